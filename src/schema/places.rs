//! Records where the keys and values of a recipe were written.

use std::fmt;
use std::sync::Arc;

use super::overrides::names;
use super::problem::{Excerpt, Problem, line_at};
use super::tree::{Node, ValuePlace};

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
    pub(super) fn put(&self, problem: Problem, place: &ValuePlace) -> Problem {
        let file = &self.file;
        match *place {
            ValuePlace::File => problem.at(file),
            ValuePlace::Argument { ref text, .. } => problem.at(text),
            ValuePlace::Span { start, end } => {
                let (number, line_start) = line_at(&self.text, start);
                let column = self.text.get(line_start..start).unwrap_or_default().chars().count() + 1;
                let excerpt = Excerpt::new(&self.text[line_start..], number, start - line_start..end - line_start);
                Problem { excerpt, ..problem.at(format!("{file}:{number}:{column}")) }
            }
        }
    }

    /// The value of a key such as `data.train[0].path`.
    fn node(&self, key: &str) -> Option<&Node> {
        names(key).ok()?.iter().try_fold(self.root.as_deref()?, |node, name| node.child(name))
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
