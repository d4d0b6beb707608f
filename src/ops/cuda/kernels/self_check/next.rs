//! Texts that go on from the states of sublayers without attention.

use burn::tensor::{DType, Device, Tensor};

use super::{Results, documents, numbers, read};
use crate::ops::delta_rule::{DeltaHeads, DeltaInputs, Gates, delta_rule_next};
use crate::ops::kernels::Place;
use crate::ops::place::place_of;
use crate::ops::short_conv::{Convolution, TextRows, convolve_next};
use crate::ops::state_space::{StateGates, StateHeads, StateInputs, state_space_next};

/// New tokens of the texts.
const LENGTHS: [usize; 3] = [20, 1, 3];
const TOKENS: usize = 24;

/// What the tokens give, and of the first text what is kept behind them.
pub(super) fn continued(device: &Device, dtype: DType) -> Result<Results, String> {
    let place = place_of(device, dtype);
    let tensor = |rows: usize, width: usize, seed: usize| numbers([rows, width], seed, device).cast(dtype);
    let weight = numbers([4, 72], 1, device).cast(DType::F32);
    let bias = numbers([1, 72], 2, device).cast(DType::F32).reshape([72]);
    let short = convolve(place, Convolution::Short((&weight, Some(&bias))), 3, &tensor(TOKENS, 72, 3));
    let weight = weight.narrow(0, 1, 3);
    let gated = convolve(place, Convolution::Gated(&weight), 2, &tensor(TOKENS, 216, 4));
    let [by_rule, after_rule] = delta_rule(device, dtype, &tensor);
    let [by_space, after_space] = state_space(device, dtype, &tensor);
    read([
        ("short", &short[0]),
        ("inputs after it", &short[1]),
        ("gated", &gated[0]),
        ("inputs after that", &gated[1]),
        ("delta rule", &by_rule),
        ("state after it", &after_rule),
        ("state space", &by_space),
        ("state after that", &after_space),
    ])
}

fn convolve(place: Place, conv: Convolution<'_>, kept: usize, x: &Tensor<2>) -> [Tensor<2>; 2] {
    let last = (0..LENGTHS.len()).map(|text| x.clone().narrow(0, 5 * text, kept)).collect();
    let (y, mut last) = convolve_next(place, conv, last, &TextRows::of(&LENGTHS, kept), x);
    [y, last.remove(0)]
}

/// States of the texts, `[heads, rows, columns]`.
fn memories([heads, rows, columns]: [usize; 3], device: &Device) -> Vec<Tensor<3>> {
    let memory = |seed| numbers([heads * rows, columns], seed, device).cast(DType::F32).reshape([heads, rows, columns]);
    (10..10 + LENGTHS.len()).map(memory).collect()
}

/// Of the first text.
fn first(memories: Vec<Tensor<3>>) -> Option<Tensor<2>> {
    memories.into_iter().next().map(|memory| memory.flatten(0, 1))
}

fn gate(heads: usize, seed: usize, device: &Device) -> Tensor<2> {
    numbers([TOKENS, heads], seed, device).cast(DType::F32).abs()
}

type Make<'a> = &'a dyn Fn(usize, usize, usize) -> Tensor<2>;

fn delta_rule(device: &Device, dtype: DType, tensor: Make<'_>) -> [Tensor<2>; 2] {
    let heads = DeltaHeads { num_key_heads: 1, num_value_heads: 2, key_head_dim: 128, value_head_dim: 64 };
    let gates = Gates { decay: gate(2, 5, device) * -0.2, strength: gate(2, 6, device) };
    let (qkv, layout) = (tensor(TOKENS, heads.qkv_width(), 7), documents());
    let inputs = DeltaInputs { qkv: &qkv, gates: &gates, layout: &layout, heads };
    let memories = memories([2, 128, 64], device);
    let (o, memories) = delta_rule_next(place_of(device, dtype), memories, &TextRows::of(&LENGTHS, 0), inputs);
    [o.clone(), first(memories).unwrap_or(o)]
}

fn state_space(device: &Device, dtype: DType, tensor: Make<'_>) -> [Tensor<2>; 2] {
    let heads = StateHeads { num_heads: 4, num_groups: 2, head_dim: 32, state_dim: 64 };
    let gates = StateGates { decay: gate(4, 8, device) * -0.2, strength: gate(4, 9, device) };
    let (xbc, layout) = (tensor(TOKENS, heads.xbc_width(), 10), documents());
    let inputs = StateInputs { xbc: &xbc, gates: &gates, layout: &layout, heads };
    let memories = memories([4, 64, 32], device);
    let (y, memories) = state_space_next(place_of(device, dtype), memories, &TextRows::of(&LENGTHS, 0), inputs);
    [y.clone(), first(memories).unwrap_or(y)]
}
