//! The arguments of training.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use crate::recipe::RecipeArgs;

/// Arguments of `lora-train RECIPE.toml`.
#[derive(Clone, Debug, clap::Args)]
pub struct TrainArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub recipe: RecipeArgs,

    /// Continue from a checkpoint of this recipe's output folder: the latest, or the one that is named
    #[arg(long, value_name = "CHECKPOINT_DIR", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<Resume>,

    /// Show a live dashboard in the terminal
    #[arg(long, conflicts_with = "quiet")]
    pub tui: bool,

    /// Show warnings and errors only
    #[arg(long, short)]
    pub quiet: bool,
}

/// Where training goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// At the latest checkpoint of `output_dir`.
    Latest,
    /// At this checkpoint.
    Checkpoint(PathBuf),
}

impl FromStr for Resume {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "latest" => Self::Latest,
            path => Self::Checkpoint(path.into()),
        })
    }
}
