//! How a base that is already quantised is stored: `quantization_config` of config.json.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::schema::{Problem, Section, Value};

/// How the linear layers of a base are stored that is already quantised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredQuantisation {
    /// What the stored codes are.
    pub method: Method,
    /// Modules that are stored whole, by name, or by the start or the end of it.
    pub whole: Vec<String>,
    /// Bytes of the matrices that are blocks in a GGUF file, by name; but for the embedding, which is decoded.
    #[serde(skip)]
    pub blocks: BTreeMap<String, usize>,
}

/// What stored codes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Four bits of bitsandbytes, `NormalFloat`.
    Nf4 {
        /// Whether the scales are codes themselves.
        nested: bool,
    },
    /// Four bits of bitsandbytes, floats.
    Fp4 {
        /// Whether the scales are codes themselves.
        nested: bool,
    },
    /// Eight bits of bitsandbytes.
    Int8,
    /// Codes of GPTQ or AWQ.
    Words(Words),
    /// 8-bit floats (E4M3) with scales.
    Fp8 {
        /// Rows and columns that share a scale, where not all do or those of a row.
        tile: [usize; 2],
    },
    /// Numbers or blocks in a GGUF file, each matrix of a type of its own.
    Gguf,
}

/// How GPTQ and AWQ pack codes into words of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Words {
    /// Bits of a code: 4 or 8.
    pub bits: usize,
    /// Neighbouring inputs that share a scale and a zero; absent: all.
    pub group_len: Option<usize>,
    /// Whether a word holds codes of neighbouring outputs, in the order of AWQ; else of neighbouring inputs.
    pub is_awq: bool,
    /// Whether one is to be added to stored zeros.
    pub zeros_less_one: bool,
    /// Whether inputs are grouped by their activations, so that neighbours have different scales.
    pub is_reordered: bool,
}

impl Words {
    /// Codes of a word.
    #[must_use]
    pub fn per_word(&self) -> usize {
        32 / self.bits
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nf4 { .. } => f.write_str("nf4 of bitsandbytes"),
            Self::Fp4 { .. } => f.write_str("fp4 of bitsandbytes"),
            Self::Int8 => f.write_str("int8 of bitsandbytes"),
            Self::Words(Words { bits, is_awq, .. }) => {
                write!(f, "int{bits} of {}", if *is_awq { "AWQ" } else { "GPTQ" })
            }
            Self::Fp8 { .. } => f.write_str("fp8"),
            Self::Gguf => f.write_str("GGUF"),
        }
    }
}

impl StoredQuantisation {
    /// Whether matrices are stored as codes; those of a GGUF file may be numbers.
    #[must_use]
    pub fn is_in_codes(&self) -> bool {
        self.method != Method::Gguf || self.blocks.keys().any(|name| name.starts_with("model.layers."))
    }

    /// Whether config.json says that a module is stored whole. What the files hold decides; this is for estimates.
    #[must_use]
    pub fn is_whole(&self, module: &str) -> bool {
        let is_start = |name: &String| module.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('.'));
        self.whole.iter().any(|name| module.ends_with(name.as_str()) || is_start(name))
    }
}

/// Reads `quantization_config`; `None` where there is none, or after a problem.
pub(super) fn read(json: &mut Section) -> Option<StoredQuantisation> {
    json.value("quantization_config")?;
    let mut config = json.below("quantization_config", "an object or null");
    let [four, eight] = ["load_in_4bit", "load_in_8bit"].map(|key| config.boolean(key, false));
    let method = config.optional_string("quant_method", None);
    let method = match (method.as_deref(), four, eight) {
        (None | Some("bitsandbytes"), true, false) => four_bits(&mut config),
        (None | Some("bitsandbytes"), false, true) => Some(Method::Int8),
        (Some("bitsandbytes"), ..) => {
            config.problem("load_in_4bit", "and `load_in_8bit`: expected one of them to be true");
            None
        }
        (Some("gptq"), ..) => gptq(&mut config),
        (Some("awq"), ..) => awq(&mut config),
        (Some("fp8" | "fbgemm_fp8"), ..) => Some(fp8(&mut config)),
        (Some("compressed-tensors"), ..) => {
            config.only("format", "\"float-quantized\"", |format| format.text() == Some("float-quantized"));
            Some(fp8(&mut config))
        }
        (method, ..) => {
            let found = method.map_or("is missing".to_owned(), |method| format!("= \"{method}\" is not supported"));
            let name = config.full_name("quant_method");
            let expected = "expected bitsandbytes, gptq, awq, fp8 or compressed-tensors";
            let problem = Problem::new(format!("`{name}` {found}, {expected}"));
            config.reject("quant_method", problem.hint("use the repository with the original bf16 or f16 weights"));
            None
        }
    };
    let whole = ["llm_int8_skip_modules", "modules_to_not_convert", "ignore"]
        .map(|key| config.any(key, Vec::new(), "a list of names, or null", names));
    Some(StoredQuantisation { method: method?, whole: whole.concat(), blocks: BTreeMap::new() })
}

