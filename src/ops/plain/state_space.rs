//! State spaces in plain tensor calls: all chunks at a time, then the states along them, then what is read of these.

use burn::tensor::{DType, Tensor, activation};

use self::along::{StateChunks, no_state};
use super::delta_rule::chunks::CHUNK_TOKENS;
use crate::device::Dtype;
use crate::ops::layout::Layout;
use crate::ops::product::{F32Products, matmul};
use crate::spec::StateHeads;

pub mod along;

/// What a state space computes with.
#[derive(Clone, Copy, Debug)]
pub struct StateInputs<'a> {
    /// `x` of all heads, and `b` and `c` of all groups, side by side, `[tokens, xbc_width]`.
    pub xbc: &'a Tensor<2>,
    /// Decay and strength of every head.
    pub gates: &'a StateGates<Tensor<2>>,
    /// Where the documents are.
    pub layout: &'a Layout,
    /// The heads.
    pub heads: StateHeads,
}

/// Decay and strength of every head, `[tokens, num_heads]` each, in `f32`; or their gradients.
#[derive(Clone, Debug)]
pub struct StateGates<T> {
    /// The logarithm of what the state is multiplied by.
    pub decay: T,
    /// What is written is multiplied by it.
    pub strength: T,
}

/// Bounds of strengths.
pub type StepBounds = [f64; 2];

impl StateGates<Tensor<2>> {
    /// Strengths are `softplus(dt + dt_bias)` within the bounds, and decays `-exp(a_log)` times those.
    ///
    /// # Shapes
    /// `dt`: `[tokens, num_heads]`, the others `[num_heads]` in `f32`.
    #[must_use]
    pub fn new(dt: &Tensor<2>, a_log: &Tensor<1>, dt_bias: &Tensor<1>, [least, most]: StepBounds) -> Self {
        let dt = dt.clone().cast(DType::F32) + dt_bias.clone().unsqueeze();
        // Without overflow: max(x, 0) + ln(1 + exp(-|x|)).
        let softplus = activation::relu(dt.clone()) + dt.abs().neg().exp().log1p();
        let strength = softplus.clamp_min(least);
        let strength = if most.is_finite() { strength.clamp_max(most) } else { strength };
        Self { decay: strength.clone() * a_log.clone().exp().neg().unsqueeze(), strength }
    }

    /// The gradient of `dt` from those of decay and strength.
    #[must_use]
    pub fn backward(
        &self,
        grads: Self,
        dt: &Tensor<2>,
        a_log: &Tensor<1>,
        dt_bias: &Tensor<1>,
        [least, most]: StepBounds,
    ) -> Tensor<2> {
        let slope = activation::sigmoid(dt.clone().cast(DType::F32) + dt_bias.clone().unsqueeze());
        let of_strength = grads.strength + grads.decay * a_log.clone().exp().neg().unsqueeze();
        // At a bound it does not change.
        let is_bound = self.strength.clone().lower_equal_elem(least);
        let is_bound =
            if most.is_finite() { is_bound.bool_or(self.strength.clone().greater_equal_elem(most)) } else { is_bound };
        (of_strength * slope).mask_fill(is_bound, 0.0).cast(dt.dtype())
    }
}

/// Temporary numbers for each token, in the type of the activations: in the forward and in the backward.
pub(crate) fn plain_state_space_numbers(heads: StateHeads, dtype: Dtype) -> [usize; 2] {
    let in_f32 = size_of::<f32>() / dtype.num_bytes();
    let (inner, groups) = (heads.inner_width(), 2 * heads.num_groups * heads.state_dim);
    let (states, pairs) = (heads.num_heads * heads.state_len() / CHUNK_TOKENS, heads.num_heads * CHUNK_TOKENS);
    // While states go along the chunks: rows, decays between tokens, states and what they are made of. Then what is read of them.
    let forward = (3 * inner + pairs + 3 * states).max(6 * inner + 2 * pairs + states);
    // Likewise the gradients of states. Then those of rows and of pairs of tokens.
    let of_rows = (8 * inner + 2 * pairs).max(7 * inner + 3 * pairs) + 2 * states;
    let backward = (4 * inner + pairs + 5 * states).max(of_rows);
    [forward, backward].map(|numbers| (numbers + groups) * in_f32)
}

/// All chunks. Rows of tokens are `[chunks, len, width]`, of heads `[chunks, num_heads, len, head_dim]`, and of groups, whose heads
/// lie side by side, `[chunks, num_groups, len, width]`.
struct Chunked {
    heads: StateHeads,
    products: F32Products,
    /// Rows of tokens.
    x: Tensor<3>,
    /// `d x`.
    written: Tensor<3>,
    /// Of groups.
    b: Tensor<4>,
    c: Tensor<4>,
    /// `d`, `exp(l)`, `exp(l_last - l)`, `[chunks, len, num_heads]`.
    strength: Tensor<3>,
    from_start: Tensor<3>,
    to_end: Tensor<3>,
    /// `l_last`, `[chunks, num_heads]`.
    whole: Tensor<2>,
    /// `exp(l_t - l_s)` up to the diagonal, `[chunks, num_groups, heads, len, len]`.
    decays: Tensor<5>,
}

