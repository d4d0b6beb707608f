//! Matrices of 8-bit floats (E4M3), with a scale for each tile, each row, or all of them.

use std::sync::Arc;

use burn::tensor::{Bytes, Device};
use safetensors::Dtype::F8_E4M3;

use super::convert;
use super::files::{StoredTensor, WeightFiles};
use super::words::gcd;
use crate::device::Dtype;
use crate::ops::host;
use crate::ops::linear::Matrix;
use crate::ops::quantised::{BlockScales, Coding, Quantised, bytes_tensor};

/// A matrix that was found in the files and is sound.
pub(super) struct StoredFloats<'a> {
    shape: [usize; 2],
    codes: &'a StoredTensor,
    scales: (&'a StoredTensor, Dtype),
    /// Rows and columns that share a scale.
    tile: [usize; 2],
}

/// Names of the tensors beside the matrix; scales of activations are not used.
pub(super) fn tensors_of(module: &str) -> Vec<String> {
    ["weight_scale_inv", "weight_scale", "input_scale", "activation_scale"]
        .map(|part| format!("{module}.{part}"))
        .to_vec()
}

/// Finds the matrix `name` and its scales, of which each is for `tile` rows and columns, if not for rows or all.
pub(super) fn find<'a>(
    files: &'a WeightFiles,
    name: &str,
    shape: [usize; 2],
    tile: [usize; 2],
) -> Result<StoredFloats<'a>, String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let codes = files.part(name, &shape, F8_E4M3)?;
    let names = ["weight_scale_inv", "weight_scale"].map(|part| format!("{module}.{part}"));
    let scale_name = names.iter().find(|name| files.tensors().contains_key(*name)).unwrap_or(&names[0]);
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
        let numbers = convert::to_f32(files.bytes(stored), dtype);
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
