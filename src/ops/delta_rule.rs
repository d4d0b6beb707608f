//! The gated delta rule (Yang et al., 2025), in chunks of tokens.
//!
//! Every value head has a state `S`, `[key_head_dim, value_head_dim]`, which is zero before a document. A token with decay
//! `g <= 0` and strength `b` in (0, 1) makes `S = exp(g) S + b k (v - exp(g) S^T k)^T` and reads `o = S^T q`. Queries and keys
//! are divided by their norms, queries also by the root of their width.
//!
//! In a chunk, with the sums `c` of its decays, all tokens are one triangular system: `(I + A) W = b (V - exp(c) K S)`, where
//! `A_ij = b_i k_i k_j exp(c_i - c_j)` below the diagonal. Then `O = exp(c) Q S + P W` with `P_ij = q_i k_j exp(c_i - c_j)` up to
//! the diagonal, and the next state is `exp(c_last) S + (exp(c_last - c) K)^T W`.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::plain::next::TextRows;
use super::profile::{self, Cost};

#[cfg(test)]
mod tests;

pub use super::plain::delta_rule::chunks::CHUNK_TOKENS;
pub use super::plain::delta_rule::{DeltaInputs, Gates};
pub use crate::spec::DeltaHeads;

/// The outputs of all value heads, `[tokens, value_width]`; zeros outside all documents.
#[must_use]
pub fn delta_rule(place: Place, inputs: DeltaInputs<'_>) -> Tensor<2> {
    profile::measure("delta_rule", || cost(inputs, 1), || place.delta_rule(inputs, None).0)
}

/// [`delta_rule`] of the next tokens of texts, and the states after them.
///
/// # Shapes
/// `memories`: the states before them, `[num_value_heads, key_head_dim, value_head_dim]` each, in `f32`.
#[must_use]
pub fn delta_rule_next(
    place: Place,
    memories: Vec<Tensor<3>>,
    texts: &[TextRows],
    inputs: DeltaInputs<'_>,
) -> (Tensor<2>, Vec<Tensor<3>>) {
    profile::measure("delta_rule_next", || cost(inputs, 1), || place.delta_rule_next(memories, texts, inputs))
}

/// The gradients of [`delta_rule`] with respect to queries, keys and values side by side, and to the gates.
///
/// # Shapes
/// `d_o`: `[tokens, value_width]`, zeros outside all documents.
#[must_use]
pub fn delta_rule_backward(place: Place, d_o: &Tensor<2>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Gates<Tensor<2>>) {
    profile::measure("delta_rule_backward", || cost(inputs, 4), || place.delta_rule_backward(d_o, inputs))
}

/// Cost of `times` the products of the forward.
fn cost(DeltaInputs { qkv, heads, .. }: DeltaInputs<'_>, times: usize) -> Cost {
    let tokens = qkv.dims()[0];
    let DeltaHeads { num_value_heads, key_head_dim, value_head_dim, .. } = heads;
    Cost {
        shape: format!("{num_value_heads} heads of {key_head_dim} x {value_head_dim}"),
        flops: profile::count(times * tokens * heads.flops_per_token(CHUNK_TOKENS)),
        bytes: profile::count(times) * (profile::bytes(qkv) + profile::count(4 * tokens * heads.value_width())),
    }
}
