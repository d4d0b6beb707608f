//! Differences between a checkpoint's recipe and the recipe that continues it.

use std::fmt;
use std::path::Path;

use toml::{Table, Value};

use crate::config::ObjectiveName;
use crate::recipe::Recipe;
use crate::schema::{Choice, Effect, Keys, rows_to};

/// A recipe key whose value has changed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    /// `train.max_steps`, `data.train[0].path`.
    pub(super) key: String,
    /// Its value in the checkpoint's recipe, as TOML; `none` where it is absent.
    pub(super) before: String,
    /// Its value now.
    pub(super) after: String,
    /// Effect of the change on training.
    pub(super) effect: Effect,
}

/// Effect of changing a key. For a key that no longer exists it is unknown, so later steps may differ.
fn effect_of(key: &str) -> Effect {
    rows_to(Recipe::ROWS, key).iter().rev().find_map(|row| row.effect).unwrap_or(Effect::LaterSteps)
}

impl Change {
    /// Its effect; a head that scores belongs to the adapter.
    pub(super) fn effect_on_adapter(&self) -> Effect {
        let scores = |value: &str| value.trim_matches('"') == ObjectiveName::Reward.word();
        if self.key == "objective.name" && scores(&self.before) != scores(&self.after) {
            return Effect::OtherAdapter;
        }
        self.effect
    }

    /// Whether a finished run may have steps left after this change.
    pub(super) fn may_add_steps(&self) -> bool {
        rows_to(Recipe::ROWS, &self.key).iter().any(|row| row.adds_steps)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.key, self.before, self.after)
    }
}

/// Keys whose values differ between two recipes with every default filled in, except the output folder. Paths of the earlier
/// one start at `started`.
pub(super) fn changes(earlier: &str, started: &Path, now: &str) -> Vec<Change> {
    let (Ok(earlier), Ok(now)) = (earlier.parse::<Table>(), now.parse::<Table>()) else { return Vec::new() };
    let (mut before, mut after) = (Vec::new(), Vec::new());
    flatten("", &Value::Table(earlier), &mut before);
    flatten("", &Value::Table(now), &mut after);
    let value_of = |entries: &[(String, String)], key: &str| {
        entries.iter().find(|(other, _)| other == key).map_or_else(|| "none".to_owned(), |(_, value)| value.clone())
    };
    let mut keys: Vec<&String> = before.iter().chain(&after).map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    keys.into_iter()
        .filter(|key| *key != "output_dir")
        .map(|key| (key, value_of(&before, key), value_of(&after, key)))
        .filter(|(key, before, after)| before != after && !(is_path(key) && is_same_place(started, before, after)))
        .map(|(key, before, after)| Change { key: key.clone(), before, after, effect: effect_of(key) })
        .collect()
}

fn is_path(key: &str) -> bool {
    key.ends_with(".path") || ["data.chat_template", "data.image_folder"].contains(&key)
}

/// Whether two quoted paths name the same file or folder: the command may run from another directory than `started`, or that
/// may be gone.
fn is_same_place(started: &Path, before: &str, after: &str) -> bool {
    let [before, after] = [before, after].map(|quoted| Path::new(quoted.trim_matches('"')));
    let place = |path: &Path| path.canonicalize().ok();
    place(after).is_some_and(|after| [place(&started.join(before)), place(before)].contains(&Some(after)))
}

/// Lists every key with its value, such as `data.train[0].path`.
fn flatten(prefix: &str, value: &Value, entries: &mut Vec<(String, String)>) {
    match value {
        Value::Table(table) => {
            for (key, value) in table {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, entries);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_table) => {
            for (index, value) in values.iter().enumerate() {
                flatten(&format!("{prefix}[{index}]"), value, entries);
            }
        }
        value => entries.push((prefix.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_added_and_removed_keys_are_named_with_both_values() {
        let earlier = "output_dir = \"a\"\nseed = 1\n[train]\nmax_steps = 2\n[[data.train]]\npath = \"a\"\n";
        let now =
            "output_dir = \"b\"\nseed = 1\n[train]\nmax_steps = 4\nnum_epochs = 1.0\n[[data.train]]\npath = \"b\"\n";
        let reported: Vec<String> = changes(earlier, Path::new(""), now).iter().map(ToString::to_string).collect();
        assert_eq!(
            reported,
            ["data.train[0].path: \"a\" -> \"b\"", "train.max_steps: 2 -> 4", "train.num_epochs: none -> 1.0"]
        );
        assert!(changes(now, Path::new(""), now).is_empty());
    }

    #[test]
    fn every_key_has_the_effect_that_it_has_on_a_run_under_way() {
        for (key, effect) in [
            ("train.max_steps", Effect::None),
            ("logging.tensorboard", Effect::None),
            ("eval.eval_steps", Effect::None),
            ("data.eval[1].path", Effect::None),
            ("optimizer.learning_rate", Effect::LaterSteps),
            ("lora.lora_dropout", Effect::LaterSteps),
            ("train.gradient_accumulation_steps", Effect::LaterSteps),
            ("train.precision", Effect::LaterSteps),
            ("data.eval_split", Effect::OtherRows),
            ("data.train[0].weight", Effect::OtherRows),
            ("seed", Effect::OtherRows),
            ("lora.r", Effect::OtherAdapter),
            ("lora.rank_pattern.q_proj", Effect::OtherAdapter),
            ("model.path", Effect::OtherAdapter),
        ] {
            assert_eq!(effect_of(key), effect, "{key}");
        }
        let may_add_steps = |now: &str| changes("", Path::new(""), now).iter().all(Change::may_add_steps);
        assert!(may_add_steps("[train]\nmax_steps = 2\n") && may_add_steps("[[data.train]]\npath = \"a\"\n"));
        assert!(!may_add_steps("[optimizer]\nlearning_rate = 1.0\n") && !may_add_steps("seed = 1\n"));
    }

    #[test]
    fn one_place_by_two_names_is_no_change() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("model")).unwrap();
        let recipe = |path: &str| format!("[model]\npath = \"{}/{path}\"\n", folder.path().display());
        let [model, other] = ["model", "other"].map(recipe);
        assert!(changes(&model, Path::new(""), &recipe("model/../model")).is_empty());
        assert!(changes("[model]\npath = \"model\"\n", folder.path(), &model).is_empty());
        assert_eq!(changes(&model, Path::new(""), &other).len(), 1);
    }
}
