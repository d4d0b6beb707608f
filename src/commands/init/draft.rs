//! A recipe while it is being written: settings with their comments, and its text.

use std::collections::BTreeSet;
use std::path::Path;

use crate::recipe::{Purpose, Recipe};
use crate::schema::{KeyRow, Keys as _, Override, Problem};

/// Widest line with a comment at its end.
const MAX_COLUMNS: usize = 110;

/// A key with its value, and why it has it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Setting {
    /// As `--set` names it: `lora.r`, `data.train.0.path`.
    pub(super) key: String,
    pub(super) value: toml::Value,
    /// May be empty.
    pub(super) comment: String,
    /// Whether its line is a comment, too: a setting that the user may want.
    pub(super) is_offered: bool,
}

/// A recipe that is being written.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    /// Lines of comment at the top.
    pub(super) header: Vec<String>,
    pub(super) settings: Vec<Setting>,
    /// Keys that the user has given on the command line.
    given: Vec<String>,
    /// Lines of comment at the end, which the console shows too.
    pub(super) footer: Vec<String>,
    /// The last line of comment, where it is too long for the console.
    pub(super) last: Option<String>,
    /// Files beside the recipe, which are written where there are none of their names.
    pub(super) files: Vec<(String, String)>,
    /// Whether its rows cannot be trained on as they are.
    pub(super) has_mistakes: bool,
}

impl Draft {
    /// Sets a key; a value that is there already is replaced, but none that the user has given.
    pub(super) fn set(&mut self, key: impl Into<String>, value: impl Into<toml::Value>, comment: impl Into<String>) {
        let setting = Setting { key: key.into(), value: value.into(), comment: comment.into(), is_offered: false };
        if !self.is_given(&setting.key) {
            self.put(setting);
        }
    }

    /// Writes a setting as a comment, where the key has no value.
    pub(super) fn offer(&mut self, key: &str, value: impl Into<toml::Value>, comment: impl Into<String>) {
        if self.get(key).is_none() {
            self.put(Setting { key: key.into(), value: value.into(), comment: comment.into(), is_offered: true });
        }
    }

    fn put(&mut self, setting: Setting) {
        match self.settings.iter_mut().find(|known| known.key == setting.key) {
            Some(known) => *known = setting,
            None => self.settings.push(setting),
        }
    }

    /// Sets, or takes out, what the user gives, which a recipe has taken already: nothing else replaces it.
    pub(super) fn give(&mut self, change: &Override) {
        if let Some((names, value)) = change.parts() {
            self.give_below(Recipe::ROWS, "", &names, value);
        }
    }

    /// The same below a section.
    fn give_below(&mut self, rows: &[KeyRow], path: &str, names: &[String], value: Option<toml::Value>) {
        let [name, rest @ ..] = names else {
            match value {
                Some(toml::Value::Table(table)) => {
                    table.into_iter().for_each(|(name, value)| self.give_below(rows, path, &[name], Some(value)));
                }
                Some(toml::Value::Array(items)) => items
                    .into_iter()
                    .enumerate()
                    .for_each(|(index, item)| self.give_below(rows, path, &[index.to_string()], Some(item))),
                _ => self.settings.retain(|setting| !setting.key.starts_with(&format!("{path}."))),
            }
            return;
        };
        let path = below(path, name);
        if name.parse::<usize>().is_ok() {
            return self.give_below(rows, &path, rest, value);
        }
        let Some(row) = rows.iter().find(|row| row.name == name) else { return };
        if !row.keys.is_empty() {
            return self.give_below(row.keys, &path, rest, value);
        }
        let inner = rest
            .iter()
            .rev()
            .fold(value, |value, name| Some(toml::Value::Table(toml::Table::from_iter([(name.clone(), value?)]))));
        self.given.push(path.clone());
        match (inner, self.settings.iter_mut().find(|setting| setting.key == path)) {
            (Some(toml::Value::Table(more)), Some(Setting { value: toml::Value::Table(table), .. }))
                if !rest.is_empty() =>
            {
                table.extend(more);
            }
            (Some(value), _) => self.put(Setting { key: path, value, comment: String::new(), is_offered: false }),
            (None, _) => self.settings.retain(|setting| setting.key != path),
        }
    }

