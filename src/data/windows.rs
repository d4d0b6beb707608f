//! The tokens of a .txt file, which is treated as one document.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::blocks::read_exact_at;
use super::encoding::Utf8;
use super::error::DataError;
use super::rows::STARTING_BYTES;
use super::tokenizer::{Token, Tokenizer};
use super::unpack;

#[derive(Clone, Copy, Debug)]
struct Pieces {
    bytes: usize,
    /// Bytes of text that neighbouring pieces share, so that the tokens at a seam equal those of the whole text.
    overlap: usize,
    /// Pieces that are tokenised in parallel, if there are enough cores.
    at_once: usize,
}

// Tokenising takes some 200 bytes for each of the text.
const PIECES: Pieces = Pieces { bytes: 64 * 1024, overlap: 8 * 1024, at_once: 16 };

/// Tokenises the text file `path`: BOS if the tokenizer adds it, the text, EOS. Hands the tokens to `sink`, in order.
/// Returns what was taken for granted of its encoding.
///
/// # Errors
/// A file that cannot be read, or is not UTF-8; an error of `sink`.
pub(super) fn tokenise(
    path: &Path,
    tokenizer: &Tokenizer,
    sink: &mut dyn FnMut(u32) -> Result<(), DataError>,
) -> Result<Option<String>, DataError> {
    let mut last = None;
    let text = TextFile::open(path)?;
    for_each_token(&text, tokenizer, PIECES, &mut |id| {
        last = Some(id);
        sink(id)
    })?;
    tokenizer.eos().filter(|eos| last != Some(eos.id)).map_or(Ok(()), |eos| sink(eos.id))?;
    Ok(text.note)
}

/// A UTF-8 file that is read in pieces.
#[derive(Debug)]
struct TextFile {
    path: PathBuf,
    file: File,
    len: usize,
    /// Offset where the text starts: after a byte order mark.
    start: usize,
    /// What was taken for granted of its encoding, for the user.
    note: Option<String>,
}

impl TextFile {
    fn open(path: &Path) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
        let unpacked = unpack::open(path, &mut |_| Ok(()));
        let Utf8 { file, note } = unpacked.and_then(|file| Utf8::of(file, true)).map_err(failed)?;
        let size = file.metadata().map_err(|error| failed(error.to_string()))?.len();
        let len = usize::try_from(size).unwrap_or(0);
        let mut text = Self { path: path.to_path_buf(), file, len, start: 0, note };
        let (_, first) = text.read(0..PIECES.bytes.min(text.len))?;
        if first.starts_with('\u{feff}') {
            (text.start, text.len) = ('\u{feff}'.len_utf8(), text.len - '\u{feff}'.len_utf8());
        }
        if let Some(at) = first.bytes().take(STARTING_BYTES).position(|byte| byte == 0) {
            return Err(failed(format!("byte {at} is NUL: this is no text")));
        }
        let is_short = text.len <= PIECES.bytes;
        if is_short && first.trim_start_matches('\u{feff}').trim().is_empty() {
            return Err(failed("the file has no text".into()));
        }
        Ok(text)
    }

    /// The text between the first character that starts at or after `range.start` and the first character that starts
    /// at or after `range.end`, and the offset where it starts.
    fn read(&self, range: Range<usize>) -> Result<(usize, String), DataError> {
        let failed = |reason: String| DataError::File { path: self.path.clone(), reason };
        // Up to three more bytes, to complete the last character.
        let mut bytes = vec![0; (range.end + 3).min(self.len) - range.start];
        let offset = (self.start + range.start) as u64;
        read_exact_at(&self.file, &mut bytes, offset).map_err(|error| failed(error.to_string()))?;
        let next_character = |from: usize| {
            let continues = |byte: &&u8| **byte & 0b1100_0000 == 0b1000_0000;
            from + bytes[from..].iter().take(3).take_while(continues).count()
        };
        let start = if range.start == 0 { 0 } else { next_character(0) };
        let end = next_character(range.end - range.start).max(start);
        match std::str::from_utf8(&bytes[start..end]) {
            Ok(text) => Ok((range.start + start, text.to_owned())),
            Err(error) => {
                let at = self.start + range.start + start + error.valid_up_to();
                Err(failed(format!("not UTF-8 at byte {at}\n  hint: `iconv` converts other encodings")))
            }
        }
    }
}

