//! Rotary frequencies, with the scaling of Llama 3.1 and 3.2.

use std::f64::consts::TAU;
use std::sync::Arc;

use crate::ops::layout::RotaryTable;
use crate::spec::{ModelConfig, RopeScaling};

impl ModelConfig {
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
            1.0 / (self.rope_theta as f32).powf(exponent)
        });
        match self.rope_scaling {
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

    /// Cosines and sines of positions `0..num_positions`. Angles are computed in `f32` for every precision.
    #[must_use]
    pub fn rotary_table(&self, num_positions: usize) -> Arc<RotaryTable> {
        let frequencies = self.inverse_frequencies();
        let angles = || {
            #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
            (0..num_positions).flat_map(|position| frequencies.iter().map(move |f| position as f32 * f))
        };
        Arc::new(RotaryTable::new(
            angles().map(f32::cos).collect(),
            angles().map(f32::sin).collect(),
            self.head_dim / 2,
        ))
    }
}
