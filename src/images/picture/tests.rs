use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::util::files::hex;

/// Files of every kind, with what Pillow makes of them (`scripts/make_picture_golden.py`).
fn cases() -> Vec<Value> {
    serde_json::from_str(include_str!("../../../tests/golden/pictures.json")).unwrap()
}

fn bytes(case: &Value, key: &str) -> Vec<u8> {
    STANDARD.decode(case[key].as_str().unwrap()).unwrap()
}

fn file(name: &str) -> Vec<u8> {
    bytes(cases().iter().find(|case| case["name"] == name).unwrap(), "file")
}

#[test]
fn every_kind_of_file_becomes_what_pillow_makes_of_it() {
    for case in cases() {
        let (name, file) = (&case["name"], bytes(&case, "file"));
        let size = [0, 1].map(|side| case["size"][side].as_u64().unwrap() as usize);
        assert_eq!(size_of(&file), Ok(size), "{name}");
        let picture = Picture::decode(&file).unwrap_or_else(|error| panic!("{name} {error}"));
        let expected = bytes(&case, "pixels");
        assert_eq!((picture.size, picture.pixels.len()), (size, expected.len()), "{name}");
        let most = picture.pixels.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(u64::from(most) <= case["bound"].as_u64().unwrap(), "{name}: {most}");
    }
}

/// Features are kept on disk by the content of a file. Where a newer decoder makes other pixels of one, the `MAGIC` of features must
/// change with these numbers, so that none of the old are used.
#[test]
fn jpegs_become_the_pixels_that_features_on_disk_are_of() {
    let hashes = [
        ("jpeg, 4:4:4", "c2325d9efdd80080"),
        ("jpeg, 4:2:2", "97afc0a14d115b37"),
        ("jpeg, 4:2:0", "e7245d7ead3f4139"),
        ("jpeg, progressive", "c2325d9efdd80080"),
        ("jpeg, grey", "b48003e2d7fe0f0f"),
        ("jpeg, cmyk", "b628f443d62e407f"),
        ("jpeg, ycck", "054369ea1e67b164"),
        ("jpeg, orientation 6", "484d7806a50a46b5"),
    ];
    let found = hashes.map(|(name, _)| {
        let pixels = Picture::decode(&file(name)).unwrap().pixels;
        (name, hex(&Sha256::digest(pixels)[..8]))
    });
    assert_eq!(found.each_ref().map(|(name, hash)| (*name, hash.as_str())), hashes);
}

#[test]
fn what_is_no_whole_image_of_a_decent_size_is_refused() {
    let png = file("png, color 2, 8 bits");
    let jpeg = file("jpeg, 4:2:0");
    let mut changed = png.clone();
    changed[50] ^= 1;
    for (file, reason) in [
        (&b""[..], "is empty"),
        (b"<html></html>", "is no image but HTML"),
        (b"name,age", "is no image: "),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
        (b"BM......", "is a BMP; PNG, JPEG, GIF and WebP are read"),
        (b"\0\0\0\x20ftypavif", "is an AVIF"),
        (&png[..20], "is damaged or cut short"),
        (&png[..png.len() - 30], "cut short: its end is missing"),
        (&changed, "the checksum of its IDAT is another"),
        (&jpeg[..jpeg.len() / 2], "is damaged or cut short"),
        (&jpeg[..jpeg.len() - 2], "cut short: its end is missing"),
    ] {
        for error in [Picture::decode(file).unwrap_err(), size_of(file).unwrap_err()] {
            assert!(error.contains(reason), "{error}");
        }
    }
    // Pillow opens what has other bytes behind it, or lacks an end behind its pixels.
    for (name, num_ends) in [("png, color 2, 8 bits", 12), ("jpeg, 4:2:0", 0), ("gif", 2), ("webp, lossy", 0)] {
        let whole = file(name);
        let picture = Picture::decode(&whole).unwrap();
        for changed in [&whole[..whole.len() - num_ends], &[&whole[..], b"more"].concat()] {
            assert!(size_of(changed) == Ok(picture.size) && Picture::decode(changed) == Ok(picture.clone()), "{name}");
        }
        let error = size_of(&whole[..whole.len() - num_ends - 3]).unwrap_err();
        assert!(error.contains("cut short"), "{name}: {error}");
    }
    // A header that promises more than a file can hold.
    let mut bomb = png;
    bomb[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
    let checksum = crc32fast::hash(&bomb[12..29]);
    bomb[29..33].copy_from_slice(&checksum.to_be_bytes());
    let error = size_of(&bomb).unwrap_err();
    assert!(error.contains("65536 x 65536 pixels of 4 bytes, more than"), "{error}");
}

#[test]
fn what_is_odd_about_an_image_is_in_its_header() {
    let odd = |name: &str| {
        let Oddities { moves, is_deep, is_transparent } = header_of(&file(name)).unwrap().1;
        [moves, is_deep, is_transparent]
    };
    for (name, expected) in [
        ("png, color 2, 8 bits", [false, false, false]),
        ("png, color 0, 16 bits", [false, true, false]),
        ("png, color 6, 8 bits", [false, false, true]),
        ("png, palette of 2 bits, transparent", [false, false, true]),
        ("jpeg, cmyk", [false, false, false]),
        ("gif", [false, false, false]),
        ("gif, moving and transparent", [true, false, true]),
        ("webp, lossy", [false, false, false]),
        ("webp, transparent", [false, false, true]),
    ] {
        assert_eq!(odd(name), expected, "{name}");
    }
}
