//! The norm of all gradients.

use burn::tensor::Tensor;

/// Sum of the squares of the gradients of all blocks, `[1]`; there is at least one.
pub(super) fn plain_sum_of_squares(blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
    // Sums of sums: fusion makes one kernel of many additions, or of a `cat`, with as many inputs.
    let of_block = |grads: &Vec<&Tensor<2>>| {
        grads.iter().map(|&grad| grad.clone().square().sum()).reduce(|sum, squares| sum + squares)
    };
    let sum = blocks.iter().filter_map(of_block).reduce(|sum, squares| sum + squares);
    sum.unwrap_or_else(|| unreachable!("there is a gradient"))
}
