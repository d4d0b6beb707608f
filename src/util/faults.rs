//! Faults of a device: what its backend reports, and the one message with which a fault ends a command.
//!
//! CubeCL computes on threads of its own: `DSD-*` launches kernels, `DSU-*` fuses operations. A panic there loses the
//! current task, and CubeCL continues with the next task, which after a fault of the GPU panics too. So these panics
//! are not printed. The first panic that lost work is kept, and ends the command when the next tensor is read.

pub mod backend_log;

use std::any::Any;
use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{Int, Tensor};

/// What the backend said when it first lost work.
static FIRST: Mutex<Option<String>> = Mutex::new(None);

/// The last panic of a backend's thread. CubeCL may hand it on to the thread that waits for the task.
static UNPRINTED: Mutex<Option<String>> = Mutex::new(None);

/// Errors of CUDA after which nothing computes until the process ends, by the number that CubeCL may give instead.
const LASTING: [(&str, &str); 12] = [
    ("214", "CUDA_ERROR_ECC_UNCORRECTABLE"),
    ("700", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ("702", "CUDA_ERROR_LAUNCH_TIMEOUT"),
    ("709", "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    ("710", "CUDA_ERROR_ASSERT"),
    ("714", "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    ("715", "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    ("716", "CUDA_ERROR_MISALIGNED_ADDRESS"),
    ("717", "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    ("718", "CUDA_ERROR_INVALID_PC"),
    ("719", "CUDA_ERROR_LAUNCH_FAILED"),
    ("999", "CUDA_ERROR_UNKNOWN"),
];

/// A device no longer computes, or has no memory left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the GPU stopped: {}{}\n  hint: a run that has a checkpoint continues with `--resume`; if the GPU stops again, see \
     `lora-train doctor`, and the lines with `Xid` in `dmesg`",
    reason(said),
    read.as_ref().map(|what| format!(" (found when {what} was read)")).unwrap_or_default()
)]
pub struct Fault {
    /// The backend's words, often with a backtrace.
    said: String,
    /// The tensor that was read when the fault was found.
    read: Option<String>,
}

impl Fault {
    /// The fault that a panic of this thread stands for; `None` if the panic is about something else.
    ///
    /// After the first fault every panic follows from it.
    #[must_use]
    pub fn of_panic(panic: &(dyn Any + Send)) -> Option<Self> {
        if let Some(fault) = panic.downcast_ref::<Self>() {
            return Some(fault.clone());
        }
        let text = panic_text(panic);
        let is_about_device = is_about_device(text) || lock(&UNPRINTED).as_deref() == Some(text);
        let said = first().or_else(|| is_about_device.then(|| text.to_owned()))?;
        Some(Self { said, read: None })
    }

    /// Whether memory ran out, in the words of CubeCL, CUDA or wgpu.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        is_out_of_memory(&self.said)
    }
}

/// The numbers of a tensor, in host memory. `what` names it to people, in the singular.
///
/// # Panics
/// If it cannot be read, or if the device has lost work before, with a [`Fault`]; nothing is printed.
#[must_use]
pub fn read<const D: usize>(tensor: Tensor<D>, what: &str) -> Vec<f32> {
    checked(tensor.try_into_vec_as(), what)
}

/// The values of a tensor of bytes; `what` names it to people.
///
/// # Panics
/// As [`read`].
#[must_use]
pub fn read_bytes(tensor: Tensor<1, Int>, what: &str) -> Vec<u8> {
    checked(tensor.try_into_vec_as(), what)
}

/// The values of a tensor of integers; `what` names it to people.
///
/// # Panics
/// As [`read`].
#[must_use]
pub fn read_ints<const D: usize>(tensor: Tensor<D, Int>, what: &str) -> Vec<i32> {
    checked(tensor.try_into_vec_as(), what)
}

fn checked<T>(values: Result<Vec<T>, impl ToString>, what: &str) -> Vec<T> {
    match values {
        // What was read may be what the memory held before the work that was lost.
        Ok(values) if first().is_none() => values,
        Ok(_) => throw("", what),
        Err(error) => throw(&error.to_string(), what),
    }
}

/// Ends the command since `what` cannot be read: `said` is the error, and the first fault, if there was one, its cause.
///
/// # Panics
/// Always, with a [`Fault`]; nothing is printed.
pub fn throw(said: &str, what: &str) -> ! {
    let said = first().unwrap_or_else(|| said.to_owned());
    resume_unwind(Box::new(Fault { said, read: Some(what.to_owned()) }))
}

/// Keeps the first fault.
fn keep(said: &str) {
    lock(&FIRST).get_or_insert_with(|| said.to_owned());
}

fn first() -> Option<String> {
    lock(&FIRST).clone()
}

/// Forgets the first fault, and says what it was in one line: for a device that is not used after all.
#[must_use]
pub fn take() -> Option<String> {
    lock(&FIRST).take().map(|said| reason(&said))
}

/// Whether a panic of this thread is to be printed; its message is kept otherwise. A panic of a backend's thread, or
/// one that is about the device, ends a command with a [`Fault`] if it ends anything.
pub(crate) fn is_printed(thread: Option<&str>, text: &str) -> bool {
    if thread.is_some_and(|name| name.starts_with("DSD-") || name.starts_with("DSU-")) {
        *lock(&UNPRINTED) = Some(text.to_owned());
        return false;
    }
    !is_about_device(text) && first().is_none()
}

/// The message of a panic, empty where it has none.
#[must_use]
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or_default()
}

fn is_about_device(text: &str) -> bool {
    is_out_of_memory(text) || is_lasting(text) || cuda_error(text).is_some()
}

