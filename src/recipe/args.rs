//! The arguments of every command that takes a recipe.

use std::path::PathBuf;

use super::{Purpose, Recipe, read_text};
use crate::schema::{Override, Problems};

/// A recipe on the command line, and changes to it.
#[derive(Clone, Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file, or - for standard input; `lora-train help reference` shows every key
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
    ///
    /// All mistakes in the file and the changes, sorted by place.
    pub fn load(&self, purpose: Purpose) -> Result<Recipe, Problems> {
        self.load_with_text(purpose).map(|(recipe, _)| recipe)
    }

    /// Reads the recipe with its changes, and returns the text of its file too. The file may later change or be gone: a
    /// pipe is read only once.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_with_text(&self, purpose: Purpose) -> Result<(Recipe, String), Problems> {
        let text = read_text(&self.recipe)?;
        let recipe = Recipe::parse(&self.recipe, &text, &self.overrides(), purpose)?;
        Ok((recipe, text))
    }

    /// As much of the recipe with its changes as can be read, and all mistakes in it. A key that is wrong or missing
    /// gets its default. `None` where nothing can be read.
    #[must_use]
    pub fn examine(&self, purpose: Purpose) -> (Option<Recipe>, Problems) {
        match read_text(&self.recipe) {
            Ok(text) => Recipe::read(&self.recipe, &text, &self.overrides(), purpose),
            Err(problem) => (None, problem.into()),
        }
    }

    /// The changes to the recipe, in order; `--device` comes last.
    #[must_use]
    pub fn overrides(&self) -> Vec<Override> {
        let device = self.device.iter().map(|name| Override::argument("--device", "device.name", name));
        self.set.iter().map(Override::set).chain(device).collect()
    }
}
