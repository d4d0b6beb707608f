//! One `AdamW` update of one parameter whose moments are codes of eight bits (Dettmers et al., 2022), as bitsandbytes computes
//! it: decoded, updated, and coded again with the largest absolute number of each block as its scale.

use burn::tensor::{DType, Device, Int, Tensor};

use super::adamw::{State, Update, plain_adamw};
use super::cpu::{self, Nearest, dynamic_table};
use super::host;
use super::kernels::Place;

pub use super::cpu::BLOCK_LEN;

/// A parameter with its moments in codes.
#[derive(Clone, Debug)]
pub struct Coded {
    /// The parameter.
    pub parameter: Tensor<2>,
    /// A byte for each number of the first and of the second moment.
    pub codes: [Tensor<1, Int>; 2],
    /// The scales of their blocks, `[1, blocks]`.
    pub scales: [Tensor<2>; 2],
}

/// The state after one update, as [`adamw`](super::adamw::adamw) takes it.
#[must_use]
pub fn adamw_8bit(place: Place, state: Coded, grad: &Tensor<2>, update: &Update, factor: Option<&Tensor<1>>) -> Coded {
    place.adamw_8bit(state, grad, update, factor)
}

/// [`adamw_8bit`] in plain tensor calls.
#[must_use]
pub fn plain_adamw_8bit(state: Coded, grad: &Tensor<2>, update: &Update) -> Coded {
    let (shape, device) = (grad.dims(), grad.device());
    let size: usize = shape.iter().product();
    let tables = [true, false].map(dynamic_table);
    let numbers = |values: &[f32]| Tensor::<1>::from_data(values, (&device, DType::F32));
    let [m, v] = std::array::from_fn(|moment| {
        let numbers = numbers(&tables[moment]).select(0, state.codes[moment].clone().cast(DType::I32));
        let scales = state.scales[moment].clone().transpose();
        (in_blocks(numbers, &device) * scales).reshape([-1]).narrow(0, 0, size).reshape(shape)
    });
    let State { parameter, m, v } = plain_adamw(State { parameter: state.parameter, m, v }, grad, update);
    let coded = [(m, &tables[0]), (v, &tables[1])].map(|(moment, table)| {
        let blocks = in_blocks(moment.reshape([-1]), &device);
        let most = blocks.clone().abs().max_dim(1);
        let scales = most.clone().mask_fill(most.equal_elem(0.0), 1.0);
        let scaled = (blocks / scales.clone()).reshape([-1]).narrow(0, 0, size);
        (nearest(&scaled, &numbers(&Nearest::new(table).middles)), scales.transpose())
    });
    let [(m, m_scales), (v, v_scales)] = coded;
    Coded { parameter, codes: [m, v], scales: [m_scales, v_scales] }
}

/// `[blocks, BLOCK_LEN]`, filled up with zeros.
fn in_blocks(numbers: Tensor<1>, device: &Device) -> Tensor<2> {
    let rest = numbers.dims()[0].next_multiple_of(BLOCK_LEN) - numbers.dims()[0];
    let whole = match rest {
        0 => numbers,
        _ => Tensor::cat(vec![numbers, Tensor::zeros([rest], (device, DType::F32))], 0),
    };
    whole.reshape([-1, i64::try_from(BLOCK_LEN).unwrap_or(-1)])
}

/// The number of middles below each number, halving what is left to search.
fn nearest(numbers: &Tensor<1>, middles: &Tensor<1>) -> Tensor<1, Int> {
    let mut code = Tensor::<1, Int>::zeros(numbers.dims(), (&numbers.device(), DType::I32));
    for step in [128, 64, 32, 16, 8, 4, 2, 1] {
        let is_above = middles.clone().select(0, code.clone() + (step - 1)).lower(numbers.clone());
        code = code + is_above.int().cast(DType::I32) * step;
    }
    code.cast(DType::U8)
}

/// [`adamw_8bit`] by the kernel of the CPU.
pub(super) fn host_adamw_8bit(state: Coded, grad: &Tensor<2>, update: &Update) -> Coded {
    let Coded { parameter, codes: [m, v], scales } = state;
    let grad = host::view(grad);
    let [mut m, mut v] = [m, v].map(host::HostCodes::new);
    let scales = scales.map(|scales| scales.reshape([1, -1]));
    let [m_scales, v_scales] = scales;
    let [parameter, m_scales, v_scales] =
        host::update_all([parameter, m_scales, v_scales], |[parameter, m_scales, v_scales]| {
            let moments =
                [cpu::Coded { codes: m.get(), scales: m_scales }, cpu::Coded { codes: v.get(), scales: v_scales }];
            cpu::adamw_8bit(parameter, &grad, moments, update);
        });
    Coded { parameter, codes: [m.into_tensor(), v.into_tensor()], scales: [m_scales, v_scales] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::kernels;

    fn values(tensor: &Tensor<2>) -> Vec<f32> {
        tensor.to_data().try_to_vec().unwrap()
    }

    #[test]
    fn plain_calls_and_the_kernel_give_the_same_codes_scales_and_parameters() {
        let (shape, device) = ([5, 333], Device::flex());
        let size = 5 * 333;
        let drawn = |seed: u32| {
            let draw = |i: u32| ((i.wrapping_mul(2_654_435_761) ^ seed) % 1999) as f32 / 999.0 - 1.0;
            host::tensor((0..size).map(draw).collect(), shape, &device)
        };
        let mut states = [false, true].map(|_| Coded {
            parameter: drawn(1),
            codes: [0, 1].map(|_| Tensor::zeros([1665], (&device, DType::U8))),
            scales: [0, 1].map(|_| Tensor::zeros([1, 7], (&device, DType::F32))),
        });
        for step in 1..=4 {
            let update = Update {
                learning_rate: 1e-2,
                betas: [0.9, 0.999],
                eps: 1e-8,
                weight_decay: 0.1,
                step,
                grad_scale: 0.5,
            };
            let grad = drawn(77 * u32::try_from(step).unwrap());
            states[0] = adamw_8bit(kernels::place_on(DeviceKind::Cpu), states[0].clone(), &grad, &update, None);
            states[1] = plain_adamw_8bit(states[1].clone(), &grad, &update);
            let [kernel, plain] = &states;
            for moment in 0..2 {
                let codes = [kernel, plain].map(|state| state.codes[moment].to_data().try_to_vec::<u8>().unwrap());
                // A number that is rounded otherwise may be nearer to the next code.
                let others = codes[0].iter().zip(&codes[1]).filter(|(a, b)| a != b).count();
                assert!(others <= 3, "{others} codes of step {step} differ");
                let scales = [kernel, plain].map(|state| values(&state.scales[moment]));
                assert!(scales[0].iter().zip(&scales[1]).all(|(a, b)| (a - b).abs() <= 1e-5 * a), "{scales:?}");
            }
            let parameters = [kernel, plain].map(|state| values(&state.parameter));
            let apart = parameters[0].iter().zip(&parameters[1]).filter(|(a, b)| (*a - *b).abs() > 1e-5).count();
            assert!(apart <= 3, "{apart} parameters of step {step} differ");
        }
    }
}
