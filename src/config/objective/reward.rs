//! Sections `[[objective.reward]]` of a recipe.

use std::path::PathBuf;

use regex::Regex;

use super::super::last_line;
use super::accept_weights;
use crate::schema::{Choice as _, Problem, Section, choice, section};

section! {
    /// One `[[objective.reward]]`.
    pub struct RewardConfig then check {
        /// What an answer gets, mostly 1 or 0. "exact": it is the text in `column`; "number": its last number is the last one
        /// in `column`; "contains": it has the text in `column` in it; "similarity": the share, from 0 to 1, of its characters
        /// and those in `column` that both have in the same order; "regex": `regex_pattern` finds something in it; "json": it is a
        /// JSON object or list, with `schema` what satisfies that; "length": 0, and less down to -1 over the last quarter of
        /// `max_completion_length`; "command": what a program of yours says; "python": what functions of a Python file say, as
        /// TRL calls them.
        kind: Option<RewardKind> = None => optional_choice() like "exact";
        /// Factor of the reward; below 0 for what shall not be.
        weight: f64 = 1.0 => number(..), ["reward_weights"];
        /// Column of the rows with what is right.
        column: String = "answer".into() => string(), ["answer_column"];
        /// Compare with `column` without the difference of upper and lower case.
        ignore_case: bool = false => boolean();
        /// What "regex" looks for.
        regex_pattern: Option<String> = None => optional_string() like "<answer>.*</answer>";
        /// JSON Schema that an answer of "json" satisfies: a file.
        schema: Option<PathBuf> = None => optional_path() like "answer.schema.json", ["json_schema"];
        /// Program of "command", with arguments: it runs as long as training does, reads one JSON object a line (the row's
        /// columns and `completion`), and writes one number or null a line.
        command: Vec<String> = Vec::new() => strings() like ["python3", "judge.py"];
        /// Python file with the functions of "python": a process of its own imports it, and nothing but training and evaluation
        /// starts that.
        file: Option<PathBuf> = None => optional_path() like "rewards.py";
        /// Functions of that file, with TRL's arguments and its list of numbers as the result; `None` judges nothing.
        functions: Vec<String> = Vec::new() => strings() like ["correctness_reward_func"];
        /// Factor of each function. Default: 1.
        weights: Option<Vec<f64>> = None => any("a list of numbers", accept_weights) like [1.0];
        /// The program that imports the file.
        python: String = "python3".into() => string();
        /// Variables of the environment that the process of "command" or "python" gets beside PATH, HOME, LANG, TMPDIR,
        /// `VIRTUAL_ENV` and those of Python: no token or key that it does not name.
        env: Vec<String> = Vec::new() => strings() like ["OPENAI_API_KEY"];
        /// Seconds in which the file of "python" is to be imported.
        start_seconds: f64 = 300.0 => number(0.001..=1e6);
        /// Seconds that "command" may take for an answer, and "python" for all answers that are written together. Default: 60, of
        /// "python" 600.
        max_seconds: Option<f64> = None => optional_number(0.001..=1e6) like 60.0;
    }
}

impl RewardConfig {
    fn check(self, section: &mut Section) -> Self {
        if self.kind.is_none() && !section.is_wrong("kind") {
            section.problem("kind", "is missing: how answers are judged, such as \"exact\"");
        }
        let is = |kind: RewardKind| self.kind == Some(kind);
        for (key, is_set, kind, word) in [
            ("regex_pattern", self.regex_pattern.is_some(), RewardKind::Regex, "regex"),
            ("command", !self.command.is_empty(), RewardKind::Command, "command"),
            ("file", self.file.is_some(), RewardKind::Python, "python"),
            ("functions", !self.functions.is_empty(), RewardKind::Python, "python"),
        ] {
            if is_set && !is(kind) && self.kind.is_some() {
                section.problem(key, format!("is of \"{word}\" alone: leave it out"));
            } else if !is_set && is(kind) && !section.is_wrong(key) {
                section.problem(key, format!("is missing: \"{word}\" needs it"));
            }
        }
        self.check_program(section);
        let is_compared = is(RewardKind::Exact) || is(RewardKind::Contains) || is(RewardKind::Similarity);
        if self.ignore_case && !is_compared && self.kind.is_some() {
            section.problem("ignore_case", "is of \"exact\", \"contains\" and \"similarity\" alone: leave it out");
        }
        if self.schema.is_some() && !is(RewardKind::Json) && self.kind.is_some() {
            section.problem("schema", "is of \"json\" alone: leave it out");
        }
        if let Some(Err(error)) = self.regex_pattern.as_ref().map(|pattern| Regex::new(pattern)) {
            let message = format!("`{}` is no regular expression", section.full_name("regex_pattern"));
            section.reject("regex_pattern", Problem::new(message).hint(last_line(&error)));
        }
        self
    }

