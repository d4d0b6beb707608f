//! Matrix products by cuBLASLt, on burn's stream. It is loaded where it lies, and not shipped; without it, burn's products remain.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::iter::once;

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::matrix::{self, dims, rows, stacked, stride};
use super::one;
use super::stream::{Failure, submit};
use crate::ops::cuda::WORKSPACE_BYTES;
use crate::ops::custom::{Output, queue, side_by_side, spec};
use crate::ops::linear::Weight;

/// `CUBLAS_OP_N`.
const AS_IT_IS: i32 = 0;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// What pointers and rows are multiples of.
const ALIGNMENT_BYTES: u32 = 16;

/// How the frozen matrix `[out_features, in_features]` is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Way {
    /// `x W^T`
    Forward,
    /// `dy W`
    Backward,
}

/// `x W^T` for each of the weights, side by side; added to `sum` if there is one, which is for one weight. Rounded once.
pub(super) fn forward(x: &Tensor<2>, weights: &[&Weight], sum: Option<&Tensor<2>>) -> Vec<Tensor<2>> {
    let outputs = side_by_side(x.dims()[0], weights.iter().map(|weight| weight.dims()[0]));
    let (num_weights, weights) = (weights.len(), dense(weights));
    let inputs = once(x).chain(weights.iter().map(AsRef::as_ref)).chain(sum).map(|x| x.clone().into_dispatch());
    let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
        let inputs: Vec<_> = inputs.into_iter().map(rows).collect();
        let (x, weights, sum) = (&inputs[0], &inputs[1..=num_weights], inputs.get(num_weights + 1));
        match (stacked(weights), matrix::side_by_side(ys)) {
            (Some(weight), Some(y)) => multiply(Way::Forward, x, &weight, sum, &y),
            _ => weights.iter().zip(ys).for_each(|(weight, y)| multiply(Way::Forward, x, weight, sum, y)),
        }
    };
    queue("products", inputs.collect(), outputs, run).into_iter().map(Tensor::from_dispatch).collect()
}

/// The sum of `dy W` over the weights, added to `sum` if there is one. Rounded once where the gradients are side by side and the
/// weights one below the other, else after each weight.
pub(super) fn backward(dys: &[&Tensor<2>], weights: &[&Weight], sum: Option<&Tensor<2>>) -> Tensor<2> {
    let ([tokens, _], [_, width]) = (dys[0].dims(), weights[0].dims());
    let (num_weights, weights) = (weights.len(), dense(weights));
    let inputs =
        dys.iter().copied().chain(weights.iter().map(AsRef::as_ref)).chain(sum).map(|x| x.clone().into_dispatch());
    let run = move |inputs: Vec<CubeTensor>, dx: &[CubeTensor]| {
        let inputs: Vec<_> = inputs.into_iter().map(rows).collect();
        let ((dys, rest), dx) = (inputs.split_at(num_weights), &dx[0]);
        let (weights, sum) = (&rest[..num_weights], rest.get(num_weights));
        if let (Some(dy), Some(weight)) = (matrix::side_by_side(dys), stacked(weights)) {
            return multiply(Way::Backward, &dy, &weight, sum, dx);
        }
        let mut sum = sum;
        for (dy, weight) in dys.iter().zip(weights) {
            multiply(Way::Backward, dy, weight, sum, dx);
            sum = Some(dx);
        }
    };
    let output = vec![Output::New(spec(DType::BF16, [tokens, width]))];
    Tensor::from_dispatch(one(queue("products_backward", inputs.collect(), output, run)))
}

fn dense<'a>(weights: &[&'a Weight]) -> Vec<Cow<'a, Tensor<2>>> {
    weights.iter().map(|weight| weight.values.dense_in(DType::BF16)).collect()
}

fn multiply(way: Way, x: &CubeTensor, weight: &CubeTensor, sum: Option<&CubeTensor>, y: &CubeTensor) {
    let strides = [x, weight, sum.unwrap_or(y), y].map(stride);
    let (has_sum, product) = (sum.is_some(), Product { way, tokens: dims(x)[0], weight: dims(weight), strides });
    let inputs: Vec<_> = [x, weight].into_iter().chain(sum).cloned().collect();
    submit(&inputs, std::slice::from_ref(y), move |loaded, pointers, stream| {
        PRODUCTS.with_borrow_mut(|devices| {
            let products = match devices.entry(loaded.context as usize) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(Products::new()?),
            };
            products.multiply(product, pointers, has_sum, stream)
        })
    });
}

