//! Describes a model: its shape and constants from `config.json`, and what follows from them: linear layers, names of
//! tensors, numbers of parameters.
//!
//! A family whose decoder block is a variation of the common one is a row in `families`.

use serde::Serialize;

mod families;
pub mod gguf;
mod json;
mod shipped;
mod stored;

pub use shipped::shipped_config;
pub use stored::{Method, Packer, StoredQuantisation, Words};

/// A linear layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Linear {
    /// `self_attn.q_proj`
    Query,
    /// `self_attn.k_proj`
    Key,
    /// `self_attn.v_proj`
    Value,
    /// `self_attn.o_proj`
    Output,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
}

impl Linear {
    /// All of them, in the order of the forward pass.
    pub const ALL: [Self; 7] = [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Name within a block, as in Hugging Face's files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Last component of the name, as used in `target_modules`.
    #[must_use]
    pub fn short_name(self) -> &'static str {
        self.name().rsplit('.').next().unwrap_or_default()
    }

    /// Name within the model, for example `model.layers.3.mlp.up_proj`.
    #[must_use]
    pub fn module_name(self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name())
    }
}

/// Shape and constants of a decoder model, from Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The family: `llama`, `mistral`, `qwen2` or `qwen3`.
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
    /// Whether `lm_head` is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// For each layer, how many tokens a token can look back, itself included (Mistral 7B v0.1: 4096); absent: all.
    pub windows: Vec<Option<usize>>,
    /// Whether each linear layer of a block adds a bias, in the order of [`Linear::ALL`].
    pub biases: [bool; 7],
    /// Whether queries and keys are normed head by head before the rotary embedding (Qwen3).
    pub qk_norm: bool,
    /// Token that starts a sequence.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Standard deviation of randomly initialised weights, for `init = "random"`.
    pub initializer_range: f64,
    /// How the linear layers are stored, where they are quantised already.
    pub quantisation: Option<StoredQuantisation>,
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
    /// Llama 3.1: low frequencies are divided by `factor`, high ones are kept, with a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled by the full factor.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pretraining.
        original_max_position_embeddings: usize,
    },
}

impl ModelConfig {
    /// Number of parameters; a tied head is counted once.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.expected_tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Shape of a linear layer's weight, `[out_features, in_features]`.
    #[must_use]
    pub fn linear(&self, linear: Linear) -> [usize; 2] {
        let hidden = self.hidden_size;
        match linear {
            Linear::Query => [self.num_attention_heads * self.head_dim, hidden],
            Linear::Key | Linear::Value => [self.num_key_value_heads * self.head_dim, hidden],
            Linear::Output => [hidden, self.num_attention_heads * self.head_dim],
            Linear::Gate | Linear::Up => [self.intermediate_size, hidden],
            Linear::Down => [hidden, self.intermediate_size],
        }
    }

    /// Number of weights in the linear layers of one block.
    #[must_use]
    pub fn block_linear_size(&self) -> usize {
        Linear::ALL.into_iter().map(|linear| self.linear(linear).iter().product::<usize>()).sum()
    }

    /// Every tensor of the model with its shape, under Hugging Face's names. `lm_head.weight` is left out where it is
    /// tied.
    #[must_use]
    pub fn expected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, self.hidden_size])];
        for layer in 0..self.num_hidden_layers {
            for linear in Linear::ALL {
                let (name, shape) = (linear.module_name(layer), self.linear(linear));
                tensors.push((format!("{name}.weight"), shape.to_vec()));
                if self.biases[linear as usize] {
                    tensors.push((format!("{name}.bias"), vec![shape[0]]));
                }
            }
            let heads: &[(&str, usize)] = if self.qk_norm {
                &[("self_attn.q_norm", self.head_dim), ("self_attn.k_norm", self.head_dim)]
            } else {
                &[]
            };
            let norms = [("input_layernorm", self.hidden_size), ("post_attention_layernorm", self.hidden_size)];
            for (norm, width) in heads.iter().chain(&norms) {
                tensors.push((format!("model.layers.{layer}.{norm}.weight"), vec![*width]));
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
        let untied = ModelConfig { tie_word_embeddings: false, ..config };
        assert_eq!(untied.expected_tensors()[20], ("lm_head.weight".into(), vec![256, 64]));
        assert_eq!(
            untied.num_parameters(),
            ModelConfig { tie_word_embeddings: true, ..untied.clone() }.num_parameters() + 256 * 64
        );
    }
}
