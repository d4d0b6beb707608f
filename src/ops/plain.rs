//! The operations in plain tensor calls, which run on any backend, and the types that they and all kernels take.

pub mod attention;
pub mod cached_attention;
pub mod cross_entropy;
pub mod delta_rule;
pub mod draw;
pub mod dropout;
pub mod gates;
pub mod linear;
pub mod next;
pub mod norms;
pub mod routing;
pub mod short_conv;
pub mod state_space;
pub mod updates;
