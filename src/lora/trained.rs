//! What is trained: one map of named tensors, of the adapters and of those that are trained in full: PEFT's `modules_to_save`,
//! rows of tokens, a head that scores.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;

use crate::config::LoraConfig;
use crate::ops::linear::Weight;
use crate::ops::token_rows::TokenRows;
use crate::spec::{ModelConfig, NormKind, SiteId, in_layer, short_name};

/// Why an embedding stays as it is.
pub(super) const NORMED_EMBEDDING: &str = "embeddings of this model are normed, and stay as they are here";
/// The same of others.
pub(super) const OTHER_EMBEDDING: &str =
    "the embedding of this model has another name in PEFT's files, which are written here for `embed_tokens` alone";

/// A tensor that is trained. In this order gradients are summed, parameters updated and states written.
///
/// Each is `[rows, columns]`; what is stacked, such as the A of several experts, lies row below row under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorId {
    /// Of the adapter of a linear layer: its layer, its place there, and which of [`Matrices::NAMES`](super::Matrices::NAMES).
    Adapter(usize, SiteId, &'static str),
    /// One that is trained in full.
    Full(FullTensor),
}

impl From<FullTensor> for TensorId {
    fn from(full: FullTensor) -> Self {
        Self::Full(full)
    }
}

impl TensorId {
    /// The block of an adapter.
    #[must_use]
    pub fn block(self) -> Option<usize> {
        match self {
            Self::Adapter(layer, ..) => Some(layer),
            Self::Full(_) => None,
        }
    }

    /// The first layer whose backward one of these needs; the number of layers where none does.
    pub(super) fn first_trained(ids: impl Iterator<Item = Self>, num_layers: usize) -> usize {
        let first = |id| match id {
            Self::Adapter(layer, ..) | Self::Full(FullTensor::BlockNorm(layer, _)) => Some(layer),
            Self::Full(full) => full.embeds().then_some(0),
        };
        ids.filter_map(first).min().unwrap_or(num_layers)
    }
}

/// A tensor that is trained itself, not by an update of low rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FullTensor {
    /// The head that scores, `[1, hidden_size]`.
    Score,
    /// The rows of the embedding of some tokens, `[tokens, hidden_size]`.
    Tokens,
    /// The embedding, apart from the head.
    Embedding,
    /// The embedding that is the head too.
    Tied,
    /// The head, apart from the embedding.
    Head,
    /// The norm before the head, `[1, hidden_size]` as its file has it: its name.
    Norm(&'static str),
    /// A norm around a sublayer, likewise: its layer, and its name within it.
    BlockNorm(usize, &'static str),
}

impl FullTensor {
    /// The module's name, as a language model alone has it.
    #[must_use]
    pub fn module(self) -> String {
        match self {
            Self::Score => "score".to_owned(),
            Self::Tokens | Self::Embedding | Self::Tied => "model.embed_tokens".to_owned(),
            Self::Head => "lm_head".to_owned(),
            Self::Norm(name) => name.to_owned(),
            Self::BlockNorm(layer, name) => in_layer(layer, name),
        }
    }

    /// Its name, as PEFT has it behind the model's.
    #[must_use]
    pub fn name(self) -> String {
        let part = if self == Self::Tokens { "token_adapter.trainable_tokens_delta" } else { "weight" };
        format!("{}.{part}", self.module())
    }

    /// Whether it is a module of the model, all of it: one of `modules_to_save`.
    #[must_use]
    pub fn is_module(self) -> bool {
        !matches!(self, Self::Score | Self::Tokens)
    }

    /// Whether it gives tokens their embeddings.
    #[must_use]
    pub fn embeds(self) -> bool {
        matches!(self, Self::Tokens | Self::Embedding | Self::Tied)
    }

    /// Whether it is a vector.
    #[must_use]
    pub fn is_norm(self) -> bool {
        matches!(self, Self::Norm(_) | Self::BlockNorm(..))
    }

    /// Whether it is the head of a model that writes.
    #[must_use]
    pub fn is_head(self) -> bool {
        matches!(self, Self::Tied | Self::Head)
    }
}

/// The tensors that are trained in full, in `f32`.
#[derive(Clone, Debug, Default)]
pub struct FullTensors {
    /// Those that are trained.
    values: BTreeMap<FullTensor, Tensor<2>>,
    /// The tokens of the rows among them, each once.
    token_ids: Arc<[u32]>,
    /// Those that lie beside a saved adapter in place of the base's and stay as they are.
    beside: BTreeMap<FullTensor, Tensor<2>>,
    /// The head among them in the type of the computation.
    head: OnceLock<Weight>,
}

impl FullTensors {
    /// These; rows of tokens are those of `token_ids`, and what is `beside` stays as it is.
    #[must_use]
    pub fn new(
        values: BTreeMap<FullTensor, Tensor<2>>,
        token_ids: &[usize],
        beside: BTreeMap<FullTensor, Tensor<2>>,
    ) -> Self {
        Self { values, token_ids: as_u32(token_ids), beside, head: OnceLock::new() }
    }

    /// One of them, trained or beside.
    #[must_use]
    pub fn get(&self, full: FullTensor) -> Option<&Tensor<2>> {
        self.values.get(&full).or_else(|| self.beside.get(&full))
    }

    /// Trains one, which starts as it is here, or else as `make` has it.
    pub fn start(&mut self, full: FullTensor, make: impl FnOnce() -> Tensor<2>) {
        self.head = OnceLock::new();
        let beside = self.beside.get(&full);
        self.values.entry(full).or_insert_with(|| beside.cloned().unwrap_or_else(make));
    }

    /// [`start`](Self::start) of rows of these tokens.
    pub fn start_tokens(&mut self, ids: &[usize], make: impl FnOnce(&[u32]) -> Tensor<2>) {
        self.token_ids = as_u32(ids);
        let ids = self.token_ids.clone();
        self.start(FullTensor::Tokens, || make(&ids));
    }

    /// The rows of tokens among them.
    #[must_use]
    pub fn tokens(&self) -> Option<TokenRows> {
        let values = self.get(FullTensor::Tokens)?.clone();
        Some(TokenRows { ids: self.token_ids.clone(), values })
    }

    /// Whether modules of the model have others in their place.
    #[must_use]
    pub fn replaces_modules(&self) -> bool {
        self.values.keys().any(|full| full.is_module()) || !self.beside.is_empty()
    }

    /// Those that stay as they are.
    pub fn beside(&self) -> impl Iterator<Item = (FullTensor, &Tensor<2>)> {
        self.beside.iter().map(|(full, values)| (*full, values))
    }

    /// Every one that is trained.
    pub fn iter(&self) -> impl Iterator<Item = (FullTensor, &Tensor<2>)> {
        self.values.iter().map(|(full, values)| (*full, values))
    }

    /// The same, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (FullTensor, &mut Tensor<2>)> {
        self.head = OnceLock::new();
        self.values.iter_mut().map(|(full, values)| (*full, values))
    }

    /// The head among them; `make` gives it the type of the computation.
    pub(crate) fn head(&self, make: impl FnOnce(&Tensor<2>) -> Weight) -> Option<&Weight> {
        let values = self.get(FullTensor::Head).or_else(|| self.get(FullTensor::Tied))?;
        Some(self.head.get_or_init(|| make(values)))
    }
}

