//! Stop requests: SIGINT, SIGTERM, a closed terminal, or the dashboard's quit key.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_train::Interrupter;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{SigId, flag};

use crate::util::cancel;

/// Exit code of a run that was stopped by a signal.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Whether the run was asked to stop. Clones share one request.
///
/// The loop checks it between micro-batches and, within them, between two operations. The signal handler sets a flag and
/// says so, or ends the process.
#[derive(Clone, Default)]
pub struct Stop {
    signal: Arc<AtomicBool>,
    /// What makes a second signal end the process.
    at_second: Vec<SigId>,
    /// A signal ends the process at once, because there is nothing to save yet.
    at_once: Arc<AtomicBool>,
    /// A signal is answered on standard error.
    answers: Arc<AtomicBool>,
    interrupter: Interrupter,
}

impl Stop {
    /// Handles signals from now on. Until [`defer`](Self::defer), the first signal ends the process with
    /// [`EXIT_INTERRUPTED`]. This also works as process 1 of a container, where the kernel's default action for a
    /// signal does nothing.
    ///
    /// Writing beyond the file size limit becomes an error, like that of a full disk, instead of a deadly signal.
    ///
    /// # Errors
    /// Where the operating system refuses the handlers.
    pub fn on_signals() -> io::Result<Self> {
        let (mut stop, first) = (Self::default(), Arc::default());
        #[cfg(unix)]
        let start = std::time::Instant::now();
        stop.at_once.store(true, Ordering::Relaxed);
        for signal in stop_signals() {
            #[cfg(unix)]
            {
                handler::end_if(signal, &stop.at_once)?;
                stop.at_second.push(handler::end_at_second(signal, &first, start)?);
                handler::answer(signal, &stop.answers)?;
            }
            #[cfg(not(unix))]
            {
                // At the second signal the flag is already set.
                flag::register_conditional_shutdown(signal, i32::from(EXIT_INTERRUPTED), stop.at_once.clone())?;
                flag::register_conditional_shutdown(signal, i32::from(EXIT_INTERRUPTED), first.clone())?;
                stop.at_second.push(flag::register(signal, first.clone())?);
            }
            flag::register(signal, stop.signal.clone())?;
        }
        #[cfg(unix)]
        flag::register(signal_hook::consts::SIGXFSZ, Arc::default())?;
        Ok(stop)
    }

    /// From now on no second signal ends the process: launchers send the same one twice, and end what takes too long themselves.
    pub fn outlast(&self) {
        for id in &self.at_second {
            signal_hook::low_level::unregister(*id);
        }
    }

    /// From now on the first signal is a request, met once all files are complete; a second signal ends the process.
    pub fn defer(&self) {
        self.at_once.store(false, Ordering::Relaxed);
    }

    /// From now on a signal is answered at once on standard error, whatever the run is busy with.
    pub fn answer(&self) {
        self.answers.store(true, Ordering::Relaxed);
    }

    /// From now on a signal ends the process at once again.
    pub fn at_once(&self) {
        self.at_once.store(true, Ordering::Relaxed);
    }

    /// Ends the process as a signal does, after `message`. Call it only where no file is being written, and where other
    /// work may be cut off.
    pub fn end(message: &str) -> ! {
        // If standard error is closed, there is no place for the message.
        drop(writeln!(io::stderr(), "{message}"));
        signal_hook::low_level::exit(i32::from(EXIT_INTERRUPTED))
    }

    /// Sets a message for when the process aborts, which happens where the system refuses it memory. The process then
    /// ends with exit code 1 instead of a signal. Only the first call has an effect.
    pub fn on_abort(&self, advice: &str) {
        #[cfg(unix)]
        handler::on_abort(advice);
        #[cfg(not(unix))]
        let _ = advice;
    }

    /// Whether the run was asked to stop.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.signal.load(Ordering::Relaxed) || self.interrupter.should_stop()
    }

    /// Runs `work`, which is given up between two operations once the run is asked to stop: then `None`.
    pub fn unless_requested<R>(&self, work: impl FnOnce() -> R) -> Option<R> {
        let stop = self.clone();
        cancel::unless(move || stop.requested(), work)
    }

    /// burn-train's handle on the same request, for its dashboard.
    #[must_use]
    pub fn interrupter(&self) -> &Interrupter {
        &self.interrupter
    }
}

