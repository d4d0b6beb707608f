//! The backward pass: one task per stretch, head and block of keys.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::arithmetic::Pairs;
use super::arithmetic::{Arithmetic, Single};
use super::{Heads, STRIP, Stretch, TILE, clear_gaps};
use crate::device::has_bf16_products;
use crate::ops::cpu::pack::pack_rows;
use crate::ops::cpu::product::{Left, ProductInto};
use crate::ops::cpu::simd::{Scratch, SharedMut, arch, dot, exp2_bounded, rows_per_chunk, tanh, with_scratch};

/// A block of keys is at least this long and at least a quarter of its stretch, so that one head has at most four
/// tasks per stretch and at most four partial gradients of its queries.
const MIN_BLOCK_KEYS: usize = 5 * TILE;

/// One task: the keys `keys` of the stretch at `start`, and the queries `queries` that see them, counted from there.
#[derive(Clone, Debug)]
struct Task {
    shape: Heads,
    start: usize,
    head: usize,
    keys: Range<usize>,
    queries: Range<usize>,
    /// Where its share of dq lies in the partial sums; `None` for the first block that the queries see, which writes dq itself.
    partial: Option<usize>,
}

fn tasks(stretches: &[Stretch], shape: &Heads) -> (Vec<Task>, usize) {
    let mut tasks = Vec::new();
    let mut partial_len = 0;
    for stretch in stretches {
        let (&Stretch { start, len, reach, ref prefix }, shape) = (stretch, shape.of(stretch));
        let block = MIN_BLOCK_KEYS.max(len.div_ceil(4).next_multiple_of(TILE));
        for head in 0..shape.num_heads {
            for first in (0..len).step_by(block) {
                let keys = first..len.min(first + block);
                // The first block writes all of dq, including queries that see no key of the block.
                let end = if first == 0 { reach } else { shape.end_query(keys.end - 1, reach) };
                let queries = first..end;
                let is_first = first == 0 && prefix.is_empty();
                let partial = (!is_first).then_some(partial_len);
                if !is_first {
                    partial_len += queries.len() * shape.head_dim;
                }
                tasks.push(Task { shape, start, head, keys, queries, partial });
            }
        }
    }
    (tasks, partial_len)
}

/// Gradients of [`attention`](super::attention) with respect to `q`, `k` and `v`; zeros outside all stretches.
///
/// # Shapes
/// As in [`attention`](super::attention): `d_o`, `dq` like `q`; `dk`, `dv` like `k`; `o`, `lse` as its results.
pub fn attention_backward(
    d_o: &[f32],
    [q, k, v]: [&[f32]; 3],
    o: &[f32],
    lse: &[f32],
    stretches: &[Stretch],
    shape: &Heads,
    rounds: bool,
    grads: [&mut [f32]; 3],
) {
    let inputs = Inputs { d_o, q, k, v, o, lse };
    #[cfg(target_arch = "x86_64")]
    if rounds && has_bf16_products() {
        return backward::<Pairs>(inputs, stretches, shape, grads);
    }
    backward::<Single>(inputs, stretches, shape, grads);
}

/// The gradient of the result, and what the forward had and made.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    d_o: &'a [f32],
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
}

