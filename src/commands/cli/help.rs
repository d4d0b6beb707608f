//! The text of `--help`, completions for shells, and the manual page.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};

use clap::builder::PossibleValuesParser;
use clap::builder::Styles;
use clap::{Arg, Command, ValueEnum};
use clap_complete::{Shell, generate};

use crate::device::DeviceKind;
use crate::recipe::Recipe;
use crate::schema::{KeyRow, Keys as _};
use crate::util::failure::Failure;

/// The commands, in the order of `--help`.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Before training", &["demo", "init", "check", "inspect", "plan", "tune"]),
    ("Training", &["train"]),
    ("After training", &["chat", "generate", "serve", "eval", "merge", "export", "push", "report", "compare"]),
    ("This machine", &["doctor", "bench", "completions", "help"]),
];

const MORE: &str = "\
Changes to a recipe:
  --set SECTION.KEY=VALUE takes a TOML value; what is not TOML is text.
  Nothing after `=` takes the key out, so that its default applies.
  An element of a list has its number: --set data.train.0.path=rows.jsonl

Examples:
  lora-train demo                                    try it: seconds, and nothing to download
  lora-train init --model MODEL --data rows.csv      write recipe.toml for a model and rows of yours
  lora-train recipe.toml                             train
  lora-train recipe.toml --set lora.r=32 --set output_dir=runs/r32
  lora-train recipe.toml --resume                    continue an interrupted run
  lora-train plan recipe.toml --device \"RTX 4090\"    memory and time on a GPU elsewhere
  lora-train chat runs/recipe                        talk with what was trained

Exit codes:
  0 done   1 failed while running   2 wrong recipe, arguments or input files
  130 stopped by SIGINT or SIGTERM after saving a checkpoint

A recipe with the name of a command is given with its folder: lora-train ./check

More help:
  lora-train help reference   every key of a recipe with its default
  lora-train help lora.r      a key, and what it takes; help lora: a section
  lora-train help PAGE        a page of the documentation: ";

/// The definition with its commands in groups, which clap does not have, and the text below them.
pub(super) fn grouped(definition: Command) -> Command {
    let heading = *Styles::styled().get_header();
    let mut groups = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(groups, "\n{heading}{title}:{heading:#}");
        for name in names {
            let about = definition.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            let _ = writeln!(groups, "  {name:<13}{}", about.unwrap_or_default());
        }
    }
    let template = format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n{groups}\n\
         {heading}Options of training:{heading:#}\n{{options}}{{after-help}}"
    );
    definition.help_template(template).after_help(format!("{MORE}{}", super::topics::page_names()))
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
pub(super) fn print(definition: Command, format: Format) -> Result<(), Failure> {
    let mut text = Vec::new();
    describe(definition, format, &mut text)?;
    match io::stdout().write_all(&text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::running(error)),
        _ => Ok(()),
    }
}

fn describe(mut definition: Command, format: Format, text: &mut Vec<u8>) -> Result<(), Failure> {
    let shell = match format {
        Format::Bash => Some(Shell::Bash),
        Format::Zsh => Some(Shell::Zsh),
        Format::Fish => Some(Shell::Fish),
        Format::Man => None,
    };
    if let Some(shell) = shell {
        generate(shell, &mut with_values(definition), "lora-train", text);
        if shell == Shell::Bash {
            let script = String::from_utf8_lossy(text)
                // clap_complete 4.6 takes the hyphen of our name for the start of a sub-command here, and not where it looks.
                .replace("lora__subcmd__train__", "lora__train__")
                // A value follows the `=` of a key at once.
                .replace("--set)\n", "--set)\n                    compopt -o nospace\n");
            *text = script.into_bytes();
        }
    } else {
        // One file with the pages of all commands, because the first page refers to the others.
        definition.build();
        for (index, command) in std::iter::once(&definition).chain(definition.get_subcommands()).enumerate() {
            let mut page = Vec::new();
            clap_mangen::Man::new(command.clone()).render(&mut page).map_err(Failure::running)?;
            // The last of several titles would be that of the whole.
            let is_kept = |line: &&str| index == 0 || !line.starts_with(".TH ");
            text.extend(String::from_utf8_lossy(&page).split_inclusive('\n').filter(is_kept).flat_map(str::bytes));
        }
    }
    Ok(())
}

