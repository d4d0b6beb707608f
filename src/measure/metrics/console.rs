//! Progress for people: on stderr a bar on a terminal and plain lines elsewhere, or the dashboard.

mod averages;
mod ending;

use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use averages::Averages;
use ending::summary_text;

use super::dashboard::Dashboard;
use super::pace::Pace;
use super::{EvalMetrics, Finding, Sample, StepMetrics, Summary, on_a_line};
use crate::measure::figures::evaluation::Group;
use crate::util::stats::as_f64;
use crate::util::terminal::redraws;
use crate::util::text::{at_words, bytes, counted, duration, has_colors, shortened, thousands};

/// Where lines for people go.
pub(super) struct Console {
    view: View,
    quiet: bool,
    colors: bool,
    total_steps: u64,
    logging_steps: u64,
    pace: Pace,
    since_last_line: Averages,
}

enum View {
    /// A bar that is redrawn, with lines above it.
    Bar(ProgressBar),
    /// A line every `logging_steps`.
    Lines,
    Quiet,
    Nothing,
    /// The dashboard has the terminal; warnings wait for [`Console::release`].
    Dashboard(Dashboard, Vec<String>),
}

impl Console {
    /// A bar if stderr is a terminal, otherwise lines; neither with `quiet` or a dashboard.
    pub(super) fn new(
        quiet: bool,
        dashboard: Option<Dashboard>,
        logging_steps: u64,
        [first_step, total_steps]: [u64; 2],
        pace: Pace,
    ) -> Self {
        let terminal = redraws(&std::io::stderr());
        let colors = terminal && has_colors(&std::io::stderr());
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
            logging_steps: logging_steps.max(1),
            pace,
            since_last_line: Averages::default(),
        }
    }

    /// The same without any line.
    pub(super) fn silent(self) -> Self {
        Self { view: View::Nothing, ..self }
    }

    /// Closes the dashboard, and prints the warnings that waited: what else it showed is in the run's files.
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
        let line = format!("{label} {text}");
        if let View::Dashboard(dashboard, lines) = &mut self.view {
            dashboard.warning(text);
            lines.push(line);
        } else {
            self.print(&line);
        }
    }

    pub(super) fn step(&mut self, step: &StepMetrics) {
        self.since_last_line.add(step);
        let remaining = self.pace.remaining_seconds(step.step).map(duration);
        match &self.view {
            View::Bar(bar) => {
                bar.set_position(step.step);
                bar.set_message(bar_message(step, remaining.as_deref()));
            }
            View::Dashboard(dashboard, _) => dashboard.step(step),
            View::Lines | View::Quiet | View::Nothing => {}
        }
        if self.is_due(step.step) && matches!(self.view, View::Bar(_) | View::Lines) {
            let averages = std::mem::take(&mut self.since_last_line);
            let parts = averages.parts(step, self.total_steps, remaining.as_deref());
            let line = self.fit(&parts);
            self.print(&line);
        }
    }

    /// The parts of a line, with line breaks between them where the terminal is too narrow.
    fn fit(&self, parts: &[String]) -> String {
        let width = if matches!(self.view, View::Bar(_)) { terminal_width() } else { usize::MAX };
        let mut line = String::new();
        let mut column = 0;
        for part in parts {
            let columns = part.chars().count() + 2;
            if column > 0 && column + columns > width {
                line.push_str("\n    ");
                column = 4;
            } else if column > 0 {
                line.push_str("  ");
            }
            line.push_str(part);
            column += columns;
        }
        line
    }

    fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.logging_steps) || step >= self.total_steps
    }

    /// Shows what is done between steps, and how far it is, on a terminal only.
    pub(super) fn at_work(&mut self, what: String) {
        match &self.view {
            View::Bar(bar) => bar.set_message(what),
            View::Dashboard(dashboard, _) => dashboard.at_work(what),
            View::Lines | View::Quiet | View::Nothing => {}
        }
    }

    /// An evaluation after `step` has ended: it took so long, samples and score included.
    pub(super) fn evaluated(&mut self, step: u64, seconds: f64) {
        self.pace.evaluated(step, seconds);
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.evaluated(step, seconds);
        }
    }

    pub(super) fn finding(&mut self, step: u64, finding: &Finding) {
        self.note(&format!("step {step}: {}", finding.lines().join("\n")));
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.finding(&finding.verdict);
        }
    }

    pub(super) fn eval(&mut self, eval: &EvalMetrics) {
        let mut figures = eval.clone();
        figures.eval_perplexity = figures.eval_perplexity.filter(|perplexity| perplexity.is_finite());
        let mut score = figures.texts(&[Group::Score]);
        let rows = eval.eval_score_rows.unwrap_or_default();
        score.iter_mut().for_each(|score| *score += &format!(" of {}", counted(rows, "row")));
        let figures = [score, figures.texts(&[Group::Pairs, Group::Answers, Group::Loss])].concat();
        self.note(&format!(
            "eval at step {}: {}, {} target tokens in {}",
            eval.step,
            figures.join(", "),
            thousands(as_f64(eval.eval_target_tokens)),
            duration(eval.eval_seconds),
        ));
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.eval(eval);
        }
    }

    /// Text of a prompt; beside a bar, that of the first prompt only, on one line.
    pub(super) fn sample(&mut self, index: usize, sample: &Sample) {
        let [prompt, text] = [&sample.prompt, &sample.text].map(|text| text.trim_end());
        match &self.view {
            View::Bar(_) | View::Dashboard(..) if index > 0 => {}
            View::Dashboard(dashboard, _) => dashboard.sample(sample),
            View::Bar(_) => {
                let line = format!("sample at step {}: {}", sample.step, on_a_line(sample));
                self.note(&shortened(&line, terminal_width()));
            }
            _ => {
                let [prompt, text] = [prompt, text].map(|text| text.replace('\n', "\n    "));
                let reward = sample.reward.map(|reward| format!(", reward {reward:.3}")).unwrap_or_default();
                self.note(&format!("sample at step {}{reward}\n  > {prompt}\n    {text}", sample.step));
            }
        }
    }

    pub(super) fn finish(&mut self, summary: &Summary) {
        let mut text = summary_text(summary);
        if let View::Bar(bar) = &self.view {
            bar.finish_and_clear();
            self.view = View::Lines;
            // Commands, which are to be pasted, come later and keep their lines.
            text = at_words(&text, terminal_width());
        }
        self.note(&text);
    }

    /// Leaves the bar where it is.
    pub(super) fn close(&mut self) {
        if let View::Bar(bar) = &self.view {
            bar.abandon();
            self.view = View::Lines;
        }
    }

    /// The first step begins.
    pub(super) fn start(&mut self) {
        self.pace.start();
        if let View::Dashboard(dashboard, _) = &self.view {
            dashboard.start();
        }
    }

    fn print(&mut self, line: &str) {
        match &mut self.view {
            View::Bar(bar) => bar.println(at_words(line, terminal_width())),
            View::Dashboard(..) | View::Nothing => {}
            View::Lines | View::Quiet => {
                // A closed stderr must not end training.
                let _ = writeln!(std::io::stderr().lock(), "{line}");
            }
        }
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
    parts.extend(gpu_text(step.gpu_utilization_percent, step.gpu_memory_used_bytes));
    if step.gpu_memory_used_bytes.is_none() {
        parts.extend(step.host_memory_bytes.map(bytes));
    }
    parts.extend(remaining.map(|text| format!("eta {text}")));
    parts.join(" · ")
}

