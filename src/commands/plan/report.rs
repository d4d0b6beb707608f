//! The content of a plan: sizes, times, prices.

use serde::Serialize;

use super::target::Target;
use crate::metrics::CostConfig;
use crate::recipe::Recipe;
use crate::stats::as_f64;
use crate::train::config::GradientCheckpointing;
use crate::train::fit::{self, Suggestion};
use crate::train::flops::StepFlops;
use crate::train::forecast::Forecast;
use crate::train::memory::{HostPlan, MemoryPlan, Workload};

/// The inputs of a plan.
pub(super) struct Basis<'a> {
    pub(super) recipe: &'a Recipe,
    pub(super) workload: &'a Workload<'a>,
    pub(super) target: &'a Target,
    pub(super) prices: &'a CostConfig,
    /// The steps from the training rows; `None` where these cannot be read.
    pub(super) forecast: Option<&'a Forecast>,
    /// Measured time of a step on full-length rows.
    pub(super) calibrated: Option<f64>,
    /// Whether to find the largest micro-batch.
    pub(super) wants_fit: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_bytes: Option<u64>,
    /// The part of it that this process can have now, which decides whether the plan fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) free_memory_bytes: Option<u64>,
    #[serde(flatten)]
    pub(super) plan: MemoryPlan,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) host: Option<Host>,
    /// Absent where the device's memory is not known. With a GPU of this machine, the host's memory must suffice, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fits: Option<bool>,
    /// Model FLOPs of a token at full length.
    pub(super) flops_per_token: f64,
    /// Tokens of a step at full length.
    pub(super) tokens_per_step: usize,
    /// Time of a step at full length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) step_seconds: Option<f64>,
    /// The step time was measured instead of estimated.
    pub(super) is_calibrated: bool,
    /// Absent where the training rows cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rows: Option<Rows>,
    /// Steps of the whole run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) steps: Option<u64>,
    /// Tokens of a step with the actual rows, without padding; at full length where the rows cannot be read.
    pub(super) mean_step_tokens: f64,
    /// Time of a step with the actual rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mean_step_seconds: Option<f64>,
    /// Tokens of the whole run, without padding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) total_tokens: Option<u64>,
    /// Time of all steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seconds: Option<f64>,
    /// Tokens, time, energy and cost of the run assume rows of full length.
    pub(super) is_at_most: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) energy_kwh: Option<f64>,
    /// Cost of the hours and, where the device's power is known, of the energy, at the recipe's prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) currency: Option<String>,
    /// Changes to make it fit, or the largest micro-batch, each with its peak.
    pub(super) suggestions: Vec<Suggestion>,
}

/// Memory of the host when training on a GPU.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Host {
    #[serde(flatten)]
    pub(super) plan: HostPlan,
    /// The part of it that this process can have now; absent where the machine is not here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) free_memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fits: Option<bool>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Rows {
    /// Rows visited per epoch.
    pub(super) per_epoch: usize,
}

impl Report {
    pub(super) fn new(basis: &Basis<'_>) -> Self {
        let Basis { recipe, workload, target, prices, forecast, calibrated, wants_fit } = *basis;
        let plan = workload.plan();
        let host = workload.host_plan().map(|plan| Host {
            free_memory_bytes: target.host_free_bytes.map(whole),
            fits: target.host_free_bytes.map(|memory| fit::is_room(plan.peak_bytes, memory)),
            plan,
        });
        let holds = host.as_ref().and_then(|host| host.fits).unwrap_or(true);
        let fits = target.usable_bytes().map(|memory| holds && fit::fits(&plan, memory));
        let flops = StepFlops::new(workload.config, plan.num_trainable);
        let flops_per_row = flops.of_full_row(workload.row_length);
        let tokens_per_step = workload.rows * workload.row_length * workload.gradient_accumulation_steps;
        // Recomputing the forward does not count as model FLOPs, but takes half as long as the FLOPs that do.
        let recomputation = if workload.gradient_checkpointing == GradientCheckpointing::Off { 1.0 } else { 1.5 };
        let flops_per_step = flops_per_row * as_f64(workload.rows * workload.gradient_accumulation_steps);
        let reckoned = target.flops_per_second.map(|rate| flops_per_step * recomputation / rate);
        let step_seconds = calibrated.or(reckoned);

        let steps = forecast.map_or(recipe.train.max_steps, |forecast| Some(forecast.steps));
        let mean_step_tokens = forecast.map_or(as_f64(tokens_per_step), |forecast| forecast.step_tokens);
        let of_full_step = forecast.map_or(1.0, |forecast| forecast.step_flops / flops_per_step);
        let mean_step_seconds = step_seconds.map(|seconds| seconds * of_full_step);
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 steps")]
        let of_all_steps = |of_step: f64| steps.map(|steps| of_step * steps as f64);
        let seconds = mean_step_seconds.and_then(of_all_steps);
        let energy_kwh = seconds.zip(target.watts).map(|(seconds, watts)| seconds / 3600.0 * watts / 1000.0);
        let cost = seconds.and_then(|seconds| prices.price(seconds, energy_kwh));
        let suggestions = match target.memories() {
            Some(memories) if wants_fit || fits == Some(false) => fit::largest_that_fit(workload, memories),
            _ => Vec::new(),
        };
        Self {
            device: target.label.clone(),
            memory_bytes: target.memory_bytes.map(whole),
            free_memory_bytes: target.free_bytes.map(whole),
            host,
            fits,
            plan,
            flops_per_token: flops_per_row / as_f64(workload.row_length.max(1)),
            tokens_per_step,
            step_seconds,
            is_calibrated: calibrated.is_some(),
            rows: forecast.map(|forecast| Rows { per_epoch: forecast.rows_per_epoch }),
            steps,
            mean_step_tokens,
            mean_step_seconds,
            total_tokens: of_all_steps(mean_step_tokens).map(whole),
            seconds,
            is_at_most: forecast.is_none(),
            energy_kwh,
            cost,
            currency: cost.map(|_| prices.currency.clone()),
            suggestions,
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes and tokens")]
pub(super) fn whole(count: f64) -> u64 {
    count.round() as u64
}
