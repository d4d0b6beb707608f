//! How a base that is already quantised is stored: `quantization_config` of config.json.

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
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nf4 { .. } => "nf4 of bitsandbytes",
            Self::Fp4 { .. } => "fp4 of bitsandbytes",
            Self::Int8 => "int8 of bitsandbytes",
        })
    }
}

impl StoredQuantisation {
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
        (method, ..) => {
            let found = method.map_or("is missing".to_owned(), |method| format!("= \"{method}\" is not supported"));
            let name = config.full_name("quant_method");
            let problem = Problem::new(format!("`{name}` {found}, expected \"bitsandbytes\""));
            config.reject("quant_method", problem.hint("use the repository with the original bf16 or f16 weights"));
            None
        }
    };
    let whole = config.any("llm_int8_skip_modules", Vec::new(), "a list of names, or null", names);
    Some(StoredQuantisation { method: method?, whole })
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
            ("{}", "`quantization_config.quant_method` is missing, expected \"bitsandbytes\""),
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
