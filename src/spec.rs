//! Describes a model: its shape and constants from `config.json`, and what follows from them: linear layers, names of
//! tensors, numbers of parameters.
//!
//! A family whose decoder block is a variation of the common one is a row in `families`.

use families::FAMILIES;
use family::Family;

use crate::util::stats::as_u64;
use crate::util::text::with_commas;

mod block;
pub mod delta_net;
mod families;
pub(crate) mod family;
pub mod gguf;
mod json;
mod rope;
mod shipped;
mod stored;
mod vision;

pub use block::attention::{
    Attention, GATE_NAME, HeadWeights, Heads, LATENT_NAMES, LATENT_NORMS, Latent, Qkv, QueryKeyNorms,
};
pub use block::short_conv::{GATED_CONV, SHORT_CONV_NAMES, ShortConv};
pub use block::state_space::{self, StateHeads, StateSpace};
pub use block::{
    Activation, BLOCK_SCALE, BRANCH_NORMS, Block, CORRECTION, CURVE_NAMES, Choice, Curve, DeltaNet, DeltaNetInputs,
    EXPERT_SCALES, ExpertGroups, FUSED_NAMES, Gated, HEAD_NORMS, LATENT_EXPERT_NAMES, LAUREL_NAMES, LAYER_INPUT_NAMES,
    LFM2_NAMES, Laurel, LayerInput, Mixture, NEOX_NAMES, PHI_NAMES, PLAIN_MLP_NAMES, PREDICTION, PerSite,
    Probabilities, Projections, ROUTER_SCALE, Role, SHARED_GATE, SHARED_MLP_NAMES, SINKS, SITE_NAMES, STREAM_NORM,
    STREAM_ROUTER, STREAM_SCALE, SharedExpert, Site, SiteId, Streams, Sublayer, SublayerKind, TwoBranches, short_name,
};
pub use delta_net::{DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES, DeltaHeads};
pub use family::ExpertForm;
pub use rope::{QueryGrowth, Rope, RopeAxes, RopePairs, RopeScaling};
pub use shipped::shipped_config;
pub use stored::{Method, Packer, StoredQuantisation, Words};
pub use vision::{
    Cut, Cutting, Encoder, EncoderKind, Filter, Grid, Pixels, Projector, SeenBothWays, TOWER_PARTS, Tiles, Vision,
    Windows,
};

/// Shape and constants of a decoder model, from Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family, such as `llama`; that of the language model in a multimodal model.
    pub model_type: String,
    /// Rows of the embedding, and of the head: one for each token.
    pub vocab_size: usize,
    /// The last of them, which the model's files do not have: they start as the mean of those in the files.
    pub num_new_rows: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Its layers.
    pub blocks: Vec<Block>,
    /// The rotary embeddings of the layers.
    pub ropes: Vec<Rope>,
    /// Embeddings of the tokens for every layer (Gemma 4); absent: there are none.
    pub layer_inputs: Option<LayerInputs>,
    /// Longest sequence that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Name of the norm before the head.
    pub last_norm: &'static str,
    /// Added to the mean square, or to the variance, in norms.
    pub rms_norm_eps: f64,
    /// The same in norms of the outputs of sublayers, where that differs (Muse Glimmer).
    pub post_norm_eps: Option<f64>,
    /// What the norms of the residual stream compute.
    pub norm_kind: NormKind,
    /// Whether files have the weights of norms less 1 (Gemma).
    pub has_norms_less_one: bool,
    /// Factor of the embeddings, which is rounded to the type of the computation; absent: 1.
    pub embedding_scale: Option<f64>,
    /// Divisor of the logits (Granite).
    pub logit_divisor: f64,
    /// Logits `l` become `cap tanh(l / cap)` (Gemma 2); absent: they stay as they are.
    pub logit_soft_cap: Option<f64>,
    /// Where modules of the decoder are, if it is the language model of a multimodal model.
    pub nesting: Option<&'static str>,
    /// So many of its first layers add something at images (Qwen3-VL).
    pub num_deepstack_layers: usize,
    /// Whether `lm_head` is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Token that starts a sequence.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Standard deviation of randomly initialised weights, for `init = "random"`.
    pub initializer_range: f64,
    /// How the linear layers are stored, where they are quantised already.
    pub quantisation: Option<StoredQuantisation>,
}

