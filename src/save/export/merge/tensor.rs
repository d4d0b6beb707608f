//! The tensors of a merged model, each computed when it is written.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn::tensor::Device;

use super::packed::Packing;
use crate::device::Dtype;
use crate::lora::Matrices;
use crate::lora::targets::AdapterShape;
use crate::model::weights::{Quantisation, StoredTensor, WeightFiles, Weights, convert};
use crate::ops::quantised::Quantised;
use crate::save::export::adapter_file::{EMBEDDING, HEAD, TOKENS};
use crate::save::export::{AdapterWeights, ExportError, HostMatrix, SavedAdapter, check_adapter, read_adapter};
use crate::schema::Problem;
use crate::spec::{ModelConfig, Site};
use crate::util::faults;

/// Differences between weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Differences {
    /// The largest between the written and the trained weights.
    pub written: f32,
    /// The largest between the stored base and the decoded base that the adapter was trained on.
    pub decoded: f32,
    /// The sum of the squares of all updates.
    update: f64,
    /// The sum of the products of each update and the part that rounding took from it.
    lost: f64,
}

impl Differences {
    /// The share of the updates that rounding took: 1 where every weight was rounded back to where it was before.
    #[must_use]
    pub fn share_lost(&self) -> f64 {
        if self.update > 0.0 { self.lost / self.update } else { 0.0 }
    }
}

/// A model, and an adapter that fits it.
pub(in crate::save::export) struct Merging {
    pub(in crate::save::export) config: ModelConfig,
    pub(in crate::save::export) base: Weights,
    /// The folder or file with the tokenizer.
    pub(in crate::save::export) tokenizer: PathBuf,
    /// Names and shapes of the model's tensors, and of the other parts of a multimodal model, sorted.
    tensors: Vec<(String, Vec<usize>)>,
    /// Bytes of all of them.
    num_bytes: usize,
    pub(super) adapter: SavedAdapter,
    /// The adapter's shape on every adapted module.
    shapes: BTreeMap<String, AdapterShape>,
    /// Names of the linear layers' weights.
    linears: BTreeSet<String>,
    /// Those that are linear layers to other programs, too: experts and what chooses them are not.
    pub(super) codable: BTreeSet<String>,
    /// The codes from which the linear layers are decoded before the adapter is added.
    decoded: Option<Quantisation>,
    differences: Mutex<Differences>,
    /// The largest number of matrices that share a scale, by the first of them.
    largest: Mutex<BTreeMap<String, f32>>,
}

/// Matrices that servers join to one.
const JOINED: [&[&str]; 2] = [&["q_proj.", "k_proj.", "v_proj."], &["gate_proj.", "up_proj."]];

impl Merging {
    pub(in crate::save::export) fn open(
        model: &Path,
        adapter: &Path,
        decoded: Option<Quantisation>,
    ) -> Result<Self, ExportError> {
        Self::of(model, read_adapter(adapter)?, adapter, decoded)
    }

    /// The same where the adapter in the folder was read.
    pub(in crate::save::export) fn of(
        model: &Path,
        saved: SavedAdapter,
        adapter: &Path,
        decoded: Option<Quantisation>,
    ) -> Result<Self, ExportError> {
        let mut config = ModelConfig::from_model(model)?;
        let saved = saved.that_writes(adapter)?.named_for(&config);
        let tokenizer = saved.grow(&mut config, model, adapter).unwrap_or_else(|| model.to_owned());
        let base = Weights::open(model, &config)?;
        base.check(&config)?;
        let saved = saved.without_equal_tables(&base, &config);
        let selection = check_adapter(adapter, &saved, &config)?;
        let shapes = selection.adapted_modules(&config).map(|(module, _, shape)| (module, shape)).collect();
        let weight = |(name, _): (String, &Site)| format!("{name}.weight");
        let linears = config.sites().map(weight).collect();
        let codable = config.sites().filter(|(_, site)| site.role.is_plain()).map(weight).collect();
        let mut tensors = config.expected_tensors();
        if let (Some(_), Weights::Files(files)) = (config.nesting, &base) {
            // Some have the language model under the names that it has alone.
            let own: HashSet<String> = tensors.iter().map(|(name, _)| name.clone()).collect();
            let is_other = |name: &str| name != HEAD && !name.starts_with("model.layers.") && !own.contains(name);
            let others = files.tensors().iter();
            let others = others.filter(|(name, stored)| stored.nested_name.is_none() && is_other(name));
            tensors.extend(others.map(|(name, stored)| (name.clone(), stored.shape.clone())));
        }
        tensors.sort();
        let (differences, largest) = Default::default();
        let mut merging = Self {
            config,
            base,
            tokenizer,
            tensors,
            num_bytes: 0,
            adapter: saved,
            shapes,
            linears,
            codable,
            decoded,
            differences,
            largest,
        };
        merging.num_bytes = merging.tensors(&|_, _| ()).map(|tensor| tensor.num_bytes()).sum();
        Ok(merging)
    }

