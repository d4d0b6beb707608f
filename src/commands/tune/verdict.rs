//! Whether a candidate is faster, or whether the machine only looked so: a pure function from what was measured.
//!
//! Nothing is compared with a figure from long ago. A candidate's run lies between two runs of the settings that it is to
//! beat, and what counts are the ratios to these neighbours: a machine that gets slower or faster meanwhile takes all three
//! along. The median of these ratios is believed where it is more than the noise, which is how much rounds differ that should
//! not.

use serde::Serialize;

/// A gain below this is not worth another recipe.
pub(super) const GAIN: f64 = 1.03;
/// Fewer rounds than these show no gain.
pub(super) const MIN_ROUNDS: usize = 3;
/// What is not clear after these is within the noise.
const MAX_ROUNDS: usize = 100;
/// Standard errors by which a candidate has to be ahead. So many, because every round is another look, at every candidate.
const NUM_STANDARD_ERRORS: f64 = 5.0;
/// Standard errors that a candidate may lack of a gain that could be seen in the end, for more rounds to be worth their time.
const HOPE: f64 = 2.0;
/// What seems to be the noise is taken for more by this over its degrees of freedom: two or three rounds may agree by luck.
const DOUBT: f64 = 3.0;
/// The least that rounds are thought to vary by, in natural logarithms: runs that agree to the last digit are luck.
const LEAST_NOISE: f64 = 0.01;

/// Speed of a candidate, and of what it is to beat right before and right after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Round {
    pub(super) before: f64,
    pub(super) candidate: f64,
    pub(super) after: f64,
}

impl Round {
    /// Logarithms of the candidate's speed over that of each of its neighbours.
    ///
    /// One by one, since of equal settings either is as likely to be the faster. The mean of two is not: what slows runs
    /// down now and then slows one of two more often than one alone, and a median of such ratios would favour the candidate.
    fn log_ratios(&self) -> [f64; 2] {
        [self.candidate.ln() - self.before.ln(), self.candidate.ln() - self.after.ln()]
    }

    /// Their mean, from which steady drift is gone.
    fn log_ratio(&self) -> f64 {
        self.candidate.ln() - f64::midpoint(self.before.ln(), self.after.ln())
    }
}

/// How much rounds vary on this machine that should not: rounds of equal settings, and rounds of one candidate.
#[derive(Clone, Debug, Default)]
pub(super) struct Noise {
    /// Sum of the squares of the deviations.
    squares: f64,
    /// Their degrees of freedom.
    count: f64,
}

impl Noise {
    /// Takes in runs of the same settings, one after the other: each of them is the candidate of a round that should be 1.
    pub(super) fn add_repeats(&mut self, rates: &[f64]) {
        for neighbours in rates.windows(3) {
            if let [before, candidate, after] = *neighbours {
                self.add(Round { before, candidate, after }.log_ratio());
            }
        }
    }

    /// Takes in what the rounds of one candidate differ by from each other: a single one says nothing.
    pub(super) fn add_rounds(&mut self, rounds: &[Round]) {
        if rounds.len() > 1 {
            self.squares += squared_deviations(rounds);
            self.count += as_f64(rounds.len() - 1);
        }
    }

    fn add(&mut self, deviation: f64) {
        self.squares += deviation * deviation;
        self.count += 1.0;
    }

    /// By how much one round varies (standard deviation), as a share: a difference of logarithms.
    pub(super) fn of_a_round(&self) -> f64 {
        let deviation = if self.count > 0.0 { (self.squares / self.count).sqrt() } else { 0.0 };
        deviation.max(LEAST_NOISE)
    }
}

fn middle_of(rounds: &[Round]) -> f64 {
    median(&rounds.iter().flat_map(Round::log_ratios).collect::<Vec<_>>())
}

/// Sum of the squares of the rounds' deviations from their median, which has a degree of freedom less than rounds, since
/// the median is their own.
fn squared_deviations(rounds: &[Round]) -> f64 {
    let middle = middle_of(rounds);
    rounds.iter().map(|round| (round.log_ratio() - middle).powi(2)).sum()
}

/// What the rounds say of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// More rounds may tell.
    Undecided,
    /// By more than the noise, and by more than [`GAIN`].
    Faster,
    /// By more than the noise, but too little to be worth it.
    HardlyFaster,
    /// Not to be told from what it was to beat.
    WithinNoise,
    /// Ahead by more than the noise, in fewer rounds than it takes to believe that.
    NotSettled,
    /// By more than the noise.
    Slower,
}

