//! Finds settings with which a recipe's step fits into memory, and their sizes.

use std::{fmt, iter};

use serde::Serialize;

use super::memory::{Component, MemoryPlan};
use super::workload::Workload;
use crate::config::{GradientCheckpointing, ObjectiveName, Residency};
use crate::device::Dtype;
use crate::insight::diagnosis::MEMORY_MARGIN;
use crate::model::Storage;
use crate::model::weights::Quantisation;
use crate::ops::cross_entropy::LossChunk;
use crate::ops::quantised::Coding;
use crate::util::stats::as_f64;

/// Usable share of a device's memory: drivers, the desktop and fragmentation take the rest.
pub const USABLE: f64 = 0.95;

/// Weights that the memory of a host that is not known is taken to hold, in memories of its GPU.
const USUAL_HOST_MEMORY: f64 = 3.0;

const MAX_PARTS_NAMED: usize = 3;

const MAX_CHANGES_NAMED: usize = 3;

const MIB: f64 = 1024.0 * 1024.0;

/// A change to the recipe and the resulting peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Suggestion {
    /// `section.key=value`, separated by spaces.
    pub settings: String,
    /// Peak memory of a step with this change.
    pub peak_bytes: usize,
}

impl Suggestion {
    /// The change as arguments of the command line.
    #[must_use]
    pub fn arguments(&self) -> String {
        format!("--set {}", self.settings.replace(' ', " --set "))
    }
}

/// The memory sizes that a step has to fit into.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memories {
    /// Memory of the device, in bytes.
    pub device_bytes: f64,
    /// Memory of the host beside a GPU, in bytes; `None` where it is not known, and on the CPU.
    pub host_bytes: Option<f64>,
}

impl Memories {
    /// The memory of a device, without a host limit.
    #[must_use]
    pub fn of_device(device_bytes: f64) -> Self {
        Self { device_bytes, host_bytes: None }
    }
}

/// Whether a plan fits into `memory_bytes`, of which [`USABLE`] can be used.
#[must_use]
pub fn fits(plan: &MemoryPlan, memory_bytes: f64) -> bool {
    is_room(plan.peak_bytes, memory_bytes)
}

/// Whether a peak fits into `memory_bytes`, of which [`USABLE`] can be used.
#[must_use]
pub fn is_room(peak_bytes: usize, memory_bytes: f64) -> bool {
    as_f64(peak_bytes) <= memory_bytes * USABLE
}

/// What became of `train.gradient_checkpointing` = "auto", and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// On, off, or on for some blocks; on a resumed run, what the earlier start had.
    pub choice: GradientCheckpointing,
    /// The reason, with what joins it to the choice.
    pub reason: String,
}

impl Decision {
    /// Off for as many blocks as a device of `device_bytes` has room for: beside the rest of a step, half as much again as they
    /// keep is left. On where it has not even room for what attention gives, or where its memory is not known.
    #[must_use]
    pub fn new(workload: &Workload<'_>, device_bytes: Option<f64>) -> Self {
        let peak =
            |gradient_checkpointing| as_f64(Workload { gradient_checkpointing, ..workload.clone() }.plan().peak_bytes);
        let on = peak(GradientCheckpointing::On);
        let needed = |choice| (peak(choice) - on).max(0.0);
        let Some(left) = device_bytes.map(|bytes| bytes * USABLE - on) else {
            return Self {
                choice: GradientCheckpointing::On,
                reason: ", as the device's memory is not known".to_owned(),
            };
        };
        let blocks = (1..=workload.config.num_layers()).map(GradientCheckpointing::Blocks);
        let mut choices = iter::once(GradientCheckpointing::Off).chain(blocks);
        let choice = choices.find(|choice| left >= MEMORY_MARGIN * needed(*choice));
        let choice = choice.unwrap_or(GradientCheckpointing::On);
        let (saved, left) = (size(needed(GradientCheckpointing::Off)), size(left.max(0.0)));
        let reason = match choice {
            GradientCheckpointing::Off => format!(", as there is room (it would save up to {saved} of {left})"),
            _ => format!(": without it a step takes up to {saved} more, and {left} are left"),
        };
        Self { choice, reason }
    }

