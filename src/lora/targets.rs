//! Which linear layers an adapter sits on, with PEFT's matching rules.

mod error;
mod patterns;
mod selection;

use std::collections::BTreeMap;

pub use error::TargetError;
use patterns::Patterns;
pub use selection::{Selection, TargetHits};

use super::kind::AdapterKind;
use super::matrices::Matrices;
use super::trained::{FullTensor, NORMED_EMBEDDING, OTHER_EMBEDDING};
use crate::config::{InitLoraWeights, LoraConfig, TargetModules, meant_layer};
use crate::spec::{LINEAR_NAMES, ModelConfig, PerSite, Role, Site, SiteId, in_layer, short_name};
use crate::util::stats::as_f64;

/// Names or patterns of one key that are more than any model has modules.
const MANY_PATTERNS: usize = 4096;

/// What is in the names of the first expert's linear layers.
pub(crate) const FIRST_EXPERT: &str = ".experts.0.";

/// What PEFT calls the parameter in which this layer of the first expert is for all experts, in its `target_parameters`.
pub(crate) fn expert_parameter(module: &str) -> Option<String> {
    let (experts, name) = module.split_once(FIRST_EXPERT)?;
    let parameter = match name {
        "down_proj" | "w2" => "down_proj",
        // Experts without a gate.
        "up_proj" if experts.ends_with(".mixer") => "up_proj",
        _ => "gate_up_proj",
    };
    Some(format!("{experts}.experts.{parameter}"))
}

/// Rank and scale of the adapter on one linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterShape {
    /// Kind of the adapter.
    pub kind: AdapterKind,
    /// Rank.
    pub r: usize,
    /// Scale of the update.
    pub scale: f64,
    /// Experts whose matrices are one, row below row; `None` on a layer that is no expert's.
    pub num_experts: Option<usize>,
}

impl AdapterShape {
    /// Shapes of its matrices on a weight `[out_features, in_features]`.
    #[must_use]
    pub fn shapes(self, weight: [usize; 2]) -> Matrices<[usize; 2]> {
        let num_experts = self.num_experts.unwrap_or(1);
        self.kind.shapes(self.r, weight).map(|[rows, columns]| [num_experts * rows, columns])
    }
}

impl LoraConfig {
    /// Finds the linear layers of a model to adapt.
    ///
    /// # Errors
    /// Everything in the section that does not fit the model, all at once.
    pub fn select(&self, config: &ModelConfig) -> Result<Selection, Vec<TargetError>> {
        let names = config.blocks.iter().enumerate().map(|(layer, block)| {
            let sites = block.sites.iter().enumerate();
            sites.map(|(site, Site { role, .. })| (config.module_name(layer, site), *role)).collect()
        });
        let mut selection = self.select_of(&names.collect::<Vec<_>>())?;
        let modules = self.modules(config).map(|modules| selection.full = modules).err();
        let rows = self.trainable_token_indices.as_ref().map(|ids| [ids.len(), config.hidden_size]);
        selection.full.extend(rows.map(|shape| (FullTensor::Tokens, shape)));
        let start = self.start_problem(config, &selection).map(TargetError::Start);
        let tokens = self.tokens_problem(config).map(TargetError::Tokens);
        let modules = modules.into_iter().flatten().map(TargetError::Modules);
        let experts = self.experts_problem(config, &selection).map(TargetError::ExpertRank);
        let problems: Vec<_> = start.into_iter().chain(tokens).chain(modules).chain(experts).collect();
        if problems.is_empty() { Ok(selection) } else { Err(problems) }
    }

