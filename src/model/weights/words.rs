//! Matrices that GPTQ, AWQ and compressed-tensors have quantised: codes in 32-bit words, and a scale and a zero for each group
//! of inputs.

use std::sync::Arc;

use burn::tensor::{Bytes, Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype::I32;

use super::convert::{self, Overflow};
use super::files::{StoredTensor, WeightFiles};
use super::pages::of_bytes;
use crate::device::Dtype;
use crate::ops::host;
use crate::ops::linear::Matrix;
use crate::ops::quantised::{BlockScales, Coding, Quantised, bytes_tensor};
use crate::spec::{Packer, Words};

/// Where AWQ has the code of each of eight outputs in their word.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Fewest numbers with a scale of their own that are kept as codes.
const LEAST_BLOCK: usize = 8;

/// A matrix of words that was found in the files and is sound.
pub(super) struct StoredWords<'a> {
    shape: [usize; 2],
    words: Words,
    codes: &'a StoredTensor,
    /// Absent where all are the half of the codes.
    zeros: Option<&'a StoredTensor>,
    scales: (&'a StoredTensor, Dtype),
    /// The group of each input.
    groups: Vec<usize>,
}

/// Names of the tensors that a module may have.
pub(super) fn tensors_of(module: &str, packer: Packer) -> Vec<String> {
    parts(packer).into_iter().chain(["weight_shape"]).map(|part| format!("{module}.{part}")).collect()
}

/// Names of codes, zeros, scales, and the group of each input.
fn parts(packer: Packer) -> [&'static str; 4] {
    match packer {
        Packer::Gptq | Packer::Awq => ["qweight", "qzeros", "scales", "g_idx"],
        Packer::CompressedTensors => ["weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"],
    }
}

/// Finds the tensors of a module.
pub(super) fn find<'a>(
    files: &'a WeightFiles,
    module: &str,
    shape: [usize; 2],
    words: Words,
) -> Result<StoredWords<'a>, String> {
    let [out_features, in_features] = shape;
    let [codes, zeros, scales, order] = parts(words.packer).map(|part| format!("{module}.{part}"));
    let per_word = words.per_word();
    if shape.iter().any(|size| !size.is_multiple_of(per_word)) {
        return Err(format!("misshapen: `{module}` is {shape:?}, expected multiples of {per_word}"));
    }
    let group_len = words.group_len.unwrap_or(in_features);
    if words.packer == Packer::CompressedTensors && !in_features.is_multiple_of(group_len) {
        return Err(format!("`{module}` has {in_features} inputs, which are no whole groups of {group_len}"));
    }
    let num_groups = in_features.div_ceil(group_len);
    let (zeros_shape, scales_shape) = ([num_groups, out_features / per_word], [num_groups, out_features]);
    let flipped = |[rows, columns]: [usize; 2]| [columns, rows];
    let (packed, zeros_shape, scales_shape) = match words.packer {
        Packer::Gptq => ([in_features / per_word, out_features], zeros_shape, scales_shape),
        Packer::Awq => ([in_features, out_features / per_word], zeros_shape, scales_shape),
        Packer::CompressedTensors => {
            ([out_features, in_features / per_word], flipped(zeros_shape), flipped(scales_shape))
        }
    };
    let codes = files.part(&codes, &packed, I32)?;
    // The files decide, whatever the configuration says of zeros.
    let has_zeros =
        !(words.is_symmetric && words.packer == Packer::CompressedTensors) || files.tensors().contains_key(&zeros);
    let zeros = has_zeros.then(|| files.part(&zeros, &zeros_shape, I32)).transpose()?;
    let scales = files.stored(&scales, &scales_shape)?;
    let groups: Vec<usize> = if files.tensors().contains_key(&order) {
        numbers(files, files.part(&order, &[in_features], I32)?).map(|group| group as usize).collect()
    } else {
        (0..in_features).map(|input| input / group_len).collect()
    };
    match groups.iter().find(|group| **group >= num_groups) {
        Some(group) => Err(format!("`{order}` names group {group} of {num_groups}")),
        None => Ok(StoredWords { shape, words, codes, zeros, scales, groups }),
    }
}

/// The words of a tensor.
fn numbers<'a>(files: &'a WeightFiles, stored: &StoredTensor) -> impl Iterator<Item = u32> + 'a {
    files.in_place(stored).as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

