//! Short causal convolution of every channel by itself: with `SiLU`, as linear attention has it before its heads, and between two
//! gates (LFM2).

use burn::tensor::Tensor;

use super::kernels::Place;
use super::layout::Layout;
use super::profile::{self, Cost};

/// `silu(sum over j of weight[j] x[t - kernel_size + 1 + j] + bias)`; tokens before a document are zeros.
///
/// # Shapes
/// `x`: `[tokens, channels]`, `weight`: `[kernel_size, channels]` and `bias`, if there is one: `[channels]`, in `f32`. Tokens outside all documents get something finite.
#[must_use]
pub fn short_conv(place: Place, x: &Tensor<2>, weights: ConvWeights<'_>, layout: &Layout) -> Tensor<2> {
    let work = || place.convolve(Convolution::Short(weights), x, layout);
    profile::measure("short_conv", || cost(x, weights.0, 2), work)
}

/// What [`short_conv`] or [`gated_conv`] makes of the next tokens of texts behind their last inputs, and these of the tokens.
///
/// # Shapes
/// `last`: `[kernel_size - 1, width]` for each text, `x`: `[tokens, width]`, both of one type.
#[must_use]
pub fn convolve_next(
    place: Place,
    conv: Convolution<'_>,
    last: Vec<Tensor<2>>,
    texts: &[TextRows],
    x: &Tensor<2>,
) -> (Tensor<2>, Vec<Tensor<2>>) {
    let (Convolution::Short((weight, _)) | Convolution::Gated(weight)) = conv;
    profile::measure("convolve_next", || cost(x, weight, 2), || place.convolve_next(conv, last, texts, x))
}

/// The gradient of [`short_conv`] with respect to `x`; that of its output is zero outside all documents.
#[must_use]
pub fn short_conv_backward(
    place: Place,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weights: ConvWeights<'_>,
    layout: &Layout,
) -> Tensor<2> {
    let work = || place.short_conv_backward(dy, x, weights, layout);
    profile::measure("short_conv_backward", || cost(x, weights.0, 3), work)
}

/// `c * (sum over j of weight[j] (b x)[t - kernel_size + 1 + j])`; tokens before a document are zeros.
///
/// # Shapes
/// `bcx`: `b`, `c` and `x` side by side, `[tokens, 3 * channels]`, `weight`: `[kernel_size, channels]` in `f32`; the result:
/// `[tokens, channels]`. Tokens outside all documents get something finite.
#[must_use]
pub fn gated_conv(place: Place, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
    profile::measure("gated_conv", || cost(bcx, weight, 2), || place.gated_conv(bcx, weight, layout))
}

