//! How the progress of a download is shown on standard error.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler, UploadEvent};
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::util::terminal::redraws;

/// Time between two lines about the same file.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// How the progress of a download is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A bar that is redrawn.
    Bar,
    /// A line per file, and one more every ten seconds.
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
        } else if redraws(&std::io::stderr()) {
            Self::Bar
        } else {
            Self::Lines
        }
    }

    /// Shows a remark.
    pub(crate) fn note(self, text: &str) {
        if self != Self::Quiet {
            write_line(text);
        }
    }

    /// Announces a transfer, such as `downloading owner/name`; the bar is hidden where none is wanted.
    pub(super) fn start(self, what: &str, num_files: usize, total_bytes: u64) -> ProgressBar {
        let target = if self == Self::Bar { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total_bytes), target);
        if let Ok(style) = ProgressStyle::with_template(
            "{wide_msg} [{bar:24}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        if self == Self::Lines {
            let plural = if num_files == 1 { "" } else { "s" };
            write_line(&format!("{what}: {num_files} file{plural}, {}", HumanBytes(total_bytes)));
        }
        bar
    }
}

/// Reports the progress of an upload.
pub(super) struct UploadMeter(pub(super) ProgressBar);

impl ProgressHandler for UploadMeter {
    fn on_progress(&self, event: &ProgressEvent) {
        if let ProgressEvent::Upload(UploadEvent::Progress { bytes_completed, .. }) = event {
            self.0.set_position(*bytes_completed);
        }
    }
}

/// Reports the progress of one file of a download.
#[derive(Clone)]
pub(super) struct FileMeter {
    kind: Progress,
    bar: ProgressBar,
    name: String,
    num_bytes: u64,
    /// Bytes of the earlier files.
    before_bytes: u64,
    start: Instant,
    last_line: Arc<Mutex<Instant>>,
}

impl FileMeter {
    pub(super) fn start(kind: Progress, bar: &ProgressBar, name: &str, num_bytes: u64) -> Self {
        bar.set_message(name.to_owned());
        let (bar, before_bytes, start) = (bar.clone(), bar.position(), Instant::now());
        let last_line = Arc::new(Mutex::new(start));
        Self { kind, bar, name: name.to_owned(), num_bytes, before_bytes, start, last_line }
    }

    /// Shows a remark without disturbing the bar or the lines.
    pub(super) fn note(&self, text: &str) {
        self.bar.suspend(|| self.kind.note(text));
    }

    pub(super) fn finish(&self) {
        self.bar.set_position(self.before_bytes + self.num_bytes);
        if self.kind == Progress::Lines {
            let seconds = self.start.elapsed().as_secs_f64();
            write_line(&format!("  {} {} in {seconds:.1} s", self.name, HumanBytes(self.num_bytes)));
        }
    }

    fn advance(&self, file_bytes: u64) {
        let position = self.before_bytes + file_bytes.min(self.num_bytes);
        self.bar.set_position(position);
        let mut last_line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if self.kind == Progress::Lines && last_line.elapsed() >= LINE_INTERVAL {
            *last_line = Instant::now();
            let total_bytes = HumanBytes(self.bar.length().unwrap_or(position));
            write_line(&format!("  {} {} of {total_bytes}", self.name, HumanBytes(position)));
        }
    }
}

impl ProgressHandler for FileMeter {
    fn on_progress(&self, event: &ProgressEvent) {
        match event {
            ProgressEvent::Download(DownloadEvent::Progress { files }) => {
                if let Some(file) = files.iter().find(|file| file.status == FileStatus::InProgress) {
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
    // If standard error is closed, there is nowhere to report it.
    drop(writeln!(std::io::stderr(), "{text}"));
}
