//! What a fine-tuning job of OpenAI says, in its present form and in the older one, and what its graders judge.

use std::path::Path;

use serde_json::{Map, Value};

use super::draft::Draft;
use super::foreign::Meaning::{self, Lost, Near, Nothing, Set};
use super::foreign::{Foreign, READ, is_off, one};

/// What its server notes of a job.
const OF_ITS_SERVER: [&str; 10] = [
    "metadata", "integrations", "object", "id", "created_at", "finished_at", "organization_id", "status",
    "fine_tuned_model", "result_files",
];
/// A model that many have begun with.
const SUCH_AS: &str = "that model cannot be had: name one by --model, such as Qwen/Qwen2.5-1.5B-Instruct";

/// The meaning of a key of a job.
pub(super) fn of_key(from: &Foreign, path: &str, value: &Value) -> Meaning {
    let text = value.as_str().unwrap_or_default();
    if value.is_null() || text == "auto" {
        return Nothing;
    }
    if let Some(grader) = grader(from) {
        let is_whole = from.root.get("type").is_some();
        match path.split('.').collect::<Vec<_>>()[..] {
            ["type"] | [.., "grader", "type"] => return judged(grader),
            [.., "grader", _] => return READ,
            _ if is_whole || path.contains(".grader.") || path.starts_with("grader.") => return READ,
            _ => {}
        }
    }
    let file = |key: &str| match text {
        _ if from.has_data && key == "data.train.0.path" => Nothing,
        _ if text.contains(['/', '.']) || Path::new(text).exists() => one(key, value, from),
        _ if key == "data.train.0.path" => Lost("a file of OpenAI's, by its id: name yours by --data FILE".into()),
        _ => Lost("a file of OpenAI's, by its id: write yours as path in [[data.eval]]".into()),
    };
    match path.rsplit('.').next().unwrap_or(path) {
        "training_file" => file("data.train.0.path"),
        "validation_file" => file("data.eval.0.path"),
        "model" if from.has_model => Nothing,
        "model" if text.contains('/') || Path::new(text).exists() => one("model.path", value, from),
        "model" => Lost(SUCH_AS.into()),
        "seed" => one("seed", value, from),
        "suffix" => Set(vec![("output_dir".into(), format!("runs/{text}").into())]),
        "n_epochs" => one("train.num_epochs", value, from),
        "batch_size" => one("train.micro_batch_size", value, from),
        "beta" => one("objective.beta", value, from),
        "eval_interval" => one("eval.eval_steps", value, from),
        "learning_rate_multiplier" if value.as_f64() == Some(1.0) => Nothing,
        "learning_rate_multiplier" => {
            Lost("a factor of a rate that OpenAI does not tell; optimizer.learning_rate here is the rate itself".into())
        }
        "type" if text == "dpo" => Set(vec![("objective.name".into(), "dpo".into())]),
        "type" if text == "reinforcement" => Set(vec![("objective.name".into(), "grpo".into())]),
        "type" if text == "wandb" => Lost(
            "figures go to metrics.jsonl, TensorBoard and MLflow; `lora-train help telemetry` has the way to W&B"
                .into(),
        ),
        "type" if text == "supervised" => Nothing,
        _ if is_off(value) || OF_ITS_SERVER.iter().any(|part| path.starts_with(part)) => Nothing,
        _ => Lost("there is no such key here".into()),
    }
}

/// What a job leaves open, where it says no rate and no rewards.
pub(super) fn fill(from: &Foreign, draft: &mut Draft) {
    let objective = draft.get("objective.name").and_then(toml::Value::as_str).map(str::to_owned);
    if objective.as_deref() == Some("grpo") && grader(from).is_none() {
        draft.set("objective.reward.0.kind", "exact", "TO REPLACE: how answers are judged");
    }
    if objective.is_none() {
        draft.set("optimizer.learning_rate", 2e-4, "");
    }
}

