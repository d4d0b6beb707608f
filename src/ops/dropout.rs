//! Dropout masks that can be recomputed: a mask is a pure function of its seed.

use burn::tensor::{DType, Device, Distribution, Tensor};

use super::place::Place;
use super::{cpu, host};

pub use super::cpu::{Dropout, mix};

/// A mask of zeros and `1 / (1 - probability)`.
///
/// The same seed gives the same mask on the same kind of device, so nothing has to be kept for the backward or for
/// a resumed run.
///
/// # Shapes
/// Returns `shape`, in `dtype`.
#[must_use]
pub fn mask(shape: [usize; 2], dropout: Dropout, device: &Device, dtype: DType) -> Tensor<2> {
    let keep = 1.0 - dropout.probability;
    if Place::of(device, DType::F32) != Place::Cpu {
        device.seed(dropout.seed);
        return Tensor::<2>::random(shape, Distribution::Bernoulli(keep), (device, DType::F32))
            .div_scalar(keep)
            .cast(dtype);
    }
    let ones = vec![1.0; shape[0] * shape[1]];
    let mut values = vec![0.0; ones.len()];
    cpu::dropout(&ones, shape[1], dropout, &mut values);
    host::tensor(values, shape, device).cast(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_keeps_its_share_and_mean_and_repeats_by_seed() {
        let device = Device::flex();
        let values = |seed| {
            let dropout = Dropout { probability: 0.2, seed };
            mask([300, 100], dropout, &device, DType::F32).into_data().try_to_vec::<f32>().unwrap()
        };
        let first = values(1);
        let zeros = first.iter().filter(|&&v| v == 0.0).count();
        assert!((5_700..6_300).contains(&zeros), "{zeros} zeros of 30000");
        assert!(first.iter().all(|&v| v == 0.0 || v == 1.25));
        assert_eq!(first, values(1));
        assert_ne!(first, values(2));
    }
}
