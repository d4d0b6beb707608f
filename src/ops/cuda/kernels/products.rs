//! Matrix products by cuBLASLt, on burn's stream. It is loaded where it lies, and not shipped; without it, burn's products remain. What
//! it refuses a kernel of ours computes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;

use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{DriverError, result as driver};

use super::matrix::{dims, start, stride};
use super::stream::{Failure, Loaded, major, submit};
use crate::ops::cuda::table::Kernel;
use crate::ops::cuda::{WORKSPACE_BYTES, check};
use crate::ops::custom::{custom, device_of, spec};
use crate::util::faults::backend_log::CUBLAS;

/// `CUBLAS_OP_N`.
const AS_IT_IS: i32 = 0;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// What pointers and rows are multiples of.
const ALIGNMENT_BYTES: u32 = 16;

/// The kernel for what the library refuses, its threads, and rows and columns of a block's results.
const KERNEL: &str = "product";
const THREADS: u32 = 256;
const TILE: usize = 64;

/// Whether the library computes on this GPU.
///
/// # Errors
/// If it cannot be loaded, or has no handle to give.
pub(super) fn check(gpu: u16) -> Result<(), String> {
    crate::device::cublas_library()?;
    let of_driver = |error: DriverError| format!("cuBLASLt: {error:?}");
    let device = driver::device::get(gpu.into()).map_err(of_driver)?;
    // SAFETY: `device` comes from cuDeviceGet, and burn holds its primary context as well; the handle is used no more.
    unsafe {
        let context = driver::primary_ctx::retain(device).map_err(of_driver)?;
        driver::ctx::set_current(context).map_err(of_driver)?;
        let made = lt::create_handle().and_then(|handle| lt::destroy_handle(handle));
        driver::ctx::set_current(std::ptr::null_mut()).map_err(of_driver)?;
        driver::primary_ctx::release(device).map_err(of_driver)?;
        made.map_err(|error| Failure::from(error).0)
    }
}

/// How the frozen matrix `[out_features, in_features]` is multiplied.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// `x W^T`
    Forward,
    /// `dy W`
    Backward,
}

/// Multiplies a matrix of 16 bits with a frozen one, with aligned rows, into `y`, which may be `sum`.
pub(super) fn multiply(way: Way, x: &CubeTensor, weight: &CubeTensor, sum: Option<&CubeTensor>, y: &CubeTensor) {
    let is_transposed = matches!(way, Way::Forward);
    let matrices = [weight, x, sum.unwrap_or(y), y].map(Stored::new);
    Product::of_frozen([kind(x.dtype); 2], [is_transposed, false], matrices).submit(&[weight, x], sum, y);
}

fn kind(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// A matrix of E4M3 numbers by rows.
pub(super) struct EightBits {
    pub(super) codes: CubeTensor,
    /// Rows and columns.
    pub(super) dims: [usize; 2],
    /// What 1 stands for, one number in `f32`.
    pub(super) scale: CubeTensor,
}

/// `x W^T` in `bf16`, with aligned rows, into `y`, which may be `sum`: the only way in which all GPUs multiply eight bits. `W` is
/// transposed where it is [`Way::Backward`].
pub(super) fn multiply_eight_bits(
    way: Way,
    weight: &EightBits,
    x: &EightBits,
    sum: Option<&CubeTensor>,
    y: &CubeTensor,
) {
    let stored = |EightBits { dims, .. }: &EightBits| Stored { dims: *dims, stride: dims[1], apart: 0 };
    let matrices = [stored(weight), stored(x), Stored::new(sum.unwrap_or(y)), Stored::new(y)];
    let product = Product::of_frozen([sys::cudaDataType::CUDA_R_8F_E4M3, kind(y.dtype)], [true, false], matrices);
    let product = Product { is_fast: matches!(way, Way::Forward), ..product };
    product.submit(&[&weight.codes, &x.codes, &weight.scale, &x.scale], sum, y);
}

/// The product of two matrices, or of batches of them, by cuBLASLt; `None` where it does not multiply.
pub(in crate::ops) fn matmul<const D: usize>(lhs: &Tensor<D>, rhs: &Tensor<D>) -> Option<Tensor<D>> {
    let is_taken = |x: &Tensor<D>| {
        let is_float = matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16);
        is_float
            && x.dims().iter().all(|size| *size > 0)
            && matches!(device_of(&x.clone().into_dispatch()), Some(CubeDevice::Cuda(_)))
    };
    let is_used =
        check::is_decided_on(Kernel::Products) && is_taken(lhs) && is_taken(rhs) && lhs.dtype() == rhs.dtype();
    is_used.then(|| batches(lhs, rhs))
}

