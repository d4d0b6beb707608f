//! Short convolutions in plain tensor calls.

use burn::tensor::{DType, Tensor, activation};

use crate::ops::layout::Layout;

/// Every row `shift` rows later, zeros before; or earlier, zeros behind.
fn shifted(x: &Tensor<2>, shift: usize, is_later: bool) -> Tensor<2> {
    let [rows, width] = x.dims();
    let zeros = Tensor::zeros([shift, width], (&x.device(), x.dtype()));
    let kept = x.clone().narrow(0, if is_later { 0 } else { shift }, rows - shift);
    Tensor::cat(if is_later { vec![zeros, kept] } else { vec![kept, zeros] }, 0)
}

/// The sum over all taps of the weight times `x`, or what `term` makes of a shift and of the mask of tokens that have such a one.
fn over_taps<F: Fn(usize, Tensor<2>) -> Tensor<2>>(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    layout: &Layout,
    term: F,
) -> Tensor<2> {
    let ([num_tokens, _], last) = (x.dims(), weight.dims()[0] - 1);
    let own = x.clone() * weight.clone().narrow(0, last, 1);
    let taps = (1..num_tokens).zip(layout.within(last, &x.device()));
    taps.fold(own, |sum, (shift, mask)| sum + term(shift, mask) * weight.clone().narrow(0, last - shift, 1))
}

/// The convolution alone, in `f32`.
fn convolved(x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let x = x.clone().cast(DType::F32);
    over_taps(&x, weight, layout, |shift, mask| shifted(&x, shift, true) * mask)
}

/// The gradient of [`convolved`]'s input from that of its output.
fn convolved_backward(du: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    over_taps(du, weight, layout, |shift, mask| shifted(&(du.clone() * mask), shift, false))
}

/// The weight of a convolution, `[kernel_size, channels]`, and what it adds, `[channels]`, both in `f32`.
pub type ConvWeights<'a> = (&'a Tensor<2>, Option<&'a Tensor<1>>);

/// The convolution with its bias, in `f32`.
fn biased(x: &Tensor<2>, (weight, bias): ConvWeights<'_>, layout: &Layout) -> Tensor<2> {
    let y = convolved(x, weight, layout);
    match bias {
        Some(bias) => y + bias.clone().unsqueeze(),
        None => y,
    }
}

pub(crate) fn plain_short_conv(x: &Tensor<2>, weights: ConvWeights<'_>, layout: &Layout) -> Tensor<2> {
    activation::silu(biased(x, weights, layout)).cast(x.dtype())
}

pub(crate) fn plain_short_conv_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weights: ConvWeights<'_>,
    layout: &Layout,
) -> Tensor<2> {
    let u = biased(x, weights, layout);
    let sigmoid = activation::sigmoid(u.clone());
    let slope = sigmoid.clone() * (u * (sigmoid.neg() + 1.0) + 1.0);
    let du = dy.clone().cast(DType::F32) * slope;
    convolved_backward(&du, weights.0, layout).cast(x.dtype())
}

/// `b`, `c` and `x` of what has them side by side, in `f32`.
fn parts(bcx: &Tensor<2>) -> [Tensor<2>; 3] {
    let width = bcx.dims()[1] / 3;
    [0, 1, 2].map(|part| bcx.clone().narrow(1, part * width, width).cast(DType::F32))
}

pub(crate) fn plain_gated_conv(bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let [b, c, x] = parts(bcx);
    (c * convolved(&(b * x), weight, layout)).cast(bcx.dtype())
}

pub(crate) fn plain_gated_conv_backward(
    dy: &Tensor<2>,
    bcx: &Tensor<2>,
    weight: &Tensor<2>,
    layout: &Layout,
) -> Tensor<2> {
    let ([b, c, x], dy) = (parts(bcx), dy.clone().cast(DType::F32));
    let dc = dy.clone() * convolved(&(b.clone() * x.clone()), weight, layout);
    let du = convolved_backward(&(dy * c), weight, layout);
    Tensor::cat(vec![du.clone() * x, dc, du * b], 1).cast(bcx.dtype())
}
