//! `lora-train demo`: the quickstart for who has no checkout. Writes a small model, its rows and a recipe into a folder, and
//! trains.

use std::fs;
use std::path::{Path, PathBuf};

use super::say;
use crate::recipe::RecipeArgs;
use crate::run::{self, TrainArgs};
use crate::schema::Problem;
use crate::util::failure::Failure;
use crate::util::text::quoted;

/// Files of the folder with what they hold.
macro_rules! quickstart {
    ($($file:literal),+) => {
        &[$(($file, include_bytes!(concat!("../../quickstart/", $file)))),+]
    };
}

const FILES: &[(&str, &[u8])] = quickstart![
    "README.md", "model/config.json", "model/generation_config.json", "model/model.safetensors",
    "model/tokenizer.json", "model/tokenizer_config.json", "train.jsonl", "eval.jsonl"
];

/// Trains from the root of a checkout.
const RECIPE: &str = include_str!("../../recipes/quickstart.toml");

/// Arguments of `lora-train demo`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// A new folder for the model, its rows, the recipe and the run
    #[arg(value_name = "FOLDER", default_value = "lora-train-demo")]
    pub(crate) folder: PathBuf,
}

/// Writes the folder, trains, and says what comes next.
pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let recipe = write(&args.folder)?;
    say(&format!(
        "{}: a model of 1.2 million parameters, 600 rows and recipe.toml, which `lora-train {}` trains:\n",
        args.folder.display(),
        quoted(&recipe.display().to_string())
    ));
    let recipe = RecipeArgs { recipe, set: Vec::new(), device: None };
    run::train(&TrainArgs { recipe, resume: None, overwrite: false, allow_command: false, tui: false, quiet: false })?;
    say("  your own  lora-train init --model MODEL --data rows.csv   # MODEL: a folder, or a name on the Hub");
    Ok(())
}

/// Writes everything into a new folder; returns the recipe's path.
fn write(folder: &Path) -> Result<PathBuf, Failure> {
    let shown = quoted(&folder.display().to_string());
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        let problem = Problem::new(format!("{shown} is there already, and has files in it"));
        return Err(problem.hint("give the name of a new folder: lora-train demo FOLDER").into());
    }
    let recipe = folder.join("recipe.toml");
    let text = recipe_in(folder);
    let files = FILES.iter().map(|(file, bytes)| (folder.join(file), *bytes));
    for (path, bytes) in files.chain([(recipe.clone(), text.as_bytes())]) {
        path.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&path, bytes))
            .map_err(|error| Failure::running(format!("cannot write {}: {error}", path.display())))?;
    }
    Ok(recipe)
}

/// The quickstart's recipe with its paths in this folder.
fn recipe_in(folder: &Path) -> String {
    let places = [("quickstart/model", "model"), ("quickstart/train.jsonl", "train.jsonl")];
    let places = places.into_iter().chain([("quickstart/eval.jsonl", "eval.jsonl"), ("runs/quickstart", "run")]);
    places.fold(RECIPE.to_owned(), |text, (from, to)| {
        let to = toml::Value::from(folder.join(to).display().to_string());
        text.replace(&format!("\"{from}\""), &to.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Purpose, Recipe};

    #[test]
    fn the_recipe_of_any_folder_names_the_files_that_are_written_there() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("my \"demo\"");
        let recipe = Recipe::load(&write(&folder).unwrap(), &[], Purpose::Training).unwrap();
        for path in [Path::new(&recipe.model.path).join("config.json"), folder.join("train.jsonl")] {
            assert!(path.is_file(), "{}", path.display());
        }
        assert_eq!(Path::new(&recipe.data.train[0].path), folder.join("train.jsonl"));
        assert_eq!(Path::new(&recipe.data.eval[0].path), folder.join("eval.jsonl"));
        assert_eq!(recipe.output_dir, folder.join("run"));
        let again = write(&folder).unwrap_err().to_string();
        assert!(again.contains("is there already") && again.contains("lora-train demo FOLDER"), "{again}");
    }

    #[test]
    fn every_file_of_the_quickstart_is_carried() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart");
        let count = |folder: &Path| fs::read_dir(folder).unwrap().count();
        // Two of those at the top are folders: the model's, and the drawings' that a recipe of their own is for.
        assert_eq!(count(&root) + count(&root.join("model")) - 2, FILES.len());
    }
}
