//! The output folder of a run.

use std::path::Path;

use super::findings::Findings;
use crate::run::dir::{RunDirError, has_checkpoints, nearest_existing};
use crate::schema::Problem;

/// Looks at `output_dir` without creating it.
pub(super) fn examine(output_dir: &Path, findings: &mut Findings) {
    let shown = output_dir.display();
    if output_dir.join("summary.json").exists() {
        return findings.error(&RunDirError::Finished { path: output_dir.to_owned() });
    }
    if has_checkpoints(output_dir) {
        findings.fact("output", format!("{shown} (an unfinished run, which `--resume` continues)"));
        return;
    }
    let existing = nearest_existing(output_dir);
    if !existing.is_dir() {
        let (path, file) = (output_dir.to_owned(), existing.to_owned());
        return findings.error(&RunDirError::NotAFolder { path, file });
    }
    let where_ = existing.display();
    // An unnamed file: it disappears when its handle is closed.
    match tempfile::tempfile_in(existing) {
        Ok(_) => findings.fact("output", format!("{shown}{}", if existing == output_dir { "" } else { " (new)" })),
        Err(error) => {
            findings.problem(Problem::new(format!("`output_dir` = {shown}: cannot write in {where_}: {error}")));
        }
    }
}
