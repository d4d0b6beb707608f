//! How the progress of tokenising a large file is shown on standard error.

use std::io::Write as _;
use std::time::{Duration, Instant};

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::hub::Progress;

/// Tokenising that ends sooner than this is not reported.
const SILENCE: Duration = Duration::from_secs(1);
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Reports the progress of one file.
#[derive(Debug)]
pub(super) struct Meter {
    kind: Progress,
    file: String,
    num_rows: usize,
    bar: ProgressBar,
    start: Instant,
    last_line: Option<Instant>,
}

impl Meter {
    /// Starts with `num_rows` rows to tokenise.
    pub(super) fn start(kind: Progress, file: String, num_rows: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(num_rows as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{wide_msg} [{bar:24}] {human_pos}/{human_len} rows {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(format!("tokenising {file}"));
        Self { kind, file, num_rows, bar, start: Instant::now(), last_line: None }
    }

    /// Reports that the rows before `done` are tokenised.
    pub(super) fn advance(&mut self, done: usize) {
        let elapsed = self.start.elapsed();
        if self.kind == Progress::Quiet || elapsed < SILENCE {
            return;
        }
        let is_first = self.last_line.is_none();
        if self.kind == Progress::Bar {
            if is_first {
                self.bar.set_draw_target(ProgressDrawTarget::stderr());
                self.last_line = Some(Instant::now());
            }
            self.bar.set_position(done as u64);
        } else if self.last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            #[allow(clippy::cast_precision_loss, reason = "shown in whole seconds")]
            let left = elapsed.mul_f64((self.num_rows - done) as f64 / done.max(1) as f64);
            let (rows, all) = (HumanCount(done as u64), HumanCount(self.num_rows as u64));
            write_line(&format!("tokenising {}: {rows} of {all} rows, {} s left", self.file, left.as_secs() + 1));
            self.last_line = Some(Instant::now());
        }
    }

    pub(super) fn finish(self) {
        self.bar.finish_and_clear();
        if self.last_line.is_some() {
            let seconds = self.start.elapsed().as_secs_f64();
            let rows = HumanCount(self.num_rows as u64);
            write_line(&format!("tokenised {}: {rows} rows in {seconds:.1} s", self.file));
        }
    }
}

fn write_line(text: &str) {
    // If standard error is closed, there is nowhere to report it.
    drop(writeln!(std::io::stderr(), "{text}"));
}
