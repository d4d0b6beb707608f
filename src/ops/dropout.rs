//! Dropout whose mask is a function of a seed and the element's place: nothing is kept for the backward or for a
//! resumed run, and every device has the same masks.

use burn::tensor::{Bool, DType, Int, Tensor};

use super::cpu;
use super::kernels::Place;

pub use super::cpu::{Dropout, mix};

/// Inverted dropout; applied to an upstream gradient, the gradient.
///
/// # Shapes
/// `x`: `[tokens, width]`. Returns the same, in the type of `x`.
#[must_use]
pub fn dropout(place: Place, x: &Tensor<2>, settings: Dropout) -> Tensor<2> {
    place.dropout(x, settings)
}

/// [`dropout`] in plain tensor calls.
#[must_use]
pub fn plain_dropout(x: &Tensor<2>, settings: Dropout) -> Tensor<2> {
    PlainDropout::new(x, settings).apply(x)
}

/// The kernel's dropout in plain tensor calls.
///
/// Only a few numbers a row and a column come from the host. The device's own generator would have to be seeded for
/// every mask, and burn's fusion runs all waiting work before it passes a seed on.
pub(super) struct PlainDropout {
    settings: Dropout,
    /// Both keys of each row, `[tokens, 1]`.
    keys: [Tensor<2, Int>; 2],
    /// The first step of the hash of each column, `[1, width]`.
    columns: Tensor<2, Int>,
}

impl PlainDropout {
    /// The dropout of tensors like `x`.
    pub(super) fn new(x: &Tensor<2>, settings: Dropout) -> Self {
        let ([tokens, width], device) = (x.dims(), x.device());
        let words = |values: Vec<i32>| Tensor::<1, Int>::from_data(values.as_slice(), (&device, DType::I32));
        let of_rows = |key: usize| (0..tokens).map(|row| settings.keys(row)[key].cast_signed()).collect();
        #[expect(clippy::cast_possible_truncation, reason = "as in the kernel")]
        let of_columns = (0..width).map(|column| (column as u32).wrapping_mul(cpu::FACTORS[0]).cast_signed()).collect();
        let keys = [0, 1].map(|key| words(of_rows(key)).unsqueeze_dim(1));
        Self { settings, keys, columns: words(of_columns).unsqueeze_dim(0) }
    }

    /// Marks what is dropped, `[tokens, width]`.
    fn dropped(&self) -> Tensor<2, Bool> {
        // With the highest bit of both inverted, signed numbers compare like unsigned ones.
        let threshold = self.settings.threshold().cast_signed() ^ i32::MIN;
        self.hash().bitwise_xor_scalar(i32::MIN).lower_elem(threshold)
    }

    /// The kernel's hash, `[tokens, width]`, in signed integers.
    ///
    /// Every call from the first on gives the full shape, so that all of them become one kernel.
    pub(super) fn hash(&self) -> Tensor<2, Int> {
        // A shift repeats the sign, which the bits of an unsigned shift leave out.
        let shifted = |h: &Tensor<2, Int>, bits: u32| {
            h.clone()
                .bitwise_right_shift_scalar(bits.cast_signed())
                .bitwise_and_scalar((u32::MAX >> bits).cast_signed())
        };
        let [key, other_key] = self.keys.clone();
        let h = self.columns.clone().bitwise_xor(key);
        let h = h.clone().bitwise_xor(shifted(&h, 16)).mul_scalar(cpu::FACTORS[1].cast_signed());
        let h = h.clone().bitwise_xor(other_key).bitwise_xor(shifted(&h, 15)).mul_scalar(cpu::FACTORS[2].cast_signed());
        h.clone().bitwise_xor(shifted(&h, 16))
    }

    /// `x` with what is dropped set to zero, and the rest scaled.
    pub(super) fn apply(&self, x: &Tensor<2>) -> Tensor<2> {
        let dtype = x.dtype();
        // Scaled in f32, because the factor itself would be rounded in bf16.
        (x.clone().cast(DType::F32) * self.settings.factor()).mask_fill(self.dropped(), 0.0).cast(dtype)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::{host, kernels};

    #[test]
    fn plain_calls_drop_and_scale_what_the_kernel_does() {
        let (rows, width) = (70, 333);
        let x: Vec<f32> = (0..rows * width).map(|i| (i * 7919 % 1013) as f32 - 506.5).collect();
        let x = host::tensor(x, [rows, width], &Device::flex());
        for (probability, seed) in [(0.05, 1), (0.5, u64::MAX), (0.9, 1 << 40), (1.0 - 1e-7, 3)] {
            let settings = Dropout { probability, seed, first_row: 5 };
            let found = PlainDropout::new(&x, settings).apply(&x).into_data();
            assert_eq!(found, dropout(kernels::place_on(DeviceKind::Cpu), &x, settings).into_data(), "{settings:?}");
        }
    }

    #[test]
    fn in_bf16_what_stays_is_scaled_by_the_exact_factor() {
        let x = Tensor::<2>::full([64, 64], 7.0, (&Device::flex(), DType::BF16));
        let settings = Dropout { probability: 0.1, seed: 5, first_row: 0 };
        let y = PlainDropout::new(&x, settings).apply(&x);
        assert_eq!(y.dtype(), DType::BF16);
        // 7 / 0.9 in bf16; times the factor in bf16 it would be 7.75.
        let y: Vec<f32> = y.cast(DType::F32).into_data().try_to_vec().unwrap();
        assert!(y.iter().all(|y| [0.0, 7.781_25].contains(y)));
        let stay = y.iter().filter(|y| **y != 0.0).count();
        assert!((3600..3780).contains(&stay), "{stay} of 4096");
    }
}