/// A product, by what decides how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    way: Way,
    tokens: usize,
    weight: [usize; 2],
    /// Numbers from a row to the next: of `x`, of the weight, of what is added, and of the result.
    strides: [usize; 4],
}

thread_local! {
    /// By context, like what is loaded for launches.
    static PRODUCTS: RefCell<HashMap<usize, Products>> = RefCell::default();
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
    planned: HashMap<(Product, bool), Planned>,
}

/// A product as the library computes it, always alike: the first that it recommends.
struct Planned {
    description: sys::cublasLtMatmulDesc_t,
    /// Of the weight, of `x`, of what is added, and of the result.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Products {
    fn new() -> Result<Self, Failure> {
        // SAFETY: the context is current. Neither is freed before the process ends.
        let workspace = unsafe { cudarc::driver::result::malloc_sync(WORKSPACE_BYTES) }?;
        Ok(Self { handle: lt::create_handle()?, workspace, planned: HashMap::new() })
    }

    /// `pointers`: to `x`, the weight, what is added if `has_sum`, and the result.
    fn multiply(&mut self, product: Product, pointers: &[u64], has_sum: bool, stream: CUstream) -> Result<(), Failure> {
        let planned = match self.planned.entry((product, has_sum)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Planned::new(self.handle, product)?),
        };
        let pointer = |index: usize| pointers[index] as *const c_void;
        let result = pointer(pointers.len() - 1);
        let sum = if has_sum { pointer(2) } else { result };
        let (alpha, beta) = (1.0_f32, if has_sum { 1.0_f32 } else { 0.0 });
        let [weight, x, of_sum, of_result] = planned.layouts;
        // SAFETY: the layouts are those of the tensors, whose memory is theirs while the product is in the stream, as for a launch.
        unsafe {
            lt::matmul(
                self.handle,
                planned.description,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(1),
                weight,
                pointer(0),
                x,
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
        Ok(())
    }
}

impl Planned {
    /// A matrix by rows is its transpose by columns, which the library takes: `y^T = W x^T`, `dx^T = W^T dy^T`.
    fn new(handle: sys::cublasLtHandle_t, product: Product) -> Result<Self, CublasError> {
        let Product { way, tokens, weight: [out_features, in_features], strides: [x, weight, sum, result] } = product;
        let (transposed, k, m) = match way {
            Way::Forward => (TRANSPOSED, in_features, out_features),
            Way::Backward => (AS_IT_IS, out_features, in_features),
        };
        let description =
            lt::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)?;
        let layout = |columns: usize, rows: usize, stride: usize| {
            lt::create_matrix_layout(
                sys::cudaDataType::CUDA_R_16BF,
                columns as u64,
                rows as u64,
                i64::try_from(stride).unwrap_or(i64::MAX),
            )
        };
        let layouts = [
            layout(in_features, out_features, weight)?,
            layout(k, tokens, x)?,
            layout(m, tokens, sum)?,
            layout(m, tokens, result)?,
        ];
        let [of_weight, of_x, of_sum, of_result] = layouts;
        let preference = lt::create_matmul_pref()?;
        // SAFETY: the values have the sizes that are named with them, and outlive the calls.
        let found = unsafe {
            use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

            let transa = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            lt::set_matmul_desc_attribute(
                description,
                transa,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            let set = |attribute, value: *const c_void, size| {
                lt::set_matmul_pref_attribute(preference, attribute, value, size)
            };
            let workspace = WORKSPACE_BYTES;
            set(
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )?;
            let alignment = ALIGNMENT_BYTES;
            for attribute in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(attribute, (&raw const alignment).cast(), size_of_val(&alignment))?;
            }
            let found =
                lt::get_matmul_algo_heuristic(handle, description, of_weight, of_x, of_sum, of_result, preference);
            lt::destroy_matmul_pref(preference)?;
            found
        }?;
        Ok(Self { description, layouts, algorithm: found.algo })
    }
}
