//! Which changes are tried, in which order, and which of them is kept: one axis after the other, the best of each kept for
//! the next.

use serde::Serialize;

use super::trial::Figures;
use crate::device::Dtype;
use crate::train::config::GradientCheckpointing;

/// A change is kept if it is faster by more than this: less is noise.
pub(super) const GAIN: f64 = 1.03;
/// Data wait below this share of a step is not worth another worker.
const DATA_WAIT: f64 = 0.02;
/// The most rows of a micro-batch that are tried.
const MAX_ROWS: usize = 256;

/// The settings that are searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) micro_batch_size: usize,
    pub(super) gradient_accumulation_steps: usize,
    pub(super) gradient_checkpointing: GradientCheckpointing,
    pub(super) num_workers: usize,
    pub(super) packing: bool,
    pub(super) precision: Dtype,
    pub(super) storage: Option<Dtype>,
}

impl Settings {
    /// What is to be set to come from `base` to these, as `--set` takes it.
    pub(super) fn changes_from(&self, base: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        let mut set = |is_new: bool, key: &str, value: String| {
            if is_new {
                changes.push(format!("{key}={value}"));
            }
        };
        let checkpointing = serde_json::to_string(&self.gradient_checkpointing).unwrap_or_default();
        set(
            self.gradient_checkpointing != base.gradient_checkpointing,
            "train.gradient_checkpointing",
            checkpointing.trim_matches('"').to_owned(),
        );
        let rows = self.micro_batch_size;
        set(rows != base.micro_batch_size, "train.micro_batch_size", rows.to_string());
        let steps = self.gradient_accumulation_steps;
        set(steps != base.gradient_accumulation_steps, "train.gradient_accumulation_steps", steps.to_string());
        set(self.num_workers != base.num_workers, "data.num_workers", self.num_workers.to_string());
        set(self.packing != base.packing, "data.packing", self.packing.to_string());
        set(self.precision != base.precision, "train.precision", self.precision.to_string());
        if let Some(storage) = self.storage {
            set(self.storage != base.storage, "model.dtype", storage.to_string());
        }
        changes
    }

    /// Whether a run with these trains on the same rows in the same arithmetic.
    fn keeps_numbers_of(&self, base: &Self) -> bool {
        (self.packing, self.precision, self.storage) == (base.packing, base.precision, base.storage)
    }
}

/// What the machine allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) threads: usize,
    pub(super) is_gpu: bool,
    pub(super) has_bf16: bool,
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// What is kept for the backward.
    Checkpointing,
    /// How a step's rows are divided into micro-batches.
    MicroBatch,
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
        let mut axes = vec![Self::Checkpointing, Self::MicroBatch, Self::Workers];
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
        self == Self::MicroBatch
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
    /// Why nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) left_out: Option<String>,
}

/// Index of the trial with the most target tokens per second; the recipe as it is, where none is faster by more than
/// noise.
pub(super) fn fastest(trials: &[Trial]) -> usize {
    let rate = |trial: &Trial| trial.figures.as_ref().map_or(0.0, |figures| figures.target_tokens_per_second);
    let first = trials.first().map_or(0.0, rate);
    // Of equals the one that changes least, which was tried first.
    let faster = |best: usize, index: usize| if rate(&trials[index]) > rate(&trials[best]) { index } else { best };
    let best = (0..trials.len()).reduce(faster).unwrap_or(0);
    if trials.get(best).is_some_and(|trial| rate(trial) > first * GAIN) { best } else { 0 }
}

/// Runs settings.
pub(super) type Measure<'a> = dyn FnMut(&Settings) -> Result<Figures, String> + 'a;

