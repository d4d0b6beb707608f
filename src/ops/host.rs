//! Slices of tensors that are in host memory.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};

/// The tensor's elements, if it is `f32` and lives in host memory on the CPU backend, untracked by autodiff.
///
/// No copy if the tensor is contiguous; otherwise it is made contiguous.
#[must_use]
pub fn view<const D: usize>(tensor: &Tensor<D>) -> Option<HostView> {
    (tensor.dtype() == DType::F32).then(|| primitive(tensor))?.map(HostView)
}

/// The tensor in host memory, of any float type, contiguous.
#[must_use]
pub fn primitive<const D: usize>(tensor: &Tensor<D>) -> Option<FlexTensor> {
    let flex = tensor.clone().try_into_primitive::<Flex>().ok()?;
    Some(if flex.is_contiguous() { flex } else { flex.to_contiguous() })
}

/// Whether tensors of this device and type run on the kernels of [`cpu`](super::cpu).
#[must_use]
pub fn has_kernels(device: &Device, dtype: DType) -> bool {
    dtype == DType::F32 && view(&Tensor::<1>::zeros([1], (device, DType::F32))).is_some()
}

/// Shared access to the elements of a host tensor.
pub struct HostView(FlexTensor);

impl HostView {
    /// The elements in row-major order.
    #[must_use]
    pub fn as_slice(&self) -> &[f32] {
        self.0.as_slice().unwrap_or_default()
    }
}

/// Takes the elements of a host tensor in order to change them: without a copy if nothing else holds them.
#[must_use]
pub fn take<const D: usize>(tensor: Tensor<D>) -> Option<FlexTensor> {
    if tensor.dtype() != DType::F32 {
        return None;
    }
    let flex = tensor.try_into_primitive::<Flex>().ok()?;
    let whole = flex.is_contiguous() && flex.layout().start_offset() == 0 && {
        flex.bytes().len() == flex.layout().num_elements() * size_of::<f32>()
    };
    Some(if whole { flex } else { flex.to_contiguous() })
}

/// A tensor that owns `values`. No copy on the CPU backend.
#[must_use]
pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Makes a changed host tensor a tensor again.
#[must_use]
pub fn restore<const D: usize>(flex: FlexTensor) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(flex)
}
