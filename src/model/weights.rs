//! Weights from safetensors files.
