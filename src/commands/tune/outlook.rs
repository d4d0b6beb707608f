//! What can be tried in the time there is, told before the first candidate.

use super::contest::{NUM_REPEATS, SHARE_OF_CONFIRMATION};
use super::verdict::MIN_ROUNDS;

/// With time for fewer candidates than these the search is told to be a poor one.
const FEW_CANDIDATES: usize = 3;

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outlook {
    /// One run of the recipe as it is, from the start of its process to its end.
    pub(super) run_seconds: f64,
    /// Time that the runs of the recipe as it is have taken.
    pub(super) spent_seconds: f64,
    /// Candidates that fit, those left aside that follow from a better one.
    pub(super) num_candidates: usize,
}

impl Outlook {
    /// Time of a candidate that is found to be faster, each time between two runs of what it beats.
    fn candidate_seconds(&self) -> f64 {
        2.0 * as_f64(MIN_ROUNDS) * self.run_seconds
    }

    /// For how many candidates there is time, but not more than there are.
    fn num_within(&self, max_minutes: f64) -> usize {
        let seconds = 60.0 * max_minutes * (1.0 - SHARE_OF_CONFIRMATION) - self.spent_seconds;
        (1..=self.num_candidates).take_while(|count| as_f64(*count) * self.candidate_seconds() <= seconds).count()
    }

    /// The `--max-minutes` that is enough for all candidates.
    fn minutes_for_all(&self) -> f64 {
        // With more time the recipe as it is is run more often.
        let repeats = self.spent_seconds.max(as_f64(NUM_REPEATS) * self.run_seconds);
        let seconds = repeats + as_f64(self.num_candidates) * self.candidate_seconds();
        (seconds / (1.0 - SHARE_OF_CONFIRMATION) / 60.0).ceil()
    }

    /// For people.
    pub(super) fn text(&self, max_minutes: f64) -> String {
        let Self { run_seconds, num_candidates, .. } = *self;
        let run = format!("one run takes {run_seconds:.1} s, a candidate that is faster {} of them", 2 * MIN_ROUNDS);
        match self.num_within(max_minutes) {
            within if within == num_candidates => format!("{run}: there is time for all {num_candidates} candidates"),
            within => {
                let few = if within < FEW_CANDIDATES { ", which is too few to find much" } else { "" };
                format!(
                    "{run}: the time is enough for about {within} of {num_candidates} candidates{few}; for all of them \
                     --max-minutes {:.0} would do",
                    self.minutes_for_all()
                )
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few runs")]
fn as_f64(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_model_is_told_for_how_many_candidates_the_time_is_enough_and_what_would_do() {
        // Of 10 minutes 8.5 are for candidates, of which two are gone; a candidate takes four.
        let large = Outlook { run_seconds: 40.0, spent_seconds: 120.0, num_candidates: 8 };
        assert_eq!(large.num_within(10.0), 1);
        assert_eq!(
            large.text(10.0),
            "one run takes 40.0 s, a candidate that is faster 6 of them: the time is enough for about 1 of 8 candidates, \
             which is too few to find much; for all of them --max-minutes 43 would do"
        );
        assert_eq!(large.num_within(large.minutes_for_all()), 8);
        assert!(large.text(20.0).contains("about 3 of 8 candidates; for all"), "{}", large.text(20.0));
    }

    #[test]
    fn a_small_model_has_time_for_all() {
        let small = Outlook { run_seconds: 0.8, spent_seconds: 4.8, num_candidates: 8 };
        assert!(small.text(10.0).ends_with("there is time for all 8 candidates"), "{}", small.text(10.0));
        assert_eq!(small.num_within(0.01), 0);
        let slower = Outlook { run_seconds: 8.0, spent_seconds: 48.0, num_candidates: 8 };
        assert_eq!((slower.num_within(10.0), slower.minutes_for_all()), (8, 9.0));
    }
}