    /// The same with other numbers of the adapter, which lies in this folder.
    pub(in crate::save::export) fn with(
        &self,
        model: &Path,
        adapter: &Path,
        weights: &AdapterWeights,
    ) -> Result<Self, ExportError> {
        Self::of(model, SavedAdapter { weights: weights.clone(), ..self.adapter.clone() }, adapter, self.decoded)
    }

    /// Every tensor, in the order of the names. `on_bytes` is called with its size and that of all when one is written.
    pub(in crate::save::export) fn tensors<'a>(
        &'a self,
        on_bytes: &'a dyn Fn(usize, usize),
    ) -> impl Iterator<Item = MergedTensor<'a>> {
        self.tensors.iter().map(move |(name, shape)| {
            let module = self.config.module_of(name.strip_suffix(".weight").unwrap_or(name));
            let shape_of = self.shapes.get(&module).copied();
            let difference = self.adapter.weights.get(&module).zip(shape_of);
            let rows =
                self.adapter.config.trainable_token_indices.as_deref().zip(self.adapter.weights.full.get(TOKENS));
            let rows = rows.filter(|_| name == EMBEDDING);
            let whole = self.adapter.weights.replaced(name).map(|values| &*values.values);
            let replaced = (rows.is_some() || whole.is_some()).then_some(Update::Replaced { whole, rows });
            let update = difference.map(|(matrices, shape)| Update::Difference(matrices, shape)).or(replaced);
            let decoded = self.decoded.filter(|_| self.linears.contains(name));
            MergedTensor { merging: self, name, shape, stored: self.stored(name, shape), update, decoded, on_bytes }
        })
    }

    /// A tensor that is stored as numbers in a file of safetensors.
    fn stored(&self, name: &str, shape: &[usize]) -> Option<(&StoredTensor, Dtype)> {
        let Weights::Files(files) = &self.base else { return None };
        let is_table = files.rows_of_fewer(name, shape).is_some();
        let stored = files.tensors().get(name).filter(|stored| is_table || stored.shape == shape)?;
        Some((stored, stored.float_dtype()?))
    }

    /// Type in which codes are written: that of the embedding, if it has 16 bits.
    fn decoded_dtype(&self) -> Dtype {
        let ModelConfig { vocab_size, hidden_size, .. } = self.config;
        let (of_embedding, otherwise) = match &self.base {
            Weights::Gguf(file) => (file.float_dtype(), Dtype::F16),
            _ => (
                self.stored("model.embed_tokens.weight", &[vocab_size, hidden_size]).map(|stored| stored.1),
                Dtype::Bf16,
            ),
        };
        of_embedding.filter(|dtype| *dtype != Dtype::F32).unwrap_or(otherwise)
    }

    /// A tensor of the base, as the adapter was trained on it.
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Problem> {
        let device = Device::flex();
        if let (Weights::Files(files), [_, _, _, ..]) = (&self.base, shape) {
            return files.load_f32(name, shape);
        }
        let &[rows, columns] = shape else {
            let values = self.base.load(name, [shape.iter().product()], Dtype::F32, &device)?;
            return Ok(faults::read(values, "a weight"));
        };
        self.base.matrix_values(name, [rows, columns], &self.config)
    }

    /// The largest absolute number of a matrix and of those that servers join it with, which share its scale.
    fn largest_beside(&self, name: &str) -> Result<f32, Problem> {
        let joined = JOINED.iter().find(|names| names.iter().any(|part| name.contains(part)));
        let names: Vec<String> = joined.map_or_else(
            || vec![name.to_owned()],
            |names| {
                let own = names.iter().find(|part| name.contains(**part)).copied().unwrap_or_default();
                names.iter().map(|part| name.replace(own, part)).collect()
            },
        );
        let mut known = self.largest.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(largest) = known.get(&names[0]) {
            return Ok(*largest);
        }
        let mut largest = 0f32;
        for tensor in self.tensors(&|_, _| ()).filter(|tensor| names.iter().any(|name| name == tensor.name)) {
            largest = tensor.numbers()?.0.iter().fold(largest, |most, number| most.max(number.abs()));
        }
        known.insert(names[0].clone(), largest);
        Ok(largest)
    }

    /// Of the tensors that were written so far.
    pub(super) fn differences(&self) -> Differences {
        *self.differences.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn note(&self, found: Differences) {
        let mut all = self.differences.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        all.written = all.written.max(found.written);
        all.decoded = all.decoded.max(found.decoded);
        all.update += found.update;
        all.lost += found.lost;
    }
}

