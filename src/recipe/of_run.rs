//! The recipe in the folder of a run: where it lies, where its paths lead, and which programs it starts.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Purpose, Recipe, read_text};
use crate::schema::{Override, Problem, flattened};
use crate::util::text::quoted;

/// Facts about the process that trained.
pub(crate) const ENVIRONMENT_FILE: &str = "environment.json";
/// The recipe of the latest start as its user wrote it, with the changes of the command line in it.
pub(crate) const RECIPE_FILE: &str = "recipe.toml";
/// The same, every default filled in.
pub(crate) const RESOLVED_FILE: &str = "resolved.toml";

/// How `recipe.toml` began in earlier versions: its changes were comments.
const CHANGES_AS_COMMENTS: &str = "# --";

/// The run that a folder is, or whose checkpoint it is.
pub(crate) fn run_of(folder: &Path) -> Option<&Path> {
    let is_run = |folder: &&Path| [RESOLVED_FILE, ENVIRONMENT_FILE].iter().all(|name| folder.join(name).is_file());
    let above = folder.parent().filter(|parent| parent.ends_with("checkpoints")).and_then(Path::parent);
    [Some(folder), above].into_iter().flatten().filter(|_| folder.is_dir()).find(is_run)
}

/// Name, text and changes of the recipe of a run: they lead where they did in training, and to this folder.
pub(super) fn recipe_of(run: &Path) -> Result<(PathBuf, String, Vec<Override>), Problem> {
    let mut path = run.join(RECIPE_FILE);
    if fs::read_to_string(&path).is_ok_and(|text| text.starts_with(CHANGES_AS_COMMENTS)) || !path.is_file() {
        path = run.join(RESOLVED_FILE);
    }
    let text = read_text(&path)?;
    let mut changes = moved_paths(run, &text);
    changes.extend(run.to_str().map(|run| Override::argument("RUN", "output_dir", run)));
    Ok((path, text, changes))
}

/// The directory in which the run in `folder` was started.
pub(crate) fn started_in(folder: &Path) -> Option<PathBuf> {
    let json = fs::read(folder.join(ENVIRONMENT_FILE)).ok()?;
    let environment: serde_json::Value = serde_json::from_slice(&json).ok()?;
    environment["directory"].as_str().map(PathBuf::from)
}

/// Where a path of the run that a folder is or belongs to leads: relative ones start where the run was started; where it was
/// moved from there, usually at a folder above it. `None` where nothing is found.
pub(crate) fn path_of_run(folder: &Path, path: &str) -> Option<String> {
    let in_full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let matches = |path: &PathBuf| glob::glob(&path.to_string_lossy()).is_ok_and(|mut found| found.next().is_some());
    let started = in_full.ancestors().find_map(started_in).map(|folder| folder.join(path));
    let started = started.filter(|path| path.exists() || matches(path));
    // Above it, a pattern would match what the run wrote.
    let above = || in_full.ancestors().skip(1).map(|folder| folder.join(path)).find(|path| path.exists());
    started.or_else(above).map(|path| path.display().to_string())
}

/// The changes by which the paths of a run's recipe lead where they did in training.
pub(crate) fn moved_paths(folder: &Path, text: &str) -> Vec<Override> {
    let table: toml::Table = text.parse().unwrap_or_default();
    let is_path = |key: &str, value: &str| match key {
        "data.chat_template" => !["auto", "none"].contains(&value),
        "model.path" | "lora.start_from" | "data.image_folder" => true,
        _ => key.starts_with("data.") && key.ends_with("].path") || key.ends_with("].schema"),
    };
    let moved = flattened(&table).into_iter().filter_map(|(key, value)| {
        let path = value.as_str().filter(|value| is_path(&key, value))?;
        let (moved, place) = (path_of_run(folder, path)?, |path: &str| Path::new(path).canonicalize().ok());
        let is_elsewhere = place(path).is_none() || place(path) != place(&moved);
        is_elsewhere.then(|| Override::argument("RUN", &key, &moved))
    });
    moved.collect()
}

