//! The data files, their first rows, and the steps that follow from them.

use std::sync::Arc;

use indicatif::HumanCount;

use super::findings::Findings;
use crate::data::cache::CacheSettings;
use crate::data::config::{DataConfig, DataSource};
use crate::data::dataset::{Dataset, OpenOptions, RowCounts};
use crate::data::error::DataError;
use crate::data::files::matching_files;
use crate::data::tokenizer::Tokenizer;
use crate::hub::Progress;
use crate::recipe::Recipe;
use crate::run::overview;
use crate::schema::Problem;

/// Opens every file, tokenises its rows, at most `max_rows` of each file, and counts steps.
pub(super) fn examine(recipe: &Recipe, tokenizer: &Arc<Tokenizer>, max_rows: Option<usize>, findings: &mut Findings) {
    let options = OpenOptions {
        cache: CacheSettings::from_env(),
        progress: Progress::detect(false),
        max_rows,
        ..OpenOptions::default()
    };
    let mut config = recipe.data.clone();
    if let Some(rows) = max_rows {
        // With only some of the rows, nothing is split off.
        config.eval_split = None;
        findings.fact("looked at", format!("the first {rows} rows of each file"));
    }
    match Dataset::open(&config, Arc::clone(tokenizer), recipe.seed, &options) {
        Ok(data) => {
            examine_files(&config, &data, findings);
            examine_rows(&data, findings);
            if max_rows.is_none() {
                examine_steps(recipe, &data, findings);
            }
        }
        // This error holds the mistakes of all files.
        Err(error @ DataError::Rows(_)) => findings.error(&error),
        Err(first) => {
            // The first mistake hides those of other files, so open each file alone.
            let before = findings.problems.0.len();
            examine_paths(&recipe.data, findings);
            let is_there = |source: &&DataSource| matching_files("", &source.path).is_ok();
            for source in recipe.data.train.iter().chain(&recipe.data.eval).filter(is_there) {
                let alone =
                    DataConfig { train: vec![source.clone()], eval: vec![], eval_split: None, ..recipe.data.clone() };
                if let Err(error) = Dataset::open(&alone, Arc::clone(tokenizer), recipe.seed, &options) {
                    findings.error(&error);
                }
            }
            if findings.problems.0.len() == before {
                findings.error(&first);
            }
        }
    }
}

/// Without a tokenizer rows cannot be checked, but missing files can be found.
pub(super) fn examine_paths(data: &DataConfig, findings: &mut Findings) {
    let mut examine = |section: &str, sources: &[DataSource]| {
        for (index, DataSource { path, .. }) in sources.iter().enumerate() {
            if let Err(error) = matching_files(&format!("data.{section}[{index}].path"), path) {
                findings.error(&error);
            }
        }
    };
    examine("train", &data.train);
    examine("eval", &data.eval);
}

fn examine_files(config: &DataConfig, data: &Dataset, findings: &mut Findings) {
    for file in data.files() {
        findings.facts.push(overview::file(data, file));
        if !file.unused_columns.is_empty() {
            findings.warn(format!("{}: columns not read: {}", file.path.display(), file.unused_columns.join(", ")));
        }
    }
    if config.eval_split.is_some() {
        findings.facts.push(overview::held_out(data));
    }
    data.warnings().into_iter().for_each(|warning| findings.warn(warning));
}

fn examine_rows(data: &Dataset, findings: &mut Findings) {
    let counts = match data.train_counts() {
        Ok(counts) => counts,
        Err(error) => return findings.error(&error),
    };
    let RowCounts { rows, bad, without_targets, tokens, target_tokens, longest_tokens, .. } = counts;
    let mut fact = format!(
        "{} rows of up to {} tokens; {} of {} tokens carry loss",
        HumanCount(rows),
        HumanCount(longest_tokens),
        HumanCount(target_tokens),
        HumanCount(tokens)
    );
    if bad + without_targets > 0 {
        fact.push_str(&format!("; {} rows left out", HumanCount(bad + without_targets)));
    }
    findings.fact("rows", fact);
}

fn examine_steps(recipe: &Recipe, data: &Dataset, findings: &mut Findings) {
    let train = &recipe.train;
    let (per_epoch, total) = (overview::steps_per_epoch(recipe, data), overview::total_steps(recipe, data));
    let rows = train.micro_batch_size * train.gradient_accumulation_steps;
    findings.fact("steps", format!("{total} of {rows} rows; an epoch has {per_epoch}"));
    if let Some(warmup) = recipe.scheduler.warmup_steps.filter(|warmup| *warmup >= total) {
        let message = format!("`scheduler.warmup_steps` = {warmup} leaves none of the {total} steps of this run");
        findings.problem(Problem::new(message).hint("make it smaller, or use `warmup_ratio`"));
    }
    let intervals =
        [("eval.eval_steps", recipe.eval.eval_steps), ("checkpoint.save_steps", recipe.checkpoint.save_steps)];
    for (key, interval) in intervals {
        if let Some(steps) = interval.filter(|steps| *steps > total) {
            findings.warn(format!("`{key}` = {steps} never comes: the run has {total} steps"));
        }
    }
}
