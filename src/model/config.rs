//! Section `[model]` of a recipe.

use serde::Serialize;

use crate::device::Dtype;
use crate::schema::{Choice, Problem, Section, section};

section! {
    /// Section `[model]` of a recipe.
    pub struct ModelOptions then check {
        /// A local Hugging Face folder, or the id of a repository on the Hub.
        path: String = String::new() => required_path("a local Hugging Face folder or the id of a Hub repository")
            like "meta-llama/Llama-3.2-1B-Instruct", OtherAdapter,
            ["base_model", "model_name_or_path", "model_name", "model_id", "model_path", "base_model_name_or_path",
             "pretrained_model_name_or_path", "hf_model_id", "repo_id", "tokenizer_name_or_path",
             "name", "id", "repo", "name_or_path"];
        /// Branch, tag or commit on the Hub. Default: main.
        revision: Option<String> = None => optional_string() like "main", OtherAdapter,
            ["model_revision", "revision_of_model", "base_model_revision", "branch", "commit"];
        /// Storage of the frozen weights: "bf16", "f16" or "f32". Default: train.precision.
        dtype: Option<Dtype> = None => optional_choice() like "bf16", LaterSteps,
            ["torch_dtype", "model_dtype", "weights_dtype", "base_dtype"];
        /// Quantisation of the frozen weights: "none".
        quantization: Quantization = Quantization::None => choice(), OtherAdapter,
            ["load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "quantize", "qlora", "quantization_bit";
             "only \"none\" is available yet"],
            ["quantisation", "quant"];
        /// "pretrained" reads the weights; "random" makes some from config.json alone, for benchmarks.
        init: Init = Init::Pretrained => choice(), OtherAdapter;
    }
}

/// Quantisation of the frozen base. Only `none` exists so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// Weights stay as stored.
    #[default]
    None,
}

/// The source of the base weights.
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
    fn check(self, section: &mut Section) -> Self {
        let path = &self.path;
        for site in ["https://huggingface.co/", "http://huggingface.co/", "hf://"] {
            if let Some(id) = path.strip_prefix(site) {
                let message = format!("`model.path` = \"{path}\" is an address, expected a folder or a repository id");
                section.reject("path", Problem::new(message).hint(format!("write \"{id}\"")));
            }
        }
        self
    }
}
