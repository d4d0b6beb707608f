//! Attention by the kernels of `kernels/attention.cu`, after the plan of FlashAttention-2 (Dao, 2023): the matrix of scores never
//! exists, and every sum has one order.

use burn::backend::TensorMetadata as _;
use burn::tensor::{DType, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{rows, stride};
use super::stream::{Argument, Launch, Module, launch};
use crate::ops::attention::{Attended, Heads};
use crate::ops::custom::{custom, spec};
use crate::ops::layout::Layout;

static MODULE: Module = Module { name: "attention", ptx: include_str!("kernels/attention.ptx") };

/// Threads of a warp.
const WARP: usize = 32;
/// Warps of a block of `attention_delta`, one for a head.
const DELTA_WARPS: usize = 4;

/// Rows of a tile of queries and of a tile of keys, and warps of a block, as the kernels were compiled.
#[derive(Clone, Copy)]
struct Tiles {
    queries: usize,
    keys: usize,
    warps: usize,
}

/// Tiles of the forward, with the number of tiles of keys in flight; of the backward by queries; and by keys.
fn tiles(head_dim: usize) -> (Tiles, usize, Tiles, Tiles) {
    let tiles = |queries, keys, warps| Tiles { queries, keys, warps };
    match head_dim {
        64 => (tiles(128, 64, 4), 4, tiles(128, 32, 4), tiles(32, 128, 4)),
        96 => (tiles(128, 64, 4), 3, tiles(128, 32, 4), tiles(32, 128, 8)),
        128 => (tiles(128, 64, 4), 3, tiles(128, 32, 8), tiles(32, 128, 8)),
        _ => (tiles(64, 64, 4), 2, tiles(64, 16, 4), tiles(16, 64, 8)),
    }
}

/// [`attention`](crate::ops::attention::attention) of `bf16`; log-sum-exps are `[num_heads, tokens]`.
pub(super) fn forward([q, k, v]: [&Tensor<2>; 3], layout: &Layout, heads: Heads) -> Attended {
    let [tokens, width] = q.dims();
    let outputs = [spec(DType::BF16, [tokens, width]), spec(DType::F32, [heads.num_heads * tokens])];
    let first_key = layout.spans(heads.window, &q.device()).first_key.into_dispatch();
    let [q, k, v] = [q, k, v].map(|x| x.clone().into_dispatch());
    let [o, lse] = custom("attention", [q, k, v, first_key], outputs, move |[q, k, v, first_key], outputs| {
        let inputs = [rows(q), rows(k), rows(v), first_key];
        let (tiles, stages, ..) = tiles(heads.head_dim);
        let shared = 2 * heads.head_dim * (tiles.queries + stages * tiles.keys);
        let grid = [heads.num_heads, tokens.div_ceil(tiles.queries), 1];
        let strided = inputs[..3].iter().chain(&outputs[..1]);
        launch(&MODULE, kernel("forward", grid, tiles, shared, 6, strided, heads), &inputs, outputs);
    });
    Attended { o: Tensor::from_dispatch(o), lse: Tensor::from_dispatch(lse) }
}

/// [`attention_backward`](crate::ops::attention::attention_backward) of what [`forward`] has made.
pub(super) fn backward(
    d_o: &Tensor<2>,
    [q, k, v]: [&Tensor<2>; 3],
    attended: &Attended,
    layout: &Layout,
    heads: Heads,
) -> [Tensor<2>; 3] {
    let [tokens, _] = q.dims();
    let outputs = [q, k, v].map(|x| spec(DType::BF16, x.dims()));
    let [q, k, v, d_o, o] = [q, k, v, d_o, &attended.o].map(|x| x.clone().into_dispatch());
    let spans = layout.spans(heads.window, &attended.o.device());
    let [first_key, last_query] = [spans.first_key, spans.last_query].map(Tensor::into_dispatch);
    let inputs = [q, k, v, d_o, o, attended.lse.clone().into_dispatch(), first_key, last_query];
    let work = move |[q, k, v, d_o, o, lse, first_key, last_query]: [CubeTensor; 8], outputs: &[CubeTensor; 3]| {
        let [q, k, v, d_o, o] = [q, k, v, d_o, o].map(rows);
        let delta = empty_device_contiguous_dtype(lse.client.clone(), lse.device.clone(), lse.shape(), lse.dtype);
        let head_dim = heads.head_dim;

        let mut arguments: Vec<_> = (0..3).map(Argument::Tensor).collect();
        arguments.extend([stride(&d_o), stride(&o), tokens, heads.num_heads, head_dim].map(int));
        let (function, grid) = ("attention_delta".to_owned(), [tokens, heads.num_heads.div_ceil(DELTA_WARPS), 1]);
        let sums = Launch { function, grid, threads: DELTA_WARPS * WARP, shared_bytes: 0, arguments };
        launch(&MODULE, sums, &[d_o.clone(), o], std::slice::from_ref(&delta));

        let (_, _, by_query, by_key) = tiles(head_dim);
        let read = [q, k, v, d_o, lse, delta];
        let reads = |span| [&read[..], &[span]].concat();
        let strided = |written: std::ops::Range<usize>| read[..4].iter().chain(&outputs[written]);

        let shared = 4 * head_dim * (by_query.queries + 2 * by_query.keys);
        let grid = [heads.num_heads, tokens.div_ceil(by_query.queries), 1];
        let queries = kernel("backward_q", grid, by_query, shared, 8, strided(0..1), heads);
        launch(&MODULE, queries, &reads(first_key), &outputs[..1]);

        let shared = 4 * head_dim * (by_key.keys + 2 * by_key.queries) + 16 * by_key.queries;
        let grid = [heads.num_kv_heads, tokens.div_ceil(by_key.keys), 1];
        let keys = kernel("backward_kv", grid, by_key, shared, 9, strided(1..3), heads);
        launch(&MODULE, keys, &reads(last_query), &outputs[1..]);
    };
    custom("attention_backward", inputs, outputs, work).map(Tensor::from_dispatch)
}

/// A launch with `num_tensors` tensors, then the strides of the rows of `strided`, and what all kernels take.
fn kernel<'a>(
    name: &str,
    grid: [usize; 3],
    tiles: Tiles,
    shared_bytes: usize,
    num_tensors: usize,
    strided: impl Iterator<Item = &'a CubeTensor>,
    heads: Heads,
) -> Launch {
    let mut strided = strided.peekable();
    let tokens = strided.peek().map_or(0, |x| x.shape()[0]);
    let mut arguments: Vec<_> = (0..num_tensors).map(Argument::Tensor).collect();
    arguments.extend(strided.map(stride).chain([tokens, heads.num_heads, heads.num_kv_heads]).map(int));
    #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
    arguments.push(Argument::Float(heads.scale as f32));
    let function = format!("attention_{name}_{}", heads.head_dim);
    Launch { function, grid, threads: tiles.warps * WARP, shared_bytes, arguments }
}

fn int(value: usize) -> Argument {
    Argument::Int(i32::try_from(value).unwrap_or(i32::MAX))
}
