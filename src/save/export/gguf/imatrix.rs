//! How much each input of a matrix weighs, in the form of llama.cpp's `llama-imatrix`, which `llama-quantize` reads.

use std::collections::BTreeMap;
use std::path::Path;

use super::file::{Gguf, Tensor, list, text};
use super::named;
use crate::save::export::ExportError;
use crate::spec::ModelConfig;
use crate::spec::gguf::{Order, parts_of};
use crate::util::gguf::{List, Value, joined};

/// What the inputs of a matrix were like.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSquares {
    /// The sum of the squares of each.
    pub sums: Vec<f32>,
    /// Tokens that passed the matrix: of an expert those that it was given.
    pub num_tokens: usize,
}

impl InputSquares {
    /// The means, as llama.cpp computes them: of no tokens, all are 1.
    #[expect(clippy::cast_precision_loss, reason = "counts below 2^24")]
    fn means(&self) -> Vec<f32> {
        let count = self.num_tokens as f32;
        self.sums.iter().map(|sum| if self.num_tokens == 0 { 1.0 } else { sum / count }).collect()
    }
}

/// The squares of the inputs of matrices, over the tokens of some rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imatrix {
    /// By the name of the weight in Hugging Face's files.
    pub inputs: BTreeMap<String, InputSquares>,
    /// Tokens of the rows.
    pub num_tokens: usize,
    /// Micro-batches of the rows.
    pub num_chunks: usize,
    /// Files of the rows.
    pub datasets: Vec<String>,
}

impl Imatrix {
    /// Of one weight, in the order of its columns in a file.
    #[must_use]
    pub fn of(&self, config: &ModelConfig, name: &str) -> Option<Vec<f32>> {
        Some(in_order(config, name, self.inputs.get(name)?.means()))
    }

    /// What the file of a model says of it; `path` is where it lies itself.
    #[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
    pub(super) fn keys(&self, config: &ModelConfig, path: &Path) -> Vec<(String, Value)> {
        [
            ("quantize.imatrix.file", text(&path.file_name().unwrap_or_default().to_string_lossy())),
            ("quantize.imatrix.dataset", text(&self.datasets.join(", "))),
            ("quantize.imatrix.entries_count", Value::U32(self.by_tensor(config).len() as u32)),
            ("quantize.imatrix.chunks_count", Value::U32(self.num_chunks as u32)),
        ]
        .map(named)
        .into()
    }

    /// Writes it as a file of its own.
    #[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
    pub(super) fn write(&self, config: &ModelConfig, path: &Path) -> Result<(), ExportError> {
        let metadata = [
            ("general.type", text("imatrix")),
            ("imatrix.datasets", list(List::String(self.datasets.clone()))),
            ("imatrix.chunk_count", Value::U32(self.num_chunks as u32)),
            ("imatrix.chunk_size", Value::U32((self.num_tokens / self.num_chunks.max(1)) as u32)),
        ];
        let tensors = self.by_tensor(config).into_iter().flat_map(|(name, each)| {
            let num = each.len();
            let (sums, counts): (Vec<_>, Vec<_>) = each.into_values().unzip();
            [("in_sum2", sums.concat()), ("counts", counts)].map(|(what, numbers)| {
                let shape = vec![num, numbers.len() / num];
                Tensor::of(format!("{name}.{what}"), shape, move || numbers.clone())
            })
        });
        Gguf { metadata: metadata.map(named).into(), tensors: tensors.collect() }.write(path).map(drop)
    }

    /// Sums of the squares and the number of tokens, by the name of a tensor, and in it by expert.
    #[expect(clippy::cast_precision_loss, reason = "counts below 2^24")]
    fn by_tensor(&self, config: &ModelConfig) -> BTreeMap<String, BTreeMap<usize, (Vec<f32>, f32)>> {
        let mut tensors: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (weight, InputSquares { sums, num_tokens }) in &self.inputs {
            let (sums, count) = (in_order(config, weight, sums.clone()), *num_tokens as f32);
            // Columns of a turned part are others.
            for part in parts_of(config, weight, &[0, 0]).into_iter().filter(|part| part.turned.is_none()) {
                let (name, expert) = joined(&part.name).unwrap_or((part.name, 0));
                tensors.entry(name).or_default().insert(expert, (sums.clone(), count));
            }
        }
        tensors
    }
}

/// Numbers of the columns of a weight in their order in a file.
fn in_order(config: &ModelConfig, name: &str, numbers: Vec<f32>) -> Vec<f32> {
    match Order::of(config, name).filter(|order| order.is_of_columns) {
        Some(order) => order.in_file(&numbers, numbers.len()),
        None => numbers,
    }
}
