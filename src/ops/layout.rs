//! Where the sequences of a micro-batch lie, on the device.

mod blocks;
mod chunk_table;
mod stretches;

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::plain::attention::chunk::QueryChunk;
use super::plain::delta_rule::chunks::Chunks;
use super::plain::state_space::along::StateChunks;
use crate::spec::{Heads, RopePairs};

pub use blocks::Blocks;
pub use chunk_table::ChunkTable;
pub use stretches::Stretch;

/// Rotary angles of every position, as cosines and sines.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    half: usize,
    head_dim: usize,
    pairs: RopePairs,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Cosines and sines on a device: copied there once.
    copies: Made<(Device, [Tensor<1>; 2])>,
}

impl RotaryTable {
    /// A table of `cos` and `sin`, each `[positions, half]` in row-major order.
    ///
    /// # Panics
    /// If the two differ in length or do not hold whole rows.
    #[must_use]
    pub fn new(cos: Vec<f32>, sin: Vec<f32>, half: usize) -> Self {
        assert!(cos.len() == sin.len() && half > 0 && cos.len().is_multiple_of(half), "a rotary table has whole rows");
        let (head_dim, pairs, copies) = (2 * half, RopePairs::Halves, Made::default());
        Self { half, head_dim, pairs, cos, sin, copies }
    }

    /// The table of the first numbers of heads that are `head_dim` wide, which turn in these pairs.
    #[must_use]
    pub fn within(self, head_dim: usize, pairs: RopePairs) -> Self {
        Self { head_dim, pairs, ..self }
    }

    /// Number of pairs.
    #[must_use]
    pub fn half(&self) -> usize {
        self.half
    }

    /// Which numbers of a head turn together.
    #[must_use]
    pub fn pairs(&self) -> RopePairs {
        self.pairs
    }

    /// Whether all numbers of a head turn, in halves.
    #[must_use]
    pub fn turns_halves(&self) -> bool {
        self.pairs == RopePairs::Halves && 2 * self.half == self.head_dim
    }

    /// Cosines and sines, `[positions, half]` each.
    #[must_use]
    pub fn values(&self) -> (&[f32], &[f32]) {
        (&self.cos, &self.sin)
    }

    /// The same on a device, each in one dimension.
    fn on(&self, device: &Device) -> [Tensor<1>; 2] {
        let copy = |values: &Vec<f32>| Tensor::from_data(values.as_slice(), (device, DType::F32));
        self.copies.of(device.clone(), || [&self.cos, &self.sin].map(copy))
    }

    /// Number of positions.
    #[must_use]
    pub fn num_positions(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Cosine and sine of pair `pair` at `position`.
    #[must_use]
    pub fn at(&self, position: usize, pair: usize) -> (f32, f32) {
        let index = position * self.half + pair;
        (self.cos[index], self.sin[index])
    }
}

/// What was asked for so far.
#[derive(Debug)]
struct Made<T>(Mutex<Vec<T>>);

impl<T> Made<T> {
    fn all(&self) -> MutexGuard<'_, Vec<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: PartialEq, V: Clone> Made<(K, V)> {
    /// What belongs to `key`: made when it is first asked for.
    fn of(&self, key: K, make: impl FnOnce() -> V) -> V {
        let mut all = self.all();
        if let Some((_, made)) = all.iter().find(|(of, _)| *of == key) {
            return made.clone();
        }
        let made = make();
        all.push((key, made.clone()));
        made
    }
}

impl<T> Default for Made<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Clone for Made<T> {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.all().clone()))
    }
}

