//! How long a step takes that several ranks share: `plan --ranks 8 --nodes 2 --network 25G`.

use serde::Serialize;

use crate::device::DeviceKind;
use crate::train::grads::bucket_numbers;
use crate::train::ranks::share::num_parts;
use crate::util::stats::{as_f64, as_u64};
use crate::util::text::with_commas;

/// Share of a link's rate that a ring over TCP reaches: 0.84 to 0.96 at 1 Gbit/s and 100 Mbit/s.
const OF_LINK: f64 = 0.9;
/// Bytes a second of a sum within a node, through its memory: of Open MPI between two cores.
const OF_MEMORY: f64 = 1.5e9;
/// Seconds for each of the 2 (ranks - 1) parts of a ring: between nodes, and within one.
const HOP_SECONDS: [f64; 2] = [50e-6, 10e-6];
/// Bytes a second between GPUs of a node, and between a GPU and host memory.
const OF_BUS: f64 = 25e9;
/// Share of the backward in the time of a micro-batch: weights that are frozen have no gradients.
const BACKWARD: f64 = 0.5;
/// Share of a step that an exchange should not exceed.
const GOAL: f64 = 0.05;
/// From this efficiency downwards the curve has bent.
const BENT: f64 = 0.8;
/// The last point of the curve.
const MOST_RANKS: usize = 1024;

/// Processes that share the steps, and what is between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cluster {
    pub(super) ranks: usize,
    pub(super) nodes: usize,
    /// Bits a second of a node's link to the others.
    pub(super) network: f64,
    /// What has the gradients.
    pub(super) kind: DeviceKind,
}

/// What a step is on one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct OneRank {
    /// Time of the whole step.
    pub(super) seconds: f64,
    /// Rows of the whole step.
    pub(super) rows: usize,
    /// Backwards of the whole step.
    pub(super) backwards: usize,
    pub(super) tokens: f64,
    /// Gradients, in 32 bits.
    pub(super) gradient_bytes: f64,
    /// Numbers of those that blocks have: others are summed at the end.
    pub(super) of_blocks: usize,
}

/// A step that ranks share.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SharedStep {
    ranks: usize,
    nodes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_bits_per_second: Option<f64>,
    /// Rows of the rank that has most of them.
    rows_per_rank: usize,
    gradient_bytes: u64,
    compute_seconds: f64,
    exchange_seconds: f64,
    /// Part of `exchange_seconds` that passes beside the backward.
    hidden_seconds: f64,
    pub(super) step_seconds: f64,
    tokens_per_second: f64,
    /// Against as many times one rank, from 0 to 1.
    efficiency: f64,
    /// Tokens of a rank's share from which the exchange takes at most a twentieth of a step.
    tokens_per_rank_for_95_percent: u64,
    /// Efficiency with as many tokens a rank on other numbers of ranks.
    curve: Vec<Point>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Point {
    ranks: usize,
    efficiency: f64,
}

impl Cluster {
    /// Time of summing gradients over the ranks: a ring, in which every rank sends nearly twice what it has, over the slowest
    /// link; and, where these are not NVIDIA's, their way from the GPUs to host memory and back.
    fn exchange_seconds(&self, bytes: f64) -> f64 {
        if self.ranks < 2 {
            return 0.0;
        }
        let parts = as_f64(2 * (self.ranks - 1));
        let within = if self.kind == DeviceKind::Cuda { OF_BUS } else { OF_MEMORY };
        let (rate, hop) = match self.nodes {
            1 => (within, HOP_SECONDS[1]),
            _ => ((OF_LINK * self.network / 8.0).min(within), HOP_SECONDS[0]),
        };
        let copies = if self.sums_beside() { 0.0 } else { 2.0 * bytes / OF_BUS };
        parts / as_f64(self.ranks) * bytes / rate + parts * hop + copies
    }

    /// Whether sums go on beside the backward: in host memory by MPI, between NVIDIA's GPUs by NCCL.
    fn sums_beside(&self) -> bool {
        matches!(self.kind, DeviceKind::Cpu | DeviceKind::Cuda)
    }

    /// What a rank takes of a step of so many micro-batches of so many rows: micro-batches, and rows of each.
    pub(super) fn part_of(&self, micro_batches: usize, rows: usize) -> [usize; 2] {
        let parts = num_parts(micro_batches, self.ranks).min(rows).max(1);
        [(micro_batches * parts).div_ceil(self.ranks).max(1), rows.div_ceil(parts).max(1)]
    }

