//! Chooses the next token from its logits, in the order of transformers: temperature, then top-k, then top-p, then
//! min-p.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::GenerateOptions;

#[derive(Debug)]
pub(super) struct Sampler {
    temperature: f64,
    top_p: f64,
    top_k: Option<usize>,
    min_p: Option<f64>,
    rng: ChaCha8Rng,
    /// Entropy in nats of what the last token was drawn from, at its temperature and before top-k, top-p and min-p; `None` where it
    /// was the most likely one.
    pub(super) entropy: Option<f64>,
}

/// A token that may be drawn, and its weight: its probability times a common factor.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    weight: f64,
}

/// Natural logarithms of probabilities of a token, before temperature, top-k, top-p and min-p.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// That of the token that was chosen.
    pub chosen: f64,
    /// The most likely tokens, most likely first, with their logarithms.
    pub top: Vec<(u32, f64)>,
}

/// The logarithms for `token` and the `top` most likely ones.
pub(super) fn logprobs(logits: &[f32], token: u32, top: usize) -> Logprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(max)).exp()).sum();
    let log = |logit: f32| f64::from(logit) - f64::from(max) - sum.ln();
    let by_logit = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let chosen = log(logits[token as usize]);
    if top < all.len() {
        all.select_nth_unstable_by(top, by_logit);
        all.truncate(top);
    }
    all.sort_unstable_by(by_logit);
    Logprobs { chosen, top: all.into_iter().map(|(id, logit)| (id, log(logit))).collect() }
}

impl Sampler {
    pub(super) fn new(options: &GenerateOptions) -> Self {
        Self {
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            rng: ChaCha8Rng::seed_from_u64(options.seed),
            entropy: None,
        }
    }

    /// The next token; `None` where the logits are not finite numbers.
    pub(super) fn next(&mut self, logits: &[f32]) -> Option<u32> {
        let (best, max) = greedy(logits)?;
        if self.temperature <= 0.0 {
            return Some(best);
        }
        let candidates = self.candidates(logits, max);
        let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
        let mut left = self.rng.random::<f64>() * total;
        let drawn = candidates.iter().find(|candidate| {
            left -= candidate.weight;
            left < 0.0
        });
        // Rounding may leave the drawn number beyond the last candidate.
        drawn.or(candidates.last()).map(|candidate| candidate.id)
    }

    /// The tokens to draw from. Without top-k, top-p and min-p: all tokens, in the order of their ids.
    fn candidates(&mut self, logits: &[f32], max: f32) -> Vec<Candidate> {
        let (mut candidates, mut sum, mut weighted_logs) = (Vec::with_capacity(logits.len()), 0.0, 0.0);
        for (id, &logit) in (0..).zip(logits) {
            let log = (f64::from(logit) - f64::from(max)) / self.temperature;
            let weight = log.exp();
            // What is ruled out is never drawn, be it as the last where rounding leaves none.
            if weight > 0.0 {
                sum += weight;
                weighted_logs += weight * log;
                candidates.push(Candidate { id, weight });
            }
        }
        self.entropy = Some(sum.ln() - weighted_logs / sum);
        if let Some(k) = self.top_k.filter(|&k| k < candidates.len()) {
            let (_, last, _) = candidates.select_nth_unstable_by(k.max(1) - 1, by_weight);
            let least = last.weight;
            // Tokens with the same weight as the last one stay too.
            candidates.retain(|candidate| candidate.weight >= least);
        }
        if self.top_p < 1.0 {
            self.keep_top_p(&mut candidates);
        }
        if let Some(min_p) = self.min_p {
            // The most likely token weighs 1.
            candidates.retain(|candidate| candidate.weight >= min_p);
        }
        candidates
    }

    /// Keeps the most likely candidates that together reach `top_p`, including the candidate that reaches it.
    fn keep_top_p(&self, candidates: &mut Vec<Candidate>) {
        let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
        // Tokens below this weight together have less than 1 - top_p: drop them without sorting.
        #[expect(clippy::cast_precision_loss, reason = "vocabularies are far below 2^53")]
        let negligible = total * (1.0 - self.top_p) / candidates.len() as f64;
        candidates.retain(|candidate| candidate.weight >= negligible);
        candidates.sort_unstable_by(by_weight);
        let mut sum = 0.0;
        let reached = candidates.iter().position(|candidate| {
            sum += candidate.weight;
            sum >= self.top_p * total
        });
        candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
    }
}

