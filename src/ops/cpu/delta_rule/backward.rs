//! The backward pass: one task for each document and key head, which takes its value heads one after the other. A task first
//! computes the states before all chunks again.

use rayon::prelude::*;

use super::{CHUNK, DeltaInputs, HeadTask, Operands, Scratch, add_scaled, dot_of, multiply_rows, product};
use crate::ops::cpu::pack::pack_columns;
use crate::ops::cpu::product::Left;
use crate::ops::cpu::simd::{SharedMut, with_scratch};
use crate::spec::DeltaHeads;

/// Gradients of [`delta_rule`](super::delta_rule) with respect to queries, keys and values side by side, to the decays, and to the
/// logarithms of the strengths; zeros outside all documents.
///
/// # Shapes
/// `d_o`: `[tokens, value_width]`; `grads`: like `qkv`, `decay` and `strength` of the inputs.
pub fn delta_rule_backward(
    d_o: &[f32],
    inputs: DeltaInputs<'_>,
    documents: &[(usize, usize)],
    heads: DeltaHeads,
    grads: [&mut [f32]; 3],
) {
    let tokens = inputs.check(heads, documents);
    assert_eq!(d_o.len(), tokens * heads.value_width(), "delta_rule_backward: gradient");
    let lengths = [inputs.qkv.len(), inputs.decay.len(), inputs.strength.len()];
    assert!(grads.each_ref().map(|grad| grad.len()) == lengths, "delta_rule_backward: results");
    let [qkv, decay, strength] = grads.map(|grad| {
        grad.fill(0.0);
        SharedMut(grad.as_mut_ptr())
    });
    let grads = Grads { qkv, decay, strength };
    let of_documents =
        documents.iter().flat_map(|document| (0..heads.num_key_heads).map(move |head| (*document, head)));
    let tasks: Vec<_> = of_documents.collect();
    tasks.into_par_iter().with_max_len(1).for_each(|((start, len), key_head)| {
        for head in key_head * heads.group()..(key_head + 1) * heads.group() {
            let task = HeadTask { inputs, heads, head, start, len };
            // SAFETY: this task alone writes the columns of this key head and of its value heads in this document.
            unsafe { run(task, d_o, grads) };
        }
    });
}

/// The results, as [`delta_rule_backward`] has them.
#[derive(Clone, Copy)]
struct Grads {
    qkv: SharedMut,
    decay: SharedMut,
    strength: SharedMut,
}

/// Gradients of a chunk, and operands of its products. Names as in [`crate::ops::delta_rule`].
struct Buffers<'a> {
    /// Of the state after the chunk, then of that before.
    d_state: &'a mut [f32],
    /// `[value, key]`
    transposed_state: &'a mut [f32],
    /// `[value, CHUNK]`
    transposed_w: &'a mut [f32],
    /// `[CHUNK, value]` each: of the output, also times `exp(c)`, and of `W`.
    d_o: &'a mut [f32],
    asked: &'a mut [f32],
    d_w: &'a mut [f32],
    /// `[CHUNK, key]` each: of queries, and of keys by the rows and the columns of the matrices.
    d_q: &'a mut [f32],
    of_row: &'a mut [f32],
    of_column: &'a mut [f32],
    /// `[CHUNK, CHUNK]` each: of `k_i k_j` and of `q_i k_j`.
    d_system: &'a mut [f32],
    d_weights: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    fn len(task: &HeadTask<'_>) -> usize {
        let (value, key) = (task.value(), task.key());
        let of_heads = task.state_len() + task.heads.value_head_dim * (key + CHUNK);
        of_heads + CHUNK * (3 * value + 3 * key + 2 * CHUNK)
    }

    fn new(scratch: &mut Scratch<'a>, task: &HeadTask<'_>) -> Self {
        let (value, key, value_head_dim) = (task.value(), task.key(), task.heads.value_head_dim);
        Self {
            d_state: scratch.take(task.state_len()),
            transposed_state: scratch.take(value_head_dim * key),
            transposed_w: scratch.take(value_head_dim * CHUNK),
            d_o: scratch.take(CHUNK * value),
            asked: scratch.take(CHUNK * value),
            d_w: scratch.take(CHUNK * value),
            d_q: scratch.take(CHUNK * key),
            of_row: scratch.take(CHUNK * key),
            of_column: scratch.take(CHUNK * key),
            d_system: scratch.take(CHUNK * CHUNK),
            d_weights: scratch.take(CHUNK * CHUNK),
        }
    }
}

