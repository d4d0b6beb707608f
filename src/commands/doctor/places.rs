//! The folders that runs read and write.

use std::path::PathBuf;

use super::{Section, size};
use crate::data::cache::CacheSettings;
use crate::hub::HubSettings;
use crate::telemetry::free_disk_bytes;

/// With less space, a model or a few checkpoints do not fit.
const LITTLE_DISK_BYTES: u64 = 2 << 30;

/// A folder, and the setting that moves it.
struct Place {
    name: &'static str,
    folder: PathBuf,
    moved_by: &'static str,
}

/// Checks the caches, the temporary folder and the working directory.
pub(super) fn look() -> Section {
    let mut places = vec![Place {
        name: "model_cache",
        folder: HubSettings::from_env().cache,
        moved_by: "HF_HOME names another folder",
    }];
    if let Some(folder) = CacheSettings::from_env().folder {
        places.push(Place { name: "token_cache", folder, moved_by: "LORA_TRAIN_CACHE names another folder" });
    }
    places.push(Place {
        name: "temporary_files",
        folder: std::env::temp_dir(),
        moved_by: "TMPDIR names another folder",
    });
    places.push(Place {
        name: "working_folder",
        folder: std::env::current_dir().unwrap_or_else(|_| ".".into()),
        moved_by: "`output_dir` takes runs elsewhere",
    });
    let mut section = Section::new("places");
    for place in places {
        examine(&place, &mut section);
    }
    section
}

fn examine(Place { name, folder, moved_by }: &Place, section: &mut Section) {
    // A cache that does not exist yet is created when needed.
    let Some(there) = folder.ancestors().find(|folder| folder.is_dir()) else {
        return section.problem(format!("{}: there is no such folder, nor one above it", folder.display()), *moved_by);
    };
    let free = free_disk_bytes(there);
    let free_text = free.map_or(String::new(), |bytes| format!(", {} free", size(bytes)));
    let value = serde_json::json!({ "path": folder.to_string_lossy(), "free_bytes": free });
    section.figure(name, value, format!("{}{free_text}", folder.display()));
    if let Err(error) = tempfile::tempfile_in(there) {
        section.problem(format!("{}: cannot be written ({error})", folder.display()), *moved_by);
    } else if let Some(bytes) = free.filter(|bytes| *bytes < LITTLE_DISK_BYTES) {
        section.problem(format!("{}: only {} are free", folder.display(), size(bytes)), *moved_by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_yet_is_judged_by_the_one_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut section = Section::new("places");
        let place = |folder: PathBuf| Place { name: "model_cache", folder, moved_by: "HF_HOME" };
        examine(&place(folder.path().join("a/b")), &mut section);
        assert_eq!(section.facts.len(), 1);
        assert!(section.problems.is_empty() || section.problems[0].problem.contains("are free"));
        assert!(section.facts[0].value["path"].as_str().unwrap().ends_with("a/b"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_cannot_be_written_is_a_problem_with_what_moves_it() {
        let mut section = Section::new("places");
        examine(&Place { name: "model_cache", folder: "/proc/1".into(), moved_by: "HF_HOME" }, &mut section);
        assert!(section.problems[0].problem.starts_with("/proc/1: cannot be written"), "{section:?}");
        assert_eq!(section.problems[0].remedy, "HF_HOME");
    }
}
