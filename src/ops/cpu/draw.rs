//! Draws of a token from its logits: the one that comes first when each waits for a time that is exponentially distributed, with its
//! weight as the rate (the Gumbel-max trick). The times are hashes of the seed, the number of the draw and the token.
//!
//! `draw.cu` does the same to the bit: what decides is multiplied, added and divided in `f32`, with every result rounded, or summed in
//! integers.

use super::dropout::{hash, mix};
use super::simd::{EXP_POLYNOMIAL, LN_2_HI, LN_2_LO, ROUND, vectorised, with_scratch};

/// How a token is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divisor of the logits; at 0 the most likely token is taken, the first of several.
    pub temperature: f64,
    /// Tokens are drawn only from this many most likely ones, and from those as likely as the last of these; absent: all.
    pub top_k: Option<usize>,
    /// Tokens are drawn only from the most likely ones that together reach this share of what top-k leaves, and from those as likely
    /// as the last of these; in (0, 1].
    pub top_p: f64,
    /// Tokens are drawn only from those at least this share as likely as the most likely one, in [0, 1]; absent: all.
    pub min_p: Option<f64>,
    /// Names the draws of a text.
    pub seed: u64,
    /// Number of the draw within its text.
    pub index: usize,
}

/// What a draw has given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub id: u32,
    /// Entropy in nats of all tokens at the temperature, before top-k, top-p and min-p; `None` at temperature 0.
    pub entropy: Option<f64>,
}

impl Draw {
    /// What the times are hashes of, beside the token.
    pub(in crate::ops) fn keys(&self) -> [u32; 2] {
        let key = mix(mix(self.seed) ^ self.index as u64);
        [key as u32, (key >> 32) as u32]
    }

    /// Factor of the logits.
    pub(in crate::ops) fn factor(&self) -> f32 {
        ((1.0 / self.temperature) as f32).min(f32::MAX)
    }

    /// The least weight of what may be drawn, where the most likely token weighs 1.
    pub(in crate::ops) fn least_weight(&self) -> f32 {
        const LEAST: f32 = 1.0 / FIXED_POINT;
        self.min_p.map_or(LEAST, |min_p| (min_p as f32).max(LEAST))
    }
}

/// Of weights as integers, which sum to the same in any order.
const FIXED_POINT: f32 = (1u64 << 40) as f32;
const LANES: usize = 16;

/// The next token; `None` where the logits are not finite numbers.
#[must_use]
pub fn draw(logits: &[f32], draw: &Draw) -> Option<Drawn> {
    let max = largest(logits).filter(|max| max.is_finite())?;
    if draw.temperature <= 0.0 {
        let id = logits.iter().position(|logit| *logit == max)? as u32;
        return Some(Drawn { id, entropy: None });
    }
    with_scratch(logits.len(), |weights| {
        let [sum, weighted] = weigh(logits, max, draw.factor(), weights);
        let mut least = f32::NEG_INFINITY;
        if let Some(k) = draw.top_k.filter(|k| *k < logits.len()) {
            least = kth_largest(logits, k.max(1));
        }
        if draw.top_p < 1.0 {
            least = least_of_top_p(logits, weights, draw.top_p, least);
        }
        let id = first(logits, weights, draw.keys(), least, draw.least_weight())?;
        Some(Drawn { id, entropy: Some(sum.ln() - weighted / sum) })
    })
}

vectorised! {
/// The largest of the logits; `None` where one is no number.
fn largest<'a, S>(_simd, logits: &'a [f32]) -> Option<f32> {
    let (mut largest, mut is_nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks.iter().map(|chunk| &chunk[..]).chain([rest]) {
        for ((x, largest), is_nan) in chunk.iter().zip(&mut largest).zip(&mut is_nan) {
            *largest = if *x > *largest { *x } else { *largest };
            *is_nan |= x.is_nan();
        }
    }
    (!is_nan.contains(&true)).then(|| largest.into_iter().fold(f32::NEG_INFINITY, f32::max))
} }

