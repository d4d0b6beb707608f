//! Sums that go on while this rank computes.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::abi::{Library, Number, Request};
use super::{end, system};

/// Between two questions: a link of 1 Gbit/s takes 60 kB meanwhile, of some MB that the kernel keeps ready for it.
const PAUSE: Duration = Duration::from_micros(500);

/// Numbers that are being summed.
pub(super) struct Begun {
    pub(super) numbers: Vec<f32>,
    pub(super) sum: Request,
}

/// Sums under way, and a thread that moves them on. Only who holds them makes calls of the library, or, where there are none,
/// the thread of the step.
pub(super) struct SumsUnderWay {
    library: &'static Library,
    under_way: Mutex<Vec<Begun>>,
    is_begun: Condvar,
}

impl SumsUnderWay {
    /// Starts the thread, which lives as long as the process.
    pub(super) fn start(library: &'static Library) -> &'static Self {
        let (under_way, is_begun) = (Mutex::default(), Condvar::new());
        let beside: &Self = Box::leak(Box::new(Self { library, under_way, is_begun }));
        std::thread::spawn(|| beside.move_on());
        beside
    }

    /// Begins to sum these over all ranks.
    pub(super) fn begin(&self, mut numbers: Vec<f32>) {
        let mut under_way = self.under_way();
        let sum = system::begin_sum(self.library, numbers.as_mut_ptr().cast(), numbers.len(), Number::F32);
        match sum {
            Ok(sum) => under_way.push(Begun { numbers, sum }),
            Err(error) => end(&error.to_string()),
        }
        self.is_begun.notify_one();
    }

    /// All that were begun, which the caller moves on.
    pub(super) fn take(&self) -> Vec<Begun> {
        std::mem::take(&mut *self.under_way())
    }

    fn under_way(&self) -> MutexGuard<'_, Vec<Begun>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn move_on(&self) -> ! {
        let mut under_way = self.under_way();
        loop {
            let is_done = under_way.iter_mut().try_fold(true, |is_done, begun| {
                // The first that is not complete moves all of them on.
                if is_done { self.library.is_done(&mut begun.sum) } else { Ok(false) }
            });
            match is_done {
                Ok(true) => under_way = self.is_begun.wait(under_way).unwrap_or_else(PoisonError::into_inner),
                Ok(false) => {
                    drop(under_way);
                    std::thread::sleep(PAUSE);
                    under_way = self.under_way();
                }
                Err(error) => end(&error.to_string()),
            }
        }
    }
}
