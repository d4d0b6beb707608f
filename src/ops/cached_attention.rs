//! Attention that keeps the keys and values of earlier tokens from pass to pass, so that generation is linear in the
//! length of the text.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use rayon::prelude::*;

use super::attention::{Attended, Heads, LseOrder};
use super::kernels::Place;
use super::plain::cached_attention::{CHUNK_TOKENS, CachedKeyValues, TextsOnDevice};
use super::{cpu, host};

/// Keys and values of one layer for the tokens of one sequence, on the device where they are used.
///
/// Keys are kept after the rotary embedding. Appending a token copies only that token, except when the memory grows,
/// once in `CHUNK_TOKENS` tokens.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    heads: Heads,
    num_tokens: usize,
    held: CachedKeyValues,
}

impl KeyValueCache {
    /// An empty cache for activations of type `dtype` on `device`.
    #[must_use]
    pub fn new(place: Place, heads: Heads, device: &Device, dtype: DType) -> Self {
        Self { heads, num_tokens: 0, held: place.cache(heads, device, dtype) }
    }

    /// Forgets all tokens but the first `num_tokens`.
    pub fn truncate(&mut self, num_tokens: usize) {
        self.num_tokens = num_tokens.min(self.num_tokens);
        // On a device, what follows is written over.
        if let CachedKeyValues::Host { keys, values } = &mut self.held {
            keys.truncate(self.num_tokens);
            values.truncate(self.num_tokens * self.heads.num_kv_heads * self.heads.head_dim);
        }
    }

    /// Adds the keys (after the rotary embedding) and values of the tokens that follow, of which these are the rows.
    fn append_on_host(&mut self, [k, v]: [&[f32]; 2], rows: &Range<usize>) {
        let CachedKeyValues::Host { keys, values } = &mut self.held else { return };
        let width = self.heads.num_kv_heads * self.heads.head_dim;
        let range = rows.start * width..rows.end * width;
        keys.append(&k[range.clone()], width);
        values.extend_from_slice(&v[range]);
        self.num_tokens += rows.len();
    }

    /// Attention of the last tokens, each on the tokens of the cache up to itself.
    fn attend_on_host(&self, keys: &cpu::CachedKeys, values: &[f32], q: &[f32], o: &mut [f32], lse: &mut [f32]) {
        let Heads { num_heads, head_dim, .. } = self.heads;
        let width = num_heads * head_dim;
        let start = self.num_tokens - q.len() / width;
        let tokens = q.par_chunks(width).zip(o.par_chunks_mut(width)).zip(lse.par_chunks_mut(num_heads)).enumerate();
        tokens.for_each(|(index, ((q, o), lse))| {
            cpu::attention_of_last(q, keys, values, start + index + 1, &self.heads, o, lse);
        });
    }
}

/// Appends the keys and values of the next tokens of several sequences, which lie one after the other. `lengths` are their numbers
/// of tokens.
///
/// # Shapes
/// `[tokens, num_kv_heads * head_dim]`.
pub fn append_each(place: Place, caches: &mut [&mut KeyValueCache], lengths: &[usize], kv: [&Tensor<2>; 2]) {
    let rows: Vec<Range<usize>> = rows_of(lengths).collect();
    if caches.iter().all(|cache| matches!(cache.held, CachedKeyValues::Host { .. })) {
        let [k, v] = kv.map(host::view);
        for (cache, rows) in caches.iter_mut().zip(rows) {
            cache.append_on_host([&k, &v], &rows);
        }
        return;
    }
    let heads = caches[0].heads;
    let mut texts = TextsOnDevice { heads, held: Vec::with_capacity(rows.len()), rows, positions: Vec::new() };
    for (cache, length) in caches.iter_mut().zip(lengths) {
        // Taken out, so that nothing else holds the tensors and they are written in place.
        let CachedKeyValues::Device(held) = std::mem::take(&mut cache.held) else { continue };
        texts.positions.push(cache.num_tokens);
        cache.num_tokens += length;
        texts.held.push(held.map(|held| with_room_for(held, cache.num_tokens)));
    }
    for (cache, held) in caches.iter_mut().zip(place.append(texts, kv)) {
        cache.held = CachedKeyValues::Device(Box::new(held));
    }
}

/// Attention of the last tokens of several sequences, likewise, each within its sequence.
///
/// # Shapes
/// `q`: `[tokens, num_heads * head_dim]`.
#[must_use]
pub fn attend_each(place: Place, caches: &[&mut KeyValueCache], lengths: &[usize], q: &Tensor<2>) -> Attended {
    let (rows, heads) = (rows_of(lengths).collect::<Vec<_>>(), caches[0].heads);
    if let CachedKeyValues::Host { .. } = caches[0].held {
        return attend_each_on_host(caches, &rows, q);
    }
    let held = caches.iter().filter_map(|cache| match &cache.held {
        CachedKeyValues::Device(held) => Some((**held).clone()),
        CachedKeyValues::Host { .. } => None,
    });
    let positions = caches.iter().zip(&rows).map(|(cache, rows)| cache.num_tokens - rows.len()).collect();
    place.attend(&TextsOnDevice { heads, held: held.collect(), positions, rows }, q)
}

fn attend_each_on_host(caches: &[&mut KeyValueCache], rows: &[Range<usize>], q: &Tensor<2>) -> Attended {
    let end = rows.last().map_or(0, |last| last.end);
    let num_heads = caches.first().map_or(0, |cache| cache.heads.num_heads);
    let host_q = host::view(q);
    let (mut o, mut lse) = (vec![0.0; host_q.len()], vec![0.0; end * num_heads]);
    let (mut rest, mut tasks) = ((&*host_q, o.as_mut_slice(), lse.as_mut_slice()), Vec::with_capacity(caches.len()));
    for (cache, rows) in caches.iter().zip(rows) {
        let CachedKeyValues::Host { keys, values } = &cache.held else { continue };
        let width = rest.0.len() / (end - rows.start);
        let (q, q_rest) = rest.0.split_at(rows.len() * width);
        let (o, o_rest) = rest.1.split_at_mut(rows.len() * width);
        let (lse, lse_rest) = rest.2.split_at_mut(rows.len() * num_heads);
        rest = (q_rest, o_rest, lse_rest);
        tasks.push((cache, keys, values, q, o, lse));
    }
    tasks.into_par_iter().for_each(|(cache, keys, values, q, o, lse)| cache.attend_on_host(keys, values, q, o, lse));
    let (device, num_rows) = (q.device(), lse.len());
    let lse = host::tensor(lse, [num_rows], &device);
    Attended { o: host::tensor(o, q.dims(), &device), lse, order: LseOrder::ByToken }
}

fn rows_of(lengths: &[usize]) -> impl Iterator<Item = Range<usize>> {
    lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end - length..*end)
    })
}

/// The tensor, enlarged if needed, with room for at least `num_tokens` tokens.
fn with_room_for(all: Tensor<3>, num_tokens: usize) -> Tensor<3> {
    let [num_kv_heads, capacity, head_dim] = all.dims();
    if num_tokens <= capacity {
        return all;
    }
    let more = num_tokens.next_multiple_of(CHUNK_TOKENS) - capacity;
    let room = Tensor::zeros([num_kv_heads, more, head_dim], (&all.device(), all.dtype()));
    Tensor::cat(vec![all, room], 1)
}
