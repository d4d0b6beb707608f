//! Where another trainer's configuration says that its rows are.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::foreign::Meaning::{self, Lost, Near, Nothing, Set};
use super::foreign::{Foreign, READ, is_off, one};
use super::objective::learns_otherwise;

/// A folder of rows to train and to evaluate on, or a file, or the id of a data set.
pub(super) fn folder(from: &Foreign, value: &Value, names: [&str; 2]) -> Meaning {
    let Some(path) = value.as_str() else { return Nothing };
    let mut settings = vec![];
    let file = |name: &str| Path::new(path).join(name);
    if Path::new(path).is_dir() {
        for (section, name) in ["train", "eval"].into_iter().zip(names) {
            if file(name).exists() {
                settings.push((format!("data.{section}.0.path"), file(name).to_string_lossy().into_owned().into()));
            }
        }
        let none = || Lost(format!("there is no {} in this folder", names[0]));
        return if settings.is_empty() { none() } else { Set(settings) };
    }
    one("data.train.0.path", value, from)
}

/// A file of a data set or folder, if the source names one.
fn file_of(source: &Map<String, Value>, file: &str) -> String {
    let folder = source.get("path").and_then(Value::as_str);
    let folder = folder.filter(|path| path.contains('/') || Path::new(path).is_dir());
    folder.map_or(file.to_owned(), |folder| {
        let home = if Path::new(folder).is_dir() { "" } else { "hf://datasets/" };
        format!("{home}{folder}/{file}")
    })
}

/// A key of axolotl's list of data sets, `0.path`; none where it means what it means elsewhere.
pub(super) fn listed(from: &Foreign, list: &str, section: &str, below: &str, value: &Value) -> Option<Meaning> {
    let texts = list == "pretraining_dataset";
    // One name alone.
    let (index, key) = below.split_once('.').or_else(|| Some(("0", "path")).filter(|_| texts && value.is_string()))?;
    let named = Map::new();
    let source = from.get(&format!("{list}.{index}")).and_then(Value::as_object).unwrap_or(&named);
    let ours = |name: &str| format!("data.{section}.{index}.{name}");
    let text = value.as_str().unwrap_or_default();
    Some(match key {
        _ if value.is_null() => Nothing,
        "path" if source.contains_key("data_files") => READ,
        "path" => {
            let format = texts.then(|| (ours("format"), "text".into()));
            Set([(ours("path"), text.into())].into_iter().chain(format).collect())
        }
        "data_files" => match (value.as_array().map(Vec::as_slice), value.get(0).unwrap_or(value).as_str()) {
            (None | Some([_]), Some(file)) => Set(vec![(ours("path"), file_of(source, file).into())]),
            _ => Lost("several files: write a [[data.train]] for each".into()),
        },
        "type" if ALPACA.contains(&text) => {
            let lists = ["datasets", "test_datasets"].into_iter().filter_map(|list| from.get(list)?.as_array());
            let mut types = lists.flatten().map(|source| source.get("type").and_then(Value::as_str));
            let is_alone = types.all(|name| name.is_some_and(|name| ALPACA.contains(&name)));
            alpaca(vec![(ours("format"), "alpaca".into())], is_alone)
        }
        "type" if text.starts_with("alpaca") => Near(
            format(text).map(|format| (ours("format"), format.into())).into_iter().collect(),
            "a prompt in words of its own there; the model's chat template here".into(),
        ),
        "type" => match format(text) {
            Some(format) => Set(vec![(ours("format"), format.into())]),
            None if text.starts_with("chat_template") => Nothing,
            None => Lost("a form of its trainer's own; `lora-train help data.md` has those of rows here".into()),
        },
        "split" => split(section, index.parse().ok()?, text),
        "name" => Set(vec![(ours("name"), text.into())]),
        "ds_type" => Nothing,
        "message_property_mappings.role" | "message_field_role" if matches!(text, "role" | "from") => Nothing,
        "message_property_mappings.content" | "message_field_content" if matches!(text, "content" | "value") => Nothing,
        "type.format" | "type.no_input_format" => Lost("a prompt of one's own: write it into the rows".into()),
        key if COLUMNS.iter().any(|(theirs, _)| *theirs == key.trim_start_matches("type.")) => {
            columns(from, source).map_or(Nothing, |columns| Set(vec![(ours("columns"), columns)]))
        }
        key if key.starts_with("roles.") => {
            let known = ["system", "user", "human", "assistant", "gpt", "model", "tool"];
            let names = value.as_array().into_iter().flatten();
            match names.filter_map(Value::as_str).find(|name| !known.contains(name)) {
                Some(name) => Lost(format!("the role `{name}` has another name here; change it in the rows")),
                None => Nothing,
            }
        }
        "chat_template" | "roles_to_train" | "train_on_eos" => return None,
        _ if is_off(value) => Nothing,
        _ => Lost(NO_SUCH_KEY.into()),
    })
}

