//! The terminal under the dashboard: what must work even when the dashboard does not get to end by itself.
//!
//! - Ctrl-C sends SIGINT again, which raw mode turns off and burn-train's dashboard does not answer.
//! - SIGINT and SIGTERM give the terminal back at once: training still finishes its micro-batch and saves, and a
//!   second signal, which ends the process, must not leave raw mode behind.
//! - The message of a panic is not drawn over.

use std::panic::{set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// The dashboard draws on stdout.
static IS_OPEN: AtomicBool = AtomicBool::new(false);

/// The terminal while the dashboard has it. Dropping it does not give it back, which the dashboard does by itself.
pub(super) struct Terminal {
    #[cfg(unix)]
    signals: Vec<signal_hook::SigId>,
}

impl Terminal {
    /// Prepares the terminal; before the dashboard starts.
    pub(super) fn prepare() -> Self {
        silence_panics();
        #[cfg(unix)]
        unix::remember_settings();
        IS_OPEN.store(true, Ordering::Relaxed);
        Self {
            #[cfg(unix)]
            signals: unix::give_back_on_signals(),
        }
    }
}

/// Waits for the dashboard's thread to set raw mode, then lets Ctrl-C through.
pub(super) fn keep_ctrl_c() {
    #[cfg(unix)]
    unix::keep_ctrl_c();
}

impl Drop for Terminal {
    fn drop(&mut self) {
        IS_OPEN.store(false, Ordering::Relaxed);
        #[cfg(unix)]
        for id in self.signals.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// Silences the dashboard when a panic is about to be printed. burn-train's hook has given the terminal back by then,
/// but its thread would draw over the message.
fn silence_panics() {
    static INSTALL: Once = Once::new();
    // The dashboard puts its hook around the one that it finds: this one, which hence runs after it.
    INSTALL.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if IS_OPEN.swap(false, Ordering::Relaxed) {
                #[cfg(unix)]
                unix::silence_stdout();
            }
            print(panic);
        }));
    });
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "the terminal is given back in a signal handler, by system calls")]
mod unix {
    use std::mem::MaybeUninit;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use signal_hook::SigId;
    use signal_hook::consts::{SIGINT, SIGTERM};

    /// Settings of the terminal before the dashboard.
    static BEFORE: OnceLock<libc::termios> = OnceLock::new();

    /// No mouse reports (all four kinds that crossterm asks for), the normal screen, a cursor.
    const LEAVE: &[u8] = b"\x1b[?1006l\x1b[?1015l\x1b[?1003l\x1b[?1002l\x1b[?1000l\x1b[?1049l\x1b[?25h";

    pub(super) fn remember_settings() {
        if let Some(settings) = settings() {
            BEFORE.get_or_init(|| settings);
        }
    }

    pub(super) fn give_back_on_signals() -> Vec<SigId> {
        // SAFETY: the action makes only system calls that may be made in a signal handler (tcsetattr, write, open,
        // dup2, close) and reads atomics.
        let register = |signal| unsafe { signal_hook::low_level::register(signal, give_back) };
        // Where a handler is refused, the dashboard works all the same.
        [SIGINT, SIGTERM].into_iter().filter_map(|signal| register(signal).ok()).collect()
    }

    /// Runs in a signal handler.
    fn give_back() {
        if !super::IS_OPEN.swap(false, Ordering::Relaxed) {
            return;
        }
        // SAFETY: plain system calls on constants and on a value that is set once.
        unsafe {
            if let Some(before) = BEFORE.get() {
                libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, before);
            }
            libc::write(libc::STDOUT_FILENO, LEAVE.as_ptr().cast(), LEAVE.len());
        }
        silence_stdout();
    }

    /// Sends what is written to stdout from now on nowhere. May be called in a signal handler.
    pub(super) fn silence_stdout() {
        // SAFETY: plain system calls on file descriptors; where the first fails, the others are not made.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
            if null >= 0 {
                libc::dup2(null, libc::STDOUT_FILENO);
                libc::close(null);
            }
        }
    }

    pub(super) fn keep_ctrl_c() {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(1) {
            let Some(mut settings) = settings() else { return };
            if settings.c_lflag & libc::ICANON == 0 {
                settings.c_lflag |= libc::ISIG;
                // SAFETY: `settings` is what the terminal gave, with one flag set.
                unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const settings) };
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn settings() -> Option<libc::termios> {
        let mut settings = MaybeUninit::uninit();
        // SAFETY: `settings` outlives the call, which fills it where it returns 0.
        unsafe {
            match libc::tcgetattr(libc::STDIN_FILENO, settings.as_mut_ptr()) {
                0 => Some(settings.assume_init()),
                _ => None,
            }
        }
    }
}
