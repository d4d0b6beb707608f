//! What every module may use.

pub mod allocator;
pub mod cancel;
pub mod failure;
pub mod faults;
pub mod files;
pub mod gguf;
pub mod json_schema;
pub mod panics;
pub mod stats;
pub mod terminal;
pub mod text;
