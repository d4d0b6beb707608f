//! Micro-batches that worker threads make ahead, in order.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::batch::Batch;
use super::error::DataError;
use super::pipeline::{Cursor, Order, RowCounts, Shared};
use super::work::Work;

/// While waiting for a micro-batch, how often to check whether the run should stop.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// A micro-batch and its place in the training rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedBatch {
    /// The rows. Rows without a token that carries loss are left out, so the batch may be empty.
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

/// Training micro-batches, without end.
#[derive(Debug)]
pub struct Loader {
    prefetch: Prefetch,
}

impl Loader {
    pub(super) fn start(shared: Arc<Shared>, from: Cursor, micro_batch_size: usize) -> Result<Self, DataError> {
        let plan = Plan {
            cursor: from,
            order: Arc::new(shared.train_order(from.epoch)),
            micro_batch_size: micro_batch_size.max(1),
            epochs: Epochs::Endless,
        };
        Ok(Self { prefetch: Prefetch::start(shared, plan)? })
    }

    /// The next micro-batch; waits if it is not ready.
    ///
    /// # Errors
    /// A row that cannot be read, with its place; a worker that panicked. After an error the loader returns no more
    /// batches.
    pub fn next_batch(&mut self) -> Result<LoadedBatch, DataError> {
        self.prefetch.next(&|| false).unwrap_or(Err(DataError::Stopped))
    }

    /// The work that the workers have done since the last call.
    #[must_use]
    pub fn take_work(&mut self) -> Work {
        std::mem::take(&mut self.prefetch.queue.lock().work)
    }

    /// Like [`next_batch`](Self::next_batch), but returns `None` without waiting once `is_stopped` is true. Do not use
    /// the loader after that.
    ///
    /// # Errors
    /// As [`next_batch`](Self::next_batch).
    pub fn next_batch_unless(&mut self, is_stopped: &dyn Fn() -> bool) -> Result<Option<LoadedBatch>, DataError> {
        match self.prefetch.next(is_stopped) {
            None | Some(Err(DataError::Stopped)) if is_stopped() => Ok(None),
            next => next.unwrap_or(Err(DataError::Stopped)).map(Some),
        }
    }
}

/// Evaluation micro-batches, in a fixed order.
#[derive(Debug)]
pub struct EvalLoader {
    prefetch: Prefetch,
}

impl EvalLoader {
    pub(super) fn start(
        shared: Arc<Shared>,
        micro_batch_size: usize,
        max_batches: Option<usize>,
    ) -> Result<Self, DataError> {
        let micro_batch_size = micro_batch_size.max(1);
        let mut order = shared.eval_order();
        if let Some(max_batches) = max_batches {
            order.truncate(max_batches.saturating_mul(micro_batch_size));
        }
        let plan = Plan { cursor: Cursor::default(), order: Arc::new(order), micro_batch_size, epochs: Epochs::One };
        Ok(Self { prefetch: Prefetch::start(shared, plan)? })
    }
}

impl EvalLoader {
    /// Iterates over the micro-batches; ends early once `is_stopped` is true.
    pub fn until(mut self, is_stopped: impl Fn() -> bool) -> impl Iterator<Item = Result<LoadedBatch, DataError>> {
        std::iter::from_fn(move || self.prefetch.next(&is_stopped).filter(|_| !is_stopped()))
    }
}

impl Iterator for EvalLoader {
    type Item = Result<LoadedBatch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.prefetch.next(&|| false)
    }
}

/// Whether the plan repeats epochs or ends after one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Epochs {
    One,
    Endless,
}

/// Which rows go into which micro-batch.
#[derive(Debug)]
struct Plan {
    cursor: Cursor,
    order: Arc<Order>,
    micro_batch_size: usize,
    epochs: Epochs,
}

#[derive(Debug)]
struct Job {
    order: Arc<Order>,
    start: usize,
    end: usize,
    epoch: u64,
    cursor_after: Cursor,
}

impl Plan {
    /// The next micro-batch, `None` at the end.
    fn next_job(&mut self, shared: &Shared) -> Option<Job> {
        let start_of = |batch: u64| usize::try_from(batch).unwrap_or(usize::MAX).saturating_mul(self.micro_batch_size);
        let mut start = start_of(self.cursor.batch);
        if start >= self.order.num_rows() {
            if self.epochs == Epochs::One {
                return None;
            }
            self.cursor = Cursor { epoch: self.cursor.epoch + 1, batch: 0 };
            self.order = Arc::new(shared.train_order(self.cursor.epoch));
            start = 0;
        }
        let epoch = self.cursor.epoch;
        let end = (start + self.micro_batch_size).min(self.order.num_rows());
        self.cursor = if end == self.order.num_rows() && self.epochs == Epochs::Endless {
            Cursor { epoch: epoch + 1, batch: 0 }
        } else {
            Cursor { epoch, batch: self.cursor.batch + 1 }
        };
        let job = Job { order: Arc::clone(&self.order), start, end, epoch, cursor_after: self.cursor };
        if self.cursor.epoch != epoch {
            self.order = Arc::new(shared.train_order(self.cursor.epoch));
        }
        Some(job)
    }
}

