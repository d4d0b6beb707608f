//! `adapter_config.json`, with the keys of PEFT's `LoraConfig`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::AdapterWeights;
use super::experts::parameter_names;
use crate::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::lora::targets::{FIRST_EXPERT, expert_parameter};
use crate::schema::ByName;
use crate::spec::{ExpertForm, is_of_expert, is_router, nested_name, nesting_of, router_in_transformers, short_name};

mod reading;

pub(super) use reading::{Read, from_json};

/// `adapter_config.json` of an adapter with these weights.
///
/// Only keys that PEFT has had for a long time are written: older versions refuse keys that they do not know.
pub(super) fn to_json(
    config: &LoraConfig,
    weights: &AdapterWeights,
    base_model_name_or_path: &str,
) -> serde_json::Value {
    let experts = with_experts(config, weights).unwrap_or_else(|| (config.clone(), Vec::new()));
    let (config, target_parameters) = &with_routers(experts, weights);
    let has_score = weights.scores();
    // Names of layers are in the other parts of a multimodal model, too.
    let nesting = weights.keys().find_map(|module| nesting_of(module));
    // PEFT cannot combine a regular expression with `layers_to_transform`, and has had `exclude_modules` not for long: the
    // modules are listed one by one.
    let has_layers = config.layers_to_transform.is_some();
    let one_by_one = (nesting.is_some() || matches!(config.target_modules, TargetModules::Regex(_))) && has_layers
        || config.exclude_modules.is_some();
    let target_modules = if one_by_one {
        let is_parameter =
            |module: &String| !target_parameters.is_empty() && (is_like_expert(module) || is_router(module));
        json!(weights.keys().filter(|module| !is_parameter(module)).collect::<Vec<_>>())
    } else {
        target_modules(&config.target_modules, weights, nesting)
    };
    let alpha_pattern = config.alpha_pattern.map(|alpha| number(*alpha));
    let init_lora_weights = match config.init_lora_weights {
        InitLoraWeights::Gaussian => json!("gaussian"),
        InitLoraWeights::Orthogonal => json!("orthogonal"),
        // Others as an adapter of the whole base.
        _ => json!(true),
    };
    // Other parts of a multimodal model have norms, too.
    let saved: Vec<String> = match nesting {
        Some(nesting) => weights.modules().map(|name| nested_name(nesting, name)).collect(),
        None => config.modules_to_save.clone().unwrap_or_default(),
    };
    let saved: Vec<String> = has_score.then(|| "score".to_owned()).into_iter().chain(saved).collect();
    let modules_to_save = (!saved.is_empty()).then_some(saved);
    let mut json = json!({
        "alpha_pattern": alpha_pattern,
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": init_lora_weights,
        "layers_pattern": config.layers_pattern.as_ref().filter(|_| !one_by_one),
        "layers_to_transform": config.layers_to_transform.as_ref().filter(|_| !one_by_one),
        "lora_alpha": number(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "modules_to_save": modules_to_save,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": config.rank_pattern,
        "target_modules": target_modules,
        "task_type": if has_score { "SEQ_CLS" } else { "CAUSAL_LM" },
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
    });
    // As in PEFT since 0.19, which takes names such as `gate_proj` for those of experts.
    if !target_parameters.is_empty() {
        json["target_parameters"] = json!(target_parameters);
    }
    // PEFT has had it since 0.15.
    if let Some(tokens) = &config.trainable_token_indices {
        json["trainable_token_indices"] = json!(tokens);
    }
    // Since 0.18; without it, PEFT takes embedding and head apart.
    if weights.is_tied {
        json["ensure_weight_tying"] = json!(true);
    }
    json
}

/// The section for an adapter of a model with experts, and the parameters that are named one by one: those of all experts, or weights
/// beside experts whose names PEFT would take for those of experts. It has one rank for all experts, which is `r`.
///
/// Source: `_convert_peft_config_moe` of PEFT 0.21.
fn with_experts(config: &LoraConfig, weights: &AdapterWeights) -> Option<(LoraConfig, Vec<String>)> {
    let Some(expert_rank) = config.expert_rank else { return beside_experts(config, weights) };
    let others = || weights.iter().filter(|(module, _)| !is_of_expert(module));
    let within = |module: &str| module.splitn(4, '.').last().map(regex::escape).unwrap_or_default();
    let mut written = config.clone();
    if expert_rank != config.r {
        written.r = expert_rank;
        // The scale of experts stays.
        written.lora_alpha = config.alpha_for(expert_rank);
        let ranks: BTreeMap<String, usize> = others().map(|(module, pair)| (within(module), pair.a.num_rows)).collect();
        // Of patterns the first that matches counts.
        let alphas = ranks.keys().map(|name| (name.clone(), config.lora_alpha));
        written.alpha_pattern = before(&config.alpha_pattern, alphas);
        written.rank_pattern = before(&config.rank_pattern, ranks.iter().map(|(name, r)| (name.clone(), *r)));
    }
    if weights.experts.is_joined() {
        return Some(with_parameters(written, weights));
    }
    if config.use_rslora {
        // PEFT joins gate and up, with twice the rank, by whose root it divides, and twice `lora_alpha`. Its own pattern for that,
        // `.*\.gate_up_proj`, comes later, also where it sorts them.
        let joined = (r"(experts\.gate_up_proj)".to_owned(), written.alpha_for(2 * expert_rank));
        written.alpha_pattern = before(&[joined].into_iter().collect(), pairs(&written.alpha_pattern));
    }
    if let TargetModules::Names(names) = &mut written.target_modules {
        // PEFT knows the names of experts' layers there, but not of their parameters.
        let first = || weights.keys().filter(|module| module.contains(FIRST_EXPERT));
        let is_of = |module: &String, name: &String| {
            expert_parameter(module).is_some_and(|parameter| is_end(&parameter, name) && !is_end(module, name))
        };
        let added: BTreeSet<String> = first()
            .filter(|module| names.iter().any(|name| is_of(module, name)))
            .map(|module| format!("{}{}", &FIRST_EXPERT[1..], short_name(module)))
            .collect();
        names.retain(|name| !first().any(|module| is_of(module, name)));
        names.extend(added);
    }
    Some(as_parameters(written, others().map(|(module, _)| module)))
}

/// The same where experts stay frozen: PEFT would wait for theirs, and leave these out. It has no dropout of parameters, nor magnitudes.
fn beside_experts(config: &LoraConfig, weights: &AdapterWeights) -> Option<(LoraConfig, Vec<String>)> {
    if weights.experts != ExpertForm::Apart || config.use_dora || !weights.keys().any(|module| is_like_expert(module)) {
        return None;
    }
    let others = || weights.keys().filter(|module| !is_like_expert(module));
    let names = match &config.target_modules {
        TargetModules::AllLinear => {
            others().map(|module| short_name(module).to_owned()).collect::<BTreeSet<_>>().into_iter().collect()
        }
        TargetModules::Names(names) => names.iter().filter(|name| !is_like_expert(name)).cloned().collect(),
        TargetModules::Regex(_) => others().cloned().collect(),
    };
    let target_modules = TargetModules::Names(names);
    Some(as_parameters(LoraConfig { target_modules, lora_dropout: 0.0, ..config.clone() }, weights.keys()))
}

/// Names of the weights among these modules that PEFT would take for those of experts, and patterns for them.
fn as_parameters<'a>(mut written: LoraConfig, modules: impl Iterator<Item = &'a String>) -> (LoraConfig, Vec<String>) {
    let of_parameter = |name: &String| if is_like_expert(name) { format!("{name}{WEIGHT}") } else { name.clone() };
    written.rank_pattern = written.rank_pattern.renamed(of_parameter);
    written.alpha_pattern = written.alpha_pattern.renamed(of_parameter);
    let names = modules.filter(|module| is_like_expert(module)).map(|module| parameter_of(module)).collect();
    (written, names)
}

