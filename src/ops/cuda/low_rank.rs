//! The low-rank paths of a linear layer by the kernels of `kernels/low_rank.cu`: each reads its large operand once, and every sum has
//! one order.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, scratch, stride};
use super::stream::{Launch, Module};
use crate::ops::custom::{change, custom, spec};
use crate::ops::dropout::{Dropout, mix};
use crate::ops::low_rank::{Lora, LowRank};

static MODULE: Module = Module { name: "low_rank", ptx: include_str!("kernels/low_rank.ptx") };

/// The largest rank.
pub(super) const MOST_RANK: usize = 256;

/// Threads of a block.
const THREADS: usize = 256;
/// Tokens and columns of a tile, and its bytes.
const TOKENS: usize = 64;
const COLUMNS: usize = 256;
const TILE_BYTES: usize = 2 * TOKENS * COLUMNS;
/// Columns of a factor that a block of a pass takes.
const RANKS: usize = 64;
/// Those of a pass that makes both products.
const RANKS_OF_BOTH: usize = 32;
/// Dynamic shared memory of a block of which two fit where memory is least.
const MOST_SHARED: usize = 96 << 10;

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
    rank.next_multiple_of(8)
}

/// `drop(x) A^T`, `[tokens, r]` and columns of zeros behind, in `bf16`.
pub(super) fn input(x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
    let ([tokens, _], [rank, _], dropout) = (x.dims(), lora.matrices.a.dims(), lora.dropout);
    let inputs = [x, lora.matrices.a].map(|x| x.clone().into_dispatch());
    let output = [spec(DType::BF16, [tokens, padded(rank)])];
    let [xa] = custom("low_rank_input", inputs, output, move |[x, a], [xa]| {
        multiply(&rows(x), Factor::A, &a, xa, 1.0, dropout);
    });
    Tensor::from_dispatch(xa)
}

/// `y + scale xa B^T`, rounded once more.
pub(super) fn output(y: Tensor<2>, xa: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
    let (inputs, scale) = ([xa, lora.matrices.b].map(|x| x.clone().into_dispatch()), lora.scale);
    let [y] = change("low_rank_output", [y.into_dispatch()], inputs, move |[y], [xa, b]| {
        add(&xa, Factor::B, &b, y, scale, None);
    });
    Tensor::from_dispatch(y)
}

/// The gradients of the matrices in `f32`, and `dx` with the update's part added, rounded once more. `xa`: as [`input`] gives it.
pub(super) fn backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    xa: &Tensor<2>,
    lora: Lora<&Tensor<2>>,
    dx: Option<Tensor<2>>,
) -> (Option<Tensor<2>>, LowRank<Tensor<2>>) {
    let Lora { matrices, scale, dropout } = lora;
    let of_dxa = spec(DType::BF16, xa.dims());
    let [of_a, of_b] = [matrices.a, matrices.b].map(|matrix| spec(DType::F32, matrix.dims()));
    let LowRank { a, b } = matrices.map(|matrix| matrix.clone().into_dispatch());
    let [dy, x, xa] = [dy, x, xa].map(|x| x.clone().into_dispatch());
    let gradients = move |[dy, x, xa, b]: [CubeTensor; 4], [dxa, da, db]: &[CubeTensor; 3]| {
        let (dy, x) = (rows(dy), rows(x));
        if dims(dxa)[1] <= RANKS_OF_BOTH {
            multiply_both(&dy, &b, &xa, dxa, db, scale);
        } else {
            multiply(&dy, Factor::B, &b, dxa, scale, None);
            sum_over_tokens(&dy, &xa, Factor::B, db, scale, None);
        }
        sum_over_tokens(&x, dxa, Factor::A, da, 1.0, dropout);
    };
    let [dxa, da, db] = custom("low_rank_backward", [dy, x, xa, b], [of_dxa, of_a, of_b], gradients);
    let dx = dx.map(|dx| {
        let [dx] = change("low_rank_input_grad", [dx.into_dispatch()], [dxa, a], move |[dx], [dxa, a]| {
            add(&dxa, Factor::A, &a, dx, 1.0, dropout);
        });
        Tensor::from_dispatch(dx)
    });
    (dx, LowRank { a: da, b: db }.map(Tensor::from_dispatch))
}

/// Blocks for a pass over tiles of tokens: those that share columns, in all about 256.
fn shares(tokens: usize, others: usize) -> usize {
    (THREADS / others.max(1)).clamp(1, tokens.div_ceil(TOKENS).max(1))
}

fn rank_of(factor: Factor, matrix: &CubeTensor) -> usize {
    dims(matrix)[usize::from(factor == Factor::B)]
}

