//! Adapters on experts, whose parameters other trainers list apart from modules.

use serde_json::Value;

use super::foreign::{Foreign, Meaning, is_off};

/// Names of the list.
const LISTS: [&str; 2] = ["target_parameters", "lora_target_parameters"];

/// What such a list means: each expert has the rank of other layers there.
pub(super) fn of_key(from: &Foreign, name: &str, value: &Value) -> Option<Meaning> {
    if is_off(value) || !LISTS.contains(&name) {
        return None;
    }
    let parameters = parameters(from);
    if parameters.is_empty() {
        let message = "of parameters that are no modules, those of experts (`gate_up_proj`, `down_proj`) are adapted";
        return Some(Meaning::Lost(message.into()));
    }
    let rank = from.anywhere(&["lora_r", "lora_rank", "r", "rank"]).and_then(Value::as_i64).unwrap_or(8);
    let are_alone = from.anywhere(&["target_modules", "lora_target_modules", "lora_target"]).is_none_or(is_off);
    let targets = are_alone.then(|| ("lora.target_modules".into(), toml::Value::Array(parameters)));
    let settings = [("lora.expert_rank".into(), rank.into())].into_iter().chain(targets).collect();
    Some(Meaning::Near(
        settings,
        "each expert has this rank, as there; the rank over the experts of a token is usual".into(),
    ))
}

/// Targets with the parameters of experts among them, as they are listed here.
pub(super) fn with_parameters(modules: Meaning, from: &Foreign) -> Meaning {
    let Meaning::Set(mut settings) = modules else { return modules };
    if let [(key, toml::Value::Array(names))] = &mut settings[..]
        && key == "lora.target_modules"
    {
        names.extend(parameters(from));
    }
    Meaning::Set(settings)
}

fn parameters(from: &Foreign) -> Vec<toml::Value> {
    let names = from.anywhere(&LISTS).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let is_of_experts = |name: &&str| ["gate_up_proj", "down_proj"].iter().any(|end| name.ends_with(end));
    names.filter(is_of_experts).map(toml::Value::from).collect()
}
