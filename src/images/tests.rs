use zune_png::PngEncoder;
use zune_png::zune_core::bit_depth::BitDepth;
use zune_png::zune_core::colorspace::ColorSpace;
use zune_png::zune_core::options::EncoderOptions;

use super::*;
use crate::spec::{Activation, Cutting, Encoder, EncoderKind, Filter, Pixels, Projector, SeenBothWays};

pub(super) fn vision() -> Vision {
    Vision {
        encoder: Encoder {
            kind: EncoderKind::Pixtral { rope_theta: 1e4 },
            hidden_size: 8,
            intermediate_size: 8,
            num_layers: 1,
            num_heads: 2,
            patch_size: 4,
            activation: Activation::Silu,
            eps: 1e-5,
            windows: None,
        },
        projector: Projector::Merging { merge_size: 2, activation: Activation::Gelu, has_bias: false, eps: 1e-5 },
        deepstack: Vec::new(),
        text_size: 3,
        image_token_id: 10,
        table_id: 10,
        pixels: Pixels { filter: Filter::Bicubic, norm: Some([[0.5; 3], [0.5, 0.25, 1.0]]) },
        cutting: Cutting::Whole { longest_edge: 64 },
        seen_both_ways: SeenBothWays::Nowhere,
    }
}

fn png([width, height]: [usize; 2], color: [u8; 3]) -> Vec<u8> {
    let (pixels, mut file) = (color.repeat(width * height), Vec::new());
    let options = EncoderOptions::new(width, height, ColorSpace::RGB, BitDepth::Eight);
    PngEncoder::new(&pixels, options).encode(&mut file).unwrap();
    file
}

#[test]
fn equal_images_are_one_and_others_have_their_own_ids() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    for (name, size, color) in [("a.png", [20, 9], [9; 3]), ("b.png", [20, 9], [9; 3]), ("c.png", [8, 8], [9; 3])] {
        std::fs::write(path(name), png(size, color)).unwrap();
    }
    let images = Images::new(Ok(vision()), Limits::default());
    let ids = |name: &str| images.add(name).map(|image| (image.first_id - FIRST_IMAGE_ID, image.num_tokens()));
    assert_eq!(
        ["a.png", "b.png", "c.png", "a.png"].map(|name| ids(&path(name)).unwrap()),
        [(0, 6), (0, 6), (6, 1), (0, 6)]
    );
    let inline = format!("data:image/png;base64,{}", STANDARD.encode(png([8, 8], [9; 3])));
    assert_eq!(ids(&inline), Ok((6, 1)));
    assert_eq!(images.all().len(), 2);
    for (name, reason) in [
        (path("none.png"), "cannot be read"),
        ("https://example.com/a.png".to_owned(), "is an address, and here only files are read"),
        ("data:image/png;base64,!".to_owned(), "has damaged base64: "),
    ] {
        let error = ids(&name).unwrap_err();
        assert!(error.contains(reason) && error.starts_with("the image"), "{error}");
    }
    let [scaled] = &images.pieces(&images.all()[1]).unwrap()[..] else { panic!("it is seen as a whole") };
    assert_eq!(scaled.size, [8, 8]);
    let expected = [(9.0 - 127.5) / 127.5, (9.0 - 127.5) / 63.75, (9.0 - 127.5) / 255.0_f32];
    assert_eq!([0, 64, 128].map(|at| scaled.values[at]), expected);
}

#[test]
fn images_in_rows_wait_on_disk_only_until_they_are_encoded() {
    let name = format!("data:image/png;base64,{}", STANDARD.encode(png([20, 9], [1; 3])));
    let rows = || Images::new(Ok(vision()), Limits::default()).of_rows();
    let (images, headers) = (rows(), rows().headers_alone());
    let image = images.add(&name).unwrap();
    assert_eq!(images.pieces(&image).unwrap().len(), 1);
    images.drop_spool();
    assert_eq!(images.add(&name).unwrap().first_id, image.first_id);
    assert_eq!(headers.add(&name).unwrap().cut, image.cut);
    for images in [&images, &headers] {
        assert!(images.found().spool.is_none());
        assert_eq!(images.pieces(&images.all()[0]).unwrap_err(), "is not there any more");
    }
}

/// The files of features in a folder.
fn kept(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|end| end == "features")).collect()
}

#[test]
fn features_are_made_once_and_again_where_they_are_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let images = Images::new(Ok(vision()), Limits::default());
    for (size, color) in [([20, 9], [1; 3]), ([8, 8], [2; 3])] {
        images.add(&format!("data:image/png;base64,{}", STANDARD.encode(png(size, color)))).unwrap();
    }
    let all = images.all();
    let made = |tower: u8| {
        let mut made = Vec::new();
        let key = images.key([tower; 32]).unwrap();
        let mut writer = FeatureWriter::new((Some(folder.path().to_owned()), u64::MAX), key, &vision(), &all).unwrap();
        for (index, image) in all.iter().enumerate() {
            let values = || {
                made.push(index);
                Ok((0..3 * image.num_tokens()).map(|at| (100 * index + at) as f32).collect())
            };
            writer.add(image, values).unwrap();
        }
        (made, writer.finish())
    };
    assert_eq!(made(1).0, [0, 1]);
    let (again, features) = made(1);
    assert!(again.is_empty());
    let ids = [7, 6, 1, 2, 6].map(|id| FIRST_IMAGE_ID + id);
    assert!(features.read(&ids[..1]).is_err(), "there is no such image");
    let rows = features.read(&ids[1..]).unwrap();
    assert_eq!(rows, [100.0, 101.0, 102.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0, 101.0, 102.0]);
    // What was interrupted goes on with what is missing.
    std::fs::remove_file(&kept(folder.path())[0]).unwrap();
    assert_eq!(made(1).0.len(), 1);
    assert_eq!(made(2).0, [0, 1], "another tower");
    for path in kept(folder.path()) {
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
    assert_eq!(made(1).0, [0, 1], "damaged");
}