/// The product of two matrices of one type, or of batches of them as burn multiplies them, in that type, with sums in `f32`.
/// Operands in `f32` are rounded to TF32 on tensor cores that have it, as burn's products do.
fn batches<const D: usize>(lhs: &Tensor<D>, rhs: &Tensor<D>) -> Tensor<D> {
    let mut shape = lhs.dims();
    shape[D - 1] = rhs.dims()[D - 1];
    let (mut of_lhs, mut of_rhs) = (lhs.dims(), rhs.dims());
    for axis in 0..D - 2 {
        shape[axis] = shape[axis].max(of_rhs[axis]);
        (of_lhs[axis], of_rhs[axis]) = (shape[axis], shape[axis]);
    }
    let grown = |x: &Tensor<D>, dims| if x.dims() == dims { x.clone() } else { x.clone().expand(dims) };
    let inputs = [grown(lhs, of_lhs), grown(rhs, of_rhs)].map(Tensor::into_dispatch);
    let run = |inputs: [CubeTensor; 2], [y]: &[CubeTensor; 1]| {
        let [(lhs, of_lhs, is_lhs_turned), (rhs, of_rhs, is_rhs_turned)] = inputs.map(stored);
        let (_, of_y, _) = stored(y.clone());
        let is_aligned = |x: &CubeTensor, stored: Stored| {
            let bytes = |numbers: usize| (numbers * x.dtype.size()) as u64;
            let places = [start(x), bytes(stored.stride), bytes(stored.apart)];
            places.iter().all(|at| at.is_multiple_of(ALIGNMENT_BYTES.into()))
        };
        let are_aligned = is_aligned(&lhs, of_lhs) && is_aligned(&rhs, of_rhs) && is_aligned(y, of_y);
        let (is_f32, has_tf32) = (y.dtype == DType::F32, major(y.client.service_id().device.index_id) >= 8);
        let product = Product {
            kinds: [kind(y.dtype); 2],
            // By columns, the factors change places.
            is_transposed: [is_rhs_turned, is_lhs_turned],
            matrices: [of_rhs, of_lhs, of_y, of_y],
            batch: y.meta.shape()[..D - 2].iter().product(),
            alignment_bytes: match (are_aligned, is_f32) {
                (true, _) => ALIGNMENT_BYTES,
                (false, true) => 4,
                (false, false) => 2,
            },
            compute: if is_f32 && has_tf32 {
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
            } else {
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F
            },
            is_fast: false,
        };
        product.submit(&[&rhs, &lhs], None, y);
    };
    let [y] = custom("matmul", inputs, [spec(lhs.dtype(), shape)], run);
    Tensor::from_dispatch(y)
}

