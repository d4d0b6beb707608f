//! Changes to a recipe from the command line.

use toml::de::DeTable;

use super::places::Place;
use super::problem::Problem;
use super::syntax;
use super::tree::{Entry, Node, Table, Value, argument};

/// One change to a recipe from the command line: `--set lora.r=16`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// As typed, for messages.
    shown: String,
    /// `section.key=value`, or a key and its text.
    change: Change,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Change {
    Assignment(String),
    Text { key: String, text: String },
}

impl Override {
    /// `--set section.key=value`. The value is read as TOML. A value that is not TOML is text, unless it begins like a
    /// list, a table or a quoted text. An empty value takes the key out of the recipe. An element of a list is written
    /// as `data.train[0].path` or `data.train.0.path`.
    pub fn set(assignment: impl Into<String>) -> Self {
        let assignment = assignment.into();
        Self { shown: format!("--set {assignment}"), change: Change::Assignment(assignment) }
    }

    /// Another argument that sets a key to a text: `--device cpu` sets `device.name`.
    #[must_use]
    pub fn argument(flag: &str, key: &str, text: &str) -> Self {
        let change = Change::Text { key: key.to_owned(), text: text.to_owned() };
        Self { shown: format!("{flag} {text}"), change }
    }

    /// Applies the change to `root`; `index` is the argument's position among the changes.
    pub(super) fn apply(&self, root: &mut Table, index: usize) -> Result<(), (Place, Problem)> {
        let place = argument(index, &self.shown);
        let result = match &self.change {
            Change::Text { key, text } => {
                let node = Node { place: place.clone(), value: Value::String(text.clone()) };
                steps(key).and_then(|steps| change_table(root, &steps, Some(node), &place, ""))
            }
            Change::Assignment(assignment) => match assignment.split_once('=') {
                None => Err(Problem::new("expected section.key=value").hint("for example --set lora.r=16")),
                Some((key, value)) => steps(key.trim()).and_then(|steps| {
                    let node = match value.trim() {
                        "" => None,
                        value => Some(parse_value(value, &place)?),
                    };
                    change_table(root, &steps, node, &place, "")
                }),
            },
        };
        result.map_err(|problem| (place, problem))
    }
}

/// One step from a table or a list to something in it.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// A name between dots: a key, or an index if the value is a list.
    Name(String),
    /// `[0]`.
    Index(usize),
}

impl Step {
    fn index(&self) -> Option<usize> {
        match self {
            Self::Name(name) => name.parse().ok(),
            Self::Index(index) => Some(*index),
        }
    }
}

/// Most steps in a path: no recipe is nested nearly as deep, and each step takes a stack frame.
const MAX_STEPS: usize = 32;

/// Splits `data.train[0].path` into steps; names with dots are quoted: `lora.rank_pattern."layers.0"`.
pub(super) fn steps(path: &str) -> Result<Vec<Step>, Problem> {
    let invalid = || Problem::new(format!("`{path}` is not the name of a key")).hint("write section.key=value");
    let mut steps = Vec::new();
    let mut rest = path;
    loop {
        let end;
        if let Some(quote) = rest.chars().next().filter(|c| matches!(c, '"' | '\'')) {
            end = rest[1..].find(quote).ok_or_else(invalid)? + 2;
            steps.push(Step::Name(rest[1..end - 1].to_owned()));
        } else {
            end = rest.find(['.', '[']).unwrap_or(rest.len());
            let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if end == 0 || !rest[..end].chars().all(is_bare) {
                return Err(invalid());
            }
            steps.push(Step::Name(rest[..end].to_owned()));
        }
        rest = &rest[end..];
        while let Some(inside) = rest.strip_prefix('[') {
            let (index, after) = inside.split_once(']').ok_or_else(invalid)?;
            steps.push(Step::Index(index.parse().map_err(|_| invalid())?));
            rest = after;
        }
        if steps.len() > MAX_STEPS {
            return Err(Problem::new(format!("the name of a key has more than {MAX_STEPS} parts")));
        }
        if rest.is_empty() {
            return Ok(steps);
        }
        rest = rest.strip_prefix('.').ok_or_else(invalid)?;
    }
}

fn parse_value(text: &str, place: &Place) -> Result<Node, Problem> {
    let document = format!("value = {text}");
    match DeTable::parse(&document) {
        Ok(table) if table.get_ref().len() == 1 => {
            let table = Table::new(table.into_inner(), Some(place));
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

fn change_table(
    table: &mut Table,
    steps: &[Step],
    value: Option<Node>,
    place: &Place,
    walked: &str,
) -> Result<(), Problem> {
    let [Step::Name(name), rest @ ..] = steps else {
        return Err(Problem::new(format!("`{walked}` is a table, not a list")));
    };
    let walked = if walked.is_empty() { name.clone() } else { format!("{walked}.{name}") };
    let position = table.entries.iter().position(|entry| entry.key == *name);
    match (position, value) {
        (None, None) => Err(Problem::new(format!("there is no `{walked}` in the recipe to take out"))),
        (Some(position), None) if rest.is_empty() => {
            table.entries.remove(position);
            Ok(())
        }
        (Some(position), value) => {
            let entry = &mut table.entries[position];
            if rest.is_empty() {
                entry.key_place = place.clone();
            }
            change_node(&mut entry.node, rest, value, place, &walked)
        }
        (None, value) => {
            let mut node = empty_for(rest, place);
            change_node(&mut node, rest, value, place, &walked)?;
            table.entries.push(Entry { key: name.clone(), key_place: place.clone(), node });
            Ok(())
        }
    }
}

fn change_node(
    node: &mut Node,
    steps: &[Step],
    value: Option<Node>,
    place: &Place,
    walked: &str,
) -> Result<(), Problem> {
    let Some((step, rest)) = steps.split_first() else {
        if let Some(value) = value {
            *node = value;
        }
        return Ok(());
    };
    let shown = node.shown();
    match &mut node.value {
        Value::Table(table) => change_table(table, steps, value, place, walked),
        Value::Array(items) => {
            let len = items.len();
            let Some(index) = step.index() else {
                let hint = format!("name one of its elements: {walked}[0]");
                return Err(Problem::new(format!("`{walked}` is a list")).hint(hint));
            };
            let walked = format!("{walked}[{index}]");
            if index == len && value.is_some() {
                let mut item = empty_for(rest, place);
                change_node(&mut item, rest, value, place, &walked)?;
                items.push(item);
                return Ok(());
            }
            let Some(item) = items.get_mut(index) else {
                let elements = if len == 1 { "1 element".to_owned() } else { format!("{len} elements") };
                return Err(Problem::new(format!("there is no `{walked}`: the list has {elements}")));
            };
            if rest.is_empty() && value.is_none() {
                items.remove(index);
                return Ok(());
            }
            change_node(item, rest, value, place, &walked)
        }
        _ => Err(Problem::new(format!("`{walked}` = {shown} has no keys"))),
    }
}

/// The value of a new key before the change: a list where the next step is an index, a table otherwise.
fn empty_for(rest: &[Step], place: &Place) -> Node {
    let value = match rest.first() {
        Some(step) if step.index().is_some() => Value::Array(Vec::new()),
        _ => Value::Table(Table::default()),
    };
    Node { place: place.clone(), value }
}
