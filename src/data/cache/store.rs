//! A file of tokens: its layout, writing it, and reading it.
//!
//! ```text
//! header      128 bytes, see `Header`
//! rows        one record each: CRC-32 of the rest, then its tokens, or the text of why it cannot be used
//! table       a `RowEntry` for each row: 12 bytes
//! details     JSON
//! ```
//!
//! Numbers are little-endian. A token has four bytes; its highest bit says whether it carries loss. The one below marks the
//! first token of a rejected answer's sequence, and the first of a row whose answer is bad. Behind the tokens of a pair is
//! its margin, an f32. Every length is compared with the length of the file before it is used.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::TempPath;

use super::CacheKey;
use crate::config::DataFormat;
use crate::data::blocks::read_exact_at;
use crate::data::encode::EncodedRow;
use crate::data::files::FileKind;
use crate::data::findings::RowFindings;
use crate::images::is_of_image;
use crate::util::files::UNFINISHED_SUFFIX;

const MAGIC: [u8; 8] = *b"LTTOKENS";
const HEADER_BYTES: usize = 128;
const CRC_BYTES: usize = 4;
const ENTRY_BYTES: usize = 16;
const LOSS_BIT: u32 = 1 << 31;
const MARK_BIT: u32 = 1 << 30;
const MAX_DETAILS_BYTES: u64 = 1 << 20;

/// What tokenising found out about the data file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::data) struct Details {
    pub(in crate::data) kind: FileKind,
    pub(in crate::data) format: DataFormat,
    pub(in crate::data) unused_columns: Vec<String>,
    /// What is said of an unused column that is the point of the rows.
    pub(in crate::data) unlearnt: Option<String>,
    /// What was taken for granted of its encoding, for the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::data) note: Option<String>,
    pub(in crate::data) bad_rows: RowFindings,
    /// Rows without a token that carries loss, whatever their length.
    pub(in crate::data) unanswered_rows: RowFindings,
    /// Rows that are unusual but not wrong.
    pub(in crate::data) odd_rows: RowFindings,
    /// Letters beyond ASCII, the tokens of them, and all tokens.
    pub(in crate::data) letters: [u64; 3],
}

/// The table's entry for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) struct RowEntry {
    /// Number of tokens, or bytes of the problem text.
    length: u32,
    /// Index of the first token that carries loss; of two sequences the later one in its own.
    first_target: u32,
    num_targets: u32,
    /// Whether the label says that the answer is bad.
    is_bad_answer: bool,
    /// Where the second sequence begins, or 0.
    second: u32,
}

impl RowEntry {
    const NO_TARGET: u32 = u32::MAX;
    const BAD: u32 = u32::MAX - 1;

    fn of(row: &EncodedRow) -> Self {
        let number = |count: usize| u32::try_from(count).unwrap_or(Self::BAD - 1);
        if let Some(problem) = &row.problem {
            let (length, first_target) = (number(problem.len()), Self::BAD);
            return Self { length, first_target, num_targets: 0, is_bad_answer: false, second: 0 };
        }
        Self {
            length: number(row.ids.len()),
            first_target: row.first_target().map_or(Self::NO_TARGET, number),
            num_targets: number(row.num_target_tokens()),
            is_bad_answer: row.is_bad_answer,
            second: number(row.second),
        }
    }

    pub(in crate::data) fn is_bad(self) -> bool {
        self.first_target == Self::BAD
    }

    /// Number of tokens; 0 for a row that cannot be used.
    pub(in crate::data) fn num_tokens(self) -> u32 {
        if self.is_bad() { 0 } else { self.length }
    }

    pub(in crate::data) fn is_pair(self) -> bool {
        self.second > 0
    }

    /// Number of tokens of the longer sequence.
    pub(in crate::data) fn longest(self) -> u32 {
        self.second.max(self.num_tokens().saturating_sub(self.second))
    }

    /// Number of tokens where no sequence is longer than `max_length`.
    pub(in crate::data) fn cut(self, max_length: u32) -> u32 {
        self.second.min(max_length) + self.num_tokens().saturating_sub(self.second).min(max_length)
    }

