//! Rows to token batches, in host memory: no tensor is made here.
//!
//! Before the first step: [`files`] finds the rows of a file, [`formats`] says what a row means, [`template`] writes a
//! conversation as text, [`tokenizer`] cuts it into tokens, [`encode`] marks those that carry loss, [`sources`] does
//! that for all rows on all cores; [`cache`] keeps the tokens of large files on disk, those of others are in memory.
//! From then on [`pipeline`] puts rows in order, several into one if they are packed, and into a [`batch`], and
//! [`loader`] reads them ahead on its own threads.

mod ahead;
pub mod batch;
pub mod cache;
pub mod config;
pub mod counts;
pub mod encode;
pub mod error;
pub mod files;
mod findings;
#[cfg(test)]
mod fixture;
pub mod formats;
mod jinja;
pub mod loader;
mod order;
mod packing;
pub mod pipeline;
mod progress;
pub mod sources;
pub mod template;
pub mod tokenizer;
mod windows;
pub mod work;
