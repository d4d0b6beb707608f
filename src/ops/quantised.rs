//! A frozen matrix as codes, on any device: what [`cpu::Codes`] is to slices, this is to tensors.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{cpu, host};

/// The sixteen numbers of a 4-bit `NormalFloat` (Dettmers et al., 2023), in the order of their codes.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The numbers of the 4-bit float of bitsandbytes: sign, then 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4.
pub const FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    -0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// The integers from -8 to 7, in the order of their codes.
pub const INT4: [f32; 16] = [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// The numbers of 8-bit floats with four bits of exponent (E4M3, without infinities).
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a code is a byte")]
pub static FP8: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
        let bits = match (exponent, mantissa) {
            (15, 7) => f32::NAN.to_bits(),
            // Multiples of 2^-9.
            (0, _) => (mantissa as f32 / 512.0).to_bits(),
            _ => (exponent + 120) << 23 | mantissa << 20,
        };
        numbers[code] = f32::from_bits(bits | (code as u32 >> 7) << 31);
        code += 1;
    }
    numbers
};

/// What a code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Two codes to a byte, the first in the upper half; each an index of [`NF4`].
    Nf4,
    /// Two codes to a byte; each an index of [`FP4`].
    Fp4,
    /// Two codes to a byte; each an index of [`INT4`].
    Int4,
    /// A signed byte.
    Int8,
    /// A byte, an index of [`FP8`].
    Fp8,
}

impl std::fmt::Display for Coding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        })
    }
}

impl Coding {
    /// The numbers of codes of four bits.
    #[must_use]
    pub fn table(self) -> Option<&'static [f32; 16]> {
        match self {
            Self::Nf4 => Some(&NF4),
            Self::Fp4 => Some(&FP4),
            Self::Int4 => Some(&INT4),
            Self::Int8 | Self::Fp8 => None,
        }
    }
}

/// The scales of the blocks of a [`Quantised`], `[blocks]`.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes, one for a matrix")]
pub enum BlockScales {
    /// One number for each block.
    Plain(Tensor<1>),
    /// One number for each block, and another that is subtracted from what a code stands for.
    Shifted {
        /// `[blocks]`.
        scales: Tensor<1>,
        /// `[blocks]`.
        zeros: Tensor<1>,
    },
    /// Codes of eight bits, with a scale for every [`cpu::NESTED_LEN`] of them.
    Nested {
        /// `[blocks]`, bytes.
        codes: Tensor<1, Int>,
        /// The number of each code, `[256]`.
        table: Tensor<1>,
        /// `[blocks / 256]`, rounded up.
        scales: Tensor<1>,
        /// Added to every scale.
        offset: f32,
    },
}

/// A frozen matrix `[out_features, in_features]` as codes.
#[derive(Clone, Debug)]
pub struct Quantised {
    /// `[out_features, in_features]`.
    pub shape: [usize; 2],
    /// What the codes stand for.
    pub coding: Coding,
    /// The codes as bytes, in the order of the matrix.
    pub codes: Tensor<1, Int>,
    /// Numbers that share a scale.
    pub block_len: usize,
    /// The scales.
    pub scales: BlockScales,
}

/// Bytes as a tensor.
#[must_use]
pub fn bytes_tensor(bytes: burn::tensor::Bytes, device: &Device) -> Tensor<1, Int> {
    let shape = [bytes.len()];
    Tensor::from_data(TensorData::from_bytes(bytes, shape, DType::U8), (device, DType::U8))
}

