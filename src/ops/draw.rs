//! The next token of a text, drawn from its logits in the order of transformers: temperature, then top-k, then top-p, then min-p.
//!
//! A draw is a function of the logits, the settings, a seed and the number of the draw. The arithmetic is one for all devices, so
//! that equal logits give equal tokens, however many texts are drawn for together.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::profile::{self, Cost};

pub use super::cpu::{Draw, Drawn, draw as draw_row};
pub use super::plain::draw::LOGITS;

/// A token for each row of logits, `[rows, vocab_size]` in `f32`; `None` where its logits are not finite numbers.
///
/// # Panics
/// If what was drawn cannot be read, with a [`Fault`](crate::util::faults::Fault).
#[must_use]
pub fn draw(place: Place, logits: &Tensor<2>, draws: &[Draw]) -> Vec<Option<Drawn>> {
    let cost = || Cost { bytes: profile::bytes(logits), ..Cost::default() };
    profile::measure("draw", cost, || place.draw(logits, draws))
}