/// What norms compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm.
    Rms,
    /// `LayerNorm` with a bias (Nemotron).
    Layer,
    /// `LayerNorm` without one (Cohere).
    LayerWithoutBias,
}

/// Embeddings of the tokens that every layer has of its own, beside the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInputs {
    /// Number of tokens that have them.
    pub vocab_size: usize,
    /// Width of that of a layer.
    pub width: usize,
}

impl ModelConfig {
    /// The row of its family.
    pub(crate) fn family(&self) -> &'static Family {
        let known = FAMILIES.iter().find(|family| family.model_type == self.model_type);
        // A configuration is only ever made by a row.
        known.unwrap_or(&FAMILIES[0])
    }

    /// How PEFT has the adapters of its experts.
    #[must_use]
    pub fn expert_form(&self) -> ExpertForm {
        let has_experts = self.blocks.iter().any(|block| block.mixture().is_some());
        self.family().experts.filter(|_| has_experts).map(|experts| experts.form).unwrap_or_default()
    }

    /// Number of parameters; a tied head is counted once.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.expected_tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Number of parameters that a token is computed with: all, but of experts those of some; `None` without experts.
    #[must_use]
    pub fn num_active_parameters(&self) -> Option<usize> {
        self.blocks.iter().find_map(Block::mixture)?;
        let others = self.num_parameters() - self.num_block_weights();
        usize::try_from(as_u64(self.num_active_block_weights())).ok().map(|active| active + others)
    }

    /// How many parameters it has, to people.
    #[must_use]
    pub fn parameters(&self) -> String {
        let all = format!("{} parameters", with_commas(self.num_parameters()));
        let active = |active| format!("{all}, of which a token uses {}", with_commas(active));
        self.num_active_parameters().map_or_else(|| all.clone(), active)
    }

    /// Gives the embedding and the head at least so many rows. Models with embeddings for every layer, and those of GGUF
    /// files, stay as they are.
    pub fn grow(&mut self, vocab_size: usize) {
        let is_gguf = self.quantisation.as_ref().is_some_and(|stored| stored.method == Method::Gguf);
        if self.layer_inputs.is_none() && !is_gguf && !self.family().has_head_bias {
            self.num_new_rows += vocab_size.saturating_sub(self.vocab_size);
            self.vocab_size = self.vocab_size.max(vocab_size);
        }
    }

    /// The shape that a tensor of this shape has in the model's files.
    #[must_use]
    pub fn shape_in_files(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        match shape {
            [rows, columns] if has_row_for_each_token(name) => vec![rows - self.num_new_rows, *columns],
            _ => shape.to_vec(),
        }
    }

    /// The residual streams, where there are several.
    #[must_use]
    pub fn streams(&self) -> Option<Streams> {
        self.blocks.first()?.streams
    }

    /// Width of all residual streams, side by side.
    #[must_use]
    pub fn streams_width(&self) -> usize {
        self.hidden_size * self.streams().map_or(1, |streams| streams.count)
    }

    /// Names of the matrices that make the other streams of the first, and of those that they pass before all become one; each
    /// `[hidden_size, hidden_size]`.
    #[must_use]
    pub fn stream_projections(&self) -> [Vec<String>; 2] {
        let num_others = self.streams().map_or(0, |streams| streams.count - 1);
        STREAM_PROJECTIONS.map(|name| (0..num_others).map(|other| format!("{name}.{other}.weight")).collect())
    }

    /// Number of layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.blocks.len()
    }

    /// Name of a linear layer within the model, as adapters have it: `model.layers.3.mlp.up_proj`.
    #[must_use]
    pub fn module_name(&self, layer: usize, site: SiteId) -> String {
        self.module_of(&in_layer(layer, &self.blocks[layer].sites[site].name))
    }

    /// Name within the model of what is called `name` in a language model alone.
    #[must_use]
    pub fn module_of(&self, name: &str) -> String {
        match (self.nesting, self.family().names.embedding, name.strip_prefix(EMBEDDING)) {
            (Some(nesting), Some(embedding), Some(rest)) => format!("{nesting}{embedding}{rest}"),
            (Some(nesting), ..) => nested_name(nesting, name),
            (None, Some(embedding), Some(rest)) => format!("model.{embedding}{rest}"),
            (None, ..) => name.to_owned(),
        }
    }

    /// A name, or a pattern, with the router's name as files of this model have it, where it ends with that in transformers 5.
    #[must_use]
    pub fn router_as_in_files(&self, name: &str) -> String {
        let own = self.blocks.iter().find_map(|block| Some(&block.sites[block.mixture()?.router].name));
        renamed_router(name, ROUTER_MODULES.into_iter().filter(|(_, ours)| own.is_some_and(|own| own.ends_with(ours))))
    }

    /// Whether its embedding is not called `embed_tokens`.
    #[must_use]
    pub fn has_other_embedding(&self) -> bool {
        self.family().names.embedding.is_some()
    }

    /// Whether later layers use the keys and values of this one.
    #[must_use]
    pub fn shares_key_values(&self, layer: usize) -> bool {
        let attentions = self.blocks.iter().filter_map(Block::attention);
        attentions.into_iter().any(|attention| attention.key_value_layer() == Some(layer))
    }

    /// Whether a tensor makes keys or values in a layer that uses those of an earlier one: files may have such.
    #[must_use]
    pub fn is_unused(&self, name: &str) -> bool {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        layer.is_some_and(|(layer, part)| {
            let layer = layer.parse::<usize>().ok();
            if self.family().predicts_more() && layer.is_some_and(|layer| layer >= self.num_layers()) {
                return true;
            }
            // Masks of GPT-NeoX's first files.
            if matches!(part, "attention.bias" | "attention.masked_bias") {
                return true;
            }
            let block = layer.and_then(|layer| self.blocks.get(layer));
            let uses_others = block.and_then(Block::attention).and_then(Attention::key_value_layer).is_some();
            uses_others && (part.starts_with("self_attn.k_") || part.starts_with("self_attn.v_"))
        })
    }

    /// Every linear layer of the blocks with its name within the model, in the order of the forward pass.
    pub fn sites(&self) -> impl Iterator<Item = (String, &Site)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.flat_map(|(layer, block)| block.sites.iter().map(move |site| (in_layer(layer, &site.name), site)))
    }

    /// Number of weights in the linear layers of all blocks.
    #[must_use]
    pub fn num_block_weights(&self) -> usize {
        self.sites().map(|(_, site)| site.num_weights()).sum()
    }

    /// Tokens up to which texts can share their beginning: attention must see all of it, and no layer may hand a state from
    /// token to token.
    #[must_use]
    pub fn longest_sharing(&self) -> usize {
        let of_block = |block: &Block| {
            let heads = block.attention().map(|attention| attention.heads);
            heads.map_or(0, |heads| heads.window.into_iter().chain(heads.chunk).min().unwrap_or(usize::MAX))
        };
        self.blocks.iter().map(of_block).min().unwrap_or_default()
    }

    /// Number of weights in the linear layers of all blocks that a token is multiplied by.
    #[must_use]
    pub fn num_active_block_weights(&self) -> f64 {
        self.sites().map(|(_, site)| site.num_active_weights()).sum()
    }

    /// Every tensor of the model with its shape, under Hugging Face's names. `lm_head.weight` is left out where it is
    /// tied.
    #[must_use]
    pub fn expected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, self.hidden_size])];
        for (layer, block) in self.blocks.iter().enumerate() {
            for site in &block.sites {
                let name = in_layer(layer, &site.name);
                tensors.push((format!("{name}.weight"), site.shape.to_vec()));
                if site.has_bias {
                    tensors.push((format!("{name}.bias"), vec![site.shape[0]]));
                }
            }
            for (norm, width) in block.norms(self.hidden_size) {
                tensors.extend(self.norm_tensors(&in_layer(layer, norm), width));
            }
            let by_head = block.attention().and_then(Attention::norms_by_head).into_iter().flatten().flatten();
            tensors.extend(by_head.map(|(name, shape)| (in_layer(layer, &name), shape)));
            tensors.extend(block.other_tensors(self.hidden_size).map(|(name, shape)| (in_layer(layer, name), shape)));
        }
        if let Some(LayerInputs { vocab_size, width }) = self.layer_inputs {
            let all = self.num_layers() * width;
            tensors.push((LAYER_INPUT_TABLE.to_owned(), vec![vocab_size, all]));
            tensors.push((LAYER_INPUT_PROJECTION.to_owned(), vec![all, self.hidden_size]));
            tensors.push((format!("{LAYER_INPUT_NORM}.weight"), vec![width]));
        }
        let of_streams = self.stream_projections().into_iter().flatten();
        tensors.extend(of_streams.map(|name| (name, vec![self.hidden_size; 2])));
        tensors.extend(self.norm_tensors(self.last_norm, self.hidden_size));
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, self.hidden_size]));
        }
        if self.family().has_head_bias {
            tensors.push((HEAD_BIAS.to_owned(), vec![self.vocab_size]));
        }
        tensors
    }
}

