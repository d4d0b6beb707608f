//! The rules, by topic.

pub(super) mod clocks;
pub(super) mod compute;
pub(super) mod data;
pub(super) mod input;
pub(super) mod memory;
pub(super) mod page_cache;
pub(super) mod recomputation;
pub(super) mod stalls;
