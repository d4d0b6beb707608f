//! How the progress of long work on a file is shown on standard error.

use std::io::Write as _;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::hub::Progress;

/// Work that ends sooner than this is not reported.
const SILENCE: Duration = Duration::from_secs(1);
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// What is done to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Its rows become tokens.
    Tokenising,
    /// Its bytes are written.
    Writing,
    /// Parts of its weights are computed.
    Decomposing,
    /// Features of its images are made.
    Seeing,
    /// Images that it names come from the web.
    Fetching,
}

impl Work {
    /// While it is done, and afterwards.
    fn verbs(self) -> [&'static str; 2] {
        match self {
            Self::Tokenising => ["tokenising", "tokenised"],
            Self::Writing => ["writing", "wrote"],
            Self::Decomposing => ["decomposing", "decomposed"],
            Self::Seeing => ["encoding", "encoded"],
            Self::Fetching => ["fetching images of", "fetched images of"],
        }
    }

    fn amount(self, amount: usize) -> String {
        match self {
            Self::Tokenising => format!("{} rows", HumanCount(amount as u64)),
            Self::Writing => HumanBytes(amount as u64).to_string(),
            Self::Decomposing => format!("{amount} weights"),
            Self::Seeing | Self::Fetching => amount.to_string(),
        }
    }

    fn template(self) -> &'static str {
        match self {
            Self::Tokenising => "{wide_msg} [{bar:24}] {human_pos}/{human_len} rows {eta}",
            Self::Writing => "{wide_msg} [{bar:24}] {binary_bytes}/{binary_total_bytes} {eta}",
            Self::Decomposing => "{wide_msg} [{bar:24}] {pos}/{len} weights {eta}",
            Self::Seeing | Self::Fetching => "{wide_msg} [{bar:24}] {human_pos}/{human_len} {eta}",
        }
    }
}

/// Reports the progress of one file.
#[derive(Debug)]
pub(crate) struct Meter {
    kind: Progress,
    work: Work,
    file: String,
    /// Rows or bytes.
    all: usize,
    bar: ProgressBar,
    start: Instant,
    last_line: Option<Instant>,
}

impl Meter {
    /// Starts with `all` rows or bytes to do.
    pub(crate) fn start(kind: Progress, work: Work, file: String, all: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(all as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(work.template()) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(format!("{} {file}", work.verbs()[0]));
        Self { kind, work, file, all, bar, start: Instant::now(), last_line: None }
    }

    /// Reports that the rows or bytes before `done` are done.
    pub(crate) fn advance(&mut self, done: usize) {
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
            let left = elapsed.mul_f64((self.all - done) as f64 / done.max(1) as f64);
            let (verb, all) = (self.work.verbs()[0], self.work.amount(self.all));
            let done = self.work.amount(done);
            let of = format!("{} of {all}", done.trim_end_matches(" rows").trim_end_matches(" weights"));
            write_line(&format!("{verb} {}: {of}, {} s left", self.file, left.as_secs() + 1));
            self.last_line = Some(Instant::now());
        }
    }

    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
        if self.last_line.is_some() {
            let (seconds, verb) = (self.start.elapsed().as_secs_f64(), self.work.verbs()[1]);
            write_line(&format!("{verb} {}: {} in {seconds:.1} s", self.file, self.work.amount(self.all)));
        }
    }
}

fn write_line(text: &str) {
    // If standard error is closed, there is nowhere to report it.
    drop(writeln!(std::io::stderr(), "{text}"));
}
