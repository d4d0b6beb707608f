//! An adapter folder as the user names it, loaded onto a device for a model.

use std::path::{Path, PathBuf};

use burn::tensor::Device;

use super::adapter_file::CONFIG;
use super::{ExportError, SavedAdapter, adapter_set};
use crate::lora::AdapterSet;
use crate::lora::targets::Selection;
use crate::spec::ModelConfig;

/// Number of mismatched matrices that an error lists.
const MAX_PROBLEMS: usize = 8;

/// Where the adapter is: `folder` itself, such as a checkpoint, or `folder/adapter`, where `folder` is the `output_dir`
/// of a run. Where neither holds an adapter, returns `folder`, and [`read_adapter`](super::read_adapter) reports the
/// error.
#[must_use]
pub fn find_adapter(folder: &Path) -> PathBuf {
    let inner = folder.join("adapter");
    if !folder.join(CONFIG).is_file() && inner.join(CONFIG).is_file() { inner } else { folder.to_owned() }
}

impl SavedAdapter {
    /// Loads the adapter, read from `folder`, onto a device, for a model of this shape. Dropout is off.
    ///
    /// # Errors
    /// Matrices that do not fit the model; the first ones are listed, the others counted.
    pub fn into_set(self, folder: &Path, config: &ModelConfig, device: &Device) -> Result<AdapterSet, ExportError> {
        let misfit = |mut problems: Vec<String>| {
            // For another model's adapter every matrix mismatches: a few examples are enough.
            let others = problems.len().saturating_sub(MAX_PROBLEMS);
            problems.truncate(MAX_PROBLEMS);
            problems.extend((others > 0).then(|| format!("and {others} more")));
            ExportError::AdapterTensors { path: folder.to_owned(), expected_by: "this model", problems }
        };
        let selection: Selection = self
            .config
            .select(config.num_hidden_layers)
            .map_err(|errors| misfit(errors.iter().map(ToString::to_string).collect()))?;
        adapter_set(folder, self.weights, &selection, config, 0.0, device).map_err(|error| match error {
            ExportError::AdapterTensors { problems, .. } => misfit(problems),
            error => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::adapter_file::tests::adapter;
    use super::super::{read_adapter, write_adapter};
    use super::*;
    use crate::model::weights::fixture::tiny_config;

    #[test]
    fn a_run_a_checkpoint_and_an_adapter_folder_are_all_understood() {
        let folder = tempfile::tempdir().unwrap();
        let (run, checkpoint) = (folder.path().join("run"), folder.path().join("run/checkpoints/step-000010"));
        let adapter = adapter();
        for folder in [&run.join("adapter"), &checkpoint] {
            write_adapter(folder, &adapter.weights, &adapter.config, "org/base").unwrap();
        }
        assert_eq!(find_adapter(&run), run.join("adapter"));
        assert_eq!(find_adapter(&run.join("adapter")), run.join("adapter"));
        assert_eq!(find_adapter(&checkpoint), checkpoint);
        std::fs::remove_dir_all(run.join("adapter")).unwrap();
        let error = read_adapter(&find_adapter(&run)).unwrap_err().to_string();
        assert!(error.contains("has not finished; its checkpoints are in `checkpoints`"), "{error}");
    }

    #[test]
    fn an_adapter_of_another_model_is_refused_by_shape_and_by_layer() {
        let device = Device::flex();
        let fits = adapter().into_set(Path::new("a"), &tiny_config(), &device).unwrap();
        assert_eq!(fits.iter().count(), 4);
        let narrow = ModelConfig { intermediate_size: 88, ..tiny_config() };
        let error = adapter().into_set(Path::new("a"), &narrow, &device).unwrap_err().to_string();
        assert!(error.contains("a: these tensors do not fit this model"), "{error}");
        assert!(error.contains("`model.layers.0.mlp.down_proj.lora_A` is [3, 176], expected [3, 88]"), "{error}");
        let shallow = ModelConfig { num_hidden_layers: 1, ..tiny_config() };
        let error = adapter().into_set(Path::new("a"), &shallow, &device).unwrap_err().to_string();
        assert!(error.contains("unexpected: `model.layers.1.mlp.down_proj.lora_A`"), "{error}");
    }
}
