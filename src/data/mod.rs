//! Rows to token batches, in host memory: no tensor is made here.
//!
//! Before the first step: [`files`] finds the rows of a file, [`formats`] interprets a row, [`template`] writes a
//! conversation as text, [`tokenizer`] turns the text into tokens, and [`encode`] marks the tokens that carry loss.
//! [`sources`] does this for all rows on all cores. [`cache`] keeps the tokens of large files on disk; the tokens of
//! other files stay in memory. From then on [`pipeline`] puts rows in order, packs several into one if asked to, and
//! makes a [`batch`] of them; [`loader`] reads batches ahead on its own threads.

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
