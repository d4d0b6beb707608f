//! The library and the binary from outside, as one test binary, because each would link all crates.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the numbers of tests are small"
)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where something is missing")]

mod common;

mod cli;
mod combinations;
mod compare;
mod dashboard;
mod diagnosis;
mod disks;
mod doctor;
mod dora;
mod endings;
mod engine;
mod environments;
mod experts;
mod faults;
mod generate;
mod golden;
mod images;
mod init;
mod instruction_sets;
mod interrupts;
mod layers;
mod long;
mod matrix;
mod mistakes;
mod modules;
mod numbers;
mod optimizers;
mod plan;
mod preferences;
mod push;
mod ranks;
mod recipes;
mod report;
mod residency;
mod reward;
mod rollouts;
mod room;
mod routers;
mod scores;
mod secrets;
mod shipping;
mod shown;
mod soak;
mod start_from;
mod starts;
mod talk;
mod telemetry;
mod tensorboard;
mod time;
mod token_cache;
mod token_rows;
mod tokens;
mod training;
mod tune;
mod whole_run;