    /// Whether the user has given a key.
    pub(super) fn is_given(&self, key: &str) -> bool {
        self.given.iter().any(|given| given == key)
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &str) -> Option<&toml::Value> {
        let mut set = self.settings.iter().filter(|setting| !setting.is_offered);
        set.find(|setting| setting.key == key).map(|setting| &setting.value)
    }

    /// The recipe's file.
    pub(super) fn text(&self) -> String {
        let lines = self.lines();
        lines.iter().map(|(_, line)| format!("{line}\n")).collect()
    }

    /// The settings that a recipe refuses, with the reason, and the problems of no setting.
    pub(super) fn refused(&self) -> (Vec<(String, Problem)>, Vec<Problem>) {
        let lines = self.lines();
        let text: String = lines.iter().map(|(_, line)| format!("{line}\n")).collect();
        let Err(problems) = Recipe::parse(Path::new("recipe.toml"), &text, &[], Purpose::Training) else {
            return Default::default();
        };
        let mut refused = (Vec::new(), Vec::new());
        for problem in problems.0 {
            let line = problem.place.as_deref().and_then(|place| place.split(':').nth(1)?.parse::<usize>().ok());
            match line.and_then(|line| lines.get(line - 1)?.0.clone()) {
                Some(key) => refused.0.push((key, problem)),
                None => refused.1.push(problem),
            }
        }
        refused
    }

    /// Every line, with its key where it has one.
    fn lines(&self) -> Vec<(Option<String>, String)> {
        let mut lines: Vec<_> = self.header.iter().map(|line| comment(line)).collect();
        self.table(&mut lines, Recipe::ROWS, "");
        if !self.footer.is_empty() {
            lines.push((None, String::new()));
            lines.extend(self.footer.iter().chain(&self.last).map(|line| comment(line)));
        }
        lines
    }

    /// The keys of a section in the order of its rows, then the sections below.
    fn table(&self, lines: &mut Vec<(Option<String>, String)>, rows: &[KeyRow], path: &str) {
        let own = rows.iter().filter(|row| row.keys.is_empty());
        let own = own.filter_map(|row| self.settings.iter().find(|setting| setting.key == below(path, row.name)));
        let own: Vec<&Setting> = own.collect();
        if !own.is_empty() {
            if !lines.is_empty() {
                lines.push((None, String::new()));
            }
            lines.extend(header(path).map(|header| (None, header)));
        }
        own.into_iter().for_each(|setting| lines.extend(setting.lines()));
        for row in rows.iter().filter(|row| !row.keys.is_empty()) {
            let name = below(path, row.name);
            let elements = self.elements(&name);
            if elements.is_empty() {
                self.table(lines, row.keys, &name);
            }
            elements.into_iter().for_each(|index| self.table(lines, row.keys, &format!("{name}.{index}")));
        }
    }

    /// The numbers of the elements of a list of sections.
    fn elements(&self, name: &str) -> BTreeSet<usize> {
        let number = |setting: &Setting| {
            let rest = setting.key.strip_prefix(name)?.strip_prefix('.')?;
            rest.split('.').next()?.parse().ok()
        };
        self.settings.iter().filter_map(number).collect()
    }
}

impl Setting {
    /// `key = value  # comment`, or the comment above it where that is too wide.
    fn lines(&self) -> Vec<(Option<String>, String)> {
        let name = self.key.rsplit('.').next().unwrap_or_default();
        let mark = if self.is_offered { "# " } else { "" };
        let line = format!("{mark}{name} = {}", shown(&self.value));
        let key = (!self.is_offered).then(|| self.key.clone());
        let columns = line.chars().count() + self.comment.chars().count() + 4;
        match self.comment.as_str() {
            "" => vec![(key, line)],
            comment if columns <= MAX_COLUMNS => vec![(key, format!("{line:<32}  # {comment}"))],
            text => vec![comment(text), (key, line)],
        }
    }
}

