//! The adapters of a model: its trained weights.

use burn::tensor::{DType, Device, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::kind::AdapterKind;
use super::matrices::{Applied, Matrices};
use super::row_norms::RowNorms;
use super::start::{normal, start};
use super::targets::{AdapterShape, Selection};
use super::trained::{FullTensor, FullTensors, TensorId};
use crate::config::InitLoraWeights;
use crate::ops::dropout::{Dropout, mix};
use crate::ops::host;
use crate::ops::kernels::{Place, plain};
use crate::ops::linear::Weight;
use crate::ops::place::place_of;
use crate::ops::product::F32Products;
use crate::spec::{ExpertForm, ModelConfig, PerSite, SiteId};

/// The adapter of one linear layer.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Name of the linear layer within the model.
    pub module: String,
    /// Its kind.
    pub kind: AdapterKind,
    /// Its matrices, in `f32`.
    pub matrices: Matrices<Tensor<2>>,
    /// Scale of the update.
    pub scale: f64,
    /// Experts whose matrices are one, row below row, of the first of which the module is; `None` on a layer that is no expert's.
    pub num_experts: Option<usize>,
    /// Norms of the rows of its weight, where the kind needs them.
    pub norms: RowNorms,
}

impl Adapter {
    /// What is applied to a layer's input.
    #[must_use]
    pub fn applied(&self, dropout: Option<Dropout>) -> Applied<'_> {
        Applied { matrices: self.matrices.as_ref(), scale: self.scale, dropout, norms: &self.norms }
    }

    /// The same, to be changed.
    fn before_change(&mut self) -> &mut Self {
        self.norms = std::mem::take(&mut self.norms).before_change();
        self
    }

    /// That of one of its experts.
    #[must_use]
    pub fn of_expert(&self, expert: usize) -> Self {
        let num_experts = self.num_experts.unwrap_or(1);
        let matrices = self.matrices.as_ref().map(|all| {
            let num_rows = all.dims()[0] / num_experts;
            all.clone().narrow(0, expert * num_rows, num_rows)
        });
        let module = self.module.clone();
        Self { module, matrices, num_experts: None, norms: RowNorms::default(), ..*self }
    }

    /// Gives new magnitudes, if it has some, the norms of the weight's rows: the update is zero, or taken out of the weight.
    pub fn start_magnitude(&mut self, weight: &Weight) {
        let norms = &self.norms;
        self.matrices.magnitude.iter_mut().for_each(|magnitude| *magnitude = norms.of_weight(weight));
    }
}

/// The adapters of one block.
pub type BlockAdapters = PerSite<Adapter>;

/// The adapters of a model.
#[derive(Clone, Debug)]
pub struct AdapterSet {
    /// By layer.
    pub blocks: Vec<BlockAdapters>,
    /// Dropout on the input of every A while training, in `[0, 1)`.
    pub dropout: f64,
    /// What is trained in full, beside the adapters.
    pub full: FullTensors,
    /// In which form a file has those of experts.
    pub expert_form: ExpertForm,
}

impl AdapterSet {
    /// New adapters from `seed`, drawn one after the other. Magnitudes [start](crate::model::Model::start_magnitudes) with the model.
    #[must_use]
    pub fn new(
        config: &ModelConfig,
        selection: &Selection,
        init: InitLoraWeights,
        dropout: f64,
        seed: u64,
        device: &Device,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let blocks = selection.shapes.iter().enumerate().map(|(layer, shapes)| {
            let new = |(&site, shape): (&SiteId, &AdapterShape)| {
                let matrices = start(init, shape.shapes(config.blocks[layer].sites[site].shape), &mut rng, device);
                let module = config.module_name(layer, site);
                let AdapterShape { kind, scale, num_experts, .. } = *shape;
                (site, Adapter { module, kind, matrices, scale, num_experts, norms: RowNorms::default() })
            };
            shapes.iter().map(new).collect()
        });
        let (full, expert_form) = (FullTensors::default(), config.expert_form());
        Self { blocks: blocks.collect(), dropout, full, expert_form }
    }

    /// No adapters: the base model.
    #[must_use]
    pub fn none(num_layers: usize) -> Self {
        let (full, expert_form) = (FullTensors::default(), ExpertForm::default());
        Self { blocks: vec![BlockAdapters::new(); num_layers], dropout: 0.0, full, expert_form }
    }

    /// The same with a head that scores: its own, or a new one from `seed`, drawn as transformers does.
    #[must_use]
    pub fn with_score(mut self, hidden_size: usize, seed: u64, device: &Device) -> Self {
        const STANDARD_DEVIATION: f32 = 0.02;
        self.full.start(FullTensor::Score, || {
            let mut rng = ChaCha8Rng::seed_from_u64(mix(seed));
            let values = (0..hidden_size).map(|_| STANDARD_DEVIATION * normal(&mut rng)).collect();
            host::tensor(values, [1, hidden_size], device)
        });
        self
    }

    /// The head of a model that scores texts, `[1, hidden_size]`.
    #[must_use]
    pub fn score(&self) -> Option<&Tensor<2>> {
        self.full.get(FullTensor::Score)
    }

    /// Every tensor that is trained, in the order of their ids.
    pub fn tensors(&self) -> impl Iterator<Item = (TensorId, &Tensor<2>)> {
        let of_adapters =
            self.by_site().flat_map(|((layer, site), adapter)| adapter.matrices.as_ref().tensors(layer, site));
        of_adapters.chain(self.full.iter().map(|(full, values)| (full.into(), values)))
    }

