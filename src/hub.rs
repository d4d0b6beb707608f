//! Files of models and data sets from the Hugging Face Hub.
//!
//! `model.path` is a local folder or GGUF file, a Hub repository id, or a GGUF file there; [`resolve`] returns a local folder
//! or file for any. The files of a [`DatasetId`] are found by [`dataset_files`], those of a web address by
//! [`download_url`], those at the addresses that rows name by [`PublicFiles`]. Files of the Hub are kept in the cache that
//! all Hugging Face tools share, and the environment variables are theirs: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
//! `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. [`upload`] writes files to a repository.

use std::path::{Path, PathBuf};

use crate::schema::Problem;
use crate::util::gguf::only_gguf;

mod dataset;
mod download;
mod error;
#[cfg(test)]
pub(crate) mod fixture;
mod gguf;
mod greeting;
mod location;
mod progress;
mod public;
mod repository;
mod settings;
mod upload;
mod url;

pub use dataset::{DatasetId, DatasetLayout, dataset_files};
use download::ModelRequest;
pub use error::HubError;
pub use greeting::{Greeting, greet};
pub use location::Location;
pub use progress::Progress;
pub use public::PublicFiles;
use repository::{Repository, RepositoryKind};
pub use settings::{AccessToken, HubSettings};
pub use upload::{Content, Upload, check_target, upload};
pub use url::download_url;

/// Which files of a model are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Config, tokenizer and weights.
    Model,
    /// Only config and tokenizer, for weights drawn at random.
    WithoutWeights,
}

/// The local folder of a model, or its GGUF file: itself, or the Hub's files in the local cache. Files that are missing
/// there are downloaded. Of a GGUF file [`without weights`](Wanted::WithoutWeights) all is there but the numbers.
///
/// `revision` is a branch, tag or commit on the Hub, `main` where absent. Complete files are not downloaded again, so
/// an interrupted download continues with the file at which it stopped.
///
/// # Errors
/// A path that does not exist; a repository that does not exist, is gated or cannot be reached; a model that is not in
/// the cache while offline. If the Hub cannot be reached and the model is in the cache, the cache is used, and a note
/// says so.
pub fn resolve(
    path_or_id: &str,
    revision: Option<&str>,
    wanted: Wanted,
    settings: &HubSettings,
    progress: Progress,
) -> Result<PathBuf, HubError> {
    match Location::parse(path_or_id)? {
        Location::Folder(folder) => match revision {
            None => {
                refuse_adapter(&folder)?;
                Ok(only_gguf(&folder)?.unwrap_or(folder))
            }
            Some(revision) => {
                let message = format!("revision `{revision}` was given, but {} is a local folder", folder.display());
                Err(Problem::new(message).hint("leave `model.revision` out").into())
            }
        },
        Location::Repository { id, file } => {
            let revision = revision.unwrap_or("main");
            let repository = Repository { kind: RepositoryKind::Model, id: &id, revision, settings };
            let request = ModelRequest { repository, asked: path_or_id, file: file.as_deref(), wanted };
            if settings.offline { request.find() } else { request.download(progress) }
        }
    }
}

/// The local folder of an adapter in a repository of the Hub, with its files; `None` where the name is of no repository, or the
/// repository holds no adapter.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_adapter(
    name: &str,
    revision: Option<&str>,
    settings: &HubSettings,
    progress: Progress,
) -> Result<Option<PathBuf>, HubError> {
    let Ok(Location::Repository { id, file: None }) = Location::parse(name) else { return Ok(None) };
    if !id.contains('/') {
        return Ok(None);
    }
    let repository =
        Repository { kind: RepositoryKind::Model, id: &id, revision: revision.unwrap_or("main"), settings };
    ModelRequest { repository, asked: name, file: None, wanted: Wanted::Model }.adapter(progress)
}

/// A folder that holds an adapter, or a run with one, and no model.
fn refuse_adapter(folder: &Path) -> Result<(), Problem> {
    let has = |name: &&str| folder.join(name).is_file();
    let configs = ["adapter_config.json", "adapter/adapter_config.json"];
    let Some(config) = configs.iter().find(|name| has(name)).filter(|_| !has(&"config.json")) else { return Ok(()) };
    let json: Option<serde_json::Value> =
        std::fs::read(folder.join(config)).ok().and_then(|content| serde_json::from_slice(&content).ok());
    let base = json.as_ref().and_then(|json| json["base_model_name_or_path"].as_str()).filter(|base| !base.is_empty());
    let of = base.map_or_else(String::new, |base| format!(" of {base}"));
    let problem = Problem::new(format!("{}: an adapter{of}, not a model", folder.display()));
    let base = base.unwrap_or("the model that it was trained on");
    Err(problem.hint(format!("`model.path` is {base}, and this is `lora.start_from`")))
}

