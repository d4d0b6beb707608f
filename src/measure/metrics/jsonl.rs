//! Files of one JSON object a line: metrics.jsonl and samples.jsonl.

use std::io;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::append::AppendLog;
use crate::util::files;

/// Starts a new file or, in a resumed run, continues after the lines that are kept. When a line has been appended, the
/// operating system has it, so a crash of the process loses no line.
pub(super) fn open(name: &'static str, path: &Path, resume: Option<KeepUpTo>) -> io::Result<AppendLog> {
    match resume {
        // A pipe or a device has no lines to drop, and perhaps no end.
        Some(keep) if path.is_file() => keep.trim(path)?,
        Some(_) => {}
        None => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        },
    }
    AppendLog::open(name, path)
}

pub(super) fn line(record: &impl Serialize) -> Vec<u8> {
    // Records are plain structs, which always serialise.
    let mut line = serde_json::to_vec(record).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Which lines of an earlier start a resumed run keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeepUpTo {
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

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap()).collect()
    }

    fn step(step: u64) -> Vec<u8> {
        line(&StepMetrics { step, ..StepMetrics::default() })
    }

    fn open(path: &Path, resume: Option<u64>) -> AppendLog {
        super::open("metrics.jsonl", path, resume.map(|step| KeepUpTo { step, has_evaluated: true })).unwrap()
    }

    #[test]
    fn a_resumed_run_drops_later_lines_and_an_evaluation_that_the_checkpoint_does_not_know_with_its_samples() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":9}\n").unwrap();
        let mut file = open(&path, None);
        for number in 1..=3 {
            file.append(step(number));
            file.append(line(&EvalMetrics { step: number, ..EvalMetrics::default() }));
            file.append(line(&Sample { step: number, ..Sample::default() }));
        }
        assert_eq!(steps(&path), [1, 1, 1, 2, 2, 2, 3, 3, 3], "a new run starts a new file");
        open(&path, Some(2));
        assert_eq!(steps(&path), [1, 1, 1, 2, 2, 2]);
        super::open("metrics.jsonl", &path, Some(KeepUpTo { step: 2, has_evaluated: false })).unwrap();
        assert_eq!(steps(&path), [1, 1, 1, 2]);
        std::fs::remove_file(&path).unwrap();
        open(&path, Some(4)).append(step(5));
        assert_eq!(steps(&path), [5], "a resumed run may find none");
    }

    #[test]
    fn every_truncation_of_the_file_can_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let whole = (1..=3).flat_map(step).collect::<Vec<u8>>();
        for length in 0..=whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            open(&path, Some(3)).append(step(4));
            let lines = whole[..length].iter().filter(|&&byte| byte == b'\n').count() as u64;
            assert_eq!(steps(&path), (1..=lines).chain([4]).collect::<Vec<_>>(), "cut at byte {length}");
        }
    }

    /// A reader of the whole line would stop there.
    #[test]
    fn a_line_with_a_number_that_cannot_be_read_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let lines = "{\"step\":1}\n{\"step\":2,\"loss\":1e999}\n{\"step\":3,\"x\":\"\\ud800\"}\n{\"step\":4}\n";
        std::fs::write(&path, lines).unwrap();
        open(&path, Some(9));
        assert_eq!(steps(&path), [1, 4]);
    }
}
