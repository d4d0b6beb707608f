//! Files of text that are not UTF-8: what Excel and Windows write.
//!
//! Rows are read by their offsets, so such a file is decoded once into an unnamed temporary file, as a compressed one is
//! unpacked.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};

use encoding_rs::{Decoder, Encoding, WINDOWS_1252};

use super::blocks::{first_bytes, for_each_block};

/// A file in UTF-8.
#[derive(Debug)]
pub(super) struct Utf8 {
    /// The file itself, or the temporary file that it was decoded into.
    pub(super) file: File,
    /// What was taken for granted, for the user.
    pub(super) note: Option<String>,
}

impl Utf8 {
    /// The file as UTF-8: from UTF-16 where a byte order mark says so, and `or_windows` from Windows-1252 where it cannot
    /// be UTF-8. A file of UTF-8 that is damaged in places is left as it is.
    pub(super) fn of(file: File, or_windows: bool) -> Result<Self, String> {
        let unreadable = |error: io::Error| error.to_string();
        let start = first_bytes(&file, 3).map_err(unreadable)?;
        let of_mark = Encoding::for_bom(&start).map(|(encoding, _)| encoding);
        if let Some(encoding) = of_mark.filter(|encoding| !encoding.is_ascii_compatible()) {
            let (file, _) = decoded(&file, encoding)?;
            return Ok(Self { file, note: None });
        }
        if !or_windows || !is_of_single_bytes(&file).map_err(unreadable)? {
            return Ok(Self { file, note: None });
        }
        let (file, word) = decoded(&file, WINDOWS_1252)?;
        let such_as = word.map(|word| format!(", with words such as \"{word}\"")).unwrap_or_default();
        let note = format!(
            "not UTF-8: read as Windows-1252, as Excel writes it{such_as}\n  hint: if that is wrong, `iconv -f ENCODING -t \
             UTF-8` converts the file"
        );
        Ok(Self { file, note: Some(note) })
    }
}

/// Whether bytes above ASCII stand alone in a file rather than in sequences of UTF-8: more of them than of such sequences, and
/// among letters of ASCII, as in the languages that Windows-1252 is for.
fn is_of_single_bytes(file: &File) -> io::Result<bool> {
    let (mut alone, mut in_sequences, mut letters) = (0_u64, 0_u64, 0_u64);
    // A sequence that a block cuts waits for the next one.
    let mut waiting: Vec<u8> = Vec::new();
    let mut count = |bytes: &[u8]| {
        for chunk in bytes.utf8_chunks() {
            in_sequences += chunk.valid().bytes().filter(|byte| *byte >= 0xc0).count() as u64;
            alone += u64::from(!chunk.invalid().is_empty());
            letters += chunk.valid().bytes().filter(u8::is_ascii_alphabetic).count() as u64;
        }
    };
    for_each_block(file, 0..u64::MAX, &mut |block| {
        waiting.extend(block);
        let cut = (1..=waiting.len().min(3)).find(|back| waiting[waiting.len() - back] >= 0xc0).unwrap_or(0);
        let rest = waiting.split_off(waiting.len() - cut);
        count(&waiting);
        waiting = rest;
        Ok(())
    })?;
    count(&waiting);
    Ok(alone > in_sequences && 2 * alone < letters)
}

/// The file in UTF-8, and its first word that has more than ASCII.
fn decoded(file: &File, encoding: &'static Encoding) -> Result<(File, Option<String>), String> {
    let spool = tempfile::tempfile().map_err(|error| format!("cannot create a temporary file: {error}"))?;
    let mut lines = BufWriter::new(spool);
    let mut decoder = encoding.new_decoder_with_bom_removal();
    let mut word = None;
    let mut write = |bytes: &[u8], is_last: bool| {
        let text = text_of(&mut decoder, bytes, is_last)
            .ok_or_else(|| io::Error::other(format!("is not valid {}", encoding.name())))?;
        if word.is_none() {
            word = text.split(|c: char| !c.is_alphanumeric()).find(|word| !word.is_ascii()).map(str::to_owned);
        }
        lines.write_all(text.as_bytes())
    };
    let written = for_each_block(file, 0..u64::MAX, &mut |block| write(block, false)).and_then(|()| write(&[], true));
    written.map_err(|error| error.to_string())?;
    let file = lines.into_inner().map_err(|error| format!("cannot write a temporary file: {error}"))?;
    Ok((file, word))
}

/// The next part of a text; `None` where the bytes are none of the encoding.
fn text_of(decoder: &mut Decoder, bytes: &[u8], is_last: bool) -> Option<String> {
    let mut text = String::with_capacity(decoder.max_utf8_buffer_length(bytes.len())?);
    let (_, _, has_errors) = decoder.decode_to_string(bytes, &mut text, is_last);
    (!has_errors).then_some(text)
}
