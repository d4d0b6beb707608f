//! The low-rank paths of a linear layer by the kernels of `low_rank.cu`: each reads its large operand once, and every sum has
//! one order.

use std::iter::once;
use std::ops::Range;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, scratch, side_by_side, stride};
use super::stream::{Launch, tiles_in_flight};
use crate::ops::cpu::{Dropout, mix};
use crate::ops::cuda::{MOST_RANK, RANK_COLUMNS, RANK_MULTIPLE};
use crate::ops::custom::{self, Output, queue, spec};
use crate::ops::low_rank::{Lora, LowRank};

const MODULE: &str = "low_rank";

/// Threads of a block.
const THREADS: usize = 256;
/// Tokens and columns of a tile.
const TOKENS: usize = 64;
const COLUMNS: usize = RANK_COLUMNS;
/// Columns of a factor that a block of a pass takes.
const RANKS: usize = 64;
/// Those of a pass that makes both products.
const RANKS_OF_BOTH: usize = 32;

/// Sums that a block makes of those of other blocks.
const SUMS_OF_BLOCK: usize = 1024;
/// Where a GPU does not say how many multiprocessors it has. Blocks that add up leave room for the others, for which they wait.
const FEW_MULTIPROCESSORS: u32 = 32;

/// Projections that a launch takes together.
const MOST_JOINED: usize = 3;

/// Which of the matrices a pass multiplies with, or makes the gradient of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Factor {
    /// `[r, width]`
    A,
    /// `[width, r]`
    B,
}

impl Factor {
    /// Of a rank and of a column.
    fn strides(self, width: usize, rank: usize) -> [usize; 2] {
        if self == Self::A { [width, 1] } else { [1, rank] }
    }
}

/// Columns of `x A^T` in memory: padding is zero.
fn padded(rank: usize) -> usize {
    rank.next_multiple_of(RANK_MULTIPLE)
}

/// Projections of one input whose matrices a launch takes together: of one rank, and at most three.
struct Group<'a> {
    factor: Factor,
    matrices: &'a [CubeTensor],
    rank: usize,
    /// Of the one input that all A multiply, or of the output of each B.
    widths: [usize; 3],
    /// Padded ranks: of all A, or of one B.
    columns: usize,
}

impl<'a> Group<'a> {
    fn new(factor: Factor, matrices: &'a [CubeTensor]) -> Self {
        let [rows, columns] = dims(&matrices[0]);
        let width = |index: usize| matrices.get(index).map_or(0, |matrix| dims(matrix)[0]);
        let (rank, widths, num_joined) = match factor {
            Factor::A => (rows, [columns, 0, 0], matrices.len()),
            Factor::B => (columns, [0, 1, 2].map(width), 1),
        };
        Self { factor, matrices, rank, widths, columns: num_joined * padded(rank) }
    }

    fn strides(&self) -> [usize; 2] {
        self.factor.strides(self.widths[0], self.rank)
    }

    /// Blocks that each width needs.
    fn blocks(&self, columns: usize) -> [usize; 3] {
        self.widths.map(|width| width.div_ceil(columns))
    }

    /// With the matrices, packed, which one that was copied to the device need not be.
    fn read(&self, launch: Launch) -> Launch {
        let matrices = self.matrices.iter().map(|matrix| into_contiguous(matrix.clone()));
        let launch = matrices.fold(launch, |launch, matrix| launch.read(&matrix));
        self.absent(launch)
    }

    /// With the gradients of the matrices.
    fn write(&self, launch: Launch, gradients: &[CubeTensor]) -> Launch {
        self.absent(gradients.iter().fold(launch, Launch::write))
    }

    /// With nothing for those of three matrices that are not there.
    fn absent(&self, launch: Launch) -> Launch {
        (self.matrices.len()..MOST_JOINED).fold(launch, |launch, _| launch.long(0))
    }
}

/// How the updates of projections of one input are computed.
#[derive(Clone)]
struct Updates {
    /// Scale and dropout of each.
    settings: Vec<(f64, Option<Dropout>)>,
    /// Whether ranks and scales are equal, and not too many.
    are_alike: bool,
}

impl Updates {
    fn new(loras: &[Lora<&Tensor<2>>]) -> Self {
        let alike = |a: &Lora<&Tensor<2>>, b: &Lora<&Tensor<2>>| rank(*a) == rank(*b) && a.scale == b.scale;
        let columns: usize = loras.iter().map(|lora| padded(rank(*lora))).sum();
        let is_few = loras.len() <= MOST_JOINED && columns <= MOST_RANK;
        let settings = loras.iter().map(|lora| (lora.scale, lora.dropout)).collect();
        Self { settings, are_alike: is_few && loras.is_sorted_by(alike) }
    }

