//! Every figure of a step, one row each; those of an evaluation are in `evaluation`. The rows determine the lines of
//! metrics.jsonl, TensorBoard's tags and their descriptions, and how samples of the machine become one figure of the step.
//!
//! To add a figure, add a row here and the code that measures it.

pub(crate) mod evaluation;
mod rewards;

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::{Deserialize, Deserializer, Serialize};

pub use evaluation::EvalMetrics;
pub use rewards::{Rollout, RolloutEpisode, Spread};

/// How the samples taken during a step become its figure.
#[derive(Clone, Copy)]
pub(crate) enum Fold {
    Mean,
    Max,
    Min,
    Last,
    /// How much a counter has grown since the step before.
    Since,
    /// Measured by the thread that samples the machine.
    Once,
}

/// A sum, and what it is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    /// The sum.
    pub sum: f64,
    /// Number of what was added.
    pub count: f64,
}

impl Mean {
    /// That of one number.
    #[must_use]
    pub fn of(value: f64) -> Self {
        Self { sum: value, count: 1.0 }
    }

    /// The mean; `None` of nothing.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

impl AddAssign for Mean {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
    }
}

impl ObjectiveFigures {
    /// The mean margin; of answers without pairs, that of the means.
    #[must_use]
    pub fn margin(&self) -> Option<f64> {
        let of_means = || Some(self.rewards_chosen.value()? - self.rewards_rejected.value()?);
        self.rewards_margins.value().or_else(of_means)
    }
}

/// Samples of a number since the last [`take`](Samples::take).
#[derive(Debug, Default)]
struct Samples {
    sum: f64,
    count: u32,
    highest: Option<f64>,
    lowest: Option<f64>,
    last: Option<f64>,
    /// The latest sample before the current time span.
    before: Option<f64>,
}

impl Samples {
    fn add(&mut self, value: Option<f64>) {
        self.last = value;
        let Some(value) = value else { return };
        self.sum += value;
        self.count += 1;
        self.highest = Some(self.highest.map_or(value, |highest| highest.max(value)));
        self.lowest = Some(self.lowest.map_or(value, |lowest| lowest.min(value)));
    }

    /// Returns the figure and starts anew. Without a sample, the latest earlier one stands in.
    fn take(&mut self, fold: Fold) -> Option<f64> {
        let next = Self { last: self.last, before: self.last, ..Self::default() };
        let samples = std::mem::replace(self, next);
        let figure = match fold {
            Fold::Mean => (samples.count > 0).then(|| samples.sum / f64::from(samples.count)),
            Fold::Max => samples.highest,
            Fold::Min => samples.lowest,
            Fold::Since => return Some((samples.last? - samples.before?).max(0.0)),
            Fold::Last => None,
            Fold::Once => return None,
        };
        figure.or(samples.last)
    }
}

/// Samples of shares by name; a share that a sample lacks is 0.
#[derive(Debug, Default)]
struct ShareSamples {
    sums: BTreeMap<String, f64>,
    count: u32,
    last: Option<BTreeMap<String, f64>>,
}

/// A type of figure that can be sampled.
trait Sampled: Sized {
    type Samples;
    fn add(samples: &mut Self::Samples, sample: Option<&Self>);
    fn take(samples: &mut Self::Samples, fold: Fold) -> Option<Self>;
}

impl Sampled for f64 {
    type Samples = Samples;

    fn add(samples: &mut Samples, sample: Option<&Self>) {
        samples.add(sample.copied());
    }

    fn take(samples: &mut Samples, fold: Fold) -> Option<Self> {
        samples.take(fold)
    }
}

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2^53")]
impl Sampled for u64 {
    type Samples = Samples;

    fn add(samples: &mut Samples, sample: Option<&Self>) {
        samples.add(sample.map(|count| *count as f64));
    }

    fn take(samples: &mut Samples, fold: Fold) -> Option<Self> {
        samples.take(fold).map(|count| count as Self)
    }
}

impl Sampled for BTreeMap<String, f64> {
    type Samples = ShareSamples;

