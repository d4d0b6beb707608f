//! Matrix products of the plain operations: the one place that decides how precisely operands are multiplied.
//!
//! From compute capability 8.0 on, `CubeCL`'s products on tensor cores round operands in `f32` to TF32, which has 11
//! significant bits, and no setting of burn or `CubeCL` prevents it. An operand in `f32` is therefore split into two
//! numbers that TF32 holds, and a product of two such operands is three products (Ootomo and Yokota, 2022, without
//! their scaling): its terms are as exact as those of `f32`, 2^-22, instead of 2^-11.

use burn::tensor::{DType, Tensor};

/// How operands in `f32` are multiplied. Operands of fewer bits, `bf16` and `f16`, are exact in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum F32Products {
    /// In whatever precision the device multiplies.
    #[default]
    OfDevice,
    /// In three products of short numbers, on a device that rounds operands to TF32.
    Split,
}

/// A matrix, or a batch of them, as products take it.
#[derive(Clone, Debug)]
pub struct Operand<const D: usize> {
    high: Tensor<D>,
    /// What `high` lacks, where the values are split.
    low: Option<Tensor<D>>,
}

impl<const D: usize> Operand<D> {
    /// `x` as an operand of a product that is computed and returned in `dtype`.
    #[must_use]
    pub fn new(x: &Tensor<D>, dtype: DType, products: F32Products) -> Self {
        let is_long = x.dtype() == DType::F32 && dtype == DType::F32;
        let x = x.clone().cast(dtype);
        if !is_long || products == F32Products::OfDevice {
            return Self { high: x, low: None };
        }
        // The sum is rounded at the last bit of x, which leaves 11 bits of the addend. Every other operation is exact,
        // so it does not matter which of them a compiler contracts to a fused multiply-add.
        let high = (x.clone() + x.clone() * SHIFT.recip() - x.clone()) * SHIFT;
        Self { low: Some(x - high.clone()), high }
    }

    /// The transpose of every matrix.
    #[must_use]
    pub fn transpose(self) -> Self {
        Self { high: self.high.transpose(), low: self.low.map(Tensor::transpose) }
    }
}

/// Moves a number of 24 bits by 13, so that 11 are left.
const SHIFT: f64 = 8192.0;

/// The product as a device computes it, in the operands' type: on an NVIDIA GPU by cuBLASLt where it is found, which takes no
/// time to choose among kernels and to compile them; else burn's.
#[must_use]
pub fn device_product<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cuda-llvm")]
    if let Some(product) = super::cuda::kernels::products::matmul(&lhs, &rhs) {
        return product;
    }
    lhs.matmul(rhs)
}

/// The product of two operands of one type.
#[must_use]
pub fn product<const D: usize>(lhs: &Operand<D>, rhs: &Operand<D>) -> Tensor<D> {
    product_by(lhs, rhs, device_product)
}

/// The product of two matrices of one type, or of batches of them.
#[must_use]
pub fn matmul<const D: usize>(lhs: &Tensor<D>, rhs: &Tensor<D>, products: F32Products) -> Tensor<D> {
    let [lhs, rhs] = [lhs, rhs].map(|x| Operand::new(x, x.dtype(), products));
    product(&lhs, &rhs)
}

