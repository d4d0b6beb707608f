//! Attention by the kernels of `attention.cu`, after the plan of FlashAttention-2 (Dao, 2023), and on compute capability 9.0 by those
//! of `attention_hopper.cu`, after that of FlashAttention-3 (Shah et al., 2024): the matrix of scores never exists, and every sum has
//! one order.

use burn::backend::TensorMetadata as _;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, scratch, stride};
use super::stream::{Launch, note_memory, tiles_in_flight};
use super::{table, uses_hopper};
use crate::ops::cuda::parts_of_group;
use crate::ops::custom::{custom, custom_of, side_by_side, spec};
use crate::ops::plain::attention::{Attended, AttentionInputs, LseOrder};
use crate::spec::Heads;

/// The kernels' files, without and with a cap of scores.
const MODULES: [&str; 2] = ["attention", "attention_capped"];

const HOPPER: &str = "attention_hopper";

/// Threads of a warp.
const WARP: usize = 32;
/// Warps of a block of `attention_delta`, one for a head.
const DELTA_WARPS: usize = 4;
/// Numbers that a block of `join_parts` adds up.
const JOINED: usize = 512;
/// Rows of the tiles that layouts put in order.
const ORDERED: usize = 128;
/// Warps of 255 registers a thread that a multiprocessor has at a time.
const MOST_WARPS: usize = 8;
/// Multiprocessors of an H100, for a GPU that says nothing of them.
const MULTIPROCESSORS: u32 = 132;

/// Rows of a tile of queries and of a tile of keys, and warps of a block, as the kernels were compiled.
#[derive(Clone, Copy)]
struct Tiles {
    queries: usize,
    keys: usize,
    warps: usize,
}

/// Tiles of the forward on the GPU of `q`, with the number of tiles of keys in flight; of the backward by queries; and by keys.
fn tiles(head_dim: usize, q: &CubeTensor) -> (Tiles, usize, Tiles, Tiles) {
    let tiles = |queries, keys, warps| Tiles { queries, keys, warps };
    if tiles_in_flight(q) == 1 {
        return match head_dim {
            32 => (tiles(128, 64, 4), 2, tiles(128, 32, 4), tiles(32, 128, 4)),
            64 => (tiles(128, 64, 4), 2, tiles(64, 32, 4), tiles(16, 64, 4)),
            96 => (tiles(64, 32, 4), 2, tiles(64, 32, 4), tiles(32, 64, 4)),
            128 => (tiles(64, 32, 4), 2, tiles(64, 32, 4), tiles(16, 64, 4)),
            _ => (tiles(64, 32, 4), 2, tiles(32, 16, 2), tiles(16, 16, 4)),
        };
    }
    match head_dim {
        32 | 64 => (tiles(128, 64, 4), 4, tiles(128, 32, 4), tiles(32, 128, 4)),
        96 => (tiles(128, 64, 4), 3, tiles(128, 32, 4), tiles(64, 128, 8)),
        128 => (tiles(128, 64, 4), 3, tiles(128, 32, 8), tiles(32, 128, 8)),
        _ => (tiles(64, 64, 4), 2, tiles(64, 16, 4), tiles(16, 64, 8)),
    }
}

/// The forward of which two blocks fit into a multiprocessor of a GPU whose blocks have no more than 99 KB of shared memory (8.6, 8.9
/// and 12.0), where the other is alone there with its four warps: its name, its tiles, and how many of keys are in flight.
fn small_tiles(head_dim: usize, q: &CubeTensor) -> Option<(&'static str, Tiles, usize)> {
    let is_small = q.client.properties().hardware.max_shared_memory_size <= 99 << 10 && tiles_in_flight(q) > 1;
    (is_small && matches!(head_dim, 96 | 128)).then_some((
        "small_forward",
        Tiles { queries: 64, keys: 64, warps: 4 },
        2,
    ))
}

