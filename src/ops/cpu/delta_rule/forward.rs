//! The forward pass.

use rayon::prelude::*;

use super::{CHUNK, DeltaInputs, HeadTask, Operands, Scratch, multiply_rows, product};
use crate::ops::cpu::product::Left;
use crate::ops::cpu::simd::{SharedMut, with_scratch};
use crate::spec::DeltaHeads;

/// The outputs of all value heads; zeros outside all documents. With `states`, the only document goes on from them, and they
/// become those after it.
///
/// # Shapes
/// `o`: `[tokens, value_width]`; `states`: `[num_value_heads, key_head_dim, value_head_dim]`; `documents`: `(start, len)`, ascending
/// and disjoint.
pub fn delta_rule(
    inputs: DeltaInputs<'_>,
    documents: &[(usize, usize)],
    heads: DeltaHeads,
    o: &mut [f32],
    states: Option<&mut [f32]>,
) {
    let tokens = inputs.check(heads, documents);
    assert_eq!(o.len(), tokens * heads.value_width(), "delta_rule: result");
    let state_len = heads.state_len();
    if let Some(states) = &states {
        assert!(documents.len() == 1 && states.len() == heads.num_value_heads * state_len, "delta_rule: states");
    }
    let states = states.map(|states| SharedMut(states.as_mut_ptr()));
    let of_documents =
        documents.iter().flat_map(|document| (0..heads.num_value_heads).map(move |head| (*document, head)));
    let tasks: Vec<_> = of_documents.collect();
    o.fill(0.0);
    let o = SharedMut(o.as_mut_ptr());
    tasks.into_par_iter().with_max_len(1).for_each(|((start, len), head)| {
        let held = states.map(|states| {
            // SAFETY: this task alone uses the states of this head: there is one document.
            unsafe { std::slice::from_raw_parts_mut(states.get().add(head * state_len), state_len) }
        });
        run(&HeadTask { inputs, heads, head, start, len }, o, held);
    });
}

fn run(task: &HeadTask<'_>, o: SharedMut, mut held: Option<&mut [f32]>) {
    let (heads, key, value) = (task.heads, task.key(), task.value());
    let DeltaHeads { key_head_dim, value_head_dim, .. } = heads;
    with_scratch(Operands::len(task) + task.state_len() + 2 * CHUNK * value, |scratch| {
        let mut scratch = Scratch(scratch);
        let state = scratch.take(task.state_len());
        let (written, output) = (scratch.take(CHUNK * value), scratch.take(CHUNK * value));
        let mut operands = Operands::new(&mut scratch, task);
        state.fill(0.0);
        if let Some(held) = &held {
            for (to, from) in state.chunks_exact_mut(value).zip(held.chunks_exact(value_head_dim)) {
                to[..value_head_dim].copy_from_slice(from);
            }
        }
        let chunks = task.len.div_ceil(CHUNK);
        for chunk in 0..chunks {
            let tokens = task.chunk(chunk);
            let [token, num] = tokens;
            let whole = operands.load(task, tokens);
            operands.write(task, tokens, state, written);
            let q = Left::rows(operands.q, key);
            product([num, value, key_head_dim], q, (state, value), (output, value), false);
            multiply_rows(&mut output[..num * value], value, &operands.from_start[..num]);
            let weights = Left::rows(operands.weights, CHUNK);
            product([num, value, num], weights, (written, value), (output, value), true);
            for (i, row) in output.chunks_exact(value).take(num).enumerate() {
                let first = (token + i) * heads.value_width() + task.head * value_head_dim;
                // SAFETY: inside `o`; this task alone writes this head's columns of this token.
                let to = unsafe { std::slice::from_raw_parts_mut(o.get().add(first), value_head_dim) };
                to.copy_from_slice(&row[..value_head_dim]);
            }
            if chunk + 1 < chunks || held.is_some() {
                operands.update(task, num, whole, state, written);
            }
        }
        if let Some(held) = &mut held {
            for (from, to) in state.chunks_exact(value).zip(held.chunks_exact_mut(value_head_dim)) {
                to.copy_from_slice(&from[..value_head_dim]);
            }
        }
    });
}
