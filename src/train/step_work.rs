//! The rows, tokens and FLOPs of a step.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};

use super::budget::flops::StepFlops;
use super::rollouts::Round;
use crate::data::batch::{Batch, RowSource};
use crate::data::dataset::{Cursor, RowCounts};
use crate::data::files::FileInfo;
use crate::data::files::FileKind;
use crate::data::loader::LoadedBatch;
use crate::data::unpack::Compression;
use crate::measure::figures::Spread;

/// Number of rows that a warning names before it only counts the others.
const MAX_ROWS_NAMED: usize = 8;

/// Files up to this size are searched for the line of a row that a warning names.
const MAX_SEARCHED_BYTES: u64 = 64 << 20;

/// The micro-batches of one step, and their rows, tokens and FLOPs.
#[derive(Debug)]
pub(super) struct StepWork {
    /// Position after the step.
    pub(super) cursor: Cursor,
    pub(super) rows: RowCounts,
    /// Where the rows were read.
    pub(super) sources: Vec<RowSource>,
    /// Number of tokens, without padding.
    pub(super) tokens: u64,
    pub(super) padding_tokens: u64,
    pub(super) flops: f64,
    /// The answers that it trains on, where the model writes them.
    pub(super) round: Option<Round>,
    /// What they got of each rule or function that judges.
    pub(super) rewards: BTreeMap<String, Spread>,
    /// What functions that judge have logged, where answers were written for this step.
    pub(super) reward_metrics: BTreeMap<String, f64>,
    /// Seconds in which they were judged.
    pub(super) reward_seconds: Option<f64>,
    /// Seconds in which nothing was written, as all waited for the environment.
    pub(super) environment_seconds: Option<f64>,
}

impl StepWork {
    /// An empty step at `cursor`.
    pub(super) fn new(cursor: Cursor) -> Self {
        Self {
            cursor,
            rows: RowCounts::default(),
            sources: Vec::new(),
            tokens: 0,
            padding_tokens: 0,
            flops: 0.0,
            round: None,
            rewards: BTreeMap::new(),
            reward_metrics: BTreeMap::new(),
            reward_seconds: None,
            environment_seconds: None,
        }
    }

    /// Adds a finished micro-batch, of which the reference was known before or not.
    pub(super) fn add(&mut self, loaded: &LoadedBatch, flops: &StepFlops, knew_reference: bool) {
        self.read(loaded);
        self.compute(&loaded.batch, flops);
        self.flops -= if knew_reference { flops.of_reference(&loaded.batch) } else { 0.0 };
    }

    /// Adds the rows of a micro-batch.
    pub(super) fn read(&mut self, loaded: &LoadedBatch) {
        self.cursor = loaded.cursor_after;
        self.rows += loaded.report;
    }

    /// Adds what is computed of one.
    pub(super) fn compute(&mut self, batch: &Batch, flops: &StepFlops) {
        if !batch.targets.is_empty() {
            self.flops += flops.of(batch);
        }
        self.tokens += batch.num_tokens() as u64;
        self.padding_tokens += batch.num_padding_tokens() as u64;
        self.sources.extend(&batch.sources);
    }

    /// A warning about the step, with the rows that it had.
    pub(super) fn warning(&self, step: u64, what: &str, files: &[FileInfo]) -> String {
        let named = self.sources.iter().take(MAX_ROWS_NAMED).filter_map(|source| {
            let file = files.get(source.file)?;
            let path = file.path.display();
            Some(match line_of(file, source.row) {
                Some(line) => format!("{path}:{line}"),
                None => format!("{path} row {}", source.row + 1),
            })
        });
        let mut rows = named.collect::<Vec<_>>().join(", ");
        match self.sources.len().checked_sub(MAX_ROWS_NAMED) {
            Some(more) if more > 0 => rows.push_str(&format!(" and {more} more")),
            _ if rows.is_empty() => return format!("step {step}: {what}"),
            _ => {}
        }
        format!("step {step}: {what}; its rows: {rows}")
    }
}

/// Line number of a row in a file with one row per line, from 1; blank lines are no rows. `None` for other files, and
/// for files that would take long to read.
fn line_of(file: &FileInfo, row: usize) -> Option<usize> {
    let is_plain = file.kind == FileKind::JsonLines && Compression::of(&file.path).is_none();
    if !is_plain || fs::metadata(&file.path).ok()?.len() > MAX_SEARCHED_BYTES {
        return None;
    }
    let lines = BufReader::new(fs::File::open(&file.path).ok()?).split(b'\n').map_while(Result::ok);
    let rows = lines.enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
    rows.map(|(index, _)| index + 1).nth(row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DataFormat;
    use crate::data::files::FileKind;

    #[test]
    fn an_odd_step_names_its_rows_counted_from_1() {
        let mut file = FileInfo {
            path: "rows.json".into(),
            kind: FileKind::Json,
            format: DataFormat::Text,
            num_rows: 20,
            num_rows_in_file: 20,
            unused_columns: Vec::new(),
            unlearnt: None,
            note: None,
            is_eval: false,
            kept_tokens: None,
        };
        let mut work = StepWork::new(Cursor::default());
        let warn = |work: &StepWork, file: &FileInfo| work.warning(7, "no update", std::slice::from_ref(file));
        assert_eq!(warn(&work, &file), "step 7: no update");
        work.sources = vec![RowSource { file: 0, row: 0 }, RowSource { file: 0, row: 4 }];
        assert!(warn(&work, &file).ends_with("its rows: rows.json row 1, rows.json row 5"), "{}", warn(&work, &file));
        work.sources = (0..10).map(|row| RowSource { file: 0, row }).collect();
        assert!(warn(&work, &file).ends_with("rows.json row 8 and 2 more"), "{}", warn(&work, &file));

        // In a file with one row per line, blank lines are not counted.
        let folder = tempfile::tempdir().unwrap();
        (file.path, file.kind) = (folder.path().join("rows.jsonl"), FileKind::JsonLines);
        fs::write(&file.path, "{}\n\n{}\n \n{}").unwrap();
        work.sources = (0..3).map(|row| RowSource { file: 0, row }).collect();
        let place = file.path.display();
        assert!(warn(&work, &file).ends_with(&format!("{place}:1, {place}:3, {place}:5")), "{}", warn(&work, &file));
    }
}
