//! The wish to stop: SIGINT, SIGTERM, or the dashboard's quit key.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_train::Interrupter;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Exit code of a run that was stopped by a signal.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Whether somebody wants the run to stop. Clones share one wish.
///
/// The loop looks at it between micro-batches; nothing else happens in the signal handler than setting a flag.
#[derive(Clone, Default)]
pub struct Stop {
    signal: Arc<AtomicBool>,
    interrupter: Interrupter,
}

impl Stop {
    /// Listens to SIGINT and SIGTERM from now on. The first one is a wish; a second one ends the process at once.
    ///
    /// # Errors
    ///
    /// Where the operating system refuses the handlers.
    pub fn on_signals() -> io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: at the second signal the flag is set already, and the first handler ends the process.
            flag::register_conditional_shutdown(signal, i32::from(EXIT_INTERRUPTED), stop.signal.clone())?;
            flag::register(signal, stop.signal.clone())?;
        }
        Ok(stop)
    }

    /// Whether to stop.
    #[must_use]
    pub fn requested(&self) -> bool {
        self.signal.load(Ordering::Relaxed) || self.interrupter.should_stop()
    }

    /// burn-train's handle on the same wish, for its dashboard.
    #[must_use]
    pub fn interrupter(&self) -> &Interrupter {
        &self.interrupter
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
}
