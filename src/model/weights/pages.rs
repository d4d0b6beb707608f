//! Parts of memory-mapped files, and tensors over them.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{AllocationProperty, Bytes, DType, Device, Tensor, TensorData};
use memmap2::{Advice, Mmap, UncheckedAdvice};

use crate::device::Dtype;

/// A part of a memory-mapped file. Its pages are read when they are used, and can be released and read again.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

impl Pages {
    pub(super) fn new(map: &Arc<Mmap>, range: Range<usize>) -> Self {
        Self { map: Arc::clone(map), range }
    }

    /// Takes the first bytes off.
    pub(super) fn take(&mut self, len: usize) -> Self {
        let middle = self.range.start + len;
        let first = Self::new(&self.map, self.range.start..middle);
        self.range.start = middle;
        first
    }

    /// Whether its first byte is where numbers of `dtype` may start.
    pub(super) fn is_aligned(&self, dtype: Dtype) -> bool {
        self.as_ref().as_ptr().align_offset(dtype.num_bytes()) == 0
    }

    /// A tensor of these bytes, without a copy.
    pub(super) fn tensor<const D: usize>(self, shape: [usize; D], dtype: Dtype, device: &Device) -> Tensor<D> {
        of_bytes(self.shared(), shape, dtype, device)
    }

    /// These bytes, without a copy.
    pub(super) fn shared(self) -> Bytes {
        Bytes::from_shared(bytes::Bytes::from_owner(self), AllocationProperty::File)
    }

    /// Reads the pages, and returns when they are there.
    pub(crate) fn read(&self) {
        let advices = [
            Advice::WillNeed,
            #[cfg(target_os = "linux")]
            Advice::PopulateRead,
        ];
        for advice in advices {
            // Only advice: where the system refuses it, pages are read when they are used.
            drop(self.map.advise_range(advice, self.range.start, self.range.len()));
        }
    }

    /// Releases the pages to the system.
    #[expect(unsafe_code, reason = "pages of a mapping can only be released so")]
    pub(crate) fn release(&self) {
        // SAFETY: the mapping is of a file and read-only, so released pages come back with the same content.
        let released =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, self.range.start, self.range.len()) };
        // This is only advice: where the system refuses it, the pages stay until the mapping ends.
        drop(released);
    }
}

/// A tensor of these bytes, whose rows follow each other: of a matrix burn would make rows of a multiple of 512 bytes on CUDA.
pub(super) fn of_bytes<const D: usize>(bytes: Bytes, shape: [usize; D], dtype: Dtype, device: &Device) -> Tensor<D> {
    let dtype = DType::from(dtype);
    let data = TensorData::from_bytes(bytes, [shape.iter().product::<usize>()], dtype);
    Tensor::<1>::from_data(data, (device, dtype)).reshape(shape)
}
