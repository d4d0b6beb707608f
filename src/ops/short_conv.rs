//! Short causal convolution of every channel by itself: with `SiLU`, as linear attention has it before its heads, and between two
//! gates (LFM2).

use burn::tensor::{DType, Tensor, activation};

use super::kernels::Place;
use super::layout::Layout;
use super::profile::{self, Cost};

/// `silu(sum over j of weight[j] x[t - kernel_size + 1 + j])`; tokens before a document are zeros.
///
/// # Shapes
/// `x`: `[tokens, channels]`, `weight`: `[kernel_size, channels]` in `f32`. Tokens outside all documents get something finite.
#[must_use]
pub fn short_conv(x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let place: Place = layout.place();
    profile::measure("short_conv", || cost(x, weight, 2), || place.short_conv(x, weight, layout))
}

/// The gradient of [`short_conv`] with respect to `x`; that of its output is zero outside all documents.
#[must_use]
pub fn short_conv_backward(dy: &Tensor<2>, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let work = || layout.place().short_conv_backward(dy, x, weight, layout);
    profile::measure("short_conv_backward", || cost(x, weight, 3), work)
}

/// `c * (sum over j of weight[j] (b x)[t - kernel_size + 1 + j])`; tokens before a document are zeros.
///
/// # Shapes
/// `bcx`: `b`, `c` and `x` side by side, `[tokens, 3 * channels]`, `weight`: `[kernel_size, channels]` in `f32`; the result:
/// `[tokens, channels]`. Tokens outside all documents get something finite.
#[must_use]
pub fn gated_conv(bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let place: Place = layout.place();
    profile::measure("gated_conv", || cost(bcx, weight, 2), || place.gated_conv(bcx, weight, layout))
}

/// The gradient of [`gated_conv`] with respect to `bcx`; that of its output is zero outside all documents.
#[must_use]
pub fn gated_conv_backward(dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let work = || layout.place().gated_conv_backward(dy, bcx, weight, layout);
    profile::measure("gated_conv_backward", || cost(bcx, weight, 3), work)
}

fn cost(x: &Tensor<2>, weight: &Tensor<2>, passes: usize) -> Cost {
    let ([tokens, _], [kernel_size, channels]) = (x.dims(), weight.dims());
    Cost {
        shape: format!("{channels} of {kernel_size}"),
        flops: profile::count(2 * (passes - 1) * tokens * channels * kernel_size),
        ..profile::passes(x, passes)
    }
}

/// Every row `shift` rows later, zeros before.
fn later(x: &Tensor<2>, shift: usize) -> Tensor<2> {
    let [rows, width] = x.dims();
    let shift = shift.min(rows);
    let zeros = Tensor::zeros([shift, width], (&x.device(), x.dtype()));
    Tensor::cat(vec![zeros, x.clone().narrow(0, 0, rows - shift)], 0)
}

/// Every row `shift` rows earlier, zeros behind.
fn earlier(x: &Tensor<2>, shift: usize) -> Tensor<2> {
    let [rows, width] = x.dims();
    let shift = shift.min(rows);
    let zeros = Tensor::zeros([shift, width], (&x.device(), x.dtype()));
    Tensor::cat(vec![x.clone().narrow(0, shift, rows - shift), zeros], 0)
}

/// The convolution alone, in `f32`.
fn convolved(x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let (x, last) = (x.clone().cast(DType::F32), weight.dims()[0] - 1);
    let masks = layout.within(last, &x.device());
    let own = x.clone() * weight.clone().narrow(0, last, 1);
    masks.iter().enumerate().map(|(index, mask)| (index + 1, mask)).fold(own, |sum, (shift, mask)| {
        if shift >= x.dims()[0] {
            return sum;
        }
        sum + later(&x, shift) * mask.clone() * weight.clone().narrow(0, last - shift, 1)
    })
}

/// [`short_conv`] in plain tensor calls.
#[must_use]
pub fn plain_short_conv(x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    activation::silu(convolved(x, weight, layout)).cast(x.dtype())
}

/// [`short_conv_backward`] in plain tensor calls.
#[must_use]
pub fn plain_short_conv_backward(dy: &Tensor<2>, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let u = convolved(x, weight, layout);
    let sigmoid = activation::sigmoid(u.clone());
    let slope = sigmoid.clone() * (u * (sigmoid.neg() + 1.0) + 1.0);
    let du = dy.clone().cast(DType::F32) * slope;
    convolved_backward(&du, weight, layout).cast(x.dtype())
}

/// The gradient of [`convolved`]'s input from that of its output.
fn convolved_backward(du: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let last = weight.dims()[0] - 1;
    let masks = layout.within(last, &du.device());
    let own = du.clone() * weight.clone().narrow(0, last, 1);
    masks.iter().enumerate().map(|(index, mask)| (index + 1, mask)).fold(own, |sum, (shift, mask)| {
        if shift >= du.dims()[0] {
            return sum;
        }
        sum + earlier(&(du.clone() * mask.clone()), shift) * weight.clone().narrow(0, last - shift, 1)
    })
}

/// `b`, `c` and `x` of what has them side by side, in `f32`.
fn parts(bcx: &Tensor<2>) -> [Tensor<2>; 3] {
    let width = bcx.dims()[1] / 3;
    [0, 1, 2].map(|part| bcx.clone().narrow(1, part * width, width).cast(DType::F32))
}

/// [`gated_conv`] in plain tensor calls.
#[must_use]
pub fn plain_gated_conv(bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let [b, c, x] = parts(bcx);
    (c * convolved(&(b * x), weight, layout)).cast(bcx.dtype())
}

