//! Sums over steps, in bounded memory, that give means, quantiles and straight lines.

use super::figures::as_f64;

/// Values kept of a distribution; beyond that, every second value is dropped.
const MAX_VALUES: usize = 2048;

/// Mean of the values present.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    weight: f64,
    max: Option<f64>,
}

impl Mean {
    /// Adds a value that held for `weight`, mostly seconds.
    pub fn add(&mut self, value: Option<f64>, weight: f64) {
        let Some(value) = value.filter(|value| value.is_finite()) else { return };
        self.sum += value * weight;
        self.weight += weight;
        self.max = Some(self.max.map_or(value, |max| max.max(value)));
    }

    /// The mean; `None` without values.
    #[must_use]
    pub fn get(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }

    /// The largest value.
    #[must_use]
    pub fn max(&self) -> Option<f64> {
        self.max
    }
}

/// An evenly thinned sample of values.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    values: Vec<f64>,
    stride: u64,
    seen: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self { values: Vec::new(), stride: 1, seen: 0 }
    }
}

impl Distribution {
    /// Adds a value.
    pub fn add(&mut self, value: f64) {
        if self.seen.is_multiple_of(self.stride) {
            if self.values.len() == MAX_VALUES {
                let mut index = 0;
                self.values.retain(|_| {
                    index += 1;
                    index % 2 == 1
                });
                self.stride *= 2;
            }
            self.values.push(value);
        }
        self.seen += 1;
    }

    /// The quantile of a share from 0 to 1; `None` without values.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let index = (share * last as f64).round() as usize;
        sorted.get(index.min(last)).copied()
    }

    /// The median.
    #[must_use]
    pub fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }
}

/// A count over steps: its sum, and its distribution over them.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    sums: Vec<u64>,
    /// Steps per bucket.
    size: u64,
    seen: u64,
}

impl Default for Buckets {
    fn default() -> Self {
        Self { sums: Vec::new(), size: 1, seen: 0 }
    }
}

impl Buckets {
    /// Adds the count of the next step.
    pub fn add(&mut self, count: u64) {
        if self.seen.is_multiple_of(self.size) {
            if self.sums.len() == MAX_VALUES {
                self.sums = self.sums.chunks(2).map(|pair| pair.iter().sum()).collect();
                self.size *= 2;
            }
            self.sums.push(0);
        }
        if let Some(last) = self.sums.last_mut() {
            *last += count;
        }
        self.seen += 1;
    }

    /// The whole count.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.sums.iter().sum()
    }

    /// The first steps that hold a share of the whole count, from 0 to 1: their number, rounded to a bucket, and their
    /// count.
    #[must_use]
    pub fn leading(&self, share: f64) -> (u64, u64) {
        let wanted = share * as_f64(self.total());
        let (mut num_steps, mut count) = (0, 0);
        for sum in &self.sums {
            if as_f64(count) >= wanted {
                break;
            }
            (num_steps, count) = (num_steps + self.size, count + sum);
        }
        (num_steps.min(self.seen), count)
    }

    /// The count of the first steps, rounded to a bucket.
    #[must_use]
    pub fn of_first(&self, num_steps: u64) -> u64 {
        let num_buckets = usize::try_from(num_steps.div_ceil(self.size)).unwrap_or(usize::MAX);
        self.sums.iter().take(num_buckets).sum()
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
    /// Adds a point (Welford, 1962: without the loss of digits of sums of squares).
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

    /// Standard deviation of y divided by its mean.
    #[must_use]
    pub fn variation_of_y(&self) -> Option<f64> {
        (self.n > 1.0 && self.mean_y > 0.0).then(|| (self.yy / self.n).sqrt() / self.mean_y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_through_its_points() {
        let mut line = Line::default();
        for x in 0..50 {
            line.add(1e9 + f64::from(x), 3.0 + 0.25 * f64::from(x));
        }
        assert!((line.slope().unwrap() - 0.25).abs() < 1e-9 && (line.correlation().unwrap() - 1.0).abs() < 1e-9);
        let mut flat = Line::default();
        flat.add(1.0, 2.0);
        assert_eq!((flat.slope(), flat.correlation()), (None, None));
        assert_eq!(Line::default().intercept(), None);
    }

    #[test]
    fn quantiles_hold_for_more_values_than_are_kept() {
        let mut all = Distribution::default();
        assert_eq!(all.median(), None);
        for value in 0..10_000 {
            all.add(f64::from(value));
        }
        assert!(all.values.len() <= MAX_VALUES);
        assert!((all.median().unwrap() - 5000.0).abs() < 20.0 && (all.quantile(0.95).unwrap() - 9500.0).abs() < 20.0);
    }

    #[test]
    fn buckets_keep_their_sum_and_tell_what_came_first() {
        let mut buckets = Buckets::default();
        assert_eq!((buckets.total(), buckets.leading(0.9), buckets.of_first(7)), (0, (0, 0), 0));
        (0..10_000).for_each(|step| buckets.add(10 * u64::from(step < 2000)));
        assert!(buckets.sums.len() <= MAX_VALUES);
        assert_eq!((buckets.total(), buckets.leading(1.0)), (20_000, (2000, 20_000)));
        assert_eq!((buckets.of_first(1000), buckets.of_first(20_000)), (10_000, 20_000));
        let (num_steps, count) = buckets.leading(0.9);
        assert!(num_steps.abs_diff(1800) < 20 && count >= 18_000, "{num_steps} steps with {count}");
        (0..10_000).for_each(|_| buckets.add(1));
        assert_eq!(buckets.total(), 30_000);
    }

    #[test]
    fn a_mean_is_weighted_and_ignores_what_is_absent() {
        let mut mean = Mean::default();
        mean.add(None, 5.0);
        assert_eq!(mean.get(), None);
        mean.add(Some(10.0), 3.0);
        mean.add(Some(50.0), 1.0);
        assert_eq!((mean.get(), mean.max()), (Some(20.0), Some(50.0)));
    }
}
