use std::net::{TcpListener, TcpStream};

use super::*;
use crate::hub::fixture::{Behaviour, Hub};

fn hub() -> Hub {
    let files = [("a.png", &b"image"[..]), ("page", b"<html>")].map(|(name, file)| (name.to_owned(), file.to_vec()));
    let moved = |to: &str| format!("/files/{to}");
    let moved = [
        ("once", moved("a.png")),
        ("round", moved("round")),
        ("inside", "http://10.0.0.1/a.png".to_owned()),
        ("metadata", "http://169.254.169.254/latest".to_owned()),
        ("kind", "ftp://example.com/a.png".to_owned()),
    ];
    let moved = moved.map(|(name, to)| (name.to_owned(), to)).into();
    Hub::start(Behaviour { files: files.into(), moved, ..Behaviour::default() })
}

fn is_image(bytes: &[u8]) -> bool {
    bytes == b"image"
}

#[test]
fn a_file_is_fetched_once_and_kept_whole_or_not_at_all() {
    let (hub, folder) = (hub(), tempfile::tempdir().unwrap());
    let files = || PublicFiles::of_this_machine(folder.path());
    let url = |name: &str| format!("{}/files/{name}", hub.endpoint);
    for _ in 0..2 {
        assert_eq!(files().get(&url("a.png"), is_image).unwrap(), b"image");
        assert_eq!(files().get(&url("once"), is_image).unwrap(), b"image");
    }
    let seen: Vec<_> = hub.take_seen().into_iter().map(|seen| (seen.path, seen.token)).collect();
    assert_eq!(seen, ["a.png", "once", "a.png"].map(|name| (format!("/files/{name}"), None)));
    assert_eq!(files().kept_alone().get(&url("a.png"), is_image).unwrap(), b"image");
    let error = files().kept_alone().get(&url("page"), is_image).unwrap_err();
    assert!(error.contains("`lora-train check` does it"), "{error}");

    // What is no image is another time one, perhaps, and so is what was damaged here.
    assert_eq!(files().get(&url("page"), is_image).unwrap(), b"<html>");
    hub.change(|behaviour| drop(behaviour.files.insert("page".to_owned(), b"image".to_vec())));
    assert_eq!(files().get(&url("page"), is_image).unwrap(), b"image");
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(path, &whole[..whole.len() - 1]).unwrap();
    }
    hub.take_seen();
    assert_eq!(files().get(&url("a.png"), is_image).unwrap(), b"image");
    assert_eq!(hub.take_seen().len(), 1);
}

#[test]
fn what_fails_is_not_asked_for_again() {
    let (hub, folder) = (hub(), tempfile::tempdir().unwrap());
    let files = PublicFiles::of_this_machine(folder.path());
    let get = |name: &str| files.get(&format!("{}/files/{name}", hub.endpoint), is_image).unwrap_err();
    for _ in 0..2 {
        assert_eq!(get("none.png"), "cannot be fetched: its host answered 404 Not Found");
    }
    assert_eq!(get("round"), "is redirected more than 5 times");
    assert_eq!(hub.take_seen().len(), 1 + 6);
    // No server listens on this port.
    let down = |name: usize| files.get(&format!("http://localhost:9/{name}"), is_image).unwrap_err();
    assert!((0..3).all(|name| down(name).starts_with("cannot be fetched: ")));
    assert_eq!(down(4), "cannot be fetched: localhost could not be reached 3 times");
}

#[test]
fn nothing_but_the_internet_is_asked() {
    let (hub, folder) = (hub(), tempfile::tempdir().unwrap());
    let get = |files: PublicFiles, address: &str| files.get(address, is_image).unwrap_err();
    let port = hub.endpoint.rsplit_once(':').unwrap().1;
    for (address, reason) in [
        (hub.endpoint.clone(), "without https"),
        ("ftp://example.com/a.png".to_owned(), "another kind than https"),
        ("https://me:secret@example.com/a.png".to_owned(), "a user's name in its address"),
        (
            format!("https://127.0.0.1:{port}/files/a.png"),
            "its host 127.0.0.1 is 127.0.0.1, which is not of the internet",
        ),
        (format!("https://localhost:{port}/files/a.png"), "cannot be fetched: its host localhost is "),
        // Other ways to write numbers.
        ("https://2130706433/".to_owned(), "127.0.0.1"),
        ("https://0x7f.1/".to_owned(), "127.0.0.1"),
        ("https://[::ffff:10.1.2.3]/".to_owned(), "not of the internet"),
    ] {
        let files = PublicFiles { refusal: None, ..PublicFiles::new(Some(folder.path().to_owned())) };
        let error = get(files, &address);
        assert!(error.contains(reason) && !error.contains("secret"), "{address}: {error}");
    }
    assert_eq!(hub.take_seen(), []);
    for (name, reason) in [("inside", "10.0.0.1"), ("metadata", "169.254.169.254"), ("kind", "another kind than https")]
    {
        let error = get(PublicFiles::of_this_machine(folder.path()), &format!("{}/files/{name}", hub.endpoint));
        assert!(error.starts_with("is redirected, and") && error.contains(reason), "{error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn numbers_of_special_purposes_are_not_public() {
    let is_public = |text: &&str| is_public(text.parse().unwrap());
    let special = [
        "0.0.0.0", "10.255.0.1", "100.100.100.200", "127.8.9.1", "169.254.169.254", "172.31.0.1", "192.0.0.192",
        "192.0.2.1", "192.168.1.1", "198.19.0.1", "203.0.113.9", "168.63.129.16", "224.0.0.1", "255.255.255.255", "::",
        "::1", "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2001::1",
        "2001:db8::1", "2002:a00:1::1", "fec0::1", "::7f00:1",
    ];
    assert_eq!(special.iter().filter(|number| is_public(number)).collect::<Vec<_>>(), Vec::<&&str>::new());
    let public = [
        "1.1.1.1", "100.128.0.1", "172.32.0.1", "192.0.1.1", "2606:4700::1111", "2001:4860:4860::8888",
        "64:ff9b::101:101",
    ];
    assert!(public.iter().all(is_public));
}

/// Answers every request, once it is there, with bytes that never end, so many at a time, with a pause behind each.
fn endless(bytes: usize, pause: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let answer = |mut stream: TcpStream| -> io::Result<()> {
            assert!(stream.read(&mut [0; 1 << 10])? > 0, "no request");
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
            loop {
                stream.write_all(&vec![0; bytes])?;
                std::thread::sleep(pause);
            }
        };
        listener.incoming().flatten().for_each(|stream| drop(answer(stream)));
    });
    address
}

#[test]
fn what_does_not_end_is_broken_off() {
    let folder = tempfile::tempdir().unwrap();
    let files = PublicFiles {
        most_bytes: 100_000,
        most_time: Duration::from_secs(1),
        ..PublicFiles::of_this_machine(folder.path())
    };
    let error = files.get(&endless(1 << 12, Duration::ZERO), is_image).unwrap_err();
    assert!(error.contains("has more than 100000 bytes"), "{error}");
    let error = files.get(&endless(1, Duration::from_millis(20)), is_image).unwrap_err();
    assert!(error.contains("takes more than 1 s"), "{error}");
    let big = Hub::start(Behaviour { files: [("big".to_owned(), vec![0; 100_001])].into(), ..Behaviour::default() });
    let error = files.get(&format!("{}/files/big", big.endpoint), is_image).unwrap_err();
    assert!(error.contains("has more than 100000 bytes"), "{error}");
}
