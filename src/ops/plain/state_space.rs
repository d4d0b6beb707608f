//! State spaces in plain tensor calls: a chunk of all heads and documents at a time.

use burn::tensor::{DType, Tensor, activation};

use super::delta_rule::chunks::{CHUNK_TOKENS, Chunks};
use super::delta_rule::{going_on, of_step, repeated, summed};
use crate::device::Dtype;
use crate::ops::layout::Layout;
use crate::ops::product::{F32Products, matmul};
use crate::spec::StateHeads;

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
    let (keys, values) = (heads.num_heads * heads.state_dim, heads.inner_width());
    let states = heads.num_heads * heads.state_len() / CHUNK_TOKENS;
    // As of the delta rule: `b`, `c`, `x` and outputs by head; then states, copies, matrices of pairs of tokens and gradients.
    let by_head = 2 * keys + 2 * values;
    let pairs = 4 * heads.num_heads * CHUNK_TOKENS;
    [by_head, 2 * by_head + 2 * states + values + pairs + by_head].map(|numbers| numbers * in_f32)
}

/// All chunks, `[chunks, num_heads, len, width]`.
struct Split {
    x: Tensor<4>,
    b: Tensor<4>,
    c: Tensor<4>,
    decay: Tensor<4>,
    strength: Tensor<4>,
}

/// One chunk of some documents, `[documents * num_heads, len, width]`.
struct Chunk {
    x: Tensor<3>,
    b: Tensor<3>,
    c: Tensor<3>,
    /// `d`, `[.., len, 1]`.
    strength: Tensor<3>,
    /// `exp(l)`, `exp(l_last - l)`, `[.., len, 1]`, and `exp(l_last)`, `[.., 1, 1]`.
    from_start: Tensor<3>,
    to_end: Tensor<3>,
    whole: Tensor<3>,
    /// `exp(l_t - l_s)` up to the diagonal.
    decays: Tensor<3>,
}

impl Split {
    fn new(inputs: StateInputs<'_>, chunks: &Chunks) -> Self {
        let StateInputs { xbc, gates, heads, .. } = inputs;
        let (inner, of_groups) = (heads.inner_width(), heads.num_groups * heads.state_dim);
        let part = |first, width, heads| chunks.split(&xbc.clone().narrow(1, first, width), heads);
        let [b, c] =
            [0, 1].map(|which| repeated(part(inner + which * of_groups, of_groups, heads.num_groups), heads.group()));
        let gate = |gate: &Tensor<2>| chunks.split(gate, heads.num_heads);
        Self { x: part(0, inner, heads.num_heads), b, c, decay: gate(&gates.decay), strength: gate(&gates.strength) }
    }

    fn chunk(&self, step: (usize, usize), chunks: &Chunks) -> Chunk {
        let part = |x: &Tensor<4>| of_step(x, step);
        let sums = part(&self.decay).cumsum(1);
        let last = sums.clone().narrow(1, chunks.len - 1, 1);
        let difference = sums.clone() - sums.clone().swap_dims(1, 2);
        Chunk {
            x: part(&self.x),
            b: part(&self.b),
            c: part(&self.c),
            strength: part(&self.strength),
            from_start: sums.clone().exp(),
            to_end: (last.clone() - sums).exp(),
            whole: last.exp(),
            // Above the diagonal differences are positive, and may be large.
            decays: (difference * chunks.causal.clone()).exp() * chunks.causal.clone(),
        }
    }
}

fn transposed(x: &Tensor<3>) -> Tensor<3> {
    x.clone().swap_dims(1, 2)
}

impl Chunk {
    /// What is written: `d x`.
    fn written(&self) -> Tensor<3> {
        self.x.clone() * self.strength.clone()
    }

    /// `c_t b_s exp(l_t - l_s)` up to the diagonal.
    fn weights(&self, products: F32Products) -> Tensor<3> {
        matmul(&self.c, &transposed(&self.b), products) * self.decays.clone()
    }

    fn output(&self, state: &Tensor<3>, products: F32Products) -> Tensor<3> {
        matmul(&self.c, state, products) * self.from_start.clone()
            + matmul(&self.weights(products), &self.written(), products)
    }

