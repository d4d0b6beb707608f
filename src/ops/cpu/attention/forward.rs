//! The forward pass: one task per document, head and tile of queries.

use std::f32::consts::{LN_2, LOG2_E};

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{AttentionShape, STRIP, TILE, clear_gaps};
use crate::ops::cpu::pack::{pack_columns, pack_rows};
use crate::ops::cpu::product::{Left, Product};
use crate::ops::cpu::simd::{SharedMut, exp2_bounded, load, store, with_scratch};

/// Causal attention of every head within each document; tokens outside all documents get zeros.
///
/// `lse` keeps the log-sum-exp of every query's scaled scores for the backward pass.
///
/// # Shapes
/// `q`, `o`: `[tokens, num_heads * head_dim]`; `k`, `v`: `[tokens, num_kv_heads * head_dim]`;
/// `lse`: `[num_heads, tokens]`; `documents`: `(start, len)`, ascending and disjoint.
pub fn attention(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    documents: &[(usize, usize)],
    shape: &AttentionShape,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let tokens = shape.check(q.len(), k.len(), v.len(), documents);
    assert!(o.len() == q.len() && lse.len() == tokens * shape.num_heads, "attention: o {}, lse {}", o.len(), lse.len());
    clear_gaps(o, shape.q_width(), documents);
    for lse in lse.chunks_exact_mut(tokens.max(1)) {
        clear_gaps(lse, 1, documents);
    }
    let mut tasks = Vec::new();
    for &(start, len) in documents {
        // The last tiles see the most keys: they go first.
        for first_query in (0..len).step_by(TILE).rev() {
            tasks.extend((0..shape.num_heads).map(|head| (start, len, first_query, head)));
        }
    }
    let (o, lse) = (SharedMut(o.as_mut_ptr()), SharedMut(lse.as_mut_ptr()));
    let dim = shape.padded_dim();
    tasks.into_par_iter().with_max_len(1).for_each(|(start, len, first_query, head)| {
        with_scratch(TILE * (TILE + 4 * dim + 3), |scratch| {
            let (transposed_q, scratch) = scratch.split_at_mut(TILE * dim);
            let (keys, scratch) = scratch.split_at_mut(TILE * dim);
            let (values, scratch) = scratch.split_at_mut(TILE * dim);
            let (output, scratch) = scratch.split_at_mut(TILE * dim);
            let (scores, scratch) = scratch.split_at_mut(TILE * TILE);
            let (max, scratch) = scratch.split_at_mut(TILE);
            let (sum, correction) = scratch.split_at_mut(TILE);
            Arch::new().dispatch(QueryTile {
                shape,
                q: &q[start * shape.q_width() + head * shape.head_dim..],
                k: &k[start * shape.kv_width() + shape.kv_head(head) * shape.head_dim..],
                v: &v[start * shape.kv_width() + shape.kv_head(head) * shape.head_dim..],
                first_query,
                num_queries: TILE.min(len - first_query),
                transposed_q,
                keys,
                values,
                output,
                scores,
                max,
                sum,
                correction,
            });
            let num_queries = TILE.min(len - first_query);
            for i in 0..num_queries {
                let token = start + first_query + i;
                let normaliser = 1.0 / sum[i];
                let row = &output[i * dim..i * dim + shape.head_dim];
                for (d, x) in row.iter().enumerate() {
                    // SAFETY: this task alone writes this head's columns of this token's row; token < tokens.
                    unsafe { *o.get().add(token * shape.q_width() + head * shape.head_dim + d) = x * normaliser };
                }
                // SAFETY: this task alone writes this head's entry of this token.
                unsafe { *lse.get().add(head * tokens + token) = max[i] * LN_2 + sum[i].ln() };
            }
        });
    });
}

/// One task: up to [`TILE`] queries of one head against all keys that they see.
struct QueryTile<'a> {
    shape: &'a AttentionShape,
    // From the document's first token and the head's first column on.
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    first_query: usize,
    num_queries: usize,
    // Scratch; `scores` holds [keys, queries], so that the softmax runs across vectors and not within them.
    transposed_q: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a mut [f32],
    scores: &'a mut [f32],
    // Results, still to be divided by `sum`; `max` in units of log2.
    output: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    correction: &'a mut [f32],
}

impl WithSimd for QueryTile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let shape = self.shape;
        let (head_dim, dim) = (shape.head_dim, shape.padded_dim());
        let factor = shape.scale * LOG2_E;
        let q = &self.q[self.first_query * shape.q_width()..];
        pack_columns(q, shape.q_width(), self.num_queries, head_dim, self.transposed_q, TILE);
        self.transposed_q[..head_dim * TILE].iter_mut().for_each(|x| *x *= factor);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        let end = self.first_query + self.num_queries;
        let first = shape.first_key(self.first_query) / TILE * TILE;
        for first_key in (first..end).step_by(TILE) {
            let num_keys = TILE.min(end - first_key);
            let from = first_key * shape.kv_width();
            pack_rows(&self.k[from..], shape.kv_width(), num_keys, head_dim, 1.0, self.keys, dim);
            pack_rows(&self.v[from..], shape.kv_width(), num_keys, head_dim, 1.0, self.values, dim);
            self.scores(simd, first_key, num_keys);
            self.softmax(simd, first_key, num_keys);
            self.accumulate(simd, first_key, num_keys, first_key > first);
        }
    }
}

