//! Which changes are kept: one axis after the other is tried, the best of each kept for the next.

use serde::Serialize;

use super::axis::{Axis, Limits};
use super::contest::{Contest, Event};
use super::settings::Settings;
use super::trial::Figures;
use super::verdict::Verdict;

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Trial {
    /// The changes to the recipe, as `--set` takes them.
    pub(super) settings: Vec<String>,
    /// Whether it trains on the same rows, as many of them in an update, in the same arithmetic.
    pub(super) keeps_numbers: bool,
    /// Rows of an update, where they are not those of the recipe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rows_of_step: Option<usize>,
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
        rows_of_step: None,
        figures: Some(incumbent.figures.clone()),
        result: None,
        left_out: None,
    }];
    let mut axes = axes.to_vec();
    let num_promising = Axis::put_promising_first(&mut axes, &incumbent.figures);
    let first = axes.iter().flat_map(|axis| axis.candidates(base, base, &incumbent.figures, limits));
    let num_candidates = first.filter(|candidate| does_fit(candidate).is_ok()).count();
    let run_seconds = incumbent.figures.run_seconds;
    contest.tell(Event::Planned { axes: &axes, num_promising, num_candidates, run_seconds });
    for axis in axes {
        loop {
            let before = incumbent.settings.clone();
            for candidate in axis.candidates(base, &before, &incumbent.figures, limits) {
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
                let rows_of_step = Some(candidate.rows_of_step()).filter(|rows| *rows != base.rows_of_step());
                let (figures, result, left_out) = match outcome {
                    Ok((figures, result)) => (Some(figures), Some(result), None),
                    Err(reason) => (None, None, Some(reason)),
                };
                trials.push(Trial { settings, keeps_numbers, rows_of_step, figures, result, left_out });
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
    use crate::device::Dtype;
    use crate::train::config::GradientCheckpointing;

    const BASE: Settings = Settings {
        micro_batch_size: 4,
        gradient_accumulation_steps: 4,
        gradient_checkpointing: GradientCheckpointing::On,
        loss_chunk_tokens: None,
        num_workers: 1,
        prefetch_batches: 4,
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
            steps_of_epoch: 100.0,
            run_seconds: 1.0,
            advised_keys: Vec::new(),
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
    fn what_the_recipe_as_it_is_suffers_from_is_tried_first() {
        let order = |wait: f64, advised: &[&str]| {
            let advised_keys: Vec<String> = advised.iter().map(|key| (*key).to_owned()).collect();
            let mut measure = |_: &Settings| Ok(Figures { advised_keys: advised_keys.clone(), ..figures(100.0, wait) });
            let told = std::cell::RefCell::new(Vec::new());
            let tell = |event: Event<'_>| {
                if let Event::Planned { axes, num_promising, num_candidates, .. } = event {
                    let promising: Vec<_> = axes[..num_promising].iter().map(|axis| axis.key()).collect();
                    told.borrow_mut().push((promising, axes[num_promising..].to_vec(), num_candidates));
                }
            };
            let mut contest = Contest::new(&mut measure, &|| 1.0, &tell);
            let found = run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut contest).unwrap();
            (told.take().pop().unwrap(), found.trials[1].settings.join(" "))
        };
        let ((promising, rest, num_candidates), first) = order(0.0, &[]);
        assert_eq!((promising, rest), (vec![], Axis::all(false)));
        // Checkpointing, two micro-batches, precision, packing and storage; one chunk holds the 25 targets of a micro-batch.
        assert_eq!((num_candidates, first.as_str()), (6, "train.gradient_checkpointing=false"));
        let ((promising, ..), first) = order(0.0, &["eval.eval_steps", "data.packing", "train.precision"]);
        assert_eq!((promising, first.as_str()), (vec!["data.packing", "train.precision"], "data.packing=true"));
        // Three more: two numbers of workers, and a longer queue.
        let ((promising, _, num_candidates), first) = order(0.4, &["data.packing"]);
        assert_eq!(promising, ["data.num_workers", "data.prefetch_batches", "data.packing"]);
        assert_eq!((num_candidates, first.as_str()), (9, "data.num_workers=2"));
    }

    #[test]
    fn batches_are_made_further_ahead_while_that_helps_and_where_data_is_waited_for_only() {
        let found = |wait: f64| {
            let rate = |settings: &Settings, _| 100.0 * faster(settings.prefetch_batches >= 64, 1.2);
            let mut measure = |settings: &Settings| Ok(figures(rate(settings, 0), wait));
            let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
            let base = Settings { prefetch_batches: 16, ..BASE };
            let found = run(&base, &[Axis::Prefetch], &LIMITS, &|_| Ok(()), &mut contest).unwrap();
            assert!(found.trials.iter().all(|trial| trial.keeps_numbers));
            found.trials[1..].iter().flat_map(|trial| trial.settings.clone()).collect::<Vec<_>>()
        };
        assert_eq!(found(0.4), ["data.prefetch_batches=64", "data.prefetch_batches=256"]);
        assert_eq!(found(0.001), [""; 0]);
    }

    #[test]
    fn rows_are_added_to_an_update_where_no_division_of_them_makes_a_larger_micro_batch() {
        let tried = |base: &Settings, keep_numbers: bool, steps_of_epoch: f64| {
            let mut measure = |settings: &Settings| {
                let rate = 100.0 * f64::from(u32::try_from(settings.micro_batch_size.min(16)).unwrap());
                Ok(Figures { steps_of_epoch: steps_of_epoch / rate, ..figures(rate, 0.0) })
            };
            let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
            let does_fit = |settings: &Settings| if settings.micro_batch_size <= 32 { Ok(()) } else { Err(1 << 30) };
            let mut axes = Axis::all(keep_numbers);
            axes.retain(|axis| matches!(axis, Axis::MicroBatch | Axis::Rows));
            let found = run(base, &axes, &LIMITS, &does_fit, &mut contest).unwrap();
            let of_rows = found.trials.iter().filter(|trial| trial.rows_of_step.is_some());
            assert!(of_rows.clone().all(|trial| !trial.keeps_numbers));
            let rows: Vec<_> = of_rows.filter_map(|trial| trial.rows_of_step).collect();
            (rows, found.best.micro_batch_size, found.best.gradient_accumulation_steps)
        };
        let alone = Settings { gradient_accumulation_steps: 1, ..BASE };
        // While it helps; and not where fewer than four updates of an epoch are left.
        assert_eq!(tried(&alone, false, f64::INFINITY), (vec![8, 16, 32], 16, 1));
        assert_eq!(tried(&alone, false, 100.0 * 4.0 * 16.0), (vec![8, 16], 16, 1));
        assert_eq!(tried(&alone, true, f64::INFINITY), (vec![], 4, 1));
        // Accumulation is spent first; and seven rows are divided by nothing.
        assert_eq!(tried(&Settings { gradient_accumulation_steps: 2, ..BASE }, false, f64::INFINITY).0, [16, 32]);
        let odd = Settings { micro_batch_size: 7, ..alone };
        assert_eq!(tried(&odd, false, f64::INFINITY), (vec![14, 28, 56], 28, 1));
    }

    #[test]
    fn chunks_of_the_loss_are_enlarged_while_that_helps_and_where_there_is_more_than_one() {
        // 96 MiB hold 512 tokens of this vocabulary.
        let with = |targets: f64, speed: &dyn Fn(usize) -> f64| {
            let mut measure = |settings: &Settings| {
                let rate = 100.0 * speed(settings.loss_chunk().most_tokens(LIMITS.vocab_size));
                let figures = figures(rate, 0.0);
                Ok(Figures { target_tokens_per_second: 4.0 * targets / figures.step_seconds, ..figures })
            };
            let mut contest = Contest::new(&mut measure, &|| 1.0, &|_| ());
            let found = run(&BASE, &[Axis::LossChunk], &LIMITS, &|_| Ok(()), &mut contest).unwrap();
            (found.trials[1..].iter().flat_map(|trial| trial.settings.clone()).collect::<Vec<_>>(), found.best)
        };
        let with_targets = |targets| with(targets, &|most| faster(most > 512, 1.2) * faster(most > 5000, 1.2));
        let tried = |all: &[usize]| all.iter().map(|n| format!("train.loss_chunk_tokens={n}")).collect::<Vec<_>>();
        let (settings, best) = with_targets(9000.0);
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[2048, 8192, 32_768]), Some(8192)));
        let (settings, best) = with_targets(400.0);
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[100]), None));
        assert_eq!(with_targets(100.0).0, tried(&[]));
        // The size that was left is not tried once more, whether by its number or as the one chunk of so many tokens.
        let (settings, best) = with(9000.0, &|most| faster(most < 512, 1.2));
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[2048, 128, 32]), Some(128)));
        let (settings, best) = with(400.0, &|most| faster(most < 512, 1.2));
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[100]), Some(100)));
        let (settings, best) = with(9000.0, &|most| faster(most == 2048, 1.2));
        assert_eq!((settings, best.loss_chunk_tokens), (tried(&[2048, 8192]), Some(2048)));
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
