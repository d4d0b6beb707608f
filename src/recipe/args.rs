//! The arguments of every command that takes a recipe.

use std::path::{Path, PathBuf};

use super::{Purpose, Recipe, of_run, read_text};
use crate::schema::{Override, Problem, Problems};

/// A recipe on the command line, and changes to it.
#[derive(Clone, Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file, or - for standard input; or the folder of a run, which has its recipe; `lora-train help
    /// reference` shows every key
    #[arg(value_name = "RECIPE.toml")]
    pub recipe: PathBuf,

    /// Change one key of the recipe; can be given several times
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,

    /// Where to compute: auto, cpu, cuda, cuda:N, or what else is compiled in
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
}

impl RecipeArgs {
    /// Reads the recipe with its changes.
    ///
    /// # Errors
    /// All mistakes in the file and the changes, sorted by place.
    pub fn load(&self, purpose: Purpose) -> Result<Recipe, Problems> {
        self.load_with_text(purpose).map(|(recipe, _)| recipe)
    }

    /// Reads the recipe with its changes, and returns the text of its file too. The file may later change or be gone: a
    /// pipe is read only once.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with_text(&self, purpose: Purpose) -> Result<(Recipe, String), Problems> {
        let (path, text, overrides) = self.read()?;
        let recipe = Recipe::parse(&path, &text, &overrides, purpose)?;
        Ok((recipe, text))
    }

    /// As much of the recipe with its changes as can be read, and all mistakes in it. A key that is wrong or missing
    /// gets its default. `None` where nothing can be read.
    #[must_use]
    pub fn examine(&self, purpose: Purpose) -> (Option<Recipe>, Problems) {
        match self.read() {
            Ok((path, text, overrides)) => Recipe::read(&path, &text, &overrides, purpose),
            Err(problem) => (None, problem.into()),
        }
    }

    /// The run whose folder was named.
    #[must_use]
    pub fn run(&self) -> Option<&Path> {
        of_run::run_of(&self.recipe)
    }

    /// Name and text of the recipe, and all changes to it.
    fn read(&self) -> Result<(PathBuf, String, Vec<Override>), Problem> {
        let (path, text, mut changes) = match self.run() {
            Some(run) => of_run::recipe_of(run)?,
            None => (self.recipe.clone(), read_text(&self.recipe)?, Vec::new()),
        };
        changes.extend(self.overrides());
        Ok((path, text, changes))
    }

    /// The recipe's text with the changes in it, so that it alone is `recipe`, comments and all; where they do not fit the
    /// text, the recipe with every default filled in.
    #[must_use]
    pub fn written(&self, text: &str, recipe: &Recipe, purpose: Purpose) -> String {
        let mut changes = self.run().map_or_else(Vec::new, |run| of_run::moved_paths(run, text));
        changes.extend(self.overrides());
        changes.extend(recipe.output_dir.to_str().map(|folder| Override::argument("", "output_dir", folder)));
        // As it is read by its new name, which decides where a recipe without `output_dir` writes.
        let read = |text: &str| Recipe::parse(Path::new(of_run::RECIPE_FILE), text, &[], purpose);
        let is_same = |text: &String| read(text).as_ref() == Ok(recipe);
        let with_changes = || Override::write_all(&changes, text).filter(is_same);
        Some(text.to_owned()).filter(is_same).or_else(with_changes).unwrap_or_else(|| recipe.to_toml())
    }

    /// The changes to the recipe, in order; `--device` comes last.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let device = self.device.iter().map(|name| Override::argument("--device", "device.name", name));
        self.set.iter().map(Override::set).chain(device).collect()
    }
}