/// How a matrix, or each of a batch, lies in memory by rows, and whether it is the transpose of what lies there. It is copied
/// where it does not.
fn stored(x: CubeTensor) -> (CubeTensor, Stored, bool) {
    let of = |x: &CubeTensor| {
        let (shape, strides) = (x.meta.shape(), x.meta.strides());
        let at = shape.len() - 2;
        let mut apart = 0;
        let mut num = 1;
        for axis in (0..at).rev().filter(|axis| shape[*axis] > 1) {
            if num == 1 {
                apart = strides[axis];
            } else if strides[axis] != apart * num {
                return None;
            }
            num *= shape[axis];
        }
        let by_rows = |[rows, columns]: [usize; 2], [row, column]: [usize; 2]| {
            let stride = if rows == 1 { columns } else { row };
            (column == 1 || columns == 1)
                .then_some(Stored { dims: [rows, columns], stride, apart })
                .filter(|_| stride >= columns)
        };
        let (dims, strides) = ([shape[at], shape[at + 1]], [strides[at], strides[at + 1]]);
        let turned = |[a, b]: [usize; 2]| [b, a];
        let found = by_rows(dims, strides).map(|stored| (stored, false));
        found.or_else(|| by_rows(turned(dims), turned(strides)).map(|stored| (stored, true)))
    };
    if let Some((stored, is_turned)) = of(&x) {
        return (x, stored, is_turned);
    }
    let x = into_contiguous(x);
    let (stored, is_turned) = of(&x).unwrap_or_else(|| unreachable!("it is contiguous"));
    (x, stored, is_turned)
}

/// A matrix by rows, or each of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Stored {
    /// Rows and columns.
    dims: [usize; 2],
    /// Numbers from a row to the next.
    stride: usize,
    /// Numbers from a matrix of the batch to the next.
    apart: usize,
}

impl Stored {
    fn new(x: &CubeTensor) -> Self {
        Self { dims: dims(x), stride: stride(x), apart: 0 }
    }
}

/// A product, by what decides how it is computed. A matrix by rows is its transpose by columns, which the library takes:
/// `y^T = W x^T`, `dx^T = W^T dy^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    /// Of the factors' numbers, and of the result's.
    kinds: [sys::cudaDataType; 2],
    /// Whether the library takes the transpose of each factor that lies by columns.
    is_transposed: [bool; 2],
    /// The library's factors, what is added, and the result.
    matrices: [Stored; 4],
    batch: usize,
    /// What pointers are multiples of.
    alignment_bytes: u32,
    compute: sys::cublasComputeType_t,
    /// Whether sums of products of eight bits keep fewer bits on the way, which is faster: in the forward alone, as elsewhere.
    is_fast: bool,
}

impl Product {
    /// With a frozen matrix, the first, in `bf16`.
    fn of_frozen(kinds: [sys::cudaDataType; 2], is_transposed: [bool; 2], matrices: [Stored; 4]) -> Self {
        Self {
            kinds,
            is_transposed,
            matrices,
            batch: 1,
            alignment_bytes: ALIGNMENT_BYTES,
            compute: sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            is_fast: false,
        }
    }

    /// Puts it into burn's stream. `factors`: both, and of eight bits the scales of both.
    fn submit(self, factors: &[&CubeTensor], sum: Option<&CubeTensor>, y: &CubeTensor) {
        let has_sum = sum.is_some();
        let inputs: Vec<_> = factors.iter().copied().chain(sum).cloned().collect();
        submit(&inputs, std::slice::from_ref(y), move |loaded, pointers, stream| {
            PRODUCTS.with_borrow_mut(|devices| {
                let products = match devices.entry((loaded.context as usize, stream as usize)) {
                    Entry::Occupied(entry) => entry.into_mut(),
                    Entry::Vacant(entry) => entry.insert(Products::new()?),
                };
                if products.multiply(self, pointers, has_sum, stream)? {
                    return Ok(());
                }
                log::warn!(target: CUBLAS, "it refuses some products, which a slower kernel computes: {:?}", self.matrices[3].dims);
                self.by_kernel(loaded, pointers, has_sum, stream)
            })
        });
    }

