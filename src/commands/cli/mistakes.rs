//! What is said about a command line that is wrong: names of other trainers, slips, a command in the wrong place.

use std::ffi::OsString;
use std::path::Path;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::recipe::of_run::run_of;
use crate::recipe::{Flag, flag};
use crate::schema::{Problem, closest};
use crate::util::text::quoted;

/// Our commands by what other programs call them, as words or as options.
const PEERS: &[(&str, &[&str])] = &[
    ("bench", &["benchmark"]),
    ("check", &["dry_run", "validate", "lint", "preflight"]),
    ("compare", &["diff"]),
    ("demo", &["quickstart", "example", "tutorial"]),
    ("doctor", &["info", "env", "devices", "list_devices"]),
    ("help", &["explain", "docs", "reference", "keys", "man"]),
    ("generate", &["inference", "predict", "infer", "complete"]),
    ("init", &["new", "create", "cp", "wizard"]),
    ("inspect", &["preprocess", "preview", "tokenize"]),
    ("merge", &["merge_lora", "merge_and_unload", "merge_adapter", "fuse"]),
    ("eval", &["evaluate", "test"]),
    ("plan", &["estimate", "estimate_memory", "vram", "memory"]),
    ("push", &["upload", "publish", "push_to_hub", "upload_repo"]),
    ("serve", &["api", "server"]),
    ("train", &["sft", "finetune", "fine_tune", "fit", "run", "start"]),
];

/// Options with which other trainers name the recipe.
const RECIPE_OPTIONS: &[&str] = &["config", "config_file", "config_path", "cfg", "recipe", "yaml", "c", "f"];

/// The mistake in the first word where it is neither a command nor a file and has no ending: a mistyped command.
pub(super) fn unknown_command(word: &str, definition: &Command) -> Option<Problem> {
    let path = Path::new(word);
    let is_there = path.is_file() || run_of(path).is_some();
    if word.starts_with('-') || path.extension().is_some() || path.components().count() != 1 || is_there {
        return None;
    }
    let recipe =
        ["recipes/", ""].iter().map(|folder| format!("{folder}{word}.toml")).find(|file| Path::new(file).exists());
    let near = || closest(word, definition.get_subcommands().map(Command::get_name));
    let hint = match (peer(word), recipe) {
        _ if word == "version" => "`lora-train --version` does that".to_owned(),
        _ if word == "resume" => "`lora-train RUN --resume` does that, or RECIPE.toml --resume".to_owned(),
        (_, Some(recipe)) => format!("did you mean the recipe {recipe}?"),
        (Some(command), None) => format!("this trainer calls it `{command}`"),
        (None, None) => match near() {
            Some(command) => format!("did you mean `{command}`?"),
            None => "a recipe is a TOML file: `lora-train init` writes one; `lora-train --help` lists the commands"
                .to_owned(),
        },
    };
    Some(Problem::new(format!("no command `{word}`")).hint(hint))
}

/// Our command for another program's.
pub(super) fn peer(word: &str) -> Option<&'static str> {
    let word = plain(word);
    PEERS.iter().find(|(_, names)| names.contains(&word.as_str())).map(|(command, _)| *command)
}

/// What is wrong with an argument that clap does not know; `None` for its other errors, which it explains itself.
pub(super) fn unknown_argument(error: &clap::Error, args: &[OsString], definition: &Command) -> Option<Problem> {
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(argument))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let command = definition.find_subcommand(args.get(1)?)?;
    Some(if argument.starts_with('-') {
        let words: Vec<&str> = args.iter().filter_map(|arg| arg.to_str()).collect();
        unknown_option(argument, &words, command, definition)
    } else {
        stray_word(argument, command, definition)
    })
}