/// Tries the axes one after the other.
///
/// # Errors
///
/// What `measure` says of the recipe as it is.
pub(super) fn run(
    base: &Settings,
    axes: &[Axis],
    limits: &Limits,
    does_fit: &dyn Fn(&Settings) -> Result<(), usize>,
    measure: &mut Measure<'_>,
) -> Result<Vec<Trial>, String> {
    let first = measure(base)?;
    let trial = |settings: &Settings, figures: Result<Figures, String>| {
        let (figures, left_out) = match figures {
            Ok(figures) => (Some(figures), None),
            Err(reason) => (None, Some(reason)),
        };
        Trial {
            settings: settings.changes_from(base),
            keeps_numbers: settings.keeps_numbers_of(base),
            figures,
            left_out,
        }
    };
    let mut trials = vec![trial(base, Ok(first.clone()))];
    let (mut best, mut figures) = (base.clone(), first);
    for axis in axes {
        loop {
            let before = best.clone();
            for candidate in axis.candidates(&before, &figures, limits) {
                let is_known = trials.iter().any(|trial| trial.settings == candidate.changes_from(base));
                if is_known {
                    continue;
                }
                #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
                let outcome = match does_fit(&candidate) {
                    Err(peak) => Err(format!("does not fit ({})", crate::train::fit::size(peak as f64))),
                    Ok(()) => measure(&candidate),
                };
                trials.push(trial(&candidate, outcome.clone()));
                if let Ok(measured) = outcome
                    && measured.target_tokens_per_second > GAIN * figures.target_tokens_per_second
                {
                    (best, figures) = (candidate, measured);
                }
            }
            if best == before || !axis.goes_on() {
                break;
            }
        }
    }
    Ok(trials)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Settings = Settings {
        micro_batch_size: 4,
        gradient_accumulation_steps: 4,
        gradient_checkpointing: GradientCheckpointing::On,
        num_workers: 1,
        packing: false,
        precision: Dtype::F32,
        storage: None,
    };
    const LIMITS: Limits = Limits { threads: 8, is_gpu: false, has_bf16: true };

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

    /// Searches where the rate is a function of the settings.
    fn search(keep_numbers: bool, rate: impl Fn(&Settings) -> f64, wait: f64, max_rows: usize) -> Vec<Trial> {
        let does_fit = |settings: &Settings| if settings.micro_batch_size <= max_rows { Ok(()) } else { Err(1 << 30) };
        let axes = Axis::all(keep_numbers);
        run(&BASE, &axes, &LIMITS, &does_fit, &mut |settings| Ok(figures(rate(settings), wait))).unwrap()
    }

    fn settings_of_fastest(trials: &[Trial]) -> Vec<String> {
        trials[fastest(trials)].settings.clone()
    }

    #[test]
    fn gains_of_several_axes_are_combined_and_the_rows_of_a_step_stay() {
        let rate = |settings: &Settings| {
            let faster = |is_so: bool, by: f64| if is_so { by } else { 1.0 };
            100.0
                * faster(settings.gradient_checkpointing == GradientCheckpointing::Off, 1.3)
                * faster(settings.precision == Dtype::Bf16, 1.4)
                * f64::from(u32::try_from(settings.micro_batch_size).unwrap()).powf(0.2)
        };
        let trials = search(false, rate, 0.0, 16);
        let expected = [
            "train.gradient_checkpointing=false",
            "train.micro_batch_size=16",
            "train.gradient_accumulation_steps=1",
            "train.precision=bf16",
            "model.dtype=f32",
        ];
        assert_eq!(settings_of_fastest(&trials), expected);
        let kept = search(true, rate, 0.0, 16);
        assert_eq!(settings_of_fastest(&kept), expected[..3]);
        assert!(kept.iter().all(|trial| trial.keeps_numbers));
    }

    #[test]
    fn what_does_not_fit_is_named_and_not_run() {
        let trials =
            search(true, |settings| 100.0 * f64::from(u32::try_from(settings.micro_batch_size).unwrap()), 0.0, 8);
        assert_eq!(settings_of_fastest(&trials)[0], "train.micro_batch_size=8");
        let left_out: Vec<_> = trials.iter().filter_map(|trial| trial.left_out.as_deref()).collect();
        assert_eq!(left_out, ["does not fit (1.00 GiB)"]);
    }

    #[test]
    fn noise_changes_nothing() {
        let trials = search(false, |settings| if settings.packing { 102.0 } else { 100.0 }, 0.0, 64);
        assert_eq!(fastest(&trials), 0);
        assert!(trials.len() > 4);
    }

    #[test]
    fn workers_are_tried_where_data_is_waited_for_only() {
        let tries = |wait: f64| {
            let trials = search(true, |settings| if settings.num_workers == 2 { 150.0 } else { 100.0 }, wait, 64);
            (trials.iter().any(|trial| trial.settings == ["data.num_workers=2"]), settings_of_fastest(&trials))
        };
        assert_eq!(tries(0.001), (false, vec![]));
        assert_eq!(tries(0.4), (true, vec!["data.num_workers=2".to_owned()]));
    }

    #[test]
    fn a_trial_that_fails_is_told_and_the_search_goes_on() {
        let mut measure = |settings: &Settings| match settings.gradient_checkpointing {
            GradientCheckpointing::Off => Err("out of memory".to_owned()),
            _ => Ok(figures(if settings.packing { 200.0 } else { 100.0 }, 0.0)),
        };
        let trials = run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut measure).unwrap();
        assert_eq!(trials[1].left_out.as_deref(), Some("out of memory"));
        assert_eq!(settings_of_fastest(&trials), ["data.packing=true"]);
        let mut fails = |_: &Settings| Err("no rows".to_owned());
        assert_eq!(run(&BASE, &Axis::all(false), &LIMITS, &|_| Ok(()), &mut fails), Err("no rows".to_owned()));
    }
}
