//! burn-train's terminal dashboard, driven by our own step loop.
//!
//! burn-train thinks in epochs of items. A run is shown to it as one epoch whose items are the steps, and an
//! evaluation as a pass over the validation split.

use std::collections::HashSet;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn_train::Interrupter;
use burn_train::logger::TrainingProgressLogger;
use burn_train::metric::{
    MetricAttributes, MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry, SerializedEntry,
};
use burn_train::renderer::tui::TuiMetricsRendererWrapper;
use burn_train::renderer::{MetricState, MetricsRenderer, MetricsRendererTraining};

use super::format::{bytes, thousands};
use super::{EvalMetrics, StepMetrics};

/// The dashboard. Dropping it gives the terminal back.
pub(super) struct Dashboard {
    renderer: TuiMetricsRendererWrapper,
    total_steps: usize,
    registered: HashSet<&'static str>,
    is_evaluating: bool,
    was_killed: bool,
}

/// A figure as a tab of the dashboard.
struct Figure {
    name: &'static str,
    value: f64,
    text: String,
    higher_is_better: bool,
}

impl Dashboard {
    /// Takes the terminal over.
    ///
    /// # Errors
    ///
    /// Says why where stdout is no terminal.
    pub(super) fn open(interrupter: Interrupter, total_steps: u64, label: &str) -> Result<Self, String> {
        needs_terminal(std::io::stdin().is_terminal(), std::io::stdout().is_terminal())?;
        let total_steps = usize::try_from(total_steps).unwrap_or(usize::MAX).max(1);
        let mut renderer = TuiMetricsRendererWrapper::new(interrupter, None);
        signals::keep_ctrl_c();
        renderer.start(1, 1, Some(total_steps), Some(label));
        renderer.start_split("train", total_steps);
        Ok(Self { renderer, total_steps, registered: HashSet::new(), is_evaluating: false, was_killed: false })
    }

    pub(super) fn step(&mut self, step: &StepMetrics) {
        let done = usize::try_from(step.step).unwrap_or(usize::MAX);
        let figures = step_figures(step);
        self.guarded(|this| {
            if std::mem::take(&mut this.is_evaluating) {
                this.renderer.end_split();
                this.renderer.start_split("train", this.total_steps);
            }
            for figure in figures {
                this.register(&figure);
                this.renderer.update_train(figure.state());
            }
            this.renderer.update_split(done);
        });
    }

    pub(super) fn evaluating(&mut self, done: usize, total: usize) {
        self.guarded(|this| {
            if !std::mem::replace(&mut this.is_evaluating, true) {
                this.renderer.start_split("valid", total.max(1));
            }
            this.renderer.update_split(done);
        });
    }

    pub(super) fn eval(&mut self, eval: &EvalMetrics) {
        let loss = loss_figure(eval.eval_loss);
        self.guarded(|this| {
            this.register(&loss);
            this.renderer.update_valid(loss.state());
        });
    }

    /// Counts a warning; its text is printed when the dashboard closes.
    pub(super) fn warning(&mut self) {
        self.guarded(|this| this.renderer.log_event_training("Warnings".into()));
    }

    /// Whether the user chose to end the program at once. The dashboard panics for that, which is caught: the
    /// training loop still ends by itself, and saves.
    pub(super) fn was_killed(&self) -> bool {
        self.was_killed
    }

    fn register(&mut self, figure: &Figure) {
        if self.registered.insert(figure.name) {
            self.renderer.register_metric(figure.definition());
        }
    }

    /// Runs a call of the renderer, which panics once its user has chosen "kill".
    fn guarded(&mut self, call: impl FnOnce(&mut Self)) {
        if !self.was_killed && catch_unwind(AssertUnwindSafe(|| call(self))).is_err() {
            self.was_killed = true;
        }
    }
}

impl Figure {
    fn new(name: &'static str, value: f64, text: String, higher_is_better: bool) -> Self {
        Self { name, value, text, higher_is_better }
    }

    fn id(&self) -> MetricId {
        MetricId::new(Arc::new(self.name.to_owned()))
    }

    fn definition(&self) -> MetricDefinition {
        MetricDefinition {
            metric_id: self.id(),
            name: Arc::new(self.name.to_owned()),
            description: None,
            attributes: MetricAttributes::Numeric(NumericAttributes {
                unit: None,
                higher_is_better: self.higher_is_better,
            }),
        }
    }