/// What an adapter does to a tensor.
#[derive(Clone, Copy)]
enum Update<'a> {
    /// Adds the difference that these matrices make in this shape.
    Difference(&'a Matrices<HostMatrix>, AdapterShape),
    /// Puts numbers in the place of all, then rows of tokens in the place of some.
    Replaced { whole: Option<&'a [f32]>, rows: Option<(&'a [usize], &'a HostMatrix)> },
}

impl Update<'_> {
    /// Puts what takes the place of a weight's numbers there.
    fn put(self, weight: &mut [f32]) {
        let Self::Replaced { whole, rows } = self else { return };
        whole.iter().for_each(|whole| weight.copy_from_slice(whole));
        if let Some((ids, rows)) = rows {
            for (id, row) in ids.iter().zip(rows.values.chunks(rows.num_columns)) {
                weight[id * rows.num_columns..][..rows.num_columns].copy_from_slice(row);
            }
        }
    }
}

/// A tensor of the merged model.
#[derive(Clone, Copy)]
pub(in crate::save::export) struct MergedTensor<'a> {
    pub(in crate::save::export) merging: &'a Merging,
    pub(in crate::save::export) name: &'a str,
    pub(in crate::save::export) shape: &'a [usize],
    /// Where it is, and in which type, if the base's files have its numbers.
    stored: Option<(&'a StoredTensor, Dtype)>,
    update: Option<Update<'a>>,
    decoded: Option<Quantisation>,
    on_bytes: &'a dyn Fn(usize, usize),
}

impl<'a> MergedTensor<'a> {
    /// Its name in the base's files.
    pub(super) fn name_in_file(&self) -> String {
        match self.stored {
            Some((StoredTensor { nested_name: Some(name), .. }, _)) => name.clone(),
            Some(_) => self.name.to_owned(),
            None => self.merging.config.module_of(self.name),
        }
    }

    /// Whether the base has codes of it, or none of its numbers.
    pub(super) fn is_coded(&self) -> bool {
        self.stored.is_none()
    }

    /// Type in which the tensor is written by default.
    pub(in crate::save::export) fn dtype(&self) -> Dtype {
        self.stored.map_or_else(|| self.merging.decoded_dtype(), |(_, dtype)| dtype)
    }

    /// Index of its file in the base.
    pub(super) fn shard(&self, files: &WeightFiles) -> usize {
        let module = self.name.trim_end_matches("weight");
        let of_codes = || files.tensors().range(module.to_owned()..).next().map(|(_, stored)| stored.shard);
        self.stored.map(|(stored, _)| stored.shard).or_else(of_codes).unwrap_or_default()
    }

    /// Its numbers, not rounded, and the update that they contain.
    pub(in crate::save::export) fn values(&self) -> Result<(Vec<f32>, Vec<f32>), Problem> {
        self.report();
        let (numbers, update) = self.numbers()?;
        self.note_update(&update);
        self.release();
        Ok((numbers, update))
    }