fn as_u32(ids: &[usize]) -> Arc<[u32]> {
    ids.iter().map(|&id| u32::try_from(id).unwrap_or(u32::MAX)).collect()
}

impl LoraConfig {
    /// Whether the embedding or the head is trained as a whole.
    #[must_use]
    pub fn trains_tables(&self, config: &ModelConfig) -> bool {
        let is_table = |full: &FullTensor| full.embeds() || full.is_head();
        self.modules_to_save.is_some() && self.modules(config).is_ok_and(|modules| modules.keys().any(is_table))
    }

    /// The modules that `modules_to_save` names in a model, with their shapes. As in PEFT, a name is the end of a module's
    /// name, also behind another sign than a dot.
    ///
    /// # Errors
    /// Why some cannot be trained.
    pub(super) fn modules(&self, config: &ModelConfig) -> Result<BTreeMap<FullTensor, [usize; 2]>, Vec<String>> {
        let (mut found, mut problems) = (BTreeMap::new(), Vec::new());
        let all = all_modules(config);
        if let Some(names) = self.modules_to_save.as_ref().filter(|names| names.len() > all.len()) {
            return Err(vec![format!("{} entries, and the model has {} modules", names.len(), all.len())]);
        }
        for name in self.modules_to_save.iter().flatten() {
            let hits = || all.iter().filter(|(module, _)| module.ends_with(&**name));
            if hits().next().is_none() {
                let trained = all.iter().filter(|(_, full)| full.is_some());
                let names: BTreeSet<_> = trained.map(|(module, _)| format!("`{}`", short_name(module))).collect();
                let names = names.into_iter().collect::<Vec<_>>().join(", ");
                problems
                    .push(format!("no module with weights of its own has a name that ends in `{name}`: take {names}"));
            }
            // Every layer has one: the first says it.
            if let Some((module, _)) = hits().find(|(_, full)| full.is_none()) {
                let norms = match config.norm_kind {
                    NormKind::Rms => ", the head and the norms around attention and feed-forward layers",
                    NormKind::Layer | NormKind::LayerWithoutBias => " and the head (LayerNorms stay frozen)",
                };
                problems
                    .push(format!("`{name}` names `{module}`, and only the embedding{norms} are trained as a whole"));
            }
            found.extend(hits().filter_map(|(_, full)| *full));
        }
        let embeds = found.keys().any(|full| full.embeds());
        if embeds && config.layer_inputs.is_some() {
            problems.push("every layer of this model has embeddings of its own, which stay as they are".to_owned());
        }
        if embeds && config.family().is_muse() {
            problems.push(NORMED_EMBEDDING.to_owned());
        }
        if embeds && config.has_other_embedding() {
            problems.push(OTHER_EMBEDDING.to_owned());
        }
        if found.contains_key(&FullTensor::Head) && config.family().has_head_bias {
            problems
                .push("the head of this model has a bias, which stays frozen here and PEFT would train too".to_owned());
        }
        if embeds && self.trainable_token_indices.is_some() {
            problems.push("the whole embedding, beside its rows in `trainable_token_indices`".to_owned());
        }
        problems.sort();
        problems.dedup();
        if problems.is_empty() { Ok(found) } else { Err(problems) }
    }
}

