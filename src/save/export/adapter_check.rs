//! Whether an adapter fits a model.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use super::adapter_config;
use super::adapter_file::{HEAD, SavedAdapter, TOKENS, module_of_weight};
use super::experts::apart::with_modules;
use super::experts::is_of_all;
use super::{AdapterWeights, ExportError, HostMatrix};
use crate::config::{LoraConfig, is_of_tower};
use crate::lora::targets::{AdapterShape, Selection};
use crate::lora::{FullTensor, Matrices};
use crate::schema::Problem;
use crate::spec::ModelConfig;

/// Number of mismatched matrices that an error lists.
const MAX_PROBLEMS: usize = 8;

const TOWER: &str = "it adapts vision tower or projector too, which stay as they are here: `merge_and_unload` of PEFT makes a model of \
                     it, which can be named instead";

/// Checks that the layers of the adapter, read from `folder`, are exactly those that its config targets in this model,
/// with matching shapes and ranks; returns these layers.
///
/// # Errors
/// Matrices that are missing, unexpected or misshapen; the first ones are listed, the others counted.
pub fn check_adapter(folder: &Path, adapter: &SavedAdapter, model: &ModelConfig) -> Result<Selection, ExportError> {
    let selection = adapter.config.known_in(model).select(model);
    let mut problems = match &selection {
        Ok(selection) => matrix_problems(&adapter.weights, selection, model),
        Err(errors) => errors.iter().map(ToString::to_string).collect(),
    };
    match selection {
        Ok(selection) if problems.is_empty() => Ok(selection),
        _ => {
            // For another model's adapter every matrix mismatches: a few examples are enough.
            let others = problems.len().saturating_sub(MAX_PROBLEMS);
            problems.truncate(MAX_PROBLEMS);
            problems.extend((others > 0).then(|| format!("and {others} more")));
            Err(ExportError::AdapterTensors { path: folder.to_owned(), expected_by: "this model", problems })
        }
    }
}

/// Checks that the config which is written for a section, read again, selects exactly what the section does, so that a finished
/// run's adapter is found complete. `scores`: with a head that scores.
///
/// # Errors
/// The first layers that it takes otherwise. A section that selects nothing is reported elsewhere.
pub fn check_written(lora: &LoraConfig, model: &ModelConfig, scores: bool) -> Result<(), Problem> {
    let Ok(selection) = lora.select(model) else { return Ok(()) };
    let none = || HostMatrix { num_rows: 0, num_columns: 0, values: Vec::new() };
    let pair = |num_rows| Matrices { a: HostMatrix { num_rows, ..none() }, b: none(), magnitude: None };
    let adapters = selection.adapted_modules(model).map(|(name, _, shape)| (name, pair(shape.r)));
    let full = selection.full.keys().copied().chain(scores.then_some(FullTensor::Score));
    let weights = AdapterWeights {
        adapters: adapters.collect(),
        full: full.map(|full| (full.name(), none())).collect(),
        is_tied: selection.full.contains_key(&FullTensor::Tied),
        experts: model.expert_form(),
        ..AdapterWeights::default()
    };
    let text = adapter_config::to_json(lora, &weights, "").to_string();
    let modules = weights.modules_in_file();
    let read = adapter_config::from_json("adapter_config.json", &text, modules.iter(), scores);
    let has_all = modules.iter().any(|module| is_of_all(module));
    let config = read.map(|read| {
        let SavedAdapter { config, weights, .. } =
            SavedAdapter { weights, config: read.config, base_model_name_or_path: None }.named_for(model);
        if has_all { with_modules(&config, &weights, model) } else { config }
    });
    let problems: Vec<String> = match config.map(|config| config.select(model)) {
        Err(problems) => vec![problems.to_string()],
        Ok(Err(errors)) => errors.iter().map(ToString::to_string).collect(),
        Ok(Ok(written)) => {
            // Of another rank the scale is the quotient of other numbers.
            #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
            let rounded = |shape: AdapterShape| AdapterShape { scale: f64::from(shape.scale as f32), ..shape };
            let shapes = |selection: &Selection| {
                let shapes = selection.iter();
                let shapes = shapes.map(|(layer, site, shape)| (model.module_name(layer, site), rounded(shape)));
                shapes.collect::<Vec<_>>()
            };
            let (ours, theirs) = (shapes(&selection), shapes(&written));
            let others = |these: &[(String, AdapterShape)], those: &[(String, AdapterShape)]| -> Vec<String> {
                these.iter().filter(|shape| !those.contains(shape)).map(|(name, _)| format!("`{name}`")).collect()
            };
            let modules = (written.full != selection.full).then(|| "`modules_to_save`".to_owned());
            others(&ours, &theirs).into_iter().chain(others(&theirs, &ours)).chain(modules).collect()
        }
    };
    let Some(first) = problems.first() else { return Ok(()) };
    let message = format!("adapter_config.json cannot say which layers these are: of {first} it says something else");
    Err(Problem::new(message)
        .hint("name layers by the ends of their names, such as `q_proj`, and `layers_to_transform`"))
}