    /// That of the run that is resumed.
    #[must_use]
    pub fn kept(choice: GradientCheckpointing) -> Self {
        Self { choice, reason: ", as in the run that is resumed".to_owned() }
    }
}

/// Shows `off, as there is room (it would save up to 1.20 GiB of 9.00 GiB)`.
impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.choice {
            GradientCheckpointing::Off => f.write_str("off")?,
            GradientCheckpointing::Offload => f.write_str("offload")?,
            GradientCheckpointing::On | GradientCheckpointing::Auto => f.write_str("on")?,
            GradientCheckpointing::Blocks(blocks) => write!(f, "on for {blocks} blocks, whose attention is kept")?,
        }
        f.write_str(&self.reason)
    }
}

/// Whether a step fits into the memory of the host beside a GPU; true where that is not known.
fn fits_host(workload: &Workload<'_>, memories: Memories) -> bool {
    workload.host_plan().zip(memories.host_bytes).is_none_or(|(plan, bytes)| is_room(plan.peak_bytes, bytes))
}

/// The largest micro-batch that fits, without changes or with those that save most memory, the mildest first.
#[must_use]
pub fn largest_that_fit(workload: &Workload<'_>, memories: Memories) -> Vec<Suggestion> {
    suggestions(workload, memories, |rows| (rows, vec![format!("train.micro_batch_size={rows}")]))
}

/// Changes with which the step fits and still trains on as many rows, the mildest first.
#[must_use]
pub fn that_fit(workload: &Workload<'_>, memories: Memories) -> Vec<Suggestion> {
    let rows_of_step = workload.rows * workload.gradient_accumulation_steps;
    suggestions(workload, memories, |most| {
        if most >= workload.rows {
            return (workload.rows, Vec::new());
        }
        // The largest number of rows that divides the rows of a step.
        let rows = (1..=most).rev().find(|rows| rows_of_step.is_multiple_of(*rows)).unwrap_or(1);
        let passes = rows_of_step / rows;
        let settings = [("micro_batch_size", rows), ("gradient_accumulation_steps", passes)];
        (rows, settings.map(|(key, value)| format!("train.{key}={value}")).to_vec())
    })
}

/// Ways to hold the base, the recipe's own first. Fewer bits change the model, and disks and buses are slow: these come last, and
/// only where nothing else fits.
fn storages(workload: &Workload<'_>, memories: Memories) -> impl Iterator<Item = Storage> {
    let bf16 = (workload.storage == Dtype::F32.into()).then(|| Dtype::Bf16.into());
    let nf4 = Quantisation { coding: Coding::Nf4, nested: false };
    let is_whole = workload.storage.quantisation.is_none() && workload.config.quantisation.is_none();
    let nf4 = is_whole.then_some(Storage { quantisation: Some(nf4), ..workload.storage });
    let residency = if workload.place.is_host() { Residency::Mapped } else { Residency::Host };
    let can_leave =
        workload.storage.residency == Residency::Memory && !(workload.is_random && workload.place.is_host());
    let elsewhere = can_leave.then_some(Storage { residency, ..workload.storage });
    let both = nf4.zip(elsewhere).map(|(nf4, _)| Storage { residency, ..nf4 });
    let parked_bytes = |storage| as_f64(Workload { storage, ..workload.clone() }.parked_base_bytes());
    let has_room = |storage: &Storage| {
        memories.host_bytes.is_some() || parked_bytes(*storage) <= USUAL_HOST_MEMORY * memories.device_bytes
    };
    let elsewhere = elsewhere.filter(has_room);
    [Some(workload.storage), bf16, nf4, elsewhere, both].into_iter().flatten()
}

