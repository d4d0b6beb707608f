//! Products of operands in eight bits (E4M3), each with one scale, by cuBLASLt: of a frozen matrix as it is kept, and what it is
//! multiplied with, rounded for it by the kernels of `fp8.cu`.

use std::iter::once;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{aligned, dims, rows, scratch, stride};
use super::products::{EightBits, Way, multiply_eight_bits};
use super::stream::Launch;
use super::{Kernel, check};
use crate::ops::cuda::EIGHT_BIT_MULTIPLE;
use crate::ops::custom::{Output, launch, queue, side_by_side, spec};
use crate::ops::plain::linear::{Matrix, Weight};
use crate::ops::quantised::{BlockScales, Coding, Quantised};

const MODULE: &str = "fp8";

const THREADS: usize = 256;
/// Numbers of a thread at a time.
const NUMBERS: usize = 8;
/// Blocks that read one matrix, at most.
const BLOCKS: usize = 1024;
/// Rows and columns of a block's part of a transpose.
const TILE: usize = 64;
/// The matrices of the weights, if they are multiplied so with rows of `bf16`.
pub(super) fn matrices<'a>(x: &Tensor<2>, weights: &[&'a Weight]) -> Option<Vec<&'a Quantised>> {
    let is_on = x.dtype() == DType::BF16 && check::is_on(Kernel::Fp8);
    let matrix = |weight: &&'a Weight| match &weight.values {
        Matrix::Quantised(matrix) => Some(&**matrix).filter(|matrix| {
            matrix.coding == Coding::Fp8
                && matches!(matrix.scales, BlockScales::Plain(_))
                && matrix.block_len >= matrix.shape[0] * matrix.shape[1]
                && matrix.shape.iter().all(|width| width.is_multiple_of(EIGHT_BIT_MULTIPLE))
        }),
        _ => None,
    };
    weights.iter().map(matrix).collect::<Option<_>>().filter(|_| is_on)
}

/// `x W^T` for each of the matrices, side by side; added to `sum` if there is one, which is for one matrix.
pub(super) fn forward(x: &Tensor<2>, matrices: &[&Quantised], sum: Option<&Tensor<2>>) -> Vec<Tensor<2>> {
    let outputs = side_by_side(x, matrices.iter().map(|matrix| matrix.shape[0]));
    let shapes: Vec<_> = matrices.iter().map(|matrix| matrix.shape).collect();
    let inputs = parts(matrices).into_iter().chain(once(x).chain(sum).map(|x| x.clone().into_dispatch()));
    let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
        let (weights, floats) = split(&shapes, inputs);
        let x = rounded(&floats[0]);
        weights.iter().zip(ys).for_each(|(weight, y)| multiply_eight_bits(Way::Forward, weight, &x, floats.get(1), y));
    };
    queue("products", inputs.collect(), outputs, run).into_iter().map(Tensor::from_dispatch).collect()
}

/// The sum of `dy W` over the matrices, added to `sum` if there is one. Rounded after each matrix.
pub(super) fn backward(dys: &[&Tensor<2>], matrices: &[&Quantised], sum: Option<&Tensor<2>>) -> Tensor<2> {
    let shape = [dys[0].dims()[0], matrices[0].shape[1]];
    let shapes: Vec<_> = matrices.iter().map(|matrix| matrix.shape).collect();
    let floats = dys.iter().copied().chain(sum).map(|x| x.clone().into_dispatch());
    let inputs = parts(matrices).into_iter().chain(floats);
    let output = Output::New(spec(DType::BF16, shape));
    let [dx] = launch("products_backward", inputs, [output], move |[], inputs, [dx]| {
        let (weights, floats) = split(&shapes, inputs);
        let mut sum = floats.get(shapes.len());
        for (weight, dy) in weights.into_iter().zip(&floats) {
            multiply_eight_bits(Way::Backward, &transposed(weight), &rounded(dy), sum, dx);
            sum = Some(dx);
        }
    });
    Tensor::from_dispatch(dx)
}

/// Codes and scale of each matrix.
fn parts(matrices: &[&Quantised]) -> Vec<DispatchTensor> {
    let parts = |matrix: &&Quantised| match &matrix.scales {
        BlockScales::Plain(scale) => [matrix.codes.clone().into_dispatch(), scale.clone().into_dispatch()],
        _ => unreachable!("it has one scale"),
    };
    matrices.iter().flat_map(parts).collect()
}

/// The matrices of these shapes of their [`parts`], and the rows that are the inputs behind them.
fn split(shapes: &[[usize; 2]], inputs: Vec<CubeTensor>) -> (Vec<EightBits>, Vec<CubeTensor>) {
    let mut inputs = inputs.into_iter();
    let matrix = |dims: &[usize; 2]| {
        let [codes, scale] = [inputs.next()?, inputs.next()?];
        Some(EightBits { codes: aligned(codes), dims: *dims, scale })
    };
    (shapes.iter().filter_map(matrix).collect(), inputs.map(rows).collect())
}

fn rounded(x: &CubeTensor) -> EightBits {
    let dims = dims(x);
    let len = dims[0] * dims[1];
    let blocks = len.div_ceil(NUMBERS * THREADS).min(BLOCKS);
    let largest = scratch(x, [blocks], DType::U32);
    let (codes, scale) = (scratch(x, [len], DType::U8), scratch(x, [1], DType::F32));
    let kernel = |name: &str| Launch::new(MODULE, name, [blocks, 1, 1], THREADS).read(x);
    kernel("fp8_largest").write(&largest).ints([stride(x), dims[0], dims[1]]).launch();
    let rounding = kernel("fp8_rounded").read(&largest).write(&codes).write(&scale);
    rounding.ints([blocks, stride(x), dims[0], dims[1]]).launch();
    EightBits { codes, dims, scale }
}

fn transposed(matrix: EightBits) -> EightBits {
    let EightBits { codes: before, dims: [rows, columns], scale } = matrix;
    let codes = scratch(&before, [rows * columns], DType::U8);
    let grid = [columns.div_ceil(TILE), rows.div_ceil(TILE), 1];
    Launch::new(MODULE, "fp8_transposed", grid, THREADS).read(&before).write(&codes).ints([rows, columns]).launch();
    EightBits { codes, dims: [columns, rows], scale }
}
