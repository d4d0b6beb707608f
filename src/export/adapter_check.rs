//! Whether an adapter fits a model.

use std::collections::HashSet;
use std::path::Path;

use super::adapter_file::{SavedAdapter, WEIGHTS};
use super::{AdapterWeights, ExportError};
use crate::lora::targets::Selection;
use crate::spec::ModelConfig;

/// Checks that the adapter's layers are exactly those that its config targets in this model, with matching shapes and
/// ranks.
///
/// # Errors
/// Every matrix that is missing, unexpected or misshapen.
pub fn check_adapter(folder: &Path, adapter: &SavedAdapter, model: &ModelConfig) -> Result<(), ExportError> {
    let problems = match adapter.config.select(model.num_hidden_layers) {
        Ok(selection) => matrix_problems(&adapter.weights, &selection, model),
        Err(errors) => errors.iter().map(ToString::to_string).collect(),
    };
    if problems.is_empty() {
        return Ok(());
    }
    Err(ExportError::AdapterTensors { path: folder.join(WEIGHTS), expected_by: "the model", problems })
}

/// Every matrix that is missing, unexpected or misshapen, compared with what `selection` expects.
pub(super) fn matrix_problems(weights: &AdapterWeights, selection: &Selection, model: &ModelConfig) -> Vec<String> {
    let mut problems = Vec::new();
    let mut expected = HashSet::new();
    for (layer, linear, shape) in selection.iter() {
        let ([out_features, in_features], module) = (model.linear(linear), linear.module_name(layer));
        match weights.get(&module) {
            None => problems.push(format!("missing: `{module}.lora_A` and `.lora_B`")),
            Some(pair) => {
                let matrices = [("A", &pair.a, [shape.r, in_features]), ("B", &pair.b, [out_features, shape.r])];
                for (letter, matrix, wanted) in matrices {
                    if matrix.shape() != wanted {
                        let found = matrix.shape();
                        problems.push(format!("`{module}.lora_{letter}` is {found:?}, expected {wanted:?}"));
                    }
                }
            }
        }
        expected.insert(module);
    }
    let unexpected = weights.keys().filter(|module| !expected.contains(*module));
    problems.extend(unexpected.map(|module| format!("unexpected: `{module}.lora_A` and `.lora_B`")));
    problems
}

#[cfg(test)]
mod tests {
    use super::super::adapter_file::tests::adapter;
    use super::*;
    use crate::model::weights::fixture::tiny_config;

    #[test]
    fn an_adapter_fits_the_model_that_it_was_made_for() {
        check_adapter(Path::new("a"), &adapter(), &tiny_config()).unwrap();
    }

    #[test]
    fn an_adapter_for_another_model_lists_every_difference() {
        let mut adapter = adapter();
        let model = ModelConfig { intermediate_size: 200, ..tiny_config() };
        adapter.weights.remove("model.layers.1.self_attn.q_proj");
        let stray = adapter.weights["model.layers.0.self_attn.q_proj"].clone();
        adapter.weights.insert("model.layers.2.self_attn.q_proj".into(), stray);
        let error = check_adapter(Path::new("a"), &adapter, &model).unwrap_err().to_string();
        for part in [
            "layers.0.mlp.down_proj.lora_A` is [3, 176], expected [3, 200]",
            "layers.1.mlp.down_proj.lora_A` is [3, 176], expected [3, 200]",
            "missing: `model.layers.1.self_attn.q_proj.lora_A`",
            "unexpected: `model.layers.2.self_attn.q_proj.lora_A`",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        adapter.config.r = 4;
        let error = check_adapter(Path::new("a"), &adapter, &tiny_config()).unwrap_err().to_string();
        assert!(error.contains("q_proj.lora_B` is [64, 3], expected [64, 4]"), "{error}");
    }
}
