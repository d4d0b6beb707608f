//! Writing a file of tokens: complete or absent.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::store::{Details, HEADER_BYTES, Header, MAX_DETAILS_BYTES, push_record};
use super::{CacheKey, UNFINISHED_SUFFIX};
use crate::data::counts::RowCounts;
use crate::data::encode::EncodedRow;

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
        let length = if self.counts.add(row) { row.ids.len() } else { 0 };
        self.lengths.push(u32::try_from(length).unwrap_or(u32::MAX));
    }
}

/// A file of tokens that is being written, under a name of its own. Dropped unfinished, it is gone.
#[derive(Debug)]
pub(in crate::data) struct StoreWriter {
    path: PathBuf,
    key: CacheKey,
    file: BufWriter<NamedTempFile>,
    records_bytes: u64,
    ends: Vec<u64>,
    lengths: Vec<u32>,
    counts: RowCounts,
}

impl StoreWriter {
    /// Starts the tokens of `key` in `folder`, which is made where there is none.
    pub(in crate::data) fn create(folder: &Path, key: CacheKey) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let file = tempfile::Builder::new().prefix("tokens-").suffix(UNFINISHED_SUFFIX).tempfile_in(folder)?;
        // Tells other processes that somebody still writes it. Some file systems know no locks.
        drop(file.as_file().try_lock());
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&[0; HEADER_BYTES])?;
        let (ends, lengths) = (Vec::new(), Vec::new());
        let path = key.path(folder);
        Ok(Self { path, key, file, records_bytes: 0, ends, lengths, counts: RowCounts::default() })
    }

    /// Takes the next rows.
    pub(in crate::data) fn push(&mut self, chunk: &Chunk) -> io::Result<()> {
        self.file.write_all(&chunk.bytes)?;
        self.ends.extend(chunk.ends.iter().map(|end| self.records_bytes + *end as u64));
        self.records_bytes += chunk.bytes.len() as u64;
        self.lengths.extend(&chunk.lengths);
        self.counts += chunk.counts;
        Ok(())
    }

    /// What the rows turned out to be so far.
    pub(in crate::data) fn counts(&self) -> RowCounts {
        self.counts
    }

    /// Forces all to disk and gives it its name.
    pub(in crate::data) fn finish(mut self, details: &Details) -> io::Result<()> {
        let details = serde_json::to_vec(details)?;
        if details.len() as u64 > MAX_DETAILS_BYTES {
            return Err(io::Error::other("the names of its columns are too long"));
        }
        let mut crc = crc32fast::Hasher::new();
        let mut write = |file: &mut BufWriter<NamedTempFile>, bytes: &[u8]| {
            crc.update(bytes);
            file.write_all(bytes)
        };
        for end in &self.ends {
            write(&mut self.file, &end.to_le_bytes())?;
        }
        for length in &self.lengths {
            write(&mut self.file, &length.to_le_bytes())?;
        }
        write(&mut self.file, &details)?;
        let header = Header {
            key: self.key,
            num_rows: self.ends.len() as u64,
            records_bytes: self.records_bytes,
            details_bytes: details.len() as u64,
            tables_crc: crc.finalize(),
        };
        let mut file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header.to_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        sync_folder(self.path.parent())
    }
}

/// Makes the new name survive a power cut. Only Unix can open a folder.
fn sync_folder(folder: Option<&Path>) -> io::Result<()> {
    match folder {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}
