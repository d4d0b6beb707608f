//! What `adapter_config.json` says, read.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::WEIGHT;
use crate::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::lora::targets::FIRST_EXPERT;
use crate::save::export::experts::is_of_all;
use crate::schema::{ByName, Node, Problem, Problems, Section, Value, read_json};
use crate::spec::is_of_expert;

/// Keys that change neither what the adapter computes nor where it sits.
const WITHOUT_EFFECT: [&str; 10] = [
    "auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision",
];

/// Any number above 0.
const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

/// What `adapter_config.json` says.
pub(in crate::save::export) struct Read {
    pub(in crate::save::export) config: LoraConfig,
    pub(in crate::save::export) base_model_name_or_path: Option<String>,
    /// Whether embedding and head are one.
    pub(in crate::save::export) is_tied: bool,
    /// The version of PEFT that wrote it.
    pub(in crate::save::export) peft_version: Option<[u64; 3]>,
}

/// Reads the text of `adapter_config.json`. `file` is its name in messages; `modules` are the module names of the tensors, among which
/// a head that scores may be. Those of experts that are one are no targets: these follow with a model.
///
/// # Errors
/// Every setting that this trainer does not support.
pub(in crate::save::export) fn from_json<'a>(
    file: &str,
    text: &str,
    modules: impl Iterator<Item = &'a String>,
    has_score: bool,
) -> Result<Read, Problems> {
    read_json(file, text, |json| {
        let scores = refuse_other_methods(json, has_score);
        // The head that scores is known by its tensor.
        let is_whole = |name: &String| !(scores && SCORES.contains(&&**name));
        let whole = json.any("modules_to_save", None, "a list of names", accept_patterns);
        let whole: Vec<String> = whole.into_iter().flatten().filter(is_whole).collect();
        let is_first = |module: &String| module.contains(FIRST_EXPERT);
        // The first expert stands for all.
        let modules = modules.filter(|module| is_first(module) || is_of_all(module) || !is_of_expert(module));
        let (of_all, modules): (Vec<String>, Vec<String>) = modules.cloned().partition(|module| is_of_all(module));
        let has_experts = !of_all.is_empty() || modules.iter().any(is_first);
        let targets = json.any("target_modules", None, TARGETS, accept_targets);
        let parameters = weights_of_modules(json);
        let of_module =
            |name: &String| name.strip_suffix(WEIGHT).or(name.strip_suffix(".weight")).unwrap_or(name).to_owned();
        let r = json.count("r", 8, 1..);
        let excludes = json.value("exclude_modules").is_some_and(|value| !is_empty(value));
        let config = LoraConfig {
            // PEFT's own defaults, for missing keys.
            r,
            lora_alpha: json.number("lora_alpha", 8.0, POSITIVE),
            lora_dropout: json.number("lora_dropout", 0.0, 0.0..1.0),
            // Where PEFT chose the modules by model, or some are excluded: those of the tensors.
            target_modules: targets
                .filter(|_| !excludes)
                .map_or(TargetModules::Names(modules), |targets| targets.and(parameters)),
            use_rslora: json.boolean("use_rslora", false),
            use_dora: json.boolean("use_dora", false),
            init_lora_weights: init_lora_weights(json),
            eva_rho: None,
            // Their effect is in the modules.
            exclude_modules: None,
            layers_to_transform: json.any("layers_to_transform", None, LAYERS, accept_layers).filter(|_| !excludes),
            layers_pattern: json.any("layers_pattern", None, PATTERNS, accept_patterns).filter(|_| !excludes),
            rank_pattern: json.counts_by_name("rank_pattern", ByName::default(), 1..).renamed(of_module),
            alpha_pattern: json.numbers_by_name("alpha_pattern", ByName::default(), POSITIVE).renamed(of_module),
            expert_rank: has_experts.then_some(r),
            trainable_token_indices: json.any("trainable_token_indices", None, TOKENS, accept_tokens),
            modules_to_save: Some(whole).filter(|names| !names.is_empty()),
            loraplus_lr_ratio: None,
            start_from: None,
        };
        let base = json.any("base_model_name_or_path", None, "a name", |value| {
            value.text().map(|name| Some(name.to_owned())).ok_or(None)
        });
        let is_tied = json.boolean("ensure_weight_tying", false);
        let peft_version = json.value("peft_version").and_then(Value::text).and_then(version);
        refuse_unknown(json);
        Some(Read { config, base_model_name_or_path: base, is_tied, peft_version })
    })
}

/// Modules whose weights are named as parameters: the others are of all experts.
fn weights_of_modules(json: &mut Section) -> Vec<String> {
    let parameters = json.any("target_parameters", None, PATTERNS, accept_patterns);
    parameters.into_iter().flatten().filter_map(|name| name.strip_suffix(".weight").map(str::to_owned)).collect()
}

/// The numbers of a version such as 0.19.0 or 0.19.1.dev0.
fn version(text: &str) -> Option<[u64; 3]> {
    let mut numbers = text.split(['.', '-', '+', '@']).map(|part| part.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or_default()])
}

/// Null, false or empty: treated as absent.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Boolean(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Table(table) => table.is_empty(),
        value => value.text().is_some_and(str::is_empty),
    }
}

/// Names of a head that scores.
const SCORES: [&str; 2] = ["score", "classifier"];

