//! Where another trainer's configuration says that its rows are.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::foreign::Meaning::{self, Lost, Nothing, Set};
use super::foreign::{Foreign, one};

/// mlx-lm's folder of train.jsonl and valid.jsonl, or the id of a data set.
pub(super) fn folder(from: &Foreign, value: &Value) -> Meaning {
    let Some(path) = value.as_str() else { return Nothing };
    let mut settings = vec![];
    let file = |name: &str| Path::new(path).join(name);
    if Path::new(path).is_dir() {
        for (section, name) in [("train", "train.jsonl"), ("eval", "valid.jsonl")] {
            if file(name).exists() {
                settings.push((format!("data.{section}.0.path"), file(name).to_string_lossy().into_owned().into()));
            }
        }
        return Set(settings);
    }
    one("data.train.0.path", value, from)
}

/// Axolotl's list of data sets.
pub(super) fn listed(section: &str, value: &Value) -> Meaning {
    let mut settings = Vec::new();
    for (index, source) in value.as_array().into_iter().flatten().filter_map(Value::as_object).enumerate() {
        let key = |name: &str| format!("data.{section}.{index}.{name}");
        let text = |name: &str| source.get(name).and_then(Value::as_str);
        let file = source.get("data_files").and_then(|files| files.get(0).unwrap_or(files).as_str());
        settings.extend(file.or(text("path")).map(|path| (key("path"), path.into())));
        settings.extend(text("type").and_then(format).map(|format| (key("format"), format.into())));
        settings.extend(text("split").into_iter().flat_map(|split| of_split(section, index, split)));
        settings.extend(text("name").map(|name| (key("name"), name.into())));
        settings.extend(columns(source).map(|columns| (key("columns"), columns)));
    }
    if settings.is_empty() { Lost("no data set with a `path` in it".into()) } else { Set(settings) }
}

/// Our name of a format; none where `auto` finds it.
fn format(name: &str) -> Option<&'static str> {
    match name {
        "completion" | "pretrain" => Some("text"),
        name if name.starts_with("alpaca") => Some("alpaca"),
        name if name.starts_with("sharegpt") => Some("sharegpt"),
        _ => None,
    }
}

/// `train[:10%]`: the split, and its rows.
fn of_split(section: &str, index: usize, split: &str) -> Vec<(String, toml::Value)> {
    let key = |name: &str| format!("data.{section}.{index}.{name}");
    let (name, part) = split.split_once("[:").unwrap_or((split, ""));
    let part = part.trim_end_matches(']');
    let rows = part.parse::<i64>().map_or_else(|_| part.into(), toml::Value::from);
    let rows = (!part.is_empty()).then(|| (key("rows"), rows));
    [(key("split"), name.into())].into_iter().chain(rows).collect()
}

/// Columns that have other names than the format expects.
fn columns(source: &Map<String, Value>) -> Option<toml::Value> {
    let names = [
        ("field_messages", "messages"),
        ("field_instruction", "instruction"),
        ("field_input", "input"),
        ("field_output", "output"),
        ("field", "text"),
    ];
    let column = |key: &str| source.get(key).and_then(Value::as_str);
    let renamed = names.into_iter().filter_map(|(key, ours)| Some((ours, column(key)?)));
    let renamed = renamed.filter(|(ours, column)| ours != column && *column != "conversations");
    let columns: toml::Table = renamed.map(|(ours, column)| (ours.to_owned(), column.into())).collect();
    (!columns.is_empty()).then_some(toml::Value::Table(columns))
}

