//! The rules, by topic.

mod clocks;
mod compute;
mod data;
mod input;
mod memory;
mod page_cache;
mod ranks;
mod recomputation;
mod stalls;
mod weights;

use super::{Finding, Run};
use When::{AtOnce, AtTheEnd, DuringTheRun};

pub use compute::MARGIN;

/// A rule: its finding in a run, if any.
pub(super) type Rule = fn(&Run) -> Option<Finding>;

/// When a rule is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Of the last steps, and of a run that is too short for all other rules: few steps show as much as many.
    AtOnce,
    /// Of the whole run only.
    AtTheEnd,
    /// Also of the last steps: what it finds can hold for a while and justify a change in the middle of a run.
    DuringTheRun,
}

pub(super) const RULES: &[(Rule, When)] = &[
    (input::input_bound, DuringTheRun),
    (page_cache::page_cache, DuringTheRun),
    (weights::weights_from_disk, DuringTheRun),
    (ranks::straggler, DuringTheRun),
    (ranks::exchange_bound, DuringTheRun),
    (compute::shared_cpu, DuringTheRun),
    (compute::host_to_device, DuringTheRun),
    (compute::launch_overhead, DuringTheRun),
    (compute::small_batches, AtTheEnd),
    (compute::low_mfu, AtTheEnd),
    (recomputation::not_needed, AtTheEnd),
    (recomputation::missing, AtTheEnd),
    (data::padding, DuringTheRun),
    (data::truncation, AtOnce),
    (stalls::evaluation, DuringTheRun),
    (stalls::checkpoint, DuringTheRun),
    (stalls::logging, DuringTheRun),
    (stalls::first_step, AtTheEnd),
    (stalls::uneven_steps, AtTheEnd),
    (memory::pressure, AtOnce),
    (memory::creep, DuringTheRun),
    (memory::fragmentation, AtTheEnd),
    (memory::swapping, AtOnce),
    (memory::other_process, AtOnce),
    (clocks::throttled, AtOnce),
];
