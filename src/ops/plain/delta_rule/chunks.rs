//! Where the chunks of all documents lie, for plain tensor calls that compute the same chunk of all documents, or all chunks, at once.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Tokens in a chunk.
pub const CHUNK_TOKENS: usize = 64;

/// Which tokens chunks of one length have. Tokens that a document lacks in its last chunk are zeros.
#[derive(Clone, Debug)]
pub(crate) struct ChunkRows {
    /// Tokens in a chunk.
    pub(in crate::ops::plain) len: usize,
    /// How many chunks there are.
    pub(in crate::ops::plain) count: usize,
    /// The token of every place in the chunks; the number of tokens where there is none.
    tokens: Tensor<1, Int>,
    /// The place of every token in the chunks; their length where it has none.
    places: Tensor<1, Int>,
    /// 1 up to the diagonal, `[1, len, len]`.
    pub(in crate::ops::plain) causal: Tensor<3>,
}

impl ChunkRows {
    /// Tokens in a chunk of these documents.
    pub(in crate::ops::plain) fn len_of(documents: &[(usize, usize)]) -> usize {
        documents.iter().map(|(_, len)| *len).max().unwrap_or(0).clamp(1, CHUNK_TOKENS)
    }

    /// Of chunks that are `(first token, tokens)`.
    pub(in crate::ops::plain) fn new(
        num_tokens: usize,
        len: usize,
        chunks: &[(usize, usize)],
        device: &Device,
    ) -> Self {
        let (mut tokens, mut places) = (vec![num_tokens; chunks.len() * len], vec![chunks.len() * len; num_tokens]);
        for (chunk, (start, of)) in chunks.iter().enumerate() {
            for token in 0..*of {
                (tokens[chunk * len + token], places[start + token]) = (start + token, chunk * len + token);
            }
        }
        let indices = |indices: Vec<usize>| {
            let indices: Vec<_> = indices.into_iter().map(|index| i32::try_from(index).unwrap_or(i32::MAX)).collect();
            Tensor::from_data(indices.as_slice(), (device, DType::I32))
        };
        let causal = mask([len, len], device, |i, j| i >= j);
        Self { len, count: chunks.len(), tokens: indices(tokens), places: indices(places), causal }
    }

    /// Rows of tokens, `[tokens, width]`, by chunk, `[chunks, len, width]` in `f32`.
    pub(in crate::ops::plain) fn rows(&self, x: &Tensor<2>) -> Tensor<3> {
        let width = x.dims()[1];
        with_zeros(x.clone().cast(DType::F32)).select(0, self.tokens.clone()).reshape([self.count, self.len, width])
    }

    /// The inverse of [`rows`](Self::rows); zeros outside all documents.
    pub(in crate::ops::plain) fn tokens(&self, x: Tensor<3>) -> Tensor<2> {
        let [chunks, len, width] = x.dims();
        with_zeros(x.reshape([chunks * len, width])).select(0, self.places.clone())
    }
}

/// 1 where it is set and 0 elsewhere, `[1, rows, columns]`.
pub(in crate::ops::plain) fn mask(
    [rows, columns]: [usize; 2],
    device: &Device,
    is_set: impl Fn(usize, usize) -> bool,
) -> Tensor<3> {
    let values = (0..rows * columns).map(|at| f32::from(u8::from(is_set(at / columns, at % columns))));
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), [1, rows, columns]), (device, DType::F32))
}

/// The chunks of a micro-batch: first those that start a document, then the second ones, and so on.
#[derive(Clone, Debug)]
pub(crate) struct Chunks {
    pub(in crate::ops::plain) rows: ChunkRows,
    /// How many documents have a first chunk, a second one, and so on: the longest documents come first.
    pub(in crate::ops::plain) counts: Vec<usize>,
    /// 1 below the diagonal, `[1, len, len]`.
    pub(in crate::ops::plain) below: Tensor<3>,
    /// For blocks of 1, 2, 4, ... tokens: 1 where the second of two neighbours meets the first.
    pub(in crate::ops::plain) pairs: Vec<Tensor<3>>,
}

impl Chunks {
    pub(crate) fn new(num_tokens: usize, documents: &[(usize, usize)], device: &Device) -> Self {
        let len = ChunkRows::len_of(documents);
        let mut by_length: Vec<_> = documents.iter().filter(|(_, len)| *len > 0).collect();
        by_length.sort_by_key(|(_, of)| std::cmp::Reverse(of.div_ceil(len)));
        let of_index = |index: usize| {
            let chunk = move |(start, of): &&(usize, usize)| {
                let first = index * len;
                (first < *of).then(|| (start + first, len.min(of - first)))
            };
            by_length.iter().filter_map(chunk)
        };
        let num_steps = by_length.first().map_or(0, |(_, of)| of.div_ceil(len));
        let counts = (0..num_steps).map(|index| of_index(index).count()).collect();
        let chunks: Vec<_> = (0..num_steps).flat_map(of_index).collect();
        let sizes = std::iter::successors(Some(1_usize), |size| Some(2 * size)).take_while(|size| *size < len);
        let pairs = sizes.map(|size| {
            mask([len, len], device, |i, j| {
                i / (2 * size) == j / (2 * size) && i % (2 * size) >= size && j % (2 * size) < size
            })
        });
        Self {
            rows: ChunkRows::new(num_tokens, len, &chunks, device),
            counts,
            below: mask([len, len], device, |i, j| i > j),
            pairs: pairs.collect(),
        }
    }

    /// Rows of tokens, `[tokens, heads * width]`, by chunk and head, `[chunks, heads, len, width]` in `f32`.
    pub(in crate::ops::plain) fn split(&self, x: &Tensor<2>, heads: usize) -> Tensor<4> {
        let width = x.dims()[1] / heads;
        self.rows.rows(x).reshape([self.rows.count, self.rows.len, heads, width]).swap_dims(1, 2)
    }

    /// The inverse of [`split`](Self::split); zeros outside all documents.
    pub(in crate::ops::plain) fn join(&self, x: Tensor<4>) -> Tensor<2> {
        let [chunks, heads, len, width] = x.dims();
        self.rows.tokens(x.swap_dims(1, 2).reshape([chunks, len, heads * width]))
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
