//! The gated delta rule (Yang et al., 2025), in chunks of tokens.
//!
//! Every value head has a state `S`, `[key_head_dim, value_head_dim]`, which is zero before a document. A token with decay
//! `g <= 0` and strength `b` in (0, 1) makes `S = exp(g) S + b k (v - exp(g) S^T k)^T` and reads `o = S^T q`. Queries and keys
//! are divided by their norms, queries also by the root of their width.
//!
//! In a chunk, with the sums `c` of its decays, all tokens are one triangular system: `(I + A) W = b (V - exp(c) K S)`, where
//! `A_ij = b_i k_i k_j exp(c_i - c_j)` below the diagonal. Then `O = exp(c) Q S + P W` with `P_ij = q_i k_j exp(c_i - c_j)` up to
//! the diagonal, and the next state is `exp(c_last) S + (exp(c_last - c) K)^T W`.

use burn::tensor::{DType, Tensor, activation};

use super::layout::Layout;
use super::profile::{self, Cost};

pub(super) mod chunks;
pub(super) mod host;
mod plain;
#[cfg(test)]
mod tests;

pub use self::plain::{plain_delta_rule, plain_delta_rule_backward};
use crate::device::Dtype;
pub use crate::spec::DeltaHeads;

/// Tokens in a chunk.
pub const CHUNK_TOKENS: usize = 64;

/// Added to the squares of a query or key before the root.
pub(super) const NORM_EPS: f64 = 1e-6;

/// What the rule computes with.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values side by side, `[tokens, qkv_width]`.
    pub qkv: &'a Tensor<2>,
    /// Decay `g` and strength `b` of every value head.
    pub gates: &'a Gates<Tensor<2>>,
}

/// Decay and strength of every value head, `[tokens, num_value_heads]` each, in `f32`; or their gradients.
#[derive(Clone, Debug)]
pub struct Gates<T> {
    /// `g`, the logarithm of what the state is multiplied by.
    pub decay: T,
    /// `b`, how much of the difference is written; as a gradient, that of its logarithm.
    pub strength: T,
}

impl Gates<Tensor<2>> {
    /// `g = -exp(a_log) softplus(a + dt_bias)` and `b = sigmoid(b)` of the projections `a` and `b`, `[tokens, num_value_heads]`.
    #[must_use]
    pub fn new([b, a]: [&Tensor<2>; 2], a_log: &Tensor<1>, dt_bias: &Tensor<1>) -> Self {
        let a = a.clone().cast(DType::F32) + dt_bias.clone().unsqueeze();
        // Without overflow: max(x, 0) + ln(1 + exp(-|x|)).
        let softplus = activation::relu(a.clone()) + a.abs().neg().exp().log1p();
        let decay = softplus * a_log.clone().exp().neg().unsqueeze();
        Self { decay, strength: activation::sigmoid(b.clone().cast(DType::F32)) }
    }

    /// The gradients of the projections `b` and `a` from those of decay and strength.
    #[must_use]
    pub fn backward(&self, grads: Self, a: &Tensor<2>, a_log: &Tensor<1>, dt_bias: &Tensor<1>) -> [Tensor<2>; 2] {
        let dtype = a.dtype();
        let slope = activation::sigmoid(a.clone().cast(DType::F32) + dt_bias.clone().unsqueeze());
        let da = grads.decay * slope * a_log.clone().exp().neg().unsqueeze();
        let db = grads.strength * (self.strength.clone().neg() + 1.0);
        [db, da].map(|grad| grad.cast(dtype))
    }
}

/// Temporary numbers for each token in plain tensor calls, in the type of the activations: in the forward and in the backward.
pub(super) fn plain_delta_rule_numbers(heads: DeltaHeads, dtype: Dtype) -> [usize; 2] {
    let in_f32 = size_of::<f32>() / dtype.num_bytes();
    let (keys, values) = (heads.num_value_heads * heads.key_head_dim, heads.value_width());
    let states = heads.num_value_heads * heads.state_len() / CHUNK_TOKENS;
    // Queries, keys, values and outputs by head. Then the states before and after every chunk, what each writes, its copies of
    // queries, keys and values, its matrices of pairs of tokens, and the gradients.
    let by_head = 2 * keys + 2 * values;
    let pairs = 4 * heads.num_value_heads * CHUNK_TOKENS;
    [by_head, 2 * by_head + 2 * states + values + pairs + by_head].map(|numbers| numbers * in_f32)
}

/// The outputs of all value heads, `[tokens, value_width]`; zeros outside all documents.
#[must_use]
pub fn delta_rule(inputs: DeltaInputs<'_>, layout: &Layout, heads: DeltaHeads) -> Tensor<2> {
    let work = || layout.place().delta_rule(inputs, layout, heads, None).0;
    profile::measure("delta_rule", || cost(inputs, heads, 1), work)
}

/// [`delta_rule`] of the next tokens of a text, all of them one document, and the state after them.
///
/// # Shapes
/// `state`: of the tokens before, `[num_value_heads, key_head_dim, value_head_dim]`, in `f32`.
#[must_use]
pub fn delta_rule_from(
    state: Tensor<3>,
    inputs: DeltaInputs<'_>,
    layout: &Layout,
    heads: DeltaHeads,
) -> (Tensor<2>, Tensor<3>) {
    let work = || layout.place().delta_rule(inputs, layout, heads, Some(state));
    let (o, state) = profile::measure("delta_rule", || cost(inputs, heads, 1), work);
    let Some(state) = state else { unreachable!("a state gives a state") };
    (o, state)
}

/// The gradients of [`delta_rule`] with respect to queries, keys and values side by side, and to the gates.
///
/// # Shapes
/// `d_o`: `[tokens, value_width]`, zeros outside all documents.
#[must_use]
pub fn delta_rule_backward(
    d_o: &Tensor<2>,
    inputs: DeltaInputs<'_>,
    layout: &Layout,
    heads: DeltaHeads,
) -> (Tensor<2>, Gates<Tensor<2>>) {
    let work = || layout.place().delta_rule_backward(d_o, inputs, layout, heads);
    profile::measure("delta_rule_backward", || cost(inputs, heads, 4), work)
}

/// Cost of `times` the products of the forward.
fn cost(inputs: DeltaInputs<'_>, heads: DeltaHeads, times: usize) -> Cost {
    let tokens = inputs.qkv.dims()[0];
    let DeltaHeads { num_value_heads, key_head_dim, value_head_dim, .. } = heads;
    Cost {
        shape: format!("{num_value_heads} heads of {key_head_dim} x {value_head_dim}"),
        flops: profile::count(times * tokens * heads.flops_per_token(CHUNK_TOKENS)),
        bytes: profile::count(times) * (profile::bytes(inputs.qkv) + profile::count(4 * tokens * heads.value_width())),
    }
}