/// # Safety
/// The gradients must have the inputs' lengths, and nothing else may use this head's columns of the document.
unsafe fn run(task: HeadTask<'_>, d_o: &[f32], grads: Grads) {
    let (state_len, written_len, chunks) = (task.state_len(), CHUNK * task.value(), task.len.div_ceil(CHUNK));
    let kept = (chunks + 1) * state_len + chunks * written_len;
    with_scratch(kept + Buffers::len(&task) + Operands::len(&task), |scratch| {
        let mut scratch = Scratch(scratch);
        // The states before every chunk and after the last, and what every chunk writes.
        let (states, written) = (scratch.take((chunks + 1) * state_len), scratch.take(chunks * written_len));
        let (mut buffers, mut operands) = (Buffers::new(&mut scratch, &task), Operands::new(&mut scratch, &task));
        states[..state_len].fill(0.0);
        for (chunk, written) in written.chunks_exact_mut(written_len).enumerate() {
            let (before, after) = states[chunk * state_len..(chunk + 2) * state_len].split_at_mut(state_len);
            let tokens = task.chunk(chunk);
            let whole = operands.load(&task, tokens);
            operands.write(&task, tokens, before, written);
            after.copy_from_slice(before);
            operands.update(&task, tokens[1], whole, after, written);
        }
        buffers.d_state.fill(0.0);
        for (chunk, written) in written.chunks_exact(written_len).enumerate().rev() {
            let (before, after) = states[chunk * state_len..(chunk + 2) * state_len].split_at(state_len);
            let tokens = task.chunk(chunk);
            let whole = operands.load(&task, tokens);
            buffers.of_written(&task, &operands, tokens, d_o);
            buffers.of_pairs(&task, &operands, tokens[1], written);
            // SAFETY: by the caller's promise.
            unsafe { buffers.of_values(&task, &operands, tokens, written, grads) };
            buffers.of_keys(&task, &operands, tokens[1], before, written);
            // SAFETY: likewise.
            unsafe { buffers.of_decays(&task, &operands, tokens, after, grads) };
            buffers.of_state(&task, &operands, tokens[1], whole);
            // SAFETY: likewise.
            unsafe { buffers.through_norms(&task, &operands, tokens, grads) };
        }
    });
}

