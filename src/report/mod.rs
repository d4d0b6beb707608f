//! What a run has written, to look at: one page for a run, and several runs side by side.
//!
//! - [`record`](Record): the files of a run's folder, read
//! - [`columns`](Columns): its figures by name
//! - [`page`](write()): report.html
//! - [`compare`]: runs side by side
//! - `chart`, `axis`, `downsample`: figures as SVG
//! - `memory`: the plan against what was measured
//! - `statistics`: medians
//!
//! Everything here is made from files, so that it can be made anew, also of a run that was interrupted.

mod axis;
mod chart;
mod columns;
pub mod compare;
mod downsample;
mod figures;
mod html;
mod memory;
mod page;
mod record;
mod split;
mod stack;
mod statistics;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

pub use columns::Columns;
pub use record::{PlannedComponent, PlannedMemory, Record};

use crate::panics::guarded;

/// The file's name in the run's folder.
pub const REPORT_FILE: &str = "report.html";

/// How often a page that is waited for is asked whether it still may be.
const PATIENCE: Duration = Duration::from_millis(100);

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Nothing is there.
    #[error("{path}: there is no such folder\n  hint: give the `output_dir` of a run", path = path.display())]
    NoFolder {
        /// The folder.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{path}: not a run, there is no metrics.jsonl in it\n  hint: give the `output_dir` of a run", path = path.display())]
    NotARun {
        /// The folder.
        path: PathBuf,
    },
    /// A run that has not come to its first step.
    #[error("{path}: metrics.jsonl holds no step{}", torn(*num_torn_lines), path = path.display())]
    NoFigures {
        /// The folder.
        path: PathBuf,
        /// Lines of it that cannot be read.
        num_torn_lines: usize,
    },
    /// The file system refused.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The template does not fit its figures: a mistake of this program.
    #[error("cannot lay out the page: {0}")]
    Layout(#[from] minijinja::Error),
    /// Another mistake of this program.
    #[error("cannot make the page: {0}")]
    Panic(String),
    /// There was no time left to wait for it.
    #[error("the page is not made within {} s\n  hint: `lora-train report {}` makes it", limit.as_secs(), path.display())]
    NotInTime {
        /// The folder.
        path: PathBuf,
        /// How long it was waited for.
        limit: Duration,
    },
}

impl ReportError {
    /// Whether what was asked for is wrong, rather than something on the way.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self, Self::NoFolder { .. } | Self::NotARun { .. } | Self::NoFigures { .. })
    }
}

fn torn(num_lines: usize) -> String {
    match num_lines {
        0 => String::new(),
        1 => ", and one line that cannot be read".to_owned(),
        n => format!(", and {n} lines that cannot be read"),
    }
}

/// Makes report.html of a run's files, in its folder or elsewhere; returns where it is.
///
/// # Errors
///
/// A folder that holds no run, or a file that cannot be read or written.
pub fn write(folder: &Path, out: Option<&Path>) -> Result<PathBuf, ReportError> {
    let page = page::render(&Record::read(folder)?)?;
    let path = out.map_or_else(|| folder.join(REPORT_FILE), Path::to_owned);
    put(&path, &page)?;
    Ok(path)
}

/// As [`write()`], into the run's folder, for the end of a run that must not take long and must not fail by this: what takes
/// longer than `limit` says is given up, and a panic is an error. `limit` is asked again and again, since somebody may become
/// impatient meanwhile.
///
/// # Errors
///
/// As [`write()`]; where the limit is exceeded.
pub fn write_within(folder: &Path, limit: impl Fn() -> Duration) -> Result<PathBuf, ReportError> {
    let (sender, receiver) = mpsc::channel();
    let run = folder.to_owned();
    let make = move || {
        let page = guarded(|| Record::read(&run).and_then(|record| page::render(&record)));
        // After the limit nobody listens.
        drop(sender.send(page));
    };
    let path = folder.join(REPORT_FILE);
    let thread = std::thread::Builder::new().name("report".into()).spawn(make);
    thread.map_err(|source| ReportError::Io { path: path.clone(), action: "begin", source })?;
    let started = Instant::now();
    let page = loop {
        match receiver.recv_timeout(PATIENCE.min(limit().saturating_sub(started.elapsed()))) {
            Ok(page) => break page,
            Err(RecvTimeoutError::Timeout) if started.elapsed() < limit() => {}
            Err(_) => return Err(ReportError::NotInTime { path: folder.to_owned(), limit: limit() }),
        }
    };
    put(&path, &page.map_err(ReportError::Panic)??)?;
    Ok(path)
}

/// Writes a file whole or not at all.
fn put(path: &Path, text: &str) -> Result<(), ReportError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.partial"));
    std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path)).map_err(|source| {
        // The first error is the one to report.
        drop(std::fs::remove_file(&partial));
        ReportError::Io { path: path.to_owned(), action: "write", source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn who_becomes_impatient_while_a_page_is_made_is_not_made_to_wait() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            std::process::Command::new("mkfifo").arg(folder.path().join("metrics.jsonl")).status().unwrap().success()
        );
        let started = Instant::now();
        let is_impatient = || started.elapsed() > Duration::from_millis(50);
        let limit = || if is_impatient() { Duration::from_millis(10) } else { Duration::from_mins(10) };
        let error = write_within(folder.path(), limit).unwrap_err();
        assert!(
            matches!(error, ReportError::NotInTime { .. }) && started.elapsed() < Duration::from_mins(1),
            "{error}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_page_that_takes_too_long_is_given_up_and_nothing_is_left_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = folder.path().join("metrics.jsonl");
        // Nobody writes into it, so whoever reads it waits.
        assert!(std::process::Command::new("mkfifo").arg(&metrics).status().unwrap().success());
        let error = write_within(folder.path(), || Duration::from_millis(20)).unwrap_err().to_string();
        assert!(error.contains("not made within 0 s") && error.contains("hint: `lora-train report /"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::remove_file(&metrics).unwrap();
        std::fs::write(metrics, "{\"step\":1,\"loss\":4.0,\"learning_rate\":1e-3}\n").unwrap();
        let path = write_within(folder.path(), || Duration::from_mins(3)).unwrap();
        assert!(std::fs::read_to_string(path).unwrap().contains("not finished"));
    }
}