    /// Why experts cannot be adapted so.
    fn experts_problem(&self, config: &ModelConfig, selection: &Selection) -> Option<String> {
        self.expert_rank?;
        let of_experts = |shapes: &PerSite<AdapterShape>| -> Vec<SiteId> {
            shapes.iter().filter(|(_, shape)| shape.num_experts.is_some()).map(|(site, _)| *site).collect()
        };
        let is_half = |(layer, shapes): (usize, &PerSite<AdapterShape>)| {
            let experts = config.blocks[layer].mixture().map(|mixture| &mixture.experts[0]);
            let gate_up = experts.map(|expert| expert.gate_up.sites()).unwrap_or_default();
            let adapted = of_experts(shapes);
            gate_up.len() == 2 && gate_up.iter().filter(|site| adapted.contains(site)).count() == 1
        };
        if !selection.adapts_experts() {
            return Some(
                "no layer of experts is among `lora.target_modules`\n  hint: \"all-linear\" takes them with it"
                    .to_owned(),
            );
        }
        if selection.shapes.iter().enumerate().any(is_half) {
            return Some(
                "experts' gate and up are one in PEFT\n  hint: name both in `lora.target_modules`, or neither"
                    .to_owned(),
            );
        }
        let refused = [
            (self.exclude_modules.is_some(), "`exclude_modules`"),
            (self.layers_to_transform.is_some(), "`layers_to_transform`"),
            (matches!(self.target_modules, TargetModules::Regex(_)), "expression in `target_modules`"),
            (self.use_dora, "`use_dora`"),
            (self.lora_dropout > 0.0, "`lora_dropout`"),
            (self.init_lora_weights != InitLoraWeights::Kaiming, "this `init_lora_weights`"),
        ];
        let (_, what) = refused.into_iter().find(|(is_refused, _)| *is_refused)?;
        Some(format!("adapters on experts have no {what} here\n  hint: leave one of the two out"))
    }

    /// Why tokens cannot be trained in this model.
    fn tokens_problem(&self, config: &ModelConfig) -> Option<String> {
        let highest = *self.trainable_token_indices.as_ref()?.iter().max()?;
        if config.layer_inputs.is_some() {
            return Some("every layer of this model has embeddings of its own, which stay as they are".to_owned());
        }
        if config.family().is_muse() {
            return Some(NORMED_EMBEDDING.to_owned());
        }
        if config.has_other_embedding() {
            return Some(OTHER_EMBEDDING.to_owned());
        }
        let hint = "or tokens that were added to the tokenizer in the model's folder; is this another model?";
        (highest >= config.vocab_size)
            .then(|| format!("{highest}, expected tokens from 0 to {}\n  hint: {hint}", config.vocab_size - 1))
    }

    /// The section of adapters with these ranks, in the order of the selection; a layer of rank 0 has none. Where ranks differ
    /// from those that were asked for, `lora_alpha` differs by as much.
    ///
    /// Source: `initialize_lora_eva_weights` of PEFT 0.21.
    #[must_use]
    pub fn with_ranks(&self, config: &ModelConfig, selection: &Selection, ranks: &[usize]) -> Self {
        let mut alphas = Patterns::of_ends("alpha_pattern", self.alpha_pattern.keys(), &mut Vec::new());
        let (mut modules, mut rank_pattern, mut alpha_pattern) = (Vec::new(), Vec::new(), Vec::new());
        for ((layer, site, shape), &r) in selection.iter().zip(ranks).filter(|(_, r)| **r > 0) {
            let module = config.module_name(layer, site);
            let alpha = alphas.first(&module).map_or(self.lora_alpha, |key| self.alpha_pattern[key]);
            rank_pattern.push((module.clone(), r));
            alpha_pattern.push((module.clone(), alpha * (as_f64(r) / as_f64(shape.r))));
            modules.push(module);
        }
        let mut found = self.clone();
        if modules.len() < ranks.len() {
            found.target_modules = TargetModules::Names(modules);
            (found.exclude_modules, found.layers_to_transform, found.layers_pattern) = (None, None, None);
        }
        rank_pattern.retain(|(_, r)| *r != self.r);
        alpha_pattern.retain(|(_, alpha)| *alpha != self.lora_alpha);
        found.rank_pattern = rank_pattern.into_iter().collect();
        found.alpha_pattern = alpha_pattern.into_iter().collect();
        self.with_found(found)
    }

