//! The device as the training loop sees it: its work can be waited for, and its memory pools report what they hold.

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
    /// Waits until all work handed over is done. Returns at once on the CPU, which computes within the call.
    pub fn wait(&self) {
        if self.is_gpu() {
            // Failed work fails again where its result is read, and that call can report the error.
            drop(self.device.sync());
        }
    }

    /// What the backend's pools hold, counting the work handed over so far; `None` if the backend does not report it
    /// (the CPU is not asked).
    #[must_use]
    pub fn memory_in_use(&self) -> Option<MemoryInUse> {
        let usage = if self.is_gpu() { self.device.memory_pool_usage() } else { None }?;
        Some(MemoryInUse { allocated_bytes: usage.bytes_in_use, reserved_bytes: usage.bytes_reserved })
    }
}