fn four_bits(config: &mut Section) -> Option<Method> {
    let nested = config.boolean("bnb_4bit_use_double_quant", false);
    match config.optional_string("bnb_4bit_quant_type", None).as_deref() {
        Some("nf4") => Some(Method::Nf4 { nested }),
        None | Some("fp4") => Some(Method::Fp4 { nested }),
        Some(other) => {
            config
                .problem("bnb_4bit_quant_type", format!("= \"{other}\" is not supported, expected \"nf4\" or \"fp4\""));
            None
        }
    }
}

fn gptq(config: &mut Section) -> Option<Method> {
    let version = config.optional_string("checkpoint_format", None);
    config.only("checkpoint_format", "\"gptq\" or \"gptq_v2\"", |format| {
        matches!(format.text(), Some("gptq" | "gptq_v2"))
    });
    config.only("is_marlin_format", "false", |value| *value == Value::Boolean(false));
    let zeros_less_one = version.as_deref() != Some("gptq_v2");
    let is_reordered = config.boolean("desc_act", false);
    Some(Method::Words(Words { zeros_less_one, is_reordered, ..words(config, &[4, 8])? }))
}

fn awq(config: &mut Section) -> Option<Method> {
    config.only("version", "\"gemm\"", |version| version.text().is_some_and(|text| text.eq_ignore_ascii_case("gemm")));
    Some(Method::Words(Words { is_awq: true, ..words(config, &[4])? }))
}

/// `bits` and `group_size`.
fn words(config: &mut Section, known: &[usize]) -> Option<Words> {
    let bits = config.required_count("bits", 2..=16);
    if !known.contains(&bits) {
        config.problem("bits", format!("= {bits} is not supported, expected one of {known:?}"));
        return None;
    }
    let all = config.value("group_size").and_then(Value::number) == Some(-1.0);
    let group_len = if all { None } else { Some(config.count("group_size", 128, 1..=1 << 22)) };
    Some(Words { bits, group_len, is_awq: false, zeros_less_one: false, is_reordered: false })
}

fn fp8(config: &mut Section) -> Method {
    config.only("fmt", "\"e4m3\"", |format| format.text() == Some("e4m3"));
    let tile = config.any("weight_block_size", [128; 2], "two numbers of at least 1, or null", |value| {
        let Value::Array(sizes) = value else { return Err(None) };
        let size = |i: usize| match sizes.get(i)?.value() {
            Value::Integer(size) => usize::try_from(*size).ok().filter(|size| (1..=1 << 22).contains(size)),
            _ => None,
        };
        size(0).zip(size(1)).filter(|_| sizes.len() == 2).map(Into::into).ok_or(None)
    });
    Method::Fp8 { tile }
}

fn names(value: &Value) -> Result<Vec<String>, Option<String>> {
    let Value::Array(names) = value else { return Err(None) };
    names.iter().map(|name| name.value().text().map(str::to_owned)).collect::<Option<_>>().ok_or(None)
}

#[cfg(test)]
mod tests {
    use super::super::ModelConfig;
    use super::*;

