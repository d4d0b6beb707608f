//! Every kernel of ours against the CPU's, on small operands.

mod mixture;
mod next;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::tensor::{Bytes, DType, Device, Tensor};

use super::{IS_HOPPER_ASIDE, Kernel, decode, is_half, kernel_state, one, table::Gpus};
use crate::device::Dtype;
use crate::ops::adamw::{AdamState, Update, adamw};
use crate::ops::adamw_8bit::{Coded, adamw_8bit};
use crate::ops::attention::{AttentionInputs, Heads, attention, attention_backward};
use crate::ops::cached_attention::{KeyValueCache, append_each, attend_each};
use crate::ops::cross_entropy::{Head, LossChunk, linear_cross_entropy};
use crate::ops::cuda::{Compared, check};
use crate::ops::delta_rule::{DeltaHeads, DeltaInputs, Gates, delta_rule, delta_rule_backward};
use crate::ops::draw::{Draw, draw};
use crate::ops::dropout::{Dropout, mix};
use crate::ops::head_norm::{HeadNorms, norm_and_rotate, norm_and_rotate_backward};
use crate::ops::host;
use crate::ops::kernels::Place;
use crate::ops::layout::{Layout, RotaryTable};
use crate::ops::linear::{InputGrad, Layer, Matrix, Weight, linear, linear_backward, linears, linears_backward};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::place::place_of;
use crate::ops::product::device_product;
use crate::ops::quantised::{BlockScales, Coding, FP8, Quantised, bytes_tensor, fp8_code, fp8_factors};
use crate::ops::rotary::rotate;
use crate::ops::short_conv::{gated_conv, gated_conv_backward, short_conv, short_conv_backward};
use crate::ops::swiglu;
use crate::spec::{Activation, RopePairs};
use crate::util::faults;
use crate::util::panics::guarded;

/// `bf16` rounds to 2^-9: operands of products once each, and a result at most twice; three times the largest error seen.
const TOLERANCE: f64 = 1e-2;

/// Compares all kernels that are used on a device, for numbers of one of its types of 16 bits.
#[must_use]
pub fn self_check(device: &Device, half: Dtype) -> Vec<Compared> {
    // Decides which are used.
    let _ = kernel_state(device);
    let half = half.into();
    let is_for = |kernel: &Kernel| match kernel.row().gpus {
        Gpus::Ada | Gpus::Hopper => half == DType::BF16,
        Gpus::All | Gpus::Turing => true,
    };
    let mut compared = Vec::new();
    for kernel in Kernel::ALL.iter().copied().filter(|kernel| check::is_on(*kernel) && is_for(kernel)) {
        // On a Hopper the other kernels are compared, too.
        IS_HOPPER_ASIDE.store(kernel.row().gpus != Gpus::Hopper, Ordering::Relaxed);
        for (what, of) in comparisons(kernel) {
            let [found, expected] =
                [(device, half), (&Device::flex(), DType::F32)].map(|(on, dtype)| tried(|| of(on, dtype)));
            compared.extend(compare(kernel.name(), what, found, &expected.unwrap_or_default()));
        }
    }
    IS_HOPPER_ASIDE.store(false, Ordering::Relaxed);
    compared
}

