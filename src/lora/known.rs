//! What of a saved adapter's config means something in a model.

use super::targets::TargetError;
use crate::config::{LoraConfig, TargetModules};
use crate::spec::ModelConfig;

impl LoraConfig {
    /// The section without names and patterns that match nothing in this model, if others match: PEFT leaves them out, and people
    /// list those of many models.
    #[must_use]
    pub fn known_in(&self, model: &ModelConfig) -> Self {
        let mut known = self.clone();
        while let Err(errors) = known.select(model) {
            match (errors.first(), &mut known.target_modules) {
                (Some(TargetError::NoMatch { target, .. }), TargetModules::Names(names)) => {
                    names.retain(|name| name != target);
                }
                (Some(TargetError::PatternNoMatch { key: "rank_pattern", pattern }), _) => {
                    known.rank_pattern.remove(pattern);
                }
                (Some(TargetError::PatternNoMatch { key: "alpha_pattern", pattern }), _) => {
                    known.alpha_pattern.remove(pattern);
                }
                _ => return self.clone(),
            }
        }
        known
    }
}
