//! Compares a candidate with the fastest recipe: both run in turn, pair by pair, so that changes in the machine's speed
//! affect both.

use serde::Serialize;

use super::trial::Figures;
use crate::recipe::Recipe;
use crate::stats::median;

/// Smallest gain, as the median of the pairs' ratios. Less is not worth another recipe and may be noise of the machine.
pub(super) const MIN_GAIN: f64 = 1.02;
/// Pairs of runs per candidate.
pub(super) const NUM_PAIRS: usize = 5;
/// Pairs that the candidate must win.
const MIN_NUM_FASTER: usize = 4;

pub(super) type Measure<'a> = dyn FnMut(&Recipe) -> Result<Figures, String> + 'a;

/// Result of a candidate's pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Paired {
    /// The candidate's tokens a second relative to the other recipe's, the median over the pairs.
    pub(super) ratio: f64,
    pub(super) num_pairs: usize,
    /// Pairs that the candidate won.
    pub(super) num_faster: usize,
}

impl Paired {
    fn of(ratios: &[f64]) -> Self {
        let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        Self { ratio: median(ratios).unwrap_or(f64::NAN), num_pairs: ratios.len(), num_faster }
    }

    pub(super) fn is_faster(&self) -> bool {
        self.ratio >= MIN_GAIN && self.num_faster >= MIN_NUM_FASTER
    }
}

/// Runs `best` and `candidate` in turn, until the candidate has run all its pairs or lost too many. Returns the figures
/// of the candidate's median run.
///
/// # Errors
///
/// Why one of them did not run.
pub(super) fn run(best: &Recipe, candidate: &Recipe, measure: &mut Measure<'_>) -> Result<(Figures, Paired), String> {
    let (mut runs, mut ratios): (Vec<Figures>, Vec<f64>) = (Vec::new(), Vec::new());
    loop {
        // Each goes first in every other pair, so that steady drift favours neither.
        let (before, figures) = if ratios.len().is_multiple_of(2) {
            (measure(best)?, measure(candidate)?)
        } else {
            let figures = measure(candidate)?;
            (measure(best)?, figures)
        };
        ratios.push(figures.speed.tokens_per_second / before.speed.tokens_per_second);
        runs.push(figures);
        let paired = Paired::of(&ratios);
        if paired.num_pairs == NUM_PAIRS || paired.num_pairs - paired.num_faster > NUM_PAIRS - MIN_NUM_FASTER {
            runs.sort_by(|one, other| one.speed.tokens_per_second.total_cmp(&other.speed.tokens_per_second));
            return Ok((runs.swap_remove(runs.len() / 2), paired));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_candidate_is_faster_by_the_median_and_in_most_pairs() {
        let is_faster = |ratios: &[f64]| Paired::of(ratios).is_faster();
        assert!(is_faster(&[1.3, 1.3, 1.3, 1.3, 1.3]));
        assert!(is_faster(&[1.3, 0.5, 1.3, 1.2, 1.4]), "one run that the machine disturbed");
        assert!(!is_faster(&[1.3, 0.9, 1.3, 0.9, 1.3]));
        assert!(!is_faster(&[1.01; 5]));
        assert!(!is_faster(&[1.3]));
    }
}