impl StoredWords<'_> {
    /// The matrix as codes; in `dtype`, where neighbouring inputs are of different groups, as GPTQ orders them by activation.
    pub(super) fn read(self, files: &WeightFiles, dtype: Dtype, device: &Device) -> Result<Matrix, Overflow> {
        let unpacked = Unpacked {
            coding: if self.words.bits == 4 { Coding::Int4 } else { Coding::Int8 },
            codes: self.codes(files),
            zeros: self.zeros(files),
            scales: self.by_group(convert::to_f32(&files.bytes(self.scales.0), self.scales.1)),
            shape: self.shape,
            groups: self.groups,
        };
        [self.codes, self.scales.0].into_iter().chain(self.zeros).for_each(|stored| files.release(stored));
        match unpacked.block_len() {
            block_len if block_len < LEAST_BLOCK => unpacked.dense(dtype, device).map(Matrix::Dense),
            block_len => Ok(Matrix::Quantised(Arc::new(unpacked.in_blocks(block_len, device)))),
        }
    }

    /// What each output has of each group, group after group.
    fn by_group<T: Copy>(&self, numbers: Vec<T>) -> Vec<T> {
        if self.words.packer != Packer::CompressedTensors {
            return numbers;
        }
        let num_groups = self.scales.0.shape[1];
        (0..num_groups).flat_map(|group| numbers.iter().skip(group).step_by(num_groups)).copied().collect()
    }

    /// Codes row after row: of four bits two to a byte, the first in the upper half; of eight bits less 128.
    fn codes(&self, files: &WeightFiles) -> Vec<u8> {
        let [out_features, in_features] = self.shape;
        let words = files.in_place(self.codes).as_chunks::<4>().0;
        let unpacked = |byte: u8| if self.words.bits == 4 { byte.rotate_left(4) } else { byte ^ 128 };
        if self.words.packer == Packer::CompressedTensors {
            return files.bytes(self.codes).par_iter().map(|byte| unpacked(*byte)).collect();
        }
        let row_bytes = in_features * self.words.bits / 8;
        let mut codes = vec![0u8; out_features * row_bytes];
        // Eight rows at a time: words of neighbouring outputs are neighbours.
        codes.par_chunks_mut(8 * row_bytes).enumerate().for_each(|(eight, codes)| {
            if self.words.packer == Packer::Awq {
                let word = |input: usize| u32::from_le_bytes(words[input * out_features / 8 + eight]);
                for pair in 0..row_bytes {
                    let (first, second) = (word(2 * pair), word(2 * pair + 1));
                    for (row, place) in codes.chunks_mut(row_bytes).zip(AWQ_PLACES) {
                        let code = |word: u32| (word >> (4 * place) & 15) as u8;
                        row[pair] = code(first) << 4 | code(second);
                    }
                }
                return;
            }
            for four in 0..row_bytes / 4 {
                let words = &words[four * out_features + 8 * eight..];
                for (row, word) in codes.chunks_mut(row_bytes).zip(words) {
                    row[4 * four..4 * four + 4].copy_from_slice(&word.map(unpacked));
                }
            }
        });
        codes
    }

    /// The zero of each group and output, less the half of all codes.
    fn zeros(&self, files: &WeightFiles) -> Vec<f32> {
        let Words { bits, packer, zeros_less_one, .. } = self.words;
        let Some(zeros) = self.zeros else { return vec![0.0; self.scales.0.shape.iter().product()] };
        let half = 1i32 << (bits - 1);
        let of_word = |word: u32| {
            (0..self.words.per_word()).map(move |output| {
                let place = if packer == Packer::Awq { AWQ_PLACES[output] } else { output };
                let code = word >> (bits * place) & ((1 << bits) - 1);
                code.cast_signed() + i32::from(zeros_less_one) - half
            })
        };
        #[expect(clippy::cast_precision_loss, reason = "at most 256")]
        let zeros = self
            .by_group(numbers(files, zeros).collect())
            .into_iter()
            .flat_map(of_word)
            .map(|zero| zero as f32)
            .collect();
        zeros
    }
}

/// Codes in the order of the matrix, and `[groups, out_features]` scales and zeros.
struct Unpacked {
    shape: [usize; 2],
    coding: Coding,
    codes: Vec<u8>,
    zeros: Vec<f32>,
    scales: Vec<f32>,
    /// The group of each input.
    groups: Vec<usize>,
}

impl Unpacked {
    /// The length of which all runs of inputs of one group are multiples.
    fn block_len(&self) -> usize {
        self.groups.chunk_by(|a, b| a == b).map(<[usize]>::len).fold(0, gcd)
    }

    fn in_blocks(self, block_len: usize, device: &Device) -> Quantised {
        let is_symmetric = self.zeros.iter().all(|zero| *zero == 0.0);
        let scales = match self.by_block(&self.scales, block_len, device) {
            scales if is_symmetric => BlockScales::Plain(scales),
            scales => BlockScales::Shifted { scales, zeros: self.by_block(&self.zeros, block_len, device) },
        };
        let codes = bytes_tensor(Bytes::from_elems(self.codes), device);
        Quantised { shape: self.shape, coding: self.coding, codes, block_len, scales }
    }

    /// The number of each block, row after row.
    fn by_block(&self, numbers: &[f32], block_len: usize, device: &Device) -> Tensor<1> {
        let num_rows = self.shape[0];
        let row = |row| self.groups.iter().step_by(block_len).map(move |group| numbers[group * num_rows + row]);
        let numbers: Vec<f32> = (0..num_rows).flat_map(row).collect();
        let shape = [numbers.len()];
        host::tensor(numbers, shape, device)
    }

    fn dense(&self, dtype: Dtype, device: &Device) -> Result<Tensor<2>, Overflow> {
        let [num_rows, width] = self.shape;
        let number = |place: usize| match self.coding {
            Coding::Int8 => f32::from(self.codes[place].cast_signed()),
            _ => f32::from(self.codes[place / 2] >> (4 * (1 - place % 2)) & 15) - 8.0,
        };
        let buffer = convert::generate(num_rows * width, dtype, |first, wide| {
            for (place, x) in (first..).zip(wide) {
                let at = self.groups[place % width] * num_rows + place / width;
                *x = (number(place) - self.zeros[at]) * self.scales[at];
            }
        })?;
        Ok(of_bytes(buffer, self.shape, dtype, device))
    }
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
