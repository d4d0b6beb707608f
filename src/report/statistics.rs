//! Medians.

/// The value below which a share of the finite values lies, between neighbours in proportion.
#[must_use]
pub(super) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    #[expect(clippy::cast_precision_loss, reason = "numbers of steps")]
    let place = share.clamp(0.0, 1.0) * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the last place")]
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    Some(sorted[below] + (sorted[above] - sorted[below]) * place.fract())
}

/// How many of the first steps are warm-up, which compiles kernels, fills caches and measures the device: a tenth of
/// them, from 1 to 10; none of a single step.
#[must_use]
pub(super) fn num_warmup_steps(num_steps: usize) -> usize {
    (num_steps / 10).clamp(1, 10).min(num_steps.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        assert_eq!(quantile(&[4.0, 1.0, f64::NAN, 3.0, 2.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[1.0, 2.0, 3.0], 0.95), Some(2.9));
        assert_eq!((quantile(&[7.0], 0.95), quantile(&[f64::NAN], 0.5)), (Some(7.0), None));
    }

    #[test]
    fn the_first_steps_are_warm_up_but_never_all() {
        assert_eq!([0, 1, 2, 30, 200].map(num_warmup_steps), [0, 0, 1, 3, 10]);
    }
}
