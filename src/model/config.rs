//! `config.json` of a Llama-family model: its shape, and the tensors that follow from it.

use serde::Serialize;

mod json;
mod problems;

pub use problems::{ConfigError, ConfigProblem, Problems};

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

impl LlamaConfig {
    /// Heads of the attention.
    #[must_use]
    pub fn heads(&self) -> crate::ops::attention::Heads {
        crate::ops::attention::Heads {
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            window: self.sliding_window,
        }
    }

    /// Number of parameters; a tied head is counted once.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.expected_tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// The linear layers of a block with their `[out, in]` shapes, in Hugging Face's names and order.
    #[must_use]
    pub fn block_linears(&self) -> [(&'static str, [usize; 2]); 7] {
        let hidden = self.hidden_size;
        let query = self.num_attention_heads * self.head_dim;
        let key_value = self.num_key_value_heads * self.head_dim;
        [
            ("self_attn.q_proj", [query, hidden]),
            ("self_attn.k_proj", [key_value, hidden]),
            ("self_attn.v_proj", [key_value, hidden]),
            ("self_attn.o_proj", [hidden, query]),
            ("mlp.gate_proj", [self.intermediate_size, hidden]),
            ("mlp.up_proj", [self.intermediate_size, hidden]),
            ("mlp.down_proj", [hidden, self.intermediate_size]),
        ]
    }

    /// Every tensor of the model with its shape, in Hugging Face's names; no `lm_head.weight` where it is tied.
    #[must_use]
    pub fn expected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, self.hidden_size])];
        for layer in 0..self.num_hidden_layers {
            for (linear, shape) in self.block_linears() {
                tensors.push((format!("model.layers.{layer}.{linear}.weight"), shape.to_vec()));
            }
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push((format!("model.layers.{layer}.{norm}.weight"), vec![self.hidden_size]));
            }
        }
        tensors.push(("model.norm.weight".to_owned(), vec![self.hidden_size]));
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, self.hidden_size]));
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str) -> LlamaConfig {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name);
        LlamaConfig::from_file(&path).unwrap()
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
        ] {
            assert_eq!(config(name).num_parameters(), parameters, "{name}");
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
        let untied = LlamaConfig { tie_word_embeddings: false, ..config };
        assert_eq!(untied.expected_tensors()[20], ("lm_head.weight".into(), vec![256, 64]));
        assert_eq!(
            untied.num_parameters(),
            LlamaConfig { tie_word_embeddings: true, ..untied.clone() }.num_parameters() + 256 * 64
        );
    }
}
