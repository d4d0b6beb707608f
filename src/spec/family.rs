//! What a family of models, a variation of one decoder block, may vary.

use super::block::Activation;
use super::block::attention::QueryKeyNorms;
use super::state_space::StateNames;
use super::{DeltaHeads, FUSED_NAMES, HEAD_NORMS, NormKind, RopeAxes, RopePairs, SITE_NAMES};

/// What varies between families, and the values that transformers assumes if a config lacks a key.
#[expect(clippy::struct_excessive_bools, reason = "a row of a table")]
pub(crate) struct Family {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    pub(super) names: FamilyNames,
    pub(super) biases: Biases,
    /// How queries and keys are normed.
    pub(super) qk_norms: Option<QueryKeyNorms>,
    pub(crate) no_rope: NoRope,
    /// The norms before and after the attention, and before and after the feed-forward layer.
    pub(super) norms: [[Option<&'static str>; 2]; 2],
    /// What those norms compute.
    pub(crate) norm_kind: NormKind,
    /// Files have the weights of norms less 1.
    pub(super) norms_less_one: bool,
    /// The key that names the activation, and what it means where it is absent. Without a gate, `Relu` means its square.
    pub(crate) activation: (&'static str, Activation),
    pub(crate) scales: Scales,
    /// Feed-forward layers have a gate.
    pub(super) gated: bool,
    /// The head, which is not the embedding then, adds a bias.
    pub(crate) has_head_bias: bool,
    /// What its attention has besides.
    pub(super) attention_extra: AttentionExtra,
    /// The feed-forward layers are mixtures of experts; of Gemma 4, they have such beside them where `enable_moe_block` says so.
    pub(crate) experts: Option<Experts>,
    /// Whether the layers of queries, keys and values are one, whether those of gate and up are, and whether those of a linear
    /// attention's input are two.
    pub(super) fused: [bool; 3],
    /// Value of `partial_rotary_factor`, the share of a head that turns, where absent; absent: all of it turns.
    pub(super) partial_rotary_factor: Option<f64>,
    /// Which numbers of a head turn together.
    pub(super) rope_pairs: RopePairs,
    pub(crate) own_ropes: OwnRopes,
    /// Values of `attn_logit_softcapping` and `final_logit_softcapping` where absent; absent: the family has no such keys. Without
    /// a value of the first, its configs may have the key, and transformers caps no scores.
    pub(crate) soft_caps: Option<[Option<f64>; 2]>,
    pub(super) windows: Windows,
    /// The heads of layers with linear attention where the config has none: all but the last of each `full_attention_interval`,
    /// unless `layer_types` says otherwise. Absent: no layer has it.
    pub(super) delta_heads: Option<DeltaHeads>,
    /// Layers that `layer_types` calls `conv` have a gated short convolution in place of attention.
    pub(super) has_short_convs: bool,
    /// Layers that `layer_types` calls `mamba` or `linear_attention` have a state space in place of attention.
    pub(super) state_spaces: Option<StateSpaces>,
    pub(crate) arrangement: Arrangement,
    pub(super) rms_norm_eps: f64,
    /// Base of the rotary frequencies where the config has none.
    pub(super) rope_theta: f64,
    /// Layers with a window have a rotary embedding of their own, with this base where the config has none.
    pub(super) local_rope_theta: Option<f64>,
    /// Absent: it must be given.
    pub(super) vocab_size: Option<usize>,
    /// Absent: it must be given.
    pub(super) num_attention_heads: Option<usize>,
    /// Width of a head; absent: `hidden_size` divided by the number of heads.
    pub(super) head_dim: Option<usize>,
    /// Absent: as many as query heads.
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) max_position_embeddings: usize,
    pub(super) tie_word_embeddings: bool,
    pub(super) bos_token_id: Option<u32>,
    pub(super) eos_token_id: Option<u32>,
    pub(crate) gguf: Gguf,
}

impl Family {
    pub(crate) fn is_gemma4(&self) -> bool {
        matches!(self.attention_extra, AttentionExtra::Gemma4 { .. })
    }

    pub(crate) fn is_muse(&self) -> bool {
        self.attention_extra == AttentionExtra::Muse
    }

    pub(crate) fn is_gemma3n(&self) -> bool {
        self.attention_extra == AttentionExtra::Gemma3n
    }

    /// The least strength of its state spaces where a config has none.
    pub(crate) fn least_strength(&self) -> f64 {
        self.state_spaces.and_then(|spaces| spaces.least).map_or(0.0, |(_, least)| least)
    }

    /// Whether layers see texts in chunks, and queries of the others grow (Llama 4).
    pub(crate) fn has_chunks(&self) -> bool {
        self.experts.is_some_and(|experts| experts.weighs_inputs)
    }

    /// Whether layers that predict more tokens may follow the others in files (GLM-4.5 and its like).
    pub(crate) fn predicts_more(&self) -> bool {
        self.model_type == "glm_ocr_text" || self.experts.is_some_and(|experts| experts.router.is_some())
    }

    /// Whether GGUF files of it may have what frequencies of long and of short texts are divided by.
    pub(crate) fn has_long_ropes(&self) -> bool {
        self.own_ropes == OwnRopes::Phi || self.gguf.rope_factors
    }
}

/// How the sublayers of a layer follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// What mixes tokens, then what feeds forward.
    InTurn,
    /// Both take the same, normed once.
    Beside,
    /// The same where this key says so.
    BesideIf(&'static str),
    /// Both take the same, each normed by itself.
    NormedApart,
    /// The same unless this key says no (GPT-NeoX).
    NormedApartIf(&'static str),
    /// One of them, which `layers_block_type` names, or a letter of `hybrid_override_pattern` (Nemotron-H).
    OneEach,
    /// A state space and attention take the same, normed once; then what feeds forward (Falcon-H1).
    MixersBeside,
}

/// A family's state spaces: the keys of their shape, with values where absent.
#[derive(Clone, Copy)]
pub(super) struct StateSpaces {
    /// Numbers of heads and of their groups, width of a head and of a state, and tokens that the convolution sees.
    pub(super) counts: [(&'static str, usize); 5],
    /// `mamba_d_ssm` is the width of all heads, this where absent; where null or not here, it is `mamba_expand` times `hidden_size`.
    pub(super) width: Option<usize>,
    /// The width of a head is that over the number of heads where it is absent or `auto`.
    pub(super) divides: bool,
    /// Whether `mamba_rms_norm` decides about the norm behind the gate.
    pub(super) asks_for_norm: bool,
    /// The key of whether the projection of the output adds a bias, where it has its own.
    pub(super) output_bias: Option<&'static str>,
    /// Whether the convolution adds a bias, true where absent, and whether the projections do, false where absent.
    pub(super) biases: [&'static str; 2],
    /// The activation behind the convolution.
    pub(super) activation: &'static str,
    /// The least strength, with its value where absent. Without it, `time_step_limit` has both bounds.
    pub(super) least: Option<(&'static str, f64)>,
    pub(super) names: &'static StateNames,
    /// Whether its kernel reads the bare weight of its output's projection in transformers: PEFT refuses an adapter on that.
    pub(super) is_output_bare: bool,
}

/// A model around a language model, which is the part that is trained.
pub(super) struct Wrapper {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    /// Type of the language model where its config does not say it.
    pub(super) text: &'static str,
    /// Where its modules are; those of the decoder begin with `model.` in a language model alone.
    pub(super) nesting: &'static str,
}

/// Which layers have no rotary embedding.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRope {
    Never,
    /// The last of each `no_rope_layer_interval`, whose value is this where absent, unless `no_rope_layers` says otherwise.
    LastOf(usize),
    /// All, unless `position_embedding_type` is `rope` (Granite 4).
    UnlessNamed,
    /// All.
    All,
    /// Those of which `layer_rope_theta` has a 0; absent: none (Granite with sinks), or those without a window (Muse Glimmer).
    Bases,
    /// Those without a window (Cohere 2).
    Full,
    /// The same, but none where `sliding_window` is null (EXAONE 4).
    FullUnlessNull,
}

/// Scalings of rotary frequencies that one family has, or has in its own way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OwnRopes {
    None,
    /// Frequencies for long and for short texts, which its first configs call otherwise.
    Phi,
    /// Always a yarn, whose ramp is between fractions.
    GptOss,
    /// Always a yarn, with queries that grow.
    Ministral,
    /// Layers with a window have the base of the others, without their scaling.
    Olmo,
    /// A `dynamic` one with `alpha` has a larger base alone.
    Hunyuan,
    /// Keys of its own: `rotary_pct` and `rotary_emb_base`.
    NeoX,
    /// Tokens have three positions, with these sections where the config has none.
    Axes(RopeAxes),
}

/// What GGUF files call a family, and what llama.cpp takes for granted of it.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "a row of a table")]
pub(crate) struct Gguf {
    /// `general.architecture`; absent: llama.cpp has none, or computes something else.
    pub(crate) architecture: Option<&'static str>,
    /// The same of models with experts, where it is another.
    pub(crate) of_mixtures: Option<&'static str>,
    /// The same of models without a state space, where it is another.
    pub(crate) without_states: Option<&'static str>,
    /// The projection from the latent of keys and values is two tensors.
    pub(crate) splits_latents: bool,
    /// Rows of queries and keys that turn together are side by side.
    pub(crate) interleaved: bool,
    /// Rotary frequencies may be divided by those of Llama 3, or by some for long and others for short texts.
    pub(crate) rope_factors: bool,
    /// The norm between attention and feed-forward layer is called that after the attention.
    pub(crate) post_attention_norm: bool,
    pub(crate) windows: GgufWindows,
    /// The head must be the embedding, or must not; absent: either.
    pub(crate) tied_head: Option<bool>,
    /// The weights of a token's experts sum to 1.
    pub(crate) experts_sum_to_one: bool,
    /// Of models with a [`Router`], a file says what those weights are multiplied by, and whether they sum to 1 before.
    pub(crate) expert_factor: bool,
    /// A file says how wide experts are.
    pub(crate) expert_width: bool,
}

impl Gguf {
    /// What most have.
    pub(super) const fn named(architecture: &'static str) -> Self {
        Self { architecture: Some(architecture), ..Self::NONE }
    }

    /// No files.
    pub(super) const NONE: Self = Self {
        architecture: None,
        of_mixtures: None,
        without_states: None,
        splits_latents: false,
        interleaved: false,
        rope_factors: false,
        post_attention_norm: false,
        windows: GgufWindows::Never,
        tied_head: None,
        experts_sum_to_one: true,
        expert_factor: true,
        expert_width: true,
    };
}

/// Which layers have a sliding window in llama.cpp.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GgufWindows {
    Never,
    /// All, with a width in the file.
    Everywhere,
    /// A file says which.
    Listed,
    /// All but the last of each `pattern` in a model of so many layers; in others none.
    OfLayers {
        num_layers: usize,
        pattern: usize,
    },
    /// All but the last of each `pattern`. Scores are over the root of the width of a head; in a model of as many layers as the
    /// largest, of the mean width.
    AllButEvery {
        pattern: usize,
        largest: Option<usize>,
    },
}

/// What families call the parts that all have.
#[derive(Clone, Copy)]
pub(super) struct FamilyNames {
    /// The linear layers of a block.
    pub(super) sites: [&'static str; 7],
    /// The norms of query and key heads.
    pub(super) head_norms: [&'static str; 2],
    /// What is gate and up in one.
    pub(super) gate_up: &'static str,
    /// The module of the embedding within `model`, which files call so too; absent: `embed_tokens`. Files may call `model` `backbone`.
    pub(super) embedding: Option<&'static str>,
    /// What files and PEFT call `model.`; absent: so.
    pub(super) nesting: Option<&'static str>,
    /// The norm before the head.
    pub(super) last_norm: &'static str,
    /// The key of what is added to the mean square in norms.
    pub(super) norm_eps: &'static str,
}

impl FamilyNames {
    /// Those of nearly all families.
    pub(super) const COMMON: Self = Self {
        sites: SITE_NAMES,
        head_norms: HEAD_NORMS,
        gate_up: FUSED_NAMES[1],
        embedding: None,
        nesting: None,
        last_norm: "model.norm",
        norm_eps: "rms_norm_eps",
    };
}

/// What an attention may have besides.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AttentionExtra {
    None,
    /// Every head has one more score, without a value (gpt-oss).
    Sinks,
    /// The layer of queries also makes a gate of the output (Qwen3.5).
    OutputGate,
    /// Norms of values, and layers that have other heads, use the keys and values of earlier layers, have embeddings of their
    /// own, and multiply their output by a number.
    Gemma4 {
        /// Value of `hidden_size_per_layer_input` where absent; 0: there are none.
        layer_input_width: usize,
    },
    /// Norms of values, several residual streams, and layers that use the keys and values of earlier layers and have embeddings of
    /// their own.
    Gemma3n,
    /// A layer of its own makes a gate of the output; embeddings are normed, norms of outputs add another number to the mean square, and
    /// the last norm is stored whole (Muse Glimmer).
    Muse,
    /// Queries, keys and values of a head are rows of one layer, side by side (GPT-NeoX).
    ByHead,
    /// Queries, keys and values come from latents.
    Latent(LatentWidths),
}

/// Widths of an attention with latents, or the values of their keys where absent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LatentWidths {
    /// `q_lora_rank`; absent: queries have no latent.
    pub(super) queries: Option<usize>,
    /// `kv_lora_rank`
    pub(super) key_values: usize,
    /// Of a head: `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim`; where that is 0, `hidden_size` over the number of heads.
    pub(super) of_head: [usize; 3],
}

/// A family's mixtures of experts, and the values of their keys where absent.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    /// `num_experts`, or `num_local_experts`.
    pub(super) count: usize,
    /// `num_experts_per_tok`.
    pub(super) num_per_token: usize,
    /// `moe_intermediate_size`; absent: `intermediate_size` is theirs.
    pub(super) intermediate_size: Option<usize>,
    /// `shared_expert_intermediate_size`; absent: there is no shared expert.
    pub(super) shared: Option<usize>,
    /// `norm_topk_prob` decides whether the weights of a token's experts sum to 1, this where absent; `decoder_sparse_step` and
    /// `mlp_only_layers` decide which layers are mixtures. Absent: they do, and all are.
    pub(super) norm_topk_prob: Option<bool>,
    /// Whether router and experts add biases.
    pub(super) has_biases: bool,
    /// What would be the feed-forward layer is a shared expert without a gate (Granite 4); `num_local_experts` may be 0, and
    /// `intermediate_size` is that of experts.
    pub(super) beside_dense: bool,
    /// Weights multiply the inputs of experts, `intermediate_size` is theirs and `intermediate_size_mlp` that of dense layers, of which
    /// `interleave_moe_layer_step` or `moe_layers` decides (Llama 4).
    pub(super) weighs_inputs: bool,
    /// Names within the block of the router and of what holds the experts, and within an expert of gate, up and down.
    pub(super) names: [&'static str; 5],
    pub(crate) router: Option<Router>,
    /// How PEFT has their adapters.
    pub(crate) form: ExpertForm,
}

/// How PEFT has the adapters of a layer's experts in its files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertForm {
    /// Not at all: the model has none, or is not known.
    #[default]
    None,
    /// One by one, as it reads them.
    Apart,
    /// One for gate and up of all experts, and one for down; up is below gate.
    Joined,
    /// The same where rows of gate and up take turns (gpt-oss).
    InTurn,
    /// One for up of all experts, which have no gate, and one for down (Nemotron 3).
    Ungated,
    /// As joined, where A and B have each other's places: PEFT takes the matrices, `[experts, in, out]`, for turned ones (Llama 4).
    Turned,
}

impl ExpertForm {
    /// Whether those of all experts of a layer are one.
    #[must_use]
    pub fn is_joined(self) -> bool {
        !matches!(self, Self::None | Self::Apart)
    }
}

/// Routers of mixtures beyond the softmax, and what stands beside their experts.
#[derive(Clone, Copy)]
pub(crate) struct Router {
    /// The key of the number of experts, and that of how many a token has.
    pub(crate) counts: [&'static str; 2],
    /// Probabilities are sigmoids; to the sum of a token's this is added, where its weights are made to sum to 1. Absent: they are the
    /// softmax.
    pub(crate) sigmoid: Option<f64>,
    /// Name within the block of the bias of the choice, and the key that says whether there is one, if there is such; absent: none has
    /// a bias.
    pub(crate) bias: Option<(&'static str, Option<&'static str>)>,
    /// `n_group` and `topk_group` have a say. Absent: they do not.
    pub(crate) groups: Option<RouterGroups>,
    /// The key of what weights of experts are multiplied by, and its value where absent.
    pub(crate) factor: (&'static str, f64),
    /// Name within the block of the shared experts, and the key of their number, or of the width of all.
    pub(crate) shared: Option<(&'static str, &'static str)>,
    /// The key of the first layer with a mixture, and its value where absent.
    pub(crate) first: Option<(&'static str, usize)>,
}

/// How a router groups experts, with values of the keys where absent.
#[derive(Clone, Copy)]
pub(crate) struct RouterGroups {
    /// `n_group` and `topk_group`; where `topk_method` must say so, they have a say only then.
    pub(crate) counts: [usize; 2],
    /// Whether `topk_method` must.
    pub(crate) by_method: bool,
    /// Number of a group's best experts whose probabilities decide.
    pub(crate) num_best: usize,
}

/// What scores of attention, embeddings, outputs of sublayers and logits are multiplied by.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Scales {
    /// Scores: over the root of the width of a head. Others: by 1.
    HeadWidth,
    /// Scores: over the root of `query_pre_attn_scalar`, whose value is this where absent. Embeddings: by the root of
    /// `hidden_size`. Others: by 1.
    QueryScalar(f64),
    /// Embeddings: by the root of `hidden_size`. Others: by 1.
    Embeddings,
    /// Scores: over the root of the width of a head. Embeddings: by the root of `hidden_size`. Others: by 1.
    EmbeddingsAndHeads,
    /// Scores: over the root of the width of a head. Embeddings: by `scale_emb`. Outputs of sublayers: by `scale_depth`, over the root of
    /// the number of layers. Logits: over the times that `hidden_size` is `dim_model_base`. Each 1 where null (`MiniCPM3`).
    Depth,
    /// By `attention_multiplier`, `embedding_multiplier`, `residual_multiplier` and over `logits_scaling`, each 1 where absent.
    Multipliers,
    /// Scores: over the root of the width of a head, times `qk_scale_factor`. Logits: by `output_multiplier`, both with values where absent
    /// (Muse Glimmer). Others: by 1.
    Normed,
    /// Scores: over the root of the width of a head. Logits: by `logit_scale`, 0.0625 where absent (Cohere). Others: by 1.
    Logits,
    /// Scores: over the root of the width of a head, times `key_multiplier`. Embeddings: by `embedding_multiplier`. Logits: by
    /// `lm_head_multiplier`. Parts of sublayers have some, too (Falcon-H1).
    Parts,
}

/// Which linear layers add a bias.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Biases {
    /// No layer, whatever the config says: the family has no such key.
    None,
    /// Every layer.
    All,
    /// The layers of queries, keys and values, whatever the config says.
    QueryKeyValue,
    /// `attention_bias` decides for the layers of queries, keys and values; this is its value where absent.
    QueryKeyValueKey(bool),
    /// `attention_bias` decides for the four attention layers.
    AttentionKey,
    /// `attention_bias`, and `mlp_bias` for the feed-forward layers.
    AttentionAndMlpKeys,
    /// These decide for the layers of queries, keys and values, for that of the output, and for the feed-forward layers, each with its
    /// value where absent.
    Keys([(&'static str, bool); 3]),
}

/// Which layers have a sliding window.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// No layer.
    Never,
    /// All layers, unless `sliding_window` is null; the number is its value where absent.
    Everywhere(Option<usize>),
    /// With `use_sliding_window`: the layers that `layer_types` names, or otherwise the layers from `max_window_layers`
    /// on.
    LaterLayers {
        /// Value of `sliding_window` where absent.
        default: usize,
        /// Value of `max_window_layers` where absent.
        first: usize,
    },
    /// The layers that `layer_types` names, or otherwise all but the last of each `sliding_window_pattern`.
    AllButEvery {
        /// Value of `sliding_window` where absent.
        default: usize,
        /// Value of `sliding_window_pattern` where absent.
        pattern: usize,
    },
    /// The layers that `layer_types` names, or otherwise all but the first of each `pattern` (CWM).
    AllButFirst {
        /// Value of `sliding_window` where absent.
        default: usize,
        pattern: usize,
    },
}
