//! Rows that name images by web addresses.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::hub::PublicFiles;
use crate::hub::fixture::{Behaviour, Hub};
use crate::images::{Images, Limits};
use crate::spec::{ModelConfig, Vision};

fn open(folder: &Path, files: &Files, name: &str) -> Result<(Dataset, Arc<Images>), String> {
    open_all(config(vec![files.source(name)]), folder)
}

fn open_all(config: DataConfig, folder: &Path) -> Result<(Dataset, Arc<Images>), String> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images-mistral3");
    let model = ModelConfig::from_file(&golden.join("config.json")).unwrap();
    let vision = Vision::of_folder(&golden, &model).unwrap().unwrap();
    let limits = Limits { folder: Some(golden.clone()), max_length: 64, ..Limits::default() };
    let images = Images::new(Ok(vision), limits).of_rows().with_web(PublicFiles::of_this_machine(folder));
    let images = Arc::new(images);
    let options = OpenOptions { images: Some(Arc::clone(&images)), ..OpenOptions::default() };
    let config = DataConfig { max_length: 64, ..config };
    let data = Dataset::open(&config, Arc::new(Tokenizer::open(&golden).unwrap()), 0, &options);
    data.map(|data| (data, images)).map_err(|error| error.to_string())
}

#[test]
fn the_digest_of_training_rows_is_without_images_of_others() {
    let files = Files::new();
    let row = |image: &str| {
        let said = json!([{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}]);
        files.write(&format!("{image}.jsonl"), &json!({"messages": said, "images": [image]}).to_string())
    };
    let digest = |train: &str, eval: Option<&str>| {
        let eval = eval.map(&row).into_iter().collect();
        let (data, images) = open_all(DataConfig { eval, ..config(vec![row(train)]) }, &files.path("")).unwrap();
        (images.all().len(), data.train_digest().unwrap())
    };
    let (num_images, alone) = digest("a.png", None);
    assert_eq!((num_images, digest("a.png", Some("c.png"))), (1, (2, alone)));
    assert_eq!(digest("a.png", Some("a.png")), (1, alone));
}

#[test]
fn images_at_web_addresses_are_fetched_once_and_are_those_of_files() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images-mistral3");
    let served = ["a.png", "c.png"].map(|name| (name.to_owned(), std::fs::read(golden.join(name)).unwrap()));
    let hub = Hub::start(Behaviour { files: served.into(), ..Behaviour::default() });
    let (cache, files) = (tempfile::tempdir().unwrap(), Files::new());
    let rows = |start: &str| {
        let at = |name: &str| format!("{start}{name}");
        let said =
            |content: Value| json!([{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]);
        let part = |part: Value| json!({"messages": said(json!([part, {"type": "text", "text": "?"}]))});
        let rows = [
            part(json!({"type": "image_url", "image_url": {"url": at("a.png")}})),
            part(json!({"type": "image", "url": at("c.png")})),
            json!({"messages": said(json!("<image>?")), "images": [{"bytes": null, "path": at("a.png")}]}),
            json!({"prompt": "?", "completion": "x", "image": at("c.png")}),
            json!({"prompt": "no http here", "completion": "x"}),
        ];
        rows.map(|row| format!("{row}\n"))
    };
    let texts = rows(&format!("{}/files/", hub.endpoint));
    let found = |name: &str| {
        let (data, images) = open(cache.path(), &files, name).unwrap();
        let rows: Vec<_> = (0..data.num_train_rows()).map(|row| data.train_row(row).unwrap().1.carries_loss).collect();
        (rows, images.all().len(), images.hosts().into_iter().collect::<Vec<_>>())
    };
    files.write("web.jsonl", &texts[..3].concat());
    files.write("files.jsonl", &rows("")[..3].concat());
    let (rows, num_images, hosts) = found("web.jsonl");
    assert_eq!((num_images, hosts), (2, vec![(hub.endpoint.replace("http://", ""), 2)]));
    assert_eq!(found("files.jsonl"), (rows.clone(), 2, Vec::new()));
    assert_eq!((found("web.jsonl").0, hub.take_seen().len()), (rows, 2));
    files.write("pairs.jsonl", &texts[3..].concat());
    assert_eq!((found("pairs.jsonl").1, hub.take_seen().len()), (1, 0));

    hub.change(|behaviour| drop(behaviour.files.insert("page".to_owned(), b"<html>".to_vec())));
    for (name, reason) in [("none.png", "cannot be fetched: its host answered 404 Not Found"), ("page", "is no image")]
    {
        let bad = texts[0].replace("a.png", name);
        files.write("bad.jsonl", &[&texts[1], &bad, &bad].map(String::as_str).concat());
        let error = open(cache.path(), &files, "bad.jsonl").unwrap_err();
        assert!(
            error.contains(&format!("bad.jsonl:line 2: the image \"{}/files/{name}\" {reason}", hub.endpoint)),
            "{error}"
        );
    }
}