fn backward<A: Arithmetic>(inputs: Inputs<'_>, stretches: &[Stretch], shape: &Heads, [dq, dk, dv]: [&mut [f32]; 3]) {
    let Inputs { d_o, q, k, v, o, lse } = inputs;
    let tokens = shape.check(q.len(), k.len(), v.len(), stretches);
    assert!(
        [d_o.len(), o.len(), dq.len()] == [q.len(); 3] && dk.len() == k.len() && dv.len() == k.len(),
        "attention_backward: lengths"
    );
    assert_eq!(lse.len(), tokens * shape.num_heads, "attention_backward: lse");
    let (tasks, partial_len) = tasks(stretches, shape);
    clear_gaps(dq, shape.query_width(), stretches);
    // Gradients of keys and values, head by head: [num_heads, tokens, head_dim].
    let per_head = tokens * shape.head_dim;
    with_scratch(2 * shape.num_heads * per_head + partial_len, |scratch| {
        let (dk_heads, rest) = scratch.split_at_mut(shape.num_heads * per_head);
        let (dv_heads, partial) = rest.split_at_mut(shape.num_heads * per_head);
        let [dq_shared, dk_shared, dv_shared, partial_shared] =
            [&mut *dq, &mut *dk_heads, &mut *dv_heads, &mut *partial].map(|x| SharedMut(x.as_mut_ptr()));
        tasks.par_iter().with_max_len(1).for_each(|task| {
            let head = task.head * per_head + (task.start + task.keys.start) * shape.head_dim;
            let len = task.keys.len() * shape.head_dim;
            // SAFETY: the keys of different tasks of one head are disjoint, so this task alone uses these ranges of its
            // head's part of the scratch.
            let (dk, dv) = unsafe {
                (
                    std::slice::from_raw_parts_mut(dk_shared.get().add(head), len),
                    std::slice::from_raw_parts_mut(dv_shared.get().add(head), len),
                )
            };
            let dq = match task.partial {
                // SAFETY: this range of the partial sums belongs to this task alone.
                Some(at) => (unsafe { partial_shared.get().add(at) }, shape.head_dim),
                None => {
                    let at = (task.start + task.queries.start) * shape.query_width() + task.head * shape.head_dim;
                    // SAFETY: inside dq; only the first block of a head writes the head's columns.
                    (unsafe { dq_shared.get().add(at) }, shape.query_width())
                }
            };
            run_task::<A>(task, inputs, tokens, dq, [dk, dv]);
        });
        add_partial(&tasks, partial, shape, dq);
        sum_groups(dk_heads, stretches, shape, dk);
        sum_groups(dv_heads, stretches, shape, dv);
    });
}

/// Adds the later blocks' shares to dq, in the order of the blocks.
fn add_partial(tasks: &[Task], partial: &[f32], shape: &Heads, dq: &mut [f32]) {
    for task in tasks {
        let Some(at) = task.partial else { continue };
        let rows = partial[at..].chunks_exact(shape.head_dim).take(task.queries.len());
        let first = (task.start + task.queries.start) * shape.query_width() + task.head * shape.head_dim;
        for (row, partial) in dq[first..].chunks_mut(shape.query_width()).zip(rows) {
            row.iter_mut().zip(partial).for_each(|(dq, partial)| *dq += partial);
        }
    }
}

/// Sums the gradients of the query heads that share a key head; zeros outside all stretches.
fn sum_groups(heads: &[f32], stretches: &[Stretch], shape: &Heads, out: &mut [f32]) {
    let (head_dim, width) = (shape.head_dim, shape.key_value_width());
    let per_head = heads.len() / shape.num_heads;
    let group = shape.num_heads / shape.num_kv_heads;
    let rows = rows_per_chunk(width);
    out.par_chunks_mut(rows * width).enumerate().for_each(|(chunk, out)| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let token = chunk * rows + row;
            for (kv_head, out) in out.chunks_exact_mut(head_dim).enumerate() {
                for member in 0..group {
                    let at = (kv_head * group + member) * per_head + token * head_dim;
                    let from = &heads[at..at + head_dim];
                    if member == 0 {
                        out.copy_from_slice(from);
                    } else {
                        out.iter_mut().zip(from).for_each(|(out, from)| *out += from);
                    }
                }
            }
        }
    });
    clear_gaps(out, width, stretches);
}

