//! Parts of a file by their offsets.

use std::fs::File;
use std::io;
use std::ops::Range;

/// Bytes that are read at a time.
pub(super) const BLOCK_BYTES: usize = 1 << 20;

/// The bytes of a file in `range`.
pub(super) fn bytes_at(file: &File, range: Range<u64>) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
    read_exact_at(file, &mut bytes, range.start)?;
    Ok(bytes)
}

/// At most so many bytes at the start of a file.
pub(super) fn first_bytes(file: &File, most: u64) -> io::Result<Vec<u8>> {
    bytes_at(file, 0..most.min(file.metadata()?.len()))
}

/// Hands the bytes of a file in `range` to `sink`, a block at a time; stops early at the end of the file.
pub(super) fn for_each_block(
    file: &File,
    range: Range<u64>,
    sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut at = range.start;
    let end = range.end.min(file.metadata()?.len());
    while at < end {
        let size = usize::try_from(end - at).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
        read_exact_at(file, &mut block[..size], at)?;
        sink(&block[..size])?;
        at += size as u64;
    }
    Ok(())
}

/// Reads `bytes.len()` bytes from `offset`, without moving a cursor: threads share the file.
#[cfg(unix)]
pub(super) fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Reads `bytes.len()` bytes from `offset`. Moves the file's cursor, which nothing else uses.
#[cfg(windows)]
pub(super) fn read_exact_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (bytes, offset) = (&mut bytes[read..], offset + read as u64),
        }
    }
    Ok(())
}