    fn len(&self) -> usize {
        self.settings.len()
    }

    /// Whether they can be computed together on both sides of A: masks differ.
    fn share_input(&self) -> bool {
        self.are_alike && (self.len() == 1 || self.settings.iter().all(|(_, dropout)| dropout.is_none()))
    }

    /// The ranges of updates that `work` gets: all of them where they are `joined`, or each.
    fn each(&self, joined: bool, mut work: impl FnMut(Range<usize>, (f64, Option<Dropout>))) {
        if joined {
            return work(0..self.len(), self.settings[0]);
        }
        (0..self.len()).for_each(|index| work(index..index + 1, self.settings[index]));
    }
}

fn rank(lora: Lora<&Tensor<2>>) -> usize {
    lora.matrices.a.dims()[0]
}

fn dispatched<'a>(all: impl IntoIterator<Item = &'a Tensor<2>>) -> impl Iterator<Item = DispatchTensor> {
    all.into_iter().map(|x| x.clone().into_dispatch())
}

/// The matrix of these parts, of which there is one or which lie side by side.
fn whole(parts: &[CubeTensor]) -> CubeTensor {
    side_by_side(parts).unwrap_or_else(|| unreachable!("joined parts are side by side"))
}

/// `drop(x) A^T` of each update, `[tokens, r]` and columns of zeros behind, in the type of `x`.
pub(super) fn input(x: &Tensor<2>, loras: &[Lora<&Tensor<2>>]) -> Vec<Tensor<2>> {
    let updates = Updates::new(loras);
    let outputs = custom::side_by_side(x, loras.iter().map(|lora| padded(rank(*lora))));
    let inputs = once(x).chain(loras.iter().map(|lora| lora.matrices.a));
    let run = move |mut inputs: Vec<CubeTensor>, xas: &[CubeTensor]| {
        let x = rows(inputs.remove(0));
        updates.each(updates.share_input(), |range, (_, dropout)| {
            let group = Group::new(Factor::A, &inputs[range.clone()]);
            multiply(&x, &group, &whole(&xas[range]), 1.0, dropout);
        });
    };
    queue("low_rank_input", dispatched(inputs).collect(), outputs, run).into_iter().map(Tensor::from_dispatch).collect()
}

/// `y + scale xa B^T` of each update, rounded once more.
pub(super) fn output(ys: Vec<Tensor<2>>, xas: &[&Tensor<2>], loras: &[Lora<&Tensor<2>>]) -> Vec<Tensor<2>> {
    let (updates, num_updates) = (Updates::new(loras), loras.len());
    let outputs = (0..num_updates).map(Output::ChangedColumns).collect();
    let others = xas.iter().copied().chain(loras.iter().map(|lora| lora.matrices.b));
    let inputs = ys.into_iter().map(Tensor::into_dispatch).chain(dispatched(others)).collect();
    let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
        let (xas, b) = inputs.split_at(num_updates);
        let are_joined = updates.are_alike && side_by_side(xas).is_some() && side_by_side(ys).is_some();
        updates.each(are_joined, |range, (scale, _)| {
            let group = Group::new(Factor::B, &b[range.clone()]);
            add(&whole(&xas[range.clone()]), &group, &whole(&ys[range]), scale, None);
        });
    };
    queue("low_rank_output", inputs, outputs, run).into_iter().map(Tensor::from_dispatch).collect()
}

