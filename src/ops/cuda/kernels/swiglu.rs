//! The gate of a feed-forward layer by the kernels of `swiglu.cu`.

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, stride};
use super::stream::{Launch, note_memory};
use crate::ops::custom::{custom, custom_of, side_by_side, spec};
use crate::ops::plain::gates::name;
use crate::spec::Activation;

const MODULE: &str = "swiglu";

const THREADS: usize = 128;

/// Whether there are kernels for it.
fn kernel(name: &str, [tokens, width]: [usize; 2]) -> Launch {
    Launch::new(MODULE, name, [tokens, width.div_ceil(8 * THREADS), 1], THREADS)
}

/// [`gated`](crate::ops::swiglu::gated) of `bf16`.
pub(super) fn forward(activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    let inputs = [gate, up].map(|x| x.clone().into_dispatch());
    let [name, _] = name(activation);
    let [h] = custom(name, inputs, [spec(gate.dtype(), gate.dims())], move |inputs, [h]| {
        let inputs = inputs.map(rows);
        let gated = inputs.iter().fold(kernel(name, dims(h)), Launch::read).write(h);
        gated.ints(inputs.iter().chain([h]).map(stride)).ints([dims(h)[1]]).launch();
    });
    Tensor::from_dispatch(h)
}

/// [`gated_backward`](crate::ops::swiglu::gated_backward) of `bf16`; the results are side by side.
pub(super) fn backward(activation: Activation, dh: &Tensor<2>, [gate, up]: [&Tensor<2>; 2]) -> [Tensor<2>; 2] {
    let inputs = [dh, gate, up].map(|x| x.clone().into_dispatch());
    let ([_, width], [_, name]) = (gate.dims(), name(activation));
    let run = move |inputs: [CubeTensor; 3], outputs: &[CubeTensor; 2]| {
        note_memory(&outputs[0]);
        let inputs = inputs.map(rows);
        let size = dims(&outputs[0]);
        let gated = inputs.iter().fold(kernel(name, size), Launch::read);
        let gated = outputs.iter().fold(gated, Launch::write).long(0);
        gated.ints(inputs.iter().chain(outputs).map(stride)).ints([0, size[1]]).launch();
    };
    custom_of(name, inputs, side_by_side(gate, [width; 2]), run).map(Tensor::from_dispatch)
}
