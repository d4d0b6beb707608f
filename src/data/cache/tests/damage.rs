//! Token files that are cut short, changed, made for another data file, or cannot be written.

use super::*;

#[test]
fn damaged_and_foreign_files_are_never_believed() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    let expected = rows(&cache.open(&config, &tokenizer).unwrap());
    let store = cache.stores().remove(0);
    let sound = fs::read(&store).unwrap();
    // Every byte of the header, and some bytes of each record, the table and the details.
    let records = records(&sound);
    let places = (0..128).chain(records.clone().step_by(7)).chain((records.end..sound.len()).step_by(3));
    let mut num_found_at_start = 0;
    for place in places {
        let mut bytes = sound.clone();
        bytes[place] ^= 1 << (place % 8);
        fs::write(&store, &bytes).unwrap();
        let opened = cache.open(&config, &tokenizer).unwrap();
        if is_hit(&opened) {
            // A record is checked when it is read; if it is damaged, the whole file is thrown away.
            assert!(records.contains(&place), "byte {place}");
            let error = (0..40).find_map(|row| opened.train_row(row).err()).unwrap();
            assert!(matches!(error, DataError::Tokens { .. }) && !error.is_mistake(), "{error}");
        } else {
            num_found_at_start += 1;
            assert_eq!(rows(&opened), expected, "byte {place}");
        }
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
        let opened = Encoded::open(&store, key);
        assert!(opened.is_none(), "{number} at {at}");
    }
    // A token id beyond the model's embedding, with a correct checksum.
    let mut bytes = sound.clone();
    let first = 128..128 + 4 + 4 * rows(&cache.open(&config, &tokenizer).unwrap())[0].1.full_length;
    bytes[first.start + 4..first.start + 8].copy_from_slice(&261_u32.to_le_bytes());
    let crc = crc32fast::hash(&bytes[first.start + 4..first.end]);
    bytes[first.start..first.start + 4].copy_from_slice(&crc.to_le_bytes());
    fs::write(&store, &bytes).unwrap();
    let tokens = Encoded::open(&store, key).unwrap().tokens;
    assert_eq!(tokens.read(0, 261).unwrap().ids[0], 261);
    assert!(tokens.read(0, 260).is_none());
}

#[test]
fn a_folder_that_cannot_be_written_is_a_warning() {
    let (files, tokenizer) = (Files::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    let fresh = Dataset::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
    // A file stands where the folder should be: that fails even for root.
    let folder = files.path("r.jsonl").join("tokens");
    let cache = CacheSettings { folder: Some(folder), max_bytes: 0, min_file_bytes: 0 };
    let options = OpenOptions { cache, ..OpenOptions::default() };
    let opened = Dataset::open(&config, tokenizer, 7, &options).unwrap();
    let warnings = opened.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("its tokens cannot be kept in"), "{warnings:?}");
    assert!(warnings[0].contains("hint: LORA_TRAIN_CACHE names another folder"), "{warnings:?}");
    assert_eq!(rows(&opened), rows(&fresh));
    assert_eq!(opened.batches_per_epoch(1), fresh.batches_per_epoch(1));
}
