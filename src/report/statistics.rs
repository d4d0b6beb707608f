//! Medians, and what lies within the noise.

/// The value below which a share of the finite values lies, between neighbours in proportion.
#[must_use]
pub(super) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    #[expect(clippy::cast_precision_loss, reason = "numbers of steps")]
    let place = share.clamp(0.0, 1.0) * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the last place")]
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    Some(sorted[below] + (sorted[above] - sorted[below]) * place.fract())
}

/// How many of the first steps are warm-up, which compiles kernels, fills caches and measures the device: a tenth of
/// them, from 1 to 10; none of a single step.
#[must_use]
pub(super) fn num_warmup_steps(num_steps: usize) -> usize {
    (num_steps / 10).clamp(1, 10).min(num_steps.saturating_sub(1))
}

/// A median of consecutive steps and how well they tell it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) median: f64,
    /// Standard error of the median; `None` where there are too few steps to tell.
    pub(super) error: Option<f64>,
    /// Stretches that the error is taken from.
    num_stretches: usize,
}

/// Stretches of steps whose medians are compared, and the least number of steps in each.
const NUM_STRETCHES: usize = 12;
const MIN_STRETCH: usize = 3;

impl Measured {
    /// Of a figure of consecutive steps.
    ///
    /// Steps that follow each other are alike, since the machine is: as if they were independent, the error would come
    /// out too small. So it is taken from the medians of up to twelve stretches of steps (the method of batch means).
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        let median = quantile(&finite, 0.5)?;
        let num_stretches = NUM_STRETCHES.min(finite.len() / MIN_STRETCH);
        if num_stretches < 4 {
            return Some(Self { median, error: None, num_stretches });
        }
        let stretches = super::downsample::stretches(finite.len(), num_stretches);
        let medians: Vec<f64> = stretches.filter_map(|(start, end)| quantile(&finite[start..end], 0.5)).collect();
        #[expect(clippy::cast_precision_loss, reason = "at most twelve")]
        let count = medians.len() as f64;
        let mean = medians.iter().sum::<f64>() / count;
        let variance = medians.iter().map(|median| (median - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Self { median, error: Some((variance / count).sqrt()), num_stretches: medians.len() })
    }
}

/// Standard errors on either side that hold 95 % of what chance does: Student's t for 1, 2, ... degrees of freedom.
const NUM_ERRORS: [f64; 22] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074,
];

/// Standard errors on either side of a difference, of two errors from so many stretches each: with Welch's degrees of
/// freedom, rounded down.
fn num_errors([one, other]: [(f64, usize); 2]) -> f64 {
    let square = |(error, _): (f64, usize)| error * error;
    #[expect(clippy::cast_precision_loss, reason = "at most twelve")]
    let part = |of: (f64, usize)| square(of).powi(2) / of.1.saturating_sub(1).max(1) as f64;
    let freedom = (square(one) + square(other)).powi(2) / (part(one) + part(other));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped; NaN, of no error, becomes 0")]
    let place = (freedom.clamp(1.0, 22.0) + 1e-9) as usize;
    NUM_ERRORS[place.max(1) - 1]
}

/// How a median differs from that of a baseline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    /// `other / baseline - 1`.
    pub(super) relative: f64,
    /// The relative changes that chance leaves possible (95 %); `None` where there are too few steps to tell.
    pub(super) interval: Option<(f64, f64)>,
}

impl Change {
    pub(super) fn between(baseline: Measured, other: Measured) -> Option<Self> {
        if baseline.median <= 0.0 {
            return None;
        }
        let relative = other.median / baseline.median - 1.0;
        let interval = baseline.error.zip(other.error).map(|(of_baseline, of_other)| {
            // Of a quotient: relative errors add up as squares. As a factor, so that twice as slow and half as fast say
            // the same.
            let own = if other.median > 0.0 { of_other / other.median } else { 0.0 };
            let of_baseline = of_baseline / baseline.median;
            let num_errors = num_errors([(of_baseline, baseline.num_stretches), (own, other.num_stretches)]);
            let factor = (num_errors * (of_baseline.powi(2) + own.powi(2)).sqrt()).exp();
            let ratio = other.median / baseline.median;
            (ratio / factor - 1.0, ratio * factor - 1.0)
        });
        Some(Self { relative, interval })
    }