/// The name of a module's weight among parameters.
fn parameter_of(module: &str) -> String {
    format!("{}.weight", module.splitn(3, '.').last().unwrap_or_default())
}

/// The same with the weights of routers among the parameters: few are linear layers to PEFT, which has no magnitudes of parameters.
fn with_routers(
    (mut written, mut parameters): (LoraConfig, Vec<String>),
    weights: &AdapterWeights,
) -> (LoraConfig, Vec<String>) {
    let (routers, others): (Vec<&String>, Vec<_>) = weights.keys().partition(|module| is_router(module));
    if routers.is_empty() || written.use_dora {
        return (written, parameters);
    }
    parameters.extend(routers.iter().map(|module| parameter_of(&router_in_transformers(module))));
    let is_of = |modules: &[&String], name: &str| modules.iter().any(|module| is_end(module, name));
    if let TargetModules::Names(names) = &mut written.target_modules {
        names.retain(|name| is_of(&others, name) || !is_of(&routers, name));
    }
    let of_parameter = |name: &String| {
        let is_router = is_of(&routers, &name.replace('\\', ""));
        if is_router { format!("{}{WEIGHT}", router_in_transformers(name)) } else { name.clone() }
    };
    written.rank_pattern = written.rank_pattern.renamed(of_parameter);
    written.alpha_pattern = written.alpha_pattern.renamed(of_parameter);
    written.lora_dropout = 0.0;
    (written, parameters)
}

