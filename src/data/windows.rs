//! A .txt file as one document, cut into windows of tokens.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use memmap2::Mmap;

use super::error::DataError;
use super::tokenizer::{Token, Tokenizer};

/// Bytes of text that are tokenised at a time.
const CHUNK_BYTES: usize = 256 * 1024;
/// Bytes of text that neighbouring chunks share, so that tokens at a seam are those of the whole text.
const OVERLAP_BYTES: usize = 8 * 1024;

/// The tokens of a document, in an unnamed temporary file: host memory does not grow with it.
#[derive(Debug)]
pub(super) struct TokenFile {
    map: Mmap,
    window_tokens: usize,
}

impl TokenFile {
    /// Tokenises the text file `path`: BOS as the tokenizer adds it, the text, EOS.
    pub(super) fn open(path: &Path, tokenizer: &Tokenizer, window_tokens: usize) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
        let text = File::open(path).map_err(|error| failed(error.to_string()))?;
        // SAFETY: the mapping is only read, and checked to be UTF-8 before it is used as text. As with every program
        // that maps its input, whoever changes the file meanwhile changes what is read.
        let text = unsafe { Mmap::map(&text) }.map_err(|error| failed(error.to_string()))?;
        let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
        let text = std::str::from_utf8(text)
            .map_err(|error| failed(format!("not UTF-8: {error}\n  hint: `iconv` converts other encodings")))?;
        if text.trim().is_empty() {
            return Err(failed("the file has no text".into()));
        }

        let write_failed = |error: std::io::Error| failed(format!("cannot write a temporary file: {error}"));
        let mut spool = BufWriter::new(tempfile::tempfile().map_err(write_failed)?);
        let mut last = None;
        for_each_token(text, tokenizer, (CHUNK_BYTES, OVERLAP_BYTES), &mut |token| {
            last = Some(token.id);
            spool.write_all(&token.id.to_ne_bytes()).map_err(write_failed)
        })?;
        if let Some(eos) = tokenizer.eos().filter(|eos| last != Some(eos.id)) {
            spool.write_all(&eos.id.to_ne_bytes()).map_err(write_failed)?;
        }
        let spool = spool.into_inner().map_err(|error| write_failed(error.into_error()))?;
        // SAFETY: nobody else has this file: it has no name.
        let map = unsafe { Mmap::map(&spool) }.map_err(write_failed)?;
        Ok(Self { map, window_tokens })
    }

    pub(super) fn num_rows(&self) -> usize {
        self.ids().len().div_ceil(self.window_tokens)
    }

    /// Tokens of window `index`.
    pub(super) fn read(&self, index: usize) -> &[u32] {
        self.ids().chunks(self.window_tokens).nth(index).unwrap_or_default()
    }

    fn ids(&self) -> &[u32] {
        bytemuck::cast_slice(&self.map)
    }
}

/// Hands the tokens of `text` to `sink`, tokenising `chunk` bytes at a time, of which `overlap` are shared with the
/// next chunk. Two chunks are joined at the last place in their overlap where both have a token boundary, away from
/// the end of the first, whose tokens may be due to its being cut there.
fn for_each_token(
    text: &str,
    tokenizer: &Tokenizer,
    (chunk, overlap): (usize, usize),
    sink: &mut dyn FnMut(Token) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let encode = |from: usize| -> Result<(Vec<Token>, usize), DataError> {
        let to = text.floor_char_boundary(from + chunk);
        let mut tokens = tokenizer.encode_tokens(&text[from..to], from == 0)?;
        for token in &mut tokens {
            (token.start, token.end) = (token.start + from, token.end + from);
        }
        Ok((tokens, to))
    };
    let (mut tokens, mut to) = encode(0)?;
    let mut written_to = 0;
    while to < text.len() {
        let from = text.floor_char_boundary(to - overlap);
        let (next, next_to) = encode(from)?;
        let trusted = to - overlap / 2;
        let is_boundary = |end: usize| next.binary_search_by_key(&end, |token| token.end).is_ok();
        let mut ends = tokens.iter().rev().map(|token| token.end).filter(|end| *end <= trusted && *end > from);
        // Where the two never agree, the next chunk starts afresh behind the first.
        let seam = ends.find(|end| is_boundary(*end));
        let (seam, next, next_to) = match seam {
            Some(seam) => (seam, next, next_to),
            None => encode(to).map(|(next, next_to)| (to, next, next_to))?,
        };
        for token in tokens.iter().filter(|token| token.end <= seam && (token.end > written_to || token.end == 0)) {
            sink(*token)?;
        }
        written_to = seam;
        (tokens, to) = (next, next_to);
    }
    tokens.iter().filter(|token| token.end > written_to || token.end == 0).try_for_each(|token| sink(*token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixture::{BOS, EOS, Files, tokenizer};

    /// Ids of `text`, tokenised in pieces.
    fn in_pieces(text: &str, chunk: usize, overlap: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut sink = |token: Token| {
            ids.push(token.id);
            Ok(())
        };
        for_each_token(text, &tokenizer(), (chunk, overlap), &mut sink).unwrap();
        ids
    }

    #[test]
    fn a_text_in_pieces_has_the_tokens_of_the_whole() {
        // `aab` and `ab` shift against each other, characters have 1 to 4 bytes, spaces are left out of a token's bytes.
        let text: String = (0..500).map(|i| ["ab", "a", "é", "  ", "😀b", "aab", "\n"][i * i % 7]).collect();
        let whole = tokenizer().encode(&text, true).unwrap();
        for (chunk, overlap) in [(64, 16), (64, 40), (101, 33), (4000, 100)] {
            assert_eq!(in_pieces(&text, chunk, overlap), whole, "{chunk} bytes at a time");
        }
    }

    #[test]
    fn pieces_without_a_common_boundary_still_hold_the_whole_text() {
        // One endless character run: with an overlap of 4 bytes the emoji leaves no boundary to join at.
        let text = "😀".repeat(50);
        let ids = in_pieces(&text, 16, 4);
        assert_eq!(tokenizer().decode(&ids[1..], true).unwrap(), text);
    }

    #[test]
    fn a_file_is_one_document_cut_into_windows() {
        let files = Files::new();
        files.write("t.txt", "\u{feff}abcdefg");
        let tokens = TokenFile::open(&files.path("t.txt"), &tokenizer(), 3).unwrap();
        assert_eq!(tokens.num_rows(), 3);
        let windows: Vec<&[u32]> = (0..3).map(|row| tokens.read(row)).collect();
        assert_eq!(windows, [&[BOS, 260, 99][..], &[100, 101, 102], &[103, EOS]]);
    }

    #[test]
    fn files_without_text_or_in_another_encoding_are_refused() {
        let files = Files::new();
        std::fs::write(files.path("latin.txt"), b"caf\xe9").unwrap();
        files.write("empty.txt", " \n");
        let error = |name: &str| TokenFile::open(&files.path(name), &tokenizer(), 8).unwrap_err().to_string();
        assert!(error("latin.txt").contains("not UTF-8") && error("latin.txt").contains("iconv"));
        assert!(error("empty.txt").ends_with("the file has no text"));
    }
}
