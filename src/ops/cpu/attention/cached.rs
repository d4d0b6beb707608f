//! Attention of one token, the last, on the keys and values of all tokens so far.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::super::simd::{exp, tanh, vectorised, with_scratch};
use super::Heads;

/// Tokens whose keys are kept together: a multiple of the numbers in a vector of any instruction set.
const BLOCK: usize = 16;

/// Numbers that one task handles at least.
const MIN_TASK: usize = 4 * 1024;

/// The keys of the tokens so far, `[tokens / BLOCK, num_kv_heads * head_dim, BLOCK]`: the products of a query with the keys
/// of a block are sums of whole vectors.
#[derive(Clone, Debug, Default)]
pub struct CachedKeys {
    values: Vec<f32>,
    num_tokens: usize,
}

impl CachedKeys {
    /// Adds the keys of the tokens that follow, `[tokens, width]`.
    pub fn append(&mut self, keys: &[f32], width: usize) {
        for key in keys.chunks_exact(width) {
            let (block, lane) = (self.num_tokens / BLOCK, self.num_tokens % BLOCK);
            self.num_tokens += 1;
            self.values.resize(self.num_tokens.div_ceil(BLOCK) * BLOCK * width, 0.0);
            let block = &mut self.values[block * BLOCK * width..];
            for (lanes, key) in block.chunks_exact_mut(BLOCK).zip(key) {
                lanes[lane] = *key;
            }
        }
    }

    /// Forgets all tokens but the first `num_tokens`; there must be as many.
    pub fn truncate(&mut self, num_tokens: usize) {
        self.num_tokens = num_tokens;
    }
}

vectorised! {
    /// The query heads that share one head of keys and values. `k` and `v` start at that head's first column, `k` in the
    /// first block of which a token is seen, `v` at the first token of that block; a block and a token are `width` columns.
    /// `seen`: the tokens seen, counted from there. `scores`: `[heads, whole blocks]`.
    fn group_of_last<'a, S>(
        simd, q: &'a [f32], k: &'a [f32], v: &'a [f32], width: usize, shape: &'a Heads, seen: Range<usize>,
        scores: &'a mut [f32], o: &'a mut [f32], lse: &'a mut [f32],
    ) {
        let per_head = scores.len() / lse.len();
        let head_dim = q.len() / lse.len();
        for (block, k) in k.chunks(width * BLOCK).enumerate() {
            let k = S::as_simd_f32s(&k[..head_dim * BLOCK]).0;
            for (scores, q) in scores.chunks_exact_mut(per_head).zip(q.chunks_exact(head_dim)) {
                block_scores(simd, q, k, shape.scale as f32, &mut scores[block * BLOCK..][..BLOCK]);
            }
        }
        for ((scores, o), lse) in scores.chunks_exact_mut(per_head).zip(o.chunks_exact_mut(head_dim)).zip(lse) {
            if let Some(cap) = shape.soft_cap {
                capped(simd, scores, cap as f32);
            }
            scores[..seen.start].fill(f32::NEG_INFINITY);
            scores[seen.end..].fill(f32::NEG_INFINITY);
            let (max, sum) = exponentials(simd, scores);
            weighted_sum(simd, &scores[seen.clone()], &v[seen.start * width..], width, 1.0 / sum, o);
            *lse = max + sum.ln();
        }
    }
}

/// The scores of one query head with a block of keys, `[head_dim, BLOCK]`.
#[inline(always)]
fn block_scores<S: Simd>(simd: S, q: &[f32], k: &[S::f32s], scale: f32, scores: &mut [f32]) {
    let vectors = BLOCK / S::F32_LANES;
    let (quads, rest) = pulp::as_arrays::<4, _>(q);
    for (part, scores) in S::as_mut_simd_f32s(scores).0.iter_mut().enumerate() {
        let mut sums = [simd.splat_f32s(0.0); 4];
        for (quad, k) in quads.iter().zip(k.chunks_exact(4 * vectors)) {
            for i in 0..4 {
                sums[i] = simd.mul_add_e_f32s(simd.splat_f32s(quad[i]), k[i * vectors + part], sums[i]);
            }
        }
        for (q, k) in rest.iter().zip(k[quads.len() * 4 * vectors..].chunks_exact(vectors)) {
            sums[0] = simd.mul_add_e_f32s(simd.splat_f32s(*q), k[part], sums[0]);
        }
        let sum = simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
        *scores = simd.mul_f32s(simd.splat_f32s(scale), sum);
    }
}

/// `cap tanh(score / cap)`
#[inline(always)]
fn capped<S: Simd>(simd: S, scores: &mut [f32], cap: f32) {
    let (factor, cap) = (simd.splat_f32s(1.0 / cap), simd.splat_f32s(cap));
    for score in S::as_mut_simd_f32s(scores).0 {
        *score = simd.mul_f32s(cap, tanh(simd, simd.mul_f32s(*score, factor)));
    }
}

/// Replaces scores by their exponentials, each over that of the highest; returns the highest and the sum.
#[inline(always)]
fn exponentials<S: Simd>(simd: S, scores: &mut [f32]) -> (f32, f32) {
    let (scores, _) = S::as_mut_simd_f32s(scores);
    let mut highest = simd.splat_f32s(f32::NEG_INFINITY);
    for score in &*scores {
        highest = simd.max_f32s(highest, *score);
    }
    let max = simd.reduce_max_f32s(highest);
    let mut sums = simd.splat_f32s(0.0);
    for score in scores {
        *score = exp(simd, simd.sub_f32s(*score, simd.splat_f32s(max)));
        sums = simd.add_f32s(sums, *score);
    }
    (max, simd.reduce_sum_f32s(sums))
}

