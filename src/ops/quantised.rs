//! A frozen matrix as codes, on any device: what [`cpu::Codes`] is to slices, this is to tensors.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use float8::F8E4M3;
use rayon::prelude::*;

use super::host::{HostBytes, HostView};
use super::{cpu, host};

/// The sixteen numbers of a 4-bit `NormalFloat` (Dettmers et al., 2023), in the order of their codes.
pub const NF4: [f32; 16] = [
    -1.0, -0.696_192_8, -0.525_073_05, -0.394_917_5, -0.284_441_38, -0.184_773_43, -0.091_050_036, 0.0, 0.079_580_3,
    0.160_930_2, 0.246_112_3, 0.337_915_24, 0.440_709_83, 0.562_617, 0.722_956_84, 1.0,
];

/// The numbers of the 4-bit float of bitsandbytes: sign, then 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4.
pub const FP4: [f32; 16] = [
    0.0, 0.005_208_333_5, 0.666_666_7, 1.0, 0.333_333_34, 0.5, 0.166_666_67, 0.25, -0.0, -0.005_208_333_5,
    -0.666_666_7, -1.0, -0.333_333_34, -0.5, -0.166_666_67, -0.25,
];

/// The numbers of 4-bit floats with two bits of exponent (E2M1).
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

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

/// The factor that turns numbers of at most `most` in size into [`FP8`] numbers, and the scale that turns those back: the largest
/// becomes 448.
#[must_use]
pub fn fp8_factors(most: f32) -> [f32; 2] {
    // No number whose reciprocal is infinite.
    [if most < 1e-30 { 0.0 } else { FP8[0x7e] / most }, most / FP8[0x7e]]
}

/// The code of the nearest of [`FP8`], of two equally near the even one; beyond them, of the largest.
#[must_use]
pub const fn fp8_code(x: f32) -> u8 {
    F8E4M3::from_f32(x).to_bits()
}

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
    /// Two codes to a byte; each an index of [`E2M1`]. A scale is a power of two.
    Mxfp4,
    /// Two codes to a byte; each an index of [`E2M1`]. A scale is an 8-bit float over a number of the matrix.
    Nvfp4,
}

impl std::fmt::Display for Coding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
        })
    }
}

impl Coding {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Nf4, Self::Fp4, Self::Int4, Self::Int8, Self::Fp8, Self::Mxfp4, Self::Nvfp4];

    /// The numbers of codes of four bits.
    #[must_use]
    pub fn table(self) -> Option<&'static [f32; 16]> {
        match self {
            Self::Nf4 => Some(&NF4),
            Self::Fp4 => Some(&FP4),
            Self::Int4 => Some(&INT4),
            Self::Mxfp4 | Self::Nvfp4 => Some(&E2M1),
            Self::Int8 | Self::Fp8 => None,
        }
    }
}

/// The scales of the blocks of a [`Quantised`].
pub type BlockScales<F = Tensor<1>, B = Tensor<1, Int>> = cpu::Scales<F, B>;

/// A frozen matrix `[out_features, in_features]` as codes; its parts are floats `F` and bytes `B`.
#[derive(Clone, Debug)]
pub struct Quantised<F = Tensor<1>, B = Tensor<1, Int>> {
    /// `[out_features, in_features]`.
    pub shape: [usize; 2],
    /// What the codes stand for.
    pub coding: Coding,
    /// The codes as bytes, in the order of the matrix.
    pub codes: B,
    /// Numbers that share a scale.
    pub block_len: usize,
    /// The scales.
    pub scales: BlockScales<F, B>,
}

impl<F, B> Quantised<F, B> {
    /// The matrix with other parts in the place of its own: floats come before bytes, codes last.
    pub fn map<'a, G, C>(
        &'a self,
        mut floats: impl FnMut(&'a F) -> G,
        mut bytes: impl FnMut(&'a B) -> C,
    ) -> Quantised<G, C> {
        let scales = self.scales.map(&mut floats, &mut bytes);
        let Self { shape, coding, ref codes, block_len, .. } = *self;
        Quantised { shape, coding, codes: bytes(codes), block_len, scales }
    }

    /// The lengths of its parts.
    #[must_use]
    pub fn lengths(&self) -> Quantised<usize, usize> {
        let Self { shape: [out_features, in_features], coding, block_len, .. } = *self;
        let len = out_features * in_features;
        let blocks = len.div_ceil(block_len.max(1));
        let scales = match self.scales {
            BlockScales::Plain(_) => BlockScales::Plain(blocks),
            BlockScales::Shifted { .. } => BlockScales::Shifted { scales: blocks, zeros: blocks },
            BlockScales::Nested { offset, .. } => {
                BlockScales::Nested { codes: blocks, table: 256, scales: blocks.div_ceil(cpu::NESTED_LEN), offset }
            }
        };
        let codes = if coding.table().is_some() { len.div_ceil(2) } else { len };
        Quantised { shape: self.shape, coding, codes, block_len, scales }
    }

    /// Bytes that codes and scales take.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let sum = Cell::new(0);
        let add = |num_bytes: usize| sum.set(sum.get() + num_bytes);
        self.lengths().map(|floats| add(4 * floats), |bytes| add(*bytes));
        sum.get()
    }
}

