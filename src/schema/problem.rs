//! Problems: what is wrong, where, and what would be right.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

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

/// The number of the line at a byte offset, from 1, and the offset where the line begins.
pub(super) fn line_at(text: &str, offset: usize) -> (usize, usize) {
    let before = &text.as_bytes()[..offset];
    let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    (before.iter().filter(|byte| **byte == b'\n').count() + 1, start)
}

/// A line of a recipe with a mistake in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    line: String,
    number: usize,
    /// Bytes of the mistake in the line.
    span: Range<usize>,
}

/// Longest line that is shown.
const MAX_EXCERPT_BYTES: usize = 400;

impl Excerpt {
    /// The first line of `text`; `None` if it is too long.
    pub(super) fn new(text: &str, number: usize, span: Range<usize>) -> Option<Box<Self>> {
        let line = text.split('\n').next().filter(|line| line.len() <= MAX_EXCERPT_BYTES)?.trim_end_matches('\r');
        let span = span.start.min(line.len())..span.end.min(line.len());
        Some(Box::new(Self { line: line.to_owned(), number, span }))
    }

    /// The line, and a caret below the mistake, each with a line end.
    fn shown(&self, colour: bool) -> String {
        let mistake = AnnotationKind::Primary.span(self.span.clone());
        let snippet = Snippet::source(&self.line).line_start(self.number).annotation(mistake);
        let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[Group::with_level(Level::ERROR).element(snippet)]) + "\n"
    }
}