vectorised! {
/// Weights of the tokens, of which that of the largest is 1. Returns their sum, and that of them times their logarithms.
fn weigh<'a, S>(_simd, logits: &'a [f32], max: f32, factor: f32, weights: &'a mut [f32]) -> [f64; 2] {
    // Short sums, so that what is rounded off is little.
    const BLOCK: usize = 256 * LANES;
    let mut sums = [0.0; 2];
    for (logits, weights) in logits.chunks(BLOCK).zip(weights.chunks_mut(BLOCK)) {
        let mut of_block = [[0.0; LANES]; 2];
        for (logits, weights) in logits.chunks(LANES).zip(weights.chunks_mut(LANES)) {
            for (lane, (x, weight)) in logits.iter().zip(weights).enumerate() {
                let log = (*x - max) * factor;
                let log = if log > LEAST_LOG { log } else { LEAST_LOG };
                *weight = exp(log);
                of_block[0][lane] += *weight;
                of_block[1][lane] += *weight * log;
            }
        }
        sums = [0, 1].map(|which| sums[which] + of_block[which].iter().copied().map(f64::from).sum::<f64>());
    }
    sums
} }

/// Weights are nothing long before.
const LEAST_LOG: f32 = -60.0;

/// `e^x` for `x` from [`LEAST_LOG`] to 0.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2_HI) - n * LN_2_LO;
    let mut sum = EXP_POLYNOMIAL[5];
    for coefficient in EXP_POLYNOMIAL[..5].iter().rev() {
        sum = sum * r + coefficient;
    }
    (sum * r + 1.0) * f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23))
}

/// The time that a token of weight 1 waits: `-ln(1 - v)` for `v` = (hash + 0.5) / 2^32.
#[inline(always)]
fn time(hash: u32) -> f32 {
    const STEP: f32 = 1.0 / (1u64 << 32) as f32;
    // 1 - v is 2^e m with m in [3/4, 3/2), and ln m = 2 artanh((m - 1) / (m + 1)). Close to 1 what is less than that counts.
    let bits = ((!hash as f32 + 0.5) * STEP).to_bits().wrapping_sub(THREE_QUARTERS);
    let e = bits.cast_signed() >> 23;
    let above_one = f32::from_bits((bits & 0x7f_ffff) + THREE_QUARTERS) - 1.0;
    let z = if e == 0 { (hash as f32 + 0.5) * -STEP } else { above_one };
    let s = z / (z + 2.0);
    let q = s * s;
    let series = (((q * (1.0 / 9.0) + 1.0 / 7.0) * q + 0.2) * q + 1.0 / 3.0) * q;
    -(e as f32 * std::f32::consts::LN_2) - (s + s * series) * 2.0
}

const THREE_QUARTERS: u32 = 0x3f40_0000;

vectorised! {
/// The token that comes first of those whose logit and weight are at least these.
fn first<'a, S>(
    _simd, logits: &'a [f32], weights: &'a [f32], keys: [u32; 2], least: f32, least_weight: f32,
) -> Option<u32> {
    let (mut times, mut ids) = ([f32::INFINITY; LANES], [0; LANES]);
    for ((logits, weights), start) in logits.chunks(LANES).zip(weights.chunks(LANES)).zip((0u32..).step_by(LANES)) {
        for (lane, (x, weight)) in logits.iter().zip(weights).enumerate() {
            let id = start + lane as u32;
            let waits = time(hash(id, keys)) / *weight;
            let is_first = *x >= least && *weight >= least_weight && waits < times[lane];
            times[lane] = if is_first { waits } else { times[lane] };
            ids[lane] = if is_first { id } else { ids[lane] };
        }
    }
    let of_lanes = times.into_iter().zip(ids).filter(|(time, _)| time.is_finite());
    of_lanes.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(_, id)| id)
} }

fn kth_largest(logits: &[f32], k: usize) -> f32 {
    with_scratch(logits.len(), |all| {
        all.copy_from_slice(logits);
        *all.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    })
}

