//! Files of one JSON object a line: metrics.jsonl and samples.jsonl.

use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::append::AppendLog;

/// A file of JSON lines. Every line is with the operating system when [`Jsonl::write`] returns, so a crash of the
/// process loses none.
#[derive(Debug)]
pub(super) struct Jsonl {
    log: AppendLog,
}

impl Jsonl {
    /// Starts a file anew, or where a run is resumed goes on after the lines up to `resume_step`.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read or written.
    pub(super) fn open(path: &Path, resume_step: Option<u64>) -> io::Result<Self> {
        match resume_step {
            // A pipe or a device has no lines to drop, and perhaps no end.
            Some(step) if path.is_file() => keep_up_to(path, step)?,
            Some(_) => {}
            None => match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            },
        }
        Ok(Self { log: AppendLog::open(path)? })
    }

    /// Appends one line.
    ///
    /// # Errors
    ///
    /// Where it cannot be written whole; the file then ends with the line before it.
    pub(super) fn write(&mut self, record: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.log.append(&line)
    }
}

/// Drops the lines after a step, which the resumed run writes again, and lines that a crash tore.
fn keep_up_to(path: &Path, step: u64) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }

    let text = std::fs::read(path)?;
    let is_kept = |line: &&[u8]| {
        line.ends_with(b"\n") && serde_json::from_slice::<Line>(line).is_ok_and(|line| line.step <= step)
    };
    let kept: Vec<&[u8]> = text.split_inclusive(|&byte| byte == b'\n').filter(is_kept).collect();
    if kept.iter().map(|line| line.len()).sum::<usize>() == text.len() {
        return Ok(());
    }
    // Whole or not at all: a crash meanwhile must not lose the figures of days.
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    for line in kept {
        file.write_all(line)?;
    }
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::full_step;
    use super::super::{EvalMetrics, StepMetrics};
    use super::*;

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn a_resumed_run_drops_later_lines_and_a_torn_one_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = Jsonl::open(&path, None).unwrap();
        file.write(&EvalMetrics::default()).unwrap();
        for step in 1..=7 {
            file.write(&full_step(step)).unwrap();
        }
        drop(file);
        // The process was killed in the middle of a line.
        let whole = std::fs::read(&path).unwrap();
        let mut torn = whole.clone();
        torn.extend_from_slice(br#"{"step":8,"epoch":0.2,"lo"#);
        std::fs::write(&path, torn).unwrap();

        let mut file = Jsonl::open(&path, Some(5)).unwrap();
        assert_eq!(steps(&path), [0, 1, 2, 3, 4, 5]);
        file.write(&full_step(6)).unwrap();
        assert_eq!(steps(&path), [0, 1, 2, 3, 4, 5, 6]);
        let last: StepMetrics =
            serde_json::from_str(std::fs::read_to_string(&path).unwrap().lines().last().unwrap()).unwrap();
        assert_eq!(last, full_step(6));
    }

    #[test]
    fn every_truncation_of_the_file_can_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = Jsonl::open(&path, None).unwrap();
        for step in 1..=3 {
            file.write(&StepMetrics { step, ..StepMetrics::default() }).unwrap();
        }
        let whole = std::fs::read(&path).unwrap();
        for length in 0..=whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            Jsonl::open(&path, Some(3)).unwrap().write(&StepMetrics { step: 4, ..StepMetrics::default() }).unwrap();
            let lines = whole[..length].iter().filter(|&&byte| byte == b'\n').count() as u64;
            assert_eq!(steps(&path), (1..=lines).chain([4]).collect::<Vec<_>>(), "cut at byte {length}");
        }
    }

    #[test]
    fn a_new_run_starts_a_new_file_and_a_resumed_one_may_find_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":9}\n").unwrap();
        Jsonl::open(&path, None).unwrap().write(&full_step(1)).unwrap();
        assert_eq!(steps(&path), [1]);
        std::fs::remove_file(&path).unwrap();
        Jsonl::open(&path, Some(4)).unwrap().write(&full_step(5)).unwrap();
        assert_eq!(steps(&path), [5]);
    }
}