    fn next_state(&self, state: &Tensor<3>, products: F32Products) -> Tensor<3> {
        let keys = transposed(&(self.b.clone() * self.to_end.clone()));
        state.clone() * self.whole.clone() + matmul(&keys, &self.written(), products)
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
    let chunks = inputs.layout.delta_chunks(&device);
    let split = Split::new(inputs, &chunks);
    let has_state = state.is_some();
    let mut state = state.unwrap_or_else(|| zero_state(inputs, &chunks));
    let mut outputs = Vec::with_capacity(chunks.counts.len());
    for step in chunks.steps() {
        state = going_on(state, step.1 * heads.num_heads);
        let chunk = split.chunk(step, &chunks);
        let y = chunk.output(&state, products);
        outputs.push(y.reshape([step.1, heads.num_heads, chunks.len, heads.head_dim]));
        state = chunk.next_state(&state, products);
    }
    let y = if outputs.is_empty() {
        Tensor::zeros([inputs.xbc.dims()[0], heads.inner_width()], (&device, DType::F32))
    } else {
        chunks.join(Tensor::cat(outputs, 0))
    };
    (y.cast(inputs.xbc.dtype()), has_state.then_some(state))
}

fn zero_state(StateInputs { xbc, heads, .. }: StateInputs<'_>, chunks: &Chunks) -> Tensor<3> {
    let count = chunks.counts.first().copied().unwrap_or(0) * heads.num_heads;
    Tensor::zeros([count, heads.state_dim, heads.head_dim], (&xbc.device(), DType::F32))
}

/// Gradients of a chunk.
struct ChunkGrads {
    x: Tensor<3>,
    b: Tensor<3>,
    c: Tensor<3>,
    decay: Tensor<3>,
    strength: Tensor<3>,
    /// Of the state before.
    state: Tensor<3>,
}

impl Chunk {
    /// From the gradients of the output and of the state after it; `before` is the state before.
    fn backward(&self, dy: &Tensor<3>, d_state: &Tensor<3>, before: &Tensor<3>, products: F32Products) -> ChunkGrads {
        let product = |a: &Tensor<3>, b: &Tensor<3>| matmul(a, b, products);
        let (written, weights) = (self.written(), self.weights(products));
        let d_written = product(&transposed(&weights), dy) + product(&self.b, d_state) * self.to_end.clone();
        let d_weights = product(dy, &transposed(&written)) * self.decays.clone();
        let asked = dy.clone() * self.from_start.clone();
        let c = product(&d_weights, &self.b) + product(&asked, &transposed(before));
        let b =
            product(&transposed(&d_weights), &self.c) + product(&written, &transposed(d_state)) * self.to_end.clone();
        // Decays multiply what is read in their rows, and divide what is written in their columns.
        let d_sums = (self.c.clone() * c.clone()).sum_dim(2) - (self.b.clone() * b.clone()).sum_dim(2);
        // The last sum also decays all of the state, and what is written until it.
        let after = self.next_state(before, products);
        let [batch, rows, columns] = after.dims();
        let of_state = (after * d_state.clone()).reshape([batch, 1, rows * columns]).sum_dim(2);
        // Sums from a token on.
        let decay = d_sums.flip([1]).cumsum(1).flip([1]) + of_state;
        ChunkGrads {
            x: d_written.clone() * self.strength.clone(),
            strength: (d_written * self.x.clone()).sum_dim(2),
            b,
            c,
            decay,
            state: d_state.clone() * self.whole.clone() + product(&transposed(&self.c), &asked),
        }
    }
}

pub(crate) fn plain_state_space_backward(
    products: F32Products,
    dy: &Tensor<2>,
    inputs: StateInputs<'_>,
) -> (Tensor<2>, StateGates<Tensor<2>>) {
    let (heads, chunks) = (inputs.heads, inputs.layout.delta_chunks(&inputs.xbc.device()));
    let steps = chunks.steps();
    if steps.is_empty() {
        let StateGates { decay, strength } = inputs.gates;
        let zeros = StateGates { decay: decay.zeros_like(), strength: strength.zeros_like() };
        return (inputs.xbc.zeros_like(), zeros);
    }
    let split = Split::new(inputs, &chunks);
    let mut states = Vec::with_capacity(steps.len());
    let mut state = zero_state(inputs, &chunks);
    for step in &steps {
        state = going_on(state, step.1 * heads.num_heads);
        let next = split.chunk(*step, &chunks).next_state(&state, products);
        states.push(std::mem::replace(&mut state, next));
    }
    let dy = chunks.split(dy, heads.num_heads);
    let mut d_state = state.zeros_like();
    let mut grads: Vec<[Tensor<4>; 5]> = Vec::with_capacity(steps.len());
    for (step, before) in steps.iter().zip(states).rev() {
        let missing = before.dims()[0] - d_state.dims()[0];
        if missing > 0 {
            // Documents that end here.
            let zeros = before.zeros_like().narrow(0, 0, missing);
            d_state = Tensor::cat(vec![d_state, zeros], 0);
        }
        let of_chunk = split.chunk(*step, &chunks).backward(&of_step(&dy, *step), &d_state, &before, products);
        let ChunkGrads { x, b, c, decay, strength, state } = of_chunk;
        d_state = state;
        grads.push([x, b, c, decay, strength].map(|grad| {
            let [_, len, width] = grad.dims();
            grad.reshape([step.1, heads.num_heads, len, width])
        }));
    }
    let all = |which: usize| Tensor::cat(grads.iter().rev().map(|grads| grads[which].clone()).collect(), 0);
    let [dx, db, dc] = [all(0), summed(all(1), heads.group()), summed(all(2), heads.group())].map(|x| chunks.join(x));
    let dxbc = Tensor::cat(vec![dx, db, dc], 1).cast(inputs.xbc.dtype());
    (dxbc, StateGates { decay: chunks.join(all(3)), strength: chunks.join(all(4)) })
}
