//! How much the inputs of linear layers weigh: the means of their squares over the tokens of rows. A quantiser that knows them
//! rounds those weights well which are multiplied by large inputs (llama.cpp's "importance matrix").

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};

use crate::data::batch::Batch;
use crate::data::dataset::{Cursor, Dataset};
use crate::data::error::DataError;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::context::Watch;
use crate::save::export::{Imatrix, InputSquares};
use crate::spec::{Role, SiteId};
use crate::util::faults;

use super::step::TrainStep;

/// So many tokens tell inputs that weigh much from those that do not.
pub const NUM_TOKENS: usize = 1 << 14;

/// What the inputs of the layers of a model with its adapters weigh on rows that are trained on; `None` where `is_stopped`.
/// `on_tokens` gets how many tokens have been seen.
///
/// # Errors
/// A row that cannot be read.
pub fn imatrix(
    step: &TrainStep,
    data: &Dataset,
    is_stopped: &dyn Fn() -> bool,
    on_tokens: &dyn Fn(usize),
) -> Result<Option<Imatrix>, DataError> {
    let mut loader = data.loader(Cursor::default(), step.config().micro_batch_size)?;
    let mut importance = Importance::default();
    loop {
        let loaded = loader.next_batch_unless(is_stopped)?;
        let Some(loaded) = loaded.filter(|_| !is_stopped()) else { return Ok(None) };
        importance.see(step.model(), step.adapters(), &loaded.batch);
        on_tokens(importance.num_tokens);
        if loaded.last_of_epoch || importance.num_tokens >= NUM_TOKENS {
            break;
        }
    }
    let config = &step.model().config;
    let name = |(layer, site)| format!("{}.weight", config.module_name(layer, site));
    Ok(Some(Imatrix {
        inputs: importance.inputs().map(|(place, inputs)| (name(place), inputs)).collect(),
        num_tokens: importance.num_tokens,
        num_chunks: importance.num_batches,
        datasets: data.names_of_train_files(),
    }))
}

/// Sums over the tokens that were seen.
#[derive(Debug, Default)]
struct Importance {
    /// By block and layer.
    sums: BTreeMap<(usize, SiteId), Sums>,
    num_tokens: usize,
    num_batches: usize,
}

/// Sums over the tokens of one layer.
#[derive(Debug)]
struct Sums {
    /// Of the squares of each input.
    squares: Vec<f64>,
    /// Of an expert, those that were sent to it.
    num_tokens: usize,
}

impl Sums {
    fn none(width: usize) -> Self {
        Self { squares: vec![0.0; width], num_tokens: 0 }
    }
}

impl Importance {
    /// Passes the texts of a micro-batch through the model with its adapters. Where rows are padded, experts see padding, too.
    ///
    /// # Panics
    /// As [`faults::read`].
    fn see(&mut self, model: &Model, adapters: &AdapterSet, batch: &Batch) {
        // No documents share tokens, so that each token is there.
        let batch = &*model.arranged(batch, true);
        let of_texts = batch.documents.iter().flat_map(|document| document.start..document.start + document.len);
        let tokens: Vec<u32> = of_texts.filter_map(|token| u32::try_from(token).ok()).collect();
        self.num_tokens += tokens.len();
        self.num_batches += 1;
        let tokens = model.token_ids(&tokens);
        let mut embedded = model.embed(&model.tokens(batch), adapters, None);
        for (layer, block) in model.walk(0..model.blocks.len()) {
            let sites = &model.config.blocks[layer].sites;
            let quantised = sites.iter().enumerate().filter(|(_, site)| site.role != Role::Router);
            let watch = Watch::new(quantised.clone().map(|(id, _)| id).collect());
            embedded.through(model, (layer, &block), adapters, Some(&watch));
            // Some experts may be given no token.
            for (id, site) in quantised.filter(|(_, site)| !site.role.is_plain()) {
                self.sums.entry((layer, id)).or_insert_with(|| Sums::none(site.shape[1]));
            }
            for (site, x) in watch.seen() {
                // The tokens of an expert are those that it was given.
                let is_linear = sites[site].role.is_plain();
                let x: Tensor<2> = if is_linear { x.select(0, tokens.clone()) } else { x };
                let x = x.cast(DType::F32);
                let num_tokens = x.dims()[0];
                let squares = faults::read((x.clone() * x).sum_dim(0), "the input of a layer");
                let sums = self.sums.entry((layer, site)).or_insert_with(|| Sums::none(squares.len()));
                sums.num_tokens += num_tokens;
                sums.squares.iter_mut().zip(&squares).for_each(|(sum, square)| *sum += f64::from(*square));
            }
        }
    }