/// What can be trained of a module, and its shape.
type Found = (FullTensor, [usize; 2]);

/// The modules of a model with a weight, by the names that they have in it, and what can be trained of them.
fn all_modules(config: &ModelConfig) -> Vec<(String, Option<Found>)> {
    let ModelConfig { vocab_size, hidden_size, .. } = *config;
    let tied = |otherwise| if config.tie_word_embeddings { FullTensor::Tied } else { otherwise };
    let (table, norm) = ([vocab_size, hidden_size], [1, hidden_size]);
    let mut trained: BTreeMap<String, Found> = BTreeMap::from([
        (FullTensor::Embedding.module(), (tied(FullTensor::Embedding), table)),
        (FullTensor::Head.module(), (tied(FullTensor::Head), table)),
        (config.last_norm.to_owned(), (FullTensor::Norm(config.last_norm), norm)),
    ]);
    let is_rms = config.norm_kind == NormKind::Rms;
    if !is_rms {
        trained.remove(config.last_norm);
    }
    let blocks = config.blocks.iter().enumerate().filter(|_| is_rms);
    for (layer, block) in blocks {
        let around = block.sublayers.iter().flat_map(|sublayer| [sublayer.norm_before, sublayer.norm_after]);
        trained.extend(around.flatten().map(|name| {
            let full = FullTensor::BlockNorm(layer, name);
            (full.module(), (full, norm))
        }));
    }
    let weights = config.expected_tensors().into_iter().map(|(name, _)| name);
    let modules = weights.filter_map(|name| name.strip_suffix(".weight").map(str::to_owned));
    let tied_head = config.tie_word_embeddings.then(|| FullTensor::Head.module());
    modules.chain(tied_head).map(|module| (config.module_of(&module), trained.get(&module).copied())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::fixture::tiny_with;

    fn modules(names: &[&str], tied: bool) -> Result<Vec<FullTensor>, String> {
        let names = names.iter().map(ToString::to_string).collect();
        let lora = LoraConfig { modules_to_save: Some(names), ..LoraConfig::default() };
        let config = ModelConfig { tie_word_embeddings: tied, ..tiny_with(&[("num_hidden_layers", 1)]) };
        let found = lora.modules(&config).map(|modules| modules.into_keys().collect());
        found.map_err(|errors| errors.join("\n"))
    }

    #[test]
    fn names_are_the_ends_of_modules_and_a_tied_head_is_the_embedding() {
        let around = ["input_layernorm", "post_attention_layernorm"].map(|name| FullTensor::BlockNorm(0, name));
        assert_eq!(
            modules(&["lm_head", "model.norm"], false).unwrap(),
            [FullTensor::Head, FullTensor::Norm("model.norm")]
        );
        assert_eq!(modules(&["embed_tokens", "lm_head"], false).unwrap(), [FullTensor::Embedding, FullTensor::Head]);
        for names in [&["embed_tokens", "lm_head"][..], &["lm_head"], &["model.embed_tokens"]] {
            assert_eq!(modules(names, true).unwrap(), [FullTensor::Tied]);
        }
        assert_eq!(modules(&["norm"], true).unwrap(), [FullTensor::Norm("model.norm"), around[0], around[1]]);
    }

    #[test]
    fn a_head_with_a_bias_is_not_trained() {
        let lora = LoraConfig { modules_to_save: Some(vec!["lm_head".to_owned()]), ..LoraConfig::default() };
        let phi = ModelConfig { model_type: "phi".to_owned(), ..tiny_with(&[("num_hidden_layers", 1)]) };
        let errors = lora.modules(&ModelConfig { tie_word_embeddings: false, ..phi }).unwrap_err();
        assert!(errors[0].contains("the head of this model has a bias"), "{errors:?}");
    }

    #[test]
    fn what_is_no_such_module_is_named() {
        let error = modules(&["q_proj", "wte"], true).unwrap_err();
        assert!(error.contains("`q_proj` names `model.layers.0.self_attn.q_proj`"), "{error}");
        let there_are = "take `embed_tokens`, `input_layernorm`, `lm_head`, `norm`, `post_attention_layernorm`";
        assert!(
            error.contains("no module with weights of its own has a name that ends in `wte`")
                && error.contains(there_are),
            "{error}"
        );
    }
}