impl Recipe {
    /// Refuses to start a program that is named by a recipe which came in a folder: `text` is that recipe, before the
    /// user's own changes.
    ///
    /// # Errors
    /// A program of this recipe that is in that text.
    pub(crate) fn refuse_programs_of(&self, path: &Path, text: &str) -> Result<(), Problem> {
        let of_folder = Self::read(path, text, &[], Purpose::Benchmark).0;
        let theirs: Vec<Vec<String>> = of_folder.iter().flat_map(|recipe| recipe.objective.programs()).collect();
        let own = self.objective.programs();
        let Some(command) = own.iter().find(|command| theirs.contains(command)) else { return Ok(()) };
        // Whatever is in it, a terminal obeys none of it.
        let words = command.iter().map(|word| quoted(&word.escape_debug().to_string()));
        let message = format!(
            "{}: `[objective]` names a program, and the folder may be somebody else's: {}",
            path.display(),
            words.collect::<Vec<_>>().join(" ")
        );
        Err(Problem::new(message).hint("`--allow-command` starts it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_a_folder_names_is_refused_and_one_that_the_user_names_is_not() {
        let path = Path::new("resolved.toml");
        let text = |command: &str| {
            format!(
                "[model]\npath = \"m\"\n[objective]\nname = \"grpo\"\n[[objective.reward]]\nkind = \"command\"\n\
                 command = [{command}]\n"
            )
        };
        let refused = |text: &str, set: &[&str]| {
            let set: Vec<Override> = set.iter().map(|set| Override::set(*set)).collect();
            let recipe = Recipe::parse(path, text, &set, Purpose::Benchmark).unwrap();
            recipe.refuse_programs_of(path, text).map_err(|problem| problem.to_string())
        };
        let theirs = text("\"sh\", \"-c\", \"\\u001b[2J; rm\"");
        let error = refused(&theirs, &[]).unwrap_err();
        assert!(error.contains(r"sh -c '\u{1b}[2J; rm'") && error.contains("`--allow-command`"), "{error}");
        assert!(refused(&theirs, &["objective.reward.0.weight=2"]).is_err());
        assert!(refused(&theirs, &["objective.reward.1={kind=\"length\"}"]).is_err());
        refused(&theirs, &["objective.reward.0.command=[\"mine\"]"]).unwrap();
        refused(&theirs, &["objective.reward=[{kind=\"length\"}]"]).unwrap();
        // A file of functions is code that runs, as a program is.
        let python = theirs.replace("\"command\"", "\"python\"").replace("command = [", "functions = [\"f\"] # ");
        let python = format!("{python}file = \"theirs.py\"\n");
        for set in ["functions=[\"g\"]", "python=\"mine\"", "weight=2"] {
            assert!(refused(&python, &[&format!("objective.reward.0.{set}")]).is_err(), "{set}");
        }
        refused(&python, &["objective.reward.0.file=\"mine.py\""]).unwrap();
        let other = format!("{python}python = \"theirs\"\n");
        assert!(refused(&other, &["objective.reward.0.file=\"mine.py\""]).is_err());
        // In another form, and beside mistakes.
        let inline = "unknown = 1\n[model]\npath = \"m\"\n[objective]\nname = \"grpo\"\nreward = [{kind = \"command\", \
                      command = [\"x\"]}]\n";
        assert!(refused(&inline.replace("unknown = 1\n", ""), &[]).is_err());
        assert!(refused(inline, &["unknown="]).is_err());
    }

    #[test]
    fn the_recipe_of_a_run_leads_to_its_folder_and_to_what_it_was_trained_on() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("work/runs/x/checkpoints/step-000010")).unwrap();
        fs::create_dir(at("work/model")).unwrap();
        fs::write(at("work/rows.jsonl"), "").unwrap();
        let run = at("work/runs/x");
        assert_eq!(run_of(&run), None);
        let text = "[model]\npath = \"model\"\n[[data.train]]\npath = \"rows.jsonl\"\n";
        for (name, text) in [
            (RECIPE_FILE, text),
            (RESOLVED_FILE, "seed = 1"),
            (ENVIRONMENT_FILE, &*serde_json::json!({"directory": at("work")}).to_string()),
        ] {
            fs::write(run.join(name), text).unwrap();
        }
        for named in ["work/runs/x", "work/runs/x/checkpoints/step-000010"] {
            assert_eq!(run_of(&at(named)), Some(&*run));
        }
        let (path, text, changes) = recipe_of(&run).unwrap();
        let recipe = Recipe::parse(&path, &text, &changes, Purpose::Training).unwrap();
        assert_eq!(recipe.output_dir, run);
        let shown = |name: &str| at(name).display().to_string();
        assert_eq!([&recipe.model.path, &recipe.data.train[0].path], [&shown("work/model"), &shown("work/rows.jsonl")]);
        // An earlier version's, in which the changes are comments.
        fs::write(run.join(RECIPE_FILE), format!("# --set lora.r=4\n{text}")).unwrap();
        assert_eq!(recipe_of(&run).unwrap().0, run.join(RESOLVED_FILE));
    }
}
