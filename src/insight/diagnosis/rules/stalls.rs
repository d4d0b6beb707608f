//! Time between steps, and uneven steps.

use super::input::longer_queue;
use crate::insight::diagnosis::text::{at_most, change, finding, percent, seconds};
use crate::insight::diagnosis::{Finding, Run, Severity};
use crate::util::stats::{Line, as_f64, as_u64};

/// Shares of all time from which evaluations, checkpoints and writing figures are reported.
const MIN_EVALUATION: f64 = 0.15;
const MIN_CHECKPOINT: f64 = 0.05;
const MIN_LOGGING: f64 = 0.03;
/// Share from which writing figures is a problem: a disk this slow costs more than most settings.
const GRAVE_LOGGING: f64 = 0.25;
/// Fewest evaluations of a run to propose: fewer are no curve, and leave the best adapter to chance.
const MIN_EVALUATIONS: u64 = 3;
/// Fewest micro-batches of an evaluation to propose: the loss of fewer says little.
const MIN_EVAL_BATCHES: u64 = 10;
/// Shares of the time to aim for.
const GOAL: f64 = 0.05;
const CHECKPOINT_GOAL: f64 = 0.02;
/// The slowest step in twenty takes this many times the median.
const UNEVEN: f64 = 1.5;

/// `about 1.25x (after start-up 100 s -> 80 s)`.
fn whole(before: f64, after: f64) -> String {
    format!("about {:.2}x (after start-up {} -> {})", before / after, seconds(before), seconds(after))
}

/// By which factor to make something rarer that takes `part` of `all`, so that it takes `goal` of the time left.
fn factor(part: f64, all: f64, goal: f64) -> u64 {
    let rest = (all - part).max(1e-9);
    as_u64((part * (1.0 - goal) / (goal * rest)).ceil().clamp(2.0, 1000.0))
}

/// Evaluations take a large part of the time.
pub(super) fn evaluation(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let (all, part) = (figures.wall_seconds, figures.evaluation_seconds);
    let share = figures.share_of_wall(part);
    if share < MIN_EVALUATION || figures.num_evaluations == 0 {
        return None;
    }
    let count = figures.num_evaluations;
    let each = part / as_f64(count);
    let times = factor(part, all, GOAL);
    let mut changes = Vec::new();
    let between = as_f64(count.saturating_sub(figures.num_edge_evaluations));
    if let Some(eval_steps) = facts.eval.eval_steps.filter(|_| between > 0.0) {
        let to = (eval_steps * times).min(facts.total_steps.map_or(u64::MAX, |steps| steps / MIN_EVALUATIONS));
        if to > eval_steps {
            let after = all - each * between * (1.0 - as_f64(eval_steps) / as_f64(to));
            changes.push(change("eval.eval_steps", eval_steps, to, whole(all, after)));
        }
    }
    if let Some(batches) = facts.eval_batches.filter(|batches| *batches > MIN_EVAL_BATCHES) {
        let to = (batches / times).max(MIN_EVAL_BATCHES);
        let after = all - part * (1.0 - as_f64(to) / as_f64(batches));
        // How much of an evaluation its samples and scores take is not known.
        let expected = if !facts.eval.generate.is_empty() || facts.eval.task.metric.is_some() {
            "shorter evaluations; samples and scores take as long as before".to_owned()
        } else {
            whole(all, after)
        };
        changes.push(change("eval.max_batches", batches, to, expected));
    }
    let verdict = format!("EVALUATION: {} of the time after start-up", percent(share));
    let evidence = vec![format!("{count} evaluations of {} each, in {}", seconds(each), seconds(all))];
    let severity = if share >= 0.3 { Severity::Problem } else { Severity::Advice };
    Some(Finding { evidence, changes, ..finding("evaluation", severity, Some(share), verdict) })
}

/// Checkpoints take a noticeable part of the time.
pub(super) fn checkpoint(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let (all, part) = (figures.wall_seconds, figures.checkpoint_seconds);
    let share = figures.share_of_wall(part);
    if share < MIN_CHECKPOINT || figures.num_checkpoints == 0 {
        return None;
    }
    let count = figures.num_checkpoints;
    let times = factor(part, all, CHECKPOINT_GOAL);
    let after = all - part * (1.0 - 1.0 / as_f64(times));
    let rarer = |save_steps| change("checkpoint.save_steps", save_steps, save_steps * times, whole(all, after));
    let changes = facts.checkpoint.save_steps.map(rarer).into_iter().collect();
    let verdict = format!("CHECKPOINTS: {} of the time after start-up", percent(share));
    let evidence = vec![format!("{count} checkpoints of {} each, in {}", seconds(part / as_f64(count)), seconds(all))];
    let severity = if share >= 0.2 { Severity::Problem } else { Severity::Advice };
    Some(Finding { evidence, changes, ..finding("checkpoint", severity, Some(share), verdict) })
}