    /// Whether any token of the row carries loss.
    pub(in crate::data) fn has_targets(self) -> bool {
        self.first_target < Self::BAD
    }

    /// Whether any of the first `max_length` tokens carries loss, of a pair in both, which differ there.
    pub(in crate::data) fn is_usable(self, max_length: u32) -> bool {
        self.has_targets() && self.first_target < max_length
    }

    pub(in crate::data) fn num_targets(self) -> u32 {
        self.num_targets
    }

    pub(in crate::data) fn is_bad_answer(self) -> bool {
        self.is_bad_answer
    }

    fn record_bytes(self) -> u64 {
        let margin = if self.second > 0 { 4 } else { 0 };
        CRC_BYTES as u64 + u64::from(self.length) * if self.is_bad() { 1 } else { 4 } + margin
    }

    fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        // The mark of the first token, which the entry has for counting.
        let targets = self.num_targets | if self.is_bad_answer { MARK_BIT } else { 0 };
        for (bytes, number) in bytes.chunks_exact_mut(4).zip([self.length, self.first_target, targets, self.second]) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let number = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
        Self {
            length: number(0),
            first_target: number(4),
            num_targets: number(8) & !MARK_BIT,
            is_bad_answer: number(8) & MARK_BIT != 0,
            second: number(12),
        }
    }
}

/// Consecutive rows, encoded by one thread.
#[derive(Debug, Default)]
pub(in crate::data) struct RowChunk {
    bytes: Vec<u8>,
    entries: Vec<RowEntry>,
}

impl RowChunk {
    pub(in crate::data) fn push(&mut self, row: &EncodedRow) {
        let start = self.bytes.len();
        self.bytes.extend([0; CRC_BYTES]);
        if let Some(problem) = &row.problem {
            self.bytes.extend_from_slice(problem.as_bytes());
        }
        let is_marked = |at: usize| if at == 0 { row.is_bad_answer } else { at == row.second };
        for (at, (id, carries_loss)) in row.ids.iter().zip(&row.carries_loss).enumerate() {
            let bits = if *carries_loss { LOSS_BIT } else { 0 } | if is_marked(at) { MARK_BIT } else { 0 };
            self.bytes.extend((id | bits).to_le_bytes());
        }
        if row.second > 0 {
            self.bytes.extend(row.margin.to_le_bytes());
        }
        self.entries.push(RowEntry::of(row));
        let crc = crc32fast::hash(&self.bytes[start + CRC_BYTES..]);
        self.bytes[start..start + CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    key: CacheKey,
    num_rows: u64,
    records_bytes: u64,
    details_bytes: u64,
    /// CRC-32 of the table and, behind it, the details.
    tables_crc: u32,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
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
        is_ours.then_some(Self {
            key: CacheKey(*bytes[16..].first_chunk()?),
            num_rows: u64_at(48)?,
            records_bytes: u64_at(56)?,
            details_bytes: u64_at(64)?,
            tables_crc: u32_at(72)?,
        })
    }

    /// Bytes of the table, or `None` where the header's numbers do not fit a file of `bytes`.
    fn table_bytes(&self, bytes: u64) -> Option<u64> {
        let table = self.num_rows.checked_mul(ENTRY_BYTES as u64)?;
        let all = table.checked_add(HEADER_BYTES as u64)?.checked_add(self.records_bytes)?;
        let is_whole = all.checked_add(self.details_bytes)? == bytes && self.details_bytes <= MAX_DETAILS_BYTES;
        is_whole.then_some(table)
    }
}

/// Writes tokens into memory, or into a file under a temporary name. The file is removed unless it is finished.
#[derive(Debug)]
pub(in crate::data) struct StoreWriter {
    out: Out,
    entries: Vec<RowEntry>,
}

#[derive(Debug)]
enum Out {
    File { file: BufWriter<File>, key: CacheKey, unfinished: TempPath, finished: PathBuf },
    Memory(Vec<u8>),
}

impl StoreWriter {
    /// Starts the token file of `key` in `folder`, and creates the folder if it is absent.
    pub(in crate::data) fn in_folder(folder: &Path, key: CacheKey) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let (file, unfinished) = tempfile::Builder::new().suffix(UNFINISHED_SUFFIX).tempfile_in(folder)?.into_parts();
        let mut file = BufWriter::new(file);
        file.write_all(&[0; HEADER_BYTES])?;
        let out = Out::File { file, key, unfinished, finished: key.path(folder) };
        Ok(Self { out, entries: Vec::new() })
    }

