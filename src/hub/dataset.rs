//! The files of a data set: downloads them into the cache, and finds them there without a network.
//!
//! Which files a configuration and a split have follows from the card and the names of the repository. A repository
//! without files that are read here, such as one of images or scripts, has been converted to Parquet by the Hub. What was
//! chosen is recorded beside the snapshots: without a network, neither names nor card are known.

use std::path::PathBuf;

use hf_hub::split_id;
use serde::{Deserialize, Serialize};

use super::location::is_repository_id;
use super::repository::{REQUEST_RETRIES, RemoteFile, Repository, RepositoryKind, is_below};
use super::{HubError, HubSettings, Progress};
use crate::schema::Problem;

mod layout;

pub use layout::DatasetLayout;

/// The branch with the Hub's own conversion to Parquet.
const CONVERSION: &str = "refs/convert/parquet";

/// A data set on the Hub, or some of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetId {
    id: String,
    revision: Option<String>,
    /// A file or a glob in the repository.
    files: Option<String>,
}

impl DatasetId {
    /// `owner/name`.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether it names files, so that there is no split to choose.
    #[must_use]
    pub fn names_files(&self) -> bool {
        self.files.is_some()
    }

    /// Reads `owner/name`, `hf://datasets/owner/name` with `@revision` and a file or glob behind it, or the address of a
    /// data set's page or file at `endpoint`.
    #[must_use]
    pub fn parse(path: &str, endpoint: &str) -> Option<Self> {
        let named = |id: &str, revision: Option<&str>, files: Option<&str>| {
            let owned = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
            is_repository_id(id).then(|| Self { id: id.to_owned(), revision: owned(revision), files: owned(files) })
        };
        let page = path.strip_prefix(endpoint).and_then(|rest| rest.strip_prefix("/datasets/"));
        let Some(rest) = path.strip_prefix("hf://datasets/").or(page) else {
            return (path.matches('/').count() == 1).then(|| named(path, None, None)).flatten();
        };
        let rest = rest.split(['?', '#']).next().unwrap_or(rest);
        let mut parts = rest.splitn(3, '/');
        let (owner, name, behind) = (parts.next()?, parts.next().unwrap_or_default(), parts.next());
        let (name, revision) = name.split_once('@').map_or((name, None), |(name, revision)| (name, Some(revision)));
        let id = format!("{owner}/{name}");
        match behind.filter(|_| page.is_some()).map(|behind| behind.splitn(3, '/').collect::<Vec<_>>()) {
            Some(words) => match words[..] {
                ["resolve" | "blob", revision, file] => named(&id, Some(revision), Some(file)),
                ["tree", revision] => named(&id, Some(revision), None),
                _ => named(&id, None, None),
            },
            None => named(id.trim_end_matches('/'), revision, behind),
        }
    }
}

/// The files of a data set's configuration `name` and `split`, in the local cache. Files that are missing there are
/// downloaded. `is_data` says which files are read, by their names.
///
/// # Errors
/// A data set that does not exist, is gated or cannot be reached; a configuration or a split that it does not have; a
/// configuration that has to be named; files that are not in the cache while offline.
pub fn dataset_files(
    dataset: &DatasetId,
    name: Option<&str>,
    split: &str,
    is_data: fn(&str) -> bool,
    settings: &HubSettings,
    progress: Progress,
) -> Result<Vec<PathBuf>, HubError> {
    let revision = dataset.revision.as_deref().unwrap_or("main");
    let repository = Repository { kind: RepositoryKind::Dataset, id: &dataset.id, revision, settings };
    let request = SplitRequest { repository, files: dataset.files.as_deref(), name, split, is_data };
    if settings.offline { request.find() } else { request.download(progress) }
}

struct SplitRequest<'a> {
    repository: Repository<'a>,
    files: Option<&'a str>,
    name: Option<&'a str>,
    split: &'a str,
    is_data: fn(&str) -> bool,
}

/// What was chosen of a data set.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    commit: String,
    files: Vec<RemoteFile>,
}

