//! Matrices as the kernels and cuBLASLt take them.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
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

pub(super) fn dims(x: &CubeTensor) -> [usize; 2] {
    let shape = x.meta.shape();
    [shape[0], shape[1]]
}

/// Memory on the device of `like`, without values.
pub(super) fn scratch(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}
