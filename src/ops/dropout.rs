//! Dropout whose mask is a function of a seed and the element's place: nothing is kept for the backward or for a
//! resumed run, and every device has the same masks.

use burn::tensor::Tensor;

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

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::host;
    use crate::ops::place::place_on;
    use crate::ops::plain::dropout::PlainDropout;

    #[test]
    fn plain_calls_drop_and_scale_what_the_kernel_does() {
        let (rows, width) = (70, 333);
        let x: Vec<f32> = (0..rows * width).map(|i| (i * 7919 % 1013) as f32 - 506.5).collect();
        let x = host::tensor(x, [rows, width], &Device::flex());
        for (probability, seed) in [(0.05, 1), (0.5, u64::MAX), (0.9, 1 << 40), (1.0 - 1e-7, 3)] {
            let settings = Dropout { probability, seed, first_row: 5 };
            let found = PlainDropout::new(&x, settings).apply(&x).into_data();
            assert_eq!(found, dropout(place_on(DeviceKind::Cpu), &x, settings).into_data(), "{settings:?}");
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