    /// A step of one rank, shared.
    pub(super) fn share(&self, one: OneRank) -> SharedStep {
        let rows_per_rank = one.rows.div_ceil(self.ranks).max(1);
        let compute_seconds = one.seconds * as_f64(rows_per_rank) / as_f64(one.rows.max(1));
        let [backwards, _] = self.part_of(one.backwards, one.rows / one.backwards.max(1));
        let backward_seconds = BACKWARD * compute_seconds / as_f64(backwards);
        // The last bucket begins when the backward is over.
        let bucket = bucket_numbers(one.of_blocks).min(one.of_blocks);
        let last = 1.0 - 4.0 * as_f64(one.of_blocks - bucket) / one.gradient_bytes.max(1.0);
        let hidden = |exchange: f64| {
            if self.sums_beside() { backward_seconds.min(exchange * (1.0 - last).max(0.0)) } else { 0.0 }
        };
        let exchange_seconds = self.exchange_seconds(one.gradient_bytes);
        let hidden_seconds = hidden(exchange_seconds);
        let step_seconds = compute_seconds + exchange_seconds - hidden_seconds;
        let per_token = one.seconds / one.tokens.max(1.0);
        let with = |ranks: usize| {
            // As many ranks on a node; one node as long as they fit there.
            let nodes = if self.nodes == 1 { 1 } else { ranks.div_ceil(self.ranks.div_ceil(self.nodes)).max(1) };
            let exchange = Self { ranks, nodes, ..*self }.exchange_seconds(one.gradient_bytes);
            Point { ranks, efficiency: compute_seconds / (compute_seconds + exchange - hidden(exchange)) }
        };
        SharedStep {
            ranks: self.ranks,
            nodes: self.nodes,
            network_bits_per_second: (self.nodes > 1).then_some(self.network),
            rows_per_rank,
            gradient_bytes: as_u64(one.gradient_bytes),
            compute_seconds,
            exchange_seconds,
            hidden_seconds,
            step_seconds,
            tokens_per_second: one.tokens / step_seconds,
            efficiency: one.seconds / (as_f64(self.ranks) * step_seconds),
            tokens_per_rank_for_95_percent: as_u64(
                (exchange_seconds - hidden_seconds) * (1.0 - GOAL) / GOAL / per_token,
            ),
            curve: std::iter::successors(Some(1), |ranks| Some(2 * ranks).filter(|ranks| *ranks <= MOST_RANKS))
                .map(with)
                .collect(),
        }
    }
}

impl SharedStep {
    /// The lines of the table. `seconds` writes a time.
    pub(super) fn lines(&self, seconds: impl Fn(f64) -> String) -> Vec<String> {
        let Self { ranks, nodes, rows_per_rank, .. } = self;
        let network = self.network_bits_per_second.map_or_else(
            || "on one node".to_owned(),
            |bits| format!("on {nodes} nodes with {} Gbit/s between them", bits / 1e9),
        );
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let megabytes = as_f64(self.gradient_bytes) / 1e6;
        let way = if *nodes > 1 { "a ring through 90% of the link" } else { "within the node" };
        let of_step = percent((self.exchange_seconds - self.hidden_seconds) / self.step_seconds);
        let beside = match self.hidden_seconds {
            hidden if hidden > 0.0 => format!("; {} of it beside the backward", seconds(hidden).trim()),
            _ => String::new(),
        };
        let mut lines = vec![
            format!("{ranks} ranks {network}; each has the memory above"),
            format!("  {:<24} {:>10}   {rows_per_rank} rows a rank", "computing", seconds(self.compute_seconds)),
            format!(
                "  {:<24} {:>10}   {megabytes:.1} MB of gradients, {way}{beside}",
                "exchange",
                seconds(self.exchange_seconds)
            ),
            format!(
                "  {:<24} {:>10}   {of_step} of it wait for the exchange; {:.0} tokens/s, {} of {ranks} times one rank",
                "step",
                seconds(self.step_seconds),
                self.tokens_per_second,
                percent(self.efficiency)
            ),
        ];
        let enough = usize::try_from(self.tokens_per_rank_for_95_percent).unwrap_or(usize::MAX);
        lines.push(format!(
            "  from {} tokens a rank a step on, the exchange takes less than 5% (train.gradient_accumulation_steps)",
            with_commas(enough)
        ));
        let points = self.curve.iter().map(|point| format!("{} {}", point.ranks, percent(point.efficiency)));
        lines.push(format!("  efficiency by ranks, with this share each: {}", points.collect::<Vec<_>>().join(", ")));
        let bend = self.curve.iter().find(|point| point.efficiency < BENT);
        lines.extend(bend.map(|point| format!("  it falls below 80% at {} ranks", point.ranks)));
        lines
    }
}

