//! A model's safetensors files as the source of its tensors.

use std::collections::HashSet;
use std::path::Path;

use burn::tensor::Device;

use super::files::{StoredTensor, WeightFiles};
use super::form;
use super::pages::Pages;
use super::source::{MatrixStorage, Numbers, Source};
use super::storage::Storage;
use super::stored::{self, StoredMatrix, tensors_beside};
use crate::config::Residency;
use crate::device::Dtype;
use crate::ops::linear::Matrix;
use crate::schema::Problem;
use crate::spec::{LAYER_INPUT_TABLE, ModelConfig, StoredQuantisation};

/// Tensors that some old files hold and that are not needed: the rotary frequencies follow from the config.
const IGNORED_SUFFIX: &str = "rotary_emb.inv_freq";

/// Layers that predict more tokens at a time, which are no part of the language model; transformers does not load them either.
const IGNORED_PREFIX: &str = "mtp.";

/// `lm_head.weight` is stored and differs from the embedding, but the config says that the two are tied.
const UNTIED_HEAD: &str = "`lm_head.weight` differs from `model.embed_tokens.weight`, but `tie_word_embeddings` is true\n  \
                           hint: set \"tie_word_embeddings\": false in config.json if the head was trained on its own";

impl Source for WeightFiles {
    /// Rotary frequencies of old files are ignored, layers of multi-token prediction, keys and values of layers that use those of
    /// earlier ones, and the parts of a multimodal model that are not its language model. So is a stored head that equals the
    /// embedding, where the two are tied.
    fn check(&self, config: &ModelConfig) -> Result<(), Problem> {
        let expected = config.expected_tensors();
        let mut known: HashSet<String> = expected.iter().map(|(name, _)| name.clone()).collect();
        let mut problems = Vec::new();
        for (name, shape) in &expected {
            let shape = &config.shape_in_files(name, shape);
            problems.extend(self.problem_of(name, shape, config.quantisation.as_ref()));
            if let Some(StoredQuantisation { method, .. }) = &config.quantisation
                && is_coded(self, name, shape)
            {
                known.extend(tensors_beside(name, *method));
            }
        }
        for (name, stored) in self.tensors() {
            // Packers write biases of zeros where a layer has none.
            let is_zero = || self.bytes(stored).iter().all(|byte| *byte == 0);
            let is_padding = || config.quantisation.is_some() && name.ends_with("_proj.bias") && is_zero();
            let is_other_part = config.nesting.is_some()
                && stored.nested_name.is_none()
                && name != "lm_head.weight"
                && !name.starts_with("model.layers.");
            let is_ignored =
                name.ends_with(IGNORED_SUFFIX) || name.starts_with(IGNORED_PREFIX) || config.is_unused(name);
            if known.contains(name) || is_ignored || is_padding() || is_other_part {
                continue;
            }
            if name != "lm_head.weight" || !config.tie_word_embeddings {
                problems.push(format!("unexpected: `{name}` {:?}", stored.shape));
            } else if !same_bytes(self, name, "model.embed_tokens.weight") {
                problems.push(UNTIED_HEAD.to_owned());
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(self.mismatch(&problems)) }
    }

    fn digest(&self) -> Option<[u8; 32]> {
        Some(self.digest())
    }

    fn numbers(&self, name: &str, shape: &[usize]) -> Result<(Numbers<'_>, &Path), Problem> {
        let rows = self.rows_of_fewer(name, shape);
        let in_file = rows.map_or_else(|| shape.to_vec(), |rows| vec![rows, shape[1]]);
        let (stored, from) = self.find(name, &in_file)?;
        let numbers = Numbers::Stored(self.bytes(stored), from);
        Ok((if rows.is_some() { numbers.with_means(&in_file) } else { numbers }, self.path(stored)))
    }

    fn as_stored(&self, name: &str, shape: [usize; 2], held: &MatrixStorage<'_>) -> Result<Option<Matrix>, Problem> {
        let MatrixStorage { storage: Storage { dtype, residency, .. }, config, device } = *held;
        if self.rows_of_fewer(name, &shape).is_some() {
            return Ok(None);
        }
        if residency == Residency::Mapped {
            return self.map(name, shape, dtype, device).map(Some);
        }
        let stored = config.quantisation.as_ref().filter(|_| is_coded(self, name, &shape));
        stored.map(|stored| stored::load(self, name, shape, stored.method, dtype, device)).transpose()
    }

    fn pages(&self, name: &str) -> Option<Pages> {
        self.tensors().get(name).map(|stored| self.pages(stored))
    }

    fn release_pages(&self, name: &str) {
        self.tensors().get(name).into_iter().for_each(|stored| self.release(stored));
    }
}

impl WeightFiles {
    /// That a tensor is missing, has another shape, or is of a type that cannot be read. A matrix may be stored as codes of this kind.
    pub(in crate::model) fn problem_of(
        &self,
        name: &str,
        shape: &[usize],
        quantisation: Option<&StoredQuantisation>,
    ) -> Option<String> {
        match (quantisation, shape) {
            (Some(StoredQuantisation { method, .. }), &[out, width]) if is_coded(self, name, shape) => {
                StoredMatrix::find(self, name, [out, width], *method).err()
            }
            _ => self.stored(name, shape).err(),
        }
    }

    /// Whether a tensor can be used as numbers of `dtype` where it lies.
    pub(super) fn has_numbers(&self, stored: &StoredTensor, dtype: Dtype) -> bool {
        stored.float_dtype() == Some(dtype) && stored.is_dense() && self.pages(stored).is_aligned(dtype)
    }

    /// One matrix over the pages of its file: as numbers of `dtype`, or in the form that a copy says.
    ///
    /// # Errors
    /// Where the tensor is missing, has another shape, or is not in that form.
    pub(super) fn map(&self, name: &str, shape: [usize; 2], dtype: Dtype, device: &Device) -> Result<Matrix, Problem> {
        let unusable = |form: &str| self.mismatch(&[format!("`{name}` cannot be used as {form} where it lies")]);
        let copied = self.tensors().get(name).filter(|stored| stored.dtype == safetensors::Dtype::U8);
        let form = copied.and_then(|stored| Some((stored, self.shard_metadata(stored.shard)?.get(name)?)));
        if let Some((stored, form)) = form {
            return form::over(form, self.pages(stored), shape, device).ok_or_else(|| unusable(form));
        }
        let (stored, _) = self.find(name, &shape)?;
        if !self.has_numbers(stored, dtype) {
            return Err(unusable(dtype.name()));
        }
        Ok(Matrix::Dense(self.pages(stored).tensor(shape, dtype, device)))
    }
}

/// Whether the files hold codes of this matrix: neither is it the embedding, nor is it there as it is.
fn is_coded(files: &WeightFiles, name: &str, shape: &[usize]) -> bool {
    !matches!(name, "model.embed_tokens.weight" | LAYER_INPUT_TABLE) && files.stored(name, shape).is_err()
}

fn same_bytes(files: &WeightFiles, name: &str, other: &str) -> bool {
    match (files.tensors().get(name), files.tensors().get(other)) {
        (Some(first), Some(second)) => {
            let same = first.dtype == second.dtype && files.bytes(first) == files.bytes(second);
            files.release(first);
            files.release(second);
            same
        }
        _ => true,
    }
}
