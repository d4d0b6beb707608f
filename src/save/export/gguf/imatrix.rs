//! How much each input of a matrix weighs, in the form of llama.cpp's `llama-imatrix`, which `llama-quantize` reads.

use std::collections::BTreeMap;
use std::path::Path;

use super::file::{Gguf, Tensor, list, text};
use super::named;
use crate::save::export::ExportError;
use crate::spec::ModelConfig;
use crate::spec::gguf::{Order, tensors_of};
use crate::util::gguf::{List, Value};

/// Means of the squares of the inputs of matrices, over the tokens of some rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imatrix {
    /// By the name of the weight in Hugging Face's files.
    pub means: BTreeMap<String, Vec<f32>>,
    /// Tokens of the rows.
    pub num_tokens: usize,
    /// Micro-batches of the rows.
    pub num_chunks: usize,
    /// Files of the rows.
    pub datasets: Vec<String>,
}

impl Imatrix {
    /// Of one weight, in the order of its columns in a file.
    pub(super) fn of(&self, config: &ModelConfig, name: &str) -> Option<Vec<f32>> {
        let means = self.means.get(name)?;
        let order = Order::of(config, name).filter(|order| order.is_of_columns);
        Some(order.map_or_else(|| means.clone(), |order| order.in_file(means, means.len())))
    }

    /// What the file of a model says of it; `path` is where it lies itself.
    #[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
    pub(super) fn keys(&self, path: &Path) -> Vec<(String, Value)> {
        [
            ("quantize.imatrix.file", text(&path.file_name().unwrap_or_default().to_string_lossy())),
            ("quantize.imatrix.dataset", text(&self.datasets.join(", "))),
            ("quantize.imatrix.entries_count", Value::U32(self.means.len() as u32)),
            ("quantize.imatrix.chunks_count", Value::U32(self.num_chunks as u32)),
        ]
        .map(named)
        .into()
    }

    /// Writes it as a file of its own.
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "counts below 2^24")]
    pub(super) fn write(&self, config: &ModelConfig, path: &Path) -> Result<(), ExportError> {
        let metadata = [
            ("general.type", text("imatrix")),
            ("imatrix.datasets", list(List::String(self.datasets.clone()))),
            ("imatrix.chunk_count", Value::U32(self.num_chunks as u32)),
            ("imatrix.chunk_size", Value::U32((self.num_tokens / self.num_chunks.max(1)) as u32)),
        ];
        let count = self.num_tokens as f32;
        let of_weight = |name: &String| {
            let means = self.of(config, name).unwrap_or_default();
            let names = tensors_of(config, name, 0).into_iter().map(|(name, _)| name);
            names.flat_map(move |name| {
                let sums: Vec<f32> = means.iter().map(|mean| mean * count).collect();
                let shape = vec![1, sums.len()];
                [
                    Tensor::of(format!("{name}.in_sum2"), shape, move || sums.clone()),
                    Tensor::of(format!("{name}.counts"), vec![1, 1], move || vec![count]),
                ]
            })
        };
        let tensors = self.means.keys().flat_map(of_weight).collect();
        Gguf { metadata: metadata.map(named).into(), tensors }.write(path).map(drop)
    }
}
