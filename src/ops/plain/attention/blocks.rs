//! Stretches of tokens that see each other both ways (images of Gemma 3 and 4): what they see of those behind them.
//!
//! Attention to the tokens before is computed as ever. With the log-sum-exp of both parts, that is one attention; what the backward of
//! the part before needs of its result is right for it, too.

use burn::tensor::{DType, IndexingUpdateOp, Tensor};

use super::{Attended, AttentionInputs, LseOrder};
use crate::ops::layout::{Blocks, Layout, indices};
use crate::ops::product::{F32Products, matmul};
use crate::spec::Heads;

impl Blocks {
    /// Rows of tokens by block and head of keys, in `f32`, `[blocks * num_kv_heads, group * length, width]`.
    fn by_head(&self, x: &Tensor<2>, heads: Heads) -> Tensor<3> {
        let (length, num_kv_heads, x) = (self.length, heads.num_kv_heads, x.clone().select(0, self.places.clone()));
        let ([tokens, width], group) = (x.dims(), 1.max(x.dims()[1] / heads.head_dim / num_kv_heads));
        let (blocks, width) = (tokens / length, width / num_kv_heads / group);
        let x = x.cast(DType::F32).reshape([blocks, length, num_kv_heads, group, width]).permute([0, 2, 3, 1, 4]);
        x.reshape([blocks * num_kv_heads, group * length, width])
    }

    /// The inverse, `[blocks * length, num_kv_heads * group * width]`.
    fn by_token(&self, x: Tensor<3>, heads: Heads) -> Tensor<2> {
        let ([matrices, rows, width], length) = (x.dims(), self.length);
        let (blocks, group) = (matrices / heads.num_kv_heads, rows / length);
        let x = x.reshape([blocks, heads.num_kv_heads, group, length, width]).permute([0, 3, 1, 2, 4]);
        x.reshape([blocks * length, heads.num_kv_heads * group * width])
    }

    /// Scores of queries for the keys behind them, -inf for the others, `[blocks * num_kv_heads, group * length, length]`.
    fn scores(&self, [q, k]: [&Tensor<3>; 2], heads: Heads) -> Tensor<3> {
        let ([_, rows, _], device) = (q.dims(), &q.device());
        let queries = indices((0..rows).map(|row| row % self.length), device).reshape([1, rows, 1]);
        let keys = indices(0..self.length, device).reshape([1, 1, self.length]);
        let scores = matmul(q, &k.clone().swap_dims(1, 2), F32Products::OfDevice) * heads.scale;
        let is_before = keys.expand([1, rows, self.length]).lower_equal(queries.expand([1, rows, self.length]));
        let [matrices, ..] = scores.dims();
        scores.mask_fill(is_before.expand([matrices, rows, self.length]), f32::NEG_INFINITY)
    }

    /// Those of `rows` in place of the tokens' in `x`.
    fn put(&self, x: &Tensor<2>, rows: Tensor<2>) -> Tensor<2> {
        Tensor::cat(vec![x.clone(), rows], 0).select(0, self.order.clone())
    }

    fn add(&self, x: Tensor<2>, rows: Tensor<2>) -> Tensor<2> {
        let rows = rows.cast(x.dtype());
        x.select_assign(0, self.places.clone(), rows, IndexingUpdateOp::Add)
    }
}

/// Heads of one number each.
fn single(heads: Heads) -> Heads {
    Heads { head_dim: 1, ..heads }
}

/// Log-sum-exp by token and head, `[tokens, num_heads]`, and the inverse.
fn by_token(lse: Tensor<1>, order: LseOrder, layout: &Layout, heads: Heads) -> Tensor<2> {
    let (tokens, Heads { num_heads, num_kv_heads, .. }) = (layout.rows() * layout.row_length(), heads);
    let shape = [layout.rows(), num_kv_heads, layout.row_length(), num_heads / num_kv_heads];
    match order {
        LseOrder::ByHead => lse.reshape([num_heads, tokens]).swap_dims(0, 1),
        LseOrder::ByToken => lse.reshape([tokens, num_heads]),
        LseOrder::Grouped => lse.reshape(shape).swap_dims(1, 2).reshape([tokens, num_heads]),
    }
}

fn ordered(lse: Tensor<2>, order: LseOrder, layout: &Layout, heads: Heads) -> Tensor<1> {
    let ([tokens, num_heads], num_kv_heads) = (lse.dims(), heads.num_kv_heads);
    let shape = [layout.rows(), layout.row_length(), num_kv_heads, num_heads / num_kv_heads];
    match order {
        LseOrder::ByHead => lse.swap_dims(0, 1).reshape([tokens * num_heads]),
        LseOrder::ByToken => lse.reshape([tokens * num_heads]),
        LseOrder::Grouped => lse.reshape(shape).swap_dims(1, 2).reshape([tokens * num_heads]),
    }
}

/// The attention in which tokens of blocks see those behind them in their block, too.
#[must_use]
pub fn with_blocks(attended: Attended, blocks: &Blocks, inputs: AttentionInputs<'_>) -> Attended {
    let (AttentionInputs { qkv, layout, heads }, Attended { o, lse, order }) = (inputs, attended);
    let [q, k, v] = qkv.map(|x| blocks.by_head(x, heads));
    let scores = blocks.scores([&q, &k], heads);
    let lse = by_token(lse, order, layout, heads);
    let before = blocks.by_head(&lse, single(heads));
    let most = before.clone().max_pair(scores.clone().max_dim(2));
    let sum = (before.clone() - most.clone()).exp() + (scores.clone() - most.clone()).exp().sum_dim(2);
    let both = most + sum.log();
    let behind = matmul(&(scores - both.clone()).exp(), &v, F32Products::OfDevice);
    let of_both = blocks.by_head(&o, heads) * (before - both.clone()).exp() + behind;
    let of_both = blocks.by_token(of_both, heads).cast(o.dtype());
    let lse = blocks.put(&lse, blocks.by_token(both, single(heads)));
    Attended { o: blocks.put(&o, of_both), lse: ordered(lse, order, layout, heads), order }
}

