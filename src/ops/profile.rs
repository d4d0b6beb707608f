//! Where the time and the bytes of a step go, operation by operation.
//!
//! Profiling is on only in `bench --profile`. Off, it costs an operation one relaxed load. On, every operation is
//! between two waits for the device and so has its own time; a profiled step is slower than others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use serde::Serialize;

use crate::util::cancel;

/// The work of one call of an operation, in any implementation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// Sizes that tell calls of one operation apart, such as `576 -> 1536`.
    pub shape: String,
    /// Floating-point operations of its matrix products; 0 if it has none.
    pub flops: f64,
    /// Bytes of its operands and results, each counted once.
    pub bytes: f64,
}

impl Cost {
    /// The cost of several calls that are made as one.
    pub(super) fn sum(calls: impl Iterator<Item = Self>) -> Self {
        let add = |all: Self, one: Self| Self {
            shape: format!("{}, {}", all.shape, one.shape),
            flops: all.flops + one.flops,
            bytes: all.bytes + one.bytes,
        };
        calls.reduce(add).unwrap_or_default()
    }
}

/// All calls of one operation at one shape.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProfileRow {
    /// Name of the operation.
    pub operation: &'static str,
    /// As in [`Cost`].
    pub shape: String,
    /// Number of calls.
    pub calls: u64,
    /// Time of all calls.
    pub seconds: f64,
    /// Floating-point operations of all calls.
    pub flops: f64,
    /// Bytes of all calls.
    pub bytes: f64,
}

#[derive(Debug)]
struct Profile {
    device: Device,
    rows: BTreeMap<(&'static str, String), ProfileRow>,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static PROFILE: Mutex<Option<Profile>> = Mutex::new(None);

fn profile() -> MutexGuard<'static, Option<Profile>> {
    PROFILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts the operations on `device` from now on.
pub fn start(device: &Device) {
    *profile() = Some(Profile { device: device.clone(), rows: BTreeMap::new() });
    IS_ON.store(true, Ordering::Relaxed);
}

/// Stops counting and returns what was counted since [`start`], the longest first.
#[must_use]
pub fn finish() -> Vec<ProfileRow> {
    IS_ON.store(false, Ordering::Relaxed);
    let mut rows: Vec<ProfileRow> =
        profile().take().map_or_else(Vec::new, |profile| profile.rows.into_values().collect());
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    rows
}

/// Runs an operation, unless its work is [given up](cancel) here, and counts it if a profile is being taken.
pub fn measure<R>(operation: &'static str, cost: impl FnOnce() -> Cost, work: impl FnOnce() -> R) -> R {
    cancel::check();
    if !IS_ON.load(Ordering::Relaxed) {
        return work();
    }
    let Cost { shape, flops, bytes } = cost();
    let device = profile().as_ref().map(|profile| profile.device.clone());
    // A device error is reported again where its numbers are read.
    let wait = || device.as_ref().map(Device::sync);
    // What comes from outside of any operation is not this one's.
    let _ = wait();
    let start = Instant::now();
    let result = work();
    let _ = wait();
    let seconds = start.elapsed().as_secs_f64();
    if let Some(profile) = profile().as_mut() {
        let row = profile.rows.entry((operation, shape.clone())).or_default();
        *row = ProfileRow {
            operation,
            shape,
            calls: row.calls + 1,
            seconds: row.seconds + seconds,
            flops: row.flops + flops,
            bytes: row.bytes + bytes,
        };
    }
    result
}

/// The cost of an operation that reads or writes `num_passes` tensors like `x`, `[tokens, width]`, element by element.
#[must_use]
pub fn passes(x: &Tensor<2>, num_passes: usize) -> Cost {
    Cost { shape: x.dims()[1].to_string(), flops: 0.0, bytes: count(num_passes) * bytes(x) }
}

/// Bytes of the elements of a tensor.
#[must_use]
pub fn bytes<const D: usize>(tensor: &Tensor<D>) -> f64 {
    count(tensor.dims().iter().product::<usize>() * tensor.dtype().size())
}

/// A count as a floating-point number.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts of operations need no more than 53 bits")]
pub fn count(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::linear::{Weight, linear};
    use crate::ops::place::place_on;
    use crate::ops::swiglu::gated;
    use crate::spec::Activation;

    #[test]
    fn a_profile_counts_calls_flops_and_bytes_between_its_start_and_its_end() {
        let device = Device::flex();
        let (x, w) = (Tensor::<2>::ones([5, 7], &device), Weight::new(Tensor::ones([3, 7], &device)));
        let run = || {
            let (y, _) = linear(place_on(DeviceKind::Cpu), &x, &w, None, None);
            gated(place_on(DeviceKind::Cpu), Activation::Silu, &y, &y)
        };
        let _ = run();
        start(&device);
        let _ = (run(), run());
        let rows = finish();
        let _ = run();
        assert!(finish().is_empty());
        // Other tests of this process may run operations meanwhile, but on other shapes.
        let row = rows.iter().find(|row| row.operation == "linear" && row.shape == "7 -> 3").unwrap();
        assert_eq!((row.calls, row.flops, row.bytes), (2, 2.0 * 210.0, 2.0 * 4.0 * (35.0 + 21.0 + 15.0)));
        assert!(row.seconds > 0.0);
        assert!(rows.iter().any(|row| row.operation == "swiglu" && row.flops == 0.0));
        assert!(rows.is_sorted_by(|a, b| a.seconds >= b.seconds));
    }
}