    /// Why the adapters cannot start as a part of this base, or from its inputs.
    fn start_problem(&self, config: &ModelConfig, selection: &Selection) -> Option<String> {
        if self.starts_from_rows() {
            let too_large = selection.iter().find_map(|(layer, site, shape)| {
                let site = &config.blocks[layer].sites[site];
                (as_f64(shape.r) * self.rho() > as_f64(site.shape[1])).then_some((shape.r, site))
            });
            let message = |(r, site): (usize, &Site)| {
                let (rho, [_, width], name) = (self.rho(), site.shape, &site.name);
                format!("rank {r} times `eva_rho` = {rho} is more than the {width} numbers of an input of `{name}`")
            };
            return too_large.map(message);
        }
        if !self.starts_in_base() {
            return None;
        }
        if config.quantisation.is_some() {
            let hint = "use one in 16 or 32 bits, or init_lora_weights = true";
            return Some(format!(
                "the adapter would start as a part of the base, which cannot be taken out of a quantised one\n  hint: {hint}"
            ));
        }
        let too_large = selection.iter().find_map(|(layer, site, shape)| {
            let site = &config.blocks[layer].sites[site];
            let most = site.shape[0].min(site.shape[1]);
            (shape.r > most).then_some((shape.r, &site.name, most))
        });
        too_large.map(|(r, name, most)| format!("rank {r} is larger than the {most} of which `{name}` has parts"))
    }

    /// [`select`](Self::select) of linear layers in some model of `num_layers` layers that have every linear layer of every family.
    ///
    /// # Errors
    /// Likewise.
    pub fn select_of_any(&self, num_layers: usize) -> Result<Selection, Vec<TargetError>> {
        let all = || LINEAR_NAMES.iter().flat_map(|names| names.iter());
        let names = (0..num_layers).map(|layer| all().map(|name| (in_layer(layer, name), Role::Linear)).collect());
        self.select_of(&names.collect::<Vec<_>>())
    }

    /// [`select`](Self::select) among the linear layers of these names, by layer.
    fn select_of(&self, names: &[Vec<(String, Role)>]) -> Result<Selection, Vec<TargetError>> {
        let num_layers = names.len();
        let mut errors = Vec::new();
        if let Some(&layer) = self.layers_to_transform.iter().flatten().find(|&&layer| layer >= num_layers) {
            errors.push(TargetError::NoLayer { layer, last: num_layers.saturating_sub(1), num_layers });
        }
        let mut targets = Patterns::of_modules("target_modules", Some(&self.target_modules), &mut errors);
        let mut excluded = Patterns::of_modules("exclude_modules", self.exclude_modules.as_ref(), &mut errors);
        let too_many = self.too_many([&targets, &excluded], names.iter().map(Vec::len).sum());
        if !too_many.is_empty() {
            return Err(too_many);
        }
        let layers = Patterns::of_layers(self.layers_pattern.as_deref(), &mut errors);
        let mut ranks = Patterns::of_ends("rank_pattern", self.rank_pattern.keys(), &mut errors);
        let mut alphas = Patterns::of_ends("alpha_pattern", self.alpha_pattern.keys(), &mut errors);
        let mut shapes = vec![PerSite::new(); num_layers];
        let mut adapted = Vec::new();
        for (layer, shapes) in shapes.iter_mut().enumerate() {
            for (site, (module, role)) in names[layer].iter().enumerate() {
                let num_experts = match *role {
                    // The first stands for all.
                    Role::Expert { num_experts, .. } if module.contains(FIRST_EXPERT) => Some(num_experts),
                    _ => None,
                };
                let is_expert = num_experts.is_some() && self.expert_rank.is_some();
                let parameter = expert_parameter(module).filter(|_| is_expert);
                let is_named_router = *role == Role::Router && matches!(self.target_modules, TargetModules::Names(_));
                if (*role != Role::Linear && !is_expert && !is_named_router)
                    || !self.is_in_layers(layer, module, &layers)
                    || targets.count(module) + parameter.map_or(0, |name| targets.count(&name)) == 0
                    || excluded.count(module) > 0
                {
                    continue;
                }
                shapes.insert(site, self.shape_of(module, num_experts, [&mut ranks, &mut alphas]));
                adapted.push(&**module);
            }
        }
        let is_nothing_left = shapes.iter().all(PerSite::is_empty);
        let errors = without_use(names, &adapted, is_nothing_left, [&targets, &excluded, &ranks, &alphas], errors);
        if errors.is_empty() {
            Ok(Selection { shapes, hits: targets.hits(), full: BTreeMap::new() })
        } else {
            Err(errors)
        }
    }

