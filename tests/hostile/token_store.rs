//! A token cache file, finished or interrupted, with changed bytes and repaired checksums.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use lora_train::config::{DataConfig, DataFormat, OnBadRow};
use lora_train::data::dataset::{Cursor, Dataset};
use lora_train::data::error::DataError;

use crate::folder::Folder;
use crate::targets::{check_rows, data_config, quickstart_tokenizer, with_cache};

const ROWS: &[u8] =
    b"{\"text\": \"a frog\"}\n{\"text\": []}\n{\"text\": \"\"}\n{\"text\": \"At the beach, Clara met a frog.\"}\n";
const HEADER_BYTES: usize = 128;
/// Positions of the header's numbers: rows, bytes of records, bytes of details.
const NUMBERS: [usize; 3] = [48, 56, 64];

/// Changes of four bytes each: where (two bytes), how, and with what. The first byte says which checksums to repair
/// afterwards, and whether the file was left unfinished.
pub(crate) fn tokens(data: &[u8]) {
    let Some((repairs, changes)) = data.split_first() else { return };
    let folder = Folder::new();
    let config = DataConfig {
        packing: true,
        ..data_config(&folder.write("rows.jsonl", ROWS), DataFormat::Text, OnBadRow::Skip)
    };
    let cache = folder.path().join("cache");
    let (name, mut bytes) = valid(&cache, &config);
    for change in changes.chunks_exact(4).take(64) {
        apply(&mut bytes, [change[0], change[1], change[2], change[3]]);
    }
    if repairs & 1 != 0 {
        repair_tables(&mut bytes);
    }
    if repairs & 2 != 0 && bytes.len() >= HEADER_BYTES {
        let crc = crc32fast::hash(&bytes[12..HEADER_BYTES]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    }
    fs::create_dir_all(&cache).unwrap();
    let name = if repairs & 4 == 0 { name } else { name.replace(".tokens", ".unfinished") };
    fs::write(cache.join(name), bytes).unwrap();
    // A table with a valid checksum may say that no row is usable.
    let Ok(pipeline) = Dataset::open(&config, quickstart_tokenizer().clone(), 0, &with_cache(&cache)) else {
        return;
    };
    check_rows(&pipeline, &config);
    match pipeline.loader(Cursor::default(), 2).unwrap().next_batch() {
        Ok(loaded) => assert!(loaded.batch.num_target_tokens() <= loaded.batch.num_tokens()),
        Err(error) => assert!(matches!(error, DataError::Tokens { .. }), "{error}"),
    }
    folder.assert_nothing_outside();
}

/// The file that the trainer makes from the rows: its name and its bytes.
fn valid(cache: &Path, config: &DataConfig) -> (String, Vec<u8>) {
    static VALID: OnceLock<(String, Vec<u8>)> = OnceLock::new();
    let make = || {
        drop(Dataset::open(config, quickstart_tokenizer().clone(), 0, &with_cache(cache)).unwrap());
        let stores = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path());
        let path = stores.filter(|path| path.extension().is_some_and(|end| end == "tokens")).last().unwrap();
        (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
    };
    VALID.get_or_init(make).clone()
}

fn apply(bytes: &mut Vec<u8>, [high, low, how, with]: [u8; 4]) {
    let at = usize::from(u16::from_be_bytes([high, low]));
    let len = bytes.len();
    match how % 6 {
        0 if len > 0 => bytes[at % len] ^= with,
        1 if len > 0 => bytes[at % len] = with,
        2 => bytes.truncate(at),
        3 => bytes.insert(at.min(len), with),
        4 if len > 0 => drop(bytes.remove(at % len)),
        // Overwrites a number of the header with a small or huge one.
        5 if len >= HEADER_BYTES => {
            let place = NUMBERS[at % NUMBERS.len()];
            let number = if with & 0x80 == 0 { u64::from(with) } else { u64::MAX >> (with & 0x3f) };
            bytes[place..place + 8].copy_from_slice(&number.to_le_bytes());
        }
        _ => {}
    }
}

/// The checksum of the tables and the details, at the place that the header gives.
fn repair_tables(bytes: &mut [u8]) {
    let number = |at: usize| {
        let bytes = bytes.get(at..at + 8)?.first_chunk()?;
        usize::try_from(u64::from_le_bytes(*bytes)).ok()
    };
    let sum = || {
        // The table and the details follow the records.
        Some(crc32fast::hash(bytes.get(number(56)?.checked_add(HEADER_BYTES)?..)?))
    };
    if let Some(crc) = sum() {
        bytes[72..76].copy_from_slice(&crc.to_le_bytes());
    }
}
