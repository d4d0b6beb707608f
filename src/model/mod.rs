//! The Llama architecture: configuration, weights, blocks.

use crate::device::Dtype;
use serde::Serialize;

/// Section `[model]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelOptions {
    /// Local Hugging Face folder, or Hub repository id.
    pub path: String,
    /// Branch, tag or commit on the Hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Storage type of the frozen base; absent: the compute type of `train.precision`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Quantisation of the frozen base.
    pub quantization: Quantization,
    /// Where the weights come from.
    pub init: Init,
}

/// Quantisation of the frozen base. Only `none` exists so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// Weights as stored.
    #[default]
    None,
}

/// Where base weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// The safetensors files of the model folder.
    #[default]
    Pretrained,
    /// Random weights, from config.json alone, for benchmarks.
    Random,
}

pub mod config;
pub mod weights;