/// The gradients of the matrices of each update in `f32`, and `dx` with the updates' part added, rounded once more after each
/// launch. `xas`: as [`input`] gives them.
pub(super) fn backward(
    dys: &[&Tensor<2>],
    x: &Tensor<2>,
    xas: &[&Tensor<2>],
    loras: &[Lora<&Tensor<2>>],
    dx: Option<Tensor<2>>,
) -> (Option<Tensor<2>>, Vec<LowRank<Tensor<2>>>) {
    let (updates, num_updates) = (Updates::new(loras), loras.len());
    let of_matrix = |matrix: &Tensor<2>| Output::New(spec(DType::F32, matrix.dims()));
    let mut outputs = custom::side_by_side(x, xas.iter().map(|xa| xa.dims()[1]));
    outputs.extend(loras.iter().map(|lora| of_matrix(lora.matrices.a)));
    outputs.extend(loras.iter().map(|lora| of_matrix(lora.matrices.b)));
    let b = loras.iter().map(|lora| lora.matrices.b);
    let inputs = once(x).chain(dys.iter().copied()).chain(xas.iter().copied()).chain(b);
    let for_gradients = updates.clone();
    let gradients = move |inputs: Vec<CubeTensor>, outputs: &[CubeTensor]| {
        let inputs: Vec<_> = inputs.into_iter().map(rows).collect();
        let (x, inputs) = (&inputs[0], &inputs[1..]);
        let (n, updates) = (num_updates, &for_gradients);
        let (dys, xas, b) = (&inputs[..n], &inputs[n..2 * n], &inputs[2 * n..]);
        let (dxas, da, db) = (&outputs[..n], &outputs[n..2 * n], &outputs[2 * n..]);
        let are_joined = updates.are_alike && side_by_side(dys).is_some() && side_by_side(xas).is_some();
        updates.each(are_joined, |range, (scale, _)| {
            let group = Group::new(Factor::B, &b[range.clone()]);
            let [dy, xa, dxa] = [dys, xas, dxas].map(|parts| whole(&parts[range.clone()]));
            if group.columns <= RANKS_OF_BOTH {
                multiply_both(&dy, &group, &xa, &dxa, &db[range], scale);
            } else {
                multiply(&dy, &group, &dxa, scale, None);
                sum_over_tokens(&dy, &xa, &group, &db[range], scale, None);
            }
        });
        updates.each(updates.share_input(), |range, (_, dropout)| {
            let group = Group::new(Factor::A, &da[range.clone()]);
            sum_over_tokens(x, &whole(&dxas[range.clone()]), &group, &da[range], 1.0, dropout);
        });
    };
    let mut results = queue("low_rank_backward", dispatched(inputs).collect(), outputs, gradients).into_iter();
    let dxas: Vec<_> = results.by_ref().take(num_updates).collect();
    let dx = dx.map(|dx| {
        let a = dispatched(loras.iter().map(|lora| lora.matrices.a));
        let inputs = once(dx.into_dispatch()).chain(dxas).chain(a).collect();
        let run = move |inputs: Vec<CubeTensor>, dx: &[CubeTensor]| {
            let (dxas, a) = inputs.split_at(num_updates);
            let are_joined = updates.share_input() && side_by_side(dxas).is_some();
            updates.each(are_joined, |range, (_, dropout)| {
                add(&whole(&dxas[range.clone()]), &Group::new(Factor::A, &a[range]), &dx[0], 1.0, dropout);
            });
        };
        let changed = vec![Output::ChangedColumns(0)];
        queue("low_rank_input_grad", inputs, changed, run).pop().map(Tensor::from_dispatch)
    });
    let mut gradients = results.map(Tensor::from_dispatch);
    let da: Vec<_> = gradients.by_ref().take(num_updates).collect();
    (dx.flatten(), da.into_iter().zip(gradients).map(|(a, b)| LowRank { a, b }).collect())
}

/// A pass over `x`: its blocks, and those that then add up what several of them have made of a result.
struct Pass {
    /// Blocks that share columns: those along the tokens.
    shares: usize,
    num_blocks: usize,
    num_sums: usize,
    /// Sums of blocks in `f32`, where several share a result: of products, of gradients.
    partial: [Option<CubeTensor>; 2],
}

impl Pass {
    /// `num_products`: numbers of the products that it makes, 0 if none; likewise of gradients.
    fn new(x: &CubeTensor, group: &Group<'_>, tiles_across: usize, num_products: usize, num_gradients: usize) -> Self {
        let (tokens, columns) = (dims(x)[0], group.columns);
        let across: usize = group.blocks(COLUMNS * tiles_across).iter().sum();
        let deep = columns.div_ceil(RANKS);
        let shares = (THREADS / (across * deep).max(1)).clamp(1, tokens.div_ceil(TOKENS).max(1));
        let of_products =
            if group.blocks(COLUMNS * tiles_across).iter().any(|blocks| *blocks > 1) { num_products } else { 0 };
        let of_gradients = if shares > 1 { num_gradients } else { 0 };
        let partial = |numbers: usize, size: [usize; 2]| (numbers > 0).then(|| scratch(x, size, DType::F32));
        let width: usize = group.widths.iter().sum();
        let multiprocessors =
            x.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(FEW_MULTIPROCESSORS);
        let num_sums = (of_products + of_gradients).div_ceil(SUMS_OF_BLOCK).min(multiprocessors as usize / 2);
        Self {
            shares,
            num_blocks: across * shares * deep,
            num_sums,
            partial: [
                partial(of_products, [across * tokens, columns]),
                partial(of_gradients, [shares * width, columns]),
            ],
        }
    }