    /// Whether chance alone may be behind it; `None` where there are too few steps to tell.
    pub(super) fn is_noise(&self) -> Option<bool> {
        self.interval.map(|(low, high)| low <= 0.0 && high >= 0.0)
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        assert_eq!(quantile(&[4.0, 1.0, f64::NAN, 3.0, 2.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[1.0, 2.0, 3.0], 0.95), Some(2.9));
        assert_eq!((quantile(&[7.0], 0.95), quantile(&[f64::NAN], 0.5)), (Some(7.0), None));
    }

    #[test]
    fn the_first_steps_are_warm_up_but_never_all() {
        assert_eq!([0, 1, 2, 30, 200].map(num_warmup_steps), [0, 0, 1, 3, 10]);
    }

    /// Step times around a level, each like the one before.
    fn steps(level: f64, seed: u64) -> Vec<f64> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut drift = 0.0;
        let mut step = || {
            drift = 0.8 * drift + random.random_range(-0.03..0.03);
            level * (1.0 + drift)
        };
        (0..200).map(|_| step()).collect()
    }

    #[test]
    fn chance_is_called_chance_in_nineteen_of_twenty_pairs_of_equal_runs() {
        let change = |seed| {
            let [one, other] = [seed, seed + 1000].map(|seed| Measured::of(&steps(1.0, seed)).unwrap());
            Change::between(one, other).unwrap()
        };
        let called_real = (0..200).filter(|seed| change(*seed).is_noise() == Some(false)).count();
        // 5 % of 200, and room for what neighbouring stretches share.
        assert!(called_real <= 24, "{called_real} of 200");
    }

    #[test]
    fn few_stretches_leave_more_to_chance() {
        // Student's t at 97.5 %: 6 degrees of freedom of two times 4 stretches, 22 of two times 12, and 3 where one of
        // the errors is nothing.
        assert_eq!(num_errors([(0.01, 4), (0.01, 4)]), 2.447);
        assert_eq!(num_errors([(0.01, 12), (0.01, 12)]), 2.074);
        assert_eq!(num_errors([(0.0, 12), (0.01, 4)]), 3.182);
        let change = |seed: u64| {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut run = || {
                let steps: Vec<f64> = (0..12).map(|_| 1.0 + random.random_range(-0.03..0.03)).collect();
                Measured::of(&steps).unwrap()
            };
            Change::between(run(), run()).unwrap()
        };
        let called_real = (0..4000).filter(|seed| change(*seed).is_noise() == Some(false)).count();
        // 5 % of 4000, and a little; with the quantile of many stretches it would be 8 %.
        assert!(called_real <= 240, "{called_real} of 4000");
    }

    #[test]
    fn a_tenth_slower_is_no_chance_and_the_interval_holds_it() {
        let [one, other] = [(1.0, 1), (1.1, 2)].map(|(level, seed)| Measured::of(&steps(level, seed)).unwrap());
        let change = Change::between(one, other).unwrap();
        assert_eq!(change.is_noise(), Some(false));
        let (low, high) = change.interval.unwrap();
        assert!(low < 0.1 && 0.1 < high && high - low < 0.1, "{change:?}");
    }

    #[test]
    fn a_few_steps_tell_nothing_about_chance() {
        let few = Measured::of(&[1.0, 1.1, 0.9, 1.0, 1.2]).unwrap();
        assert_eq!((few.median, few.error), (1.0, None));
        assert_eq!(Change::between(few, few).unwrap().is_noise(), None);
    }
}
