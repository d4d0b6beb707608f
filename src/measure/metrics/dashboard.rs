//! The live dashboard behind `--tui`. Its own thread draws it, so that the training loop only hands figures over.

mod screen;
mod state;
mod terminal;

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn_train::Interrupter;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind};

use state::{DashboardState, Question};
use terminal::Terminal;
#[cfg(unix)]
pub(super) use terminal::give_back_in_handler;

use super::pace::Pace;
use super::{EvalMetrics, Sample, StepMetrics};
use crate::util::terminal::is_notebook;

/// Time between two checks of the keyboard.
const POLL: Duration = Duration::from_millis(50);
/// Shortest time between two drawings: over ssh every one costs.
const MIN_REDRAW: Duration = Duration::from_millis(200);
/// Longest time between two drawings: the clock keeps running.
const MAX_REDRAW: Duration = Duration::from_secs(1);

/// The dashboard. Dropping it gives the terminal back.
pub(super) struct Dashboard {
    state: Arc<Mutex<DashboardState>>,
    drawing: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Takes the terminal over.
    pub(super) fn open(interrupter: Interrupter, steps: [u64; 2], pace: Pace, label: &str) -> Result<Self, String> {
        needs_terminal(std::io::stdin().is_terminal(), std::io::stdout().is_terminal())?;
        if is_notebook() {
            return Err("a cell of a notebook does not show it".into());
        }
        let terminal = Terminal::take().map_err(|error| error.to_string())?;
        let state = Arc::new(Mutex::new(DashboardState { pace, ..DashboardState::new(label, steps) }));
        let shared = Arc::clone(&state);
        let drawing = std::thread::Builder::new()
            .name("dashboard".into())
            .spawn(move || draw_until_closed(terminal, &shared, &interrupter))
            .map_err(|error| error.to_string())?;
        Ok(Self { state, drawing: Some(drawing) })
    }

    pub(super) fn start(&self) {
        self.change(|state| state.pace.start());
    }

    /// Shows the losses of a resumed run from its first step on.
    pub(super) fn earlier(&self, metrics: &str) {
        self.change(|state| state.earlier(metrics));
    }

    pub(super) fn step(&self, step: &StepMetrics) {
        self.change(|state| state.step(step));
    }

    pub(super) fn at_work(&self, what: String) {
        self.change(|state| state.work = Some(what));
    }

    pub(super) fn evaluated(&self, step: u64, seconds: f64) {
        self.change(|state| state.pace.evaluated(step, seconds));
    }

    pub(super) fn eval(&self, eval: &EvalMetrics) {
        self.change(|state| state.eval(eval));
    }

    pub(super) fn sample(&self, sample: &Sample) {
        self.change(|state| state.sample(sample));
    }

    /// Counts a warning and shows its first line; all of them are printed when the dashboard closes.
    pub(super) fn warning(&self, text: &str) {
        self.change(|state| state.warning(text));
    }

    pub(super) fn finding(&self, verdict: &str) {
        self.change(|state| state.finding = Some(verdict.to_owned()));
    }

    fn change(&self, change: impl FnOnce(&mut DashboardState)) {
        let mut state = lock(&self.state);
        change(&mut state);
        state.is_changed = true;
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        lock(&self.state).is_closed = true;
        if let Some(drawing) = self.drawing.take() {
            // If the thread panicked, the hook has given the terminal back.
            drop(drawing.join());
        }
    }
}

/// After a panic elsewhere the figures can still be shown.
fn lock(state: &Mutex<DashboardState>) -> MutexGuard<'_, DashboardState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn needs_terminal(stdin: bool, stdout: bool) -> Result<(), String> {
    match (stdin, stdout) {
        (true, true) => Ok(()),
        (false, _) => Err("stdin is not a terminal".into()),
        (true, false) => Err("stdout is not a terminal".into()),
    }
}

fn draw_until_closed(mut terminal: Terminal, shared: &Mutex<DashboardState>, interrupter: &Interrupter) {
    let mut drawn: Option<Instant> = None;
    loop {
        let is_pressed = answer_keys(shared, interrupter);
        let mut state = lock(shared);
        if state.is_closed || !terminal::is_open() {
            break;
        }
        let since = drawn.map_or(MAX_REDRAW, |drawn| drawn.elapsed());
        if is_pressed || since >= MAX_REDRAW || state.is_changed && since >= MIN_REDRAW {
            state.is_changed = false;
            let picture = state.clone();
            drop(state);
            // If the terminal is gone, drawing fails and training continues.
            drop(terminal.draw(|frame| screen::draw(frame, &picture)));
            drawn = Some(Instant::now());
        }
    }
}

/// Waits a moment for keys. Returns whether a key was pressed or the window changed.
fn answer_keys(shared: &Mutex<DashboardState>, interrupter: &Interrupter) -> bool {
    // If the keyboard is gone, only wait.
    let Ok(is_ready) = event::poll(POLL) else {
        std::thread::sleep(POLL);
        return false;
    };
    if !is_ready {
        return false;
    }
    let Ok(Event::Key(key)) = event::read() else { return true };
    if key.kind == KeyEventKind::Release {
        return false;
    }
    let mut state = lock(shared);
    match (state.question, key.code) {
        (Question::None, KeyCode::Char('q')) => state.question = Question::Stop,
        (Question::Stop, KeyCode::Char('s')) => {
            interrupter.stop(Some("stopped in the dashboard"));
            state.question = Question::Stopping;
        }
        (Question::Stop, KeyCode::Char('c') | KeyCode::Esc) => state.question = Question::None,
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_it_says_what_is_missing() {
        assert_eq!(needs_terminal(true, true), Ok(()));
        assert_eq!(needs_terminal(true, false).unwrap_err(), "stdout is not a terminal");
        assert_eq!(needs_terminal(false, false).unwrap_err(), "stdin is not a terminal");
    }
}