/// `x` with heads of another width: with zeros behind, or without these.
fn with_heads(x: &Tensor<2>, [from, to]: [usize; 2]) -> Tensor<2> {
    let [tokens, width] = x.dims();
    if from == to {
        return x.clone();
    }
    let num_heads = width / from;
    let by_head = x.clone().reshape([tokens, num_heads, from]);
    let by_head = if to < from {
        by_head.narrow(2, 0, to)
    } else {
        let zeros = Tensor::zeros([tokens, num_heads, to - from], (&x.device(), x.dtype()));
        Tensor::cat(vec![by_head, zeros], 2)
    };
    by_head.reshape([tokens, num_heads * to])
}

/// [`attention`](crate::ops::attention::attention) of 16 bits by heads of `wide`; log-sum-exps are `[num_heads, tokens]`.
pub(super) fn forward(inputs: AttentionInputs<'_>, wide: Heads) -> Attended {
    let widths = [inputs.heads.head_dim, wide.head_dim];
    let qkv = inputs.qkv.map(|x| with_heads(x, widths));
    let attended = forward_by(AttentionInputs { qkv: qkv.each_ref(), heads: wide, ..inputs });
    Attended { o: with_heads(&attended.o, [widths[1], widths[0]]), ..attended }
}

/// [`attention_backward`](crate::ops::attention::attention_backward) of what [`forward`] has made.
pub(super) fn backward(
    d_o: &Tensor<2>,
    attended: &Attended,
    inputs: AttentionInputs<'_>,
    wide: Heads,
) -> [Tensor<2>; 3] {
    let widths = [inputs.heads.head_dim, wide.head_dim];
    let qkv = inputs.qkv.map(|x| with_heads(x, widths));
    let [d_o, o] = [d_o, &attended.o].map(|x| with_heads(x, widths));
    let grads = backward_by(
        &d_o,
        &Attended { o, ..attended.clone() },
        AttentionInputs { qkv: qkv.each_ref(), heads: wide, ..inputs },
    );
    grads.map(|grad| with_heads(&grad, [widths[1], widths[0]]))
}

fn forward_by(AttentionInputs { qkv: [q, k, v], layout, heads }: AttentionInputs<'_>) -> Attended {
    let [tokens, width] = q.dims();
    let outputs = [spec(q.dtype(), [tokens, width]), spec(DType::F32, [heads.num_heads * tokens])];
    let spans = layout.spans(heads.window, &q.device());
    let [first_key, order] = [spans.first_key, spans.order].map(Tensor::into_dispatch);
    let [q, k, v] = [q, k, v].map(|x| x.clone().into_dispatch());
    let run = move |[q, k, v, first_key, order]: [CubeTensor; 5], [o, lse]: &[CubeTensor; 2]| {
        let qkv = [q, k, v].map(rows);
        let (tiles, stages, ..) = tiles(heads.head_dim, &qkv[0]);
        let (name, tiles, stages) = small_tiles(heads.head_dim, &qkv[0]).unwrap_or(("forward", tiles, stages));
        let forward = Kernel::new("forward", &qkv[0], heads.num_heads, heads, || {
            let shared = 2 * heads.head_dim * (tiles.queries + stages * tiles.keys);
            kernel(name, heads.num_heads, tokens, tiles.queries, tiles, heads).shared(shared)
        });
        forward.launch(&qkv, [&order, &first_key], [o], [lse], tokens, heads);
    };
    let [o, lse] = custom("attention", [q, k, v, first_key, order], outputs, run);
    Attended { o: Tensor::from_dispatch(o), lse: Tensor::from_dispatch(lse), order: LseOrder::ByHead }
}

