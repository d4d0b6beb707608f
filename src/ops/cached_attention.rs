//! Attention that keeps the keys and values of earlier tokens from pass to pass, so that generation is linear in the
//! length of the text.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use rayon::prelude::*;

use super::attention::{Attended, Heads, LseOrder};
use super::kernels::Place;
use super::plain::cached_attention::{CHUNK_TOKENS, CachedKeyValues, plain_attention_of_last};
use super::product::F32Products;
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

    /// Adds the keys (after the rotary embedding) and values of the tokens that follow.
    ///
    /// # Shapes
    /// `[tokens, num_kv_heads * head_dim]`.
    pub fn append(&mut self, k: &Tensor<2>, v: &Tensor<2>) {
        let [count, _] = k.dims();
        let end = self.num_tokens + count;
        // Taken out, so that nothing else holds the tensors and they are written in place.
        self.held = match std::mem::take(&mut self.held) {
            CachedKeyValues::Host { mut keys, mut values } => {
                keys.append(&host::view(k), self.heads.num_kv_heads * self.heads.head_dim);
                values.extend_from_slice(&host::view(v));
                CachedKeyValues::Host { keys, values }
            }
            CachedKeyValues::Device(held, products) => {
                let Heads { num_kv_heads, head_dim, .. } = self.heads;
                let range = [0..num_kv_heads, self.num_tokens..end, 0..head_dim];
                let [keys, values] = *held;
                let appended = [(keys, k), (values, v)].map(|(held, new)| {
                    let new = new.clone().reshape([count, num_kv_heads, head_dim]).swap_dims(0, 1);
                    with_room_for(held, end).slice_assign(range.clone(), new)
                });
                CachedKeyValues::Device(Box::new(appended), products)
            }
        };
        self.num_tokens = end;
    }

    /// Attention of the last tokens, each on the tokens of the cache up to itself, in plain tensor calls.
    fn plain_attend(&self, q: &Tensor<2>, held: &[Tensor<3>; 2], products: F32Products) -> Attended {
        let [count, _] = q.dims();
        let of_token = |index: usize| {
            let end = self.num_tokens - count + index + 1;
            let first = self.heads.window.map_or(0, |window| end.saturating_sub(window));
            let [k, v] = held.each_ref().map(|all| all.clone().narrow(1, first, end - first));
            plain_attention_of_last(&q.clone().narrow(0, index, 1), &k, &v, self.heads, products)
        };
        joined((0..count).map(of_token).collect())
    }

    /// The same by the kernels.
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
pub fn append_each(caches: &mut [&mut KeyValueCache], lengths: &[usize], [k, v]: [&Tensor<2>; 2]) {
    for (cache, rows) in caches.iter_mut().zip(rows_of(lengths)) {
        cache.append(&part(k, &rows), &part(v, &rows));
    }
}

/// Attention of the last tokens of several sequences, likewise, each within its sequence.
///
/// # Shapes
/// `q`: `[tokens, num_heads * head_dim]`.
#[must_use]
pub fn attend_each(caches: &[&mut KeyValueCache], lengths: &[usize], q: &Tensor<2>) -> Attended {
    let rows: Vec<Range<usize>> = rows_of(lengths).collect();
    let end = rows.last().map_or(0, |last| last.end);
    let num_heads = caches.first().map_or(0, |cache| cache.heads.num_heads);
    let host_q =
        matches!(caches, [KeyValueCache { held: CachedKeyValues::Host { .. }, .. }, ..]).then(|| host::view(q));
    let Some(host_q) = host_q else {
        let parts = caches.iter().zip(&rows).filter_map(|(cache, rows)| match &cache.held {
            CachedKeyValues::Device(held, products) => Some(cache.plain_attend(&part(q, rows), held, *products)),
            CachedKeyValues::Host { .. } => None,
        });
        return joined(parts.collect());
    };
    let (mut o, mut lse) = (vec![0.0; host_q.len()], vec![0.0; end * num_heads]);
    let (mut rest, mut tasks) = ((&*host_q, o.as_mut_slice(), lse.as_mut_slice()), Vec::with_capacity(caches.len()));
    for (cache, rows) in caches.iter().zip(&rows) {
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

fn part(x: &Tensor<2>, rows: &Range<usize>) -> Tensor<2> {
    x.clone().narrow(0, rows.start, rows.len())
}

/// Attention of tokens that follow one another.
fn joined(mut parts: Vec<Attended>) -> Attended {
    if parts.len() == 1
        && let Some(only) = parts.pop()
    {
        return only;
    }
    let (o, lse) = parts.into_iter().map(|part| (part.o, part.lse)).unzip();
    Attended { o: Tensor::cat(o, 0), lse: Tensor::cat(lse, 0), order: LseOrder::ByToken }
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