impl ModelConfig {
    /// The tensors of a norm.
    fn norm_tensors(&self, name: &str, width: usize) -> impl Iterator<Item = (String, Vec<usize>)> + use<> {
        let bias = (self.norm_kind == NormKind::Layer).then(|| format!("{name}.bias"));
        [format!("{name}.weight")].into_iter().chain(bias).map(move |name| (name, vec![width]))
    }
}

/// The embedding's module in a language model alone.
const EMBEDDING: &str = "model.embed_tokens";

/// Name of what a head adds to its logits, in models with such.
pub const HEAD_BIAS: &str = "lm_head.bias";
/// Name of the table of [`LayerInputs`].
pub const LAYER_INPUT_TABLE: &str = "model.embed_tokens_per_layer.weight";
/// Name of what projects the embeddings of the tokens to those of the layers.
pub const LAYER_INPUT_PROJECTION: &str = "model.per_layer_model_projection.weight";
/// Name of the norm of what it makes.
pub const LAYER_INPUT_NORM: &str = "model.per_layer_projection_norm";
/// Where the [matrices of several residual streams](ModelConfig::stream_projections) are.
pub const STREAM_PROJECTIONS: [&str; 2] = ["model.altup_projections", "model.altup_unembed_projections"];

/// The names of all linear layers of any family, group by group.
pub const LINEAR_NAMES: [&[&str]; 15] = [
    &SITE_NAMES,
    &FUSED_NAMES,
    &DELTA_NET_NAMES,
    &DELTA_NET_FUSED_NAMES,
    &[SHARED_GATE],
    &LAYER_INPUT_NAMES,
    &[GATE_NAME],
    &LAUREL_NAMES,
    &SHORT_CONV_NAMES,
    &LFM2_NAMES,
    &SHARED_MLP_NAMES,
    &PLAIN_MLP_NAMES,
    &LATENT_EXPERT_NAMES,
    &NEOX_NAMES,
    &PHI_NAMES,
];

