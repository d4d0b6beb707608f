//! Section `[lora]` of a recipe.

use std::collections::BTreeMap;

use serde::Serialize;

/// Section `[lora]`: names and meaning as in PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoraConfig {
    /// Rank of the update.
    pub r: usize,
    /// Numerator of the scale `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Dropout on the input of A, in `[0, 1)`.
    pub lora_dropout: f64,
    /// Which linear layers are adapted.
    pub target_modules: TargetModules,
    /// Scale by `lora_alpha / sqrt(r)` instead.
    pub use_rslora: bool,
    /// Weight-decomposed LoRA (not available yet: `true` is refused).
    pub use_dora: bool,
    /// How A starts; B starts at zero.
    pub init_lora_weights: InitLoraWeights,
    /// Only these layers; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers_to_transform: Option<Vec<usize>>,
    /// Rank by module name (the end of the name, or a regex, as in PEFT).
    pub rank_pattern: BTreeMap<String, usize>,
    /// `lora_alpha` by module name.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Learning rate of B over that of A (LoRA+); absent: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loraplus_lr_ratio: Option<f64>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 16.0,
            lora_dropout: 0.0,
            target_modules: TargetModules::AllLinear,
            use_rslora: false,
            use_dora: false,
            init_lora_weights: InitLoraWeights::Kaiming,
            layers_to_transform: None,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            loraplus_lr_ratio: None,
        }
    }
}

/// Which linear layers are adapted.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(into = "toml::Value")]
pub enum TargetModules {
    /// Every linear layer of the blocks; not `lm_head`.
    AllLinear,
    /// Names such as `q_proj`, matched against the end of the module name.
    Names(Vec<String>),
    /// A regular expression that the whole module name must match.
    Regex(String),
}

impl From<TargetModules> for toml::Value {
    fn from(targets: TargetModules) -> Self {
        match targets {
            TargetModules::AllLinear => Self::String("all-linear".into()),
            TargetModules::Names(names) => Self::Array(names.into_iter().map(Self::String).collect()),
            TargetModules::Regex(regex) => Self::String(regex),
        }
    }
}

/// How A starts. In recipes: `true` for [`Kaiming`](Self::Kaiming), `"gaussian"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "toml::Value")]
pub enum InitLoraWeights {
    /// Uniform in ±1/sqrt(`in_features`).
    Kaiming,
    /// Normal with standard deviation 1/r.
    Gaussian,
}

impl From<InitLoraWeights> for toml::Value {
    fn from(init: InitLoraWeights) -> Self {
        match init {
            InitLoraWeights::Kaiming => Self::Boolean(true),
            InitLoraWeights::Gaussian => Self::String("gaussian".into()),
        }
    }
}
