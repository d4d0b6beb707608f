//! Which changes are tried, in which order, and which of them is kept: one axis after the other, the best of each kept for
//! the next.

use serde::Serialize;

use super::contest::Contest;
use super::settings::Settings;
use super::trial::Figures;
use super::verdict::Verdict;
use crate::device::Dtype;
use crate::train::config::GradientCheckpointing;

/// Data wait below this share of a step is not worth another worker.
const DATA_WAIT: f64 = 0.02;
/// The most rows of a micro-batch that are tried.
const MAX_ROWS: usize = 256;
/// By how much the next chunk of the loss is larger or smaller.
const LOSS_CHUNK_FACTOR: usize = 4;
/// The least target tokens of a chunk that are tried: fewer make the product with the head one of vectors.
const MIN_LOSS_CHUNK: usize = 32;

/// What the machine allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) threads: usize,
    pub(super) is_gpu: bool,
    pub(super) has_bf16: bool,
    /// Logits of a target token.
    pub(super) vocab_size: usize,
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// What is kept for the backward.
    Checkpointing,
    /// How a step's rows are divided into micro-batches.
    MicroBatch,
    /// Target tokens whose logits exist at a time.
    LossChunk,
    /// Threads that make batches.
    Workers,
    /// Precision of activations and products.
    Precision,
    /// Storage of the base.
    Storage,
    /// Several rows in one sequence.
    Packing,
}

impl Axis {
    /// All of them; those that change the numbers last, or not at all.
    pub(super) fn all(keep_numbers: bool) -> Vec<Self> {
        let mut axes = vec![Self::Checkpointing, Self::MicroBatch, Self::LossChunk, Self::Workers];
        if !keep_numbers {
            axes.extend([Self::Precision, Self::Storage, Self::Packing]);
        }
        axes
    }

    /// The changes of this kind to `best`, whose figures are given.
    fn candidates(self, best: &Settings, figures: &Figures, limits: &Limits) -> Vec<Settings> {
        let with = |change: &dyn Fn(&mut Settings)| {
            let mut settings = best.clone();
            change(&mut settings);
            settings
        };
        match self {
            Self::Checkpointing => {
                let mut all = vec![GradientCheckpointing::Off, GradientCheckpointing::On];
                all.extend(limits.is_gpu.then_some(GradientCheckpointing::Offload));
                all.retain(|checkpointing| *checkpointing != best.gradient_checkpointing);
                all.into_iter().map(|value| with(&|settings| settings.gradient_checkpointing = value)).collect()
            }
            Self::MicroBatch => {
                let rows = best.micro_batch_size * best.gradient_accumulation_steps;
                let divisors = (1..=rows.min(MAX_ROWS)).filter(|size| rows.is_multiple_of(*size));
                let mut sizes: Vec<usize> = divisors.filter(|size| *size != best.micro_batch_size).collect();
                // The neighbours first; far ones follow only from a better neighbour.
                sizes.sort_by_key(|size| size.abs_diff(best.micro_batch_size));
                let below = sizes.iter().find(|size| **size < best.micro_batch_size).copied();
                let above = sizes.iter().find(|size| **size > best.micro_batch_size).copied();
                let near = [above, below].into_iter().flatten();
                near.map(|size| {
                    with(&|settings| {
                        settings.micro_batch_size = size;
                        settings.gradient_accumulation_steps = rows / size;
                    })
                })
                .collect()
            }
            Self::LossChunk => {
                let targets = figures.target_tokens_per_second * figures.step_seconds;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens of a step")]
                let targets = targets.ceil() as usize / best.gradient_accumulation_steps.max(1);
                let most = best.loss_chunk().most_tokens(limits.vocab_size);
                // Fewer passes over the head, where there is more than one; or logits that stay in a cache.
                let more = (most < targets).then_some(LOSS_CHUNK_FACTOR * most);
                let fewer = Some(most.min(targets) / LOSS_CHUNK_FACTOR).filter(|tokens| *tokens >= MIN_LOSS_CHUNK);
                let tried = more.into_iter().chain(fewer);
                tried.map(|tokens| with(&|settings| settings.loss_chunk_tokens = Some(tokens))).collect()
            }
            Self::Workers if figures.data_wait_share < DATA_WAIT => Vec::new(),
            Self::Workers => {
                let more = [2 * best.num_workers, 4 * best.num_workers];
                let more = more.into_iter().filter(|workers| *workers <= limits.threads.max(2));
                more.map(|workers| with(&|settings| settings.num_workers = workers)).collect()
            }
            Self::Precision if limits.has_bf16 && best.precision == Dtype::F32 => {
                // The base stays as it is stored, which is what the recipe's precision says where it says nothing else.
                let storage = best.storage.or(Some(best.precision));
                vec![with(&|settings| (settings.precision, settings.storage) = (Dtype::Bf16, storage))]
            }
            Self::Storage if limits.has_bf16 && best.storage.unwrap_or(best.precision) == Dtype::F32 => {
                vec![with(&|settings| settings.storage = Some(Dtype::Bf16))]
            }
            Self::Packing if !best.packing => vec![with(&|settings| settings.packing = true)],
            _ => Vec::new(),
        }
    }

