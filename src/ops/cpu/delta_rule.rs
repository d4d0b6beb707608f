//! The gated delta rule in chunks of tokens, as [`crate::ops::delta_rule`] describes it: one task for each document and head.

mod backward;
mod forward;

pub use backward::delta_rule_backward;
pub use forward::delta_rule;

use super::pack::pack_columns;
use super::product::{Left, ProductInto};
use super::simd::{Scratch, arch, dot, exp, vectorised};
use crate::ops::plain::delta_rule::NORM_EPS;
use crate::ops::plain::delta_rule::chunks::CHUNK_TOKENS as CHUNK;
use crate::spec::DeltaHeads;

/// Queries, keys and values side by side, and the gates, of all tokens.
#[derive(Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// `[tokens, qkv_width]`
    pub qkv: &'a [f32],
    /// `[tokens, num_value_heads]`
    pub decay: &'a [f32],
    /// `[tokens, num_value_heads]`
    pub strength: &'a [f32],
}

/// Tokens whose triangular system is solved one by one before the next ones are.
const BLOCK: usize = 16;

impl DeltaInputs<'_> {
    fn check(&self, heads: DeltaHeads, documents: &[(usize, usize)]) -> usize {
        let tokens = self.decay.len() / heads.num_value_heads;
        assert!(
            self.decay.len() == tokens * heads.num_value_heads
                && self.strength.len() == self.decay.len()
                && self.qkv.len() == tokens * heads.qkv_width(),
            "delta_rule: {tokens} tokens of {heads:?}"
        );
        let mut end = 0;
        for &(start, len) in documents {
            assert!(start >= end && start + len <= tokens, "delta_rule: document ({start}, {len}) of {tokens} tokens");
            end = start + len;
        }
        tokens
    }
}

/// `c = a b`, or `c += a b`, with rows of `c` and `b` of whole vectors of any instruction set.
///
/// # Shapes
/// `[m, n] = [m, k] [k, n]`
fn product([m, n, k]: [usize; 3], a: Left<'_>, b: (&[f32], usize), c: (&mut [f32], usize), accumulate: bool) {
    let (c, c_stride) = c;
    if m == 0 {
        return;
    }
    assert!(c_stride >= n && (m - 1) * c_stride + n <= c.len(), "delta_rule: result [{m}, {n}]");
    let product =
        ProductInto { shape: [m, n, k], c: c.as_mut_ptr(), c_stride, a, b: b.0, b_stride: b.1, then: None, accumulate };
    // SAFETY: the assertion above; `c` is borrowed alone.
    arch().dispatch(unsafe { product.promise() });
}

/// A head of a document.
#[derive(Clone, Copy)]
struct HeadTask<'a> {
    inputs: DeltaInputs<'a>,
    heads: DeltaHeads,
    /// The value head.
    head: usize,
    /// First token of the document, and their number.
    start: usize,
    len: usize,
}

impl HeadTask<'_> {
    /// Width of a key head, padded to whole vectors.
    fn key(&self) -> usize {
        self.heads.key_head_dim.next_multiple_of(16)
    }

    /// Width of a value head, likewise.
    fn value(&self) -> usize {
        self.heads.value_head_dim.next_multiple_of(16)
    }

    /// Numbers of a state, `[key_head_dim, value]`.
    fn state_len(&self) -> usize {
        self.heads.key_head_dim * self.value()
    }

    /// What a normed query is multiplied by.
    fn scale(&self) -> f32 {
        1.0 / (self.heads.key_head_dim as f32).sqrt()
    }

    /// The first token of a chunk, and the number of its tokens.
    fn chunk(&self, index: usize) -> [usize; 2] {
        [self.start + index * CHUNK, CHUNK.min(self.len - index * CHUNK)]
    }
}

