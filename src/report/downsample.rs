//! Fewer points that look the same, so that a run of any length makes a file of bounded size.

/// Indices of the values to draw: all, if there are at most `max_points`. Otherwise the lowest and highest of each of
/// `max_points / 2` stretches, in order, with the first and the last value. A stretch with a gap keeps one.
#[must_use]
pub(super) fn lowest_and_highest(values: &[f64], max_points: usize) -> Vec<usize> {
    if values.len() <= max_points.max(4) {
        return (0..values.len()).collect();
    }
    let num_stretches = (max_points.max(4) - 2) / 2;
    let mut kept = vec![0];
    for (start, end) in stretches(values.len(), num_stretches) {
        let finite = || (start..end).filter(|&at| values[at].is_finite());
        let lowest = finite().min_by(|&a, &b| values[a].total_cmp(&values[b]));
        let highest = finite().max_by(|&a, &b| values[a].total_cmp(&values[b]));
        let gap = (start..end).find(|&at| !values[at].is_finite());
        kept.extend([lowest, highest, gap].into_iter().flatten());
    }
    kept.push(values.len() - 1);
    kept.sort_unstable();
    kept.dedup();
    kept
}

/// Cuts `len` places into at most `count` stretches of nearly equal length: start and end of each.
pub(super) fn stretches(len: usize, count: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = count.clamp(1, len.max(1));
    (0..count).map(move |index| (index * len / count, (index + 1) * len / count)).filter(|(start, end)| start < end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_series_is_kept_whole() {
        assert_eq!(lowest_and_highest(&[3.0, f64::NAN, 1.0], 600), [0, 1, 2]);
        assert_eq!(lowest_and_highest(&[], 600), [0_usize; 0]);
    }

    #[test]
    fn a_long_series_keeps_its_ends_every_spike_and_every_gap() {
        let mut values: Vec<f64> = (0..100_000).map(|step| f64::from(step % 7)).collect();
        values[54_321] = 99.0;
        values[77_777] = -5.0;
        values[12_345] = f64::NAN;
        let kept = lowest_and_highest(&values, 600);
        assert!(kept.len() <= 601, "{}", kept.len());
        assert!(kept.is_sorted() && kept[0] == 0 && kept.last() == Some(&99_999));
        for place in [54_321, 77_777, 12_345] {
            assert!(kept.contains(&place), "{place}");
        }
    }

    #[test]
    fn stretches_cover_every_place_once() {
        for (len, count) in [(0, 5), (3, 5), (10, 3), (100_000, 120)] {
            let places: Vec<usize> = stretches(len, count).flat_map(|(start, end)| start..end).collect();
            assert_eq!(places, (0..len).collect::<Vec<_>>());
        }
    }
}