    /// That of the adapter of a module, or of so many experts.
    fn shape_of(&self, module: &str, num_experts: Option<usize>, [ranks, alphas]: [&mut Patterns; 2]) -> AdapterShape {
        let kind = if self.use_dora { AdapterKind::Dora } else { AdapterKind::Lora };
        if let Some(r) = self.expert_rank.filter(|_| num_experts.is_some()) {
            // The scale stays with another rank; patterns are for other layers.
            return AdapterShape { kind, r, scale: self.scale(self.r, self.lora_alpha), num_experts };
        }
        let r = ranks.first(module).map_or(self.r, |key| self.rank_pattern[key]);
        let alpha = alphas.first(module).map_or(self.lora_alpha, |key| self.alpha_pattern[key]);
        AdapterShape { kind, r, scale: self.scale(r, alpha), num_experts }
    }

    /// The keys that have more patterns than a model has use for, which has `num_modules` modules.
    fn too_many(&self, [targets, excluded]: [&Patterns; 2], num_modules: usize) -> Vec<TargetError> {
        let most = MANY_PATTERNS.max(num_modules);
        let counts = [
            (targets.key, targets.len()),
            (excluded.key, excluded.len()),
            ("layers_pattern", self.layers_pattern.as_ref().map_or(0, Vec::len)),
            ("rank_pattern", self.rank_pattern.len()),
            ("alpha_pattern", self.alpha_pattern.len()),
        ];
        let too_many = counts.into_iter().filter(|(_, count)| *count > most);
        too_many.map(|(key, count)| TargetError::TooMany { key, count, most }).collect()
    }

    /// Whether a module is in one of the layers, or listed with its whole name.
    fn is_in_layers(&self, layer: usize, module: &str, patterns: &Patterns) -> bool {
        let Some(layers) = &self.layers_to_transform else { return true };
        let is_listed =
            matches!(&self.target_modules, TargetModules::Names(names) if names.iter().any(|name| name == module));
        let number = if self.layers_pattern.is_some() { patterns.number(module) } else { Some(layer) };
        is_listed || number.is_some_and(|number| layers.contains(&number))
    }

    /// The scale of a layer of this rank and `lora_alpha`.
    #[expect(clippy::cast_precision_loss, reason = "a rank is a small number")]
    #[must_use]
    pub fn scale(&self, r: usize, alpha: f64) -> f64 {
        if self.use_rslora { alpha / (r as f64).sqrt() } else { alpha / r as f64 }
    }
}

impl LoraConfig {
    /// The `lora_alpha` that a module has, or would have.
    #[must_use]
    pub fn alpha_of(&self, module: &str) -> f64 {
        let mut alphas = Patterns::of_ends("alpha_pattern", self.alpha_pattern.keys(), &mut Vec::new());
        alphas.first(module).map_or(self.lora_alpha, |key| self.alpha_pattern[key])
    }

    /// The `lora_alpha` that gives another rank the scale of `r`.
    #[must_use]
    pub fn alpha_for(&self, rank: usize) -> f64 {
        let ratio = as_f64(rank) / as_f64(self.r);
        self.lora_alpha * if self.use_rslora { ratio.sqrt() } else { ratio }
    }
}

