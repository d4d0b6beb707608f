//! Matrices as the kernels and cuBLASLt take them.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use half::bf16;

/// Numbers of 16 bits in 16 bytes, which are copied at a time.
const ALIGNMENT: usize = 8;

/// A matrix of 16 bits whose rows begin at multiples of 16 bytes.
pub(super) fn rows(x: CubeTensor) -> CubeTensor {
    let is_aligned = x.meta.strides()[1] == 1
        && stride(&x).is_multiple_of(ALIGNMENT)
        && start(&x).is_multiple_of((ALIGNMENT * size_of::<bf16>()) as u64);
    if is_aligned { x } else { into_contiguous(x) }
}

/// Contiguous numbers of any shape that begin at a multiple of 16 bytes.
pub(super) fn aligned(x: CubeTensor) -> CubeTensor {
    let x = into_contiguous(x);
    if start(&x).is_multiple_of((ALIGNMENT * size_of::<bf16>()) as u64) { x } else { x.copy() }
}

/// Matrices of 16 bits whose rows begin at multiples of 16 bytes, and are as far from each other in all of them.
pub(super) fn rows_of_one_stride(matrices: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let matrices: Vec<_> = matrices.into_iter().map(rows).collect();
    let is_one = matrices.iter().all(|matrix| stride(matrix) == stride(&matrices[0]));
    if is_one { matrices } else { matrices.into_iter().map(aligned).collect() }
}

/// Numbers from a row to the next.
pub(super) fn stride(x: &CubeTensor) -> usize {
    x.meta.strides()[0]
}

pub(super) fn dims(x: &CubeTensor) -> [usize; 2] {
    let shape = x.meta.shape();
    [shape[0], shape[1]]
}

/// The one matrix whose columns are those of `parts`, where they lie side by side.
pub(super) fn side_by_side(parts: &[CubeTensor]) -> Option<CubeTensor> {
    together(parts, 1, |a, b| stride(a) == stride(b) && start(b) == start(a) + bytes(dims(a)[1], a))
}

/// The one matrix whose rows are those of `parts`, where they lie one below the other.
pub(super) fn stacked(parts: &[CubeTensor]) -> Option<CubeTensor> {
    together(parts, 0, |a, b| stride(a) == stride(b) && start(b) == start(a) + bytes(dims(a)[0] * stride(a), a))
}

/// The one matrix of parts in one memory, each of which `is_next` to the one before it, along `axis`.
fn together(
    parts: &[CubeTensor],
    axis: usize,
    is_next: impl Fn(&CubeTensor, &CubeTensor) -> bool,
) -> Option<CubeTensor> {
    let memory = |x: &CubeTensor| x.handle.memory.clone().binding();
    let is_in_one = |x: &CubeTensor, y: &CubeTensor| memory(x).descriptor() == memory(y).descriptor();
    if !parts.is_sorted_by(|a, b| is_in_one(a, b) && is_next(a, b)) {
        return None;
    }
    let mut whole = parts.first()?.clone();
    whole.handle.offset_end = parts.last()?.handle.offset_end;
    whole.meta.shape[axis] = parts.iter().map(|part| dims(part)[axis]).sum();
    Some(whole)
}

/// Rows of a contiguous matrix from `first` on, in its memory.
pub(super) fn rows_from(x: &CubeTensor, first: usize, count: usize) -> CubeTensor {
    let [rows, width] = dims(x);
    let mut part = x.clone();
    part.handle.offset_start = Some(start(x) + bytes(first * width, x));
    part.handle.offset_end = Some(x.handle.offset_end.unwrap_or(0) + bytes((rows - first - count) * width, x));
    part.meta.shape[0] = count;
    part
}

/// Where it starts in its memory, in bytes.
pub(super) fn start(x: &CubeTensor) -> u64 {
    x.handle.offset_start.unwrap_or(0)
}

fn bytes(numbers: usize, like: &CubeTensor) -> u64 {
    (numbers * like.dtype.size()) as u64
}

/// Memory on the device of `like`, without values.
pub(super) fn scratch(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}