impl Quantised {
    /// Bytes that codes and scales take.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let scales = match &self.scales {
            BlockScales::Plain(scales) => 4 * scales.dims()[0],
            BlockScales::Shifted { scales, .. } => 8 * scales.dims()[0],
            BlockScales::Nested { codes, table, scales, .. } => {
                codes.dims()[0] + 4 * (table.dims()[0] + scales.dims()[0])
            }
        };
        self.codes.dims()[0] + scales
    }

    /// The numbers of a matrix in host memory.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        const CHUNK: usize = 1 << 16;
        let codes = HostCodes::new(self);
        let mut numbers = vec![0.0; self.shape[0] * self.shape[1]];
        let chunks = numbers.par_chunks_mut(CHUNK).enumerate();
        chunks.for_each(|(chunk, numbers)| codes.get().decode(chunk * CHUNK, numbers));
        numbers
    }

    /// The matrix, decoded in plain tensor calls, `[out_features, in_features]` in `f32`.
    #[must_use]
    pub fn decoded(&self) -> Tensor<2> {
        let wide = |codes: &Tensor<1, Int>| codes.clone().cast(DType::I32);
        let device = self.codes.device();
        let len = self.shape[0] * self.shape[1];
        let values: Tensor<1> = match self.coding.table() {
            Some(table) => {
                let codes = wide(&self.codes);
                let pairs: Tensor<2, Int> =
                    Tensor::stack(vec![codes.clone().bitwise_right_shift_scalar(4), codes.bitwise_and_scalar(15)], 1);
                let table = Tensor::from_data(TensorData::new(table.to_vec(), [16]), (&device, DType::F32));
                table.select(0, pairs.flatten::<1>(0, 1).narrow(0, 0, len))
            }
            None if self.coding == Coding::Fp8 => {
                let table: Tensor<1> = Tensor::from_data(TensorData::new(FP8.to_vec(), [256]), (&device, DType::F32));
                table.select(0, wide(&self.codes))
            }
            // A byte above 127 is negative.
            None => {
                let codes = wide(&self.codes);
                let sign = codes.clone().bitwise_right_shift_scalar(7) * 256;
                (codes - sign).float().cast(DType::F32)
            }
        };
        let values = match &self.scales {
            BlockScales::Shifted { zeros, .. } => values - spread(zeros, self.block_len, len),
            _ => values,
        };
        let scales = match &self.scales {
            BlockScales::Plain(scales) | BlockScales::Shifted { scales, .. } => scales.clone(),
            BlockScales::Nested { codes, table, scales, offset } => {
                let codes = wide(codes);
                let num_blocks = codes.dims()[0];
                table.clone().select(0, codes) * spread(scales, cpu::NESTED_LEN, num_blocks) + *offset
            }
        };
        (values * spread(&scales, self.block_len, len)).reshape(self.shape)
    }
}

/// Every number `times` times, the first `len` of them.
fn spread(x: &Tensor<1>, times: usize, len: usize) -> Tensor<1> {
    let num = x.dims()[0];
    x.clone().reshape([num, 1]).expand([num, times]).reshape([num * times]).narrow(0, 0, len)
}

/// The slices of a [`Quantised`] in host memory.
pub(super) struct HostCodes {
    codes: FlexTensor,
    scales: HostScales,
    coding: Coding,
    block_len: usize,
    len: usize,
}

enum HostScales {
    Plain(host::HostView),
    Shifted { scales: host::HostView, zeros: host::HostView },
    Nested { codes: FlexTensor, table: host::HostView, scales: host::HostView, offset: f32 },
}

impl HostCodes {
    pub(super) fn new(matrix: &Quantised) -> Self {
        let scales = match &matrix.scales {
            BlockScales::Plain(scales) => HostScales::Plain(host::view(scales)),
            BlockScales::Shifted { scales, zeros } => {
                HostScales::Shifted { scales: host::view(scales), zeros: host::view(zeros) }
            }
            BlockScales::Nested { codes, table, scales, offset } => HostScales::Nested {
                codes: host::bytes(codes),
                table: host::view(table),
                scales: host::view(scales),
                offset: *offset,
            },
        };
        Self {
            codes: host::bytes(&matrix.codes),
            scales,
            coding: matrix.coding,
            block_len: matrix.block_len,
            len: matrix.shape[0] * matrix.shape[1],
        }
    }

    pub(super) fn get(&self) -> cpu::Codes<'_> {
        let codes = byte_slice(&self.codes);
        let packed = match self.coding.table() {
            Some(table) => cpu::Packed::Four(codes, table),
            None if self.coding == Coding::Fp8 => cpu::Packed::Table(codes, &FP8),
            None => cpu::Packed::Eight(bytemuck::cast_slice(codes)),
        };
        let scales = match &self.scales {
            HostScales::Plain(scales) => cpu::Scales::Plain(scales),
            HostScales::Shifted { scales, zeros } => cpu::Scales::Shifted { scales, zeros },
            HostScales::Nested { codes, table, scales, offset } => {
                cpu::Scales::Nested { codes: byte_slice(codes), table, scales, offset: *offset }
            }
        };
        cpu::Codes { packed, block_len: self.block_len, scales, len: self.len }
    }
}

fn byte_slice(tensor: &FlexTensor) -> &[u8] {
    let Some(bytes) = tensor.as_slice() else { panic!("codes are bytes") };
    bytes
}