    /// Starts tokens in memory.
    pub(in crate::data) fn in_memory() -> Self {
        Self { out: Out::Memory(Vec::new()), entries: Vec::new() }
    }

    pub(in crate::data) fn push(&mut self, chunk: &RowChunk) -> io::Result<()> {
        self.entries.extend_from_slice(&chunk.entries);
        match &mut self.out {
            Out::File { file, .. } => file.write_all(&chunk.bytes),
            Out::Memory(bytes) => bytes.write_all(&chunk.bytes),
        }
    }

    /// Goes on in memory, with what is in the file so far.
    pub(in crate::data) fn hold(&mut self) -> io::Result<()> {
        let Out::File { file, .. } = &mut self.out else { return Ok(()) };
        file.seek(SeekFrom::Start(HEADER_BYTES as u64))?;
        let mut bytes = Vec::new();
        file.get_mut().read_to_end(&mut bytes)?;
        self.out = Out::Memory(bytes);
        Ok(())
    }

    /// Completes the file.
    pub(in crate::data) fn finish(self, details: Details) -> io::Result<Encoded> {
        let Self { out, entries } = self;
        let records = match out {
            Out::Memory(mut bytes) => {
                bytes.shrink_to_fit();
                Records::Memory(bytes)
            }
            Out::File { mut file, key, unfinished, finished } => {
                let json = serde_json::to_vec(&details)?;
                let mut crc = crc32fast::Hasher::new();
                for entry in &entries {
                    crc.update(&entry.to_bytes());
                    file.write_all(&entry.to_bytes())?;
                }
                crc.update(&json);
                file.write_all(&json)?;
                let header = Header {
                    key,
                    num_rows: entries.len() as u64,
                    records_bytes: entries.iter().map(|entry| entry.record_bytes()).sum(),
                    details_bytes: json.len() as u64,
                    tables_crc: crc.finalize(),
                };
                let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
                file.seek(SeekFrom::Start(0))?;
                file.write_all(&header.to_bytes())?;
                file.sync_all()?;
                unfinished.persist(&finished).map_err(|error| error.error)?;
                Records::File { file, path: finished }
            }
        };
        Ok(Encoded { tokens: TokenStore::new(records, &entries), entries, details })
    }
}

/// All rows of a data file as tokens, and what was found out about them.
#[derive(Debug)]
pub(in crate::data) struct Encoded {
    pub(in crate::data) tokens: TokenStore,
    pub(in crate::data) entries: Vec<RowEntry>,
    pub(in crate::data) details: Details,
}

impl Encoded {
    /// Opens the tokens of `key` at `path` and checks everything except the records. `None` where there is no such
    /// file, or it is cut short, changed, or of another key.
    pub(in crate::data) fn open(path: &Path, key: CacheKey) -> Option<Self> {
        let file = File::open(path).ok()?;
        let mut head = [0; HEADER_BYTES];
        read_exact_at(&file, &mut head, 0).ok()?;
        let header = Header::from_bytes(&head).filter(|header| header.key == key)?;
        let table_bytes = usize::try_from(header.table_bytes(file.metadata().ok()?.len())?).ok()?;
        // From here on the lengths are known to fit the file.
        let mut tables = vec![0; table_bytes + usize::try_from(header.details_bytes).ok()?];
        read_exact_at(&file, &mut tables, HEADER_BYTES as u64 + header.records_bytes).ok()?;
        let (table, details) = tables.split_at(table_bytes);
        let entries: Vec<RowEntry> = table.chunks_exact(ENTRY_BYTES).map(RowEntry::from_bytes).collect();
        let records_bytes: u64 = entries.iter().map(|entry| entry.record_bytes()).sum();
        let is_sound = crc32fast::hash(&tables) == header.tables_crc && records_bytes == header.records_bytes;
        let details = serde_json::from_slice(details).ok().filter(|_| is_sound)?;
        drop(tables);
        let records = Records::File { file, path: path.to_path_buf() };
        Some(Self { tokens: TokenStore::new(records, &entries), entries, details })
    }
}