/// Names of axolotl for the published prompt of Alpaca.
const ALPACA: [&str; 2] = ["alpaca", "alpaca_instruct.load"];

/// Rows in the published prompt of Alpaca, which is ours where there is no chat template.
fn alpaca(mut settings: Vec<(String, toml::Value)>, is_alone: bool) -> Meaning {
    if !is_alone {
        let difference = "Alpaca's prompt there; here the model's chat template, which the other rows need";
        return Near(settings, difference.into());
    }
    settings.push(("data.chat_template".into(), "none".into()));
    Near(settings, "a line break follows Alpaca's `### Response:` there, none here".into())
}

const NO_SUCH_KEY: &str = "there is no such key of a data set here";

/// Our name of a format; none where `auto` finds it.
fn format(name: &str) -> Option<&'static str> {
    match name {
        "completion" | "pretrain" => Some("text"),
        // `load_qa` and others have columns of other names, which `auto` knows.
        name if name.starts_with("alpaca") && !name.contains(".load_") => Some("alpaca"),
        name if name.starts_with("sharegpt") => Some("sharegpt"),
        _ => None,
    }
}

/// `train[:10%]`: the split, and its rows.
pub(super) fn split(section: &str, index: usize, split: &str) -> Meaning {
    let key = |name: &str| format!("data.{section}.{index}.{name}");
    let (name, part) = split.split_once('[').unwrap_or((split, "]"));
    let rows = part.trim_end_matches(']');
    let Some(rows) = rows.strip_prefix(':').or(Some("").filter(|_| rows.is_empty())) else {
        return Lost("`rows` takes the first rows alone; data.eval_split holds rows out".into());
    };
    let value = rows.parse::<i64>().map_or_else(|_| rows.into(), toml::Value::from);
    let rows = (!rows.is_empty()).then(|| (key("rows"), value));
    Set([(key("split"), name.into())].into_iter().chain(rows).collect())
}

/// Names of columns, with ours.
const COLUMNS: [(&str, &str); 13] = [
    ("field_chosen", "chosen"),
    ("field_rejected", "rejected"),
    ("field_messages", "messages"),
    ("field_instruction", "instruction"),
    ("field_input", "input"),
    ("field_output", "output"),
    ("field_system", "system"),
    ("field", "text"),
    ("text_column", "text"),
    ("prompt_feature", "prompt"),
    ("completion_feature", "completion"),
    ("chat_feature", "messages"),
    ("text_feature", "text"),
];

/// Columns that have other names than the format expects.
fn columns(from: &Foreign, source: &Map<String, Value>) -> Option<toml::Value> {
    // Of preferences the conversation is what is asked.
    let of_kind = |ours| if ours == "messages" && learns_otherwise(from) { "prompt" } else { ours };
    let below = source.get("type").and_then(Value::as_object);
    let column = |key: &str| source.get(key).or_else(|| below?.get(key)).and_then(Value::as_str);
    let renamed = COLUMNS.into_iter().filter_map(|(key, ours)| Some((of_kind(ours), column(key)?)));
    let renamed = renamed.filter(|(ours, column)| ours != column && *column != "conversations");
    let columns: toml::Table = renamed.map(|(ours, column)| (ours.to_owned(), column.into())).collect();
    (!columns.is_empty()).then_some(toml::Value::Table(columns))
}

