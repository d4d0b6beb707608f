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

/// The convolution `name` of `bf16`: [`short_conv`](crate::ops::short_conv::short_conv), or
/// [`gated_conv`](crate::ops::short_conv::gated_conv).
pub(super) fn forward(name: &'static str, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let ([tokens, _], [_, channels]) = (x.dims(), weight.dims());
    let (spans, output) = (layout.spans(None, &x.device()), spec(x.dtype(), [tokens, channels]));
    let inputs = [x.clone().into_dispatch(), padded(weight).into_dispatch(), spans.first_key.into_dispatch()];
    let [y] = custom(name, inputs, [output], move |[x, weight, first], [y]| {
        let (x, weight) = (rows(x), into_contiguous(weight));
        let conv = kernel(name, dims(y)).read(&x).read(&weight).read(&first).write(y);
        conv.ints([stride(&x), stride(y)]).ints(dims(y)).launch();
    });
    Tensor::from_dispatch(y)
}

/// The gradient of [`forward`] by the kernel `name`.
pub(super) fn backward(
    name: &'static str,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<2>,
    layout: &Layout,
) -> Tensor<2> {
    let (spans, output) = (layout.spans(None, &x.device()), spec(x.dtype(), x.dims()));
    let [dy, x, weight] = [dy.clone(), x.clone(), padded(weight)].map(Tensor::into_dispatch);
    let inputs = [dy, x, weight, spans.first_key.into_dispatch(), spans.last_query.into_dispatch()];
    let [dx] = custom(name, inputs, [output], move |[dy, x, weight, first, last], [dx]| {
        let (dy, x, weight) = (rows(dy), rows(x), into_contiguous(weight));
        let conv = kernel(name, dims(&dy)).read(&dy).read(&x).read(&weight).read(&first).read(&last);
        conv.write(dx).ints([stride(&dy), stride(&x), stride(dx)]).ints(dims(&dy)).launch();
    });
    Tensor::from_dispatch(dx)
}

/// The weight as the kernels take it: of taps that are not there, zeros.
pub(super) fn padded(weight: &Tensor<2>) -> Tensor<2> {
    let [taps, channels] = weight.dims();
    if taps == TAPS {
        return weight.clone();
    }
    Tensor::cat(vec![Tensor::zeros([TAPS - taps, channels], (&weight.device(), DType::F32)), weight.clone()], 0)
}
