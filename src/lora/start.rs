//! How the matrices of an adapter start.

mod decomposition;
mod eva;
mod from_base;
mod orthogonal;
mod rows;

use burn::tensor::{DType, Device, Tensor};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::matrices::Matrices;
use crate::config::InitLoraWeights;
use crate::ops::host;

pub(super) use decomposition::Singular;
pub use eva::Directions;
pub(super) use rows::{StartRows, as_f32};

/// New matrices with which the model's output is the base model's: A drawn as PEFT does and B zero, or such that their product
/// is; and ones for magnitudes, until the model is there. Numbers are drawn on the host, so that a seed gives the same matrices on every device.
///
/// Those that start as [a part of the base](InitLoraWeights::is_part_of_base), and the A of those that start from the rows, get
/// their numbers later.
pub(super) fn start(
    init: InitLoraWeights,
    shapes: Matrices<[usize; 2]>,
    rng: &mut ChaCha8Rng,
    device: &Device,
) -> Matrices<Tensor<2>> {
    let ([r, in_features], [out_features, columns]) = (shapes.a, shapes.b);
    let zeros = || vec![0.0; out_features * columns];
    let [a, b] = match init {
        InitLoraWeights::Kaiming | InitLoraWeights::Eva => [uniform(shapes.a, rng), zeros()],
        InitLoraWeights::Gaussian => [gaussian(shapes.a, rng), zeros()],
        InitLoraWeights::Orthogonal => orthogonal::orthogonal(r, [out_features, in_features], rng),
        InitLoraWeights::Pissa | InitLoraWeights::PissaNiter(_) | InitLoraWeights::Olora => {
            [vec![0.0; r * in_features], zeros()]
        }
    };
    let magnitude = shapes.magnitude.map(|shape| Tensor::ones(shape, (device, DType::F32)));
    Matrices { a: host::tensor(a, shapes.a, device), b: host::tensor(b, shapes.b, device), magnitude }
}

/// Uniform in ±1/sqrt(in): `kaiming_uniform_` with `a = sqrt(5)`.
#[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
fn uniform([r, in_features]: [usize; 2], rng: &mut ChaCha8Rng) -> Vec<f32> {
    let bound = 1.0 / (in_features as f32).sqrt();
    (0..r * in_features).map(|_| rng.random_range(-bound..bound)).collect()
}

/// Normal with standard deviation 1/r.
#[expect(clippy::cast_precision_loss, reason = "a rank is a small number")]
fn gaussian([r, in_features]: [usize; 2], rng: &mut ChaCha8Rng) -> Vec<f32> {
    let std = 1.0 / r as f32;
    (0..r * in_features).map(|_| std * normal(rng)).collect()
}

/// A standard normal number (Box and Muller, 1958).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}
