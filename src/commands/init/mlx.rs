//! Bases in MLX's form, which is not read.

use std::path::Path;

use regex::Regex;
use serde_json::Value;

/// What is said of such a base.
pub(super) fn of_base(model: &str) -> Option<String> {
    let config = std::fs::read(Path::new(model).join("config.json")).ok();
    let config: Option<Value> = config.and_then(|text| serde_json::from_slice(&text).ok());
    let quantised = config.as_ref().and_then(|config| config.get("quantization"));
    let is_here = quantised.is_some_and(|form| form.get("bits").is_some() && form.get("quant_method").is_none());
    let is_named = Regex::new(r"^mlx-community/.*\dbit").is_ok_and(|pattern| pattern.is_match(model));
    (is_here || is_named).then(|| {
        format!("{model} is quantised in MLX's form, which is not read: name the original by --model, and model.quantization = \"nf4\"")
    })
}