/// The same where a file has those of experts joined: gate and up are one, of twice the rank, and names are those of other modules.
fn with_parameters(mut written: LoraConfig, weights: &AdapterWeights) -> (LoraConfig, Vec<String>) {
    let parameters = weights.parameters();
    let in_layer = |experts: &str| experts.rsplit_once(".layers.").map_or("", |(_, rest)| rest).to_owned();
    let names: BTreeSet<String> = parameters
        .iter()
        .flat_map(|(experts, parameters)| {
            // Without the number of the layer.
            let within = in_layer(experts).split_once('.').map(|(_, within)| within.to_owned()).unwrap_or_default();
            parameters.iter().map(move |parameter| format!("{within}.{}", parameter_names(weights.experts)[*parameter]))
        })
        .collect();
    // Before all that people wrote: these patterns are for other layers.
    let ranks = names.iter().map(|name| {
        let times = if name.ends_with("gate_up_proj") { 2 } else { 1 };
        (regex::escape(name), times * written.r)
    });
    let ranks: Vec<(String, usize)> = ranks.collect();
    let alphas: Vec<(String, f64)> = ranks.iter().map(|(name, r)| (name.clone(), written.alpha_for(*r))).collect();
    written.rank_pattern = before(&ranks.into_iter().collect(), pairs(&written.rank_pattern));
    written.alpha_pattern = before(&alphas.into_iter().collect(), pairs(&written.alpha_pattern));
    let is_other = |name: &String| weights.keys().any(|module| !is_of_expert(module) && is_end(module, name));
    if let TargetModules::Names(names) = &mut written.target_modules {
        names.retain(is_other);
    }
    (written, names.into_iter().collect())
}

/// Whether a name is the end of a module's name after a dot, or all of it.
fn is_end(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The entries of patterns.
fn pairs<T: Copy>(patterns: &ByName<T>) -> impl Iterator<Item = (String, T)> {
    patterns.keys().map(|name| (name.clone(), patterns[name]))
}

/// Patterns, and behind them others of other names.
fn before<T: Copy>(first: &ByName<T>, others: impl Iterator<Item = (String, T)>) -> ByName<T> {
    pairs(first).chain(others.filter(|(name, _)| !first.keys().any(|own| own == name))).collect()
}

/// The end of a pattern for a weight.
const WEIGHT: &str = r"\.weight";

/// Whether PEFT takes a module's name for one of experts.
fn is_like_expert(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("gate_proj" | "up_proj" | "down_proj"))
}

/// The value of `target_modules` for the layers of an adapter with these weights.
fn target_modules(written: &TargetModules, weights: &AdapterWeights, nesting: Option<&str>) -> serde_json::Value {
    let joined = weights.experts.is_joined();
    let modules = weights.keys().filter(|module| !(joined && is_of_expert(module))).map(|module| short_name(module));
    match (written, nesting) {
        (TargetModules::AllLinear, Some(nesting)) => json!(nested(nesting, modules)),
        (TargetModules::Names(names), Some(nesting)) => json!(nested(nesting, names.iter().map(String::as_str))),
        // PEFT writes the layer names once it has resolved "all-linear" for a model.
        (TargetModules::AllLinear, None) => json!(modules.collect::<BTreeSet<_>>()),
        (TargetModules::Names(names), None) => json!(names),
        (TargetModules::Regex(regex), _) => json!(regex),
    }
}

