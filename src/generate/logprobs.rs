//! Logarithms of the probabilities of tokens.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_those_of_the_softmax_and_the_most_likely_come_first() {
        let logits = [0.15_f32, 0.5, 0.05, 0.3].map(f32::ln);
        let found = logprobs(&logits, 2, 2);
        assert!((found.chosen - 0.05_f64.ln()).abs() < 1e-6, "{found:?}");
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
        assert!((found.top[0].1 - 0.5_f64.ln()).abs() < 1e-6, "{found:?}");
        assert_eq!(logprobs(&logits, 2, 9).top.len(), 4);
    }
}
