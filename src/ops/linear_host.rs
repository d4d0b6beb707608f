//! [`linear`](super::linear) by the kernels, if they apply; otherwise what was passed in is returned.

use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};

use super::linear::{InputGrad, LowRank, LowRankGrad, Weight};
use super::{cpu, host};

/// Output and `drop(x) A^T`.
type Output = (Tensor<2>, Option<Tensor<2>>);

pub(super) fn elements(flex: &FlexTensor, rounds: bool) -> Option<cpu::Weight<'_>> {
    let weight = match flex.dtype() {
        DType::F32 => flex.as_slice::<f32>().map(cpu::Weight::f32),
        DType::BF16 => flex.as_slice::<bf16>().map(cpu::Weight::bf16),
        DType::F16 => flex.as_slice::<f16>().map(cpu::Weight::f16),
        _ => None,
    };
    Some(weight?.rounding(rounds))
}

/// Calls `run` with the update in the form that the kernels take.
fn with_lora<R>(lora: &LowRank<'_>, run: impl FnOnce(&cpu::Lora<'_>) -> R) -> Option<R> {
    let (a, b) = (host::view(lora.a)?, host::view(lora.b)?);
    #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
    let lora = cpu::Lora {
        a: a.as_slice(),
        b: b.as_slice(),
        rank: lora.a.dims()[0],
        scale: lora.scale as f32,
        dropout: lora.dropout.map(|d| cpu::Dropout { probability: d.probability as f32, seed: d.seed }),
    };
    Some(run(&lora))
}

#[expect(clippy::result_large_err, reason = "what was passed in comes back")]
pub(super) fn linear(
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<&LowRank<'_>>,
    residual: Option<Tensor<2>>,
) -> Result<Output, Option<Tensor<2>>> {
    let (Some(host_x), Some(flex_w)) = (host::view(x), host::primitive(&weight.values)) else { return Err(residual) };
    let Some(w) = elements(&flex_w, weight.rounds) else { return Err(residual) };
    let ([tokens, in_features], [out_features, _]) = (x.dims(), dims(&flex_w));
    let accumulate = residual.is_some() || weight.bias.is_some();
    let mut sum = match residual {
        // The kernels add to the existing values; `storage_mut` copies a shared residual once.
        Some(residual) => match host::take(residual.clone()) {
            Some(flex) => flex,
            None => return Err(Some(residual)),
        },
        None => zeros([tokens, out_features]),
    };
    let y = sum.storage_mut::<f32>();
    if let Some(bias) = weight.bias.as_ref().and_then(host::view) {
        for row in y.chunks_exact_mut(out_features) {
            row.iter_mut().zip(bias.as_slice()).for_each(|(y, bias)| *y += bias);
        }
    }
    let x_values = host_x.as_slice();
    let xa = match lora {
        None => {
            cpu::linear(x_values, w, in_features, out_features, y, accumulate);
            None
        }
        Some(lora) => {
            let r = lora.a.dims()[0];
            let mut xa = vec![0.0; tokens * r];
            with_lora(lora, |lora| {
                cpu::lora_linear(x_values, w, lora, in_features, out_features, y, accumulate, &mut xa);
            });
            Some(host::tensor(xa, [tokens, r], &x.device()))
        }
    };
    Ok((host::restore(sum), xa))
}

#[expect(clippy::result_large_err, reason = "what was passed in comes back")]
pub(super) fn linear_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<(&LowRank<'_>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> Result<(Option<Tensor<2>>, Option<LowRankGrad>), InputGrad> {
    let (Some(host_dy), Some(host_x), Some(flex_w)) = (host::view(dy), host::view(x), host::primitive(&weight.values))
    else {
        return Err(input_grad);
    };
    let Some(w) = elements(&flex_w, weight.rounds) else { return Err(input_grad) };
    let ([tokens, in_features], [out_features, _]) = (x.dims(), dims(&flex_w));
    let accumulate = matches!(input_grad, InputGrad::AddTo(_));
    let mut dx = match input_grad {
        InputGrad::Skip => None,
        InputGrad::Fresh => Some(zeros([tokens, in_features])),
        InputGrad::AddTo(sum) => match host::take(sum.clone()) {
            Some(flex) => {
                drop(sum);
                Some(flex)
            }
            None => return Err(InputGrad::AddTo(sum)),
        },
    };
    let dy = host_dy.as_slice();
    let grad = match lora {
        None => {
            if let Some(dx) = &mut dx {
                cpu::linear_backward_input(dy, w, in_features, out_features, dx.storage_mut(), accumulate);
            }
            None
        }
        Some((lora, xa)) => {
            let r = lora.a.dims()[0];
            let (mut da, mut db) = (vec![0.0; r * in_features], vec![0.0; out_features * r]);
            let host_xa = host::view(xa);
            let xa = host_xa.as_ref().map_or(&[][..], host::HostView::as_slice);
            with_lora(lora, |lora| {
                cpu::lora_linear_backward(
                    dy,
                    host_x.as_slice(),
                    xa,
                    w,
                    lora,
                    in_features,
                    out_features,
                    dx.as_mut().map(FlexTensor::storage_mut),
                    accumulate,
                    &mut cpu::LoraGradients { a: &mut da, b: &mut db },
                );
            });
            let device = x.device();
            Some(LowRankGrad {
                a: host::tensor(da, [r, in_features], &device),
                b: host::tensor(db, [out_features, r], &device),
            })
        }
    };
    Ok((dx.map(host::restore), grad))
}

fn dims(weight: &FlexTensor) -> [usize; 2] {
    let shape = weight.layout().shape();
    [shape[0], shape[1]]
}

/// Not `FlexTensor::empty`: it fills a buffer of bytes and then copies it to one that is aligned for floats.
fn zeros(shape: [usize; 2]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(vec![0f32; shape[0] * shape[1]], shape))
}