fn product_by<const D: usize>(
    lhs: &Operand<D>,
    rhs: &Operand<D>,
    multiply: impl Fn(Tensor<D>, Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let multiply = |lhs: &Tensor<D>, rhs: &Tensor<D>| multiply(lhs.clone(), rhs.clone());
    let high = multiply(&lhs.high, &rhs.high);
    let right = rhs.low.as_ref().map(|low| multiply(&lhs.high, low));
    let left = lhs.low.as_ref().map(|low| multiply(low, &rhs.high));
    match right.into_iter().chain(left).reduce(|right, left| right + left) {
        None => high,
        Some(low) => high + low,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::ops::host;

    const SIZE: usize = 64;

    /// Numbers of either sign, of many magnitudes.
    fn random(seed: u64) -> Tensor<2> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut draw = || rng.random_range(-1.0_f32..1.0) * 2.0_f32.powi(rng.random_range(-20..20));
        host::tensor((0..SIZE * SIZE).map(|_| draw()).collect(), [SIZE, SIZE], &Device::flex())
    }

    fn values(x: &Tensor<2>) -> Vec<f32> {
        x.clone().into_data().try_to_vec().unwrap()
    }

    /// The nearest number of 11 bits, of two equally near the larger: `cvt.rna.tf32.f32`.
    fn tf32(x: f32) -> f32 {
        f32::from_bits(x.to_bits().wrapping_add(1 << 12) & !0x1fff)
    }

    /// A product on tensor cores.
    fn multiply_tf32(lhs: Tensor<2>, rhs: Tensor<2>) -> Tensor<2> {
        let [lhs, rhs] =
            [lhs, rhs].map(|x| host::tensor(values(&x).into_iter().map(tf32).collect(), x.dims(), &Device::flex()));
        lhs.matmul(rhs)
    }

    /// The largest error of an element, relative to the sum of its terms' magnitudes.
    fn error(found: &Tensor<2>, lhs: &Tensor<2>, rhs: &Tensor<2>) -> f64 {
        let (found, lhs, rhs) = (values(found), values(lhs), values(rhs));
        let element = |index: usize| {
            let terms =
                (0..SIZE).map(|k| f64::from(lhs[index / SIZE * SIZE + k]) * f64::from(rhs[k * SIZE + index % SIZE]));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            (f64::from(found[index]) - sum).abs() / size
        };
        (0..SIZE * SIZE).map(element).fold(0.0, f64::max)
    }

    #[test]
    fn a_split_loses_no_bit_and_its_high_part_is_exact_in_tf32() {
        for seed in 0..4 {
            let x = random(seed);
            let Operand { high, low } = Operand::new(&x, DType::F32, F32Products::Split);
            let (high, low) = (values(&high), values(&low.unwrap()));
            for ((x, high), low) in values(&x).into_iter().zip(high).zip(low) {
                assert_eq!((tf32(high), high + low), (high, x));
                assert!(low.abs() <= x.abs() / 1024.0, "{low} of {x}");
            }
        }
        // Beside a power of two, where the last bit of the sum is not that of the number; and far from 1.
        for x in [2.0 - f32::EPSILON, 1.0, f32::MAX / 2.0, 1e-30, 0.0] {
            let one = host::tensor(vec![x, -x], [1, 2], &Device::flex());
            let Operand { high, low } = Operand::new(&one, DType::F32, F32Products::Split);
            let (high, low) = (values(&high), values(&low.unwrap()));
            assert_eq!((tf32(high[0]), high[0] + low[0], high[1] + low[1]), (high[0], x, -x));
        }
    }

    #[test]
    fn products_of_split_operands_are_those_of_f32_on_a_device_that_multiplies_tf32() {
        let (x, y) = (random(10), random(11));
        let by = |products| {
            let operand = |x: &Tensor<2>| Operand::new(x, DType::F32, products);
            product_by(&operand(&x), &operand(&y), multiply_tf32)
        };
        let (of_device, split) = (by(F32Products::OfDevice), by(F32Products::Split));
        assert!(error(&of_device, &x, &y) > 1e-4, "{}", error(&of_device, &x, &y));
        // Two operands lose 2^-23 each and their low parts' product 2^-22; and sums are rounded to f32.
        assert!(error(&split, &x, &y) < 6e-7, "{}", error(&split, &x, &y));
    }

    #[test]
    fn operands_of_few_bits_are_not_split() {
        let (x, y) = (random(12), random(13).cast(DType::BF16));
        let [long, short] = [&x, &y].map(|x| Operand::new(x, DType::F32, F32Products::Split));
        assert!(long.low.is_some() && short.low.is_none() && short.high.dtype() == DType::F32);
        let found = product_by(&long, &short.transpose(), multiply_tf32);
        assert!(error(&found, &x, &y.cast(DType::F32).transpose()) < 6e-7);
        assert!(Operand::new(&x, DType::BF16, F32Products::Split).low.is_none());
    }
}