/// The operands of a chunk of one head.
struct Operands<'a> {
    /// Normed, queries scaled, `[CHUNK, key]`.
    q: &'a mut [f32],
    k: &'a mut [f32],
    /// Factors of the norms, `[CHUNK]`.
    of_q: &'a mut [f32],
    of_k: &'a mut [f32],
    /// `[key, CHUNK]`
    transposed_k: &'a mut [f32],
    /// Sums of the decays, `[CHUNK]`, and `exp` of them and of what is left to the last.
    sums: &'a mut [f32],
    from_start: &'a mut [f32],
    to_end: &'a mut [f32],
    strength: &'a mut [f32],
    /// `exp(c_i - c_j)` up to the diagonal, `[CHUNK, CHUNK]`.
    decays: &'a mut [f32],
    /// `-A` below the diagonal.
    system: &'a mut [f32],
    /// `q_i k_j exp(c_i - c_j)` up to the diagonal.
    weights: &'a mut [f32],
}

vectorised! {
/// `to = x / sqrt(x^2 + eps)` times `scale`; the factor without the scale.
fn norm_into<'a, S>(simd, x: &'a [f32], scale: f32, to: &'a mut [f32]) -> f32 {
    let factor = 1.0 / (dot(simd, x, x) + NORM_EPS as f32).sqrt();
    let (body, padding) = to.split_at_mut(x.len());
    for (to, x) in body.iter_mut().zip(x) {
        *to = x * factor * scale;
    }
    padding.fill(0.0);
    factor
} }

vectorised! {
/// `exp(sum - sums_j)`, of a whole number of vectors.
fn exp_differences<'a, S>(simd, sum: f32, sums: &'a [f32], to: &'a mut [f32]) {
    let sum = simd.splat_f32s(sum);
    for (to, x) in S::as_mut_simd_f32s(to).0.iter_mut().zip(S::as_simd_f32s(sums).0) {
        *to = exp(simd, simd.sub_f32s(sum, *x));
    }
} }

vectorised! {
fn multiply_rows<'a, S>(_simd, x: &'a mut [f32], stride: usize, factors: &'a [f32]) {
    for (row, factor) in x.chunks_exact_mut(stride).zip(factors) {
        row.iter_mut().for_each(|x| *x *= factor);
    }
} }

vectorised! {
/// `y += factor x`.
fn add_scaled<'a, S>(_simd, y: &'a mut [f32], factor: f32, x: &'a [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
} }

vectorised! {
fn dot_of<'a, S>(simd, x: &'a [f32], y: &'a [f32]) -> f32 {
    dot(simd, x, y)
} }

impl<'a> Operands<'a> {
    fn len(task: &HeadTask<'_>) -> usize {
        3 * CHUNK * task.key() + 6 * CHUNK + 3 * CHUNK * CHUNK
    }

    fn new(scratch: &mut Scratch<'a>, task: &HeadTask<'_>) -> Self {
        let key = task.key();
        Self {
            q: scratch.take(CHUNK * key),
            k: scratch.take(CHUNK * key),
            transposed_k: scratch.take(CHUNK * key),
            of_q: scratch.take(CHUNK),
            of_k: scratch.take(CHUNK),
            sums: scratch.take(CHUNK),
            from_start: scratch.take(CHUNK),
            to_end: scratch.take(CHUNK),
            strength: scratch.take(CHUNK),
            decays: scratch.take(CHUNK * CHUNK),
            system: scratch.take(CHUNK * CHUNK),
            weights: scratch.take(CHUNK * CHUNK),
        }
    }

