//! The tensors of a merged model, each computed when it is written.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;

use burn::tensor::Device;

use crate::device::Dtype;
use crate::export::{ExportError, HostMatrix, SavedAdapter, check_adapter, read_adapter};
use crate::model::weights::{Quantisation, StoredTensor, WeightFiles, convert};
use crate::ops::cpu::{Weight, linear_backward_input};
use crate::ops::low_rank::LowRank;
use crate::ops::quantised::Quantised;
use crate::schema::Problem;
use crate::spec::{Linear, ModelConfig};

/// The largest differences between weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Differences {
    /// Between what is written and what was trained.
    pub written: f32,
    /// Between the base as it is stored and the decoded one that the adapter was trained on.
    pub decoded: f32,
}

/// A model, and an adapter that fits it.
pub(in crate::export) struct Merging {
    pub(in crate::export) config: ModelConfig,
    pub(in crate::export) files: WeightFiles,
    pub(super) adapter: SavedAdapter,
    /// The scale of every adapted module.
    scales: BTreeMap<String, f64>,
    /// Names of the linear layers' weights.
    pub(super) linears: BTreeSet<String>,
    /// The codes from which the linear layers are decoded before the adapter is added.
    decoded: Option<Quantisation>,
    differences: Mutex<Differences>,
}

impl Merging {
    pub(in crate::export) fn open(
        model: &Path,
        adapter: &Path,
        decoded: Option<Quantisation>,
    ) -> Result<Self, ExportError> {
        let config = ModelConfig::from_file(&model.join("config.json"))?;
        if let Some(stored) = &config.quantisation {
            let problem = Problem::new(format!("the base is stored as {}, whose codes cannot change", stored.method));
            let hint = "merge into the 16-bit model that it was made of; its folder or repository is --model";
            return Err(problem.at(model.display()).hint(hint).into());
        }
        let files = WeightFiles::open(model)?;
        files.check(&config)?;
        let saved = read_adapter(adapter)?;
        let selection = check_adapter(adapter, &saved, &config)?;
        let scales = selection.iter().map(|(layer, linear, shape)| (linear.module_name(layer), shape.scale)).collect();
        let layers = 0..config.num_hidden_layers;
        let linears =
            layers.flat_map(|layer| Linear::ALL.map(|linear| format!("{}.weight", linear.module_name(layer))));
        let linears = linears.collect();
        Ok(Self { config, files, adapter: saved, scales, linears, decoded, differences: Mutex::default() })
    }

    pub(in crate::export) fn tensor<'a>(
        &'a self,
        name: &'a str,
        stored: &'a StoredTensor,
        on_bytes: &'a dyn Fn(usize, usize),
    ) -> MergedTensor<'a> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let update = self.adapter.weights.get(module).zip(self.scales.get(module).copied());
        let decoded = self.decoded.filter(|_| self.linears.contains(name));
        MergedTensor { merging: self, name, stored, update, decoded, on_bytes }
    }

    /// Of the tensors that were written so far.
    pub(super) fn differences(&self) -> Differences {
        *self.differences.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn note(&self, found: Differences) {
        let mut most = self.differences.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        most.written = most.written.max(found.written);
        most.decoded = most.decoded.max(found.decoded);
    }
}

/// A tensor of the merged model.
#[derive(Clone, Copy)]
pub(in crate::export) struct MergedTensor<'a> {
    merging: &'a Merging,
    pub(super) name: &'a str,
    pub(super) stored: &'a StoredTensor,
    /// The update that is added, and its scale.
    update: Option<(&'a LowRank<HostMatrix>, f64)>,
    decoded: Option<Quantisation>,
    on_bytes: &'a dyn Fn(usize, usize),
}

impl<'a> MergedTensor<'a> {
    /// Its numbers, in the base's type.
    pub(in crate::export) fn bytes(&self) -> Result<Cow<'a, [u8]>, Problem> {
        self.bytes_in(self.stored.float_dtype())
    }

    /// Its numbers, in `dtype` if it is one of floating-point numbers.
    pub(super) fn bytes_in(&self, dtype: Option<Dtype>) -> Result<Cow<'a, [u8]>, Problem> {
        let bytes = self.merging.files.bytes(self.stored);
        self.report();
        let Some((from, to)) = self.stored.float_dtype().zip(dtype) else { return Ok(Cow::Borrowed(bytes)) };
        let is_changed = self.update.is_some() || self.decoded.is_some();
        if !is_changed && from == to {
            return Ok(Cow::Borrowed(bytes));
        }
        let numbers = self.numbers(from)?;
        let written = convert::from_f32(&numbers, to).map_err(|_| self.too_large(to))?;
        if is_changed {
            let difference = largest_difference(&numbers, &convert::to_f32(&written, to));
            self.merging.note(Differences { written: difference, decoded: 0.0 });
        }
        Ok(Cow::Owned(written))
    }

    /// Its numbers as they were trained; `from` is their type in the base.
    fn numbers(&self, from: Dtype) -> Result<Vec<f32>, Problem> {
        let mut weight = convert::to_f32(self.merging.files.bytes(self.stored), from);
        self.merging.files.release(self.stored);
        if let Some(quantisation) = self.decoded {
            let decoded = self.quantised(&weight, quantisation)?.to_f32();
            let difference = largest_difference(&weight, &decoded);
            self.merging.note(Differences { written: 0.0, decoded: difference });
            weight = decoded;
        }
        if let Some((pair, scale)) = self.update {
            add_update(&mut weight, pair, scale);
        }
        Ok(weight)
    }

    /// Says that it is about to be written.
    pub(super) fn report(&self) {
        (self.on_bytes)(self.merging.files.bytes(self.stored).len(), self.merging.files.num_bytes());
    }

    /// Its numbers as codes, whatever the base's type.
    pub(super) fn codes(&self, quantisation: Quantisation) -> Result<Quantised, Problem> {
        let from = self.stored.float_dtype().unwrap_or(Dtype::F32);
        let numbers = self.numbers(from)?;
        let codes = self.quantised(&numbers, quantisation)?;
        self.merging.note(Differences { written: largest_difference(&numbers, &codes.to_f32()), decoded: 0.0 });
        Ok(codes)
    }

    fn quantised(&self, numbers: &[f32], quantisation: Quantisation) -> Result<Quantised, Problem> {
        let shape = [self.stored.shape[0], self.stored.shape[1]];
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

/// `weight += scale B A`. The product is rounded before it is scaled, as in PEFT.
fn add_update(weight: &mut [f32], pair: &LowRank<HostMatrix>, scale: f64) {
    let [rank, in_features] = pair.a.shape();
    let mut update = vec![0.0; weight.len()];
    linear_backward_input(&pair.b.values, Weight::f32(&pair.a.values), in_features, rank, &mut update, false);
    #[expect(clippy::cast_possible_truncation, reason = "the sum is in f32")]
    let scale = scale as f32;
    for (weight, update) in weight.iter_mut().zip(update) {
        *weight += scale * update;
    }
}
