//! Draws on the host.

use burn::tensor::Tensor;
use rayon::prelude::*;

use crate::ops::cpu::{self, Draw, Drawn};
use crate::util::faults;

/// What is read from a device, to people.
pub const LOGITS: &str = "the logits of a token";

/// The logits are read, and all cores draw.
pub(in crate::ops) fn plain_draw(logits: &Tensor<2>, draws: &[Draw]) -> Vec<Option<Drawn>> {
    let [_, vocab_size] = logits.dims();
    let logits = faults::read(logits.clone(), LOGITS);
    draws.par_iter().zip(logits.par_chunks(vocab_size)).map(|(draw, logits)| cpu::draw(logits, draw)).collect()
}
