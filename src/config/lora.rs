//! Section `[lora]` of a recipe.

use std::path::PathBuf;

use regex::Regex;
use serde::Serialize;

use super::{POSITIVE, last_line};
use crate::schema::{ByName, Node, Problem, Section, Value, closest, section};
use crate::spec::{LINEAR_NAMES, ROUTER_ENDS, SITE_NAMES, short_name};

section! {
    /// Section `[lora]`: names and meaning as in PEFT's `LoraConfig`.
    pub struct LoraConfig then check {
        /// Rank of the update.
        r: usize = 8 => count(1..=65_536), OtherAdapter, ["lora_r", "rank", "lora_rank", "lora_dim", "adapter_rank"];
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
        /// Of these layers those without an adapter: a list of names such as `["k_proj"]`, or a regular expression for whole
        /// module names. Default: none.
        exclude_modules: Option<TargetModules> = None
            => any(TargetModules::EXCLUDED, TargetModules::accept_excluded) like ["k_proj"], OtherAdapter,
            ["lora_exclude_modules", "peft_exclude_modules"];
        /// Scale by `lora_alpha / sqrt(r)` instead (rank-stabilised LoRA).
        use_rslora: bool = false => boolean(), OtherAdapter,
            ["rslora", "peft_use_rslora", "lora_use_rslora", "use_rs_lora"];
        /// Train the lengths of the rows of the weights apart from their directions (weight-decomposed LoRA).
        use_dora: bool = false => boolean(), OtherAdapter, ["dora", "peft_use_dora", "lora_use_dora"];
        /// How A and B start. true: A in PEFT's uniform distribution, B zero; "gaussian": A in a normal one; "orthogonal": both
        /// drawn, their product zero. "pissa", `"pissa_niter_16"` (estimated in 16 iterations, faster) and "olora" start as a
        /// part of the base that is trained in its place; what is written is an adapter of twice the rank for the whole base.
        /// "eva": A in the directions in which a layer's inputs vary most, of rows that are read before the first step.
        init_lora_weights: InitLoraWeights = InitLoraWeights::Kaiming
            => any(InitLoraWeights::EXPECTED, InitLoraWeights::accept), OtherStates,
            ["lora_init", "init_weights", "peft_init_lora_weights"];
        /// With "eva": a layer of rank r gets at most this times r of the ranks of all; 1 leaves every layer its own. Default: 2.
        eva_rho: Option<f64> = None => optional_number(1.0..) like 1.0, OtherAdapter, ["rho"];
        /// Only these layers, counted from 0; modules that `target_modules` lists with their whole names stay. Default: all.
        layers_to_transform: Option<Vec<usize>> = None => any(LAYERS, accept_layers) like [14, 15], OtherAdapter,
            ["lora_layers_to_transform", "peft_layers_to_transform"],
            ["lora_layers", "num_layers"; "it lists layers: the last 4 of 16 are [12, 13, 14, 15]"];
        /// What comes before a layer's number in module names, beside `layers_to_transform`: a name, a regular expression, or a
        /// list of them of which the first that matches counts. Default: anything.
        layers_pattern: Option<Vec<String>> = None => any(LAYERS_PATTERN, accept_names) like ["layers"], OtherAdapter,
            ["lora_layers_pattern", "peft_layers_pattern"];
        /// Another rank for modules whose name ends like this (or matches, as a regular expression); of several the first.
        rank_pattern: ByName<usize> = ByName::default() => counts_by_name(1..=65_536), OtherAdapter,
            ["lora_rank_pattern", "ranks"];
        /// Puts adapters of this rank, with the scale of the others, on the experts of a mixture that `target_modules` names:
        /// gate, up and down of each. A token has several experts: `r` over their number is a usual choice. Default: experts stay
        /// frozen.
        expert_rank: Option<usize> = None => optional_count(1..=65_536) like 2, OtherAdapter, ["moe_rank", "lora_expert_rank"];
        /// Another `lora_alpha` for modules whose name ends like this.
        alpha_pattern: ByName<f64> = ByName::default() => numbers_by_name(POSITIVE), OtherAdapter,
            ["lora_alpha_pattern", "alphas"];
        /// Tokens whose rows of the embedding are trained too, by their numbers: those of a new chat template, or that a model
        /// has without ever having seen them. Where the head is the embedding, its rows are trained with them. Default: none.
        trainable_token_indices: Option<Vec<usize>> = None => any(TOKENS, accept_layers) like [7, 8], OtherAdapter,
            ["lora_trainable_token_indices", "trainable_tokens", "peft_trainable_token_indices"];
        /// Modules that are trained as a whole beside the adapters: `"embed_tokens"`, `"lm_head"` (where these two are one, it is
        /// trained as one), and norms, such as `"layernorm"` or `"model.norm"`, the last. A name is the end of a module's name.
        /// Default: none.
        modules_to_save: Option<Vec<String>> = None => any(MODULES, accept_names) like ["embed_tokens", "lm_head"], OtherAdapter,
            ["lora_modules_to_save", "additional_target", "peft_modules_to_save"];
        /// Learning rate of B over that of A (LoRA+). Default: both the same.
        loraplus_lr_ratio: Option<f64> = None => optional_number(POSITIVE) like 16.0, LaterSteps,
            ["lora_plus_lr_ratio", "loraplus_ratio", "loraplus", "lora_plus"];
        /// An adapter to continue from: the folder of a run, of a checkpoint, or one that PEFT wrote, or the id of a repository on
        /// the Hub. Its rank, scale and layers are taken. Default: a new adapter, which changes nothing yet.
        start_from: Option<PathBuf> = None => optional_path() like "runs/first",
            // Of no meaning once training goes on from a checkpoint.
            None, ["lora_model_dir", "adapter_name_or_path", "adapter_path", "resume_adapter_file", "lora_weights",
             "pretrained_adapter", "lora_path"];
    }
}