    /// Of `num` tokens from `token` on; returns `exp` of the sum of their decays.
    fn load(&mut self, task: &HeadTask<'_>, [token, num]: [usize; 2]) -> f32 {
        let HeadTask { inputs, heads, head, .. } = *task;
        let (key, width, key_head) = (task.key(), heads.key_head_dim, head / heads.group());
        let mut sum = 0.0;
        for i in 0..num {
            let first = (token + i) * heads.qkv_width() + key_head * width;
            let [q, k] = [first, first + heads.key_width()].map(|first| &inputs.qkv[first..first + width]);
            let to = i * key..(i + 1) * key;
            self.of_q[i] = norm_into(q, task.scale(), &mut self.q[to.clone()]);
            self.of_k[i] = norm_into(k, 1.0, &mut self.k[to]);
            let gate = (token + i) * heads.num_value_heads + head;
            sum += inputs.decay[gate];
            self.sums[i] = sum;
            self.from_start[i] = sum.exp();
            self.strength[i] = inputs.strength[gate];
        }
        for (to_end, before) in self.to_end.iter_mut().zip(&*self.sums).take(num) {
            *to_end = (sum - before).exp();
        }
        self.sums[num..].fill(0.0);
        pack_columns(self.k, key, num, width, self.transposed_k, CHUNK);
        let columns = num.next_multiple_of(16);
        let (shape, k) = ([num, columns, width], (&*self.transposed_k, CHUNK));
        product(shape, Left::rows(self.k, key), k, (self.system, CHUNK), false);
        product(shape, Left::rows(self.q, key), k, (self.weights, CHUNK), false);
        for i in 0..num {
            let row = i * CHUNK..i * CHUNK + columns;
            let (decays, end) = (&mut self.decays[row.clone()], (i + 1).next_multiple_of(16));
            exp_differences(self.sums[i], &self.sums[..end], &mut decays[..end]);
            decays[i + 1..].fill(0.0);
            let (system, weights) = (&mut self.system[row.clone()], &mut self.weights[row]);
            let strength = -self.strength[i];
            for (x, decay) in system.iter_mut().zip(&*decays) {
                *x *= decay * strength;
            }
            system[i..].fill(0.0);
            for (x, decay) in weights.iter_mut().zip(&*decays) {
                *x *= decay;
            }
        }
        sum.exp()
    }

    /// Solves `(I + A) w = x` in place, `[num, width]`.
    fn solve(&self, x: &mut [f32], num: usize, width: usize) {
        for first in (0..num).step_by(BLOCK) {
            let last = num.min(first + BLOCK);
            let (known, rest) = x.split_at_mut(first * width);
            let system = &self.system[first * CHUNK..];
            product([last - first, width, first], Left::rows(system, CHUNK), (known, width), (rest, width), true);
            for i in 1..last - first {
                let (before, row) = rest.split_at_mut(i * width);
                for (j, before) in before.chunks_exact(width).enumerate() {
                    add_scaled(&mut row[..width], system[i * CHUNK + first + j], before);
                }
            }
        }
    }

    /// Solves `(I + A)^T w = x` in place, `[num, width]`.
    fn solve_transposed(&self, x: &mut [f32], num: usize, width: usize) {
        for first in (0..num).step_by(BLOCK).rev() {
            let last = num.min(first + BLOCK);
            let (block, known) = x[first * width..].split_at_mut((last - first) * width);
            if num > last {
                let system = Left::columns(&self.system[last * CHUNK + first..], CHUNK);
                product([last - first, width, num - last], system, (known, width), (block, width), true);
            }
            for j in (0..last - first).rev() {
                let (row, after) = block[j * width..].split_at_mut(width);
                for (i, after) in after.chunks_exact(width).enumerate() {
                    add_scaled(row, self.system[(first + j + 1 + i) * CHUNK + first + j], after);
                }
            }
        }
    }

    /// `W` from the state before the chunk, `[num, value]`.
    fn write(&self, task: &HeadTask<'_>, [token, num]: [usize; 2], state: &[f32], written: &mut [f32]) {
        let (heads, value) = (task.heads, task.value());
        let k = Left::rows(self.k, task.key());
        product([num, value, heads.key_head_dim], k, (state, value), (written, value), false);
        for (i, row) in written.chunks_exact_mut(value).take(num).enumerate() {
            let first = (token + i) * heads.qkv_width() + 2 * heads.key_width() + task.head * heads.value_head_dim;
            let v = &task.inputs.qkv[first..first + heads.value_head_dim];
            // What pads the state is zero, and so is what pads the row.
            for (x, v) in row.iter_mut().zip(v) {
                *x = (v - self.from_start[i] * *x) * self.strength[i];
            }
        }
        self.solve(written, num, value);
    }

    /// Takes the state to behind the chunk, and decays the keys to its end.
    fn update(&mut self, task: &HeadTask<'_>, num: usize, whole: f32, state: &mut [f32], written: &[f32]) {
        let (key, value) = (task.key(), task.value());
        multiply_rows(&mut self.k[..num * key], key, &self.to_end[..num]);
        state.iter_mut().for_each(|x| *x *= whole);
        let k = Left::columns(self.k, key);
        product([task.heads.key_head_dim, value, num], k, (written, value), (state, value), true);
    }
}