fn run_task<A: Arithmetic>(
    task: &Task,
    Inputs { d_o, q, k, v, o, lse }: Inputs<'_>,
    tokens: usize,
    dq: (*mut f32, usize),
    [dk, dv]: [&mut [f32]; 2],
) {
    let shape = &task.shape;
    let dim = shape.padded_dim();
    let num_queries = task.queries.len();
    // Pairs lie differently by rows and for a depth of rows.
    let (again, tile_words) = if A::NUMBERS == 1 { (0, 0) } else { (1, TILE * TILE / A::NUMBERS) };
    let rows_len = num_queries.next_multiple_of(A::NUMBERS) * dim;
    let len = (3 + 2 * again) * rows_len + 2 * num_queries + 2 * tile_words + TILE * (2 * TILE + 5 * dim);
    with_scratch(len, |scratch| {
        let mut scratch = Scratch(scratch);
        let dq_rows = scratch.take(num_queries * dim);
        let q_at = (task.start + task.queries.start) * shape.query_width() + task.head * shape.head_dim;
        let kv_at = task.start * shape.key_value_width() + shape.kv_head(task.head) * shape.head_dim;
        let lse_at = task.head * tokens + task.start + task.queries.start;
        arch().dispatch(KeyBlock::<A> {
            shape,
            task,
            d_o: &d_o[q_at..],
            q: &q[q_at..],
            o: &o[q_at..],
            lse: &lse[lse_at..lse_at + num_queries],
            k: &k[kv_at..],
            v: &v[kv_at..],
            dq_rows: &mut *dq_rows,
            q_rows: scratch.take_words(rows_len),
            d_o_rows: scratch.take_words(rows_len),
            q_stacked: scratch.take_words(again * rows_len),
            d_o_stacked: scratch.take_words(again * rows_len),
            p: scratch.take(TILE * TILE),
            ds: scratch.take(TILE * TILE),
            p_words: scratch.take_words(tile_words),
            ds_words: scratch.take_words(tile_words),
            k_columns: scratch.take_words(TILE * dim),
            v_columns: scratch.take_words(TILE * dim),
            k_rows: scratch.take_words(TILE * dim),
            dk_tile: scratch.take(TILE * dim),
            dv_tile: scratch.take(TILE * dim),
            // Of no whole vectors: last.
            lse_rows: scratch.take(num_queries),
            delta: scratch.take(num_queries),
            dk,
            dv,
        });
        for (i, row) in dq_rows.chunks_exact(dim).enumerate() {
            for (d, x) in row[..shape.head_dim].iter().enumerate() {
                // SAFETY: row i of the task's queries, column d of its head, which this task alone writes.
                unsafe { *dq.0.add(i * dq.1 + d) = *x };
            }
        }
    });
}

struct KeyBlock<'a, A: Arithmetic> {
    shape: &'a Heads,
    task: &'a Task,
    // From the task's first query and the head's first column on.
    d_o: &'a [f32],
    q: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
    // From the stretch's first token and the head's first column on.
    k: &'a [f32],
    v: &'a [f32],
    // Scratch for all queries of the task; `lse_rows` in units of log2, `delta` = rowsum(d_o * o).
    q_rows: &'a mut [A::Word],
    d_o_rows: &'a mut [A::Word],
    // For a depth of queries; of f32, the rows are that too.
    q_stacked: &'a mut [A::Word],
    d_o_stacked: &'a mut [A::Word],
    dq_rows: &'a mut [f32],
    lse_rows: &'a mut [f32],
    delta: &'a mut [f32],
    // Scratch for one tile of keys; `k_columns` holds scale * log2(e) * k^T, `k_rows` scale * k.
    k_columns: &'a mut [A::Word],
    v_columns: &'a mut [A::Word],
    k_rows: &'a mut [A::Word],
    dk_tile: &'a mut [f32],
    dv_tile: &'a mut [f32],
    // Scratch for one pair of tiles, [queries, keys].
    p: &'a mut [f32],
    ds: &'a mut [f32],
    p_words: &'a mut [A::Word],
    ds_words: &'a mut [A::Word],
    // Results of the block's keys, rows of head_dim.
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