    /// The same, to be changed.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = (TensorId, &mut Tensor<2>)> {
        let of_blocks = self.blocks.iter_mut().enumerate().flat_map(|(layer, block)| {
            let adapters = block.iter_mut();
            adapters.flat_map(move |(&site, adapter)| adapter.before_change().matrices.as_mut().tensors(layer, site))
        });
        of_blocks.chain(self.full.iter_mut().map(|(full, values)| (full.into(), values)))
    }

    /// The name of one of these tensors in the file of the optimizer's states.
    #[must_use]
    pub fn name(&self, id: TensorId) -> String {
        match id {
            TensorId::Adapter(layer, site, matrix) => format!("{}.{matrix}", self.blocks[layer][&site].module),
            TensorId::Full(full) => full.name(),
        }
    }

    /// Number of matrices that are one of these tensors, row below row.
    #[must_use]
    pub fn num_stacked(&self, id: TensorId) -> usize {
        match id {
            TensorId::Adapter(layer, site, _) => self.blocks[layer][&site].num_experts.unwrap_or(1),
            TensorId::Full(_) => 1,
        }
    }

    /// Whether embeddings are trained.
    #[must_use]
    pub fn trains_embeddings(&self) -> bool {
        self.full.iter().any(|(full, _)| full.embeds())
    }

    /// Whether experts have adapters.
    #[must_use]
    pub fn adapts_experts(&self) -> bool {
        self.iter().any(|adapter| adapter.num_experts.is_some())
    }

    /// The first layer whose backward something needs; the number of layers where nothing does.
    #[must_use]
    pub fn first_trained(&self) -> usize {
        TensorId::first_trained(self.tensors().map(|(id, _)| id), self.blocks.len())
    }

    /// Where the optimizer runs: the matrices are in `f32`, whatever the type of the activations.
    #[must_use]
    pub fn place(&self) -> Place {
        let first = self.iter().next().map(|adapter| adapter.matrices.a.device());
        first.map_or_else(|| plain(F32Products::OfDevice), |device| place_of(&device, DType::F32))
    }

    /// Every adapter, in the order of the forward pass.
    pub fn iter(&self) -> impl Iterator<Item = &Adapter> {
        self.blocks.iter().flat_map(BlockAdapters::values)
    }

    /// Every adapter with its layer and site, in the order of the forward pass.
    pub fn by_site(&self) -> impl Iterator<Item = ((usize, SiteId), &Adapter)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.flat_map(|(layer, block)| block.iter().map(move |(&site, adapter)| ((layer, site), adapter)))
    }

    /// Every adapter, mutable, in the order of [`iter`](Self::iter).
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Adapter> {
        self.blocks.iter_mut().flat_map(BlockAdapters::values_mut).map(Adapter::before_change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoraConfig;

    fn set(init: InitLoraWeights, seed: u64) -> AdapterSet {
        let selection = LoraConfig::default().select(&config()).unwrap();
        AdapterSet::new(&config(), &selection, init, 0.0, seed, &Device::flex())
    }

    /// Every linear layer has 400 inputs and outputs.
    fn config() -> ModelConfig {
        ModelConfig::from_json(
            r#"{"model_type": "llama", "vocab_size": 9, "hidden_size": 400, "intermediate_size": 400,
            "num_hidden_layers": 2, "num_attention_heads": 4}"#,
        )
        .unwrap()
    }

    #[test]
    fn a_is_uniform_within_one_over_root_in_and_b_is_zero() {
        let set = set(InitLoraWeights::Kaiming, 7);
        for adapter in set.iter() {
            let a = adapter.matrices.a.to_data().try_to_vec::<f32>().unwrap();
            let largest = a.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            assert!((0.049..=0.05).contains(&largest), "bound is 1/20, largest is {largest}");
            let variance = a.iter().map(|v| v * v).sum::<f32>() / 3200.0;
            assert!((variance / (0.05 * 0.05 / 3.0) - 1.0).abs() < 0.1, "variance {variance}");
            assert!(adapter.matrices.b.to_data().try_to_vec::<f32>().unwrap().iter().all(|&b| b == 0.0));
        }
        assert_eq!(set.tensors().map(|(_, values)| values.shape().num_elements()).sum::<usize>(), 14 * 8 * 800);
    }

    #[test]
    fn tensors_are_in_the_order_of_their_ids_and_keep_the_names_of_their_modules() {
        let lora = LoraConfig { use_dora: true, ..LoraConfig::default() };
        let selection = lora.select(&config()).unwrap();
        let mut set = AdapterSet::new(&config(), &selection, InitLoraWeights::Kaiming, 0.0, 7, &Device::flex());
        for full in [FullTensor::BlockNorm(0, "input_layernorm"), FullTensor::Head, FullTensor::Score] {
            set.full.start(full, || Tensor::zeros([1, 400], &Device::flex()));
        }
        let ids: Vec<_> = set.tensors().map(|(id, _)| id).collect();
        assert!(ids.len() == 14 * 3 + 3 && ids.is_sorted());
        assert!(set.tensors_mut().map(|(id, _)| id).eq(ids.iter().copied()));
        let names = [0, 41, 42, 43, 44].map(|at| set.name(ids[at]));
        assert_eq!(
            names[..2],
            ["model.layers.0.self_attn.q_proj.lora_A", "model.layers.1.mlp.down_proj.lora_magnitude_vector"]
        );
        assert_eq!(names[2..], ["score.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"]);
    }

    #[test]
    fn a_seed_names_the_adapters() {
        let first = |set: &AdapterSet| set.iter().next().map(|a| a.matrices.a.to_data()).unwrap();
        assert_eq!(first(&set(InitLoraWeights::Gaussian, 1)), first(&set(InitLoraWeights::Gaussian, 1)));
        assert_ne!(first(&set(InitLoraWeights::Gaussian, 1)), first(&set(InitLoraWeights::Gaussian, 2)));
    }
}
