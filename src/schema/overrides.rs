//! Changes to a recipe from the command line.

use toml::de::DeTable;

use super::problem::Problem;
use super::syntax;
use super::tree::{Entry, Node, Table, Value, ValuePlace};

/// One change to a recipe from the command line: `--set lora.r=16`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// As typed, for messages.
    shown: String,
    /// `section.key=value`.
    assignment: String,
}

impl Override {
    /// `--set section.key=value`. The value is read as TOML. A value that is not TOML is text, unless it begins like a
    /// list, a table or a quoted text. An empty value takes the key out of the recipe. An element of a list is written
    /// as `data.train[0].path` or `data.train.0.path`.
    pub fn set(assignment: impl Into<String>) -> Self {
        let assignment = assignment.into();
        Self { shown: format!("--set {assignment}"), assignment }
    }

    /// Another argument that sets a key to a text: `--device cpu` sets `device.name`.
    #[must_use]
    pub fn argument(flag: &str, key: &str, text: &str) -> Self {
        Self { shown: format!("{flag} {text}"), assignment: format!("{key}={}", toml::Value::from(text)) }
    }

    /// The text of a recipe with changes in it: what they do not touch stays as it is, comments too. `None` where one does
    /// not fit the text; whoever asks reads the text again.
    #[must_use]
    pub fn write_all(changes: &[Self], text: &str) -> Option<String> {
        changes.iter().try_fold(text.to_owned(), |text, change| change.write(text))
    }

    fn write(&self, mut text: String) -> Option<String> {
        let (key, value) = self.assignment.split_once('=')?;
        let (names, value) = (names(key.trim()).ok()?, value.trim());
        if value.is_empty() {
            return None;
        }
        let is_toml = DeTable::parse(&format!("value = {value}")).is_ok_and(|table| table.get_ref().len() == 1);
        let value = if is_toml { value.to_owned() } else { toml::Value::from(value).to_string() };
        let mut node = Node { place: ValuePlace::File, value: Value::Table(syntax::parse(&text).0) };
        let mut depth = 0;
        while let Some(child) = names.get(depth).and_then(|name| node.child(name)) {
            (node, depth) = (child.clone(), depth + 1);
        }
        let is_bare = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        let name = |name: &String| if is_bare(name) { name.clone() } else { toml::Value::from(&**name).to_string() };
        let shown = |names: &[String]| names.iter().map(name).collect::<Vec<_>>().join(".");
        match (&names[depth..], node.place) {
            ([], ValuePlace::Span { start, end }) => text.replace_range(start..end, &value),
            ([key], ValuePlace::File) => text.insert_str(0, &format!("{} = {value}\n", name(key))),
            ([sections @ .., key], ValuePlace::File) => {
                text = format!("{}\n\n[{}]\n{} = {value}\n", text.trim_end(), shown(sections), name(key));
            }
            (rest, ValuePlace::Span { end, .. }) => {
                // Below the header of the section.
                let line_end = text.get(end..)?.find('\n').map_or(text.len(), |at| end + at);
                text.insert_str(line_end, &format!("\n{} = {value}", shown(rest)));
            }
            _ => return None,
        }
        Some(text)
    }

    /// The names of its key, and the value; no value where it takes the key out. `None` where it is no change.
    #[must_use]
    pub fn parts(&self) -> Option<(Vec<String>, Option<toml::Value>)> {
        let (key, value) = self.assignment.split_once('=')?;
        let text = value.trim();
        let table = toml::from_str::<toml::Table>(&format!("value = {text}")).ok().filter(|table| table.len() == 1);
        let value = table.and_then(|mut table| table.remove("value")).unwrap_or_else(|| text.into());
        Some((names(key.trim()).ok()?, (!text.is_empty()).then_some(value)))
    }

    /// Applies the change to `root`; `index` is the argument's position among the changes.
    pub(super) fn apply(&self, root: &mut Node, index: usize) -> Result<(), (ValuePlace, Problem)> {
        let place = ValuePlace::Argument { index, text: self.shown.as_str().into() };
        self.apply_at(root, &place).map_err(|problem| (place, problem))
    }

    fn apply_at(&self, root: &mut Node, place: &ValuePlace) -> Result<(), Problem> {
        let no_value = || Problem::new("expected section.key=value").hint("for example --set lora.r=16");
        let (key, value) = self.assignment.split_once('=').ok_or_else(no_value)?;
        let names = names(key.trim())?;
        let value = match value.trim() {
            "" => None,
            value => Some(parse_value(value, place)?),
        };
        change(root, &names, value, place, "")
    }
}

/// Most names in a path: no recipe is nested nearly as deep, and each takes a stack frame.
const MAX_NAMES: usize = 32;

/// Splits `data.train[0].path` into names, `[0]` like `.0`; names with dots are quoted:
/// `lora.rank_pattern."layers.0"`.
pub(super) fn names(path: &str) -> Result<Vec<String>, Problem> {
    let invalid = || Problem::new(format!("`{path}` is not the name of a key")).hint("write section.key=value");
    let mut names = Vec::new();
    let mut rest = path;
    loop {
        let (name, after) = if let Some(inside) = rest.strip_prefix('[') {
            inside.split_once(']').filter(|(index, _)| index.parse::<usize>().is_ok()).ok_or_else(invalid)?
        } else {
            let name = if names.is_empty() { rest } else { rest.strip_prefix('.').ok_or_else(invalid)? };
            match name.chars().next() {
                Some(quote @ ('"' | '\'')) => name[1..].split_once(quote).ok_or_else(invalid)?,
                _ => {
                    let (name, after) = name.split_at(name.find(['.', '[']).unwrap_or(name.len()));
                    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
                    if name.is_empty() || !name.chars().all(is_bare) {
                        return Err(invalid());
                    }
                    (name, after)
                }
            }
        };
        names.push(name.to_owned());
        if names.len() > MAX_NAMES {
            return Err(Problem::new(format!("the name of a key has more than {MAX_NAMES} parts")));
        }
        if after.is_empty() {
            return Ok(names);
        }
        rest = after;
    }
}

