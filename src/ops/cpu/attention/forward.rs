//! The forward pass: one task per stretch, key head and tile of queries.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::arithmetic::Pairs;
use super::arithmetic::{Arithmetic, Single};
use super::{Heads, STRIP, Stretch, TILE, clear_gaps};
use crate::device::has_bf16_products;
use crate::ops::cpu::product::{Left, ProductInto};
use crate::ops::cpu::simd::{Scratch, SharedMut, arch, exp2_bounded, load, store, tanh, with_scratch};

/// Causal attention of every head within each stretch and on what it continues; tokens outside all get zeros.
///
/// `lse` keeps the log-sum-exp of every query's scaled scores for the backward pass. With `rounds`, operands of products are
/// rounded as by [`Weight::rounding`](crate::ops::cpu::Weight::rounding).
///
/// # Shapes
/// `q`, `o`: `[tokens, num_heads * head_dim]`; `k`, `v`: `[tokens, num_kv_heads * head_dim]`;
/// `lse`: `[num_heads, tokens]`; `stretches`: ascending and disjoint.
pub fn attention(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    stretches: &[Stretch],
    shape: &Heads,
    rounds: bool,
    o: &mut [f32],
    lse: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if rounds && has_bf16_products() {
        return forward::<Pairs>([q, k, v], stretches, shape, o, lse);
    }
    forward::<Single>([q, k, v], stretches, shape, o, lse);
}

fn forward<'a, A: Arithmetic>(
    [q, k, v]: [&'a [f32]; 3],
    stretches: &[Stretch],
    shape: &Heads,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let tokens = shape.check(q.len(), k.len(), v.len(), stretches);
    assert!(o.len() == q.len() && lse.len() == tokens * shape.num_heads, "attention: o {}, lse {}", o.len(), lse.len());
    clear_gaps(o, shape.query_width(), stretches);
    for lse in lse.chunks_exact_mut(tokens.max(1)) {
        clear_gaps(lse, 1, stretches);
    }
    let mut tasks = Vec::new();
    for stretch in stretches {
        // The last tiles see the most keys, so they go first.
        for first in (0..stretch.len).step_by(TILE).rev() {
            tasks.extend((0..shape.num_kv_heads).map(|kv_head| (stretch, first, kv_head)));
        }
    }
    let (o, lse) = (SharedMut(o.as_mut_ptr()), SharedMut(lse.as_mut_ptr()));
    let dim = shape.padded_dim();
    let group = shape.num_heads / shape.num_kv_heads;
    tasks.into_par_iter().with_max_len(1).for_each(|(stretch, first, kv_head)| {
        let (start, num_queries) = (stretch.start, TILE.min(stretch.len - first));
        let from = |x: &'a [f32], token: usize| &x[token * shape.key_value_width() + kv_head * shape.head_dim..];
        let tile_words = TILE * TILE / A::NUMBERS;
        with_scratch(tile_words + TILE * (TILE + 2 * dim + group * (2 * dim + 2) + 1), |scratch| {
            let mut scratch = Scratch(scratch);
            let output = scratch.take(group * TILE * dim);
            let (max, sum) = (scratch.take(group * TILE), scratch.take(group * TILE));
            arch().dispatch(QueryTile::<A> {
                shape: shape.of(stretch),
                q: &q[(start + first) * shape.query_width() + kv_head * group * shape.head_dim..],
                own: [k, v].map(|x| from(x, start)),
                prefix: [k, v].map(|x| from(x, stretch.prefix.start)),
                prefix_len: stretch.prefix.len(),
                first_query: stretch.prefix.len() + first,
                num_queries,
                sees_itself: !stretch.is_both_ways(),
                keys: scratch.take_words(TILE * dim),
                values: scratch.take_words(TILE * dim),
                scores: scratch.take(TILE * TILE),
                weights: scratch.take_words(tile_words),
                correction: scratch.take(TILE),
                heads: HeadTiles { transposed_q: scratch.take_words(group * TILE * dim), output, max, sum },
            });
            for member in 0..group {
                let head = kv_head * group + member;
                for i in 0..num_queries {
                    let (token, row) = (start + first + i, member * TILE + i);
                    let normaliser = 1.0 / sum[row];
                    for (d, x) in output[row * dim..row * dim + shape.head_dim].iter().enumerate() {
                        // SAFETY: this task alone writes this head's columns of this token's row; token < tokens.
                        unsafe {
                            *o.get().add(token * shape.query_width() + head * shape.head_dim + d) = x * normaliser;
                        };
                    }
                    // SAFETY: this task alone writes this head's entry of this token.
                    unsafe { *lse.get().add(head * tokens + token) = max[row] * LN_2 + sum[row].ln() };
                }
            }
        });
    });
}

