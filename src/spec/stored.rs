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
    /// Codes of GPTQ, AWQ or compressed-tensors.
    Words(Words),
    /// 8-bit floats (E4M3) with scales.
    Fp8 {
        /// Rows and columns that share a scale; absent: all, or those of a row.
        tile: Option<[usize; 2]>,
    },
    /// 4-bit floats (E2M1), 32 of which share a power of two.
    Mxfp4,
    /// 4-bit floats (E2M1), 16 of which share an 8-bit float, and all of a matrix another scale.
    Nvfp4,
    /// Numbers or blocks in a GGUF file, each matrix of a type of its own.
    Gguf,
}

/// How codes are packed into words of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Words {
    /// Bits of a code: 4 or 8.
    pub bits: usize,
    /// Neighbouring inputs that share a scale and a zero; absent: all.
    pub group_len: Option<usize>,
    /// What packed them.
    pub packer: Packer,
    /// Whether every zero is the half of the codes.
    pub is_symmetric: bool,
    /// Whether one is to be added to stored zeros.
    pub zeros_less_one: bool,
    /// Whether inputs are grouped by their activations, so that neighbours have different scales.
    pub is_reordered: bool,
}

/// What packs codes into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packer {
    /// A word holds codes of neighbouring inputs; words of neighbouring outputs are neighbours.
    Gptq,
    /// A word holds codes of neighbouring outputs, in an order of its own.
    Awq,
    /// A word holds codes of neighbouring inputs; so do neighbouring words.
    CompressedTensors,
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
            Self::Words(Words { bits, packer, .. }) => {
                let packer = match packer {
                    Packer::Gptq => "GPTQ",
                    Packer::Awq => "AWQ",
                    Packer::CompressedTensors => "compressed-tensors",
                };
                write!(f, "int{bits} of {packer}")
            }
            Self::Fp8 { .. } => f.write_str("fp8"),
            Self::Mxfp4 => f.write_str("mxfp4"),
            Self::Nvfp4 => f.write_str("nvfp4"),
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
        let is_below = |module: &str, name: &str| {
            module.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        // A star is for the number of a layer.
        let in_layers = |(start, name): (&str, &str)| {
            let rest = module.strip_prefix(start).and_then(|rest| rest.strip_prefix('.')?.split_once('.'));
            rest.is_some_and(|(_, rest)| is_below(rest, name))
        };
        let is_of = |name: &String| {
            module.ends_with(name.as_str()) || is_below(module, name) || name.split_once(".*.").is_some_and(in_layers)
        };
        self.whole.iter().any(is_of)
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
        (Some("fp8"), ..) => {
            config.only("fmt", "\"e4m3\"", |format| format.text() == Some("e4m3"));
            Some(Method::Fp8 { tile: tile(&mut config, "weight_block_size", Some([128; 2])) })
        }
        (Some("mxfp4"), ..) => Some(Method::Mxfp4),
        (Some("fbgemm_fp8"), ..) => Some(Method::Fp8 { tile: None }),
        (Some("compressed-tensors"), ..) => compressed_tensors(&mut config),
        (method, ..) => {
            let found = method.map_or("is missing".to_owned(), |method| format!("= \"{method}\" is not supported"));
            let name = config.full_name("quant_method");
            let expected = "expected bitsandbytes, gptq, awq, fp8, mxfp4 or compressed-tensors";
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
    let is_symmetric = config.boolean("sym", true);
    let words = words(config, "bits", Packer::Gptq)?;
    Some(Method::Words(Words { is_symmetric, zeros_less_one, is_reordered, ..words }))
}

fn awq(config: &mut Section) -> Option<Method> {
    config.only("version", "\"gemm\"", |version| version.text().is_some_and(|text| text.eq_ignore_ascii_case("gemm")));
    let is_symmetric = !config.boolean("zero_point", true);
    Some(Method::Words(Words { is_symmetric, ..words(config, "bits", Packer::Awq)? }))
}

/// How many bits a code has, and `group_size`.
fn words(config: &mut Section, bits: &'static str, packer: Packer) -> Option<Words> {
    let known: &[usize] = if packer == Packer::Awq { &[4] } else { &[4, 8] };
    let count = |value: &Value| known.iter().copied().find(|known| *value == Value::Integer(*known as i128));
    config.only(bits, &format!("one of {known:?}"), |value| count(value).is_some());
    let num_bits = config.value(bits).map(count);
    if num_bits.is_none() {
        config.problem(bits, format!("is missing, expected one of {known:?}"));
    }
    let group_len = match config.value("group_size").map(Value::number) {
        None => (packer != Packer::CompressedTensors).then_some(128),
        Some(Some(-1.0)) => None,
        Some(_) => Some(config.count("group_size", 128, 1..=1 << 22)),
    };
    let [is_symmetric, zeros_less_one, is_reordered] = [false; 3];
    Some(Words { bits: num_bits??, group_len, packer, is_symmetric, zeros_less_one, is_reordered })
}

fn tile(config: &mut Section, key: &'static str, default: Option<[usize; 2]>) -> Option<[usize; 2]> {
    config.any(key, default, "two numbers of at least 1, or null", |value| {
        let Value::Array(sizes) = value else { return Err(None) };
        let size = |i: usize| match sizes.get(i)?.value() {
            Value::Integer(size) => usize::try_from(*size).ok().filter(|size| (1..=1 << 22).contains(size)),
            _ => None,
        };
        size(0).zip(size(1)).filter(|_| sizes.len() == 2).map(|tile| Some(tile.into())).ok_or(None)
    })
}

/// What compressed-tensors packs all layers as that it packs.
fn compressed_tensors(config: &mut Section) -> Option<Method> {
    config.only("transform_config", "none", |value| matches!(value, Value::Table(table) if table.is_empty()));
    let format = config.value("format").and_then(Value::text).unwrap_or_default();
    config.only("format", &format!("one of {FORMATS:?}"), |_| FORMATS.contains(&format));
    let mut groups = config.below("config_groups", "an object");
    let mut schemes = groups.each("an object", |group| scheme(&mut group.below("weights", "an object"), format));
    schemes.dedup();
    if schemes.len() != 1 {
        config.problem("config_groups", format!("describes {} schemes for weights, expected 1", schemes.len()));
    }
    schemes.pop()?
}

/// Formats of compressed-tensors.
const FORMATS: [&str; 4] = ["mxfp4-pack-quantized", "nvfp4-pack-quantized", "pack-quantized", "float-quantized"];

fn scheme(weights: &mut Section, format: &str) -> Option<Method> {
    Some(match format {
        "mxfp4-pack-quantized" => Method::Mxfp4,
        "nvfp4-pack-quantized" => Method::Nvfp4,
        "pack-quantized" => {
            let is_symmetric = weights.boolean("symmetric", true);
            let order = weights.value("actorder").and_then(Value::text);
            let is_reordered = matches!(order, Some("group" | "dynamic"));
            let words = words(weights, "num_bits", Packer::CompressedTensors)?;
            Method::Words(Words { is_symmetric, is_reordered, ..words })
        }
        _ => Method::Fp8 { tile: tile(weights, "block_structure", None) },
    })
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

    const GPTQ: Words = Words {
        bits: 4,
        group_len: Some(64),
        packer: Packer::Gptq,
        is_symmetric: true,
        zeros_less_one: true,
        is_reordered: true,
    };

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
        let text = r#"{"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": true"#;
        assert_eq!(words(&format!("{text}}}")), GPTQ);
        let second = format!(r#"{text}, "checkpoint_format": "gptq_v2"}}"#);
        assert_eq!(words(&second), Words { zeros_less_one: false, ..GPTQ });
        let awq = words(r#"{"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}"#);
        let plain = Words { is_symmetric: false, zeros_less_one: false, is_reordered: false, ..GPTQ };
        assert_eq!(awq, Words { group_len: None, packer: Packer::Awq, ..plain });
        let fp8 = |more: &str| method(&format!(r#"{{"quant_method": "fp8"{more}}}"#));
        assert_eq!(fp8(r#", "weight_block_size": [64, 32]"#), Method::Fp8 { tile: Some([64, 32]) });
        assert_eq!(fp8(""), Method::Fp8 { tile: Some([128, 128]) });
        assert!(read(r#"{"quant_method": "gptq", "bits": 3}"#).unwrap_err().contains("bits` = 3 is not supported"));
        assert!(read(r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#).unwrap_err().contains("\"gemm\""));
        assert!(read(r#"{"quant_method": "fp8", "weight_block_size": [0, 1]}"#).unwrap_err().contains("two numbers"));
    }

    /// The method of one group of compressed-tensors in a format.
    fn scheme(format: &str, weights: &str) -> Result<Method, String> {
        read(&format!(
            r#"{{"quant_method": "compressed-tensors", "format": "{format}", "transform_config": {{}},
                "config_groups": {{"group_0": {{"targets": ["Linear"], "weights": {{{weights}}}}}}}}}"#
        ))
        .map(|stored| stored.unwrap().method)
    }

    #[test]
    fn the_schemes_of_compressed_tensors_are_read() {
        let rows = Words { packer: Packer::CompressedTensors, bits: 8, group_len: None, zeros_less_one: false, ..GPTQ };
        let words = Words { bits: 4, group_len: Some(32), is_reordered: false, ..rows };
        let rows = Words { is_symmetric: false, ..rows };
        for (format, weights, expected) in [
            ("mxfp4-pack-quantized", r#""num_bits": 4, "type": "float", "group_size": 32"#, Method::Mxfp4),
            ("nvfp4-pack-quantized", r#""num_bits": 4, "group_size": 16, "strategy": "tensor_group""#, Method::Nvfp4),
            ("pack-quantized", r#""num_bits": 4, "symmetric": true, "group_size": 32"#, Method::Words(words)),
            (
                "pack-quantized",
                r#""num_bits": 8, "symmetric": false, "group_size": null, "strategy": "channel", "actorder": "group""#,
                Method::Words(rows),
            ),
            ("float-quantized", r#""num_bits": 8, "strategy": "channel""#, Method::Fp8 { tile: None }),
            ("float-quantized", r#""block_structure": [64, 32]"#, Method::Fp8 { tile: Some([64, 32]) }),
        ] {
            assert_eq!(scheme(format, weights), Ok(expected), "{format} {weights}");
        }
        for (weights, told) in [
            (r#""num_bits": 3"#, "= 3 is not supported, expected one of [4, 8]"),
            (r#""num_bits": 0"#, "= 0 is not supported, expected one of [4, 8]"),
            (r#""num_bits": "4""#, "= \"4\" is not supported, expected one of [4, 8]"),
            (r#""num_bits": null"#, "is missing, expected one of [4, 8]"),
        ] {
            let key = "config.json: `quantization_config.config_groups.group_0.weights.num_bits`";
            assert_eq!(scheme("pack-quantized", weights), Err(format!("{key} {told}")));
        }
        assert!(scheme("int-quantized", "").unwrap_err().contains("`quantization_config.format` = \"int-quantized\""));
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
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"a": 1},
                    "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}, "c": ["Linear"]}}"#,
                "`quantization_config.config_groups` describes 2 schemes for weights, expected 1",
            ),
            ("7", "`quantization_config` = 7, expected an object"),
        ] {
            let problems = read(text).unwrap_err();
            assert!(problems.contains(part), "{problems}");
        }
        assert!(read(r#"{"quant_method": "hqq"}"#).unwrap_err().contains("original bf16 or f16 weights"));
    }
}
