//! Section `[model]` of a recipe.

use serde::{Deserialize, Serialize};

use super::weights::{Quantisation, gcd};
use crate::device::Dtype;
use crate::ops::kernels::Place;
use crate::ops::quantised::{BlockScales, Coding, Quantised};
use crate::schema::{Choice, Problem, Section, section};
use crate::spec::{Method, ModelConfig, Words};

section! {
    /// Section `[model]` of a recipe.
    pub struct ModelOptions then check {
        /// A local Hugging Face folder, a GGUF file, or the id of a repository on the Hub; of one with GGUF files also
        /// owner/name/file.gguf, or `owner/name:Q4_K_M`.
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
        /// Quantisation of the frozen linear layers: "none", "nf4", "fp4" or "int8"; embeddings, head and norms stay whole.
        quantization: Quantization = Quantization::None => choice(), OtherAdapter,
            ["load_in_4bit", "qlora"; "write quantization = \"nf4\""],
            ["load_in_8bit"; "write quantization = \"int8\""],
            ["bnb_4bit_quant_type", "quantize", "quantization_bit", "quantization_type", "quantisation", "quant"];
        /// Whether the scales of "nf4" and "fp4" are quantised too. Default: false, or as the base is stored.
        double_quantization: Option<bool> = None => optional_boolean() like false, OtherAdapter,
            ["bnb_4bit_use_double_quant"], ["double_quant", "use_double_quant", "use_bnb_nested_quant", "nested"];
        /// Where the frozen weights are: "memory", that of the device. "mapped", only on the CPU: in their files, of which two
        /// blocks, or one and the head, are in memory at a time; bases that are quantised already, and weights that dtype or
        /// quantization change, are written to lora-train/weights in the user's cache folder once. "host", for GPUs: blocks in
        /// host memory, of which three are on the GPU at a time. The numbers are the same.
        residency: Residency = Residency::Memory => choice(), None;
        /// "pretrained" reads the weights; "random" makes some from config.json alone, for benchmarks.
        init: Init = Init::Pretrained => choice(), OtherAdapter;
    }
}

/// Quantisation of the frozen linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// Weights stay as stored.
    #[default]
    None,
    /// 4-bit `NormalFloat`, in blocks of 64.
    Nf4,
    /// 4-bit float, in blocks of 64.
    Fp4,
    /// 8-bit integers, with a scale for each output.
    Int8,
}

/// How the frozen weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Type of the matrices that are not quantised.
    pub dtype: Dtype,
    /// What becomes of the linear layers.
    pub quantisation: Option<Quantisation>,
    /// Where they are.
    pub residency: Residency,
}

impl Storage {
    /// Bytes of a tensor of `config` in memory, as far as that says how it is stored.
    #[must_use]
    pub fn tensor_bytes(self, config: &ModelConfig, name: &str, shape: &[usize], place: Place) -> usize {
        let stored = config.quantisation.as_ref();
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let is_whole = !name.starts_with("model.layers.") || stored.is_some_and(|stored| stored.is_whole(module));
        // A GPU has no kernel for the blocks of GGUF, so they are decoded.
        let in_blocks = stored.filter(|_| place.takes_blocks()).and_then(|stored| stored.blocks.get(name).copied());
        match (shape, self.quantisation.filter(|_| !is_whole)) {
            (&[out_features, in_features], quantisation) => in_blocks.unwrap_or_else(|| match quantisation {
                Some(quantisation) => {
                    let shape = [out_features, in_features];
                    let stored = stored.and_then(|stored| in_memory(stored.method, shape));
                    stored.unwrap_or_else(|| quantisation.form(shape)).num_bytes()
                }
                None => out_features * in_features * self.dtype.num_bytes(),
            }),
            _ => shape.iter().product::<usize>() * size_of::<f32>(),
        }
    }
}

