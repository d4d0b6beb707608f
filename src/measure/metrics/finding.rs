//! What held a run back, and what to change.

use serde::{Deserialize, Serialize};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The run was held back, or something is wrong.
    Problem,
    /// A change of the recipe could make the run better.
    Advice,
    /// Worth knowing.
    #[default]
    Note,
    /// Nothing is wrong.
    Healthy,
}

impl Severity {
    /// Its name, as in summary.json.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Advice => "advice",
            Self::Note => "note",
            Self::Healthy => "healthy",
        }
    }
}

/// One thing that the figures of a run say about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// The rule that found it, such as `input_bound_cpu`.
    pub rule: String,
    /// How much it matters.
    pub severity: Severity,
    /// One line: what it is, in capitals, and the figure that shows it.
    pub verdict: String,
    /// The figures behind it, one line each.
    pub evidence: Vec<String>,
    /// Share of the run's time after start-up that it took, from 0 to 1; absent if it is not about time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_of_time: Option<f64>,
    /// Recipe keys worth changing, the best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// First and last step at which it was seen; absent if it was seen throughout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<(u64, u64)>,
}

/// A recipe key to change.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// `data.num_workers`.
    pub key: String,
    /// Its value now, as TOML.
    pub from: String,
    /// The value to try, as TOML.
    pub to: String,
    /// What the change should bring, in figures of this run.
    pub expected: String,
}

impl Finding {
    /// The finding in a few lines for a terminal, the first one not indented.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.verdict.clone()];
        lines.extend(self.evidence.iter().map(|evidence| format!("  {evidence}")));
        let line = |change: &Change| {
            let Change { key, from, to, expected } = change;
            format!("  try `{key}` {from} -> {to}: {expected}")
        };
        lines.extend(self.changes.iter().map(line));
        lines
    }

    /// What it is and what to change.
    #[must_use]
    pub fn without_evidence(&self) -> Self {
        Self { evidence: Vec::new(), ..self.clone() }
    }

    /// The finding as Markdown, for TensorBoard.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = format!("**{}**\n", self.verdict);
        self.evidence.iter().for_each(|evidence| text.push_str(&format!("\n- {evidence}")));
        for Change { key, from, to, expected } in &self.changes {
            text.push_str(&format!("\n- try `{key}` = `{from}` -> `{to}`: {expected}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_survives_the_way_to_json_and_back_and_is_shown_in_short() {
        let finding = Finding {
            rule: "padding".into(),
            severity: Severity::Advice,
            verdict: "PADDING: 61% of the tokens are padding".into(),
            evidence: vec!["1,220 of 2,000 tokens a step".into()],
            share_of_time: Some(0.61),
            changes: vec![Change {
                key: "data.packing".into(),
                from: "false".into(),
                to: "true".into(),
                expected: "2.6x the tokens/s".into(),
            }],
            steps: Some((3, 9)),
        };
        let json = serde_json::to_string(&finding).unwrap();
        assert!(json.contains(r#""severity":"advice""#) && json.contains(r#""steps":[3,9]"#), "{json}");
        assert_eq!(serde_json::from_str::<Finding>(&json).unwrap(), finding);
        let lines = finding.lines();
        assert_eq!(lines[2], "  try `data.packing` false -> true: 2.6x the tokens/s");
        assert!(finding.markdown().starts_with("**PADDING: 61% of the tokens are padding**\n\n- 1,220"));
    }
}