impl QueryTile<'_> {
    /// `scores = k q^T`, with -inf where a query does not see a key.
    #[inline(always)]
    fn scores<S: Simd>(&mut self, simd: S, first_key: usize, num_keys: usize) {
        let dim = self.shape.padded_dim();
        let columns = self.num_queries.next_multiple_of(S::F32_LANES);
        let diagonal = first_key == self.first_query;
        for key in (0..num_keys).step_by(STRIP) {
            // On the diagonal no query before the strip sees its keys.
            let column = if diagonal { key } else { 0 };
            let rows = STRIP.min(num_keys - key);
            Product {
                shape: [rows, columns - column, self.shape.head_dim],
                c: &mut self.scores[key * TILE + column..],
                c_stride: TILE,
                a: Left::rows(&self.keys[key * dim..], dim),
                b: &self.transposed_q[column..],
                b_stride: TILE,
                then: None,
                accumulate: false,
            }
            .run(simd);
        }
        let visible = |key: usize| {
            let start = (first_key + key).saturating_sub(self.first_query).min(columns);
            let end = self.shape.end_query(first_key + key, usize::MAX).saturating_sub(self.first_query).min(columns);
            (start, end)
        };
        if diagonal || visible(0).1 < columns {
            for key in 0..num_keys {
                let (start, end) = visible(key);
                let row = &mut self.scores[key * TILE..key * TILE + columns];
                row[..start].fill(f32::NEG_INFINITY);
                row[end..].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Turns scores into `2^(score - max)` with the running maximum, and updates `max`, `sum` and `correction`.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, simd: S, first_key: usize, num_keys: usize) {
        let columns = self.num_queries.next_multiple_of(S::F32_LANES);
        let zero = simd.splat_f32s(0.0);
        let lowest = simd.splat_f32s(f32::NEG_INFINITY);
        for column in (0..columns).step_by(S::F32_LANES) {
            // As far as `accumulate` reads: to the end of the strip of queries.
            let keys = self.keys_seen((column / STRIP + 1) * STRIP, first_key, num_keys);
            let at = |key: usize| key * TILE + column;
            let mut highest = [lowest; 4];
            for key in 0..keys {
                let score = load::<S>(&self.scores[at(key)..]);
                highest[key % 4] = simd.max_f32s(score, highest[key % 4]);
            }
            let highest = simd.max_f32s(simd.max_f32s(highest[0], highest[1]), simd.max_f32s(highest[2], highest[3]));
            let before = load::<S>(&self.max[column..]);
            let max = simd.max_f32s(before, highest);
            // A query that sees none of the keys so far: keep its exponents at -inf instead of NaN.
            let shift = simd.select_f32s(simd.equal_f32s(max, lowest), zero, max);
            let correction = exp2_bounded(simd, simd.sub_f32s(before, shift));
            let mut sum = simd.mul_f32s(load::<S>(&self.sum[column..]), correction);
            for key in 0..keys {
                let score = &mut self.scores[at(key)..];
                let p = exp2_bounded(simd, simd.sub_f32s(load::<S>(score), shift));
                sum = simd.add_f32s(sum, p);
                store::<S>(score, p);
            }
            store::<S>(&mut self.max[column..], max);
            store::<S>(&mut self.sum[column..], sum);
            store::<S>(&mut self.correction[column..], correction);
        }
    }

    /// Keys of the tile that the queries below `end` of the tile may see.
    #[inline(always)]
    fn keys_seen(&self, end: usize, first_key: usize, num_keys: usize) -> usize {
        (self.first_query + end - first_key).min(num_keys)
    }

    /// `output = correction * output + p v`.
    #[inline(always)]
    fn accumulate<S: Simd>(&mut self, simd: S, first_key: usize, num_keys: usize, accumulate: bool) {
        let dim = self.shape.padded_dim();
        if accumulate {
            for (output, correction) in self.output.chunks_exact_mut(dim).zip(&*self.correction).take(self.num_queries)
            {
                if *correction != 1.0 {
                    output.iter_mut().for_each(|x| *x *= correction);
                }
            }
        }
        for query in (0..self.num_queries).step_by(STRIP) {
            let rows = STRIP.min(self.num_queries - query);
            Product {
                shape: [rows, dim, self.keys_seen(query + rows, first_key, num_keys)],
                c: &mut self.output[query * dim..],
                c_stride: dim,
                a: Left::columns(&self.scores[query..], TILE),
                b: self.values,
                b_stride: dim,
                then: None,
                accumulate,
            }
            .run(simd);
        }
    }
}