fn terminal_width() -> usize {
    terminal_size::terminal_size_of(std::io::stderr()).map_or(80, |(width, _)| usize::from(width.0))
}

fn gpu_text(utilization_percent: Option<f64>, memory_bytes: Option<u64>) -> Option<String> {
    let utilization = utilization_percent.map(|percent| format!("{percent:.0}%"));
    let text = [utilization, memory_bytes.map(bytes)].into_iter().flatten().collect::<Vec<_>>().join(" ");
    (!text.is_empty()).then(|| format!("gpu {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::figures::tests::full_step;

    #[test]
    fn the_bar_shows_the_last_step() {
        let bar = bar_message(&full_step(8), Some("3s"));
        assert_eq!(bar, "loss 2.5000 · 1,000 tok/s · gpu 97% 12.0 GiB · eta 3s");
    }

    #[test]
    fn lines_end_between_words_and_a_sample_is_one_line() {
        let text = "one two three\n  four five six";
        assert_eq!(at_words(text, 11), "one two\n    three\n  four five\n      six");
        assert_eq!(at_words(text, 80), text);
        assert_eq!(shortened("one two three", 8), "one two…");
        assert_eq!(shortened("one", 8), "one");
        let sample =
            |prompt: &str| on_a_line(&Sample { prompt: prompt.into(), text: " so\nbe it".into(), ..Sample::default() });
        assert_eq!(sample("Dear Sir,\n"), "Dear Sir, > so be it");
        assert_eq!(sample(&"letter ".repeat(50)), "…er letter letter letter letter > so be it");
    }

    #[test]
    fn lines_are_due_every_logging_steps_and_at_the_end() {
        let console = Console::new(true, None, 10, [0, 25], Pace::default());
        let due: Vec<_> = (1..=25).filter(|&step| console.is_due(step)).collect();
        assert_eq!(due, [10, 20, 25]);
    }
}