impl LoraConfig {
    /// Whether new adapters start as a part of the base.
    #[must_use]
    pub fn starts_in_base(&self) -> bool {
        self.init_lora_weights.is_part_of_base() && self.start_from.is_none()
    }

    /// Whether all layers have one rank and one scale.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.rank_pattern.keys().next().is_none() && self.alpha_pattern.keys().next().is_none()
    }

    /// Whether all layers have one scale, whatever their ranks.
    #[must_use]
    pub fn has_one_scale(&self) -> bool {
        let of = |key: &String| {
            let r = self.rank_pattern.keys().find(|own| *own == key).map_or(self.r, |own| self.rank_pattern[own]);
            let alphas = self.alpha_pattern.keys();
            let alpha =
                alphas.into_iter().find(|own| *own == key).map_or(self.lora_alpha, |own| self.alpha_pattern[own]);
            self.scale(r, alpha)
        };
        let all = self.scale(self.r, self.lora_alpha);
        self.rank_pattern.keys().chain(self.alpha_pattern.keys()).all(|key| (of(key) / all - 1.0).abs() < 1e-6)
    }

    /// Whether new adapters start from the rows, which also say how the ranks are shared out.
    #[must_use]
    pub fn starts_from_rows(&self) -> bool {
        self.init_lora_weights == InitLoraWeights::Eva && self.start_from.is_none()
    }

    /// A layer of rank r gets at most this times r of the ranks of all.
    #[must_use]
    pub fn rho(&self) -> f64 {
        self.eva_rho.unwrap_or(2.0)
    }

    /// The section of adapters that have started from the rows, whose layers and ranks are those of `found`.
    #[must_use]
    pub fn with_found(&self, found: Self) -> Self {
        Self {
            target_modules: found.target_modules,
            exclude_modules: found.exclude_modules,
            layers_to_transform: found.layers_to_transform,
            layers_pattern: found.layers_pattern,
            rank_pattern: found.rank_pattern,
            alpha_pattern: found.alpha_pattern,
            init_lora_weights: InitLoraWeights::Kaiming,
            eva_rho: None,
            ..self.clone()
        }
    }

    /// The section that describes the adapter as it is written: of twice the rank where it starts as a part of the base, of
    /// which the second half takes that part out again, as PEFT's `path_initial_model_for_weight_conversion` does it.
    #[must_use]
    pub fn written(&self) -> Self {
        if !self.starts_in_base() {
            return self.clone();
        }
        // The scale stays.
        let factor = if self.use_rslora { 2.0_f64.sqrt() } else { 2.0 };
        Self {
            r: 2 * self.r,
            lora_alpha: factor * self.lora_alpha,
            rank_pattern: self.rank_pattern.map(|r| 2 * r),
            alpha_pattern: self.alpha_pattern.map(|alpha| factor * alpha),
            init_lora_weights: InitLoraWeights::Kaiming,
            ..self.clone()
        }
    }

    fn check(self, section: &mut Section) -> Self {
        let ranks = self.rank_pattern.keys().map(|name| ("rank_pattern", name));
        for (key, name) in ranks.chain(self.alpha_pattern.keys().map(|name| ("alpha_pattern", name))) {
            if let Err(error) = Regex::new(&format!(r"^(?:.*\.)?(?:{name})$")) {
                let message = format!("`lora.{key}` has the name `{name}`, which is no regular expression");
                section.reject(key, Problem::new(message).hint(last_line(&error)));
            }
        }
        let init = self.init_lora_weights;
        if self.starts_in_base() && self.lora_dropout > 0.0 {
            let message = "`lora.lora_dropout`: the adapter starts as a part of the base, and dropout would drop that";
            section.reject(
                "lora_dropout",
                Problem::new(message).hint("leave it out, or choose another `init_lora_weights`"),
            );
        }
        let is_odd = |r: &usize| !r.is_multiple_of(2);
        if init == InitLoraWeights::Orthogonal && (is_odd(&self.r) || self.rank_pattern.values().any(is_odd)) {
            section
                .problem("init_lora_weights", "= \"orthogonal\" needs an even rank: A and B are halves of one matrix");
        }
        if self.eva_rho.is_some() && init != InitLoraWeights::Eva {
            section.problem("eva_rho", "is of no use without `init_lora_weights` = \"eva\"");
        }
        if self.layers_pattern.is_some() && self.layers_to_transform.is_none() {
            section.problem("layers_pattern", "is of no use without `layers_to_transform`, which numbers the layers");
        }
        if self.layers_pattern.is_some() && matches!(self.target_modules, TargetModules::Regex(_)) {
            section.problem(
                "layers_pattern",
                "is of no use beside a regular expression, which can name the layers itself",
            );
        }
        for pattern in self.layers_pattern.iter().flatten() {
            if let Err(error) = layers_regex(pattern) {
                let message = format!("`lora.layers_pattern`: `{pattern}` is no regular expression");
                section.reject("layers_pattern", Problem::new(message).hint(last_line(&error)));
            }
        }
        self
    }
}

