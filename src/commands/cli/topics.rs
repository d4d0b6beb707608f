//! `lora-train help`: commands, keys of a recipe, and pages of the documentation, which the program carries.

use std::io::ErrorKind;

use clap::Command;

use super::mistakes::peer;
use crate::commands::{print, print_text};
use crate::recipe::{Meant, explained, key_names, look_up, reference};
use crate::schema::{Problem, closest};
use crate::util::failure::Failure;

/// Names and texts of the pages of docs/ for users, as build.rs lists them.
const PAGES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/pages.rs"));

/// The word for all keys.
const REFERENCE: &str = "reference";

/// Arguments of `lora-train help`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct HelpArgs {
    /// A command, a key or section of a recipe (lora.r, lora), reference, a page (data.md), or a word to look for in all
    #[arg(value_name = "TOPIC")]
    pub(super) topic: Vec<String>,
}

/// Prints what was asked about.
pub(super) fn show(args: &HelpArgs, mut definition: Command) -> Result<(), Failure> {
    if args.topic.is_empty() {
        return print_options(&mut definition, &[]);
    }
    let topic = &*args.topic.join(" ");
    if definition.find_subcommand(topic).is_some() {
        print_options(&mut definition, &[topic])?;
        return more(topic, true);
    }
    if topic == REFERENCE {
        return print(reference().trim_end());
    }
    if let Some(text) = topic.strip_suffix(".md").and_then(page) {
        return print(text.trim_end());
    }
    match look_up(topic) {
        Meant::Ours(names) => {
            let texts: Vec<String> = names.iter().map(|name| explained(name)).collect();
            print(texts.join("\n").trim_end())?;
            more(topic, false)
        }
        _ if page(topic).is_some() => print(page(topic).unwrap_or_default().trim_end()),
        _ if peer(topic).is_some() => {
            let ours = peer(topic).unwrap_or_default();
            print(&format!("`{topic}` is `{ours}` here.\n"))?;
            print_options(&mut definition, &[ours])
        }
        Meant::Theirs(name) => print(&format!("`{topic}` is `{name}` here.\n\n{}", explained(&name).trim_end())),
        Meant::Nothing(note) => print_text(&format!("A recipe has no `{topic}`: {note}.")),
        Meant::Unknown => match places(topic) {
            Some(places) => print(&places),
            None => Err(unknown(topic, &definition).into()),
        },
    }
}

/// The options of a command, or without one of training, as `--help` shows them.
fn print_options(definition: &mut Command, command: &[&str]) -> Result<(), Failure> {
    let words = [&["lora-train"], command, &["--help"]].concat();
    match definition.try_get_matches_from_mut(words).map_err(|help| help.print()) {
        Err(Err(error)) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::running(error)),
        _ => Ok(()),
    }
}

/// What else a word names: the keys of a section that is called like a command, the page of both.
fn more(topic: &str, is_command: bool) -> Result<(), Failure> {
    let start = format!("{topic}.");
    let keys: Vec<String> = key_names().into_iter().filter(|name| name.starts_with(&start)).collect();
    if is_command && !keys.is_empty() {
        print_text(&format!(
            "\nKeys of [{topic}] in a recipe, each with `lora-train help KEY`:\n  {}",
            keys.join(", ")
        ))?;
    }
    match page(topic.trim_matches(['[', ']'])) {
        Some(_) => print(&format!("\nMore: lora-train help {topic}.md")),
        None => Ok(()),
    }
}

/// How a page or a key is asked for.
const HELP: &str = "lora-train help";
/// Most pages, and most keys, that are named of those in which a word stands.
const MAX_PLACES: usize = 5;
/// Most sections of a page.
const MAX_SECTIONS: usize = 3;
/// As many times as this a word counts in a heading.
const HEADING_COUNTS: usize = 20;

