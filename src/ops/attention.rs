//! Causal self-attention with grouped queries, without the matrix of all scores in either direction.
//!
//! The forward keeps the log-sum-exp of each row of scores; from it the backward recomputes the probabilities (Dao et
//! al., 2022). Keys and values are never expanded to the number of query heads.

use burn::tensor::{Bool, DType, Int, Tensor};

use super::layout::Layout;
use super::place::Place;
use super::profile::{self, Cost};
use super::{cpu, host};

pub use super::cpu::Heads;

/// Bytes of `f32` scores that the plain version makes at a time.
pub const CHUNK_BYTES: usize = 256 << 20;

/// Output of attention, and what its backward needs.
#[derive(Clone, Debug)]
pub struct Attended {
    /// `[tokens, num_heads * head_dim]`.
    pub o: Tensor<2>,
    /// Log-sum-exp of every row of scores, in `f32`, `[num_heads * tokens]`; the order is the implementation's.
    pub lse: Tensor<1>,
}

/// `softmax(scale q k^T + mask) v` for every head; a token sees itself and the tokens before it in its document.
///
/// # Shapes
/// `q`: `[tokens, num_heads * head_dim]`, `k`, `v`: `[tokens, num_kv_heads * head_dim]`.
#[must_use]
pub fn attention(q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>, layout: &Layout, heads: Heads) -> Attended {
    let work = || match layout.place() {
        Place::Plain(_) => plain_attention(q, k, v, layout, heads),
        Place::Cpu => {
            let [tokens, width] = q.dims();
            let (mut o, mut lse) = (vec![0.0; tokens * width], vec![0.0; tokens * heads.num_heads]);
            let (host_q, k, v) = (host::view(q), host::view(k), host::view(v));
            cpu::attention(&host_q, &k, &v, layout.documents(), &heads, &mut o, &mut lse);
            let (lse_shape, device) = ([lse.len()], q.device());
            Attended { o: host::tensor(o, [tokens, width], &device), lse: host::tensor(lse, lse_shape, &device) }
        }
    };
    profile::measure("attention", || cost([q, k, v], layout, heads, 2), work)
}

/// Cost of `products` products for every visible pair of a query and a key, for each query head.
fn cost(operands: [&Tensor<2>; 3], layout: &Layout, heads: Heads, products: usize) -> Cost {
    let window = |len: usize| heads.window.map_or(len, |window| window.min(len));
    let pairs = |len: usize| window(len) * (window(len) + 1) / 2 + (len - window(len)) * window(len);
    let all_pairs: usize = layout.documents().iter().map(|(_, len)| pairs(*len)).sum();
    let output = profile::bytes(operands[0]);
    Cost {
        shape: format!("{} heads of {}", heads.num_heads, heads.head_dim),
        flops: profile::count(2 * products * all_pairs * heads.num_heads * heads.head_dim),
        bytes: operands.iter().map(|x| profile::bytes(x)).sum::<f64>() + output,
    }
}

/// The gradients of [`attention`] with respect to `q`, `k` and `v`.
///
/// # Shapes
/// `d_o`: `[tokens, num_heads * head_dim]`; the rest as in the forward.
#[must_use]
pub fn attention_backward(
    d_o: &Tensor<2>,
    operands: [&Tensor<2>; 3],
    attended: &Attended,
    layout: &Layout,
    heads: Heads,
) -> [Tensor<2>; 3] {
    let once = || cost(operands, layout, heads, 4);
    let cost = || Cost { bytes: 2.0 * once().bytes, ..once() };
    let work = || match layout.place() {
        Place::Plain(_) => plain_attention_backward(d_o, operands, attended, layout, heads),
        Place::Cpu => {
            let views = operands.map(host::view);
            let (d_o, o, lse) = (host::view(d_o), host::view(&attended.o), host::view(&attended.lse));
            let mut grads = views.each_ref().map(|x| vec![0.0; x.len()]);
            let grads_mut = grads.each_mut().map(Vec::as_mut_slice);
            cpu::attention_backward(
                &d_o,
                views.each_ref().map(|x| &**x),
                &o,
                &lse,
                layout.documents(),
                &heads,
                grads_mut,
            );
            let [dq, dk, dv] = grads;
            let [q, k, v] = operands;
            [(q, dq), (k, dk), (v, dv)].map(|(x, dx)| host::tensor(dx, x.dims(), &x.device()))
        }
    };
    profile::measure("attention_backward", cost, work)
}

/// A range of query rows and the keys that any of them can see.
struct Chunk {
    start: usize,
    len: usize,
    keys: usize,
}