/// Bytes as a tensor.
#[must_use]
pub fn bytes_tensor(bytes: burn::tensor::Bytes, device: &Device) -> Tensor<1, Int> {
    let shape = [bytes.len()];
    Tensor::from_data(TensorData::from_bytes(bytes, shape, DType::U8), (device, DType::U8))
}

impl Quantised {
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

    /// The matrix, decoded in plain tensor calls and rounded to `dtype`, `[out_features, in_features]`.
    #[must_use]
    pub fn decoded(&self, dtype: DType) -> Tensor<2> {
        let Self { shape, block_len, .. } = *self;
        let values = first(self.values().reshape([-1]), shape[0] * shape[1]);
        // Together, before the shape changes: a fused kernel ends there.
        let scale = |x: Tensor<2>, scales: Tensor<2>| (x * scales).cast(dtype);
        let scaled = match &self.scales {
            BlockScales::Plain(scales) => by_block(values, scales, block_len, scale),
            BlockScales::Shifted { scales, zeros } => {
                by_block(by_block(values, zeros, block_len, Tensor::sub), scales, block_len, scale)
            }
            BlockScales::Nested { codes, table, scales, offset } => {
                let inner = table.clone().select(0, codes.clone());
                let scales = by_block(inner, scales, cpu::NESTED_LEN, |x, scales| x * scales + *offset);
                by_block(values, &scales, block_len, scale)
            }
        };
        scaled.reshape(shape)
    }

    /// What the codes stand for, those of a byte in a row.
    fn values(&self) -> Tensor<2> {
        let table = table(self.coding, &self.codes.device());
        table.reshape([256, -1]).select(0, self.codes.clone())
    }
}

/// What the codes of each byte stand for, byte after byte: `[256 codes of a byte]`. It is sent to a device once: a copy for each
/// product would have the host wait for the device. In rows, which CUDA's memory holds apart, kernels would have to copy it.
pub(super) fn table(coding: Coding, device: &Device) -> Tensor<1> {
    static TABLES: Mutex<Vec<(Device, Coding, Tensor<1>)>> = Mutex::new(Vec::new());
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    // Devices with and without autodiff are equal, and their tensors are not.
    let is_here = |on: &Device| on == device && on.is_autodiff() == device.is_autodiff();
    if let Some((.., table)) = tables.iter().find(|(on, of, _)| is_here(on) && *of == coding) {
        return table.clone();
    }
    let numbers: Vec<f32> = match (coding.table(), coding) {
        (Some(table), _) => (0..256).flat_map(|byte| [table[byte >> 4], table[byte & 15]]).collect(),
        (None, Coding::Fp8) => FP8.to_vec(),
        // A byte above 127 is negative.
        (None, _) => (0..=255u8).map(|byte| f32::from(byte.cast_signed())).collect(),
    };
    let shape = [numbers.len()];
    let table = Tensor::from_data(TensorData::new(numbers, shape), (device, DType::F32));
    tables.push((device.clone(), coding, table.clone()));
    table
}

/// `operation` on the numbers of each block of `block_len` and the block's number of `of_blocks`.
fn by_block(
    x: Tensor<1>,
    of_blocks: &Tensor<1>,
    block_len: usize,
    operation: impl Fn(Tensor<2>, Tensor<2>) -> Tensor<2>,
) -> Tensor<1> {
    let ([len], [num_blocks]) = (x.dims(), of_blocks.dims());
    let missing = num_blocks * block_len - len;
    let padding = (missing > 0).then(|| Tensor::zeros([missing], (&x.device(), x.dtype())));
    let whole = padding.into_iter().fold(x, |x, padding| Tensor::cat(vec![x, padding], 0));
    let result = operation(whole.reshape([num_blocks, block_len]), of_blocks.clone().reshape([num_blocks, 1]));
    first(result.reshape([-1]), len)
}

fn first(x: Tensor<1>, len: usize) -> Tensor<1> {
    if x.dims()[0] == len { x } else { x.narrow(0, 0, len) }
}

/// A [`Quantised`] in host memory.
pub(super) type HostCodes = Quantised<HostView, HostBytes>;

impl HostCodes {
    pub(super) fn new(matrix: &Quantised) -> Self {
        matrix.map(host::view, host::bytes)
    }

    pub(super) fn get(&self) -> cpu::Codes<'_> {
        let packed = match self.coding.table() {
            Some(table) => cpu::Packed::Four(&self.codes, table),
            None if self.coding == Coding::Fp8 => cpu::Packed::Table(&self.codes, &FP8),
            None => cpu::Packed::Eight(bytemuck::cast_slice(&self.codes)),
        };
        let scales = self.scales.map(|floats| &**floats, |bytes| &**bytes);
        cpu::Codes { packed, block_len: self.block_len, scales, len: self.shape[0] * self.shape[1] }
    }
}
