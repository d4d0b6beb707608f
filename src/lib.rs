//! lora-train: LoRA fine-tuning of decoder language models: Llama, Mistral, Qwen, Gemma, Phi and others.
//!
//! The modules, from top to bottom. A file imports only from lines below its own (`tests/it/layers.rs` checks this):
//!
//! - [`commands`] the command line, one file per sub-command: `check`, `inspect`, `plan`, `tune`, `doctor`, `chat`,
//!   `serve`, `eval`, `generate`, `merge`, `push`, `bench`, `report`, `compare`
//! - `run` training, as a straight line
//! - [`recipe`] the TOML file: the sections of [`config`] composed, all problems reported at once
//! - [`train`] the loop, one step, block-wise backpropagation, loss, optimizer, schedule, evaluation
//! - [`generate`] text from a model, token by token
//! - [`save`] what is written to disk: training state, PEFT adapters, merged models
//! - [`insight`] what the figures of a run say about it: the diagnosis, the report
//! - [`data`] rows to token batches, in host memory
//! - [`model`] the decoder block forwards and backwards, its weights, decoding
//! - [`lora`] low-rank adapters
//! - [`ops`] the operations of a step, each with its forward and backward
//! - [`images`] the images of a data set: from files to pixels, and their features on disk
//! - [`measure`] every figure of a step, one row each; samples of the machine; where figures are written
//! - [`config`] the sections of the recipe as plain data
//! - [`spec`] what a model is: shapes, tensors and names, from config.json; a family is a row
//! - [`device`] the device that computes, its types and its speed
//! - [`hub`] files of models and data sets from the Hugging Face Hub
//! - [`util`] whole files, GGUF files, numbers for people, statistics, failures, the allocator
//! - [`schema`] strict reading of TOML and JSON

#![cfg_attr(
    test,
    allow(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "the numbers of tests are small"
    )
)]

pub mod commands;
pub mod config;
pub mod data;
pub mod device;
pub mod generate;
pub mod hub;
pub mod images;
pub mod insight;
pub mod lora;
pub mod measure;
pub mod model;
pub mod ops;
pub mod recipe;
mod run;
pub mod save;
pub mod schema;
pub mod spec;
pub mod train;
pub mod util;
