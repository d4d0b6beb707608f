//! "did you mean": finds the key that the user probably meant.

use std::collections::BTreeMap;

use super::keys::{KeyRow, Peer};
use super::problem::Problem;
use super::tree::ValuePlace;

/// Longest word that may be a typing mistake: none of our keys is nearly as long.
const MAX_MISTYPED_BYTES: usize = 64;

/// The candidate most similar to `word`, if any is similar enough.
pub fn closest<'c>(word: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    // The comparison's time and memory grow with both lengths.
    if word.len() > MAX_MISTYPED_BYTES {
        return None;
    }
    let folded = |name: &str| name.to_lowercase().replace('-', "_");
    let word = folded(word);
    let likeness = |candidate: &str| {
        let candidate = folded(candidate);
        let is_part = word.len() >= 3 && (candidate.starts_with(&word) || candidate.ends_with(&word));
        let distance = strsim::normalized_damerau_levenshtein(&word, &candidate);
        if is_part { distance.max(0.75) } else { distance }
    };
    candidates
        .map(|candidate| (likeness(candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// What a key of another trainer's configuration is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counterpart {
    /// This key or section: `lora.r`.
    Key(String),
    /// Something else, as the note says.
    Other(&'static str),
    /// Nothing; a name that it is nearly spelled like.
    Unknown(Option<&'static str>),
}

/// Finds our key for a key that another trainer, or we, call `name`, in the section that is `section` here.
#[must_use]
pub fn counterpart(name: &str, section: &str, is_section: bool, rows: &[KeyRow], peers: &[Peer]) -> Counterpart {
    let known = Known::new(rows);
    let own = |home: &str| known.keys.iter().any(|(section, key)| section == home && *key == name);
    // `optimizer = "adamw"` is not our section of this name.
    if own(section) && known.headers.contains_key(&child(section, name)) == is_section {
        return Counterpart::Key(child(section, name));
    }
    let names = known.names(name, is_section, peers);
    let is_alike = |home: &str| known.headers.contains_key(&child(home, name)) == is_section;
    let mut homes = known.keys.iter().filter(|(home, key)| *key == name && is_alike(home));
    match (names.iter().find(|peer| peer.section == section), homes.next(), homes.next()) {
        (None, Some((home, _)), None) => Counterpart::Key(child(home, name)),
        (here, ..) => match here.or(names.first()) {
            Some(Peer { note: Some(note), .. }) => Counterpart::Other(note),
            Some(Peer { key: Some(key), section, .. }) => Counterpart::Key(child(section, key)),
            _ => {
                let names = peers.iter().flat_map(|peer| peer.names.iter().copied());
                let near = closest(name, known.keys.iter().map(|(_, key)| *key).chain(names));
                Counterpart::Unknown(near.filter(|near| strsim::damerau_levenshtein(name, near) <= name.len() / 6))
            }
        },
    }
}

/// A key that no section declares.
pub(super) struct Unknown {
    pub(super) place: ValuePlace,
    /// Name of its section: `lora`, `data.train`; empty at the top.
    pub(super) section: String,
    pub(super) key: String,
    /// Whether its value is a table or a list of tables.
    pub(super) is_section: bool,
}

/// The keys and sections that exist.
pub(super) struct Known {
    /// Section and name of every key.
    keys: Vec<(String, &'static str)>,
    /// How a section is written: `[lora]`, `[[data.train]]`.
    headers: BTreeMap<String, String>,
}

impl Known {
    pub(super) fn new(rows: &[KeyRow]) -> Self {
        let mut known = Self { keys: Vec::new(), headers: BTreeMap::new() };
        known.add(rows, "");
        known
    }

    fn add(&mut self, rows: &[KeyRow], section: &str) {
        for row in rows {
            self.keys.push((section.to_owned(), row.name));
            if !row.keys.is_empty() {
                let name = child(section, row.name);
                let is_list = (row.default)().is_some_and(|default| default.is_array());
                let header = if is_list { format!("[[{name}]]") } else { format!("[{name}]") };
                self.add(row.keys, &name);
                self.headers.insert(name, header);
            }
        }
    }

    /// Where a key of this section is written.
    fn within(&self, section: &str) -> String {
        match self.headers.get(section) {
            Some(header) => format!("in {header}"),
            None => "at the top, before the first section".to_owned(),
        }
    }

    /// The entries of a name in other trainers.
    fn names<'p>(&self, name: &str, is_section: bool, peers: &'p [Peer]) -> Vec<&'p Peer> {
        let spelling = name.to_lowercase().replace('-', "_");
        let mut names: Vec<&Peer> = peers.iter().filter(|peer| peer.names.contains(&spelling.as_str())).collect();
        // [adapter] is a section, `adapter = "lora"` a key.
        let is_for_section =
            |peer: &Peer| peer.key.is_some_and(|ours| self.headers.contains_key(&child(&peer.section, ours)));
        if names.iter().any(|peer| is_for_section(peer) == is_section) {
            names.retain(|peer| is_for_section(peer) == is_section);
        }
        names
    }

    /// The problem for an unknown key. It checks in this order: another trainer's name, a correct key in the wrong
    /// section, a typing mistake.
    pub(super) fn explain(&self, unknown: &Unknown, peers: &[Peer]) -> Problem {
        let Unknown { section, key, is_section, .. } = unknown;
        let what = if *is_section {
            format!("unknown section [{}]", child(section, key))
        } else {
            format!("unknown key `{key}`")
        };
        let homes: Vec<&str> =
            self.keys.iter().filter(|(_, known)| known == key).map(|(section, _)| section.as_str()).collect();

        // Another trainer's name; the entry for this section is preferred.
        let names = self.names(key, *is_section, peers);
        let here = names.iter().find(|peer| peer.section == *section);
        if let Some(peer) = here.or(names.first().filter(|_| homes.is_empty())) {
            let ours = peer.key.map(|ours| match self.headers.get(&child(&peer.section, ours)) {
                Some(header) => header.clone(),
                None if peer.section == *section => format!("`{ours}`"),
                None => format!("`{ours}`, {}", self.within(&peer.section)),
            });
            let message = ours.map_or(what.clone(), |ours| format!("{what}; this trainer calls it {ours}"));
            return Problem { hint: peer.note.map(str::to_owned), ..Problem::new(message) };
        }

        // A correct key in the wrong section; sections below this one come first.
        let below = format!("{section}.");
        let is_below = |home: &str| home.starts_with(&below);
        let some_below = homes.iter().any(|home| is_below(home));
        let homes: Vec<String> =
            homes.iter().filter(|home| !some_below || is_below(home)).map(|home| self.within(home)).collect();
        if !homes.is_empty() {
            return Problem::new(format!("{what}; it belongs {}", homes.join(" or ")));
        }

        // A typing mistake: search this section first, then all others.
        let here: Vec<&str> = self.keys.iter().filter(|(home, _)| home == section).map(|(_, key)| *key).collect();
        let hint = if let Some(meant) = closest(key, here.iter().copied()) {
            let header = self.headers.get(&child(section, meant));
            format!("did you mean {}?", header.cloned().unwrap_or_else(|| format!("`{meant}`")))
        } else if let Some(meant) = closest(key, self.keys.iter().map(|(_, key)| *key))
            && let Some((home, _)) = self.keys.iter().find(|(_, known)| *known == meant)
        {
            format!("did you mean `{meant}`, {}?", self.within(home))
        } else {
            let whose = self.headers.get(section).map_or("a recipe", String::as_str);
            format!("{whose} takes {}", quoted_list(&here))
        };
        Problem::new(what).hint(hint)
    }
}

/// The name of a key or section below another.
fn child(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// "`a`, `b`".
fn quoted_list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
