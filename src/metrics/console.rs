//! Progress for people: on stderr a bar on a terminal and plain lines elsewhere, or the dashboard.

mod ending;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use ending::summary_text;

use super::dashboard::Dashboard;
use super::{EvalMetrics, Finding, Sample, StepMetrics, Summary, remaining_seconds};
use crate::stats::as_f64;
use crate::text::{bytes, duration, thousands};

/// Where lines for people go.
pub(super) struct Console {
    view: View,
    quiet: bool,
    colors: bool,
    total_steps: u64,
    first_step: u64,
    logging_steps: u64,
    started: Instant,
    since_last_line: Averages,
}

enum View {
    /// A bar that is redrawn, with lines above it.
    Bar(ProgressBar),
    /// A line every `logging_steps`.
    Lines,
    Quiet,
    /// The dashboard has the terminal; lines wait for [`Console::release`].
    Dashboard(Dashboard, Vec<String>),
}

#[derive(Debug, Default)]
struct Averages {
    loss_sum: f64,
    target_tokens: u64,
    tokens: u64,
    seconds: f64,
    steps: u64,
}

impl Console {
    /// A bar if stderr is a terminal, otherwise lines; neither with `quiet` or a dashboard.
    pub(super) fn new(
        quiet: bool,
        dashboard: Option<Dashboard>,
        logging_steps: u64,
        first_step: u64,
        total_steps: u64,
    ) -> Self {
        let terminal = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        // https://no-color.org: present and not empty.
        let colors = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let view = match dashboard {
            Some(dashboard) => View::Dashboard(dashboard, Vec::new()),
            None if quiet => View::Quiet,
            None if terminal => View::Bar(bar(first_step, total_steps, colors)),
            None => View::Lines,
        };
        Self {
            view,
            quiet,
            colors,
            total_steps,
            first_step,
            logging_steps: logging_steps.max(1),
            started: Instant::now(),
            since_last_line: Averages::default(),
        }
    }

    /// Closes the dashboard, and prints the lines that waited.
    pub(super) fn release(&mut self) {
        if let View::Dashboard(_, lines) = &mut self.view {
            let lines = std::mem::take(lines);
            // Dropping the dashboard gives the terminal back.
            self.view = if self.quiet { View::Quiet } else { View::Lines };
            lines.iter().for_each(|line| self.print(line));
        }
    }

    /// A line that is not progress, such as a finding or a choice.
    pub(super) fn note(&mut self, text: &str) {
        if !self.quiet {
            self.print(text);
        }
    }

    /// A line that is shown even with `--quiet`.
    pub(super) fn say(&mut self, text: &str) {
        self.print(text);
    }

    /// A warning; it is shown even with `--quiet`.
    pub(super) fn warn(&mut self, text: &str) {
        let label = if self.colors { "\x1b[33mwarning:\x1b[0m" } else { "warning:" };
        self.print(&format!("{label} {text}"));
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.warning(text);
        }
    }

    pub(super) fn step(&mut self, step: &StepMetrics) {
        self.since_last_line.add(step);
        let steps = [self.first_step, step.step, self.total_steps];
        let remaining = remaining_seconds(self.started, steps).map(duration);
        match &self.view {
            View::Bar(bar) => {
                bar.set_position(step.step);
                bar.set_message(bar_message(step, remaining.as_deref()));
            }
            View::Lines if self.is_due(step.step) => {
                let averages = std::mem::take(&mut self.since_last_line);
                let line = step_line(step, &averages, self.total_steps, remaining.as_deref());
                self.print(&line);
            }
            View::Dashboard(dashboard, _) => dashboard.step(step),
            View::Lines | View::Quiet => {}
        }
    }

    fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.logging_steps) || step >= self.total_steps
    }

    /// Shows how many micro-batches of the evaluation are done, on a terminal only.
    pub(super) fn evaluating(&mut self, done: usize, total: usize) {
        match &self.view {
            View::Bar(bar) => bar.set_message(format!("evaluating {done}/{total}")),
            View::Dashboard(dashboard, _) => dashboard.evaluating(done, total),
            View::Lines | View::Quiet => {}
        }
    }

    pub(super) fn finding(&mut self, step: u64, finding: &Finding) {
        self.note(&format!("step {step}: {}", finding.lines().join("\n")));
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.finding(&finding.verdict);
        }
    }

    pub(super) fn eval(&mut self, eval: &EvalMetrics) {
        self.note(&format!(
            "eval at step {}: loss {:.4}, perplexity {:.3}, {} target tokens in {}",
            eval.step,
            eval.eval_loss,
            eval.eval_perplexity,
            thousands(as_f64(eval.eval_target_tokens)),
            duration(eval.eval_seconds),
        ));
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.eval(eval);
        }
    }

    pub(super) fn sample(&mut self, sample: &Sample) {
        let indented = sample.text.trim_end().replace('\n', "\n    ");
        let prompt = sample.prompt.trim_end().replace('\n', "\n    ");
        self.note(&format!("sample at step {}\n  > {prompt}\n    {indented}", sample.step));
    }

    pub(super) fn finish(&mut self, summary: &Summary) {
        if let View::Bar(bar) = &self.view {
            bar.finish_and_clear();
            self.view = View::Lines;
        }
        self.note(&summary_text(summary));
    }

    /// Leaves the bar where it is.
    pub(super) fn close(&mut self) {
        if let View::Bar(bar) = &self.view {
            bar.abandon();
            self.view = View::Lines;
        }
    }

    /// The first step begins. The time before it is start-up and says nothing about the time left.
    pub(super) fn start(&mut self) {
        self.started = Instant::now();
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.start();
        }
    }

    fn print(&mut self, line: &str) {
        match &mut self.view {
            View::Bar(bar) => bar.println(line),
            View::Dashboard(_, lines) => lines.push(line.to_owned()),
            View::Lines | View::Quiet => {
                // A closed stderr must not end training.
                let _ = writeln!(std::io::stderr().lock(), "{line}");
            }
        }
    }
}

