//! The gated delta rule in plain tensor calls: a chunk of all heads and documents at a time.
//!
//! The triangular systems are solved by the inverses of their matrices, which are made of those of blocks of 1, 2, 4, ...
//! tokens: with the inverse `T` of the blocks on the diagonal and the part `L` between two neighbours, `T - T L T` is the inverse
//! of twice as large blocks. Powers of the whole matrix would overflow where keys are alike.

use burn::tensor::{DType, Tensor, activation};

use self::chunks::{CHUNK_TOKENS, Chunks};
use crate::device::Dtype;
use crate::ops::layout::Layout;
use crate::ops::product::{F32Products, matmul};
use crate::spec::DeltaHeads;

pub mod chunks;

/// Added to the squares of a query or key before the root.
pub const NORM_EPS: f64 = 1e-6;

/// What the rule computes with.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values side by side, `[tokens, qkv_width]`.
    pub qkv: &'a Tensor<2>,
    /// Decay `g` and strength `b` of every value head.
    pub gates: &'a Gates<Tensor<2>>,
    /// Where the documents are.
    pub layout: &'a Layout,
    /// The heads.
    pub heads: DeltaHeads,
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
pub(crate) fn plain_delta_rule_numbers(heads: DeltaHeads, dtype: Dtype) -> [usize; 2] {
    let in_f32 = size_of::<f32>() / dtype.num_bytes();
    let (keys, values) = (heads.num_value_heads * heads.key_head_dim, heads.value_width());
    let states = heads.num_value_heads * heads.state_len() / CHUNK_TOKENS;
    // Queries, keys, values and outputs by head. Then the states before and after every chunk, what each writes, its copies of
    // queries, keys and values, its matrices of pairs of tokens, and the gradients.
    let by_head = 2 * keys + 2 * values;
    let pairs = 4 * heads.num_value_heads * CHUNK_TOKENS;
    [by_head, 2 * by_head + 2 * states + values + pairs + by_head].map(|numbers| numbers * in_f32)
}

/// All chunks, `[chunks, value_heads, len, width]`.
struct Split {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    decay: Tensor<4>,
    strength: Tensor<4>,
}

/// One chunk of some documents, `[documents * value_heads, len, width]`.
struct Chunk {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    /// `b`, `[.., len, 1]`.
    strength: Tensor<3>,
    /// `exp(c)`, `exp(c_last - c)`, `[.., len, 1]`, and `exp(c_last)`, `[.., 1, 1]`.
    from_start: Tensor<3>,
    to_end: Tensor<3>,
    whole: Tensor<3>,
    /// `exp(c_i - c_j)` up to the diagonal, and `b_i` times it below.
    decays: Tensor<3>,
    strong_decays: Tensor<3>,
    /// `q_i k_j exp(c_i - c_j)` up to the diagonal.
    weights: Tensor<3>,
    /// The inverse of `I + A`.
    inverse: Tensor<3>,
}

/// Normed queries or keys, `[chunks, heads, len, width]`, and the factor of each.
fn normed(x: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
    let factor = (x.clone().square().sum_dim(3) + NORM_EPS).sqrt().recip();
    (x * factor.clone(), factor)
}

/// Every key head as often as value heads share it.
fn repeated(x: Tensor<4>, group: usize) -> Tensor<4> {
    let [chunks, heads, len, width] = x.dims();
    if group == 1 {
        return x;
    }
    let x = x.reshape([chunks, heads, 1, len * width]).repeat_dim(2, group);
    x.reshape([chunks, heads * group, len, width])
}

/// The sum over the value heads that share a key head.
fn summed(x: Tensor<4>, group: usize) -> Tensor<4> {
    let [chunks, heads, len, width] = x.dims();
    if group == 1 {
        return x;
    }
    let x = x.reshape([chunks, heads / group, group, len * width]).sum_dim(2);
    x.reshape([chunks, heads / group, len, width])
}