/// Most likely first; equal weights are ordered by id, so that every machine gives the same order.
fn by_weight(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// The first of the largest logits, and its value; `None` where the value is not a finite number.
fn greedy(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &logit) in (0..).zip(logits) {
        if logit.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, max)| logit > max) {
            best = Some((id, logit));
        }
    }
    best.filter(|(_, max)| max.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of each token among 20,000 draws from probabilities of 0.5, 0.25, 0.15, 0.06, 0.04 in shuffled places.
    fn shares(options: GenerateOptions) -> [f64; 5] {
        let logits = [0.15_f32, 0.5, 0.04, 0.25, 0.06].map(f32::ln);
        let mut sampler = Sampler::new(&options);
        let mut counts = [0_u32; 5];
        for _ in 0..20_000 {
            counts[sampler.next(&logits).unwrap() as usize] += 1;
        }
        counts.map(|count| f64::from(count) / 20_000.0)
    }

    /// Within three standard deviations of 20,000 draws.
    fn assert_shares(options: GenerateOptions, expected: [f64; 5]) {
        let found = shares(options);
        for (found, expected) in found.into_iter().zip(expected) {
            let tolerance = 3.0 * (expected * (1.0 - expected) / 20_000.0).sqrt();
            assert!((found - expected).abs() <= tolerance, "{found} for {expected} with {options:?}");
        }
    }

    fn options(temperature: f64) -> GenerateOptions {
        GenerateOptions { temperature, seed: 11, ..GenerateOptions::default() }
    }

    #[test]
    fn logprobs_are_those_of_the_softmax_and_the_most_likely_come_first() {
        let logits = [0.15_f32, 0.5, 0.05, 0.3].map(f32::ln);
        let found = logprobs(&logits, 2, 2);
        assert!((found.chosen - 0.05_f64.ln()).abs() < 1e-6, "{found:?}");
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
        assert!((found.top[0].1 - 0.5_f64.ln()).abs() < 1e-6, "{found:?}");
        assert_eq!(logprobs(&logits, 2, 9).top.len(), 4);
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(&options(0.0));
        assert_eq!(sampler.next(&[0.0, 3.0, 3.0, 1.0]), Some(1));
        assert_eq!(sampler.next(&[f32::NEG_INFINITY, -2.0]), Some(1));
    }

    #[test]
    fn logits_that_are_not_finite_give_no_token() {
        let mut sampler = Sampler::new(&options(0.7));
        for logits in [&[1.0, f32::NAN][..], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 3], &[]] {
            assert_eq!(sampler.next(logits), None, "{logits:?}");
        }
    }

    #[test]
    fn draws_follow_the_distribution_at_its_temperature() {
        assert_shares(options(1.0), [0.15, 0.5, 0.04, 0.25, 0.06]);
        // p^2, normalised.
        let squares = [0.0225, 0.25, 0.0016, 0.0625, 0.0036];
        assert_shares(options(0.5), squares.map(|square| square / 0.3402));
    }

    #[test]
    fn top_p_keeps_the_token_that_reaches_it_and_no_more() {
        let with = |top_p| GenerateOptions { top_p, ..options(1.0) };
        assert_shares(with(0.4), [0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_shares(with(0.7), [0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0]);
        assert_shares(with(0.8), [0.15 / 0.9, 0.5 / 0.9, 0.0, 0.25 / 0.9, 0.0]);
    }

    #[test]
    fn top_k_comes_before_top_p_and_keeps_equals() {
        let with = |top_k, top_p| GenerateOptions { top_k: Some(top_k), top_p, ..options(1.0) };
        assert_shares(with(2, 1.0), [0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0]);
        // The first of the two tokens left has two thirds: it reaches 0.6 alone.
        assert_shares(with(2, 0.6), [0.0, 1.0, 0.0, 0.0, 0.0]);
        let mut sampler = Sampler::new(&with(1, 1.0));
        let drawn: std::collections::BTreeSet<_> = (0..100).filter_map(|_| sampler.next(&[2.0, 2.0, 1.0])).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn min_p_keeps_what_is_so_likely_beside_the_most_likely_token_at_its_temperature() {
        let with = |min_p, temperature| GenerateOptions { min_p: Some(min_p), ..options(temperature) };
        assert_shares(with(0.0, 1.0), [0.15, 0.5, 0.04, 0.25, 0.06]);
        assert_shares(with(0.2, 1.0), [0.15 / 0.9, 0.5 / 0.9, 0.0, 0.25 / 0.9, 0.0]);
        assert_shares(with(0.2, 0.5), [0.0, 0.25 / 0.3125, 0.0, 0.0625 / 0.3125, 0.0]);
        assert_shares(with(1.0, 1.0), [0.0, 1.0, 0.0, 0.0, 0.0]);
        // What top-p reaches is counted before.
        assert_shares(GenerateOptions { top_p: 0.4, ..with(0.2, 1.0) }, [0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_shares(GenerateOptions { top_p: 0.8, ..with(0.4, 1.0) }, [0.0, 0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0]);
    }

    #[test]
    fn the_entropy_is_that_of_all_tokens_at_the_temperature() {
        let logits = [0.15_f32, 0.5, 0.25, 0.1].map(f32::ln);
        let entropy = |temperature: f64| {
            let mut sampler = Sampler::new(&GenerateOptions { top_k: Some(1), ..options(temperature) });
            sampler.next(&logits).unwrap();
            sampler.entropy
        };
        let of = |probabilities: [f64; 4]| -probabilities.iter().map(|p| p * p.ln()).sum::<f64>();
        assert!((entropy(1.0).unwrap() - of([0.15, 0.5, 0.25, 0.1])).abs() < 1e-7);
        let squares = [0.0225, 0.25, 0.0625, 0.01].map(|square| square / 0.345);
        assert!((entropy(0.5).unwrap() - of(squares)).abs() < 1e-7);
        assert_eq!(entropy(0.0), None);
    }

    #[test]
    fn a_seed_names_the_draw() {
        let draw = |seed| {
            let mut sampler = Sampler::new(&GenerateOptions { seed, ..options(1.0) });
            (0..20).map(|_| sampler.next(&[0.0; 100]).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