/// The logit down to which the most likely tokens of at least `least` reach `top_p` of these.
fn least_of_top_p(logits: &[f32], weights: &[f32], top_p: f64, least: f32) -> f32 {
    let weight_of = |(logit, weight): (&f32, &f32)| if *logit >= least { (*weight * FIXED_POINT) as u64 } else { 0 };
    let total = logits.iter().zip(weights).map(weight_of).sum::<u64>() as f64;
    // Tokens below this weight together have less than is left.
    let negligible = (total * (1.0 - top_p) / (2.0 * logits.len() as f64)) as u64;
    let all = logits.iter().zip(weights).map(|token| (*token.0, weight_of(token)));
    let mut likely: Vec<(f32, u64)> = all.filter(|(_, weight)| *weight > negligible).collect();
    likely.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
    let (limit, mut sum) = (((total * top_p).ceil() as u64).min(total as u64), 0);
    let reached = likely.iter().find(|(_, weight)| {
        sum += weight;
        sum >= limit
    });
    reached.map_or(least, |(logit, _)| *logit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Draw = Draw { temperature: 1.0, top_k: None, top_p: 1.0, min_p: None, seed: 11, index: 0 };

    fn draws(logits: &[f32], of: Draw, count: usize) -> Vec<usize> {
        (0..count).map(|index| draw(logits, &Draw { index, ..of }).unwrap().id as usize).collect()
    }

    /// Shares of 20,000 draws from probabilities of 0.15, 0.5, 0.04, 0.25, 0.06, within three standard deviations.
    fn assert_shares(of: Draw, expected: [f64; 5]) {
        let logits = [0.15_f32, 0.5, 0.04, 0.25, 0.06].map(f32::ln);
        let drawn = draws(&logits, of, 20_000);
        for (token, expected) in expected.into_iter().enumerate() {
            let found = drawn.iter().filter(|id| **id == token).count() as f64 / 20_000.0;
            let tolerance = 3.0 * (expected * (1.0 - expected) / 20_000.0).sqrt();
            assert!((found - expected).abs() <= tolerance, "{found} for {expected} with {of:?}");
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let greedy = Draw { temperature: 0.0, ..ALL };
        assert_eq!(draw(&[0.0, 3.0, 3.0, 1.0], &greedy), Some(Drawn { id: 1, entropy: None }));
        assert_eq!(draw(&[f32::NEG_INFINITY, -2.0], &greedy).map(|drawn| drawn.id), Some(1));
    }

    #[test]
    fn logits_that_are_not_finite_give_no_token() {
        for logits in [&[1.0, f32::NAN][..], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 3], &[]] {
            assert_eq!(draw(logits, &ALL), None, "{logits:?}");
        }
    }

    #[test]
    fn exponentials_and_times_are_right() {
        for step in 0..6_000_u16 {
            let x = f32::from(step) * -0.01;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) / expected - 1.0).abs() < 4e-7, "{x}");
        }
        for hash in (0..=u32::MAX).step_by(65_521).chain([1, 2, 1 << 30, u32::MAX - 1, u32::MAX]) {
            let expected = -(-(f64::from(hash) + 0.5) / 2f64.powi(32)).ln_1p();
            assert!((f64::from(time(hash)) / expected - 1.0).abs() < 4e-7, "{hash}: {} of {expected}", time(hash));
        }
    }

    #[test]
    fn draws_follow_the_distribution_at_its_temperature() {
        assert_shares(ALL, [0.15, 0.5, 0.04, 0.25, 0.06]);
        // p^2, normalised.
        let squares = [0.0225, 0.25, 0.0016, 0.0625, 0.0036];
        assert_shares(Draw { temperature: 0.5, ..ALL }, squares.map(|square| square / 0.3402));
    }

    #[test]
    fn of_many_tokens_each_is_drawn_as_often_as_it_is_likely() {
        // 50,000 tokens, half of the probability on ten of them.
        let mut logits = vec![0.0_f32; 50_000];
        logits[40_000..40_010].fill(5_000_f32.ln());
        let drawn = draws(&logits, ALL, 4_000);
        let likely = drawn.iter().filter(|id| (40_000..40_010).contains(*id)).count() as f64 / 4_000.0;
        assert!((likely - 0.5).abs() < 3.0 * (0.25_f64 / 4_000.0).sqrt(), "{likely}");
        let others: Vec<_> = drawn.iter().filter(|id| !(40_000..40_010).contains(*id)).collect();
        let mean = others.iter().map(|id| **id as f64).sum::<f64>() / others.len() as f64;
        assert!((mean - 25_000.0).abs() < 3.0 * 50_000.0 / (12.0 * others.len() as f64).sqrt(), "{mean}");
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_it_and_no_more() {
        let with = |top_p| Draw { top_p, ..ALL };
        assert_shares(with(0.4), [0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_shares(with(0.7), [0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0]);
        assert_shares(with(0.8), [0.15 / 0.9, 0.5 / 0.9, 0.0, 0.25 / 0.9, 0.0]);
    }

    #[test]
    fn top_k_comes_before_top_p_and_keeps_equals() {
        let with = |top_k, top_p| Draw { top_k: Some(top_k), top_p, ..ALL };
        assert_shares(with(2, 1.0), [0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0]);
        // The first of the two tokens left has two thirds: it reaches 0.6 alone.
        assert_shares(with(2, 0.6), [0.0, 1.0, 0.0, 0.0, 0.0]);
        let mut equal = draws(&[2.0, 2.0, 1.0], with(1, 1.0), 100);
        equal.sort_unstable();
        equal.dedup();
        assert_eq!(equal, [0, 1]);
    }

    #[test]
    fn min_p_keeps_what_is_so_likely_beside_the_most_likely_token_at_its_temperature() {
        let with = |min_p, temperature| Draw { min_p: Some(min_p), temperature, ..ALL };
        assert_shares(with(0.0, 1.0), [0.15, 0.5, 0.04, 0.25, 0.06]);
        assert_shares(with(0.2, 1.0), [0.15 / 0.9, 0.5 / 0.9, 0.0, 0.25 / 0.9, 0.0]);
        assert_shares(with(0.2, 0.5), [0.0, 0.25 / 0.3125, 0.0, 0.0625 / 0.3125, 0.0]);
        assert_shares(with(1.0, 1.0), [0.0, 1.0, 0.0, 0.0, 0.0]);
        // What top-p reaches is counted before.
        assert_shares(Draw { top_p: 0.4, ..with(0.2, 1.0) }, [0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_shares(Draw { top_p: 0.8, ..with(0.4, 1.0) }, [0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0]);
    }

    #[test]
    fn what_is_kept_is_what_sorting_all_tokens_keeps() {
        let logits: Vec<f32> = (0..3_000).map(|id| (mix(id) >> 40) as f32 / 2f32.powi(21) - 4.0).collect();
        for (top_k, top_p, temperature) in [(None, 0.9, 1.0), (Some(50), 0.5, 0.6), (Some(400), 0.99, 1.5)] {
            let of = Draw { temperature, top_k, top_p, ..ALL };
            let mut sorted: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            sorted.truncate(top_k.unwrap_or(logits.len()));
            let weights: Vec<f64> = sorted.iter().map(|logit| (logit / temperature).exp()).collect();
            let (total, mut sum) = (weights.iter().sum::<f64>(), 0.0);
            let last = weights.iter().position(|weight| {
                sum += weight;
                sum >= top_p * total
            });
            let least = sorted[last.unwrap()] as f32;
            let drawn = draws(&logits, of, 2_000);
            assert!(drawn.iter().all(|id| logits[*id] >= least), "{of:?}");
            assert!(drawn.iter().any(|id| logits[*id] < sorted[last.unwrap() / 2] as f32), "{of:?}");
        }
    }

    #[test]
    fn the_entropy_is_that_of_all_tokens_at_the_temperature() {
        let logits = [0.15_f32, 0.5, 0.25, 0.1].map(f32::ln);
        let entropy = |temperature| draw(&logits, &Draw { temperature, top_k: Some(1), ..ALL }).unwrap().entropy;
        let of = |probabilities: [f64; 4]| -probabilities.iter().map(|p| p * p.ln()).sum::<f64>();
        assert!((entropy(1.0).unwrap() - of([0.15, 0.5, 0.25, 0.1])).abs() < 1e-6);
        let squares = [0.0225, 0.25, 0.0625, 0.01].map(|square| square / 0.345);
        assert!((entropy(0.5).unwrap() - of(squares)).abs() < 1e-6);
        assert_eq!(entropy(0.0), None);
    }

    #[test]
    fn a_seed_names_the_draws() {
        let of = |seed| draws(&[0.0; 100], Draw { seed, ..ALL }, 20);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        // They are the same on every machine.
        assert_eq!(of(1)[..8], [61, 21, 78, 68, 80, 22, 56, 31]);
    }
}
