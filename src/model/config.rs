//! `config.json` of a Llama-family model.

use serde::Serialize;

/// Shape and constants of a Llama-family model, from Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LlamaConfig {
    /// `llama` or `mistral`.
    pub model_type: String,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward layer.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Longest sequence that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Change of the rotary frequencies for long contexts.
    pub rope_scaling: Option<RopeScaling>,
    /// `lm_head` is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Tokens that a token can look back, itself included (Mistral 7B v0.1); absent: all.
    pub sliding_window: Option<usize>,
    /// Token that starts a sequence.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Standard deviation of fresh weights, for `init = "random"`.
    pub initializer_range: f64,
}

/// Change of the rotary frequencies for contexts longer than the model was pretrained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Positions divided by `factor` (Chen et al., 2023).
    Linear {
        /// Divisor of the positions.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled in full.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pretraining.
        original_max_position_embeddings: usize,
    },
}
