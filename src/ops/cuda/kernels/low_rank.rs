//! The low-rank paths of a linear layer by the kernels of `low_rank.cu`: each reads its large operand once, and every sum has
//! one order.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, scratch, stride};
use super::stream::{Launch, Module};
use crate::ops::custom::{change, custom, spec};
use crate::ops::dropout::{Dropout, mix};
use crate::ops::low_rank::{Lora, LowRank};

pub(super) static MODULE: Module = Module { name: "low_rank", ptx: include_str!("low_rank.ptx") };

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
    let ranks = columns.min(RANKS);
    let tiles_across = (32 / ranks).max(1).min(width.div_ceil(COLUMNS));
    let (across, deep) = (width.div_ceil(COLUMNS * tiles_across), columns.div_ceil(RANKS));
    let products = scratch(x, [across * tokens, columns], DType::F32);
    let grid = [across, shares(tokens, across * deep), deep];
    let shared = 2 * TILE_BYTES + 2 * COLUMNS * ranks * tiles_across;
    let pass = of_factor(Launch::new(&MODULE, "low_rank_product", grid, THREADS).shared(shared).read(x), matrix);
    let pass = pass.write(&products).ints([stride(x)]).ints(factor.strides(width, rank));
    with_mask(pass.ints([tokens, width, 0, 0, rank, columns, tiles_across]), dropout).launch();
    let sums = Sums { factor, rank, columns, tokens, width, across, shares: 0 };
    sums.add_up(Some((&products, out)), None, scale);
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
    let ([tokens, width], [_, columns], rank) = (dims(x), dims(left), rank_of(factor, out));
    let (across, deep) = (width.div_ceil(COLUMNS), columns.div_ceil(RANKS));
    let shares = shares(tokens, across * deep);
    let gradients = scratch(x, [shares * width, columns], DType::F32);
    let pass = Launch::new(&MODULE, "low_rank_gradient", [across, shares, deep], THREADS).shared(80 << 10);
    let pass = pass.read(x).read(left).write(&gradients).ints([stride(x), stride(left), tokens, width, 0, 0, columns]);
    with_mask(pass, dropout).launch();
    let sums = Sums { factor, rank, columns, tokens, width, across: 0, shares };
    sums.add_up(None, Some((&gradients, out)), scale);
}

/// `dxa = scale dy B` and `db = scale dy^T xa`, by one pass over `dy`.
fn multiply_both(dy: &CubeTensor, b: &CubeTensor, xa: &CubeTensor, dxa: &CubeTensor, db: &CubeTensor, scale: f64) {
    let ([tokens, width], [_, columns], rank) = (dims(dy), dims(xa), rank_of(Factor::B, b));
    let across = width.div_ceil(COLUMNS);
    let shares = shares(tokens, across);
    let products = scratch(dy, [across * tokens, columns], DType::F32);
    let gradients = scratch(dy, [shares * width, columns], DType::F32);
    let shared = (72 << 10) + 2 * COLUMNS * columns;
    let pass = Launch::new(&MODULE, "low_rank_both", [across, shares, 1], THREADS).shared(shared);
    let pass = of_factor(pass.read(dy), b).read(xa).write(&products).write(&gradients);
    pass.ints([stride(dy), stride(xa), tokens, width, 0, 0, rank, columns]).launch();
    let sums = Sums { factor: Factor::B, rank, columns, tokens, width, across, shares };
    sums.add_up(Some((&products, dxa)), Some((&gradients, db)), scale);
}

/// The second stage of a pass.
struct Sums {
    /// Which matrix the gradient is of.
    factor: Factor,
    rank: usize,
    columns: usize,
    tokens: usize,
    width: usize,
    /// Blocks that share a row of a product.
    across: usize,
    /// Blocks that share a gradient.
    shares: usize,
}

impl Sums {
    /// The sums of products to a matrix in `bf16`, and those of gradients to one in `f32`, all times `scale`.
    fn add_up(
        self,
        products: Option<(&CubeTensor, &CubeTensor)>,
        gradients: Option<(&CubeTensor, &CubeTensor)>,
        scale: f64,
    ) {
        let Self { factor, rank, columns, tokens, width, across, shares } = self;
        let row_blocks = products.map_or(0, |_| (tokens * columns).div_ceil(2 * THREADS));
        let gradient_blocks = gradients.map_or(0, |_| columns / 8 * width.div_ceil(32));
        let sum = Launch::new(&MODULE, "low_rank_sum", [row_blocks + gradient_blocks, 1, 1], THREADS);
        let read = |launch: Launch, pair: Option<(&CubeTensor, &CubeTensor)>| match pair {
            Some((sums, _)) => launch.read(sums),
            None => launch.long(0),
        };
        let write = |launch: Launch, pair: Option<(&CubeTensor, &CubeTensor)>| match pair {
            Some((_, out)) => launch.write(out),
            None => launch.long(0),
        };
        let sum = write(write(read(read(sum, products), gradients), products), gradients).long(0).long(0);
        let out_stride = products.map_or(0, |(_, out)| stride(out));
        let sum = sum.ints([out_stride]).ints(factor.strides(width, rank));
        let sum = sum.ints([tokens, width, 0, 0, rank, columns, across, 0, 0, shares]);
        sum.float(scale).ints([0, row_blocks]).launch();
    }
}

/// `y += scale drop(left factor)`.
fn add(left: &CubeTensor, factor: Factor, matrix: &CubeTensor, y: &CubeTensor, scale: f64, dropout: Option<Dropout>) {
    let ([tokens, width], [_, columns], rank) = (dims(y), dims(left), rank_of(factor, matrix));
    let (name, tile_width, tile_tokens) =
        if columns <= 64 { ("low_rank_add_64", 256, 32) } else { ("low_rank_add_256", 128, 16) };
    let across = width.div_ceil(tile_width);
    let down = (2 * THREADS / across).clamp(1, tokens.div_ceil(tile_tokens).max(1));
    let pass = of_factor(Launch::new(&MODULE, name, [across, down, 1], THREADS).read(left), matrix);
    let pass = pass.change(y).ints([stride(left), stride(y)]).ints(factor.strides(width, rank));
    with_mask(pass.ints([tokens, width, 0, 0, rank, columns]).float(scale), dropout).launch();
}

/// With a factor, packed, which one that was copied to the device need not be: the kernels take up to three, of projections of one
/// input.
fn of_factor(launch: Launch, matrix: &CubeTensor) -> Launch {
    launch.read(&into_contiguous(matrix.clone())).long(0).long(0)
}

/// With the key, the threshold and the factor of a mask.
fn with_mask(launch: Launch, dropout: Option<Dropout>) -> Launch {
    let (key, threshold, factor) =
        dropout.map_or((0, 0, 1.0), |dropout| (mix(dropout.seed), dropout.threshold(), f64::from(dropout.factor())));
    launch.long(key).bits(threshold).float(factor)
}
