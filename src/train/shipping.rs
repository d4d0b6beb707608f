//! Training in the form that is served: from some step on, the model computes with the weights that a quantised file will have, and
//! the adapter learns to make up for their rounding.
//!
//! Every adapted matrix is `Q(W + s B A)`, encoded once an update; gradients go straight through `Q` (Bengio et al., 2013). All other
//! weights are as that file has them, too. Blocks whose scales are searched for keep those of the first step: codes alone are chosen
//! anew, and `merge` writes the file with the same scales, so that it is the model that was trained and evaluated, bit for bit. What
//! an error costs in which column, the rows of the first part say (`imatrix`).

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Instant;

use crate::config::{FileType, Residency};
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::device::Dtype;
use crate::model::weights::Weights;
use crate::model::{Storage, load};
use crate::save::export::{ExportError, GgufOptions, Shipped, adapter_weights, merge_gguf};
use crate::util::stats::as_f64;
use crate::util::text::duration;

use super::importance::{self, NUM_TOKENS};
use super::rounding::Rounding;
use super::saver::AdapterFiles;
use super::step::TrainStep;
use super::stop::Stop;

/// Name of the folder of the first file.
const TEMPORARY: &str = ".shipping";

/// What a run is to train for, and from when on.
pub struct Shipping {
    /// Type of the file.
    pub file_type: FileType,
    /// Steps before.
    pub first_step: u64,
    /// The base: its folder or GGUF file.
    pub base: PathBuf,
    /// Its weights, which stay on disk.
    pub weights: Weights,
    /// How it is held.
    pub storage: Storage,
    /// Type of the arithmetic.
    pub compute: Dtype,
    /// Where the first file is made, which is deleted once it is read.
    pub folder: PathBuf,
    /// How that began, where a resumed run is beyond it.
    pub begun: Option<Shipped>,
}