/// Every matrix that is missing, unexpected or misshapen, compared with what `selection` expects.
pub(super) fn matrix_problems(weights: &AdapterWeights, selection: &Selection, model: &ModelConfig) -> Vec<String> {
    let mut problems = Vec::new();
    let mut expected = HashSet::new();
    for (module, weight, shape) in selection.adapted_modules(model) {
        let shapes = shape.kind.shapes(shape.r, weight);
        match weights.get(&module) {
            None => problems.push(format!("missing: `{module}.lora_A` and `.lora_B`")),
            Some(pair) => {
                let magnitude = Matrices::NAMES.magnitude.unwrap_or_default();
                match (&pair.magnitude, shapes.magnitude) {
                    (None, Some(_)) => problems.push(format!("missing: `{module}.{magnitude}`, of `use_dora`")),
                    (Some(_), None) => problems.push(format!("unexpected: `{module}.{magnitude}` without `use_dora`")),
                    _ => {}
                }
                for (name, (matrix, wanted)) in pair.as_ref().zip(shapes).named() {
                    if matrix.shape() != wanted {
                        let found = matrix.shape();
                        problems.push(format!("`{module}.{name}` is {found:?}, expected {wanted:?}"));
                    }
                }
            }
        }
        expected.insert(module);
    }
    let width = model.hidden_size;
    let score = weights.scores().then_some((FullTensor::Score, [1, width]));
    let mut others: BTreeSet<_> = weights.full.keys().map(String::as_str).collect();
    for (full, wanted) in score.into_iter().chain(selection.full.iter().map(|(&full, &shape)| (full, shape))) {
        let name = full.name();
        let (shown, key) =
            (module_of_weight(&name), if full.is_module() { "modules_to_save" } else { "trainable_token_indices" });
        problems.extend(match weights.full.get(&name).map(HostMatrix::shape) {
            Some(shape) if shape == wanted => None,
            Some(shape) => Some(format!("`{shown}` is {shape:?}, expected {wanted:?}")),
            None => Some(format!("missing: `{shown}`, of `{key}`")),
        });
        others.remove(&*name);
        if full == FullTensor::Tied && !weights.is_tied {
            let reason = "they are one in this model; PEFT trains them as one with `ensure_weight_tying`";
            problems.push(format!("embedding and head were trained apart: {reason}"));
        }
    }
    let table = [model.vocab_size, width];
    problems.extend(weights.beside.iter().filter_map(|(name, values)| match values.shape() {
        shape if shape != table => Some(format!("`{}` is {shape:?}, expected {table:?}", module_of_weight(name))),
        _ if name == HEAD && model.tie_word_embeddings => {
            Some("`lm_head` and the embedding differ, and they are one in this model".to_owned())
        }
        _ => None,
    }));
    problems.extend(others.into_iter().map(|name| match name {
        TOKENS => format!("unexpected: `{TOKENS}` without `trainable_token_indices`"),
        _ => format!("unexpected: `{}`, which no key names", module_of_weight(name)),
    }));
    let unexpected = || weights.keys().filter(|module| !expected.contains(*module));
    if unexpected().any(|module| is_of_tower(module)) {
        problems.insert(0, TOWER.to_owned());
    }
    problems.extend(unexpected().map(|module| format!("unexpected: `{module}.lora_A` and `.lora_B`")));
    problems
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::adapter_file::EMBEDDING;
    use super::super::adapter_file::tests::adapter;
    use super::*;
    use crate::config::TargetModules;
    use crate::model::weights::fixture::{tiny_config, tiny_with};

    #[test]
    fn an_adapter_fits_the_model_that_it_was_made_for() {
        let set = adapter().into_set(Path::new("a"), &tiny_config(), &Device::flex()).unwrap();
        assert_eq!(set.iter().count(), 4);
        // Of lists that are made for several models, PEFT takes what there is.
        let mut listed = adapter();
        listed.config.target_modules = TargetModules::Names(["down_proj", "q_proj", "w1"].map(str::to_owned).into());
        listed.config.rank_pattern = [("layers.9.down_proj".to_owned(), 7)].into_iter().collect();
        check_adapter(Path::new("a"), &listed, &tiny_config()).unwrap();
        // Also where they are very many, which are one when they are the same.
        let mut many = vec!["q_proj".to_owned(); 100_000];
        many.push("down_proj".to_owned());
        listed.config.target_modules = TargetModules::Names(many);
        check_adapter(Path::new("a"), &listed, &tiny_config()).unwrap();
        let others = (0..100_000).map(|index| format!("w{index}")).collect();
        listed.config.target_modules = TargetModules::Names(others);
        let many = check_adapter(Path::new("a"), &listed, &tiny_config()).unwrap_err().to_string();
        assert!(many.contains("`lora.target_modules` has 100000 entries, expected at most 4096"), "{many}");
        listed.config.target_modules = TargetModules::Names(vec!["w1".to_owned()]);
        let none = check_adapter(Path::new("a"), &listed, &tiny_config()).unwrap_err().to_string();
        assert!(none.contains("`w1` matches no linear layer"), "{none}");
    }

    #[test]
    fn an_adapter_for_another_model_lists_the_differences() {
        let error = |adapter: &SavedAdapter, model: &ModelConfig| {
            check_adapter(Path::new("a"), adapter, model).unwrap_err().to_string()
        };
        let mut adapter = adapter();
        let shallow = tiny_with(&[("num_hidden_layers", 1)]);
        let unexpected = "unexpected: `model.layers.1.mlp.down_proj.lora_A`";
        assert!(error(&adapter, &shallow).contains(unexpected), "{}", error(&adapter, &shallow));

        let model = tiny_with(&[("intermediate_size", 200)]);
        let tower = (
            "model.vision_tower.layers.0.q_proj".to_owned(),
            adapter.weights["model.layers.0.self_attn.q_proj"].clone(),
        );
        let mut seeing = adapter.clone();
        seeing.weights.extend([tower]);
        assert!(error(&seeing, &tiny_config()).contains("it adapts vision tower or projector too"));
        adapter.weights.remove("model.layers.1.self_attn.q_proj");
        let stray = adapter.weights["model.layers.0.self_attn.q_proj"].clone();
        for layer in 2..9 {
            adapter.weights.insert(format!("model.layers.{layer}.self_attn.q_proj"), stray.clone());
        }
        let text = error(&adapter, &model);
        for part in [
            "a: these tensors do not fit this model:\n",
            "layers.0.mlp.down_proj.lora_A` is [3, 176], expected [3, 200]",
            "layers.1.mlp.down_proj.lora_A` is [3, 176], expected [3, 200]",
            "missing: `model.layers.1.self_attn.q_proj.lora_A`",
            "unexpected: `model.layers.2.self_attn.q_proj.lora_A`",
            "\n  and 2 more",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        adapter.config.r = 4;
        let text = error(&adapter, &tiny_config());
        assert!(text.contains("q_proj.lora_B` is [64, 3], expected [64, 4]"), "{text}");
    }

    #[test]
    fn where_embedding_and_head_are_one_either_name_is_that_of_both() {
        let one = ModelConfig { tie_word_embeddings: true, ..tiny_config() };
        let table = |value: f32| HostMatrix {
            num_rows: one.vocab_size,
            num_columns: one.hidden_size,
            values: vec![value; one.vocab_size * one.hidden_size],
        };
        let of = |tables: &[(&str, f32)]| {
            let mut adapter = adapter();
            adapter.weights.beside = tables.iter().map(|(name, value)| ((*name).to_owned(), table(*value))).collect();
            let named = adapter.named_for(&one);
            check_adapter(Path::new("a"), &named, &one).map(|_| named.weights.beside)
        };
        let tied = [(EMBEDDING.to_owned(), table(3.0))].into();
        for tables in [&[(HEAD, 3.0)][..], &[(EMBEDDING, 3.0)], &[(HEAD, 3.0), (EMBEDDING, 3.0)]] {
            assert_eq!(of(tables).unwrap(), tied);
        }
        let error = of(&[(HEAD, 3.0), (EMBEDDING, 4.0)]).unwrap_err().to_string();
        assert!(error.contains("`lm_head` and the embedding differ, and they are one in this model"), "{error}");
    }
}
