//! Attention in which tokens see each other both ways, in plain tensor calls.

use burn::tensor::Tensor;
use burn::tensor::activation::softmax;

use crate::ops::product::{F32Products, matmul};
use crate::spec::Heads;

/// Most scores that are computed at a time.
pub(crate) const MOST_SCORES: usize = 1 << 24;

pub(crate) fn plain_both_ways(
    products: F32Products,
    qkv: [&Tensor<2>; 3],
    groups: &[[usize; 2]],
    heads: Heads,
) -> Tensor<2> {
    let mut start = 0;
    let of_groups = groups.iter().map(|[count, length]| {
        start += count * length;
        let part = |x: &Tensor<2>| x.clone().narrow(0, start - count * length, count * length);
        in_groups(products, qkv.map(part), [*count, *length], heads)
    });
    Tensor::cat(of_groups.collect(), 0)
}

/// Some queries at a time, so that their scores fit in memory.
fn in_groups(products: F32Products, qkv: [Tensor<2>; 3], [count, length]: [usize; 2], heads: Heads) -> Tensor<2> {
    let Heads { num_heads, head_dim, scale, .. } = heads;
    let by_head = |x: Tensor<2>| x.reshape([count, length, num_heads, head_dim]).swap_dims(1, 2);
    let [q, k, v] = qkv.map(|x| by_head(x).reshape([count * num_heads, length, head_dim]));
    let (q, k) = (q * scale, k.swap_dims(1, 2));
    let at_a_time = (MOST_SCORES / (count * num_heads * length)).max(1);
    let of_queries = |start: usize| {
        let queries = q.clone().narrow(1, start, at_a_time.min(length - start));
        let shares = softmax(matmul(&queries, &k, products), 2);
        matmul(&shares, &v, products)
    };
    let parts = (0..length).step_by(at_a_time).map(of_queries).collect();
    let all = Tensor::cat(parts, 1).reshape([count, num_heads, length, head_dim]);
    all.swap_dims(1, 2).reshape([count * length, num_heads * head_dim])
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::attention::attention_both_ways;
    use crate::ops::host;
    use crate::ops::kernels::plain;
    use crate::ops::place::place_on;

    #[test]
    fn the_cpus_kernel_computes_what_plain_calls_do() {
        for (head_dim, groups) in [(20, vec![[1, 1], [2, 7], [3, 96]]), (72, vec![[1, 300]]), (64, vec![[2, 97]])] {
            let heads = Heads {
                num_heads: 3,
                num_kv_heads: 3,
                head_dim,
                scale: 0.3,
                window: None,
                chunk: None,
                soft_cap: None,
            };
            let tokens: usize = groups.iter().map(|[count, length]| count * length).sum();
            let qkv: [Tensor<2>; 3] = std::array::from_fn(|which| {
                let value = |i: usize| ((i + 31 * which) * 7919 % 1013) as f32 / 506.5 - 1.0;
                host::tensor((0..tokens * 3 * head_dim).map(value).collect(), [tokens, 3 * head_dim], &Device::flex())
            });
            let [ours, expected] = [place_on(DeviceKind::Cpu), plain(F32Products::OfDevice)]
                .map(|place| host::view(&attention_both_ways(place, qkv.each_ref(), &groups, heads)).to_vec());
            let most = ours.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 2e-6, "{head_dim} {groups:?}: {most}");
        }
    }
}
