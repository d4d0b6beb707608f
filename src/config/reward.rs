//! Sections `[[objective.reward]]` of a recipe.

use std::path::PathBuf;

use regex::Regex;

use super::last_line;
use crate::schema::{Problem, Section, choice, section};

section! {
    /// One `[[objective.reward]]`.
    pub struct RewardConfig then check {
        /// What an answer gets, mostly 1 or 0. "exact": it is the text in `column`; "number": its last number is the last one
        /// in `column`; "contains": it has the text in `column` in it; "similarity": the share, from 0 to 1, of its characters
        /// and those in `column` that both have in the same order; "regex": `regex_pattern` finds something in it; "json": it is a
        /// JSON object or list, with `schema` what satisfies that; "length": 0, and less down to -1 over the last quarter of
        /// `max_completion_length`; "command": what a program of yours says.
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
        /// Seconds that "command" may take for an answer.
        max_seconds: f64 = 60.0 => number(0.001..=1e6);
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
        ] {
            if is_set && !is(kind) && self.kind.is_some() {
                section.problem(key, format!("is of \"{word}\" alone: leave it out"));
            } else if !is_set && is(kind) && !section.is_wrong(key) {
                section.problem(key, format!("is missing: \"{word}\" needs it"));
            }
        }
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
        Command = "command", ["python", "score_model"];
    }
}
