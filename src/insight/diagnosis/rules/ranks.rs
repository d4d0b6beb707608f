//! Ranks that wait for one of them, or for the network.

use crate::insight::diagnosis::text::{change, finding, percent, seconds};
use crate::insight::diagnosis::{Finding, Run, Severity};
use crate::util::stats::as_f64;

/// Shares of the steps' time from which they are reported.
const MIN_WAIT: f64 = 0.05;
const MIN_EXCHANGE: f64 = 0.1;
/// Share of a step to aim for.
const GOAL: f64 = 0.05;
/// A rank is named where it is the slowest in most steps.
const MOSTLY: f64 = 0.7;

/// One rank is slower than the others, which wait for it in every step.
pub(super) fn straggler(run: &Run) -> Option<Finding> {
    let ranks = &run.figures.ranks;
    if !run.figures.are_enough() || ranks.seconds.len() < 2 {
        return None;
    }
    let (slowest, times) = ranks.times_slowest.iter().enumerate().max_by_key(|(_, times)| **times)?;
    let all = ranks.seconds.iter().sum::<f64>();
    let others = (all - ranks.seconds[slowest]) / as_f64(ranks.seconds.len() - 1);
    let lost = ranks.seconds[slowest] - others;
    let share = run.figures.share_of_steps(lost);
    if share < MIN_WAIT || as_f64(*times) < MOSTLY * as_f64(run.figures.num_steps()) {
        return None;
    }
    let each = |sum: f64| seconds(run.figures.per_step(sum));
    let verdict = format!("STRAGGLER: the other ranks wait {} of their time for rank {slowest}", percent(share));
    let mut evidence = vec![format!(
        "until its gradients are there, rank {slowest} takes {}, the others {}",
        each(ranks.seconds[slowest]),
        each(others)
    )];
    let wait_of = |rank: usize| ranks.data_wait_seconds[rank];
    let waits_of_others =
        (ranks.data_wait_seconds.iter().sum::<f64>() - wait_of(slowest)) / as_f64(ranks.seconds.len() - 1);
    let tokens_of_others = (ranks.tokens.iter().sum::<f64>() - ranks.tokens[slowest]) / as_f64(ranks.seconds.len() - 1);
    let more_tokens = ranks.tokens[slowest] / tokens_of_others.max(1.0) - 1.0;
    evidence.push(if wait_of(slowest) - waits_of_others > 0.5 * lost {
        format!("it waits {} for data, the others {}: its disk or its processors are slower", each(wait_of(slowest)), each(waits_of_others))
    } else if more_tokens > 0.5 * lost / others.max(1e-9) {
        format!("its share has {} more tokens: rows of very different lengths cannot be shared evenly", percent(more_tokens))
    } else {
        "its share is as large as theirs and it does not wait for data: it computes more slowly, for heat, a lower power limit or \
         other processes (`nvidia-smi -q -d PERFORMANCE`, `top` on its node)"
            .to_owned()
    });
    let severity = if share >= 0.15 { Severity::Problem } else { Severity::Advice };
    Some(Finding { evidence, ..finding("straggler", severity, Some(share), verdict) })
}

/// Summing the gradients takes a large part of the steps.
pub(super) fn exchange_bound(run: &Run) -> Option<Finding> {
    let (figures, ranks) = (&run.figures, &run.figures.ranks);
    let share = figures.share_of_steps(ranks.exchange_seconds);
    if !figures.are_enough() || share < MIN_EXCHANGE {
        return None;
    }
    let each = figures.per_step(ranks.exchange_seconds);
    let mut evidence = vec![format!("{} of a step of {}", seconds(each), seconds(figures.mean_step_seconds()))];
    if let Some(bytes) = run.facts.gradient_bytes {
        let megabytes = as_f64(bytes) / 1e6;
        evidence.push(format!("{megabytes:.1} MB of gradients; what passes beside the backward is not counted"));
    }
    let rest = figures.mean_step_seconds() - each;
    let times = (each * (1.0 - GOAL) / (GOAL * rest.max(1e-9))).ceil().clamp(2.0, 64.0);
    let steps = run.facts.train.gradient_accumulation_steps;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 64")]
    let more = steps * times as usize;
    let expected = format!("the exchange takes about {} of a step; the batch of a step grows as much", percent(GOAL));
    let changes = vec![change("train.gradient_accumulation_steps", steps, more, expected)];
    let verdict = format!("EXCHANGE-BOUND: summing the gradients over the ranks takes {} of the steps", percent(share));
    let severity = if share >= 0.25 { Severity::Problem } else { Severity::Advice };
    Some(Finding { evidence, changes, ..finding("exchange_bound", severity, Some(share), verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::tests::{finds, run};
    use crate::measure::metrics::StepMetrics;

    fn shared(change: impl Fn(&mut StepMetrics)) -> Run {
        run(move |line| {
            (line.ranks, line.exchange_seconds) = (Some(3), Some(0.01));
            line.rank_seconds = Some(vec![0.6, 0.6, 0.6]);
            line.rank_data_wait_seconds = Some(vec![0.0; 3]);
            line.rank_tokens = Some(vec![100.0; 3]);
            change(line);
        })
    }

    #[test]
    fn the_slowest_rank_is_named_with_what_it_is_busy_with() {
        finds(straggler(&run(|_| {})), &[]);
        finds(straggler(&shared(|_| {})), &[]);
        let slow = |line: &mut StepMetrics| line.rank_seconds = Some(vec![0.6, 0.9, 0.6]);
        let named = "STRAGGLER: the other ranks wait 30% of their time for rank 1";
        finds(
            straggler(&shared(slow)),
            &["straggler problem", named, "rank 1 takes 0.900 s, the others 0.600 s", "heat"],
        );
        let starved = |line: &mut StepMetrics| {
            slow(line);
            line.rank_data_wait_seconds = Some(vec![0.0, 0.3, 0.0]);
        };
        finds(straggler(&shared(starved)), &["it waits 0.300 s for data"]);
        let longer = |line: &mut StepMetrics| {
            slow(line);
            line.rank_tokens = Some(vec![100.0, 150.0, 100.0]);
        };
        finds(straggler(&shared(longer)), &["50% more tokens"]);
        // Each of them once is nobody in particular.
        let by_turns = |line: &mut StepMetrics| {
            let mut seconds = vec![0.6; 3];
            seconds[usize::try_from(line.step % 3).unwrap()] = 0.9;
            line.rank_seconds = Some(seconds);
        };
        finds(straggler(&shared(by_turns)), &[]);
    }

    #[test]
    fn a_slow_network_is_reported_with_what_it_carries_and_a_larger_batch() {
        finds(exchange_bound(&shared(|_| {})), &[]);
        let mut bound = shared(|line| line.exchange_seconds = Some(0.4));
        bound.facts.train.gradient_accumulation_steps = 1;
        bound.facts.gradient_bytes = Some(30_000_000);
        finds(
            exchange_bound(&bound),
            &[
                "exchange_bound problem",
                "takes 40% of the steps",
                "30.0 MB of gradients; what passes beside",
                "`train.gradient_accumulation_steps` 1 -> 13",
            ],
        );
    }
}