/// SIGINT, SIGTERM, and, unless `nohup` has turned it off, SIGHUP, which a closed terminal sends.
pub(crate) fn stop_signals() -> Vec<i32> {
    #[cfg(unix)]
    if !is_ignored(signal_hook::consts::SIGHUP) {
        return vec![SIGINT, SIGTERM, signal_hook::consts::SIGHUP];
    }
    vec![SIGINT, SIGTERM]
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "signal handlers are made with system calls")]
mod handler {
    use std::io;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, OnceLock};
    use std::time::{Duration, Instant};

    use signal_hook::consts::SIGABRT;
    use signal_hook::{SigId, low_level};

    use crate::util::terminal::{is_notebook, redraws};

    /// Milliseconds within which signals are one wish: `timeout` sends one to the process and one to its group.
    pub(super) const SAME_WISH: u64 = 500;

    static ADVICE: OnceLock<String> = OnceLock::new();

    /// What a signal is answered with. On a terminal it replaces the bar, and in a notebook a second signal does nothing.
    fn text_of_answer() -> &'static str {
        match (is_notebook(), redraws(&io::stderr())) {
            (true, _) => "stopping: a checkpoint is being saved, also after the cell has ended\n",
            (_, false) => "stopping; a second signal ends the run at once\n",
            (_, true) => "\r\x1b[Kstopping; a second signal ends the run at once\n",
        }
    }

    /// Lets a signal end the process while `ends` is set. Two signals may be handled by two threads at the same time: the
    /// terminal is given back here too, because the handler of the first may not have come to it yet.
    pub(super) fn end_if(signal: i32, ends: &Arc<AtomicBool>) -> io::Result<()> {
        let ends = ends.clone();
        // SAFETY: the action reads atomics and makes only system calls that are allowed in a handler.
        unsafe { low_level::register(signal, move || end_process_if(ends.load(Ordering::Relaxed))) }.map(drop)
    }

    /// Lets a signal end the process where the first one, of any kind, came [some time](SAME_WISH) before it.
    pub(super) fn end_at_second(signal: i32, first: &Arc<AtomicU64>, start: Instant) -> io::Result<SigId> {
        let first = first.clone();
        // SAFETY: as above; reading the clock is allowed there too.
        unsafe { low_level::register(signal, move || end_process_if(is_another(&first, start.elapsed()))) }
    }

    /// Whether a signal is another wish than the first, whose time in milliseconds is kept, from 1.
    pub(super) fn is_another(first: &AtomicU64, now: Duration) -> bool {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX).max(1);
        let first = first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        first.is_err_and(|first| now - first.min(now) >= SAME_WISH)
    }

    fn end_process_if(ends: bool) {
        if ends {
            crate::measure::metrics::give_terminal_back();
            low_level::exit(i32::from(super::EXIT_INTERRUPTED));
        }
    }

    /// Answers a signal while `answers` is set.
    pub(super) fn answer(signal: i32, answers: &Arc<AtomicBool>) -> io::Result<()> {
        let (answers, text) = (answers.clone(), text_of_answer());
        let say = move || {
            if answers.swap(false, Ordering::Relaxed) {
                write(text);
            }
        };
        // SAFETY: the action makes one system call that is allowed in a handler, and changes a flag.
        unsafe { low_level::register(signal, say) }.map(drop)
    }

    pub(super) fn on_abort(advice: &str) {
        if ADVICE.set(format!("error: if this was for want of memory: {advice}\n")).is_ok() {
            // SAFETY: the action reads a value that is set once, and makes only system calls that are allowed in a
            // handler. If registering it fails, the process ends by the signal, as it would without the action.
            let _ = unsafe { low_level::register(SIGABRT, || end()) };
        }
    }

    /// Runs in the signal handler.
    fn end() -> ! {
        // Text on the dashboard's screen would be lost with that screen.
        crate::measure::metrics::give_terminal_back();
        if let Some(advice) = ADVICE.get() {
            write(advice);
        }
        low_level::exit(1)
    }

    fn write(text: &str) {
        // SAFETY: a system call on memory that stays valid. If standard error is closed, the message is lost.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "signal handlers are asked for with system calls")]
fn is_ignored(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: with a null pointer for the new action, nothing is changed. `action` outlives the call, which fills it
    // where it returns 0.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interrupter_and_the_flag_are_one_wish_for_all_clones() {
        let stop = Stop::default();
        let clone = stop.clone();
        assert!(!clone.requested());
        stop.interrupter().stop(Some("q was pressed"));
        assert!(clone.requested());
        let stop = Stop::default();
        stop.signal.store(true, Ordering::Relaxed);
        assert!(stop.clone().requested());
    }

    #[cfg(unix)]
    #[test]
    fn signals_within_half_a_second_of_the_first_are_one_wish() {
        let first = std::sync::atomic::AtomicU64::new(0);
        let seen =
            [0, 0, 20, 499, 501, 502].map(|ms| handler::is_another(&first, std::time::Duration::from_millis(ms)));
        assert_eq!(seen, [false, false, false, false, true, true]);
    }
}
