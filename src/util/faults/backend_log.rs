//! The log of burn and CubeCL: its warnings and errors, each once, shown where our own warnings are.

use std::collections::HashSet;
use std::io::Write;
use std::sync::{LazyLock, Mutex};

use log::{LevelFilter, Log, Metadata, Record};

use super::{first, is_lasting, keep, lock};

/// Logs a panic in a task that nobody waits for, and a panic that was passed on, such as when tuning drops a kernel.
const TASKS: &str = "cubecl_common::device::handle::channel";
/// Logs a panic in an operation.
const OPERATIONS: &str = "burn_fusion::stream::queue::execution";
/// Logs every launch that is refused. Most are kernels that tuning tries and drops; any other is reported by the tensor
/// that it was to write.
const LAUNCHES: &str = "cubecl_runtime::logging::server";

struct BackendLog;

#[derive(Default)]
struct Warnings {
    /// Texts that were shown, without their digits: what differs only in a size or a count is a repetition.
    shown: HashSet<String>,
    /// Where a run shows its progress, warnings wait until it takes them.
    held: Option<Vec<String>>,
}

static WARNINGS: LazyLock<Mutex<Warnings>> = LazyLock::new(Mutex::default);

/// What our products by that library say.
pub(crate) const CUBLAS: &str = "cuBLASLt";

/// Shows warnings of the backend from now on, and keeps its faults.
pub fn install() {
    // Another logger is that of a program that uses this library.
    if log::set_logger(&BackendLog).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}

/// From now on warnings wait for [`take_held`].
pub fn hold() {
    lock(&WARNINGS).held.get_or_insert_default();
}

/// The warnings that have come since the last call.
#[must_use]
pub fn take_held() -> Vec<String> {
    lock(&WARNINGS).held.as_mut().map(std::mem::take).unwrap_or_default()
}

/// From now on warnings are printed; returns those that have waited.
#[must_use]
pub fn release() -> Vec<String> {
    lock(&WARNINGS).held.take().unwrap_or_default()
}

impl Log for BackendLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        target != LAUNCHES && ["burn", "cubecl", "cubek", CUBLAS].iter().any(|name| target.starts_with(name))
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = record.args().to_string();
        let target = record.target();
        if target.starts_with(TASKS) || target == OPERATIONS {
            lost_work(&text).into_iter().for_each(keep);
        } else if is_lasting(&text) {
            keep(&text);
        } else {
            warn(target, &text);
        }
    }

    fn flush(&self) {}
}

/// The message of a panic that was reported to nobody.
fn lost_work(text: &str) -> Option<&str> {
    if let Some(operation) = text.strip_prefix("an operation failed: ") {
        return operation.split("; the tensors it was going to write").next();
    }
    let task = text.strip_prefix("CallError(")?.strip_suffix(')')?;
    Some(task.strip_prefix("task panicked on device runner thread: ").unwrap_or(task))
}

fn warn(target: &str, text: &str) {
    // Whatever comes after a fault is its consequence.
    if first().is_some() {
        return;
    }
    let name = target.split("::").next().unwrap_or(target);
    // The other lines are a backtrace.
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let warning = format!("{name}: {line}");
    let mut warnings = lock(&WARNINGS);
    if !warnings.shown.insert(warning.chars().filter(|c| !c.is_ascii_digit()).collect()) {
        return;
    }
    match &mut warnings.held {
        Some(held) => held.push(warning),
        None => {
            // With stderr closed there is nobody to warn.
            let _ = writeln!(std::io::stderr().lock(), "warning: {warning}");
        }
    }
}
