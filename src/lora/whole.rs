//! What is trained as a whole, beside the adapters: PEFT's `modules_to_save`, rows of tokens, a head that scores.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use burn::tensor::Tensor;

use crate::config::LoraConfig;
use crate::ops::linear::Weight;
use crate::spec::{ModelConfig, NormKind, in_layer, short_name};

/// A weight that is trained as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Whole {
    /// The head that scores.
    Score,
    /// The rows of the embedding of some tokens.
    Tokens,
    /// The embedding, apart from the head.
    Embedding,
    /// The embedding that is the head too.
    Tied,
    /// The head, apart from the embedding.
    Head,
    /// The norm before the head: its name.
    Norm(&'static str),
    /// A norm around a sublayer: its layer, and its name within it.
    BlockNorm(usize, &'static str),
}

impl Whole {
    /// The module's name, as a language model alone has it.
    #[must_use]
    pub fn module(self) -> String {
        match self {
            Self::Score => "score".to_owned(),
            Self::Tokens | Self::Embedding | Self::Tied => "model.embed_tokens".to_owned(),
            Self::Head => HEAD.to_owned(),
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

/// The module that makes logits.
pub(crate) const HEAD: &str = "lm_head";

/// The modules that take the place of the base's, in `f32`; of norms `[1, width]`, as files have them.
#[derive(Clone, Debug, Default)]
pub struct Modules {
    /// Those that are trained.
    values: BTreeMap<Whole, Tensor<2>>,
    /// Those that lie beside a saved adapter and stay as they are.
    beside: BTreeMap<Whole, Tensor<2>>,
    /// The head among them in the type of the computation.
    head: OnceLock<Weight>,
}

impl Modules {
    /// A module, if it is among them.
    #[must_use]
    pub fn get(&self, whole: Whole) -> Option<&Tensor<2>> {
        self.values.get(&whole).or_else(|| self.beside.get(&whole))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty() && self.beside.is_empty()
    }

    /// Those that stay as they are.
    pub fn beside(&self) -> impl Iterator<Item = (Whole, &Tensor<2>)> {
        self.beside.iter().map(|(whole, values)| (*whole, values))
    }

    /// The same with these, which stay as they are.
    #[must_use]
    pub fn with_beside(self, beside: BTreeMap<Whole, Tensor<2>>) -> Self {
        Self { beside, head: OnceLock::new(), ..self }
    }

    /// Every module that is trained.
    pub fn iter(&self) -> impl Iterator<Item = (Whole, &Tensor<2>)> {
        self.values.iter().map(|(whole, values)| (*whole, values))
    }

    /// The same, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Whole, &mut Tensor<2>)> {
        self.head = OnceLock::new();
        self.values.iter_mut().map(|(whole, values)| (*whole, values))
    }

    /// The head among them; `make` gives it the type of the computation.
    pub(crate) fn head(&self, make: impl FnOnce(&Tensor<2>) -> Weight) -> Option<&Weight> {
        let values = self.get(Whole::Head).or_else(|| self.get(Whole::Tied))?;
        Some(self.head.get_or_init(|| make(values)))
    }
}

impl FromIterator<(Whole, Tensor<2>)> for Modules {
    fn from_iter<I: IntoIterator<Item = (Whole, Tensor<2>)>>(modules: I) -> Self {
        Self { values: modules.into_iter().collect(), ..Self::default() }
    }
}

impl LoraConfig {
    /// Whether the embedding or the head is trained as a whole.
    #[must_use]
    pub fn trains_tables(&self, config: &ModelConfig) -> bool {
        let is_table = |whole: &Whole| whole.embeds() || whole.is_head();
        self.modules_to_save.is_some() && self.modules(config).is_ok_and(|modules| modules.keys().any(is_table))
    }

    /// The modules that `modules_to_save` names in a model, with their shapes. As in PEFT, a name is the end of a module's
    /// name, also behind another sign than a dot.
    ///
    /// # Errors
    /// Why some cannot be trained.
    pub(super) fn modules(&self, config: &ModelConfig) -> Result<BTreeMap<Whole, [usize; 2]>, Vec<String>> {
        let (mut found, mut problems) = (BTreeMap::new(), Vec::new());
        let all = whole_modules(config);
        if let Some(names) = self.modules_to_save.as_ref().filter(|names| names.len() > all.len()) {
            return Err(vec![format!("{} entries, and the model has {} modules", names.len(), all.len())]);
        }
        for name in self.modules_to_save.iter().flatten() {
            let hits = || all.iter().filter(|(module, _)| module.ends_with(&**name));
            if hits().next().is_none() {
                let trained = all.iter().filter(|(_, whole)| whole.is_some());
                let names: BTreeSet<_> = trained.map(|(module, _)| format!("`{}`", short_name(module))).collect();
                let names = names.into_iter().collect::<Vec<_>>().join(", ");
                problems
                    .push(format!("no module with weights of its own has a name that ends in `{name}`: take {names}"));
            }
            // Every layer has one: the first says it.
            if let Some((module, _)) = hits().find(|(_, whole)| whole.is_none()) {
                let norms = match config.norm_kind {
                    NormKind::Rms => ", the head and the norms around attention and feed-forward layers",
                    NormKind::Layer => " and the head (LayerNorms stay frozen)",
                };
                problems
                    .push(format!("`{name}` names `{module}`, and only the embedding{norms} are trained as a whole"));
            }
            found.extend(hits().filter_map(|(_, whole)| *whole));
        }
        let embeds = found.keys().any(|whole| whole.embeds());
        if embeds && config.layer_inputs.is_some() {
            problems.push("every layer of this model has embeddings of its own, which stay as they are".to_owned());
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
type Found = (Whole, [usize; 2]);

/// The modules of a model with a weight, by the names that they have in it, and what can be trained of them.
fn whole_modules(config: &ModelConfig) -> Vec<(String, Option<Found>)> {
    let ModelConfig { vocab_size, hidden_size, .. } = *config;
    let tied = |otherwise| if config.tie_word_embeddings { Whole::Tied } else { otherwise };
    let (table, norm) = ([vocab_size, hidden_size], [1, hidden_size]);
    let mut trained: BTreeMap<String, Found> = BTreeMap::from([
        (Whole::Embedding.module(), (tied(Whole::Embedding), table)),
        (HEAD.to_owned(), (tied(Whole::Head), table)),
        (config.last_norm.to_owned(), (Whole::Norm(config.last_norm), norm)),
    ]);
    let is_rms = config.norm_kind == NormKind::Rms;
    if !is_rms {
        trained.remove(config.last_norm);
    }
    let blocks = config.blocks.iter().enumerate().filter(|_| is_rms);
    for (layer, block) in blocks {
        let around = block.sublayers.iter().flat_map(|sublayer| [sublayer.norm_before, sublayer.norm_after]);
        trained.extend(around.flatten().map(|name| {
            let whole = Whole::BlockNorm(layer, name);
            (whole.module(), (whole, norm))
        }));
    }
    let weights = config.expected_tensors().into_iter().map(|(name, _)| name);
    let modules = weights.filter_map(|name| name.strip_suffix(".weight").map(str::to_owned));
    let tied_head = config.tie_word_embeddings.then(|| HEAD.to_owned());
    modules.chain(tied_head).map(|module| (config.module_of(&module), trained.get(&module).copied())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::fixture::tiny_with;

    fn modules(names: &[&str], tied: bool) -> Result<Vec<Whole>, String> {
        let names = names.iter().map(ToString::to_string).collect();
        let lora = LoraConfig { modules_to_save: Some(names), ..LoraConfig::default() };
        let config = ModelConfig { tie_word_embeddings: tied, ..tiny_with(&[("num_hidden_layers", 1)]) };
        let found = lora.modules(&config).map(|modules| modules.into_keys().collect());
        found.map_err(|errors| errors.join("\n"))
    }

    #[test]
    fn names_are_the_ends_of_modules_and_a_tied_head_is_the_embedding() {
        let around = ["input_layernorm", "post_attention_layernorm"].map(|name| Whole::BlockNorm(0, name));
        assert_eq!(modules(&["lm_head", "model.norm"], false).unwrap(), [Whole::Head, Whole::Norm("model.norm")]);
        assert_eq!(modules(&["embed_tokens", "lm_head"], false).unwrap(), [Whole::Embedding, Whole::Head]);
        for names in [&["embed_tokens", "lm_head"][..], &["lm_head"], &["model.embed_tokens"]] {
            assert_eq!(modules(names, true).unwrap(), [Whole::Tied]);
        }
        assert_eq!(modules(&["norm"], true).unwrap(), [Whole::Norm("model.norm"), around[0], around[1]]);
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