fn parse_value(text: &str, place: &ValuePlace) -> Result<Node, Problem> {
    let document = format!("value = {text}");
    match DeTable::parse(&document) {
        Ok(table) if table.get_ref().len() == 1 => {
            let table = Table::from_toml(table.into_inner(), Some(place));
            if let Some(entry) = table.entries.into_iter().next() {
                return Ok(entry.node);
            }
        }
        Err(error) if text.starts_with(['[', '{', '"', '\'']) => {
            let hint = format!("text that begins with `{}` needs quotes of its own: '...'", &text[..1]);
            return Err(Problem::new(format!("not a TOML value: {}", syntax::in_words(&error, &document))).hint(hint));
        }
        _ => {}
    }
    Ok(Node { place: place.clone(), value: Value::String(text.to_owned()) })
}

/// Puts `value` where `names` lead, or takes out what is there; `walked` is the path to `node`.
fn change(
    node: &mut Node,
    names: &[String],
    value: Option<Node>,
    place: &ValuePlace,
    walked: &str,
) -> Result<(), Problem> {
    let [name, rest @ ..] = names else {
        if let Some(value) = value {
            *node = value;
        }
        return Ok(());
    };
    let is_taken_out = rest.is_empty() && value.is_none();
    let shown = node.value.shown();
    match &mut node.value {
        Value::Table(table) => {
            let walked = if walked.is_empty() { name.clone() } else { format!("{walked}.{name}") };
            match table.entries.iter().position(|entry| entry.key == *name) {
                Some(index) if is_taken_out => drop(table.entries.remove(index)),
                Some(index) => {
                    let entry = &mut table.entries[index];
                    if rest.is_empty() {
                        entry.key_place = place.clone();
                    }
                    change(&mut entry.node, rest, value, place, &walked)?;
                }
                None if value.is_none() => {
                    return Err(Problem::new(format!("there is no `{walked}` in the recipe to take out")));
                }
                None => {
                    let mut node = empty_for(rest, place);
                    change(&mut node, rest, value, place, &walked)?;
                    table.entries.push(Entry { key: name.clone(), key_place: place.clone(), node });
                }
            }
        }
        Value::Array(items) => {
            let Ok(index) = name.parse::<usize>() else {
                let hint = format!("name one of its elements: {walked}[0]");
                return Err(Problem::new(format!("`{walked}` is a list")).hint(hint));
            };
            let (len, walked) = (items.len(), format!("{walked}[{index}]"));
            if index < len && is_taken_out {
                items.remove(index);
            } else if index < len {
                change(&mut items[index], rest, value, place, &walked)?;
            } else if index == len && value.is_some() {
                let mut item = empty_for(rest, place);
                change(&mut item, rest, value, place, &walked)?;
                items.push(item);
            } else {
                let elements = if len == 1 { "1 element".to_owned() } else { format!("{len} elements") };
                return Err(Problem::new(format!("there is no `{walked}`: the list has {elements}")));
            }
        }
        _ => return Err(Problem::new(format!("`{walked}` = {shown} has no keys"))),
    }
    Ok(())
}

/// The value of a new key before the change: a list where the next name is a number, a table otherwise.
fn empty_for(rest: &[String], place: &ValuePlace) -> Node {
    let value = match rest.first() {
        Some(name) if name.parse::<usize>().is_ok() => Value::Array(Vec::new()),
        _ => Value::Table(Table::default()),
    };
    Node { place: place.clone(), value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_written_into_a_text_whose_comments_stay() {
        let text = "# mine\n[lora]   # adapters\nr = 8  # rank\n[[data.train]]\npath = \"a\"\n";
        for (change, expected) in [
            ("lora.r=16", text.replace('8', "16")),
            ("data.train.0.path=b.jsonl", text.replace("\"a\"", "\"b.jsonl\"")),
            ("data.train[0].path=b.jsonl", text.replace("\"a\"", "\"b.jsonl\"")),
            ("lora.rank_pattern={q_proj = 4}", text.replace("adapters", "adapters\nrank_pattern = {q_proj = 4}")),
            ("seed=3", format!("seed = 3\n{text}")),
            ("train.max_steps=2", format!("{text}\n[train]\nmax_steps = 2\n")),
            ("lora.rank_pattern.\"a.b\"=4", text.replace("adapters", "adapters\nrank_pattern.\"a.b\" = 4")),
        ] {
            assert_eq!(Override::write_all(&[Override::set(change)], text), Some(expected), "{change}");
        }
        assert_eq!(Override::write_all(&[Override::set("lora.r=")], text), None);
        let twice = [Override::set("train.max_steps=2"), Override::set("train.num_epochs=1.5")];
        assert!(Override::write_all(&twice, text).unwrap().ends_with("[train]\nnum_epochs = 1.5\nmax_steps = 2\n"));
    }
}
