//! The device as the loop sees it: work that can be waited for, and pools that say what they hold.

use super::OpenDevice;

/// Bytes that the backend's own pools hold on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInUse {
    /// Live tensors.
    pub allocated_bytes: u64,
    /// Live tensors, padding and what is kept for reuse.
    pub reserved_bytes: u64,
}

impl OpenDevice {
    /// Waits until all that was handed over is done; returns at once on the CPU, which computes within the call.
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
        let usage = if self.is_gpu() { self.device.memory_pool_usage() } else { None }?;
        Some(MemoryInUse { allocated_bytes: usage.bytes_in_use, reserved_bytes: usage.bytes_reserved })
    }
}