/// The grader of a job, or of a file that is one.
fn grader(from: &Foreign) -> Option<&Map<String, Value>> {
    let of_job = from.get("method.reinforcement.grader").or_else(|| from.get("grader")).and_then(Value::as_object);
    of_job
        .or_else(|| from.root.contains_key("input").then_some(&from.root))
        .or_else(|| (from.root.contains_key("graders") || from.root.contains_key("source")).then_some(&from.root))
}

/// A grader as rewards.
fn judged(grader: &Map<String, Value>) -> Meaning {
    let mut settings = vec![("objective.name".to_owned(), "grpo".into())];
    let mut differences = Vec::new();
    let text = |key: &str| grader.get(key).and_then(Value::as_str).unwrap_or_default();
    if text("type") == "multi" {
        let graders = grader.get("graders").and_then(Value::as_object);
        let formula = text("calculate_output");
        let weights = weights(formula);
        if weights.is_none() {
            differences.push(format!("`{formula}` is no weighted sum: the rewards are added here"));
        }
        // What the formula leaves out does not count.
        let weight = |name: &str| match &weights {
            Some(weights) => weights.iter().find(|(own, _)| own == name).map(|(_, weight)| *weight),
            None => Some(1.0),
        };
        let counted = graders.into_iter().flatten().filter_map(|(name, grader)| Some((grader, weight(name)?)));
        for (index, (grader, weight)) in counted.enumerate() {
            let grader = grader.as_object().cloned().unwrap_or_default();
            reward(&grader, index, weight, &mut settings, &mut differences);
        }
    } else {
        reward(grader, 0, 1.0, &mut settings, &mut differences);
    }
    if differences.is_empty() { Set(settings) } else { Near(settings, differences.join("; ")) }
}

/// The command of a program that stands in the place of a grader of this name.
fn program_of(name: &str) -> toml::Value {
    let name = if name.is_empty() { "judge" } else { name };
    let name: String = name.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
    toml::Value::Array(vec!["python3".into(), format!("{name}.py").into()])
}

/// One grader as the reward of a number, with what differs.
fn reward(
    grader: &Map<String, Value>,
    index: usize,
    weight: f64,
    settings: &mut Vec<(String, toml::Value)>,
    differences: &mut Vec<String>,
) {
    let text = |key: &str| grader.get(key).and_then(Value::as_str).unwrap_or_default();
    let mut set = |key: &str, value: toml::Value| settings.push((format!("objective.reward.{index}.{key}"), value));
    let (kind, operation, reference) = (text("type"), text("operation"), text("reference"));
    let is_of_answer = within_braces(text("input")) == Some("sample.output_text");
    let column =
        within_braces(reference).and_then(|path| path.strip_prefix("item.")).filter(|path| !path.contains('.'));
    let mut weight = weight;
    match (kind, operation, column) {
        ("string_check", "eq" | "ne", Some(column)) if is_of_answer => {
            set("kind", "exact".into());
            set("column", column.into());
            if operation == "ne" {
                weight = -weight;
            }
        }
        ("string_check", "like" | "ilike", Some(column)) if is_of_answer => {
            set("kind", "contains".into());
            set("column", column.into());
            if operation == "ilike" {
                set("ignore_case", true.into());
            }
        }
        ("text_similarity", _, Some(column)) if is_of_answer && text("evaluation_metric") == "fuzzy_match" => {
            set("kind", "similarity".into());
            set("column", column.into());
        }
        ("string_check", "eq" | "ne" | "like" | "ilike", None) if is_of_answer && !reference.contains("{{") => {
            let (pattern, case) = (regex::escape(reference), if operation == "ilike" { "(?i)" } else { "" });
            let pattern = if operation.ends_with("like") { pattern } else { format!("^{pattern}$") };
            set("kind", "regex".into());
            set("regex_pattern", format!("{case}{pattern}").into());
            if operation == "ne" {
                weight = -weight;
            }
        }
        _ => {
            set("kind", "command".into());
            set("command", program_of(text("name")));
            // A rule compares with a whole column.
            let is_compared = is_of_answer && reference.contains("{{") && column.is_none();
            let compared = if is_compared { format!(" with `{reference}`") } else { String::new() };
            differences.push(format!(
                "{kind}{compared}: a program stands in its place, which is yours to write: it reads a JSON line and writes a \
                 number; `lora-train help preferences` shows one"
            ));
        }
    }
    if (weight - 1.0).abs() > f64::EPSILON {
        set("weight", weight.into());
    }
}