    pub(super) fn bytes_in(&self, dtype: Dtype) -> Result<Cow<'a, [u8]>, Problem> {
        self.report();
        let is_changed = self.update.is_some() || self.decoded.is_some();
        if let (Some((stored, from)), Weights::Files(files)) = (self.stored, &self.merging.base)
            && from == dtype
            && stored.shape == self.shape
            && !is_changed
        {
            return Ok(files.bytes(stored));
        }
        let (numbers, update) = self.numbers()?;
        let written = convert::from_f32(&numbers, dtype).map_err(|_| self.too_large(dtype))?;
        self.note_update(&update);
        self.note_rounding(&numbers, &convert::to_f32(&written, dtype), &update);
        Ok(Cow::Owned(written))
    }

    fn note_update(&self, update: &[f32]) {
        self.merging.note(Differences { update: product(update, update), ..Differences::default() });
    }

    /// Notes what rounding `numbers` to `written` takes from an update.
    pub(in crate::save::export) fn note_rounding(&self, numbers: &[f32], written: &[f32], update: &[f32]) {
        let taken: Vec<f32> = numbers.iter().zip(written).map(|(number, written)| number - written).collect();
        let largest = taken.iter().fold(0.0, |most: f32, taken| most.max(taken.abs()));
        let lost = product(&taken, update);
        self.merging.note(Differences { written: largest, lost, ..Differences::default() });
    }

    /// Its trained numbers, and the update that they contain.
    fn numbers(&self) -> Result<(Vec<f32>, Vec<f32>), Problem> {
        let mut weight = self.merging.weight(self.name, self.shape)?;
        if let Some(quantisation) = self.decoded {
            let decoded = self.quantised(&weight, quantisation)?.to_f32();
            let difference = largest_difference(&weight, &decoded);
            self.merging.note(Differences { decoded: difference, ..Differences::default() });
            weight = decoded;
        }
        let update = self.update(&weight);
        if let Some(replaced @ Update::Replaced { .. }) = self.update {
            replaced.put(&mut weight);
        } else {
            weight.iter_mut().zip(&update).for_each(|(weight, update)| *weight += update);
        }
        Ok((weight, update))
    }

    /// What the adapter adds to `weight`; empty without one.
    fn update(&self, weight: &[f32]) -> Vec<f32> {
        match self.update {
            None => Vec::new(),
            Some(Update::Difference(matrices, AdapterShape { kind, scale, .. })) => {
                let matrices = matrices.as_ref().map(|matrix| &*matrix.values);
                kind.difference(matrices, scale, weight, [self.shape[0], self.shape[1]])
            }
            Some(replaced @ Update::Replaced { .. }) => {
                let mut values = weight.to_vec();
                replaced.put(&mut values);
                values.iter_mut().zip(weight).for_each(|(value, weight)| *value -= weight);
                values
            }
        }
    }

    /// Says that it is about to be written.
    pub(super) fn report(&self) {
        (self.on_bytes)(self.num_bytes(), self.merging.num_bytes);
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype().num_bytes()
    }

    /// Releases the pages that a borrowed tensor has in memory.
    pub(super) fn release(&self) {
        if let (Some((stored, _)), Weights::Files(files)) = (self.stored, &self.merging.base) {
            files.release(stored);
        }
    }

    /// Its numbers as codes, whatever the base's type.
    pub(super) fn codes(&self, quantisation: Quantisation) -> Result<Quantised, Problem> {
        let (numbers, update) = self.numbers()?;
        let codes = self.quantised(&numbers, quantisation)?;
        self.note_update(&update);
        self.note_rounding(&numbers, &codes.to_f32(), &update);
        Ok(codes)
    }

    /// One of the tensors that take its place in a form of compressed-tensors.
    pub(super) fn packed(&self, packing: Packing, index: usize, dtype: Dtype) -> Result<Vec<u8>, Problem> {
        if index == 0 {
            self.report();
        }
        let largest = if packing == Packing::Nvfp4 { self.merging.largest_beside(self.name)? } else { 0.0 };
        if index == 2 {
            return Ok(packing.third(self.shape, largest));
        }
        let (numbers, update) = self.numbers()?;
        let packed = packing.pack(&numbers, self.shape[1], dtype, largest);
        self.note_update(&update);
        self.note_rounding(&numbers, &packed.decoded, &update);
        Ok(if index == 0 { packed.codes } else { packed.scales })
    }

    fn quantised(&self, numbers: &[f32], quantisation: Quantisation) -> Result<Quantised, Problem> {
        let shape = [self.shape[0], self.shape[1]];
        let fill = |first: usize, to: &mut [f32]| to.copy_from_slice(&numbers[first..first + to.len()]);
        quantisation.quantise(shape, &Device::flex(), fill).map_err(|_| self.too_large(Dtype::F16))
    }

    fn too_large(&self, dtype: Dtype) -> Problem {
        let problem = Problem::new(format!("a merged value of `{}` is too large for {dtype}", self.name));
        problem.hint("write it in another type: --dtype bf16")
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |most, (a, b)| (a - b).abs().max(most))
}

fn product(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