fn chunks(layout: &Layout, heads: Heads) -> Vec<Chunk> {
    let (rows, length) = (layout.rows(), layout.row_length());
    let bytes_per_query = rows * heads.num_heads * length * size_of::<f32>();
    let size = (CHUNK_BYTES / bytes_per_query.max(1)).clamp(64.min(length), length).next_power_of_two().min(length);
    (0..length)
        .step_by(size)
        .map(|start| {
            let len = size.min(length - start);
            Chunk { start, len, keys: start + len }
        })
        .collect()
}

/// `[tokens, heads * head_dim]` to `[rows * kv_heads, group, row_length, head_dim]`.
fn split_heads(x: Tensor<2>, layout: &Layout, heads: Heads) -> Tensor<4> {
    let group = x.dims()[1] / heads.head_dim / heads.num_kv_heads;
    x.reshape([layout.rows(), layout.row_length(), heads.num_kv_heads * group, heads.head_dim])
        .swap_dims(1, 2)
        .reshape([layout.rows() * heads.num_kv_heads, group, layout.row_length(), heads.head_dim])
}

/// The inverse of [`split_heads`].
fn join_heads(x: Tensor<4>, layout: &Layout, heads: Heads) -> Tensor<2> {
    let group = x.dims()[1];
    x.reshape([layout.rows(), heads.num_kv_heads * group, layout.row_length(), heads.head_dim])
        .swap_dims(1, 2)
        .reshape([layout.rows() * layout.row_length(), heads.num_kv_heads * group * heads.head_dim])
}

/// Marks the keys that a query of the chunk must not see: `[rows or 1, len, keys]`.
fn hidden_keys(chunk: &Chunk, layout: &Layout, heads: Heads, like: &Tensor<4>) -> Tensor<3, Bool> {
    let device = like.device();
    let range = |start: usize, end: usize| {
        #[expect(clippy::cast_possible_wrap, reason = "rows are far shorter than 2^63 tokens")]
        Tensor::<1, Int>::arange(start as i64..end as i64, (&device, DType::I32))
    };
    let queries = range(chunk.start, chunk.keys).reshape([1, chunk.len, 1]);
    let keys = range(0, chunk.keys).reshape([1, 1, chunk.keys]);
    let shape = [1, chunk.len, chunk.keys];
    let (queries, keys) = (queries.expand::<3, _>(shape), keys.expand::<3, _>(shape));
    let mut hidden = keys.clone().greater(queries.clone());
    if let Some(window) = heads.window {
        #[expect(clippy::cast_possible_wrap, reason = "a window is far shorter than 2^63 tokens")]
        let reach = keys.add_scalar(window as i64);
        hidden = hidden.bool_or(reach.lower_equal(queries));
    }
    if let Some(ids) = layout.document_ids() {
        let shape = [layout.rows(), chunk.len, chunk.keys];
        let of_queries = ids.clone().narrow(1, chunk.start, chunk.len).unsqueeze_dim::<3>(2);
        let of_keys = ids.narrow(1, 0, chunk.keys).unsqueeze_dim::<3>(1);
        let differ = of_queries.expand::<3, _>(shape).not_equal(of_keys.expand::<3, _>(shape));
        hidden = hidden.expand::<3, _>(shape).bool_or(differ);
    }
    hidden
}

/// Masked, scaled scores of a chunk in `f32`, `[rows * kv_heads, group * len, keys]`.
fn scores(q: &Tensor<4>, k: &Tensor<4>, chunk: &Chunk, layout: &Layout, heads: Heads) -> Tensor<3> {
    let [batch, group, _, head_dim] = q.dims();
    let q_chunk = q.clone().narrow(2, chunk.start, chunk.len).reshape([batch, group * chunk.len, head_dim]);
    let k_chunk = k.clone().narrow(2, 0, chunk.keys).reshape([batch, chunk.keys, head_dim]);
    let k_chunk = k_chunk.swap_dims(1, 2);
    // f16 products could overflow before they are scaled; bf16 would round the scale itself.
    let scores = if q.dtype() == DType::F16 {
        (q_chunk * heads.scale).matmul(k_chunk).cast(DType::F32)
    } else {
        q_chunk.matmul(k_chunk).cast(DType::F32) * heads.scale
    };
    let hidden = hidden_keys(chunk, layout, heads, q);
    let [rows, ..] = hidden.dims();
    let shape = [layout.rows(), heads.num_kv_heads, group, chunk.len, chunk.keys];
    let hidden = hidden.reshape([rows, 1, 1, chunk.len, chunk.keys]).expand::<5, _>(shape);
    scores.reshape(shape).mask_fill(hidden, f32::NEG_INFINITY).reshape([batch, group * chunk.len, chunk.keys])
}