/// `out = scale drop(x) factor^T`.
fn multiply(
    x: &CubeTensor,
    factor: Factor,
    matrix: &CubeTensor,
    out: &CubeTensor,
    scale: f64,
    dropout: Option<Dropout>,
) {
    let ([tokens, width], [_, columns], rank) = (dims(x), dims(out), rank_of(factor, matrix));
    let of_factor = 512 * columns.min(RANKS);
    let tiles_across = ((MOST_SHARED - 2 * TILE_BYTES) / of_factor).clamp(1, 4).min(width.div_ceil(COLUMNS));
    let (across, deep) = (width.div_ceil(COLUMNS * tiles_across), columns.div_ceil(RANKS));
    let sums = scratch(x, [across * tokens, columns], DType::F32);
    let grid = [across, shares(tokens, across * deep), deep];
    let pass =
        Launch::new(&MODULE, "low_rank_product", grid, THREADS).shared(2 * TILE_BYTES + of_factor * tiles_across);
    let pass = pass.read(x).read(matrix).read(matrix).read(matrix).write(&sums).ints([stride(x)]);
    let pass = pass.ints(factor.strides(width, rank)).ints([tokens, width, rank, columns, tiles_across]);
    with_mask(pass, dropout).launch();
    sum_rows(&sums, out, across, scale);
}

/// `out = scale * sum over i of sums[i]`, in `bf16`.
fn sum_rows(sums: &CubeTensor, out: &CubeTensor, num_sums: usize, scale: f64) {
    let [tokens, columns] = dims(out);
    let grid = [(tokens * columns).div_ceil(2 * THREADS), 1, 1];
    let sum = Launch::new(&MODULE, "low_rank_sum_rows", grid, THREADS).read(sums).write(out);
    sum.ints([stride(out), tokens, columns, num_sums]).float(scale).launch();
}

/// `out = scale * left^T drop(x)`, or its transpose.
fn sum_over_tokens(
    x: &CubeTensor,
    left: &CubeTensor,
    factor: Factor,
    out: &CubeTensor,
    scale: f64,
    dropout: Option<Dropout>,
) {
    let ([tokens, width], [_, columns]) = (dims(x), dims(left));
    let (across, deep) = (width.div_ceil(COLUMNS), columns.div_ceil(RANKS));
    let shares = shares(tokens, across * deep);
    let sums = scratch(x, [shares * width, columns], DType::F32);
    let pass = Launch::new(&MODULE, "low_rank_gradient", [across, shares, deep], THREADS).shared(80 << 10);
    let pass = pass.read(x).read(left).write(&sums).ints([stride(x), stride(left), tokens, width, columns]);
    with_mask(pass, dropout).launch();
    sum_gradient(&sums, factor, out, [width, columns], shares, scale);
}

fn sum_gradient(
    sums: &CubeTensor,
    factor: Factor,
    out: &CubeTensor,
    [width, columns]: [usize; 2],
    num_sums: usize,
    scale: f64,
) {
    let (rank, grid) = (rank_of(factor, out), [width.div_ceil(32), columns / 8, 1]);
    let sum = Launch::new(&MODULE, "low_rank_sum_gradient", grid, THREADS).read(sums).write(out).long(0).long(0);
    sum.ints(factor.strides(width, rank)).ints([width, rank, columns, num_sums]).float(scale).ints([0]).launch();
}

/// `dxa = scale dy B` and `db = scale dy^T xa`, by one pass over `dy`.
fn multiply_both(dy: &CubeTensor, b: &CubeTensor, xa: &CubeTensor, dxa: &CubeTensor, db: &CubeTensor, scale: f64) {
    let ([tokens, width], [_, columns], rank) = (dims(dy), dims(xa), rank_of(Factor::B, b));
    let across = width.div_ceil(COLUMNS);
    let shares = shares(tokens, across);
    let products = scratch(dy, [across * tokens, columns], DType::F32);
    let gradients = scratch(dy, [shares * width, columns], DType::F32);
    let pass = Launch::new(&MODULE, "low_rank_both", [across, shares, 1], THREADS).shared((72 << 10) + 512 * columns);
    let pass = pass.read(dy).read(b).read(xa).write(&products).write(&gradients);
    pass.ints([stride(dy), stride(xa), tokens, width, rank, columns]).launch();
    sum_rows(&products, dxa, across, scale);
    sum_gradient(&gradients, Factor::B, db, [width, columns], shares, scale);
}

/// `y += scale drop(left factor)`.
fn add(left: &CubeTensor, factor: Factor, matrix: &CubeTensor, y: &CubeTensor, scale: f64, dropout: Option<Dropout>) {
    let ([tokens, width], [_, columns], rank) = (dims(y), dims(left), rank_of(factor, matrix));
    let (name, tile_width, tile_tokens) =
        if columns <= 64 { ("low_rank_add_64", 256, 32) } else { ("low_rank_add_256", 128, 16) };
    let across = width.div_ceil(tile_width);
    let down = (2 * THREADS / across).clamp(1, tokens.div_ceil(tile_tokens).max(1));
    let pass = Launch::new(&MODULE, name, [across, down, 1], THREADS);
    let pass = pass.read(left).read(matrix).read(matrix).read(matrix).change(y).ints([stride(left), stride(y)]);
    let pass = pass.ints(factor.strides(width, rank)).ints([tokens, width, rank, columns]).float(scale);
    with_mask(pass, dropout).launch();
}

/// With the key, the threshold and the factor of a mask.
fn with_mask(launch: Launch, dropout: Option<Dropout>) -> Launch {
    let (key, threshold, factor) =
        dropout.map_or((0, 0, 1.0), |dropout| (mix(dropout.seed), dropout.threshold(), f64::from(dropout.factor())));
    launch.long(key).bits(threshold).float(factor)
}
