//! Which modules may import which: a file uses only modules below its own, so that a change has one place.

use std::fs;
use std::path::{Path, PathBuf};

/// From top to bottom, as in `src/lib.rs`.
const LAYERS: [&str; 30] = [
    "cli",
    "commands",
    "run",
    "recipe",
    "report",
    "train",
    "generate",
    "checkpoint",
    "export",
    "model",
    "lora",
    "ops",
    "data",
    "diagnosis",
    "metrics",
    "telemetry",
    "figures",
    "config",
    "spec",
    "device",
    "hub",
    "failure",
    "panics",
    "faults",
    "files",
    "gguf",
    "text",
    "stats",
    "allocator",
    "schema",
];

fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The crate modules named in a file's code, without its unit tests.
fn used_modules(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let uses = lines.flat_map(|line| line.split("crate::").skip(1));
    uses.map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(rest)).collect()
}

#[test]
fn a_file_uses_only_modules_below_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    assert!(files.len() > 30, "found only {} files", files.len());
    let layer = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let mut wrong = Vec::new();
    for file in files {
        let path = file.strip_prefix(&root).unwrap();
        let first = path.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        let Some(own) = layer(first) else {
            assert!(["lib", "main"].contains(&first), "{} is in no layer", path.display());
            continue;
        };
        for used in used_modules(&fs::read_to_string(&file).unwrap()) {
            match layer(used) {
                Some(other) if other < own => wrong.push(format!("{} uses crate::{used}", path.display())),
                Some(_) => {}
                None => wrong.push(format!("{} uses crate::{used}, which is in no layer", path.display())),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_the_device_module_asks_for_a_backend_feature() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    for file in files {
        let path = file.strip_prefix(&root).unwrap().to_owned();
        let text = fs::read_to_string(&file).unwrap();
        for backend in ["cuda", "vulkan", "metal", "rocm"] {
            let asks = text.contains(&format!("feature = \"{backend}\""));
            assert!(!asks || path.starts_with("device") || path == Path::new("device.rs"), "{}", path.display());
        }
    }
}