#[cfg(test)]
mod tests {
    use super::fixture::{Behaviour, COMMIT, Hub};
    use super::*;

    /// A repository with files that a model needs and files that it does not need.
    fn files() -> std::collections::BTreeMap<String, Vec<u8>> {
        let index =
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
        [
            ("config.json", "{}".as_bytes().to_vec()),
            ("generation_config.json", b"{}".to_vec()),
            ("tokenizer.json", b"{\"model\": 1}".to_vec()),
            ("tokenizer_config.json", b"{}".to_vec()),
            ("chat_template.jinja", b"{{ x }}".to_vec()),
            ("chat_template.json", b"{}".to_vec()),
            ("model.safetensors.index.json", index.as_bytes().to_vec()),
            ("model-00001-of-00002.safetensors", vec![7; 300_000]),
            ("model-00002-of-00002.safetensors", vec![9; 1_000]),
            ("pytorch_model.bin", vec![1; 10]),
            ("consolidated.safetensors", vec![1; 10]),
            ("model-q4.gguf", vec![1; 10]),
            ("onnx/model.onnx", vec![1; 10]),
            ("original/params.json", vec![1; 10]),
            ("README.md", b"# hello".to_vec()),
        ]
        .map(|(name, content)| (name.to_owned(), content))
        .into()
    }

    fn served() -> Behaviour {
        Behaviour { files: files(), ..Behaviour::default() }
    }

    struct Case {
        hub: Hub,
        settings: HubSettings,
        _cache: tempfile::TempDir,
    }

    fn case(behaviour: Behaviour) -> Case {
        let hub = Hub::start(behaviour);
        let cache = tempfile::tempdir().unwrap();
        let settings = HubSettings {
            endpoint: hub.endpoint.clone(),
            cache: cache.path().to_owned(),
            // Set, so that the client does not read the token of the user who runs this test.
            token: Some(AccessToken::new("hf_secret")),
            offline: false,
        };
        Case { hub, settings, _cache: cache }
    }

    impl Case {
        fn resolve(&self, revision: Option<&str>) -> Result<PathBuf, HubError> {
            self.resolve_id("org/model", revision)
        }

        fn resolve_id(&self, id: &str, revision: Option<&str>) -> Result<PathBuf, HubError> {
            let result = resolve(id, revision, Wanted::Model, &self.settings, Progress::Quiet);
            if let Err(error) = &result {
                assert!(!format!("{error} {error:?}").contains("hf_secret"), "{error:?}");
            }
            result
        }

        /// Finds the model without the network.
        fn find(&self, revision: Option<&str>) -> Result<PathBuf, HubError> {
            let offline = HubSettings { offline: true, ..self.settings.clone() };
            resolve("org/model", revision, Wanted::Model, &offline, Progress::Quiet)
        }
    }