#[test]
fn features_are_not_deleted_while_a_run_uses_them() {
    let folder = tempfile::tempdir().unwrap();
    let images = |colors: [u8; 2]| {
        let images = Images::new(Ok(vision()), Limits::default());
        for color in colors {
            images.add(&format!("data:image/png;base64,{}", STANDARD.encode(png([20, 9], [color; 3])))).unwrap();
        }
        images
    };
    let (own, others) = (images([1, 2]), images([3, 4]));
    let bytes = features::bytes_of(&vision(), &own.all());
    let made = |images: &Images, most_bytes: u64| {
        // The clock of files goes in steps of some milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (mut made, all) = (0, images.all());
        let kept_in = (Some(folder.path().to_owned()), most_bytes);
        let mut writer = FeatureWriter::new(kept_in, images.key([1; 32]).unwrap(), &vision(), &all).unwrap();
        for image in &all {
            let values = || {
                made += 1;
                Ok(vec![0.5; 3 * image.num_tokens()])
            };
            writer.add(image, values).unwrap();
        }
        (made, writer.finish())
    };
    drop(made(&others, bytes));
    assert_eq!(made(&own, bytes).0, 2);
    assert_eq!(kept(folder.path()).len(), 2, "those of others make room");
    // They need all that may be kept, and none of it is to be made.
    let (again, used) = made(&own, bytes);
    assert_eq!((again, kept(folder.path()).len()), (0, 2));
    let other = made(&others, 0).1;
    assert_eq!(used.read(&[FIRST_IMAGE_ID, FIRST_IMAGE_ID + 6]).unwrap(), [0.5; 6]);
    drop((used, other));
    drop(made(&others, 0));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn features_without_room_are_made_whenever_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let images = Images::new(Ok(vision()), Limits::default());
    let data = |size, color| format!("data:image/png;base64,{}", STANDARD.encode(png(size, [color; 3])));
    for (size, color) in [([20, 9], 1), ([20, 9], 2), ([8, 8], 3)] {
        images.add(&data(size, color)).unwrap();
    }
    let all = images.all();
    // The first and the last, whose tokens are fewer.
    let bytes = features::bytes_of(&vision(), &[Arc::clone(&all[0]), Arc::clone(&all[2])]);
    let kept_in = (Some(folder.path().to_owned()), bytes);
    let mut writer = FeatureWriter::new(kept_in, images.key([1; 32]).unwrap(), &vision(), &all).unwrap();
    let start = |image: &Image| (image.first_id - FIRST_IMAGE_ID) as usize;
    let values = move |image: &Image| (0..3 * image.num_tokens()).map(|at| (3 * start(image) + at) as f32).collect();
    let added: Vec<bool> = all.iter().map(|image| writer.add(image, || Ok(values(image))).unwrap()).collect();
    assert_eq!((added, kept(folder.path()).len()), (vec![true, false, true], 2));
    let num_made = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&num_made);
    let features = writer.finish().made_by(move |image| {
        *counted.lock().unwrap() += 1;
        if *counted.lock().unwrap() < 3 { Ok(values(image)) } else { Err("is lost".to_owned()) }
    });
    let ids = [0, 6, 7, 12, 6].map(|id| FIRST_IMAGE_ID + id);
    let found = features.read(&ids).unwrap();
    let first = |row: usize| found[3 * row];
    assert_eq!([0, 1, 2, 3, 4].map(first), [0.0, 18.0, 21.0, 36.0, 18.0]);
    assert_eq!(*num_made.lock().unwrap(), 1);
    features.read(&ids[..1]).unwrap();
    features.read(&ids[1..2]).unwrap();
    assert_eq!(*num_made.lock().unwrap(), 2);
    assert!(features.read(&ids[1..2]).unwrap_err().to_string().contains("is lost"));
}

#[test]
fn what_nobody_holds_is_forgotten_and_its_ids_are_free_again() {
    let (images, features) = (Images::new(Ok(vision()), Limits::default()), Features::new(&vision()));
    let add =
        |color: u8| images.add(&format!("data:image/png;base64,{}", STANDARD.encode(png([8, 8], [color; 3])))).unwrap();
    let (held, other) = (add(1), add(2));
    features.keep(&held, vec![1.0, 2.0, 3.0]);
    features.keep(&other, vec![4.0, 5.0, 6.0]);
    assert_eq!(features.read(&[other.first_id, held.first_id]).unwrap(), [4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
    drop(other);
    assert!(images.forget(u64::MAX).is_empty());
    let forgotten = images.forget(0);
    assert_eq!(forgotten, [FIRST_IMAGE_ID + 1]);
    features.forget(&forgotten);
    assert!(features.has(&held) && features.read(&forgotten).is_err() && images.all().len() == 1);
    assert!(!features.has(&add(2)));

    // At the end of the ids, those of forgotten images are taken.
    let mut found = Found::default();
    let at = |first_id: u32| {
        let (source, cut, name) = (Source::Bytes(Vec::new()), held.cut.clone(), String::new());
        (first_id, Arc::new(Image { name, source, cut, first_id, ..*held }))
    };
    found.images.extend([at(FIRST_IMAGE_ID), at(FIRST_IMAGE_ID + 3), at(FIRST_IMAGE_ID + NUM_IDS - 1)]);
    assert_eq!([2, 3].map(|tokens| found.free_ids(tokens)), [Some(FIRST_IMAGE_ID + 1), Some(FIRST_IMAGE_ID + 4)]);
    assert_eq!(found.free_ids(NUM_IDS as usize), None);
}
