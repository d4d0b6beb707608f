//! Names and regular expressions of a recipe, matched as PEFT does.

use regex::Regex;

use super::{TargetError, TargetHits};
use crate::config::{TargetModules, layers_regex};

/// The patterns of a recipe's key, with how often each matched.
pub(super) struct Patterns {
    pub(super) key: &'static str,
    /// As they are written, and compiled.
    patterns: Vec<(String, Regex, usize)>,
}

impl Patterns {
    fn new(
        key: &'static str,
        patterns: impl Iterator<Item = (String, Result<Regex, regex::Error>)>,
        errors: &mut Vec<TargetError>,
    ) -> Self {
        let mut compiled = Vec::new();
        for (pattern, regex) in patterns {
            match regex {
                Ok(regex) => compiled.push((pattern, regex, 0)),
                Err(error) => errors.push(TargetError::Regex { key, pattern, reason: error.to_string() }),
            }
        }
        Self { key, patterns: compiled }
    }

    /// A list entry is a whole module name, or the end of one after a dot; a regular expression must match the whole name.
    pub(super) fn of_modules(
        key: &'static str,
        modules: Option<&TargetModules>,
        errors: &mut Vec<TargetError>,
    ) -> Self {
        let patterns: Vec<_> = match modules {
            None => Vec::new(),
            Some(TargetModules::AllLinear) => vec![("all-linear".to_owned(), Regex::new(""))],
            Some(TargetModules::Names(names)) => {
                let regex = |name: &String| Regex::new(&format!(r"^(?:.*\.)?{}$", regex::escape(name)));
                names.iter().map(|name| (name.clone(), regex(name))).collect()
            }
            Some(TargetModules::Regex(regex)) => vec![(regex.clone(), Regex::new(&format!("^(?:{regex})$")))],
        };
        Self::new(key, patterns.into_iter(), errors)
    }

    /// Each finds the number of the layer.
    pub(super) fn of_layers(patterns: Option<&[String]>, errors: &mut Vec<TargetError>) -> Self {
        let regex = |pattern: &String| (pattern.clone(), layers_regex(pattern));
        Self::new("layers_pattern", patterns.into_iter().flatten().map(regex), errors)
    }

    /// Each is a regular expression for the end of a module name, after a dot.
    pub(super) fn of_ends<'a>(
        key: &'static str,
        patterns: impl Iterator<Item = &'a String>,
        errors: &mut Vec<TargetError>,
    ) -> Self {
        let regex = |pattern: &String| (pattern.clone(), Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$")));
        Self::new(key, patterns.map(regex), errors)
    }

    /// Number of patterns that match, each of which is counted.
    pub(super) fn count(&mut self, module: &str) -> usize {
        let matching = self.patterns.iter_mut().filter(|(_, regex, _)| regex.is_match(module));
        matching.map(|(_, _, num_hits)| *num_hits += 1).count()
    }

    /// The first pattern that matches, which is counted.
    pub(super) fn first(&mut self, module: &str) -> Option<&String> {
        let (pattern, _, num_hits) = self.patterns.iter_mut().find(|(_, regex, _)| regex.is_match(module))?;
        *num_hits += 1;
        Some(pattern)
    }

    /// The number that the first pattern that matches finds.
    pub(super) fn number(&self, module: &str) -> Option<usize> {
        let found = self.patterns.iter().find_map(|(_, regex, _)| regex.captures(module))?;
        found.name("idx")?.as_str().parse().ok()
    }

    /// The patterns that never matched.
    pub(super) fn unused(&self) -> impl Iterator<Item = String> {
        self.patterns.iter().filter(|(_, _, num_hits)| *num_hits == 0).map(|(pattern, ..)| pattern.clone())
    }

    /// Whether a pattern matches one of the modules.
    pub(super) fn matches<'a>(&self, pattern: &str, mut modules: impl Iterator<Item = &'a str>) -> bool {
        let regex = self.patterns.iter().find(|(written, ..)| written == pattern).map(|(_, regex, _)| regex);
        regex.is_some_and(|regex| modules.any(|module| regex.is_match(module)))
    }

    pub(super) fn hits(self) -> Vec<TargetHits> {
        self.patterns.into_iter().map(|(target, _, num_hits)| TargetHits { target, num_hits }).collect()
    }
}
