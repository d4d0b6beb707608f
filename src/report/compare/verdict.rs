//! What a comparison says, in words.

use super::super::axis::Unit;
use super::super::record::Record;
use super::{Difference, Run, RunFigure, Verdict, peak_key};
use crate::metrics::format::thousands;

/// Keys that decide over which tokens the evaluation loss is taken.
const EVALUATION_KEYS: [&str; 6] =
    ["data.eval", "data.max_length", "data.chat_template", "data.train_on_inputs", "eval.max_batches", "model.path"];
/// The same, where only the first micro-batches are looked at.
const BATCH_KEYS: [&str; 1] = ["train.micro_batch_size"];
/// The same, where the rows are held out of the training files.
const SPLIT_KEYS: [&str; 3] = ["data.eval_split", "data.train", "seed"];

/// Less memory than this is not worth a word, in percent.
const SMALL_PERCENT: f64 = 1.0;

/// A run against the baseline; `index` is its place among the runs.
pub(super) fn verdict(
    baseline: &Run,
    run: &Run,
    records: &[Record],
    differences: &[Difference],
    index: usize,
) -> Verdict {
    let both = [&records[0], &records[index]];
    let has_recipes = both.iter().all(|record| !record.settings.is_empty());
    let differs = |key: &str| {
        let prefixed =
            |difference: &&Difference| difference.key == key || difference.key.starts_with(&format!("{key}["));
        differences.iter().filter(prefixed).any(|difference| difference.values[0] != difference.values[index])
    };
    let parts: Vec<String> =
        [speed(baseline, run), memory(baseline, run), loss(baseline, run)].into_iter().flatten().collect();
    let text = if parts.is_empty() { "no figure can be compared".to_owned() } else { parts.join("; ") };
    let mut notes = Vec::new();
    let has_losses = run.value("final_eval_loss").is_some() && baseline.value("final_eval_loss").is_some();
    let has = |key: &str| both.iter().any(|record| record.setting(key).is_some());
    let (has_split, has_batches) = (has("data.eval_split"), has("eval.max_batches"));
    let split_keys = SPLIT_KEYS.into_iter().filter(|_| has_split);
    let batch_keys = BATCH_KEYS.into_iter().filter(|_| has_batches);
    let keys = EVALUATION_KEYS.into_iter().chain(split_keys).chain(batch_keys);
    let moved: Vec<&str> = keys.filter(|key| has_recipes && differs(key)).collect();
    let since = format!("since {} differ{}", moved.join(", "), if moved.len() == 1 { "s" } else { "" });
    if has_losses && run.evaluates_other_tokens(baseline) {
        let since = match moved.as_slice() {
            [] if has_recipes => {
                "though the recipes ask for the same: the rows or the tokenizer have changed".to_owned()
            }
            [] => "and the recipes do not say why".to_owned(),
            _ => since,
        };
        notes.push(format!("the evaluation losses are over different tokens and cannot be compared, {since}"));
    } else if has_losses && !moved.is_empty() {
        notes.push(format!("the evaluation losses may be over different tokens, {since}"));
    }
    if let (Some(from), Some(to)) = (baseline.value("steps"), run.value("steps"))
        && from != to
    {
        let [from, to] = [from, to].map(thousands);
        notes.push(format!("the runs took {from} and {to} steps, so their last losses are of different moments"));
    } else if let (Some(from), Some(to)) = (baseline.value("evaluations"), run.value("evaluations"))
        && has_losses
        && from != to
    {
        let [from, to] = [from, to].map(thousands);
        notes.push(format!("the best evaluation losses are the lowest of {from} and of {to}; more find a lower one"));
    }
    if run.device != baseline.device {
        notes.push(format!("the devices differ: {} and {}", baseline.device, run.device));
    }
    let own: Vec<&str> = differences
        .iter()
        .filter(|difference| difference.values[0] != difference.values[index])
        .map(|difference| difference.key.as_str())
        .collect();
    match own.as_slice() {
        _ if !has_recipes => {
            notes.push("the recipes cannot be compared: a resolved.toml is missing or cannot be read".to_owned());
        }
        [] => notes.push("the recipes are the same, so what differs is the machine, the program or chance".to_owned()),
        ["seed"] => notes.push("the recipes differ in `seed` alone, so the losses differ by chance".to_owned()),
        _ => {}
    }
    Verdict { run: run.name.clone(), baseline: baseline.name.clone(), text, notes }
}

fn speed(baseline: &Run, run: &Run) -> Option<String> {
    let figure = run.figure("tokens_per_second")?;
    let change = figure.change_percent?;
    let rates = format!("{} -> {} tokens/s", rate(baseline)?, rate(run)?);
    let words = if change >= 0.0 { "faster" } else { "slower" };
    Some(match (figure.is_noise, figure.interval_percent) {
        (Some(true), Some(range)) => {
            format!(
                "as fast, within the noise of the steps ({rates}; {change:+.1} %, chance leaves {})",
                between(range)
            )
        }
        (Some(false), Some(range)) => {
            format!("{:.1} % {words} ({rates}; chance leaves {})", change.abs(), between(range))
        }
        _ => format!("{:.1} % {words} ({rates}), from too few steps to tell it from chance", change.abs()),
    })
}

fn rate(run: &Run) -> Option<String> {
    Some(thousands(run.value("tokens_per_second")?))
}

fn between((low, high): (f64, f64)) -> String {
    format!("{low:+.1} to {high:+.1} %")
}

fn memory(baseline: &Run, run: &Run) -> Option<String> {
    let key = peak_key(baseline, run)?;
    let RunFigure { value, change_percent, .. } = run.figure(key)?;
    let change = (*change_percent)?;
    let sizes = format!("{} -> {}", Unit::Bytes.text(baseline.value(key)?), Unit::Bytes.text((*value)?));
    Some(if change.abs() < SMALL_PERCENT {
        format!("the same memory ({sizes})")
    } else {
        format!("{:.1} % {} memory ({sizes})", change.abs(), if change < 0.0 { "less" } else { "more" })
    })
}

fn loss(baseline: &Run, run: &Run) -> Option<String> {
    let from = baseline.value("final_eval_loss")?;
    let Some(to) = run.value("final_eval_loss") else {
        return Some(format!("no evaluation loss at the end, or one that is no number (before: {from:.4})"));
    };
    if run.evaluates_other_tokens(baseline) {
        let tokens = |run: &Run| run.value("eval_target_tokens").map(thousands);
        let (before, after) = (tokens(baseline)?, tokens(run)?);
        return Some(format!(
            "evaluation losses that cannot be compared ({from:.4} over {before} target tokens, {to:.4} over {after})"
        ));
    }
    let losses = format!("{from:.4} -> {to:.4}");
    Some(if (to - from).abs() < 5e-5 {
        format!("the same evaluation loss ({losses})")
    } else {
        let words = if to < from { "lower" } else { "higher" };
        format!("an evaluation loss {:.4} {words} ({losses})", (to - from).abs())
    })
}