    /// By the kernel of `product.cu`; the rest as [`Products::multiply`].
    fn by_kernel(self, loaded: &mut Loaded, pointers: &[u64], has_sum: bool, stream: CUstream) -> Result<(), Failure> {
        let [first, second, sum, result] = self.matrices;
        let ([rows, columns], last) = (result.dims, pointers.len() - 1);
        let operand = |pointer: u64, stored: Stored, is_transposed: bool| {
            let steps = if is_transposed { [1, stored.stride] } else { [stored.stride, 1] };
            [pointer, steps[0] as u64, steps[1] as u64, stored.apart as u64]
        };
        let of_sum = if has_sum { pointers[last - 1] } else { 0 };
        let factors = &pointers[2..last - usize::from(has_sum)];
        let factor = |index: usize| factors.get(index).copied().unwrap_or_default();
        // As the kernel counts them.
        let [of_factors, of_result] = self.kinds.map(|kind| match kind {
            sys::cudaDataType::CUDA_R_16BF => 1,
            sys::cudaDataType::CUDA_R_16F => 2,
            sys::cudaDataType::CUDA_R_8F_E4M3 => 3,
            _ => 0,
        });
        let depth = second.dims[usize::from(!self.is_transposed[1])];
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let operands = [
            operand(pointers[1], second, self.is_transposed[1]),
            operand(pointers[0], first, self.is_transposed[0]),
            operand(of_sum, sum, false),
            operand(pointers[last], result, false),
        ];
        let rest = [factor(0), factor(1), pair(rows, columns), pair(depth, of_factors), of_result as u64];
        let mut words: Vec<u64> = operands.into_iter().flatten().chain(rest).collect();
        let blocks = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let grid = (blocks(columns.div_ceil(TILE)), blocks(rows.div_ceil(TILE)), blocks(self.batch));
        let kernel = loaded.function(KERNEL, false, KERNEL, 0)?;
        // SAFETY: the words are the kernel's argument, and the tensors' memory is theirs while it is in the stream, as for a launch.
        unsafe { driver::launch_kernel(kernel, grid, (THREADS, 1, 1), 0, stream, &mut [words.as_mut_ptr().cast()]) }?;
        Ok(())
    }
}

thread_local! {
    /// By context and stream: those of two streams may run at a time, and would write into one workspace.
    static PRODUCTS: RefCell<HashMap<(usize, usize), Products>> = RefCell::default();
}

impl From<CublasError> for Failure {
    fn from(error: CublasError) -> Self {
        Self(format!("cuBLASLt: {error:?}"))
    }
}

/// The library on a device.
struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    /// `None`: the library refuses it.
    planned: HashMap<(Product, bool), Option<Planned>>,
}

/// A product as the library computes it, always alike: the first that it recommends.
struct Planned {
    description: sys::cublasLtMatmulDesc_t,
    /// Of the factors, of what is added, and of the result.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Products {
    fn new() -> Result<Self, Failure> {
        let handle = lt::create_handle()?;
        // SAFETY: the context is current. Neither is freed before the process ends.
        let workspace = unsafe { driver::malloc_sync(WORKSPACE_BYTES) }?;
        Ok(Self { handle, workspace, planned: HashMap::new() })
    }

    /// `pointers`: to the factors and their scales, what is added if `has_sum`, and the result. Whether the library takes the product.
    fn multiply(
        &mut self,
        product: Product,
        pointers: &[u64],
        has_sum: bool,
        stream: CUstream,
    ) -> Result<bool, Failure> {
        let last = pointers.len() - 1;
        let scales = &pointers[2..last - usize::from(has_sum)];
        let planned = match self.planned.entry((product, has_sum)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(match Planned::new(self.handle, product, scales) {
                Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => None,
                planned => Some(planned?),
            }),
        };
        let Some(planned) = planned else { return Ok(false) };
        scale(planned.description, scales)?;
        let pointer = |index: usize| pointers[index] as *const c_void;
        let result = pointer(last);
        let sum = if has_sum { pointer(last - 1) } else { result };
        let (alpha, beta) = (1.0_f32, if has_sum { 1.0_f32 } else { 0.0 });
        let [first, second, of_sum, of_result] = planned.layouts;
        // SAFETY: the layouts are those of the tensors, whose memory is theirs while the product is in the stream, as for a launch.
        unsafe {
            lt::matmul(
                self.handle,
                planned.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(0),
                first,
                pointer(1),
                second,
                sum,
                of_sum,
                result.cast_mut(),
                of_result,
                &raw const planned.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        }?;
        Ok(true)
    }
}

impl Stored {
    /// How the library finds as many of them, of such numbers.
    fn layout(self, kind: sys::cudaDataType, batch: usize) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Layout;

