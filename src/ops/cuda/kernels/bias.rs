//! Biases of linear layers by the kernel of `bias.cu`.

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, side_by_side, stride};
use super::stream::Launch;
use crate::ops::custom::{Output, queue};

const MODULE: &str = "bias";

const THREADS: usize = 128;
/// Outputs that a launch takes, where they lie side by side.
const MOST_JOINED: usize = 3;

/// `y + bias` of each output `[tokens, width]` in `bf16`, rounded once more; biases are `[width]` in `f32`.
pub(super) fn add(ys: Vec<Tensor<2>>, biases: &[&Tensor<1>]) -> Vec<Tensor<2>> {
    let num_outputs = ys.len();
    let outputs = (0..num_outputs).map(Output::ChangedColumns).collect();
    let biases = biases.iter().map(|bias| (*bias).clone().into_dispatch());
    let inputs = ys.into_iter().map(Tensor::into_dispatch).chain(biases).collect();
    let run = |biases: Vec<CubeTensor>, ys: &[CubeTensor]| match side_by_side(ys) {
        Some(y) if ys.len() <= MOST_JOINED => launch(&y, &biases),
        _ => ys.iter().zip(&biases).for_each(|(y, bias)| launch(y, std::slice::from_ref(bias))),
    };
    queue("add_bias", inputs, outputs, run).into_iter().map(Tensor::from_dispatch).collect()
}

/// Adds biases to outputs that lie side by side in `y`.
pub(super) fn launch(y: &CubeTensor, biases: &[CubeTensor]) {
    let [tokens, width] = dims(y);
    let launch = Launch::new(MODULE, "add_bias", [tokens, width.div_ceil(8 * THREADS), 1], THREADS).change(y);
    let launch = biases.iter().fold(launch, Launch::read);
    let launch = (biases.len()..MOST_JOINED).fold(launch, |launch, _| launch.long(0)).ints([stride(y)]);
    let widths = (0..MOST_JOINED).map(|index| biases.get(index).map_or(0, |bias| bias.meta.shape()[0]));
    launch.ints(widths).launch();
}
