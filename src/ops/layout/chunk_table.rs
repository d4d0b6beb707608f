//! The chunks of all documents, for kernels of GPUs.

use burn::tensor::{Device, Int, Tensor};

use super::indices;

/// Chunks of tokens, document after document; what lies outside all documents is such as well, as one chunk.
#[derive(Clone, Debug)]
pub struct ChunkTable {
    /// The first token of each chunk and how many it has, negative outside all documents, `[2 * num_chunks]`.
    pub chunks: Tensor<1, Int>,
    /// The first chunk of each document and how many it has, the longest first, `[2 * num_documents]`.
    pub documents: Tensor<1, Int>,
    /// Number of chunks.
    pub num_chunks: usize,
    /// Number of documents, and of gaps between them.
    pub num_documents: usize,
}

impl ChunkTable {
    pub(super) fn new(num_tokens: usize, documents: &[(usize, usize)], chunk_len: usize, device: &Device) -> Self {
        let (chunks, by_document) = table(num_tokens, documents, chunk_len);
        let (num_chunks, num_documents) = (chunks.len(), by_document.len());
        let tensor = |pairs: Vec<[i32; 2]>| indices(pairs.into_iter().flatten(), device);
        Self { chunks: tensor(chunks), documents: tensor(by_document), num_chunks, num_documents }
    }
}

/// Chunks (first token, tokens) and documents (first chunk, chunks).
fn table(num_tokens: usize, documents: &[(usize, usize)], chunk_len: usize) -> (Vec<[i32; 2]>, Vec<[i32; 2]>) {
    let int = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let (mut chunks, mut by_document, mut end) = (Vec::new(), Vec::new(), 0);
    let mut sorted: Vec<_> = documents.iter().copied().filter(|(_, len)| *len > 0).collect();
    sorted.sort_unstable();
    for (start, len) in sorted.into_iter().chain([(num_tokens, 0)]) {
        if end < start {
            by_document.push([int(chunks.len()), 1]);
            chunks.push([int(end), -int(start - end)]);
        }
        let count = len.div_ceil(chunk_len);
        if count > 0 {
            by_document.push([int(chunks.len()), int(count)]);
        }
        chunks.extend((0..count).map(|i| [int(start + i * chunk_len), int(chunk_len.min(len - i * chunk_len))]));
        end = start + len;
    }
    // Who begins last ends last.
    by_document.sort_by_key(|[_, count]| std::cmp::Reverse(*count));
    (chunks, by_document)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_has_a_chunk_and_no_chunk_has_two_documents() {
        let (chunks, documents) = table(20, &[(9, 3), (2, 7), (13, 4)], 3);
        assert_eq!(chunks, [[0, -2], [2, 3], [5, 3], [8, 1], [9, 3], [12, -1], [13, 3], [16, 1], [17, -3]]);
        assert_eq!(documents, [[1, 3], [6, 2], [0, 1], [4, 1], [5, 1], [8, 1]]);
        assert_eq!(table(2, &[], 3), (vec![[0, -2]], vec![[0, 1]]));
    }
}
