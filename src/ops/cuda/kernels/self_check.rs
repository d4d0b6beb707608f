//! Every kernel of ours against the CPU's, on small operands.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use crate::ops::attention::{Heads, attention, attention_backward};
use crate::ops::cuda::Compared;
use crate::ops::dropout::mix;
use crate::ops::host;
use crate::ops::kernels::place_of;
use crate::ops::layout::{Layout, RotaryTable};
use crate::ops::linear::{InputGrad, Weight, linear, linear_backward};
use crate::util::panics::guarded;

/// `bf16` rounds to 2^-9: operands of products once each, and a result at most twice; twice the largest error seen.
const TOLERANCE: f64 = 1e-2;

/// Compares all kernels that are used on a device.
#[must_use]
pub fn self_check(device: &Device) -> Vec<Compared> {
    let cpu = Device::flex();
    let heads = [(32, None), (64, None), (96, Some(3)), (128, None), (256, Some(20))];
    let of_heads = heads.into_iter().flat_map(|(head_dim, window)| {
        let heads = Heads { num_heads: 6, num_kv_heads: 2, head_dim, scale: 0.125, window };
        let of = |device: &Device, dtype| attend(device, dtype, heads);
        let of_gpu = guarded(|| of(device, DType::BF16)).and_then(|found| found);
        compare(
            "attention",
            &format!("heads of {head_dim}, window {window:?}"),
            of_gpu,
            &of(&cpu, DType::F32).unwrap_or_default(),
        )
    });
    let of_gpu = guarded(|| layer(device, DType::BF16)).and_then(|found| found);
    let of_layer = compare("products", "a layer", of_gpu, &layer(&cpu, DType::F32).unwrap_or_default());
    of_heads.chain(of_layer).collect()
}

/// Results with their names.
type Results = Vec<(&'static str, Vec<f32>)>;

fn compare(kernel: &str, what: &str, found: Result<Results, String>, expected: &Results) -> Vec<Compared> {
    let compared = |what: String, error, problem| Compared { kernel: kernel.to_owned(), what, error, problem };
    match found {
        Err(problem) => vec![compared(what.to_owned(), None, Some(problem))],
        Ok(found) => found
            .iter()
            .zip(expected)
            .map(|((name, found), (_, expected))| {
                let error = relative_error(found, expected);
                let problem = (error.is_nan() || error > TOLERANCE).then(|| format!("off by {error:.1e}"));
                compared(format!("{name} of {what}"), Some(error), problem)
            })
            .collect(),
    }
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut expected.iter().map(|value| f64::from(*value)))
}

/// Numbers that `bf16` holds, between -1 and 1.
fn numbers(shape: [usize; 2], seed: usize, device: &Device) -> Tensor<2> {
    let number = |i: usize| {
        let number = (mix((seed << 32 | i) as u64) >> 56) as u8;
        f32::from(number) / 128.0 - 1.0
    };
    let numbers = (0..shape[0] * shape[1]).map(number).collect();
    host::tensor::<2>(numbers, shape, device).cast(DType::BF16)
}

fn read<const N: usize>(results: [(&'static str, &Tensor<2>); N]) -> Result<Results, String> {
    let read = |(name, result): (&'static str, &Tensor<2>)| {
        let values = result.clone().cast(DType::F32).try_into_data().map_err(|error| error.to_string())?;
        Ok((name, values.iter::<f32>().collect()))
    };
    results.into_iter().map(read).collect()
}

/// Output and gradients of an attention of two rows, the second of which has two documents.
fn attend(device: &Device, dtype: DType, heads: Heads) -> Result<Results, String> {
    const ROW: u32 = 137;
    let table = Arc::from([RotaryTable::new(vec![1.0; ROW as usize], vec![0.0; ROW as usize], 1)]);
    let positions: Vec<_> = (0..ROW).chain(0..70).chain(0..ROW - 70).collect();
    let (row, tokens) = (ROW as usize, positions.len());
    let documents = vec![(0, row), (row, 70), (row + 70, row - 70)];
    let layout = Layout::new(place_of(device, dtype), 2, documents, positions, table);
    let tensor = |width: usize, seed: usize| numbers([tokens, width], seed, device).cast(dtype);
    let (q, d_o) = (tensor(heads.query_width(), 1), tensor(heads.query_width(), 2));
    let (k, v) = (tensor(heads.key_value_width(), 3), tensor(heads.key_value_width(), 4));
    let attended = attention(&q, &k, &v, &layout, heads);
    let [dq, dk, dv] = attention_backward(&d_o, [&q, &k, &v], &attended, &layout, heads);
    read([("o", &attended.o), ("dq", &dq), ("dk", &dk), ("dv", &dv)])
}

/// A layer with a residual of an input that is a part of longer rows, and the gradient of its input, added to another.
fn layer(device: &Device, dtype: DType) -> Result<Results, String> {
    let (tokens, [out_features, in_features]) = (70, [144, 80]);
    let place = place_of(device, dtype);
    let tensor = |shape: [usize; 2], seed: usize| numbers(shape, seed, device).cast(dtype);
    let weight = Weight::new(tensor([out_features, in_features], 1));
    let x = tensor([tokens, in_features + 16], 2).narrow(1, 8, in_features);
    let [residual, dy] = [3, 4].map(|seed| tensor([tokens, out_features], seed));
    let (y, _) = linear(place, &x, &weight, None, Some(residual));
    let (dx, _) = linear_backward(place, &dy, &x, &weight, None, InputGrad::AddTo(x.clone()));
    read([("y", &y), ("dx", &dx.unwrap_or_else(|| x.clone()))])
}
