//! Attention of one token, the last, on the keys and values of all tokens so far.

use rayon::prelude::*;

use super::super::simd::{dot, exp, vectorised, with_scratch};
use super::Heads;

vectorised! {
    /// The query heads that share one head of keys and values. `k` and `v` start at that head's first column and at the
    /// first token seen; their rows are `width` apart. `scores`: `[heads, tokens seen]`.
    fn group_of_last<'a, S>(
        simd, q: &'a [f32], k: &'a [f32], v: &'a [f32], width: usize, scale: f32,
        scores: &'a mut [f32], o: &'a mut [f32], lse: &'a mut [f32],
    ) {
        let num_seen = scores.len() / lse.len();
        let head_dim = q.len() / lse.len();
        for (token, k) in k.chunks(width).enumerate() {
            for (scores, q) in scores.chunks_exact_mut(num_seen).zip(q.chunks_exact(head_dim)) {
                scores[token] = scale * dot(simd, q, &k[..head_dim]);
            }
        }
        for ((scores, o), lse) in scores.chunks_exact_mut(num_seen).zip(o.chunks_exact_mut(head_dim)).zip(lse) {
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let (body, tail) = S::as_mut_simd_f32s(scores);
            let shift = simd.splat_f32s(max);
            for score in body {
                *score = exp(simd, simd.sub_f32s(*score, shift));
            }
            let weights = exp(simd, simd.sub_f32s(simd.partial_load_f32s(tail), shift));
            simd.partial_store_f32s(tail, weights);
            let sum: f32 = scores.iter().sum();
            let normaliser = 1.0 / sum;
            o.fill(0.0);
            for (score, v) in scores.iter().zip(v.chunks(width)) {
                let weight = score * normaliser;
                for (o, v) in o.iter_mut().zip(v) {
                    *o += weight * v;
                }
            }
            *lse = max + sum.ln();
        }
    }
}

/// Attention of the last of `tokens` tokens, whose query is `q`.
///
/// # Shapes
/// `q`, `o`: `[num_heads * head_dim]`; `k`, `v`: `[tokens, num_kv_heads * head_dim]`; `lse`: `[num_heads]`.
pub fn attention_of_last(q: &[f32], k: &[f32], v: &[f32], shape: &Heads, o: &mut [f32], lse: &mut [f32]) {
    let width = shape.kv_width();
    let tokens = shape.check(q.len() * (k.len() / width.max(1)), k.len(), v.len(), &[]);
    assert!(
        tokens > 0 && q.len() == shape.q_width() && o.len() == q.len() && lse.len() == shape.num_heads,
        "attention_of_last: q {}, o {}, lse {} for {shape:?} and {tokens} tokens",
        q.len(),
        o.len(),
        lse.len()
    );
    let first = shape.first_key(tokens - 1);
    let group = shape.num_heads / shape.num_kv_heads;
    let group_width = group * shape.head_dim;
    o.par_chunks_mut(group_width).zip(q.par_chunks(group_width)).zip(lse.par_chunks_mut(group)).enumerate().for_each(
        |(head, ((o, q), lse))| {
            let start = first * width + head * shape.head_dim;
            with_scratch(group * (tokens - first), |scores| {
                group_of_last(q, &k[start..], &v[start..], width, shape.scale as f32, scores, o, lse);
            });
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::super::reference::{assert_close, random};
    use super::super::attention;
    use super::*;

    #[test]
    fn it_is_the_last_row_of_full_attention() {
        for (tokens, num_heads, num_kv_heads, head_dim, window) in [
            (1, 2, 1, 8, None),
            (7, 3, 3, 5, None),
            (130, 9, 3, 64, None),
            (50, 4, 2, 10, Some(7)),
            (3, 2, 2, 16, Some(9)),
        ] {
            let shape = Heads { num_heads, num_kv_heads, head_dim, scale: 0.3, window };
            let q = random(tokens * shape.q_width(), 1);
            let (k, v) = (random(tokens * shape.kv_width(), 2), random(tokens * shape.kv_width(), 3));
            let (mut all, mut all_lse) = (vec![0.0; q.len()], vec![0.0; num_heads * tokens]);
            attention(&q, &k, &v, &[(0, tokens)], &shape, &mut all, &mut all_lse);
            let (mut o, mut lse) = (vec![7.0; shape.q_width()], vec![7.0; num_heads]);
            attention_of_last(&q[(tokens - 1) * shape.q_width()..], &k, &v, &shape, &mut o, &mut lse);
            let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            assert_close(&o, &wide(&all[(tokens - 1) * shape.q_width()..]), 2e-6);
            let last_lse: Vec<f32> = all_lse.chunks(tokens).map(|lse| lse[tokens - 1]).collect();
            assert_close(&lse, &wide(&last_lse), 2e-6);
        }
    }
}
