//! Attention that keeps the keys and values of earlier tokens from pass to pass, so that generation is linear in the
//! length of the text.

use burn::tensor::{DType, Device, Tensor};

use super::attention::{Attended, Heads};
use super::place::Place;
use super::product::{F32Products, Operand, matmul, product};
use super::{cpu, host};

/// Tokens by which the memory of a cache grows.
const CHUNK_TOKENS: usize = 256;

/// Keys and values of one layer for the tokens of one sequence, on the device where they are used.
///
/// Keys are kept after the rotary embedding. Appending a token copies only that token, except when the memory grows,
/// once in `CHUNK_TOKENS` tokens.
#[derive(Debug)]
pub struct KeyValueCache {
    heads: Heads,
    num_tokens: usize,
    held: Held,
}

#[derive(Debug)]
enum Held {
    /// For the kernels: `[tokens, num_kv_heads * head_dim]`.
    Host { keys: Vec<f32>, values: Vec<f32> },
    /// For plain tensor calls: `[num_kv_heads, capacity, head_dim]` each.
    Device(Box<[Tensor<3>; 2]>, F32Products),
}

impl KeyValueCache {
    /// An empty cache for activations of type `dtype` on `device`.
    #[must_use]
    pub fn new(place: Place, heads: Heads, device: &Device, dtype: DType) -> Self {
        let held = match place {
            Place::Cpu => Held::default(),
            Place::Plain(products) => {
                let empty = || Tensor::zeros([heads.num_kv_heads, CHUNK_TOKENS, heads.head_dim], (device, dtype));
                Held::Device(Box::new([empty(), empty()]), products)
            }
        };
        Self { heads, num_tokens: 0, held }
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
            Held::Host { mut keys, mut values } => {
                keys.extend_from_slice(&host::view(k));
                values.extend_from_slice(&host::view(v));
                Held::Host { keys, values }
            }
            Held::Device(held, products) => {
                let Heads { num_kv_heads, head_dim, .. } = self.heads;
                let range = [0..num_kv_heads, self.num_tokens..end, 0..head_dim];
                let [keys, values] = *held;
                let appended = [(keys, k), (values, v)].map(|(held, new)| {
                    let new = new.clone().reshape([count, num_kv_heads, head_dim]).swap_dims(0, 1);
                    with_room_for(held, end).slice_assign(range.clone(), new)
                });
                Held::Device(Box::new(appended), products)
            }
        };
        self.num_tokens = end;
    }

    /// Attention of the last token, whose query is `q`, on all tokens of the cache, itself included.
    ///
    /// # Shapes
    /// `q`: `[1, num_heads * head_dim]`.
    #[must_use]
    pub fn attend(&self, q: &Tensor<2>) -> Attended {
        let device = q.device();
        match &self.held {
            Held::Host { keys, values } => {
                let (host_q, num_heads) = (host::view(q), self.heads.num_heads);
                let (mut o, mut lse) = (vec![0.0; host_q.len()], vec![0.0; num_heads]);
                cpu::attention_of_last(&host_q, keys, values, &self.heads, &mut o, &mut lse);
                Attended { o: host::tensor(o, q.dims(), &device), lse: host::tensor(lse, [num_heads], &device) }
            }
            Held::Device(held, products) => {
                let first = self.heads.window.map_or(0, |window| self.num_tokens.saturating_sub(window));
                let [k, v] = held.each_ref().map(|all| all.clone().narrow(1, first, self.num_tokens - first));
                plain_attention_of_last(q, &k, &v, self.heads, *products)
            }
        }
    }
}

impl Default for Held {
    fn default() -> Self {
        Self::Host { keys: Vec::new(), values: Vec::new() }
    }
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

/// In plain tensor calls; `k` and `v` are the tokens that the query sees, `[num_kv_heads, tokens, head_dim]`.
fn plain_attention_of_last(
    q: &Tensor<2>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    heads: Heads,
    products: F32Products,
) -> Attended {
    let Heads { num_heads, num_kv_heads, head_dim, .. } = heads;
    let dtype = q.dtype();
    // As in `attention`, from operands in f32.
    let in_f32 = |x: &Tensor<3>| Operand::new(x, DType::F32, products);
    let q = in_f32(&q.clone().reshape([num_kv_heads, num_heads / num_kv_heads, head_dim]));
    let scores = product(&q, &in_f32(k).transpose()) * heads.scale; // [num_kv_heads, group, tokens]
    let max = scores.clone().max_dim(2);
    let weights = (scores - max.clone()).exp();
    let sum = weights.clone().sum_dim(2);
    let o = matmul(&(weights / sum.clone()).cast(dtype), v, products);
    Attended { o: o.reshape([1, num_heads * head_dim]), lse: (max + sum.log()).reshape([num_heads]) }
}
