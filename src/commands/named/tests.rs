use std::fs;

use super::*;
use crate::config::{Quantization, Residency};

/// A finished run, with a folder that PEFT wrote beside it. Only what names paths is read in them.
fn runs() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for adapter in ["runs/a/adapter", "runs/a/adapter-best", "runs/a/checkpoints/step-000010", "runs/b/adapter"] {
        fs::create_dir_all(folder.path().join(adapter)).unwrap();
        fs::write(folder.path().join(adapter).join("adapter_config.json"), "{}").unwrap();
    }
    fs::create_dir(folder.path().join("base")).unwrap();
    for run in ["a", "b"] {
        let recipe = "[model]\npath = \"base\"\nnew_key = 1\n[train]\nprecision = \"bf16\"\n";
        fs::write(folder.path().join("runs").join(run).join(RESOLVED_FILE), recipe).unwrap();
        fs::write(folder.path().join("runs").join(run).join(SUMMARY_FILE), "{}").unwrap();
    }
    folder
}

fn find(names: &[&Path], model: Option<&str>, adapter: &[&str]) -> Result<Named, String> {
    let names: Vec<String> = names.iter().map(|name| name.display().to_string()).collect();
    let adapter = adapter.iter().map(|&name| name.to_owned()).collect();
    let args = ModelArgs { model: model.map(str::to_owned), revision: None, adapter };
    let on_hub = |id: &str, _: Option<&str>| Ok((id == "me/mine").then(|| std::env::temp_dir().join("snapshot")));
    Named::find_with(&names, &args, &on_hub).map_err(|failure| failure.messages().join("\n"))
}

#[test]
fn a_run_names_its_adapter_and_its_base_from_wherever_it_is_called() {
    let folder = runs();
    let run = folder.path().join("runs/a");
    let base = folder.path().canonicalize().unwrap().join("base");
    for (named, adapter, name) in
        [("", "adapter", "a"), ("adapter", "adapter", "a"), ("adapter-best", "adapter-best", "a-adapter-best")]
    {
        let found = find(&[&run.join(named)], None, &[]).unwrap();
        assert_eq!((&found.base.path, found.base.dtype), (&base.display().to_string(), Some(Dtype::Bf16)));
        assert_eq!((found.adapters[0].folder.clone(), &found.adapters[0].name[..]), (run.join(adapter), name));
    }
    let checkpoint = run.join("checkpoints/step-000010");
    assert_eq!(NamedAdapter::new(checkpoint.to_str().unwrap()).name, "a-step-000010");
    let recipe = fs::read_to_string(run.join(RESOLVED_FILE)).unwrap();
    fs::write(run.join(RESOLVED_FILE), recipe.replace("\"base\"", "\"q4.gguf\"")).unwrap();
    fs::write(folder.path().join("q4.gguf"), "").unwrap();
    assert_eq!(find(&[&run], None, &[]).unwrap().base.path, base.with_file_name("q4.gguf").display().to_string());
}

#[test]
fn every_key_of_the_model_is_taken_over_from_the_run() {
    let folder = runs();
    let run = folder.path().join("runs/a");
    let named = find(&[&run], None, &[]).unwrap().base;
    // The recipe is read by the section's table. Random weights alone stay with the benchmark that made them.
    let keys = "quantization = \"nf4\"\ndouble_quantization = true\nresidency = \"host\"\ninit = \"random\"";
    let recipe = fs::read_to_string(run.join(RESOLVED_FILE)).unwrap();
    fs::write(run.join(RESOLVED_FILE), recipe.replace("new_key = 1", keys)).unwrap();
    let (quantization, residency) = (Quantization::Nf4, Residency::Host);
    let expected = ModelOptions { quantization, double_quantization: Some(true), residency, ..named };
    assert_eq!(find(&[&run], None, &[]).unwrap().base, expected);
    fs::write(run.join(RESOLVED_FILE), recipe.replace("new_key = 1", "quantization = \"nf9\"")).unwrap();
    let error = find(&[&run], None, &[]).unwrap_err();
    assert!(error.contains("resolved.toml: `model.quantization` = \"nf9\", expected one of"), "{error}");
}

#[test]
fn several_runs_share_a_base_and_have_names_of_their_own() {
    let folder = runs();
    let [a, b] = ["a", "b"].map(|run| folder.path().join("runs").join(run));
    let found = find(&[&a, &b], None, &[]).unwrap();
    assert_eq!(found.adapters.iter().map(|adapter| &adapter.name[..]).collect::<Vec<_>>(), ["a", "b"]);
    assert!(found.one_adapter().is_err());
    let error = find(&[&a, &a], None, &[]).unwrap_err();
    assert!(error.contains("two adapters are called `a`") && error.contains("--adapter a1="), "{error}");
    assert!(find(&[&a], None, &[&format!("again={}", a.display())]).is_ok());

    fs::write(b.join(RESOLVED_FILE), "[model]\npath = \"other\"\n[train]\nprecision = \"f32\"\n").unwrap();
    let error = find(&[&a, &b], None, &[]).unwrap_err();
    assert!(error.starts_with("two base models: ") && error.contains("other\n  hint: "), "{error}");
    assert_eq!(find(&[&a, &b], Some("mine"), &[]).unwrap().base.path, "mine");
}

#[test]
fn what_is_neither_run_nor_adapter_is_a_model() {
    let folder = runs();
    let found = find(&[Path::new("owner/name")], None, &["nowhere"]).unwrap();
    assert_eq!((&found.base.path[..], found.adapters[0].folder.as_path()), ("owner/name", Path::new("nowhere")));
    for (names, model, adapter) in [
        (&[Path::new("me/mine")][..], Some("base"), &[][..]),
        (&[], Some("base"), &["me/mine"][..]),
        (&[Path::new("base")], Some("me/mine"), &[]),
    ] {
        let found = find(names, model, adapter).unwrap();
        let [NamedAdapter { name, folder, .. }] = &found.adapters[..] else { panic!("{:?}", found.adapters) };
        assert_eq!((&found.base.path[..], &name[..], folder.ends_with("snapshot")), ("base", "mine", true));
    }
    let called = find(&[], Some("base"), &["other=me/mine"]).unwrap();
    assert_eq!(called.adapters[0].name, "other");
    let of_run = find(&[], Some(folder.path().join("runs/a").to_str().unwrap()), &[]).unwrap();
    assert_eq!((of_run.adapters.len(), of_run.base.path.ends_with("/base")), (1, true));
    assert!(find(&[Path::new("owner/name")], Some("other/name"), &[]).unwrap_err().starts_with("two base models"));
    assert!(find(&[], None, &[]).unwrap_err().starts_with("no model\n  hint: name a run"));
    let run = folder.path().join("runs/a");
    fs::remove_file(run.join(SUMMARY_FILE)).unwrap();
    fs::remove_dir_all(run.join("adapter")).unwrap();
    let error = find(&[&run], None, &[]).unwrap_err();
    assert!(error.contains("no adapter and no checkpoint yet\n  hint: "), "{error}");
    assert!(error.ends_with("adapter-best is that of its best evaluation so far: name it"), "{error}");
    fs::remove_dir_all(run.join("adapter-best")).unwrap();
    let error = find(&[&run], None, &[]).unwrap_err();
    assert!(error.contains("no adapter and no checkpoint yet\n  hint: `checkpoint.save_steps`"), "{error}");
}
