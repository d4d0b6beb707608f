//! Section `[model]` of a recipe.

use serde::Serialize;

use crate::device::Dtype;
use crate::schema::{Choice, Problem, Section};

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

impl Choice for Quantization {
    const NAMES: &'static [(&'static str, Self)] = &[("none", Self::None)];
    const LATER: &'static [&'static str] = &["nf4", "int8"];
    const PEERS: &'static [(&'static str, &'static str)] =
        &[("4bit", "nf4"), ("fp4", "nf4"), ("bnb", "nf4"), ("8bit", "int8"), ("llm.int8", "int8")];
}

impl Choice for Init {
    const NAMES: &'static [(&'static str, Self)] = &[("pretrained", Self::Pretrained), ("random", Self::Random)];
}

impl ModelOptions {
    /// Reads section `[model]`.
    pub fn read(section: &mut Section) -> Self {
        let path = section.required_path("path", "a local Hugging Face folder or the id of a Hub repository");
        for site in ["https://huggingface.co/", "http://huggingface.co/", "hf://"] {
            if let Some(id) = path.strip_prefix(site) {
                let message = format!("`model.path` = \"{path}\" is an address, expected a folder or a repository id");
                section.reject("path", Problem::new(message).hint(format!("write \"{id}\"")));
            }
        }
        Self {
            path,
            revision: section.optional_string("revision"),
            dtype: section.optional_choice("dtype"),
            quantization: section.choice("quantization", Quantization::None),
            init: section.choice("init", Init::Pretrained),
        }
    }
}