/// Where multimodal models have the decoder of their language model, and GPT-NeoX its own.
const NESTINGS: [&str; 4] = ["model.language_model.", "model.text_model.", "gpt_neox.", "language_model.model."];

/// In which of them a module is.
#[must_use]
pub fn nesting_of(module: &str) -> Option<&'static str> {
    NESTINGS.into_iter().find(|nesting| module.starts_with(nesting))
}

/// What files of K-EXAONE and Hunyuan 3 call parts of a mixture, and Flint's its sinks, and their modules.
const OTHER_NAMES: [(&str, &str); 4] = [
    (".self_attn.softmax_offset", ".self_attn.sinks"),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.router.gate.", ".mlp.gate."),
];

/// The same of EXAONE 3, behind `transformer`.
const EXAONE_NAMES: [(&str, &str); 10] = [
    ("wte.", "embed_tokens."),
    ("ln_f.", "norm."),
    ("h.", "layers."),
    (".attn.attention.out_proj.", ".self_attn.o_proj."),
    (".attn.attention.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
];

/// The name in a language model alone of what a multimodal model has under `name`; `None` for its other parts. Before
/// transformers 4.52 the language model was around the decoder. Files of Nemotron-H have a `backbone`, and call its embedding
/// otherwise, as do those of GPT-NeoX, whose first ones have another name for the head; those of EXAONE 3 have other names for all.
#[must_use]
pub fn name_alone(name: &str) -> Option<String> {
    if let Some((theirs, ours)) = OTHER_NAMES.iter().find(|(theirs, _)| name.contains(theirs)) {
        return Some(name.replace(theirs, ours));
    }
    if let Some(rest) = name.strip_prefix("transformer.") {
        let in_turn = |name: String, (theirs, ours): &(&str, &str)| match (theirs.strip_prefix('.'), &*name) {
            (None, whole) => whole.strip_prefix(theirs).map_or(whole.to_owned(), |rest| format!("{ours}{rest}")),
            (Some(_), whole) => whole.replacen(theirs, ours, 1),
        };
        return Some(format!("model.{}", EXAONE_NAMES.iter().fold(rest.to_owned(), in_turn)));
    }
    let rest = match name.strip_prefix("language_model.") {
        Some(rest) => return Some(rest.to_owned()),
        None if name == "embed_out.weight" => return Some("lm_head.weight".to_owned()),
        None if name.starts_with("model.embeddings.") => name.strip_prefix("model.")?,
        None => name.strip_prefix("backbone.").or_else(|| name.strip_prefix(nesting_of(name)?))?,
    };
    let of_embedding = ["embeddings.", "embed_in."].into_iter().find_map(|start| rest.strip_prefix(start));
    Some(of_embedding.map_or_else(|| format!("model.{rest}"), |rest| format!("{EMBEDDING}.{rest}")))
}

/// The name in a multimodal model, whose decoder is in `nesting`, of what a language model alone has under `name`.
#[must_use]
pub fn nested_name(nesting: &str, name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) => format!("{nesting}{rest}"),
        // Llama 4's language model has the head in it.
        None => format!("{}{name}", nesting.strip_suffix("model.").filter(|it| *it == "language_model.").unwrap_or("")),
    }
}

