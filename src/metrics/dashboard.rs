//! burn-train's terminal dashboard, driven by our own step loop.
//!
//! burn-train thinks in epochs of items. A run is shown to it as one epoch whose items are the steps, and an
//! evaluation as a pass over the validation split.

mod terminal;

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

use terminal::Terminal;

use super::format::{bytes, thousands};
use super::{EvalMetrics, StepMetrics};

/// The dashboard. Dropping it gives the terminal back.
pub(super) struct Dashboard {
    /// `None` only while it is dropped.
    renderer: Option<TuiMetricsRendererWrapper>,
    #[allow(dead_code, reason = "ends with the dashboard, after the renderer")]
    terminal: Terminal,
    label: String,
    total_steps: usize,
    num_warnings: usize,
    registered: HashSet<&'static str>,
    split: Option<Split>,
    was_killed: bool,
}

/// What the renderer's progress counts at the moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Split {
    Train,
    Valid,
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
        let terminal = Terminal::prepare();
        let mut renderer = TuiMetricsRendererWrapper::new(interrupter, None);
        terminal::keep_ctrl_c();
        renderer.start(1, 1, Some(total_steps), Some(label));
        renderer.start_split("train", total_steps);
        Ok(Self {
            renderer: Some(renderer),
            terminal,
            label: label.into(),
            total_steps,
            num_warnings: 0,
            registered: HashSet::new(),
            split: Some(Split::Train),
            was_killed: false,
        })
    }

    pub(super) fn step(&mut self, step: &StepMetrics) {
        let done = usize::try_from(step.step).unwrap_or(usize::MAX);
        let figures = step_figures(step);
        let total_steps = self.total_steps;
        let is_train = self.split.replace(Split::Train) == Some(Split::Train);
        self.register(&figures);
        self.guarded(|renderer| {
            if !is_train {
                renderer.end_split();
                renderer.start_split("train", total_steps);
            }
            for figure in figures {
                renderer.update_train(figure.state());
            }
            renderer.update_split(done);
        });
    }

    pub(super) fn evaluating(&mut self, done: usize, total: usize) {
        let is_valid = self.split.replace(Split::Valid) == Some(Split::Valid);
        self.guarded(|renderer| {
            if !is_valid {
                renderer.start_split("valid", total.max(1));
            }
            renderer.update_split(done);
        });
    }

    pub(super) fn eval(&mut self, eval: &EvalMetrics) {
        let loss = loss_figure(eval.eval_loss);
        self.register(std::slice::from_ref(&loss));
        self.guarded(|renderer| renderer.update_valid(loss.state()));
    }

    /// Counts a warning in the title; its text is printed when the dashboard closes.
    pub(super) fn warning(&mut self) {
        self.num_warnings += 1;
        let label = match self.num_warnings {
            1 => format!("{} (1 warning, shown at the end)", self.label),
            n => format!("{} ({n} warnings, shown at the end)", self.label),
        };
        // The only call that sets the title. It forgets the split, which the next step or evaluation sets again.
        let total_steps = self.total_steps;
        self.split = None;
        self.guarded(|renderer| renderer.start(1, 1, Some(total_steps), Some(&label)));
    }

    /// Whether the user chose to end the program at once. The dashboard panics for that, which is caught: the
    /// training loop still ends by itself, and saves.
    pub(super) fn was_killed(&self) -> bool {
        self.was_killed
    }

    fn register(&mut self, figures: &[Figure]) {
        let new: Vec<_> = figures.iter().filter(|figure| self.registered.insert(figure.name)).collect();
        self.guarded(|renderer| new.iter().for_each(|figure| renderer.register_metric(figure.definition())));
    }

    /// Runs calls of the renderer, which panics once its user has chosen "kill".
    fn guarded(&mut self, calls: impl FnOnce(&mut TuiMetricsRendererWrapper)) {
        let Some(renderer) = self.renderer.as_mut().filter(|_| !self.was_killed) else { return };
        self.was_killed = catch_unwind(AssertUnwindSafe(|| calls(renderer))).is_err();
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        let renderer = self.renderer.take();
        // After "kill" even the renderer's own drop panics; its terminal has been given back by then.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(renderer)));
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