/// Queries, keys and values of all chunks.
fn qkv(inputs: DeltaInputs<'_>, chunks: &Chunks) -> [Tensor<4>; 3] {
    let heads = inputs.heads;
    let DeltaHeads { num_key_heads, num_value_heads, .. } = heads;
    let (width, x) = (heads.key_width(), inputs.qkv);
    let part = |first, width, heads| chunks.split(&x.clone().narrow(1, first, width), heads);
    let keys = [0, width].map(|first| part(first, width, num_key_heads));
    let [q, k] = keys;
    [q, k, part(2 * width, heads.value_width(), num_value_heads)]
}

/// What queries are multiplied by.
#[expect(clippy::cast_precision_loss, reason = "a width")]
fn scale(heads: DeltaHeads) -> f64 {
    (heads.key_head_dim as f64).powf(-0.5)
}

impl Split {
    fn new(inputs: DeltaInputs<'_>, chunks: &Chunks) -> Self {
        let ([q, k, v], heads) = (qkv(inputs, chunks), inputs.heads);
        let gate = |x: &Tensor<2>| chunks.split(x, heads.num_value_heads);
        let (q, k) = (normed(q).0 * scale(heads), normed(k).0);
        let [q, k] = [q, k].map(|x| repeated(x, heads.group()));
        Self { q, k, v, decay: gate(&inputs.gates.decay), strength: gate(&inputs.gates.strength) }
    }

    fn chunk(&self, step: (usize, usize), chunks: &Chunks, products: F32Products) -> Chunk {
        let part = |x: &Tensor<4>| of_step(x, step);
        let (q, k, strength) = (part(&self.q), part(&self.k), part(&self.strength));
        let sums = part(&self.decay).cumsum(1);
        let last = sums.clone().narrow(1, chunks.rows.len - 1, 1);
        let difference = sums.clone() - sums.clone().swap_dims(1, 2);
        // Above the diagonal differences are positive, and may be large.
        let decays = (difference * chunks.rows.causal.clone()).exp() * chunks.rows.causal.clone();
        let strong_decays = decays.clone() * strength.clone() * chunks.below.clone();
        let transposed = k.clone().swap_dims(1, 2);
        let system = matmul(&k, &transposed, products) * strong_decays.clone();
        Chunk {
            weights: matmul(&q, &transposed, products) * decays.clone(),
            inverse: inverse(&system, chunks, products),
            v: part(&self.v),
            from_start: sums.clone().exp(),
            to_end: (last.clone() - sums).exp(),
            whole: last.exp(),
            q,
            k,
            strength,
            decays,
            strong_decays,
        }
    }
}

/// The part of a step, `[documents * heads, len, width]`.
fn of_step(x: &Tensor<4>, (first, count): (usize, usize)) -> Tensor<3> {
    let [_, heads, len, width] = x.dims();
    x.clone().narrow(0, first, count).reshape([count * heads, len, width])
}

/// `(I + system)^-1`; the system is below the diagonal.
fn inverse(system: &Tensor<3>, chunks: &Chunks, products: F32Products) -> Tensor<3> {
    let identity = (chunks.rows.causal.clone() - chunks.below.clone()).expand(system.dims());
    let mut pairs = chunks.pairs.iter().map(|pairs| system.clone() * pairs.clone());
    let Some(first) = pairs.next() else { return identity };
    pairs.fold(identity - first, |inverse, between| {
        let product = matmul(&matmul(&inverse, &between, products), &inverse, products);
        inverse - product
    })
}

impl Chunk {
    /// `W` from the state before.
    fn written(&self, state: &Tensor<3>, products: F32Products) -> Tensor<3> {
        let known = matmul(&self.k, state, products) * self.from_start.clone();
        matmul(&self.inverse, &((self.v.clone() - known) * self.strength.clone()), products)
    }

    fn output(&self, state: &Tensor<3>, written: &Tensor<3>, products: F32Products) -> Tensor<3> {
        matmul(&self.q, state, products) * self.from_start.clone() + matmul(&self.weights, written, products)
    }

    fn next_state(&self, state: &Tensor<3>, written: &Tensor<3>, products: F32Products) -> Tensor<3> {
        let keys = (self.k.clone() * self.to_end.clone()).swap_dims(1, 2);
        state.clone() * self.whole.clone() + matmul(&keys, written, products)
    }
}

/// The states of the documents that go on.
fn going_on(state: Tensor<3>, count: usize) -> Tensor<3> {
    let [_, rows, columns] = state.dims();
    let has_ended = state.dims()[0] > count;
    if has_ended { state.slice([0..count, 0..rows, 0..columns]) } else { state }
}

