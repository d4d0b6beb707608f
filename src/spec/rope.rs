//! Rotary frequencies, with the scaling of Llama 3.1 and 3.2.

use std::f64::consts::TAU;

use serde::Serialize;

/// A rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: Option<RopeScaling>,
    /// Width of a head; even.
    pub head_dim: usize,
}

/// Change of the rotary frequencies for contexts longer than the model was pretrained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Positions divided by `factor` (Chen et al., 2023).
    Linear {
        /// Divisor of the positions.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones are kept, with a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled by the full factor.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of pretraining.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// Radians by which each pair of dimensions turns from one position to the next, `[head_dim / 2]`.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "computed as transformers does, in f32"
    )]
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let half = self.head_dim / 2;
        let frequencies = (0..half).map(|i| {
            // In f32, as in the reference: at high positions the difference from f64 grows into visible angles.
            let exponent = (2 * i) as f32 / self.head_dim as f32;
            1.0 / (self.theta as f32).powf(exponent)
        });
        match self.scaling {
            None => frequencies.collect(),
            Some(RopeScaling::Linear { factor }) => frequencies.map(|f| f / factor as f32).collect(),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }) => {
                let original = original_max_position_embeddings as f64;
                let scaled = frequencies.map(|frequency| {
                    let frequency = f64::from(frequency);
                    let wavelength = TAU / frequency;
                    if wavelength < original / high_freq_factor {
                        return frequency;
                    }
                    if wavelength > original / low_freq_factor {
                        return frequency / factor;
                    }
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                });
                scaled.map(|frequency| frequency as f32).collect()
            }
        }
    }
}