    /// Checks the keys of what is a process of its own.
    fn check_program(&self, section: &mut Section) {
        let default = Self::default();
        let is_other = |own: f64, default: f64| own.to_bits() != default.to_bits();
        let is_python = self.kind.is_none_or(|kind| kind == RewardKind::Python);
        let is_process = is_python || self.kind == Some(RewardKind::Command);
        for (key, is_set, is_read, words) in [
            ("weights", self.weights.is_some(), is_python, "\"python\""),
            ("python", self.python != default.python, is_python, "\"python\""),
            ("start_seconds", is_other(self.start_seconds, default.start_seconds), is_python, "\"python\""),
            ("env", !self.env.is_empty(), is_process, "\"command\" and \"python\""),
            ("max_seconds", self.max_seconds.is_some(), is_process, "\"command\" and \"python\""),
        ] {
            if is_set && !is_read {
                section.problem(key, format!("is of {words} alone: leave it out"));
            }
        }
        if self.weights.as_ref().is_some_and(|weights| weights.len() != self.functions.len()) && is_python {
            section.problem("weights", format!("needs one number for each of {} functions", self.functions.len()));
        }
        if let Some(twice) = (1..self.functions.len()).find(|&at| self.functions[..at].contains(&self.functions[at])) {
            section.problem("functions", format!("has `{}` twice", self.functions[twice]));
        }
    }

    /// What it judges by, with a factor for each: the functions of "python", or itself.
    #[must_use]
    pub fn parts(&self) -> Vec<(&str, f64)> {
        if self.kind == Some(RewardKind::Python) {
            let weight = |at: usize| self.weights.as_ref().and_then(|weights| weights.get(at)).copied().unwrap_or(1.0);
            return self.functions.iter().enumerate().map(|(at, name)| (&**name, self.weight * weight(at))).collect();
        }
        vec![(self.kind.map_or("", RewardKind::word), self.weight)]
    }

    /// The programs that it starts, each with its arguments; a file that Python imports is one.
    #[must_use]
    pub fn programs(&self) -> Vec<Vec<String>> {
        match &self.file {
            Some(file) => {
                let named = (self.python != Self::default().python).then(|| vec![self.python.clone()]);
                named.into_iter().chain([vec![file.display().to_string()]]).collect()
            }
            None if self.command.is_empty() => Vec::new(),
            None => vec![self.command.clone()],
        }
    }
}

choice! {
    /// How an answer is judged.
    pub enum RewardKind {
        /// It is the text of a column.
        Exact = "exact", ["string_check", "eq"];
        /// Its last number is that of a column.
        Number = "number";
        /// It has the text of a column in it.
        Contains = "contains", ["like", "ilike"];
        /// How much of it is the text of a column.
        Similarity = "similarity", ["text_similarity", "fuzzy_match"];
        /// A pattern finds something in it.
        Regex = "regex";
        /// It is JSON.
        Json = "json";
        /// It is not too long.
        Length = "length";
        /// What a program says.
        Command = "command", ["score_model"];
        /// What functions of a Python file say.
        Python = "python";
    }
}