/// LLaMA-Factory's names, looked up in `dataset_info.json`.
pub(super) fn named(from: &Foreign, section: &str, value: &Value) -> Meaning {
    let Some(list) = value.as_str() else { return Nothing };
    let (folder, known) = dataset_info(from);
    let mut settings = Vec::new();
    for (index, name) in list.split(',').map(str::trim).enumerate() {
        let key = |name: &str| format!("data.{section}.{index}.{name}");
        let entry = known.get(name);
        let text = |key: &str| entry.and_then(|entry| entry.get(key)?.as_str());
        let file = text("file_name").map(|file| folder.join(file).to_string_lossy().into_owned());
        let path = file.or_else(|| text("hf_hub_url").map(str::to_owned)).unwrap_or_else(|| name.to_owned());
        settings.push((key("path"), path.into()));
        settings.extend(text("subset").map(|subset| (key("name"), subset.into())));
        settings.extend(text("split").map(|split| (key("split"), split.into())));
        let ours = [("prompt", "instruction"), ("query", "input"), ("response", "output"), ("messages", "messages")];
        let column = |theirs: &str| entry.and_then(|entry| entry.get("columns")?.get(theirs)?.as_str());
        let renamed = ours.into_iter().filter_map(|(theirs, ours)| Some((ours, column(theirs)?)));
        let renamed = renamed.filter(|(ours, column)| ours != column && *column != "conversations");
        let columns: toml::Table = renamed.map(|(ours, column)| (ours.to_owned(), column.into())).collect();
        settings.extend((!columns.is_empty()).then(|| (key("columns"), toml::Value::Table(columns))));
    }
    Set(settings)
}

/// The folder of data sets and its `dataset_info.json`: as named, or beside a folder above the configuration.
fn dataset_info(from: &Foreign) -> (PathBuf, Map<String, Value>) {
    let named = from.get("dataset_dir").and_then(Value::as_str).unwrap_or("data");
    let above = from.path.ancestors().skip(1).map(|folder| folder.join(named));
    for folder in [PathBuf::from(named)].into_iter().chain(above) {
        let text = std::fs::read_to_string(folder.join("dataset_info.json")).ok();
        if let Some(Value::Object(known)) = text.and_then(|text| serde_json::from_str(&text).ok()) {
            return (folder, known);
        }
    }
    (PathBuf::from(named), Map::new())
}

/// Rows that a class of torchtune or litgpt stands for, and its options.
pub(super) fn of_class(from: &Foreign, value: &Value) -> Meaning {
    let class = ["_component_", "class_path"].into_iter().find_map(|key| value.get(key)?.as_str());
    let class = class.and_then(|class| class.rsplit('.').next()).unwrap_or_default();
    let option = |name: &str| value.get(name).or_else(|| value.get("init_args")?.get(name));
    let text = |name: &str| option(name).and_then(Value::as_str);
    let source = text("source").filter(|source| !matches!(*source, "json" | "csv" | "parquet" | "text"));
    let Some(path) = text("data_files").or(text("json_path")).or(source).or_else(|| on_the_hub(class)) else {
        return Lost(format!("`{class}` stands for rows that have no name here: name a file by --data"));
    };
    let mut settings = vec![("data.train.0.path".to_owned(), from.expanded(path).into())];
    let mut set = |key: &str, value: toml::Value| settings.push((key.to_owned(), value));
    if let Some(packed) = option("packed").and_then(Value::as_bool) {
        set("data.packing", packed.into());
    }
    if let Some(share) = option("val_split_fraction").and_then(Value::as_f64) {
        set("data.eval_split", share.into());
    }
    let on_inputs = option("train_on_input").and_then(Value::as_bool);
    let is_masked = option("mask_prompt").and_then(Value::as_bool);
    // The default of torchtune's alpaca rows.
    let on_inputs = on_inputs.or(is_masked.map(|is_masked| !is_masked));
    if let Some(on_inputs) = on_inputs.or_else(|| class.starts_with("alpaca").then_some(true)) {
        set("data.train_on_inputs", on_inputs.into());
    }
    Set(settings)
}

/// The data set of the Hub that a class reads.
fn on_the_hub(class: &str) -> Option<&'static str> {
    Some(match class {
        "alpaca_dataset" | "Alpaca" => "tatsu-lab/alpaca",
        "alpaca_cleaned_dataset" => "yahma/alpaca-cleaned",
        "Alpaca2k" => "mhenrichsen/alpaca_2k_test",
        "samsum_dataset" => "Samsung/samsum",
        "slimorca_dataset" => "Open-Orca/SlimOrca-Dedup",
        "grammar_dataset" => "liweili/c4_200m",
        "LIMA" => "GAIR/lima",
        "Dolly" => "databricks/databricks-dolly-15k",
        _ => return None,
    })
}
