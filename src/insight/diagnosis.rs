//! What the figures of a run say about it: where its time went, and which recipe keys are worth changing.
//!
//! A [`Run`] holds the facts known beforehand and sums over the step lines. Each file of `rules` holds rules of one
//! kind. A rule is a pure function from a run to a [`Finding`] or nothing, and computes the gain that it promises from
//! the run's own figures. [`diagnose`] runs all rules at the end. During the run, [`Watch`] runs those that can hold
//! for a while.

mod facts;
mod figures;
mod rules;
mod text;
mod watch;

pub use crate::measure::metrics::{Change, Finding, Severity};
pub use facts::Facts;
pub use figures::{Figures, Run};
pub use rules::MARGIN as MEMORY_MARGIN;
pub use watch::Watch;

use rules::{RULES, When};
use text::percent;

/// All findings about a run, the worst first. Where none of them matters, the first says that the run is healthy. A run
/// of less than 50 steps and a minute is asked only about memory, clocks and rows that are cut.
#[must_use]
pub fn diagnose(run: &Run) -> Vec<Finding> {
    let is_asked = |when: When| when == When::AtOnce || run.figures.deserve_advice();
    let asked = RULES.iter().filter(|(_, when)| is_asked(*when));
    let mut findings: Vec<Finding> = asked.filter_map(|(rule, _)| rule(run)).collect();
    // What is neither wrong nor worth a change is a figure, which the report has among the others.
    findings.retain(|finding| finding.severity == Severity::Problem || !finding.changes.is_empty());
    // The sort is stable: findings of equal weight keep the order of the rules.
    findings.sort_by(|a, b| {
        let share = |finding: &Finding| finding.share_of_time.unwrap_or(0.0);
        a.severity.cmp(&b.severity).then(share(b).total_cmp(&share(a)))
    });
    if findings.first().is_none_or(|worst| worst.severity >= Severity::Note) {
        findings.insert(0, healthy(run));
    }
    findings
}