/// Adds to the gradients of queries, keys and values those of what [`with_blocks`] made of keys behind queries.
#[must_use]
pub fn with_blocks_backward(
    [dq, dk, dv]: [Tensor<2>; 3],
    d_o: &Tensor<2>,
    attended: &Attended,
    blocks: &Blocks,
    AttentionInputs { qkv, layout, heads }: AttentionInputs<'_>,
) -> [Tensor<2>; 3] {
    let [q, k, v] = qkv.map(|x| blocks.by_head(x, heads));
    let [d_o, o] = [d_o, &attended.o].map(|x| blocks.by_head(x, heads));
    let lse = by_token(attended.lse.clone(), attended.order, layout, heads);
    let p = (blocks.scores([&q, &k], heads) - blocks.by_head(&lse, single(heads))).exp();
    let product = |a: &Tensor<3>, b: &Tensor<3>| matmul(a, b, F32Products::OfDevice);
    let dp = product(&d_o, &v.swap_dims(1, 2));
    let ds = p.clone() * (dp - (d_o.clone() * o).sum_dim(2)) * heads.scale;
    let more = [product(&ds, &k), product(&ds.swap_dims(1, 2), &q), product(&p.swap_dims(1, 2), &d_o)];
    let [of_q, of_k, of_v] = more.map(|x| blocks.by_token(x, heads));
    [blocks.add(dq, of_q), blocks.add(dk, of_k), blocks.add(dv, of_v)]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::Device;

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::attention::{attention, attention_backward};
    use crate::ops::host;
    use crate::ops::kernels::plain;
    use crate::ops::layout::RotaryTable;
    use crate::ops::place::place_on;

    /// A row of two documents and one of one and padding, with a block in the second and one in the third.
    fn layout(device: &Device) -> Layout {
        let positions = [0..4, 0..7, 0..9, 0..2].into_iter().flatten().collect();
        let tables = Arc::new([RotaryTable::new(vec![1.0; 44], vec![0.0; 44], 4)]);
        let layout = Layout::new(2, vec![(0, 4), (4, 7), (11, 9)], positions, tables);
        layout.with_blocks(vec![Blocks::new(&[5], 5, 22, device), Blocks::new(&[13], 4, 22, device)])
    }

    #[test]
    fn tokens_of_a_block_see_each_other_and_others_those_before_them() {
        let device = Device::flex();
        let values = |which: usize, heads: usize| -> Vec<f32> {
            (0..22 * heads * 8).map(|i| ((i + 31 * which) * 7919 % 1013) as f32 / 506.5 - 1.0).collect()
        };
        let [q, k, v, d_o] = [6, 2, 2, 6].map(|heads| host::tensor(values(heads, heads), [22, heads * 8], &device));
        // Padding has no gradient.
        let d_o = Tensor::cat(vec![d_o.clone().narrow(0, 0, 20), d_o.narrow(0, 20, 2) * 0.0], 0);
        let layout = layout(&device);
        for window in [None, Some(3)] {
            let heads =
                Heads { num_heads: 6, num_kv_heads: 2, head_dim: 8, scale: 0.3, window, chunk: None, soft_cap: None };
            let inputs = AttentionInputs { qkv: [&q, &k, &v], layout: &layout, heads };
            let [one, other] = [place_on(DeviceKind::Cpu), plain(F32Products::OfDevice)].map(|place| {
                let attended = attention(place, inputs);
                let gradients = attention_backward(place, &d_o, &attended, inputs);
                let all = std::iter::once(attended.o).chain(gradients);
                // Without padding.
                all.flat_map(|x| x.narrow(0, 0, 20).into_data().try_to_vec::<f32>().unwrap()).collect::<Vec<_>>()
            });
            let worst = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-5, "{worst}");

            // Head by head with every score.
            let values = [&q, &k, &v].map(|x| x.clone().into_data().try_to_vec::<f32>().unwrap());
            let (documents, block) = ([0..4, 4..11, 11..20], [5..10, 13..17]);
            let is_seen = |query: usize, key: usize| {
                let is_one = documents.iter().any(|document| document.contains(&query) && document.contains(&key));
                let is_block = block.iter().any(|block| block.contains(&query) && block.contains(&key));
                is_one && (key <= query || is_block) && window.is_none_or(|window| key + window > query)
            };
            for (query, head) in (0..20).flat_map(|query| (0..6).map(move |head| (query, head))) {
                let of = |x: &Vec<f32>, token: usize, heads: usize, head: usize| {
                    x[(token * heads + head) * 8..][..8].to_vec()
                };
                let seen: Vec<usize> = (0..20).filter(|key| is_seen(query, *key)).collect();
                let product = |key: &usize| {
                    let (q, k) = (of(&values[0], query, 6, head), of(&values[1], *key, 2, head / 3));
                    (q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * 0.3).exp()
                };
                let weights: Vec<f32> = seen.iter().map(product).collect();
                let sum: f32 = weights.iter().sum();
                for at in 0..8 {
                    let shares = seen.iter().zip(&weights);
                    let expected: f32 = shares.map(|(key, p)| of(&values[2], *key, 2, head / 3)[at] * p / sum).sum();
                    assert!((one[(query * 6 + head) * 8 + at] - expected).abs() < 1e-5, "{query} {head}");
                }
            }
        }
    }
}
