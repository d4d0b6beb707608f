//! A file of tokens: its layout, and reading it.
//!
//! ```text
//! header      128 bytes, see `Header`
//! ends        where each record ends, from the first one, u64
//! lengths     tokens of each row, 0 for one that is left out, u32
//! rows        one record each: CRC-32 of the rest, flags, length and target tokens before truncation, tokens
//! details     JSON
//! ```
//!
//! The tables come first, since the number of rows is known before their tokens: a file that was not finished says by
//! itself which rows it has.
//!
//! Numbers are little-endian; a record's numbers and tokens have four bytes, and the highest bit of a token says whether
//! it carries loss. Every length is held against that of the file before it is used.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::CacheKey;
use crate::data::config::DataFormat;
use crate::data::counts::RowCounts;
use crate::data::encode::EncodedRow;
use crate::data::files::{FileKind, read_exact_at};

const MAGIC: [u8; 8] = *b"LTTOKENS";
pub(super) const HEADER_BYTES: usize = 128;
/// Bytes of a record before its tokens.
const RECORD_HEAD_BYTES: usize = 16;
/// Bytes of `ends` for each row.
pub(super) const END_BYTES: u64 = 8;
/// Bytes of `ends` and `lengths` for each row.
pub(super) const TABLE_BYTES_PER_ROW: u64 = END_BYTES + 4;
const LOSS_BIT: u32 = 1 << 31;
const FLAG_BAD: u32 = 1;
/// Longest details that are read.
pub(super) const MAX_DETAILS_BYTES: u64 = 1 << 20;
/// Bytes of a table that are read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// What was found out about the data file when it was tokenised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::data) struct Details {
    pub(in crate::data) kind: FileKind,
    pub(in crate::data) format: DataFormat,
    pub(in crate::data) unused_columns: Vec<String>,
    pub(in crate::data) counts: RowCounts,
    /// The first rows that cannot be used, each with its place and what is wrong.
    pub(in crate::data) bad_rows: Vec<String>,
}

/// The start of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) key: CacheKey,
    pub(super) num_rows: u64,
    /// Bytes of all records.
    pub(super) records_bytes: u64,
    pub(super) details_bytes: u64,
    /// CRC-32 of the tables and, behind them, the details.
    pub(super) tables_crc: u32,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[16..48].copy_from_slice(&self.key.0);
        for (at, number) in [(48, self.num_rows), (56, self.records_bytes), (64, self.details_bytes)] {
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes[72..76].copy_from_slice(&self.tables_crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let u32_at = |at: usize| bytes[at..].first_chunk().map(|chunk| u32::from_le_bytes(*chunk));
        let u64_at = |at: usize| bytes[at..].first_chunk().map(|chunk| u64::from_le_bytes(*chunk));
        let is_ours = bytes[..8] == MAGIC && u32_at(8)? == crc32fast::hash(&bytes[12..]);
        is_ours.then_some(())?;
        Some(Self {
            key: CacheKey(*bytes[16..].first_chunk()?),
            num_rows: u64_at(48)?,
            records_bytes: u64_at(56)?,
            details_bytes: u64_at(64)?,
            tables_crc: u32_at(72)?,
        })
    }

    /// Bytes of the whole file, if that is a number.
    fn file_bytes(&self) -> Option<u64> {
        records_at(self.num_rows)?.checked_add(self.records_bytes)?.checked_add(self.details_bytes)
    }
}

/// Where the records of a file of `num_rows` rows start, if that is a number.
pub(super) fn records_at(num_rows: u64) -> Option<u64> {
    num_rows.checked_mul(TABLE_BYTES_PER_ROW)?.checked_add(HEADER_BYTES as u64)
}

/// Bytes of the longest record there can be.
pub(super) fn longest_record(max_length: usize) -> u64 {
    (max_length as u64).saturating_mul(4).saturating_add(RECORD_HEAD_BYTES as u64)
}

/// Whether a record may have `bytes` bytes.
pub(super) fn is_record_size(bytes: u64, longest: u64) -> bool {
    (RECORD_HEAD_BYTES as u64..=longest).contains(&bytes) && bytes.is_multiple_of(4)
}

/// Puts the record of a row behind `bytes`.
pub(super) fn push_record(bytes: &mut Vec<u8>, row: &EncodedRow) {
    let start = bytes.len();
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let flags = if row.is_bad { FLAG_BAD } else { 0 };
    for number in [0, flags, number(row.full_length), number(row.full_target_tokens)] {
        bytes.extend(number.to_le_bytes());
    }
    for (id, carries_loss) in row.ids.iter().zip(&row.carries_loss) {
        bytes.extend((id | if *carries_loss { LOSS_BIT } else { 0 }).to_le_bytes());
    }
    let crc = crc32fast::hash(&bytes[start + 4..]);
    bytes[start..start + 4].copy_from_slice(&crc.to_le_bytes());
}

