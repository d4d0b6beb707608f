//! All rows of a file are processed at once: on all cores, in order, with a bounded part of them in memory.

use std::fmt;
use std::ops::Range;

use rayon::prelude::*;

use super::cache::CacheSettings;
use super::error::DataError;
use super::progress::Meter;
use crate::hub::Progress;

const CHUNK_ROWS: usize = 128;
/// Chunks that a thread gets in one round: enough that threads seldom wait for the last chunk.
const CHUNKS_PER_THREAD: usize = 16;
/// Most bytes of rows that are tokenised at a time, unless a single row has more.
const MAX_ROUND_BYTES: usize = 32 << 20;

/// How data is opened, besides what the recipe says.
pub struct OpenOptions<'a> {
    /// Where tokens are kept between runs.
    pub cache: CacheSettings,
    /// How the progress of tokenising a large file is shown.
    pub progress: Progress,
    /// How many rows of each file are read; all where absent. A .txt file is read whole.
    pub max_rows: Option<usize>,
    /// Whether to refuse a large file whose tokens are not in the cache, since making them takes long.
    pub refuse_large: bool,
    /// Whether the user wants the command to end.
    pub is_stopped: &'a (dyn Fn() -> bool + Sync),
}

impl Default for OpenOptions<'_> {
    /// Keeps nothing on disk, shows nothing, and is never stopped.
    fn default() -> Self {
        Self {
            cache: CacheSettings::default(),
            progress: Progress::Quiet,
            max_rows: None,
            refuse_large: false,
            is_stopped: &|| false,
        }
    }
}

impl fmt::Debug for OpenOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cache, progress, .. } = self;
        f.debug_struct("OpenOptions").field("cache", cache).field("progress", progress).finish_non_exhaustive()
    }
}

/// Makes chunks of the rows `0..num_rows` with `encode` on all cores and hands them to `sink` in order. The next round
/// of chunks is made while the current round goes to `sink`.
///
/// `row_bytes` is the mean size of a row.
pub(super) fn for_each_chunk<C: Send, E: Send + From<DataError>>(
    num_rows: usize,
    row_bytes: usize,
    is_stopped: &(dyn Fn() -> bool + Sync),
    mut meter: Meter,
    encode: &(dyn Fn(Range<usize>) -> Result<C, E> + Sync),
    sink: &mut (dyn FnMut(Range<usize>, C) -> Result<(), E> + Send),
) -> Result<(), E> {
    let chunks_per_round = rayon::current_num_threads() * CHUNKS_PER_THREAD;
    let chunk_rows = (MAX_ROUND_BYTES / chunks_per_round / row_bytes.max(1)).clamp(1, CHUNK_ROWS);
    let round_rows = chunk_rows * chunks_per_round;
    let chunk = |rows: Range<usize>| {
        if is_stopped() {
            return Err(DataError::Interrupted.into());
        }
        Ok((rows.clone(), encode(rows)?))
    };
    let make = |rows: Range<usize>| -> Vec<Result<(Range<usize>, C), E>> {
        let starts: Vec<usize> = rows.clone().step_by(chunk_rows).collect();
        starts.into_par_iter().map(|start| chunk(start..(start + chunk_rows).min(rows.end))).collect()
    };
    let mut made: Vec<Result<(Range<usize>, C), E>> = Vec::new();
    let mut at = 0;
    loop {
        let next = at..(at + round_rows).min(num_rows);
        at = next.end;
        let is_last = next.is_empty();
        let hand_on = || {
            let mut done = 0;
            for chunk in made {
                let (rows, chunk) = chunk?;
                done = rows.end;
                sink(rows, chunk)?;
            }
            // Once per round, not per chunk: otherwise the round's first chunk would seem to have taken all the time.
            if done > 0 {
                meter.advance(done);
            }
            Ok::<(), E>(())
        };
        let (handed_on, next) = rayon::join(hand_on, || make(next));
        handed_on?;
        if is_last {
            meter.finish();
            return Ok(());
        }
        made = next;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn meter() -> Meter {
        Meter::start(Progress::Quiet, String::new(), 0)
    }

    #[test]
    fn chunks_arrive_in_order_and_hold_every_row_once() {
        for (num_rows, row_bytes) in [(0, 10), (1, 10), (10_000, 10), (500, usize::MAX)] {
            let mut rows = Vec::new();
            let encode = |chunk: Range<usize>| Ok::<_, DataError>(chunk.collect::<Vec<_>>());
            let mut sink = |range: Range<usize>, chunk: Vec<usize>| {
                assert_eq!(range.collect::<Vec<_>>(), chunk);
                rows.extend(chunk);
                Ok(())
            };
            for_each_chunk(num_rows, row_bytes, &|| false, meter(), &encode, &mut sink).unwrap();
            assert_eq!(rows, (0..num_rows).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_first_error_in_order_is_reported() {
        let encode = |chunk: Range<usize>| match chunk.clone().find(|row| row % 1000 == 999) {
            Some(row) => Err(DataError::Worker(row.to_string())),
            None => Ok(()),
        };
        let error = for_each_chunk(5000, 10, &|| false, meter(), &encode, &mut |_, ()| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "a data worker failed: 999");
    }

    #[test]
    fn a_wish_to_stop_is_heeded_at_the_next_chunk() {
        let made = AtomicUsize::new(0);
        let encode = |_: Range<usize>| {
            made.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let is_stopped = || made.load(Ordering::Relaxed) >= 3;
        let result = for_each_chunk(1_000_000, 1000, &is_stopped, meter(), &encode, &mut |_, ()| Ok(()));
        assert!(matches!(result, Err(DataError::Interrupted)));
        assert!(made.into_inner() < 3 + rayon::current_num_threads() + 1);
    }
}
