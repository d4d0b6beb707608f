//! Where the operations of a model run.

use burn::tensor::{DType, Device, Tensor};
use burn_flex::Flex;

use super::product::F32Products;

/// Where operations run. It is decided once, with the model; every operation has one arm for each place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The kernels of [`super::cpu`]: activations are `f32` in host memory, and autodiff does not track them.
    Cpu,
    /// Plain tensor calls, which every backend runs, with these products of operands in `f32`.
    Plain(F32Products),
}

impl Place {
    /// The place of activations of type `dtype` on `device`, with the device's own products.
    #[must_use]
    pub fn of(device: &Device, dtype: DType) -> Self {
        let is_host = || Tensor::<1>::zeros([1], (device, DType::F32)).try_into_primitive::<Flex>().is_ok();
        if dtype == DType::F32 && is_host() { Self::Cpu } else { Self::Plain(F32Products::OfDevice) }
    }

    /// Runs small operations where their tasks start fastest: on the CPU in a thread of the pool that computes them, so that
    /// each of hundreds need not wake it from outside. A GPU's queue belongs to the thread that calls. Steps of training do
    /// not go through here: every thread of the pool would come to keep the scratch memory of large operations.
    pub fn run<R: Send>(self, operations: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Cpu => rayon::scope(|_| operations()),
            Self::Plain(_) => operations(),
        }
    }

    /// The products of the place; the kernels of the CPU have their own.
    #[must_use]
    pub fn f32_products(self) -> F32Products {
        match self {
            Self::Cpu => F32Products::OfDevice,
            Self::Plain(products) => products,
        }
    }
}