/// The row of a record; `None` for one that is damaged, or has ids above `max_id`.
pub(super) fn read_record(bytes: &[u8], max_id: u32) -> Option<EncodedRow> {
    let mut numbers =
        bytes.chunks_exact(4).map(|chunk| chunk.first_chunk().map_or(0, |word| u32::from_le_bytes(*word)));
    if numbers.next()? != crc32fast::hash(&bytes[4..]) {
        return None;
    }
    let (flags, full_length, full_target_tokens) = (numbers.next()?, numbers.next()?, numbers.next()?);
    let mut row = EncodedRow {
        ids: Vec::with_capacity(numbers.len()),
        carries_loss: Vec::with_capacity(numbers.len()),
        full_length: full_length as usize,
        full_target_tokens: full_target_tokens as usize,
        is_bad: flags & FLAG_BAD != 0,
    };
    for word in numbers {
        row.ids.push(word & !LOSS_BIT);
        row.carries_loss.push(word & LOSS_BIT != 0);
    }
    row.ids.iter().all(|id| *id <= max_id).then_some(row)
}

/// Why a file of tokens cannot be used.
#[derive(Debug)]
pub(in crate::data) enum Unusable {
    /// There is none.
    Absent,
    /// It is cut short, changed, or another's.
    Damaged,
    /// It cannot be read.
    Unreadable(io::Error),
}

impl From<Unusable> for io::Error {
    fn from(unusable: Unusable) -> Self {
        match unusable {
            Unusable::Absent => io::ErrorKind::NotFound.into(),
            Unusable::Damaged => {
                io::Error::new(io::ErrorKind::InvalidData, "what was written is not what is read back")
            }
            Unusable::Unreadable(error) => error,
        }
    }
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Absent,
            io::ErrorKind::UnexpectedEof => Self::Damaged,
            _ => Self::Unreadable(error),
        }
    }
}

/// An open file of tokens. In memory are 8 bytes a row.
#[derive(Debug)]
pub(in crate::data) struct TokenStore {
    path: PathBuf,
    file: File,
    /// Where the records start.
    records_at: u64,
    /// Where each record ends, from the first one.
    ends: Vec<u64>,
    details: Details,
    bytes: u64,
    max_id: u32,
}

impl TokenStore {
    /// Opens the tokens of `key` at `path`, rows of at most `max_length` tokens with ids up to `max_id`. All but the
    /// records is checked.
    pub(in crate::data) fn open(path: &Path, key: CacheKey, max_length: usize, max_id: u32) -> Result<Self, Unusable> {
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        let mut head = [0; HEADER_BYTES];
        read_exact_at(&file, &mut head, 0)?;
        let header = Header::from_bytes(&head).filter(|header| header.key == key).ok_or(Unusable::Damaged)?;
        let is_whole = header.file_bytes() == Some(bytes) && header.details_bytes <= MAX_DETAILS_BYTES;
        if !is_whole {
            return Err(Unusable::Damaged);
        }
        // From here on the lengths are known to fit the file.
        let ends_bytes = header.num_rows * END_BYTES;
        let records_at = HEADER_BYTES as u64 + header.num_rows * TABLE_BYTES_PER_ROW;
        let mut crc = crc32fast::Hasher::new();
        let mut ends = Vec::with_capacity(usize::try_from(header.num_rows).map_err(|_| Unusable::Damaged)?);
        for_each_block(&file, HEADER_BYTES as u64, ends_bytes, &mut |block| {
            crc.update(block);
            ends.extend(long_words(block));
        })?;
        let mut lengths = Vec::with_capacity(ends.len());
        for_each_block(&file, HEADER_BYTES as u64 + ends_bytes, header.num_rows * 4, &mut |block| {
            crc.update(block);
            lengths.extend(words(block));
        })?;
        let mut details = Vec::new();
        for_each_block(&file, bytes - header.details_bytes, header.details_bytes, &mut |block| {
            crc.update(block);
            details.extend_from_slice(block);
        })?;
        let longest = longest_record(max_length);
        let mut start = 0;
        // Rows are packed by their lengths before their records are read.
        let are_records = ends.iter().zip(&lengths).all(|(end, length)| {
            let record = end.checked_sub(std::mem::replace(&mut start, *end));
            record.is_some_and(|bytes| {
                is_record_size(bytes, longest)
                    && (*length == 0 || u64::from(*length) * 4 == bytes - RECORD_HEAD_BYTES as u64)
            })
        });
        if crc.finalize() != header.tables_crc || !are_records || start != header.records_bytes {
            return Err(Unusable::Damaged);
        }
        let details: Details = serde_json::from_slice(&details).map_err(|_| Unusable::Damaged)?;
        if !details.counts.are_of(&lengths) {
            return Err(Unusable::Damaged);
        }
        Ok(Self { path: path.to_path_buf(), file, records_at, ends, details, bytes, max_id })
    }