/// A key of mlx-lm's data set of the Hub.
pub(super) fn hugging_face(from: &Foreign, path: &str, value: &Value) -> Meaning {
    let source = from.get("hf_dataset").and_then(Value::as_object);
    let text = value.as_str().unwrap_or_default();
    let evaluated = || source.and_then(|source| source.get("path")?.as_str());
    match path.trim_start_matches("hf_dataset.") {
        "path" => one("data.train.0.path", value, from),
        "name" | "config.name" => one("data.train.0.name", value, from),
        "train_split" => split("train", 0, text),
        "valid_split" => match (split("eval", 0, text), evaluated()) {
            (Set(split), Some(path)) => {
                Set([("data.eval.0.path".into(), path.into())].into_iter().chain(split).collect())
            }
            (other, _) => other,
        },
        key if COLUMNS.iter().any(|(theirs, _)| *theirs == key) => {
            let columns = source.and_then(|source| columns(from, source));
            columns.map_or(Nothing, |columns| Set(vec![("data.train.0.columns".into(), columns)]))
        }
        _ if is_off(value) => Nothing,
        _ => Lost(NO_SUCH_KEY.into()),
    }
}

/// A key of a data set of TRL's mixture.
pub(super) fn mixed(path: &str, value: &Value) -> Meaning {
    let (index, key) = path.trim_start_matches("dataset_mixture.datasets.").split_once('.').unwrap_or_default();
    let set = |name: &str| Set(vec![(format!("data.train.{index}.{name}"), value.as_str().unwrap_or_default().into())]);
    match key {
        _ if value.is_null() => Nothing,
        "path" | "id" => set("path"),
        "name" | "config" => set("name"),
        "split" => split("train", index.parse().unwrap_or(0), value.as_str().unwrap_or_default()),
        // Those that are kept.
        "columns" => Nothing,
        "weight" if value.as_f64() == Some(1.0) => Nothing,
        "weight" => Lost("a share of its rows there; here `rows` takes the first, as in rows = \"10%\"".into()),
        _ if is_off(value) => Nothing,
        _ => Lost(NO_SUCH_KEY.into()),
    }
}

/// LLaMA-Factory's `max_samples`: so many rows of each data set.
pub(super) fn rows(from: &Foreign, value: &Value) -> Meaning {
    let Some(rows) = value.as_i64() else { return Nothing };
    let sections = [("dataset", "train"), ("eval_dataset", "eval")];
    let of = |(theirs, section): (&str, &'static str)| {
        let number = from.get(theirs).and_then(Value::as_str).map_or(0, |list| list.split(',').count());
        (0..number).map(move |index| (format!("data.{section}.{index}.rows"), rows.into()))
    };
    Set(sections.into_iter().flat_map(of).collect())
}

