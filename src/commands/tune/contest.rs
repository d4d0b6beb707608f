//! Candidates against the fastest settings so far, run in turn.

use super::axis::Axis;
use super::search::TrialResult;
use super::settings::Settings;
use super::trial::{Figures, OUT_OF_TIME};
use super::verdict::{Comparison, MIN_ROUNDS, Noise, Round, Verdict, compare};

/// Runs of the recipe as it is before the first candidate: their differences are the noise to begin with.
pub(super) const NUM_REPEATS: usize = 6;
/// No candidate takes more of the time than this share, so that one which is neither faster nor slower leaves some to the
/// others.
const SHARE_OF_TIME: f64 = 1.0 / 6.0;
/// Share of the time that is kept for the fastest against the recipe as it is, at the end.
pub(super) const SHARE_OF_CONFIRMATION: f64 = 0.15;

/// Runs settings.
pub(super) type Measure<'a> = dyn FnMut(&Settings) -> Result<Figures, String> + 'a;

/// The settings that are to be beaten.
#[derive(Clone, Debug)]
pub(super) struct Incumbent {
    pub(super) settings: Settings,
    pub(super) figures: Figures,
    /// Speed over that of the recipe as it is.
    speedup: f64,
    /// Tokens per second of its latest run, where nothing has been run since.
    rate: Option<f64>,
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
    /// What comes now: so many candidates that fit, of these kinds, of which the first `num_promising` are what the runs of the
    /// recipe as it is ask for. One such run takes `run_seconds`.
    Planned { axes: &'a [Axis], num_promising: usize, num_candidates: usize, run_seconds: f64 },
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

    /// Tells what is being done.
    pub(super) fn tell(&self, event: Event<'_>) {
        (self.tell)(event);
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
        Ok(Incumbent { settings: base.clone(), figures, speedup: 1.0, rate: rates.last().copied() })
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
            // The settings that it beat were the last to be run.
            *incumbent = Incumbent { settings: candidate.clone(), figures: figures.clone(), speedup, rate: None };
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
        let rate = Some(figures.tokens_per_second);
        let mut incumbent = Incumbent { settings: base.clone(), figures, speedup: 1.0, rate };
        let has_time = |left: f64, rounds: usize| left > 0.0 || rounds < MIN_ROUNDS;
        self.rounds(&mut incumbent, fastest, &has_time).map(|(_, comparison)| comparison)
    }

    /// Runs both in turn. Where the time ends in the middle of a round, those before it count.
    fn rounds(
        &mut self,
        incumbent: &mut Incumbent,
        candidate: &Settings,
        has_time: &dyn Fn(f64, usize) -> bool,
    ) -> Result<(Vec<Figures>, Comparison), String> {
        let (mut runs, mut rounds) = (Vec::new(), Vec::new());
        loop {
            match self.round(incumbent, candidate) {
                Ok((figures, round)) => {
                    runs.push(figures);
                    rounds.push(round);
                }
                Err(error) if error == OUT_OF_TIME && !rounds.is_empty() => {
                    let comparison = compare(&rounds, &self.noise).settled();
                    self.noise.add_rounds(&rounds);
                    return Ok((runs, comparison));
                }
                Err(error) => return Err(error),
            }
            let comparison = compare(&rounds, &self.noise);
            if comparison.verdict != Verdict::Undecided || !has_time((self.time_left)(), rounds.len()) {
                self.noise.add_rounds(&rounds);
                return Ok((runs, comparison.settled()));
            }
        }
    }

    /// Runs a candidate between two runs of the incumbent.
    fn round(&mut self, incumbent: &mut Incumbent, candidate: &Settings) -> Result<(Figures, Round), String> {
        let before = match incumbent.rate.take() {
            Some(rate) => rate,
            None => self.rate_of(&incumbent.settings)?,
        };
        let figures = (self.measure)(candidate)?;
        let after = self.rate_of(&incumbent.settings)?;
        incumbent.rate = Some(after);
        let round = Round { before, candidate: figures.tokens_per_second, after };
        Ok((figures, round))
    }

    /// Tokens per second of the settings that are to be beaten.
    fn rate_of(&mut self, settings: &Settings) -> Result<f64, String> {
        let figures = (self.measure)(settings).map_err(|error| match error {
            error if error == OUT_OF_TIME => error,
            error => format!("what it is compared with failed: {error}"),
        })?;
        Ok(figures.tokens_per_second)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::device::Dtype;
    use crate::train::config::GradientCheckpointing;

    fn base() -> Settings {
        Settings {
            micro_batch_size: 4,
            gradient_accumulation_steps: 1,
            gradient_checkpointing: GradientCheckpointing::Off,
            loss_chunk_tokens: None,
            num_workers: 1,
            prefetch_batches: 4,
            packing: false,
            precision: Dtype::F32,
            storage: None,
        }
    }

    fn figures(rate: f64) -> Figures {
        Figures {
            target_tokens_per_second: rate,
            tokens_per_second: rate,
            step_seconds: 1.0,
            data_wait_share: 0.0,
            steps_of_epoch: 100.0,
            run_seconds: 1.0,
            advised_keys: Vec::new(),
            peak_memory_bytes: None,
            loss: 1.0,
        }
    }

    #[test]
    fn a_candidate_that_is_ahead_in_its_only_round_is_not_settled() {
        let base = base();
        let candidate = Settings { packing: true, ..base.clone() };
        let left = Cell::new(1.0);
        let mut measure = |settings: &Settings| {
            if settings.packing {
                left.set(SHARE_OF_CONFIRMATION);
            }
            Ok(figures(if settings.packing { 150.0 } else { 100.0 }))
        };
        let time_left = || left.get();
        let mut contest = Contest::new(&mut measure, &time_left, &|_| ());
        let mut incumbent = contest.start(&base).unwrap();
        let (_, result) = contest.against(&mut incumbent, &candidate).unwrap();
        assert_eq!((result.rounds, result.verdict), (1, Verdict::NotSettled));
        assert_eq!(incumbent.settings, base);
    }

    #[test]
    fn what_is_compared_with_was_run_right_before() {
        let base = base();
        let settings = [
            Settings { num_workers: 2, ..base.clone() },
            Settings { packing: true, ..base.clone() },
            Settings { packing: true, num_workers: 4, ..base.clone() },
        ];
        let runs = RefCell::new(Vec::new());
        let mut measure = |settings: &Settings| {
            runs.borrow_mut().push(settings.clone());
            match settings.num_workers {
                2 => Err("no more threads".to_owned()),
                _ => Ok(figures(if settings.packing { 150.0 } else { 100.0 })),
            }
        };
        let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
        let mut incumbent = contest.start(&base).unwrap();
        let [fails, faster, same] = &settings;
        // After the recipe as it is; after one that failed; after one that was faster.
        assert_eq!(contest.against(&mut incumbent, fails).unwrap_err(), "no more threads");
        contest.against(&mut incumbent, faster).unwrap();
        contest.against(&mut incumbent, same).unwrap();
        let runs = runs.borrow();
        let before = |candidate| {
            let at = runs.iter().position(|settings| settings == candidate).unwrap();
            runs[at - 1].clone()
        };
        assert_eq!([before(fails), before(faster), before(same)], [base.clone(), base, faster.clone()]);
    }

    #[test]
    fn rounds_that_were_run_before_the_time_was_over_count() {
        let base = base();
        let candidate = Settings { packing: true, ..base.clone() };
        // Six runs of the recipe as it is, then in turn.
        for (rate, cut_off, rounds, expected) in
            [(150.0, 9, 1, Verdict::NotSettled), (50.0, 7, 0, Verdict::Undecided), (150.0, 8, 0, Verdict::Undecided)]
        {
            let runs = Cell::new(0);
            let mut measure = |settings: &Settings| {
                runs.set(runs.get() + 1);
                match settings.packing {
                    _ if runs.get() >= cut_off => Err(OUT_OF_TIME.to_owned()),
                    packing => Ok(figures(if packing { rate } else { 100.0 })),
                }
            };
            let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
            let mut incumbent = contest.start(&base).unwrap();
            match contest.against(&mut incumbent, &candidate) {
                Ok((_, result)) => assert_eq!((result.rounds, result.verdict), (rounds, expected)),
                Err(error) => assert_eq!((error.as_str(), rounds), (OUT_OF_TIME, 0)),
            }
        }
    }
}
