//! Figures that ranks sum: by name here, in one order on their way.

use super::Ranks;
use crate::measure::figures::ObjectiveFigures;
use crate::train::loss::LossSum;
use crate::util::stats::{as_f64, as_u64};

/// Figures that are summed over ranks.
pub trait Summed: Sized {
    /// Them as numbers.
    fn pack(&self) -> Vec<f64>;

    /// The figures of such numbers.
    fn unpack(numbers: &mut dyn Iterator<Item = f64>) -> Self;

    /// Those of all ranks.
    #[must_use]
    fn over(&self, ranks: &mut dyn Ranks) -> Self {
        let mut numbers = self.pack();
        ranks.sum(&mut [], &mut numbers);
        Self::unpack(&mut numbers.into_iter())
    }
}

/// What a rank tells the others with its gradients; after that, whether any rank said so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankFlags {
    /// It was asked to stop.
    pub stop: bool,
    /// It has failed, and its gradients are of no use.
    pub failed: bool,
}

impl Summed for RankFlags {
    fn pack(&self) -> Vec<f64> {
        let Self { stop, failed } = *self;
        [stop, failed].map(|flag| f64::from(u8::from(flag))).into()
    }

    fn unpack(numbers: &mut dyn Iterator<Item = f64>) -> Self {
        let mut next = || numbers.next().is_some_and(|number| number > 0.0);
        Self { stop: next(), failed: next() }
    }
}

impl Summed for LossSum {
    fn pack(&self) -> Vec<f64> {
        let Self { sum, count, target_tokens, figures } = *self;
        [vec![sum, count, as_f64(target_tokens)], figures.numbers()].concat()
    }

    fn unpack(numbers: &mut dyn Iterator<Item = f64>) -> Self {
        let mut next = || numbers.next().unwrap_or_default();
        let (sum, count, target_tokens) = (next(), next(), as_u64(next()));
        Self { sum, count, target_tokens, figures: ObjectiveFigures::of_numbers(&numbers.collect::<Vec<_>>()) }
    }
}

/// What is summed with the gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::train) struct StepSums {
    /// Those of its ranks.
    pub(in crate::train) flags: RankFlags,
    /// Its loss.
    pub(in crate::train) loss: LossSum,
}

impl Summed for StepSums {
    fn pack(&self) -> Vec<f64> {
        let Self { flags, loss } = self;
        [flags.pack(), loss.pack()].concat()
    }

    fn unpack(numbers: &mut dyn Iterator<Item = f64>) -> Self {
        Self { flags: RankFlags::unpack(numbers), loss: LossSum::unpack(numbers) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::ranks::RankFigures;

    #[test]
    fn figures_come_out_under_the_names_under_which_they_went_in() {
        // As many numbers as there are, each another.
        let numbers: Vec<f64> =
            (0..ObjectiveFigures::default().numbers().len()).map(|number| 0.5 + as_f64(number)).collect();
        let figures = ObjectiveFigures::of_numbers(&numbers);
        assert_eq!(figures.numbers(), numbers);
        let loss = LossSum { sum: -1.0, count: -2.0, target_tokens: 3, figures };
        for (stop, failed) in [(false, false), (true, false), (false, true)] {
            let sums = StepSums { flags: RankFlags { stop, failed }, loss };
            assert_eq!(StepSums::unpack(&mut sums.pack().into_iter()), sums);
        }
        let own = RankFigures { busy_seconds: 1.0, data_wait_seconds: 2.0, tokens: 3.0 };
        assert_eq!(RankFigures::unpack(&mut own.pack().into_iter()), own);
    }
}