/// Where the pages and what is said of keys have a word, or words that follow each other: most of it first.
fn places(topic: &str) -> Option<String> {
    let words = regex::escape(topic).replace(['_', ' '], "[-_ ]");
    let pattern = regex::RegexBuilder::new(&format!(r"\b{words}s?\b")).case_insensitive(true).build().ok()?;
    let count = |text: &str| pattern.find_iter(text).count();
    let mut pages = Vec::new();
    for (name, text) in PAGES {
        let mut found: Vec<(usize, &str)> = sections(text)
            .map(|(heading, below)| (count(heading) * HEADING_COUNTS + count(below), heading))
            .filter(|(count, _)| *count > 0)
            .collect();
        found.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        let total: usize = found.iter().map(|(count, _)| count).sum();
        let headings: Vec<&str> = found.iter().take(MAX_SECTIONS).map(|(_, heading)| *heading).collect();
        pages.extend((total > 0).then(|| (total, format!("{HELP} {}", shown(name)), headings.join("; "))));
    }
    pages.sort_by_key(|(count, ..)| std::cmp::Reverse(*count));
    let names = key_names();
    let is_section = |name: &String| names.iter().any(|other| other.starts_with(&format!("{name}.")));
    let keys = names.iter().filter(|name| !is_section(name) && pattern.is_match(&explained(name)));
    let keys = keys.take(MAX_PLACES).map(|name| format!("\n  {HELP} {name}"));
    let pages = pages.into_iter().take(MAX_PLACES).map(|(_, page, headings)| format!("\n  {page}: {headings}"));
    let lines: String = pages.chain(keys).collect();
    (!lines.is_empty()).then(|| format!("`{topic}` stands in{lines}"))
}

/// The headings of a page with what stands below each.
fn sections(text: &str) -> impl Iterator<Item = (&str, &str)> {
    // In blocks of code `#` begins a comment.
    let mut is_code = false;
    let mut starts = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        is_code ^= line.starts_with("```");
        starts.extend((!is_code && line.starts_with('#')).then_some(at));
        at += line.len();
    }
    let ends: Vec<usize> = starts.iter().skip(1).copied().chain([text.len()]).collect();
    let section = move |(start, end): (usize, usize)| text[start..end].split_once('\n').unwrap_or_default();
    starts.into_iter().zip(ends).map(section).map(|(heading, below)| (heading.trim_start_matches(['#', ' ']), below))
}

/// The text of a page: `data`, `docs/data`.
fn page(name: &str) -> Option<&'static str> {
    let name = name.rsplit('/').next().unwrap_or(name);
    PAGES.iter().find(|(page, _)| *page == name).map(|(_, text)| *text)
}

fn unknown(topic: &str, definition: &Command) -> Problem {
    let all = all(definition);
    let ends = all.iter().filter_map(|name| Some(name.rsplit_once('.')?.1));
    let near = closest(topic, all.iter().map(String::as_str)).or_else(|| closest(topic, ends));
    let hint = near.map_or_else(
        || "`lora-train help reference` shows every key, `lora-train help` the commands and pages".to_owned(),
        |near| format!("did you mean `{near}`?"),
    );
    Problem::new(format!("no command, key or page `{topic}`")).hint(hint)
}

/// Everything that there is help for.
pub(super) fn all(definition: &Command) -> Vec<String> {
    let commands = definition.get_subcommands().map(|command| command.get_name().to_owned());
    let pages = PAGES.iter().map(|(name, _)| shown(name));
    commands.chain([REFERENCE.to_owned()]).chain(key_names()).chain(pages).collect()
}

/// The pages' names, for a line of text.
pub(super) fn page_names() -> String {
    PAGES.iter().map(|(name, _)| shown(name)).collect::<Vec<_>>().join(", ")
}