impl Shipping {
    /// With what the last part begins: the adapter as it is, and what the inputs weigh. `None` where it was stopped.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub(super) fn start(
        &self,
        step: &TrainStep,
        data: &Dataset,
        stop: &Stop,
        at_work: &dyn Fn(String),
    ) -> Result<Option<Shipped>, DataError> {
        let on_tokens = |tokens| {
            let share = 100.0 * (as_f64(tokens) / as_f64(NUM_TOKENS)).min(1.0);
            at_work(format!("weighing inputs for the {} file {share:.0} %", self.file_type.name()));
        };
        let mut imatrix = None;
        if self.file_type.weighs_errors() {
            imatrix = importance::imatrix(step, data, &|| stop.requested(), &on_tokens)?;
            if imatrix.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(Shipped { file_type: self.file_type, start: adapter_weights(step.adapters()), imatrix }))
    }

    /// Puts the model as the file has it in the place of that of the step, which may not be used where this fails. `at_work` gets
    /// what is done, and how far that is.
    ///
    /// # Errors
    /// What llama.cpp has no place for; a disk that takes no file of that size.
    pub(super) fn begin(
        &self,
        shipped: Shipped,
        step: &mut TrainStep,
        files: &AdapterFiles,
        at_work: &dyn Fn(String),
    ) -> Result<(), ExportError> {
        let (config, device) = (step.model().config.clone(), step.model().device());
        // The weights of the first part make room.
        step.leave_model();
        // A fixed name: what a killed start left behind goes now.
        drop(std::fs::remove_dir_all(self.folder.join(TEMPORARY)));
        let temporary = tempfile::Builder::new().prefix(TEMPORARY).rand_bytes(0).tempdir_in(&self.folder);
        let temporary = temporary.map_err(ExportError::io("write to", &self.folder))?;
        let [adapter, file] = ["adapter", "model.gguf"].map(|name| temporary.path().join(name));
        files.write(&adapter, &shipped.start, None)?;
        let (begin, done) = (Instant::now(), Cell::new(0));
        let on_bytes = |bytes: usize, all: usize| {
            done.set(done.get() + bytes);
            let share = as_f64(done.get()) / as_f64(all.max(1));
            let left = duration(begin.elapsed().as_secs_f64() * (1.0 / share.max(1e-9) - 1.0));
            at_work(format!("making the {} file {:.0} %, {left} left", self.file_type.name(), 100.0 * share));
        };
        let imatrix = shipped.imatrix.as_ref();
        let options = GgufOptions { dtype: Some(shipped.file_type), imatrix, ..GgufOptions::default() };
        merge_gguf(&self.base, &adapter, &file, options, &on_bytes)?;
        let storage = Storage { residency: Residency::Memory, quantisation: None, ..self.storage };
        let model = load::load(&config, &Weights::open(&file, &config)?, storage, self.compute, &device)?;
        step.ship(model, Rounding { base: self.weights.clone(), shipped });
        Ok(step.round()?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use burn::tensor::Device;

    use super::*;
    use crate::config::{LoraConfig, OptimizerConfig, TrainConfig};
    use crate::data::batch::{Batch, Document, Target};
    use crate::lora::AdapterSet;
    use crate::model::Model;
    use crate::ops::linear::Matrix;
    use crate::save::export::{Imatrix, InputSquares, PromptForm};
    use crate::spec::ModelConfig;

    /// Blocks of 32 for most matrices and, 512 wide, of 256 for those behind the feed-forward's product.
    const BASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/quickstart/model");

    fn batch(first: u32) -> Batch {
        let target = |i: u32| Target { position: i as usize, token: first + 7 * (i + 1) };
        Batch {
            input_ids: (0..24).map(|i| first + 7 * i).collect(),
            row_lengths: vec![24],
            documents: vec![Document { start: 0, len: 24 }],
            targets: (0..23).map(target).collect(),
            ..Batch::default()
        }
    }

    fn plain(lora: &LoraConfig) -> TrainStep {
        let config = ModelConfig::from_model(Path::new(BASE)).unwrap();
        let (weights, device) = (Weights::open(Path::new(BASE), &config).unwrap(), Device::flex());
        let model = load::load(&config, &weights, Dtype::F32, Dtype::F32, &device).unwrap();
        let selection = lora.select(&config).unwrap();
        let adapters = AdapterSet::new(&config, &selection, lora.init_lora_weights, 0.1, 3, &device);
        TrainStep::new(model, adapters, &TrainConfig::default(), &OptimizerConfig::default(), None, 5)
    }

    fn take_step(step: &mut TrainStep, first: u32) {
        step.forward_backward(&batch(first));
        assert_eq!(step.update(1e-2).skipped, None);
        step.round().unwrap();
    }

    /// The bytes of all matrices of a model.
    fn bytes(model: &Model) -> Vec<Vec<u8>> {
        let matrices = model.blocks.iter().flat_map(|block| &block.linears).map(|linear| &linear.values);
        let head = Matrix::Dense(model.embed_tokens.clone());
        matrices.chain([&head]).flat_map(Matrix::parts).map(|part| part.to_vec()).collect()
    }

    fn shipping(file_type: FileType, folder: &Path) -> Shipping {
        let config = ModelConfig::from_model(Path::new(BASE)).unwrap();
        let weights = Weights::open(Path::new(BASE), &config).unwrap();
        let (base, folder) = (PathBuf::from(BASE), folder.to_owned());
        let (storage, compute) = (Dtype::F32.into(), Dtype::F32);
        Shipping { file_type, first_step: 2, base, weights, storage, compute, folder, begun: None }
    }

    /// Inputs some of which weigh more than others.
    fn imatrix(config: &ModelConfig) -> Imatrix {
        let sites =
            (0..config.num_layers()).flat_map(|layer| (0..config.blocks[layer].sites.len()).map(move |i| (layer, i)));
        let weighed = sites.map(|(layer, site)| {
            let sums = (0..config.blocks[layer].sites[site].shape[1]).map(|i| [0.1, 40.0, 3.0][i % 3]).collect();
            (format!("{}.weight", config.module_name(layer, site)), InputSquares { sums, num_tokens: 20 })
        });
        Imatrix { inputs: weighed.collect(), num_tokens: 20, num_chunks: 1, datasets: Vec::new() }
    }

    #[test]
    fn the_merged_file_is_the_model_that_was_trained_bit_for_bit_and_so_is_the_resumed_one() {
        let lora = LoraConfig { r: 4, ..LoraConfig::default() };
        let q2 = (FileType::Q2K, true);
        for ((file_type, is_searched), weighs) in
            [(q2, true), (q2, false), ((FileType::Q4, false), true), ((FileType::Nvfp4, false), false)]
        {
            let root = tempfile::tempdir().unwrap();
            let (base_model_name_or_path, prompt_form) = ("base".to_owned(), PromptForm::Raw);
            let files = AdapterFiles { lora: lora.clone(), base_model_name_or_path, prompt_form, tokenizer: None };
            let mut step = plain(&lora);
            take_step(&mut step, 100);
            let imatrix = weighs.then(|| imatrix(&step.model().config));
            let start = adapter_weights(step.adapters());
            let start = Shipped { file_type, start, imatrix: imatrix.clone() };
            shipping(file_type, root.path()).begin(start, &mut step, &files, &|_| ()).unwrap();
            assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "nothing is left of the first file");
            let before = bytes(step.model());
            (0..3).for_each(|i| take_step(&mut step, 200 + i));
            let trained = bytes(step.model());
            assert!(trained != before && trained.last() == before.last());

            let shipped = step.shipped().unwrap();
            let adapter = root.path().join("adapter");
            files.write(&adapter, &adapter_weights(step.adapters()), Some(shipped)).unwrap();
            let shipped = Shipped::read(&adapter).unwrap().unwrap();
            let written = |name: &str, start| {
                let file = root.path().join(name);
                let imatrix = shipped.imatrix.as_ref();
                let options = GgufOptions { dtype: Some(shipped.file_type), imatrix, start, ..GgufOptions::default() };
                merge_gguf(Path::new(BASE), &adapter, &file, options, &|_, _| ()).unwrap();
                let config = &step.model().config;
                let weights = Weights::open(&file, config).unwrap();
                load::load(config, &weights, Dtype::F32, Dtype::F32, &Device::flex()).unwrap()
            };
            let file = written("a.gguf", Some(&shipped.start));
            assert!(bytes(&file) == trained, "{file_type:?}");
            assert_eq!(shipped.imatrix, imatrix);
            // Scales that are searched for anew make another model.
            assert_eq!(bytes(&written("b.gguf", None)) != trained, is_searched, "{file_type:?}");
            let none = AdapterSet::none(file.config.num_layers());
            let config = (&TrainConfig::default(), &OptimizerConfig::default());
            let of_file = TrainStep::new(file, none, config.0, config.1, None, 5).eval_loss(&batch(300)).sum;
            assert_eq!(of_file.to_bits(), step.eval_loss(&batch(300)).sum.to_bits());

            let mut resumed = plain(&lora);
            let saved = crate::save::export::read_adapter(&adapter).unwrap();
            resumed.replace_adapters(saved.into_set(&adapter, &step.model().config, &Device::flex()).unwrap());
            shipping(file_type, root.path()).begin(shipped.clone(), &mut resumed, &files, &|_| ()).unwrap();
            assert!(bytes(resumed.model()) == trained, "{file_type:?}");
        }
    }
}
