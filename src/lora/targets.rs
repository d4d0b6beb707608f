//! Which linear layers an adapter sits on, with PEFT's matching rules.

use regex::Regex;

use super::kind::Kind;
use crate::config::{LoraConfig, TargetModules, meant_layer};
use crate::spec::{ModelConfig, PerSite, SITE_NAMES, SiteId, in_layer};

/// Rank and scale of the adapter on one linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterShape {
    /// Kind of the adapter.
    pub kind: Kind,
    /// Rank.
    pub r: usize,
    /// Scale of the update.
    pub scale: f64,
}

impl AdapterShape {
    /// Number of trained parameters on a weight of shape `[out_features, in_features]`.
    #[must_use]
    pub fn num_parameters(self, weight: [usize; 2]) -> usize {
        self.kind.shapes(self.r, weight).values().map(|[rows, columns]| rows * columns).sum()
    }
}

/// How often a target matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHits {
    /// The target as written in the recipe.
    pub target: String,
    /// Number of linear layers that it matched.
    pub num_hits: usize,
}

/// The layers that a `[lora]` section selects in a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// By block: the adapted linear layers.
    pub shapes: Vec<PerSite<AdapterShape>>,
    /// Every target with its number of hits.
    pub hits: Vec<TargetHits>,
}

impl Selection {
    /// Every adapted linear layer with its block, in the order of the forward pass.
    pub fn iter(&self) -> impl Iterator<Item = (usize, SiteId, AdapterShape)> {
        let blocks = self.shapes.iter().enumerate();
        blocks.flat_map(|(layer, shapes)| shapes.iter().map(move |(&site, &shape)| (layer, site, shape)))
    }

    /// Number of trained parameters in a model of this shape.
    #[must_use]
    pub fn num_parameters(&self, config: &ModelConfig) -> usize {
        let parameters = |(layer, site, shape): (usize, SiteId, AdapterShape)| {
            shape.num_parameters(config.blocks[layer].sites[site].shape)
        };
        self.iter().map(parameters).sum()
    }
}

/// A target, pattern or layer list that does not fit the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// A target that matches no linear layer of the blocks.
    #[error("`lora.target_modules`: `{target}` matches no linear layer of this model\n  hint: {}", meant_layer(target))]
    NoMatch {
        /// The target.
        target: String,
    },
    /// The head, which the chunked loss needs frozen, or the embedding, which stays frozen too.
    #[error(
        "`lora.target_modules`: `{target}` cannot be adapted: the head and the embedding stay frozen\n  hint: \
         `\"all-linear\"` takes every linear layer but these, as in PEFT"
    )]
    Frozen {
        /// The target.
        target: String,
    },
    /// A regular expression that does not compile.
    #[error("`lora.{key}`: `{pattern}` is not a regular expression: {reason}")]
    Regex {
        /// The recipe key.
        key: &'static str,
        /// The pattern.
        pattern: String,
        /// The parser's message.
        reason: String,
    },
    /// A layer that the model does not have.
    #[error("`lora.layers_to_transform` = {layer}, expected layers from 0 to {last}: the model has {num_layers}")]
    NoLayer {
        /// The layer.
        layer: usize,
        /// The last layer.
        last: usize,
        /// Number of layers.
        num_layers: usize,
    },
    /// A pattern that matches none of the adapted layers.
    #[error("`lora.{key}`: `{pattern}` matches none of the adapted layers")]
    PatternNoMatch {
        /// The recipe key.
        key: &'static str,
        /// The pattern.
        pattern: String,
    },
}

impl LoraConfig {
    /// Finds the linear layers of a model to adapt.
    ///
    /// # Errors
    /// Everything in the section that does not fit the model, all at once.
    pub fn select(&self, config: &ModelConfig) -> Result<Selection, Vec<TargetError>> {
        let names = config
            .blocks
            .iter()
            .enumerate()
            .map(|(layer, block)| (0..block.sites.len()).map(|site| config.module_name(layer, site)).collect());
        self.select_of(&names.collect::<Vec<_>>())
    }

    /// [`select`](Self::select) in some model of `num_layers` layers that have every linear layer of every family.
    ///
    /// # Errors
    /// Likewise.
    pub fn select_of_any(&self, num_layers: usize) -> Result<Selection, Vec<TargetError>> {
        let names = (0..num_layers).map(|layer| SITE_NAMES.iter().map(|name| in_layer(layer, name)).collect());
        self.select_of(&names.collect::<Vec<_>>())
    }

