//! States along the chunks of documents: products with the decays between them, of some chunks at a time.

use burn::tensor::{DType, Device, Tensor};

use crate::ops::plain::delta_rule::chunks::{ChunkRows, mask};
use crate::ops::product::{F32Products, matmul};

/// So many chunks are one product, whose operations grow with their square.
const BLOCK: usize = 64;

/// The chunks of all documents, one document after another.
#[derive(Clone, Debug)]
pub(crate) struct StateChunks {
    pub(super) rows: ChunkRows,
    /// 1 where a chunk goes on from the one before, or from a state that is given, `[1, chunks, 1]`.
    goes_on: Tensor<3>,
    blocks: Vec<Block>,
}

/// Chunks that follow each other. What comes to them is the state before the first, then what each of them writes.
#[derive(Clone, Debug)]
struct Block {
    first: usize,
    len: usize,
    /// 1 where a chunk decays what has come, and where the state after it has something of that, `[1, len, len + 1]`.
    decays: Tensor<3>,
    holds: Tensor<3>,
}

impl StateChunks {
    pub(crate) fn new(num_tokens: usize, documents: &[(usize, usize)], device: &Device) -> Self {
        let len = ChunkRows::len_of(documents);
        let (mut chunks, mut document_of) = (Vec::new(), Vec::new());
        for (document, (start, of)) in documents.iter().enumerate() {
            for first in (0..*of).step_by(len) {
                chunks.push((start + first, len.min(of - first)));
                document_of.push(document);
            }
        }
        // Of what comes to chunk `at` from before it.
        let before = |at: usize| document_of[at.saturating_sub(1)];
        let block = |first: usize| {
            let len = BLOCK.min(chunks.len() - first);
            let holds =
                |chunk: usize, come: usize| come <= chunk + 1 && before(first + come) == document_of[first + chunk];
            let shape = [len, len + 1];
            Block {
                first,
                len,
                decays: mask(shape, device, |chunk, come| come <= chunk),
                holds: mask(shape, device, holds),
            }
        };
        Self {
            rows: ChunkRows::new(num_tokens, len, &chunks, device),
            goes_on: mask([chunks.len(), 1], device, |at, _| before(at) == document_of[at]),
            blocks: (0..chunks.len()).step_by(BLOCK).map(block).collect(),
        }
    }

    /// The states after all chunks, from what each of them writes.
    ///
    /// # Shapes
    /// All in `f32`. `written`: `[heads, chunks, numbers]`; `decays`, logarithms: `[chunks, heads]`; `first`, before the first chunk:
    /// `[heads, 1, numbers]`.
    pub(super) fn states(
        &self,
        written: &Tensor<3>,
        decays: &Tensor<2>,
        first: Tensor<3>,
        products: F32Products,
    ) -> Tensor<3> {
        let mut state = first;
        let blocks = self.blocks.iter().map(|block| {
            let (decays, written) = (block.decays(decays), written.clone().narrow(1, block.first, block.len));
            // Not by a product, which may round: for every token of a text that is written, it would round the state again.
            let left = decays.clone().narrow(2, 0, 1) * state.clone();
            let states = matmul(&decays.narrow(2, 1, block.len), &written, products) + left;
            state = states.clone().narrow(1, block.len - 1, 1);
            states
        });
        Tensor::cat(blocks.collect(), 1)
    }

    /// The states before all chunks.
    pub(super) fn before(&self, after: &Tensor<3>, first: Tensor<3>) -> Tensor<3> {
        Tensor::cat(vec![first, after.clone()], 1).narrow(1, 0, self.rows.count) * self.goes_on.clone()
    }

    /// The gradients of the states after all chunks, from what each chunk adds to that of the state before it.
    pub(super) fn gradients(&self, read: &Tensor<3>, decays: &Tensor<2>, products: F32Products) -> Tensor<3> {
        let mut later = read.clone().narrow(1, 0, 1).zeros_like();
        // By the chunk before.
        let read = Tensor::cat(vec![read.clone() * self.goes_on.clone(), later.clone()], 1);
        let blocks = self.blocks.iter().rev().map(|block| {
            let read = read.clone().narrow(1, block.first + 1, block.len);
            let [heads, len, numbers] = read.dims();
            let last = read.clone().narrow(1, len - 1, 1) + later.clone();
            let read = read.slice_assign([0..heads, len - 1..len, 0..numbers], last);
            let come = matmul(&block.decays(decays).swap_dims(1, 2), &read, products);
            later = come.clone().narrow(1, 0, 1);
            come.narrow(1, 1, len)
        });
        let mut blocks: Vec<_> = blocks.collect();
        blocks.reverse();
        Tensor::cat(blocks, 1)
    }
}

impl Block {
    /// What is left after each of its chunks of what has come, `[heads, len, len + 1]`.
    fn decays(&self, decays: &Tensor<2>) -> Tensor<3> {
        let of_chunks = decays.clone().narrow(0, self.first, self.len).swap_dims(0, 1).unsqueeze_dim(2);
        (of_chunks * self.decays.clone()).cumsum(1).exp() * self.holds.clone()
    }
}

/// A state of zeros before the first chunk.
pub(super) fn no_state(heads: usize, numbers: usize, device: &Device) -> Tensor<3> {
    Tensor::zeros([heads, 1, numbers], (device, DType::F32))
}
