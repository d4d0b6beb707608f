//! Training in the form that is served: from some step on, the model computes with the weights that a quantised file will have, and
//! the adapter learns to make up for their rounding.
//!
//! Every adapted matrix is `Q(W + s B A)`, encoded once an update; gradients go straight through `Q` (Bengio et al., 2013). All other
//! weights are as that file has them, too. Blocks whose scales are searched for keep those of the first step: codes alone are chosen
//! anew, and `merge` writes the file with the same scales, so that it is the model that was trained and evaluated, bit for bit.

use std::path::PathBuf;

use crate::config::{FileType, Residency};
use crate::device::Dtype;
use crate::model::weights::Weights;
use crate::model::{Storage, load};
use crate::save::export::{AdapterWeights, ExportError, GgufOptions, Shipped, adapter_weights, merge_gguf};

use super::rounding::Rounding;
use super::saver::AdapterFiles;
use super::step::TrainStep;

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
    /// The adapter as it was at the first step, where a resumed run is beyond that.
    pub start: Option<AdapterWeights>,
}

impl Shipping {
    /// Puts the model as the file has it in the place of that of the step, which may not be used where this fails.
    ///
    /// # Errors
    /// What llama.cpp has no place for; a disk that takes no file of that size.
    pub(super) fn begin(&mut self, step: &mut TrainStep, files: &AdapterFiles) -> Result<(), ExportError> {
        let start = self.start.take().unwrap_or_else(|| adapter_weights(step.adapters()));
        let (config, device) = (step.model().config.clone(), step.model().device());
        // The weights of the first part make room.
        step.leave_model();
        // A fixed name: what a killed start left behind goes now.
        drop(std::fs::remove_dir_all(self.folder.join(TEMPORARY)));
        let temporary = tempfile::Builder::new().prefix(TEMPORARY).rand_bytes(0).tempdir_in(&self.folder);
        let temporary = temporary.map_err(ExportError::io("write to", &self.folder))?;
        let [adapter, file] = ["adapter", "model.gguf"].map(|name| temporary.path().join(name));
        files.write(&adapter, &start, None)?;
        let options = GgufOptions { dtype: Some(self.file_type), ..GgufOptions::default() };
        merge_gguf(&self.base, &adapter, &file, options, &|_, _| ())?;
        let storage = Storage { residency: Residency::Memory, quantisation: None, ..self.storage };
        let model = load::load(&config, &Weights::open(&file, &config)?, storage, self.compute, &device)?;
        step.ship(
            model,
            Rounding { base: self.weights.clone(), shipped: Shipped { file_type: self.file_type, start } },
        );
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
    use crate::save::export::PromptForm;
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

    fn shipping(file_type: FileType, folder: &Path, start: Option<AdapterWeights>) -> Shipping {
        let config = ModelConfig::from_model(Path::new(BASE)).unwrap();
        let weights = Weights::open(Path::new(BASE), &config).unwrap();
        let (base, folder) = (PathBuf::from(BASE), folder.to_owned());
        let (storage, compute) = (Dtype::F32.into(), Dtype::F32);
        Shipping { file_type, first_step: 2, base, weights, storage, compute, folder, start }
    }

    #[test]
    fn the_merged_file_is_the_model_that_was_trained_bit_for_bit_and_so_is_the_resumed_one() {
        let lora = LoraConfig { r: 4, ..LoraConfig::default() };
        for (file_type, is_searched) in [(FileType::Q2K, true), (FileType::Q4, false), (FileType::Nvfp4, false)] {
            let root = tempfile::tempdir().unwrap();
            let (base_model_name_or_path, prompt_form) = ("base".to_owned(), PromptForm::Raw);
            let files = AdapterFiles { lora: lora.clone(), base_model_name_or_path, prompt_form, tokenizer: None };
            let mut step = plain(&lora);
            take_step(&mut step, 100);
            shipping(file_type, root.path(), None).begin(&mut step, &files).unwrap();
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
                let options = GgufOptions { dtype: Some(shipped.file_type), start, ..GgufOptions::default() };
                merge_gguf(Path::new(BASE), &adapter, &file, options, &|_, _| ()).unwrap();
                let config = &step.model().config;
                let weights = Weights::open(&file, config).unwrap();
                load::load(config, &weights, Dtype::F32, Dtype::F32, &Device::flex()).unwrap()
            };
            let file = written("a.gguf", Some(&shipped.start));
            assert!(bytes(&file) == trained, "{file_type:?}");
            // Scales that are searched for anew make another model.
            assert_eq!(bytes(&written("b.gguf", None)) != trained, is_searched, "{file_type:?}");
            let none = AdapterSet::none(file.config.num_layers());
            let config = (&TrainConfig::default(), &OptimizerConfig::default());
            let of_file = TrainStep::new(file, none, config.0, config.1, None, 5).eval_loss(&batch(300)).sum;
            assert_eq!(of_file.to_bits(), step.eval_loss(&batch(300)).sum.to_bits());

            let mut resumed = plain(&lora);
            let saved = crate::save::export::read_adapter(&adapter).unwrap();
            resumed.replace_adapters(saved.into_set(&adapter, &step.model().config, &Device::flex()).unwrap());
            shipping(file_type, root.path(), Some(shipped.start.clone())).begin(&mut resumed, &files).unwrap();
            assert!(bytes(resumed.model()) == trained, "{file_type:?}");
        }
    }
}