fn backward_by(
    d_o: &Tensor<2>,
    attended: &Attended,
    AttentionInputs { qkv: [q, k, v], layout, heads }: AttentionInputs<'_>,
) -> [Tensor<2>; 3] {
    let [tokens, _] = q.dims();
    let outputs = side_by_side(q, [q, k, v].map(|x| x.dims()[1]));
    let spans = layout.spans(heads.window, &q.device());
    let [q, k, v, d_o, o] = [q, k, v, d_o, &attended.o].map(|x| x.clone().into_dispatch());
    let seen = [spans.order, spans.first_key, spans.key_order, spans.last_query].map(Tensor::into_dispatch);
    let [order, first_key, key_order, last_query] = seen;
    let inputs = [q, k, v, d_o, o, attended.lse.clone().into_dispatch(), order, first_key, key_order, last_query];
    let run = move |[q, k, v, d_o, o, lse, order, first_key, key_order, last_query]: [CubeTensor; 10],
                    outputs: &[CubeTensor; 3]| {
        let ([q, k, v, d_o], o, [dq, dk, dv]) = ([q, k, v, d_o].map(rows), rows(o), outputs);
        let (Heads { num_heads, num_kv_heads, head_dim, .. }, delta) = (heads, scratch(&lse, lse.shape(), DType::F32));
        note_memory(&delta);
        let grid = [tokens, num_heads.div_ceil(DELTA_WARPS), 1];
        let sums = launch("delta", grid, DELTA_WARPS * WARP, heads).read(&d_o).read(&o).write(&delta);
        sums.ints([stride(&d_o), stride(&o), tokens, num_heads, head_dim]).launch();

        let (_, _, by_query, by_key) = tiles(head_dim, &q);
        let inputs = [q, k, v, d_o];
        let queries = Kernel::new("backward_q", &inputs[0], num_heads, heads, || {
            let shared = 4 * head_dim * (by_query.queries + 2 * by_query.keys);
            kernel("backward_q", num_heads, tokens, by_query.queries, by_query, heads).shared(shared)
        });
        queries.launch(&inputs, [&lse, &delta, &order, &first_key], [dq], [], tokens, heads);

        let is_hopper = has_hopper("backward_kv", heads, &inputs[0]);
        let num_tiles = tokens.div_ceil(if is_hopper { HOPPER_ROWS } else { by_key.keys });
        let places = multiprocessors(&inputs[0]) * if is_hopper { 1 } else { MOST_WARPS / by_key.warps };
        let parts = parts_of_group(num_heads / num_kv_heads, num_kv_heads * num_tiles, places);
        let keys = Kernel::new("backward_kv", &inputs[0], num_kv_heads * parts, heads, || {
            let shared = 4 * head_dim * (by_key.keys + 2 * by_key.queries) + 16 * by_key.queries;
            kernel("backward_kv", num_kv_heads * parts, tokens, by_key.keys, by_key, heads).shared(shared)
        });
        let others = [&lse, &delta, &key_order, &last_query];
        if parts == 1 {
            return keys.launch(&inputs, others, [dk, dv], [], tokens, heads);
        }
        let sums = [dk, dv].map(|d| scratch(d, [parts * tokens, dims(d)[1]], DType::F32));
        note_memory(&sums[0]);
        keys.launch(&inputs, others, sums.each_ref(), [], tokens, heads);
        [dk, dv].into_iter().zip(&sums).for_each(|(d, sums)| join_parts(sums, d, parts, heads));
    };
    custom_of("attention_backward", inputs, outputs, run).map(Tensor::from_dispatch)
}

/// A kernel for tiles of so many rows of each of the heads.
fn kernel(name: &str, num_heads: usize, tokens: usize, rows: usize, tiles: Tiles, heads: Heads) -> Launch {
    let num_tiles = tokens.div_ceil(ORDERED) * (ORDERED / rows);
    launch(&format!("{name}_{}", heads.head_dim), [num_heads, num_tiles, 1], tiles.warps * WARP, heads)
}

fn launch(name: &str, grid: [usize; 3], threads: usize, heads: Heads) -> Launch {
    let module = MODULES[usize::from(heads.soft_cap.is_some())];
    Launch::new(module, format!("{module}_{name}"), grid, threads)
}

/// `d`, of the sums of its parts, which lie one below the other.
fn join_parts(sums: &CubeTensor, d: &CubeTensor, parts: usize, heads: Heads) {
    let [tokens, width] = dims(d);
    let joining = launch("join_parts", [(tokens * width).div_ceil(JOINED), 1, 1], JOINED / 4, heads);
    joining.read(sums).write(d).ints([stride(d), tokens, width, parts]).launch();
}