/// A candidate against the settings that it was to beat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Comparison {
    /// Its speed over theirs, the median of the ratios to its neighbours.
    pub(super) ratio: f64,
    /// What it has to be ahead by, as a share.
    pub(super) margin: f64,
    pub(super) rounds: usize,
    pub(super) verdict: Verdict,
}

impl Comparison {
    /// The same where there is no time for more rounds.
    pub(super) fn settled(self) -> Self {
        let verdict = match self.verdict {
            Verdict::Undecided if self.ratio.ln() > self.margin => Verdict::NotSettled,
            Verdict::Undecided => Verdict::WithinNoise,
            decided => decided,
        };
        Self { verdict, ..self }
    }
}

/// Judges a candidate by its rounds and by what is known of the noise.
pub(super) fn compare(rounds: &[Round], noise: &Noise) -> Comparison {
    let (middle, count) = (middle_of(rounds), as_f64(rounds.len()));
    let own_squares = squared_deviations(rounds);
    let own = (own_squares / (count - 1.0).max(1.0)).sqrt();
    // The machine may have become noisier since, or these rounds may agree by luck.
    let freedom = (count - 1.0 + noise.count).max(1.0);
    let all = ((own_squares + noise.squares) / freedom).sqrt();
    let deviation = (own.max(all) * (1.0 + DOUBT / freedom)).max(LEAST_NOISE);
    let error = deviation / count.sqrt();
    let margin = NUM_STANDARD_ERRORS * error;
    let gain = GAIN.ln();
    let visible = gain.max(NUM_STANDARD_ERRORS * deviation / as_f64(MAX_ROUNDS).sqrt());
    let has_enough = rounds.len() >= MIN_ROUNDS;
    let verdict = if has_enough && middle > margin.max(gain) {
        Verdict::Faster
    } else if middle + margin < gain || (has_enough && middle + HOPE * error < visible) || rounds.len() >= MAX_ROUNDS {
        // No gain that is worth it, and could be seen, is to be hoped for any more.
        match middle {
            _ if middle < -margin => Verdict::Slower,
            _ if middle > margin => Verdict::HardlyFaster,
            _ => Verdict::WithinNoise,
        }
    } else {
        Verdict::Undecided
    };
    Comparison { ratio: middle.exp(), margin, rounds: rounds.len(), verdict }
}

/// The middle one, or the mean of the two in the middle; `NaN` of nothing.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.get(half), half.checked_sub(1).and_then(|below| sorted.get(below))) {
        (Some(upper), Some(lower)) if sorted.len().is_multiple_of(2) => f64::midpoint(*lower, *upper),
        (Some(middle), _) => *middle,
        _ => f64::NAN,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few rounds")]
