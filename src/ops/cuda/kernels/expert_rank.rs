//! The low-rank paths of the experts of a mixture by the kernels of `expert_rank.cu`.

use std::iter::once;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, scratch, stride};
use super::stream::{Launch, note_memory, tiles_in_flight};
use crate::ops::cuda::RANK_MULTIPLE;
use crate::ops::custom::{Output, first_of, queue, spec};
use crate::ops::low_rank::{Lora, LowRank};

const MODULE: &str = "expert_rank";

const THREADS: usize = 256;
/// Rows of a tile.
const ROWS: usize = 128;
/// Columns of a factor that a block takes.
const RANKS: usize = 64;
/// Columns of a block's gradients.
const COLUMNS: usize = 256;

/// Factors of all experts, or their gradients, expert below expert.
#[derive(Clone, Copy)]
struct Factors {
    num_experts: usize,
    rank: usize,
    /// `in_features` of A, `[experts r, in_features]`, or `out_features` of B, `[experts out_features, r]`.
    width: usize,
    is_a: bool,
}

impl Factors {
    fn columns(self) -> usize {
        self.rank.next_multiple_of(RANK_MULTIPLE)
    }

    /// With strides of a rank and of a column, and numbers of a factor.
    fn layout(self, launch: Launch) -> Launch {
        let strides = if self.is_a { [self.width, 1] } else { [1, self.rank] };
        launch.ints(strides).ints([self.rank * self.width])
    }

    /// `scale x factor^T`, each row by its expert's, with columns of zeros behind.
    fn product(self, x: &CubeTensor, factor: &CubeTensor, first: &CubeTensor, scale: f64) -> CubeTensor {
        let out = scratch(x, [dims(x)[0], self.columns()], x.dtype);
        let grid = [dims(x)[0].div_ceil(ROWS) + self.num_experts, self.columns().div_ceil(RANKS), 1];
        let launch = Launch::new(MODULE, "expert_rank_product", grid, THREADS).shared(tiles_in_flight(x) * 24 * 1024);
        let launch = launch.read(x).read(factor).read(first).write(&out).ints([stride(x), stride(&out)]);
        self.end(self.layout(launch).ints([self.num_experts]), scale);
        out
    }

    /// `y += scale left factor`, likewise.
    fn add(self, left: &CubeTensor, factor: &CubeTensor, first: &CubeTensor, y: &CubeTensor, scale: f64) {
        let (most, columns) = if self.columns() <= 64 { (64, 256) } else { (256, 128) };
        let grid = [self.width.div_ceil(columns), dims(y)[0].div_ceil(ROWS) + self.num_experts, 1];
        let launch = Launch::new(MODULE, format!("expert_rank_add_{most}"), grid, THREADS);
        let launch = launch.read(left).read(factor).read(first).change(y).ints([stride(left), stride(y)]);
        self.end(self.layout(launch).ints([self.num_experts]), scale);
    }

    /// `gradient = scale left^T x` of each expert's rows, or its transpose.
    fn gradient(self, x: &CubeTensor, left: &CubeTensor, first: &CubeTensor, gradient: &CubeTensor, scale: f64) {
        let grid = [self.width.div_ceil(COLUMNS), self.columns().div_ceil(RANKS), self.num_experts];
        let launch = Launch::new(MODULE, "expert_rank_gradient", grid, THREADS).shared(tiles_in_flight(x) * 40 * 1024);
        let launch = launch.read(x).read(left).read(first).write(gradient).ints([stride(x), stride(left)]);
        self.end(self.layout(launch), scale);
    }

    fn end(self, launch: Launch, scale: f64) {
        launch.ints([self.width, self.rank, self.columns()]).float(scale).launch();
    }
}

/// Those of an update of as many experts as rows begin in `first`.
fn factors(lora: Lora<&Tensor<2>>, first: &Tensor<1, Int>) -> LowRank<Factors> {
    let num_experts = first.dims()[0] - 1;
    let LowRank { a: [ranks, in_features], b: [out_features, rank] } = lora.matrices.map(Tensor::dims);
    let of = |width, is_a| Factors { num_experts, rank, width, is_a };
    debug_assert_eq!(ranks, num_experts * rank, "a rank for each expert");
    LowRank { a: of(in_features, true), b: of(out_features / num_experts, false) }
}

fn inputs<const N: usize>(changed: Tensor<2>, read: [&Tensor<2>; N], first: &Tensor<1, Int>) -> Vec<DispatchTensor> {
    let read = read.into_iter().map(|tensor| tensor.clone().into_dispatch());
    once(changed.into_dispatch()).chain(read).chain([first.clone().into_dispatch()]).collect()
}

/// `y + scale x A^T B^T`, each row by its expert's.
pub(super) fn add(y: Tensor<2>, x: &Tensor<2>, lora: Lora<&Tensor<2>>, first: &Tensor<1, Int>) -> Tensor<2> {
    let (of, scale, LowRank { a, b }) = (factors(lora, first), lora.scale, lora.matrices);
    let inputs = inputs(y, [x, a, b], first);
    let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
        let ([x, a, b, first], _) = first_of(inputs);
        let (x, [a, b]) = (rows(x), [a, b].map(into_contiguous));
        let xa = of.a.product(&x, &a, &first, 1.0);
        note_memory(&x);
        of.b.add(&xa, &b, &first, &ys[0], scale);
    };
    let ys = queue("expert_rank", inputs, vec![Output::ChangedColumns(0)], run);
    Tensor::from_dispatch(super::one(ys))
}

/// `dx` with the update's part added, and the gradients of the factors in `f32`. What A makes of `x` is computed anew.
pub(super) fn backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    lora: Lora<&Tensor<2>>,
    first: &Tensor<1, Int>,
    dx: Tensor<2>,
) -> (Tensor<2>, LowRank<Tensor<2>>) {
    let (of, scale, LowRank { a, b }) = (factors(lora, first), lora.scale, lora.matrices);
    let gradient = |factor: &Tensor<2>| Output::New(spec(DType::F32, factor.dims()));
    let outputs = vec![Output::ChangedColumns(0), gradient(a), gradient(b)];
    let inputs = inputs(dx, [dy, x, a, b], first);
    let run = move |inputs: Vec<CubeTensor>, outputs: &[CubeTensor]| {
        let ([dy, x, a, b, first], _) = first_of(inputs);
        let ([dy, x], [a, b], [dx, da, db]) =
            ([dy, x].map(rows), [a, b].map(into_contiguous), [0, 1, 2].map(|i| &outputs[i]));
        let xa = of.a.product(&x, &a, &first, 1.0);
        let dxa = of.b.product(&dy, &b, &first, scale);
        note_memory(&x);
        of.b.gradient(&dy, &xa, &first, db, scale);
        of.a.gradient(&x, &dxa, &first, da, 1.0);
        of.a.add(&dxa, &a, &first, dx, 1.0);
    };
    let mut results = queue("expert_rank_backward", inputs, outputs, run).into_iter().map(Tensor::from_dispatch);
    let mut next = || results.next().unwrap_or_else(|| unreachable!("there are three"));
    (next(), LowRank { a: next(), b: next() })
}
