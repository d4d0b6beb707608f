//! The recipe for TensorBoard's `HParams` tab, in which runs are compared.

use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::Message;
use protobuf::well_known_types::Value;
use tensorboard_proto::api::Status;
use tensorboard_proto::plugin_hparams::{HParamsPluginData, SessionEndInfo, SessionStartInfo};
use tensorboard_proto::summary::Summary_Value;
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::{TensorShapeProto, TensorShapeProto_Dim};
use tensorboard_proto::types::DataType;

use super::metadata;

/// Sections whose keys decide what is learned.
const SECTIONS: [&str; 6] = ["model", "lora", "data", "train", "optimizer", "scheduler"];

/// A run with the keys of its recipe begins.
pub(super) fn start(recipe: &str) -> Summary_Value {
    let recipe: toml::Table = recipe.parse().unwrap_or_default();
    let sections = SECTIONS.iter().filter_map(|section| Some((*section, recipe.get(*section)?.as_table()?)));
    let keys = sections.flat_map(|(section, table)| {
        table.iter().filter_map(move |(key, value)| Some((format!("{section}.{key}"), shown(value)?)))
    });
    let seed = recipe.get("seed").and_then(shown).map(|seed| ("seed".to_owned(), seed));
    let info =
        SessionStartInfo { hparams: keys.chain(seed).collect(), start_time_secs: now(), ..SessionStartInfo::default() };
    let mut data = HParamsPluginData::new();
    data.set_session_start_info(info);
    value("_hparams_/session_start_info", &data)
}

/// The run has ended.
pub(super) fn end(is_finished: bool) -> Summary_Value {
    let status = if is_finished { Status::STATUS_SUCCESS } else { Status::STATUS_FAILURE };
    let mut data = HParamsPluginData::new();
    data.set_session_end_info(SessionEndInfo { status, end_time_secs: now(), ..SessionEndInfo::default() });
    value("_hparams_/session_end_info", &data)
}

/// A number, a text or a boolean; lists as text. Tables, such as data files, are left out.
fn shown(value: &toml::Value) -> Option<Value> {
    let mut shown = Value::new();
    match value {
        #[expect(clippy::cast_precision_loss, reason = "the format has no other numbers")]
        toml::Value::Integer(number) => shown.set_number_value(*number as f64),
        toml::Value::Float(number) => shown.set_number_value(*number),
        toml::Value::Boolean(on) => shown.set_bool_value(*on),
        toml::Value::String(text) => shown.set_string_value(text.clone()),
        toml::Value::Array(items) if !items.iter().any(toml::Value::is_table) => {
            shown.set_string_value(value.to_string());
        }
        _ => return None,
    }
    Some(shown)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The plugin reads its data from the metadata; the tensor is empty.
fn value(tag: &str, data: &HParamsPluginData) -> Summary_Value {
    let mut metadata = metadata("hparams");
    metadata.mut_plugin_data().content = data.write_to_bytes().unwrap_or_default();
    let none = TensorShapeProto { dim: vec![TensorShapeProto_Dim::default()].into(), ..TensorShapeProto::default() };
    let mut value = Summary_Value { tag: tag.into(), ..Summary_Value::default() };
    value.set_metadata(metadata);
    value.set_tensor(TensorProto {
        dtype: DataType::DT_FLOAT,
        tensor_shape: protobuf::SingularPtrField::some(none),
        ..TensorProto::default()
    });
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_that_decide_what_is_learned_are_hyperparameters() {
        let recipe = "seed = 3\noutput_dir = \"x\"\n[lora]\nr = 8\ntarget_modules = [\"q_proj\"]\nrank_pattern = {}\n\
                      [train]\nprecision = \"bf16\"\n[data]\npacking = true\n[[data.train]]\npath = \"a\"\n[logging]\n\
                      logging_steps = 1\n";
        let value = start(recipe);
        let data = HParamsPluginData::parse_from_bytes(&value.get_metadata().get_plugin_data().content).unwrap();
        let hparams = data.get_session_start_info().get_hparams();
        let mut names: Vec<&str> = hparams.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["data.packing", "lora.r", "lora.target_modules", "seed", "train.precision"]);
        assert_eq!(hparams["lora.r"].get_number_value(), 8.0);
        assert_eq!(hparams["lora.target_modules"].get_string_value(), "[\"q_proj\"]");
        assert!(hparams["data.packing"].get_bool_value());
    }
}
