//! The elements of tensors in host memory, where the kernels of [`cpu`](super::cpu) run.
//!
//! Whoever calls these functions knows that its tensors are in host memory; a tensor that lies elsewhere
//! is a mistake of this program, and a panic.

use std::ops::Deref;

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};

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

/// A tensor of bytes, to be changed: in place if nothing else holds it.
pub(super) struct HostCodes(FlexTensor);

impl HostCodes {
    pub(super) fn new(codes: Tensor<1, Int>) -> Self {
        let Ok(flex) = codes.try_into_primitive::<Flex>() else { panic!("the kernels take tensors in host memory") };
        let is_whole = flex.layout().start_offset() == 0 && flex.bytes().len() == flex.layout().num_elements();
        Self(if is_whole && flex.is_contiguous() { flex } else { flex.to_contiguous() })
    }

    pub(super) fn get(&mut self) -> &mut [u8] {
        self.0.storage_mut()
    }

    pub(super) fn into_tensor(self) -> Tensor<1, Int> {
        Tensor::from_primitive::<Flex>(self.0)
    }
}

/// A tensor that owns `values`. No copy on the CPU backend.
#[must_use]
pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    // A GPU would leave gaps between the rows of a matrix, which are closed by a copy wherever kernels take it.
    let length = [values.len()];
    Tensor::<1>::from_data(TensorData::new(values, length), (device, DType::F32)).reshape(shape)
}

/// The bytes of a tensor of floats.
pub(super) fn float_bytes<const D: usize>(tensor: &Tensor<D>) -> HostBytes {
    HostBytes(contiguous(tensor.clone()))
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

/// The tensor in host memory, row by row.
pub(super) fn contiguous<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    let Ok(flex) = tensor.try_into_primitive::<Flex>() else { panic!("the kernels take tensors in host memory") };
    if flex.is_contiguous() { flex } else { flex.to_contiguous() }
}
