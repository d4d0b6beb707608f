//! The norm of all gradients by the kernels of `kernels/optimizer.cu`, which take many matrices in a launch.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::scratch;
use super::stream::{Launch, Module, Operand};
use crate::ops::custom::{Output, queue, spec};

static MODULE: Module = Module { name: "optimizer", ptx: include_str!("kernels/optimizer.ptx") };

const THREADS: usize = 256;
/// Blocks that share a matrix.
const SHARES: usize = 16;
/// Matrices in a table of gradients.
const GRADIENTS: usize = 240;

/// The sum of the squares of matrices in `f32`, `[1]`, by way of `f64`.
pub(super) fn sum_of_squares(grads: impl Iterator<Item = Tensor<2>>) -> Tensor<1> {
    let grads: Vec<_> = grads.map(Tensor::into_dispatch).collect();
    let output = vec![Output::New(spec(DType::F32, [1]))];
    let mut queued = queue("sum_of_squares", grads, output, |grads, outputs| {
        let grads: Vec<_> = grads.into_iter().map(into_contiguous).collect();
        let num_sums = grads.len() * SHARES;
        let sums = scratch(&grads[0], [num_sums * size_of::<f64>() / size_of::<f32>()], DType::F32);
        for (index, chunk) in grads.chunks(GRADIENTS).enumerate() {
            let offset = index * GRADIENTS * SHARES * size_of::<f64>();
            let part = CubeTensor { handle: sums.handle.clone().offset_start(offset as u64), ..sums.clone() };
            let entries =
                chunk.iter().flat_map(|grad| [Operand::Read(grad), Operand::Value(grad.meta.shape().num_elements())]);
            let kernel = Launch::new(&MODULE, "sum_of_squares", [SHARES, chunk.len(), 1], THREADS);
            kernel.table(entries, 2 * GRADIENTS).write(&part).launch();
        }
        let sum = Launch::new(&MODULE, "sum_of_sums", [1; 3], THREADS).read(&sums).write(&outputs[0]);
        sum.ints([num_sums]).launch();
    });
    Tensor::from_dispatch(queued.remove(0))
}