/// Where the sequences of a micro-batch lie: what attention and rotary embedding need to know.
#[derive(Clone, Debug)]
pub struct Layout {
    rows: usize,
    row_length: usize,
    documents: Vec<(usize, usize)>,
    /// The same as attention takes them.
    stretches: Vec<Stretch>,
    positions: Vec<u32>,
    tables: Arc<[RotaryTable]>,
    /// By table, for plain tensor calls: made when they are first asked for.
    angles: Vec<OnceLock<Angles>>,
    /// By table, for kernels of GPUs: likewise.
    turns: Vec<OnceLock<Turns>>,
    chunks: Made<(Heads, Arc<[QueryChunk]>)>,
    /// For the delta rule in plain tensor calls.
    delta_chunks: OnceLock<Arc<Chunks>>,
    /// For state spaces, likewise.
    state_chunks: OnceLock<Arc<StateChunks>>,
    /// For kernels of GPUs.
    chunk_table: OnceLock<ChunkTable>,
    /// For short convolutions in plain tensor calls.
    within: Made<Tensor<2>>,
    /// By window, for kernels of GPUs: made when they are first asked for.
    spans: Made<(Option<usize>, Spans)>,
    /// By the length of chunks, the layout in which these are documents: likewise.
    cut: Made<(usize, Arc<Layout>)>,
    /// Tokens that see each other both ways.
    blocks: Vec<Blocks>,
}

/// How far tokens see and are seen, as indices of flat tokens, `[tokens]` each: neither decreases. And what follows from it.
#[derive(Clone, Debug)]
pub struct Spans {
    /// The first key that each query sees; the last is its own.
    pub first_key: Tensor<1, Int>,
    /// The last query that sees each key; the first is its own.
    pub last_query: Tensor<1, Int>,
    /// The tiles of 128 queries, from those that see most tiles of keys on: `[tokens / 128]`, rounded up.
    pub order: Tensor<1, Int>,
    /// Those of 128 keys, from those that most tiles of queries see on, likewise.
    pub key_order: Tensor<1, Int>,
}

/// The rotary embedding of a micro-batch as tensors, for plain tensor calls: `x cos + x[swap] sin`.
#[derive(Clone, Debug)]
pub struct Angles {
    /// Of every token and dimension of a head, `[tokens, 1, head_dim]`.
    pub cos: Tensor<3>,
    /// Likewise, negated for the first of a pair.
    pub sin: Tensor<3>,
    /// The dimension that each dimension turns with, `[head_dim]`.
    pub swap: Tensor<1, Int>,
}

/// The angles of every token's pairs, for kernels of GPUs: in one dimension, whose numbers have no gaps on any device.
#[derive(Clone, Debug)]
pub struct Turns {
    /// `[positions * head_dim / 2]`
    pub cos: Tensor<1>,
    /// Likewise.
    pub sin: Tensor<1>,
    /// The position of each token, `[tokens]`.
    pub rows: Tensor<1, Int>,
}

impl Layout {
    /// A layout of `rows` rows of `row_length` tokens with `documents` (start, length) in them.
    ///
    /// `positions` are the tokens' positions within their documents, `[rows * row_length]`.
    #[must_use]
    pub fn new(rows: usize, documents: Vec<(usize, usize)>, positions: Vec<u32>, tables: Arc<[RotaryTable]>) -> Self {
        let row_length = positions.len() / rows.max(1);
        let (angles, turns) = (vec![OnceLock::new(); tables.len()], vec![OnceLock::new(); tables.len()]);
        let (chunks, delta_chunks, state_chunks, chunk_table, within, spans, cut) = Default::default();
        Self {
            rows,
            row_length,
            stretches: Stretch::of(&documents, &[]),
            documents,
            positions,
            tables,
            angles,
            turns,
            chunks,
            delta_chunks,
            state_chunks,
            chunk_table,
            within,
            spans,
            cut,
            blocks: Vec::new(),
        }
    }

    /// The same where tokens of these blocks see those behind them in their block, too.
    #[must_use]
    pub fn with_blocks(self, blocks: Vec<Blocks>) -> Self {
        Self { blocks, ..self }
    }

    /// Those blocks whose tokens do so in an attention of these heads.
    pub fn blocks(&self, heads: Heads) -> impl Iterator<Item = &Blocks> {
        self.blocks.iter().filter(move |blocks| heads.window.is_some() || !blocks.are_in_windows)
    }

    /// The same where each document continues its own of `prefixes`, if any does, see [`Stretch::of`]: only for places that
    /// take rows as they are.
    #[must_use]
    pub fn with_prefixes(self, prefixes: &[Range<usize>]) -> Self {
        Self { stretches: Stretch::of(&self.documents, prefixes), ..self }
    }

