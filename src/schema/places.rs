//! Records where the keys and values of a recipe were written.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use super::overrides::{Step, steps};
use super::problem::Problem;
use super::tree::{Node, Table, Value};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// The file as a whole.
    File,
    /// A byte range of the file's text.
    Span {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// A command-line argument.
    Argument {
        /// Its position among the arguments that change the recipe.
        index: usize,
        /// As typed: `--set lora.r=x`.
        text: Arc<str>,
    },
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
    pub(super) root: Arc<Table>,
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
            Some(node) => self.put(problem, &node.place, &Lines::new(&self.text)),
            None => problem,
        }
    }

    /// Adds `place` to the problem.
    pub(super) fn put(&self, problem: Problem, place: &Place, lines: &Lines<'_>) -> Problem {
        let file = &self.file;
        match *place {
            Place::File => problem.at(file),
            Place::Argument { ref text, .. } => problem.at(text),
            Place::Span { start, end } => {
                let (line, column) = lines.position(start);
                let line_start = lines.starts[line - 1];
                let excerpt = Excerpt { text: Arc::clone(&self.text), span: start..end, line, line_start };
                Problem { excerpt: Some(excerpt.into()), ..problem.at(format!("{file}:{line}:{column}")) }
            }
        }
    }

    /// The value of a key such as `data.train[0].path`.
    fn node(&self, key: &str) -> Option<&Node> {
        let mut steps = steps(key).ok()?.into_iter();
        let Some(Step::Name(first)) = steps.next() else { return None };
        steps.try_fold(self.root.get(&first)?, |node, step| match (&node.value, step) {
            (Value::Table(table), Step::Name(name)) => table.get(&name),
            (Value::Array(items), Step::Index(index)) => items.get(index),
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

/// A line of a recipe with a mistake in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    text: Arc<str>,
    /// Bytes of the mistake in the text.
    span: Range<usize>,
    /// Number of the line where the mistake begins.
    line: usize,
    /// Offset of that line.
    line_start: usize,
}

/// Longest line that is shown.
const MAX_EXCERPT_BYTES: usize = 400;

impl Excerpt {
    /// The line, and a caret below the mistake, each with a line end; empty for a line that is too long.
    pub(super) fn shown(&self, colour: bool) -> String {
        let text = &self.text[self.line_start..];
        let length = text.bytes().take(MAX_EXCERPT_BYTES + 1).position(|byte| byte == b'\n').unwrap_or(text.len());
        if length > MAX_EXCERPT_BYTES {
            return String::new();
        }
        let line = text[..length].trim_end_matches('\r');
        let [from, to] = [self.span.start, self.span.end].map(|offset| (offset - self.line_start).min(line.len()));
        let snippet = Snippet::source(line).line_start(self.line).annotation(AnnotationKind::Primary.span(from..to));
        let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[Group::with_level(Level::ERROR).element(snippet)]) + "\n"
    }
}

/// Where the lines of a text begin.
pub(super) struct Lines<'t> {
    text: &'t str,
    starts: Vec<usize>,
    /// The last offset asked for, and its column, so that a long line is not counted again for each of its problems.
    last: Cell<(usize, usize)>,
}

impl<'t> Lines<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        let after_newlines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(index, _)| index + 1);
        Self { text, starts: std::iter::once(0).chain(after_newlines).collect(), last: Cell::new((0, 1)) }
    }

    /// Line and column of a byte offset, in characters, both from 1.
    pub(super) fn position(&self, offset: usize) -> (usize, usize) {
        let offset = offset.min(self.text.len());
        let line = self.starts.partition_point(|start| *start <= offset);
        let (last, column) = self.last.get();
        let start = self.starts[line - 1];
        let (from, column) = if (start..=offset).contains(&last) { (last, column) } else { (start, 1) };
        let before = self.text.as_bytes().get(from..offset).unwrap_or_default();
        // Count every byte except UTF-8 continuation bytes.
        let column = column + before.iter().filter(|byte| **byte & 0b1100_0000 != 0b1000_0000).count();
        self.last.set((offset, column));
        (line, column)
    }
}
