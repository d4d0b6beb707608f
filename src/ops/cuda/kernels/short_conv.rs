//! Short convolutions by the kernels of `short_conv.cu`.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;

use super::matrix::{dims, rows, stride};
use super::stream::{Launch, Module};
use crate::ops::custom::{custom, spec};
use crate::ops::layout::Layout;

pub(super) static MODULE: Module = Module { name: "short_conv", ptx: include_str!("short_conv.ptx") };

/// Tokens that a token is computed from, as the kernels were compiled.
pub(super) const TAPS: usize = 4;
const THREADS: usize = 128;
/// Tokens of a thread, and its channels.
const RUN: usize = 32;
const CHANNELS: usize = 8;

fn kernel(name: &str, [tokens, channels]: [usize; 2]) -> Launch {
    Launch::new(&MODULE, name, [channels.div_ceil(CHANNELS * THREADS), tokens.div_ceil(RUN), 1], THREADS)
}

/// [`short_conv`](crate::ops::short_conv::short_conv) of `bf16`.
pub(super) fn forward(x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let (spans, output) = (layout.spans(None, &x.device()), spec(DType::BF16, x.dims()));
    let inputs = [x.clone().into_dispatch(), weight.clone().into_dispatch(), spans.first_key.into_dispatch()];
    let [y] = custom("short_conv", inputs, [output], |[x, weight, first], [y]| {
        let (x, weight) = (rows(x), into_contiguous(weight));
        let conv = kernel("short_conv", dims(y)).read(&x).read(&weight).read(&first).write(y);
        conv.ints([stride(&x), stride(y)]).ints(dims(y)).launch();
    });
    Tensor::from_dispatch(y)
}

/// [`short_conv_backward`](crate::ops::short_conv::short_conv_backward) of `bf16`.
pub(super) fn backward(dy: &Tensor<2>, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let (spans, output) = (layout.spans(None, &x.device()), spec(DType::BF16, x.dims()));
    let [dy, x, weight] = [dy, x, weight].map(|x| x.clone().into_dispatch());
    let inputs = [dy, x, weight, spans.first_key.into_dispatch(), spans.last_query.into_dispatch()];
    let [dx] = custom("short_conv_backward", inputs, [output], |[dy, x, weight, first, last], [dx]| {
        let (dy, x, weight) = (rows(dy), rows(x), into_contiguous(weight));
        let conv = kernel("short_conv_backward", dims(dx)).read(&dy).read(&x).read(&weight).read(&first).read(&last);
        conv.write(dx).ints([stride(&dy), stride(&x), stride(dx)]).ints(dims(dx)).launch();
    });
    Tensor::from_dispatch(dx)
}
