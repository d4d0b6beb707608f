//! Reads typed values from a JSON object, and records what is wrong with them.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde_json::{Map, Value};

/// Why a `config.json` could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {source}\n  hint: a model folder holds a config.json next to its weights", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The text is not JSON.
    #[error("{place}: not valid JSON: {source}")]
    Syntax {
        /// The file, or `config.json`.
        place: String,
        /// Line, column and reason.
        source: serde_json::Error,
    },
    /// All values that are wrong or not supported by this trainer.
    #[error("{}", problems.at(place))]
    Refused {
        /// The file, or `config.json`.
        place: String,
        /// One entry per mistake.
        problems: Problems,
    },
}

/// One value of a `config.json` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Key, with dots where objects are nested.
    pub key: String,
    /// The value found, and the allowed values.
    pub message: String,
    /// How to fix it.
    pub hint: Option<String>,
}

/// Every problem of one `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<ConfigProblem>);

impl Problems {
    pub(super) fn at(&self, place: &str) -> impl fmt::Display {
        let lines: Vec<String> = self
            .0
            .iter()
            .map(|problem| {
                let hint = problem.hint.as_ref().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default();
                format!("{place}: `{}` {}{hint}", problem.key, problem.message)
            })
            .collect();
        lines.join("\n")
    }
}

/// Reads typed values from an object and records what is wrong with them.
pub(super) struct Reader<'a> {
    pub(super) object: &'a Map<String, Value>,
    pub(super) problems: Vec<ConfigProblem>,
}

impl Reader<'_> {
    pub(super) fn problem(&mut self, key: &str, message: &str, hint: Option<&str>) {
        let (key, message, hint) = (key.to_owned(), message.to_owned(), hint.map(str::to_owned));
        self.problems.push(ConfigProblem { key, message, hint });
    }

    /// A whole number. A mistake is recorded, and 1 is returned instead.
    pub(super) fn count(&mut self, key: &str, range: RangeInclusive<usize>, default: Option<usize>) -> usize {
        let allowed = format!("expected a whole number from {} to {}", range.start(), range.end());
        match (self.object.get(key), default) {
            (None | Some(Value::Null), Some(default)) => return default,
            (None | Some(Value::Null), None) => self.problem(key, &format!("is missing, {allowed}"), None),
            (Some(value), _) => {
                match value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| range.contains(count))
                {
                    Some(count) => return count,
                    None => self.problem(key, &format!("= {value}, {allowed}"), None),
                }
            }
        }
        1
    }

    /// A number. A mistake is recorded, and 1 is returned instead.
    pub(super) fn number(&mut self, key: &str, range: RangeInclusive<f64>, default: Option<f64>) -> f64 {
        let allowed = format!("expected a number from {} to {}", range.start(), range.end());
        match (self.object.get(key), default) {
            (None | Some(Value::Null), Some(default)) => return default,
            (None | Some(Value::Null), None) => self.problem(key, &format!("is missing, {allowed}"), None),
            (Some(value), _) => match value.as_f64().filter(|number| range.contains(number)) {
                Some(number) => return number,
                None => self.problem(key, &format!("= {value}, {allowed}"), None),
            },
        }
        1.0
    }

    /// A boolean, `false` where absent.
    pub(super) fn flag(&mut self, key: &str) -> bool {
        match self.object.get(key) {
            None | Some(Value::Null) => false,
            Some(Value::Bool(flag)) => *flag,
            Some(other) => {
                self.problem(key, &format!("= {other}, expected true or false"), None);
                false
            }
        }
    }

    /// A token id, a list of them, or null; the default where the key is absent.
    pub(super) fn tokens(&mut self, key: &str, default: Option<u32>, vocab_size: usize) -> Vec<u32> {
        let values = match self.object.get(key) {
            None => return Vec::from_iter(default.filter(|token| (*token as usize) < vocab_size)),
            Some(Value::Null) => return Vec::new(),
            Some(Value::Array(values)) => values.as_slice(),
            Some(value) => std::slice::from_ref(value),
        };
        let mut tokens = Vec::with_capacity(values.len());
        for value in values {
            let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
            match token.filter(|token| (*token as usize) < vocab_size) {
                Some(token) => tokens.push(token),
                None => {
                    let message = format!("= {value}, expected a token id below `vocab_size` = {vocab_size}");
                    self.problem(key, &message, None);
                }
            }
        }
        tokens
    }
}
