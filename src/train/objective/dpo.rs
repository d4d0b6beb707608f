//! Direct preference optimisation (Rafailov et al., 2023) and its kin: losses of how much more than the reference the model
//! likes a chosen and a rejected answer.

use super::pairs::{Pair, Weights, figures, sigmoid, softplus_of_minus};
use super::{LossRows, Needs, Objective, OfLogits, OfReference, Weighed};
use crate::config::{Divergence, LossType, ObjectiveConfig};
use crate::util::stats::as_f64;

/// The largest exponent of an alpha divergence, as in TRL.
const MAX_EXPONENT: f64 = 80.0;

/// A weighted sum of losses, each the mean over pairs.
#[derive(Clone, Debug)]
pub(super) struct Dpo {
    losses: Vec<(LossType, f64)>,
    beta: f64,
    label_smoothing: f64,
    divergence: Divergence,
    alpha: f64,
    ld_alpha: Option<f64>,
    discopop_tau: f64,
    is_weighted: bool,
}

impl Dpo {
    pub(super) fn new(config: &ObjectiveConfig) -> Self {
        let losses = config.losses();
        let weights = config.loss_weights.clone().unwrap_or_else(|| vec![1.0; losses.len()]);
        Self {
            losses: losses.into_iter().zip(weights).collect(),
            beta: config.beta(),
            label_smoothing: config.label_smoothing,
            divergence: config.f_divergence_type,
            alpha: config.f_alpha_divergence_coef,
            ld_alpha: config.ld_alpha,
            discopop_tau: config.discopop_tau,
            is_weighted: config.use_weighting,
        }
    }

    /// The score of a log-ratio and its slope.
    fn score(&self, log_ratio: f64) -> [f64; 2] {
        match self.divergence {
            Divergence::ForwardKl => [1.0 - (-log_ratio).exp(), (-log_ratio).exp()],
            Divergence::JsDivergence => [std::f64::consts::LN_2 - softplus_of_minus(log_ratio), sigmoid(-log_ratio)],
            Divergence::AlphaDivergence if (self.alpha - 1.0).abs() >= 1e-6 => {
                let exponent = (self.alpha - 1.0) * log_ratio;
                let power = exponent.min(MAX_EXPONENT).exp();
                [(power - 1.0) / (self.alpha - 1.0), if exponent > MAX_EXPONENT { 0.0 } else { power }]
            }
            Divergence::ReverseKl | Divergence::AlphaDivergence => [log_ratio, 1.0],
        }
    }

    /// A pair's loss, and its slopes with respect to the scores `[u, v]` of answers of `[m, n]` tokens.
    fn loss(&self, loss: LossType, [u, v]: [f64; 2], [m, n]: [f64; 2]) -> (f64, [f64; 2]) {
        let (beta, smoothing) = (self.beta, self.label_smoothing);
        let x = beta * (u - v);
        let both = |loss: f64, slope: f64| (loss, [beta * slope, -beta * slope]);
        let bell = |x: f64| sigmoid(x) * sigmoid(-x);
        match loss {
            LossType::Hinge => both((1.0 - x).max(0.0), if x < 1.0 { -1.0 } else { 0.0 }),
            LossType::Ipo => {
                let error = u / m - v / n - 0.5 / beta;
                (error * error, [2.0 * error / m, -2.0 * error / n])
            }
            LossType::Robust => {
                let loss = (1.0 - smoothing) * softplus_of_minus(x) - smoothing * softplus_of_minus(-x);
                let slope = -(1.0 - smoothing) * sigmoid(-x) - smoothing * sigmoid(x);
                both(loss / (1.0 - 2.0 * smoothing), slope / (1.0 - 2.0 * smoothing))
            }
            LossType::ExoPair => {
                let of = |x: f64, share: f64| sigmoid(x) * (-softplus_of_minus(x) - share.ln());
                let odds = (smoothing / (1.0 - smoothing)).ln();
                both(of(x, 1.0 - smoothing) + of(-x, smoothing), bell(x) * (x + odds))
            }
            LossType::NcaPair => {
                let (u, v) = (beta * u, beta * v);
                let loss = softplus_of_minus(u) + 0.5 * softplus_of_minus(-u) + 0.5 * softplus_of_minus(-v);
                (loss, [beta * (1.5 * sigmoid(u) - 1.0), 0.5 * beta * sigmoid(v)])
            }
            LossType::BcoPair => {
                let (u, v) = (beta * u, beta * v);
                (softplus_of_minus(u) + softplus_of_minus(-v), [-beta * sigmoid(-u), beta * sigmoid(v)])
            }
            LossType::SppoHard => {
                let [u, v] = [u - 0.5 / beta, v + 0.5 / beta];
                (u * u + v * v, [2.0 * u, 2.0 * v])
            }
            LossType::ApoZero => {
                let (u, v) = (beta * u, beta * v);
                (sigmoid(-u) + sigmoid(v), [-beta * bell(u), beta * bell(v)])
            }
            LossType::ApoDown => {
                let u = beta * u;
                (sigmoid(u) + sigmoid(-x), [beta * (bell(u) - bell(x)), beta * bell(x)])
            }
            LossType::Discopop => {
                let (mix, power) = (sigmoid(x / self.discopop_tau), (-x).exp());
                let logistic = softplus_of_minus(x);
                let slope = -sigmoid(-x) * (1.0 - mix) - power * mix
                    + mix * (1.0 - mix) * (power - logistic) / self.discopop_tau;
                both(logistic * (1.0 - mix) + power * mix, slope)
            }
            LossType::SigmoidNorm => {
                let y = beta * (u / m - v / n);
                (softplus_of_minus(y), [-beta * sigmoid(-y) / m, beta * sigmoid(-y) / n])
            }
            // "sigmoid", and the others that are no loss of a pair alone, with labels that may be the wrong way round.
            _ => {
                let loss = (1.0 - smoothing) * softplus_of_minus(x) + smoothing * softplus_of_minus(-x);
                both(loss, smoothing - sigmoid(-x))
            }
        }
    }