/// Finds the number of the layer in a module's name, `idx`, after what `pattern` matches. As in PEFT, the pattern stands there
/// without a group.
pub(crate) fn layers_regex(pattern: &str) -> Result<Regex, regex::Error> {
    Regex::new(&format!(r"^(?:(?:|.*?\.){pattern}\.(?P<idx>\d+)\.)"))
}

const LAYERS_PATTERN: &str = "a name or a list of names, such as \"layers\"";

const MODULES: &str = "a name or a list of names, such as \"embed_tokens\"";

fn accept_names(value: &Value) -> Result<Option<Vec<String>>, Option<String>> {
    let patterns: Option<Vec<String>> = match value {
        Value::Array(items) => items.iter().map(|item| item.value().text().map(str::to_owned)).collect(),
        single => single.text().map(|text| vec![text.to_owned()]),
    };
    match patterns {
        Some(patterns) if !patterns.is_empty() && patterns.iter().all(|pattern| !pattern.is_empty()) => {
            Ok(Some(patterns))
        }
        _ => Err(None),
    }
}

const LAYERS: &str = "a list of layer numbers from 0, each once";

const TOKENS: &str = "a list of token numbers from 0, each once";

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
    /// With more names.
    #[must_use]
    pub fn and(self, more: Vec<String>) -> Self {
        match self {
            Self::Names(names) => Self::Names([names, more].concat()),
            Self::Regex(regex) if !more.is_empty() => {
                let more: Vec<String> = more.iter().map(|name| regex::escape(name)).collect();
                Self::Regex(format!(r"{regex}|(?:.*\.)?(?:{})", more.join("|")))
            }
            other => other,
        }
    }

    const EXPECTED: &'static str = "\"all-linear\", a list of names such as [\"q_proj\", \"v_proj\"], \
                                    or a regular expression for whole module names";

    const EXCLUDED: &'static str =
        "a list of names such as [\"k_proj\"], or a regular expression for whole module names";

    fn accept_excluded(value: &Value) -> Result<Option<Self>, Option<String>> {
        match Self::accept(value)? {
            Self::AllLinear => Err(Some("this leaves no adapter".to_owned())),
            excluded => Ok(Some(excluded)),
        }
    }

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
                Ok(_) if is_plain_name(text) => Err(Some(meant_layer(text, &SITE_NAMES.map(short_name)))),
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
            Err(Some("`lm_head` cannot be adapted: `modules_to_save` trains it as a whole".to_owned()))
        }
        Value::String(name) if name == "all-linear" => Err(Some("write \"all-linear\" without brackets".to_owned())),
        Value::String(name) => {
            Err(Some(format!("there is no `{name}`: {}", meant_layer(name, &SITE_NAMES.map(short_name)))))
        }
        _ => Err(None),
    }
}