    fn add(samples: &mut ShareSamples, sample: Option<&Self>) {
        samples.last = sample.cloned();
        let Some(shares) = sample else { return };
        samples.count += 1;
        for (name, share) in shares {
            *samples.sums.entry(name.clone()).or_default() += share;
        }
    }

    /// The mean shares; `None` where all are 0.
    fn take(samples: &mut ShareSamples, _: Fold) -> Option<Self> {
        let next = ShareSamples { last: samples.last.clone(), ..ShareSamples::default() };
        let ShareSamples { sums, count, last } = std::mem::replace(samples, next);
        let (mut shares, count) = if count > 0 { (sums, count) } else { (last?, 1) };
        shares.values_mut().for_each(|share| *share /= f64::from(count));
        (!shares.is_empty()).then_some(shares)
    }
}

/// Makes [`StepMetrics`], [`MachineSample`], [`MachineSamples`] and the table of tags from rows. A row is the sentence
/// with its unit, the name, the type, how samples fold (machine only), and TensorBoard's tag.
macro_rules! figures {
    (
        always { $($(#[doc = $doc:literal])+ $(#[serde $serde:tt])? $name:ident: $type:ty $(, $tag:literal)?;)+ }
        if_measured { $($(#[doc = $doc_if:literal])+ $name_if:ident: $type_if:ty $(, $tag_if:literal)?;)+ }
        objective { $($(#[doc = $doc_ob:literal])+ $name_ob:ident, $tag_ob:literal;)+ }
        machine { $($(#[doc = $doc_of:literal])+ $name_of:ident: $type_of:ty, $fold:ident $(, $tag_of:literal)?;)+ }
    ) => {
        /// The figures of one step: a line of metrics.jsonl, field by field. Figures that were not measured are absent;
        /// numbers that are not finite are `null` in JSON.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct StepMetrics {
            $($(#[doc = $doc])+ $(#[serde $serde])? pub $name: $type,)+
            $($(#[doc = $doc_if])+ #[serde(skip_serializing_if = "Option::is_none")] pub $name_if: Option<$type_if>,)+
            $($(#[doc = $doc_ob])+ #[serde(skip_serializing_if = "Option::is_none")] pub $name_ob: Option<f64>,)+
            $($(#[doc = $doc_of])+ #[serde(skip_serializing_if = "Option::is_none")] pub $name_of: Option<$type_of>,)+
        }

        /// What an objective reports besides its loss.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct ObjectiveFigures {
            $($(#[doc = $doc_ob])+ pub $name_ob: Mean,)+
        }

        impl ObjectiveFigures {
            /// All sums and counts, in the order of the rows: what ranks add up.
            #[must_use]
            pub fn numbers(&self) -> Vec<f64> {
                [$(self.$name_ob.sum, self.$name_ob.count),+].into()
            }

            /// The figures of such numbers.
            #[must_use]
            pub fn of_numbers(numbers: &[f64]) -> Self {
                let mut numbers = numbers.iter().copied();
                let mut next = || numbers.next().unwrap_or_default();
                Self { $($name_ob: Mean { sum: next(), count: next() },)+ }
            }
        }

        impl AddAssign for ObjectiveFigures {
            fn add_assign(&mut self, other: Self) {
                $(self.$name_ob += other.$name_ob;)+
            }
        }

        impl StepMetrics {
            /// Takes over the figures of the objective.
            pub fn set_objective(&mut self, figures: &ObjectiveFigures) {
                $(self.$name_ob = figures.$name_ob.value();)+
                self.rewards_margins = figures.margin();
            }

            /// Takes over the figures of the machine.
            pub fn set_machine(&mut self, machine: MachineSample) {
                $(self.$name_of = machine.$name_of;)+
            }
        }

        /// Figures of the machine, at a moment or over a step. Figures that cannot be measured are absent.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct MachineSample {
            $($(#[doc = $doc_of])+ pub $name_of: Option<$type_of>,)+
        }

        /// Samples of the machine since the last [`take`](Self::take).
        #[derive(Debug, Default)]
        pub struct MachineSamples {
            $($name_of: <$type_of as Sampled>::Samples,)+
        }

        impl MachineSamples {
            /// Adds a sample.
            pub fn add(&mut self, sample: &MachineSample) {
                $(<$type_of>::add(&mut self.$name_of, sample.$name_of.as_ref());)+
            }

            /// The figures since the last call, which then start anew. Without a sample since then, the latest one
            /// stands in.
            pub fn take(&mut self) -> MachineSample {
                MachineSample { $($name_of: <$type_of>::take(&mut self.$name_of, Fold::$fold),)+ }
            }
        }

        /// Every figure: its name, TensorBoard's tag (empty if it has none), the sentence.
        const ROWS: &[(&str, &str, &str)] = &[
            $((stringify!($name), concat!("" $(, $tag)?), concat!($($doc),+)),)+
            $((stringify!($name_if), concat!("" $(, $tag_if)?), concat!($($doc_if),+)),)+
            $((stringify!($name_ob), $tag_ob, concat!($($doc_ob),+)),)+
            $((stringify!($name_of), concat!("" $(, $tag_of)?), concat!($($doc_of),+)),)+
        ];
    };
}

figures! {
    always {
        /// Optimizer update, from 1.
        step: u64;
        /// Passes over the training rows so far.
        epoch: f64, "train/epoch";
        /// Mean loss of the step's target tokens, in nats; of preferences that of a pair or an answer.
        #[serde(deserialize_with = "null_is_nan")]
        loss: f64, "train/loss";
        /// Learning rate of the step.
        learning_rate: f64, "train/learning_rate";
        /// Global norm of the gradient, before clipping.
        #[serde(deserialize_with = "null_is_nan")]
        grad_norm: f64, "train/grad_norm";
        /// The update was left out, since the loss or the gradient was not finite.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        skipped: bool;
        /// Rules of the diagnosis that have held for some time by this step and are reported from here on; `slow_step` where
        /// it took far longer than those before it and its tokens explain.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        findings: Vec<String>;
        /// Tokens of the step that are not padding.
        tokens: u64, "train/tokens";
        /// Tokens of the step that carry loss.
        target_tokens: u64, "train/target_tokens";
        /// Tokens that are not padding, per second of `step_seconds`.
        tokens_per_second: f64, "throughput/tokens_per_second";
        /// Seconds of the step, from the end of the previous one; evaluations, samples and checkpoints between the two are
        /// left out. It ends when the update has been made; on a GPU, which the loop waits for where loss and gradient norm
        /// are read, when it has been handed over: the rest of the update is in the next step.
        step_seconds: f64, "time/step";
        /// Seconds in which the loop waited for data.
        data_wait_seconds: f64, "time/data_wait";
        /// Seconds of the forward and backward passes, until their loss and gradient norm had been read. In steps of a GPU
        /// that have no `forward_seconds`, the update of the step before is in it too.
        forward_backward_seconds: f64, "time/forward_backward";
        /// Seconds of clipping and the update. In steps of a GPU that have no `forward_seconds`: of handing it over.
        optimizer_seconds: f64, "time/optimizer";
    }
    if_measured {
        /// What the watchdog found wrong with the step: `skipped_step`, `loss_spike`, `zero_gradient`, `unmoved_adapters`.
        anomaly: String;
        /// Factor on the loss that keeps `f16` gradients above zero; only with `precision = "f16"`.
        loss_scale: f64;
        /// Model FLOPs per second over the fastest matrix product measured on the device, from 0 to 1.
        mfu: f64, "throughput/mfu";
        /// Tokens that are not padding, per joule that the GPU draws.
        tokens_per_joule: f64, "throughput/tokens_per_joule";
        /// Seconds from the end of the previous step's figures to the end of this one's; for the first step, from the end
        /// of start-up. Data wait, host-to-device, forward and backward, optimizer, logging, evaluation, checkpoint and other
        /// add up to it.
        wall_seconds: f64, "time/wall";
        /// Seconds in which micro-batches were laid out and handed to the device. In steps of a GPU that have no
        /// `forward_seconds` not until they were there.
        host_to_device_seconds: f64, "time/host_to_device";
        /// Seconds of the forward passes, with loss and its gradient. On a GPU only the second step after a start and every
        /// 50th step have it: in them, the device is waited for at the end of every part.
        forward_seconds: f64, "time/forward";
        /// Seconds of the backward passes, with the gradient norm; absent where `forward_seconds` is.
        backward_seconds: f64, "time/backward";
        /// Seconds in which figures were written, those of the step before among them.
        logging_seconds: f64, "time/logging";
        /// Seconds of an evaluation before this step, and of the samples drawn at it.
        evaluation_seconds: f64, "time/evaluation";
        /// Seconds in which a checkpoint was written before this step.
        checkpoint_seconds: f64, "time/checkpoint";
        /// Seconds of the wall time that are in none of the other parts; in the first step, measuring the device's peak among
        /// them, and in steps of a GPU that have `forward_seconds` the end of the update before.
        other_seconds: f64, "time/other";
        /// Seconds in which "grpo" wrote and judged answers.
        rollout_seconds: f64, "time/rollout";
        /// Those of them in which rules, programs and functions judged.
        reward_seconds: f64, "time/reward";
        /// Those of them in which nothing could be written, as all episodes waited for the environment.
        environment_seconds: f64, "time/environment";
        /// Mean of what answers of "grpo" got of each rule or function, by its name, without its factor. In TensorBoard
        /// rewards/NAME/mean.
        reward_means: BTreeMap<String, f64>;
        /// Standard deviation of the same. In TensorBoard rewards/NAME/std.
        reward_stds: BTreeMap<String, f64>;
        /// What functions that judge have logged by `log_metric`, mean of a round. In TensorBoard `reward_metrics/NAME`.
        reward_metrics: BTreeMap<String, f64>;
        /// Rows that were read for the step.
        rows: u64, "data/rows";
        /// Rows of the step that were longer than `data.max_length` and were cut.
        truncated_rows: u64, "data/truncated_rows";
        /// Tokens of padding in the step's micro-batches, with rows at a multiple of 64 (beyond 1024 of 128). A device with
        /// kernels that leave padding out does not compute them.
        padding_tokens: u64, "data/padding_tokens";
        /// Seconds in which data workers made the micro-batches of the step, all workers together.
        worker_busy_seconds: f64, "data/worker_busy";
        /// Seconds of processor time in `worker_busy_seconds`.
        worker_cpu_seconds: f64, "data/worker_cpu";
        /// Seconds in which a data worker could have run and no processor was free. The rest of `worker_busy_seconds` was
        /// waiting, for the disk mostly.
        worker_queued_seconds: f64, "data/worker_queued";
        /// Processes that shared the step; absent where there is one. Tokens and rows are those of all, and so are means and norms;
        /// the machine's figures are those of the first one's.
        ranks: u64;
        /// Seconds in which the first rank waited for the sums of the gradients over the ranks, once all of them had theirs: what
        /// passed beside the backward is not in it.
        exchange_seconds: f64, "time/exchange";
        /// Seconds for which the first rank waited for the slowest one; its `forward_backward_seconds` contain them, and the
        /// exchange.
        rank_wait_seconds: f64, "time/rank_wait";
        /// Seconds until each rank had its gradients, in their order.
        rank_seconds: Vec<f64>;
        /// Seconds in which each rank waited for data.
        rank_data_wait_seconds: Vec<f64>;
        /// Tokens of each rank's share.
        rank_tokens: Vec<f64>;
        /// Bytes of live tensors in the backend's pools.
        gpu_memory_allocated_bytes: u64, "gpu/memory_allocated";
        /// Bytes that the backend's pools hold.
        gpu_memory_reserved_bytes: u64, "gpu/memory_reserved";
        /// Bytes of live tensors in the backend's pools, the most that were seen: at the end of the step and, with CUDA kernels
        /// of our own, in it, where logits exist and in each block's backward. Without them: after the forward of the last
        /// micro-batch, in this step or the last one that asked then (those whose parts are measured, and the first).
        gpu_memory_peak_bytes: u64, "gpu/memory_peak";
        /// What kept the GPU's clocks down during the step, by name; absent where nothing did, or where the driver does not
        /// say.
        gpu_throttle_reasons: Vec<String>;
    }
    objective {
        /// Reward of the chosen answers, mean: beta times how much likelier they are than by the reference, in nats; without
        /// a reference beta times their log-probability.
        rewards_chosen, "rewards/chosen";
        /// The same of the rejected answers.
        rewards_rejected, "rewards/rejected";
        /// Share of the pairs whose chosen answer has the higher reward, from 0 to 1. Before the first update both are equal.
        rewards_accuracies, "rewards/accuracies";
        /// Reward of the chosen answers over that of the rejected ones, mean.
        rewards_margins, "rewards/margins";
        /// Log-probability of the chosen answers in nats, mean; of "orpo" and "simpo" that of a token.
        logps_chosen, "logps/chosen";
        /// The same of the rejected answers.
        logps_rejected, "logps/rejected";
        /// Cross-entropy of the chosen answers in nats, where it is a part of the loss.
        nll_loss, "train/nll_loss";
        /// Logarithm of the sigmoid of `log_odds_chosen`, mean; of "orpo".
        log_odds_ratio, "train/log_odds_ratio";
        /// Logarithm of the odds of the chosen answers over those of the rejected ones, mean; of "orpo".
        log_odds_chosen, "train/log_odds_chosen";
        /// Divergence from the reference in nats: of "kto" measured on answers to other prompts, of "grpo" that of a token.
        kl, "train/kl";
        /// Reward of an answer of "grpo", mean.
        reward, "rewards/mean";
        /// Standard deviation of the rewards of the answers to a prompt, mean.
        reward_std, "rewards/std";
        /// Share of the prompts whose answers all have the same reward: nothing can be learned from them.
        frac_reward_zero_std, "rewards/zero_std";
        /// Tokens of an answer of "grpo", mean.
        completion_length, "completions/length";
        /// The same of those that ended by themselves.
        terminated_length, "completions/terminated_length";
        /// Share of the answers that did not end by themselves.
        clipped_ratio, "completions/clipped";
        /// Entropy in nats of what a token of an answer was drawn from, at `temperature` and before `top_p`, `top_k` and `min_p`, mean.
        /// Towards 0 all answers become one.
        entropy, "completions/entropy";
        /// Share of the tokens of "grpo", from 0 to 1, that are to become less likely and are so by more than `epsilon` since
        /// they were written: they are left as they are. Only where answers are used again; of sequences where these are
        /// weighed.
        clip_ratio_low_mean, "clip_ratio/low_mean";
        /// The same of tokens that are to become likelier, by more than `epsilon_high`.
        clip_ratio_high_mean, "clip_ratio/high_mean";
        /// The sum of both.
        clip_ratio_region_mean, "clip_ratio/region_mean";
        /// Answers of the model in an episode with an environment, mean; like the next two without episodes that have failed.
        turns, "episodes/turns";
        /// Calls of tools in an episode, mean.
        tool_calls, "tools/call_frequency";
        /// Share of the calls of tools that have failed.
        tool_failures, "tools/failure_frequency";
        /// Share of the episodes whose environment has failed for good.
        failed_episodes, "episodes/failed";
        /// How often an episode has begun anew as its environment had failed, mean.
        episode_retries, "episodes/retries";
    }
    machine {
        /// Bytes of the process that are in RAM.
        host_memory_bytes: u64, Last, "memory/host";
        /// Bytes that the machine, or the process's control group, has left, lowest sample of the step.
        host_available_bytes: u64, Min, "memory/host_available";
        /// Bytes of the process that have been swapped out.
        host_swapped_bytes: u64, Last, "memory/host_swapped";
        /// Percent of all processor threads that the process used during the step.
        cpu_utilization_percent: f64, Once, "cpu/utilization";
        /// Bytes that the process read from disks during the step: not what was found in the page cache.
        disk_read_bytes: u64, Since, "disk/read";
        /// Page faults of the process during the step that waited for a disk.
        major_page_faults: u64, Since, "disk/major_page_faults";
        /// Percent of the time in which the GPU ran a kernel, mean over the step.
        gpu_utilization_percent: f64, Mean, "gpu/utilization";
        /// Percent of the time in which the GPU ran a kernel, highest sample of the step.
        gpu_utilization_max_percent: f64, Max;
        /// Bytes of the GPU's memory that are in use, by whatever process.
        gpu_memory_used_bytes: u64, Max, "gpu/memory_used";
        /// Watts that the GPU draws, mean over the step.
        gpu_power_watts: f64, Mean, "gpu/power";
        /// Joules that the GPU has used since the start.
        energy_joules: f64, Last, "gpu/energy";
        /// Joules that the processor's packages have used since the start, by whatever process; only where no GPU is used.
        cpu_energy_joules: f64, Last, "cpu/energy";
        /// Temperature of the GPU in degrees Celsius, highest sample of the step.
        gpu_temperature_celsius: f64, Max, "gpu/temperature";
        /// Percent of the GPU's multiprocessors that had work, mean over the step; absent where the driver does not count it.
        gpu_sm_activity_percent: f64, Mean, "gpu/sm_activity";
        /// Percent of the bandwidth of the GPU's memory that was used, where the driver counts it (Hopper and newer);
        /// elsewhere percent of the time in which it was read or written. Mean over the step.
        gpu_memory_activity_percent: f64, Mean, "gpu/memory_activity";
        /// Percent of the time in which the GPU's tensor cores were at work, mean over the step; absent where the driver does
        /// not count it.
        gpu_tensor_activity_percent: f64, Mean, "gpu/tensor_activity";
        /// Percent of the time in which the GPU's pipelines of single or half precision outside of the tensor cores were at
        /// work, the busier of the two, mean over the step; absent where the driver does not count it.
        gpu_float_activity_percent: f64, Mean, "gpu/float_activity";
        /// MHz of the GPU's multiprocessors, mean over the step.
        gpu_sm_clock_mhz: f64, Mean, "gpu/sm_clock";
        /// MHz of the GPU's memory, mean over the step.
        gpu_memory_clock_mhz: f64, Mean, "gpu/memory_clock";
        /// The share of the step's samples in which each throttle reason kept the GPU's clocks down, from 0 to 1.
        gpu_throttle_shares: BTreeMap<String, f64>, Mean;
        /// Bytes a second that the GPU received over PCI Express, mean over the step.
        gpu_pcie_received_bytes_per_second: f64, Mean, "gpu/pcie_received";
        /// Bytes a second that the GPU sent over PCI Express, mean over the step.
        gpu_pcie_sent_bytes_per_second: f64, Mean, "gpu/pcie_sent";
        /// Bytes of the GPU's memory that other processes hold.
        gpu_other_processes_memory_bytes: u64, Max, "gpu/other_processes_memory";
    }
}

/// Text that the model wrote: a line of samples.jsonl.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Optimizer updates before this evaluation.
    pub step: u64,
    /// The prompt as the recipe gives it.
    pub prompt: String,
    /// What the model wrote after it.
    pub text: String,
    /// Its reward, of "grpo".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
}

/// Figures that TensorBoard gets: the name, the tag, a sentence with the unit.
pub fn tags() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let rows = ROWS.iter().chain(evaluation::ROWS);
    rows.filter(|(_, tag, _)| !tag.is_empty()).map(|(name, tag, sentence)| (*name, *tag, sentence.trim()))
}

/// The tagged figures of a record, in the order of its fields. Numbers that are not finite come as NaN.
pub(crate) fn tagged_scalars(record: &impl Serialize) -> Vec<(&'static str, f64)> {
    // Only the structs above are passed in; they serialise to objects of numbers.
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(record) else { return Vec::new() };
    let tag = |name: &str| tags().find(|(field, ..)| *field == name).map(|(_, tag, _)| tag);
    fields.iter().filter_map(|(name, value)| Some((tag(name)?, value.as_f64().unwrap_or(f64::NAN)))).collect()
}

/// The tagged figures of an evaluation, without its epoch, which is a figure of the steps.
pub(crate) fn eval_scalars(eval: &EvalMetrics) -> Vec<(&'static str, f64)> {
    tagged_scalars(eval).into_iter().filter(|(tag, _)| tag.starts_with("eval/")).collect()
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
pub(crate) mod tests;
