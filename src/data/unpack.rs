//! Compressed data files.
//!
//! Rows are read by their offsets, which a compressed file does not have: it is unpacked, in pieces, into an unnamed
//! temporary file, as a Parquet file is.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::util::files;

/// Bytes that a file of any size may unpack to.
const HARMLESS_BYTES: u64 = 64 << 20;
/// Largest ratio beyond that. Text packs to a tenth, rarely to a hundredth.
const MAX_RATIO: u64 = 1000;

/// Bytes that are unpacked at a time.
const BLOCK_BYTES: u64 = 1 << 17;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Zstd,
}

impl Compression {
    /// The compression that the last ending of a path names.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "gz" => Some(Self::Gzip),
            "zst" => Some(Self::Zstd),
            _ => None,
        }
    }

    fn ending(self) -> &'static str {
        match self {
            Self::Gzip => "gz",
            Self::Zstd => "zst",
        }
    }
}

/// Opens a data file; a compressed one as a temporary file with its content, which `watch` sees while it is unpacked and
/// may refuse.
pub(super) fn open(path: &Path, watch: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> Result<File, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let Some(compression) = Compression::of(path) else {
        refuse_other_kinds(&file)?;
        return Ok(file);
    };
    let num_bytes = file.metadata().map_err(|error| error.to_string())?.len();
    let broken = |error: io::Error| {
        format!("cannot be unpacked as .{}: {error}\n  hint: write it, or download it, again", compression.ending())
    };
    let packed = BufReader::new(file);
    let mut content: Box<dyn Read> = match compression {
        Compression::Gzip => Box::new(MultiGzDecoder::new(packed)),
        Compression::Zstd => Box::new(zstd::Decoder::new(packed).map_err(broken)?),
    };
    let limit = HARMLESS_BYTES.max(num_bytes.saturating_mul(MAX_RATIO));
    let mut whole = files::temporary()?;
    let mut block = Vec::new();
    let mut unpacked = 0;
    while content.by_ref().take(BLOCK_BYTES).read_to_end(&mut block).map_err(broken)? > 0 {
        watch(&block).map_err(|error| error.to_string())?;
        unpacked += block.len() as u64;
        if unpacked > limit {
            return Err(format!("unpacks to more than {MAX_RATIO} times its size: not a file of rows"));
        }
        write_out(&mut whole, &block)?;
        block.clear();
    }
    whole.rewind().map_err(|error| error.to_string())?;
    Ok(whole)
}

/// Refuses a file whose first bytes say that it is no plain text.
fn refuse_other_kinds(mut file: &File) -> Result<(), String> {
    let mut start = Vec::new();
    let read = file.take(4).read_to_end(&mut start).and_then(|_| file.rewind());
    read.map_err(|error| error.to_string())?;
    Err(match start[..] {
        [0x1f, 0x8b, ..] => "is packed by gzip\n  hint: end its name in .gz",
        [0x28, 0xb5, 0x2f, 0xfd] => "is packed by zstd\n  hint: end its name in .zst",
        _ => return Ok(()),
    }
    .to_owned())
}

/// Writes to the temporary file.
fn write_out(file: &mut File, bytes: &[u8]) -> Result<(), String> {
    io::Write::write_all(file, bytes)
        .map_err(|error| format!("cannot be unpacked: {error}\n  hint: TMPDIR names a folder with more room"))
}
