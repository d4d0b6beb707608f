//! Files of tokens that are cut, changed, foreign, or cannot be written.

use std::os::unix::fs::FileExt as _;

use super::*;
use crate::data::cache::store::Unusable;

#[test]
fn damaged_and_foreign_files_are_never_believed() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    let expected = rows(&cache.open(&config, &tokenizer).unwrap());
    let store = cache.stores().remove(0);
    let sound = fs::read(&store).unwrap();
    // Every byte of the header, and some of the tables, of each record and of the details.
    let records = records(&sound);
    let places = (0..128).chain((128..records.start).step_by(3)).chain(records.clone().step_by(7));
    let places = places.chain((records.end..sound.len()).step_by(3));
    let mut num_found_at_start = 0;
    for place in places {
        let mut bytes = sound.clone();
        bytes[place] ^= 1 << (place % 8);
        fs::write(&store, &bytes).unwrap();
        let opened = cache.open(&config, &tokenizer).unwrap();
        num_found_at_start += usize::from(!is_hit(&opened));
        assert_eq!(rows(&opened), expected, "byte {place}");
        // Whether it was found at the start or at a row, the next start has a sound one.
        drop(cache.open(&config, &tokenizer).unwrap());
        assert_eq!(fs::read(&store).unwrap(), sound, "byte {place}");
    }
    assert!(num_found_at_start >= 128, "{num_found_at_start}");
    for bytes in [
        &[],
        &sound[..7],
        &sound[..127],
        &sound[..128],
        &sound[..sound.len() - 1],
        &[sound.clone(), vec![0]].concat()[..],
    ] {
        fs::write(&store, bytes).unwrap();
        let opened = cache.open(&config, &tokenizer).unwrap();
        assert!(!is_hit(&opened));
        assert_eq!(rows(&opened), expected, "{} bytes", bytes.len());
    }
    // The tokens of another file under this name.
    let other = packed(vec![files.write("other.jsonl", &numbered_rows(41))]);
    cache.open(&other, &tokenizer).unwrap();
    let foreign = cache.stores().into_iter().find(|path| *path != store).unwrap();
    fs::copy(&foreign, &store).unwrap();
    let opened = cache.open(&config, &tokenizer).unwrap();
    assert!(!is_hit(&opened));
    assert_eq!(rows(&opened), expected);
}

#[test]
fn lengths_that_no_file_has_are_refused_before_anything_is_allocated() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    cache.open(&config, &tokenizer).unwrap();
    let store = cache.stores().remove(0);
    let sound = fs::read(&store).unwrap();
    let key = CacheKey(*sound[16..].first_chunk().unwrap());
    for (at, number) in
        [(48, u64::MAX), (48, u64::MAX / 12), (56, u64::MAX - 200), (64, u64::MAX), (48, 1 << 40), (56, 0)]
    {
        let mut bytes = sound.clone();
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        let crc = crc32fast::hash(&bytes[12..128]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        fs::write(&store, &bytes).unwrap();
        let opened = TokenStore::open(&store, key, 64, tokenizer.max_id());
        assert!(matches!(opened, Err(Unusable::Damaged)), "{number} at {at}");
    }
    // A token that the model has no embedding for, with a right checksum.
    let mut bytes = sound.clone();
    let start = records(&sound).start;
    let first = start..start + usize::try_from(u64::from_le_bytes(*sound[128..].first_chunk().unwrap())).unwrap();
    bytes[first.start + 16..first.start + 20].copy_from_slice(&261_u32.to_le_bytes());
    let crc = crc32fast::hash(&bytes[first.start + 4..first.end]);
    bytes[first.start..first.start + 4].copy_from_slice(&crc.to_le_bytes());
    fs::write(&store, &bytes).unwrap();
    assert_eq!(TokenStore::open(&store, key, 64, 261).unwrap().read(0).unwrap().ids[0], 261);
    assert!(TokenStore::open(&store, key, 64, 260).unwrap().read(0).is_none());
    assert!(matches!(TokenStore::open(&store, key, 3, 261), Err(Unusable::Damaged)), "rows longer than there can be");
}

#[test]
fn a_cache_that_is_damaged_after_the_start_is_replaced_by_the_data_file() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    cache.open(&config, &tokenizer).unwrap();
    let expected = rows(&cache.open(&config, &tokenizer).unwrap());
    for case in ["zeroed", "cut", "data changed"] {
        let opened = cache.open(&config, &tokenizer).unwrap();
        let file = FileOptions::new().write(true).open(&cache.stores()[0]).unwrap();
        if case == "zeroed" {
            file.write_all_at(&[0; 400], 700).unwrap();
        } else {
            file.set_len(700).unwrap();
        }
        if case == "data changed" {
            files.write("r.jsonl", &numbered_rows(39));
            let error = (0..40).find_map(|row| opened.train_row(row).err()).unwrap().to_string();
            assert!(
                error.contains("r.jsonl: has changed since the start") && error.contains("hint: start again"),
                "{error}"
            );
        } else {
            assert_eq!(rows(&opened), expected, "{case}");
        }
        assert!(cache.stores().is_empty(), "it is thrown away");
        cache.open(&config, &tokenizer).unwrap();
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_a_warning() {
    let (files, tokenizer) = (Files::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    let fresh = DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
    // A file where the folder is to be: refused for root too.
    let folder = files.path("r.jsonl").join("tokens");
    let cache = CacheSettings { folder: Some(folder), max_bytes: 0 };
    let options = OpenOptions { cache, ..OpenOptions::default() };
    let opened = DataPipeline::open(&config, tokenizer, 7, &options).unwrap();
    let warnings = opened.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("its tokens cannot be kept in"), "{warnings:?}");
    assert!(warnings[0].contains("hint: LORA_TRAIN_CACHE names another folder"), "{warnings:?}");
    assert_eq!(rows(&opened), rows(&fresh));
    assert_eq!(opened.batches_per_epoch(1), fresh.batches_per_epoch(1));
}
