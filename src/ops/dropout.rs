//! Dropout masks that can be recomputed: a mask is a pure function of its seed.

use burn::tensor::{DType, Device, Distribution, Tensor};

use super::{cpu, host};

/// A mask of zeros (with probability `probability`) and `1 / (1 - probability)`.
///
/// The same seed gives the same mask on the same kind of device, so nothing has to be kept for the backward or for
/// a resumed run.
///
/// # Shapes
/// Returns `shape`, in `dtype`.
#[must_use]
pub fn mask(shape: [usize; 2], probability: f64, seed: u64, device: &Device, dtype: DType) -> Tensor<2> {
    let keep = 1.0 - probability;
    if !host::has_kernels(device, DType::F32) {
        device.seed(seed);
        return Tensor::<2>::random(shape, Distribution::Bernoulli(keep), (device, DType::F32))
            .div_scalar(keep)
            .cast(dtype);
    }
    let ones = vec![1.0; shape[0] * shape[1]];
    let mut values = vec![0.0; ones.len()];
    #[expect(clippy::cast_possible_truncation, reason = "the mask is in f32")]
    let settings = cpu::Dropout { probability: probability as f32, seed };
    cpu::dropout(&ones, shape[1], settings, &mut values);
    host::tensor(values, shape, device).cast(dtype)
}

/// Mixes the bits of `value`: the finaliser of `SplitMix64` (Steele, Lea and Flood, 2014) after its increment.
#[must_use]
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_keeps_its_share_and_mean_and_repeats_by_seed() {
        let device = Device::flex();
        let values = |seed| mask([300, 100], 0.2, seed, &device, DType::F32).into_data().try_to_vec::<f32>().unwrap();
        let first = values(1);
        let zeros = first.iter().filter(|&&v| v == 0.0).count();
        assert!((5_700..6_300).contains(&zeros), "{zeros} zeros of 30000");
        assert!(first.iter().all(|&v| v == 0.0 || v == 1.25));
        assert_eq!(first, values(1));
        assert_ne!(first, values(2));
    }
}