/// A regular expression for the layers of these names in the language model of a multimodal model. Names may begin within
/// `nesting`, as PEFT shortens them.
fn nested<'a>(nesting: &str, names: impl Iterator<Item = &'a str>) -> String {
    let inner = |name: &'a str| {
        [nesting, &nesting["model.".len()..]].into_iter().find_map(|start| name.strip_prefix(start)).unwrap_or(name)
    };
    let names: BTreeSet<String> = names.map(|name| regex::escape(inner(name))).collect();
    let names: Vec<String> = names.into_iter().collect();
    format!("{}(?:.*\\.)?(?:{})", regex::escape(nesting), names.join("|"))
}

/// Writes whole numbers without a fraction: PEFT declares `lora_alpha` as an integer.
fn number(value: f64) -> serde_json::Value {
    #[allow(clippy::cast_possible_truncation)] // checked in the line that follows
    let whole = value as i64;
    #[allow(clippy::cast_precision_loss, clippy::float_cmp)]
    if whole as f64 == value { json!(whole) } else { json!(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lora::Matrices;
    use crate::save::export::HostMatrix;
    use crate::schema::Problems;
    use crate::spec::{SITE_NAMES, in_layer};

    fn modules() -> Vec<String> {
        vec!["model.layers.0.self_attn.q_proj".into(), "model.layers.1.self_attn.q_proj".into()]
    }

    fn weights(modules: &[String]) -> AdapterWeights {
        let none = HostMatrix { num_rows: 0, num_columns: 0, values: Vec::new() };
        let pair = Matrices { a: none.clone(), b: none, magnitude: None };
        modules.iter().map(|module| (module.clone(), pair.clone())).collect()
    }

    fn all_modules() -> Vec<String> {
        [0, 1].iter().flat_map(|&layer| SITE_NAMES.map(|name| in_layer(layer, name))).collect()
    }

    fn read(text: &str) -> Result<LoraConfig, Problems> {
        from_json("a", text, modules().iter(), false).map(|read| read.config)
    }

    #[test]
    fn the_keys_are_the_long_known_ones_and_come_back_as_they_were() {
        let config = LoraConfig {
            r: 16,
            lora_alpha: 24.5,
            lora_dropout: 0.05,
            target_modules: TargetModules::Names(vec!["q_proj".into(), "v_proj".into()]),
            use_rslora: true,
            init_lora_weights: InitLoraWeights::Gaussian,
            layers_to_transform: Some(vec![0, 1]),
            rank_pattern: [("v_proj".to_owned(), 4)].into_iter().collect(),
            alpha_pattern: [("v_proj".to_owned(), 2.0)].into_iter().collect(),
            ..LoraConfig::default()
        };
        let json = to_json(&config, &weights(&modules()), "base");
        let text = serde_json::to_string_pretty(&json).unwrap();
        assert_eq!(read(&text).unwrap(), config);
        let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
        assert!(keys.is_sorted() && keys.len() == 18, "{keys:?}");
        assert!(text.contains("\"lora_alpha\": 24.5") && text.contains("\"v_proj\": 2\n"), "{text}");
        assert_eq!(json["base_model_name_or_path"], "base");
    }

    #[test]
    fn names_that_begin_within_that_of_the_language_model_come_back_as_the_same_layers() {
        let json = include_str!("../../../tests/golden/gemma3-multimodal/config.json");
        let model = crate::spec::ModelConfig::from_json(json).unwrap();
        let names = |names: &[&str]| TargetModules::Names(names.iter().map(ToString::to_string).collect());
        let layer = |layer: usize, site| model.module_name(layer, site);
        for target_modules in [
            names(&["language_model.layers.0.self_attn.q_proj", "1.self_attn.q_proj", "layers.2.mlp.up_proj"]),
            names(&[&layer(0, 0), "language_model.layers.1.self_attn.q_proj", "v_proj"]),
            TargetModules::Regex(r".*language_model.*\.q_proj".into()),
        ] {
            for change in [
                (|_| ()) as fn(&mut LoraConfig),
                |config| config.layers_to_transform = Some(vec![0, 1]),
                |config| config.exclude_modules = Some(TargetModules::Regex(r".*layers\.1\..*".into())),
                |config| {
                    config.rank_pattern =
                        [("language_model.layers.0.self_attn.q_proj".into(), 3)].into_iter().collect();
                },
                |config| config.modules_to_save = Some(vec!["language_model.norm".into(), "lm_head".into()]),
            ] {
                let mut config = LoraConfig { target_modules: target_modules.clone(), ..LoraConfig::default() };
                change(&mut config);
                crate::save::export::check_written(&config, &model, false).unwrap();
            }
        }
        let mut modules: Vec<String> = vec![layer(0, 0), layer(1, 0)];
        let config = LoraConfig {
            target_modules: names(&["language_model.layers.0.self_attn.q_proj"]),
            ..LoraConfig::default()
        };
        modules.truncate(1);
        let json = to_json(&config, &weights(&modules), "base");
        assert_eq!(json["target_modules"], r"model\.language_model\.(?:.*\.)?(?:layers\.0\.self_attn\.q_proj)");
    }

    #[test]
    fn all_linear_is_written_as_names_and_a_regex_with_layers_as_modules() {
        let json = to_json(&LoraConfig::default(), &weights(&all_modules()), "base");
        let all = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
        assert_eq!(json["target_modules"], json!(all));
        assert_eq!(json["lora_alpha"], json!(16));
        let mut config =
            LoraConfig { target_modules: TargetModules::Regex(".*q_proj".into()), ..LoraConfig::default() };
        assert_eq!(to_json(&config, &weights(&modules()), "base")["target_modules"], ".*q_proj");
        config.layers_to_transform = Some(vec![0, 1]);
        let json = to_json(&config, &weights(&modules()), "base");
        assert_eq!(json["target_modules"], json!(modules()));
        assert_eq!(json["layers_to_transform"], json!(null));
    }

    #[test]
    fn keys_of_newer_versions_are_read_over_where_they_are_switched_off() {
        let text = r#"{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "auto_mapping": null,
            "target_modules": ["v_proj", "q_proj"], "peft_version": "0.21.2", "megatron_core": "megatron.core",
            "qalora_group_size": 16, "use_qalora": false, "layer_replication": null, "loftq_config": {},
            "trainable_token_indices": null, "use_bdlora": null, "lora_bias": false, "some_future_key": []}"#;
        let config = read(text).unwrap();
        assert_eq!(config.target_modules, TargetModules::Names(vec!["q_proj".into(), "v_proj".into()]));
        assert_eq!((config.r, config.lora_alpha, config.lora_dropout), (4, 8.0, 0.0));
    }

    #[test]
    fn modules_come_from_the_tensors_where_the_config_leaves_them_open() {
        let by_tensors = TargetModules::Names(modules());
        assert_eq!(read(r#"{"peft_type": "LORA"}"#).unwrap().target_modules, by_tensors);
        let text = r#"{"peft_type": "LORA", "target_modules": "all-linear", "exclude_modules": ["k_proj"]}"#;
        assert_eq!(read(text).unwrap().target_modules, by_tensors);
    }

    #[test]
    fn everything_that_would_compute_something_else_is_refused_at_once() {
        let text = r#"{"peft_type": "LOHA", "task_type": "SEQ_CLS", "bias": "all", "use_dora": 1,
            "modules_to_save": [7], "init_lora_weights": "pissa", "r": 0, "alora_invocation_tokens": [1],
            "layer_replication": [[0, 2]], "fan_in_fan_out": true, "rank_pattern": {"q_proj": "x"}}"#;
        let problems = read(text).unwrap_err().to_string();
        for key in [
            "peft_type", "task_type", "bias", "use_dora", "modules_to_save", "init_lora_weights", "r",
            "alora_invocation_tokens", "layer_replication", "fan_in_fan_out", "rank_pattern.q_proj",
        ] {
            assert!(problems.contains(&format!("`{key}` = ")), "{key}: {problems}");
        }
        assert!(read("{").unwrap_err().to_string().contains("not valid JSON"));
    }
}