    fn read(quantisation: &str) -> Result<Option<StoredQuantisation>, String> {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "quantization_config": {quantisation}}}"#
        );
        ModelConfig::from_json(&text).map(|config| config.quantisation).map_err(|problems| problems.to_string())
    }

    fn method(quantisation: &str) -> Method {
        read(quantisation).unwrap().unwrap().method
    }

    #[test]
    fn the_methods_of_bitsandbytes_are_known_with_its_defaults() {
        assert_eq!(read("null"), Ok(None));
        let four = |more: &str| method(&format!(r#"{{"quant_method": "bitsandbytes", "load_in_4bit": true{more}}}"#));
        assert_eq!(four(""), Method::Fp4 { nested: false });
        assert_eq!(four(r#", "bnb_4bit_quant_type": "nf4""#), Method::Nf4 { nested: false });
        let nested = r#", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true"#;
        assert_eq!(four(nested), Method::Nf4 { nested: true });
        // As written before transformers 4.33.
        assert_eq!(method(r#"{"load_in_8bit": true}"#), Method::Int8);
    }

    #[test]
    fn the_packings_of_gptq_and_awq_and_the_tiles_of_fp8_are_read() {
        let words = |text: &str| match method(text) {
            Method::Words(words) => words,
            other => panic!("{other}"),
        };
        let gptq = Words { bits: 4, group_len: Some(64), is_awq: false, zeros_less_one: true, is_reordered: true };
        let text = r#"{"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": true"#;
        assert_eq!(words(&format!("{text}}}")), gptq);
        let second = format!(r#"{text}, "checkpoint_format": "gptq_v2"}}"#);
        assert_eq!(words(&second), Words { zeros_less_one: false, ..gptq });
        let awq = words(r#"{"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}"#);
        let expected = Words { group_len: None, is_awq: true, zeros_less_one: false, is_reordered: false, ..gptq };
        assert_eq!(awq, expected);
        let fp8 = |more: &str| method(&format!(r#"{{"quant_method": "fp8"{more}}}"#));
        assert_eq!(fp8(r#", "weight_block_size": [64, 32]"#), Method::Fp8 { tile: [64, 32] });
        assert_eq!(fp8(""), Method::Fp8 { tile: [128, 128] });
        assert!(read(r#"{"quant_method": "gptq", "bits": 3}"#).unwrap_err().contains("bits` = 3 is not supported"));
        assert!(read(r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#).unwrap_err().contains("\"gemm\""));
        assert!(read(r#"{"quant_method": "fp8", "weight_block_size": [0, 1]}"#).unwrap_err().contains("two numbers"));
    }

    #[test]
    fn modules_are_left_whole_by_name_start_and_end() {
        let text = r#"{"load_in_8bit": true, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp", "k_proj"]}"#;
        let found = read(text).unwrap().unwrap();
        for (module, is_whole) in [
            ("lm_head", true),
            ("model.layers.1.mlp.up_proj", true),
            ("model.layers.11.mlp.up_proj", false),
            ("model.layers.0.self_attn.k_proj", true),
            ("model.layers.0.self_attn.v_proj", false),
        ] {
            assert_eq!(found.is_whole(module), is_whole, "{module}");
        }
    }

    #[test]
    fn methods_that_cannot_be_read_are_refused_by_name_with_what_can_be_done() {
        for (text, part) in [
            (r#"{"quant_method": "hqq"}"#, "`quantization_config.quant_method` = \"hqq\" is not supported"),
            ("{}", "`quantization_config.quant_method` is missing, expected bitsandbytes, gptq, awq"),
            (r#"{"quant_method": "bitsandbytes"}"#, "expected one of them to be true"),
            (r#"{"load_in_4bit": true, "bnb_4bit_quant_type": "nf5"}"#, "= \"nf5\" is not supported"),
            (r#"{"load_in_8bit": true, "llm_int8_skip_modules": "lm_head"}"#, "expected a list of names"),
            ("7", "`quantization_config` = 7, expected an object"),
        ] {
            let problems = read(text).unwrap_err();
            assert!(problems.contains(part), "{problems}");
        }
        assert!(read(r#"{"quant_method": "hqq"}"#).unwrap_err().contains("original bf16 or f16 weights"));
    }
}