/// The definition with the values of `--device` and the keys of `--set`, which only completions take: others are allowed.
fn with_values(definition: Command) -> Command {
    let kinds = DeviceKind::ALL.into_iter().filter(|kind| kind.is_compiled_in()).map(DeviceKind::name);
    let devices: Vec<&str> = std::iter::once("auto").chain(kinds).collect();
    // These live until the process ends, which is soon.
    let keys: Vec<&str> = settings(Recipe::ROWS, "").into_iter().map(|key| &*format!("{key}=").leak()).collect();
    let topics: Vec<&str> = super::topics::all(&definition).into_iter().map(|topic| &*topic.leak()).collect();
    let values = |arg: Arg| match arg.get_long() {
        Some("device") => arg.value_parser(PossibleValuesParser::new(&devices)),
        Some("set") => arg.value_parser(PossibleValuesParser::new(&keys)),
        None if arg.get_id() == "topic" => arg.value_parser(PossibleValuesParser::new(&topics)),
        _ => arg,
    };
    definition.mut_args(values).mut_subcommands(|command| command.mut_args(values))
}

/// The keys below a section, as `--set` takes them; of a list of sections those of its first.
fn settings(rows: &[KeyRow], section: &str) -> Vec<String> {
    let key = |row: &KeyRow| format!("{section}{}", row.name);
    let below = |row: &KeyRow| {
        let first = if (row.default)().is_some_and(|default| default.is_array()) { ".0" } else { "" };
        settings(row.keys, &format!("{}{first}.", key(row)))
    };
    rows.iter().flat_map(|row| if row.keys.is_empty() { vec![key(row)] } else { below(row) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::cli::definition;

    #[test]
    fn every_command_is_in_one_group_of_the_help() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let definition = definition();
        let mut names: Vec<&str> = definition.get_subcommands().map(Command::get_name).collect();
        grouped.sort_unstable();
        names.sort_unstable();
        assert_eq!(grouped, names);
    }

    fn described(format: Format) -> String {
        let mut text = Vec::new();
        describe(definition(), format, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn the_manual_page_has_the_title_of_the_program() {
        let titles: Vec<String> =
            described(Format::Man).lines().filter(|line| line.starts_with(".TH")).map(str::to_owned).collect();
        assert!(titles.len() == 1 && titles[0].starts_with(".TH lora-train 1"), "{titles:?}");
    }

    #[test]
    fn completions_know_devices_and_the_keys_of_a_recipe() {
        for format in [Format::Bash, Format::Zsh, Format::Fish] {
            let text = described(format);
            for value in ["auto", "cpu", "seed=", "lora.lora_alpha=", "data.train.0.path=", "eval.task.metric="] {
                assert!(text.contains(value), "{format:?}: {value}");
            }
            assert!(![" ", "(", "\""].iter().any(|before| text.contains(&format!("{before}lora="))), "{format:?}");
        }
    }

    #[test]
    fn bash_completes_after_a_command_and_without_one() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("completions");
        // Outside a completion bash has no `compopt`; here it says that no space is added.
        let ask = "\ncompopt() { echo -n \"$2 \"; }\nCOMP_WORDS=(\"$@\")\nCOMP_CWORD=$(($# - 1))\n\
                   _lora__train lora-train \"${@: -1}\" \"${@: -2:1}\"\necho \"${COMPREPLY[*]}\"\n";
        std::fs::write(&script, described(Format::Bash) + ask).unwrap();
        for (line, expected) in [
            ("lora-train r.toml --set lora.lora_a", "nospace lora.lora_alpha="),
            ("lora-train check r.toml --set data.train.0.p", "nospace data.train.0.path="),
            ("lora-train chat runs/x --device cp", "cpu"),
            ("lora-train check r.toml --js", "--json"),
        ] {
            let mut bash = std::process::Command::new("bash");
            let output = bash.arg(&script).args(line.split(' ')).output().unwrap();
            let found = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(found.trim_end(), expected, "{line}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