/// What a stored matrix is in memory; `None`: numbers of the storage type.
fn in_memory(method: Method, shape: [usize; 2]) -> Option<Quantised<(), ()>> {
    let own = |coding, nested| Some(Quantisation { coding, nested }.form(shape));
    let (coding, block_len, scales) = match method {
        Method::Nf4 { nested } => return own(Coding::Nf4, nested),
        Method::Fp4 { nested } => return own(Coding::Fp4, nested),
        Method::Int8 => return own(Coding::Int8, false),
        Method::Words(Words { is_reordered: true, .. }) | Method::Gguf => return None,
        Method::Words(Words { bits, group_len, is_symmetric, .. }) => {
            let shifted = BlockScales::Shifted { scales: (), zeros: () };
            let scales = if is_symmetric { BlockScales::Plain(()) } else { shifted };
            (if bits == 4 { Coding::Int4 } else { Coding::Int8 }, group_len.unwrap_or(0), scales)
        }
        Method::Fp8 { tile } => (Coding::Fp8, tile.map_or(0, |tile| tile[1]), BlockScales::Plain(())),
        Method::Mxfp4 => (Coding::Mxfp4, 32, BlockScales::NESTED),
        Method::Nvfp4 => (Coding::Nvfp4, 16, BlockScales::NESTED),
    };
    Some(Quantised { shape, coding, codes: (), block_len: gcd(shape[1], block_len), scales })
}

impl From<Dtype> for Storage {
    fn from(dtype: Dtype) -> Self {
        Self { dtype, quantisation: None, residency: Residency::Memory }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.quantisation {
            None => write!(f, "{}", self.dtype),
            Some(quantisation) => write!(f, "{quantisation}, embeddings and head in {}", self.dtype),
        }?;
        f.write_str(match self.residency {
            Residency::Memory => "",
            Residency::Mapped => ", on disk",
            Residency::Host => ", its blocks in host memory",
        })
    }
}

/// Where the frozen weights are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Residency {
    /// In the memory of the device that computes.
    #[default]
    Memory,
    /// In files, which are memory-mapped.
    Mapped,
    /// Blocks in host memory, which a GPU copies them from; the same as [`Memory`](Self::Memory) on the CPU.
    Host,
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
    const NAMES: &'static [(&'static str, Self)] =
        &[("none", Self::None), ("nf4", Self::Nf4), ("fp4", Self::Fp4), ("int8", Self::Int8)];
    const PEERS: &'static [(&'static str, &'static str)] =
        &[("4bit", "nf4"), ("bnb", "nf4"), ("8bit", "int8"), ("llm.int8", "int8")];
    const NOTES: &'static [(&'static [&'static str], &'static str)] = &[
        (&["int4"], "four bits are \"nf4\" or \"fp4\""),
        (
            &["nf4_", "nf4-", "fp4_", "fp4-"],
            "`double_quantization` = true beside \"nf4\" or \"fp4\" quantises the scales",
        ),
        (
            &["fp8", "mxfp4", "nvfp4", "gptq", "awq", "gguf", "q2", "q3", "q4", "q5", "q6", "q8", "iq"],
            "leave the key out, and name a base in `model.path` that is stored so",
        ),
    ];
}

impl Choice for Residency {
    const NAMES: &'static [(&'static str, Self)] =
        &[("memory", Self::Memory), ("mapped", Self::Mapped), ("host", Self::Host)];
    const PEERS: &'static [(&'static str, &'static str)] =
        &[("mmap", "mapped"), ("disk", "mapped"), ("device", "memory"), ("cpu", "host")];
}

impl Choice for Init {
    const NAMES: &'static [(&'static str, Self)] = &[("pretrained", Self::Pretrained), ("random", Self::Random)];
}

impl ModelOptions {
    /// How the weights are held where the arithmetic is of type `compute`; a base that is quantised already, as stored.
    #[must_use]
    pub fn storage(&self, compute: Dtype, config: Option<&ModelConfig>) -> Storage {
        let stored = config.and_then(|config| config.quantisation.as_ref()).filter(|stored| stored.is_in_codes());
        let quantisation = stored.map_or(self.quantisation(), |stored| {
            let Quantised { coding, scales, .. } = in_memory(stored.method, [0; 2])?;
            Some(Quantisation { coding, nested: matches!(scales, BlockScales::Nested { .. }) })
        });
        Storage { dtype: self.dtype.unwrap_or(compute), quantisation, residency: self.residency }
    }

    fn quantisation(&self) -> Option<Quantisation> {
        let coding = match self.quantization {
            Quantization::None => return None,
            Quantization::Nf4 => Coding::Nf4,
            Quantization::Fp4 => Coding::Fp4,
            Quantization::Int8 => Coding::Int8,
        };
        Some(Quantisation { coding, nested: self.double_quantization == Some(true) })
    }