    /// The squares of the inputs, by block and layer.
    fn inputs(&self) -> impl Iterator<Item = ((usize, SiteId), InputSquares)> {
        self.sums.iter().map(|(place, Sums { squares, num_tokens })| {
            #[expect(clippy::cast_possible_truncation, reason = "weights of errors")]
            let sums = squares.iter().map(|sum| *sum as f32).collect();
            (*place, InputSquares { sums, num_tokens: *num_tokens })
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::data::batch::Document;
    use crate::device::Dtype;
    use crate::model::load;
    use crate::model::weights::{Weights, fixture};
    use crate::spec::ModelConfig;

    fn batch(ids: std::ops::Range<u32>) -> Batch {
        let len = ids.len();
        let documents = vec![Document { start: 0, len: 3 }, Document { start: 3, len: len - 3 }];
        Batch { input_ids: ids.collect(), row_lengths: vec![len], documents, ..Batch::default() }
    }

    #[test]
    fn inputs_are_weighed_over_all_tokens_and_those_of_an_expert_over_its_own() {
        let json = include_str!("../../tests/golden/qwen3_moe/config.json");
        let config = ModelConfig::from_json(json).unwrap();
        let (folder, tensors) = (tempfile::tempdir().unwrap(), fixture::random_tensors(&config));
        fixture::write_tensors(&folder.path().join("model.safetensors"), &tensors, Dtype::F32);
        std::fs::write(folder.path().join("config.json"), json).unwrap();
        let weights = Weights::open(folder.path(), &config).unwrap();
        let model = load::load(&config, &weights, Dtype::F32, Dtype::F32, &Device::flex()).unwrap();
        let mut importance = Importance::default();
        for ids in [10..20, 30..37] {
            importance.see(&model, &AdapterSet::none(config.num_layers()), &batch(ids));
        }
        assert_eq!((importance.num_tokens, importance.num_batches), (17, 2));
        let inputs: BTreeMap<_, _> = importance.inputs().collect();
        let of = |layer: usize, end: &str| {
            let sites = config.blocks[layer].sites.iter().enumerate();
            let found: Vec<_> = sites.filter(|(_, site)| site.name.ends_with(end)).collect();
            found.into_iter().map(|(id, site)| (inputs.get(&(layer, id)), site)).collect::<Vec<_>>()
        };

        // The first norm of the embeddings, by its definition.
        let (embedding, norm) =
            (&tensors["model.embed_tokens.weight"].1, &tensors["model.layers.0.input_layernorm.weight"].1);
        let mut expected = [0f64; 64];
        for token in (10..20).chain(30..37) {
            let x: Vec<f64> = embedding[64 * token..][..64].iter().map(|x| f64::from(*x)).collect();
            let mean_square = x.iter().map(|x| x * x).sum::<f64>() / 64.0 + 1e-6;
            for ((sum, x), weight) in expected.iter_mut().zip(&x).zip(norm) {
                *sum += x * x / mean_square * f64::from(*weight).powi(2);
            }
        }
        for end in ["q_proj", "k_proj", "v_proj"] {
            let found = of(0, end)[0].0.unwrap();
            assert_eq!(found.num_tokens, 17);
            assert!(found.sums.iter().zip(expected).all(|(found, sum)| (f64::from(*found) - sum).abs() < 1e-5 * sum));
        }

        for layer in 0..3 {
            let experts = of(layer, "down_proj");
            assert_eq!(experts.len(), 8);
            let counts: Vec<usize> = experts.iter().map(|(found, _)| found.unwrap().num_tokens).collect();
            assert_eq!(counts.iter().sum::<usize>(), 3 * 17, "{counts:?}");
            for ((gate, site), down) in of(layer, "gate_proj").into_iter().zip(counts) {
                let (gate, is_empty) = (gate.unwrap(), down == 0);
                assert_eq!((gate.num_tokens, gate.sums.len()), (down, site.shape[1]));
                assert_eq!(gate.sums.iter().all(|sum| *sum == 0.0), is_empty);
            }
            assert!(of(layer, "mlp.gate").iter().all(|(router, _)| router.is_none()));
        }
    }
}