/// LLaMA-Factory's names, looked up in `dataset_info.json`.
pub(super) fn named(from: &Foreign, section: &str, value: &Value) -> Meaning {
    let Some(list) = value.as_str() else { return Nothing };
    let (folder, known) = dataset_info(from);
    let is_text = from.get("stage").is_some_and(|stage| stage == "pt");
    let (mut settings, mut unknown) = (Vec::new(), Vec::new());
    for (index, name) in list.split(',').map(str::trim).enumerate() {
        let key = |name: &str| format!("data.{section}.{index}.{name}");
        let entry = known.get(name);
        let text = |key: &str| entry.and_then(|entry| entry.get(key)?.as_str());
        let file = text("file_name").map(|file| folder.join(file).to_string_lossy().into_owned());
        let path = file.or_else(|| text("hf_hub_url").map(str::to_owned)).unwrap_or_else(|| {
            // Of LLaMA-Factory's `dataset_dir: ONLINE`.
            unknown.extend((!name.contains('/') && !Path::new(name).exists()).then(|| format!("`{name}`")));
            name.to_owned()
        });
        settings.push((key("path"), path.into()));
        settings.extend(is_text.then(|| (key("format"), "text".into())));
        settings.extend(text("subset").map(|subset| (key("name"), subset.into())));
        settings.extend(text("split").map(|split| (key("split"), split.into())));
        let ours: &[(&str, &str)] = if is_text {
            &[("prompt", "text")]
        } else {
            &[("prompt", "instruction"), ("query", "input"), ("response", "output"), ("messages", "messages")]
        };
        let column = |theirs: &str| entry.and_then(|entry| entry.get("columns")?.get(theirs)?.as_str());
        let renamed = ours.iter().filter_map(|(theirs, ours)| Some((*ours, column(theirs)?)));
        let renamed = renamed.filter(|(ours, column)| ours != column && *column != "conversations");
        let columns: toml::Table = renamed.map(|(ours, column)| (ours.to_owned(), column.into())).collect();
        settings.extend((!columns.is_empty()).then(|| (key("columns"), toml::Value::Table(columns))));
    }
    if unknown.is_empty() {
        return Set(settings);
    }
    let file = folder.join("dataset_info.json");
    let lacks = if known.is_empty() { "there is no" } else { "no entry in" };
    let unknown = unknown.join(", ");
    Near(settings, format!("{unknown}: {lacks} {}; write the file of each as path in [[data.train]]", file.display()))
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

/// A key of torchtune's data set.
pub(super) fn of_torchtune(from: &Foreign, path: &str, value: &Value) -> Meaning {
    let key = path.trim_start_matches("dataset.");
    let text = value.as_str().unwrap_or_default();
    let has = |key: &str| from.get(&format!("dataset.{key}")).is_some_and(|value| !is_off(value));
    match key {
        "_component_" => of_class(text, has("source") || has("data_files")),
        "source" if has("data_files") => READ,
        "source" | "data_files" if value.is_string() => one("data.train.0.path", value, from),
        "split" => split("train", 0, text),
        "name" | "subset" => one("data.train.0.name", value, from),
        "packed" => one("data.packing", value, from),
        "train_on_input" => one("data.train_on_inputs", value, from),
        "new_system_prompt" if !is_off(value) => one("data.system", value, from),
        "conversation_column" if !matches!(text, "messages" | "conversations") => {
            let is_openai = from.get("dataset.conversation_style").is_some_and(|style| style == "openai");
            let ours = if is_openai { "messages" } else { "conversations" };
            let columns = toml::Table::from_iter([(ours.to_owned(), text.into())]);
            Set(vec![("data.train.0.columns".into(), toml::Value::Table(columns))])
        }
        "conversation_style" | "conversation_column" => Nothing,
        _ if is_off(value) => Nothing,
        _ => Lost(NO_SUCH_KEY.into()),
    }
}

/// A key of the class of litgpt's rows.
pub(super) fn of_litgpt(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let key = path.trim_start_matches("data.").trim_start_matches("init_args.");
    Some(match key {
        "class_path" => of_litgpt_class(from, value),
        "json_path" => folder(from, value, ["train.json", "val.json"]),
        "mask_prompt" => return None,
        "prompt_style" if value == "alpaca" => READ,
        "val_split_fraction" if !is_off(value) => one("data.eval_split", value, from),
        "prompt_style" if !is_off(value) => Lost("rows take the form of the model's chat template".into()),
        "ignore_index" | "seed" | "num_workers" | "download_dir" => Nothing,
        _ if is_off(value) => Nothing,
        _ => Lost(NO_SUCH_KEY.into()),
    })
}

pub(super) fn of_litgpt_class(from: &Foreign, value: &Value) -> Meaning {
    let argument = |key: &str| from.get("data.init_args").or_else(|| from.get("data"))?.get(key);
    let (class, path) = (value.as_str().unwrap_or_default(), argument("json_path").and_then(Value::as_str));
    let Set(mut settings) = of_class(class, path.is_some()) else { return of_class(class, path.is_some()) };
    // Its defaults: the published prompt of Alpaca, and rows that are held out.
    let share = match class.rsplit('.').next().unwrap_or_default() {
        "JSON" | "Alpaca2k" => 0.05,
        "Alpaca" => 0.03865,
        "Dolly" => 0.1,
        _ => return Set(settings),
    };
    if argument("val_split_fraction").is_none_or(Value::is_null) && !path.is_some_and(|path| Path::new(path).is_dir()) {
        settings.push(("data.eval_split".into(), share.into()));
    }
    if argument("prompt_style").is_none_or(|style| style == "alpaca") { alpaca(settings, true) } else { Set(settings) }
}

/// A class that stands for rows, or reads those that another key names.
fn of_class(path: &str, is_named: bool) -> Meaning {
    let class = path.rsplit('.').next().unwrap_or_default();
    let rows = on_the_hub(class).filter(|_| !is_named).map(|path| ("data.train.0.path".to_owned(), path.into()));
    if rows.is_none() && !is_named {
        return Lost(format!("`{class}` stands for rows that have no name here: name a file by --data"));
    }
    // torchtune's default.
    let on_inputs = class.starts_with("alpaca_").then(|| ("data.train_on_inputs".to_owned(), true.into()));
    let is_alpaca = on_inputs.is_some();
    let settings = rows.into_iter().chain(on_inputs).collect();
    if is_alpaca {
        return Near(
            settings,
            "torchtune wraps each question in Alpaca's prompt; here the question stands alone".into(),
        );
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
