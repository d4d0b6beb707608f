//! Where the chunks of all documents lie, for plain tensor calls that compute the same chunk of all documents at once.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Tokens in a chunk.
pub const CHUNK_TOKENS: usize = 64;

/// The chunks of a micro-batch: first those that start a document, then the second ones, and so on. Tokens that a document
/// lacks in its last chunk are zeros.
#[derive(Clone, Debug)]
pub(crate) struct Chunks {
    /// Tokens in a chunk.
    pub(in crate::ops::plain) len: usize,
    /// How many documents have a first chunk, a second one, and so on: the longest documents come first.
    pub(in crate::ops::plain) counts: Vec<usize>,
    /// The token of every place in the chunks; the number of tokens where there is none.
    tokens: Tensor<1, Int>,
    /// The place of every token in the chunks; their length where it has none.
    places: Tensor<1, Int>,
    /// 1 up to the diagonal, `[1, len, len]`.
    pub(in crate::ops::plain) causal: Tensor<3>,
    /// 1 below the diagonal.
    pub(in crate::ops::plain) below: Tensor<3>,
    /// For blocks of 1, 2, 4, ... tokens: 1 where the second of two neighbours meets the first.
    pub(in crate::ops::plain) pairs: Vec<Tensor<3>>,
}

impl Chunks {
    pub(crate) fn new(num_tokens: usize, documents: &[(usize, usize)], device: &Device) -> Self {
        let longest = documents.iter().map(|(_, len)| *len).max().unwrap_or(0);
        let len = CHUNK_TOKENS.min(longest.max(1));
        let mut by_length: Vec<_> = documents.iter().filter(|(_, len)| *len > 0).collect();
        by_length.sort_by_key(|(_, of)| std::cmp::Reverse(of.div_ceil(len)));
        let counts: Vec<usize> = (0..longest.div_ceil(len))
            .map(|index| by_length.iter().filter(|(_, of)| of.div_ceil(len) > index).count())
            .collect();
        let (mut tokens, mut places) = (Vec::new(), vec![counts.iter().sum::<usize>() * len; num_tokens]);
        for (index, &count) in counts.iter().enumerate() {
            for (start, of) in &by_length[..count] {
                for token in index * len..(index + 1) * len {
                    let is_there = token < *of;
                    if is_there {
                        places[start + token] = tokens.len();
                    }
                    tokens.push(if is_there { start + token } else { num_tokens });
                }
            }
        }
        let indices = |indices: Vec<usize>| {
            let indices: Vec<_> = indices.into_iter().map(|index| i32::try_from(index).unwrap_or(i32::MAX)).collect();
            Tensor::from_data(indices.as_slice(), (device, DType::I32))
        };
        let mask = |is_set: &dyn Fn(usize, usize) -> bool| {
            let values = (0..len * len).map(|at| f32::from(u8::from(is_set(at / len, at % len))));
            Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), [1, len, len]), (device, DType::F32))
        };
        let sizes = std::iter::successors(Some(1_usize), |size| Some(2 * size)).take_while(|size| *size < len);
        let pairs = sizes.map(|size| {
            mask(&|i, j| i / (2 * size) == j / (2 * size) && i % (2 * size) >= size && j % (2 * size) < size)
        });
        let pairs = pairs.collect();
        Self {
            len,
            counts,
            tokens: indices(tokens),
            places: indices(places),
            causal: mask(&|i, j| i >= j),
            below: mask(&|i, j| i > j),
            pairs,
        }
    }

    /// Rows of tokens, `[tokens, heads * width]`, by chunk and head, `[chunks, heads, len, width]` in `f32`.
    pub(in crate::ops::plain) fn split(&self, x: &Tensor<2>, heads: usize) -> Tensor<4> {
        let width = x.dims()[1] / heads;
        let rows = with_zeros(x.clone().cast(DType::F32)).select(0, self.tokens.clone());
        rows.reshape([self.num_chunks(), self.len, heads, width]).swap_dims(1, 2)
    }

    /// The inverse of [`split`](Self::split); zeros outside all documents.
    pub(in crate::ops::plain) fn join(&self, x: Tensor<4>) -> Tensor<2> {
        let [chunks, heads, len, width] = x.dims();
        let rows = x.swap_dims(1, 2).reshape([chunks * len, heads * width]);
        with_zeros(rows).select(0, self.places.clone())
    }

    fn num_chunks(&self) -> usize {
        self.counts.iter().sum()
    }

    /// First of the chunks with this index in their documents, and how many there are, for every index.
    pub(in crate::ops::plain) fn steps(&self) -> Vec<(usize, usize)> {
        let mut first = 0;
        let step = |count: &usize| {
            first += count;
            (first - count, *count)
        };
        self.counts.iter().map(step).collect()
    }
}

fn with_zeros(x: Tensor<2>) -> Tensor<2> {
    let zeros = Tensor::zeros([1, x.dims()[1]], (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], 0)
}
