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

/// [`delta_rule`] of the next tokens of a text, all of them one document, and the state after them.
///
/// # Shapes
/// `state`: of the tokens before, `[num_value_heads, key_head_dim, value_head_dim]`, in `f32`.
#[must_use]
pub fn delta_rule_from(place: Place, state: Tensor<3>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Tensor<3>) {
    let work = || place.delta_rule(inputs, Some(state));
    let (o, state) = profile::measure("delta_rule", || cost(inputs, 1), work);
    let Some(state) = state else { unreachable!("a state gives a state") };
    (o, state)
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
