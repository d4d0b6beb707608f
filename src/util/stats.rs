//! Means, quantiles and straight lines.

use serde::{Deserialize, Serialize};

/// A count as a floating-point number: exact below 2^53, which no count, size or time here reaches.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
pub fn as_f64(count: impl TryInto<u64>) -> f64 {
    count.try_into().unwrap_or(u64::MAX) as f64
}

/// A number without its fraction; 0 where it is negative or no number.
#[must_use]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
pub fn as_u64(number: f64) -> u64 {
    number as u64
}

/// The quantile of a share, from 0 to 1, of the finite values, interpolated linearly; `None` without values.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let place = share.clamp(0.0, 1.0) * as_f64(last);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the last place")]
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    Some(sorted[below] + (sorted[above] - sorted[below]) * place.fract())
}

/// The median of the finite values; the mean of the middle two for an even number. `None` without values.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The mean of the finite values; NaN without values.
#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    let finite = || values.iter().filter(|value| value.is_finite());
    finite().sum::<f64>() / as_f64(finite().count())
}

/// Mean of a figure, weighted by the time of the steps that have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MeanOverTime {
    /// Sum of figure times seconds.
    sum: f64,
    /// Time of the steps that have it.
    seconds: f64,
}

impl MeanOverTime {
    /// Adds a step; a figure that is no finite number is treated as absent.
    pub fn add(&mut self, value: Option<f64>, seconds: f64) {
        if let Some(value) = value.filter(|value| (value * seconds).is_finite()) {
            self.sum += value * seconds;
            self.seconds += seconds;
        }
    }

    /// The mean; `None` where no step had the figure.
    #[must_use]
    pub fn get(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.sum / self.seconds)
    }
}

/// A straight line through points, by least squares.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Line {
    n: f64,
    mean_x: f64,
    mean_y: f64,
    xx: f64,
    xy: f64,
    yy: f64,
}

impl Line {
    /// The line through points; those that are not finite are left out.
    #[must_use]
    pub fn through(points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut line = Self::default();
        points.into_iter().for_each(|(x, y)| line.add(x, y));
        line
    }

    /// Adds a point, if it is finite (Welford, 1962: without the loss of digits of sums of squares).
    pub fn add(&mut self, x: f64, y: f64) {
        if !(x.is_finite() && y.is_finite()) {
            return;
        }
        self.n += 1.0;
        let (dx, dy) = (x - self.mean_x, y - self.mean_y);
        self.mean_x += dx / self.n;
        self.mean_y += dy / self.n;
        self.xx += dx * (x - self.mean_x);
        self.xy += dx * (y - self.mean_y);
        self.yy += dy * (y - self.mean_y);
    }

    /// Number of points.
    #[must_use]
    pub fn count(&self) -> f64 {
        self.n
    }

    /// The slope; `None` where all x are equal.
    #[must_use]
    pub fn slope(&self) -> Option<f64> {
        (self.xx > 0.0).then(|| self.xy / self.xx)
    }

    /// y at x = 0.
    #[must_use]
    pub fn intercept(&self) -> Option<f64> {
        Some(self.mean_y - self.slope()? * self.mean_x)
    }

    /// Correlation, from -1 to 1; `None` where x or y does not vary.
    #[must_use]
    pub fn correlation(&self) -> Option<f64> {
        let scale = (self.xx * self.yy).sqrt();
        (scale > 0.0).then(|| self.xy / scale)
    }

    /// Mean of y.
    #[must_use]
    pub fn mean_y(&self) -> f64 {
        self.mean_y
    }
}

/// Digest of numbers, bit by bit (FNV-1a, 64 bits): equal for equal numbers, on every machine.
#[must_use]
pub fn digest(values: impl IntoIterator<Item = u32>) -> u64 {
    values
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_sees_every_bit() {
        assert_eq!(digest([1, 2]), digest([1, 2]));
        assert_ne!(digest([1, 2]), digest([2, 1]));
        assert_ne!(digest([0]), digest([1 << 31]));
        assert_ne!(digest([1]), digest([3]));
    }

    #[test]
    fn quantiles_lie_between_their_neighbours() {
        assert_eq!(quantile(&[4.0, 1.0, f64::NAN, 3.0, 2.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[1.0, 2.0, 3.0], 0.95), Some(2.9));
        assert_eq!((quantile(&[7.0], 0.95), quantile(&[f64::NAN], 0.5)), (Some(7.0), None));
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (Some(2.0), Some(2.5)));
    }

    #[test]
    fn a_line_is_found_through_its_points() {
        let line = Line::through((0..50).map(|x| (1e9 + f64::from(x), 3.0 + 0.25 * f64::from(x))));
        assert!((line.slope().unwrap() - 0.25).abs() < 1e-9 && (line.correlation().unwrap() - 1.0).abs() < 1e-9);
        let flat = Line::through([(1.0, 2.0)]);
        assert_eq!((flat.slope(), flat.correlation()), (None, None));
        assert_eq!(Line::default().intercept(), None);
    }

    #[test]
    fn a_mean_is_weighted_and_ignores_what_is_absent_or_no_number() {
        let mut mean = MeanOverTime::default();
        for value in [Some(f64::NAN), Some(f64::INFINITY), None] {
            mean.add(value, 1.0);
        }
        assert_eq!(mean.get(), None);
        mean.add(Some(10.0), 3.0);
        mean.add(Some(50.0), 1.0);
        let read: MeanOverTime = serde_json::from_str(&serde_json::to_string(&mean).unwrap()).unwrap();
        assert_eq!(read.get(), Some(20.0));
    }
}
