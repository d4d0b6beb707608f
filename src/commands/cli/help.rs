//! The text of `--help`, completions for shells, and the manual page.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};

use clap::builder::Styles;
use clap::{Command, ValueEnum};
use clap_complete::{Shell, generate};

use crate::util::failure::Failure;

/// The commands, in the order of `--help`.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Before training", &["init", "check", "inspect", "plan", "tune"]),
    ("Training", &["train"]),
    ("After training", &["chat", "generate", "serve", "eval", "merge", "push", "report", "compare"]),
    ("This machine", &["doctor", "bench", "completions", "help"]),
];

const MORE: &str = "\
Changes to a recipe:
  --set SECTION.KEY=VALUE takes a TOML value; what is not TOML is text.
  Nothing after `=` takes the key out, so that its default applies.
  An element of a list has its number: --set data.train.0.path=rows.jsonl

Examples:
  lora-train recipes/quickstart.toml                       train
  lora-train recipes/llama.toml --set lora.r=32 --set output_dir=runs/r32
  lora-train recipes/llama.toml --resume                   continue an interrupted run
  lora-train check recipes/llama.toml                      find mistakes before any weight is read
  lora-train plan recipes/llama.toml --device \"RTX 4090\"   memory and time on a GPU elsewhere
  lora-train chat runs/llama                               talk with what was trained

Exit codes:
  0 done   1 failed while running   2 wrong recipe, arguments or input files
  130 stopped by SIGINT or SIGTERM after saving a checkpoint

A recipe with the name of a command is given with its folder: lora-train ./check";

/// The definition with its commands in groups, which clap does not have, and the text below them.
pub(super) fn grouped(definition: Command) -> Command {
    let heading = *Styles::styled().get_header();
    let mut groups = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(groups, "\n{heading}{title}:{heading:#}");
        for name in names {
            let about = definition.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            let about = about.unwrap_or_else(|| "Show this, or the options of a command".to_owned());
            let _ = writeln!(groups, "  {name:<13}{about}");
        }
    }
    let template = format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n{groups}\n\
         {heading}Options of training:{heading:#}\n{{options}}{{after-help}}"
    );
    definition.help_template(template).after_help(MORE)
}

/// Arguments of `lora-train completions`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// What is printed, for a file where the shell or `man` looks
    pub(super) format: Format,
}

/// A form in which the command line is described.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// ~/.local/share/bash-completion/completions/lora-train
    Bash,
    /// _lora-train, in a folder of $fpath
    Zsh,
    /// ~/.config/fish/completions/lora-train.fish
    Fish,
    /// The manual page: ~/.local/share/man/man1/lora-train.1
    Man,
}

/// Prints completions or the manual page.
pub(super) fn describe(mut definition: Command, format: Format) -> Result<(), Failure> {
    let mut text = Vec::new();
    let shell = match format {
        Format::Bash => Some(Shell::Bash),
        Format::Zsh => Some(Shell::Zsh),
        Format::Fish => Some(Shell::Fish),
        Format::Man => None,
    };
    if let Some(shell) = shell {
        generate(shell, &mut definition, "lora-train", &mut text);
    } else {
        // One file with the pages of all commands, because the first page refers to the others.
        definition.build();
        let commands = definition.get_subcommands().filter(|command| command.get_name() != "help");
        for command in std::iter::once(&definition).chain(commands) {
            clap_mangen::Man::new(command.clone()).render(&mut text).map_err(Failure::running)?;
        }
    }
    match io::stdout().write_all(&text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::running(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::cli::definition;

    #[test]
    fn every_command_is_in_one_group_of_the_help() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let definition = definition();
        let mut names: Vec<&str> = definition.get_subcommands().map(Command::get_name).chain(["help"]).collect();
        grouped.sort_unstable();
        names.sort_unstable();
        assert_eq!(grouped, names);
    }
}