        let Self { dims: [rows, columns], stride, apart } = self;
        let signed = |numbers: usize| i64::try_from(numbers).unwrap_or(i64::MAX);
        let layout = lt::create_matrix_layout(kind, columns as u64, rows as u64, signed(stride))?;
        if batch > 1 {
            let beyond_int = |_| CublasError(sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE);
            let (batch, apart) = (i32::try_from(batch).map_err(beyond_int)?, signed(apart));
            // SAFETY: the values have the sizes that are named with them, and outlive the calls.
            unsafe {
                let set = |attribute, value: *const c_void, size| {
                    lt::set_matrix_layout_attribute(layout, attribute, value, size)
                };
                set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const batch).cast(), size_of_val(&batch))?;
                set(
                    Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    (&raw const apart).cast(),
                    size_of_val(&apart),
                )?;
            }
        }
        Ok(layout)
    }
}

/// Has the factors of a product multiplied by the numbers at these places, if there are any.
fn scale(description: sys::cublasLtMatmulDesc_t, places: &[u64]) -> Result<(), CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Description;

    let which = [Description::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, Description::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER];
    which.into_iter().zip(places).try_for_each(|(attribute, place)| {
        // SAFETY: the value has the size that is named with it, and outlives the call.
        unsafe { lt::set_matmul_desc_attribute(description, attribute, (&raw const *place).cast(), size_of_val(place)) }
    })
}

impl Planned {
    fn new(handle: sys::cublasLtHandle_t, product: Product, scales: &[u64]) -> Result<Self, CublasError> {
        let Product { kinds: [of_factors, of_result], is_transposed, matrices, batch, alignment_bytes, .. } = product;
        let description = lt::create_matmul_desc(product.compute, sys::cudaDataType::CUDA_R_32F)?;
        scale(description, scales)?;
        let [first, second, sum, result] = matrices;
        let of = [(first, of_factors), (second, of_factors), (sum, of_result), (result, of_result)];
        let [first, second, sum, result] = of.map(|(stored, kind)| stored.layout(kind, batch));
        let layouts = [first?, second?, sum?, result?];
        let [first, second, sum, result] = layouts;
        let preference = lt::create_matmul_pref()?;
        // SAFETY: the values have the sizes that are named with them, and outlive the calls.
        let found = unsafe {
            use sys::cublasLtMatmulDescAttributes_t as Description;
            use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

            let which = [Description::CUBLASLT_MATMUL_DESC_TRANSA, Description::CUBLASLT_MATMUL_DESC_TRANSB];
            for (attribute, is_transposed) in which.into_iter().zip(is_transposed) {
                let operation = if is_transposed { TRANSPOSED } else { AS_IT_IS };
                lt::set_matmul_desc_attribute(
                    description,
                    attribute,
                    (&raw const operation).cast(),
                    size_of_val(&operation),
                )?;
            }
            if product.is_fast {
                let fast = 1_i8;
                let attribute = Description::CUBLASLT_MATMUL_DESC_FAST_ACCUM;
                lt::set_matmul_desc_attribute(description, attribute, (&raw const fast).cast(), size_of_val(&fast))?;
            }
            let set = |attribute, value: *const c_void, size| {
                lt::set_matmul_pref_attribute(preference, attribute, value, size)
            };
            let workspace = WORKSPACE_BYTES;
            set(
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )?;
            for attribute in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(attribute, (&raw const alignment_bytes).cast(), size_of_val(&alignment_bytes))?;
            }
            let found = lt::get_matmul_algo_heuristic(handle, description, first, second, sum, result, preference);
            lt::destroy_matmul_pref(preference)?;
            found
        }?;
        Ok(Self { description, layouts, algorithm: found.algo })
    }
}