/// `{{ item.answer }}`: what stands in the braces, if nothing else does.
fn within_braces(text: &str) -> Option<&str> {
    let inside = text.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    (!inside.contains(['{', '}'])).then(|| inside.trim())
}

/// The factors of a weighted sum, `0.5 * a - b + 1`. Constants make no answer likelier.
fn weights(formula: &str) -> Option<Vec<(String, f64)>> {
    let term = |term: &str| {
        let (mut name, mut weight) = (None, 1.0);
        let term = term.trim();
        let term = term.strip_prefix('-').map_or(term, |rest| {
            weight = -1.0;
            rest
        });
        for factor in term.split('*').map(str::trim) {
            match factor.parse::<f64>() {
                Ok(number) => weight *= number,
                Err(_)
                    if name.is_none()
                        && factor.starts_with(|c: char| c.is_alphabetic() || c == '_')
                        && factor.chars().all(|c| c.is_alphanumeric() || c == '_') =>
                {
                    name = Some(factor);
                }
                Err(_) => return None,
            }
        }
        Some(name.map(|name: &str| (name.to_owned(), weight)))
    };
    let terms: Option<Vec<Option<_>>> =
        formula.replace('-', "+-").trim_start_matches('+').split('+').map(term).collect();
    terms.map(|terms| terms.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_formula_of_graders_is_their_weights_where_it_is_a_sum() {
        let of = |formula: &str| {
            weights(formula).map(|all| all.iter().map(|(name, weight)| format!("{name} {weight}")).collect::<Vec<_>>())
        };
        for (formula, expected) in
            [("0.5 * a + b", &["a 0.5", "b 1"][..]), ("a - 2 * b_2 + 1", &["a 1", "b_2 -2"]), ("-a * 0.5", &["a -0.5"])]
        {
            assert_eq!(of(formula).unwrap(), expected, "{formula}");
        }
        for formula in ["max(a, b)", "(a + b) / 2", "a * b", "1e-5 * a", ""] {
            assert_eq!(of(formula), None, "{formula}");
        }
    }

    #[test]
    fn a_rule_compares_with_a_whole_column_and_everything_else_is_named() {
        let check = |reference: &str| {
            let grader = json!({"type": "string_check", "name": "c", "input": "{{sample.output_text}}", "operation": "eq",
                "reference": reference});
            let (mut settings, mut differences) = (Vec::new(), Vec::new());
            reward(grader.as_object().unwrap(), 0, 1.0, &mut settings, &mut differences);
            let kind = settings
                .iter()
                .find(|(key, _)| key.ends_with("kind"))
                .map(|(_, kind)| kind.as_str().unwrap().to_owned());
            (kind.unwrap(), differences.join("; "))
        };
        assert_eq!(check("{{ item.x }}"), ("exact".into(), String::new()));
        assert_eq!(check("yes"), ("regex".into(), String::new()));
        for reference in ["The answer is {{item.x}}", "{{item.a.b}}"] {
            let (kind, difference) = check(reference);
            let begin = format!("string_check with `{reference}`: a program stands in its place");
            assert!(kind == "command" && difference.starts_with(&begin), "{difference}");
        }
        // A grader that the formula leaves out does not count.
        let graders = json!({"type": "multi", "calculate_output": "b", "graders": {
            "a": {"type": "string_check", "operation": "eq", "input": "{{sample.output_text}}", "reference": "x"},
            "b": {"type": "string_check", "operation": "eq", "input": "{{sample.output_text}}", "reference": "y"}}});
        let Set(settings) = judged(graders.as_object().unwrap()) else { panic!() };
        let patterns: Vec<&toml::Value> =
            settings.iter().filter(|(key, _)| key.ends_with("regex_pattern")).map(|(_, pattern)| pattern).collect();
        assert_eq!(patterns, [&toml::Value::from("^y$")]);
    }
}
