//! How a download shows itself on standard error.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time between two lines about the same file.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// How a download shows itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A bar that is redrawn.
    Bar,
    /// A line per file, and one every ten seconds.
    Lines,
    /// Nothing.
    Quiet,
}

impl Progress {
    /// A bar on a terminal, lines elsewhere.
    #[must_use]
    pub fn detect(quiet: bool) -> Self {
        if quiet {
            Self::Quiet
        } else if std::io::stderr().is_terminal() {
            Self::Bar
        } else {
            Self::Lines
        }
    }

    /// A remark that belongs to the download.
    pub(super) fn note(self, text: &str) {
        if self != Self::Quiet {
            write_line(text);
        }
    }
}

/// Follows the files of one download, one after the other.
#[derive(Clone)]
pub(super) struct Meter {
    kind: Progress,
    bar: ProgressBar,
    state: Arc<Mutex<State>>,
}

struct State {
    file: String,
    file_bytes: u64,
    file_start: Instant,
    last_line: Instant,
    completed_bytes: u64,
    total_bytes: u64,
}

/// More of a file has come than it has: what a download is ended with, by a panic that carries it.
#[derive(Clone, Copy, Debug)]
pub(super) struct TooLong {
    /// Bytes that have come.
    pub(super) found: u64,
}

impl Meter {
    pub(super) fn start(kind: Progress, id: &str, num_files: usize, total_bytes: u64) -> Self {
        let target = match kind {
            Progress::Bar => ProgressDrawTarget::stderr(),
            Progress::Lines | Progress::Quiet => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total_bytes), target);
        if let Ok(style) = ProgressStyle::with_template(
            "{wide_msg} [{bar:24}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        if kind == Progress::Lines {
            let plural = if num_files == 1 { "" } else { "s" };
            write_line(&format!("downloading {id}: {num_files} file{plural}, {}", HumanBytes(total_bytes)));
        }
        let now = Instant::now();
        let state = State {
            file: String::new(),
            file_bytes: 0,
            file_start: now,
            last_line: now,
            completed_bytes: 0,
            total_bytes,
        };
        Self { kind, bar, state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn start_file(&self, name: &str, num_bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        (state.file, state.file_bytes) = (name.to_owned(), num_bytes);
        (state.file_start, state.last_line) = (now, now);
        self.bar.set_message(name.to_owned());
        self.bar.set_position(state.completed_bytes);
    }

    pub(super) fn finish_file(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.completed_bytes += state.file_bytes;
        self.bar.set_position(state.completed_bytes);
        if self.kind == Progress::Lines {
            let seconds = state.file_start.elapsed().as_secs_f64();
            write_line(&format!("  {} {} in {seconds:.1} s", state.file, HumanBytes(state.file_bytes)));
        }
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Bytes of the file that have come, where these are more than it has.
    fn excess(&self, file_position: u64) -> Option<TooLong> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (file_position > state.file_bytes).then_some(TooLong { found: file_position })
    }

    fn advance(&self, file_position: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let position = state.completed_bytes + file_position.min(state.file_bytes);
        self.bar.set_position(position);
        if self.kind == Progress::Lines && state.last_line.elapsed() >= LINE_INTERVAL {
            state.last_line = Instant::now();
            write_line(&format!("  {} {} of {}", state.file, HumanBytes(position), HumanBytes(state.total_bytes)));
        }
    }
}

impl ProgressHandler for Meter {
    fn on_progress(&self, event: &ProgressEvent) {
        match event {
            ProgressEvent::Download(DownloadEvent::Progress { files }) => {
                if let Some(file) = files.iter().find(|file| file.status == FileStatus::InProgress) {
                    if let Some(too_long) = self.excess(file.bytes_completed) {
                        // The client goes on for as long as the server does, and asks nobody: a panic, of which nothing
                        // is printed, is the only way out.
                        std::panic::resume_unwind(Box::new(too_long));
                    }
                    self.advance(file.bytes_completed);
                }
            }
            ProgressEvent::Download(DownloadEvent::AggregateProgress { bytes_completed, .. }) => {
                self.advance(*bytes_completed);
            }
            _ => {}
        }
    }
}

fn write_line(text: &str) {
    // Nowhere to report that standard error is closed.
    drop(writeln!(std::io::stderr(), "{text}"));
}
