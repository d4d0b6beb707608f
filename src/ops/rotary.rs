//! Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout: dimension `i` turns with
//! `i + head_dim / 2`.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::layout::Layout;
use super::profile::{self, Cost};
use crate::spec::Heads;

/// Rotates every head of queries and keys by its token's angles in rotary embedding `rope` of the layout; `inverse` rotates back,
/// which is the gradient. Nothing else may have views of them.
///
/// # Shapes
/// Queries: `[tokens, num_heads * head_dim]`, keys: `[tokens, num_kv_heads * head_dim]`.
#[must_use]
pub fn rotate(
    place: Place,
    qk: [Tensor<2>; 2],
    layout: &Layout,
    rope: usize,
    heads: Heads,
    inverse: bool,
) -> [Tensor<2>; 2] {
    // Not clones: a second owner would make the kernel copy them.
    let costs = [0, 1].map(|which| profile::passes(&qk[which], 2));
    let work = || place.rotate(qk, layout, rope, heads, inverse);
    profile::measure("rotate", || Cost::sum(costs.into_iter()), work)
}
