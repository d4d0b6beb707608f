//! "did you mean": finds the key that the user probably meant.

use super::problem::Problem;
use super::section::{Record, Unknown, quoted_list};

/// Names that other trainers use for one of our keys.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Spellings of the name.
    pub names: &'static [&'static str],
    /// Section or sections of our key (`lora`, `data.train`; empty for the top).
    pub section: String,
    /// Our key; absent where there is no such key and `note` says what to do instead.
    pub key: Option<&'static str>,
    /// An additional note for the user.
    pub note: Option<&'static str>,
}

/// Longest word that may be a typing mistake: none of our keys is nearly as long.
const MAX_MISTYPED_BYTES: usize = 64;

/// The candidate most similar to `word`, if any is similar enough.
pub fn closest<'c>(word: &str, candidates: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    // The comparison's time and memory grow with both lengths.
    if word.len() > MAX_MISTYPED_BYTES {
        return None;
    }
    let word = word.to_lowercase().replace('-', "_");
    let likeness = |candidate: &str| {
        let is_part = word.len() >= 3 && (candidate.starts_with(&word) || candidate.ends_with(&word));
        let distance = strsim::normalized_damerau_levenshtein(&word, candidate);
        if is_part { distance.max(0.75) } else { distance }
    };
    candidates
        .map(|candidate| (likeness(candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// The problem for an unknown key. It checks in this order: another trainer's name, a correct key in the wrong section,
/// a typing mistake.
pub(super) fn unknown_key(unknown: &Unknown, record: &Record, peers: &[Peer]) -> Problem {
    let Unknown { section, key, is_section, .. } = unknown;
    let child = |section: &str, key: &str| if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
    let what =
        if *is_section { format!("unknown section [{}]", child(section, key)) } else { format!("unknown key `{key}`") };
    let in_header = |name: &str| match record.headers.get(name) {
        Some(header) => format!("in {header}"),
        None => "at the top, before the first section".to_owned(),
    };
    let is_declared = |section: &str, key: &str| record.declared.iter().any(|(s, k)| s == section && *k == key);

    // Another trainer's name; the entry for this section is preferred.
    let spelling = key.to_lowercase().replace('-', "_");
    let mut known: Vec<&Peer> = peers.iter().filter(|peer| peer.names.contains(&spelling.as_str())).collect();
    // [adapter] is a section, `adapter = "lora"` a key.
    let leads_to_section =
        |peer: &Peer| peer.key.is_some_and(|ours| record.headers.contains_key(&child(&peer.section, ours)));
    if known.iter().any(|peer| leads_to_section(peer) == *is_section) {
        known.retain(|peer| leads_to_section(peer) == *is_section);
    }
    let homes: Vec<&str> =
        record.declared.iter().filter(|(_, declared)| *declared == key).map(|(section, _)| section.as_str()).collect();
    let here = known.iter().find(|peer| peer.section == *section);
    if let Some(peer) = here.or(known.first().filter(|_| homes.is_empty())) {
        let message = match peer.key {
            None => what,
            Some(ours) => {
                let name = child(&peer.section, ours);
                let ours = match record.headers.get(&name) {
                    Some(header) => header.clone(),
                    None if peer.section == *section => format!("`{ours}`"),
                    None => format!("`{ours}`, {}", in_header(&peer.section)),
                };
                format!("{what}; this trainer calls it {ours}")
            }
        };
        return Problem { hint: peer.note.map(str::to_owned), ..Problem::new(message) };
    }

    // A correct key in the wrong section; sections below this one come first.
    let mut homes: Vec<&str> = homes.into_iter().filter(|home| home != section).collect();
    homes.dedup();
    let below = format!("{section}.");
    if homes.iter().any(|home| home.starts_with(&below)) {
        homes.retain(|home| home.starts_with(&below));
    }
    if !homes.is_empty() && !is_declared(section, key) {
        let homes: Vec<String> = homes.iter().map(|home| in_header(home)).collect();
        return Problem::new(format!("{what}; it belongs {}", homes.join(" or ")));
    }

    // A typing mistake: search this section first, then all others.
    let here: Vec<&str> =
        record.declared.iter().filter(|(declared, _)| declared == section).map(|(_, key)| *key).collect();
    if let Some(meant) = closest(key, here.iter().copied()) {
        let header = record.headers.get(&child(section, meant));
        let meant = header.cloned().unwrap_or_else(|| format!("`{meant}`"));
        return Problem::new(what).hint(format!("did you mean {meant}?"));
    }
    if let Some(meant) = closest(key, record.declared.iter().map(|(_, key)| *key))
        && let Some((home, _)) = record.declared.iter().find(|(_, declared)| *declared == meant)
    {
        return Problem::new(what).hint(format!("did you mean `{meant}`, {}?", in_header(home)));
    }
    let mut here = here;
    here.dedup();
    let whose = record.headers.get(section).map_or("a recipe", String::as_str);
    Problem::new(what).hint(format!("{whose} takes {}", quoted_list(&here)))
}
