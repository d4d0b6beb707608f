//! Section `[lora]` of a recipe.

use std::collections::BTreeMap;
use std::path::PathBuf;

use regex::Regex;
use serde::Serialize;

use super::{POSITIVE, last_line};
use crate::schema::{Node, Problem, Section, Value, closest, section};
use crate::spec::{SITE_NAMES, short_name};

section! {
    /// Section `[lora]`: names and meaning as in PEFT's `LoraConfig`.
    pub struct LoraConfig then check {
        /// Rank of the update.
        r: usize = 8 => count(1..), OtherAdapter, ["lora_r", "rank", "lora_rank", "lora_dim", "adapter_rank"];
        /// The update is scaled by `lora_alpha / r`.
        lora_alpha: f64 = 16.0 => number(POSITIVE), OtherAdapter,
            ["alpha", "lora_alphas"],
            ["scale", "lora_scale", "scaling"; "the scale is lora_alpha / r: multiply yours by r"];
        /// Dropout on the adapters' input, in `[0, 1)`.
        lora_dropout: f64 = 0.0 => number(0.0..1.0), LaterSteps, ["dropout", "lora_drop", "adapter_dropout"];
        /// Layers that get an adapter: "all-linear", a list such as `["q_proj", "v_proj"]`, or a regular expression that
        /// whole module names must match, such as `'.*\.self_attn\.[qv]_proj'`.
        target_modules: TargetModules = TargetModules::AllLinear
            => any(TargetModules::EXPECTED, TargetModules::accept), OtherAdapter,
            ["lora_target_modules", "lora_target", "lora_targets", "targets", "lora_modules", "lora_attn_modules", "keys",
             "lora_layers_keys"],
            ["lora_target_linear", "target_linear", "apply_lora_to_mlp", "lora_mlp", "lora_query", "lora_key", "lora_value";
             "\"all-linear\", or a list such as [\"q_proj\", \"v_proj\"]"];
        /// Scale by `lora_alpha / sqrt(r)` instead (rank-stabilised LoRA).
        use_rslora: bool = false => boolean(), OtherAdapter,
            ["rslora", "peft_use_rslora", "lora_use_rslora", "use_rs_lora"];
        /// Weight-decomposed LoRA: not available yet.
        use_dora: bool = false => boolean(), OtherAdapter, ["dora", "peft_use_dora", "lora_use_dora"];
        /// How A starts: true for PEFT's uniform distribution, or "gaussian". B starts at zero.
        init_lora_weights: InitLoraWeights = InitLoraWeights::Kaiming
            // Of no meaning once the adapters are there.
            => any(InitLoraWeights::EXPECTED, InitLoraWeights::accept), None,
            ["lora_init", "init_weights", "peft_init_lora_weights"];
        /// Only these layers, counted from 0. Default: all.
        layers_to_transform: Option<Vec<usize>> = None => any(LAYERS, accept_layers) like [14, 15], OtherAdapter,
            ["lora_layers_to_transform", "peft_layers_to_transform"],
            ["lora_layers", "num_layers"; "it lists layers: the last 4 of 16 are [12, 13, 14, 15]"];
        /// Another rank for modules whose name ends like this (or matches, as a regular expression).
        rank_pattern: BTreeMap<String, usize> = BTreeMap::new() => counts_by_name(1..), OtherAdapter,
            ["lora_rank_pattern", "ranks"];
        /// Another `lora_alpha` for modules whose name ends like this.
        alpha_pattern: BTreeMap<String, f64> = BTreeMap::new() => numbers_by_name(POSITIVE), OtherAdapter,
            ["lora_alpha_pattern", "alphas"];
        /// Learning rate of B over that of A (LoRA+). Default: both the same.
        loraplus_lr_ratio: Option<f64> = None => optional_number(POSITIVE) like 16.0, LaterSteps,
            ["lora_plus_lr_ratio", "loraplus_ratio", "loraplus", "lora_plus"];
        /// An adapter to continue from: the folder of a run, of a checkpoint, or one that PEFT wrote. Its rank, scale and
        /// layers are taken. Default: a new adapter, which changes nothing yet.
        start_from: Option<PathBuf> = None => optional_path() like "runs/first",
            // Of no meaning once training goes on from a checkpoint.
            None, ["lora_model_dir", "adapter_name_or_path", "adapter_path", "resume_adapter_file", "lora_weights",
             "pretrained_adapter", "lora_path"];
    }
}

impl LoraConfig {
    fn check(self, section: &mut Section) -> Self {
        if self.use_dora {
            section.not_yet("use_dora", "leave it out for plain LoRA");
        }
        let ranks = self.rank_pattern.keys().map(|name| ("rank_pattern", name));
        for (key, name) in ranks.chain(self.alpha_pattern.keys().map(|name| ("alpha_pattern", name))) {
            if let Err(error) = Regex::new(&format!(r"^(?:.*\.)?(?:{name})$")) {
                let message = format!("`lora.{key}` has the name `{name}`, which is no regular expression");
                section.reject(key, Problem::new(message).hint(last_line(&error)));
            }
        }
        self
    }
}