/// Writing figures takes a noticeable part of the time.
pub(super) fn logging(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = figures.share_of_wall(figures.logging_seconds);
    if share < MIN_LOGGING || figures.steps.is_empty() {
        return None;
    }
    let verdict = format!("LOGGING: writing figures takes {} of the time after start-up", percent(share));
    let each = figures.logging_seconds / as_f64(figures.num_steps() + 1);
    let mut evidence = vec![format!("{} a step of {}", seconds(each), seconds(figures.mean_step_seconds()))];
    evidence.extend((share >= 0.1).then(|| {
        "each step's line is written before the next step begins: the disk of `output_dir` is slow, or others use it"
            .to_owned()
    }));
    let off = || change("logging.tensorboard", true, false, at_most(share));
    let changes = facts.logging.tensorboard.then(off).into_iter().collect();
    let severity = match share {
        GRAVE_LOGGING.. => Severity::Problem,
        0.1.. => Severity::Advice,
        _ => Severity::Note,
    };
    Some(Finding { evidence, changes, ..finding("logging", severity, Some(share), verdict) })
}

/// The first step compiles kernels, or reads weights for the first time.
pub(super) fn first_step(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let (first, middle) = (figures.first_step_seconds?, figures.step_quantile(0.5)?);
    let extra = first - middle;
    let share = figures.share_of_wall(extra);
    if first < 3.0 * middle || share < 0.1 {
        return None;
    }
    let what =
        if run.facts.is_gpu { "compiling and tuning kernels" } else { "reading weights and rows for the first time" };
    let verdict = format!("FIRST STEP: {} of the time after start-up, {what}", percent(share));
    let mut evidence = vec![format!("the first step took {}, the others {}", seconds(first), seconds(middle))];
    evidence.extend(run.facts.is_gpu.then(|| "later runs on this machine find the kernels in the cache".to_owned()));
    Some(Finding { evidence, ..finding("first_step", Severity::Note, Some(share), verdict) })
}

