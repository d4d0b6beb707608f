//! Writing a file of tokens: complete or absent under its name, and gone on with where it was interrupted.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::store::{
    Details, END_BYTES, HEADER_BYTES, Header, MAX_DETAILS_BYTES, for_each_block, is_record_size, long_words,
    longest_record, push_record, read_record, records_at,
};
use super::{CacheKey, UNFINISHED_SUFFIX};
use crate::data::counts::RowCounts;
use crate::data::encode::EncodedRow;
use crate::data::files::read_exact_at;

/// Bytes of records in memory before they are written: what a killed process loses at most, besides the rows that it is
/// at.
const BUFFER_BYTES: usize = 4 << 20;
/// Files that are made before one is taken whether or not another process is about to remove it.
const MAX_TRIES: usize = 16;
/// How many rows are found before somebody is told, and asked whether to go on.
const ROWS_PER_WATCH: usize = 1024;

/// Rows that follow each other, made by one thread.
#[derive(Debug, Default)]
pub(in crate::data) struct Chunk {
    /// Their records.
    bytes: Vec<u8>,
    /// Where each record ends in `bytes`.
    ends: Vec<usize>,
    /// Tokens of each row, 0 for one that is left out.
    lengths: Vec<u32>,
    counts: RowCounts,
}

impl Chunk {
    pub(in crate::data) fn push(&mut self, row: &EncodedRow) {
        push_record(&mut self.bytes, row);
        self.ends.push(self.bytes.len());
        self.lengths.push(kept_length(&mut self.counts, row));
    }
}

