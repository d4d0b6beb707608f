//! The families of models that are variations of one decoder block, one row each.

/// What varies between families, and the values that transformers assumes if a config lacks a key.
pub(super) struct Family {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    pub(super) biases: Biases,
    /// Queries and keys are normed head by head before the rotary embedding.
    pub(super) qk_norm: bool,
    pub(super) windows: Windows,
    /// Width of a head; absent: `hidden_size` divided by the number of heads.
    pub(super) head_dim: Option<usize>,
    /// Absent: as many as query heads.
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) max_position_embeddings: usize,
    pub(super) bos_token_id: Option<u32>,
    pub(super) eos_token_id: Option<u32>,
}

/// Which linear layers add a bias.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Biases {
    /// No layer, whatever the config says: the family has no such key.
    None,
    /// The layers of queries, keys and values, whatever the config says.
    QueryKeyValue,
    /// `attention_bias` decides for the four attention layers.
    AttentionKey,
    /// `attention_bias`, and `mlp_bias` for the feed-forward layers.
    AttentionAndMlpKeys,
}

/// Which layers have a sliding window.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// No layer.
    Never,
    /// All layers, unless `sliding_window` is null; the number is its value where absent.
    Everywhere(usize),
    /// With `use_sliding_window`: the layers that `layer_types` names, or otherwise the layers from `max_window_layers`
    /// on.
    LaterLayers {
        /// Value of `sliding_window` where absent.
        default: usize,
        /// Value of `max_window_layers` where absent.
        first: usize,
    },
}

const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    biases: Biases::AttentionAndMlpKeys,
    qk_norm: false,
    windows: Windows::Never,
    head_dim: None,
    num_key_value_heads: None,
    max_position_embeddings: 2048,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
};

const QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    biases: Biases::QueryKeyValue,
    windows: Windows::LaterLayers { default: 4096, first: 28 },
    num_key_value_heads: Some(32),
    max_position_embeddings: 32_768,
    bos_token_id: None,
    eos_token_id: None,
    ..LLAMA
};

/// Every supported family.
pub(super) const FAMILIES: [Family; 4] = [
    LLAMA,
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        biases: Biases::None,
        windows: Windows::Everywhere(4096),
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        ..LLAMA
    },
    QWEN2,
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        biases: Biases::AttentionKey,
        qk_norm: true,
        head_dim: Some(128),
        ..QWEN2
    },
];