/// What arguments are missing; `None` for other errors.
pub(super) fn missing_argument(error: &clap::Error, args: &[OsString], definition: &Command) -> Option<Problem> {
    let (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let command = definition.find_subcommand(args.get(1)?)?;
    let missing: Vec<String> = missing.iter().map(|name| name.replace(['<', '>'], "").replace("...", "")).collect();
    let is = if missing.len() == 1 { "is" } else { "are" };
    let name = Some(command.get_name()).filter(|name| *name != "train");
    let words = command.get_positionals().filter_map(|word| word.get_value_names()?.first());
    let options = missing.iter().map(String::as_str).filter(|name| name.starts_with('-'));
    let words = ["lora-train"].into_iter().chain(name).chain(words.map(clap::builder::Str::as_str)).chain(options);
    let hint = format!("{}; {}", words.collect::<Vec<_>>().join(" "), see_help(command));
    Some(Problem::new(format!("{} {is} missing", missing.join(" and "))).hint(hint))
}

fn stray_word(word: &str, command: &Command, definition: &Command) -> Problem {
    let is_assignment = word.split_once('=').is_some_and(|(key, _)| key.contains('.') || !key.contains('/'));
    let hint = if definition.find_subcommand(word).is_some() {
        format!("the command comes first: lora-train {word} ...")
    } else if is_assignment && takes_recipe(command) {
        format!("to change a key of the recipe: --set {}", quoted(word))
    } else {
        see_help(command)
    };
    Problem::new(format!("unexpected argument `{word}`")).hint(hint)
}

fn unknown_option(option: &str, words: &[&str], command: &Command, definition: &Command) -> Problem {
    let problem = Problem::new(format!("no option `{option}`"));
    let name = plain(option);
    let value = value_of(option, words);
    let recipe = words[2..].iter().find(|word| word.ends_with(".toml")).copied();
    let takes_recipe = takes_recipe(command);
    if takes_recipe && RECIPE_OPTIONS.contains(&name.as_str()) {
        return problem.hint(of_recipe_option(command, value));
    }
    let ours = peer(&name).unwrap_or(&name);
    if let Some(ours) = definition.find_subcommand(ours)
        && value.is_none_or(|value| value.ends_with(".toml"))
    {
        let recipe = if self::takes_recipe(ours) { recipe.unwrap_or("RECIPE.toml") } else { "..." };
        return problem.hint(format!("`lora-train {} {recipe}` does that", ours.get_name()));
    }
    if takes_recipe && ["cpu", "use_cpu", "no_cuda", "cuda"].contains(&name.as_str()) {
        return problem.hint(format!("`--device {}` does that", if name == "cuda" { "cuda" } else { "cpu" }));
    }
    if let Some(near) = own_option(command, |option| option == name) {
        return problem.hint(format!("did you mean `--{near}`?"));
    }
    // `--bf16 r.toml`: the recipe is not the option's value.
    match flag(option, value.filter(|value| Some(*value) != recipe)).filter(|_| takes_recipe) {
        Some(Flag::Set(assignment)) => problem.hint(format!("`--set {}` does that", quoted(&assignment))),
        Some(Flag::Note(None, note)) => problem.hint(note),
        Some(Flag::Note(Some(key), note)) => {
            Problem::new(format!("{}; the recipe's key is `{key}`", problem.message)).hint(note)
        }
        Some(Flag::Refused(refused)) => {
            let message = format!("{}; in the recipe: {}", problem.message, refused.message);
            Problem { message, ..refused }
        }
        Some(Flag::Several(keys)) => {
            let keys: Vec<String> = keys.iter().map(|key| format!("`--set {key}=...`")).collect();
            problem.hint(format!("one of {}", keys.join(", ")))
        }
        None => {
            let options: Vec<String> = command.get_arguments().filter_map(clap::Arg::get_long).map(plain).collect();
            let near = closest(&name, options.iter().map(String::as_str));
            let is_near = |option: &str| near == Some(option) || name.starts_with(&format!("{option}_"));
            let near = own_option(command, is_near).map(|near| format!("did you mean `--{near}`?"));
            problem.hint(near.unwrap_or_else(|| see_help(command)))
        }
    }
}

/// How the recipe is named that somebody gave as `--config x.yml`.
fn of_recipe_option(command: &Command, value: Option<&str>) -> String {
    let command = match command.get_name() {
        "train" => String::new(),
        name => format!("{name} "),
    };
    match value {
        Some(file) if !file.ends_with(".toml") => format!(
            "the recipe is a bare argument, and a TOML file: lora-train {command}RECIPE.toml; `lora-train help \
             reference` shows every key"
        ),
        file => format!("the recipe is a bare argument: lora-train {command}{}", file.unwrap_or("RECIPE.toml")),
    }
}

/// The value after an option, or after its `=`.
fn value_of<'a>(option: &str, words: &[&'a str]) -> Option<&'a str> {
    let index = words.iter().position(|word| word.split('=').next() == Some(option))?;
    let after = || words.get(index + 1).copied().filter(|next| !next.starts_with("--"));
    words[index].split_once('=').map(|(_, value)| value).or_else(after)
}

/// The first option of a command that is meant, by its name in lower case with underscores.
fn own_option(command: &Command, is_meant: impl Fn(&str) -> bool) -> Option<&str> {
    command.get_arguments().filter_map(clap::Arg::get_long).find(|option| is_meant(&plain(option)))
}

/// A name as tables write it: `--Batch-Size` is `batch_size`.
fn plain(name: &str) -> String {
    name.trim_start_matches('-').to_lowercase().replace('-', "_")
}

fn takes_recipe(command: &Command) -> bool {
    command.get_arguments().any(|argument| argument.get_long() == Some("set"))
}

fn see_help(command: &Command) -> String {
    let set = if takes_recipe(command) { ", and --set changes any key of the recipe" } else { "" };
    format!("`lora-train {} --help` lists its options{set}", command.get_name())
}
