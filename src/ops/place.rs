//! Where the operations of a model run: it is decided once, with the model.

use burn::tensor::{DType, Device, Tensor};
use burn_flex::Flex;

use super::cpu_kernels::Cpu;
use super::cuda::{cuda, kernel_state};
use super::kernels::{Place, plain};
use super::product::F32Products;
use crate::device::DeviceKind;

/// The place of activations of type `dtype` on `device`, with the device's own products.
#[must_use]
pub fn place_of(device: &Device, dtype: DType) -> Place {
    if kernel_state(device).is_some() {
        return place_on(DeviceKind::Cuda);
    }
    let is_host = || Tensor::<1>::zeros([1], (device, DType::F32)).try_into_primitive::<Flex>().is_ok();
    if dtype == DType::F32 && is_host() {
        &Cpu { rounds: false, of_texts: false }
    } else {
        plain(F32Products::OfDevice)
    }
}

/// The place of activations in `f32` on such a device, which need not be here.
#[must_use]
pub fn place_on(kind: DeviceKind) -> Place {
    match kind {
        DeviceKind::Cpu => &Cpu { rounds: false, of_texts: false },
        DeviceKind::Cuda => cuda(F32Products::OfDevice),
        _ => plain(F32Products::OfDevice),
    }
}
