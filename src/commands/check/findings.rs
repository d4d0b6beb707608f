//! Findings of a check.

use std::fmt::Display;

use crate::schema::{Problem, Problems};

/// Facts, warnings and mistakes.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Subjects and their facts.
    pub(super) facts: Vec<(&'static str, String)>,
    /// Things that may be unintended.
    pub(super) warnings: Vec<String>,
    /// Problems that would end a training run.
    pub(super) problems: Problems,
}

impl Findings {
    pub(super) fn fact(&mut self, subject: &'static str, fact: String) {
        self.facts.push((subject, fact));
    }

    pub(super) fn warn(&mut self, warning: String) {
        self.warnings.push(warning);
    }

    /// Adds an error of another module. It may name several mistakes, each at the start of a line.
    pub(super) fn error(&mut self, error: &impl Display) {
        let mut mistakes: Vec<String> = Vec::new();
        for line in error.to_string().lines() {
            match mistakes.last_mut() {
                Some(mistake) if line.starts_with(' ') => {
                    mistake.push('\n');
                    mistake.push_str(line);
                }
                _ => mistakes.push(line.to_owned()),
            }
        }
        for mistake in mistakes {
            self.problem(Problem::new(mistake));
        }
    }

    /// Adds a problem, unless it is there already: two sources may report the same mistake.
    pub(super) fn problem(&mut self, problem: Problem) {
        if !self.problems.0.contains(&problem) {
            self.problems.0.push(problem);
        }
    }
}
