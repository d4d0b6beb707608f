//! Micro-batches that worker threads make ahead, in order.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::batch::Batch;
use super::counts::RowCounts;
use super::data_file::DataFile;
use super::dataset::{Cursor, Dataset, read_row};
use super::error::DataError;
use super::order::Order;
use super::worker_time::WorkerTime;
use crate::config::{DataConfig, RowKind};

/// While waiting for a micro-batch, how often to check whether the run should stop.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// A micro-batch and its place in the training rows.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedBatch {
    /// The rows. Rows without a token that carries loss are left out, so the batch may be empty. The last one of an epoch
    /// is filled up with rows without tokens: where padding is computed, its shape is that of the others.
    pub batch: Batch,
    /// Cursor of the next micro-batch.
    pub cursor_after: Cursor,
    /// Pass over the training rows, from 0.
    pub epoch: u64,
    /// Whether this is the last micro-batch of that pass.
    pub last_of_epoch: bool,
    /// Counts of its rows.
    pub report: RowCounts,
}

/// A micro-batch or why it could not be made, and the time that took.
type Made = (Result<LoadedBatch, DataError>, WorkerTime);

/// Micro-batches in order, made ahead by worker threads.
///
/// The loader hands out jobs and keeps, for each of them, the receiver of its result. It takes the results in the order
/// of the jobs, so the order does not depend on the number of workers, and hands out one more job for each result taken,
/// so no more than `prefetch_batches` micro-batches are held.
#[derive(Debug)]
pub struct Loader<'a> {
    dataset: &'a Dataset,
    /// Of the next job.
    cursor: Cursor,
    /// Order of the rows in the epoch with this number.
    order: (u64, Arc<Order>),
    micro_batch_size: usize,
    is_endless: bool,
    /// Jobs for the workers; `None` where there are no workers.
    jobs: Option<Sender<(MicroBatchJob, Sender<Made>)>>,
    /// Results of the jobs that were handed out, in order.
    pending: VecDeque<Receiver<Made>>,
    /// The first of these results, where it was looked at.
    peeked: Option<Made>,
    is_stopped: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
    work: WorkerTime,
}

/// A micro-batch to make.
#[derive(Debug)]
struct MicroBatchJob {
    order: Arc<Order>,
    rows: Range<usize>,
    micro_batch_size: usize,
    epoch: u64,
    cursor_after: Cursor,
    kind: RowKind,
    max_length: usize,
}

impl MicroBatchJob {
    fn run(&self, files: &[DataFile], is_stopped: &dyn Fn() -> bool) -> Result<LoadedBatch, DataError> {
        // A panic is printed where it happens, with its place.
        catch_unwind(AssertUnwindSafe(|| self.make(files, is_stopped)))
            .unwrap_or_else(|_| Err(DataError::Worker("a thread panicked".into())))
    }

    fn make(&self, files: &[DataFile], is_stopped: &dyn Fn() -> bool) -> Result<LoadedBatch, DataError> {
        let mut report = RowCounts::default();
        let mut rows = Vec::with_capacity(self.micro_batch_size);
        for row in self.rows.clone() {
            let mut documents = Vec::new();
            for document in self.order.documents(row) {
                if is_stopped() {
                    return Err(DataError::Stopped);
                }
                let (source, encoded) = read_row(files, *document)?;
                report.add(&encoded);
                documents.push((source, encoded));
            }
            rows.push(documents);
        }
        rows.resize(self.micro_batch_size, Vec::new());
        Ok(LoadedBatch {
            batch: Batch::of_kind(self.kind, &rows, self.max_length),
            cursor_after: self.cursor_after,
            epoch: self.epoch,
            last_of_epoch: self.rows.end == self.order.num_rows(),
            report,
        })
    }
}

impl Dataset {
    /// Micro-batches of `micro_batch_size` rows, starting at `from`, without end: epochs repeat.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn loader(&self, from: Cursor, micro_batch_size: usize) -> Result<Loader<'_>, DataError> {
        Loader::start(self, from, self.train_order(from.epoch), micro_batch_size, true)
    }

    /// The evaluation rows in micro-batches, always in the same order; at most `max_batches` of them.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn eval_batches(&self, micro_batch_size: usize, max_batches: Option<usize>) -> Result<Loader<'_>, DataError> {
        let mut order = self.eval_order();
        order.truncate(max_batches.unwrap_or(usize::MAX).saturating_mul(micro_batch_size.max(1)));
        Loader::start(self, Cursor::default(), order, micro_batch_size, false)
    }
}

