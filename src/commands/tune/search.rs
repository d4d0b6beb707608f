//! Chooses the changes to keep: tries one axis after another and keeps the best change of each. A candidate and the
//! fastest recipe so far run in turn, pair by pair, so that changes in the machine's speed affect both.

use std::collections::VecDeque;

use serde::Serialize;

use super::axis::{Axis, Limits, changes, have_same_numbers, rows_of_step};
use super::trial::Figures;
use crate::recipe::Recipe;
use crate::util::stats::quantile;

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
    /// Half of the range of the pairs' ratios, relative to their median.
    pub(super) spread: f64,
}

impl Paired {
    fn of(ratios: &[f64]) -> Self {
        let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        let [low, ratio, high] = [0.0, 0.5, 1.0].map(|share| quantile(ratios, share).unwrap_or(f64::NAN));
        Self { ratio, num_pairs: ratios.len(), num_faster, spread: (high - low) / 2.0 / ratio }
    }

    pub(super) fn is_faster(&self) -> bool {
        self.ratio >= MIN_GAIN && self.num_faster >= MIN_NUM_FASTER
    }
}

/// Runs `best` and `candidate` in turn, until the candidate has run all its pairs or lost too many. Returns the figures
/// of the candidate's median run.
///
/// # Errors
/// Why one of them did not run.
pub(super) fn run_pairs(
    best: &Recipe,
    candidate: &Recipe,
    measure: &mut Measure<'_>,
) -> Result<(Figures, Paired), String> {
    let (mut runs, mut ratios): (Vec<Figures>, Vec<f64>) = (Vec::new(), Vec::new());
    loop {
        // Each goes first in every other pair, so that steady drift favours neither.
        let (before, figures) = if ratios.len().is_multiple_of(2) {
            (measure(best)?, measure(candidate)?)
        } else {
            let figures = measure(candidate)?;
            (measure(best)?, figures)
        };
        ratios.push(figures.tokens_per_second / before.tokens_per_second);
        runs.push(figures);
        let paired = Paired::of(&ratios);
        if paired.num_pairs == NUM_PAIRS || paired.num_pairs - paired.num_faster > NUM_PAIRS - MIN_NUM_FASTER {
            runs.sort_by(|one, other| one.tokens_per_second.total_cmp(&other.tokens_per_second));
            return Ok((runs.swap_remove(runs.len() / 2), paired));
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Trial {
    /// The changes to the recipe, in the syntax of `--set`.
    pub(super) settings: Vec<String>,
    /// Whether it trains on the same rows, with as many rows in an update, in the same arithmetic.
    pub(super) keeps_numbers: bool,
    /// Rows of an update, where they differ from the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rows_of_step: Option<usize>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) figures: Option<Figures>,
    /// Comparison with the fastest so far; absent for the original recipe.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) result: Option<TrialResult>,
    /// Why it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) left_out: Option<String>,
}

impl Trial {
    /// A trial of `recipe` that has not been run.
    fn new(base: &Recipe, recipe: &Recipe) -> Self {
        Self {
            settings: changes(base, recipe),
            keeps_numbers: have_same_numbers(base, recipe),
            rows_of_step: Some(rows_of_step(recipe)).filter(|rows| *rows != rows_of_step(base)),
            figures: None,
            result: None,
            left_out: None,
        }
    }
}

/// Result of a trial's pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct TrialResult {
    /// Its speed relative to the original recipe: its ratio to the fastest so far, times the speedup of that one.
    pub(super) speedup: f64,
    pub(super) is_faster: bool,
    #[serde(flatten)]
    pub(super) paired: Paired,
}

impl TrialResult {
    /// Whether the trial was kept, and how it compared with the fastest before it.
    pub(super) fn remark(&self) -> String {
        let words = if self.is_faster { "kept" } else { "not kept" };
        let Paired { num_faster, num_pairs, .. } = self.paired;
        format!("{words}: ahead of the fastest before it in {num_faster} of {num_pairs} pairs")
    }
}

/// Tries the axes one after the other. `figures` belong to `base`; `may_run` says why a
/// recipe is not tried. Returns the trials in their order, the first of which is the original recipe, and the fastest recipe.
pub(super) fn run(
    base: &Recipe,
    mut figures: Figures,
    mut axes: Vec<Axis>,
    limits: &Limits,
    may_run: &dyn Fn(&Recipe) -> Result<(), String>,
    measure: &mut Measure<'_>,
    say: &dyn Fn(&str),
) -> (Vec<Trial>, Recipe) {
    let (mut best, mut speedup) = (base.clone(), 1.0);
    let mut trials = vec![Trial { figures: Some(figures.clone()), ..Trial::new(base, base) }];
    Axis::put_promising_first(&mut axes, &figures);
    for axis in axes {
        let mut queue = VecDeque::from(axis.candidates(base, &best, &figures, limits));
        while let Some(candidate) = queue.pop_front() {
            let mut trial = Trial::new(base, &candidate);
            if trials.iter().any(|tried| tried.settings == trial.settings) {
                continue;
            }
            let outcome = may_run(&candidate).and_then(|()| {
                say(&format!("trying: {}", trial.settings.join(" ")));
                run_pairs(&best, &candidate, measure)
            });
            match outcome {
                Ok((measured, paired)) => {
                    let is_faster = paired.is_faster();
                    let result = TrialResult { speedup: speedup * paired.ratio, is_faster, paired };
                    say(&format!("  {:.2}x the recipe as it is: {}", result.speedup, result.remark()));
                    if is_faster {
                        (best, figures, speedup) = (candidate, measured.clone(), result.speedup);
                        if axis.continues() {
                            queue = axis.candidates(base, &best, &figures, limits).into();
                        }
                    }
                    (trial.figures, trial.result) = (Some(measured), Some(result));
                }
                Err(why) => trial.left_out = Some(why),
            }
            trials.push(trial);
        }
    }
    (trials, best)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{GradientCheckpointing, Precision};
    use crate::device::{DeviceKind, Dtype};
    use crate::ops::place::place_on;
    use crate::recipe::Purpose;

    const LIMITS: Limits =
        Limits { threads: 8, kind: DeviceKind::Cpu, two_bytes: Some(Dtype::Bf16), head: [49_152, 576] };

    fn base() -> Recipe {
        let text = "[model]\npath = \"m\"\n[data]\nnum_workers = 1\nprefetch_batches = 16\npacking = false\n[train]\n\
                    precision = \"f32\"\nmicro_batch_size = 4\ngradient_accumulation_steps = 4\n\
                    gradient_checkpointing = true\n";
        Recipe::parse(Path::new("r.toml"), text, &[], Purpose::Benchmark).unwrap()
    }

    fn figures(rate: f64, data_wait_share: f64) -> Figures {
        Figures {
            target_tokens_per_second: rate,
            tokens_per_second: rate,
            step_seconds: 100.0 / rate,
            data_wait_share,
            steps_of_epoch: 6400.0 / rate,
            run_seconds: 1.0,
            loss: 1.0,
            ..Figures::default()
        }
    }

    /// The changes that were tried, one element per candidate, and those of the fastest.
    fn search(
        base: &Recipe,
        axes: Vec<Axis>,
        wait: f64,
        measure: &mut dyn FnMut(&Recipe) -> Result<f64, String>,
    ) -> (Vec<Trial>, Vec<String>) {
        let may_run = |recipe: &Recipe| {
            if recipe.train.micro_batch_size <= 32 { Ok(()) } else { Err("does not fit (1.00 GiB)".to_owned()) }
        };
        let mut measure = |recipe: &Recipe| measure(recipe).map(|rate| figures(rate, wait));
        let (trials, best) = run(base, figures(100.0, wait), axes, &LIMITS, &may_run, &mut measure, &|_| ());
        (trials, changes(base, &best))
    }

    fn tried(trials: &[Trial]) -> Vec<String> {
        trials[1..].iter().map(|trial| trial.settings.join(" ")).collect()
    }

    fn faster(is_so: bool, by: f64) -> f64 {
        if is_so { by } else { 1.0 }
    }

    #[test]
    fn gains_of_several_axes_are_combined_and_the_rows_of_a_step_stay() {
        let mut rate = |recipe: &Recipe| {
            Ok(100.0
                * faster(recipe.train.gradient_checkpointing == GradientCheckpointing::Off, 1.3)
                * faster(recipe.train.precision == Precision::Bf16, 1.4)
                * faster(recipe.data.packing, 1.01)
                * (recipe.train.micro_batch_size as f64).min(16.0).powf(0.2))
        };
        let (trials, fastest) = search(&base(), Axis::all(false), 0.0, &mut rate);
        let expected = [
            "train.gradient_checkpointing=false",
            "train.micro_batch_size=16",
            "train.gradient_accumulation_steps=1",
            "train.precision=bf16",
            "model.dtype=f32",
        ];
        assert_eq!(fastest, expected);
        let speedup = trials.iter().filter_map(|trial| trial.result).map(|result| result.speedup).fold(0.0, f64::max);
        assert!((speedup - 1.3 * 1.4 * 1.01 * 4.0_f64.powf(0.2)).abs() < 1e-9, "{speedup}");
        let (kept, fastest) = search(&base(), Axis::all(true), 0.0, &mut rate);
        assert_eq!(fastest, expected[..3]);
        assert!(kept.iter().all(|trial| trial.keeps_numbers));
    }

    #[test]
    fn a_machine_that_gets_slower_or_faster_by_a_third_makes_no_winner_and_hides_none() {
        let machines: [fn(f64) -> f64; 4] = [
            |run| 1.0 - 0.3 * run.min(30.0) / 30.0,
            |run| 0.7 + 0.3 * run.min(30.0) / 30.0,
            |run| 1.0 - 0.15 * (run / 5.0).sin(),
            |run| if run > 11.0 { 0.7 } else { 1.0 },
        ];
        for machine in machines {
            for (gain, expected) in [(1.0, vec![]), (1.3, vec!["data.packing=true".to_owned()])] {
                let mut runs = 0.0;
                let mut rate = |recipe: &Recipe| {
                    runs += 1.0;
                    Ok(100.0 * machine(runs) * faster(recipe.data.packing, gain))
                };
                assert_eq!(search(&base(), Axis::all(false), 0.0, &mut rate).1, expected);
            }
        }
    }

    #[test]
    fn workers_and_a_longer_queue_are_tried_where_data_is_waited_for_only_and_then_first() {
        let mut rate = |recipe: &Recipe| Ok(100.0 * faster(recipe.data.num_workers == 2, 1.5));
        let (trials, fastest) = search(&base(), Axis::all(true), 0.4, &mut rate);
        assert_eq!(fastest, ["data.num_workers=2"]);
        let expected = ["data.num_workers=2", "data.num_workers=4", "data.num_workers=2 data.prefetch_batches=64"];
        assert_eq!(tried(&trials)[..3], expected);
        let (trials, _) = search(&base(), vec![Axis::Workers, Axis::Prefetch], 0.001, &mut rate);
        assert_eq!(trials.len(), 1);
    }

    #[test]
    fn what_the_diagnosis_of_the_recipe_names_is_tried_first() {
        let advised_keys = ["eval.eval_steps", "data.packing", "train.precision"].map(str::to_owned).to_vec();
        let mut axes = Axis::all(false);
        Axis::put_promising_first(&mut axes, &Figures { advised_keys, ..figures(100.0, 0.0) });
        assert_eq!(axes[..3], [Axis::Packing, Axis::Precision, Axis::Checkpointing]);
    }

    #[test]
    fn rows_are_added_to_an_update_where_no_division_of_them_makes_a_larger_micro_batch() {
        let rows = |micro_batch_size, gradient_accumulation_steps, keep_numbers: bool| {
            let mut base = base();
            base.train.micro_batch_size = micro_batch_size;
            base.train.gradient_accumulation_steps = gradient_accumulation_steps;
            let mut axes = Axis::all(keep_numbers);
            axes.retain(|axis| matches!(axis, Axis::MicroBatch | Axis::Rows));
            let mut rate = |recipe: &Recipe| Ok(25.0 * recipe.train.micro_batch_size as f64);
            let (trials, _) = search(&base, axes, 0.0, &mut rate);
            trials.iter().filter_map(|trial| trial.rows_of_step).collect::<Vec<_>>()
        };
        // Not where an epoch would have too few updates, nor beyond the memory.
        assert_eq!(
            (rows(4, 1, false), rows(4, 2, false), rows(7, 1, false)),
            (vec![8, 16, 32, 64], vec![16, 32, 64], vec![14, 28, 56])
        );
        assert_eq!(rows(4, 1, true), [0; 0]);
    }

    #[test]
    fn chunks_of_the_loss_change_in_the_direction_that_helps() {
        // 96 MiB hold 512 tokens of this vocabulary.
        let chunks = |targets: f64, speed: &dyn Fn(usize) -> f64| {
            let mut rate = |recipe: &Recipe| {
                let rate = speed(recipe.train.loss_chunk().most_tokens(place_on(DeviceKind::Cpu), LIMITS.head));
                let mut figures = figures(100.0 * rate, 0.0);
                figures.target_tokens_per_second = 4.0 * targets / figures.step_seconds;
                Ok(figures)
            };
            let start = rate(&base()).unwrap();
            let (trials, best) = run(&base(), start, vec![Axis::LossChunk], &LIMITS, &|_| Ok(()), &mut rate, &|_| ());
            let tokens = |text: &String| text.rsplit_once('=').unwrap().1.parse::<usize>().unwrap();
            (
                trials[1..].iter().flat_map(|trial| trial.settings.iter().map(tokens)).collect::<Vec<_>>(),
                best.train.loss_chunk_tokens,
            )
        };
        let larger = |most| faster(most > 512, 1.2) * faster(most > 5000, 1.2);
        assert_eq!(chunks(9000.0, &larger), (vec![2048, 8192, 32_768], Some(8192)));
        assert_eq!(chunks(400.0, &larger), (vec![100], None));
        assert_eq!(chunks(100.0, &larger), (vec![], None));
        assert_eq!(chunks(9000.0, &|most| faster(most < 512, 1.2)), (vec![2048, 128, 32], Some(128)));
    }

    #[test]
    fn what_fails_or_does_not_fit_is_named_and_the_search_continues() {
        let mut rate = |recipe: &Recipe| match recipe.train.gradient_checkpointing {
            GradientCheckpointing::Off => Err("out of memory".to_owned()),
            _ => Ok(100.0 * faster(recipe.data.packing, 2.0) * recipe.train.micro_batch_size as f64),
        };
        let mut base = base();
        base.train.gradient_accumulation_steps = 16;
        let (trials, fastest) = search(&base, Axis::all(false), 0.0, &mut rate);
        let left_out: Vec<_> = trials.iter().filter_map(|trial| trial.left_out.as_deref()).collect();
        assert_eq!(left_out, ["out of memory", "does not fit (1.00 GiB)"]);
        let expected = ["train.micro_batch_size=32", "train.gradient_accumulation_steps=2", "data.packing=true"];
        assert_eq!(fastest, expected);
    }

    #[test]
    fn a_candidate_is_faster_by_the_median_and_in_most_pairs() {
        let is_faster = |ratios: &[f64]| Paired::of(ratios).is_faster();
        assert!(is_faster(&[1.3, 1.3, 1.3, 1.3, 1.3]));
        assert!(is_faster(&[1.3, 0.5, 1.3, 1.2, 1.4]), "one run that the machine disturbed");
        assert!(!is_faster(&[1.3, 0.9, 1.3, 0.9, 1.3]));
        assert!(!is_faster(&[1.01; 5]));
        assert!(!is_faster(&[1.3]));
        assert!((Paired::of(&[0.9, 1.0, 1.2]).spread - 0.15).abs() < 1e-12);
    }
}
