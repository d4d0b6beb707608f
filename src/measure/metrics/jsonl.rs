//! Files of one JSON object a line: metrics.jsonl, samples.jsonl and rollouts.jsonl.

use std::io;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::append::AppendLog;
use crate::util::files;

/// Starts a new file or, in a resumed run, continues after the lines that are kept. When a line has been appended, the
/// operating system has it, so a crash of the process loses no line. Returns also a warning about what could not be read.
pub(super) fn open(
    name: &'static str,
    path: &Path,
    resume: Option<KeepUpTo>,
) -> io::Result<(AppendLog, Option<String>)> {
    let mut num_lost = 0;
    match resume {
        // A pipe or a device has no lines to drop, and perhaps no end.
        Some(keep) if path.is_file() => num_lost = keep.trim(path)?,
        Some(_) => {}
        None => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        },
    }
    let lost = || {
        format!("{name}: {num_lost} bytes of earlier steps could not be read, as after a power cut, and are left out")
    };
    Ok((AppendLog::open(name, path)?, (num_lost > 0).then(lost)))
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
    /// Drops the lines that the resumed run writes again, and lines that a crash cut off. Returns the length of what no
    /// process has written so.
    fn trim(self, path: &Path) -> io::Result<usize> {
        let text = std::fs::read(path)?;
        let is_due = |line: &Value| {
            // Steps have a learning rate, and answers that were trained on a reward or an advantage; evaluations and their samples have neither.
            let is_of_step = ["learning_rate", "reward", "advantage"].iter().any(|name| line[name].is_number());
            let step = line["step"].as_u64();
            step.is_some_and(|step| step < self.step || step == self.step && (self.has_evaluated || is_of_step))
        };
        let (mut kept, mut num_lost) = (Vec::new(), 0);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let is_whole = line.ends_with(b"\n");
            // Each line is parsed whole, because later readers do so too.
            match serde_json::from_slice::<Value>(line) {
                Ok(value) if is_whole && is_due(&value) => kept.push(line),
                Err(_) if is_whole || line.contains(&0) => num_lost += line.len(),
                _ => {}
            }
        }
        if kept.iter().map(|line| line.len()).sum::<usize>() < text.len() {
            files::write(path, kept.concat())?;
        }
        Ok(num_lost)
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
        super::open("metrics.jsonl", path, resume.map(|step| KeepUpTo { step, has_evaluated: true })).unwrap().0
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
        // The answer that step 2 was trained on is not written again.
        let answers = [1, 2, 3].map(|step| line(&Sample { step, reward: Some(0.5), ..Sample::default() }));
        std::fs::write(&path, answers.concat()).unwrap();
        super::open("samples.jsonl", &path, Some(KeepUpTo { step: 2, has_evaluated: false })).unwrap();
        assert_eq!(steps(&path), [1, 2]);
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
    fn a_line_that_cannot_be_read_is_dropped_with_a_warning_unless_a_crash_has_cut_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let numbers = "{\"step\":1}\n{\"step\":2,\"loss\":1e999}\n{\"step\":3,\"x\":\"\\ud800\"}\n{\"step\":4}\n";
        for (lines, kept, lost) in [
            (numbers, &[1, 4][..], Some("48 bytes")),
            ("{\"step\":1}\n{\"st", &[1], None),
            // What a power cut may leave of a file.
            ("{\"step\":1}\n\0\0\0\0", &[1], Some("4 bytes")),
            ("\0\0\0\0", &[], Some("4 bytes")),
        ] {
            std::fs::write(&path, lines).unwrap();
            let keep = KeepUpTo { step: 9, has_evaluated: true };
            let (_, warning) = super::open("metrics.jsonl", &path, Some(keep)).unwrap();
            assert_eq!(steps(&path), kept);
            assert!(
                warning.as_deref().map_or(lost.is_none(), |warning| warning.contains(lost.unwrap_or("?"))),
                "{lines:?}: {warning:?}"
            );
        }
    }
}