impl SplitRequest<'_> {
    /// The files in the cache; does not use the network.
    fn find(&self) -> Result<Vec<PathBuf>, HubError> {
        let Repository { id, settings, .. } = self.repository;
        self.recorded().ok_or_else(|| {
            let cache = settings.cache.display();
            let message = format!("HF_HUB_OFFLINE is set, and split `{}` of {id} is not in {cache}", self.split);
            Problem::new(message)
                .hint("run once with the network on; there is no such file or folder here either")
                .into()
        })
    }

    /// Downloads the missing files; if the Hub cannot be reached, takes those in the cache.
    fn download(&self, progress: Progress) -> Result<Vec<PathBuf>, HubError> {
        let id = self.repository.id;
        let (endpoint, reason) = match self.download_missing(progress) {
            Err(HubError::Network { endpoint, reason, .. }) => (endpoint, reason),
            other => return other,
        };
        let Some(files) = self.recorded() else {
            let cached = format!("split `{}` of {id} is not in the cache as a whole", self.split);
            return Err(HubError::Network { endpoint, reason, cached });
        };
        progress.note(&format!("cannot reach {endpoint} ({reason}); using {id} from the cache"));
        Ok(files)
    }

    fn download_missing(&self, progress: Progress) -> Result<Vec<PathBuf>, HubError> {
        let explain = |error| self.repository.explain(error);
        let client = self.repository.settings.client(REQUEST_RETRIES).map_err(explain)?;
        let (owner, name) = split_id(self.repository.id);
        let client = client.dataset(owner, name);
        let list = |revision: &str| {
            let info = client.info().revision(revision).send().map_err(explain)?;
            let commit = self.repository.checked_commit(info.sha)?;
            let entries = client.list_tree().revision(&*commit).recursive(true).send().map_err(explain)?;
            let mut files = RemoteFile::list(&entries);
            files.retain(|file| (self.is_data)(&file.name) && is_below(&file.name));
            Ok::<_, HubError>((commit, info.card_data.unwrap_or_default(), files))
        };
        let (mut repository, (mut commit, card, mut files)) = (self.repository, list(self.repository.revision)?);
        let names = |files: &[RemoteFile]| files.iter().map(|file| file.name.clone()).collect::<Vec<_>>();
        let chosen = if let Some(pattern) = self.files {
            layout::matching(repository.id, pattern, &names(&files))?
        } else {
            let layout = if files.is_empty() {
                repository = Repository { revision: CONVERSION, ..repository };
                (commit, _, files) = list(CONVERSION).map_err(|error| self.nothing_to_read(error))?;
                DatasetLayout::of_conversion(&names(&files))
            } else {
                DatasetLayout::of_card(&card, &names(&files)).unwrap_or_else(|| DatasetLayout::of_names(&names(&files)))
            };
            layout.files(repository.id, self.name, self.split)?
        };
        files.retain(|file| chosen.contains(&file.name));
        files.sort_by(|one, other| one.name.cmp(&other.name));
        repository.download(&client, &files, &commit, progress)?;
        repository.write_ref(&commit)?;
        let snapshot = repository.snapshot(&commit);
        let paths = files.iter().map(|file| snapshot.join(&file.name)).collect();
        repository.record(&self.choice(), &Record { commit, files })?;
        Ok(paths)
    }

    /// The error for a repository whose files are not read and that the Hub has not converted.
    fn nothing_to_read(&self, error: HubError) -> HubError {
        if !matches!(error, HubError::Input(_)) {
            return error;
        }
        let id = self.repository.id;
        Problem::new(format!("{id} has no data files that are read here, and no `{CONVERSION}` made by the Hub")).into()
    }

    fn choice(&self) -> (&str, Option<&str>, Option<&str>, &str) {
        (self.repository.revision, self.files, self.name, self.split)
    }

    /// The files of this choice, if all of them are in the cache.
    fn recorded(&self) -> Option<Vec<PathBuf>> {
        let record: Record = self.repository.recorded(&self.choice())?;
        let snapshot = self.repository.snapshot(&record.commit);
        let is_whole = record.files.iter().all(|file| is_below(&file.name) && file.is_in(&snapshot));
        is_whole.then(|| record.files.iter().map(|file| snapshot.join(&file.name)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::hub::AccessToken;
    use crate::hub::fixture::{Behaviour, CONVERTED, Hub};

    fn files(names: &[&str]) -> BTreeMap<String, Vec<u8>> {
        names.iter().map(|name| ((*name).to_owned(), format!("rows of {name}").into_bytes())).collect()
    }

    fn settings(hub: &Hub, cache: &Path) -> HubSettings {
        let token = Some(AccessToken::new("hf_secret"));
        HubSettings { endpoint: hub.endpoint.clone(), cache: cache.to_owned(), token, offline: false }
    }

    fn read(path: &str, name: Option<&str>, split: &str, settings: &HubSettings) -> Result<Vec<String>, String> {
        let dataset = DatasetId::parse(path, &settings.endpoint).unwrap();
        let is_data = |name: &str| name.ends_with(".jsonl") || name.ends_with(".parquet");
        let paths = dataset_files(&dataset, name, split, is_data, settings, Progress::Quiet);
        let paths = paths.map_err(|error| error.to_string())?;
        Ok(paths.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect())
    }

    #[test]
    fn a_data_set_is_named_by_its_id_its_uri_or_its_page() {
        let parse = |path: &str| {
            let found = DatasetId::parse(path, "https://hub")?;
            Some((found.id, found.revision.unwrap_or_default(), found.files.unwrap_or_default()))
        };
        let cases = [
            ("openai/gsm8k", ("openai/gsm8k", "", "")),
            ("hf://datasets/openai/gsm8k", ("openai/gsm8k", "", "")),
            ("hf://datasets/a/b@v1/data/*.csv", ("a/b", "v1", "data/*.csv")),
            ("hf://datasets/squad", ("squad", "", "")),
            ("https://hub/datasets/a/b", ("a/b", "", "")),
            ("https://hub/datasets/a/b/viewer?x=1", ("a/b", "", "")),
            ("https://hub/datasets/a/b/resolve/main/x/y.csv?download=true", ("a/b", "main", "x/y.csv")),
            ("https://hub/datasets/a/b/tree/v2", ("a/b", "v2", "")),
        ];
        for (path, (id, revision, files)) in cases {
            assert_eq!(parse(path), Some((id.into(), revision.into(), files.into())), "{path}");
        }
        for path in ["rows", "a/b/c", "https://elsewhere/datasets/a/b", "hf://models/a/b", "a b/c", "data/*.csv"] {
            assert_eq!(parse(path), None, "{path}");
        }
    }

    #[test]
    fn the_files_of_a_split_are_downloaded_once_and_found_without_a_network() {
        let names = [
            "main/train-00000-of-00002.parquet",
            "main/train-00001-of-00002.parquet",
            "main/test.parquet",
            "x/train.jsonl",
        ];
        let hub = Hub::start(Behaviour { files: files(&names), ..Behaviour::default() });
        let cache = tempfile::tempdir().unwrap();
        let mut settings = settings(&hub, cache.path());
        let expected = [format!("rows of {}", names[0]), format!("rows of {}", names[1])];
        assert_eq!(read("org/set", Some("main"), "train", &settings).unwrap(), expected);
        let seen: Vec<String> = hub.take_seen().into_iter().map(|seen| seen.path).collect();
        assert!(!seen.iter().any(|path| path.contains("resolve") && !path.contains("/main/train-")), "{seen:?}");
        assert_eq!(read("org/set", Some("main"), "train", &settings).unwrap(), expected);
        assert!(hub.take_seen().iter().all(|seen| seen.path.starts_with("/api/")));
        assert_eq!(
            read("hf://datasets/org/set@v1/x/*.jsonl", None, "train", &settings).unwrap(),
            ["rows of x/train.jsonl"]
        );

        let error = read("org/set", None, "train", &settings).unwrap_err();
        assert!(error.contains("org/set has several configurations: `main`, `x`"), "{error}");
        let error = read("hf://datasets/org/set/y.csv", None, "train", &settings).unwrap_err();
        assert!(error.contains("org/set has no data file `y.csv`; it has `main/test.parquet`"), "{error}");
        let error = read("org/nothing", None, "train", &settings).unwrap_err();
        assert!(error.contains("org/nothing was not found") && error.contains("no such file or folder in"), "{error}");

        settings.endpoint = "http://127.0.0.1:9".into();
        assert_eq!(read("org/set", Some("main"), "train", &settings).unwrap(), expected, "nobody listens there");
        settings.offline = true;
        assert_eq!(read("org/set", Some("main"), "train", &settings).unwrap(), expected);
        let error = read("org/set", Some("main"), "test", &settings).unwrap_err();
        assert!(error.contains("HF_HUB_OFFLINE is set, and split `test` of org/set is not in"), "{error}");
        let blob = std::fs::canonicalize(cache.path().join("datasets--org--set/snapshots"));
        let shard = blob.unwrap().join(crate::hub::fixture::COMMIT).join(names[1]);
        std::fs::remove_file(std::fs::canonicalize(shard).unwrap()).unwrap();
        assert!(read("org/set", Some("main"), "train", &settings).is_err(), "half of it is gone");
    }

    #[test]
    fn the_card_comes_before_the_names_and_the_conversion_after_both() {
        let card = json!({"configs": [{"config_name": "c", "data_files": [{"split": "train", "path": "b.jsonl"}]}]});
        let hub = Hub::start(Behaviour { files: files(&["a.jsonl", "b.jsonl"]), card, ..Behaviour::default() });
        let cache = tempfile::tempdir().unwrap();
        let settings = settings(&hub, cache.path());
        assert_eq!(read("org/set", None, "train", &settings).unwrap(), ["rows of b.jsonl"]);

        hub.change(|behaviour| behaviour.files = files(&["loader.py", "images.zip"]));
        let error = read("org/set", None, "train", &settings).unwrap_err();
        assert!(
            error.contains("org/set has no data files that are read here, and no `refs/convert/parquet`"),
            "{error}"
        );
        hub.change(|behaviour| behaviour.converted = files(&["default/train/0000.parquet"]));
        assert_eq!(read("org/set", None, "train", &settings).unwrap(), ["rows of default/train/0000.parquet"]);
        let refs = cache.path().join("datasets--org--set/refs/refs/convert/parquet");
        assert_eq!(std::fs::read_to_string(refs).unwrap(), CONVERTED);
    }

    #[test]
    fn a_gated_data_set_names_its_page() {
        let hub = Hub::start(Behaviour {
            files: files(&["train.jsonl"]),
            gated_by: Some("hf_other".into()),
            ..Behaviour::default()
        });
        let cache = tempfile::tempdir().unwrap();
        let error = read("org/set", None, "train", &settings(&hub, cache.path())).unwrap_err();
        let page = format!("accept its licence at {}/datasets/org/set, then", hub.endpoint);
        assert!(error.contains("org/set is gated") && error.contains(&page), "{error}");
    }
}