/// Reads a rate in bits a second, such as `25G` or `100M`.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    let trimmed = text.trim_end_matches("bit/s").trim();
    let (number, unit) = trimmed.split_at(trimmed.trim_end_matches(char::is_alphabetic).len());
    let factor = match unit {
        "M" => 1e6,
        "G" => 1e9,
        _ => return Err("expected a rate in bits a second, such as 25G or 100M".to_owned()),
    };
    let number: f64 = number.trim().parse().map_err(|_| "expected a number before the unit".to_owned())?;
    if number > 0.0 { Ok(number * factor) } else { Err("expected a rate above 0".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: OneRank = OneRank {
        seconds: 8.0,
        rows: 64,
        backwards: 32,
        tokens: 65_536.0,
        gradient_bytes: 168e6,
        of_blocks: 42_000_000,
    };

    #[test]
    fn a_step_is_computing_by_shares_and_a_ring_through_the_slowest_link() {
        let cluster = Cluster { ranks: 8, nodes: 2, network: 10e9, kind: DeviceKind::Cpu };
        let step = cluster.share(ONE);
        assert_eq!((step.rows_per_rank, step.compute_seconds), (8, 1.0));
        // 7/4 of 168 MB at 1.125 GB/s, and 14 hops.
        let exchange = 1.75 * 168e6 / 1.125e9 + 14.0 * 50e-6;
        assert!((step.exchange_seconds - exchange).abs() < 1e-9, "{}", step.exchange_seconds);
        // Half of the last of 4 micro-batches hides a part of it.
        assert_eq!(step.hidden_seconds, 0.125);
        let waits = exchange - 0.125;
        assert!((step.efficiency - 1.0 / (1.0 + waits)).abs() < 1e-9);
        assert!((step.tokens_per_second - 65_536.0 / (1.0 + waits)).abs() < 1e-6);
        let enough = as_f64(step.tokens_per_rank_for_95_percent) * 8.0 / 65_536.0;
        assert!((waits / (waits + enough) - 0.05).abs() < 1e-3);
        // The last of 16 buckets is not hidden by a backward as long as all of it; on other GPUs than NVIDIA's, none is.
        let long = cluster.share(OneRank { backwards: 8, ..ONE });
        assert!((long.hidden_seconds - 15.0 / 16.0 * exchange).abs() < 1e-6, "{}", long.hidden_seconds);
        let on = |kind, nodes| Cluster { nodes, kind, ..cluster }.share(ONE);
        assert_eq!(on(DeviceKind::Vulkan, 2).hidden_seconds, 0.0);
        assert_eq!(on(DeviceKind::Cuda, 2).exchange_seconds, step.exchange_seconds);
        assert!(on(DeviceKind::Cuda, 1).exchange_seconds < on(DeviceKind::Cpu, 1).exchange_seconds / 10.0);
        assert_eq!(step.curve.last().unwrap().ranks, 1024);
        assert!(step.curve.windows(2).all(|pair| pair[0].efficiency >= pair[1].efficiency));
    }

    #[test]
    fn a_rank_takes_whole_micro_batches_or_parts_of_them() {
        let part = |ranks, micro_batches, rows| {
            Cluster { ranks, nodes: 1, network: 1e9, kind: DeviceKind::Cpu }.part_of(micro_batches, rows)
        };
        assert_eq!((part(2, 4, 8), part(2, 1, 8), part(4, 6, 8)), ([2, 8], [1, 4], [3, 4]));
        assert_eq!((part(8, 1, 4), part(1, 3, 2)), ([1, 1], [3, 2]));
    }

    #[test]
    fn one_rank_exchanges_nothing_and_rows_are_not_cut() {
        let alone = Cluster { ranks: 1, nodes: 1, network: 1e9, kind: DeviceKind::Vulkan }.share(ONE);
        assert_eq!((alone.step_seconds, alone.efficiency), (8.0, 1.0));
        let many = Cluster { ranks: 100, nodes: 1, network: 1e9, kind: DeviceKind::Cpu }.share(ONE);
        assert_eq!((many.rows_per_rank, many.compute_seconds), (1, 0.125));
    }

    #[test]
    fn rates_are_read_in_bits() {
        assert_eq!((rate("25G"), rate("100M"), rate("2.5Gbit/s")), (Ok(25e9), Ok(100e6), Ok(2.5e9)));
        for wrong in ["25", "G", "-1G", "10GB", ""] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
