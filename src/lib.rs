//! lora-train: LoRA fine-tuning of decoder language models: Llama, Mistral, Qwen.
//!
//! The modules, from top to bottom. A file imports only from lines below its own (`tests/it/layers.rs` checks this):
//!
//! - [`cli`] the command line
//! - `commands` one file per sub-command: `check`, `inspect`, `plan`, `tune`, `doctor`, `chat`, `serve`, `eval`,
//!   `generate`, `merge`, `push`, `bench`, `report`, `compare`
//! - `run` training, as a straight line
//! - [`recipe`] the TOML file: the sections of [`config`] composed, all problems reported at once
//! - [`report`] a run's files made into a report
//! - [`train`] the loop, one step, block-wise backpropagation, loss, optimizer, schedule, evaluation
//! - [`generate`] text from a model, token by token
//! - [`checkpoint`], [`export`] what is written to disk: training state, PEFT adapters, merged models
//! - [`model`] the decoder block forwards and backwards, its weights, decoding
//! - [`lora`] low-rank adapters
//! - [`ops`] the operations of a step, each with its forward and backward
//! - [`data`] rows to token batches, in host memory
//! - [`diagnosis`] what the figures of a run say about it
//! - [`metrics`] the figures of a step and where they are written
//! - [`telemetry`] samples of the machine during training
//! - [`figures`] every figure of a step, one row each
//! - [`config`] the sections of the recipe as plain data
//! - [`spec`] what a model is: shapes, tensors and names, from config.json; a family is a row
//! - [`device`] the device that computes, its types and its speed
//! - [`hub`] files of models and data sets from the Hugging Face Hub
//! - [`failure`] how a command ends without its result
//! - [`panics`] panics that are caught
//! - [`faults`] what a device's backend says when it fails, and reading tensors
//! - [`files`] files that are complete or absent
//! - [`gguf`] GGUF files as they are read
//! - [`text`] numbers for people
//! - [`stats`] means, quantiles and straight lines
//! - [`allocator`] small pieces of memory from mimalloc, large ones from the system
//! - [`schema`] strict reading of TOML and JSON

pub mod allocator;
pub mod checkpoint;
pub mod cli;
mod commands;
pub mod config;
pub mod data;
pub mod device;
pub mod diagnosis;
pub mod export;
pub mod failure;
pub mod faults;
pub mod figures;
pub mod files;
pub mod generate;
pub mod gguf;
pub mod hub;
pub mod lora;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod panics;
pub mod recipe;
pub mod report;
mod run;
pub mod schema;
pub mod spec;
pub mod stats;
pub mod telemetry;
pub mod text;
pub mod train;
