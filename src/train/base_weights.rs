//! The frozen weights in the memory of a step, and what is read of them where they stay on disk.

use super::memory::Workload;
use crate::model::Residency;

/// Bytes of the frozen weights as the model holds them.
struct Sizes {
    /// Norms and biases, in `f32`.
    vectors: usize,
    /// The matrices of a block.
    block: usize,
    head: usize,
    embedding: usize,
}

impl Workload<'_> {
    fn sizes(&self) -> Sizes {
        let mut sizes = Sizes { vectors: 0, block: 0, head: 0, embedding: 0 };
        let stored = self.config.quantisation.as_ref();
        let is_whole = |name: &str| {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            stored.is_some_and(|stored| stored.is_whole(module))
        };
        // A GPU has no kernel for the blocks of GGUF, so they are decoded.
        let in_blocks = |name: &str| stored.filter(|_| self.on_cpu)?.blocks.get(name).copied();
        for (name, shape) in self.config.expected_tensors() {
            let numbers: usize = shape.iter().product();
            match shape[..] {
                [out_features, in_features] if name.starts_with("model.layers.") => {
                    let storage = if is_whole(&name) { self.storage.dtype.into() } else { self.storage };
                    sizes.block +=
                        in_blocks(&name).unwrap_or_else(|| storage.matrix_bytes([out_features, in_features]));
                }
                [_] => sizes.vectors += numbers * size_of::<f32>(),
                _ if name == "lm_head.weight" => sizes.head = numbers * self.storage.dtype.num_bytes(),
                _ => sizes.embedding = numbers * self.storage.dtype.num_bytes(),
            }
        }
        sizes.block /= self.config.num_hidden_layers.max(1);
        sizes
    }

    /// Bytes in memory. On disk: two blocks, or one and the head; rows of the embedding are there before activations are.
    pub(super) fn base_bytes(&self) -> usize {
        let Sizes { vectors, block, head, embedding } = self.sizes();
        match self.storage.residency {
            Residency::Memory => vectors + self.config.num_hidden_layers * block + head + embedding,
            Residency::Mapped => vectors + block + block.max(head).max(self.tied(embedding)),
        }
    }

    /// Bytes that a step reads where they are on disk and the page cache holds none of them: for each micro-batch the
    /// blocks forward and, from the first adapted one on, back, and the head.
    pub(super) fn read_bytes_per_step(&self) -> Option<usize> {
        let Sizes { block, head, embedding, .. } = self.sizes();
        let layers = self.config.num_hidden_layers;
        let first = self.selection.shapes.iter().position(|block| block.iter().any(Option::is_some)).unwrap_or(layers);
        let of_pass = (2 * layers - first) * block + head.max(self.tied(embedding));
        (self.storage.residency == Residency::Mapped).then_some(self.gradient_accumulation_steps * of_pass)
    }

    fn tied(&self, embedding: usize) -> usize {
        if self.config.tie_word_embeddings { embedding } else { 0 }
    }
}