impl Buffers<'_> {
    /// The gradient of what the inverse of `I + A` is multiplied with, in `d_w`.
    fn of_written(&mut self, task: &HeadTask<'_>, operands: &Operands<'_>, [token, num]: [usize; 2], d_o: &[f32]) {
        let (key, value, DeltaHeads { key_head_dim, value_head_dim, .. }) = (task.key(), task.value(), task.heads);
        for (i, row) in self.d_o.chunks_exact_mut(value).take(num).enumerate() {
            let (to, padding) = row.split_at_mut(value_head_dim);
            let first = (token + i) * task.heads.value_width() + task.head * value_head_dim;
            to.copy_from_slice(&d_o[first..first + value_head_dim]);
            padding.fill(0.0);
        }
        let (shape, d_w) = ([num, value, key_head_dim], &mut *self.d_w);
        product(shape, Left::rows(operands.k, key), (self.d_state, value), (d_w, value), false);
        multiply_rows(&mut d_w[..num * value], value, &operands.to_end[..num]);
        let weights = Left::columns(operands.weights, CHUNK);
        product([num, value, num], weights, (self.d_o, value), (d_w, value), true);
        operands.solve_transposed(d_w, num, value);
    }

    /// The gradients of the products of queries and keys with keys.
    fn of_pairs(&mut self, task: &HeadTask<'_>, operands: &Operands<'_>, num: usize, written: &[f32]) {
        let (value, value_head_dim, columns) = (task.value(), task.heads.value_head_dim, num.next_multiple_of(16));
        pack_columns(written, value, num, value_head_dim, self.transposed_w, CHUNK);
        let (shape, w) = ([num, columns, value_head_dim], (&*self.transposed_w, CHUNK));
        product(shape, Left::rows(self.d_w, value), w, (self.d_system, CHUNK), false);
        product(shape, Left::rows(self.d_o, value), w, (self.d_weights, CHUNK), false);
        for i in 0..num {
            let row = i * CHUNK..i * CHUNK + columns;
            let (decays, strength) = (&operands.decays[row.clone()], -operands.strength[i]);
            for (x, decay) in self.d_weights[row.clone()].iter_mut().zip(decays) {
                *x *= decay;
            }
            let d_system = &mut self.d_system[row];
            for (x, decay) in d_system.iter_mut().zip(decays) {
                *x *= decay * strength;
            }
            d_system[i..].fill(0.0);
        }
    }

    /// Writes the gradients of values and strengths. `d_w` becomes that of what is read of the state before, `K S`; `asked` that of
    /// `Q S`.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn of_values(
        &mut self,
        task: &HeadTask<'_>,
        operands: &Operands<'_>,
        [token, num]: [usize; 2],
        written: &[f32],
        grads: Grads,
    ) {
        let (heads, value) = (task.heads, task.value());
        for i in 0..num {
            let range = i * value..(i + 1) * value;
            let row = &mut self.d_w[range.clone()];
            let of_strength = dot_of(row, &written[range.clone()]);
            row.iter_mut().for_each(|x| *x *= operands.strength[i]);
            let first = (token + i) * heads.qkv_width() + 2 * heads.key_width() + task.head * heads.value_head_dim;
            // SAFETY: by the caller's promise.
            unsafe {
                *grads.strength.get().add((token + i) * heads.num_value_heads + task.head) = of_strength;
                let to = std::slice::from_raw_parts_mut(grads.qkv.get().add(first), heads.value_head_dim);
                to.copy_from_slice(&row[..heads.value_head_dim]);
            }
            row.iter_mut().for_each(|x| *x *= -operands.from_start[i]);
            for (to, from) in self.asked[range.clone()].iter_mut().zip(&self.d_o[range]) {
                *to = from * operands.from_start[i];
            }
        }
    }

    /// The gradients of normed queries and keys: through the states before and after, and through each other.
    fn of_keys(&mut self, task: &HeadTask<'_>, operands: &Operands<'_>, num: usize, before: &[f32], written: &[f32]) {
        let (key, value, DeltaHeads { key_head_dim, value_head_dim, .. }) = (task.key(), task.value(), task.heads);
        let (shape, transposed) = ([num, key, value_head_dim], &mut *self.transposed_state);
        pack_columns(self.d_state, value, key_head_dim, value_head_dim, transposed, key);
        product(shape, Left::rows(written, value), (transposed, key), (self.of_column, key), false);
        multiply_rows(&mut self.of_column[..num * key], key, &operands.to_end[..num]);
        pack_columns(before, value, key_head_dim, value_head_dim, transposed, key);
        product(shape, Left::rows(self.asked, value), (transposed, key), (self.d_q, key), false);
        product(shape, Left::rows(self.d_w, value), (transposed, key), (self.of_row, key), false);
        let (shape, k, q) = ([num, key, num], (&*operands.k, key), (&*operands.q, key));
        product(shape, Left::rows(self.d_weights, CHUNK), k, (self.d_q, key), true);
        product(shape, Left::rows(self.d_system, CHUNK), k, (self.of_row, key), true);
        product(shape, Left::columns(self.d_system, CHUNK), k, (self.of_column, key), true);
        product(shape, Left::columns(self.d_weights, CHUNK), q, (self.of_column, key), true);
    }

    /// Writes the gradients of the decays: sums from a token on. A query has a decay in its row, a key in its row where it reads, and in
    /// its column, less, where it is read; the last sum also decays the state.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn of_decays(
        &mut self,
        task: &HeadTask<'_>,
        operands: &Operands<'_>,
        [token, num]: [usize; 2],
        after: &[f32],
        grads: Grads,
    ) {
        let key = task.key();
        let mut sum = dot_of(after, self.d_state);
        for i in (0..num).rev() {
            let row = i * key..(i + 1) * key;
            let (q, k) = (&operands.q[row.clone()], &operands.k[row.clone()]);
            let (of_row, of_column) = (&self.of_row[row.clone()], &self.of_column[row.clone()]);
            sum += dot_of(q, &self.d_q[row]) + dot_of(k, of_row) - dot_of(k, of_column);
            // SAFETY: by the caller's promise.
            unsafe { *grads.decay.get().add((token + i) * task.heads.num_value_heads + task.head) = sum };
        }
    }

    /// Takes the gradient of the state to before the chunk.
    fn of_state(&mut self, task: &HeadTask<'_>, operands: &Operands<'_>, num: usize, whole: f32) {
        let (key, value) = (task.key(), task.value());
        self.d_state.iter_mut().for_each(|x| *x *= whole);
        let (shape, d_state) = ([task.heads.key_head_dim, value, num], &mut *self.d_state);
        product(shape, Left::columns(operands.q, key), (self.asked, value), (d_state, value), true);
        product(shape, Left::columns(operands.k, key), (self.d_w, value), (d_state, value), true);
    }

    /// Adds to the gradients of queries and keys before their norms.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn through_norms(
        &mut self,
        task: &HeadTask<'_>,
        operands: &Operands<'_>,
        [token, num]: [usize; 2],
        grads: Grads,
    ) {
        let (heads, key) = (task.heads, task.key());
        let scale = task.scale();
        for i in 0..num {
            let row = i * key..(i + 1) * key;
            add_scaled(&mut self.of_row[row.clone()], 1.0, &self.of_column[row.clone()]);
            let first = (token + i) * heads.qkv_width() + task.head / heads.group() * heads.key_head_dim;
            let (q, k) = (&operands.q[row.clone()], &operands.k[row.clone()]);
            let parts = [
                (first, &self.d_q[row.clone()], q, operands.of_q[i], scale),
                (first + heads.key_width(), &self.of_row[row], k, operands.of_k[i], 1.0),
            ];
            for (first, grad, normed, factor, scale) in parts {
                // What is normed is `scale y`; the gradient of y has no part along y.
                let along = dot_of(grad, normed) / scale;
                // SAFETY: by the caller's promise.
                let to = unsafe { std::slice::from_raw_parts_mut(grads.qkv.get().add(first), heads.key_head_dim) };
                add_scaled(to, factor * scale, grad);
                add_scaled(to, -factor * along, normed);
            }
        }
    }
}
