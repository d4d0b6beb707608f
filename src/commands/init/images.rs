//! Configurations that train on images, and bases in a form that is not read.

use std::path::Path;

use regex::Regex;
use serde_json::Value;

use super::foreign::{Foreign, is_off};
use crate::schema::Problem;

/// Keys that only images have.
const KEYS: &[&str] = &[
    "image_max_pixels", "image_min_pixels", "image_size", "image_resize_algorithm", "image_folder", "image_dir",
    "media_dir", "processor_type", "freeze_vision_tower", "freeze_multi_modal_projector", "train_mm_proj_only",
    "video_max_pixels", "video_maxlen", "video_fps", "finetune_vision_layers", "max_pixels", "vision_tower",
];

/// Models that read images, by a part of their name.
const NAMES: &str = r"(?i)(vl[-_.\d]|[-_]vl$|vlm|[-_]vision|llava|pixtral|paligemma|idefics|internvl|minicpm-v|molmo)";

/// Why no recipe is made of a configuration that trains on images. `is_named`: the user names another model.
pub(super) fn refusal(from: &Foreign, is_named: bool) -> Option<Problem> {
    let why =
        KEYS.iter().find(|key| from.anywhere(&[key]).is_some_and(|value| !is_off(value))).map(|key| format!("`{key}`"));
    let class = from.said.sees_images.then(|| "the class of its model".to_owned());
    let sees = |name: &&str| Regex::new(NAMES).is_ok_and(|pattern| pattern.is_match(name));
    let model = model(from).filter(|name| !is_named && sees(name)).map(|name| format!("`{name}`"));
    let why = class.or(model).or(why)?;
    let problem =
        Problem::new(format!("this trains on images, which lora-train does not: {why}")).at(from.path.display());
    Some(problem.hint("for rows of texts and a model that reads them: lora-train init --model MODEL --data FILE"))
}

/// The model of a configuration, by whatever name.
fn model(from: &Foreign) -> Option<&str> {
    let names = ["model_name_or_path", "base_model", "model_name", "model", "model_id_or_path", "checkpoint_dir"];
    from.anywhere(&names).and_then(Value::as_str)
}

/// What is said of a base in the form of MLX, whose weights are not read.
pub(super) fn of_mlx(model: &str) -> Option<String> {
    let config = std::fs::read(Path::new(model).join("config.json")).ok();
    let config: Option<Value> = config.and_then(|text| serde_json::from_slice(&text).ok());
    let quantised = config.as_ref().and_then(|config| config.get("quantization"));
    let is_here = quantised.is_some_and(|form| form.get("bits").is_some() && form.get("quant_method").is_none());
    let is_named = Regex::new(r"^mlx-community/.*\dbit").is_ok_and(|pattern| pattern.is_match(model));
    (is_here || is_named).then(|| {
        format!("{model} is quantised in MLX's form, which is not read: name the original by --model, and model.quantization = \"nf4\"")
    })
}
