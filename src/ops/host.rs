//! The elements of tensors in host memory, where the kernels of [`cpu`] run.
//!
//! Whoever calls these functions is in the arm of [`Place::Cpu`](super::place::Place::Cpu); a tensor that lies elsewhere
//! is a mistake of this program, and a panic.

use std::cell::RefCell;
use std::ops::Deref;

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};
use half::{bf16, f16};

use super::blocks::HostBlocks;
use super::cpu;
use super::linear::{Matrix, Weight};
use super::quantised::HostCodes;

/// The elements of an `f32` tensor, row by row. No copy if the tensor is contiguous.
pub struct HostView(FlexTensor);

impl Deref for HostView {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        let Some(values) = self.0.as_slice() else { panic!("the kernels take f32 tensors") };
        values
    }
}

/// The elements of an `f32` tensor.
#[must_use]
pub fn view<const D: usize>(tensor: &Tensor<D>) -> HostView {
    HostView(contiguous(tensor.clone()))
}

/// The bytes of a tensor, row by row.
pub struct HostBytes(FlexTensor);

impl Deref for HostBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let (layout, width) = (self.0.layout(), self.0.dtype().size());
        &self.0.bytes()[layout.start_offset() * width..][..layout.num_elements() * width]
    }
}

impl Matrix {
    /// The bytes of its tensors, which are in host memory: of codes in the order of [`Quantised::map`](super::quantised::Quantised::map).
    #[must_use]
    pub fn parts(&self) -> Vec<HostBytes> {
        match self {
            Self::Dense(values) => vec![HostBytes(contiguous(values.clone()))],
            Self::Blocks(values) => vec![bytes(&values.bytes)],
            Self::Quantised(values) => {
                let parts = RefCell::new(Vec::new());
                let add = |part| parts.borrow_mut().push(part);
                values.map(|floats| add(HostBytes(contiguous(floats.clone()))), |codes| add(bytes(codes)));
                parts.into_inner()
            }
        }
    }
}

/// Changes the elements of an `f32` tensor: in place if nothing else holds them.
pub fn update<const D: usize>(tensor: Tensor<D>, change: impl FnOnce(&mut [f32])) -> Tensor<D> {
    let [tensor] = update_all([tensor], |[values]| change(values));
    tensor
}

/// [`update`] of several tensors at once.
pub fn update_all<const D: usize, const N: usize>(
    tensors: [Tensor<D>; N],
    change: impl FnOnce([&mut [f32]; N]),
) -> [Tensor<D>; N] {
    let mut tensors = tensors.map(|tensor| {
        let flex = contiguous(tensor);
        // `storage_mut` gives the whole allocation, which a part of a tensor does not fill.
        let is_whole =
            flex.layout().start_offset() == 0 && flex.bytes().len() == flex.layout().num_elements() * size_of::<f32>();
        if is_whole { flex } else { flex.to_contiguous() }
    });
    change(tensors.each_mut().map(FlexTensor::storage_mut));
    tensors.map(Tensor::from_primitive::<Flex>)
}

/// A tensor that owns `values`. No copy on the CPU backend.
#[must_use]
pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// The elements of a frozen weight, in their storage type.
pub(super) struct HostWeight {
    values: HostMatrix,
    rounds: bool,
}

enum HostMatrix {
    Dense(FlexTensor),
    Quantised(Box<HostCodes>),
    Blocks(HostBlocks),
}

impl HostWeight {
    pub(super) fn new(weight: &Weight) -> Self {
        let values = match &weight.values {
            Matrix::Dense(values) => HostMatrix::Dense(contiguous(values.clone())),
            Matrix::Quantised(values) => HostMatrix::Quantised(Box::new(HostCodes::new(values))),
            Matrix::Blocks(values) => HostMatrix::Blocks(HostBlocks::new(values)),
        };
        Self { values, rounds: weight.rounds }
    }

    /// The weight as the kernels take it.
    pub(super) fn get(&self) -> cpu::Weight<'_> {
        let weight = match &self.values {
            HostMatrix::Quantised(values) => Some(cpu::Weight::codes(values.get())),
            HostMatrix::Blocks(values) => Some(cpu::Weight::blocks(values.get())),
            HostMatrix::Dense(values) => match values.dtype() {
                DType::F32 => values.as_slice::<f32>().map(cpu::Weight::f32),
                DType::BF16 => values.as_slice::<bf16>().map(cpu::Weight::bf16),
                DType::F16 => values.as_slice::<f16>().map(cpu::Weight::f16),
                _ => None,
            },
        };
        let Some(weight) = weight else { panic!("the kernels take weights in f32, bf16 and f16") };
        weight.rounding(self.rounds)
    }
}

/// The data of a tensor. They share its bytes if [`Bytes::shared`] made these.
pub(super) fn data<const D: usize>(tensor: &Tensor<D>) -> TensorData {
    data_of(&contiguous(tensor.clone()))
}

/// [`data`] of a tensor of bytes.
pub(super) fn byte_data(tensor: &Tensor<1, Int>) -> TensorData {
    data_of(&bytes(tensor).0)
}

fn data_of(flex: &FlexTensor) -> TensorData {
    TensorData::from_bytes(Bytes::clone(&flex.data_arc()), flex.layout().shape().clone(), flex.dtype())
}

/// The elements of a tensor of bytes.
pub(super) fn bytes(tensor: &Tensor<1, Int>) -> HostBytes {
    let Ok(flex) = tensor.clone().try_into_primitive::<Flex>() else {
        panic!("the kernels take tensors in host memory")
    };
    HostBytes(if flex.is_contiguous() { flex } else { flex.to_contiguous() })
}

fn contiguous<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    let Ok(flex) = tensor.try_into_primitive::<Flex>() else { panic!("the kernels take tensors in host memory") };
    if flex.is_contiguous() { flex } else { flex.to_contiguous() }
}