/// A value in TOML; a small number as 1e-5, not as 0.00001.
fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(number) if *number != 0.0 && number.abs() < 1e-3 => format!("{number:e}"),
        value => value.to_string(),
    }
}

fn comment(text: &str) -> (Option<String>, String) {
    (None, format!("# {text}").trim_end().to_owned())
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// `[lora]`, `[[data.train]]` for `data.train.0`; none at the top.
fn header(path: &str) -> Option<String> {
    match path.rsplit_once('.') {
        Some((list, index)) if index.parse::<usize>().is_ok() => Some(format!("[[{list}]]")),
        _ => (!path.is_empty()).then(|| format!("[{path}]")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft() -> Draft {
        let mut draft = Draft { header: vec!["For a test.".into()], ..Draft::default() };
        draft.set("data.train.1.path", "b.jsonl", "");
        draft.set("data.train.0.path", "a.jsonl", "rows");
        draft.set("lora.r", 8, "");
        draft.set("lora.r", 16, "a rank ".repeat(20));
        draft.set("output_dir", "runs/x", "");
        draft.set("data.max_length", 512, "");
        draft.set("model.path", "quickstart/model", "");
        draft
    }

    #[test]
    fn settings_come_in_the_order_of_the_reference_under_their_sections() {
        let expected = format!(
            "# For a test.\n\noutput_dir = \"runs/x\"\n\n[model]\npath = \"quickstart/model\"\n\n[lora]\n# {}\nr = \
             16\n\n[data]\nmax_length = 512\n\n[[data.train]]\npath = \"a.jsonl\"                  # \
             rows\n\n[[data.train]]\npath = \"b.jsonl\"\n",
            "a rank ".repeat(20).trim_end()
        );
        assert_eq!(draft().text(), expected);
    }

    #[test]
    fn what_the_user_gives_stays_and_what_is_offered_is_a_comment() {
        let mut draft = draft();
        let changes = [
            "lora.r=4",
            "data.train[0].columns={ prompt = \"a\", completion = \"b\" }",
            "lora.rank_pattern.q_proj=2",
            "lora.rank_pattern.\"layers.0\"=3",
            "optimizer.learning_rate=0.00001",
            "data.max_length=",
            "eval={ eval_steps = 5, generate = [\"x\"] }",
        ];
        changes.iter().for_each(|change| draft.give(&Override::set(*change)));
        draft.set("lora.r", 16, "");
        draft.set("data.max_length", 128, "");
        draft.offer("lora.r", 1, "");
        draft.offer("data.on_bad_row", "skip", "leaves rows out");
        let text = draft.text();
        for line in [
            "r = 4",
            "rank_pattern = { q_proj = 2, \"layers.0\" = 3 }",
            "columns = { prompt = \"a\", completion = \"b\" }",
            "learning_rate = 1e-5",
            "# on_bad_row = \"skip\"             # leaves rows out",
            "eval_steps = 5",
            "generate = [\"x\"]",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert!(!text.contains("max_length") && draft.get("data.on_bad_row").is_none(), "{text}");
        assert_eq!(draft.refused(), Default::default());
    }

    #[test]
    fn what_a_recipe_refuses_is_found_by_its_line() {
        assert_eq!(draft().refused(), Default::default());
        let mut wrong = draft();
        wrong.set("lora.lora_dropout", 1.5, "");
        wrong.set("data.train.1.weight", -1.0, "");
        let (refused, others) = wrong.refused();
        let keys: Vec<&str> = refused.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!((keys, others.len()), (vec!["lora.lora_dropout", "data.train.1.weight"], 0));
        let empty = Draft::default().refused();
        assert!(empty.0.is_empty() && !empty.1.is_empty());
    }
}