/// Name in a language model alone of a part of a layer.
#[must_use]
pub fn in_layer(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}

/// Whether a tensor of this name belongs to one of the experts of a layer.
#[must_use]
pub fn is_of_expert(name: &str) -> bool {
    name.contains(".experts.")
}

/// Ends of the names of modules that choose among the experts of a layer.
pub const ROUTER_ENDS: [&str; 5] = ["gate", "gate.wg", "router", "router.layer", "router.proj"];

/// Whether a module chooses among the experts of a layer.
#[must_use]
pub fn is_router(module: &str) -> bool {
    ROUTER_ENDS.iter().any(|end| module.strip_suffix(end).is_some_and(|start| start.ends_with('.')))
}

/// Ends of routers' names in transformers 5, where files of the base have others.
const ROUTER_MODULES: [(&str, &str); 2] = [("mlp.gate", "block_sparse_moe.gate"), ("router", "router.layer")];

/// What transformers 5 calls a router's module, by the name in files of the base; also of a part of the name, or of a pattern.
#[must_use]
pub fn router_in_transformers(name: &str) -> String {
    renamed_router(name, ROUTER_MODULES.map(|(theirs, ours)| (ours, theirs)))
}

/// A name, or a pattern, with the first of these ends replaced by what stands beside it.
fn renamed_router<'a>(name: &str, ends: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    for (from, to) in ends {
        for (from, to) in [(from.to_owned(), to.to_owned()), (regex::escape(from), regex::escape(to))] {
            let start = name.strip_suffix(&*from).filter(|start| start.is_empty() || start.ends_with('.'));
            if let Some(start) = start {
                return format!("{start}{to}");
            }
        }
    }
    name.to_owned()
}

