//! Causal self-attention with grouped queries, without the matrix of all scores in either direction.
//!
//! The forward keeps the log-sum-exp of each row of scores; from it the backward recomputes the probabilities (Dao et
//! al., 2022). Keys and values are never expanded to the number of query heads.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::layout::Stretch;
use super::profile::{self, Cost};

use super::plain::attention::blocks::{with_blocks, with_blocks_backward};

pub use super::plain::attention::sinks::with_sinks;
pub use super::plain::attention::{Attended, AttentionInputs, LseOrder};
pub use crate::spec::Heads;

/// `softmax(scale q k^T + mask) v` for every head; a token sees itself and the tokens before it in its document, or in its chunk of
/// that where the heads have such, and those of the
/// [blocks](super::layout::Layout::with_blocks) that it is in.
#[must_use]
pub fn attention(place: Place, inputs: AttentionInputs<'_>) -> Attended {
    let cut = inputs.layout.cut(inputs.heads.chunk);
    let inputs = inputs.with_texts_of(cut.as_deref());
    let attended = || place.attention(inputs);
    let blocks = || inputs.layout.blocks(inputs.heads);
    let all = || blocks().fold(attended(), |attended, blocks| with_blocks(attended, blocks, inputs));
    profile::measure("attention", || cost(inputs, 2), all)
}

/// `softmax(scale q k^T) v` for every head, in which a token sees all of its group: so many groups of so many tokens follow one another.
/// There are as many heads of keys as of queries.
///
/// # Shapes
/// `qkv`, and the output: `[tokens, num_heads * head_dim]`.
#[must_use]
pub fn attention_both_ways(place: Place, qkv: [&Tensor<2>; 3], groups: &[[usize; 2]], heads: Heads) -> Tensor<2> {
    let cost = || {
        let pairs: usize = groups.iter().map(|[count, length]| count * length * length).sum();
        Cost {
            shape: format!("{} heads of {}", heads.num_heads, heads.head_dim),
            flops: profile::count(4 * pairs * heads.query_width()),
            bytes: 4.0 * profile::bytes(qkv[0]),
        }
    };
    profile::measure("attention_both_ways", cost, || place.attention_both_ways(qkv, groups, heads))
}

/// Cost of `products` products for every visible pair of a query and a key, for each query head.
fn cost(AttentionInputs { qkv, layout, heads }: AttentionInputs<'_>, products: usize) -> Cost {
    let of_stretch = |stretch: &Stretch| heads.visible_pairs(stretch.len) + stretch.prefix.len() * stretch.len;
    let all_pairs: usize = layout.stretches().iter().map(of_stretch).sum();
    let output = profile::bytes(qkv[0]);
    Cost {
        shape: format!("{} heads of {}", heads.num_heads, heads.head_dim),
        flops: profile::count(2 * products * all_pairs * heads.num_heads * heads.head_dim),
        bytes: qkv.iter().map(|x| profile::bytes(x)).sum::<f64>() + output,
    }
}

/// The gradients of [`attention`] with respect to `q`, `k` and `v`.
///
/// # Shapes
/// `d_o`: `[tokens, num_heads * head_dim]`; the rest as in the forward.
#[must_use]
pub fn attention_backward(
    place: Place,
    d_o: &Tensor<2>,
    attended: &Attended,
    inputs: AttentionInputs<'_>,
) -> [Tensor<2>; 3] {
    let cut = inputs.layout.cut(inputs.heads.chunk);
    let inputs = inputs.with_texts_of(cut.as_deref());
    let once = || cost(inputs, 4);
    let cost = || Cost { bytes: 2.0 * once().bytes, ..once() };
    let all = || {
        let grads = place.attention_backward(d_o, attended, inputs);
        let blocks = inputs.layout.blocks(inputs.heads);
        blocks.fold(grads, |grads, blocks| with_blocks_backward(grads, d_o, attended, blocks, inputs))
    };
    profile::measure("attention_backward", cost, all)
}
