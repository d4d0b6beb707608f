//! Several adapters written as one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::merge::require_absent_or_empty;
use super::tokenizer_files::{TOKENIZER_FILES, copy, copy_named_templates};
use super::{
    AdapterWeights, ExportError, HostMatrix, PromptForm, SavedAdapter, check_adapter, read_adapter, write_adapter,
};
use crate::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::lora::Matrices;
use crate::lora::combine::{Combination, CombinationType, MajoritySign, ScaledUpdate};
use crate::lora::targets::AdapterShape;
use crate::model::weights::Weights;
use crate::ops::low_rank::LowRank;
use crate::schema::{ByName, Problem};
use crate::spec::{ModelConfig, SiteId, is_of_expert};
use crate::util::stats::as_f64;

/// An adapter of several.
#[derive(Clone, Debug, PartialEq)]
pub struct Combined {
    /// The adapter.
    pub adapter: SavedAdapter,
    /// How its prompts are formatted, where that is known and the same for all.
    pub form: Option<PromptForm>,
    /// Whether forms differ.
    pub has_forms: bool,
}

/// An adapter's folder with its weight in the combination.
pub type Weighted = (PathBuf, f64);

/// Combines adapters of the model in a folder or file.
///
/// # Errors
/// An adapter that cannot be read, does not fit the model or is no low-rank update; ranks that differ where the type needs one.
pub fn combine(
    adapters: &[Weighted],
    combination: &Combination,
    folder_of_model: &Path,
) -> Result<Combined, ExportError> {
    let model = &ModelConfig::from_model(folder_of_model)?;
    let base = Weights::open(folder_of_model, model);
    let (mut read, mut forms) = (Vec::new(), Vec::new());
    for (folder, weight) in adapters {
        let mut saved = read_adapter(folder)?.that_writes(folder)?.named_for(model);
        if let Ok(base) = &base {
            saved = saved.without_equal_tables(base, model);
        }
        require_low_rank(folder, &saved)?;
        let selection = check_adapter(folder, &saved, model)?;
        let of_each = |(layer, site, shape): (usize, SiteId, AdapterShape)| {
            let sites = model.blocks[layer].of_experts(site).into_iter();
            sites.map(move |site| (model.module_name(layer, site), shape))
        };
        let shapes: BTreeMap<String, AdapterShape> = selection.iter().flat_map(of_each).collect();
        forms.push(PromptForm::read(folder)?);
        read.push((folder.as_path(), saved, shapes, *weight));
    }
    // As PEFT has it, the largest rank of all, also where a module is in some of them alone.
    let of_all = read
        .iter()
        .flat_map(|(_, saved, ..)| [saved.config.r].into_iter().chain(saved.config.rank_pattern.values().copied()));
    let of_others = Combination { svd_rank: combination.svd_rank.or(of_all.max()), ..*combination };
    let of_experts = read.iter().filter_map(|(_, saved, ..)| saved.config.expert_rank).max();
    let of_experts = Combination { svd_rank: combination.svd_rank.or(of_experts), ..*combination };
    let modules: BTreeSet<&String> = read.iter().flat_map(|(_, saved, ..)| saved.weights.keys()).collect();
    let (mut weights, mut rng) = (AdapterWeights::default(), combination.rng());
    for module in modules {
        let mut parts: Vec<(&Path, ScaledUpdate<'_>)> = Vec::new();
        for (folder, saved, shapes, weight) in &read {
            let Some((pair, shape)) = saved.weights.get(module).zip(shapes.get(module)) else { continue };
            let matrices = LowRank { a: &*pair.a.values, b: &*pair.b.values };
            parts.push((folder, ScaledUpdate { matrices, r: shape.r, factor: weight * shape.scale }));
        }
        let combination = if is_of_expert(module) { &of_experts } else { &of_others };
        require_one_rank(combination.kind, module, &parts)?;
        let parts: Vec<ScaledUpdate<'_>> = parts.into_iter().map(|(_, part)| part).collect();
        let (r, LowRank { a, b }) = combination.of(&parts, &mut rng);
        let matrix = |values: Vec<f32>, num_rows: usize| {
            let num_columns = values.len() / num_rows;
            HostMatrix { num_rows, num_columns, values }
        };
        let out_features = b.len() / r;
        let pair = Matrices { a: matrix(a, r), b: matrix(b, out_features), magnitude: None };
        weights.insert(module.clone(), pair);
    }
    let Some((_, first, ..)) = read.first() else {
        return Err(Problem::new("there is no adapter to combine").into());
    };
    let same = read.iter().all(|(_, saved, ..)| saved.weights.keys().eq(first.weights.keys()));
    if !same && read.iter().any(|(_, saved, ..)| saved.config.expert_rank.is_some()) {
        let problem = Problem::new("adapters on experts are combined where all of them are on the same layers");
        return Err(problem.hint("merge one after the other into the model").into());
    }
    weights.experts = first.weights.experts;
    let ranks = weights.iter().map(|(module, pair)| (module, pair.a.num_rows));
    let base_model_name_or_path = first.base_model_name_or_path.clone();
    let config = config(&first.config, ranks, same);
    let has_forms = forms.windows(2).any(|pair| pair[0] != pair[1]);
    let form = forms.into_iter().next().flatten().filter(|_| !has_forms);
    Ok(Combined { adapter: SavedAdapter { weights, config, base_model_name_or_path }, form, has_forms })
}

fn require_low_rank(folder: &Path, saved: &SavedAdapter) -> Result<(), Problem> {
    let message = if saved.config.use_dora {
        "what an adapter with `use_dora` changes is not of low rank"
    } else if saved.weights.replaces_weights() {
        "this adapter replaces rows or modules of the model, which cannot be added up"
    } else {
        return Ok(());
    };
    Err(Problem::new(message).at(folder.display()).hint("merge it alone into its model"))
}

fn require_one_rank(kind: CombinationType, module: &str, parts: &[(&Path, ScaledUpdate<'_>)]) -> Result<(), Problem> {
    let Some(((first, part), rest)) = parts.split_first() else { return Ok(()) };
    match rest.iter().find(|(_, other)| other.r != part.r) {
        Some((folder, other)) if kind.has_one_rank() => {
            let (one, two) = (first.display(), folder.display());
            let message = format!("`{module}` has rank {} in {one} and {} in {two}", part.r, other.r);
            let hint = "adapters of several ranks are combined with --combination-type svd or cat";
            Err(Problem::new(message).hint(hint))
        }
        _ => Ok(()),
    }
}

/// The section of a combination, whose scale is 1 everywhere. `same`: all have the modules of the first.
fn config<'a>(first: &LoraConfig, ranks: impl Iterator<Item = (&'a String, usize)> + Clone, same: bool) -> LoraConfig {
    let of = |experts: bool| ranks.clone().filter(move |(module, _)| is_of_expert(module) == experts);
    let expert_rank = of(true).map(|(_, r)| r).max();
    let r = of(false).map(|(_, r)| r).max().or(expert_rank).unwrap_or_default();
    let others = of(false).filter(|(_, rank)| *rank != r).map(|(module, rank)| (regex::escape(module), rank));
    #[expect(clippy::cast_precision_loss, reason = "a rank")]
    let (alpha, alphas) = (r as f64, others.clone().map(|(module, rank)| (module, rank as f64)));
    let mut config = LoraConfig {
        r,
        expert_rank,
        lora_alpha: alpha,
        use_rslora: false,
        init_lora_weights: InitLoraWeights::Kaiming,
        alpha_pattern: alphas.collect(),
        rank_pattern: others.collect(),
        ..first.clone()
    };
    if !same {
        config.target_modules = TargetModules::Names(ranks.map(|(module, _)| module.clone()).collect());
        (config.layers_to_transform, config.layers_pattern) = (None, None);
    }
    config
}

/// Writes a combination as a folder that PEFT reads.
///
/// # Errors
/// A folder that is not empty, or cannot be written.
pub fn write_combined(folder: &Path, combined: &Combined, base: &str) -> Result<(), ExportError> {
    require_absent_or_empty(folder)?;
    let SavedAdapter { weights, config, base_model_name_or_path } = &combined.adapter;
    write_adapter(folder, weights, config, base_model_name_or_path.as_deref().unwrap_or(base))?;
    combined.form.as_ref().map_or(Ok(()), |form| form.write(folder))
}

/// Writes the adapter in `folder`, of the model in `folder_of_model` called `base`, with one rank for all layers and a scale of 1;
/// returns the rank. Its product B A is the same everywhere: A has more rows and B more columns of zeros.
///
/// # Errors
/// As [`combine`]; an `out` that is not empty.
pub fn write_plain(folder: &Path, folder_of_model: &Path, base: &str, out: &Path) -> Result<usize, ExportError> {
    let (kind, majority_sign) = (CombinationType::Cat, MajoritySign::default());
    let alone = Combination { kind, density: 1.0, majority_sign, svd_rank: None, seed: 0 };
    let mut combined = combine(&[(folder.to_owned(), 1.0)], &alone, folder_of_model)?;
    let SavedAdapter { weights, config, .. } = &mut combined.adapter;
    if config.expert_rank.is_some() && weights.experts.is_joined() {
        let problem = Problem::new("experts' adapters are joined in the file of this model, with ranks of their own");
        return Err(problem.at(folder.display()).hint("merge it into its model").into());
    }
    let r = config.r.max(config.expert_rank.unwrap_or_default());
    config.expert_rank = config.expert_rank.map(|_| r);
    (config.r, config.lora_alpha) = (r, config.lora_alpha.max(as_f64(r)));
    for pair in weights.adapters.values_mut() {
        pair.a.values.resize(r * pair.a.num_columns, 0.0);
        let rows = pair.b.values.chunks(pair.b.num_columns);
        pair.b.values = rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat(0.0)).take(r)).collect();
        (pair.a.num_rows, pair.b.num_columns) = (r, r);
    }
    (config.rank_pattern, config.alpha_pattern) = (ByName::default(), ByName::default());
    write_combined(out, &combined, base)?;
    for name in TOKENIZER_FILES.iter().filter(|name| folder.join(name).is_file()) {
        copy(&folder.join(name), &out.join(name))?;
    }
    copy_named_templates(folder, out)?;
    Ok(r)
}