    /// The sum of a loss over pairs, and its slopes with respect to the log-probabilities of both answers of each.
    fn of_pairs(&self, loss: LossType, pairs: &[Pair], weights: &[f64]) -> (f64, Vec<[f64; 2]>) {
        let mut slopes = vec![[0.0; 2]; pairs.len()];
        let mut sum = 0.0;
        if !matches!(loss, LossType::Aot | LossType::AotUnpaired) {
            for ((pair, weight), slopes) in pairs.iter().zip(weights).zip(&mut slopes) {
                let [[u, du], [v, dv]] = [&pair.chosen, &pair.rejected].map(|answer| self.score(answer.log_ratio()));
                let (loss, [of_u, of_v]) = self.loss(loss, [u, v], [pair.chosen.count, pair.rejected.count]);
                sum += weight * loss;
                *slopes = [weight * of_u * du, weight * of_v * dv];
            }
            return (sum, slopes);
        }
        // Sorted over the micro-batch, the difference of the first from the first, of the second from the second ...
        let sorted = |value: &dyn Fn(&Pair) -> f64| {
            let mut sorted: Vec<(f64, usize)> = pairs.iter().map(value).zip(0..).collect();
            sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
            sorted
        };
        let is_paired = loss == LossType::Aot;
        let [upper, lower] = if is_paired {
            [
                sorted(&|pair| pair.chosen.policy - pair.rejected.policy),
                sorted(&|pair| pair.chosen.reference - pair.rejected.reference),
            ]
        } else {
            [sorted(&|pair| pair.chosen.log_ratio()), sorted(&|pair| pair.rejected.log_ratio())]
        };
        for ((upper, i), (lower, j)) in upper.into_iter().zip(lower) {
            let (loss, [slope, _]) = self.loss(LossType::Sigmoid, [upper, lower], [1.0; 2]);
            sum += loss;
            slopes[i][0] += slope;
            slopes[if is_paired { i } else { j }][1] -= slope;
        }
        (sum, slopes)
    }
}

impl Objective for Dpo {
    fn needs(&self) -> Needs {
        let of_reference = if self.ld_alpha.is_none() { OfReference::Documents } else { OfReference::Tokens };
        let (reference, of_logits) = (Some(of_reference), self.is_weighted.then_some(OfLogits::Squares));
        Needs { log_probabilities: true, reference, of_logits, ..Needs::default() }
    }

    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let pairs = Pair::all(rows, self.ld_alpha);
        let weight = |pair: &Pair| pair.chosen.weight(rows) * pair.rejected.weight(rows);
        let of_pairs: Vec<f64> = pairs.iter().map(|pair| if self.is_weighted { weight(pair) } else { 1.0 }).collect();
        let (mut weights, mut total) = (Weights::new(rows), 0.0);
        for &(loss, weight) in &self.losses {
            if loss == LossType::Sft {
                let chosen: Vec<_> = pairs.iter().map(|pair| pair.chosen.targets.clone()).collect();
                let factor = weight * as_f64(pairs.len());
                total += factor * weights.add_cross_entropy(rows, &chosen, factor);
                continue;
            }
            let (sum, slopes) = self.of_pairs(loss, &pairs, &of_pairs);
            total += weight * sum;
            for (pair, [of_chosen, of_rejected]) in pairs.iter().zip(slopes) {
                pair.chosen.add_slope(weight * of_chosen, &mut weights);
                pair.rejected.add_slope(weight * of_rejected, &mut weights);
            }
        }
        let rewards = |pair: &Pair| [&pair.chosen, &pair.rejected].map(|answer| self.beta * answer.log_ratio());
        let reported = pairs.iter().map(|pair| (rewards(pair), [pair.chosen.policy, pair.rejected.policy]));
        weights.weighed(total, pairs.len(), figures(reported))
    }
}
