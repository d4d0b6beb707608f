//! Dropout in plain tensor calls.

use burn::tensor::{Bool, DType, Int, Tensor};

use crate::ops::cpu::{self, Dropout};

pub(crate) fn plain_dropout(x: &Tensor<2>, settings: Dropout) -> Tensor<2> {
    PlainDropout::new(x, settings).apply(x)
}

/// The kernel's dropout in plain tensor calls.
///
/// Only a few numbers a row and a column come from the host. The device's own generator would have to be seeded for
/// every mask, and burn's fusion runs all waiting work before it passes a seed on.
pub(crate) struct PlainDropout {
    settings: Dropout,
    /// Both keys of each row, `[tokens, 1]`.
    keys: [Tensor<2, Int>; 2],
    /// The first step of the hash of each column, `[1, width]`.
    columns: Tensor<2, Int>,
}

impl PlainDropout {
    /// The dropout of tensors like `x`.
    pub(crate) fn new(x: &Tensor<2>, settings: Dropout) -> Self {
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
    pub(crate) fn hash(&self) -> Tensor<2, Int> {
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
    pub(crate) fn apply(&self, x: &Tensor<2>) -> Tensor<2> {
        let dtype = x.dtype();
        // Scaled in f32, because the factor itself would be rounded in bf16.
        (x.clone().cast(DType::F32) * self.settings.factor()).mask_fill(self.dropped(), 0.0).cast(dtype)
    }
}
