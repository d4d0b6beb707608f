//! Section `[cost]` of a recipe.

use crate::schema::section;

section! {
    /// Section `[cost]`.
    pub struct CostConfig {
        /// Price of an hour of the machine. Default: none.
        price_per_hour: Option<f64> = None => optional_number(0.0..) like 2.5;
        /// Price of a kWh, where energy is paid for besides. Default: none.
        price_per_kwh: Option<f64> = None => optional_number(0.0..) like 0.3;
        /// Name of the currency.
        currency: String = "USD".into() => string();
    }
}
