//! What a run costs.

use super::{PerMillionTokens, Summary};
use crate::config::CostConfig;

const JOULES_PER_KWH: f64 = 3.6e6;
const SECONDS_PER_HOUR: f64 = 3600.0;
const MILLION: f64 = 1e6;

impl CostConfig {
    /// Price of a number of seconds and, if known, of the energy; `None` if no price of the recipe applies.
    #[must_use]
    pub fn price(&self, seconds: f64, energy_kwh: Option<f64>) -> Option<f64> {
        let hours = self.price_per_hour.map(|price| price * seconds / SECONDS_PER_HOUR);
        let energy = self.price_per_kwh.zip(energy_kwh).map(|(price, energy)| price * energy);
        match (hours, energy) {
            (None, None) => None,
            (hours, energy) => Some(hours.unwrap_or(0.0) + energy.unwrap_or(0.0)),
        }
    }
}

impl Summary {
    /// Adds energy in kWh, cost, and both for a million tokens.
    #[must_use]
    pub fn with_cost(mut self, config: &CostConfig) -> Self {
        self.energy_kwh = self.totals.energy_joules.map(|joules| joules / JOULES_PER_KWH);
        self.cost = config.price(self.totals.wall_seconds, self.energy_kwh);
        self.currency = self.cost.map(|_| config.currency.clone());
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
        let millions = self.totals.tokens as f64 / MILLION;
        self.per_million_tokens = (self.totals.tokens > 0).then(|| PerMillionTokens {
            seconds: self.totals.wall_seconds / millions,
            energy_kwh: self.energy_kwh.map(|energy| energy / millions),
            cost: self.cost.map(|cost| cost / millions),
        });
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::metrics::Totals;

    #[test]
    fn hours_and_energy_are_paid_for_and_a_million_tokens_have_their_share() {
        let config = CostConfig { price_per_hour: Some(2.5), price_per_kwh: Some(0.3), currency: "EUR".into() };
        let totals =
            Totals { tokens: 4_000_000, energy_joules: Some(7.2e6), wall_seconds: 7200.0, ..Totals::default() };
        let summary = Summary { totals, ..Summary::default() };
        let with = summary.clone().with_cost(&config);
        assert_eq!((with.energy_kwh, with.currency.as_deref()), (Some(2.0), Some("EUR")));
        assert!((with.cost.unwrap() - (5.0 + 0.6)).abs() < 1e-12);
        let million = with.per_million_tokens.unwrap();
        assert_eq!((million.seconds, million.energy_kwh), (1800.0, Some(0.5)));
        assert!((million.cost.unwrap() - 1.4).abs() < 1e-12);
        // An unknown part costs nothing; if every part is unknown, there is no cost.
        let totals = Totals { energy_joules: None, wall_seconds: 3600.0, ..summary.totals };
        let without_energy = Summary { totals, ..summary.clone() };
        assert_eq!(without_energy.clone().with_cost(&config).cost, Some(2.5));
        let only_energy = CostConfig { price_per_hour: None, ..config };
        assert_eq!(without_energy.with_cost(&only_energy).cost, None);
        let free = summary.with_cost(&CostConfig::default());
        assert_eq!((free.cost, free.currency, free.energy_kwh), (None, None, Some(2.0)));
    }
}
