//! Rotary position embedding by the kernels of `rotary.cu`, in place, and with the norms of heads before it.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, side_by_side, stride};
use super::stream::Launch;
use crate::ops::custom::{self, Output, change, custom_of};
use crate::ops::layout::Layout;
use crate::ops::plain::norms::HeadNorms;
use crate::spec::Heads;
use crate::spec::RopePairs;

const MODULE: &str = "rotary";

const THREADS: usize = 128;
/// Pairs that a thread turns.
pub(super) const PAIRS: usize = 8;

/// [`rotate`](crate::ops::rotary::rotate) of `bf16`.
pub(super) fn rotate(qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
    let turns = layout.turns(rope, &qk[0].device());
    let inputs = [turns.cos.into_dispatch(), turns.sin.into_dispatch(), turns.rows.into_dispatch()];
    let table = layout.table(rope);
    let (half, are_neighbours) = (table.half(), table.pairs() == RopePairs::Neighbours);
    let run = move |qk: &[CubeTensor; 2], [cos, sin, rows]: [CubeTensor; 3]| {
        let turn = |x: &CubeTensor| {
            let ([tokens, width], head_dim) = (dims(x), heads.head_dim);
            let grid = [tokens, (width / head_dim * half).div_ceil(PAIRS * THREADS), 1];
            let rotary = Launch::new(MODULE, "rotary", grid, THREADS).change(x).read(&cos).read(&sin).read(&rows);
            let sizes = [stride(x), width / head_dim, head_dim, half];
            rotary.ints(sizes).ints([are_neighbours, inverse].map(usize::from)).launch();
        };
        match side_by_side(qk) {
            Some(qk) => turn(&qk),
            None => qk.iter().for_each(turn),
        }
    };
    change("rotate", Output::ChangedColumns, qk.map(Tensor::into_dispatch), inputs, run).map(Tensor::from_dispatch)
}

/// [`norm_and_rotate`](crate::ops::head_norm::norm_and_rotate) of `bf16`. The results are side by side; nothing else is kept.
pub(super) fn norm_and_rotate(norms: HeadNorms<'_>) -> [Tensor<2>; 2] {
    let HeadNorms { qk, eps, heads, .. } = norms;
    let outputs = custom::side_by_side(qk[0], qk.map(|x| x.dims()[1]));
    let run = move |[q, k, others @ ..]: [CubeTensor; 7], ys: &[CubeTensor; 2]| {
        norm("head_norm_rotary", &[&[q, k].map(rows), ys], &others, heads.head_dim, eps);
    };
    custom_of("norm_and_rotate", inputs(norms), outputs, run).map(Tensor::from_dispatch)
}

/// [`norm_and_rotate_backward`](crate::ops::head_norm::norm_and_rotate_backward) of `bf16`.
pub(super) fn norm_and_rotate_backward(dqk: [Tensor<2>; 2], norms: HeadNorms<'_>) -> [Tensor<2>; 2] {
    let (HeadNorms { eps, heads, .. }, dqk) = (norms, dqk.map(Tensor::into_dispatch));
    let run = move |dqk: &[CubeTensor; 2], [q, k, others @ ..]: [CubeTensor; 7]| {
        norm("head_norm_rotary_backward", &[dqk, &[q, k].map(rows), dqk], &others, heads.head_dim, eps);
    };
    change("norm_and_rotate_backward", Output::ChangedColumns, dqk, inputs(norms), run).map(Tensor::from_dispatch)
}

/// Queries, keys, the weights of both, and the angles: cosines, sines and their rows.
fn inputs(
    HeadNorms { qk: [q, k], weights: [q_weight, k_weight], layout, rope, .. }: HeadNorms<'_>,
) -> [DispatchTensor; 7] {
    let turns = layout.turns(rope, &q.device());
    let [q, k] = [q, k].map(|x| x.clone().into_dispatch());
    let [q_weight, k_weight] = [q_weight, k_weight].map(|x| x.clone().into_dispatch());
    [q, k, q_weight, k_weight, turns.cos.into_dispatch(), turns.sin.into_dispatch(), turns.rows.into_dispatch()]
}

/// Launches a norm of heads. `operands`: of queries and keys, what is read, and then what is written. It is one launch where both are
/// side by side in each.
fn norm(function: &str, operands: &[&[CubeTensor; 2]], others: &[CubeTensor; 5], head_dim: usize, eps: f64) {
    let launch = |operands: &[CubeTensor], weights: [usize; 2], widths: [usize; 2]| {
        let Some((written, read)) = operands.split_last() else { return };
        let tokens = dims(written)[0];
        let threads = tokens * widths.iter().sum::<usize>() / head_dim * (head_dim / 16).next_power_of_two();
        let norm = Launch::new(MODULE, function, [threads.div_ceil(THREADS), 1, 1], THREADS);
        let norm = weights.iter().fold(read.iter().fold(norm, Launch::read), |norm, index| norm.read(&others[*index]));
        let norm = others[2..].iter().fold(norm, Launch::read).write(written).ints(operands.iter().map(stride));
        norm.ints([tokens, widths[0] / head_dim, widths[1] / head_dim, head_dim]).float(eps).launch();
    };
    let [q_width, k_width] = operands[0].each_ref().map(|x| dims(x)[1]);
    if let Some(whole) = operands.iter().map(|parts| side_by_side(*parts)).collect::<Option<Vec<_>>>() {
        return launch(&whole, [0, 1], [q_width, k_width]);
    }
    for (which, width) in [q_width, k_width].into_iter().enumerate() {
        let part: Vec<_> = operands.iter().map(|parts| parts[which].clone()).collect();
        launch(&part, [which, which], [width, 0]);
    }
}