/// One task: up to [`TILE`] queries of the heads that share a key head, against all keys that they see. Queries and keys are
/// counted from the first token of the prefix on.
struct QueryTile<'a, A: Arithmetic> {
    shape: Heads,
    // From the first query and the first head's first column on.
    q: &'a [f32],
    // Keys and values, from the stretch's first token and the head's first column on, and from the prefix's.
    own: [&'a [f32]; 2],
    prefix: [&'a [f32]; 2],
    prefix_len: usize,
    first_query: usize,
    num_queries: usize,
    /// Whether the queries see the keys of their own stretch, up to their own, besides the prefix.
    sees_itself: bool,
    // Scratch; `scores` holds [keys, queries], so that the softmax runs across vectors and not within them.
    keys: &'a mut [A::Word],
    values: &'a mut [A::Word],
    scores: &'a mut [f32],
    /// The softmax of the scores, for pairs.
    weights: &'a mut [A::Word],
    correction: &'a mut [f32],
    heads: HeadTiles<'a, A::Word>,
}

/// Data of one query head, or of several, one after the other.
struct HeadTiles<'a, W> {
    transposed_q: &'a mut [W],
    /// Not yet divided by `sum`.
    output: &'a mut [f32],
    /// In units of log2.
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

impl<W> HeadTiles<'_, W> {
    fn member(&mut self, member: usize, dim: usize) -> HeadTiles<'_, W> {
        let (rows, tile) = (member * TILE..(member + 1) * TILE, member * TILE * dim..(member + 1) * TILE * dim);
        HeadTiles {
            transposed_q: &mut self.transposed_q[tile.clone()],
            output: &mut self.output[tile],
            max: &mut self.max[rows.clone()],
            sum: &mut self.sum[rows],
        }
    }
}

impl<A: Arithmetic> WithSimd for QueryTile<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let shape = self.shape;
        let (head_dim, dim) = (shape.head_dim, shape.padded_dim());
        let group = shape.num_heads / shape.num_kv_heads;
        let [factor, _] = self.factors();
        for member in 0..group {
            let q = &self.q[member * head_dim..];
            let head = self.heads.member(member, dim);
            A::columns(q, shape.query_width(), self.num_queries, head_dim, factor, head.transposed_q);
        }
        self.heads.max.fill(f32::NEG_INFINITY);
        self.heads.sum.fill(0.0);
        let (width, prefix_len) = (shape.key_value_width(), self.prefix_len);
        let end = if self.sees_itself { self.first_query + self.num_queries } else { self.prefix_len };
        let first = shape.first_seen(self.first_query) / TILE * TILE;
        let of_prefix = (first..prefix_len).step_by(TILE).map(|first_key| (first_key, prefix_len));
        let of_own = (first.max(prefix_len)..end).step_by(TILE).map(|first_key| (first_key, end));
        for (first_key, end) in of_prefix.chain(of_own) {
            let num_keys = TILE.min(end - first_key);
            let ([k, v], before) = if first_key < prefix_len { (self.prefix, 0) } else { (self.own, prefix_len) };
            let from = (first_key - before) * width;
            A::rows(&k[from..], width, num_keys, head_dim, 1.0, self.keys, dim / A::NUMBERS);
            A::stacked(&v[from..], width, num_keys, head_dim, 1.0, self.values, dim);
            for member in 0..group {
                self.scores(simd, member, first_key, num_keys);
                self.softmax(simd, member, first_key, num_keys);
                self.accumulate(simd, member, first_key, num_keys, first_key > first);
            }
        }
    }
}