impl Job {
    fn run(&self, shared: &Shared, is_stopped: &dyn Fn() -> bool) -> Result<LoadedBatch, DataError> {
        let rows = self.start..self.end;
        let made = catch_unwind(AssertUnwindSafe(|| shared.batch(&self.order, rows, is_stopped)));
        let (batch, report) = made.unwrap_or_else(|panic| {
            let message = panic.downcast_ref::<String>().map(String::as_str);
            let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked");
            Err(DataError::Worker(message.to_owned()))
        })?;
        Ok(LoadedBatch {
            batch,
            cursor_after: self.cursor_after,
            epoch: self.epoch,
            last_of_epoch: self.end == self.order.num_rows(),
            report,
        })
    }
}

/// Worker threads and the bounded queue between them and the consumer.
///
/// A worker takes the next job and its number under the lock, makes the micro-batch without the lock, and stores the
/// result under the job's number. The consumer takes results by number, so the order does not depend on the number of
/// workers.
#[derive(Debug)]
struct Prefetch {
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    /// A result was stored.
    ready: Condvar,
    /// A result was taken out, so there is room for another job.
    room: Condvar,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct QueueState {
    plan: Plan,
    /// Number of the next job to be taken by a worker.
    next_job: u64,
    /// Number of the next result to hand out.
    next_result: u64,
    /// Number of jobs, once the plan has ended.
    num_jobs: Option<u64>,
    /// A worker ended with a panic outside a job.
    has_failed: bool,
    work: Work,
    results: BTreeMap<u64, Result<LoadedBatch, DataError>>,
}

impl Queue {
    /// The state is never half changed when code under this lock can panic, so a poisoned lock is safe to use.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// The body of a worker thread: runs jobs until the plan ends or the loader is dropped.
    fn work(&self, shared: &Shared, capacity: u64) {
        loop {
            let mut state = self.lock();
            while state.next_job >= state.next_result + capacity && !self.is_stopped() {
                state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if self.is_stopped() {
                return;
            }
            let number = state.next_job;
            let Some(job) = state.plan.next_job(shared) else {
                state.num_jobs = Some(number);
                self.ready.notify_all();
                return;
            };
            state.next_job += 1;
            drop(state);
            let (result, work) = Work::of(|| job.run(shared, &|| self.is_stopped()));
            let mut state = self.lock();
            state.results.insert(number, result);
            state.work += work;
            drop(state);
            self.ready.notify_all();
        }
    }

    fn stop(&self) {
        // Under the lock, so that no worker is between checking the flag and starting to wait.
        let state = self.lock();
        self.stopped.store(true, Ordering::Relaxed);
        drop(state);
        self.room.notify_all();
    }
}

impl Prefetch {
    fn start(shared: Arc<Shared>, plan: Plan) -> Result<Self, DataError> {
        let state = QueueState {
            plan,
            next_job: 0,
            next_result: 0,
            num_jobs: None,
            has_failed: false,
            work: Work::default(),
            results: BTreeMap::new(),
        };
        let queue = Arc::new(Queue {
            state: Mutex::new(state),
            ready: Condvar::new(),
            room: Condvar::new(),
            stopped: AtomicBool::new(false),
        });
        let capacity = shared.config.prefetch_batches.max(1) as u64;
        let mut prefetch = Self { queue, shared, workers: Vec::new() };
        for index in 0..prefetch.shared.config.num_workers {
            let (queue, shared) = (Arc::clone(&prefetch.queue), Arc::clone(&prefetch.shared));
            let worker = std::thread::Builder::new().name(format!("data-{index}"));
            let worker = worker.spawn(move || {
                if catch_unwind(AssertUnwindSafe(|| queue.work(&shared, capacity))).is_err() {
                    queue.lock().has_failed = true;
                    queue.ready.notify_all();
                }
            });
            prefetch.workers.push(worker.map_err(|error| DataError::Worker(error.to_string()))?);
        }
        Ok(prefetch)
    }