/// The gradient of [`gated_conv`] with respect to `bcx`; that of its output is zero outside all documents.
#[must_use]
pub fn gated_conv_backward(
    place: Place,
    dy: &Tensor<2>,
    bcx: &Tensor<2>,
    weight: &Tensor<2>,
    layout: &Layout,
) -> Tensor<2> {
    let work = || place.gated_conv_backward(dy, bcx, weight, layout);
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

pub use super::plain::next::{Convolution, TextRows};
pub use super::plain::short_conv::ConvWeights;

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::ops::host;
    use crate::ops::place::place_of;
    use crate::ops::plain::short_conv::plain_gated_conv;

    /// Documents that are shorter than the kernel, and tokens in none; more rows than a chunk of the CPU's kernel has.
    const DOCUMENTS: [(usize, usize); 5] = [(0, 5), (5, 1), (6, 2), (8, 700), (710, 40)];
    const SHAPE: [usize; 2] = [755, 50];

    fn random(shape: [usize; 2], seed: u64, device: &Device) -> Tensor<2> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values = (0..shape[0] * shape[1]).map(|_| rng.random_range(-2.0..2.0)).collect();
        host::tensor(values, shape, device)
    }

    fn bias(device: &Device) -> Tensor<1> {
        random([1, SHAPE[1]], 4, device).reshape([SHAPE[1]])
    }

    fn layout() -> Layout {
        Layout::new(1, DOCUMENTS.to_vec(), vec![0; SHAPE[0]], [].into())
    }

    fn place(device: &Device) -> Place {
        place_of(device, DType::F32)
    }

    fn values(tensor: &Tensor<2>) -> Vec<f32> {
        let tensor = if tensor.is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
        tensor.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn a_token_sees_the_tokens_before_it_in_its_document() {
        let (kernel_size, devices) = (4, [Device::flex(), Device::flex().autodiff()]);
        for (device, has_bias) in devices.iter().flat_map(|device| [false, true].map(|has_bias| (device, has_bias))) {
            let (x, weight) = (random(SHAPE, 1, device), random([kernel_size, SHAPE[1]], 2, device));
            let bias = has_bias.then(|| bias(device));
            let found = values(&short_conv(place(device), &x, (&weight, bias.as_ref()), &layout()));
            let (x, weight) = (values(&x), values(&weight));
            let bias = bias.map_or_else(|| vec![0.0; SHAPE[1]], |bias| values(&bias.unsqueeze()));
            for (start, len) in DOCUMENTS {
                for (index, channel) in (0..len).flat_map(|index| (0..SHAPE[1]).map(move |channel| (index, channel))) {
                    let of = |shift: usize| {
                        let token = start + index - shift;
                        weight[(kernel_size - 1 - shift) * SHAPE[1] + channel] * x[token * SHAPE[1] + channel]
                    };
                    let sum = bias[channel] + (0..kernel_size.min(index + 1)).map(of).sum::<f32>();
                    let (found, expected) = (found[(start + index) * SHAPE[1] + channel], sum / (1.0 + (-sum).exp()));
                    assert!((found - expected).abs() < 1e-5, "token {index} of {len}: {found}, expected {expected}");
                }
            }
        }
    }

    #[test]
    fn the_backward_is_the_derivative_of_the_plain_forward() {
        for (kernel_size, has_bias) in [(1, false), (4, false), (4, true)] {
            let device = Device::flex().autodiff();
            let weight = random([kernel_size, SHAPE[1]], 2, &device);
            let bias_on = |device: &Device| has_bias.then(|| bias(device));
            let (x, dy) = (random(SHAPE, 1, &device).require_grad(), random(SHAPE, 3, &device));
            // Tokens in no document have no gradient.
            let dy = [708..710, 750..755].into_iter().fold(dy, |dy, rows| {
                let zeros = dy.clone().narrow(0, rows.start, rows.len()).zeros_like();
                dy.slice_assign([rows, 0..SHAPE[1]], zeros)
            });
            let y = short_conv(place(&device), &x, (&weight, bias_on(&device).as_ref()), &layout());
            let grads = (y * dy.clone()).sum().backward();
            let expected = values(&x.grad(&grads).unwrap());
            let by_hand = |device: &Device| {
                let on = |x: &Tensor<2>| host::tensor(values(x), x.dims(), device);
                let (weight, bias) = (on(&weight), bias_on(device));
                let weights = (&weight, bias.as_ref());
                values(&short_conv_backward(place(device), &on(&dy), &on(&x), weights, &layout()))
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
            let y = plain_gated_conv(&bcx, &weight, &layout());
            let grads = (y.clone() * dy.clone()).sum().backward();
            let expected = [values(&y), values(&bcx.grad(&grads).unwrap())];
            for by_hand in [&device, &Device::flex()] {
                let on = |x: &Tensor<2>| host::tensor(values(x), x.dims(), by_hand);
                let (place, bcx, weight) = (place(by_hand), on(&bcx), on(&weight));
                let y = gated_conv(place, &bcx, &weight, &layout());
                let dx = gated_conv_backward(place, &on(&dy), &bcx, &weight, &layout());
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
