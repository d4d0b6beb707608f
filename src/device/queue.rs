//! The device as the loop sees it: work that can be waited for, and pools that say what they hold.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::OpenDevice;

/// Names the bytes that the pools of a stand-in for a GPU hold, as `700,300`: each time they are asked the next figure, over
/// and over. Where it is set, the loop takes the CPU for a device that is not waited for, which is how the path from there
/// to the files is tested.
pub const STAND_IN_VARIABLE: &str = "LORA_TRAIN_STAND_IN_POOLS";

/// Bytes that the backend's own pools hold on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInUse {
    /// Live tensors.
    pub allocated_bytes: u64,
    /// Live tensors, padding and what is kept for reuse.
    pub reserved_bytes: u64,
}

/// What stands in for a GPU's pools.
#[derive(Debug)]
pub(super) struct StandIn {
    pools: Vec<u64>,
    num_asked: AtomicUsize,
}

impl StandIn {
    /// That of [`STAND_IN_VARIABLE`].
    pub(super) fn from_environment() -> Option<Self> {
        let pools = std::env::var(STAND_IN_VARIABLE).ok()?;
        Some(Self::new(pools.split(',').filter_map(|bytes| bytes.trim().parse().ok()).collect()))
    }

    fn new(pools: Vec<u64>) -> Self {
        Self { pools, num_asked: AtomicUsize::new(0) }
    }

    fn memory_in_use(&self) -> Option<MemoryInUse> {
        let asked = self.num_asked.fetch_add(1, Ordering::Relaxed);
        let allocated_bytes = *self.pools.get(asked % self.pools.len().max(1))?;
        Some(MemoryInUse { allocated_bytes, reserved_bytes: self.pools.iter().copied().max()? })
    }
}

impl OpenDevice {
    /// Whether work is only handed over, and done when the device comes to it: [`wait`](Self::wait) knows when. The CPU is
    /// done when a call returns.
    #[must_use]
    pub fn is_asynchronous(&self) -> bool {
        self.is_gpu() || self.stand_in.is_some()
    }

    /// Waits until all that was handed over is done; returns at once on a device that computes within the call.
    pub fn wait(&self) {
        if self.is_gpu() {
            // Work that failed fails again where its result is read, with a way to tell of it.
            drop(self.device.sync());
        }
    }

    /// What the backend's pools hold, by what has been handed over; `None` where the backend does not say (the CPU, which is
    /// not asked).
    #[must_use]
    pub fn memory_in_use(&self) -> Option<MemoryInUse> {
        if let Some(stand_in) = &self.stand_in {
            return stand_in.memory_in_use();
        }
        let usage = if self.is_gpu() { self.device.memory_pool_usage() } else { None }?;
        Some(MemoryInUse { allocated_bytes: usage.bytes_in_use, reserved_bytes: usage.bytes_reserved })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stand_in_for_a_gpu_is_not_waited_for_and_its_pools_hold_what_it_was_told() {
        let mut device = crate::device::open("cpu").unwrap();
        assert!(!device.is_asynchronous() && device.memory_in_use().is_none());
        device.stand_in = Some(StandIn::new(vec![700, 300]));
        assert!(device.is_asynchronous() && !device.is_gpu());
        let asked: Vec<u64> = (0..3).map(|_| device.memory_in_use().unwrap().allocated_bytes).collect();
        assert_eq!((asked, device.memory_in_use().unwrap().reserved_bytes), (vec![700, 300, 700], 700));
        device.stand_in = Some(StandIn::new(Vec::new()));
        assert!(device.is_asynchronous() && device.memory_in_use().is_none(), "pools of which nothing is known");
    }
}
