//! Scores of answers (Bradley and Terry, 1952; Ouyang et al., 2022): the chosen one shall have the higher.

use super::pairs::{Pair, Weights, figures, sigmoid, softplus_of_minus};
use super::{LossRows, Objective, Weighed};

/// Compares the scores of both answers. They stand where other objectives have log-probabilities.
#[derive(Clone, Debug)]
pub(super) struct Reward {
    /// Weight of the square of a pair's summed scores.
    pub(super) centering: f64,
}

impl Objective for Reward {
    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let pairs = Pair::all(rows, None);
        let (mut weights, mut total) = (Weights::new(rows), 0.0);
        for (Pair { chosen, rejected }, answers) in pairs.iter().zip(rows.answers.chunks(2)) {
            let (apart, sum) = (chosen.policy - rejected.policy, chosen.policy + rejected.policy);
            let beyond = apart - f64::from(answers[0].margin);
            total += softplus_of_minus(beyond) + self.centering * sum * sum;
            let (apart, towards_zero) = (sigmoid(-beyond), 2.0 * self.centering * sum);
            chosen.add_slope(towards_zero - apart, &mut weights);
            rejected.add_slope(towards_zero + apart, &mut weights);
        }
        let scores = pairs.iter().map(|pair| [pair.chosen.policy, pair.rejected.policy]);
        let mut figures = figures(scores.map(|scores| (scores, scores)));
        (figures.logps_chosen, figures.logps_rejected) = Default::default();
        weights.weighed(total, pairs.len(), figures)
    }
}
