//! Lengths, losses and padding over the rows.

use std::io::{self, Write};

use rayon::prelude::*;
use serde_json::json;

use crate::config::DataConfig;
use crate::data::dataset::{Cursor, Dataset, RowCounts};
use crate::data::error::DataError;
use crate::util::text::counted;

/// Maximum number of rows whose lengths are taken.
const MAX_ROWS: usize = 10_000;
/// Maximum number of rows to measure padding on, by building their micro-batches.
const MAX_BATCHED_ROWS: u64 = 2_000;
const NUM_BARS: usize = 10;
const BAR_WIDTH: usize = 40;

/// Statistics over the rows of a recipe.
#[derive(Debug, Default)]
pub(super) struct Summary {
    /// For all rows of the training files.
    counts: RowCounts,
    /// Tokens before truncation of the rows that are trained on, or of the first of them; ascending.
    lengths: Vec<usize>,
    max_length: usize,
    packing: bool,
    micro_batch_size: usize,
    /// Positions in the micro-batches that were built, and tokens in them.
    batched_places: usize,
    batched_tokens: usize,
}

impl Summary {
    /// Reads the training rows; lengths come from the first of them if there are very many.
    pub(super) fn measure(data: &Dataset, config: &DataConfig, micro_batch_size: usize) -> Result<Self, DataError> {
        let mut summary = Self {
            counts: data.train_counts()?,
            max_length: config.max_length,
            packing: config.packing,
            micro_batch_size,
            ..Self::default()
        };
        let length = |index: usize| data.train_row(index).map(|(_, row)| row.full_length);
        let rows = 0..data.num_train_rows().min(MAX_ROWS);
        summary.lengths = rows.into_par_iter().map(length).collect::<Result<_, DataError>>()?;
        summary.lengths.sort_unstable();

        let mut loader = data.loader(Cursor::default(), micro_batch_size)?;
        let mut batched_rows = 0;
        loop {
            let loaded = loader.next_batch()?;
            summary.batched_places += loaded.batch.num_tokens() + loaded.batch.num_padding_tokens();
            summary.batched_tokens += loaded.batch.num_tokens();
            batched_rows += loaded.report.rows;
            if loaded.last_of_epoch || batched_rows >= MAX_BATCHED_ROWS {
                return Ok(summary);
            }
        }
    }

    /// Length that `share` percent of the rows do not exceed.
    fn percentile(&self, share: usize) -> usize {
        let rank = (self.lengths.len() * share).div_ceil(100).max(1);
        self.lengths.get(rank - 1).copied().unwrap_or(0)
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let RowCounts { rows, truncated, answer_cut, without_targets, bad, tokens, target_tokens, .. } = self.counts;
        let (longest, max_length) = (self.percentile(100), self.max_length);
        writeln!(out, "{}:", counted(rows, "training row"))?;
        writeln!(
            out,
            "  tokens a row   shortest {}, half up to {}, 90% up to {}, 99% up to {}, longest {longest}",
            self.lengths.first().copied().unwrap_or(0),
            self.percentile(50),
            self.percentile(90),
            self.percentile(99),
        )?;
        self.write_histogram(out)?;
        let share = percent(target_tokens, tokens);
        writeln!(out, "  carrying loss  {target_tokens} of {tokens} tokens ({share})")?;
        writeln!(
            out,
            "  truncated      {} at `data.max_length` = {max_length}, {answer_cut} without any of the answer",
            counted(truncated, "row")
        )?;
        writeln!(out, "  left out       {} in which nothing carries loss", counted(without_targets, "row"))?;
        if bad > 0 {
            writeln!(
                out,
                "  skipped        {} that cannot be used (`data.on_bad_row` = \"skip\")",
                counted(bad, "row")
            )?;
        }
        let padding = percent((self.batched_places - self.batched_tokens) as u64, self.batched_places as u64);
        let packed = if self.packing { "packed" } else { "unpacked: `data.packing = true` fills rows up" };
        writeln!(
            out,
            "  padding        {padding} of a micro-batch of {} ({packed})",
            counted(self.micro_batch_size, "row")
        )
    }

    fn write_histogram(&self, out: &mut dyn Write) -> io::Result<()> {
        let bar_tokens = self.percentile(100).max(1).div_ceil(NUM_BARS);
        let count = |bar: usize| {
            let below = |limit: usize| self.lengths.partition_point(|length| *length <= limit);
            below((bar + 1) * bar_tokens) - if bar == 0 { 0 } else { below(bar * bar_tokens) }
        };
        let highest = (0..NUM_BARS).map(count).max().unwrap_or(0).max(1);
        for bar in 0..NUM_BARS {
            let (from, to, count) = (bar * bar_tokens + 1, (bar + 1) * bar_tokens, count(bar));
            let bar = "█".repeat((count * BAR_WIDTH).div_ceil(highest));
            writeln!(out, "  {from:>7}-{to:<6} {bar} {count}")?;
        }
        Ok(())
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let percentiles = [0, 50, 90, 99, 100].map(|share| self.percentile(share));
        json!({"summary": {
            "counts": self.counts,
            "length_percentiles": {"0": percentiles[0], "50": percentiles[1], "90": percentiles[2],
                                   "99": percentiles[3], "100": percentiles[4]},
            "micro_batch_tokens": self.batched_tokens,
            "micro_batch_places": self.batched_places,
        }})
    }
}

fn percent(part: u64, whole: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let share = if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 };
    format!("{share:.1}%")
}
