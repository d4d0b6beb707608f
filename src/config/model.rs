//! Section `[model]` of a recipe.

use crate::device::Dtype;
use crate::schema::{Problem, Section, choice, section};

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
        /// Quantisation of the frozen linear layers: "none", "nf4", "fp4", "int8" or "fp8"; embeddings, head and norms stay whole.
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

choice! {
    /// Quantisation of the frozen linear layers.
    #[derive(Default)]
    pub enum Quantization {
        /// Weights stay as stored.
        #[default]
        None = "none";
        /// 4-bit `NormalFloat`, in blocks of 64.
        Nf4 = "nf4", ["4bit", "bnb"];
        /// 4-bit float, in blocks of 64.
        Fp4 = "fp4";
        /// 8-bit integers, with a scale for each output.
        Int8 = "int8", ["8bit", "llm.int8"];
        /// 8-bit floats (E4M3), with a scale for each matrix: what GPUs multiply.
        Fp8 = "fp8", ["float8", "e4m3"];
    }
    notes [
        (&["int4"], "four bits are \"nf4\" or \"fp4\""),
        (
            &["nf4_", "nf4-", "fp4_", "fp4-"],
            "`double_quantization` = true beside \"nf4\" or \"fp4\" quantises the scales",
        ),
        (
            &["mxfp4", "nvfp4", "gptq", "awq", "gguf", "q2", "q3", "q4", "q5", "q6", "q8", "iq"],
            "leave the key out, and name a base in `model.path` that is stored so",
        ),
    ]
}

choice! {
    /// Where the frozen weights are.
    #[derive(Default)]
    pub enum Residency {
        /// In the memory of the device that computes.
        #[default]
        Memory = "memory", ["device"];
        /// In files, which are memory-mapped.
        Mapped = "mapped", ["mmap", "disk"];
        /// Blocks in host memory, which a GPU copies them from; the same as [`Memory`](Self::Memory) on the CPU.
        Host = "host", ["cpu"];
    }
}

choice! {
    /// The source of the base weights.
    #[derive(Default)]
    pub enum Init {
        /// The safetensors files of the model folder.
        #[default]
        Pretrained = "pretrained";
        /// Random weights, from config.json alone, for benchmarks.
        Random = "random";
    }
}

impl ModelOptions {
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