/// Whether a name is that of a module which makes what is seen of an image.
pub(crate) fn is_of_tower(name: &str) -> bool {
    let parts = ["visual", "vision", "multi_modal_projector", "modality_projection", "connector", "merger", "mlp_AR"];
    parts.iter().any(|part| name.contains(part))
}

/// The layer name closest to `name`, or the list of layer names, as a hint.
pub(crate) fn meant_layer(name: &str, layers: &[&str]) -> String {
    if is_of_tower(name) {
        return "vision tower and projector stay as they are, and each image is encoded once: leave it out".to_owned();
    }
    let last = name.rsplit('.').next().unwrap_or_default().trim_matches(|c: char| !c.is_ascii_alphanumeric());
    match closest(last, layers.iter().copied()) {
        Some(layer) => format!("did you mean `{layer}`?"),
        None => format!("there are {}", layers.join(", ")),
    }
}

fn is_linear_layer(name: &str) -> bool {
    let mut all = LINEAR_NAMES.into_iter().flatten().chain(&ROUTER_ENDS);
    all.any(|site| short_name(site) == short_name(name))
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

/// How A and B start. In recipes: `true` for [`Kaiming`](Self::Kaiming), else a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "toml::Value")]
pub enum InitLoraWeights {
    /// A uniform in ±1/sqrt(`in_features`), B zero.
    Kaiming,
    /// A normal with standard deviation 1/r, B zero.
    Gaussian,
    /// Both drawn, their product zero.
    Orthogonal,
    /// The largest singular values of the weight with their vectors (Meng et al., 2024).
    Pissa,
    /// The same, estimated in this number of iterations.
    PissaNiter(usize),
    /// The first columns of Q and rows of R of the weight (Büyükakyüz, 2024).
    Olora,
    /// A in the directions in which the layer's inputs vary most, B zero (Paischer et al., 2024).
    Eva,
}

impl InitLoraWeights {
    const EXPECTED: &'static str = "true (uniform, as PEFT does by default), \"gaussian\", \"orthogonal\", \"pissa\", \
                                    \"pissa_niter_16\", \"olora\" or \"eva\"";

    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::Boolean(true) => Ok(Self::Kaiming),
            Value::Boolean(false) => Err(Some(
                "an adapter starts so that it changes nothing: training starts from the base model".to_owned(),
            )),
            Value::String(text) => match (text.as_str(), text.strip_prefix("pissa_niter_").map(str::parse)) {
                ("gaussian", _) => Ok(Self::Gaussian),
                ("orthogonal", _) => Ok(Self::Orthogonal),
                ("pissa", _) => Ok(Self::Pissa),
                ("olora", _) => Ok(Self::Olora),
                ("eva", _) => Ok(Self::Eva),
                (_, Some(Ok(num_iterations))) => Ok(Self::PissaNiter(num_iterations)),
                ("corda" | "loftq" | "lora_ga", _) => Err(Some(format!("\"{text}\" is not available"))),
                _ => Err(None),
            },
            _ => Err(None),
        }
    }

    /// Whether the adapter starts as a part of the base, which is taken out of it.
    #[must_use]
    pub fn is_part_of_base(self) -> bool {
        matches!(self, Self::Pissa | Self::PissaNiter(_) | Self::Olora)
    }
}

impl From<InitLoraWeights> for toml::Value {
    fn from(init: InitLoraWeights) -> Self {
        Self::String(match init {
            InitLoraWeights::Kaiming => return Self::Boolean(true),
            InitLoraWeights::Gaussian => "gaussian".into(),
            InitLoraWeights::Orthogonal => "orthogonal".into(),
            InitLoraWeights::Pissa => "pissa".into(),
            InitLoraWeights::PissaNiter(num_iterations) => format!("pissa_niter_{num_iterations}"),
            InitLoraWeights::Olora => "olora".into(),
            InitLoraWeights::Eva => "eva".into(),
        })
    }
}