/// [`attention`] in plain tensor calls, a chunk of queries at a time.
#[must_use]
pub fn plain_attention(q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>, layout: &Layout, heads: Heads) -> Attended {
    let dtype = q.dtype();
    let [q, k, v] = [q, k, v].map(|x| split_heads(x.clone(), layout, heads));
    let [batch, group, length, head_dim] = q.dims();
    let (mut outputs, mut all_lse) = (Vec::new(), Vec::new());
    for chunk in chunks(layout, heads) {
        let scores = scores(&q, &k, &chunk, layout, heads);
        let max = scores.clone().max_dim(2);
        let weights = (scores - max.clone()).exp();
        let sum = weights.clone().sum_dim(2);
        let v_chunk = v.clone().narrow(2, 0, chunk.keys).reshape([batch, chunk.keys, head_dim]);
        let o = (weights / sum.clone()).cast(dtype).matmul(v_chunk);
        outputs.push(o.reshape([batch, group, chunk.len, head_dim]));
        all_lse.push((max + sum.log()).reshape([batch, group, chunk.len]));
    }
    let lse = Tensor::cat(all_lse, 2).reshape([batch * group * length]);
    Attended { o: join_heads(Tensor::cat(outputs, 2), layout, heads), lse }
}

/// [`attention_backward`] in plain tensor calls, a chunk of queries at a time.
#[must_use]
pub fn plain_attention_backward(
    d_o: &Tensor<2>,
    [q, k, v]: [&Tensor<2>; 3],
    attended: &Attended,
    layout: &Layout,
    heads: Heads,
) -> [Tensor<2>; 3] {
    let dtype = q.dtype();
    let [q, k, v] = [q, k, v].map(|x| split_heads(x.clone(), layout, heads));
    let [d_o, o] = [d_o, &attended.o].map(|x| split_heads(x.clone(), layout, heads));
    let [batch, group, length, head_dim] = q.dims();
    let lse = attended.lse.clone().reshape([batch, group, length]);
    // Row sums of dP * P, from the output: [batch, group, length, 1].
    let delta = (d_o.clone().cast(DType::F32) * o.cast(DType::F32)).sum_dim(3);
    let mut dqs = Vec::new();
    let mut dk = Tensor::<3>::zeros([batch, length, head_dim], (&q.device(), DType::F32));
    let mut dv = dk.clone();
    for chunk in chunks(layout, heads) {
        let rows = group * chunk.len;
        let lse = lse.clone().narrow(2, chunk.start, chunk.len).reshape([batch, rows, 1]);
        let delta = delta.clone().narrow(2, chunk.start, chunk.len).reshape([batch, rows, 1]);
        let d_o = d_o.clone().narrow(2, chunk.start, chunk.len).reshape([batch, rows, head_dim]);
        let q_chunk = q.clone().narrow(2, chunk.start, chunk.len).reshape([batch, rows, head_dim]);
        let [k_chunk, v_chunk] =
            [&k, &v].map(|x| x.clone().narrow(2, 0, chunk.keys).reshape([batch, chunk.keys, head_dim]));
        let p = (scores(&q, &k, &chunk, layout, heads) - lse).exp(); // [batch, rows, keys]
        let dv_chunk = p.clone().cast(dtype).swap_dims(1, 2).matmul(d_o.clone()).cast(DType::F32);
        let dp = d_o.matmul(v_chunk.swap_dims(1, 2)).cast(DType::F32);
        let ds = (p * (dp - delta) * heads.scale).cast(dtype);
        let dk_chunk = ds.clone().swap_dims(1, 2).matmul(q_chunk).cast(DType::F32);
        dqs.push(ds.matmul(k_chunk).reshape([batch, group, chunk.len, head_dim]));
        let add = |sum: Tensor<3>, part: Tensor<3>| {
            if chunk.keys == length {
                return sum + part;
            }
            let seen = sum.clone().narrow(1, 0, chunk.keys) + part;
            sum.slice_assign([0..batch, 0..chunk.keys, 0..head_dim], seen)
        };
        dk = add(dk, dk_chunk);
        dv = add(dv, dv_chunk);
    }
    let dq = join_heads(Tensor::cat(dqs, 2), layout, heads);
    let [dk, dv] = [dk, dv].map(|x| join_heads(x.reshape([batch, 1, length, head_dim]).cast(dtype), layout, heads));
    [dq, dk, dv]
}
