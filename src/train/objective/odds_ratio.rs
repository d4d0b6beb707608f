//! Odds ratio preference optimisation (Hong et al., 2024): the cross-entropy of the chosen answer, and how much higher its
//! odds are than the rejected one's.

use super::pairs::{Pair, Weights, figures, sigmoid, softplus_of_minus};
use super::{LossRows, Objective, Weighed};
use crate::measure::figures::Mean;
use crate::util::stats::as_f64;

/// `beta` weighs the odds ratio.
#[derive(Clone, Copy, Debug)]
pub(super) struct OddsRatio {
    pub(super) beta: f64,
}

/// log(1 - e^x) of `x` below 0.
fn log_of_rest(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() }
}

impl Objective for OddsRatio {
    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let pairs = Pair::all(rows, None);
        let mut weights = Weights::new(rows);
        let chosen: Vec<_> = pairs.iter().map(|pair| pair.chosen.with_prompt.clone()).collect();
        let count = as_f64(pairs.len());
        let cross_entropy = weights.add_cross_entropy(rows, &chosen, count);
        let mut loss = count * cross_entropy;
        let reward = |mean: f64| self.beta * mean;
        // An answer that is certain has no odds.
        let means = |pair: &Pair| [pair.chosen.mean(), pair.rejected.mean()].map(|mean| mean.min(-1e-7));
        let mut figures = figures(pairs.iter().map(|pair| (means(pair).map(reward), means(pair))));
        figures.nll_loss = Mean { sum: count * cross_entropy, count };
        for pair in &pairs {
            let [good, bad] = means(pair);
            let log_odds = good - bad - (log_of_rest(good) - log_of_rest(bad));
            loss += self.beta * softplus_of_minus(log_odds);
            figures.log_odds_ratio += Mean::of(-softplus_of_minus(log_odds));
            figures.log_odds_chosen += Mean::of(log_odds);
            let slope = self.beta * sigmoid(-log_odds);
            pair.chosen.add_slope(slope / (pair.chosen.count * good.exp_m1()), &mut weights);
            pair.rejected.add_slope(-slope / (pair.rejected.count * bad.exp_m1()), &mut weights);
        }
        weights.weighed(loss, pairs.len(), figures)
    }
}
