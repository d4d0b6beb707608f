//! What is wrong, where, and what would be right.

use std::fmt;
use std::sync::Arc;

/// One mistake in a recipe, in the arguments or in an input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where: `recipes/llama.toml:14:1`, `--set lora.r=x`; absent when there is no such place.
    pub place: Option<String>,
    /// What is wrong, and what is allowed.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Problem {
    /// A problem without a place.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { place: None, message: message.into(), hint: None }
    }

    /// The same, at a place.
    #[must_use]
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self { place: Some(place.to_string()), ..self }
    }

    /// The same, with a hint.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// `place: message`, and the hint on a line of its own.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Problem {}

/// All problems of one input, in the order of their places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// The file as a whole.
    File,
    /// A line and a column of the file, in characters, both from 1.
    Position {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// A command-line argument.
    Argument {
        /// Its index among those that change the recipe.
        index: usize,
        /// As typed: `--set lora.r=x`.
        text: Arc<str>,
    },
}

impl Place {
    /// As it is shown in messages.
    pub(crate) fn shown_in(&self, file: &str) -> String {
        match self {
            Self::File => file.to_owned(),
            Self::Position { line, column } => format!("{file}:{line}:{column}"),
            Self::Argument { text, .. } => text.to_string(),
        }
    }
}
