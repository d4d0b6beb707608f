//! When two answers are the same, in the order of lm-evaluation-harness: what the pattern finds, without the parts to
//! ignore, in one case, without punctuation.

use regex::{Captures, Regex};

use crate::config::{Take, TaskConfig};

/// How answers are compared.
#[derive(Clone, Debug)]
pub struct AnswerComparison {
    pattern: Option<Regex>,
    take: Take,
    ignored: Vec<Regex>,
    ignore_case: bool,
    ignore_punctuation: bool,
}

impl AnswerComparison {
    /// The comparison that a recipe asks for.
    ///
    /// # Errors
    /// A pattern that is not valid.
    pub fn new(config: &TaskConfig) -> Result<Self, regex::Error> {
        Ok(Self {
            pattern: config.regex_pattern.as_deref().map(Regex::new).transpose()?,
            take: config.take,
            ignored: config.regexes_to_ignore.iter().map(|pattern| Regex::new(pattern)).collect::<Result<_, _>>()?,
            ignore_case: config.ignore_case,
            ignore_punctuation: config.ignore_punctuation,
        })
    }

    /// The part of an answer that is compared; `None` where the pattern finds nothing.
    #[must_use]
    pub fn part_of(&self, answer: &str) -> Option<String> {
        let found = match &self.pattern {
            None => answer.trim(),
            Some(pattern) => self.found(pattern, answer)?.trim(),
        };
        let mut part = found.to_owned();
        for ignored in &self.ignored {
            part = ignored.replace_all(&part, "").into_owned();
        }
        if self.ignore_case {
            part = part.to_lowercase();
        }
        if self.ignore_punctuation {
            part.retain(|character| !character.is_ascii_punctuation());
        }
        Some(part)
    }

    fn found<'a>(&self, pattern: &Regex, answer: &'a str) -> Option<&'a str> {
        let mut finds = pattern.captures_iter(answer);
        let find: Captures<'a> = match self.take {
            Take::First => finds.next(),
            Take::Last => finds.last(),
        }?;
        // Without groups, the whole find.
        let mut groups = find.iter().skip(usize::from(find.len() > 1)).flatten();
        groups.find(|group| !group.is_empty()).map(|group| group.as_str())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::schema::Choice as _;

    fn comparison(config: &TaskConfig) -> AnswerComparison {
        AnswerComparison::new(config).unwrap()
    }

    #[test]
    fn answers_are_found_and_compared_as_lm_evaluation_harness_does_for_gsm8k() {
        let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/answers.json")).unwrap();
        let texts = |name: &str| -> Vec<String> { serde_json::from_value(golden[name].clone()).unwrap() };
        for (name, take) in Take::NAMES {
            let pattern = golden["patterns"][name].as_str().unwrap().to_owned();
            let find =
                comparison(&TaskConfig { regex_pattern: Some(pattern.clone()), take: *take, ..TaskConfig::default() });
            let compare = comparison(&TaskConfig {
                regex_pattern: Some(pattern),
                take: *take,
                regexes_to_ignore: texts("regexes_to_ignore"),
                ignore_case: true,
                ..TaskConfig::default()
            });
            let answers: Vec<Option<String>> = texts("answers").iter().map(|text| compare.part_of(text)).collect();
            let rows = golden["rows"].as_array().unwrap().iter().filter(|row| row["take"] == *name);
            assert!(rows.clone().count() > 20 && answers.iter().all(Option::is_some));
            for row in rows {
                let text = row["text"].as_str().unwrap();
                // The harness's word for nothing.
                assert_eq!(find.part_of(text).unwrap_or_else(|| "[invalid]".into()), row["found"], "{text:?}");
                let found = compare.part_of(text);
                let right = (0..answers.len()).filter(|answer| found.is_some() && found == answers[*answer]);
                assert_eq!(serde_json::json!(right.collect::<Vec<_>>()), row["right"], "{text:?}");
            }
        }
    }

    #[test]
    fn a_whole_answer_is_compared_without_what_is_to_be_ignored() {
        let plain = comparison(&TaskConfig::default());
        assert_eq!(plain.part_of(" name: Max\n").as_deref(), Some("name: Max"));
        assert_ne!(plain.part_of("Max"), plain.part_of("max"));
        let loose = comparison(&TaskConfig {
            regexes_to_ignore: vec!["^the ".into()],
            ignore_case: true,
            ignore_punctuation: true,
            ..TaskConfig::default()
        });
        assert_eq!(loose.part_of("the U.S.A.!"), loose.part_of("Usa"));
        assert_ne!(loose.part_of("The U.S.A."), loose.part_of("USA"), "patterns come before the case");
    }

    #[test]
    fn of_several_groups_the_first_that_took_part_is_found() {
        let found = |pattern: &str, text: &str| {
            comparison(&TaskConfig { regex_pattern: Some(pattern.into()), ..TaskConfig::default() }).part_of(text)
        };
        assert_eq!(found("(a)|(b)", "xb").as_deref(), Some("b"));
        assert_eq!(found("[0-9]+", "x 12 3").as_deref(), Some("12"));
        assert_eq!(found("(z)", "x"), None);
    }
}
