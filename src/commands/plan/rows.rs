//! The number of training rows, where they cannot be tokenised.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use crate::config::{DataConfig, DataSource};
use crate::data::files::OpenOptions;
use crate::data::sources::source_files;
use crate::util::stats::as_f64;

/// Most rows of an epoch: the lines of the training files. `None` where a file is missing or has no row a line.
pub(super) fn at_most(data: &DataConfig) -> Option<usize> {
    let of_source = |source: &DataSource| {
        let options = OpenOptions { refuse_large: true, ..OpenOptions::default() };
        let paths = source_files("data.train", source, &options).ok()?;
        let rows: usize = paths.iter().map(|path| num_lines(path)).sum::<Option<_>>()?;
        let rows = source.rows.map_or(rows, |limit| limit.of(rows));
        Some((source.weight * as_f64(rows)).ceil())
    };
    let rows: f64 = data.train.iter().map(of_source).sum::<Option<_>>()?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of rows")]
    (rows > 0.0).then_some(rows as usize)
}

fn num_lines(path: &Path) -> Option<usize> {
    if !path.extension().is_some_and(|ending| ending == "jsonl" || ending == "ndjson") {
        return None;
    }
    let lines = BufReader::new(File::open(path).ok()?).split(b'\n');
    Some(lines.map_while(Result::ok).filter(|line| !line.trim_ascii().is_empty()).count())
}