    /// Refuses to quantise a base again that is quantised already.
    ///
    /// # Errors
    /// Where the options name another quantisation than the stored one.
    pub fn fit(&self, config: &ModelConfig) -> Result<(), Problem> {
        let stored = config.quantisation.as_ref().filter(|stored| stored.is_in_codes());
        let Some(method) = stored.map(|stored| stored.method) else { return Ok(()) };
        let is_stored = |asked: &Quantisation| match (method, asked.coding) {
            (Method::Nf4 { .. }, coding) => coding == Coding::Nf4,
            (Method::Fp4 { .. }, coding) => coding == Coding::Fp4,
            (method, coding) => method == Method::Int8 && coding == Coding::Int8,
        };
        let message = match (self.quantisation().filter(|asked| !is_stored(asked)), method, self.double_quantization) {
            (Some(Quantisation { coding, .. }), ..) => {
                format!("`model.quantization` = \"{coding}\", but the base is stored as {method}")
            }
            (None, Method::Nf4 { nested } | Method::Fp4 { nested }, Some(asked)) if asked != nested => {
                let scales = if nested { "nested" } else { "plain" };
                format!(
                    "`model.double_quantization` = {asked}, but the base is stored as {method} with {scales} scales"
                )
            }
            _ => return Ok(()),
        };
        Err(Problem::new(message).hint("leave the key out: the base is used as stored; it is not quantised twice"))
    }

    fn check(self, section: &mut Section) -> Self {
        let is_nested = self.double_quantization == Some(true);
        if is_nested && !matches!(self.quantization, Quantization::Nf4 | Quantization::Fp4) {
            let problem =
                Problem::new("`model.double_quantization` = true, but `model.quantization` is not \"nf4\" or \"fp4\"");
            section.reject("double_quantization", problem.hint("take it out, or name the codes"));
        }
        if self.residency == Residency::Mapped && self.init == Init::Random {
            let problem = Problem::new("`model.residency` = \"mapped\", and random weights have no file to stay in");
            section.reject("residency", problem.hint("take it out, or set `model.init` to \"pretrained\""));
        }
        let path = &self.path;
        for site in ["https://huggingface.co/", "http://huggingface.co/", "hf://"] {
            if let Some(id) = path.strip_prefix(site) {
                let message = format!("`model.path` = \"{path}\" is an address, expected a folder or a repository id");
                section.reject("path", Problem::new(message).hint(format!("write \"{}\"", without_page(id))));
            }
        }
        self
    }
}

/// What an address names: a repository, or a file of it.
fn without_page(address: &str) -> String {
    let address = address.split(['?', '#']).next().unwrap_or(address);
    match address.splitn(5, '/').collect::<Vec<_>>()[..] {
        [owner, name, "blob" | "resolve", _, file] if file.ends_with(".gguf") => format!("{owner}/{name}/{file}"),
        [owner, name, "blob" | "resolve" | "tree", ..] => format!("{owner}/{name}"),
        _ => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_a_base_in_codes_is_what_it_is_stored_as_or_refused() {
        let fit = |double: &str, coding, asked| {
            let text = format!(
                r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64,
                    "num_hidden_layers": 1, "num_attention_heads": 4, "quantization_config": {{"load_in_4bit": true,
                    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": {double}}}}}"#
            );
            let options = ModelOptions { quantization: coding, double_quantization: asked, ..ModelOptions::default() };
            let fit = options.fit(&ModelConfig::from_json(&text).unwrap());
            fit.err().map(|problem| problem.message.split(", but").next().unwrap_or_default().to_owned())
        };
        for (nested, asked) in [("true", false), ("false", true)] {
            let refused = Some(format!("`model.double_quantization` = {asked}"));
            for coding in [Quantization::None, Quantization::Nf4] {
                assert_eq!(fit(nested, coding, None), None);
                assert_eq!(fit(nested, coding, Some(!asked)), None);
                assert_eq!(fit(nested, coding, Some(asked)), refused);
            }
            let other = fit(nested, Quantization::Fp4, Some(asked));
            assert_eq!(other.as_deref(), Some("`model.quantization` = \"fp4\""));
        }
    }
}