/// Rows of tokens as those of so many heads or groups.
fn split(x: &Tensor<3>, count: usize) -> Tensor<4> {
    let [chunks, len, width] = x.dims();
    x.clone().reshape([chunks, len, count, width / count]).swap_dims(1, 2)
}

/// The inverse of [`split`].
fn joined(x: Tensor<4>) -> Tensor<3> {
    let [chunks, count, len, width] = x.dims();
    x.swap_dims(1, 2).reshape([chunks, len, count * width])
}

/// Rows of tokens times a number for every head.
fn scaled(x: &Tensor<3>, by: &Tensor<3>) -> Tensor<3> {
    let ([chunks, len, width], heads) = (x.dims(), by.dims()[2]);
    let x = x.clone().reshape([chunks, len, heads, width / heads]) * by.clone().unsqueeze_dim(3);
    x.reshape([chunks, len, width])
}

fn transposed(x: &Tensor<4>) -> Tensor<4> {
    x.clone().swap_dims(2, 3)
}

impl Chunked {
    fn new(inputs: StateInputs<'_>, chunks: &StateChunks, products: F32Products) -> Self {
        let StateInputs { xbc, gates, heads, .. } = inputs;
        let (inner, of_groups) = (heads.inner_width(), heads.num_groups * heads.state_dim);
        let part = |first, width| chunks.rows.rows(&xbc.clone().narrow(1, first, width));
        let [b, c] = [0, 1].map(|which| split(&part(inner + which * of_groups, of_groups), heads.num_groups));
        let (x, strength) = (part(0, inner), chunks.rows.rows(&gates.strength));
        let (count, len) = (chunks.rows.count, chunks.rows.len);
        let sums = chunks.rows.rows(&gates.decay).cumsum(1);
        let last = sums.clone().narrow(1, len - 1, 1);
        let by_head: Tensor<3> = sums.clone().swap_dims(1, 2).reshape([count * heads.num_heads, len, 1]);
        let causal = chunks.rows.causal.clone();
        // Above the diagonal differences are positive, and may be large.
        let difference = (by_head.clone() - by_head.swap_dims(1, 2)) * causal.clone();
        let decays = difference.exp() * causal;
        Self {
            heads,
            products,
            written: scaled(&x, &strength),
            x,
            b,
            c,
            strength,
            from_start: sums.clone().exp(),
            to_end: (last.clone() - sums).exp(),
            whole: last.reshape([count, heads.num_heads]),
            decays: decays.reshape([count, heads.num_groups, heads.group(), len, len]),
        }
    }

    fn product(&self, a: &Tensor<4>, b: &Tensor<4>) -> Tensor<4> {
        matmul(a, b, self.products)
    }

    fn by_head(&self, x: &Tensor<3>) -> Tensor<4> {
        split(x, self.heads.num_heads)
    }

    fn by_group(&self, x: &Tensor<3>) -> Tensor<4> {
        split(x, self.heads.num_groups)
    }

    /// `c_t b_s exp(l_t - l_s)` up to the diagonal, `[chunks, num_heads, len, len]`.
    fn weights(&self) -> Tensor<4> {
        let [chunks, _, _, len, _] = self.decays.dims();
        let pairs = self.product(&self.c, &transposed(&self.b)).unsqueeze_dim::<5>(2);
        (pairs * self.decays.clone()).reshape([chunks, self.heads.num_heads, len, len])
    }

    /// `[chunks, num_groups, state_dim, width]` as `[num_heads, chunks, state_len]`.
    fn states_by_head(&self, states: Tensor<4>) -> Tensor<3> {
        let StateHeads { num_heads, num_groups, head_dim, state_dim } = self.heads;
        let chunks = states.dims()[0];
        let states = states.reshape([chunks, num_groups, state_dim, self.heads.group(), head_dim]);
        states.permute([1, 3, 0, 2, 4]).reshape([num_heads, chunks, state_dim * head_dim])
    }

    /// The inverse of [`states_by_head`](Self::states_by_head).
    fn states_by_group(&self, states: Tensor<3>) -> Tensor<4> {
        let StateHeads { num_groups, head_dim, state_dim, .. } = self.heads;
        let (chunks, group) = (states.dims()[1], self.heads.group());
        let states = states.reshape([num_groups, group, chunks, state_dim, head_dim]);
        states.permute([2, 0, 3, 1, 4]).reshape([chunks, num_groups, state_dim, group * head_dim])
    }

    /// The states after all chunks.
    fn states(&self, chunks: &StateChunks, first: Tensor<3>) -> Tensor<3> {
        let to_end = self.by_group(&scaled(&self.written, &self.to_end));
        let written = self.states_by_head(self.product(&transposed(&self.b), &to_end));
        chunks.states(&written, &self.whole, first, self.products)
    }

