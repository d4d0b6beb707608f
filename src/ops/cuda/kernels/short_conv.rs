//! Short convolutions by the kernels of `short_conv.cu`.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;

use super::matrix::{dims, rows, stride};
use super::stream::Launch;
use crate::ops::custom::{custom, spec};
use crate::ops::layout::Layout;

const MODULE: &str = "short_conv";

/// Tokens that a token is computed from, as the kernels were compiled.
pub(super) const TAPS: usize = 4;
const THREADS: usize = 128;
/// Tokens of a thread, and its channels.
const RUN: usize = 32;
const CHANNELS: usize = 8;

fn kernel(name: &str, [tokens, channels]: [usize; 2]) -> Launch {
    Launch::new(MODULE, name, [channels.div_ceil(CHANNELS * THREADS), tokens.div_ceil(RUN), 1], THREADS)
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

/// The weight as the kernels take it: of taps that are not there, zeros.
fn padded(weight: &Tensor<2>) -> Tensor<2> {
    let [taps, channels] = weight.dims();
    if taps == TAPS {
        return weight.clone();
    }
    Tensor::cat(vec![Tensor::zeros([TAPS - taps, channels], (&weight.device(), DType::F32)), weight.clone()], 0)
}

/// [`gated_conv`](crate::ops::short_conv::gated_conv) of `bf16`.
pub(super) fn gated(bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let ([tokens, _], [_, channels]) = (bcx.dims(), weight.dims());
    let (spans, output) = (layout.spans(None, &bcx.device()), spec(DType::BF16, [tokens, channels]));
    let inputs = [bcx.clone().into_dispatch(), padded(weight).into_dispatch(), spans.first_key.into_dispatch()];
    let [y] = custom("gated_conv", inputs, [output], |[bcx, weight, first], [y]| {
        let (bcx, weight) = (rows(bcx), into_contiguous(weight));
        let conv = kernel("gated_conv", dims(y)).read(&bcx).read(&weight).read(&first).write(y);
        conv.ints([stride(&bcx), stride(y)]).ints(dims(y)).launch();
    });
    Tensor::from_dispatch(y)
}

/// [`gated_conv_backward`](crate::ops::short_conv::gated_conv_backward) of `bf16`.
pub(super) fn gated_backward(dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let (spans, output) = (layout.spans(None, &bcx.device()), spec(DType::BF16, bcx.dims()));
    let [dy, bcx, weight] = [dy.clone(), bcx.clone(), padded(weight)].map(Tensor::into_dispatch);
    let inputs = [dy, bcx, weight, spans.first_key.into_dispatch(), spans.last_query.into_dispatch()];
    let [d_bcx] = custom("gated_conv_backward", inputs, [output], |[dy, bcx, weight, first, last], [d_bcx]| {
        let (dy, bcx, weight) = (rows(dy), rows(bcx), into_contiguous(weight));
        let conv = kernel("gated_conv_backward", dims(&dy)).read(&dy).read(&bcx).read(&weight).read(&first).read(&last);
        conv.write(d_bcx).ints([stride(&dy), stride(&bcx), stride(d_bcx)]).ints(dims(&dy)).launch();
    });
    Tensor::from_dispatch(d_bcx)
}