    /// [`select`](Self::select) among the linear layers of these names, by layer.
    fn select_of(&self, names: &[Vec<String>]) -> Result<Selection, Vec<TargetError>> {
        let num_layers = names.len();
        let mut errors = Vec::new();
        let targets = self.targets(&mut errors);
        if let Some(&layer) = self.layers_to_transform.iter().flatten().find(|&&layer| layer >= num_layers) {
            errors.push(TargetError::NoLayer { layer, last: num_layers.saturating_sub(1), num_layers });
        }
        let ranks = patterns("rank_pattern", self.rank_pattern.keys(), &mut errors);
        let alphas = patterns("alpha_pattern", self.alpha_pattern.keys(), &mut errors);
        let mut hits: Vec<_> =
            targets.iter().map(|(target, _)| TargetHits { target: target.clone(), num_hits: 0 }).collect();
        let mut used = (vec![false; ranks.len()], vec![false; alphas.len()]);
        let mut shapes = vec![PerSite::new(); num_layers];
        for (layer, shapes) in shapes.iter_mut().enumerate() {
            if self.layers_to_transform.as_ref().is_some_and(|layers| !layers.contains(&layer)) {
                continue;
            }
            for (site, module) in names[layer].iter().enumerate() {
                let matching = targets.iter().zip(&mut hits).filter(|((_, target), _)| target.is_match(module));
                if matching.map(|(_, hits)| hits.num_hits += 1).count() == 0 {
                    continue;
                }
                let r = first_match(&ranks, &mut used.0, module).map_or(self.r, |key| self.rank_pattern[key]);
                let alpha =
                    first_match(&alphas, &mut used.1, module).map_or(self.lora_alpha, |key| self.alpha_pattern[key]);
                shapes.insert(site, AdapterShape { kind: Kind::Lora, r, scale: self.scale(r, alpha) });
            }
        }
        let all_layers_exist = !errors.iter().any(|error| matches!(error, TargetError::NoLayer { .. }));
        for TargetHits { target, num_hits } in hits.iter().filter(|_| all_layers_exist) {
            let last = target.rsplit('.').next();
            if *num_hits == 0 && matches!(last, Some("lm_head" | "embed_tokens")) {
                errors.push(TargetError::Frozen { target: target.clone() });
            } else if *num_hits == 0 {
                errors.push(TargetError::NoMatch { target: target.clone() });
            }
        }
        let unused = |key, patterns: &[(String, Regex)], used: &[bool]| {
            let unused = patterns.iter().zip(used).filter(|(_, used)| !**used);
            unused.map(|((p, _), _)| TargetError::PatternNoMatch { key, pattern: p.clone() }).collect::<Vec<_>>()
        };
        if errors.is_empty() {
            errors.extend(unused("rank_pattern", &ranks, &used.0));
            errors.extend(unused("alpha_pattern", &alphas, &used.1));
        }
        if errors.is_empty() { Ok(Selection { shapes, hits }) } else { Err(errors) }
    }

    #[expect(clippy::cast_precision_loss, reason = "a rank is a small number")]
    fn scale(&self, r: usize, alpha: f64) -> f64 {
        if self.use_rslora { alpha / (r as f64).sqrt() } else { alpha / r as f64 }
    }

    fn targets(&self, errors: &mut Vec<TargetError>) -> Vec<(String, Regex)> {
        // A list entry is a whole module name, or the end of one after a dot; a regex must match the whole name.
        let (key, targets): (_, Vec<_>) = match &self.target_modules {
            TargetModules::AllLinear => return vec![("all-linear".into(), all())],
            TargetModules::Names(names) => (
                "target_modules",
                names.iter().map(|n| (n.clone(), format!(r"^(?:.*\.)?{}$", regex::escape(n)))).collect(),
            ),
            TargetModules::Regex(regex) => ("target_modules", vec![(regex.clone(), format!("^(?:{regex})$"))]),
        };
        let mut compiled = Vec::new();
        for (target, regex) in targets {
            match Regex::new(&regex) {
                Ok(regex) => compiled.push((target, regex)),
                Err(error) => errors.push(TargetError::Regex { key, pattern: target, reason: error.to_string() }),
            }
        }
        compiled
    }
}

#[expect(clippy::expect_used, reason = "a constant pattern")]
fn all() -> Regex {
    Regex::new("").expect("the empty pattern compiles")
}

/// `rank_pattern` and `alpha_pattern` keys, matched as in PEFT: a regex for the end of the name, after a dot.
fn patterns<'a>(
    key: &'static str,
    patterns: impl Iterator<Item = &'a String>,
    errors: &mut Vec<TargetError>,
) -> Vec<(String, Regex)> {
    let mut compiled = Vec::new();
    for pattern in patterns {
        match Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$")) {
            Ok(regex) => compiled.push((pattern.clone(), regex)),
            Err(error) => errors.push(TargetError::Regex { key, pattern: pattern.clone(), reason: error.to_string() }),
        }
    }
    compiled
}

fn first_match<'a>(patterns: &'a [(String, Regex)], used: &mut [bool], module: &str) -> Option<&'a String> {
    let index = patterns.iter().position(|(_, regex)| regex.is_match(module))?;
    used[index] = true;
    Some(&patterns[index].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(targets: &[&str]) -> LoraConfig {
        let names = targets.iter().map(ToString::to_string).collect();
        LoraConfig { target_modules: TargetModules::Names(names), ..LoraConfig::default() }
    }

    #[test]
    fn all_linear_takes_the_seven_layers_of_every_block() {
        let selection = LoraConfig::default().select_of_any(3).unwrap();
        let of_layer: PerSite<_> =
            (0..7).map(|site| (site, AdapterShape { kind: Kind::Lora, r: 8, scale: 2.0 })).collect();
        assert_eq!(selection.shapes, vec![of_layer; 3]);
        assert_eq!(selection.hits[0].num_hits, 21);
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
        assert_eq!(
            errors,
            [TargetError::NoMatch { target: "proj".into() }, TargetError::Frozen { target: "lm_head".into() }]
        );
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
            AdapterShape { kind: Kind::Lora, r: 16, scale: 8.0 }
        );
        config.use_rslora = false;
        config.rank_pattern.insert("down_proj".into(), 4);
        config.alpha_pattern.insert("down_proj".into(), 2.0);
        let shapes = config.select_of_any(1).unwrap().shapes;
        assert_eq!(shapes[0][&0], AdapterShape { kind: Kind::Lora, r: 16, scale: 2.0 });
        assert_eq!(shapes[0][&6], AdapterShape { kind: Kind::Lora, r: 4, scale: 0.5 });
    }

    #[test]
    fn layers_outside_the_model_are_refused() {
        let config = LoraConfig { layers_to_transform: Some(vec![0, 5]), ..LoraConfig::default() };
        assert!(matches!(config.select_of_any(2).unwrap_err()[..], [TargetError::NoLayer { layer: 5, last: 1, .. }]));
    }
}
