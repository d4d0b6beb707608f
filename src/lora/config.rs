//! Section `[lora]` of a recipe.

use std::collections::BTreeMap;
use std::ops::Bound;

use regex::Regex;
use serde::Serialize;

use crate::schema::{Node, Problem, Section, Value, closest};
use crate::spec::Linear;

/// Any number above 0.
const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

/// Section `[lora]`: names and meaning as in PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoraConfig {
    /// Rank of the update.
    pub r: usize,
    /// Numerator of the scale `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Dropout on the input of A, in `[0, 1)`.
    pub lora_dropout: f64,
    /// Which linear layers are adapted.
    pub target_modules: TargetModules,
    /// Scale by `lora_alpha / sqrt(r)` instead.
    pub use_rslora: bool,
    /// Weight-decomposed LoRA (not available yet: `true` is refused).
    pub use_dora: bool,
    /// How A starts; B starts at zero.
    pub init_lora_weights: InitLoraWeights,
    /// Only these layers; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers_to_transform: Option<Vec<usize>>,
    /// Rank by module name (the end of the name, or a regex, as in PEFT).
    pub rank_pattern: BTreeMap<String, usize>,
    /// `lora_alpha` by module name.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Learning rate of B over that of A (LoRA+); absent: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loraplus_lr_ratio: Option<f64>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 16.0,
            lora_dropout: 0.0,
            target_modules: TargetModules::AllLinear,
            use_rslora: false,
            use_dora: false,
            init_lora_weights: InitLoraWeights::Kaiming,
            layers_to_transform: None,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            loraplus_lr_ratio: None,
        }
    }
}

impl LoraConfig {
    /// Reads section `[lora]`.
    pub fn read(section: &mut Section) -> Self {
        let default = Self::default();
        let config = Self {
            r: section.count("r", default.r, 1..),
            lora_alpha: section.number("lora_alpha", default.lora_alpha, POSITIVE),
            lora_dropout: section.number("lora_dropout", default.lora_dropout, 0.0..1.0),
            target_modules: section
                .optional("target_modules", TargetModules::EXPECTED, TargetModules::accept)
                .unwrap_or(default.target_modules),
            use_rslora: section.boolean("use_rslora", default.use_rslora),
            use_dora: section.boolean("use_dora", default.use_dora),
            init_lora_weights: section
                .optional("init_lora_weights", InitLoraWeights::EXPECTED, InitLoraWeights::accept)
                .unwrap_or(default.init_lora_weights),
            layers_to_transform: section.optional("layers_to_transform", LAYERS, accept_layers),
            rank_pattern: section.counts_by_name("rank_pattern", 1..),
            alpha_pattern: section.numbers_by_name("alpha_pattern", POSITIVE),
            loraplus_lr_ratio: section.optional_number("loraplus_lr_ratio", POSITIVE),
        };
        if config.use_dora {
            section.not_yet("use_dora", "leave it out for plain LoRA");
        }
        let ranks = config.rank_pattern.keys().map(|name| ("rank_pattern", name));
        for (key, name) in ranks.chain(config.alpha_pattern.keys().map(|name| ("alpha_pattern", name))) {
            if let Err(error) = Regex::new(&format!(r"^(?:.*\.)?(?:{name})$")) {
                let message = format!("`lora.{key}` has the name `{name}`, which is no regular expression");
                section.reject(key, Problem::new(message).hint(last_line(&error)));
            }
        }
        config
    }
}

const LAYERS: &str = "a list of layer numbers from 0, each once";

fn accept_layers(value: &Value) -> Result<Vec<usize>, Option<String>> {
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
                None => Ok(layers),
            }
        }
        single => number(single).map(|layer| vec![layer]).ok_or(None),
    }
}

/// The last line of a regular expression's error: what is wrong, without the drawing above it.
fn last_line(error: &regex::Error) -> String {
    error.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
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

/// The layer that a name was probably meant to be, or what there is.
pub(super) fn meant_layer(name: &str) -> String {
    let last = name.rsplit('.').next().unwrap_or_default().trim_matches(|c: char| !c.is_ascii_alphanumeric());
    match closest(last, Linear::ALL.into_iter().map(Linear::short_name)) {
        Some(layer) => format!("did you mean `{layer}`?"),
        None => format!("there are {}", Linear::ALL.map(Linear::short_name).join(", ")),
    }
}

fn is_linear_layer(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| Linear::ALL.into_iter().any(|linear| linear.short_name() == last))
}

/// Has nothing of a regular expression.
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
