//! What of a saved adapter's config means something in a model.

use std::collections::HashSet;

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
            let is_list = matches!(known.target_modules, TargetModules::Names(_));
            let unknown = errors.iter().map(|error| match error {
                TargetError::NoMatch { target, .. } if is_list => Some(("target_modules", &**target)),
                TargetError::PatternNoMatch { key: key @ ("rank_pattern" | "alpha_pattern"), pattern }
                | TargetError::PatternTaken { key, pattern } => Some((*key, &**pattern)),
                _ => None,
            });
            let Some(unknown) = unknown.collect::<Option<HashSet<_>>>() else { return self.clone() };
            let is_known = |key, name: &String| !unknown.contains(&(key, &**name));
            if let TargetModules::Names(names) = &mut known.target_modules {
                names.retain(|name| is_known("target_modules", name));
            }
            known.rank_pattern.retain(|name| is_known("rank_pattern", name));
            known.alpha_pattern.retain(|name| is_known("alpha_pattern", name));
        }
        known
    }
}
