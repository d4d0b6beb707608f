//! One row: its text and its tokens, with the tokens that carry loss marked.

use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::data::encode::EncodedRow;
use crate::data::tokenizer::{Tokenizer, TokenizerError};

/// Width of token lists, in characters.
const LINE_WIDTH: usize = 100;

/// How tokens with loss are distinguished from tokens without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marks {
    /// Green against dim.
    Color,
    /// Between `⟦` and `⟧`.
    Brackets,
}

impl Marks {
    /// The marks around a stretch with loss, and around one without.
    fn around(self, carries_loss: bool) -> [&'static str; 2] {
        match (self, carries_loss) {
            (Self::Color, true) => ["\x1b[1;32m", "\x1b[0m"],
            (Self::Color, false) => ["\x1b[2m", "\x1b[0m"],
            (Self::Brackets, true) => ["⟦", "⟧"],
            (Self::Brackets, false) => ["", ""],
        }
    }

    fn legend(self) -> &'static str {
        match self {
            Self::Color => "\x1b[1;32mgreen\x1b[0m carries loss",
            Self::Brackets => "⟦ ⟧ carry loss",
        }
    }
}

/// Row `index` of the file `path` as JSON.
pub(super) fn json(path: &Path, index: usize, row: &EncodedRow) -> Value {
    let mut json = json!({"path": path, "row": index, "length": row.full_length, "skipped": why_left_out(row), "ids": row.ids,
                          "carries_loss": row.carries_loss});
    if row.second > 0 {
        json["rejected_from"] = row.second.into();
    }
    if row.margin != 0.0 {
        json["margin"] = row.margin.into();
    }
    if row.is_bad_answer {
        json["label"] = false.into();
    }
    json
}

/// Why training skips a row, if it does.
fn why_left_out(row: &EncodedRow) -> Option<&str> {
    match &row.problem {
        Some(problem) => Some(problem),
        None if row.is_answer_cut() && row.second > 0 => {
            Some("an answer, or how the two differ, is behind `data.max_length`")
        }
        None if row.is_answer_cut() => Some("nothing of the answer is left at `data.max_length`"),
        None if row.num_target_tokens() == 0 => {
            Some("nothing carries loss: there is no answer, an empty one, or one of weight 0")
        }
        None => None,
    }
}

/// Writes row `index` of the file `path`.
pub(super) fn write(
    out: &mut dyn Write,
    path: &Path,
    index: usize,
    row: &EncodedRow,
    tokenizer: &Tokenizer,
    marks: Marks,
) -> Result<(), super::InspectError> {
    if row.problem.is_some() {
        let why = why_left_out(row).unwrap_or_default();
        return Ok(writeln!(out, "{} row {}: left out: {why}", path.display(), index + 1)?);
    }
    let (length, targets) = (row.ids.len(), row.num_target_tokens());
    write!(out, "{} row {}: {length} tokens, {targets} carry loss", path.display(), index + 1)?;
    if row.is_truncated() {
        write!(out, ", cut off from {}", row.full_length)?;
    }
    if let Some(why) = why_left_out(row) {
        write!(out, "; left out: {why}")?;
    }
    if row.is_bad_answer {
        write!(out, "; a bad answer")?;
    }
    if row.margin != 0.0 {
        write!(out, "; margin {}", row.margin)?;
    }
    writeln!(out)?;
    let sequences = row.sequences();
    let names: &[&str] = if sequences.len() > 1 { &["chosen ", "rejected "] } else { &[""] };
    for (sequence, name) in sequences.into_iter().zip(names) {
        let (ids, carries_loss) = (&row.ids[sequence.clone()], &row.carries_loss[sequence]);
        writeln!(out, "  {name}text ({}):", marks.legend())?;
        write_text(out, &marked_text(ids, carries_loss, tokenizer, marks)?)?;
        writeln!(out, "  {name}tokens:")?;
        write_tokens(out, ids, carries_loss, tokenizer, marks)?;
    }
    Ok(())
}

/// The row's text, with stretches of loss tokens marked.
fn marked_text(
    ids: &[u32],
    carries_loss: &[bool],
    tokenizer: &Tokenizer,
    marks: Marks,
) -> Result<String, TokenizerError> {
    let mut text = String::new();
    let mut start = 0;
    for stretch in carries_loss.chunk_by(|a, b| a == b) {
        let end = start + stretch.len();
        let [open, close] = marks.around(stretch[0]);
        let stretch = piece(tokenizer, ids, start, end)?;
        // Colors are set anew on each line, so that they survive pagers.
        let lines: Vec<String> = stretch.split('\n').map(|line| format!("{open}{line}{close}")).collect();
        text.push_str(&match marks {
            Marks::Color => lines.join("\n"),
            Marks::Brackets => format!("{open}{stretch}{close}"),
        });
        start = end;
    }
    Ok(text)
}

fn write_text(out: &mut dyn Write, text: &str) -> io::Result<()> {
    text.split('\n').try_for_each(|line| writeln!(out, "    │ {line}"))
}

/// Ids with the text of each token, broken into lines.
fn write_tokens(
    out: &mut dyn Write,
    ids: &[u32],
    carries_loss: &[bool],
    tokenizer: &Tokenizer,
    marks: Marks,
) -> Result<(), super::InspectError> {
    let mut width = 0;
    for (index, (id, carries_loss)) in ids.iter().zip(carries_loss).enumerate() {
        let token = format!("{id}:{:?}", piece(tokenizer, ids, index, index + 1)?);
        let [open, close] = marks.around(*carries_loss);
        let shown = token.chars().count() + 3;
        if width == 0 || width + shown > LINE_WIDTH {
            write!(out, "{}    ", if width == 0 { "" } else { "\n" })?;
            width = 4;
        } else {
            out.write_all(b" ")?;
        }
        write!(out, "{open}{token}{close}")?;
        width += shown;
    }
    writeln!(out)?;
    Ok(())
}

/// Text of the tokens `start..end`: what they add to the text of the token before, because a decoder may treat the
/// first token of a text differently. An incomplete character is shown as U+FFFD.
fn piece(tokenizer: &Tokenizer, ids: &[u32], start: usize, end: usize) -> Result<String, TokenizerError> {
    let before = start.saturating_sub(1);
    let text = tokenizer.decode(&ids[before..end], false)?;
    let prefix = tokenizer.decode(&ids[before..start], false)?;
    match text.strip_prefix(&prefix) {
        Some(piece) => Ok(piece.to_owned()),
        None => tokenizer.decode(&ids[start..end], false),
    }
}
