//! The files that a source of a recipe stands for: on this machine, in a data set of the Hub, at a web address.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::cache::CacheSettings;
use super::error::DataError;
use super::files::{self, FileKind, OpenOptions};
use super::rows::RowFile;
use crate::config::DataSource;
use crate::hub::{self, DatasetId, DatasetLayout, HubError, HubSettings};

/// The split that is read where a recipe names none.
const TRAIN: &str = "train";

/// The files of a source, sorted. What exists on this machine comes first. `key` is the key of its path.
///
/// # Errors
/// A path or pattern that matches no file; a data set, a configuration, a split or an address that is not there.
pub fn source_files(key: &str, source: &DataSource, options: &OpenOptions<'_>) -> Result<Vec<PathBuf>, DataError> {
    let path = source.path.as_str();
    let failed = |reason: String| {
        let reason = format!("\"{}\" {reason}", if is_address(path) { without_query(path) } else { path });
        DataError::Path { key: key.to_owned(), reason }
    };
    let settings = HubSettings::from_env();
    // What takes long to tokenise takes long to download, too.
    let settings = HubSettings { offline: settings.offline || options.refuse_large, ..settings };
    let of_hub = |error| match error {
        HubError::Input(_) if options.refuse_large => failed("is not here yet: `lora-train check` downloads it".into()),
        error => DataError::Hub { key: key.to_owned(), error },
    };
    let dataset = dataset_of(path, &settings);
    let is_folder = Path::new(path).is_dir();
    let named = source.split.as_ref().map(|_| "split").or(source.name.as_ref().map(|_| "name"));
    if let Some(named) = named.filter(|_| names_files(path, &settings)) {
        return Err(failed(format!("names files, so `{named}` has no meaning here")));
    }
    if let Some(dataset) = dataset {
        let (name, split) = (source.name.as_deref(), source.split.as_deref().unwrap_or(TRAIN));
        return hub::dataset_files(&dataset, name, split, is_data, &settings, options.progress).map_err(of_hub);
    }
    if is_folder && named.is_some() {
        return files_of_split(source).map_err(failed);
    }
    if !is_address(path) {
        return files::matching_files(key, path);
    }
    let (Some(folder), true) = (CacheSettings::from_env().downloads(), is_data(without_query(path))) else {
        return Err(failed(format!("is no file of data: {}", files::unsupported(Path::new(without_query(path))))));
    };
    hub::download_url(path, &folder, settings.offline, options.progress).map(|file| vec![file]).map_err(of_hub)
}

/// The first rows of the first file of a source, as far as they can be read.
#[must_use]
pub fn first_rows(source: &DataSource, count: usize) -> Vec<Value> {
    let files = source_files("data.train", source, &OpenOptions::default()).unwrap_or_default();
    files.first().map(|file| RowFile::first_rows(file, count)).unwrap_or_default()
}

/// The files of a split, in a folder that is laid out as a data set of the Hub.
fn files_of_split(source: &DataSource) -> Result<Vec<PathBuf>, String> {
    let folder = Path::new(&source.path);
    files::refuse_saved(folder)?;
    let pattern = format!("{}/**/*", glob::Pattern::escape(source.path.trim_end_matches('/')));
    let paths = glob::glob(&pattern).map_err(|error| error.to_string())?.flatten().filter(|path| path.is_file());
    let name = |path: PathBuf| path.strip_prefix(folder).ok().and_then(Path::to_str).map(str::to_owned);
    let names: Vec<String> = paths.filter_map(name).filter(|name| is_data(name)).collect();
    let split = source.split.as_deref().unwrap_or(TRAIN);
    let chosen = DatasetLayout::of_names(&names).files("the folder", source.name.as_deref(), split);
    let chosen = chosen.map_err(|problem| format!("cannot be read: {problem}"))?;
    Ok(chosen.iter().map(|name| folder.join(name)).collect())
}

/// The Hub's data set that a path names; `None` for files of this machine and web addresses.
#[must_use]
pub fn dataset_of(path: &str, settings: &HubSettings) -> Option<DatasetId> {
    DatasetId::parse(path, &settings.endpoint).filter(|_| !is_of_this_machine(path))
}

/// Whether a path names files, so that there is no split to choose.
pub(crate) fn names_files(path: &str, settings: &HubSettings) -> bool {
    !Path::new(path).is_dir() && dataset_of(path, settings).as_ref().is_none_or(DatasetId::names_files)
}

/// Whether a path is one of a file or folder, there or not, rather than the id of a data set.
fn is_of_this_machine(path: &str) -> bool {
    let first = Path::new(path).components().next();
    !path.contains("://")
        && (Path::new(path).exists()
            || is_data(path)
            || path.starts_with(['.', '~'])
            || first.is_some_and(|first| Path::new(&first).is_dir()))
}

fn is_data(name: &str) -> bool {
    FileKind::of(Path::new(name)).is_some()
}

fn is_address(path: &str) -> bool {
    path.starts_with("https://") || path.starts_with("http://")
}

fn without_query(address: &str) -> &str {
    address.split(['?', '#']).next().unwrap_or(address)
}
