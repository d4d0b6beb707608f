//! The arguments of training.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use crate::recipe::RecipeArgs;
use crate::util::text::quoted;

/// Arguments of `lora-train RECIPE.toml`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TrainArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Continue from a checkpoint of this recipe's output folder: the latest, or the one that is named
    #[arg(long, value_name = "CHECKPOINT_DIR", num_args = 0..=1, default_missing_value = "latest")]
    pub(crate) resume: Option<Resume>,

    /// Delete the run that is in the output folder and start from the beginning
    #[arg(long, conflicts_with = "resume")]
    pub(crate) overwrite: bool,

    /// Show a live dashboard in the terminal
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) tui: bool,

    /// Show warnings and errors only
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

impl TrainArgs {
    /// The command line that continues this run with another value of a key.
    pub(crate) fn resume_command_with(&self, key: &str, value: f64) -> String {
        let mut args = self.clone();
        args.recipe.set.retain(|change| change.split('=').next().map(str::trim) != Some(key));
        args.recipe.set.push(format!("{key}={value}"));
        args.resume_command()
    }

    /// The command line that continues this run at its latest checkpoint.
    pub(crate) fn resume_command(&self) -> String {
        let mut words = vec!["lora-train".to_owned(), self.recipe.recipe.display().to_string()];
        words.extend(self.recipe.set.iter().flat_map(|change| ["--set".to_owned(), change.clone()]));
        words.extend(self.recipe.device.iter().flat_map(|name| ["--device".to_owned(), name.clone()]));
        words.extend(self.tui.then(|| "--tui".to_owned()));
        words.extend(self.quiet.then(|| "--quiet".to_owned()));
        words.push("--resume".to_owned());
        words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }
}

/// The checkpoint where training continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_that_continues_a_run_can_be_pasted_into_a_shell() {
        let recipe = RecipeArgs {
            recipe: "my runs/a.toml".into(),
            set: vec!["lora.r=4".into(), "eval.generate=[\"it's\"]".into()],
            device: Some("cpu".into()),
        };
        let args = TrainArgs { recipe, resume: None, overwrite: false, tui: false, quiet: true };
        assert_eq!(
            args.resume_command(),
            r#"lora-train 'my runs/a.toml' --set lora.r=4 --set 'eval.generate=["it'\''s"]' --device cpu --quiet --resume"#
        );
        let longer = args.resume_command_with("lora.r", 8.0);
        assert!(longer.contains("--set lora.r=8 --device") && !longer.contains("lora.r=4"), "{longer}");
    }
}