impl Averages {
    fn add(&mut self, step: &StepMetrics) {
        // A skipped step's loss is not finite and would hide those of the other steps.
        if step.loss.is_finite() {
            self.loss_sum += step.loss * as_f64(step.target_tokens);
            self.target_tokens += step.target_tokens;
        }
        self.tokens += step.tokens;
        self.seconds += step.step_seconds;
        self.steps += 1;
    }
}

fn bar(first_step: u64, total_steps: u64, colors: bool) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total_steps), ProgressDrawTarget::stderr()).with_position(first_step);
    let template = if colors { "{pos}/{len} {bar:24.cyan/blue} {wide_msg}" } else { "{pos}/{len} {bar:24} {wide_msg}" };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("━╸ "));
    }
    bar.set_message("starting");
    // Redraws during long steps too, so that people see that it is alive.
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}

fn bar_message(step: &StepMetrics, remaining: Option<&str>) -> String {
    let mut parts = vec![format!("loss {:.4}", step.loss), format!("{} tok/s", thousands(step.tokens_per_second))];
    parts.extend(gpu_text(step));
    if step.gpu_memory_used_bytes.is_none() {
        parts.extend(step.host_memory_bytes.map(bytes));
    }
    parts.extend(remaining.map(|text| format!("eta {text}")));
    parts.join(" · ")
}

fn step_line(step: &StepMetrics, averages: &Averages, total_steps: u64, remaining: Option<&str>) -> String {
    let loss = if averages.target_tokens > 0 { averages.loss_sum / as_f64(averages.target_tokens) } else { step.loss };
    let rate = as_f64(averages.tokens) / averages.seconds;
    let mut parts = vec![
        format!("step {}/{total_steps}", step.step),
        format!("loss {loss:.4}"),
        format!("lr {:.2e}", step.learning_rate),
        format!("grad {:.3}", step.grad_norm),
        format!("{} tok/s", thousands(if rate.is_finite() { rate } else { step.tokens_per_second })),
        format!("{:.3}s/step", averages.seconds / as_f64(averages.steps.max(1))),
    ];
    // Above a tenth of the time, `data.num_workers` is worth a look.
    if step.data_wait_seconds > 0.1 * step.step_seconds {
        parts.push(format!("data wait {:.3}s", step.data_wait_seconds));
    }
    parts.extend(step.mfu.map(|mfu| format!("mfu {:.1}%", 100.0 * mfu)));
    parts.extend(gpu_text(step));
    parts.extend(step.gpu_power_watts.map(|watts| format!("{watts:.0} W")));
    parts.extend(step.host_memory_bytes.map(|host| format!("host {}", bytes(host))));
    if step.skipped {
        parts.push("skipped".into());
    }
    parts.extend(remaining.map(|text| format!("eta {text}")));
    parts.join("  ")
}

fn gpu_text(step: &StepMetrics) -> Option<String> {
    let utilization = step.gpu_utilization_percent.map(|percent| format!("{percent:.0}%"));
    let memory = step.gpu_memory_used_bytes.map(bytes);
    let text = [utilization, memory].into_iter().flatten().collect::<Vec<_>>().join(" ");
    (!text.is_empty()).then(|| format!("gpu {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::tests::full_step;

    #[test]
    fn a_line_averages_the_steps_since_the_last_one_by_their_target_tokens() {
        let mut averages = Averages::default();
        let step = |loss, target_tokens, tokens, step_seconds| StepMetrics {
            step: 4,
            loss,
            target_tokens,
            tokens,
            step_seconds,
            ..StepMetrics::default()
        };
        averages.add(&step(1.0, 300, 600, 1.0));
        averages.add(&step(2.0, 100, 200, 3.0));
        averages.add(&step(f64::NAN, 100, 200, 1.0));
        // (300 * 1.0 + 100 * 2.0) / 400 and 1000 tokens / 5 s.
        let line = step_line(&step(2.0, 100, 200, 3.0), &averages, 10, Some("1m00s"));
        assert!(line.starts_with("step 4/10  loss 1.2500  lr 0.00e0  grad 0.000  200 tok/s  1.667s/step"), "{line}");
        assert!(line.ends_with("eta 1m00s") && !line.contains("gpu") && !line.contains("mfu"), "{line}");
    }

    #[test]
    fn a_gpu_run_shows_utilization_memory_and_power() {
        let step = full_step(8);
        let mut averages = Averages::default();
        averages.add(&step);
        let line = step_line(&step, &averages, 10, None);
        assert!(line.contains("mfu 50.0%  gpu 97% 12.0 GiB  510 W  host 3.0 GiB"), "{line}");
        assert_eq!(bar_message(&step, Some("3s")), "loss 2.5000 · 1,000 tok/s · gpu 97% 12.0 GiB · eta 3s");
    }

    #[test]
    fn lines_are_due_every_logging_steps_and_at_the_end() {
        let console = Console::new(true, None, 10, 0, 25);
        let due: Vec<_> = (1..=25).filter(|&step| console.is_due(step)).collect();
        assert_eq!(due, [10, 20, 25]);
    }

    #[test]
    fn the_time_left_comes_from_the_steps_of_this_start() {
        let started = Instant::now().checked_sub(Duration::from_secs(50)).unwrap();
        assert_eq!(remaining_seconds(started, [100, 100, 200]), None);
        let left = remaining_seconds(started, [100, 150, 200]).unwrap();
        assert!((left - 50.0).abs() < 1.0, "{left}");
    }
}
