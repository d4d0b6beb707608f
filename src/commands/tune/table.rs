//! What was tried, as a table.

use super::Report;
use super::search::{Trial, TrialResult};
use super::trial::Figures;
use super::verdict::Verdict;
use crate::train::fit;

/// The trials, one a line, and what is to be made of them.
pub(super) fn table(report: &Report<'_>) -> String {
    let head = format!(
        "{:>13}  {:>7}  {:>9}  {:>9}  {:>9}  {}",
        "target tok/s", "speed", "step", "data wait", "peak", "change"
    );
    let mut lines = vec![head];
    lines.extend(report.trials.iter().map(line));
    let is_ahead = |trial: &Trial| trial.result.is_some_and(|result| result.verdict == Verdict::NotSettled);
    lines.push(match (report.speedup.zip(report.speedup_noise), &report.not_confirmed) {
        (Some((speedup, noise)), _) => {
            format!("fastest: {speedup:.2}x (noise {:.1} %) with {}", 100.0 * noise, report.fastest.join(" "))
        }
        (None, Some(why)) => format!("the fastest trial {why}: the recipe stays"),
        (None, None) if report.trials.iter().any(is_ahead) => {
            "something is ahead, but there was no time to settle whether it is faster (--max-minutes): the recipe stays"
                .into()
        }
        (None, None) => format!(
            "nothing that was tried is faster by more than the noise (here {:.1} % a trial): the recipe stays",
            100.0 * report.noise
        ),
    });
    lines.extend(report.written.as_ref().map(|path| format!("recipe: {}", path.display())));
    lines.join("\n")
}

fn line(trial: &Trial) -> String {
    let what = if trial.settings.is_empty() { "as the recipe is".to_owned() } else { trial.settings.join(" ") };
    let Some(Figures { target_tokens_per_second, step_seconds, data_wait_share, peak_memory_bytes, .. }) =
        &trial.figures
    else {
        return format!("{:>13}  {what}: {}", "-", trial.left_out.as_deref().unwrap_or("not tried"));
    };
    let mut remarks: Vec<String> = trial.result.iter().map(remark).collect();
    if !trial.keeps_numbers {
        let rows = trial.rows_of_step.map(|rows| format!(": {rows} rows an update"));
        remarks.push(format!("other numbers{}", rows.unwrap_or_default()));
    }
    let remarks = if remarks.is_empty() { String::new() } else { format!("   ({})", remarks.join("; ")) };
    #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
    let peak = peak_memory_bytes.map_or_else(|| "?".into(), |bytes| fit::size(bytes as f64));
    let speedup = trial.result.map_or(1.0, |result| result.speedup);
    format!(
        "{target_tokens_per_second:>13.1}  {:>7}  {:>9}  {:>8.1}%  {peak:>9}  {what}{remarks}",
        format!("{speedup:.2}x"),
        format!("{step_seconds:.3} s"),
        100.0 * data_wait_share
    )
}

/// What is to be thought of a trial.
pub(super) fn remark(result: &TrialResult) -> String {
    let noise = 100.0 * result.noise;
    match result.verdict {
        Verdict::Faster => format!("faster, noise {noise:.1} %"),
        Verdict::HardlyFaster => format!("hardly faster, noise {noise:.1} %"),
        Verdict::WithinNoise | Verdict::Undecided => format!("within the noise of {noise:.1} %"),
        Verdict::NotSettled => format!("ahead, noise {noise:.1} %, but no time for more rounds; --max-minutes"),
        Verdict::Slower => format!("slower, noise {noise:.1} %"),
    }
}