/// Tokens of a row, 0 for one that is left out; it is counted.
fn kept_length(counts: &mut RowCounts, row: &EncodedRow) -> u32 {
    let length = if counts.add(row) { row.ids.len() } else { 0 };
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// A file of tokens that is being written, under a name of its own. Dropped, it is gone, unless it was finished or
/// [left](Self::leave).
#[derive(Debug)]
pub(in crate::data) struct StoreWriter {
    /// Its name once it is complete.
    path: PathBuf,
    unfinished: PathBuf,
    is_left: bool,
    key: CacheKey,
    file: File,
    /// Rows that it is to have.
    num_rows: u64,
    /// Where records start.
    records_at: u64,
    /// The last records, not yet in the file.
    buffer: Vec<u8>,
    /// Rows whose records are in the file.
    num_written: usize,
    ends: Vec<u64>,
    lengths: Vec<u32>,
    counts: RowCounts,
    /// Rows that were found in it and cannot be used.
    bad_rows: Vec<usize>,
}

impl StoreWriter {
    /// Starts the tokens of `key`, `num_rows` rows, in `folder`, which is made where there is none. Where an earlier
    /// process was interrupted at them, goes on with its rows: with those before the first that is not whole. `watch` is told
    /// how many were found so far, of what may be tens of gigabytes.
    ///
    /// # Errors
    ///
    /// What the disk says; [`io::ErrorKind::Interrupted`] where `watch` does not want it to go on: then nothing is lost.
    pub(in crate::data) fn open(
        folder: &Path,
        key: CacheKey,
        num_rows: usize,
        max_length: usize,
        max_id: u32,
        watch: &mut dyn FnMut(usize) -> bool,
    ) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let (file, unfinished) = open_unfinished(folder, key)?;
        let num_rows = num_rows as u64;
        let records_at = records_at(num_rows).ok_or_else(|| io::Error::other("too many rows"))?;
        let (path, counts) = (key.path(folder), RowCounts::default());
        let (buffer, ends, lengths, bad_rows) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let is_left = false;
        let mut writer = Self {
            path,
            unfinished,
            is_left,
            key,
            file,
            num_rows,
            records_at,
            buffer,
            num_written: 0,
            ends,
            lengths,
            counts,
            bad_rows,
        };
        writer.find_rows(longest_record(max_length), max_id, watch)?;
        Ok(writer)
    }

    /// Takes over the rows that are in the file, up to the first that is not whole, and cuts off what follows them.
    fn find_rows(&mut self, longest: u64, max_id: u32, watch: &mut dyn FnMut(usize) -> bool) -> io::Result<()> {
        let records_bytes = self.file.metadata()?.len().saturating_sub(self.records_at);
        if records_bytes > 0 {
            let mut is_whole = true;
            let Self { file, ends, lengths, counts, bad_rows, records_at, is_left, .. } = self;
            let mut take = |block: &[u8]| {
                if !is_whole || *is_left {
                    return;
                }
                for end in long_words(block) {
                    if ends.len().is_multiple_of(ROWS_PER_WATCH) && !watch(ends.len()) {
                        *is_left = true;
                        return;
                    }
                    let start = ends.last().copied().unwrap_or(0);
                    let size =
                        end.checked_sub(start).filter(|size| is_record_size(*size, longest) && end <= records_bytes);
                    // It is no longer than a row and lies within the file.
                    let record = size.and_then(|size| usize::try_from(size).ok()).and_then(|size| {
                        let mut record = vec![0; size];
                        read_exact_at(file, &mut record, *records_at + start).ok().map(|()| record)
                    });
                    let Some(row) = record.and_then(|record| read_record(&record, max_id)) else {
                        is_whole = false;
                        return;
                    };
                    if row.is_bad {
                        bad_rows.push(ends.len());
                    }
                    ends.push(end);
                    lengths.push(kept_length(counts, &row));
                }
            };
            for_each_block(file, HEADER_BYTES as u64, self.num_rows * END_BYTES, &mut take)?;
            if self.is_left {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        self.num_written = self.ends.len();
        self.file.set_len(self.records_at + self.records_bytes())
    }

    /// Rows that it has so far.
    pub(in crate::data) fn num_rows(&self) -> usize {
        self.ends.len()
    }

    /// Of the rows that an earlier process has left, those that cannot be used.
    pub(in crate::data) fn bad_rows(&self) -> &[usize] {
        &self.bad_rows
    }

    /// Takes the next rows.
    pub(in crate::data) fn push(&mut self, chunk: &Chunk) -> io::Result<()> {
        let start = self.records_bytes();
        self.buffer.extend_from_slice(&chunk.bytes);
        self.ends.extend(chunk.ends.iter().map(|end| start + *end as u64));
        self.lengths.extend(&chunk.lengths);
        self.counts += chunk.counts;
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    /// What the rows turned out to be so far.
    pub(in crate::data) fn counts(&self) -> RowCounts {
        self.counts
    }

    /// Bytes of all records so far.
    fn records_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Writes records, then where they end: a row that the table has is in the file.
    fn flush(&mut self) -> io::Result<()> {
        let records_end = self.records_at + self.records_bytes();
        write_at(&mut self.file, records_end - self.buffer.len() as u64, &self.buffer)?;
        let new = self.num_written..self.ends.len();
        let ends: Vec<u8> = self.ends[new.clone()].iter().flat_map(|end| end.to_le_bytes()).collect();
        let lengths: Vec<u8> = self.lengths[new].iter().flat_map(|length| length.to_le_bytes()).collect();
        let (ends_at, num_written) = (HEADER_BYTES as u64, self.num_written as u64);
        let lengths_at = ends_at + self.num_rows * END_BYTES;
        write_at(&mut self.file, ends_at + num_written * END_BYTES, &ends)?;
        write_at(&mut self.file, lengths_at + num_written * 4, &lengths)?;
        self.num_written = self.ends.len();
        self.buffer.clear();
        Ok(())
    }

    /// Leaves the rows so far for the next process. What cannot be written is made anew then.
    pub(in crate::data) fn leave(mut self) {
        // On a full disk, those that were written before stay.
        drop(self.flush());
        self.is_left = self.num_written > 0;
    }

    /// Forces all to disk and gives it its name.
    pub(in crate::data) fn finish(mut self, details: &Details) -> io::Result<()> {
        let details = serde_json::to_vec(details)?;
        if details.len() as u64 > MAX_DETAILS_BYTES {
            return Err(io::Error::other("the names of its columns are too long"));
        }
        if self.ends.len() as u64 != self.num_rows {
            return Err(io::Error::other("not all of its rows were written"));
        }
        self.flush()?;
        let mut crc = crc32fast::Hasher::new();
        self.ends.iter().for_each(|end| crc.update(&end.to_le_bytes()));
        self.lengths.iter().for_each(|length| crc.update(&length.to_le_bytes()));
        crc.update(&details);
        let header = Header {
            key: self.key,
            num_rows: self.num_rows,
            records_bytes: self.records_bytes(),
            details_bytes: details.len() as u64,
            tables_crc: crc.finalize(),
        };
        write_at(&mut self.file, self.records_at + header.records_bytes, &details)?;
        write_at(&mut self.file, 0, &header.to_bytes())?;
        self.file.sync_all()?;
        if cfg!(unix) && !is_at(&self.file, &self.unfinished) {
            return Err(io::Error::other("the file was taken away while it was written"));
        }
        std::fs::rename(&self.unfinished, &self.path)?;
        self.is_left = true;
        sync_folder(self.path.parent())
    }
}

impl Drop for StoreWriter {
    fn drop(&mut self) {
        if !self.is_left {
            drop(std::fs::remove_file(&self.unfinished));
        }
    }
}

/// The file in which the tokens of `key` are gone on with, locked: that tells other processes that somebody writes it.
/// One with a name that nobody else has, where another process is at it, or where there are no locks.
fn open_unfinished(folder: &Path, key: CacheKey) -> io::Result<(File, PathBuf)> {
    let path = key.path(folder).with_extension(&UNFINISHED_SUFFIX[1..]);
    if cfg!(unix) {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        // Another user's cannot be opened.
        if let Ok(file) = options.open(&path)
            && file.try_lock().is_ok()
            && is_at(&file, &path)
        {
            return Ok((file, path));
        }
    }
    let unique = || tempfile::Builder::new().prefix("tokens-").suffix(UNFINISHED_SUFFIX).tempfile_in(folder);
    for _ in 1..MAX_TRIES {
        let file = unique()?;
        match file.as_file().try_lock() {
            // Before it was locked it looked to others like one that nobody will finish, and they may have removed it.
            Ok(()) if cfg!(unix) && !is_at(file.as_file(), file.path()) => {}
            Err(TryLockError::WouldBlock) => {}
            _ => return Ok(file.keep()?),
        }
    }
    Ok(unique()?.keep()?)
}

/// Whether `path` still names `file`: who held its lock before may have finished it, and then it has another name.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(file), Ok(named)) => identity(file) == identity(named),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    false
}

fn write_at(file: &mut File, at: u64, bytes: &[u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)
}

/// Makes the new name survive a power cut. Only Unix can open a folder.
fn sync_folder(folder: Option<&Path>) -> io::Result<()> {
    match folder {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}
