//! Files of one JSON object a line: metrics.jsonl and samples.jsonl.

use std::io;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::append::AppendLog;
use super::sinks::LogFile;
use crate::files;

/// A file of JSON lines. When [`Jsonl::write`] returns, the operating system has the line, so a crash of the process
/// loses no line.
#[derive(Debug)]
pub(super) struct Jsonl {
    log: AppendLog,
}

impl Jsonl {
    /// Starts a new file or, in a resumed run, continues after the lines that are kept.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or written.
    pub(super) fn open(path: &Path, resume: Option<KeepUpTo>) -> io::Result<Self> {
        match resume {
            // A pipe or a device has no lines to drop, and perhaps no end.
            Some(keep) if path.is_file() => keep.trim(path)?,
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
    /// If it cannot be written whole; the file then ends with a whole line, and this one waits.
    pub(super) fn write(&mut self, record: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.log.append(&line)
    }
}

impl LogFile for Jsonl {
    fn log(&mut self) -> &mut AppendLog {
        &mut self.log
    }
}

/// Which lines of an earlier start a resumed run keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeepUpTo {
    /// Lines up to this step are kept.
    pub(super) step: u64,
    /// Lines of the evaluation after this step are kept too.
    pub(super) has_evaluated: bool,
}

impl KeepUpTo {
    /// Drops the lines that the resumed run writes again, and lines that a crash cut off.
    fn trim(self, path: &Path) -> io::Result<()> {
        let text = std::fs::read(path)?;
        let is_due = |line: &Value| {
            // Only steps have a learning rate; evaluations and samples have none.
            let is_step = line["learning_rate"].is_number();
            let step = line["step"].as_u64();
            step.is_some_and(|step| step < self.step || step == self.step && (self.has_evaluated || is_step))
        };
        // Each line is parsed whole, because later readers do so too.
        let is_kept = |line: &&[u8]| {
            line.ends_with(b"\n") && serde_json::from_slice::<Value>(line).is_ok_and(|line| is_due(&line))
        };
        let kept: Vec<&[u8]> = text.split_inclusive(|&byte| byte == b'\n').filter(is_kept).collect();
        if kept.iter().map(|line| line.len()).sum::<usize>() == text.len() {
            return Ok(());
        }
        files::write(path, kept.concat())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EvalMetrics, Sample, StepMetrics};
    use super::*;
    use crate::figures::tests::full_step;

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect()
    }

    fn up_to(step: u64) -> KeepUpTo {
        KeepUpTo { step, has_evaluated: true }
    }

    #[test]
    fn an_evaluation_that_the_checkpoint_does_not_know_is_dropped_with_its_samples_and_its_step_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = Jsonl::open(&path, None).unwrap();
        for step in 1..=2 {
            file.write(&full_step(step)).unwrap();
            file.write(&EvalMetrics { step, ..EvalMetrics::default() }).unwrap();
            file.write(&Sample { step, ..Sample::default() }).unwrap();
        }
        Jsonl::open(&path, Some(KeepUpTo { step: 2, has_evaluated: false })).unwrap();
        assert_eq!(steps(&path), [1, 1, 1, 2]);
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

        let mut file = Jsonl::open(&path, Some(up_to(5))).unwrap();
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
            Jsonl::open(&path, Some(up_to(3)))
                .unwrap()
                .write(&StepMetrics { step: 4, ..StepMetrics::default() })
                .unwrap();
            let lines = whole[..length].iter().filter(|&&byte| byte == b'\n').count() as u64;
            assert_eq!(steps(&path), (1..=lines).chain([4]).collect::<Vec<_>>(), "cut at byte {length}");
        }
    }

    /// A reader of the whole line would stop there.
    #[test]
    fn a_line_with_a_number_that_cannot_be_read_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(
            &path,
            "{\"step\":1}\n{\"step\":2,\"loss\":1e999}\n{\"step\":3,\"x\":\"\\ud800\"}\n{\"step\":4}\n",
        )
        .unwrap();
        Jsonl::open(&path, Some(up_to(9))).unwrap();
        assert_eq!(steps(&path), [1, 4]);
    }

    #[test]
    fn a_new_run_starts_a_new_file_and_a_resumed_one_may_find_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":9}\n").unwrap();
        Jsonl::open(&path, None).unwrap().write(&full_step(1)).unwrap();
        assert_eq!(steps(&path), [1]);
        std::fs::remove_file(&path).unwrap();
        Jsonl::open(&path, Some(up_to(4))).unwrap().write(&full_step(5)).unwrap();
        assert_eq!(steps(&path), [5]);
    }
}
