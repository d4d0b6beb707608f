//! Training in a notebook, where stopping a cell kills its process half a second later.
//!
//! The kernel sends SIGINT, waits for 0.2 s, and then sends SIGHUP, SIGCONT, SIGINT and SIGKILL within 0.4 s: too soon for a
//! checkpoint of any but the smallest models. So the process of the cell only waits here, and a child with a session of its
//! own trains. The first signal is handed on to it, and it notices if the process of the cell is gone.

use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGTERM;
use signal_hook::low_level;

use crate::train::stop::stop_signals;

/// Goes on in a child of this process, which is asked to stop when this process is, or is gone. This process waits for
/// it, and ends as it does. Call it while the process has one thread.
///
/// # Errors
/// No child can be made: this process goes on as it was.
#[expect(unsafe_code, reason = "a process is divided with system calls")]
pub(super) fn continue_in_child() -> io::Result<()> {
    let (life, held) = io::pipe()?;
    // SAFETY: this process has one thread, whose state the child takes over whole.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(held);
            // SAFETY: a system call without arguments; a new child leads no group, so it does not fail.
            unsafe { libc::setsid() };
            std::thread::Builder::new().name("cell".into()).spawn(move || stop_after(life)).map(drop)
        }
        child => wait_for(child, held),
    }
}

/// Asks this process to stop once the other end of the pipe is closed.
fn stop_after(mut life: PipeReader) {
    // Nothing is ever written.
    let _ = life.read(&mut [0]);
    // If it cannot be asked, it trains on.
    let _ = low_level::raise(SIGTERM);
}

#[expect(unsafe_code, reason = "signals and children are matters of system calls")]
fn wait_for(child: libc::pid_t, held: PipeWriter) -> ! {
    let is_sent = Arc::new(AtomicBool::new(false));
    for signal in stop_signals() {
        let is_sent = Arc::clone(&is_sent);
        let hand_on = move || {
            if !is_sent.swap(true, Ordering::Relaxed) {
                // SAFETY: a system call on numbers; the child is waited for, so its number is nobody else's.
                unsafe { libc::kill(child, signal) };
            }
        };
        // SAFETY: the action changes a flag and makes one system call, both allowed in a handler. Without it the signal ends
        // this process, which the child notices.
        let _ = unsafe { low_level::register(signal, hand_on) };
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call, which fills it.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    drop(held);
    let code = if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        let signal = libc::WTERMSIG(status);
        // With standard error closed there is nobody to tell.
        drop(writeln!(
            io::stderr(),
            "error: signal {signal} ended the training{}\n  hint: after a checkpoint, `--resume` continues",
            if signal == libc::SIGKILL { ", as the system does where memory runs out" } else { "" }
        ));
        1
    };
    low_level::exit(code)
}
