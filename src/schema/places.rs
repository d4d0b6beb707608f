//! Records where the keys and values of a recipe were written.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use super::overrides::names;
use super::problem::Problem;
use super::tree::{Node, Value};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// The file as a whole.
    File,
    /// A byte range of the file's text.
    Span { start: usize, end: usize },
    /// A command-line argument: its position among those that change the recipe, and its text, `--set lora.r=x`.
    Argument { index: usize, text: Arc<str> },
}

impl From<Range<usize>> for Place {
    fn from(Range { start, end }: Range<usize>) -> Self {
        Self::Span { start, end }
    }
}

/// The places of a recipe's keys, in its file and on the command line. A problem that is found after the recipe was
/// read can thus be reported where the key was written.
#[derive(Clone, Default)]
pub struct Places {
    /// The file's name in messages.
    pub(super) file: Arc<str>,
    pub(super) text: Arc<str>,
    pub(super) root: Option<Arc<Node>>,
}

impl Places {
    /// Adds a place to a problem: that of the key at the start of its message, such as `` `data.train[0].path` ``. A
    /// problem that already has a place, or whose key was not written, is returned unchanged.
    #[must_use]
    pub fn locate(&self, problem: Problem) -> Problem {
        if problem.place.is_some() {
            return problem;
        }
        let key = problem.message.strip_prefix('`').and_then(|message| Some(message.split_once('`')?.0));
        match key.and_then(|key| self.node(key)) {
            Some(node) => self.put(problem, &node.place),
            None => problem,
        }
    }

    /// Adds `place` to the problem.
    pub(super) fn put(&self, problem: Problem, place: &Place) -> Problem {
        let file = &self.file;
        match *place {
            Place::File => problem.at(file),
            Place::Argument { ref text, .. } => problem.at(text),
            Place::Span { start, end } => {
                let (number, line_start) = line_at(&self.text, start);
                let column = self.text.get(line_start..start).unwrap_or_default().chars().count() + 1;
                let excerpt = Excerpt::new(&self.text[line_start..], number, start - line_start..end - line_start);
                Problem { excerpt, ..problem.at(format!("{file}:{number}:{column}")) }
            }
        }
    }

    /// The value of a key such as `data.train[0].path`.
    fn node(&self, key: &str) -> Option<&Node> {
        names(key).ok()?.iter().try_fold(self.root.as_deref()?, |node, name| match &node.value {
            Value::Table(table) => table.get(name),
            Value::Array(items) => items.get(name.parse::<usize>().ok()?),
            _ => None,
        })
    }
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Places({})", self.file)
    }
}

/// All are equal: recipes are compared by their values, not by where the values were written.
impl PartialEq for Places {
    fn eq(&self, _: &Self) -> bool {
        true
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
    fn new(text: &str, number: usize, span: Range<usize>) -> Option<Box<Self>> {
        let line = text.split('\n').next().filter(|line| line.len() <= MAX_EXCERPT_BYTES)?.trim_end_matches('\r');
        let span = span.start.min(line.len())..span.end.min(line.len());
        Some(Box::new(Self { line: line.to_owned(), number, span }))
    }

    /// The line, and a caret below the mistake, each with a line end.
    pub(super) fn shown(&self, colour: bool) -> String {
        let mistake = AnnotationKind::Primary.span(self.span.clone());
        let snippet = Snippet::source(&self.line).line_start(self.number).annotation(mistake);
        let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[Group::with_level(Level::ERROR).element(snippet)]) + "\n"
    }
}
