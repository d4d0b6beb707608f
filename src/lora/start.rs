//! How the matrices of an adapter start.

use burn::tensor::{DType, Device, Tensor};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::matrices::Matrices;
use crate::config::InitLoraWeights;
use crate::ops::host;

/// New matrices: A drawn as PEFT does, B zero, so that the model's output is the base model's, and ones for magnitudes. Numbers are drawn on the
/// host, so that a seed gives the same matrices on every device.
pub(super) fn start(
    init: InitLoraWeights,
    shapes: Matrices<[usize; 2]>,
    rng: &mut ChaCha8Rng,
    device: &Device,
) -> Matrices<Tensor<2>> {
    let a = host::tensor(draw(init, shapes.a, rng), shapes.a, device);
    let magnitude = shapes.magnitude.map(|shape| Tensor::ones(shape, (device, DType::F32)));
    Matrices { a, b: Tensor::zeros(shapes.b, (device, DType::F32)), magnitude }
}

/// `A` as PEFT draws it: uniform in ±1/sqrt(in) is `kaiming_uniform_` with `a = sqrt(5)`.
#[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
fn draw(init: InitLoraWeights, [r, in_features]: [usize; 2], rng: &mut ChaCha8Rng) -> Vec<f32> {
    let count = r * in_features;
    match init {
        InitLoraWeights::Kaiming => {
            let bound = 1.0 / (in_features as f32).sqrt();
            (0..count).map(|_| rng.random_range(-bound..bound)).collect()
        }
        InitLoraWeights::Gaussian => {
            let std = 1.0 / r as f32;
            (0..count).map(|_| std * normal(rng)).collect()
        }
    }
}

/// A standard normal number (Box and Muller, 1958).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}
