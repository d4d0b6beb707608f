//! What the console says at the end of a run.

use crate::measure::figures::evaluation::{EvalFigure, Group};
use crate::measure::metrics::{Evaluations, Severity, Summary};
use crate::util::stats::as_f64;
use crate::util::text::{bytes, counted, duration, thousands};

/// Findings that are shown; summary.json has all.
const MAX_FINDINGS: usize = 4;

/// How the run went, in a few lines.
pub(super) fn summary_text(summary: &Summary) -> String {
    let Summary { totals, evaluations, .. } = summary;
    let mut lines = vec![outcome_line(summary)];
    let losses = losses(summary);
    if !losses.is_empty() {
        lines.push(format!("  {}", losses.join(", ")));
    }
    lines.extend(trend(evaluations).map(|trend| format!("  {trend}")));
    let mut machine = Vec::new();
    machine.extend(totals.peak_host_memory_bytes.map(|peak| format!("peak host memory {}", bytes(peak))));
    machine.extend(totals.peak_gpu_memory_bytes.map(|peak| format!("peak GPU memory {}", bytes(peak))));
    machine.extend(totals.cpu_utilization_percent.get().map(|percent| format!("CPU {percent:.0}%")));
    machine.extend(totals.gpu_utilization_percent.get().map(|percent| format!("GPU {percent:.0}%")));
    if !machine.is_empty() {
        lines.push(format!("  {}", machine.join(", ")));
    }
    lines.extend(price_line(summary));
    if totals.wall_seconds > 0.0 {
        let share = |seconds: f64| 100.0 * seconds / totals.wall_seconds;
        let parts = totals.time.parts().into_iter().filter(|&(_, seconds)| share(seconds) >= 0.5);
        let parts: Vec<_> = parts.map(|(name, seconds)| format!("{name} {:.0}%", share(seconds))).collect();
        lines.push(format!("  time: {}", parts.join(", ")));
    }
    if totals.num_starts > 1 && !summary.diagnosis.is_empty() {
        lines.push("  of the last start:".to_owned());
    }
    for finding in summary.diagnosis.iter().take(MAX_FINDINGS) {
        let shown = match finding.severity {
            Severity::Note | Severity::Healthy => finding.lines().into_iter().take(1).collect(),
            // After an unfinished run the user wants to know what to change; the page has the figures.
            _ if !summary.outcome.is_finished() => finding.without_evidence().lines(),
            _ => finding.lines(),
        };
        lines.extend(shown.into_iter().map(|line| format!("  {line}")));
    }
    lines.join("\n")
}

/// How it ended, after how many steps and how long, and how fast it was.
fn outcome_line(summary: &Summary) -> String {
    let totals = &summary.totals;
    let outcome = summary.outcome.name();
    let starts = if totals.num_starts > 1 { format!(" ({} starts)", totals.num_starts) } else { String::new() };
    let seconds = format!("{}{starts}", duration(totals.wall_seconds));
    let mut first = vec![if summary.outcome.is_finished() {
        format!("{outcome} after {} in {seconds}", counted(summary.steps, "step"))
    } else {
        let of = summary.total_steps.map(|total| format!(" of {total}")).unwrap_or_default();
        format!("{outcome} at step {}{of}, after {seconds}", summary.steps)
    }];
    first.extend(totals.tokens_per_second().map(|rate| format!("{} tokens/s", thousands(rate))));
    first.extend(totals.mfu.get().map(|mfu| format!("mfu {:.1}%", 100.0 * mfu)));
    if totals.skipped_steps > 0 {
        first.push(format!("{} skipped", counted(totals.skipped_steps, "step")));
    }
    first.join(", ")
}