/// Results with their names.
type Results = Vec<(&'static str, Vec<f32>)>;

/// Results, or why there are none: the fault of the GPU, rather than what followed from it.
fn tried(of: impl FnOnce() -> Result<Results, String>) -> Result<Results, String> {
    guarded(of).and_then(|found| found).map_err(|problem| faults::take().unwrap_or(problem))
}

/// What is computed, and its results on a device, of activations in a type.
type KernelComparison = (&'static str, fn(&Device, DType) -> Result<Results, String>);

/// What is compared of kernels.
fn comparisons(kernel: Kernel) -> &'static [KernelComparison] {
    match kernel {
        Kernel::Products => &[("products", layer), ("products", batches)],
        Kernel::Bias => &[("bias", projections)],
        Kernel::Attention | Kernel::AttentionHopper => &[
            ("heads of 32", |device, dtype| attend(device, dtype, Heads { head_dim: 32, ..GROUPED })),
            ("heads of 64", |device, dtype| attend(device, dtype, Heads { num_kv_heads: 6, ..GROUPED })),
            ("heads of 96, window 3", |device, dtype| {
                attend(device, dtype, Heads { head_dim: 96, window: Some(3), ..GROUPED })
            }),
            ("heads of 128", |device, dtype| {
                attend(device, dtype, Heads { head_dim: 128, num_kv_heads: 6, ..GROUPED })
            }),
            ("grouped heads of 128", |device, dtype| attend(device, dtype, Heads { head_dim: 128, ..GROUPED })),
            ("heads of 256, window 20", |device, dtype| {
                attend(device, dtype, Heads { head_dim: 256, window: Some(20), ..GROUPED })
            }),
            ("heads of 128 under a cap", |device, dtype| {
                attend(device, dtype, Heads { head_dim: 128, soft_cap: Some(0.5), ..GROUPED })
            }),
            ("heads of 256 under a cap", |device, dtype| {
                attend(device, dtype, Heads { head_dim: 256, num_kv_heads: 6, soft_cap: Some(2.0), ..GROUPED })
            }),
        ],
        Kernel::CachedAttention => &[
            ("heads of 64", |device, dtype| attend_in_caches(device, dtype, 64, None)),
            ("heads of 96, window Some(200)", |device, dtype| attend_in_caches(device, dtype, 96, Some(200))),
        ],
        Kernel::ExpertsHopper => &[("experts_hopper", mixture::mixture)],
        Kernel::Experts => &[("experts", mixture::mixture)],
        Kernel::Fp8 => &[("fp8", eight_bits)],
        Kernel::Decode => &[("decode", codes)],
        Kernel::DeltaRule => &[("delta_rule", linear_attention)],
        Kernel::LowRank => &[("low_rank", update), ("low_rank", projections)],
        Kernel::Draw => &[("draw", drawn)],
        Kernel::Next => &[("next", next::continued)],
        Kernel::Norm => &[("norm", norms)],
        Kernel::Rotary => &[("rotary", turned)],
        Kernel::ShortConv => &[("short_conv", convolved)],
        Kernel::Swiglu => &[("swiglu", gated)],
        Kernel::CrossEntropy => &[("cross_entropy", loss)],
        Kernel::Optimizer => &[("optimizer", updated)],
    }
}

fn compare(kernel: &str, what: &str, found: Result<Results, String>, expected: &Results) -> Vec<Compared> {
    let compared = |what: String, error, problem| Compared { kernel: kernel.to_owned(), what, error, problem };
    match found {
        Err(problem) => vec![compared(what.to_owned(), None, Some(faults::reason(&problem)))],
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

/// Numbers that `bf16` and `f16` hold, between -1 and 1.
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

/// Heads three of which share keys, so that on a large GPU each sums gradients of keys by itself.
const GROUPED: Heads =
    Heads { num_heads: 6, num_kv_heads: 2, head_dim: 64, scale: 0.125, window: None, chunk: None, soft_cap: None };

/// Output and gradients of an attention of two rows, the second of which has two documents.
fn attend(device: &Device, dtype: DType, heads: Heads) -> Result<Results, String> {
    const ROW: u32 = 137;
    let table = Arc::from([RotaryTable::new(vec![1.0; ROW as usize], vec![0.0; ROW as usize], 1)]);
    let positions: Vec<_> = (0..ROW).chain(0..70).chain(0..ROW - 70).collect();
    let (row, tokens) = (ROW as usize, positions.len());
    let documents = vec![(0, row), (row, 70), (row + 70, row - 70)];
    let (place, layout) = (place_of(device, dtype), Layout::new(2, documents, positions, table));
    let tensor = |width: usize, seed: usize| numbers([tokens, width], seed, device).cast(dtype);
    let (q, d_o) = (tensor(heads.query_width(), 1), tensor(heads.query_width(), 2));
    let (k, v) = (tensor(heads.key_value_width(), 3), tensor(heads.key_value_width(), 4));
    let inputs = AttentionInputs { qkv: [&q, &k, &v], layout: &layout, heads };
    let attended = attention(place, inputs);
    let [dq, dk, dv] = attention_backward(place, &d_o, &attended, inputs);
    read([("o", &attended.o), ("dq", &dq), ("dk", &dk), ("dv", &dv)])
}

/// Output of the attention of tokens that come behind three texts, one of which is longer than a chunk of keys; with a window, scores
/// have a cap, too.
fn attend_in_caches(device: &Device, dtype: DType, head_dim: usize, window: Option<usize>) -> Result<Results, String> {
    let heads = Heads {
        num_heads: 6,
        num_kv_heads: 2,
        head_dim,
        scale: 0.125,
        window,
        chunk: None,
        soft_cap: window.map(|_| 2.0),
    };
    let place = place_of(device, dtype);
    let tensor = |rows: usize, width: usize, seed: usize| numbers([rows, width], seed, device).cast(dtype);
    let mut caches = [0; 3].map(|_| KeyValueCache::new(place, heads, device, dtype));
    let mut caches: Vec<_> = caches.iter_mut().collect();
    let lengths = [[300, 3, 40], [1, 2, 1]];
    for (pass, lengths) in lengths.iter().enumerate() {
        let [k, v] = [1, 2].map(|seed| tensor(lengths.iter().sum(), heads.key_value_width(), 2 * pass + seed));
        append_each(place, &mut caches, lengths, [&k, &v]);
    }
    let q = tensor(lengths[1].iter().sum(), heads.query_width(), 5);
    read([("o", &attend_each(place, &caches, &lengths[1], &q).o)])
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

/// Products of batches in every type, of factors that lie by rows, by columns, with gaps, and of one for all of a batch.
fn batches(device: &Device, dtype: DType) -> Result<Results, String> {
    let (batch, [rows, inner, columns]) = (6, [5, 24, 7]);
    let mut results = Results::new();
    for of_gpu in [DType::F32, DType::BF16, DType::F16] {
        if (dtype, of_gpu) == (DType::F16, DType::BF16) {
            continue;
        }
        let dtype = if dtype == DType::F32 { dtype } else { of_gpu };
        let factor = |rows: usize, seed: usize| numbers([batch * rows, inner + 1], seed, device).cast(dtype);
        let (a, b) = (factor(rows, 1).narrow(1, 1, inner), factor(columns, 2).narrow(1, 0, inner));
        let a = a.reshape([2, 3, rows, inner]);
        let b = b.reshape([2, 3, columns, inner]).swap_dims(2, 3);
        let of_all = device_product(a.clone(), b.clone()).reshape([batch * rows, columns]);
        let of_one = device_product(a.clone(), b.clone().narrow(1, 0, 1)).reshape([batch * rows, columns]);
        let turned = device_product(b.swap_dims(2, 3), a.swap_dims(2, 3)).reshape([batch * columns, rows]);
        let flat = device_product(factor(rows, 3).transpose(), factor(rows, 4));
        results.extend(read([
            ("batches", &of_all),
            ("one for all", &of_one),
            ("turned", &turned),
            ("turned back", &flat),
        ])?);
    }
    Ok(results)
}

/// Matrices of codes of every kind, with scales of every kind.
fn codes(device: &Device, dtype: DType) -> Result<Results, String> {
    let (shape, block_len, mut results) = ([70, 88], 16, Results::new());
    let num_blocks = shape[0] * shape[1] / block_len;
    let bytes = |len: usize, seed: usize| {
        // Without the codes of FP8 that are no numbers.
        let bytes = (0..len).map(|i| (mix((seed << 32 | i) as u64) >> 56) as u8 & 0x7e).collect();
        bytes_tensor(Bytes::from_bytes_vec(bytes), device)
    };
    let floats = |len: usize, seed: usize| numbers([1, len], seed, device).cast(DType::F32).reshape([len]);
    for coding in Coding::ALL {
        let codes = bytes(shape[0] * shape[1] / if coding.table().is_some() { 2 } else { 1 }, 1);
        let nested = BlockScales::Nested {
            codes: bytes(num_blocks, 2),
            table: floats(256, 3),
            scales: floats(num_blocks.div_ceil(256), 4),
            offset: 0.25,
        };
        let (scales, zeros) = (floats(num_blocks, 5), floats(num_blocks, 6));
        for scales in [BlockScales::Plain(scales.clone()), BlockScales::Shifted { scales, zeros }, nested] {
            let matrix = Quantised { shape, coding, codes: codes.clone(), block_len, scales };
            let is_ours = is_half(dtype) && check::is_decided_on(Kernel::Decode);
            let decoded = if is_ours { decode::decoded(&matrix, dtype) } else { matrix.decoded(dtype) };
            results.extend(read([("numbers", &decoded)])?);
        }
    }
    Ok(results)
}

/// Layers of one input in eight bits, one of them with a bias. On the CPU the operands are rounded before.
fn eight_bits(device: &Device, dtype: DType) -> Result<Results, String> {
    let (tokens, widths, in_features) = (70, [80, 16], 144);
    // The CPU of a build for GPUs has none.
    if !check::is_decided_on(Kernel::Fp8) {
        return Ok(Results::new());
    }
    let place = place_of(device, dtype);
    let rounded = |x: Tensor<2>| {
        if dtype == DType::BF16 {
            return x.cast(dtype);
        }
        let values = host::view(&x.cast(DType::F32)).to_vec();
        let [factor, scale] = fp8_factors(values.iter().fold(0.0, |most, x| x.abs().max(most)));
        let value = |x: &f32| FP8[usize::from(fp8_code(x * factor))] * scale;
        host::tensor(values.iter().map(value).collect(), [tokens, values.len() / tokens], device)
    };
    let weight = |(index, width): (usize, usize)| {
        let (shape, block_len) = ([width, in_features], width * in_features);
        // Without those that are no numbers.
        let bytes = (0..block_len).map(|i| (mix((index << 32 | i) as u64) >> 56) as u8 & 0xf7).collect();
        let codes = bytes_tensor(Bytes::from_bytes_vec(bytes), device);
        let scales = BlockScales::Plain(numbers([1, 1], 5 + index, device).cast(DType::F32).reshape([1]));
        let bias = (index == 1).then(|| numbers([1, width], 3, device).cast(DType::F32).reshape([width]));
        let values = Arc::new(Quantised { shape, coding: Coding::Fp8, codes, block_len, scales });
        Weight { values: Matrix::Quantised(values), bias, rounds: false }
    };
    let weights: Vec<_> = widths.into_iter().enumerate().map(weight).collect();
    let x = rounded(numbers([tokens, in_features], 4, device));
    let layers: Vec<_> = weights.iter().map(|weight| Layer { weight, lora: None }).collect();
    let ys: Vec<_> = linears(place, &x, &layers).into_iter().map(|(y, _)| y).collect();
    // Of other sizes than the outputs.
    let dys = widths.map(|width| rounded(numbers([tokens, width], width, device) / 128.0));
    let without: Vec<_> = layers.iter().map(|layer| (*layer, None)).collect();
    let (Some(dx), _) = linears_backward(place, dys.into(), &x, &without, true) else {
        return Err("no gradient".to_owned());
    };
    read([("y", &ys[0]), ("y with a bias", &ys[1]), ("dx", &dx)])
}

/// A layer with a low-rank update and dropout. Rows of matrices that were copied to a GPU have gaps at this rank and width.
fn update(device: &Device, dtype: DType) -> Result<Results, String> {
    let (tokens, r, [out_features, in_features]) = (70, 24, [80, 144]);
    let place = place_of(device, dtype);
    let weight = Weight::new(numbers([out_features, in_features], 1, device).cast(dtype));
    let [x, dy] =
        [(in_features, 2), (out_features, 3)].map(|(width, seed)| numbers([tokens, width], seed, device).cast(dtype));
    let [a, b] = [([r, in_features], 4), ([out_features, r], 5)].map(|(shape, seed)| matrix(shape, seed, device));
    let dropout = Some(Dropout { probability: 0.25, seed: 6, first_row: 0 });
    let lora = Lora { matrices: LowRank { a: &a, b: &b }, scale: 0.5, dropout };
    let (y, xa) = linear(place, &x, &weight, Some(lora), None);
    let Some(xa) = xa else { return Err("no low-rank update".to_owned()) };
    match linear_backward(place, &dy, &x, &weight, Some((lora, &xa)), InputGrad::Fresh) {
        (Some(dx), Some(grads)) => read([("y", &y), ("dx", &dx), ("dA", &grads.a), ("dB", &grads.b)]),
        _ => Err("no gradients".to_owned()),
    }
}

/// Three layers with biases of one input, whose weights lie one below the other: each with an update, and one without.
fn projections(device: &Device, dtype: DType) -> Result<Results, String> {
    let (tokens, r, widths, in_features) = (70, 24, [80, 16, 16], 144);
    let place = place_of(device, dtype);
    let whole = numbers([widths.iter().sum(), in_features], 1, device).cast(dtype);
    let weight = |(first, width): (usize, usize)| {
        let bias = numbers([1, width], 3, device).cast(DType::F32).reshape([width]);
        Weight { bias: Some(bias), ..Weight::new(whole.clone().narrow(0, first, width)) }
    };
    let weights = [0, 80, 96].into_iter().zip(widths).map(weight);
    let (weights, x): (Vec<_>, _) = (weights.collect(), numbers([tokens, in_features], 2, device).cast(dtype));
    let matrices: Vec<_> =
        widths.iter().map(|width| [[r, in_features], [*width, r]].map(|shape| matrix(shape, *width, device))).collect();
    let mut results = Results::new();
    for without in [None, Some(1)] {
        let layer = |index: usize| {
            let [a, b] = &matrices[index];
            let lora = Lora { matrices: LowRank { a, b }, scale: 0.5, dropout: None };
            Layer { weight: &weights[index], lora: (without != Some(index)).then_some(lora) }
        };
        let layers = [0, 1, 2].map(layer);
        let (ys, xas): (Vec<_>, Vec<_>) = linears(place, &x, &layers).into_iter().unzip();
        let with_xas: Vec<_> = layers.into_iter().zip(xas.iter().map(Option::as_ref)).collect();
        let (dx, grads) = linears_backward(place, ys.clone(), &x, &with_xas, true);
        for y in &ys {
            results.extend(read([("y", y)])?);
        }
        results.extend(read([("dx", &dx.unwrap_or_else(|| x.clone()))])?);
        for LowRank { a, b } in grads.iter().flatten() {
            results.extend(read([("dA", a), ("dB", b)])?);
        }
    }
    Ok(results)
}

/// As an adapter is copied to a device.
fn matrix(shape: [usize; 2], seed: usize, device: &Device) -> Tensor<2> {
    let values = host::view(&numbers(shape, seed, &Device::flex()).cast(DType::F32)).to_vec();
    host::tensor(values, shape, device)
}

/// Norms of whole tokens, narrow and wide.
fn norms(device: &Device, dtype: DType) -> Result<Results, String> {
    let mut results = Results::new();
    for width in [96, 1032] {
        let place = place_of(device, dtype);
        let [x, dy, residual] = [1, 2, 3].map(|seed| numbers([9, width], seed, device).cast(dtype));
        let weight = numbers([1, width], 4, device).cast(DType::F32).reshape([width]);
        let (y, rstd) = rms_norm(place, &x, &weight, 1e-5);
        let dx = rms_norm_backward(place, &dy, &x, &weight, &rstd, residual);
        results.extend(read([("y", &y), ("dx", &dx)])?);
    }
    Ok(results)
}

/// Heads of which all numbers turn, fewer, and neighbours.
fn turned(device: &Device, dtype: DType) -> Result<Results, String> {
    let (tokens, half, num_heads) = (9_u16, 48, 3);
    let angles = || (0..tokens * half).map(|i| f32::from(i) / 7.0);
    let table = || RotaryTable::new(angles().map(f32::cos).collect(), angles().map(f32::sin).collect(), half.into());
    let (place, all) = (place_of(device, dtype), 2 * usize::from(half));
    let mut results = Results::new();
    for (head_dim, pairs) in [(all, RopePairs::Halves), (all + 32, RopePairs::Halves), (all + 8, RopePairs::Neighbours)]
    {
        let (tables, positions) =
            (Arc::from([table().within(head_dim, pairs)]), (0..u32::from(tokens)).rev().collect());
        let layout = Layout::new(1, vec![(0, tokens.into())], positions, tables);
        let heads =
            Heads { num_heads, num_kv_heads: 1, head_dim, scale: 1.0, window: None, chunk: None, soft_cap: None };
        let x = |num_heads| numbers([tokens.into(), head_dim * num_heads], 1, device).cast(dtype);
        let turned = |inverse| rotate(place, [x(num_heads), x(1)], &layout, 0, heads, inverse);
        let weight = numbers([1, head_dim], 2, device).cast(DType::F32).reshape([head_dim]);
        let (weights, qk) = ([&weight, &weight], [&x(num_heads), &x(1)]);
        let norms = HeadNorms { qk, weights, eps: 1e-5, layout: &layout, rope: 0, heads };
        let ([q_normed, k_normed], factors) = norm_and_rotate(place, norms);
        let [dq, dk] = norm_and_rotate_backward(place, [x(num_heads), x(1)], factors, norms);
        let ([q, k], [q_back, k_back]) = (turned(false), turned(true));
        results.extend(read([
            ("queries", &q),
            ("keys", &k),
            ("queries turned back", &q_back),
            ("keys turned back", &k_back),
            ("normed queries", &q_normed),
            ("normed keys", &k_normed),
            ("the gradient of queries", &dq),
            ("the gradient of keys", &dk),
        ])?);
    }
    Ok(results)
}

fn gated(device: &Device, dtype: DType) -> Result<Results, String> {
    let place = place_of(device, dtype);
    let [dh, gate, up] = [1, 2, 3].map(|seed| numbers([9, 1032], seed, device).cast(dtype));
    let mut results = Results::new();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let (dgate, dup) = swiglu::gated_backward(place, activation, &dh, &gate, &up);
        results.extend(read([("h", &swiglu::gated(place, activation, &gate, &up)), ("dgate", &dgate), ("dup", &dup)])?);
    }
    Ok(results)
}

/// Documents of which one ends within a chunk, with tokens in none behind them.
fn documents() -> Layout {
    let positions = [0..70, 0..5, 0..64].into_iter().flatten().chain([0; 6]).collect();
    Layout::new(1, vec![(0, 70), (70, 5), (75, 64)], positions, [].into())
}

/// Two value heads share a key head.
fn linear_attention(device: &Device, dtype: DType) -> Result<Results, String> {
    let heads = DeltaHeads { num_key_heads: 1, num_value_heads: 2, key_head_dim: 128, value_head_dim: 64 };
    let (place, layout) = (place_of(device, dtype), documents());
    let tokens = layout.positions().len();
    let tensor = |width: usize, seed: usize| numbers([tokens, width], seed, device).cast(dtype);
    let gate = |seed: usize| numbers([tokens, heads.num_value_heads], seed, device).cast(DType::F32).abs();
    let gates = Gates { decay: gate(2) * -0.2, strength: gate(3) };
    // The gradient of the output is zero in no document.
    let d_o = tensor(heads.value_width(), 4);
    let rows = tokens - 6..tokens;
    let zeros = d_o.clone().narrow(0, rows.start, rows.len()).zeros_like();
    let (qkv, d_o) = (tensor(heads.qkv_width(), 1), d_o.slice_assign([rows, 0..heads.value_width()], zeros));
    let inputs = DeltaInputs { qkv: &qkv, gates: &gates, layout: &layout, heads };
    let o = delta_rule(place, inputs);
    let (dqkv, Gates { decay, strength }) = delta_rule_backward(place, &d_o, inputs);
    read([("o", &o), ("dqkv", &dqkv), ("the gradient of decays", &decay), ("the gradient of strengths", &strength)])
}

fn convolved(device: &Device, dtype: DType) -> Result<Results, String> {
    let (place, layout, channels) = (place_of(device, dtype), documents(), 1032);
    let [x, dy] = [1, 2].map(|seed| numbers([layout.positions().len(), channels], seed, device).cast(dtype));
    let weight = numbers([4, channels], 3, device).cast(DType::F32);
    let dx = short_conv_backward(place, &dy, &x, (&weight, None), &layout);
    let bcx = numbers([layout.positions().len(), 3 * channels], 4, device).cast(dtype);
    let weight_of_gated = weight.clone().narrow(0, 1, 3);
    let d_bcx = gated_conv_backward(place, &dy, &bcx, &weight_of_gated, &layout);
    let gated = gated_conv(place, &bcx, &weight_of_gated, &layout);
    read([("y", &short_conv(place, &x, (&weight, None), &layout)), ("dx", &dx), ("gated", &gated), ("its dx", &d_bcx)])
}

fn loss(device: &Device, dtype: DType) -> Result<Results, String> {
    let head = Weight::new(numbers([1000, 64], 1, device).cast(dtype));
    let hidden = numbers([64, 64], 2, device).cast(dtype);
    let targets: Vec<_> = (0..64).map(|i| i * 13).collect();
    let (losses, grads) = linear_cross_entropy(
        place_of(device, dtype),
        &hidden,
        Head { weight: &head, rows: None, inputs: None, soft_cap: None },
        &targets,
        0.5,
        LossChunk::Auto,
    );
    read([("losses", &losses.unsqueeze_dim(1)), ("dhidden", &grads.dhidden)])
}

/// Tokens, which are to be equal, of rows that are drawn for in every way.
fn drawn(device: &Device, _: DType) -> Result<Results, String> {
    let logits = numbers([8, 1000], 3, device).cast(DType::F32) * 4;
    let all = Draw { temperature: 0.8, top_k: None, top_p: 1.0, min_p: None, seed: 7, index: 3 };
    let (few, likely) = (Draw { top_k: Some(20), ..all }, Draw { top_p: 0.4, ..all });
    let draws = [Draw { temperature: 0.0, ..all }, all, few, likely, Draw { top_p: 0.5, ..few }];
    let draws =
        draws.into_iter().chain([Draw { min_p: Some(0.1), ..all }, Draw { index: 4, ..all }, Draw { seed: 8, ..all }]);
    let drawn = draw(place_of(device, DType::F32), &logits, &draws.collect::<Vec<_>>());
    let drawn = drawn.into_iter().collect::<Option<Vec<_>>>().ok_or("a row has no token")?;
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let tokens = drawn.iter().map(|drawn| drawn.id as f32).collect();
    #[expect(clippy::cast_possible_truncation, reason = "compared within less")]
    let entropies = drawn.iter().map(|drawn| drawn.entropy.unwrap_or_default() as f32).collect();
    Ok(vec![("tokens", tokens), ("entropies", entropies)])
}

/// What the factor of these numbers makes of some states, where the host knows it.
fn stepped(place: Place, states: Vec<(AdamState, &Tensor<2>)>, update: &Update, numbers: &[f32]) -> Vec<AdamState> {
    let [loss, squares] = [0, 1].map(|index| f64::from(numbers[index]));
    let norm = squares.sqrt() / 2.0;
    let update = Update { grad_scale: (0.1 / (norm + 1e-6)).min(1.0) / 2.0, ..*update };
    if loss.is_finite() { adamw(place, states, &update, None) } else { states.into_iter().map(|(it, _)| it).collect() }
}

/// A step of two matrices in `f32`, and the norm of their gradients.
fn updated(device: &Device, _: DType) -> Result<Results, String> {
    let place = place_of(device, DType::F32);
    let shapes = [[24, 144], [80, 24]];
    let state = |shape| {
        let [parameter, m, v] = [1, 2, 3].map(|seed| matrix(shape, seed, device));
        AdamState { parameter, m, v: v.clone() * v }
    };
    let grads = shapes.map(|shape| matrix(shape, 4, device));
    let update =
        Update { learning_rate: 0.1, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, step: 3, grad_scale: 0.5 };
    let squares = place.sum_of_squares(&[grads.iter().collect()]);
    let states = || shapes.map(state).into_iter().zip(&grads).collect();
    let mut updated = adamw(place, states(), &update, None);
    // By a factor that the device makes, and one step of which it makes none.
    for loss in [3.0, f32::INFINITY] {
        let loss = Tensor::from_data([loss], (device, DType::F32));
        let numbers = Tensor::cat(vec![loss, squares.clone()], 0);
        updated.extend(match place.grad_factor(&numbers, 0.1, 2.0) {
            Some(factor) => adamw(place, states(), &update, Some(&factor)),
            None => stepped(place, states(), &update, &faults::read(numbers, "the norm")),
        });
    }
    let flat = place.flatten(grads.to_vec()).unsqueeze_dim(1);
    let mut results = read([("the sum of squares", &squares.unsqueeze_dim(1)), ("all numbers", &flat)])?;
    for AdamState { parameter, m, v } in &updated {
        results.extend(read([("a parameter", parameter), ("m", m), ("v", v)])?);
    }
    // The moments of three scales, the last of a part of a block.
    let (shape, size) = ([5, 113], 5 * 113);
    let codes = |seed: usize| {
        let code = |i: usize| (mix((seed << 32 | i) as u64) >> 56) as u8;
        bytes_tensor(Bytes::from_bytes_vec((0..size).map(code).collect()), device)
    };
    let scales = |seed: usize| matrix([1, 3], seed, device).abs();
    let coded =
        Coded { parameter: matrix(shape, 1, device), codes: [codes(2), codes(3)], scales: [scales(4), scales(5)] };
    let Coded { parameter, scales: [m, v], .. } = adamw_8bit(place, coded, &matrix(shape, 6, device), &update, None);
    results.extend(read([("a parameter of codes", &parameter), ("the scales of m", &m), ("the scales of v", &v)])?);
    Ok(results)
}