    /// The layout whose documents are chunks of these of so many tokens; `None` where no document is longer. Of documents that
    /// continue a prefix none is: see [`longest_sharing`](crate::spec::ModelConfig::longest_sharing).
    pub(super) fn cut(&self, chunk: Option<usize>) -> Option<Arc<Self>> {
        let chunk = chunk.filter(|chunk| self.documents.iter().any(|(_, len)| len > chunk))?;
        Some(self.cut.of(chunk, || {
            let parts = |start: usize, len: usize| -> Vec<_> {
                (0..len).step_by(chunk).map(|first| (start + first, chunk.min(len - first))).collect()
            };
            let documents = self.documents.iter().flat_map(|&(start, len)| parts(start, len)).collect();
            // One that is shared is in a document within a chunk.
            let in_parts = |stretch: &Stretch| match stretch {
                shared if shared.is_shared() => vec![shared.clone()],
                &Stretch { start, len, .. } => Stretch::of(&parts(start, len), &[]),
            };
            let stretches = self.stretches.iter().flat_map(in_parts).collect();
            let layout = Self::new(self.rows, documents, self.positions.clone(), Arc::clone(&self.tables));
            Arc::new(Self { stretches, ..layout.with_blocks(self.blocks.clone()) })
        }))
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens in a row.
    #[must_use]
    pub fn row_length(&self) -> usize {
        self.row_length
    }

    /// The ranges of tokens that attend only to themselves: (start, length) in flat tokens.
    #[must_use]
    pub fn documents(&self) -> &[(usize, usize)] {
        &self.documents
    }

    /// The documents, with what they have in common by itself.
    #[must_use]
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Position of every token within its document.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The angles of every position in a rotary embedding.
    #[must_use]
    pub fn table(&self, rope: usize) -> &RotaryTable {
        &self.tables[rope]
    }

    /// The angles of every token in a rotary embedding.
    #[must_use]
    pub fn angles(&self, rope: usize, device: &Device) -> Angles {
        self.angles[rope].get_or_init(|| Angles::new(&self.positions, &self.tables[rope], device)).clone()
    }

    /// The angles of every token's pairs in a rotary embedding.
    #[must_use]
    pub fn turns(&self, rope: usize, device: &Device) -> Turns {
        self.turns[rope].get_or_init(|| Turns::new(&self.positions, &self.tables[rope], device)).clone()
    }

    /// The chunks in which plain tensor calls compute attention: made by the first layer that has such heads, and kept
    /// for the others.
    pub(super) fn chunks(&self, heads: Heads, device: &Device) -> Arc<[QueryChunk]> {
        self.chunks.of(heads, || QueryChunk::of([self.rows, self.row_length], &self.documents, heads, device))
    }

    /// The chunks in which plain tensor calls compute the delta rule, likewise.
    pub(super) fn delta_chunks(&self, device: &Device) -> Arc<Chunks> {
        let make = || Arc::new(Chunks::new(self.positions.len(), &self.documents, device));
        Arc::clone(self.delta_chunks.get_or_init(make))
    }

    /// The chunks in which plain tensor calls compute state spaces, likewise.
    pub(super) fn state_chunks(&self, device: &Device) -> Arc<StateChunks> {
        let make = || Arc::new(StateChunks::new(self.positions.len(), &self.documents, device));
        Arc::clone(self.state_chunks.get_or_init(make))
    }

    /// The chunks of so many tokens in which kernels of GPUs compute the delta rule, likewise; all ask for one length.
    #[must_use]
    pub fn chunk_table(&self, chunk_len: usize, device: &Device) -> ChunkTable {
        let make = || ChunkTable::new(self.positions.len(), &self.documents, chunk_len, device);
        self.chunk_table.get_or_init(make).clone()
    }

    /// Whether the tokens 1, 2, ... before each are in its document, as 1 or 0, `[tokens, 1]` each, likewise.
    pub(super) fn within(&self, num_shifts: usize, device: &Device) -> Vec<Tensor<2>> {
        let mut all = self.within.all();
        if all.len() < num_shifts {
            *all = within(num_shifts, &self.documents, self.positions.len(), device);
        }
        all[..num_shifts].to_vec()
    }

    /// How far tokens see with such a window: made by the first layer that has it, and kept for the others.
    #[must_use]
    pub fn spans(&self, window: Option<usize>, device: &Device) -> Spans {
        self.spans.of(window, || Spans::new(self.positions.len(), &self.documents, window, device))
    }
}

/// Whether the token `shift` before each is in its document, as 1 or 0, for shifts from 1 on, `[tokens, 1]` each.
fn within(num_shifts: usize, documents: &[(usize, usize)], num_tokens: usize, device: &Device) -> Vec<Tensor<2>> {
    let mask = |shift: usize| {
        let mut values = vec![0.0_f32; num_tokens];
        for &(start, len) in documents {
            values[start + shift.min(len)..start + len].fill(1.0);
        }
        Tensor::from_data(TensorData::new(values, [num_tokens, 1]), (device, DType::F32))
    };
    (1..=num_shifts).map(mask).collect()
}

/// Queries, and keys, of a tile.
const TILE: usize = 128;

impl Spans {
    /// A token outside all documents sees itself.
    fn new(num_tokens: usize, documents: &[(usize, usize)], window: Option<usize>, device: &Device) -> Self {
        let (mut first_key, mut last_query): (Vec<_>, Vec<_>) = (0..num_tokens).map(|token| (token, token)).unzip();
        for &(start, len) in documents {
            let (end, reach) = (start + len, window.unwrap_or(len).min(len));
            for token in start..end {
                first_key[token] = start.max((token + 1).saturating_sub(reach));
                last_query[token] = (token + reach).min(end) - 1;
            }
        }
        let seen = |tile: &usize| {
            let first = tile * TILE;
            (first + TILE).min(num_tokens).div_ceil(TILE) - first_key[first] / TILE
        };
        let seen_by = |tile: &usize| {
            let first = tile * TILE;
            last_query[(first + TILE).min(num_tokens) - 1] / TILE + 1 - tile
        };
        let [mut order, mut key_order] = [0, 1].map(|_| (0..num_tokens.div_ceil(TILE)).collect::<Vec<_>>());
        // Of tiles that see as many, the last comes first, as it does where all are of one document; of keys, the first.
        order.sort_by_key(|tile| (Reverse(seen(tile)), Reverse(*tile)));
        key_order.sort_by_key(|tile| Reverse(seen_by(tile)));
        let tensor = |found: Vec<usize>| indices(found, device);
        let [first_key, last_query, order, key_order] = [first_key, last_query, order, key_order].map(tensor);
        Self { first_key, last_query, order, key_order }
    }
}

impl Turns {
    fn new(positions: &[u32], table: &RotaryTable, device: &Device) -> Self {
        let [cos, sin] = table.on(device);
        Self { cos, sin, rows: indices(positions.iter().map(|position| *position as usize), device) }
    }
}

/// Numbers of places, rows or tokens on a device.
pub(crate) fn indices<T: TryInto<i32>>(indices: impl IntoIterator<Item = T>, device: &Device) -> Tensor<1, Int> {
    let indices: Vec<_> = indices.into_iter().map(|index| index.try_into().unwrap_or(i32::MAX)).collect();
    Tensor::from_data(indices.as_slice(), (device, DType::I32))
}

impl Angles {
    fn new(positions: &[u32], table: &RotaryTable, device: &Device) -> Self {
        let (half, head_dim) = (table.half, table.head_dim);
        // The pair of a dimension, and whether it is the first in it; none where it does not turn.
        let of_pair = |d: usize| match table.pairs {
            _ if d >= 2 * half => None,
            RopePairs::Halves => Some((d % half, d < half)),
            RopePairs::Neighbours => Some((d / 2, d.is_multiple_of(2))),
        };
        let dimensions: Vec<_> = (0..head_dim).map(of_pair).collect();
        let by_token = |value: &dyn Fn(usize, Option<(usize, bool)>) -> f32| {
            let rows = positions.iter().map(|&position| position as usize * half);
            let heads = rows.flat_map(|row| dimensions.iter().map(move |pair| value(row, *pair)));
            let shape = [positions.len(), 1, head_dim];
            Tensor::from_data(TensorData::new(heads.collect::<Vec<_>>(), shape), (device, DType::F32))
        };
        let other = |d: usize| match (of_pair(d), table.pairs) {
            (None, _) => d,
            (Some((pair, is_first)), RopePairs::Halves) => pair + if is_first { half } else { 0 },
            (Some((pair, is_first)), RopePairs::Neighbours) => 2 * pair + usize::from(is_first),
        };
        let sign = |is_first: bool| if is_first { -1.0 } else { 1.0 };
        Self {
            cos: by_token(&|row, pair| pair.map_or(1.0, |(pair, _)| table.cos[row + pair])),
            sin: by_token(&|row, pair| pair.map_or(0.0, |(pair, first)| sign(first) * table.sin[row + pair])),
            swap: indices((0..head_dim).map(other), device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cuda::parts_of_group;

    #[test]
    fn tokens_see_their_document_and_are_seen_within_the_window() {
        let spans = |window| {
            let Spans { first_key, last_query, .. } = Spans::new(9, &[(0, 3), (3, 4)], window, &Device::flex());
            [first_key, last_query].map(|tensor| tensor.into_data().try_to_vec::<i32>().unwrap())
        };
        // The last two are in no document.
        assert_eq!(spans(None), [[0, 0, 0, 3, 3, 3, 3, 7, 8], [2, 2, 2, 6, 6, 6, 6, 7, 8]]);
        assert_eq!(spans(Some(2)), [[0, 0, 1, 3, 3, 4, 5, 7, 8], [1, 2, 2, 4, 5, 6, 6, 7, 8]]);
    }

    #[test]
    fn documents_are_cut_into_chunks_from_their_first_token_on() {
        let layout = Layout::new(1, vec![(0, 3), (3, 7)], (0..3).chain(0..7).collect(), Vec::new().into());
        assert_eq!(layout.cut(Some(3)).unwrap().documents(), [(0, 3), (3, 3), (6, 3), (9, 1)]);
        assert!(layout.cut(Some(7)).is_none() && layout.cut(None).is_none());
    }

    #[test]
    fn documents_that_begin_alike_do_so_beside_one_that_is_cut() {
        let layout = Layout::new(1, vec![(0, 4), (4, 3), (7, 1)], [0, 1, 2, 3, 0, 1, 2, 2].into(), Vec::new().into());
        let cut = layout.with_prefixes(&[0..0, 0..0, 4..6]).cut(Some(3)).unwrap();
        let found =
            cut.stretches().iter().map(|stretch| (stretch.start, stretch.len, stretch.reach, stretch.prefix.clone()));
        assert!(found.eq([(0, 3, 3, 0..0), (3, 1, 1, 0..0), (4, 2, 4, 0..0), (6, 1, 1, 4..6), (7, 1, 1, 4..6)]));
        assert_eq!(cut.documents(), [(0, 3), (3, 1), (4, 3), (7, 1)]);
    }

    #[test]
    fn tiles_come_by_the_tiles_that_they_see_or_that_see_them() {
        let order = |num_tokens, documents: &[(usize, usize)], window| {
            let Spans { order, key_order, .. } = Spans::new(num_tokens, documents, window, &Device::flex());
            [order, key_order].map(|order| order.into_data().try_to_vec::<i32>().unwrap())
        };
        assert_eq!(order(500, &[(0, 500)], None), [[3, 2, 1, 0], [0, 1, 2, 3]]);
        // One sees 1, 2 and 3 tiles, the other, which begins within the third, 1, 2 and 3.
        assert_eq!(order(700, &[(0, 300), (300, 400)], None), [[5, 4, 2, 3, 1, 0], [2, 0, 3, 1, 4, 5]]);
        assert_eq!(order(512, &[(0, 512)], Some(100)), [[3, 2, 1, 0], [0, 1, 2, 3]]);
    }

    fn spans_of(lengths: &[usize]) -> Spans {
        let mut at = 0;
        let document = |len: &usize| {
            at += len;
            (at - len, *len)
        };
        let documents: Vec<_> = lengths.iter().map(document).collect();
        Spans::new(at, &documents, None, &Device::flex())
    }

    /// A block for each tile of keys and part of a group, which the multiprocessor takes that is free first, and the longest's work over
    /// the mean: in the order of the flat rows with all heads of a group, as it was, and as it is.
    #[test]
    fn parts_of_groups_are_as_many_as_keep_all_multiprocessors_at_work() {
        const MULTIPROCESSORS: usize = 132;
        let uneven = |lengths: &[usize], [num_kv_heads, group]: [usize; 2], is_split: bool| {
            let Spans { last_query, key_order, .. } = spans_of(lengths);
            let [last_query, mut order] = [last_query, key_order].map(|x| x.into_data().try_to_vec::<i32>().unwrap());
            let mut parts = parts_of_group(group, num_kv_heads * order.len(), MULTIPROCESSORS);
            if !is_split {
                (parts, order) = (1, (0_i32..).take(order.len()).collect());
            }
            let (mut places, mut all) = ([0.0_f64; MULTIPROCESSORS], 0.0);
            for tile in order.iter().flat_map(|tile| std::iter::repeat_n(*tile as usize, num_kv_heads * parts)) {
                let seen_by = last_query[((tile + 1) * TILE).min(last_query.len()) - 1] as usize / TILE + 1 - tile;
                // What is around the tiles of queries takes as long as one.
                let work = (seen_by * group / parts + 1) as f64;
                let first = places.iter_mut().min_by(|a, b| a.total_cmp(b)).unwrap();
                (*first, all) = (*first + work, all + work);
            }
            places.iter().fold(0.0_f64, |longest, place| longest.max(*place)) * MULTIPROCESSORS as f64 / all
        };
        let cases: [(&[usize], _, _, _); 6] = [
            (&[2048], [8, 4], 1.92, 1.07),
            (&[4096], [8, 4], 1.00, 1.01),
            (&[4096], [4, 7], 1.99, 1.04),
            (&[2048; 4], [4, 8], 1.45, 1.04),
            (&[4096], [4, 8], 1.99, 1.02),
            (&[4096], [2, 6], 3.98, 1.11),
        ];
        for (lengths, heads, before, now) in cases {
            assert!(
                (uneven(lengths, heads, false) - before).abs() < 0.02,
                "{heads:?} {}",
                uneven(lengths, heads, false)
            );
            assert!(uneven(lengths, heads, true) < now, "{heads:?} {}", uneven(lengths, heads, true));
        }
    }

    /// Blocks that take items in rounds to and fro, and the longest block's tiles over the mean: in the order of the flat rows, as it
    /// was, and by what tiles see.
    #[test]
    fn tiles_in_order_of_their_work_are_dealt_evenly() {
        const BLOCKS: usize = 132;
        let uneven = |lengths: &[usize], num_heads: usize, is_ordered: bool| {
            let spans = spans_of(lengths);
            let [first_key, mut order] =
                [spans.first_key, spans.order].map(|tensor| tensor.into_data().try_to_vec::<i32>().unwrap());
            if !is_ordered {
                order = (0_i32..).take(order.len()).collect();
                order.reverse();
            }
            let mut blocks = [0.0; BLOCKS];
            for item in 0..num_heads * order.len() {
                let (round, place) = (item / BLOCKS, item % BLOCKS);
                let tile = order[item / num_heads] as usize;
                // What is around the tiles of keys takes 0.7 of one.
                let seen = tile + 1 - first_key[tile * TILE] as usize / TILE;
                blocks[if round % 2 == 1 { BLOCKS - 1 - place } else { place }] += seen as f64 + 0.7;
            }
            let longest = blocks.iter().fold(0.0_f64, |longest, block| longest.max(*block));
            longest * BLOCKS as f64 / blocks.iter().sum::<f64>()
        };
        for (lengths, num_heads, before) in [(&[2048; 4][..], 16, 1.60), (&[2048; 2], 32, 1.19), (&[4096], 32, 1.00)] {
            assert!((uneven(lengths, num_heads, false) - before).abs() < 0.015, "{lengths:?}");
            assert!(uneven(lengths, num_heads, true) < 1.04, "{lengths:?} {}", uneven(lengths, num_heads, true));
        }
    }
}