    fn state(&self) -> MetricState {
        let entry = MetricEntry::new(self.id(), SerializedEntry::new(self.text.clone(), self.value.to_string()));
        // What is not finite has no place in a plot.
        MetricState::Numeric(entry, self.value.is_finite().then_some(NumericEntry::Value(self.value)))
    }
}

fn needs_terminal(stdin: bool, stdout: bool) -> Result<(), String> {
    match (stdin, stdout) {
        (true, true) => Ok(()),
        (false, _) => Err("stdin is not a terminal".into()),
        (true, false) => Err("stdout is not a terminal".into()),
    }
}

fn loss_figure(loss: f64) -> Figure {
    Figure::new("Loss", loss, format!("{loss:.4}"), false)
}

/// The figures that have a tab. Absent ones have none.
fn step_figures(step: &StepMetrics) -> Vec<Figure> {
    #[allow(clippy::cast_precision_loss, reason = "plotted")]
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let memory = |name, size: Option<u64>| size.map(|size| Figure::new(name, gib(size), bytes(size), false));
    let percent = |name, value: Option<f64>| value.map(|value| Figure::new(name, value, format!("{value:.1} %"), true));
    let rate = step.tokens_per_second;
    let mut figures = vec![
        loss_figure(step.loss),
        Figure::new("Tokens per second", rate, thousands(rate), true),
        Figure::new("Gradient norm", step.grad_norm, format!("{:.4}", step.grad_norm), false),
        Figure::new("Learning rate", step.learning_rate, format!("{:.3e}", step.learning_rate), true),
        Figure::new("Step seconds", step.step_seconds, format!("{:.3} s", step.step_seconds), false),
    ];
    figures.extend(percent("MFU", step.mfu.map(|mfu| 100.0 * mfu)));
    figures.extend(percent("GPU utilization", step.gpu_utilization_percent));
    figures.extend(memory("GPU memory", step.gpu_memory_used_bytes));
    figures.extend(step.gpu_power_watts.map(|watts| Figure::new("GPU power", watts, format!("{watts:.0} W"), true)));
    figures.extend(percent("CPU utilization", step.cpu_utilization_percent));
    figures.extend(memory("Host memory", step.host_memory_bytes));
    figures
}

#[cfg(unix)]
mod signals {
    use std::time::{Duration, Instant};

    /// Lets Ctrl-C send SIGINT again, which raw mode turns off and the dashboard does not answer. It waits until the
    /// dashboard's thread has set raw mode; leaving raw mode restores what was there before.
    pub(super) fn keep_ctrl_c() {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(1) {
            let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
            // SAFETY: `settings` outlives the call, which fills it where it returns 0.
            let mut settings = unsafe {
                if libc::tcgetattr(libc::STDIN_FILENO, settings.as_mut_ptr()) != 0 {
                    return;
                }
                settings.assume_init()
            };
            if settings.c_lflag & libc::ICANON == 0 {
                settings.c_lflag |= libc::ISIG;
                // SAFETY: `settings` is what the terminal gave, with one flag set.
                unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const settings) };
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(not(unix))]
mod signals {
    pub(super) fn keep_ctrl_c() {}
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::full_step;
    use super::*;

    #[test]
    fn without_a_terminal_it_says_what_is_missing() {
        assert_eq!(needs_terminal(true, true), Ok(()));
        assert_eq!(needs_terminal(true, false).unwrap_err(), "stdout is not a terminal");
        assert_eq!(needs_terminal(false, false).unwrap_err(), "stdin is not a terminal");
    }

    #[test]
    fn every_figure_that_is_there_has_a_tab_and_no_other() {
        let names = |step: &StepMetrics| step_figures(step).iter().map(|figure| figure.name).collect::<Vec<_>>();
        assert_eq!(names(&full_step(1)).len(), 11);
        let on_a_cpu = names(&StepMetrics { host_memory_bytes: Some(1), ..StepMetrics::default() });
        assert_eq!(on_a_cpu.len(), 6);
        assert!(!on_a_cpu.iter().any(|name| name.contains("GPU")));
    }

    #[test]
    fn a_loss_that_is_not_finite_is_shown_but_not_plotted() {
        let MetricState::Numeric(entry, None) = loss_figure(f64::NAN).state() else { panic!("no point") };
        assert_eq!(entry.serialized_entry.formatted, "NaN");
        let MetricState::Numeric(_, Some(NumericEntry::Value(value))) = loss_figure(1.5).state() else { panic!() };
        assert!((value - 1.5).abs() < 1e-12);
    }
}