/// What is set for another storage.
fn storage_settings(from: Storage, to: Storage) -> impl Iterator<Item = String> {
    let residency = if to.residency == Residency::Mapped { "mapped" } else { "host" };
    let dtype = (to.dtype != from.dtype).then(|| format!("model.dtype={}", to.dtype));
    let quantisation = (to.quantisation != from.quantisation).then(|| "model.quantization=nf4".to_owned());
    let residency = (to.residency != from.residency).then(|| format!("model.residency={residency}"));
    [dtype, quantisation, residency].into_iter().flatten()
}

/// Combinations of storage and checkpointing. For each, `of_rows` turns the largest fitting number of rows into the
/// number to use and its settings.
fn suggestions(
    workload: &Workload<'_>,
    memories: Memories,
    of_rows: impl Fn(usize) -> (usize, Vec<String>),
) -> Vec<Suggestion> {
    let own = match workload.gradient_checkpointing {
        GradientCheckpointing::Auto => GradientCheckpointing::Off,
        given => given,
    };
    let is_useful = |choice: &_| *choice != GradientCheckpointing::Offload || !workload.place.is_host();
    let others = [GradientCheckpointing::On, GradientCheckpointing::Offload].into_iter().filter(|other| *other != own);
    let checkpointing: Vec<_> = iter::once(own).chain(others).filter(is_useful).collect();
    // A large chunk of logits only adds speed, so it is the first setting to reduce.
    let most_tokens = |chunk: LossChunk| chunk.most_tokens(workload.place, workload.head());
    let most = most_tokens(LossChunk::Auto);
    let has_large_chunk = most_tokens(workload.loss_chunk) > most;
    let loss_chunk = if has_large_chunk { LossChunk::Auto } else { workload.loss_chunk };
    let rows_of_step = workload.rows * workload.gradient_accumulation_steps;
    let (mut found, mut seen) = (Vec::new(), Vec::new());
    for storage in storages(workload, memories) {
        let is_last_resort =
            (storage.quantisation, storage.residency) != (workload.storage.quantisation, workload.storage.residency);
        if is_last_resort && !found.is_empty() {
            break;
        }
        for &gradient_checkpointing in &checkpointing {
            let with_rows = |rows| {
                // Fewer rows at a time are as many in a step.
                let passes = rows_of_step.div_ceil(rows).max(workload.gradient_accumulation_steps);
                let workload = Workload { gradient_accumulation_steps: passes, ..workload.clone() };
                Workload { storage, rows, gradient_checkpointing, loss_chunk, ..workload }
            };
            let do_fit = |rows| {
                let workload = with_rows(rows);
                fits(&workload.plan(), memories.device_bytes) && fits_host(&workload, memories)
            };
            let Some(most_rows) = largest(do_fit) else { continue };
            let mut settings = Vec::new();
            settings.extend(has_large_chunk.then(|| format!("train.loss_chunk_tokens={most}")));
            settings.extend(storage_settings(workload.storage, storage));
            if gradient_checkpointing != workload.gradient_checkpointing {
                settings.push(format!("train.gradient_checkpointing={gradient_checkpointing}"));
            }
            let (rows, of_rows) = of_rows(most_rows);
            // Of fewer rows, a chunk of scores may be larger.
            if !do_fit(rows) {
                continue;
            }
            settings.extend(of_rows);
            let suggestion = Suggestion { settings: settings.join(" "), peak_bytes: with_rows(rows).plan().peak_bytes };
            // Smaller weights are no gain unless they allow more rows.
            if !suggestion.settings.is_empty() && !seen.contains(&(gradient_checkpointing, rows)) {
                seen.push((gradient_checkpointing, rows));
                found.push(suggestion);
            }
        }
    }
    found
}