fn as_f64(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of a candidate `ratio` times as fast, on a machine whose speed at run number n is `machine(n)`.
    fn rounds(ratio: f64, count: u32, machine: impl Fn(f64) -> f64) -> Vec<Round> {
        let round = |index| {
            let at = 2.0 * f64::from(index);
            Round { before: machine(at), candidate: ratio * machine(at + 1.0), after: machine(at + 2.0) }
        };
        (0..count).map(round).collect()
    }

    fn quiet() -> Noise {
        let mut noise = Noise::default();
        noise.add_repeats(&[100.0, 101.0, 100.0, 99.5, 100.2]);
        noise
    }

    #[test]
    fn a_gain_is_believed_after_three_rounds_on_a_quiet_machine_and_not_before() {
        let of = |count| compare(&rounds(1.3, count, |_| 100.0), &quiet());
        assert_eq!((of(1).verdict, of(2).verdict), (Verdict::Undecided, Verdict::Undecided));
        assert_eq!((of(3).verdict, of(3).rounds), (Verdict::Faster, 3));
        assert!((of(3).ratio - 1.3).abs() < 1e-12 && of(3).margin < 0.05, "{:?}", of(3));
    }

    #[test]
    fn one_round_is_enough_for_what_is_much_slower() {
        assert_eq!(compare(&rounds(0.7, 1, |_| 100.0), &quiet()).verdict, Verdict::Slower);
    }

    #[test]
    fn where_little_is_known_of_the_noise_one_round_is_not_enough() {
        let mut noise = Noise::default();
        noise.add_repeats(&[100.0, 102.0, 100.0]);
        let slower = rounds(0.87, 3, |_| 100.0);
        assert_eq!(compare(&slower[..1], &noise).verdict, Verdict::Undecided);
        assert_eq!(compare(&slower, &noise).verdict, Verdict::Slower);
    }

    #[test]
    fn a_machine_that_drifts_by_a_third_makes_no_winner_and_hides_none() {
        // Slower by 30 % over the rounds, faster by 30 %, and up and down.
        let drifts: [fn(f64) -> f64; 3] = [
            |at| 100.0 * (1.0 - 0.3 * at / 24.0),
            |at| 100.0 * (1.0 + 0.3 * at / 24.0),
            |at| 100.0 * (1.0 + 0.15 * (at / 4.0).sin()),
        ];
        for drift in drifts {
            for count in 1..=12 {
                let same = compare(&rounds(1.0, count, drift), &quiet());
                assert_ne!(same.verdict, Verdict::Faster, "{same:?}");
            }
            let found = compare(&rounds(1.3, 6, drift), &quiet());
            assert_eq!(found.verdict, Verdict::Faster, "{found:?}");
            assert!((found.ratio - 1.3).abs() < 0.03, "{found:?}");
        }
    }

    #[test]
    fn a_sudden_change_in_the_middle_of_a_round_is_not_taken_for_a_gain() {
        // Just after the candidate's run of the second round the machine loses 30 %.
        let same = rounds(1.0, 12, |at| if at > 3.0 { 70.0 } else { 100.0 });
        for count in 1..=12 {
            let verdict = compare(&same[..count], &quiet()).verdict;
            assert_ne!(verdict, Verdict::Faster, "{count} rounds");
        }
        assert_eq!(compare(&same, &quiet()).settled().verdict, Verdict::WithinNoise);
    }

    #[test]
    fn a_hiccup_in_a_run_does_not_hide_a_gain() {
        let found = compare(&rounds(1.3, 12, |at| if at == 4.0 { 70.0 } else { 100.0 }), &quiet());
        assert_eq!(found.verdict, Verdict::Faster, "{found:?}");
        assert!((found.ratio - 1.3).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn what_is_too_little_is_told_apart_from_what_cannot_be_seen() {
        let noise = quiet();
        assert_eq!(compare(&rounds(1.025, 20, |_| 100.0), &noise).verdict, Verdict::HardlyFaster);
        assert_eq!(compare(&rounds(1.01, 12, |_| 100.0), &noise).verdict, Verdict::WithinNoise);
        let undecided = compare(&rounds(1.04, 4, |at| if at == 1.0 { 90.0 } else { 100.0 }), &noise);
        assert_eq!((undecided.verdict, undecided.settled().verdict), (Verdict::Undecided, Verdict::WithinNoise));
    }

    #[test]
    fn what_is_ahead_when_the_time_is_over_is_not_called_noise() {
        let cut_off = |ratio| compare(&rounds(ratio, 2, |_| 100.0), &quiet()).settled().verdict;
        assert_eq!((cut_off(1.5), cut_off(1.02)), (Verdict::NotSettled, Verdict::WithinNoise));
    }

    #[test]
    fn a_single_round_says_nothing_of_the_noise() {
        let mut noise = Noise::default();
        noise.add_repeats(&[100.0, 120.0, 100.0]);
        let of_a_round = 1.2_f64.ln();
        for _ in 0..10 {
            noise.add_rounds(&rounds(1.1, 1, |_| 100.0));
        }
        assert!((noise.of_a_round() - of_a_round).abs() < 1e-12, "{noise:?}");
        let one = compare(&rounds(1.1, 1, |_| 100.0), &noise);
        assert!((one.margin - NUM_STANDARD_ERRORS * (1.0 + DOUBT) * of_a_round).abs() < 1e-9, "{one:?}");
        // Two that agree are one degree of freedom.
        noise.add_rounds(&rounds(1.1, 2, |_| 100.0));
        assert!((noise.of_a_round() - of_a_round / 2.0_f64.sqrt()).abs() < 1e-12, "{noise:?}");
    }

    #[test]
    fn what_now_and_then_slows_a_run_favours_no_candidate() {
        // Every run that is the third of three takes twice as long, whichever it is.
        let same = compare(&rounds(1.0, 60, |at| if at % 3.0 == 0.0 { 50.0 } else { 100.0 }), &quiet());
        assert_eq!(same.ratio, 1.0, "{same:?}");
    }

    #[test]
    fn noise_is_what_neighbours_differ_by_and_not_what_drift_does() {
        let mut noise = Noise::default();
        noise.add_repeats(&[100.0, 90.0, 81.0, 72.9, 65.61]);
        assert!((noise.of_a_round() - LEAST_NOISE).abs() < 1e-12, "{noise:?}");
        noise.add_repeats(&[100.0, 120.0, 100.0]);
        assert!((noise.of_a_round() - (1.2_f64.ln().powi(2) / 4.0).sqrt()).abs() < 1e-9, "{noise:?}");
    }
}