impl<A: Arithmetic> WithSimd for KeyBlock<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let shape = self.shape;
        let (head_dim, dim, q_width, kv_width) =
            (shape.head_dim, shape.padded_dim(), shape.query_width(), shape.key_value_width());
        let num_queries = self.task.queries.len();
        A::rows(self.q, q_width, num_queries, head_dim, 1.0, self.q_rows, dim / A::NUMBERS);
        A::rows(self.d_o, q_width, num_queries, head_dim, 1.0, self.d_o_rows, dim / A::NUMBERS);
        if A::NUMBERS > 1 {
            A::stacked(self.q, q_width, num_queries, head_dim, 1.0, self.q_stacked, dim);
            A::stacked(self.d_o, q_width, num_queries, head_dim, 1.0, self.d_o_stacked, dim);
        }
        self.dq_rows.fill(0.0);
        for i in 0..num_queries {
            let row = i * q_width..i * q_width + head_dim;
            self.delta[i] = dot(simd, &self.d_o[row.clone()], &self.o[row]);
            self.lse_rows[i] = self.lse[i] * LOG2_E;
        }
        let [factor, _] = A::factors(shape.product_factor());
        let keys = self.task.keys.clone();
        for first_key in keys.clone().step_by(TILE) {
            let num_keys = TILE.min(keys.end - first_key);
            let (k, v) = (&self.k[first_key * kv_width..], &self.v[first_key * kv_width..]);
            A::columns(k, kv_width, num_keys, head_dim, factor, self.k_columns);
            A::columns(v, kv_width, num_keys, head_dim, 1.0, self.v_columns);
            A::stacked(k, kv_width, num_keys, head_dim, shape.scale as f32, self.k_rows, dim);
            let end = shape.end_query(first_key + num_keys - 1, self.task.queries.end);
            self.dk_tile.fill(0.0);
            self.dv_tile.fill(0.0);
            for first_query in (first_key..end).step_by(TILE) {
                let num_queries = TILE.min(end - first_query);
                self.pair(simd, first_key, num_keys, first_query, num_queries);
            }
            let at = (first_key - keys.start) * head_dim;
            pack_rows(self.dk_tile, dim, num_keys, head_dim, shape.scale as f32, &mut self.dk[at..], head_dim);
            pack_rows(self.dv_tile, dim, num_keys, head_dim, 1.0, &mut self.dv[at..], head_dim);
        }
    }
}

