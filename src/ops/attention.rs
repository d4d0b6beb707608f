//! Causal self-attention with grouped queries, without the matrix of all scores in either direction.
//!
//! The forward keeps the log-sum-exp of each row of scores; from it the backward recomputes the probabilities (Dao et
//! al., 2022). Keys and values are never expanded to the number of query heads.

use burn::tensor::Tensor;

use super::layout::{Layout, Stretch};
use super::profile::{self, Cost};

pub(super) mod chunk;
pub mod plain;
mod sinks;

pub use self::chunk::chunk_len;
pub use self::plain::{plain_attention, plain_attention_backward};
pub use self::sinks::with_sinks;
pub use crate::spec::Heads;

/// Output of attention, and what its backward needs.
#[derive(Clone, Debug)]
pub struct Attended {
    /// `[tokens, num_heads * head_dim]`.
    pub o: Tensor<2>,
    /// Log-sum-exp of every row of scores, in `f32`, `[num_heads * tokens]`.
    pub lse: Tensor<1>,
    /// Its order, which is the implementation's.
    pub order: LseOrder,
}

/// How the rows of scores of all heads follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LseOrder {
    /// Head by head: `[num_heads, tokens]`.
    ByHead,
    /// Token by token: `[tokens, num_heads]`.
    ByToken,
    /// `[rows, num_kv_heads, row_length, heads of a group]`.
    Grouped,
}

/// `softmax(scale q k^T + mask) v` for every head; a token sees itself and the tokens before it in its document.
///
/// # Shapes
/// `q`: `[tokens, num_heads * head_dim]`, `k`, `v`: `[tokens, num_kv_heads * head_dim]`.
#[must_use]
pub fn attention(q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>, layout: &Layout, heads: Heads) -> Attended {
    let work = || layout.place().attention([q, k, v], layout, heads);
    profile::measure("attention", || cost([q, k, v], layout, heads, 2), work)
}

/// Cost of `products` products for every visible pair of a query and a key, for each query head.
fn cost(operands: [&Tensor<2>; 3], layout: &Layout, heads: Heads, products: usize) -> Cost {
    let of_stretch = |stretch: &Stretch| heads.visible_pairs(stretch.len) + stretch.prefix.len() * stretch.len;
    let all_pairs: usize = layout.stretches().iter().map(of_stretch).sum();
    let output = profile::bytes(operands[0]);
    Cost {
        shape: format!("{} heads of {}", heads.num_heads, heads.head_dim),
        flops: profile::count(2 * products * all_pairs * heads.num_heads * heads.head_dim),
        bytes: operands.iter().map(|x| profile::bytes(x)).sum::<f64>() + output,
    }
}

/// The gradients of [`attention`] with respect to `q`, `k` and `v`.
///
/// # Shapes
/// `d_o`: `[tokens, num_heads * head_dim]`; the rest as in the forward.
#[must_use]
pub fn attention_backward(
    d_o: &Tensor<2>,
    operands: [&Tensor<2>; 3],
    attended: &Attended,
    layout: &Layout,
    heads: Heads,
) -> [Tensor<2>; 3] {
    let once = || cost(operands, layout, heads, 4);
    let cost = || Cost { bytes: 2.0 * once().bytes, ..once() };
    let work = || layout.place().attention_backward(d_o, operands, attended, layout, heads);
    profile::measure("attention_backward", cost, work)
}
