//! Rotary frequencies, and how they are scaled for long contexts.

use std::f64::consts::TAU;

use serde::Serialize;

/// A rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: Option<RopeScaling>,
    /// Width of a head.
    pub head_dim: usize,
    /// How many numbers of a head turn, the first ones; even.
    pub width: usize,
    /// Which of them turn together.
    pub pairs: RopePairs,
    /// How queries grow with their position; absent: they do not.
    pub query_growth: Option<QueryGrowth>,
    /// Which of the three positions of a token turn which pairs; absent: tokens have one.
    pub axes: Option<RopeAxes>,
}

/// How a token's three positions share the pairs of a head: that of an image in the text, of a row in it and of a column. They are
/// equal in a text (Qwen2-VL, Wang et al., 2024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeAxes {
    /// How many pairs each of them turns.
    pub sections: [usize; 3],
    /// Whether they take turns as long as those of rows and of columns last (Qwen3-VL); else they follow one another.
    pub are_interleaved: bool,
}

impl RopeAxes {
    /// Which of the three turns a pair.
    #[must_use]
    pub fn of_pair(self, pair: usize) -> usize {
        let [first, rows, columns] = self.sections;
        match (self.are_interleaved, pair % 3) {
            (true, 1) if pair < 3 * rows => 1,
            (true, 2) if pair < 3 * columns => 2,
            (true, _) => 0,
            (false, _) => usize::from(pair >= first) + usize::from(pair >= first + rows),
        }
    }
}

/// Queries are multiplied by `1 + beta ln(1 + floor((position + first) / period))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// How fast they grow.
    pub beta: f64,
    /// Positions below this leave them as they are.
    pub period: usize,
    /// The number of the first position: 0 (Ministral 3) or 1 (Llama 4).
    pub first: usize,
}

impl QueryGrowth {
    /// How many periods are over at a position.
    #[must_use]
    pub fn num_periods(self, position: usize) -> usize {
        (position + self.first) / self.period
    }

    /// The factor of a position.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "a small number of periods, in f32"
    )]
    pub fn factor(self, position: usize) -> f32 {
        (1.0 + self.beta * (self.num_periods(position) as f64).ln_1p()) as f32
    }
}

/// Which numbers of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Each of the first half with one of the second half.
    Halves,
    /// Neighbours (GLM).
    Neighbours,
}

/// Change of the rotary frequencies for contexts longer than the model was pretrained on.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// `YaRN` (Peng et al., 2023): as [`Llama3`](Self::Llama3), with a ramp over the numbers of turns, and a factor of cosines
    /// and sines.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Frequencies with more turns than this in the original context are kept.
        beta_fast: f64,
        /// Frequencies with fewer turns than this are scaled by the full factor.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// Context length of pretraining.
        original_max_position_embeddings: usize,
    },
    /// Phi 3 (Ding et al., 2024): a divisor of each frequency, other ones in texts longer than the original context.
    LongRope {
        /// In texts up to the original context, `[width / 2]`.
        short_factor: Vec<f64>,
        /// In longer ones.
        long_factor: Vec<f64>,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// Context length of pretraining.
        original_max_position_embeddings: usize,
    },
    /// Only the first pairs turn, as fast as if all did (Gemma 4).
    Proportional {
        /// Number of pairs that turn.
        num_turning: usize,
        /// Divisor of the positions.
        factor: f64,
    },
    /// A larger base, the longer a text is beyond the model's positions.
    Dynamic {
        /// How much the base grows.
        factor: f64,
        /// Up to here it does not.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// The length on which the frequencies of texts of `longest` positions depend; 0 if they do not.
    #[must_use]
    pub fn reach(&self, longest: usize) -> usize {
        match &self.scaling {
            Some(RopeScaling::LongRope { original_max_position_embeddings: original, .. }) if longest > *original => {
                original + 1
            }
            Some(RopeScaling::Dynamic { original_max_position_embeddings: original, .. }) if longest > *original => {
                longest
            }
            _ => 0,
        }
    }

    /// Factor of cosines and sines.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            Some(RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. }) => {
                attention_factor
            }
            _ => 1.0,
        }
    }

    /// Radians by which each pair of dimensions turns from one position to the next, in texts of that [`reach`](Self::reach),
    /// `[width / 2]`.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "computed as transformers does, in f32"
    )]
    pub fn inverse_frequencies(&self, reach: usize) -> Vec<f32> {
        let powers = |theta: f64| {
            (0..self.width / 2).map(move |i| {
                // In f32, as in the reference: at high positions the difference from f64 grows into visible angles.
                let exponent = (2 * i) as f32 / self.width as f32;
                (theta as f32).powf(exponent)
            })
        };
        let plain = powers(self.theta).map(|power| 1.0 / power);
        match &self.scaling {
            None => plain.collect(),
            Some(RopeScaling::Proportional { num_turning, factor }) => {
                let turning = |(i, f)| if i < *num_turning { f / *factor as f32 } else { 0.0 };
                plain.enumerate().map(turning).collect()
            }
            Some(RopeScaling::Linear { factor }) => plain.map(|f| f / *factor as f32).collect(),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }) => {
                let original = *original_max_position_embeddings as f64;
                let scaled = plain.map(|frequency| {
                    let frequency = f64::from(frequency);
                    let wavelength = TAU / frequency;
                    // Llama 4's factors are equal.
                    if wavelength <= original / high_freq_factor {
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
            Some(RopeScaling::Yarn { factor, .. }) => {
                let scaled =
                    |(power, kept): (f32, f32)| 1.0 / (*factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept;
                powers(self.theta).zip(self.kept_by_yarn()).map(scaled).collect()
            }
            Some(RopeScaling::LongRope { short_factor, long_factor, .. }) => {
                let divisors = if reach > 0 { long_factor } else { short_factor };
                powers(self.theta).zip(divisors).map(|(power, divisor)| 1.0 / (*divisor as f32 * power)).collect()
            }
            Some(RopeScaling::Dynamic { factor, original_max_position_embeddings }) => {
                let ratio = reach as f64 / *original_max_position_embeddings as f64;
                let growth = if reach > 0 { factor * ratio - (factor - 1.0) } else { 1.0 };
                let width = self.width as f64;
                let theta = self.theta * growth.powf(width / (width - 2.0));
                powers(theta).map(|power| 1.0 / power).collect()
            }
        }
    }

    /// The share of every frequency that `YaRN` keeps.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "computed as transformers does")]
    fn kept_by_yarn(&self) -> Vec<f32> {
        let Some(RopeScaling::Yarn { beta_fast, beta_slow, truncate, original_max_position_embeddings, .. }) =
            self.scaling
        else {
            return Vec::new();
        };
        let width = self.width as f64;
        // The pair that turns so often in the original context.
        let pair = |turns: f64| {
            width * (original_max_position_embeddings as f64 / (turns * TAU)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(width - 1.0));
        if (high - low).abs() < f64::EPSILON {
            high += 0.001;
        }
        let ramp = |i: usize| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        (0..self.width / 2).map(|i| 1.0 - ramp(i)).collect()
    }
}