/// How a page is asked for: with its ending where a section or a command has the name.
fn shown(name: &str) -> String {
    let is_taken = ["data", "serve"].contains(&name);
    if is_taken { format!("{name}.md") } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::commands::cli::definition;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    /// Whether `lora-train help WORD` has something to say.
    fn is_known(word: &str) -> bool {
        let of_key = !matches!(look_up(word), Meant::Unknown);
        let of_page = page(word.trim_end_matches(".md")).is_some();
        word == REFERENCE || of_key || of_page || definition().find_subcommand(word).is_some()
    }

    #[test]
    fn pages_are_shown_under_the_names_that_are_listed() {
        for name in ["adapters", "data", "telemetry"] {
            let text = page(name).unwrap();
            assert!(text == fs::read_to_string(root().join(format!("docs/{name}.md"))).unwrap(), "{name}");
        }
        for (name, _) in PAGES {
            let is_taken = definition().find_subcommand(name).is_some() || matches!(look_up(name), Meant::Ours(_));
            assert_eq!(shown(name).ends_with(".md"), is_taken, "{name}");
        }
        assert!(page("docs/data").is_some() && page("house").is_none());
    }

    #[test]
    fn no_message_points_to_a_file_of_the_repository_or_to_help_that_there_is_not() {
        fn look(folder: &Path, count: &mut usize) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    look(&path, count);
                    continue;
                }
                if path.extension().is_some_and(|extension| extension == "zst") {
                    continue;
                }
                let text = fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]").next().unwrap_or_default().replace("\\\n", " ");
                for line in text.lines().filter(|line| !line.trim_start().starts_with(['/', '#'])) {
                    let is_included = line.contains("include_") || line.contains("concat!(");
                    for file in ["docs/", "reference.toml", "README.md has"] {
                        assert!(is_included || !line.contains(file), "{}: {line}", path.display());
                    }
                    let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
                    for after in words.split("lora-train help ").skip(1) {
                        let word = after.split([' ', '`', '"', ';', ',', ':']).next().unwrap_or_default();
                        let word = word.trim_end_matches('.');
                        assert!(
                            ["PAGE", "KEY", "{topic}.md", "{key}"].contains(&word) || is_known(word),
                            "{}: {word}: {line}",
                            path.display()
                        );
                        *count += 1;
                    }
                }
            }
        }
        let mut count = 0;
        look(&root().join("src"), &mut count);
        assert!(count > 5, "{count}");
    }

    #[test]
    fn words_that_are_no_key_lead_to_the_pages_and_keys_that_have_them() {
        for (word, place) in [
            ("gguf", "lora-train help quantised"),
            ("gguf", "GGUF"),
            ("GGUF", "llama.cpp and Ollama"),
            ("dpo", "lora-train help preferences"),
            ("dpo", "lora-train help objective.name"),
            ("oom", "lora-train help plan-and-tune"),
            ("out of memory", "lora-train help plan-and-tune"),
            ("csv", "lora-train help data.md"),
            ("jupyter", "In a notebook"),
            ("colab", "In a notebook"),
            ("system prompt", "lora-train help data.system"),
        ] {
            let found = places(word).unwrap_or_else(|| panic!("{word}"));
            assert!(found.contains(place) && found.lines().count() <= 1 + 2 * MAX_PLACES, "{word}: {found}");
            assert!(matches!(look_up(word), Meant::Unknown) && page(word).is_none(), "{word}");
        }
        assert_eq!(places("telemtry"), None);
        // The comments of an example are no headings.
        assert!(places("double_quantization").unwrap().contains("quantised: Quantised base models"));
    }

    #[test]
    fn what_is_unknown_is_answered_with_what_is_near() {
        let hint = |word: &str| unknown(word, &definition()).to_string();
        assert_eq!(hint("inspec"), "no command, key or page `inspec`\n  hint: did you mean `inspect`?");
        assert!(hint("telemtry").ends_with("did you mean `telemetry`?"), "{}", hint("telemtry"));
        assert!(hint("lora.lora_alhpa").ends_with("did you mean `lora.lora_alpha`?"));
        assert!(hint("gradient_chekpointing").ends_with("did you mean `train.gradient_checkpointing`?"));
        assert!(hint("zzz").contains("`lora-train help reference`"));
    }
}
