//! Matrices as the kernels and cuBLASLt take them.

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use half::bf16;

/// Numbers of `bf16` in 16 bytes, which are copied at a time.
const ALIGNMENT: usize = 8;

/// A matrix of `bf16` whose rows begin at multiples of 16 bytes.
pub(super) fn rows(x: CubeTensor) -> CubeTensor {
    let offset = x.handle.offset_start.unwrap_or(0);
    let is_aligned = x.meta.strides()[1] == 1
        && stride(&x).is_multiple_of(ALIGNMENT)
        && offset.is_multiple_of((ALIGNMENT * size_of::<bf16>()) as u64);
    if is_aligned { x } else { into_contiguous(x) }
}

/// Numbers from a row to the next.
pub(super) fn stride(x: &CubeTensor) -> usize {
    x.meta.strides()[0]
}