impl<A: Arithmetic> KeyBlock<'_, A> {
    /// Adds what one tile of queries and one tile of keys contribute to each other's gradients.
    #[inline(always)]
    fn pair<S: Simd>(&mut self, simd: S, first_key: usize, num_keys: usize, first_query: usize, num_queries: usize) {
        let (head_dim, dim) = (self.shape.head_dim, self.shape.padded_dim());
        let diagonal = first_query == first_key;
        let row = first_query - self.task.queries.start;
        // Keys of the tile that the queries below `end` see; the rest is masked, so it is neither computed nor read.
        let seen = |end: usize| if diagonal { end.min(num_keys) } else { num_keys };
        for query in (0..num_queries).step_by(STRIP) {
            let rows = STRIP.min(num_queries - query);
            let columns = seen(query + rows).next_multiple_of(S::F32_LANES);
            let at = (row + query) * dim;
            for (c, a, b) in
                [(&mut *self.p, &*self.q_rows, &*self.k_columns), (&mut *self.ds, &*self.d_o_rows, &*self.v_columns)]
            {
                let product = ProductInto {
                    shape: [rows, columns, head_dim.div_ceil(A::NUMBERS)],
                    c: c[query * TILE..(query + rows - 1) * TILE + columns].as_mut_ptr(),
                    c_stride: TILE,
                    a: Left::rows(&a[at / A::NUMBERS..], dim / A::NUMBERS),
                    b,
                    b_stride: TILE,
                    then: None,
                    accumulate: false,
                };
                // SAFETY: the slice has these rows and columns.
                unsafe { A::multiply(simd, product) };
            }
            for query in query..query + rows {
                self.probabilities(simd, first_key, num_keys, first_query, query, columns);
            }
            let ds = A::tile_rows(&self.ds[query * TILE..(query + rows) * TILE], self.ds_words);
            let product = ProductInto {
                shape: [rows, dim, seen(query + rows).div_ceil(A::NUMBERS)],
                c: self.dq_rows[at..at + rows * dim].as_mut_ptr(),
                c_stride: dim,
                a: Left::rows(ds, TILE / A::NUMBERS),
                b: &*self.k_rows,
                b_stride: dim,
                then: None,
                accumulate: true,
            };
            // SAFETY: the slice of dq has these rows and columns.
            unsafe { A::multiply(simd, product) };
        }
        let p = A::tile_stacked(self.p, num_queries, self.p_words);
        let ds = A::tile_stacked(self.ds, num_queries, self.ds_words);
        let (q, d_o) =
            if A::NUMBERS == 1 { (&*self.q_rows, &*self.d_o_rows) } else { (&*self.q_stacked, &*self.d_o_stacked) };
        for key in (0..num_keys).step_by(STRIP) {
            let first = if diagonal { key.min(num_queries) } else { 0 };
            let (rows, from) = (STRIP.min(num_keys - key), (row + first) / A::NUMBERS * dim);
            for (c, a, b) in [(&mut *self.dv_tile, p, d_o), (&mut *self.dk_tile, ds, q)] {
                let product = ProductInto {
                    shape: [rows, dim, (num_queries - first).div_ceil(A::NUMBERS)],
                    c: c[key * dim..(key + rows) * dim].as_mut_ptr(),
                    c_stride: dim,
                    a: Left::columns(&a[first / A::NUMBERS * TILE + key..], TILE),
                    b: &b[from.min(b.len())..],
                    b_stride: dim,
                    then: None,
                    accumulate: true,
                };
                // SAFETY: the slice of the gradient has these rows and columns.
                unsafe { A::multiply(simd, product) };
            }
        }
    }

    /// One query's row: `p = 2^(score - lse)`, zero where masked, and `ds = p * (dp - delta)`.
    #[inline(always)]
    fn probabilities<S: Simd>(
        &mut self,
        simd: S,
        first_key: usize,
        num_keys: usize,
        first_query: usize,
        query: usize,
        columns: usize,
    ) {
        let place = first_query + query;
        let p = &mut self.p[query * TILE..query * TILE + columns];
        let ds = &mut self.ds[query * TILE..query * TILE + columns];
        let hidden_before = self.shape.first_seen(place).saturating_sub(first_key).min(columns);
        let visible_end = (place + 1).saturating_sub(first_key).min(num_keys).min(columns);
        let row = place - self.task.queries.start;
        let [_, mut factor] = A::factors(self.shape.product_factor());
        let mut delta = self.delta[row];
        if let Some(cap) = self.shape.soft_cap {
            capped(simd, [p, ds], factor, delta, cap as f32);
            (factor, delta) = (1.0, 0.0);
        }
        p[..hidden_before].fill(f32::NEG_INFINITY);
        p[visible_end..].fill(f32::NEG_INFINITY);
        let (factor, delta) = (simd.splat_f32s(factor), simd.splat_f32s(delta));
        let minus_lse = simd.splat_f32s(-self.lse_rows[row]);
        let (p, _) = S::as_mut_simd_f32s(p);
        let (ds, _) = S::as_mut_simd_f32s(ds);
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = exp2_bounded(simd, simd.mul_add_e_f32s(*p, factor, minus_lse));
            *ds = simd.mul_f32s(*p, simd.sub_f32s(*ds, delta));
        }
    }
}

/// Where scores have a cap: `p` from products to scores in units of log2, and `ds` from the gradient of the probabilities to
/// that of the scores' shares of the cap, but for the probabilities.
#[inline(always)]
fn capped<S: Simd>(simd: S, [p, ds]: [&mut [f32]; 2], factor: f32, delta: f32, cap: f32) {
    let [factor, delta, one, cap] = [factor, delta, 1.0, cap * LOG2_E].map(|x| simd.splat_f32s(x));
    for (p, ds) in S::as_mut_simd_f32s(p).0.iter_mut().zip(S::as_mut_simd_f32s(ds).0) {
        let share = tanh(simd, simd.mul_f32s(*p, factor));
        let slope = simd.sub_f32s(one, simd.mul_f32s(share, share));
        *p = simd.mul_f32s(cap, share);
        *ds = simd.mul_f32s(simd.sub_f32s(*ds, delta), slope);
    }
}
