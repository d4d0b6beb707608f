//! Noise that is a function of a seed and the element's place, as the masks of [`dropout`](super::dropout) are.

use burn::tensor::{DType, Tensor};

use super::dropout::Dropout;
use super::plain::dropout::PlainDropout;
use super::profile::{self, Cost};

/// Noise, uniform in ±`bound`.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// Its largest size.
    pub bound: f64,
    /// What names it.
    pub seed: u64,
    /// The row of the noise that the first row of a tensor gets.
    pub first_row: usize,
}

/// `x` with noise.
///
/// # Shapes
/// `x`: `[tokens, width]`. Returns the same, in the type of `x`.
#[must_use]
pub fn with_noise(x: &Tensor<2>, Noise { bound, seed, first_row }: Noise) -> Tensor<2> {
    let add = || {
        let hash = PlainDropout::new(x, Dropout { probability: 0.0, seed, first_row }).hash();
        let noise = hash.float().cast(DType::F32) * (bound / 2f64.powi(31));
        (x.clone().cast(DType::F32) + noise).cast(x.dtype())
    };
    profile::measure("noise", || Cost { bytes: 2.0 * profile::bytes(x), ..Cost::default() }, add)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn noise_is_uniform_within_its_bound_and_named_by_its_seed() {
        let x = Tensor::<2>::ones([128, 256], (&Device::flex(), DType::F32));
        let values =
            |seed| with_noise(&x, Noise { bound: 0.25, seed, first_row: 0 }).to_data().try_to_vec::<f32>().unwrap();
        let noise: Vec<f64> = values(1).iter().map(|value| f64::from(value - 1.0)).collect();
        let mean = |power| noise.iter().map(|value| value.powi(power)).sum::<f64>() / (128.0 * 256.0);
        assert!(noise.iter().all(|value| value.abs() <= 0.25) && noise.iter().any(|value| value.abs() > 0.2499));
        // Of a uniform distribution: within four standard errors.
        assert!(mean(1).abs() < 4.0 * (0.25f64.powi(2) / 3.0 / 32_768.0).sqrt(), "{}", mean(1));
        assert!((mean(2) / (0.25f64.powi(2) / 3.0) - 1.0).abs() < 0.02, "{}", mean(2));
        assert_eq!(values(1), values(1));
        assert_ne!(values(1), values(2));
    }
}
