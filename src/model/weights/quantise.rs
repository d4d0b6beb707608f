//! Quantises a matrix while it is read, block by block, to the codes of bitsandbytes, or to E4M3 numbers.

use burn::tensor::{Bytes, Device, Tensor, TensorData, f16};
use rayon::prelude::*;

use super::convert::{BLOCK_ELEMENTS, Overflow};
use crate::ops::cpu::{NESTED_LEN, Nearest, dynamic_table};
use crate::ops::host;
use crate::ops::quantised::{BlockScales, Coding, Quantised, bytes_tensor, fp8_code, fp8_factors};

/// How the frozen linear layers are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    /// What a code stands for.
    pub coding: Coding,
    /// Whether the scales of four-bit codes are codes of eight bits themselves.
    pub nested: bool,
}

impl std::fmt::Display for Quantisation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.coding, if self.is_nested() { " with quantised scales" } else { "" })
    }
}

impl Quantisation {
    /// Numbers that share a scale in four bits, as bitsandbytes has it by default.
    pub const BLOCK_LEN: usize = 64;

    /// What becomes of a matrix `[out_features, in_features]`.
    #[must_use]
    pub fn form(self, shape: [usize; 2]) -> Quantised<(), ()> {
        let block_len = match self.coding {
            Coding::Int8 => shape[1],
            Coding::Fp8 => shape[0] * shape[1],
            _ => Self::BLOCK_LEN,
        };
        let scales = if self.is_nested() { BlockScales::NESTED } else { BlockScales::Plain(()) };
        Quantised { shape, coding: self.coding, codes: (), block_len, scales }
    }

