//! A server that answers as the Hub does, with whatever the input says.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};

use lora_train::hub::{HubSettings, Progress, Token, Wanted, resolve};

use crate::folder::Folder;
use crate::targets::parts;

/// What the server says.
#[derive(Clone, Debug, Default)]
struct Answers {
    /// The list of files names itself as its next page.
    endless_list: bool,
    /// The commit of the branch.
    sha: Vec<u8>,
    /// The commit that comes with a file.
    commit: Vec<u8>,
    etag: Vec<u8>,
    tree: Vec<u8>,
    body: Vec<u8>,
}

struct Server {
    endpoint: String,
    answers: Arc<Mutex<Answers>>,
}

/// Flags, then the commit of the branch, the commit and the name of a file, the list of files, the content of every file.
pub(crate) fn hub(data: &[u8]) {
    static SERVER: OnceLock<Server> = OnceLock::new();
    // One input at a time: there is one server.
    static BUSY: Mutex<()> = Mutex::new(());
    let Some((flags, data)) = data.split_first() else { return };
    let [sha, commit, etag, tree, body] = parts(data).map(<[u8]>::to_vec);
    let _busy = BUSY.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let server = SERVER.get_or_init(start);
    *server.answers.lock().unwrap() = Answers { endless_list: flags & 1 != 0, sha, commit, etag, tree, body };
    let folder = Folder::new();
    let settings = HubSettings {
        endpoint: server.endpoint.clone(),
        cache: folder.path().join("cache"),
        token: Some(Token::new("hf_secret")),
        offline: false,
    };
    for wanted in [Wanted::Model, Wanted::WithoutWeights] {
        if let Ok(found) = resolve("org/model", None, wanted, &settings, Progress::Quiet) {
            let found = found.canonicalize().unwrap();
            assert!(found.starts_with(&settings.cache), "{}", found.display());
        }
    }
    // What is in the cache now is believed when there is no network.
    let offline = HubSettings { offline: true, ..settings };
    drop(resolve("org/model", None, Wanted::Model, &offline, Progress::Quiet));
    folder.assert_nothing_outside();
}

fn start() -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let server = Server { endpoint: endpoint.clone(), answers: Arc::default() };
    let answers = server.answers.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answers = answers.lock().unwrap().clone();
            drop(serve(&stream, &answers, &endpoint));
        }
    });
    server
}

fn serve(mut stream: &TcpStream, answers: &Answers, endpoint: &str) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut line = String::from("-");
    while !line.trim().is_empty() {
        line.clear();
        reader.read_line(&mut line)?;
    }
    let path = request.split_whitespace().nth(1).unwrap_or_default();
    let header = |name: &str, value: &[u8]| {
        let value: Vec<u8> = value.iter().copied().filter(|byte| !byte.is_ascii_control()).take(200).collect();
        [name.as_bytes(), b": ", &value, b"\r\n"].concat()
    };
    let (headers, body) = if path.contains("/tree/") {
        let next = format!("<{endpoint}{path}>; rel=\"next\"");
        (if answers.endless_list { header("Link", next.as_bytes()) } else { Vec::new() }, answers.tree.clone())
    } else if path.starts_with("/api/") {
        let sha = String::from_utf8_lossy(&answers.sha);
        (Vec::new(), serde_json::json!({"id": "org/model", "sha": sha}).to_string().into_bytes())
    } else {
        ([header("ETag", &answers.etag), header("X-Repo-Commit", &answers.commit)].concat(), answers.body.clone())
    };
    let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    let body = if request.starts_with("HEAD") { &[][..] } else { &body };
    stream.write_all(&[head.as_bytes(), &headers, b"\r\n", body].concat())?;
    stream.flush()
}