    /// The next result in order. `None` at the end of the plan, after an error, or once `is_stopped` is true before the
    /// result is there.
    fn next(&mut self, is_stopped: &dyn Fn() -> bool) -> Option<Result<LoadedBatch, DataError>> {
        if self.queue.is_stopped() {
            return None;
        }
        let result = if self.workers.is_empty() {
            let job = self.queue.lock().plan.next_job(&self.shared)?;
            let (result, work) = Work::of(|| job.run(&self.shared, is_stopped));
            self.queue.lock().work += work;
            result
        } else {
            let mut state = self.queue.lock();
            loop {
                let number = state.next_result;
                if let Some(result) = state.results.remove(&number) {
                    state.next_result += 1;
                    self.queue.room.notify_all();
                    break result;
                }
                if state.num_jobs.is_some_and(|num_jobs| number >= num_jobs) {
                    return None;
                }
                if state.has_failed {
                    break Err(DataError::Worker("a thread panicked".into()));
                }
                if is_stopped() {
                    return None;
                }
                // A signal does not wake this wait, so check at intervals whether to stop.
                let woken = self.queue.ready.wait_timeout(state, STOP_CHECK).unwrap_or_else(PoisonError::into_inner);
                state = woken.0;
            }
        };
        if result.is_err() {
            self.queue.stop();
        }
        Some(result)
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.queue.stop();
        for worker in self.workers.drain(..) {
            // Workers catch their panics; if one still ended by panic, there is nothing more to report.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::data::config::DataConfig;
    use crate::data::fixture::{Files, config, numbered_rows, tokenizer};
    use crate::data::pipeline::{DataPipeline, OpenOptions};

    #[test]
    fn a_panic_in_a_worker_is_an_error() {
        let files = Files::new();
        let shared = DataPipeline::open(
            &config(vec![files.write("r.jsonl", &numbered_rows(2))]),
            Arc::new(tokenizer()),
            1,
            &OpenOptions::default(),
        );
        let shared = shared.unwrap().shared();
        let order = Arc::new(shared.train_order(0));
        let job = Job { order, start: 0, end: 3, epoch: 0, cursor_after: Cursor::default() };
        let error = job.run(&shared, &|| false).unwrap_err().to_string();
        assert_eq!(error, "a data worker failed: index out of bounds: the len is 2 but the index is 2");
    }

    #[test]
    fn nobody_waits_for_a_micro_batch_who_wants_to_stop() {
        let files = Files::new();
        let source = files.write("r.jsonl", &numbered_rows(100));
        let config = DataConfig { num_workers: 0, ..config(vec![source]) };
        let pipeline = DataPipeline::open(&config, Arc::new(tokenizer()), 1, &OpenOptions::default()).unwrap();
        let mut loader = pipeline.loader(Cursor::default(), 100).unwrap();
        assert!(loader.next_batch_unless(&|| true).unwrap().is_none());
    }

    #[test]
    fn dropping_a_loader_stops_its_threads_at_once() {
        let files = Files::new();
        // A row takes noticeable time, a micro-batch very long.
        let row = format!("{{\"text\": \"{}\"}}\n", "words and ".repeat(2000));
        let source = files.write("r.jsonl", &row.repeat(1000));
        let config = DataConfig { num_workers: 2, max_length: 100_000, ..config(vec![source]) };
        let pipeline = DataPipeline::open(&config, Arc::new(tokenizer()), 1, &OpenOptions::default()).unwrap();
        let loader = pipeline.loader(Cursor::default(), 1000).unwrap();
        let started = Instant::now();
        drop(loader);
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        assert_eq!(Arc::strong_count(&pipeline.shared()), 2, "no thread holds the rows any more");
    }

    #[test]
    fn no_more_is_made_than_fits_the_queue() {
        let files = Files::new();
        let source = files.write("r.jsonl", &numbered_rows(100));
        let config = DataConfig { num_workers: 2, prefetch_batches: 3, ..config(vec![source]) };
        let pipeline = DataPipeline::open(&config, Arc::new(tokenizer()), 1, &OpenOptions::default()).unwrap();
        let mut loader = pipeline.loader(Cursor::default(), 1).unwrap();
        for taken in 0..5 {
            let deadline = Instant::now() + Duration::from_secs(20);
            while loader.prefetch.queue.lock().results.len() < 3 {
                assert!(Instant::now() < deadline, "the queue does not fill");
                std::thread::yield_now();
            }
            assert_eq!(loader.prefetch.queue.lock().next_job, taken + 3);
            loader.next_batch().unwrap();
        }
    }
}