impl<A: Arithmetic> QueryTile<'_, A> {
    fn factors(&self) -> [f32; 2] {
        A::factors(self.shape.product_factor())
    }

    /// `scores = k q^T`, with -inf where a query does not see a key.
    #[inline(always)]
    fn scores<S: Simd>(&mut self, simd: S, member: usize, first_key: usize, num_keys: usize) {
        let dim = self.shape.padded_dim();
        let columns = self.num_queries.next_multiple_of(S::F32_LANES);
        let diagonal = first_key == self.first_query;
        let head = self.heads.member(member, dim);
        for key in (0..num_keys).step_by(STRIP) {
            // On the diagonal, no query before the strip sees its keys.
            let column = if diagonal { key } else { 0 };
            let rows = STRIP.min(num_keys - key);
            let product = ProductInto {
                shape: [rows, columns - column, self.shape.head_dim.div_ceil(A::NUMBERS)],
                c: self.scores[key * TILE + column..(key + rows - 1) * TILE + columns].as_mut_ptr(),
                c_stride: TILE,
                a: Left::rows(&self.keys[key * dim / A::NUMBERS..], dim / A::NUMBERS),
                b: &head.transposed_q[column..],
                b_stride: TILE,
                then: None,
                accumulate: false,
            };
            // SAFETY: the slice of the scores has these rows and columns.
            unsafe { A::multiply(simd, product) };
        }
        if let Some(cap) = self.shape.soft_cap {
            for key in 0..num_keys {
                let column = if diagonal { key / STRIP * STRIP } else { 0 };
                self.cap(simd, cap as f32, &(key * TILE + column..key * TILE + columns));
            }
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

    /// Turns shares of the cap into scores in units of log2.
    #[inline(always)]
    fn cap<S: Simd>(&mut self, simd: S, cap: f32, scores: &Range<usize>) {
        let (factor, cap) = (simd.splat_f32s(self.factors()[1]), simd.splat_f32s(cap * LOG2_E));
        for score in S::as_mut_simd_f32s(&mut self.scores[scores.clone()]).0 {
            *score = simd.mul_f32s(cap, tanh(simd, simd.mul_f32s(*score, factor)));
        }
    }

    /// Turns scores into `2^(score - max)` with the running maximum, and updates `max`, `sum` and `correction`.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, simd: S, member: usize, first_key: usize, num_keys: usize) {
        let columns = self.num_queries.next_multiple_of(S::F32_LANES);
        let zero = simd.splat_f32s(0.0);
        let lowest = simd.splat_f32s(f32::NEG_INFINITY);
        let (first_query, dim) = (self.first_query, self.shape.padded_dim());
        let is_capped = self.shape.soft_cap.is_some();
        let factor = simd.splat_f32s(if is_capped { 1.0 } else { self.factors()[1] });
        let head = self.heads.member(member, dim);
        for column in (0..columns).step_by(S::F32_LANES) {
            // As far as `accumulate` reads: to the end of the strip of queries.
            let keys = keys_seen(first_query + (column / STRIP + 1) * STRIP, first_key, num_keys);
            let at = |key: usize| key * TILE + column;
            let mut highest = [lowest; 4];
            for quad in (0..keys).step_by(4) {
                for (i, highest) in highest.iter_mut().enumerate() {
                    // Reading a row twice does not change the maximum.
                    *highest = simd.max_f32s(load::<S>(&self.scores[at((quad + i).min(keys - 1))..]), *highest);
                }
            }
            let highest = simd.max_f32s(simd.max_f32s(highest[0], highest[1]), simd.max_f32s(highest[2], highest[3]));
            let highest = simd.mul_f32s(highest, factor);
            let before = load::<S>(&head.max[column..]);
            let max = simd.max_f32s(before, highest);
            // For a query that has seen no key so far, keep the exponents at -inf instead of NaN.
            let shift = simd.select_f32s(simd.equal_f32s(max, lowest), zero, max);
            let minus_shift = simd.neg_f32s(shift);
            let correction = exp2_bounded(simd, simd.sub_f32s(before, shift));
            let mut sum = simd.mul_f32s(load::<S>(&head.sum[column..]), correction);
            for key in 0..keys {
                let score = &mut self.scores[at(key)..];
                let p = exp2_bounded(simd, simd.mul_add_e_f32s(load::<S>(score), factor, minus_shift));
                sum = simd.add_f32s(sum, p);
                store::<S>(score, p);
            }
            store::<S>(&mut head.max[column..], max);
            store::<S>(&mut head.sum[column..], sum);
            store::<S>(&mut self.correction[column..], correction);
        }
    }

    /// `output = correction * output + p v`.
    #[inline(always)]
    fn accumulate<S: Simd>(&mut self, simd: S, member: usize, first_key: usize, num_keys: usize, accumulate: bool) {
        let dim = self.shape.padded_dim();
        let head = self.heads.member(member, dim);
        if accumulate {
            for (output, correction) in head.output.chunks_exact_mut(dim).zip(&*self.correction).take(self.num_queries)
            {
                if *correction != 1.0 {
                    output.iter_mut().for_each(|x| *x *= correction);
                }
            }
        }
        let weights = A::tile_stacked(self.scores, num_keys, self.weights);
        for query in (0..self.num_queries).step_by(STRIP) {
            let rows = STRIP.min(self.num_queries - query);
            let keys = keys_seen(self.first_query + query + rows, first_key, num_keys);
            let product = ProductInto {
                shape: [rows, dim, keys.div_ceil(A::NUMBERS)],
                c: head.output[query * dim..(query + rows) * dim].as_mut_ptr(),
                c_stride: dim,
                a: Left::columns(&weights[query..], TILE),
                b: &*self.values,
                b_stride: dim,
                then: None,
                accumulate,
            };
            // SAFETY: the slice of the output has these rows and columns.
            unsafe { A::multiply(simd, product) };
        }
    }
}

/// Keys of the tile that the queries below `end_query` may see.
#[inline(always)]
fn keys_seen(end_query: usize, first_key: usize, num_keys: usize) -> usize {
    (end_query - first_key).min(num_keys)
}