impl<'a> Loader<'a> {
    /// Starts the workers and hands out the first jobs.
    fn start(
        dataset: &'a Dataset,
        from: Cursor,
        order: Order,
        micro_batch_size: usize,
        is_endless: bool,
    ) -> Result<Self, DataError> {
        let mut loader = Self {
            dataset,
            cursor: from,
            order: (from.epoch, Arc::new(order)),
            micro_batch_size: micro_batch_size.max(1),
            is_endless,
            jobs: None,
            pending: VecDeque::new(),
            peeked: None,
            is_stopped: Arc::default(),
            workers: Vec::new(),
            work: WorkerTime::default(),
        };
        let (sender, receiver) = mpsc::channel::<(MicroBatchJob, Sender<Made>)>();
        let receiver = Arc::new(Mutex::new(receiver));
        for index in 0..dataset.config.num_workers {
            let (receiver, files) = (Arc::clone(&receiver), Arc::clone(&dataset.files));
            let is_stopped = Arc::clone(&loader.is_stopped);
            let work = move || {
                loop {
                    // One worker waits for a job while it holds the lock; the others wait for the lock.
                    let next = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((job, result)) = next else { return };
                    let made = WorkerTime::of(|| job.run(&files, &|| is_stopped.load(Ordering::Relaxed)));
                    // A loader that is dropped or has failed no longer receives.
                    drop(result.send(made));
                }
            };
            let worker = std::thread::Builder::new().name(format!("data-{index}")).spawn(work);
            loader.workers.push(worker.map_err(|error| DataError::Worker(error.to_string()))?);
        }
        loader.jobs = (!loader.workers.is_empty()).then_some(sender);
        loader.hand_out_jobs();
        Ok(loader)
    }

    /// The next micro-batch; waits if it is not ready.
    ///
    /// # Errors
    /// A row that cannot be read, with its place; a worker that panicked. After an error the loader returns no more
    /// batches.
    pub fn next_batch(&mut self) -> Result<LoadedBatch, DataError> {
        self.next_unless(&|| false).unwrap_or(Err(DataError::Stopped))
    }

    /// Like [`next_batch`](Self::next_batch), but returns `None` without waiting once `is_stopped` is true. Do not use
    /// the loader after that.
    ///
    /// # Errors
    /// As [`next_batch`](Self::next_batch).
    pub fn next_batch_unless(&mut self, is_stopped: &dyn Fn() -> bool) -> Result<Option<LoadedBatch>, DataError> {
        match self.next_unless(is_stopped) {
            None | Some(Err(DataError::Stopped)) if is_stopped() => Ok(None),
            next => next.unwrap_or(Err(DataError::Stopped)).map(Some),
        }
    }

    /// The next micro-batch, if a worker has made it; it stays the next one.
    pub fn peek(&mut self) -> Option<&LoadedBatch> {
        if self.peeked.is_none() {
            self.peeked = self.pending.front()?.try_recv().ok();
        }
        self.peeked.as_ref()?.0.as_ref().ok()
    }

    /// Iterates over the micro-batches; ends early once `is_stopped` is true.
    pub fn until(mut self, is_stopped: impl Fn() -> bool) -> impl Iterator<Item = Result<LoadedBatch, DataError>> {
        std::iter::from_fn(move || self.next_unless(&is_stopped).filter(|_| !is_stopped()))
    }

    /// The work of making the micro-batches that were taken since the last call.
    #[must_use]
    pub fn take_worker_time(&mut self) -> WorkerTime {
        std::mem::take(&mut self.work)
    }

    /// The next result in order. `None` at the end, after an error, or once `is_stopped` is true before the result is
    /// there.
    fn next_unless(&mut self, is_stopped: &dyn Fn() -> bool) -> Option<Result<LoadedBatch, DataError>> {
        if self.is_stopped.load(Ordering::Relaxed) {
            return None;
        }
        let (result, work) = if self.jobs.is_some() {
            let next = self.pending.pop_front()?;
            let mut made = self.peeked.take().map_or_else(|| next.recv_timeout(Duration::ZERO), Ok);
            loop {
                // A signal does not end a wait, so check at intervals whether to stop.
                match made {
                    Ok(made) => break made,
                    Err(RecvTimeoutError::Timeout) if is_stopped() => return None,
                    Err(RecvTimeoutError::Timeout) => made = next.recv_timeout(STOP_CHECK),
                    Err(RecvTimeoutError::Disconnected) => {
                        break (Err(DataError::Worker("a thread panicked".into())), WorkerTime::default());
                    }
                }
            }
        } else {
            let job = self.next_job()?;
            WorkerTime::of(|| job.run(&self.dataset.files, is_stopped))
        };
        self.work += work;
        if result.is_err() {
            self.is_stopped.store(true, Ordering::Relaxed);
        } else {
            self.hand_out_jobs();
        }
        Some(result)
    }

    fn hand_out_jobs(&mut self) {
        while self.jobs.is_some() && self.pending.len() < self.dataset.config.prefetch_batches.max(1) {
            let Some(job) = self.next_job() else { return };
            let (sender, receiver) = mpsc::channel();
            // Without workers the sender is dropped, and the receiver reports it.
            drop(self.jobs.as_ref().map(|jobs| jobs.send((job, sender))));
            self.pending.push_back(receiver);
        }
    }

