//! The terminal under the dashboard: what must work even if the dashboard does not end normally.
//!
//! - Ctrl-C sends SIGINT, which raw mode turns off.
//! - SIGINT and SIGTERM give the terminal back at once: training still finishes its micro-batch and saves, and a
//!   second signal, which ends the process, must not leave raw mode behind.
//! - Ctrl-Z and Ctrl-\, which would leave the shell in raw mode, are keys like others.
//! - An uncaught panic gives it back before its message is printed, so that no drawing covers the message.
//! - An abort gives it back too: a process ends that way when the system refuses it memory.

use std::io::{self, Stdout, Write};
use std::panic::{set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::Frame;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};

/// Whether the dashboard draws on stdout.
static IS_OPEN: AtomicBool = AtomicBool::new(false);

/// The terminal while the dashboard has it.
pub(super) struct Terminal {
    drawn_on: ratatui::Terminal<CrosstermBackend<Stdout>>,
    #[cfg(unix)]
    signals: Vec<signal_hook::SigId>,
}

/// Whether the dashboard still has the terminal: a signal or a panic takes it away.
pub(super) fn is_open() -> bool {
    IS_OPEN.load(Ordering::Relaxed)
}

impl Terminal {
    /// Takes the terminal over: its alternate screen, without echo.
    pub(super) fn take() -> io::Result<Self> {
        give_back_on_panic();
        #[cfg(unix)]
        unix::remember_settings();
        enable_raw_mode()?;
        #[cfg(unix)]
        unix::keep_ctrl_c();
        // From here on the terminal must be given back, whatever happens.
        IS_OPEN.store(true, Ordering::Relaxed);
        let drawn_on = execute!(io::stdout(), EnterAlternateScreen)
            .and_then(|()| ratatui::Terminal::new(CrosstermBackend::new(io::stdout())))
            .inspect_err(|_| leave())?;
        Ok(Self {
            drawn_on,
            #[cfg(unix)]
            signals: unix::give_back_on_signals(),
        })
    }

    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.drawn_on.draw(draw).map(|_| ())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        leave();
        #[cfg(unix)]
        for id in self.signals.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// Restores the normal screen, the cursor and echo, once.
fn leave() {
    if IS_OPEN.swap(false, Ordering::Relaxed) {
        // If the terminal is gone, there is nothing to restore.
        drop(execute!(io::stdout(), LeaveAlternateScreen, ratatui::crossterm::cursor::Show));
        drop(io::stdout().flush());
        drop(disable_raw_mode());
    }
}

/// Gives the terminal back in a signal handler.
#[cfg(unix)]
pub(in crate::measure::metrics) fn give_back_in_handler() {
    unix::give_back();
}

/// Gives the terminal back before a panic is printed.
fn give_back_on_panic() {
    static INSTALL: Once = Once::new();
    crate::util::panics::install();
    INSTALL.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if crate::util::panics::is_printed(panic) {
                // A drawing in progress must not write over the message.
                #[cfg(unix)]
                unix::give_back();
                #[cfg(not(unix))]
                leave();
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

    use signal_hook::SigId;
    use signal_hook::consts::{SIGABRT, SIGINT, SIGTERM};

    /// Settings of the terminal before the dashboard.
    static BEFORE: OnceLock<libc::termios> = OnceLock::new();

    /// Switches to the normal screen and shows the cursor.
    const LEAVE: &[u8] = b"\x1b[?1049l\x1b[?25h";

    pub(super) fn remember_settings() {
        if let Some(settings) = settings() {
            BEFORE.get_or_init(|| settings);
        }
    }

    pub(super) fn give_back_on_signals() -> Vec<SigId> {
        // SAFETY: the action makes only system calls that may be made in a signal handler (tcsetattr, write, open,
        // dup2, close) and reads atomics.
        let register = |signal| unsafe { signal_hook::low_level::register(signal, give_back) };
        // If a handler is refused, the dashboard still works.
        [SIGINT, SIGTERM, SIGABRT].into_iter().filter_map(|signal| register(signal).ok()).collect()
    }

    /// Runs in a signal handler, or before a panic is printed.
    pub(super) fn give_back() {
        if !super::is_open() {
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
        // Last: who finds the terminal given back may end the process.
        super::IS_OPEN.store(false, Ordering::SeqCst);
    }

    /// Sends later output to stdout nowhere: a drawing in progress must not reach the normal screen. Training prints
    /// nothing there. May be called in a signal handler.
    fn silence_stdout() {
        // SAFETY: plain system calls on file descriptors; where the first fails, the others are not made.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
            if null >= 0 {
                libc::dup2(null, libc::STDOUT_FILENO);
                libc::close(null);
            }
        }
    }

    /// Lets Ctrl-C through raw mode, and no other key that sends a signal.
    pub(super) fn keep_ctrl_c() {
        let Some(mut settings) = settings() else { return };
        settings.c_lflag |= libc::ISIG;
        settings.c_cc[libc::VSUSP] = libc::_POSIX_VDISABLE;
        settings.c_cc[libc::VQUIT] = libc::_POSIX_VDISABLE;
        #[cfg(target_vendor = "apple")]
        {
            settings.c_cc[libc::VDSUSP] = libc::_POSIX_VDISABLE;
        }
        // SAFETY: `settings` is what the terminal gave, with one flag set and some keys turned off.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const settings) };
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