const LAYERS: &str = "a list of layer numbers from 0, each once";

fn accept_layers(value: &Value) -> Result<Option<Vec<usize>>, Option<String>> {
    let number = |value: &Value| match value {
        Value::Integer(layer) => usize::try_from(*layer).ok(),
        _ => None,
    };
    match value {
        Value::Array(items) if !items.is_empty() => {
            let layers: Option<Vec<usize>> = items.iter().map(|item| number(item.value())).collect();
            let mut layers = layers.ok_or(None)?;
            layers.sort_unstable();
            match layers.windows(2).find(|pair| pair[0] == pair[1]) {
                Some(pair) => Err(Some(format!("{} is there twice", pair[0]))),
                None => Ok(Some(layers)),
            }
        }
        single => number(single).map(|layer| Some(vec![layer])).ok_or(None),
    }
}

/// Which linear layers are adapted.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(into = "toml::Value")]
pub enum TargetModules {
    /// Every linear layer of the blocks; not `lm_head`.
    AllLinear,
    /// Names such as `q_proj`, matched against the end of the module name.
    Names(Vec<String>),
    /// A regular expression that the whole module name must match.
    Regex(String),
}

impl TargetModules {
    const EXPECTED: &'static str = "\"all-linear\", a list of names such as [\"q_proj\", \"v_proj\"], \
                                    or a regular expression for whole module names";

    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::String(text) if text == "all-linear" => Ok(Self::AllLinear),
            Value::String(text) => match Regex::new(&format!("^(?:{text})$")) {
                Err(error) => Err(Some(last_line(&error))),
                Ok(_) if is_plain_name(text) && is_linear_layer(text) => {
                    Err(Some(format!("for the layers of this name write [\"{text}\"]")))
                }
                Ok(_) if matches!(text.as_str(), "all_linear" | "all" | "linear" | "all-linears") => {
                    Err(Some("did you mean \"all-linear\"?".to_owned()))
                }
                Ok(_) if is_plain_name(text) => Err(Some(meant_layer(text))),
                Ok(_) => Ok(Self::Regex(text.clone())),
            },
            Value::Array(items) if !items.is_empty() => {
                items.iter().map(accept_name).collect::<Result<_, _>>().map(Self::Names)
            }
            _ => Err(None),
        }
    }
}

/// A name in the list of `target_modules`: the end of a module name.
fn accept_name(item: &Node) -> Result<String, Option<String>> {
    match item.value() {
        Value::String(name) if is_linear_layer(name) => Ok(name.clone()),
        Value::String(name) if name == "lm_head" => {
            Err(Some("`lm_head` cannot be adapted: its loss is computed in chunks that need it frozen".to_owned()))
        }
        Value::String(name) if name == "all-linear" => Err(Some("write \"all-linear\" without brackets".to_owned())),
        Value::String(name) => Err(Some(format!("there is no `{name}`: {}", meant_layer(name)))),
        _ => Err(None),
    }
}

/// The layer name closest to `name`, or the list of layer names, as a hint.
pub(crate) fn meant_layer(name: &str) -> String {
    let last = name.rsplit('.').next().unwrap_or_default().trim_matches(|c: char| !c.is_ascii_alphanumeric());
    match closest(last, SITE_NAMES.into_iter().map(short_name)) {
        Some(layer) => format!("did you mean `{layer}`?"),
        None => format!("there are {}", SITE_NAMES.map(short_name).join(", ")),
    }
}

fn is_linear_layer(name: &str) -> bool {
    SITE_NAMES.into_iter().any(|site| short_name(site) == short_name(name))
}

/// Whether the text has no regular expression syntax.
fn is_plain_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

impl From<TargetModules> for toml::Value {
    fn from(targets: TargetModules) -> Self {
        match targets {
            TargetModules::AllLinear => Self::String("all-linear".into()),
            TargetModules::Names(names) => Self::Array(names.into_iter().map(Self::String).collect()),
            TargetModules::Regex(regex) => Self::String(regex),
        }
    }
}

/// How A starts. In recipes: `true` for [`Kaiming`](Self::Kaiming), `"gaussian"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "toml::Value")]
pub enum InitLoraWeights {
    /// Uniform in ±1/sqrt(`in_features`).
    Kaiming,
    /// Normal with standard deviation 1/r.
    Gaussian,
}

impl InitLoraWeights {
    const EXPECTED: &'static str = "true (uniform, as PEFT does by default) or \"gaussian\"";

    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::Boolean(true) => Ok(Self::Kaiming),
            Value::String(text) if text == "gaussian" => Ok(Self::Gaussian),
            Value::Boolean(false) => {
                Err(Some("B starts at zero always: training starts from the base model".to_owned()))
            }
            _ => Err(None),
        }
    }
}

impl From<InitLoraWeights> for toml::Value {
    fn from(init: InitLoraWeights) -> Self {
        match init {
            InitLoraWeights::Kaiming => Self::Boolean(true),
            InitLoraWeights::Gaussian => Self::String("gaussian".into()),
        }
    }
}
