//! What a place computes with.
//!
//! [`Kernels`] has every operation of a step. Its default methods are plain tensor calls, which run on any backend; a place
//! overrides what it has kernels for, and says what it is like. A door, such as [`norm`](super::norm), measures and calls.
//!
//! What kernels of a place lack (a type, a size, a cap of scores, an activation) it leaves to the default method.

mod attention;
pub(super) mod linears;
pub(super) mod losses;
pub(super) mod norms;
mod properties;
mod recurrent;
mod updates;

use super::product::F32Products;

pub use attention::Attention;
pub use linears::Linears;
pub use losses::Losses;
pub use norms::Norms;
pub use properties::Properties;
pub use recurrent::Recurrent;
pub use updates::Updates;

/// Where the operations of a model run. It is decided once, with the model.
pub type Place = &'static dyn Kernels;

/// What a place computes with. Shapes are those of the doors' functions of the same names.
pub trait Kernels: Linears + Norms + Attention + Recurrent + Losses + Updates {}

impl<T: Linears + Norms + Attention + Recurrent + Losses + Updates> Kernels for T {}

/// Runs small operations where their tasks start fastest: on the CPU in a thread of the pool that computes them, so that
/// each of hundreds need not wake it from outside. A GPU's queue belongs to the thread that calls. Steps of training do
/// not go through here: every thread of the pool would come to keep the scratch memory of large operations.
pub fn run<R: Send>(place: Place, operations: impl FnOnce() -> R + Send) -> R {
    if place.is_host() { rayon::scope(|_| operations()) } else { operations() }
}

/// Plain tensor calls, with these products of operands in `f32`.
#[must_use]
pub fn plain(products: F32Products) -> Place {
    match products {
        F32Products::OfDevice => &Plain(F32Products::OfDevice),
        F32Products::Split => &Plain(F32Products::Split),
    }
}

/// Plain tensor calls.
#[derive(Debug)]
pub(super) struct Plain(pub(super) F32Products);

impl Properties for Plain {
    fn f32_products(&self) -> F32Products {
        self.0
    }

    fn with_f32_products(&self, products: F32Products) -> Option<Place> {
        Some(plain(products))
    }
}

impl Linears for Plain {}
impl Norms for Plain {}
impl Attention for Plain {}
impl Recurrent for Plain {}
impl Losses for Plain {}
impl Updates for Plain {}
