//! Rows to token batches, in host memory: no tensor is made here.
//!
//! Before the first step: [`sources`] finds the files, `rows` reads a row, [`formats`] interprets it, [`template`] writes
//! a conversation as text, [`tokenizer`] turns the text into tokens, and [`encode`] marks the tokens that carry loss.
//! `data_file` does this for all rows of a file on all cores. [`cache`] keeps the tokens of large files on disk; the
//! tokens of other files stay in memory. From then on a [`dataset`] puts rows in order and packs several into one if
//! asked to; [`loader`] makes a [`batch`] of them ahead, on its own threads.

pub mod batch;
mod blocks;
pub mod cache;
pub mod counts;
mod data_file;
pub mod dataset;
pub mod encode;
mod encoding;
pub mod error;
pub mod files;
mod findings;
#[cfg(test)]
pub(crate) mod fixture;
pub mod formats;
mod jinja;
pub mod loader;
mod order;
mod packing;
pub(crate) mod progress;
mod rows;
pub mod sources;
pub mod template;
pub mod tokenizer;
pub(crate) mod unpack;
mod windows;
pub mod worker_time;
