//! AdamW and the norm of all gradients by the kernels of `optimizer.cu`, which take many matrices in a launch.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{aligned, scratch};
use super::stream::{Launch, Operand};
use crate::ops::cpu::{BLOCK_LEN, dynamic_table};
use crate::ops::custom::{Output, custom, launch, queue, spec};
use crate::ops::plain::updates::{AdamState, Coded, Update};

const MODULE: &str = "optimizer";

const THREADS: usize = 256;
/// Most blocks that share a matrix of an adapter.
const MOST_SHARES: usize = 16;
/// Numbers that a block takes at least.
const LEAST: usize = 4096;
/// Numbers that a block takes at most, so that all multiprocessors share an embedding.
const MOST: usize = 1 << 20;
/// Matrices in a table of gradients.
const GRADIENTS: usize = 240;

/// Matrices in a table of parts.
const PARTS: usize = 160;

/// Matrices in a table of parameters.
const PARAMETERS: usize = 100;

/// [`Updates::grad_factor`](crate::ops::kernels::Updates::grad_factor).
pub(super) fn grad_factor(figures: &Tensor<1>, max_norm: f64, count: f64) -> Tensor<1> {
    let num_losses = figures.dims()[0] - 1;
    let (figures, output) = (figures.clone().into_dispatch(), spec(DType::F32, [1]));
    let [factor] = custom("grad_factor", [figures], [output], move |[figures], [factor]| {
        let launch = Launch::new(MODULE, "grad_factor", [1; 3], THREADS).read(&into_contiguous(figures)).write(factor);
        launch.ints([num_losses]).long(max_norm.to_bits()).long(count.to_bits()).launch();
    });
    Tensor::from_dispatch(factor)
}

/// [`adamw`](crate::ops::adamw::adamw) in place.
pub(super) fn adamw(
    states: Vec<(AdamState, &Tensor<2>)>,
    update: &Update,
    factor: Option<&Tensor<1>>,
) -> Vec<AdamState> {
    let (mut states, mut updated) = (states.into_iter().peekable(), Vec::new());
    // A launch at a time: while burn's threads prepare one, the next is queued.
    while states.peek().is_some() {
        updated.extend(adamw_of_few(states.by_ref().take(PARAMETERS), update, factor));
    }
    updated
}

/// [`adamw`] of matrices that a table has place for.
fn adamw_of_few<'a>(
    states: impl Iterator<Item = (AdamState, &'a Tensor<2>)>,
    update: &Update,
    factor: Option<&Tensor<1>>,
) -> Vec<AdamState> {
    let (states, grads): (Vec<_>, Vec<_>) = states.unzip();
    let states =
        states.into_iter().flat_map(|AdamState { parameter, m, v }| [parameter, m, v]).map(Tensor::into_dispatch);
    let num_grads = grads.len();
    let grads = grads.into_iter().map(|grad| grad.clone().into_dispatch());
    let inputs = states.chain(grads).chain(factor.map(|factor| factor.clone().into_dispatch())).collect();
    let outputs = (0..3 * num_grads).map(Output::Changed).collect();
    let constants = update.constants();
    let updated = queue("adamw", inputs, outputs, move |mut grads, states| {
        let factor = grads.split_off(num_grads).pop();
        let grads: Vec<_> = grads.into_iter().map(aligned).collect();
        let entries = states.chunks(3).zip(&grads).flat_map(|(state, grad)| {
            let [parameter, m, v] = [0, 1, 2].map(|index| Operand::Change(&state[index]));
            [parameter, Operand::Read(grad), m, v, Operand::Value(size(grad))]
        });
        let step = Launch::new(MODULE, "adamw", [shares(&grads), grads.len(), 1], THREADS);
        let step = step.table(entries, 5 * PARAMETERS);
        with_constants(step, constants, factor.as_ref()).launch();
    });
    let mut updated = updated.into_iter().map(Tensor::from_dispatch);
    let mut next = || updated.next().map(|parameter| (parameter, updated.next(), updated.next()));
    std::iter::from_fn(|| match next()? {
        (parameter, Some(m), Some(v)) => Some(AdamState { parameter, m, v }),
        _ => None,
    })
    .collect()
}

/// The last arguments of an update.
fn with_constants(step: Launch, constants: [f32; 8], factor: Option<&CubeTensor>) -> Launch {
    let step = constants.iter().fold(step, |step, value| step.float(f64::from(*value)));
    match factor {
        Some(factor) => step.read(factor),
        None => step.long(0),
    }
}

/// Most blocks of `adamw_8bit`: each makes the tables of codes, and takes elements of several scales.
const MOST_BLOCKS: usize = 512;

