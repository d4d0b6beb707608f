//! The gate by the kernels of `swiglu.cu`.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, stride};
use super::stream::{Launch, Module};
use crate::ops::custom::{custom, custom_of, side_by_side, spec};

pub(super) static MODULE: Module = Module { name: "swiglu", ptx: include_str!("swiglu.ptx") };

const THREADS: usize = 128;

fn kernel(name: &str, [tokens, width]: [usize; 2]) -> Launch {
    Launch::new(&MODULE, name, [tokens, width.div_ceil(8 * THREADS), 1], THREADS)
}

/// [`gated`](crate::ops::swiglu::gated) with SiLU of `bf16`.
pub(super) fn forward(gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    let inputs = [gate, up].map(|x| x.clone().into_dispatch());
    let [h] = custom("swiglu", inputs, [spec(DType::BF16, gate.dims())], |inputs, [h]| {
        let inputs = inputs.map(rows);
        let swiglu = inputs.iter().fold(kernel("swiglu", dims(h)), Launch::read).write(h);
        swiglu.ints(inputs.iter().chain([h]).map(stride)).ints([dims(h)[1]]).launch();
    });
    Tensor::from_dispatch(h)
}

/// [`gated_backward`](crate::ops::swiglu::gated_backward) with SiLU of `bf16`.
pub(super) fn backward(dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    let inputs = [dh, gate, up].map(|x| x.clone().into_dispatch());
    let [tokens, width] = gate.dims();
    let [dgate, dup] =
        custom_of("swiglu_backward", inputs, side_by_side(tokens, [width; 2]), |inputs, outputs: &[CubeTensor; 2]| {
            let inputs = inputs.map(rows);
            let size = dims(&outputs[0]);
            let swiglu = inputs.iter().fold(kernel("swiglu_backward", size), Launch::read);
            let swiglu = outputs.iter().fold(swiglu, Launch::write).long(0);
            swiglu.ints(inputs.iter().chain(outputs).map(stride)).ints([0, size[1]]).launch();
        });
    (Tensor::from_dispatch(dgate), Tensor::from_dispatch(dup))
}