    /// Whether ids up to `max_id` leave the bit free that says what carries loss.
    pub(in crate::data) fn can_hold(max_id: u32) -> bool {
        max_id < LOSS_BIT
    }

    pub(in crate::data) fn path(&self) -> &Path {
        &self.path
    }

    pub(in crate::data) fn file(&self) -> &File {
        &self.file
    }

    pub(in crate::data) fn details(&self) -> &Details {
        &self.details
    }

    /// Bytes of the file.
    pub(in crate::data) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(in crate::data) fn num_rows(&self) -> usize {
        self.ends.len()
    }

    /// Row `index`; `None` where it cannot be read or is damaged.
    pub(in crate::data) fn read(&self, index: usize) -> Option<EncodedRow> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        let mut bytes = vec![0; usize::try_from(self.ends[index] - start).ok()?];
        read_exact_at(&self.file, &mut bytes, self.records_at + start).ok()?;
        read_record(&bytes, self.max_id)
    }

    /// Tokens of every row, 0 for one that is left out.
    pub(in crate::data) fn lengths(&self) -> io::Result<Vec<u32>> {
        let num_rows = self.ends.len() as u64;
        let mut lengths = Vec::with_capacity(self.ends.len());
        for_each_block(&self.file, HEADER_BYTES as u64 + num_rows * END_BYTES, num_rows * 4, &mut |block| {
            lengths.extend(words(block));
        })?;
        Ok(lengths)
    }
}

/// The numbers of four bytes in a block.
fn words(block: &[u8]) -> impl Iterator<Item = u32> {
    block.chunks_exact(4).filter_map(|chunk| chunk.first_chunk().copied()).map(u32::from_le_bytes)
}

/// The numbers of eight bytes in a block.
pub(super) fn long_words(block: &[u8]) -> impl Iterator<Item = u64> {
    block.chunks_exact(8).filter_map(|chunk| chunk.first_chunk().copied()).map(u64::from_le_bytes)
}

/// Hands `len` bytes from `at` on to `sink`, a block at a time.
pub(super) fn for_each_block(file: &File, at: u64, len: u64, sink: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let mut block = vec![0; usize::try_from(len).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES)];
    let mut done = 0;
    while done < len {
        let size = usize::try_from(len - done).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
        read_exact_at(file, &mut block[..size], at + done)?;
        sink(&block[..size]);
        done += size as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Chunk, StoreWriter};
    use super::*;

    /// Rows are packed by the lengths in the table: one that lies would overfill a row.
    #[test]
    fn lengths_that_are_not_those_of_the_rows_are_damage() {
        let folder = tempfile::tempdir().unwrap();
        let key = CacheKey([7; 32]);
        let mut writer = StoreWriter::open(folder.path(), key, 1, 64, 10, &mut |_| true).unwrap();
        let mut chunk = Chunk::default();
        let row = EncodedRow { ids: vec![1, 2, 3], carries_loss: vec![false, true, true], ..EncodedRow::default() };
        chunk.push(&EncodedRow { full_length: 3, full_target_tokens: 2, ..row });
        writer.push(&chunk).unwrap();
        let (kind, format) = (FileKind::JsonLines, DataFormat::Text);
        let counts = writer.counts();
        writer.finish(&Details { kind, format, unused_columns: Vec::new(), counts, bad_rows: Vec::new() }).unwrap();
        let path = key.path(folder.path());
        let whole = std::fs::read(&path).unwrap();
        let records = HEADER_BYTES + 12..HEADER_BYTES + 12 + RECORD_HEAD_BYTES + 12;
        for (length, is_good) in [(3_u32, true), (0, false), (2, false), (4, false), (u32::MAX, false)] {
            let mut bytes = whole.clone();
            bytes[HEADER_BYTES + 8..records.start].copy_from_slice(&length.to_le_bytes());
            let crc = crc32fast::hash(&[&bytes[HEADER_BYTES..records.start], &bytes[records.end..]].concat());
            bytes[72..76].copy_from_slice(&crc.to_le_bytes());
            let crc = crc32fast::hash(&bytes[12..HEADER_BYTES]);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
            std::fs::write(&path, bytes).unwrap();
            let opened = TokenStore::open(&path, key, 64, 10);
            assert_eq!(opened.is_ok(), is_good, "{length}");
        }
        // A row of any length may be asked for.
        std::fs::write(&path, &whole).unwrap();
        assert!(TokenStore::open(&path, key, usize::MAX, 10).is_ok());
    }
}
