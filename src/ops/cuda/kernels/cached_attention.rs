//! Attention of new tokens on what caches keep of their texts, by the kernels of `cached_attention.cu`.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{aligned, rows, scratch, stride};
use super::stream::{Launch, Operand};
use crate::ops::custom::{Output, launch, queue, spec};
use crate::ops::plain::attention::{Attended, LseOrder};
use crate::ops::plain::cached_attention::TextsOnDevice;
use crate::spec::Heads;

const MODULE: &str = "cached_attention";

const THREADS: usize = 128;
/// Texts of a launch, as their table was compiled.
const TEXTS: usize = 64;
/// Keys that a block takes.
const CHUNK: usize = 256;
/// Queries of a group that a block takes.
const QUERIES: usize = 8;
/// Numbers of a thread that copies.
const COPIED: usize = 8;
/// Bytes of the sums of chunks of a launch.
const MOST_BYTES: usize = 64 << 20;

/// Where the new tokens of texts are.
#[derive(Clone)]
struct Texts {
    heads: Heads,
    /// Of each text, its first row and the number of these, and the position of the first.
    spans: Vec<[usize; 3]>,
}

impl Texts {
    fn of(texts: &TextsOnDevice) -> Self {
        let spans = texts.rows.iter().zip(&texts.positions);
        Self { heads: texts.heads, spans: spans.map(|(rows, position)| [rows.start, rows.len(), *position]).collect() }
    }

    /// The ranges of rows of the launches, with the texts of each, of which a table has room for so many.
    fn launches(&self, most_rows: usize) -> impl Iterator<Item = (usize, usize, Vec<usize>)> {
        let groups = (0..self.spans.len()).collect::<Vec<_>>();
        let groups: Vec<Vec<usize>> = groups.chunks(TEXTS).map(<[usize]>::to_vec).collect();
        groups.into_iter().flat_map(move |texts| {
            let [start, ..] = self.spans[texts[0]];
            let end = texts.last().map_or(start, |last| self.spans[*last][0] + self.spans[*last][1]);
            let first_rows = (start..end).step_by(most_rows);
            first_rows.map(move |first| (first, most_rows.min(end - first), texts.clone()))
        })
    }

    /// The launch with the table of these texts, and the first row.
    fn with_table<'a>(
        &self,
        launch: Launch,
        texts: &[usize],
        held: &'a [CubeTensor],
        operand: fn(&'a CubeTensor) -> Operand<'a>,
        first_row: usize,
    ) -> Launch {
        let entries = texts.iter().flat_map(|text| {
            let [keys, values] = [0, 1].map(|index| operand(&held[2 * text + index]));
            let [row, _, position] = self.spans[*text];
            let capacity = held[2 * text].meta.shape()[1];
            [keys, values, Operand::Word(capacity as u64 | (row as u64) << 32), Operand::Value(position)]
        });
        launch.table(entries, 4 * TEXTS).ints([texts.len(), first_row])
    }
}

/// Writes the keys and values of the new tokens into the caches, in place where nothing else holds these.
pub(super) fn append(texts: TextsOnDevice, kv: [&Tensor<2>; 2]) -> Vec<[Tensor<3>; 2]> {
    let spans = Texts::of(&texts);
    let held = texts.held.into_iter().flatten().map(Tensor::into_dispatch);
    let inputs: Vec<_> = held.chain(kv.map(|x| x.clone().into_dispatch())).collect();
    let outputs = (0..inputs.len() - 2).map(Output::Changed).collect();
    let changed = queue("append_to_caches", inputs, outputs, move |kv, held| {
        let (kv, Heads { num_kv_heads, head_dim, .. }): (Vec<_>, _) = (kv.into_iter().map(rows).collect(), spans.heads);
        let columns = (num_kv_heads * head_dim).div_ceil(COPIED * THREADS);
        for (first, count, texts) in spans.launches(usize::MAX) {
            let copy = Launch::new(MODULE, "append_to_caches", [count, columns, 1], THREADS);
            let copy = kv.iter().fold(copy, Launch::read);
            let copy = spans.with_table(copy, &texts, held, Operand::Change, first);
            copy.ints(kv.iter().map(stride)).ints([num_kv_heads, head_dim]).launch();
        }
    });
    let mut changed = changed.into_iter().map(Tensor::from_dispatch);
    std::iter::from_fn(|| Some([changed.next()?, changed.next()?])).collect()
}

/// Attention of the new tokens, each on those of its text up to itself; log-sum-exps are `[tokens, num_heads]`.
pub(super) fn attend(texts: &TextsOnDevice, q: &Tensor<2>) -> Attended {
    let (spans, [num_rows, width]) = (Texts::of(texts), q.dims());
    let heads @ Heads { num_heads, num_kv_heads, head_dim, .. } = spans.heads;
    let outputs = [spec(q.dtype(), [num_rows, width]), spec(DType::F32, [num_rows * num_heads])].map(Output::New);
    let held = texts.held.iter().flatten().map(|held| held.clone().into_dispatch());
    let inputs = std::iter::once(q.clone().into_dispatch()).chain(held);
    let [o, lse] = launch("cached_attention", inputs, outputs, move |[q], held, [o, lse]| {
        let (q, held): (_, Vec<_>) = (rows(q), held.into_iter().map(aligned).collect());
        let ends = spans.spans.iter().map(|[_, count, position]| position + count);
        let chunks = ends.max().unwrap_or_default().div_ceil(CHUNK);
        let bytes = num_heads * chunks * head_dim * size_of::<f32>();
        let most_rows = (MOST_BYTES / bytes).clamp(1, num_rows);
        let [sums, ends] = [head_dim, 2].map(|width| scratch(&q, [most_rows * num_heads * chunks * width], DType::F32));
        let window = heads.window.unwrap_or_default();
        let blocks = num_kv_heads * (num_heads / num_kv_heads).div_ceil(QUERIES);
        for (first, count, texts) in spans.launches(most_rows) {
            let part = Launch::new(MODULE, "attend_to_chunks", [count, blocks, chunks], THREADS).read(&q);
            // A later launch has the memory of the one before it.
            let part = spans.with_table(part.change(&sums).change(&ends), &texts, &held, Operand::Read, first);
            let part = part.ints([stride(&q), num_heads, num_kv_heads, head_dim, window]).float(heads.scale);
            part.float(heads.soft_cap.unwrap_or_default()).launch();
            let join = Launch::new(MODULE, "join_chunks", [count, num_heads, 1], THREADS).read(&sums).read(&ends);
            let join = spans.with_table(join.change(o).change(lse), &texts, &held, Operand::Read, first);
            join.ints([num_heads, head_dim, chunks, window]).launch();
        }
    });
    Attended { o: Tensor::from_dispatch(o), lse: Tensor::from_dispatch(lse), order: LseOrder::ByToken }
}