/// `o = factor * sum of the weights times the rows of v`, which are `width` apart.
#[inline(always)]
fn weighted_sum<S: Simd>(simd: S, weights: &[f32], v: &[f32], width: usize, factor: f32, o: &mut [f32]) {
    let head_dim = o.len();
    let (body, tail) = S::as_mut_simd_f32s(o);
    let (quads, rest) = pulp::as_arrays_mut::<4, _>(body);
    let mut column = 0;
    for quad in quads {
        let mut sums = [simd.splat_f32s(0.0); 4];
        for (weight, v) in weights.iter().zip(v.chunks(width)) {
            let (v, _) = pulp::as_arrays::<4, _>(S::as_simd_f32s(&v[column..head_dim]).0);
            for i in 0..4 {
                sums[i] = simd.mul_add_e_f32s(simd.splat_f32s(*weight), v[0][i], sums[i]);
            }
        }
        for (o, sum) in quad.iter_mut().zip(sums) {
            *o = simd.mul_f32s(simd.splat_f32s(factor), sum);
        }
        column += 4 * S::F32_LANES;
    }
    for single in rest {
        let mut sum = simd.splat_f32s(0.0);
        for (weight, v) in weights.iter().zip(v.chunks(width)) {
            sum = simd.mul_add_e_f32s(simd.splat_f32s(*weight), S::as_simd_f32s(&v[column..head_dim]).0[0], sum);
        }
        *single = simd.mul_f32s(simd.splat_f32s(factor), sum);
        column += S::F32_LANES;
    }
    for (i, o) in tail.iter_mut().enumerate() {
        *o = factor * weights.iter().zip(v.chunks(width)).map(|(weight, v)| weight * v[column + i]).sum::<f32>();
    }
}

/// Attention of a token whose query is `q` on the first `tokens` tokens, of which it is the last.
///
/// # Shapes
/// `q`, `o`: `[num_heads * head_dim]`; `v`: `[tokens, num_kv_heads * head_dim]` or more; `lse`: `[num_heads]`.
pub fn attention_of_last(
    q: &[f32],
    keys: &CachedKeys,
    v: &[f32],
    tokens: usize,
    shape: &Heads,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let width = shape.key_value_width();
    assert!(
        (1..=keys.num_tokens).contains(&tokens)
            && v.len() >= tokens * width
            && q.len() == shape.query_width()
            && o.len() == q.len()
            && lse.len() == shape.num_heads,
        "attention_of_last: q {}, o {}, lse {}, v {} for {shape:?} and {tokens} of {} tokens",
        q.len(),
        o.len(),
        lse.len(),
        v.len(),
        keys.num_tokens
    );
    let first = shape.first_seen(tokens - 1);
    let blocks = first / BLOCK..tokens.div_ceil(BLOCK);
    let start = blocks.start * BLOCK * width;
    let (keys, v) = (&keys.values[start..blocks.end * BLOCK * width], &v[start..tokens * width]);
    let seen = first - blocks.start * BLOCK..tokens - blocks.start * BLOCK;
    let group = shape.num_heads / shape.num_kv_heads;
    let group_width = group * shape.head_dim;
    let heads = o.par_chunks_mut(group_width).zip(q.par_chunks(group_width)).zip(lse.par_chunks_mut(group));
    let work = group_width * (tokens - first);
    heads.enumerate().with_min_len(MIN_TASK.div_ceil(work)).for_each(|(head, ((o, q), lse))| {
        let column = head * shape.head_dim;
        with_scratch(group * blocks.len() * BLOCK, |scores| {
            let (k, v) = (&keys[column * BLOCK..], &v[column..]);
            group_of_last(q, k, v, width, shape, seen.clone(), scores, o, lse);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::super::super::reference::{assert_close, random};
    use super::super::{Stretch, attention};
    use super::*;

    #[test]
    fn it_is_the_last_row_of_full_attention() {
        for (tokens, num_heads, num_kv_heads, head_dim, window, soft_cap) in [
            (1, 2, 1, 8, None, None),
            (7, 3, 3, 5, None, None),
            (130, 9, 3, 64, None, None),
            (50, 4, 2, 10, Some(7), Some(0.5)),
            (3, 2, 2, 16, Some(9), None),
            (300, 4, 1, 136, Some(100), Some(2.0)),
        ] {
            let shape = Heads { num_heads, num_kv_heads, head_dim, scale: 0.3, window, chunk: None, soft_cap };
            let q = random(tokens * shape.query_width(), 1);
            let (k, v) = (random(tokens * shape.key_value_width(), 2), random(tokens * shape.key_value_width(), 3));
            let (mut all, mut all_lse) = (vec![0.0; q.len()], vec![0.0; num_heads * tokens]);
            attention(&q, &k, &v, &Stretch::of(&[(0, tokens)], &[]), &shape, false, &mut all, &mut all_lse);
            let (mut o, mut lse) = (vec![7.0; shape.query_width()], vec![7.0; num_heads]);
            let mut keys = CachedKeys::default();
            keys.append(&k, shape.key_value_width());
            attention_of_last(&q[(tokens - 1) * shape.query_width()..], &keys, &v, tokens, &shape, &mut o, &mut lse);
            let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            assert_close(&o, &wide(&all[(tokens - 1) * shape.query_width()..]), 2e-6);
            let last_lse: Vec<f32> = all_lse.chunks(tokens).map(|lse| lse[tokens - 1]).collect();
            assert_close(&lse, &wide(&last_lse), 2e-6);
        }
    }
}