    /// Quantises a matrix `[out_features, in_features]`. `fill` writes at most 2,048 of its numbers, starting
    /// at the element that it gets.
    ///
    /// # Errors
    /// Where a number of an `int8` matrix is beyond the range of `f16`, through which bitsandbytes takes it.
    pub fn quantise(
        self,
        shape: [usize; 2],
        device: &Device,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<Quantised, Overflow> {
        // Random numbers in a format that is only read: one of the same size.
        let coding = match self.coding {
            Coding::Int4 | Coding::Mxfp4 | Coding::Nvfp4 => Coding::Nf4,
            coding => coding,
        };
        let (codes, scales) = match coding.table() {
            Some(table) => four_bits(shape[0] * shape[1], table, fill),
            None if coding == Coding::Fp8 => fp8(shape[0] * shape[1], fill),
            None => eight_bits(shape, fill)?,
        };
        let block_len = self.form(shape).block_len;
        let scales = if self.is_nested() { nest(&scales, device) } else { plain(scales, device) };
        Ok(Quantised { shape, coding, codes: bytes_tensor(Bytes::from_elems(codes), device), block_len, scales })
    }

    fn is_nested(self) -> bool {
        self.nested && matches!(self.coding, Coding::Nf4 | Coding::Fp4)
    }
}

fn plain(scales: Vec<f32>, device: &Device) -> BlockScales {
    let shape = [scales.len()];
    BlockScales::Plain(host::tensor(scales, shape, device))
}

/// Codes two to a byte, the first in the upper half, and the largest absolute number of each block.
fn four_bits(len: usize, table: &[f32; 16], fill: impl Fn(usize, &mut [f32]) + Sync) -> (Vec<u8>, Vec<f32>) {
    let nearest = Nearest::new(table);
    let (mut codes, mut scales) = (vec![0u8; len.div_ceil(2)], vec![0f32; len.div_ceil(Quantisation::BLOCK_LEN)]);
    let pieces =
        codes.par_chunks_mut(BLOCK_ELEMENTS / 2).zip(scales.par_chunks_mut(BLOCK_ELEMENTS / Quantisation::BLOCK_LEN));
    pieces.enumerate().for_each(|(piece, (codes, scales))| {
        let first = piece * BLOCK_ELEMENTS;
        let mut wide = [0f32; BLOCK_ELEMENTS];
        fill(first, &mut wide[..BLOCK_ELEMENTS.min(len - first)]);
        for ((scale, codes), wide) in scales
            .iter_mut()
            .zip(codes.chunks_mut(Quantisation::BLOCK_LEN / 2))
            .zip(wide.chunks(Quantisation::BLOCK_LEN))
        {
            *scale = wide.iter().fold(0.0, |most, x| x.abs().max(most));
            let factor = 1.0 / scale.max(1e-38);
            let code = |x: f32| nearest.code((x * factor).clamp(-1.0, 1.0));
            for (byte, pair) in codes.iter_mut().zip(wide.as_chunks::<2>().0) {
                *byte = code(pair[0]) << 4 | code(pair[1]);
            }
        }
    });
    (codes, scales)
}

/// A signed byte for each number, and the number that 1 stands for in each row.
fn eight_bits(
    [out_features, in_features]: [usize; 2],
    fill: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(Vec<u8>, Vec<f32>), Overflow> {
    let (mut codes, mut scales) = (vec![0u8; out_features * in_features], vec![0f32; out_features]);
    let rows = codes.par_chunks_mut(in_features.max(1)).zip(&mut scales).enumerate();
    rows.try_for_each_init(
        || vec![0f32; in_features],
        |wide, (row, (codes, scale))| {
            for (piece, wide) in wide.chunks_mut(BLOCK_ELEMENTS).enumerate() {
                fill(row * in_features + piece * BLOCK_ELEMENTS, wide);
                wide.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            }
            let most = wide.iter().fold(0.0f32, |most, x| x.abs().max(most));
            if most.is_infinite() {
                return Err(Overflow);
            }
            *scale = most / 127.0;
            // As PyTorch divides a number by a tensor: by the reciprocal.
            let factor = if most > 0.0 { 127.0 * (1.0 / most) } else { 0.0 };
            for (code, x) in codes.iter_mut().zip(wide) {
                #[expect(clippy::cast_possible_truncation, reason = "at most 127 by the factor")]
                let rounded = (*x * factor).round_ties_even() as i8;
                *code = rounded.cast_unsigned();
            }
            Ok(())
        },
    )?;
    Ok((codes, scales))
}

/// An E4M3 number for each number, and what 1 stands for in all of them. Each number is read twice.
fn fp8(len: usize, fill: impl Fn(usize, &mut [f32]) + Sync) -> (Vec<u8>, Vec<f32>) {
    let piece = |index: usize, len: usize| {
        let mut wide = [0f32; BLOCK_ELEMENTS];
        fill(index * BLOCK_ELEMENTS, &mut wide[..len]);
        wide
    };
    let mut codes = vec![0u8; len];
    let pieces = codes.par_chunks(BLOCK_ELEMENTS).enumerate();
    let largest =
        pieces.map(|(index, codes)| piece(index, codes.len()).iter().fold(0.0f32, |most, x| x.abs().max(most)));
    let [factor, scale] = fp8_factors(largest.reduce(|| 0.0, f32::max));
    codes.par_chunks_mut(BLOCK_ELEMENTS).enumerate().for_each(|(index, codes)| {
        let numbers = piece(index, codes.len());
        codes.iter_mut().zip(numbers).for_each(|(code, x)| *code = fp8_code(x * factor));
    });
    (codes, vec![scale])
}

/// Scales as codes of eight bits of their distance from the mean.
fn nest(scales: &[f32], device: &Device) -> BlockScales {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a mean of f32 numbers")]
    let offset = (scales.iter().map(|scale| f64::from(*scale)).sum::<f64>() / scales.len().max(1) as f64) as f32;
    let table = dynamic_table(true);
    let nearest = Nearest::new(&table);
    let (codes, outer): (Vec<Vec<u8>>, Vec<f32>) = scales
        .par_chunks(NESTED_LEN)
        .map(|scales| {
            let most = scales.iter().fold(0.0f32, |most, scale| (scale - offset).abs().max(most));
            let factor = 1.0 / most.max(1e-38);
            let codes = scales.iter().map(|scale| nearest.code(((scale - offset) * factor).clamp(-1.0, 1.0)));
            (codes.collect::<Vec<u8>>(), most)
        })
        .unzip();
    let num_outer = outer.len();
    BlockScales::Nested {
        codes: bytes_tensor(Bytes::from_elems(codes.concat()), device),
        table: Tensor::from_data(TensorData::new(table.to_vec(), [256]), device),
        scales: host::tensor(outer, [num_outer], device),
        offset,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::Int;
    use safetensors::SafeTensors;

    use super::*;
    use crate::device::Dtype;
    use crate::model::weights::convert;
    use crate::ops::linear::Matrix;
    use crate::ops::quantised::FP8;

    const SHAPE: [usize; 2] = [70, 257];
    const KINDS: [(&str, Coding); 3] = [("nf4", Coding::Nf4), ("fp4", Coding::Fp4), ("int8", Coding::Int8)];

    fn quantised(weight: &[u8], coding: Coding, nested: bool) -> Quantised {
        let fill = |first: usize, wide: &mut [f32]| {
            convert::widen(&weight[2 * first..2 * (first + wide.len())], Dtype::Bf16, wide);
        };
        Quantisation { coding, nested }.quantise(SHAPE, &Device::flex(), fill).unwrap()
    }

    fn bytes(codes: &Tensor<1, Int>) -> Vec<u8> {
        codes.to_data().try_to_vec().unwrap()
    }

    fn floats(numbers: &Tensor<1>) -> Vec<f32> {
        numbers.to_data().try_to_vec().unwrap()
    }

    #[test]
    fn codes_and_scales_are_those_of_bitsandbytes_to_the_bit() {
        let golden = SafeTensors::deserialize(include_bytes!("../../../tests/golden/quantised.safetensors")).unwrap();
        let data = |name: &str| golden.tensor(name).unwrap().data().to_vec();
        let numbers = |name: &str| convert::to_f32(&data(name), Dtype::F32);
        let weight = data("weight");
        for (name, coding) in KINDS {
            let found = quantised(&weight, coding, false);
            let expected = data(&format!("{name}.codes"));
            let codes = bytes(&found.codes);
            let first = codes.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!((first, codes.len()), (None, expected.len()), "{name}");
            let BlockScales::Plain(scales) = &found.scales else { panic!("{name}: nested") };
            if coding == Coding::Int8 {
                let expected: Vec<f32> = numbers("int8.scb").iter().map(|most| most / 127.0).collect();
                assert_eq!(floats(scales), expected);
                continue;
            }
            assert_eq!(floats(scales), numbers(&format!("{name}.absmax")), "{name}");
            let found = quantised(&weight, coding, true);
            let BlockScales::Nested { codes, table, scales, offset } = &found.scales else { panic!("{name}: plain") };
            assert_eq!(floats(table), numbers("nested_table"));
            assert_eq!([*offset], numbers(&format!("{name}.offset"))[..]);
            assert_eq!(floats(scales), numbers(&format!("{name}.nested_absmax")), "{name}");
            assert!(bytes(codes) == data(&format!("{name}.nested_codes")), "{name}");
            let decoded: Vec<f32> = found.decoded(Dtype::F32.into()).into_data().try_to_vec().unwrap();
            let some: Vec<f32> = decoded.into_iter().step_by(37).collect();
            assert_eq!(some, numbers(&format!("{name}.decoded")), "{name}");
        }
    }

    #[test]
    fn numbers_of_eight_bits_are_the_nearest_and_their_largest_stays() {
        let golden = SafeTensors::deserialize(include_bytes!("../../../tests/golden/quantised.safetensors")).unwrap();
        let weight = golden.tensor("weight").unwrap().data().to_vec();
        let numbers = convert::to_f32(&weight, Dtype::Bf16);
        let most = numbers.iter().fold(0.0f32, |most, x| x.abs().max(most));
        let found = quantised(&weight, Coding::Fp8, false);
        let BlockScales::Plain(scales) = &found.scales else { panic!("nested") };
        assert_eq!((floats(scales), found.block_len), (vec![most / 448.0], numbers.len()));
        for (code, x) in bytes(&found.codes).into_iter().zip(&numbers) {
            let away = |code: u8| (f64::from(FP8[usize::from(code)]) - f64::from(x * (448.0 / most))).abs();
            let nearest = (0..=255u8).filter(|code| code & 0x7f != 0x7f).map(away).fold(f64::INFINITY, f64::min);
            assert_eq!(away(code), nearest, "{code:#x} for {x}");
        }
        let decoded: Vec<f32> = found.decoded(Dtype::F32.into()).into_data().try_to_vec().unwrap();
        assert!(
            decoded.iter().zip(&numbers).all(|(found, x)| (found - x).abs() <= x.abs() / 16.0 + most / 448.0 / 1024.0)
        );
        // Ties go to the even code: 1 is 0x38, and a step after it 1/8.
        assert_eq!([1.0625, 1.1875, -1.0625, 500.0, 1e-9].map(fp8_code), [0x38, 0x3a, 0xb8, 0x7e, 0]);
    }

    #[test]
    fn the_bytes_are_those_that_were_announced() {
        let weight = vec![0u8; 2 * SHAPE[0] * SHAPE[1]];
        for (name, coding) in KINDS.into_iter().chain([("fp8", Coding::Fp8)]) {
            for nested in [false, true] {
                let found = quantised(&weight, coding, nested);
                let parts = Matrix::Quantised(Arc::new(found.clone())).parts();
                let num_bytes = parts.iter().map(|part| part.len()).sum::<usize>();
                assert_eq!(
                    [found.num_bytes(), Quantisation { coding, nested }.form(SHAPE).num_bytes()],
                    [num_bytes; 2],
                    "{name}"
                );
                let decoded: Vec<f32> = found.decoded(Dtype::F32.into()).into_data().try_to_vec().unwrap();
                assert!(decoded.iter().all(|x| x.abs() < 1e-6), "{name}: zeros");
            }
        }
    }
}