/// A message about what a step needs and what is available, if that is too little. `place` names the device's memory.
#[must_use]
pub fn shortage(workload: &Workload<'_>, memories: Memories, place: &str) -> Option<String> {
    let plan = workload.plan();
    let lacks = |needs: &[Component], peak_bytes: usize, of: &str, place: &str, bytes: f64| {
        (!is_room(peak_bytes, bytes)).then(|| {
            format!(
                "a step whose rows are all as long as `data.max_length` is estimated to need {}{of} ({}), and {place} has \
                 {}\n  hint: {}",
                size(as_f64(peak_bytes)),
                largest_parts(needs),
                size(bytes),
                hint(workload, &plan, &that_fit(workload, memories))
            )
        })
    };
    lacks(&plan.components, plan.peak_bytes, "", place, memories.device_bytes).or_else(|| {
        let (plan, bytes) = workload.host_plan().zip(memories.host_bytes)?;
        lacks(&plan.components, plan.peak_bytes, " of host memory", "this process", bytes)
    })
}

/// Message for when memory ran out although the step should fit: its largest parts, and settings that need less.
#[must_use]
pub fn advice(workload: &Workload<'_>, memory_bytes: Option<f64>, host_bytes: Option<f64>, place: &str) -> String {
    let plan = workload.plan();
    let there_is = memory_bytes.unwrap_or(f64::INFINITY);
    // Aim for a quarter less than the size that was too large.
    let enough = 0.75 * there_is.min(as_f64(plan.peak_bytes) / USABLE);
    format!(
        "{place} has no memory left; a step whose rows are all as long as `data.max_length` is estimated to need {} ({})\n  \
         hint: {}",
        size(as_f64(plan.peak_bytes)),
        largest_parts(&plan.components),
        hint(workload, &plan, &that_fit(workload, Memories { device_bytes: enough, host_bytes }))
    )
}

fn largest_parts(components: &[Component]) -> String {
    let mut parts: Vec<_> = components.iter().collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let named = parts.iter().take(MAX_PARTS_NAMED).map(|part| format!("{} {}", part.name, size(as_f64(part.bytes))));
    named.collect::<Vec<_>>().join(", ")
}

/// What makes it fit where no setting that leaves the result as it is does. `writes_answers`: the model answers prompts itself.
#[must_use]
pub fn smaller(plan: &MemoryPlan, writes_answers: bool) -> &'static str {
    let of_adapters = plan.components.iter().filter(|part| part.is_of_adapters);
    if 2 * of_adapters.map(|part| part.bytes).sum::<usize>() > plan.peak_bytes {
        "most of it is for the adapters: take a smaller lora.r, or fewer lora.target_modules"
    } else if writes_answers {
        "nothing else in the recipe makes it fit: take fewer objective.num_generations, a shorter data.max_length, a smaller \
         model or a larger device"
    } else {
        "nothing in the recipe makes it fit: take a shorter data.max_length, a smaller model or a larger device"
    }
}

fn hint(workload: &Workload<'_>, plan: &MemoryPlan, suggestions: &[Suggestion]) -> String {
    if suggestions.is_empty() {
        return smaller(plan, workload.objective.name == ObjectiveName::Grpo).into();
    }
    let named = suggestions.iter().take(MAX_CHANGES_NAMED);
    let named = named.map(|change| format!("`{}` ({})", change.arguments(), size(as_f64(change.peak_bytes))));
    format!("less is needed with {}", named.collect::<Vec<_>>().join(", or with "))
}

/// The largest number up to 4096 for which `holds` is true, if it is true for all smaller ones too.
fn largest(holds: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (0, 4097);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        if holds(middle) { low = middle } else { high = middle }
    }
    (low > 0).then_some(low)
}

/// `812 MiB`, `12.34 GiB`.
#[must_use]
pub fn size(bytes: f64) -> String {
    if bytes < 1024.0 * MIB { format!("{:.0} MiB", bytes / MIB) } else { format!("{:.2} GiB", bytes / MIB / 1024.0) }
}

#[cfg(test)]
mod tests;