/// The last loss, and what evaluations came to.
fn losses(summary: &Summary) -> Vec<String> {
    let Summary { totals, evaluations, .. } = summary;
    let mut losses = Vec::new();
    losses.extend(totals.last_loss.map(|loss| format!("loss {loss:.4}")));
    // A run that was cut short may have evaluated only once.
    let has_evaluated_again = summary.outcome.is_finished()
        || evaluations.first.eval_loss != evaluations.last.eval_loss
        || evaluations.first.eval_reward != evaluations.last.eval_reward;
    for figure in EvalFigure::headlines(&[Group::Loss, Group::Answers, Group::Score]) {
        let [first, last, best] = [&evaluations.first, &evaluations.last, &evaluations.best].map(figure.of);
        let is_loss = figure.group == Group::Loss;
        if let Some(last) = last.filter(|_| has_evaluated_again && (first.is_some() || !is_loss)) {
            let initial = first.map(|first| format!("{} -> ", figure.text(first))).unwrap_or_default();
            let change = first.filter(|_| is_loss).map(|first| format!(" ({:+.1}%)", 100.0 * (last / first - 1.0)));
            let change = change.unwrap_or_default();
            losses.push(format!("{} {initial}{}{change}", figure.label("eval "), figure.text(last)));
        }
        if let (Some(best), Some(step)) = (best.filter(|_| figure.group != Group::Score), evaluations.best_step) {
            losses.push(format!("best {} at step {step}", figure.text(best)));
        }
    }
    losses
}

/// Whether the evaluation loss still falls or has turned; `None` where the score decides which adapter is the best.
fn trend(evaluations: &Evaluations) -> Option<String> {
    let Evaluations { best, last, previous, .. } = evaluations;
    if best.eval_score.is_some() {
        return None;
    }
    let (best, last, previous) = (best.eval_loss?, last.eval_loss?, previous.eval_loss?);
    let percent = |of: f64, to: f64| format!("{:.1}%", 100.0 * (of / to - 1.0).abs());
    if last > 1.01 * best {
        return Some(format!("the evaluation loss has turned: it is {} above its best", percent(last, best)));
    }
    let still_falls = last < 0.99 * previous;
    still_falls
        .then(|| format!("the evaluation loss still falls: by {} since the evaluation before", percent(last, previous)))
}

/// Tokens, energy and cost, and what a million tokens take.
fn price_line(summary: &Summary) -> Option<String> {
    let price = |energy: Option<f64>, cost: Option<f64>| {
        let cost = cost.zip(summary.currency.as_deref());
        let energy = energy.map(|kwh| if kwh < 1.0 { format!("{:.2} Wh", 1e3 * kwh) } else { format!("{kwh:.2} kWh") });
        [energy, cost.map(|(cost, currency)| format!("{} {currency}", money(cost)))].into_iter().flatten()
    };
    let million = summary.per_million_tokens.as_ref()?;
    let all = std::iter::once(format!("{} tokens", thousands(as_f64(summary.totals.tokens))));
    let all: Vec<String> = all.chain(price(summary.energy_kwh, summary.cost)).collect();
    let each = std::iter::once(duration(million.seconds)).chain(price(million.energy_kwh, million.cost));
    Some(format!("  {}; 1M tokens: {}", all.join(", "), each.collect::<Vec<_>>().join(", ")))
}

