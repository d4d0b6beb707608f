//! Candidates against the fastest settings so far, run in turn.

use super::search::TrialResult;
use super::settings::Settings;
use super::trial::{Figures, OUT_OF_TIME};
use super::verdict::{Comparison, MIN_ROUNDS, Noise, Round, Verdict, compare};

/// Runs of the recipe as it is before the first candidate: their differences are the noise to begin with.
const NUM_REPEATS: usize = 6;
/// No candidate takes more of the time than this share, so that one which is neither faster nor slower leaves some to the
/// others.
const SHARE_OF_TIME: f64 = 1.0 / 6.0;
/// Share of the time that is kept for the fastest against the recipe as it is, at the end.
const SHARE_OF_CONFIRMATION: f64 = 0.15;

/// Runs settings.
pub(super) type Measure<'a> = dyn FnMut(&Settings) -> Result<Figures, String> + 'a;

/// The settings that are to be beaten.
#[derive(Clone, Debug)]
pub(super) struct Incumbent {
    pub(super) settings: Settings,
    pub(super) figures: Figures,
    /// Speed over that of the recipe as it is.
    speedup: f64,
    /// Tokens per second of its latest run.
    rate: f64,
}

/// Runs candidates, and judges them.
pub(super) struct Contest<'a> {
    measure: &'a mut Measure<'a>,
    /// Share of the time that is left.
    time_left: &'a dyn Fn() -> f64,
    /// Hears what is being done.
    tell: &'a dyn Fn(Event<'_>),
    noise: Noise,
}

/// What is told while it happens.
pub(super) enum Event<'a> {
    /// The recipe as it is has been run several times.
    Started { noise: &'a Noise, num_runs: usize },
    /// A candidate is tried.
    Trying(&'a Settings),
    /// It has been.
    Tried(&'a TrialResult),
}

impl<'a> Contest<'a> {
    /// Nothing has been run yet.
    pub(super) fn new(
        measure: &'a mut Measure<'a>,
        time_left: &'a dyn Fn() -> f64,
        tell: &'a dyn Fn(Event<'_>),
    ) -> Self {
        Self { measure, time_left, tell, noise: Noise::default() }
    }

    /// How much rounds vary that should not.
    pub(super) fn noise(&self) -> &Noise {
        &self.noise
    }

    /// Runs the recipe as it is several times.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub(super) fn start(&mut self, base: &Settings) -> Result<Incumbent, String> {
        let start = (self.time_left)();
        let mut runs = Vec::new();
        let mut has_time = true;
        while runs.len() < NUM_REPEATS && (has_time || runs.len() < MIN_ROUNDS) {
            runs.push((self.measure)(base)?);
            has_time = start - (self.time_left)() < SHARE_OF_TIME;
        }
        let rates: Vec<f64> = runs.iter().map(|run| run.tokens_per_second).collect();
        self.noise.add_repeats(&rates);
        let figures = Figures::of_runs(&runs).ok_or("it was not run")?;
        (self.tell)(Event::Started { noise: &self.noise, num_runs: runs.len() });
        let rate = rates.last().copied().unwrap_or(figures.tokens_per_second);
        Ok(Incumbent { settings: base.clone(), figures, speedup: 1.0, rate })
    }

    /// Runs a candidate in turn with the incumbent, until it is clear which is faster; a faster one takes its place.
    ///
    /// # Errors
    ///
    /// Why the candidate does not run, or is not run.
    pub(super) fn against(
        &mut self,
        incumbent: &mut Incumbent,
        candidate: &Settings,
    ) -> Result<(Figures, TrialResult), String> {
        if (self.time_left)() <= SHARE_OF_CONFIRMATION {
            return Err(OUT_OF_TIME.into());
        }
        (self.tell)(Event::Trying(candidate));
        let start = (self.time_left)();
        let has_time = |left: f64, rounds: usize| {
            left > SHARE_OF_CONFIRMATION && (start - left < SHARE_OF_TIME || rounds < MIN_ROUNDS)
        };
        let (runs, comparison) = self.rounds(incumbent, candidate, &has_time)?;
        let Comparison { ratio, margin, rounds, verdict } = comparison;
        let speedup = incumbent.speedup * ratio;
        let result = TrialResult { speedup, noise: margin, rounds, verdict };
        (self.tell)(Event::Tried(&result));
        let figures = Figures::of_runs(&runs).ok_or("it was not run")?;
        if verdict == Verdict::Faster {
            let rate = runs.last().map_or(figures.tokens_per_second, |run| run.tokens_per_second);
            *incumbent = Incumbent { settings: candidate.clone(), figures: figures.clone(), speedup, rate };
        }
        Ok((figures, result))
    }

    /// Runs `fastest` in turn with the recipe as it is, all anew: what was luck does not show twice.
    ///
    /// # Errors
    ///
    /// What is wrong with one of them.
    pub(super) fn confirm(&mut self, base: &Settings, fastest: &Settings) -> Result<Comparison, String> {
        let figures = (self.measure)(base)?;
        let rate = figures.tokens_per_second;
        let mut incumbent = Incumbent { settings: base.clone(), figures, speedup: 1.0, rate };
        let has_time = |left: f64, rounds: usize| left > 0.0 || rounds < MIN_ROUNDS;
        self.rounds(&mut incumbent, fastest, &has_time).map(|(_, comparison)| comparison)
    }

    fn rounds(
        &mut self,
        incumbent: &mut Incumbent,
        candidate: &Settings,
        has_time: &dyn Fn(f64, usize) -> bool,
    ) -> Result<(Vec<Figures>, Comparison), String> {
        let (mut runs, mut rounds) = (Vec::new(), Vec::new());
        loop {
            let figures = (self.measure)(candidate)?;
            let again = (self.measure)(&incumbent.settings);
            let after = again.map_err(|error| format!("what it is compared with failed: {error}"))?.tokens_per_second;
            let before = std::mem::replace(&mut incumbent.rate, after);
            rounds.push(Round { before, candidate: figures.tokens_per_second, after });
            runs.push(figures);
            let comparison = compare(&rounds, &self.noise);
            if comparison.verdict != Verdict::Undecided || !has_time((self.time_left)(), rounds.len()) {
                self.noise.add_rounds(&rounds);
                return Ok((runs, comparison.settled()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::device::Dtype;
    use crate::train::config::GradientCheckpointing;

    #[test]
    fn a_candidate_that_is_ahead_in_its_only_round_is_not_settled() {
        let base = Settings {
            micro_batch_size: 4,
            gradient_accumulation_steps: 1,
            gradient_checkpointing: GradientCheckpointing::Off,
            num_workers: 1,
            packing: false,
            precision: Dtype::F32,
            storage: None,
        };
        let candidate = Settings { packing: true, ..base.clone() };
        let left = Cell::new(1.0);
        let mut measure = |settings: &Settings| {
            let rate = if settings.packing { 150.0 } else { 100.0 };
            if settings.packing {
                left.set(SHARE_OF_CONFIRMATION);
            }
            Ok(Figures {
                target_tokens_per_second: rate,
                tokens_per_second: rate,
                step_seconds: 1.0,
                data_wait_share: 0.0,
                peak_memory_bytes: None,
                loss: 1.0,
            })
        };
        let time_left = || left.get();
        let mut contest = Contest::new(&mut measure, &time_left, &|_| ());
        let mut incumbent = contest.start(&base).unwrap();
        let (_, result) = contest.against(&mut incumbent, &candidate).unwrap();
        assert_eq!((result.rounds, result.verdict), (1, Verdict::NotSettled));
        assert_eq!(incumbent.settings, base);
    }
}