/// `errors`, and those of patterns that do nothing: of `targets`, and where all else is well, of the `others` of the modules that are
/// `adapted`.
fn without_use(
    names: &[Vec<(String, Role)>],
    adapted: &[&str],
    is_nothing_left: bool,
    [targets, others @ ..]: [&Patterns; 4],
    mut errors: Vec<TargetError>,
) -> Vec<TargetError> {
    let parameters: Vec<String> = names.iter().flatten().filter_map(|(module, _)| expert_parameter(module)).collect();
    let frozen = || {
        let modules = names.iter().flatten().filter(|(_, role)| !role.is_plain()).map(|(module, _)| module);
        modules.chain(&parameters).map(String::as_str)
    };
    let bare = || names.iter().flatten().filter(|(_, role)| *role == Role::Bare).map(|(module, _)| module.as_str());
    let linear = short_names(names);
    let all_layers_exist = !errors.iter().any(|error| matches!(error, TargetError::NoLayer { .. }));
    for target in targets.unused().filter(|_| all_layers_exist) {
        errors.push(match target.rsplit('.').next() {
            Some("lm_head" | "embed_tokens") => TargetError::Frozen { target },
            _ if targets.matches(&target, frozen()) => TargetError::Experts { target },
            _ if targets.matches(&target, bare()) => TargetError::Bare { target },
            _ => TargetError::NoMatch { hint: meant_layer(&target, &linear), target },
        });
    }
    if errors.is_empty() && is_nothing_left {
        errors.push(TargetError::NothingLeft);
    }
    if errors.is_empty() {
        for patterns in others {
            errors.extend(patterns.unused().filter(|pattern| !patterns.matches(pattern, frozen())).map(
                |pattern| match (patterns.key, patterns.matches(&pattern, adapted.iter().copied())) {
                    (key, true) => TargetError::PatternTaken { key, pattern },
                    (key, false) => TargetError::PatternNoMatch { key, pattern },
                },
            ));
        }
    }
    errors
}