/// Whether the device computes nothing more.
pub(crate) fn is_lasting(text: &str) -> bool {
    let is_named = cuda_error(text).is_some_and(|name| LASTING.iter().any(|(_, lasting)| *lasting == name));
    is_named || numbered_error(text).is_some()
}

/// Whether a device's memory ran out, in the words of any backend.
pub(crate) fn is_out_of_memory(text: &str) -> bool {
    let text = text.to_lowercase();
    // The last: a tensor larger than any buffer of the device, which a smaller step need not make.
    [
        "out of memory", "out of device memory", "out-of-memory", "outofmemory", "out_of_memory",
        "can't allocate buffer of size",
    ]
    .iter()
    .any(|words| text.contains(words))
}

/// The backend's words in short: CUDA's error, or the last cause.
pub(crate) fn reason(said: &str) -> String {
    if let Some(name) = cuda_error(said) {
        let after = said.split_once(name).map_or("", |(_, after)| after);
        // As cudarc shows it: `CUDA_ERROR_X, "its meaning"`, with a backslash where that is quoted once more.
        let meaning = after.strip_prefix(", \"").or_else(|| after.strip_prefix(", \\\""));
        let meaning = meaning.and_then(|meaning| meaning.split(['\\', '"']).next());
        return meaning.map_or_else(|| name.to_owned(), |meaning| format!("{name}, {meaning}"));
    }
    let cause = said.rsplit_once("Caused by:").map_or(said, |(_, cause)| cause);
    let line = cause.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason was given");
    numbered_error(line).map_or_else(|| line.to_owned(), |name| format!("{name} ({line})"))
}

/// The first name of a CUDA error in a text.
fn cuda_error(text: &str) -> Option<&str> {
    let name = &text[text.find("CUDA_ERROR_")?..];
    let end = name.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
    Some(&name[..end.unwrap_or(name.len())])
}

/// The name of a lasting error that a text gives by number, as in `cuStreamSynchronize failed with status 700`.
fn numbered_error(text: &str) -> Option<&'static str> {
    let (_, after) = text.split_once("failed with status ")?;
    let number = after.split(|c: char| !c.is_ascii_digit()).next()?;
    LASTING.iter().find(|(status, _)| *status == number).map(|(_, name)| *name)
}

/// After a panic while one of these was locked, it is still whole: each change is one assignment.
fn lock<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(said: &str) -> Fault {
        Fault { said: said.into(), read: None }
    }

    #[test]
    fn the_message_names_the_error_of_cuda_wherever_the_backend_has_it() {
        for (said, expected) in [
            // A panic after a fault, a launch that was refused, and the same inside of another error's text.
            (
                "called `Result::unwrap()` on an `Err` value: DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal \
                 memory access was encountered\")",
                "CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered",
            ),
            (
                "An error happened during execution\nCaused by:\n  The bytes were never written (failure #3, still \
                 claiming 2 buffer(s))\n  skipped ElemwiseFuse\nCaused by:\n  A launch error happened\nCaused by:\n  An \
                 unknown error happened during launch\nCaused by:\n  DriverError(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, \
                 \"too many resources requested for launch\")\nBacktrace\n   0: x",
                "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, too many resources requested for launch",
            ),
            (
                "WithContext { reason: \"DriverError(CUDA_ERROR_ASSERT, \\\"device-side assert triggered\\\")\\n\" }",
                "CUDA_ERROR_ASSERT, device-side assert triggered",
            ),
            // A fault that a wait found.
            (
                "The device is poisoned\nCaused by:\n  cuEventSynchronize failed with status 719\nBacktrace:\n  0: x",
                "CUDA_ERROR_LAUNCH_FAILED (cuEventSynchronize failed with status 719)",
            ),
            // No error of CUDA.
            ("Should run when selected by autotune.: \n  more", "Should run when selected by autotune.:"),
            ("a\nCaused by:\n  b\nCaused by:\n  c\nBacktrace\n  d", "c"),
            ("", "no reason was given"),
        ] {
            let text = fault(said).to_string();
            assert!(text.starts_with(&format!("the GPU stopped: {expected}\n  hint: ")), "{text}");
            assert!(text.ends_with("in `dmesg`") && text.lines().count() == 2, "{text}");
        }
    }

    #[test]
    fn memory_that_ran_out_is_recognised_in_the_words_of_every_backend() {
        for said in [
            "An IO error happened\nCaused by:\n  out of device memory allocating 1048576 bytes",
            "An out-of-memory error happened during launch\nCaused by:\n  x",
            "called `Result::unwrap()` on an `Err` value: OutOfMemory { size: 5 }",
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
            "An IO error happened\nCaused by:\n  can't allocate buffer of size: 402653184",
        ] {
            assert!(fault(said).is_out_of_memory() && !is_lasting(said), "{said}");
            assert_eq!(Fault::of_panic(&said.to_owned()), Some(fault(said)));
            assert!(!is_printed(Some("main"), said), "{said}");
        }
        assert!(!fault("cuEventSynchronize failed with status 700").is_out_of_memory());
    }

    #[test]
    fn a_panic_of_our_own_is_no_fault() {
        let own = "index out of bounds: the len is 3 but the index is 700";
        assert_eq!(Fault::of_panic(&own.to_owned()), None);
        assert!(is_printed(Some("main"), own) && is_printed(None, own));
        // What a thread of the backend hands on is one, whatever it says.
        assert!(!is_printed(Some("DSU-0-0"), own));
        assert_eq!(Fault::of_panic(&own.to_owned()), Some(fault(own)));
    }
}