/// The tokens of a data file. When they are on disk, only 8 bytes a row are in memory.
#[derive(Debug)]
pub(in crate::data) struct TokenStore {
    records: Records,
    /// Where each record ends, counted from the first record.
    ends: Vec<u64>,
    /// Rows that cannot be used, ascending.
    bad_rows: Vec<usize>,
}

#[derive(Debug)]
enum Records {
    File { file: File, path: PathBuf },
    Memory(Vec<u8>),
}

impl TokenStore {
    fn new(records: Records, entries: &[RowEntry]) -> Self {
        let ends = entries.iter().scan(0, |end, entry| {
            *end += entry.record_bytes();
            Some(*end)
        });
        let bad_rows = entries.iter().enumerate().filter(|(_, entry)| entry.is_bad()).map(|(row, _)| row);
        Self { records, ends: ends.collect(), bad_rows: bad_rows.collect() }
    }

    pub(in crate::data) fn num_records(&self) -> usize {
        self.ends.len()
    }

    /// The file with the tokens; `None` where they are in memory.
    pub(in crate::data) fn file(&self) -> Option<(&File, &Path)> {
        match &self.records {
            Records::File { file, path } => Some((file, path)),
            Records::Memory(_) => None,
        }
    }

    /// Row `index`; `None` where it cannot be read, is damaged, or has ids above `max_id`.
    pub(in crate::data) fn read(&self, index: usize, max_id: u32) -> Option<EncodedRow> {
        let start = index.checked_sub(1).map_or(0, |previous| self.ends[previous]);
        let length = usize::try_from(self.ends[index] - start).ok()?;
        let mut read;
        let bytes = match &self.records {
            Records::File { file, .. } => {
                read = vec![0; length];
                read_exact_at(file, &mut read, HEADER_BYTES as u64 + start).ok()?;
                &read[..]
            }
            Records::Memory(all) => all.get(usize::try_from(start).ok()?..)?.get(..length)?,
        };
        let (crc, record) = bytes.split_first_chunk::<CRC_BYTES>()?;
        if u32::from_le_bytes(*crc) != crc32fast::hash(record) {
            return None;
        }
        if self.bad_rows.binary_search(&index).is_ok() {
            return Some(EncodedRow::bad(String::from_utf8_lossy(record).into_owned()));
        }
        let words = record.chunks_exact(4).filter_map(|word| word.first_chunk().copied()).map(u32::from_le_bytes);
        let mut words: Vec<u32> = words.collect();
        // A margin may look like a mark; behind the mark of a pair stands a token at least.
        let is_marked = |at: &usize| words[*at] & MARK_BIT != 0;
        let is_bad_answer = !words.is_empty() && is_marked(&0);
        let second = (1..words.len().saturating_sub(1)).find(is_marked).unwrap_or(0);
        let margin = if second > 0 { words.pop().map_or(0.0, f32::from_bits) } else { 0.0 };
        let (ids, carries_loss): (Vec<u32>, Vec<bool>) =
            words.into_iter().map(|word| (word & !(LOSS_BIT | MARK_BIT), word & LOSS_BIT != 0)).unzip();
        ids.iter().all(|id| *id <= max_id || is_of_image(*id)).then(|| EncodedRow {
            is_bad_answer,
            margin,
            ..EncodedRow::of_record(ids, carries_loss, second)
        })
    }
}
