//! Problems: what is wrong, where, and what would be right.

use std::fmt;

use super::places::Excerpt;

/// One mistake in a recipe, in the arguments or in an input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The place: `recipes/llama.toml:14:1`, `--set lora.r=x`; absent when there is no such place.
    pub place: Option<String>,
    /// What is wrong, and what is allowed.
    pub message: String,
    /// How to fix it.
    pub hint: Option<String>,
    /// Our word for the value, where another trainer's was written.
    pub instead: Option<&'static &'static str>,
    /// The text at the place, where that is a line of a file.
    pub excerpt: Option<Box<Excerpt>>,
}

impl Problem {
    /// A problem without a place.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { place: None, message: message.into(), hint: None, instead: None, excerpt: None }
    }

    /// The problems that an error of another module names, each at the start of a line.
    #[must_use]
    pub fn list(error: &impl fmt::Display) -> Vec<Self> {
        let mut messages: Vec<String> = Vec::new();
        for line in error.to_string().lines() {
            match messages.last_mut() {
                Some(message) if line.starts_with(' ') => *message = format!("{message}\n{line}"),
                _ => messages.push(line.to_owned()),
            }
        }
        messages.into_iter().map(Self::new).collect()
    }

    /// This problem with a place.
    #[must_use]
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self { place: Some(place.to_string()), ..self }
    }

    /// This problem with a hint.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// The text for the user: `place: message`, the line of the file with a caret, and each hint on its own line.
    #[must_use]
    pub fn shown(&self, colour: bool) -> String {
        self.text(&self.excerpt.as_ref().map(|excerpt| excerpt.shown(colour)).unwrap_or_default())
    }

    /// The text, with an excerpt after its first line.
    fn text(&self, excerpt: &str) -> String {
        let place = self.place.iter().map(|place| format!("{place}: ")).collect::<String>();
        let hint = self.hint.iter().map(|hint| format!("\n  hint: {hint}")).collect::<String>();
        let message = format!("{place}{}{hint}", self.message);
        match message.split_once('\n') {
            Some((first, others)) => format!("{first}\n{excerpt}{others}"),
            None => format!("{message}\n{excerpt}").trim_end().to_owned(),
        }
    }
}

/// Shows `place: message`, and the hint on its own line.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(""))
    }
}

impl std::error::Error for Problem {}

/// All problems of one input, in the order of their places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&problems.join("\n"))
    }
}

impl std::error::Error for Problems {}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}
