//! Attention by the kernels of `attention.cu`, after the plan of FlashAttention-2 (Dao, 2023): the matrix of scores never
//! exists, and every sum has one order.

use burn::backend::TensorMetadata as _;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{rows, scratch, stride};
use super::stream::{Launch, Module};
use crate::ops::attention::{Attended, Heads};
use crate::ops::custom::{custom, custom_of, side_by_side, spec};
use crate::ops::layout::Layout;

pub(super) static MODULE: Module = Module { name: "attention", ptx: include_str!("attention.ptx") };

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
        32 | 64 => (tiles(128, 64, 4), 4, tiles(128, 32, 4), tiles(32, 128, 4)),
        96 => (tiles(128, 64, 4), 3, tiles(128, 32, 4), tiles(64, 128, 8)),
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
    let run = move |[q, k, v, first_key]: [CubeTensor; 4], [o, lse]: &[CubeTensor; 2]| {
        let (tiles, stages, ..) = tiles(heads.head_dim);
        let shared = 2 * heads.head_dim * (tiles.queries + stages * tiles.keys);
        let qkv = [q, k, v].map(rows);
        let forward = kernel("forward", heads.num_heads, tokens.div_ceil(tiles.queries), tiles, heads).shared(shared);
        let forward = qkv.iter().fold(forward, Launch::read).read(&first_key).write(o).write(lse);
        finished(forward, qkv.iter().chain([o]), tokens, heads).launch();
    };
    let [o, lse] = custom("attention", [q, k, v, first_key], outputs, run);
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
    let outputs = side_by_side(tokens, [q, k, v].map(|x| x.dims()[1]));
    let spans = layout.spans(heads.window, &q.device());
    let [q, k, v, d_o, o] = [q, k, v, d_o, &attended.o].map(|x| x.clone().into_dispatch());
    let [first_key, last_query] = [spans.first_key, spans.last_query].map(Tensor::into_dispatch);
    let inputs = [q, k, v, d_o, o, attended.lse.clone().into_dispatch(), first_key, last_query];
    let run = move |[q, k, v, d_o, o, lse, first_key, last_query]: [CubeTensor; 8], outputs: &[CubeTensor; 3]| {
        let ([q, k, v, d_o], o, [dq, dk, dv]) = ([q, k, v, d_o].map(rows), rows(o), outputs);
        let (Heads { num_heads, num_kv_heads, head_dim, .. }, delta) = (heads, scratch(&lse, lse.shape(), DType::F32));
        let grid = [tokens, num_heads.div_ceil(DELTA_WARPS), 1];
        let sums = Launch::new(&MODULE, "attention_delta", grid, DELTA_WARPS * WARP).read(&d_o).read(&o).write(&delta);
        sums.ints([stride(&d_o), stride(&o), tokens, num_heads, head_dim]).launch();

        let (_, _, by_query, by_key) = tiles(head_dim);
        let inputs = [q, k, v, d_o];
        let read = |launch: Launch| inputs.iter().fold(launch, Launch::read).read(&lse).read(&delta);
        let shared = 4 * head_dim * (by_query.queries + 2 * by_query.keys);
        let queries =
            kernel("backward_q", num_heads, tokens.div_ceil(by_query.queries), by_query, heads).shared(shared);
        finished(read(queries).read(&first_key).write(dq), inputs.iter().chain([dq]), tokens, heads).launch();
        let shared = 4 * head_dim * (by_key.keys + 2 * by_key.queries) + 16 * by_key.queries;
        let keys = kernel("backward_kv", num_kv_heads, tokens.div_ceil(by_key.keys), by_key, heads).shared(shared);
        let keys = read(keys).read(&last_query).write(dk).write(dv);
        finished(keys, inputs.iter().chain([dk, dv]), tokens, heads).launch();
    };
    custom_of("attention_backward", inputs, outputs, run).map(Tensor::from_dispatch)
}

/// A kernel for tiles of rows of each of the heads.
fn kernel(name: &str, num_heads: usize, num_tiles: usize, tiles: Tiles, heads: Heads) -> Launch {
    let function = format!("attention_{name}_{}", heads.head_dim);
    Launch::new(&MODULE, function, [num_heads, num_tiles, 1], tiles.warps * WARP)
}

/// With what follows the tensors: the strides of rows, and what all kernels take.
fn finished<'a>(launch: Launch, strided: impl Iterator<Item = &'a CubeTensor>, tokens: usize, heads: Heads) -> Launch {
    launch.ints(strided.map(stride)).ints([tokens, heads.num_heads, heads.num_kv_heads]).float(heads.scale)
}
