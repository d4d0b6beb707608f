//! Operations on `f32` slices of host memory: vectorised, on all cores.