/// Whether it scores texts.
fn refuse_other_methods(json: &mut Section, has_score: bool) -> bool {
    if json.value("peft_type").is_none() {
        json.problem("peft_type", "is missing, expected \"LORA\"");
    }
    for (key, supported, expected) in
        [("peft_type", "LORA", "\"LORA\""), ("bias", "none", "\"none\": trained biases have no place in this model")]
    {
        json.only(key, expected, |value| value.text() == Some(supported));
    }
    for (key, expected) in
        [("fan_in_fan_out", "false: weights are [out, in] here"), ("lora_bias", "false: B has no bias here")]
    {
        json.only(key, expected, |value| *value == Value::Boolean(false));
    }
    let tasks = "\"CAUSAL_LM\", or \"SEQ_CLS\" with one label: adapters of other tasks bring a head of their own";
    let (task, scores) = ("task_type", |value: &Value| value.text() == Some("SEQ_CLS") && has_score);
    json.only(task, tasks, |value| value.text() == Some("CAUSAL_LM") || scores(value));
    json.value(task).is_some_and(scores)
}

fn init_lora_weights(json: &mut Section) -> InitLoraWeights {
    match json.value("init_lora_weights") {
        None | Some(Value::Boolean(_)) => {}
        Some(value) => match value.text() {
            Some("gaussian") => return InitLoraWeights::Gaussian,
            Some("orthogonal") => return InitLoraWeights::Orthogonal,
            Some("eva") => {}
            Some(name) => {
                let message =
                    format!("`init_lora_weights` = \"{name}\" is not supported: it changes the base weights too");
                let hint =
                    "convert the adapter with `path_initial_model_for_weight_conversion` of PEFT's save_pretrained";
                json.reject("init_lora_weights", Problem::new(message).hint(hint));
            }
            None => json.problem("init_lora_weights", format!("= {}, expected true or a name", value.shown())),
        },
    }
    InitLoraWeights::Kaiming
}

const LAYERS: &str = "a layer number or a list of them";

fn accept_layers(value: &Value) -> Result<Option<Vec<usize>>, Option<String>> {
    let layer = |value: &Value| match value {
        Value::Integer(layer) => usize::try_from(*layer).ok(),
        _ => None,
    };
    let layers: Option<Vec<usize>> = match value {
        Value::Array(layers) => layers.iter().map(|node| layer(node.value())).collect(),
        single => layer(single).map(|layer| vec![layer]),
    };
    layers.map(|layers| Some(layers).filter(|layers| !layers.is_empty())).ok_or(None)
}

const TOKENS: &str = "a list of token numbers, each once";

/// A list, or one for the embedding, with which a head that is tied to it has the same.
fn accept_tokens(value: &Value) -> Result<Option<Vec<usize>>, Option<String>> {
    let number = |node: &Node| match node.value() {
        Value::Integer(token) => usize::try_from(*token).ok(),
        _ => None,
    };
    match value {
        Value::Table(table) if !table.is_empty() => {
            let names = ["embed_tokens", "model.embed_tokens", "model.language_model.embed_tokens"];
            let embedding = names.iter().find_map(|name| table.get(name)).map(Node::value);
            let other = table.get("lm_head").map(Node::value).filter(|head| Some(*head) != embedding);
            match (embedding, other) {
                (Some(tokens), None) => accept_tokens(tokens),
                _ => Err(Some("only the embedding's rows are supported, and those of a head tied to it".to_owned())),
            }
        }
        Value::Array(tokens) => {
            let tokens = tokens.iter().map(number).collect::<Option<Vec<_>>>().ok_or(None)?;
            let mut known = BTreeSet::new();
            if let Some(twice) = tokens.iter().find(|token| !known.insert(**token)) {
                return Err(Some(format!("{twice} is there twice")));
            }
            Ok(Some(tokens).filter(|tokens| !tokens.is_empty()))
        }
        value if is_empty(value) => Ok(None),
        _ => Err(None),
    }
}

const PATTERNS: &str = "a name or a list of names";

fn accept_patterns(value: &Value) -> Result<Option<Vec<String>>, Option<String>> {
    let patterns: Option<Vec<String>> = match value {
        Value::Array(patterns) => patterns.iter().map(|pattern| pattern.value().text().map(str::to_owned)).collect(),
        single => single.text().map(|pattern| vec![pattern.to_owned()]),
    };
    let patterns = patterns.ok_or(None)?;
    Ok(Some(patterns.into_iter().filter(|pattern| !pattern.is_empty()).collect())
        .filter(|patterns: &Vec<_>| !patterns.is_empty()))
}

const TARGETS: &str = "a list of names, a regular expression or \"all-linear\"";

fn accept_targets(value: &Value) -> Result<Option<TargetModules>, Option<String>> {
    match value {
        Value::String(name) if name == "all-linear" => Ok(Some(TargetModules::AllLinear)),
        Value::String(regex) => Ok(Some(TargetModules::Regex(regex.clone()))),
        Value::Array(names) => {
            let names: Option<Vec<String>> = names.iter().map(|name| name.value().text().map(str::to_owned)).collect();
            let mut names = names.ok_or(None)?;
            // PEFT writes a set, in random order.
            names.sort();
            names.dedup();
            Ok(Some(TargetModules::Names(names)))
        }
        _ => Err(None),
    }
}

/// Refuses unknown keys, which may change the computation, unless they have no effect or are switched off.
fn refuse_unknown(json: &mut Section) {
    let unknown = json.unread().filter(|(key, value)| !WITHOUT_EFFECT.contains(key) && !is_empty(value));
    for (key, value) in unknown.collect::<Vec<_>>() {
        json.problem(key, format!("= {} is not supported", value.shown()));
    }
}