/// Whether it is the weight of the embedding or of the head.
#[must_use]
pub fn has_row_for_each_token(name: &str) -> bool {
    matches!(name, "model.embed_tokens.weight" | "lm_head.weight")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str) -> ModelConfig {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name);
        ModelConfig::from_file(&path).unwrap()
    }

    #[test]
    fn shipped_configs_have_the_published_number_of_parameters() {
        for (name, parameters) in [
            ("llama-3.1-8b.json", 8_030_261_248),
            ("llama-3.2-1b.json", 1_235_814_400),
            ("llama-3.2-3b.json", 3_212_749_824),
            ("tinyllama-1.1b.json", 1_100_048_384),
            ("mistral-7b-v0.1.json", 7_241_732_096),
            ("smollm2-135m.json", 134_515_008),
            ("qwen2.5-0.5b.json", 494_032_768),
            ("qwen2.5-7b.json", 7_615_616_512),
            ("qwen3-0.6b.json", 596_049_920),
            ("qwen3-8b.json", 8_190_735_360),
            // Without their vision towers and the layers of multi-token prediction.
            ("qwen3.5-0.8b.json", 752_393_024),
            ("qwen3.5-4b.json", 4_205_751_296),
            ("gemma-2-2b.json", 2_614_341_888),
            ("gemma-2-9b.json", 9_241_705_984),
            ("gemma-3-1b.json", 999_885_952),
            // Without the 420 million of its vision tower and projector.
            ("gemma-3-4b.json", 3_880_263_168),
            // Without what sees and hears, and with a number for each layer that transformers does not count.
            ("gemma-4-e2b.json", 4_628_569_344 + 35),
            ("gemma-4-e4b.json", 7_463_013_376 + 42),
            ("gemma-4-31b.json", 30_697_345_280 + 60),
            ("gemma-4-26b-a4b.json", 25_233_141_760 + 30),
            ("smollm3-3b.json", 3_075_098_624),
            ("olmo-2-7b.json", 7_298_617_344),
            ("phi-4.json", 14_659_507_200),
            ("glm-4-9b-0414.json", 9_400_279_040),
            ("qwen3-30b-a3b.json", 30_532_122_624),
            ("qwen1.5-moe-a2.7b.json", 14_315_784_192),
            ("mixtral-8x7b.json", 46_702_792_704),
            ("qwen3.5-35b-a3b.json", 34_660_610_688),
            ("qwen3-next-80b-a3b.json", 79_674_391_296),
            ("gpt-oss-20b.json", 20_914_757_184),
            ("lfm2-1.2b.json", 1_170_340_608),
            ("granite-3.3-2b.json", 2_533_539_840),
            ("mistral-nemo-12b.json", 12_247_782_400),
            ("mistral-small-24b-2501.json", 23_572_403_200),
            ("ministral-3-3b.json", 3_429_006_336),
            ("phi-3-mini-4k.json", 3_821_079_552),
            ("phi-3.5-mini.json", 3_821_079_552),
            ("phi-4-mini.json", 3_836_021_760),
            ("glm-4-9b.json", 9_399_951_360),
            ("nemotron-mini-4b.json", 4_190_509_056),
        ] {
            assert_eq!(config(name).num_parameters(), parameters, "{name}");
        }
        for (name, active) in [
            ("qwen3-8b.json", None),
            ("qwen3-30b-a3b.json", Some(3_353_032_704)),
            ("qwen1.5-moe-a2.7b.json", Some(2_689_173_504)),
            ("mixtral-8x7b.json", Some(12_879_925_248)),
        ] {
            assert_eq!(config(name).num_active_parameters(), active, "{name}");
        }
    }

    #[test]
    fn tensors_of_the_tiny_config_are_hugging_faces() {
        let config = config("tiny.json");
        let tensors = config.expected_tensors();
        assert_eq!(tensors.len(), 1 + 2 * 9 + 1);
        assert_eq!(tensors[0], ("model.embed_tokens.weight".into(), vec![256, 64]));
        assert_eq!(tensors[2], ("model.layers.0.self_attn.k_proj.weight".into(), vec![32, 64]));
        assert_eq!(tensors[7], ("model.layers.0.mlp.down_proj.weight".into(), vec![64, 176]));
        assert_eq!(tensors[19], ("model.norm.weight".into(), vec![64]));
        let untied = ModelConfig { tie_word_embeddings: false, ..config };
        assert_eq!(untied.expected_tensors()[20], ("lm_head.weight".into(), vec![256, 64]));
        assert_eq!(
            untied.num_parameters(),
            ModelConfig { tie_word_embeddings: true, ..untied.clone() }.num_parameters() + 256 * 64
        );
    }
}
