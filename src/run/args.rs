//! The arguments of training.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::recipe::RecipeArgs;
use crate::save::checkpoint::Checkpoints;
use crate::util::text::quoted;

/// Arguments of `lora-train RECIPE.toml`.
#[derive(Clone, Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(crate) struct TrainArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Continue from a checkpoint of this recipe's output folder: the latest, or the one that is named, or that of a run
    #[arg(long, value_name = "CHECKPOINT_DIR", num_args = 0..=1, default_missing_value = "latest")]
    pub(crate) resume: Option<Resume>,

    /// Delete the run that is in the output folder and start from the beginning
    #[arg(long, conflicts_with = "resume")]
    pub(crate) overwrite: bool,

    /// Start the programs of `[[objective.reward]]` that a run's recipe names: a folder may be somebody else's
    #[arg(long)]
    pub(crate) allow_command: bool,

    /// Show a live dashboard in the terminal
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) tui: bool,

    /// Show warnings and errors only
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

impl TrainArgs {
    /// Where training continues: a run's folder stands for its latest checkpoint.
    pub(super) fn resume_in(&self, output_dir: &Path) -> Option<Resume> {
        let resume = self.resume.clone()?;
        let Resume::Checkpoint(folder) = &resume else {
            return Some(self.checkpoint().map_or(resume, |folder| Resume::Checkpoint(folder.to_owned())));
        };
        let is_own = folder.canonicalize().is_ok_and(|folder| Some(folder) == output_dir.canonicalize().ok());
        let newest = || Checkpoints::of_folder(&folder.join("checkpoints")).newest_good().ok()?.checkpoint;
        Some(if is_own { Resume::Latest } else { newest().map_or(resume, Resume::Checkpoint) })
    }

    /// The folder of a checkpoint that is named in place of a recipe.
    fn checkpoint(&self) -> Option<&Path> {
        let folder = &*self.recipe.recipe;
        let holder = folder.parent().and_then(Path::file_name);
        (folder.is_dir() && holder.is_some_and(|holder| holder == "checkpoints")).then_some(folder)
    }

    /// The command line that continues this run with another value of a key.
    pub(crate) fn resume_command_with(&self, key: &str, value: f64, folder: &Path) -> String {
        let mut args = self.clone();
        args.recipe.set.retain(|change| change.split('=').next().map(str::trim) != Some(key));
        args.recipe.set.push(format!("{key}={value}"));
        args.resume_command(folder)
    }

    /// The command line that continues this run in `folder` at its latest checkpoint.
    pub(crate) fn resume_command(&self, folder: &Path) -> String {
        // A pipe is read once.
        let is_gone = !self.recipe.recipe.is_file() && self.recipe.run().is_none();
        let recipe = if is_gone || self.checkpoint().is_some() { folder } else { &self.recipe.recipe };
        let mut words = vec!["lora-train".to_owned(), recipe.display().to_string()];
        words.extend(self.recipe.set.iter().flat_map(|change| ["--set".to_owned(), change.clone()]));
        words.extend(self.recipe.device.iter().flat_map(|name| ["--device".to_owned(), name.clone()]));
        words.extend(self.allow_command.then(|| "--allow-command".to_owned()));
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
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("it's.toml");
        std::fs::write(&path, "").unwrap();
        let recipe = RecipeArgs {
            recipe: path.clone(),
            set: vec!["lora.r=4".into(), "eval.generate=[\"it's\"]".into()],
            device: Some("cpu".into()),
        };
        let args = TrainArgs { recipe, resume: None, overwrite: false, allow_command: false, tui: false, quiet: true };
        let run = Path::new("runs/a");
        let shown = |recipe: &str| {
            let set = r#"--set lora.r=4 --set 'eval.generate=["it'\''s"]' --device cpu --quiet --resume"#;
            format!("lora-train {recipe} {set}")
        };
        assert_eq!(args.resume_command(run), shown(&quoted(&path.display().to_string())));
        let mut piped = args.clone();
        piped.recipe.recipe = "-".into();
        assert_eq!(piped.resume_command(run), shown("runs/a"));
        let longer = args.resume_command_with("lora.r", 8.0, run);
        assert!(longer.contains("--set lora.r=8 --device") && !longer.contains("lora.r=4"), "{longer}");
    }

    #[test]
    fn the_folder_of_the_run_itself_stands_for_its_latest_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let args = TrainArgs {
            recipe: RecipeArgs { recipe: "r.toml".into(), set: Vec::new(), device: None },
            resume: Some(Resume::Checkpoint(folder.path().join("."))),
            overwrite: false,
            allow_command: false,
            tui: false,
            quiet: false,
        };
        assert_eq!(args.resume_in(folder.path()), Some(Resume::Latest));
        assert_eq!(args.resume_in(Path::new("runs/other")), args.resume);
    }
}