fn multiprocessors(q: &CubeTensor) -> usize {
    q.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(MULTIPROCESSORS) as usize
}

/// Rows of a block's tile in `attention_hopper.cu`.
const HOPPER_ROWS: usize = 128;
/// Its threads: three warpgroups.
const HOPPER_THREADS: usize = 384;

/// Rows of a tile that `attention_hopper.cu` copies, and how many tiles are in flight, as its kernels were compiled.
fn hopper_tiles(name: &str, head_dim: usize) -> Option<[usize; 2]> {
    match (name, head_dim) {
        ("forward" | "backward_q", 64 | 96 | 128) => Some([128, 4]),
        ("forward", 256) => Some([64, 3]),
        ("backward_kv", 64 | 96 | 128) => Some([64, 4]),
        _ => None,
    }
}

/// Whether a kernel for Hopper is used on the GPU of `q`: there is none for scores under a cap.
fn has_hopper(name: &str, heads: Heads, q: &CubeTensor) -> bool {
    hopper_tiles(name, heads.head_dim).is_some()
        && heads.soft_cap.is_none()
        && uses_hopper(table::Kernel::AttentionHopper, q)
}

/// A kernel of attention to be launched.
struct Kernel {
    launch: Launch,
    /// Columns of the tiles in which its operands are copied by tensor maps, on Hopper.
    tile_columns: Option<u32>,
}

impl Kernel {
    /// The kernel for `num_heads` heads on the GPU of `q`: `other` where there is none for Hopper.
    fn new(name: &str, q: &CubeTensor, num_heads: usize, heads: Heads, other: impl FnOnce() -> Launch) -> Self {
        let (tokens, head_dim) = (dims(q)[0], heads.head_dim);
        let Some([tile, slots]) = hopper_tiles(name, head_dim).filter(|_| has_hopper(name, heads, q)) else {
            return Self { launch: other(), tile_columns: None };
        };
        let num_tiles = tokens.div_ceil(HOPPER_ROWS);
        let blocks = (num_heads * num_tiles).min(multiprocessors(q));
        let (grid, shared) = match name {
            "forward" => ([blocks, 1, 1], 2 * head_dim * (256 + slots * tile) + 16 * slots + 32),
            "backward_q" => ([blocks, 1, 1], 2 * head_dim * (384 + slots * tile) + 16 * slots + 32),
            _ => ([num_heads, num_tiles, 1], 2 * head_dim * (256 + 2 * slots * tile) + (16 + 8 * tile) * slots + 8),
        };
        let launch = Launch::new(HOPPER, format!("attention_hopper_{name}_{head_dim}"), grid, HOPPER_THREADS);
        let tile_columns = if head_dim.is_multiple_of(64) { 64 } else { 32 };
        Self { launch: launch.shared(shared), tile_columns: Some(tile_columns) }
    }

    /// With the operands, what else is read, and the results: rows, and values for each of them.
    fn launch<const N: usize, const M: usize, const L: usize>(
        self,
        operands: &[CubeTensor],
        others: [&CubeTensor; N],
        results: [&CubeTensor; M],
        values: [&CubeTensor; L],
        tokens: usize,
        heads: Heads,
    ) {
        let launch = match self.tile_columns {
            Some(columns) => operands.iter().fold(self.launch, |launch, x| launch.map(x, columns)),
            None => operands.iter().fold(self.launch, Launch::read),
        };
        let launch = others.into_iter().fold(launch, Launch::read);
        let launch = results.into_iter().chain(values).fold(launch, Launch::write);
        // A tensor map has the stride, and kernels with such no cap.
        let (strided, cap) = match self.tile_columns {
            Some(_) => (&[][..], None),
            None => (operands, Some(heads.soft_cap.unwrap_or_default())),
        };
        let launch = launch.ints(strided.iter().chain(results).map(stride));
        let launch = launch.ints([tokens, heads.num_heads, heads.num_kv_heads]).float(heads.scale);
        cap.into_iter().fold(launch, Launch::float).launch();
    }
}