    /// Whether a better value asks for the next one.
    fn goes_on(self) -> bool {
        matches!(self, Self::MicroBatch | Self::LossChunk)
    }
}

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Trial {
    /// The changes to the recipe, as `--set` takes them.
    pub(super) settings: Vec<String>,
    /// Whether it trains on the same rows in the same arithmetic.
    pub(super) keeps_numbers: bool,
    /// What was measured.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) figures: Option<Figures>,
    /// How it compares with the fastest before it; absent of the recipe as it is.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) result: Option<TrialResult>,
    /// Why nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) left_out: Option<String>,
}

/// What the rounds of a trial say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct TrialResult {
    /// Its speed over that of the recipe as it is: over that of the fastest before it, times that one's.
    pub(super) speedup: f64,
    /// What the comparison with the fastest before it may be wrong by, as a share.
    pub(super) noise: f64,
    /// Times that it was run, each between two runs of the fastest before it.
    pub(super) rounds: usize,
    pub(super) verdict: Verdict,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Found {
    /// In the order in which they were tried; the first is the recipe as it is.
    pub(super) trials: Vec<Trial>,
    /// The fastest settings.
    pub(super) best: Settings,
}

/// Tries the axes one after the other.
///
/// # Errors
///
/// What is wrong with the recipe as it is.
pub(super) fn run(
    base: &Settings,
    axes: &[Axis],
    limits: &Limits,
    does_fit: &dyn Fn(&Settings) -> Result<(), usize>,
    contest: &mut Contest<'_>,
) -> Result<Found, String> {
    let mut incumbent = contest.start(base)?;
    let mut trials = vec![Trial {
        settings: Vec::new(),
        keeps_numbers: true,
        figures: Some(incumbent.figures.clone()),
        result: None,
        left_out: None,
    }];
    for axis in axes {
        loop {
            let before = incumbent.settings.clone();
            for candidate in axis.candidates(&before, &incumbent.figures, limits) {
                let settings = candidate.changes_from(base);
                if trials.iter().any(|trial| trial.settings == settings) {
                    continue;
                }
                #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
                let outcome = match does_fit(&candidate) {
                    Err(peak) => Err(format!("does not fit ({})", crate::train::fit::size(peak as f64))),
                    Ok(()) => contest.against(&mut incumbent, &candidate),
                };
                let keeps_numbers = candidate.keeps_numbers_of(base);
                trials.push(match outcome {
                    Ok((figures, result)) => {
                        Trial { settings, keeps_numbers, figures: Some(figures), result: Some(result), left_out: None }
                    }
                    Err(reason) => {
                        Trial { settings, keeps_numbers, figures: None, result: None, left_out: Some(reason) }
                    }
                });
                if incumbent.settings == candidate && axis.goes_on() {
                    break;
                }
            }
            if incumbent.settings == before || !axis.goes_on() {
                break;
            }
        }
    }
    Ok(Found { trials, best: incumbent.settings })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rand::{Rng as _, SeedableRng as _};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const BASE: Settings = Settings {
        micro_batch_size: 4,
        gradient_accumulation_steps: 4,
        gradient_checkpointing: GradientCheckpointing::On,
        loss_chunk_tokens: None,
        num_workers: 1,
        packing: false,
        precision: Dtype::F32,
        storage: None,
    };
    const LIMITS: Limits = Limits { threads: 8, is_gpu: false, has_bf16: true, vocab_size: 49_152 };

    fn figures(rate: f64, data_wait_share: f64) -> Figures {
        Figures {
            target_tokens_per_second: rate,
            tokens_per_second: rate,
            step_seconds: 100.0 / rate,
            data_wait_share,
            peak_memory_bytes: None,
            loss: 1.0,
        }
    }

    type Rate<'a> = dyn Fn(&Settings, u32) -> f64 + 'a;

    /// Searches where the rate is a function of the settings and of the number of the run.
    fn search(keep_numbers: bool, rate: &Rate<'_>, wait: f64, max_rows: usize) -> Found {
        let does_fit = |settings: &Settings| if settings.micro_batch_size <= max_rows { Ok(()) } else { Err(1 << 30) };
        let mut runs = 0;
        let mut measure = |settings: &Settings| {
            runs += 1;
            Ok(figures(rate(settings, runs), wait))
        };
        let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
        run(&BASE, &Axis::all(keep_numbers), &LIMITS, &does_fit, &mut contest).unwrap()
    }

    /// What is written in the end, after the fastest and the recipe as it is have been run in turn once more.
    fn recommended(rate: &Rate<'_>) -> Settings {
        let mut runs = 0;
        let mut measure = |settings: &Settings| {
            runs += 1;
            Ok(figures(rate(settings, runs), 0.0))
        };
        let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
        let found = run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut contest).unwrap();
        let is_faster = found.best != BASE && contest.confirm(&BASE, &found.best).unwrap().verdict == Verdict::Faster;
        if is_faster { found.best } else { BASE }
    }

    fn settings_of_fastest(found: &Found) -> Vec<String> {
        found.best.changes_from(&BASE)
    }

    fn faster(is_so: bool, by: f64) -> f64 {
        if is_so { by } else { 1.0 }
    }

    /// A number in -1..1 that depends on the run and the seed alone.
    fn chance(run: u32, seed: u64) -> f64 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (u64::from(run) << 32));
        rng.random_range(-1.0..1.0)
    }

    #[test]
    fn gains_of_several_axes_are_combined_and_the_rows_of_a_step_stay() {
        let rate = |settings: &Settings, _| {
            100.0
                * faster(settings.gradient_checkpointing == GradientCheckpointing::Off, 1.3)
                * faster(settings.precision == Dtype::Bf16, 1.4)
                * f64::from(u32::try_from(settings.micro_batch_size).unwrap()).powf(0.2)
        };
        let found = search(false, &rate, 0.0, 16);
        let expected = [
            "train.gradient_checkpointing=false",
            "train.micro_batch_size=16",
            "train.gradient_accumulation_steps=1",
            "train.precision=bf16",
            "model.dtype=f32",
        ];
        assert_eq!(settings_of_fastest(&found), expected);
        let speedup =
            found.trials.iter().filter_map(|trial| trial.result).map(|result| result.speedup).fold(0.0, f64::max);
        assert!((speedup - 1.3 * 1.4 * 4.0_f64.powf(0.2)).abs() < 1e-9, "{speedup}");
        let kept = search(true, &rate, 0.0, 16);
        assert_eq!(settings_of_fastest(&kept), expected[..3]);
        assert!(kept.trials.iter().all(|trial| trial.keeps_numbers));
    }

    #[test]
    fn what_does_not_fit_is_named_and_not_run() {
        let rate = |settings: &Settings, _| 100.0 * f64::from(u32::try_from(settings.micro_batch_size).unwrap());
        let found = search(true, &rate, 0.0, 8);
        assert_eq!(settings_of_fastest(&found)[0], "train.micro_batch_size=8");
        let left_out: Vec<_> = found.trials.iter().filter_map(|trial| trial.left_out.as_deref()).collect();
        assert_eq!(left_out, ["does not fit (1.00 GiB)"]);
    }

    #[test]
    fn what_gains_too_little_changes_nothing() {
        let found = search(false, &|settings, _| if settings.packing { 102.0 } else { 100.0 }, 0.0, 64);
        assert_eq!(found.best, BASE);
        assert!(found.trials.len() > 4);
    }

    #[test]
    fn noise_of_a_tenth_keeps_the_recipe_and_a_real_gain_is_found_in_it() {
        let (mut kept, mut found) = (0, 0);
        for seed in 0..200 {
            let noise = |run| 1.0 + 0.1 * chance(run, seed);
            // What slows now and then, by much, is not symmetric as the rest is.
            let hiccups = |run| if chance(run, !seed) > 0.6 { 0.7 } else { 1.0 };
            kept += u32::from(recommended(&|_, run| 100.0 * noise(run) * hiccups(run)) == BASE);
            let rate = |settings: &Settings, run| 100.0 * faster(settings.precision == Dtype::Bf16, 1.3) * noise(run);
            found += u32::from(recommended(&rate).precision == Dtype::Bf16);
        }
        assert!(kept >= 198 && found >= 198, "kept {kept}, found {found} of 200");
    }

    #[test]
    fn a_machine_that_gets_slower_or_faster_by_a_third_makes_no_winner_and_hides_none() {
        // Over the first thirty runs, for good; back and forth; and at once.
        let slower = |run: u32| 1.0 - 0.3 * f64::from(run.min(30)) / 30.0;
        let faster_and_faster = |run: u32| 0.7 + 0.3 * f64::from(run.min(30)) / 30.0;
        let swings = |run: u32| 1.0 - 0.15 * (f64::from(run) / 5.0).sin();
        let falls = |run: u32| if run > 11 { 0.7 } else { 1.0 };
        let machines: [&dyn Fn(u32) -> f64; 4] = [&slower, &faster_and_faster, &swings, &falls];
        for (index, machine) in machines.iter().enumerate() {
            for seed in 0..20 {
                let speed = |run| machine(run) * (1.0 + 0.01 * chance(run, seed));
                let found = search(false, &|_, run| 100.0 * speed(run), 0.0, 64);
                assert_eq!(found.best, BASE, "machine {index}, seed {seed}: {found:?}");
                let rate = |settings: &Settings, run| 100.0 * faster(settings.packing, 1.3) * speed(run);
                let found = search(false, &rate, 0.0, 64);
                assert_eq!(settings_of_fastest(&found), ["data.packing=true"], "machine {index}, seed {seed}");
            }
        }
    }

    #[test]
    fn workers_are_tried_where_data_is_waited_for_only() {
        let tries = |wait: f64| {
            let rate = |settings: &Settings, _| if settings.num_workers == 2 { 150.0 } else { 100.0 };
            let found = search(true, &rate, wait, 64);
            let is_tried = found.trials.iter().any(|trial| trial.settings == ["data.num_workers=2"]);
            (is_tried, settings_of_fastest(&found))
        };
        assert_eq!(tries(0.001), (false, vec![]));
        assert_eq!(tries(0.4), (true, vec!["data.num_workers=2".to_owned()]));
    }

    #[test]
    fn chunks_of_the_loss_are_enlarged_while_that_helps_and_where_there_is_more_than_one() {
        // 96 MiB hold 512 tokens of this vocabulary.
        let with_targets = |targets: f64| {
            let mut measure = |settings: &Settings| {
                let most = settings.loss_chunk().most_tokens(LIMITS.vocab_size);
                let rate = 100.0 * faster(most > 512, 1.2) * faster(most > 5000, 1.2);
                let figures = figures(rate, 0.0);
                Ok(Figures { target_tokens_per_second: 4.0 * targets / figures.step_seconds, ..figures })
            };
            let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
            let found = run(&BASE, &[Axis::LossChunk], &LIMITS, &|_| Ok(()), &mut contest).unwrap();
            (found.trials[1..].iter().flat_map(|trial| trial.settings.clone()).collect::<Vec<_>>(), found.best)
        };
        let tried = |all: &[usize]| all.iter().map(|n| format!("train.loss_chunk_tokens={n}")).collect::<Vec<_>>();
        let (settings, best) = with_targets(9000.0);
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[2048, 8192, 32_768]), Some(8192)));
        let (settings, best) = with_targets(400.0);
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[100]), None));
        assert_eq!(with_targets(100.0).0, tried(&[]));
    }

    #[test]
    fn a_trial_that_fails_is_told_and_the_search_goes_on() {
        let mut measure = |settings: &Settings| match settings.gradient_checkpointing {
            GradientCheckpointing::Off => Err("out of memory".to_owned()),
            _ => Ok(figures(if settings.packing { 200.0 } else { 100.0 }, 0.0)),
        };
        let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
        let found = run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut contest).unwrap();
        assert_eq!(found.trials[1].left_out.as_deref(), Some("out of memory"));
        assert_eq!(settings_of_fastest(&found), ["data.packing=true"]);
        let mut fails = |_: &Settings| Err("no rows".to_owned());
        let mut contest = Contest::new(&mut fails, &|| 1.0, &|_| ());
        let found = run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut contest);
        assert_eq!(found, Err("no rows".to_owned()));
    }

    #[test]
    fn when_the_time_is_spent_the_rest_is_named_and_not_run() {
        let runs = Cell::new(0);
        let mut measure = |_: &Settings| {
            runs.set(runs.get() + 1);
            Ok(figures(100.0, 0.0))
        };
        let time_left = || 1.0 - f64::from(runs.get()) / 20.0;
        let mut contest = Contest::new(&mut measure, &time_left, &|_| ());
        let found = run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut contest).unwrap();
        assert!(runs.get() <= 22, "{runs:?}");
        let last = found.trials.last().unwrap();
        assert!(last.left_out.as_deref().unwrap().contains("--max-minutes"), "{last:?}");
    }
}
