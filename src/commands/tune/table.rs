//! The trials as a table.

use super::Report;
use super::pairs::MIN_GAIN;
use super::search::{Trial, TrialResult};
use crate::train::fit;

/// The trials, one per line, and the fastest.
pub(super) fn table(report: &Report<'_>) -> String {
    let mut lines = vec![format!(
        "{:>13}  {:>7}  {:>9}  {:>9}  {:>9}  change",
        "target tok/s", "speed", "step", "data wait", "peak"
    )];
    lines.extend(report.trials.iter().map(line));
    lines.push(match (report.speedup, &report.not_confirmed) {
        (Some(speedup), _) => format!("fastest: {speedup:.2}x with {}", report.fastest.join(" ")),
        (None, Some(why)) => format!("the fastest trial {why}: the recipe stays"),
        (None, None) => {
            format!("nothing that was tried is faster by {:.0} % or more: the recipe stays", 100.0 * (MIN_GAIN - 1.0))
        }
    });
    lines.extend(report.written.as_ref().map(|path| format!("recipe: {}", path.display())));
    lines.join("\n")
}

fn line(trial: &Trial) -> String {
    let what = if trial.settings.is_empty() { "as the recipe is".to_owned() } else { trial.settings.join(" ") };
    let Some(figures) = &trial.figures else {
        return format!("{:>13}  {what}: {}", "-", trial.left_out.as_deref().unwrap_or("not tried"));
    };
    let mut remarks: Vec<String> = trial.result.iter().map(remark).collect();
    if !trial.keeps_numbers {
        let rows = trial.rows_of_step.map(|rows| format!(": {rows} rows an update"));
        remarks.push(format!("other numbers{}", rows.unwrap_or_default()));
    }
    let remarks = if remarks.is_empty() { String::new() } else { format!("   ({})", remarks.join("; ")) };
    #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
    let peak = figures.peak_memory_bytes.map_or_else(|| "?".into(), |bytes| fit::size(bytes as f64));
    let speed = &figures.speed;
    format!(
        "{:>13.1}  {:>6.2}x  {:>7.3} s  {:>8.1}%  {peak:>9}  {what}{remarks}",
        speed.target_tokens_per_second,
        trial.result.map_or(1.0, |result| result.speedup),
        speed.step_seconds,
        100.0 * speed.data_wait_share
    )
}

/// Whether a trial was kept, and how it compared with the fastest before it.
pub(super) fn remark(result: &TrialResult) -> String {
    let words = if result.is_faster { "kept" } else { "not kept" };
    let (num_faster, num_pairs) = (result.paired.num_faster, result.paired.num_pairs);
    format!("{words}: ahead of the fastest before it in {num_faster} of {num_pairs} pairs")
}
