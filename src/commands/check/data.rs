//! The data files, their first rows, and the steps that follow from them.

use std::sync::Arc;

use super::findings::{Findings, with_commas};
use crate::data::cache::CacheSettings;
use crate::data::config::{DataConfig, DataSource};
use crate::data::encode::EncodedRow;
use crate::data::pipeline::{DataPipeline, OpenOptions, RowCounts};
use crate::data::tokenizer::Tokenizer;
use crate::hub::Progress;
use crate::recipe::Recipe;
use crate::schema::Problem;
use crate::train::schedule::{steps_per_epoch, total_steps};

/// Rows of each file that are tokenised.
const NUM_ROWS: usize = 8;

/// Opens every file, tokenises the first rows, and counts steps.
pub(super) fn examine(recipe: &Recipe, tokenizer: &Arc<Tokenizer>, findings: &mut Findings) {
    let options =
        OpenOptions { cache: CacheSettings::from_env(), progress: Progress::detect(false), ..OpenOptions::default() };
    match DataPipeline::open(&recipe.data, Arc::clone(tokenizer), recipe.seed, &options) {
        Ok(data) => {
            examine_files(recipe, &data, findings);
            examine_rows(recipe, &data, findings);
            examine_steps(recipe, &data, findings);
        }
        Err(first) => {
            // The first mistake hides those of other files: each is opened alone.
            let before = findings.problems.0.len();
            for source in recipe.data.train.iter().chain(&recipe.data.eval) {
                let alone =
                    DataConfig { train: vec![source.clone()], eval: vec![], eval_split: None, ..recipe.data.clone() };
                if let Err(error) = DataPipeline::open(&alone, Arc::clone(tokenizer), recipe.seed, &options) {
                    findings.error(&error);
                }
            }
            if findings.problems.0.len() == before {
                findings.error(&first);
            }
        }
    }
}

/// Without a tokenizer no row can be looked at, but that files are missing can be seen.
pub(super) fn examine_paths(data: &DataConfig, findings: &mut Findings) {
    let mut examine = |section: &str, sources: &[DataSource]| {
        for (index, DataSource { path, .. }) in sources.iter().enumerate() {
            let key = format!("data.{section}[{index}].path");
            match glob::glob(path).map(|mut paths| paths.next().is_some()) {
                Ok(true) => {}
                Ok(false) => findings.problem(Problem::new(format!("`{key}` = \"{path}\": there is no such file"))),
                Err(error) => findings.problem(Problem::new(format!("`{key}` = \"{path}\" is no pattern: {error}"))),
            }
        }
    };
    examine("train", &data.train);
    examine("eval", &data.eval);
}

fn examine_files(recipe: &Recipe, data: &DataPipeline, findings: &mut Findings) {
    for file in data.files() {
        let subject = if file.is_eval { "evaluation data" } else { "training data" };
        let rows = with_commas(file.num_rows);
        findings.fact(subject, format!("{} ({rows} rows, {})", file.path.display(), file.format.name()));
        if !file.unused_columns.is_empty() {
            findings.warn(format!("{}: columns not read: {}", file.path.display(), file.unused_columns.join(", ")));
        }
    }
    if recipe.data.eval_split.is_some() {
        let (held_out, left) = (with_commas(data.num_eval_rows()), with_commas(data.num_train_rows()));
        findings.fact("evaluation data", format!("{held_out} rows held out, {left} rows left to train on"));
    }
    data.warnings().into_iter().for_each(|warning| findings.warn(warning));
}

fn examine_rows(recipe: &Recipe, data: &DataPipeline, findings: &mut Findings) {
    // Rows that `eval_split` holds out shift the others, so that the first rows of a file may be a few further on.
    let last = data.num_train_rows();
    let mut start = 0;
    let mut rows: Vec<EncodedRow> = Vec::new();
    for file in data.files().iter().filter(|file| !file.is_eval) {
        for index in (start..start + file.num_rows.min(NUM_ROWS)).filter(|index| *index < last) {
            match data.train_row(index) {
                Ok((_, row)) => rows.push(row),
                Err(error) => findings.error(&error),
            }
        }
        start += file.num_rows;
    }
    let mut counts = RowCounts::default();
    match data.eval_batches(1, Some(NUM_ROWS)) {
        Ok(batches) => {
            for batch in batches {
                match batch {
                    Ok(batch) => counts += batch.report,
                    Err(error) => findings.error(&error),
                }
            }
        }
        Err(error) => findings.error(&error),
    }
    if counts.rows > 0 && counts.without_targets == counts.rows {
        findings.warn(format!("no token of the first {} evaluation rows carries loss", counts.rows));
    }
    report_lengths(recipe, &rows, findings);
}

fn report_lengths(recipe: &Recipe, rows: &[EncodedRow], findings: &mut Findings) {
    let num_rows = rows.len();
    let lengths = || rows.iter().map(|row| row.full_length);
    let (Some(shortest), Some(longest)) = (lengths().min(), lengths().max()) else { return };
    let targets: usize = rows.iter().map(EncodedRow::num_target_tokens).sum();
    let tokens: usize = rows.iter().map(|row| row.ids.len()).sum();
    findings.fact(
        "first rows",
        format!("{num_rows} rows of {shortest} to {longest} tokens; {targets} of {tokens} tokens carry loss"),
    );
    let max_length = recipe.data.max_length;
    let truncated = rows.iter().filter(|row| row.is_truncated()).count();
    if truncated > 0 {
        let cut = rows.iter().filter(|row| row.is_answer_cut()).count();
        findings.warn(format!(
            "{truncated} of the first {num_rows} rows are longer than `data.max_length` = {max_length} and will be cut; \
             of {cut} nothing of the answer is left\n  hint: the longest has {longest} tokens"
        ));
    }
    if targets == 0 {
        let message = format!("no token of the first {num_rows} rows carries loss");
        let hint = if truncated > 0 {
            "raise `data.max_length`: nothing of the answers is left"
        } else {
            "see what `lora-train inspect` shows, or set `data.train_on_inputs = true`"
        };
        findings.problem(Problem::new(message).hint(hint));
    }
}

fn examine_steps(recipe: &Recipe, data: &DataPipeline, findings: &mut Findings) {
    let train = &recipe.train;
    let batches = usize::try_from(data.batches_per_epoch(train.micro_batch_size)).unwrap_or(usize::MAX);
    let per_epoch = steps_per_epoch(batches, train.gradient_accumulation_steps);
    let total = total_steps(batches, train.gradient_accumulation_steps, train.num_epochs, train.max_steps);
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