/// What the linear layers are called within their blocks, in the order of the first of each name.
fn short_names(names: &[Vec<(String, Role)>]) -> Vec<&str> {
    let mut linear = Vec::new();
    for (module, _) in names.iter().flatten().filter(|(_, role)| *role == Role::Linear) {
        if !linear.contains(&short_name(module)) {
            linear.push(short_name(module));
        }
    }
    linear
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{SHARED_GATE, SITE_NAMES};

    fn config(targets: &[&str]) -> LoraConfig {
        let names = targets.iter().map(ToString::to_string).collect();
        LoraConfig { target_modules: TargetModules::Names(names), ..LoraConfig::default() }
    }

    #[test]
    fn all_linear_takes_the_layers_of_every_block_of_every_family() {
        let selection = LoraConfig::default().select_of_any(3).unwrap();
        let of_layer: PerSite<_> = (0..41)
            .map(|site| (site, AdapterShape { kind: AdapterKind::Lora, r: 8, scale: 2.0, num_experts: None }))
            .collect();
        assert_eq!(selection.shapes, vec![of_layer; 3]);
        assert_eq!(selection.hits[0].num_hits, 123);
    }

    #[test]
    fn a_name_matches_from_a_dot_on_and_counts_its_hits() {
        let selection = config(&["q_proj", "mlp.up_proj", "model.layers.1.self_attn.v_proj"]).select_of_any(2).unwrap();
        let hits: Vec<_> = selection.hits.iter().map(|h| h.num_hits).collect();
        assert_eq!(hits, [2, 2, 1]);
        assert!(!selection.shapes[0].contains_key(&2) && selection.shapes[1].contains_key(&2));
    }

    #[test]
    fn a_target_that_matches_nothing_is_an_error_and_so_is_the_head() {
        let errors = config(&["q_proj", "proj", "lm_head"]).select_of_any(2).unwrap_err();
        let [TargetError::NoMatch { target, .. }, frozen] = &errors[..] else { panic!("{errors:?}") };
        assert_eq!((&**target, frozen), ("proj", &TargetError::Frozen { target: "lm_head".into() }));
    }

    #[test]
    fn a_regex_must_match_the_whole_name() {
        let regex = |r: &str| LoraConfig { target_modules: TargetModules::Regex(r.into()), ..LoraConfig::default() };
        assert_eq!(regex(r".*layers\.[01]\..*\.(q|v)_proj").select_of_any(4).unwrap().hits[0].num_hits, 4);
        assert!(regex("q_proj").select_of_any(4).is_err());
        let error = regex(r".*\.qproj").select_of_any(4).unwrap_err()[0].to_string();
        assert!(error.ends_with("\n  hint: did you mean `q_proj`?"), "{error}");
    }

    #[test]
    fn scale_is_alpha_over_r_or_over_its_root_and_patterns_override() {
        let mut config = LoraConfig { r: 16, lora_alpha: 32.0, use_rslora: true, ..LoraConfig::default() };
        assert_eq!(
            config.select_of_any(1).unwrap().shapes[0][&0],
            AdapterShape { kind: AdapterKind::Lora, r: 16, scale: 8.0, num_experts: None }
        );
        config.use_rslora = false;
        config.rank_pattern = [("down_proj".into(), 4)].into_iter().collect();
        config.alpha_pattern = [("down_proj".into(), 2.0)].into_iter().collect();
        let shapes = config.select_of_any(1).unwrap().shapes;
        assert_eq!(shapes[0][&0], AdapterShape { kind: AdapterKind::Lora, r: 16, scale: 2.0, num_experts: None });
        assert_eq!(shapes[0][&6], AdapterShape { kind: AdapterKind::Lora, r: 4, scale: 0.5, num_experts: None });
    }

    /// Checked against `check_target_module_exists` and `get_pattern_key` of PEFT 0.21.
    #[test]
    fn names_and_expressions_mean_what_they_mean_to_peft() {
        let modules = |config: &LoraConfig| -> Vec<String> {
            let shapes = config.select_of_any(3).unwrap().shapes.into_iter().enumerate();
            shapes
                .flat_map(|(layer, shapes)| shapes.into_keys().map(move |site| in_layer(layer, SITE_NAMES[site])))
                .collect()
        };
        let with = |change: fn(&mut LoraConfig)| {
            let mut config = config(&["q_proj", "v_proj"]);
            change(&mut config);
            config
        };
        let names = |names: &[&str]| TargetModules::Names(names.iter().map(ToString::to_string).collect());
        let of_layer = |layer: usize, parts: &[&str]| -> Vec<String> {
            parts.iter().map(|part| in_layer(layer, &format!("self_attn.{part}"))).collect()
        };
        let mut excluding = with(|config| config.exclude_modules = Some(TargetModules::Regex(r".*\.[02]\..*".into())));
        assert_eq!(modules(&excluding), of_layer(1, &["q_proj", "v_proj"]));
        excluding.exclude_modules = Some(names(&["v_proj", "layers.0.self_attn.q_proj", "2.self_attn.q_proj"]));
        assert_eq!(modules(&excluding), of_layer(1, &["q_proj"]));
        // A name that is no end after a dot excludes nothing.
        excluding.exclude_modules = Some(names(&["v_proj", "roj", "self_attn"]));
        let unused = |pattern: &str| TargetError::PatternNoMatch { key: "exclude_modules", pattern: pattern.into() };
        assert_eq!(excluding.select_of_any(3).unwrap_err(), [unused("roj"), unused("self_attn")]);
        excluding.exclude_modules = Some(names(&["q_proj", "v_proj"]));
        assert_eq!(excluding.select_of_any(3).unwrap_err(), [TargetError::NothingLeft]);

        let mut of_layers = with(|config| config.layers_to_transform = Some(vec![1]));
        for (patterns, found) in [
            (None, of_layer(1, &["q_proj", "v_proj"])),
            (Some(&["layers"][..]), of_layer(1, &["q_proj", "v_proj"])),
            (Some(&["h", r"lay\w+"]), of_layer(1, &["q_proj", "v_proj"])),
            (Some(&["model.layers"]), of_layer(1, &["q_proj", "v_proj"])),
        ] {
            of_layers.layers_pattern = patterns.map(|patterns| patterns.iter().map(ToString::to_string).collect());
            assert_eq!(modules(&of_layers), found, "{patterns:?}");
        }
        of_layers.layers_pattern = Some(vec!["h".into()]);
        assert!(of_layers.select_of_any(3).is_err());
        // A module that is listed with its whole name is taken from any layer.
        of_layers.layers_pattern = None;
        of_layers.target_modules = names(&["q_proj", "model.layers.2.self_attn.k_proj"]);
        assert_eq!(modules(&of_layers), [of_layer(1, &["q_proj"]), of_layer(2, &["k_proj"])].concat());

        // The first pattern counts, in the order in which they are written.
        let mut config = with(|_| ());
        config.rank_pattern =
            [("v_proj", 2), (r".*\.0\..*", 3), ("[qv]_proj", 4)].map(|(key, r)| (key.into(), r)).into_iter().collect();
        let shapes = config.select_of_any(2).unwrap().shapes;
        assert_eq!([(0, 0), (0, 2), (1, 0), (1, 2)].map(|(layer, site)| shapes[layer][&site].r), [3, 2, 4, 2]);
        config.alpha_pattern = [("self_attn.[qv]_proj", 2.0), ("q_proj", 3.0), ("k_proj", 4.0)]
            .map(|(key, alpha)| (key.into(), alpha))
            .into_iter()
            .collect();
        let [key, taken, none] = ["alpha_pattern", "q_proj", "k_proj"];
        let taken = TargetError::PatternTaken { key, pattern: taken.into() };
        let none = TargetError::PatternNoMatch { key, pattern: none.into() };
        assert_eq!(config.select_of_any(2).unwrap_err(), [taken, none]);
    }

    #[test]
    fn experts_and_their_router_stay_frozen_but_for_a_router_that_is_named() {
        let read = |kind: &str| {
            let text = format!(
                r#"{{"model_type": "{kind}", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 96,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 3,
                    "num_experts_per_tok": 2}}"#
            );
            ModelConfig::from_json(&text).unwrap()
        };
        let [alone, shared] = ["qwen3_moe", "qwen2_moe"].map(read);
        let names = |config: &ModelConfig, lora: &LoraConfig| -> Vec<String> {
            let shapes = lora.select(config).unwrap().shapes;
            shapes[1].keys().map(|site| config.blocks[1].sites[*site].name.replace("self_attn.", "")).collect()
        };
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"];
        assert_eq!(names(&alone, &LoraConfig::default()), attention);
        let mut of_shared = attention.map(str::to_owned).to_vec();
        of_shared.extend(["gate_proj", "up_proj", "down_proj"].map(|name| format!("mlp.shared_expert.{name}")));
        of_shared.push(SHARED_GATE.to_owned());
        assert_eq!(names(&shared, &LoraConfig::default()), of_shared);
        assert_eq!(names(&shared, &config(&["up_proj"])), ["mlp.shared_expert.up_proj"]);
        let refused = config(&["q_proj", "up_proj"]).select(&alone).unwrap_err();
        assert_eq!(refused, [TargetError::Experts { target: "up_proj".into() }]);
        assert_eq!(names(&alone, &config(&["q_proj", "gate"])), ["q_proj", "mlp.gate"]);
        let router = TargetModules::Regex(r".*mlp\.gate".into());
        let refused = LoraConfig { target_modules: router, ..LoraConfig::default() }.select(&alone).unwrap_err();
        assert!(matches!(refused[..], [TargetError::Experts { .. }]));
        let excluded = Some(TargetModules::Regex(r".*(gate|experts.*)".into()));
        let excluding = LoraConfig { exclude_modules: excluded, ..LoraConfig::default() };
        assert_eq!(names(&alone, &excluding), attention);
    }

    #[test]
    fn layers_outside_the_model_are_refused() {
        let config = LoraConfig { layers_to_transform: Some(vec![0, 5]), ..LoraConfig::default() };
        assert!(matches!(config.select_of_any(2).unwrap_err()[..], [TargetError::NoLayer { layer: 5, last: 1, .. }]));
    }
}
