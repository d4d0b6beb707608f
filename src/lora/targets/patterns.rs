//! Names and regular expressions of a recipe, matched as PEFT does.

use std::collections::HashMap;

use regex::Regex;

use super::{TargetError, TargetHits};
use crate::config::{TargetModules, layers_regex};

/// The patterns of a recipe's key, with how often each matched.
pub(super) struct Patterns {
    pub(super) key: &'static str,
    /// As they are written, and how often each matched.
    written: Vec<(String, usize)>,
    form: Form,
}

enum Form {
    /// Whole names of modules, or ends of such after a dot, with their places: people list those of many models.
    Names(HashMap<String, usize>),
    /// One for each.
    Expressions(Vec<Regex>),
}

/// A module's name, and every end of it after a dot.
fn ends(module: &str) -> impl Iterator<Item = &str> {
    std::iter::once(module).chain(module.match_indices('.').map(|(at, _)| &module[at + 1..]))
}

impl Patterns {
    fn new(
        key: &'static str,
        patterns: impl Iterator<Item = (String, Result<Regex, regex::Error>)>,
        errors: &mut Vec<TargetError>,
    ) -> Self {
        let (mut written, mut compiled) = (Vec::new(), Vec::new());
        for (pattern, regex) in patterns {
            match regex {
                Ok(regex) => {
                    written.push((pattern, 0));
                    compiled.push(regex);
                }
                Err(error) => errors.push(TargetError::Regex { key, pattern, reason: error.to_string() }),
            }
        }
        Self { key, written, form: Form::Expressions(compiled) }
    }

    /// Each of them once.
    fn of_names(key: &'static str, names: &[String]) -> Self {
        let (mut patterns, mut places) = (Vec::new(), HashMap::new());
        for name in names {
            places.entry(name.clone()).or_insert_with(|| {
                patterns.push((name.clone(), 0));
                patterns.len() - 1
            });
        }
        Self { key, written: patterns, form: Form::Names(places) }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.written.len()
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
            Some(TargetModules::Names(names)) => return Self::of_names(key, names),
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
        let matching: Vec<usize> = match &self.form {
            Form::Names(places) => ends(module).filter_map(|end| places.get(end).copied()).collect(),
            Form::Expressions(all) => (0..all.len()).filter(|place| all[*place].is_match(module)).collect(),
        };
        matching.iter().for_each(|place| self.written[*place].1 += 1);
        matching.len()
    }

    /// The first pattern that matches, which is counted.
    pub(super) fn first(&mut self, module: &str) -> Option<&String> {
        let Form::Expressions(all) = &self.form else { return None };
        let (pattern, num_hits) = &mut self.written[all.iter().position(|regex| regex.is_match(module))?];
        *num_hits += 1;
        Some(pattern)
    }

    /// The number that the first pattern that matches finds.
    pub(super) fn number(&self, module: &str) -> Option<usize> {
        let Form::Expressions(all) = &self.form else { return None };
        let found = all.iter().find_map(|regex| regex.captures(module))?;
        found.name("idx")?.as_str().parse().ok()
    }

    /// The patterns that never matched.
    pub(super) fn unused(&self) -> impl Iterator<Item = String> {
        self.written.iter().filter(|(_, num_hits)| *num_hits == 0).map(|(pattern, _)| pattern.clone())
    }

    /// Whether a pattern matches one of the modules.
    pub(super) fn matches<'a>(&self, pattern: &str, mut modules: impl Iterator<Item = &'a str>) -> bool {
        match &self.form {
            Form::Names(_) => modules.any(|module| ends(module).any(|end| end == pattern)),
            Form::Expressions(all) => {
                let place = self.written.iter().position(|(written, _)| written == pattern);
                place.is_some_and(|place| modules.any(|module| all[place].is_match(module)))
            }
        }
    }

    pub(super) fn hits(self) -> Vec<TargetHits> {
        self.written.into_iter().map(|(target, num_hits)| TargetHits { target, num_hits }).collect()
    }
}
