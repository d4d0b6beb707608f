//! What differs between the recipe of a checkpoint and the one with which it is to be continued.

use std::fmt;
use std::path::Path;

use toml::{Table, Value};

/// A recipe key whose value has changed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    /// `train.max_steps`, `data.train[0].path`.
    pub(super) key: String,
    /// Its value in the checkpoint's recipe, as TOML; `none` where it has none.
    pub(super) before: String,
    /// Its value now.
    pub(super) after: String,
    /// What it does to training.
    pub(super) effect: Effect,
}

/// What a change does to a run that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// How long it trains, what it writes down, where it is computed: every step means the same as before.
    None,
    /// Later steps are taken in another way.
    LaterSteps,
    /// A place in the rows means another one: sound only between two epochs.
    OtherRows,
    /// The adapter of the checkpoint is not the one that the recipe describes: never sound.
    OtherAdapter,
}

/// Keys by their effect; an entry that ends with `.` or `[` stands for all that begin so. What is not here changes later
/// steps.
const EFFECTS: [(Effect, &[&str]); 3] = [
    (
        Effect::None,
        &[
            "checkpoint.",
            "cost.",
            "data.eval[",
            "data.num_workers",
            "data.prefetch_batches",
            "device.",
            "eval.",
            "logging.",
            // Of no meaning once the adapters are there.
            "lora.init_lora_weights",
            "train.gradient_checkpointing",
            "train.loss_chunk_tokens",
            "train.max_steps",
            "train.num_epochs",
            "watchdog.",
        ],
    ),
    (
        Effect::OtherRows,
        &[
            "data.chat_template",
            "data.eval_split",
            "data.max_length",
            "data.packing",
            "data.shuffle",
            "data.train[",
            "data.train_on_inputs",
            "seed",
            "train.micro_batch_size",
        ],
    ),
    (
        Effect::OtherAdapter,
        &[
            "lora.alpha_pattern.",
            "lora.layers_to_transform",
            "lora.lora_alpha",
            "lora.r",
            "lora.rank_pattern.",
            "lora.target_modules",
            "lora.use_dora",
            "lora.use_rslora",
            "model.init",
            "model.path",
            "model.quantization",
            "model.revision",
        ],
    ),
];

impl Effect {
    fn of(key: &str) -> Self {
        let is_meant = |entry: &str| {
            if entry.ends_with(['.', '[']) { key.starts_with(entry) } else { key == entry }
        };
        let found = EFFECTS.iter().find(|(_, entries)| entries.iter().any(|entry| is_meant(entry)));
        found.map_or(Self::LaterSteps, |(effect, _)| *effect)
    }
}

impl Change {
    /// Whether a run that has finished may have steps left with it.
    pub(super) fn may_add_steps(&self) -> bool {
        [
            "data.",
            "eval.",
            "train.gradient_accumulation_steps",
            "train.max_steps",
            "train.micro_batch_size",
            "train.num_epochs",
        ]
        .iter()
        .any(|start| self.key.starts_with(start))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.key, self.before, self.after)
    }
}

/// Keys whose value differs between two recipes with every default filled in, other than where the output goes.
pub(super) fn changes(earlier: &str, now: &str) -> Vec<Change> {
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
        .filter(|(key, before, after)| before != after && !(key.ends_with(".path") && is_same_place(before, after)))
        .map(|(key, before, after)| Change { key: key.clone(), before, after, effect: Effect::of(key) })
        .collect()
}

/// Whether two paths, in quotes, are of one file or folder: it may be called from another directory.
fn is_same_place(before: &str, after: &str) -> bool {
    let place = |quoted: &str| Path::new(quoted.trim_matches('"')).canonicalize().ok();
    place(before).is_some_and(|before| Some(before) == place(after))
}

/// Every key with its value, `data.train[0].path`.
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
        let told: Vec<String> = changes(earlier, now).iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            ["data.train[0].path: \"a\" -> \"b\"", "train.max_steps: 2 -> 4", "train.num_epochs: none -> 1.0"]
        );
        assert!(changes(now, now).is_empty());
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
            assert_eq!(Effect::of(key), effect, "{key}");
        }
        let may_add_steps = |now: &str| changes("", now).iter().all(Change::may_add_steps);
        assert!(may_add_steps("[train]\nmax_steps = 2\n") && may_add_steps("[[data.train]]\npath = \"a\"\n"));
        assert!(!may_add_steps("[optimizer]\nlearning_rate = 1.0\n") && !may_add_steps("seed = 1\n"));
    }

    #[test]
    fn one_place_by_two_names_is_no_change() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("model")).unwrap();
        let recipe = |path: &str| format!("[model]\npath = \"{}/{path}\"\n", folder.path().display());
        assert!(changes(&recipe("model"), &recipe("model/../model")).is_empty());
        assert_eq!(changes(&recipe("model"), &recipe("other")).len(), 1);
    }
}
