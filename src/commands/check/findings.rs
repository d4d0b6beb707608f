//! What a look at a recipe brings to light.

use std::fmt::Display;

use crate::schema::{Problem, Problems};

/// What is so, what is odd, what is wrong.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Subjects and what was found about them.
    pub(super) facts: Vec<(&'static str, String)>,
    /// What may not be what was meant.
    pub(super) warnings: Vec<String>,
    /// What would end a training run.
    pub(super) problems: Problems,
}

impl Findings {
    pub(super) fn fact(&mut self, subject: &'static str, fact: String) {
        self.facts.push((subject, fact));
    }

    pub(super) fn warn(&mut self, warning: String) {
        self.warnings.push(warning);
    }

    /// Adds what another module refused. It may name several mistakes: each begins at the start of a line.
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

    /// Adds a problem, unless it is there: two sources may share a mistake.
    pub(super) fn problem(&mut self, problem: Problem) {
        if !self.problems.0.contains(&problem) {
            self.problems.0.push(problem);
        }
    }
}