    /// With shared memory for tiles of `x` and as many of `columns`, and for a factor.
    fn launch(&self, name: &str, x: &CubeTensor, columns: usize, factor_bytes: usize) -> Launch {
        let shared_bytes = tiles_in_flight(x) * 2 * TOKENS * (COLUMNS + columns) + factor_bytes;
        let grid = [self.num_blocks + self.num_sums, 1, 1];
        Launch::new(MODULE, name, grid, THREADS).shared(shared_bytes)
    }

    /// With the memory for sums of blocks: of products (0) or of gradients (1).
    fn partial(&self, launch: Launch, which: usize) -> Launch {
        match &self.partial[which] {
            Some(partial) => launch.write(partial),
            None => launch.long(0),
        }
    }
}

/// `out = scale drop(x) factor^T`.
fn multiply(x: &CubeTensor, group: &Group<'_>, out: &CubeTensor, scale: f64, dropout: Option<Dropout>) {
    let (tokens, columns) = (dims(x)[0], group.columns);
    let ranks = columns.min(RANKS);
    let widest = group.widths.into_iter().max().unwrap_or_default();
    let tiles_across = (32 / ranks).max(1).min(widest.div_ceil(COLUMNS));
    let pass = Pass::new(x, group, tiles_across, tokens * dims(out)[1], 0);
    let launch = pass.launch("low_rank_product", x, 0, 2 * COLUMNS * ranks * tiles_across);
    let launch = pass.partial(group.read(launch.read(x)), 0).write(out).counters();
    let launch = launch.ints([stride(x), stride(out)]).ints(group.strides()).ints([tokens]).ints(group.widths);
    let launch = launch.ints([group.rank, columns, tiles_across, pass.shares]).float(scale);
    with_mask(launch, dropout).launch();
}

/// `out = scale * left^T drop(x)` of each projection, or its transpose.
fn sum_over_tokens(
    x: &CubeTensor,
    left: &CubeTensor,
    group: &Group<'_>,
    out: &[CubeTensor],
    scale: f64,
    dropout: Option<Dropout>,
) {
    let (tokens, columns) = (dims(x)[0], group.columns);
    let pass = Pass::new(x, group, 1, 0, group.widths.iter().sum::<usize>() * columns);
    let launch = pass.launch("low_rank_gradient", x, RANKS, 0).read(x).read(left);
    let launch = group.write(pass.partial(launch, 1), out).counters();
    let launch = launch.ints([stride(x), stride(left)]).ints(group.strides()).ints([tokens]).ints(group.widths);
    with_mask(launch.ints([group.rank, columns, pass.shares]).float(scale).ints([0]), dropout).launch();
}

/// `dxa = scale dy B` and `db = scale dy^T xa`, by one pass over `dy`.
fn multiply_both(dy: &CubeTensor, group: &Group<'_>, xa: &CubeTensor, dxa: &CubeTensor, db: &[CubeTensor], scale: f64) {
    let ([tokens, width], columns) = (dims(dy), group.columns);
    let pass = Pass::new(dy, group, 1, tokens * dims(dxa)[1], width * columns);
    let launch = group.read(pass.launch("low_rank_both", dy, RANKS_OF_BOTH, 2 * COLUMNS * columns).read(dy)).read(xa);
    let launch = group.write(pass.partial(pass.partial(launch, 0).write(dxa), 1), db).counters();
    let launch = launch.ints([stride(dy), stride(xa), stride(dxa), tokens]).ints(group.widths);
    launch.ints([group.rank, columns, pass.shares]).float(scale).ints([0]).launch();
}

/// `y += scale drop(left factor)`.
fn add(left: &CubeTensor, group: &Group<'_>, y: &CubeTensor, scale: f64, dropout: Option<Dropout>) {
    let (tokens, columns) = (dims(y)[0], group.columns);
    let (name, tile_width, tile_tokens) =
        if columns <= 64 { ("low_rank_add_64", 256, 32) } else { ("low_rank_add_256", 128, 16) };
    let across = group.blocks(tile_width).iter().sum::<usize>();
    let down = (2 * THREADS / across).clamp(1, tokens.div_ceil(tile_tokens).max(1));
    let pass = group.read(Launch::new(MODULE, name, [across, down, 1], THREADS).read(left));
    let pass = pass.change(y).ints([stride(left), stride(y)]).ints(group.strides()).ints([tokens]).ints(group.widths);
    with_mask(pass.ints([group.rank, columns]).float(scale), dropout).launch();
}

/// With the key, the threshold and the factor of a mask.
fn with_mask(launch: Launch, dropout: Option<Dropout>) -> Launch {
    let (key, threshold, factor) =
        dropout.map_or((0, 0, 1.0), |dropout| (mix(dropout.seed), dropout.threshold(), f64::from(dropout.factor())));
    launch.long(key).bits(threshold).float(factor)
}