/// Some steps take much longer than others: they have more tokens, or something disturbs them.
pub(super) fn uneven_steps(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let (middle, slow) = (figures.step_quantile(0.5)?, figures.step_quantile(0.95)?);
    if figures.steps.len() < 20 || slow < UNEVEN * middle {
        return None;
    }
    let mean = figures.mean_step_seconds();
    let lost = ((mean - middle) / mean).max(0.0);
    let mut evidence =
        vec![format!("one step in twenty takes {} and more; the one in the middle {}", seconds(slow), seconds(middle))];
    let by_tokens = figures.compute_by_computed_tokens(facts).correlation().unwrap_or(0.0);
    let waits = Line::through(figures.steps.iter().map(|step| (step.data_wait_seconds, step.seconds)));
    let by_wait = waits.correlation().unwrap_or(0.0);
    let grave = if lost >= 0.25 { Severity::Advice } else { Severity::Note };
    let (why, severity, share, changes) = if by_tokens > 0.8 {
        evidence.push(format!("time goes with the number of tokens (correlation {by_tokens:.2})"));
        let even = || change("data.packing", false, true, "steps of about the same length".into());
        ("as rows differ in length", Severity::Note, None, (!facts.data.packing).then(even).into_iter().collect())
    } else if by_wait > 0.8 {
        evidence.push(format!("time goes with the wait for data (correlation {by_wait:.2})"));
        ("as some of them wait for data", grave, Some(lost), longer_queue(run, lost))
    } else {
        let (middle, mean) = (seconds(middle), seconds(mean));
        evidence.push(format!("without the slow ones a step would take {middle} instead of {mean}"));
        let cpu = figures.counted.cpu_utilization_percent.get();
        evidence
            .extend(cpu.map(|cpu| format!("this process used {cpu:.0}% of the processors; others may use the rest")));
        ("which their tokens do not explain", grave, Some(lost), Vec::new())
    };
    let verdict = format!("UNEVEN STEPS: {:.1}x the middle one, {why}", slow / middle);
    Some(Finding { evidence, changes, ..finding("uneven_steps", severity, share, verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::tests::{finds, gpu_run, run};
    use crate::measure::metrics::StepMetrics;

    #[test]
    fn evaluations_are_made_rarer_until_they_take_a_twentieth() {
        let mut busy = run(|line| {
            if line.step % 10 == 1 {
                (line.evaluation_seconds, line.wall_seconds) = (Some(10.0), Some(11.0));
            }
        });
        // 11 evaluations of 10 s in 211 s; the one before the first step is always made.
        let after = whole(211.0, 211.0 - 100.0 * (1.0 - 1.0 / 21.0));
        let rarer = format!("`eval.eval_steps` 50 -> 1050: {after}");
        finds(evaluation(&busy), &["evaluation problem", &rarer, "`eval.max_batches` 40 -> 10: about "]);
        // Three are left of any run.
        busy.facts.total_steps = Some(170);
        finds(evaluation(&busy), &["`eval.eval_steps` 50 -> 56: "]);
        busy.facts.total_steps = Some(101);
        assert_eq!(evaluation(&busy).unwrap().changes[0].key, "eval.max_batches");
        busy.facts.total_steps = None;
        busy.facts.eval.generate = vec!["Hi".into()];
        finds(evaluation(&busy), &["`eval.max_batches` 40 -> 10: shorter evaluations"]);
        // Making the two in the middle of a run rarer pays; the ones before and after it are always made.
        busy.figures.num_evaluations = 2;
        assert_eq!(evaluation(&busy).unwrap().changes[0].key, "eval.eval_steps");
        busy.figures.num_edge_evaluations = 2;
        assert_eq!(evaluation(&busy).unwrap().changes[0].key, "eval.max_batches");
        busy.facts.eval_batches = Some(10);
        assert!(evaluation(&busy).unwrap().changes.is_empty());
        finds(evaluation(&run(|_| {})), &[]);
    }

    #[test]
    fn checkpoints_figures_and_a_first_step_may_take_too_long() {
        let saving = run(|line| (line.checkpoint_seconds, line.wall_seconds) = (Some(0.3), Some(1.3)));
        let rarer = "`checkpoint.save_steps` 50 -> 750: ";
        finds(checkpoint(&saving), &["checkpoint problem", "101 checkpoints of 0.300 s each", rarer]);
        finds(checkpoint(&run(|_| {})), &[]);
        let writing = |seconds| run(move |line| line.logging_seconds = Some(seconds));
        finds(logging(&writing(0.12)), &["logging advice", "`logging.tensorboard` true -> false: at most 1.14x"]);
        finds(logging(&writing(0.3)), &["logging problem"]);
        finds(logging(&run(|_| {})), &[]);
        let compiling = gpu_run(|line| {
            if line.step == 1 {
                (line.step_seconds, line.wall_seconds) = (60.0, Some(60.0));
            }
        });
        finds(first_step(&compiling), &["first_step note", "FIRST STEP: 37% of the time", "compiling"]);
        finds(first_step(&run(|_| {})), &[]);
    }

    #[test]
    fn uneven_steps_are_explained_by_their_tokens_or_their_waits_or_not() {
        let every_tenth = |change: fn(&mut StepMetrics)| {
            run(move |line| {
                if line.step % 10 == 0 {
                    change(line);
                }
            })
        };
        let long =
            every_tenth(|line| (line.tokens, line.forward_backward_seconds, line.step_seconds) = (12_000, 2.9, 3.0));
        finds(uneven_steps(&long), &["uneven_steps note", "as rows differ in length", "`data.packing`"]);
        let disturbed = every_tenth(|line| (line.other_seconds, line.step_seconds) = (Some(7.0), 8.0));
        finds(uneven_steps(&disturbed), &["uneven_steps advice", "which their tokens do not explain"]);
        let starved = every_tenth(|line| (line.data_wait_seconds, line.step_seconds) = (7.0, 8.0));
        let waits = "8.0x the middle one, as some of them wait for data";
        finds(uneven_steps(&starved), &[waits, "`data.prefetch_batches` 4 -> 32"]);
        finds(uneven_steps(&run(|_| {})), &[]);
    }
}