/// The states before the first tokens.
fn zero_state(DeltaInputs { qkv, layout, heads, .. }: DeltaInputs<'_>, chunks: &Chunks) -> Tensor<3> {
    debug_assert!(layout.documents().len() >= chunks.counts.first().copied().unwrap_or(0));
    let count = chunks.counts.first().copied().unwrap_or(0) * heads.num_value_heads;
    Tensor::zeros([count, heads.key_head_dim, heads.value_head_dim], (&qkv.device(), DType::F32))
}

/// [`delta_rule`](crate::ops::delta_rule::delta_rule), or with a state [`delta_rule_next`](crate::ops::delta_rule::delta_rule_next), in plain tensor calls.
pub(crate) fn plain_delta_rule(
    products: F32Products,
    inputs: DeltaInputs<'_>,
    state: Option<Tensor<3>>,
) -> (Tensor<2>, Option<Tensor<3>>) {
    let (heads, chunks) = (inputs.heads, inputs.layout.delta_chunks(&inputs.qkv.device()));
    let split = Split::new(inputs, &chunks);
    let has_state = state.is_some();
    let mut state = state.unwrap_or_else(|| zero_state(inputs, &chunks));
    let mut outputs = Vec::with_capacity(chunks.counts.len());
    for step in chunks.steps() {
        state = going_on(state, step.1 * heads.num_value_heads);
        let chunk = split.chunk(step, &chunks, products);
        let written = chunk.written(&state, products);
        let o = chunk.output(&state, &written, products);
        outputs.push(o.reshape([step.1, heads.num_value_heads, chunks.rows.len, heads.value_head_dim]));
        state = chunk.next_state(&state, &written, products);
    }
    let o = if outputs.is_empty() {
        Tensor::zeros([inputs.qkv.dims()[0], heads.value_width()], (&inputs.qkv.device(), DType::F32))
    } else {
        chunks.join(Tensor::cat(outputs, 0))
    };
    (o.cast(inputs.qkv.dtype()), has_state.then_some(state))
}

/// Gradients of a chunk.
struct ChunkGrads {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    decay: Tensor<3>,
    strength: Tensor<3>,
    /// Of the state before.
    state: Tensor<3>,
}

impl Chunk {
    /// From the gradients of the output and of the state after it; `states` are those before and after.
    fn backward(
        &self,
        d_o: &Tensor<3>,
        d_state: &Tensor<3>,
        states: [&Tensor<3>; 2],
        written: &Tensor<3>,
        chunks: &Chunks,
        products: F32Products,
    ) -> ChunkGrads {
        let transposed = |x: &Tensor<3>| x.clone().swap_dims(1, 2);
        let product = |a: &Tensor<3>, b: &Tensor<3>| matmul(a, b, products);
        let [before, after] = states;
        let keys = self.k.clone() * self.to_end.clone();
        let d_written = product(&transposed(&self.weights), d_o) + product(&keys, d_state);
        // Of what the inverse is multiplied with.
        let d_known = product(&transposed(&self.inverse), &d_written);
        let d_system = (product(&d_known, &transposed(written)) * self.strong_decays.clone()).neg();
        let d_weights = product(d_o, &transposed(written)) * self.decays.clone();
        // Of what the state is read with, less its sign.
        let read = d_known.clone() * self.strength.clone() * self.from_start.clone();
        let asked = d_o.clone() * self.from_start.clone();
        let q = product(&asked, &transposed(before)) + product(&d_weights, &self.k);
        // A key has a decay in its row where it reads, and one in its column where it is read.
        let of_row = product(&d_system, &self.k) - product(&read, &transposed(before));
        let of_column = product(&transposed(&d_system), &self.k)
            + product(&transposed(&d_weights), &self.q)
            + product(written, &transposed(d_state)) * self.to_end.clone();
        let d_sums = (self.q.clone() * q.clone()).sum_dim(2)
            + (self.k.clone() * (of_row.clone() - of_column.clone())).sum_dim(2);
        // The last sum also decays all of the state.
        let [batch, ..] = d_sums.dims();
        let of_state = (after.clone() * d_state.clone()).reshape([batch, 1, before.dims()[1] * before.dims()[2]]);
        // Sums from a token on.
        let decay = d_sums.flip([1]).cumsum(1).flip([1]) + of_state.sum_dim(2);
        let state = d_state.clone() * self.whole.clone() + product(&transposed(&self.q), &asked)
            - product(&transposed(&self.k), &read);
        debug_assert_eq!(chunks.rows.len, self.q.dims()[1]);
        ChunkGrads {
            q,
            k: of_row + of_column,
            v: d_known.clone() * self.strength.clone(),
            decay,
            strength: (d_known * written.clone()).sum_dim(2),
            state,
        }
    }
}

