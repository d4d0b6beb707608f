//! Matrices of 8-bit floats (E4M3), with a scale for each tile, each row, or all of them; and of 4-bit floats (E2M1), whose
//! scales are codes.

use std::sync::Arc;

use burn::tensor::{Bytes, Device};
use safetensors::Dtype::{F8_E4M3, U8};

use super::convert;
use super::files::{StoredTensor, WeightFiles};
use super::words::gcd;
use crate::device::Dtype;
use crate::ops::cpu::NESTED_LEN;
use crate::ops::host;
use crate::ops::linear::Matrix;
use crate::ops::quantised::{BlockScales, Coding, FP8, Quantised, bytes_tensor};
use crate::spec::Method;

/// A matrix of 8-bit floats that was found in the files and is sound.
pub(super) struct StoredFloats<'a> {
    shape: [usize; 2],
    codes: &'a StoredTensor,
    scales: (&'a StoredTensor, Dtype),
    /// Rows and columns that share a scale.
    tile: [usize; 2],
}

/// A matrix of 4-bit floats that was found in the files and is sound.
pub(super) struct PackedFloats<'a> {
    shape: [usize; 2],
    coding: Coding,
    block_len: usize,
    codes: &'a StoredTensor,
    scales: &'a StoredTensor,
    /// What a code of `scales` stands for.
    table: Vec<f32>,
}

/// Names of the tensors of a module beside `weight`; scales of activations are not used.
pub(super) fn tensors_of(module: &str) -> Vec<String> {
    let parts = ["weight_scale_inv", "weight_scale", "weight_packed", "weight_global_scale"];
    let of_activations = ["input_scale", "input_global_scale", "activation_scale"];
    parts.into_iter().chain(of_activations).map(|part| format!("{module}.{part}")).collect()
}

/// The powers of two that bytes stand for (E8M0).
pub(super) fn powers() -> Vec<f32> {
    // 2^-127 is less than the least normal number.
    (0..=255u32).map(|code| f32::from_bits(if code == 0 { 1 << 22 } else { code << 23 })).collect()
}

/// Finds the 4-bit floats of a module and their scales.
pub(super) fn find_packed<'a>(
    files: &'a WeightFiles,
    module: &str,
    shape: [usize; 2],
    method: Method,
) -> Result<PackedFloats<'a>, String> {
    let [out_features, in_features] = shape;
    let name = |part: &str| format!("{module}.{part}");
    let (coding, block_len, kind) =
        if method == Method::Mxfp4 { (Coding::Mxfp4, 32, U8) } else { (Coding::Nvfp4, 16, F8_E4M3) };
    if !in_features.is_multiple_of(block_len) {
        return Err(format!("misshapen: `{module}` is {shape:?}, expected a multiple of {block_len} columns"));
    }
    let codes = files.part(&name("weight_packed"), &[out_features, in_features / 2], U8)?;
    let scales = files.part(&name("weight_scale"), &[out_features, in_features / block_len], kind)?;
    let table = if coding == Coding::Mxfp4 {
        powers()
    } else {
        let (stored, dtype) = files.stored(&name("weight_global_scale"), &[1])?;
        let divisor = convert::to_f32(&files.bytes(stored), dtype)[0];
        FP8.iter().map(|scale| scale / divisor).collect()
    };
    Ok(PackedFloats { shape, coding, block_len, codes, scales, table })
}

impl PackedFloats<'_> {
    /// The matrix as codes, as are its scales.
    pub(super) fn read(self, files: &WeightFiles, device: &Device) -> Quantised {
        let Self { shape, coding, block_len, codes, scales, table } = self;
        let bytes = |stored: &StoredTensor, of: fn(&u8) -> u8| {
            let bytes = Bytes::from_elems(files.bytes(stored).iter().map(of).collect());
            files.release(stored);
            bytes_tensor(bytes, device)
        };
        let num_outer = (shape[0] * shape[1] / block_len).div_ceil(NESTED_LEN);
        let scales = BlockScales::Nested {
            codes: bytes(scales, |code| *code),
            table: host::tensor(table, [256], device),
            scales: host::tensor(vec![1.0; num_outer], [num_outer], device),
            offset: 0.0,
        };
        // Of two codes in a byte, the first is in the lower half.
        Quantised { shape, coding, codes: bytes(codes, |pair| pair.rotate_left(4)), block_len, scales }
    }
}

/// Finds the matrix `name` of 8-bit floats and its scales: one for each `tile` of rows and columns, for each row, or for
/// all.
pub(super) fn find<'a>(
    files: &'a WeightFiles,
    name: &str,
    shape: [usize; 2],
    tile: Option<[usize; 2]>,
) -> Result<StoredFloats<'a>, String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let codes = files.part(name, &shape, F8_E4M3)?;
    let names = ["weight_scale_inv", "weight_scale"].map(|part| format!("{module}.{part}"));
    let scale_name = names.iter().find(|name| files.tensors().contains_key(*name)).unwrap_or(&names[0]);
    let tile = tile.unwrap_or([1, shape[1]]);
    let tiles = [shape[0].div_ceil(tile[0]), shape[1].div_ceil(tile[1])];
    let found = files.tensors().get(scale_name).map_or(&[][..], |stored| &stored.shape);
    let (tile, expected) = match *found {
        [] | [1] if files.tensors().contains_key(scale_name) => (shape, found),
        [rows] | [rows, 1] if rows == shape[0] => ([1, shape[1]], found),
        _ => (tile, &tiles[..]),
    };
    Ok(StoredFloats { shape, codes, scales: files.stored(scale_name, expected)?, tile })
}

impl StoredFloats<'_> {
    /// The matrix as codes; a row of a tile is a block.
    pub(super) fn read(self, files: &WeightFiles, device: &Device) -> Matrix {
        let Self { shape: [out_features, in_features], codes, scales: (stored, dtype), tile } = self;
        let numbers = convert::to_f32(&files.bytes(stored), dtype);
        let block_len = gcd(in_features, tile[1]);
        let tiles_in_row = in_features.div_ceil(tile[1]);
        let row = |row: usize| {
            let columns = (0..in_features).step_by(block_len);
            columns.map(move |column| row / tile[0] * tiles_in_row + column / tile[1])
        };
        let scales: Vec<f32> = (0..out_features).flat_map(row).map(|place| numbers[place]).collect();
        let bytes = Bytes::from_elems(files.bytes(codes).to_vec());
        [codes, stored].into_iter().for_each(|stored| files.release(stored));
        let shape = [scales.len()];
        Matrix::Quantised(Arc::new(Quantised {
            shape: self.shape,
            coding: Coding::Fp8,
            codes: bytes_tensor(bytes, device),
            block_len,
            scales: BlockScales::Plain(host::tensor(scales, shape, device)),
        }))
    }
}
