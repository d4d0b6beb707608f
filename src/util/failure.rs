//! How a command ends without its result, and the exit code that says so.

use std::error::Error;
use std::fmt;

use crate::schema::{Places, Problem, Problems};

/// Why a command ended without its result.
#[derive(Debug)]
pub enum Failure {
    /// The recipe, the arguments or an input file is wrong: nothing was computed. Exit code 2.
    Input(Problems),
    /// Something failed while running. Exit code 1.
    Running(Box<dyn Error + Send + Sync>),
    /// SIGINT or SIGTERM, after a checkpoint was saved. Exit code 130.
    Interrupted,
}

impl Failure {
    /// An input mistake, hint included, that another module describes.
    pub fn input(error: impl fmt::Display) -> Self {
        Self::Input(Problem::new(error.to_string()).into())
    }

    /// A failure while running.
    pub fn running(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Running(error.into())
    }

    /// This failure and another: the mistakes of both, or the failure that is no mistake.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Input(Problems(mut problems)), Self::Input(Problems(more))) => {
                problems.extend(more);
                Self::Input(Problems(problems))
            }
            (Self::Input(_), other) => other,
            (failure, _) => failure,
        }
    }

    /// Puts the recipe key that the mistakes are about before each message.
    #[must_use]
    pub fn about(self, key: &str) -> Self {
        self.map(|problem| Problem { message: format!("`{key}`: {}", problem.message), ..problem })
    }

    /// Adds to each mistake that begins with a recipe key, such as `` `data.train[0].path` ``, the place of that key.
    #[must_use]
    pub fn located(self, places: &Places) -> Self {
        self.map(|problem| places.locate(problem))
    }

    fn map(self, change: impl Fn(Problem) -> Problem) -> Self {
        match self {
            Self::Input(Problems(problems)) => Self::Input(Problems(problems.into_iter().map(change).collect())),
            failure => failure,
        }
    }

    /// The exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Running(_) => 1,
            Self::Input(_) => 2,
            Self::Interrupted => 130,
        }
    }

    /// What to print for the user, one text for each mistake: first line, then indented hints. Empty for
    /// [`Interrupted`](Self::Interrupted), since the run has already reported it.
    #[must_use]
    pub fn messages(&self) -> Vec<String> {
        match self {
            Self::Input(problems) => problems.0.iter().map(ToString::to_string).collect(),
            Self::Running(error) => vec![with_causes(error.as_ref())],
            Self::Interrupted => vec![],
        }
    }

    /// Like [`messages`](Self::messages), with the wrong lines of the recipe; in colour for a terminal.
    #[must_use]
    pub fn shown(&self, colour: bool) -> Vec<String> {
        match self {
            Self::Input(problems) => problems.0.iter().map(|problem| problem.shown(colour)).collect(),
            _ => self.messages(),
        }
    }
}

/// The error and its causes, unless its own text already includes them.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str("\n  because: ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted => f.write_str("interrupted"),
            _ => f.write_str(&self.messages().join("\n")),
        }
    }
}

impl Error for Failure {}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Self {
        Self::Input(problems)
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Input(problem.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write the adapter")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_the_error_once_each() {
        let failure = Failure::running(Outer(std::io::Error::other("disk full")));
        assert_eq!(failure.messages(), ["cannot write the adapter\n  because: disk full"]);
        assert_eq!(failure.exit_code(), 1);

        let said = Failure::running(std::io::Error::other(std::io::Error::other("disk full")));
        assert_eq!(said.messages(), ["disk full"]);
    }

    #[test]
    fn input_mistakes_are_listed_one_by_one_and_end_with_2() {
        let problems = Problems(vec![Problem::new("a").at("r.toml:1:2").hint("b"), Problem::new("c")]);
        let failure = Failure::from(problems);
        assert_eq!(failure.messages(), ["r.toml:1:2: a\n  hint: b", "c"]);
        assert_eq!(failure.exit_code(), 2);
        assert_eq!(Failure::Interrupted.exit_code(), 130);
    }
}