/// The gradient of what [`normed`] takes.
fn normed_backward(dy: Tensor<4>, y: &Tensor<4>, factor: Tensor<4>) -> Tensor<4> {
    let along = (dy.clone() * y.clone()).sum_dim(3);
    (dy - y.clone() * along) * factor
}

pub(crate) fn plain_delta_rule_backward(
    products: F32Products,
    d_o: &Tensor<2>,
    inputs: DeltaInputs<'_>,
) -> (Tensor<2>, Gates<Tensor<2>>) {
    let (heads, chunks) = (inputs.heads, inputs.layout.delta_chunks(&inputs.qkv.device()));
    let DeltaHeads { num_value_heads, .. } = heads;
    let split = Split::new(inputs, &chunks);
    let d_o = chunks.split(d_o, num_value_heads);
    let steps = chunks.steps();
    if steps.is_empty() {
        let zeros = |x: &Tensor<2>| x.zeros_like();
        let Gates { decay, strength } = inputs.gates;
        return (zeros(inputs.qkv), Gates { decay: zeros(decay), strength: zeros(strength) });
    }
    // The states before every chunk, what it writes, and the states after it.
    let mut state = zero_state(inputs, &chunks);
    let mut passed = Vec::with_capacity(steps.len());
    for step in &steps {
        state = going_on(state, step.1 * num_value_heads);
        let chunk = split.chunk(*step, &chunks, products);
        let written = chunk.written(&state, products);
        let after = chunk.next_state(&state, &written, products);
        passed.push((chunk, std::mem::replace(&mut state, after.clone()), written, after));
    }
    drop(state);
    let mut d_state: Option<Tensor<3>> = None;
    let mut grads = Vec::with_capacity(steps.len());
    for (step, (chunk, before, written, after)) in steps.iter().zip(passed).rev() {
        // Documents that end here have no gradient from behind.
        let ended = step.1 * num_value_heads - d_state.as_ref().map_or(0, |grad| grad.dims()[0]);
        let zeros = (ended > 0).then(|| after.clone().narrow(0, 0, ended).zeros_like());
        let from_behind = Tensor::cat(d_state.into_iter().chain(zeros).collect(), 0);
        let d_o = of_step(&d_o, *step);
        let found = chunk.backward(&d_o, &from_behind, [&before, &after], &written, &chunks, products);
        let by_head = |x: Tensor<3>| {
            let width = x.dims()[2];
            x.reshape([step.1, num_value_heads, chunks.rows.len, width])
        };
        grads.push([found.q, found.k, found.v, found.decay, found.strength].map(by_head));
        d_state = Some(found.state);
    }
    grads.reverse();
    let mut all: [Vec<Tensor<4>>; 5] = Default::default();
    for grads in grads {
        all.iter_mut().zip(grads).for_each(|(all, grad)| all.push(grad));
    }
    let [dq, dk, dv, decay, strength] = all.map(|parts| Tensor::cat(parts, 0));
    let [q, k, _] = qkv(inputs, &chunks);
    let (q, of_q) = normed(q);
    let (k, of_k) = normed(k);
    let dq = normed_backward(summed(dq, heads.group()) * scale(heads), &q, of_q);
    let dk = normed_backward(summed(dk, heads.group()), &k, of_k);
    let dqkv = Tensor::cat([dq, dk, dv].map(|grad| chunks.join(grad)).into(), 1).cast(inputs.qkv.dtype());
    (dqkv, Gates { decay: chunks.join(decay), strength: chunks.join(strength) })
}