/// The finding that nothing is wrong.
fn healthy(run: &Run) -> Finding {
    let figures = &run.figures;
    let compute = figures.share_of_steps(figures.compute_seconds());
    let between = format!(
        "evaluations {} and checkpoints {} of all time",
        percent(figures.share_of_wall(figures.evaluation_seconds)),
        percent(figures.share_of_wall(figures.checkpoint_seconds)),
    );
    let step_time = format!(
        "step time: forward, backward and update {}, waiting for data {}; {between}",
        percent(compute),
        percent(figures.share_of_steps(figures.data_wait_seconds)),
    );
    let (verdict, time) = if figures.steps.is_empty() {
        ("HEALTHY: nothing stands out; there were too few steps to say more".into(), between)
    } else if !figures.deserve_advice() {
        ("HEALTHY: nothing stands out; advice needs a run of 50 steps or a minute".into(), step_time)
    } else {
        (format!("HEALTHY: {} of step time goes into forward, backward and update", percent(compute)), step_time)
    };
    let mut evidence = vec![time];
    evidence.extend(figures.counted.mfu.get().map(|mfu| format!("MFU {}", percent(mfu))));
    evidence.extend(figures.counted.gpu_utilization_percent.get().map(|gpu| format!("GPU utilization {gpu:.0}%")));
    Finding { rule: "healthy".into(), severity: Severity::Healthy, verdict, evidence, ..Finding::default() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::{CheckpointConfig, EvalConfig, GradientCheckpointing, Precision, TrainConfig};
    use crate::measure::metrics::StepMetrics;
    use crate::util::stats::as_f64;

    /// A step of a healthy run on the CPU.
    pub(crate) fn line(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            // 10 epochs in 100 steps.
            epoch: as_f64(step) / 10.0,
            tokens: 4000 + step % 3,
            target_tokens: 2000,
            padding_tokens: Some(100),
            rows: Some(8),
            step_seconds: 1.0,
            wall_seconds: Some(1.0),
            data_wait_seconds: 0.01,
            host_to_device_seconds: Some(0.005),
            forward_seconds: Some(0.3),
            backward_seconds: Some(0.6),
            forward_backward_seconds: 0.9,
            optimizer_seconds: 0.05,
            logging_seconds: Some(0.005),
            other_seconds: Some(0.03),
            worker_busy_seconds: Some(0.3),
            worker_cpu_seconds: Some(0.28),
            worker_queued_seconds: Some(0.01),
            mfu: Some(0.6),
            host_memory_bytes: Some(2 << 30),
            host_available_bytes: Some(8 << 30),
            host_swapped_bytes: Some(0),
            cpu_utilization_percent: Some(60.0),
            ..StepMetrics::default()
        }
    }

    /// A step of a healthy run on a GPU.
    pub(crate) fn gpu_line(step: u64) -> StepMetrics {
        StepMetrics {
            forward_seconds: None,
            backward_seconds: None,
            gpu_utilization_percent: Some(96.0),
            gpu_sm_activity_percent: Some(90.0),
            gpu_memory_activity_percent: Some(40.0),
            gpu_memory_used_bytes: Some(60 << 30),
            gpu_memory_allocated_bytes: Some(20 << 30),
            gpu_memory_reserved_bytes: Some(55 << 30),
            gpu_sm_clock_mhz: Some(1750.0),
            gpu_power_watts: Some(600.0),
            gpu_temperature_celsius: Some(60.0),
            ..line(step)
        }
    }

    pub(crate) fn facts() -> Facts {
        Facts {
            num_cpu_threads: 8,
            train: TrainConfig {
                gradient_accumulation_steps: 2,
                gradient_checkpointing: GradientCheckpointing::Off,
                ..TrainConfig::default()
            },
            eval: EvalConfig { eval_steps: Some(50), ..EvalConfig::default() },
            checkpoint: CheckpointConfig { save_steps: Some(50), ..CheckpointConfig::default() },
            data_bytes: Some(100 << 20),
            max_positions: 1 << 17,
            eval_batches: Some(40),
            device_memory_bytes: Some(16 << 30),
            host_memory_bytes: Some(16 << 30),
            activation_bytes: Some(1 << 30),
            doubling_bytes: Some(2 << 30),
            block_parameters: 1_000_000,
            head_parameters: 100_000,
            ..Facts::default()
        }
    }

    /// A hundred steps after the first, each changed by `change`.
    pub(crate) fn run(change: impl Fn(&mut StepMetrics)) -> Run {
        run_of(facts(), line, change)
    }

    /// A hundred steps on a GPU after the first, each changed by `change`.
    pub(crate) fn gpu_run(change: impl Fn(&mut StepMetrics)) -> Run {
        let mut facts = Facts { is_gpu: true, device_memory_bytes: Some(80 << 30), ..facts() };
        facts.train.precision = Precision::Bf16;
        run_of(facts, gpu_line, change)
    }

    fn run_of(facts: Facts, line: fn(u64) -> StepMetrics, change: impl Fn(&mut StepMetrics)) -> Run {
        let mut figures = Figures::default();
        for step in 1..=101 {
            let mut line = line(step);
            change(&mut line);
            if step == 1 { figures.add_first(&line) } else { figures.add(&line) }
        }
        Run { facts, figures }
    }

    /// Asserts that a finding has these parts, in its rule and severity or in the lines that a user sees; that there is
    /// no finding, if there are no parts.
    #[track_caller]
    pub(crate) fn finds(found: Option<Finding>, parts: &[&str]) {
        let text = found.map_or_else(String::new, |found| {
            format!("{} {}\n{}\n", found.rule, found.severity.name(), found.lines().join("\n"))
        });
        assert_eq!(text.is_empty(), parts.is_empty(), "{text}");
        parts.iter().for_each(|part| assert!(text.contains(part), "no `{part}` in\n{text}"));
    }

    #[test]
    fn a_healthy_run_is_called_so_and_nothing_else() {
        for run in [run(|_| {}), gpu_run(|_| {}), run(|line| line.mfu = None), Run::default()] {
            let findings = diagnose(&run);
            let rules: Vec<&str> = findings.iter().map(|finding| finding.rule.as_str()).collect();
            assert_eq!(rules, ["healthy"], "{findings:#?}");
        }
        assert!(diagnose(&run(|_| {}))[0].verdict.starts_with("HEALTHY: 95% of step time"));
    }

    #[test]
    fn a_run_of_one_step_has_no_figure_that_is_not_a_number() {
        let mut figures = Figures::default();
        // As long as a minute, so that all rules are asked.
        let slow = StepMetrics { wall_seconds: Some(60.0), ..gpu_line(1) };
        let first = StepMetrics { padding_tokens: Some(9000), data_wait_seconds: 0.9, mfu: Some(0.01), ..slow };
        figures.add_first(&first);
        let mut facts = Facts { is_gpu: true, ..facts() };
        facts.train.gradient_checkpointing = GradientCheckpointing::On;
        for num_more in 0..4 {
            let found = diagnose(&Run { facts: facts.clone(), figures: figures.clone() });
            let text = format!("{found:?}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{num_more} steps: {found:#?}");
            let padding = found.iter().find(|finding| finding.rule == "padding").unwrap();
            assert_eq!(
                (padding.share_of_time, padding.changes[0].expected.as_str()),
                (None, "the same without padding")
            );
            assert!(found.iter().all(|finding| finding.share_of_time.is_none()), "too few steps: {found:#?}");
            assert!(num_more > 0 || !text.contains("step time"), "{found:#?}");
            figures.add(&StepMetrics { step: num_more + 2, ..first.clone() });
        }
    }

    #[test]
    fn a_short_run_gets_no_advice_but_about_memory_and_rows_that_are_cut() {
        let rules = |num_steps: u64, wall_seconds: f64| {
            let mut figures = Figures::default();
            for step in 1..=num_steps + 1 {
                let line = StepMetrics {
                    data_wait_seconds: 0.4,
                    wall_seconds: Some(wall_seconds / as_f64(num_steps + 1)),
                    host_available_bytes: Some(1 << 20),
                    ..line(step)
                };
                if step == 1 { figures.add_first(&line) } else { figures.add(&line) }
            }
            let found = diagnose(&Run { facts: facts(), figures });
            found.into_iter().map(|finding| finding.rule).collect::<Vec<_>>()
        };
        assert_eq!(rules(49, 59.0), ["memory_pressure_host"]);
        for (num_steps, wall_seconds) in [(50, 5.0), (12, 60.5)] {
            let found = rules(num_steps, wall_seconds);
            assert!(found[0].starts_with("input_bound") && found[1] == "memory_pressure_host", "{found:?}");
        }
    }

    #[test]
    fn the_worst_comes_first_and_a_note_does_not_make_a_run_ill() {
        let ill = run(|line| {
            line.data_wait_seconds = 0.3;
            line.padding_tokens = Some(8000);
        });
        let findings = diagnose(&ill);
        assert!(
            findings[0].rule.starts_with("padding") && findings[1].rule.starts_with("input_bound"),
            "{findings:#?}"
        );
        let mut noted = run(|line| line.padding_tokens = Some(8000));
        noted.facts.leaves_padding_out = true;
        let rules: Vec<String> = diagnose(&noted).into_iter().map(|finding| finding.rule).collect();
        assert_eq!(rules, ["healthy"], "padding that costs nothing is no advice");
    }
}