    #[test]
    fn only_what_is_needed_is_downloaded_and_a_second_run_fetches_nothing() {
        let case = case(served());
        let folder = case.resolve(None).unwrap();
        assert_eq!(folder, case.settings.cache.join("models--org--model/snapshots").join(COMMIT));
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        assert_eq!(
            names,
            [
                "chat_template.jinja",
                "chat_template.json",
                "config.json",
                "generation_config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        assert_eq!(std::fs::read(folder.join("model-00001-of-00002.safetensors")).unwrap(), vec![7; 300_000]);
        let seen = case.hub.take_seen();
        let (elsewhere, here): (Vec<_>, Vec<_>) = seen.iter().partition(|seen| seen.path.starts_with("/cdn/"));
        assert!(here.iter().all(|seen| seen.token.as_deref() == Some("hf_secret")), "{here:?}");
        assert!(!elsewhere.is_empty() && elsewhere.iter().all(|seen| seen.token.is_none()), "{elsewhere:?}");

        assert_eq!(case.resolve(None).unwrap(), folder);
        let seen = case.hub.take_seen();
        assert!(seen.iter().all(|seen| seen.path.starts_with("/api/")), "{seen:?}");
        // The branch is recorded, so that Python's library finds the same files.
        let main = std::fs::read_to_string(case.settings.cache.join("models--org--model/refs/main")).unwrap();
        assert_eq!(main, COMMIT);
    }

    #[test]
    fn the_cache_serves_without_a_network_and_offline_asks_nobody() {
        let mut case = case(served());
        let folder = case.resolve(Some("v1")).unwrap();
        case.hub.take_seen();
        assert_eq!(case.find(Some("v1")).unwrap(), folder);
        assert_eq!(case.find(Some(COMMIT)).unwrap(), folder);
        let error = case.find(None).unwrap_err().to_string();
        assert!(error.contains("HF_HUB_OFFLINE") && error.contains("org/model at `main`"), "{error}");
        assert_eq!(case.hub.take_seen(), []);

        // No server listens on this port.
        case.settings.endpoint = "http://127.0.0.1:9".into();
        assert_eq!(case.resolve(Some("v1")).unwrap(), folder);
        let error = case.resolve(Some("main")).unwrap_err().to_string();
        assert!(error.contains("cannot reach http://127.0.0.1:9") && error.contains("is not in the cache"), "{error}");
    }

    #[test]
    #[cfg(unix)]
    fn a_cache_made_by_the_python_library_is_used_as_it_is() {
        let case = case(served());
        let folder = case.settings.cache.join("models--org--model");
        let snapshot = folder.join("snapshots").join(COMMIT);
        for made in [&snapshot, &folder.join("blobs"), &folder.join("refs")] {
            std::fs::create_dir_all(made).unwrap();
        }
        std::fs::write(folder.join("refs/main"), COMMIT).unwrap();
        for (name, content) in files().iter().filter(|(name, _)| !name.contains('/')) {
            std::fs::write(folder.join("blobs").join(format!("hash-of-{name}")), content).unwrap();
            std::os::unix::fs::symlink(format!("../../blobs/hash-of-{name}"), snapshot.join(name)).unwrap();
        }
        assert_eq!((case.find(None).unwrap(), case.resolve(None).unwrap()), (snapshot.clone(), snapshot));
        let seen = case.hub.take_seen();
        assert!(seen.iter().all(|seen| seen.path.starts_with("/api/")), "{seen:?}");
    }

    #[test]
    fn a_half_downloaded_model_is_named_offline_and_completed_online() {
        let case = case(served());
        let folder = case.resolve(None).unwrap();
        // One file is cut short, one removed, and one is a link to a file that no longer exists.
        let blob = |name: &str| std::fs::canonicalize(folder.join(name)).unwrap();
        std::fs::write(blob("model-00001-of-00002.safetensors"), [7; 100]).unwrap();
        std::fs::remove_file(folder.join("model-00002-of-00002.safetensors")).unwrap();
        std::fs::remove_file(blob("tokenizer.json")).unwrap();
        let error = case.find(None).unwrap_err().to_string();
        assert!(error.contains("half-downloaded") && error.contains("model-00002-of-00002.safetensors"), "{error}");

        case.hub.take_seen();
        case.resolve(None).unwrap();
        for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"] {
            assert_eq!(std::fs::read(folder.join(name)).unwrap(), files()[name]);
        }
        let fetched: Vec<String> =
            case.hub.take_seen().into_iter().filter(|seen| seen.method == "GET").map(|seen| seen.path).collect();
        // The content of the second shard was still in the cache, so it was linked and not downloaded.
        let is_needed = |path: &String| path.ends_with("/model-00001-of-00002.safetensors") || path.ends_with("r.json");
        assert!(fetched.iter().all(|path| path.starts_with("/api/") || is_needed(path)), "{fetched:?}");
    }

    #[test]
    fn a_connection_that_breaks_off_is_tried_again_and_a_wrong_body_never_stays() {
        let broken = "model-00001-of-00002.safetensors";
        let breaks_off = |times| Behaviour { breaks_off: Some((broken.into(), times)), ..served() };
        let folder = case(breaks_off(1)).resolve(None).unwrap();
        assert!(folder.ends_with(COMMIT));

        let case = case(breaks_off(usize::MAX));
        let error = case.resolve(None).unwrap_err();
        assert!(matches!(error, HubError::Network { .. }), "{error}");
        assert!(error.to_string().contains("the cache lacks"), "{error}");

        case.hub.change(|behaviour| {
            behaviour.breaks_off = None;
            behaviour.wrong_body = Some(broken.into());
        });
        let error = case.resolve(None).unwrap_err().to_string();
        assert!(error.contains("came as 36 bytes, expected 300000"), "{error}");
        let error = case.find(None).unwrap_err().to_string();
        assert!(error.contains(&format!("lacks {broken}")), "{error}");
        case.hub.change(|behaviour| behaviour.wrong_body = None);
        let folder = case.resolve(None).unwrap();
        assert_eq!(std::fs::read(folder.join(broken)).unwrap(), vec![7; 300_000]);
    }

    #[test]
    fn a_gated_repository_names_its_page_and_what_the_token_lacks() {
        let gated = |gate: &str| Behaviour { gated_by: Some(gate.into()), ..served() };
        case(gated("hf_secret")).resolve(None).unwrap();
        let case = case(gated("hf_other"));
        let error = case.resolve(None).unwrap_err().to_string();
        let page = format!("accept its licence at {}/org/model", case.settings.endpoint);
        assert!(error.contains("the token that was sent gives no access") && error.contains(&page), "{error}");
    }

    #[test]
    fn missing_repositories_revisions_and_models_are_told_apart() {
        let case = case(served());
        let error = case.resolve_id("org/nothing", None).unwrap_err().to_string();
        assert!(error.contains("org/nothing was not found at") && error.contains("private"), "{error}");
        let error = case.resolve(Some("no/such")).unwrap_err().to_string();
        assert!(error.contains("org/model has no revision `no/such`"), "{error}");

        case.hub.change(|behaviour| behaviour.files.retain(|name, _| !name.starts_with("model")));
        let error = case.resolve(None).unwrap_err().to_string();
        assert!(error.contains("no model.safetensors") && error.contains("pickle"), "{error}");
        let wanted = Wanted::WithoutWeights;
        let folder = resolve("org/model", None, wanted, &case.settings, Progress::Quiet).unwrap();
        assert!(folder.join("tokenizer.json").is_file());

        case.hub.change(|behaviour| {
            behaviour.files = [("adapter_config.json".to_owned(), b"{}".to_vec())].into();
        });
        let error = case.resolve(None).unwrap_err().to_string();
        assert!(error.contains("no config.json") && error.contains("this is an adapter"), "{error}");
    }

    #[test]
    fn a_repository_that_holds_an_adapter_alone_is_one_and_a_model_is_none() {
        let names =
            ["adapter_config.json", "adapter_model.safetensors", "prompt_form.json", "tokenizer.json", "loss.svg"];
        let files = names.map(|name| (name.to_owned(), name.as_bytes().to_vec()));
        let case = case(Behaviour { files: files.into(), ..Behaviour::default() });
        let adapter = |name: &str, settings: &HubSettings| resolve_adapter(name, None, settings, Progress::Quiet);
        let offline = HubSettings { offline: true, ..case.settings.clone() };
        assert_eq!(adapter("org/model", &offline).unwrap(), None);
        let folder = adapter("org/model", &case.settings).unwrap().unwrap();
        let found = |name: &&str| folder.join(name).is_file();
        assert_eq!(names.iter().filter(|name| found(name)).collect::<Vec<_>>(), names[..4].iter().collect::<Vec<_>>());
        assert_eq!(adapter("org/model", &offline).unwrap(), Some(folder.clone()));
        let gone = HubSettings { endpoint: "http://127.0.0.1:9".into(), ..case.settings.clone() };
        assert_eq!(adapter("org/model", &gone).unwrap(), Some(folder));
        assert!(adapter("org/nothing", &case.settings).unwrap_err().to_string().contains("was not found at"));
        assert_eq!(adapter("src", &case.settings).unwrap(), None);

        let case = super::tests::case(served());
        assert_eq!(adapter("org/model", &case.settings).unwrap(), None);
        case.resolve(None).unwrap();
        case.hub.take_seen();
        assert_eq!(adapter("org/model", &case.settings).unwrap(), None);
        assert_eq!(case.hub.take_seen(), []);
    }

    #[test]
    fn the_folder_of_an_adapter_is_no_model_and_names_the_one_that_it_belongs_to() {
        let folder = tempfile::tempdir().unwrap();
        let adapter = folder.path().join("adapter");
        std::fs::create_dir(&adapter).unwrap();
        std::fs::write(adapter.join("adapter_config.json"), r#"{"base_model_name_or_path": "org/base"}"#).unwrap();
        let case = case(Behaviour::default());
        for path in [folder.path(), &adapter] {
            let error = case.resolve_id(path.to_str().unwrap(), None).unwrap_err().to_string();
            assert!(
                error.contains(": an adapter of org/base, not a model\n  hint: `model.path` is org/base, and"),
                "{error}"
            );
        }
        std::fs::write(adapter.join("config.json"), "{}").unwrap();
        assert!(case.resolve_id(adapter.to_str().unwrap(), None).is_ok());
    }

    #[test]
    fn answers_of_a_server_in_trouble_are_passed_on() {
        let case = case(Behaviour { always: Some(418), ..Behaviour::default() });
        let error = case.resolve(None).unwrap_err();
        assert!(matches!(error, HubError::Failed(_)), "{error}");
        assert!(error.to_string().contains("answered 418: as told"), "{error}");
    }

    #[test]
    fn a_revision_of_a_local_folder_is_refused() {
        let case = case(Behaviour::default());
        assert_eq!(case.resolve_id("src", None).unwrap(), PathBuf::from("src"));
        let error = case.resolve_id("src", Some("main")).unwrap_err().to_string();
        assert!(error.contains("leave `model.revision` out"), "{error}");
    }
}
