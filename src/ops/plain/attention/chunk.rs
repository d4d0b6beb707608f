//! The chunks of queries in which plain tensor calls compute attention.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::ops::product::{F32Products, matmul};
use crate::spec::Heads;

/// Bytes of `f32` scores that are made at a time.
const CHUNK_BYTES: usize = 256 << 20;

/// Queries of a row that are computed at a time, for rows `[rows, length]`: as many as fill 256 MiB with scores, but 64 at
/// least, rounded up to a power of two.
#[must_use]
pub fn chunk_len([rows, length]: [usize; 2], heads: Heads) -> usize {
    let bytes_per_query = rows * heads.num_heads * length * size_of::<f32>();
    (CHUNK_BYTES / bytes_per_query.max(1)).clamp(64.min(length), length).next_power_of_two().min(length)
}

/// A range of the queries of every row and the keys that any of them can see.
#[derive(Clone, Debug)]
pub(crate) struct QueryChunk {
    /// In tokens of a row.
    start: usize,
    len: usize,
    num_keys: usize,
    /// Index of the last key that each query sees, which is its own, `[1, 1, len * group, 1]`.
    last_key: Tensor<4, Int>,
    /// Index of the first key that each query sees, `[rows, 1, len * group, 1]`; absent if all see the first of a row.
    first_key: Option<Tensor<4, Int>>,
    /// Index of every key, `[1, 1, 1, num_keys]`.
    keys: Tensor<4, Int>,
}

impl QueryChunk {
    /// The chunks of a layer with such heads, of [`chunk_len`] queries.
    ///
    /// `shape` are the number of rows and their length; `documents` are (start, length) in flat tokens.
    pub(crate) fn of(shape: [usize; 2], documents: &[(usize, usize)], heads: Heads, device: &Device) -> Arc<[Self]> {
        Self::of_length(chunk_len(shape, heads), shape, documents, heads, device)
    }

    pub(super) fn of_length(
        len: usize,
        [rows, length]: [usize; 2],
        documents: &[(usize, usize)],
        heads: Heads,
        device: &Device,
    ) -> Arc<[Self]> {
        let group = heads.num_heads / heads.num_kv_heads;
        let tensor = |shape: [usize; 4], indices: &mut dyn Iterator<Item = usize>| {
            let indices: Vec<i32> = indices.map(|index| i32::try_from(index).unwrap_or(i32::MAX)).collect();
            Tensor::<4, Int>::from_data(TensorData::new(indices, shape), (device, DType::I32))
        };
        let by_query = |rows: usize, indices: &[usize]| {
            let of_group = indices.iter().flat_map(|&index| std::iter::repeat_n(index, group));
            tensor([rows, 1, length * group, 1], &mut { of_group })
        };
        let last_key = by_query(1, &(0..length).collect::<Vec<_>>());
        let first_keys = first_keys([rows, length], documents, heads.window);
        let first_key = first_keys.iter().any(|&key| key > 0).then(|| by_query(rows, &first_keys));
        let keys = tensor([1, 1, 1, length], &mut (0..length));
        let chunk = |start: usize| {
            let len = len.min(length - start);
            let of_queries = |x: &Tensor<4, Int>| x.clone().narrow(2, start * group, len * group);
            Self {
                start,
                len,
                num_keys: start + len,
                last_key: of_queries(&last_key),
                first_key: first_key.as_ref().map(of_queries),
                keys: keys.clone().narrow(3, 0, start + len),
            }
        };
        (0..length).step_by(len.max(1)).map(chunk).collect()
    }

    /// What belongs to the chunk's queries.
    pub(super) fn queries(&self, x: &Tensor<4>, group: usize) -> Tensor<4> {
        range(x, self.start * group, self.len * group)
    }

    /// What belongs to the keys that they see.
    pub(super) fn keys(&self, x: &Tensor<4>) -> Tensor<4> {
        range(x, 0, self.num_keys)
    }

    /// Scaled scores, with their cap, from `f32` queries and keys, `[rows, num_kv_heads, len * group, num_keys]`.
    pub(super) fn scores(&self, [q, k]: [&Tensor<4>; 2], heads: Heads, products: F32Products) -> Tensor<4> {
        let (q, k) = (self.queries(q, heads.num_heads / heads.num_kv_heads), self.keys(k).swap_dims(2, 3));
        let scores = matmul(&q, &k, products);
        match heads.soft_cap {
            None => scores * heads.scale,
            Some(cap) => (scores * (heads.scale / cap)).tanh() * cap,
        }
    }

    /// Scores with -inf where a query does not see a key.
    pub(super) fn masked(&self, scores: Tensor<4>) -> Tensor<4> {
        // Compared here: a mask that is kept would be read from memory by every layer.
        let scores = scores.mask_fill(self.keys.clone().greater(self.last_key.clone()), f32::NEG_INFINITY);
        match self.first_key.clone() {
            None => scores,
            Some(first_key) => scores.mask_fill(self.keys.clone().lower(first_key), f32::NEG_INFINITY),
        }
    }
}

/// Index in its row of the first key that each token sees, `[rows * row_length]`; what padding sees does not matter.
fn first_keys([rows, length]: [usize; 2], documents: &[(usize, usize)], window: Option<usize>) -> Vec<usize> {
    let mut first_keys = vec![0; rows * length];
    for &(start, len) in documents {
        let start_in_row = start % length;
        for (index, first_key) in first_keys[start..start + len].iter_mut().enumerate() {
            *first_key = start_in_row + window.map_or(0, |window| (index + 1).saturating_sub(window));
        }
    }
    first_keys
}

/// Rows of every matrix of `x`.
fn range(x: &Tensor<4>, start: usize, len: usize) -> Tensor<4> {
    let x = x.clone();
    if len == x.dims()[2] { x } else { x.narrow(2, start, len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Dtype;
    use crate::ops::kernels::plain;

    #[test]
    fn the_scores_of_a_chunk_are_those_that_are_planned() {
        let heads = Heads {
            num_heads: 16,
            num_kv_heads: 8,
            head_dim: 256,
            scale: 1.0,
            window: None,
            chunk: None,
            soft_cap: Some(50.0),
        };
        // 341 queries would fill 256 MiB; of rows of 16,384 tokens 32.
        for ([rows, length], len) in [([3, 4096], 512), ([8, 16_384], 64), ([2, 48], 48)] {
            let chunks = QueryChunk::of([rows, length], &[(0, length)], heads, &Device::flex());
            assert_eq!(chunks.iter().map(|chunk| chunk.len).max(), Some(len));
            let scores = rows * 16 * len * length * 4;
            let planned = plain(F32Products::OfDevice).score_bytes([rows, length], heads, Dtype::F32);
            assert_eq!(planned, 5 * scores);
        }
    }
}