    /// Rows of tokens, from [`weights`](Self::weights) and the states before all chunks.
    fn output(&self, weights: &Tensor<4>, before: &Tensor<4>) -> Tensor<3> {
        let of_chunk = joined(self.product(weights, &self.by_head(&self.written)));
        scaled(&joined(self.product(&self.c, before)), &self.from_start) + of_chunk
    }
}

/// [`state_space`](crate::ops::state_space::state_space), or with a state
/// [`state_space_next`](crate::ops::state_space::state_space_next), in plain tensor calls.
pub(crate) fn plain_state_space(
    products: F32Products,
    inputs: StateInputs<'_>,
    state: Option<Tensor<3>>,
) -> (Tensor<2>, Option<Tensor<3>>) {
    let (heads, device) = (inputs.heads, inputs.xbc.device());
    let chunks = inputs.layout.state_chunks(&device);
    if chunks.rows.count == 0 {
        return (Tensor::zeros([inputs.xbc.dims()[0], heads.inner_width()], (&device, inputs.xbc.dtype())), state);
    }
    let chunked = Chunked::new(inputs, &chunks, products);
    let has_state = state.is_some();
    let first = match state {
        Some(state) => state.reshape([heads.num_heads, 1, heads.state_len()]),
        None => no_state(heads.num_heads, heads.state_len(), &device),
    };
    let after = chunked.states(&chunks, first.clone());
    let last = has_state.then(|| {
        let last = after.clone().narrow(1, chunks.rows.count - 1, 1);
        last.reshape([heads.num_heads, heads.state_dim, heads.head_dim])
    });
    let before = chunked.states_by_group(chunks.before(&after, first));
    drop(after);
    let y = chunked.output(&chunked.weights(), &before);
    (chunks.rows.tokens(y).cast(inputs.xbc.dtype()), last)
}

pub(crate) fn plain_state_space_backward(
    products: F32Products,
    dy: &Tensor<2>,
    inputs: StateInputs<'_>,
) -> (Tensor<2>, StateGates<Tensor<2>>) {
    let (heads, device) = (inputs.heads, inputs.xbc.device());
    let chunks = inputs.layout.state_chunks(&device);
    if chunks.rows.count == 0 {
        let StateGates { decay, strength } = inputs.gates;
        let zeros = StateGates { decay: decay.zeros_like(), strength: strength.zeros_like() };
        return (inputs.xbc.zeros_like(), zeros);
    }
    let chunked = Chunked::new(inputs, &chunks, products);
    let Chunked { x, written, b, c, strength, from_start, to_end, whole, .. } = &chunked;
    let product = |a: &Tensor<4>, b: &Tensor<4>| chunked.product(a, b);
    let by_head = |x: &Tensor<3>| chunked.by_head(x);
    let [count, len, inner] = x.dims();
    let of_heads = |x: Tensor<3>| -> Tensor<3> {
        x.reshape([count, len, heads.num_heads, heads.head_dim]).sum_dim(3).reshape([count, len, heads.num_heads])
    };
    let dy = chunks.rows.rows(dy);

    let asked = chunked.by_group(&scaled(&dy, from_start));
    let read = chunked.states_by_head(product(&transposed(c), &asked));
    let d_after = chunks.gradients(&read, whole, products);
    drop(read);
    let first = no_state(heads.num_heads, heads.state_len(), &device);
    let after = chunked.states(&chunks, first.clone());
    // The last sum of a chunk's decays is in all of the state after it.
    let of_state: Tensor<3> = (after.clone() * d_after.clone()).sum_dim(2).swap_dims(0, 1).swap_dims(1, 2);
    let before = chunked.states_by_group(chunks.before(&after, first));
    drop(after);
    let d_after = chunked.states_by_group(d_after);

    let weights = chunked.weights();
    // Decays multiply what is read in their rows, and divide what is written in their columns.
    let of_rows = of_heads(chunked.output(&weights, &before) * dy.clone());
    let d_written =
        joined(product(&transposed(&weights), &by_head(&dy))) + scaled(&joined(product(b, &d_after)), to_end);
    drop(weights);
    let d_sums = of_rows - of_heads(d_written.clone() * written.clone());
    // Sums from a token on.
    let decay = d_sums.flip([1]).cumsum(1).flip([1]) + of_state;

    let d_pairs = product(&by_head(&dy), &transposed(&by_head(written)));
    let d_pairs = d_pairs.reshape(chunked.decays.dims()) * chunked.decays.clone();
    let d_pairs: Tensor<4> = d_pairs.sum_dim(2).reshape([count, heads.num_groups, len, len]);
    let kept = chunked.by_group(&scaled(written, to_end));
    let dc = product(&d_pairs, b) + product(&asked, &transposed(&before));
    let db = product(&transposed(&d_pairs), c) + product(&kept, &transposed(&d_after));
    let d_strength = of_heads(d_written.clone() * x.clone());
    let dx = scaled(&d_written, strength).reshape([count, len, inner]);
    let dxbc = chunks.rows.tokens(Tensor::cat(vec![dx, joined(db), joined(dc)], 2)).cast(inputs.xbc.dtype());
    (dxbc, StateGates { decay: chunks.rows.tokens(decay), strength: chunks.rows.tokens(d_strength) })
}