/// Hands the tokens of `text` to `sink`, tokenising it in pieces. Two pieces are joined in their overlap, at the last
/// place where both have a token boundary. Places near the end of the first piece are not used, because the cut there
/// may change its tokens.
fn for_each_token(
    text: &TextFile,
    tokenizer: &Tokenizer,
    pieces: Pieces,
    sink: &mut dyn FnMut(u32) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let encode = |range: Range<usize>| -> Result<Piece, DataError> {
        let (start, text) = text.read(range.clone())?;
        let mut tokens = tokenizer.encode_tokens(&text, range.start == 0)?;
        for token in &mut tokens {
            (token.start, token.end) = (token.start + start, token.end + start);
        }
        Ok(Piece { tokens, start, end: start + text.len() })
    };
    let stride = pieces.bytes - pieces.overlap;
    let starts: Vec<usize> = (0..text.len.saturating_sub(pieces.overlap).max(1)).step_by(stride).collect();
    let mut written_to = 0;
    let mut emit = |piece: &Piece, to: usize| {
        // BOS ends at 0, so it must pass although `written_to` starts at 0.
        let new = |token: &&Token| token.end <= to && (token.end > written_to || token.end == 0);
        piece.tokens.iter().filter(new).try_for_each(|token| sink(token.id))?;
        written_to = to;
        Ok::<(), DataError>(())
    };
    let mut previous: Option<Piece> = None;
    for group in starts.chunks(pieces.at_once) {
        let group: Vec<Result<Piece, DataError>> =
            group.par_iter().map(|start| encode(*start..(start + pieces.bytes).min(text.len))).collect();
        for piece in group {
            let mut piece = piece?;
            if let Some(previous) = previous {
                match previous.seam(&piece, pieces.overlap) {
                    Some(seam) => emit(&previous, seam)?,
                    // If the two have no common boundary, tokenise the next piece again from the end of the first.
                    None => {
                        emit(&previous, previous.end)?;
                        piece = encode(previous.end..piece.end)?;
                    }
                }
            }
            previous = Some(piece);
        }
    }
    // A token added behind the text ends one byte after it.
    previous.map_or(Ok(()), |last| emit(&last, last.end + 1))
}

/// The tokens of a piece of text; offsets count from the start of the whole text.
#[derive(Debug)]
struct Piece {
    tokens: Vec<Token>,
    start: usize,
    end: usize,
}

impl Piece {
    /// The last offset where both this piece and the next have a token boundary.
    fn seam(&self, next: &Self, overlap: usize) -> Option<usize> {
        let trusted = self.end.saturating_sub(overlap / 2);
        let ends = self.tokens.iter().rev().map(|token| token.end);
        let mut ends = ends.skip_while(|end| *end > trusted).take_while(|end| *end > next.start);
        ends.find(|end| next.tokens.binary_search_by_key(end, |token| token.end).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixture::{Files, tokenizer};

    /// Ids of `text`, written to a file and tokenised in pieces.
    fn in_pieces(text: &str, bytes: usize, overlap: usize) -> Vec<u32> {
        let files = Files::new();
        files.write("t.txt", text);
        let mut ids = Vec::new();
        let text = TextFile::open(&files.path("t.txt")).unwrap();
        let pieces = Pieces { bytes, overlap, at_once: 3 };
        for_each_token(&text, &tokenizer(), pieces, &mut |id| {
            ids.push(id);
            Ok(())
        })
        .unwrap();
        ids
    }

    #[test]
    fn a_text_in_pieces_has_the_tokens_of_the_whole() {
        // `aab` and `ab` shift against each other, characters have 1 to 4 bytes, and byte ranges leave out spaces.
        let text: String = (0..500).map(|i| ["ab", "a", "é", "  ", "😀b", "aab", "\n"][i * i % 7]).collect();
        let whole = tokenizer().encode(&text, true).unwrap();
        for (bytes, overlap) in [(64, 16), (64, 40), (101, 33), (4000, 100)] {
            assert_eq!(in_pieces(&text, bytes, overlap), whole, "{bytes} bytes at a time");
            assert_eq!(in_pieces(&format!("\u{feff}{text}"), bytes, overlap), whole, "with a mark");
        }
    }

    #[test]
    fn pieces_without_a_common_boundary_still_hold_the_whole_text() {
        // One endless run of characters: with an overlap of 4 bytes, the emoji leaves no boundary to join at.
        let text = "😀".repeat(50);
        let ids = in_pieces(&text, 16, 4);
        assert_eq!(tokenizer().decode(&ids[1..], true).unwrap(), text);
    }

    #[test]
    fn files_without_text_or_in_two_encodings_are_refused() {
        let files = Files::new();
        std::fs::write(files.path("two.txt"), b"caf\xc3\xa9 caf\xe9").unwrap();
        std::fs::write(files.path("latin.txt"), b"caf\xe9").unwrap();
        files.write("utf8.txt", "café");
        files.write("empty.txt", " \n");
        let error = |name: &str| tokenise(&files.path(name), &tokenizer(), &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error("two.txt").contains("not UTF-8 at byte 9\n  hint: `iconv`"), "{}", error("two.txt"));
        assert!(error("empty.txt").ends_with("the file has no text"));
        let read = |name: &str| {
            let mut ids = Vec::new();
            let note = tokenise(&files.path(name), &tokenizer(), &mut |id| {
                ids.push(id);
                Ok(())
            });
            let note = note.unwrap();
            (ids, note.is_some())
        };
        assert_eq!(read("latin.txt"), (read("utf8.txt").0, true));
    }
}