    /// The next micro-batch to make, `None` at the end.
    fn next_job(&mut self) -> Option<MicroBatchJob> {
        let size = self.micro_batch_size;
        let start_of = |batch: u64| usize::try_from(batch).unwrap_or(usize::MAX).saturating_mul(size);
        if start_of(self.cursor.batch) >= self.order.1.num_rows() && self.order.0 == self.cursor.epoch {
            if !self.is_endless {
                return None;
            }
            self.cursor = Cursor { epoch: self.cursor.epoch + 1, batch: 0 };
        }
        if self.order.0 != self.cursor.epoch {
            self.order = (self.cursor.epoch, Arc::new(self.dataset.train_order(self.cursor.epoch)));
        }
        let (Cursor { epoch, batch }, order) = (self.cursor, Arc::clone(&self.order.1));
        let start = start_of(batch);
        let end = (start + size).min(order.num_rows());
        self.cursor = if end == order.num_rows() && self.is_endless {
            Cursor { epoch: epoch + 1, batch: 0 }
        } else {
            Cursor { epoch, batch: batch + 1 }
        };
        let DataConfig { row_kind: kind, max_length, .. } = self.dataset.config;
        Some(MicroBatchJob {
            order,
            rows: start..end,
            micro_batch_size: size,
            epoch,
            cursor_after: self.cursor,
            kind,
            max_length,
        })
    }
}

impl Drop for Loader<'_> {
    fn drop(&mut self) {
        // Ends the current jobs, and then the workers.
        self.is_stopped.store(true, Ordering::Relaxed);
        self.jobs = None;
        for worker in self.workers.drain(..) {
            // Panics of jobs are caught; if a worker still ended by panic, there is nothing more to report.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::data::dataset::OpenOptions;
    use crate::data::fixture::{Files, config, numbered_rows, tokenizer};

    fn open(files: &Files, rows: &str, change: impl FnOnce(&mut DataConfig)) -> Dataset {
        let mut config = config(vec![files.write("r.jsonl", rows)]);
        change(&mut config);
        Dataset::open(&config, Arc::new(tokenizer()), 1, &OpenOptions::default()).unwrap()
    }

    #[test]
    fn a_panic_in_a_worker_is_an_error() {
        let files = Files::new();
        let dataset = open(&files, &numbered_rows(2), |_| {});
        let order = Arc::new(dataset.train_order(0));
        let (cursor_after, kind) = (Cursor::default(), RowKind::Sequence);
        let job = MicroBatchJob { order, rows: 0..3, micro_batch_size: 3, epoch: 0, cursor_after, kind, max_length: 8 };
        let error = job.run(&dataset.files, &|| false).unwrap_err().to_string();
        assert_eq!(error, "a data worker failed: a thread panicked");
    }

    #[test]
    fn nobody_waits_for_a_micro_batch_who_wants_to_stop() {
        let files = Files::new();
        let dataset = open(&files, &numbered_rows(100), |config| config.num_workers = 0);
        let mut loader = dataset.loader(Cursor::default(), 100).unwrap();
        assert!(loader.next_batch_unless(&|| true).unwrap().is_none());
    }

    #[test]
    fn dropping_a_loader_stops_its_threads_at_once() {
        let files = Files::new();
        // A row takes noticeable time, a micro-batch very long.
        let row = format!("{{\"text\": \"{}\"}}\n", "words and ".repeat(2000));
        let dataset = open(&files, &row.repeat(1000), |config| (config.num_workers, config.max_length) = (2, 100_000));
        let started = Instant::now();
        dataset.loader(Cursor::default(), 10).unwrap().next_batch().unwrap();
        let ten_rows = started.elapsed();
        let loader = dataset.loader(Cursor::default(), 1000).unwrap();
        let started = Instant::now();
        drop(loader);
        // Half the time of a micro-batch. The time of ten rows is that of this machine with what else it does.
        assert!(started.elapsed() < 50 * ten_rows, "{:?}, ten rows take {ten_rows:?}", started.elapsed());
        assert_eq!(Arc::strong_count(&dataset.files), 1, "no thread holds the rows any more");
    }

    #[test]
    fn no_more_is_made_than_fits_the_queue() {
        let files = Files::new();
        let dataset = open(&files, &numbered_rows(100), |config| {
            (config.num_workers, config.prefetch_batches) = (2, 3);
        });
        let mut loader = dataset.loader(Cursor::default(), 1).unwrap();
        for taken in 0..5 {
            assert_eq!((loader.pending.len(), loader.cursor.batch), (3, taken + 3));
            loader.next_batch().unwrap();
        }
    }
}
