//! Finds the files that hold the weights, and explains a folder that has no usable files.

use std::collections::BTreeMap;
use std::path::Path;

use crate::schema::Problem;

/// Maps tensor names to file names.
pub(super) fn read_index(path: &Path) -> Result<BTreeMap<String, String>, Problem> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let content = std::fs::read_to_string(path).map_err(|error| cannot_read(path, &error))?;
    let index: Index = serde_json::from_str(&content)
        .map_err(|error| Problem::new(format!("not an index: {error}")).at(path.display()))?;
    let has_folder = |file: &str| Path::new(file).file_name().is_none_or(|name| name != file);
    match index.weight_map.iter().find(|(_, file)| has_folder(file)) {
        Some((name, file)) => {
            let message = format!("`{name}` is in `{file}`, expected file names without folders");
            Err(Problem::new(message).at(path.display()))
        }
        None => Ok(index.weight_map),
    }
}

/// The likely reason why safetensors refuses a file.
pub(crate) fn damaged(path: &Path, content: &[u8], error: &safetensors::SafeTensorError) -> Problem {
    use safetensors::SafeTensorError::{HeaderTooSmall, InvalidHeaderLength, MetadataIncompleteBuffer};
    let problem = |reason: String| Problem::new(reason).at(path.display());
    if content.starts_with(b"version https://git-lfs") {
        problem("a Git LFS pointer, not the weights".to_owned()).hint("run `git lfs pull` in the model folder")
    } else if matches!(error, HeaderTooSmall | InvalidHeaderLength | MetadataIncompleteBuffer) {
        let reason = format!("its {} bytes are not what its header says ({error})", content.len());
        problem(reason).hint("half-downloaded? Delete the file and download it again")
    } else {
        problem(format!("not a safetensors file ({error})"))
    }
}

/// The problem of a file that the system does not let us read.
pub(super) fn cannot_read(path: &Path, error: &std::io::Error) -> Problem {
    Problem::new(format!("cannot read {}: {error}", path.display()))
}

/// What the folder holds instead of safetensors weights.
pub(super) fn no_weights_hint(folder: &Path) -> &'static str {
    let names: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let has = |test: &dyn Fn(&str) -> bool| names.iter().any(|name| test(name));
    if has(&|name| name == "adapter_model.safetensors") {
        "this is an adapter; the model is the folder or repository that it was trained on"
    } else if has(&|name| name.starts_with("consolidated") && name.ends_with(".safetensors")) {
        "`consolidated` files are Mistral's own format; use the Hugging Face files of the same repository"
    } else if has(&|name| name.ends_with(".gguf")) {
        "it holds several GGUF files; name the one to train on, as in model.path = \"FOLDER/FILE.gguf\""
    } else if has(&|name| name.ends_with(".bin") || name.ends_with(".pth")) {
        "PyTorch pickle files are not read; write safetensors with `model.save_pretrained(folder)` of transformers"
    } else if has(&|name| name.starts_with("model-") && name.ends_with(".safetensors")) {
        "shards are there, but not the index that names them: download model.safetensors.index.json too"
    } else {
        "for weights drawn at random, set `model.init` to \"random\""
    }
}