/// [`gated_conv_backward`] in plain tensor calls.
#[must_use]
pub fn plain_gated_conv_backward(dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    let ([b, c, x], dy) = (parts(bcx), dy.clone().cast(DType::F32));
    let dc = dy.clone() * convolved(&(b.clone() * x.clone()), weight, layout);
    let du = convolved_backward(&(dy * c), weight, layout);
    Tensor::cat(vec![du.clone() * x, dc, du * b], 1).cast(bcx.dtype())
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::ops::host;
    use crate::ops::kernels::place_of;

    /// Documents that are shorter than the kernel, and tokens in none; more rows than a chunk of the CPU's kernel has.
    const DOCUMENTS: [(usize, usize); 5] = [(0, 5), (5, 1), (6, 2), (8, 700), (710, 40)];
    const SHAPE: [usize; 2] = [755, 50];

    fn random(shape: [usize; 2], seed: u64, device: &Device) -> Tensor<2> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values = (0..shape[0] * shape[1]).map(|_| rng.random_range(-2.0..2.0)).collect();
        host::tensor(values, shape, device)
    }

    fn layout(device: &Device) -> Layout {
        Layout::new(place_of(device, DType::F32), 1, DOCUMENTS.to_vec(), vec![0; SHAPE[0]], [].into())
    }

    fn values(tensor: &Tensor<2>) -> Vec<f32> {
        let tensor = if tensor.is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
        tensor.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn a_token_sees_the_tokens_before_it_in_its_document() {
        for (device, kernel_size) in [Device::flex(), Device::flex().autodiff()].into_iter().zip([4, 4]) {
            let (x, weight) = (random(SHAPE, 1, &device), random([kernel_size, SHAPE[1]], 2, &device));
            let found = values(&short_conv(&x, &weight, &layout(&device)));
            let (x, weight) = (values(&x), values(&weight));
            for (start, len) in DOCUMENTS {
                for (index, channel) in (0..len).flat_map(|index| (0..SHAPE[1]).map(move |channel| (index, channel))) {
                    let of = |shift: usize| {
                        let token = start + index - shift;
                        weight[(kernel_size - 1 - shift) * SHAPE[1] + channel] * x[token * SHAPE[1] + channel]
                    };
                    let sum: f32 = (0..kernel_size.min(index + 1)).map(of).sum();
                    let (found, expected) = (found[(start + index) * SHAPE[1] + channel], sum / (1.0 + (-sum).exp()));
                    assert!((found - expected).abs() < 1e-5, "token {index} of {len}: {found}, expected {expected}");
                }
            }
        }
    }

    #[test]
    fn the_backward_is_the_derivative_of_the_plain_forward() {
        for kernel_size in [1, 4] {
            let device = Device::flex().autodiff();
            let weight = random([kernel_size, SHAPE[1]], 2, &device);
            let (x, dy) = (random(SHAPE, 1, &device).require_grad(), random(SHAPE, 3, &device));
            // Tokens in no document have no gradient.
            let dy = [708..710, 750..755].into_iter().fold(dy, |dy, rows| {
                let zeros = dy.clone().narrow(0, rows.start, rows.len()).zeros_like();
                dy.slice_assign([rows, 0..SHAPE[1]], zeros)
            });
            let grads = (short_conv(&x, &weight, &layout(&device)) * dy.clone()).sum().backward();
            let expected = values(&x.grad(&grads).unwrap());
            let by_hand = |device: &Device| {
                let on = |x: &Tensor<2>| host::tensor(values(x), x.dims(), device);
                values(&short_conv_backward(&on(&dy), &on(&x), &on(&weight), &layout(device)))
            };
            for found in [by_hand(&device), by_hand(&Device::flex())] {
                let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-5, "{worst}");
            }
        }
    }

    #[test]
    fn the_gated_convolution_and_its_backward_are_those_of_tensor_calls() {
        for kernel_size in [1, 3, 4] {
            let device = Device::flex().autodiff();
            let weight = random([kernel_size, SHAPE[1]], 2, &device);
            let bcx = random([SHAPE[0], 3 * SHAPE[1]], 1, &device).require_grad();
            let dy = random(SHAPE, 3, &device);
            let dy = [708..710, 750..755].into_iter().fold(dy, |dy, rows| {
                let zeros = dy.clone().narrow(0, rows.start, rows.len()).zeros_like();
                dy.slice_assign([rows, 0..SHAPE[1]], zeros)
            });
            let y = plain_gated_conv(&bcx, &weight, &layout(&device));
            let grads = (y.clone() * dy.clone()).sum().backward();
            let expected = [values(&y), values(&bcx.grad(&grads).unwrap())];
            for by_hand in [&device, &Device::flex()] {
                let on = |x: &Tensor<2>| host::tensor(values(x), x.dims(), by_hand);
                let (layout, bcx, weight) = (layout(by_hand), on(&bcx), on(&weight));
                let y = gated_conv(&bcx, &weight, &layout);
                let dx = gated_conv_backward(&on(&dy), &bcx, &weight, &layout);
                for (found, expected) in [values(&y), values(&dx)].iter().zip(&expected) {
                    let pairs = found.iter().zip(expected).enumerate();
                    // Tokens in no document have something finite.
                    let row = expected.len() / SHAPE[0];
                    let inside = pairs.filter(|(at, _)| !(708..710).contains(&(at / row)) && at / row < 750);
                    let worst = inside.map(|(_, (a, b))| (a - b).abs()).fold(0.0, f32::max);
                    assert!(worst < 5e-5, "{kernel_size}: {worst}");
                }
            }
        }
    }
}