/// `12.34`, and three digits of less.
fn money(amount: f64) -> String {
    if amount >= 0.1 || amount <= 0.0 { format!("{amount:.2}") } else { format!("{amount:.2e}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CostConfig;
    use crate::measure::metrics::{Change, EvalMetrics, Finding, Outcome, TimeSpent, Totals};
    use crate::util::stats::MeanOverTime;

    fn of_loss(loss: f64) -> EvalMetrics {
        EvalMetrics { eval_loss: Some(loss), ..EvalMetrics::default() }
    }

    #[test]
    fn the_summary_says_how_it_went_in_a_few_lines() {
        let time = TimeSpent { startup_seconds: 1.0, forward_backward_seconds: 8.0, ..TimeSpent::default() };
        let change =
            Change { key: "data.num_workers".into(), from: "1".into(), to: "4".into(), expected: "about 1.50x".into() };
        let mut cpu_utilization_percent = MeanOverTime::default();
        cpu_utilization_percent.add(Some(91.0), 1.0);
        let summary = Summary {
            steps: 20,
            totals: Totals {
                skipped_steps: 1,
                last_loss: Some(1.25),
                peak_host_memory_bytes: Some(1 << 30),
                step_seconds: 20_000.0 / 1234.0,
                wall_seconds: 10.0,
                time: time.within(10.0),
                tokens: 20_000,
                cpu_utilization_percent,
                energy_joules: Some(1800.0),
                ..Totals::default()
            },
            evaluations: Evaluations {
                first: of_loss(4.0),
                last: of_loss(3.0),
                best: of_loss(2.9),
                best_step: Some(15),
                ..Evaluations::default()
            },
            diagnosis: vec![
                Finding {
                    verdict: "INPUT-BOUND: waited".into(),
                    evidence: vec!["CPU at 96%".into()],
                    changes: vec![change],
                    severity: Severity::Problem,
                    ..Finding::default()
                },
                Finding { verdict: "PADDING: some".into(), evidence: vec!["not shown".into()], ..Finding::default() },
            ],
            ..Summary::default()
        };
        let prices = CostConfig { price_per_hour: Some(3.6), ..CostConfig::default() };
        let summary = summary.with_cost(&prices);
        let text = summary_text(&summary);
        let expected = "finished after 20 steps in 10s, 1,234 tokens/s, 1 step skipped\n  \
                        loss 1.2500, eval loss 4.0000 -> 3.0000 (-25.0%), best 2.9000 at step 15\n  \
                        peak host memory 1.0 GiB, CPU 91%\n  \
                        20,000 tokens, 0.50 Wh, 1.00e-2 USD; 1M tokens: 8m20s, 25.00 Wh, 0.50 USD\n  \
                        time: startup 10%, forward+backward 80%, other 10%\n  \
                        INPUT-BOUND: waited\n    CPU at 96%\n    try `data.num_workers` 1 -> 4: about 1.50x\n  PADDING: some";
        assert_eq!(text, expected);

        let interrupted = Summary { outcome: Outcome::Interrupted, total_steps: Some(80), ..summary };
        let text = summary_text(&interrupted);
        assert!(text.starts_with("interrupted at step 20 of 80, after 10s, 1,234 tokens/s"), "{text}");
        let expected = "  INPUT-BOUND: waited\n    try `data.num_workers` 1 -> 4: about 1.50x\n  PADDING: some";
        assert!(text.ends_with(expected), "{text}");

        let resumed = Summary { totals: Totals { num_starts: 3, ..interrupted.totals }, ..interrupted };
        let text = summary_text(&resumed);
        assert!(text.starts_with("interrupted at step 20 of 80, after 10s (3 starts), 1,234 tokens/s"), "{text}");
        // The diagnosis covers the last start only.
        assert!(text.contains("\n  of the last start:\n  INPUT-BOUND: waited\n"), "{text}");
    }

    #[test]
    fn a_loss_that_falls_and_one_that_has_turned_are_said() {
        let of = |best, previous, last| {
            trend(&Evaluations {
                best: of_loss(best),
                previous: of_loss(previous),
                last: of_loss(last),
                ..Evaluations::default()
            })
        };
        let turned = "the evaluation loss has turned: it is 25.0% above its best";
        assert_eq!(of(2.0, 2.2, 2.5).as_deref(), Some(turned));
        let falls = "the evaluation loss still falls: by 10.0% since the evaluation before";
        assert_eq!(of(1.8, 2.0, 1.8).as_deref(), Some(falls));
        assert_eq!((of(2.0, 2.0, 2.001), of(2.0, 2.005, 2.0)), (None, None));
    }
}