/// [`adamw_8bit`](crate::ops::adamw_8bit::adamw_8bit) in place.
pub(super) fn adamw_8bit(state: Coded, grad: &Tensor<2>, update: &Update, factor: Option<&Tensor<1>>) -> Coded {
    let Coded { parameter, codes: [m, v], scales: [m_scales, v_scales] } = state;
    let changed = [parameter.into_dispatch(), m.into_dispatch(), v.into_dispatch(), m_scales.into_dispatch()];
    let inputs = changed.into_iter().chain([v_scales.into_dispatch(), grad.clone().into_dispatch()]);
    let inputs = inputs.chain(factor.map(|factor| factor.clone().into_dispatch()));
    let constants = update.constants();
    // Two numbers to a word, the first in its lower half.
    let numbers = [true, false].map(dynamic_table).concat();
    let words: Vec<u64> =
        numbers.chunks_exact(2).map(|pair| u64::from(pair[0].to_bits()) | u64::from(pair[1].to_bits()) << 32).collect();
    let outputs = [0, 1, 2, 3, 4].map(Output::Changed);
    let updated = launch("adamw_8bit", inputs, outputs, move |[grad], factor, state| {
        let grad = into_contiguous(grad);
        let blocks = size(&grad).div_ceil(BLOCK_LEN).min(MOST_BLOCKS);
        let step = Launch::new(MODULE, "adamw_8bit", [blocks, 1, 1], THREADS).change(&state[0]).read(&grad);
        let step = state[1..].iter().fold(step, Launch::change);
        let step = step.table(words.iter().map(|word| Operand::Word(*word)), words.len()).long(size(&grad) as u64);
        with_constants(step, constants, factor.first()).launch();
    });
    let [parameter, m, v, m_scales, v_scales] = updated;
    Coded {
        parameter: Tensor::from_dispatch(parameter),
        codes: [m, v].map(Tensor::from_dispatch),
        scales: [m_scales, v_scales].map(Tensor::from_dispatch),
    }
}

/// Blocks for each of some matrices.
fn shares(matrices: &[CubeTensor]) -> usize {
    let largest = matrices.iter().map(size).max().unwrap_or(0);
    largest.div_ceil(LEAST).clamp(1, MOST_SHARES).max(largest.div_ceil(MOST))
}

fn size(matrix: &CubeTensor) -> usize {
    matrix.meta.shape().num_elements()
}

/// The numbers of matrices in `f32`, one after another.
pub(super) fn flatten(matrices: Vec<Tensor<2>>) -> Tensor<1> {
    let total = matrices.iter().map(|matrix| matrix.shape().num_elements()).sum::<usize>();
    let inputs = matrices.into_iter().map(|matrix| matrix.cast(DType::F32).into_dispatch());
    let output = Output::New(spec(DType::F32, [total]));
    let [flat] = launch("flatten", inputs, [output], |[], matrices, [flat]| {
        let matrices: Vec<_> = matrices.into_iter().map(into_contiguous).collect();
        let mut first = 0;
        for (index, chunk) in matrices.chunks(PARTS).enumerate() {
            let entries = chunk.iter().flat_map(|matrix| {
                first += size(matrix);
                [Operand::Read(matrix), Operand::Value(size(matrix)), Operand::Value(first - size(matrix))]
            });
            let join = Launch::new(MODULE, "join", [shares(chunk), chunk.len(), 1], THREADS).table(entries, 3 * PARTS);
            // A later launch leaves alone what an earlier one has written.
            if index == 0 { join.write(flat) } else { join.change(flat) }.launch();
        }
    });
    Tensor::from_dispatch(flat)
}

/// The sum of the squares of matrices in `f32`, `[1]`, by way of `f64`.
pub(super) fn sum_of_squares(grads: impl Iterator<Item = Tensor<2>>) -> Tensor<1> {
    let (grads, output) = (grads.map(Tensor::into_dispatch), Output::New(spec(DType::F32, [1])));
    let [sum] = launch("sum_of_squares", grads, [output], |[], grads, [sum]| {
        let grads: Vec<_> = grads.into_iter().map(aligned).collect();
        let shares = shares(&grads);
        let num_sums = grads.len() * shares;
        let sums = scratch(&grads[0], [num_sums * size_of::<f64>() / size_of::<f32>()], DType::F32);
        for (index, chunk) in grads.chunks(GRADIENTS).enumerate() {
            let offset = index * GRADIENTS * shares * size_of::<f64>();
            let part = CubeTensor { handle: sums.handle.clone().offset_start(offset as u64), ..sums.clone() };
            let entries = chunk.iter().flat_map(|grad| [Operand::Read(grad), Operand::Value(size(grad))]);
            let kernel = Launch::new(MODULE, "sum_of_squares", [shares, chunk.len(), 1], THREADS);
            kernel.table(entries, 2 * GRADIENTS).write(&part).launch();
        }
        Launch::new(MODULE, "sum_of_sums", [1; 3], THREADS).read(&sums).write(sum).ints([num_sums]).launch();
    });
    Tensor::from_dispatch(sum)
}
