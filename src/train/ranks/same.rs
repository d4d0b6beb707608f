//! What has to be the same on all ranks, compared before the first step.

use std::collections::BTreeMap;

use super::{Ranks, RanksError};
use crate::util::stats::as_f64;

/// Bytes of a host's name that the other ranks see.
const HOST_BYTES: usize = 64;
/// Digits of a digest that are compared: as many as an `f64` holds.
const DIGITS: usize = 12;

/// Compares facts, each a name and a digest in hexadecimal digits, with those of the other ranks; returns the host of every rank.
///
/// # Errors
/// A fact that differs, with the ranks that have it so.
pub fn require_same(
    ranks: &mut dyn Ranks,
    host: &str,
    facts: &[(&'static str, String)],
) -> Result<Vec<String>, RanksError> {
    let mut figures: Vec<f64> = host.bytes().map(f64::from).take(HOST_BYTES).collect();
    figures.resize(HOST_BYTES, 0.0);
    let start = |digest: &String| digest.get(..DIGITS).unwrap_or(digest).to_owned();
    figures.extend(facts.iter().map(|(_, digest)| as_f64(u64::from_str_radix(&start(digest), 16).unwrap_or(0))));
    let all = ranks.gather(&figures);
    let hosts: Vec<String> = all.iter().map(|figures| text(&figures[..HOST_BYTES])).collect();
    for (index, (name, _)) in facts.iter().enumerate() {
        let mut having: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (rank, figures) in all.iter().enumerate() {
            having.entry(figures[HOST_BYTES + index].to_bits()).or_default().push(rank);
        }
        if having.len() > 1 {
            return Err(RanksError::Launcher(difference(name, &having, &hosts)));
        }
    }
    Ok(hosts)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes and digits as they were sent")]
fn text(bytes: &[f64]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "digits as they were sent")]
fn difference(name: &str, having: &BTreeMap<u64, Vec<usize>>, hosts: &[String]) -> String {
    let mut parts: Vec<(&Vec<usize>, u64)> =
        having.iter().map(|(bits, ranks)| (ranks, f64::from_bits(*bits) as u64)).collect();
    // Most ranks first.
    parts.sort_by_key(|(ranks, _)| std::cmp::Reverse(ranks.len()));
    let of = |(ranks, digest): &(&Vec<usize>, u64)| {
        let first = ranks.first().copied().unwrap_or_default();
        let named = match ranks.len() {
            1 => format!("rank {first} on {}", hosts[first]),
            many => format!("{many} ranks from rank {first} on {}", hosts[first]),
        };
        format!("{digest:012x} for {named}")
    };
    let parts = parts.iter().map(of).collect::<Vec<_>>().join(", ");
    format!("the ranks have different {name}: {parts}\n  hint: all ranks need the same files, under the same paths")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 0 of three: the others have the same, but for the last figure of the last.
    #[derive(Debug)]
    struct Three {
        is_other: bool,
    }

    impl Ranks for Three {
        fn size(&self) -> usize {
            3
        }

        fn rank(&self) -> usize {
            0
        }

        fn sum(&mut self, _: &mut [f32], figures: &mut [f64]) {
            let each = figures.len() / 3;
            let (first, others) = figures.split_at_mut(each);
            others.chunks_mut(each).for_each(|figures| figures.copy_from_slice(first));
            if self.is_other {
                others[2 * each - 1] += 1.0;
            }
        }
    }

    #[test]
    fn a_difference_names_the_ranks_and_what_each_has() {
        let facts = [("recipes", "ab".repeat(32)), ("rows", "0".repeat(64))];
        let hosts = require_same(&mut Three { is_other: false }, "node-a", &facts).unwrap();
        assert_eq!(hosts, ["node-a"; 3]);
        let error = require_same(&mut Three { is_other: true }, "node-a", &facts).unwrap_err().to_string();
        let expected = "the ranks have different rows: 000000000000 for 2 ranks from rank 0 on node-a, 000000000001 for rank 2 \
                        on node-a";
        assert!(error.starts_with(expected), "{error}");
    }
}
