//! Views of what a run has written: a page for a run, and a comparison of several runs.
//!
//! - `record`, `columns`: the files of a run's folder, read, and its figures by name
//! - `page`: report.html; `charts` its charts, `time` where the time went, `bars` totals; page.js its controls
//! - `chart`, `axis`: lines as SVG
//! - [`compare`]: runs side by side; [`model_card`]: the README of a published adapter
//!
//! Everything here is made from files, so it can be made again, even for an interrupted run.

mod axis;
mod bars;
mod card;
mod chart;
mod charts;
mod columns;
pub mod compare;
mod page;
mod record;
mod time;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::util::files;
use crate::util::panics::guarded;
pub use card::{Published, model_card};
use record::Record;

/// File name of the report in the run's folder.
pub const REPORT_FILE: &str = "report.html";

/// While waiting for a page, the time between two looks at the limit.
const PATIENCE: Duration = Duration::from_millis(100);

/// Why a report could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The path is not the folder of a run with figures.
    #[error("{path}: {why}", path = path.display())]
    NoRun {
        /// The path.
        path: PathBuf,
        /// What is missing.
        why: String,
    },
    /// A file operation failed.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// A bug in this program.
    #[error("cannot make the page: {0}")]
    Bug(String),
    /// The report took too long.
    #[error("the page is not made within {} s\n  hint: `lora-train report {}` makes it", limit.as_secs(), path.display())]
    NotInTime {
        /// The folder.
        path: PathBuf,
        /// The time limit.
        limit: Duration,
    },
}

impl ReportError {
    /// Whether the request was wrong, rather than something that failed on the way.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self, Self::NoRun { .. })
    }
}

/// Makes report.html from a run's files, in its folder or elsewhere, and returns its path.
///
/// # Errors
/// A folder that holds no run, or a file that cannot be read or written.
pub fn write(folder: &Path, out: Option<&Path>) -> Result<PathBuf, ReportError> {
    let page = page(folder)?;
    let path = out.map_or_else(|| folder.join(REPORT_FILE), Path::to_owned);
    files::write(&path, page).map_err(|source| ReportError::Io { path: path.clone(), action: "write", source })?;
    Ok(path)
}

fn page(folder: &Path) -> Result<String, ReportError> {
    rendered(&Record::read(folder)?, false)
}

fn rendered(record: &Record, is_watched: bool) -> Result<String, ReportError> {
    page::render(record, is_watched).map_err(|error| ReportError::Bug(error.to_string()))
}

/// The report as a page that asks its server for a newer one again and again. A folder without figures, or none, makes a
/// page that waits for them.
///
/// # Errors
/// A file that cannot be read.
pub fn watched_page(folder: &Path) -> Result<String, ReportError> {
    match Record::read(folder) {
        Err(ReportError::NoRun { .. }) => rendered(&Record { folder: folder.to_owned(), ..Record::default() }, true),
        record => rendered(&record?, true),
    }
}

/// Whether a folder holds figures of a run.
#[must_use]
pub fn has_begun(folder: &Path) -> bool {
    Record::read(folder).is_ok()
}

/// Like [`write()`] into the run's folder, but for the end of a run, which must neither take long nor fail because of
/// it. It gives up after `limit`, and turns a panic into an error. It asks for `limit` repeatedly, because a user may
/// become impatient meanwhile.
///
/// # Errors
/// Those of [`write()`], and an exceeded limit.
pub fn write_within(folder: &Path, limit: impl Fn() -> Duration) -> Result<PathBuf, ReportError> {
    let (sender, receiver) = mpsc::channel();
    let run = folder.to_owned();
    // After the limit, the receiver is gone.
    let make = move || drop(sender.send(guarded(|| page(&run))));
    let path = folder.join(REPORT_FILE);
    let failed = |action, source| ReportError::Io { path: path.clone(), action, source };
    std::thread::Builder::new().name("report".into()).spawn(make).map_err(|source| failed("begin", source))?;
    let started = Instant::now();
    let page = loop {
        match receiver.recv_timeout(PATIENCE.min(limit().saturating_sub(started.elapsed()))) {
            Ok(page) => break page.map_err(ReportError::Bug)??,
            Err(RecvTimeoutError::Timeout) if started.elapsed() < limit() => {}
            Err(_) => return Err(ReportError::NotInTime { path: folder.to_owned(), limit: limit() }),
        }
    };
    files::write(&path, page).map_err(|source| failed("write", source))?;
    Ok(path)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_takes_too_long_is_given_up_and_nothing_is_left_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = folder.path().join("metrics.jsonl");
        // Nothing writes into the pipe, so reading it blocks.
        assert!(std::process::Command::new("mkfifo").arg(&metrics).status().unwrap().success());
        let started = Instant::now();
        // A user who becomes impatient while the page is made.
        let is_impatient = || started.elapsed() > Duration::from_millis(50);
        let limit = || if is_impatient() { Duration::from_millis(10) } else { Duration::from_mins(10) };
        let error = write_within(folder.path(), limit).unwrap_err();
        assert!(matches!(error, ReportError::NotInTime { .. }) && started.elapsed() < Duration::from_mins(1));
        let error = error.to_string();
        assert!(error.contains("not made within 0 s") && error.contains("hint: `lora-train report /"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::remove_file(&metrics).unwrap();
        std::fs::write(metrics, "{\"step\":1,\"loss\":4.0,\"learning_rate\":1e-3}\n").unwrap();
        let path = write_within(folder.path(), || Duration::from_mins(3)).unwrap();
        let page = std::fs::read_to_string(path).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.contains("not finished"), "{page}");
        assert!(page.contains("<script>\"use strict\";") && page.contains("@media print"), "{page}");
        assert!(page.contains("<h3>Loss ") && page.contains("<path class=\"line c1 solid\" d=\"M"), "{page}");
    }

    #[test]
    fn a_watched_page_waits_for_the_first_figures_and_asks_for_newer_ones() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let waiting = watched_page(&run).unwrap();
        assert!(waiting.contains("waiting for the first step") && waiting.contains("fetch(\"/\")"), "{waiting}");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("metrics.jsonl"), "{\"step\":1,\"loss\":4.0,\"learning_rate\":1e-3}\n{\"st").unwrap();
        let watched = watched_page(&run).unwrap();
        assert!(
            watched.contains("<h3>Loss ") && watched.contains("connect-src 'self'") && has_begun(&run),
            "{watched}"
        );
        assert!(!page(&run).unwrap().contains("connect-src"), "a page that was written down asks nobody");
    }
}
