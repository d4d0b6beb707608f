//! Adapters and merged models in the formats of PEFT and Hugging Face.
//!
//! An adapter is a folder with `adapter_model.safetensors` and `adapter_config.json`, as `save_pretrained` of PEFT
//! writes it: [`write_adapter`] and [`read_adapter`]. A merged model is a Hugging Face folder in which the adapter has
//! been added to the weights: [`merge()`]. Several adapters make one: [`combine()`]. Both can be written as GGUF files: [`adapter_gguf`] and [`merge_gguf`].

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use adapter_file::{SCORE, TOKENS, module_of_weight};

use crate::lora::Matrices;
use crate::spec::ExpertForm;

mod adapter_check;
mod adapter_config;
mod adapter_file;
mod adapter_set;
mod combine;
pub mod error;
mod experts;
mod gguf;
mod merge;
mod new_rows;
mod prompt_form;
mod shipped;
mod tokenizer_files;

pub use adapter_check::{check_adapter, check_written};
pub use adapter_file::{SavedAdapter, find_adapter, is_adapter, read_adapter, write_adapter};
pub use adapter_set::{adapter_set, adapter_weights};
pub use combine::{Combined, Weighted, combine, write_combined, write_plain};
pub use error::ExportError;
pub use gguf::{GgufOptions, Imatrix, InputSquares, adapter_gguf, imatrix_file, lost_windows, merge_gguf, modelfile};
pub use merge::{Codes, Differences, MergeOptions, MergeSummary, Packing, merge};
pub use new_rows::grow;
pub use prompt_form::{Ends, PROMPT_FORM_FILE, PromptForm};
pub use shipped::{SHIPPED_FILE, Shipped, about_raw};
pub use tokenizer_files::{TOKENIZER_FILES, write_tokenizer};

/// The numbers of an adapter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterWeights {
    /// The matrices by module, for example `model.layers.0.self_attn.q_proj`.
    pub adapters: BTreeMap<String, Matrices<HostMatrix>>,
    /// What is trained in full, by the names that a language model alone has: see [`FullTensor`](crate::lora::FullTensor).
    pub full: BTreeMap<String, HostMatrix>,
    /// Whether the embedding among them is the head too.
    pub is_tied: bool,
    /// Embedding and head that lie beside the adapter as they are, by the same names: PEFT's `save_embedding_layers`.
    pub beside: BTreeMap<String, HostMatrix>,
    /// In which form a file has those of experts, which are one by one here.
    pub experts: ExpertForm,
    /// The version of PEFT that wrote a file with those of experts in one, where it says so and they are not apart yet.
    peft_version: Option<[u64; 3]>,
}

impl AdapterWeights {
    /// Whether parts of the model are in it that no server takes beside its base, but merged.
    #[must_use]
    pub fn replaces_weights(&self) -> bool {
        self.full.keys().any(|name| name != SCORE) || !self.beside.is_empty()
    }

    /// Whether there is a head that scores.
    #[must_use]
    pub fn scores(&self) -> bool {
        self.full.contains_key(SCORE)
    }

    /// The modules of the model among what is trained in full.
    fn modules(&self) -> impl Iterator<Item = &str> {
        let modules = self.full.keys().filter(|name| ![SCORE, TOKENS].contains(&name.as_str()));
        modules.map(|name| module_of_weight(name))
    }

    /// What takes the place of a weight of the model, but for rows of tokens.
    fn replaced(&self, name: &str) -> Option<&HostMatrix> {
        self.full.get(name).or_else(|| self.beside.get(name))
    }
}

impl Deref for AdapterWeights {
    type Target = BTreeMap<String, Matrices<HostMatrix>>;

    fn deref(&self) -> &Self::Target {
        &self.adapters
    }
}

impl DerefMut for AdapterWeights {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.adapters
    }
}

impl FromIterator<(String, Matrices<HostMatrix>)> for AdapterWeights {
    fn from_iter<I: IntoIterator<Item = (String, Matrices<HostMatrix>)>>(adapters: I) -> Self {
        Self { adapters: adapters.into_iter().collect(), ..Self::default() }
    }
}

/// A matrix in host memory, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct HostMatrix {
    /// Number of rows.
    pub num_rows: usize,
    /// Number of columns.
    pub num_columns: usize,
    /// `num_rows * num_columns` numbers.
    pub values: Vec<f32>,
}

impl HostMatrix {
    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.num_rows, self.num_columns]
    }

    /// One of `num_parts` of equally many rows.
    fn part(&self, part: usize, num_parts: usize) -> Self {
        let (num_rows, size) = (self.num_rows / num_parts, self.values.len() / num_parts);
        Self { num_rows, num_columns: self.num_columns, values: self.values[part * size..][..size].to_vec() }
    }

    /// Its columns as rows.
    fn transposed(&self) -> Self {
        let column = |column| self.values.iter().skip(column).step_by(self.num_columns).copied();
        let values = (0..self.num_columns).flat_map(column).collect();
        Self { num_rows: self.num_columns, num_columns: self.num_rows, values }
    }

    /// Its rows with those of another below.
    fn above(mut self, other: Self) -> Self {
        self.num_rows += other.num_rows;
        self.values.extend(other.values);
        self
    }
}
