//! A server that speaks the Hub's protocol, for tests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::content::{lfs_oid, oid};

/// The commit that every revision of the served repository is.
pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server behaves.
#[derive(Clone, Debug, Default)]
pub(super) struct Behaviour {
    /// Files by name; names with a slash are in folders.
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// Files that redirect to another address, as large ones do.
    pub(super) redirected: Vec<String>,
    /// Token without which files are gated.
    pub(super) gated_by: Option<String>,
    /// File whose body breaks off in the middle, so many times.
    pub(super) breaks_off: Option<(String, usize)>,
    /// File whose body is another text, of another length.
    pub(super) wrong_body: Option<String>,
    /// File whose body has another content of the same length.
    pub(super) swapped_body: Option<String>,
    /// What it names as the commit of every revision, if not [`COMMIT`].
    pub(super) sha: Option<&'static str>,
    /// The list of files names itself as its next page.
    pub(super) endless_list: bool,
    /// File that redirects to itself.
    pub(super) endless_redirect: Option<String>,
    /// File whose body has no end.
    pub(super) endless_body: Option<String>,
    /// Answer to every request.
    pub(super) always: Option<(u16, &'static str)>,
}

/// What was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) token: Option<String>,
}

/// A running server; it stops answering when it is dropped.
pub(super) struct Hub {
    pub(super) endpoint: String,
    behaviour: Arc<Mutex<Behaviour>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    closed: Arc<std::sync::atomic::AtomicBool>,
}

impl Hub {
    pub(super) fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let hub = Self {
            endpoint: format!("http://{address}"),
            behaviour: Arc::new(Mutex::new(behaviour)),
            seen: Arc::default(),
            closed: Arc::default(),
        };
        let (behaviour, seen, closed) = (hub.behaviour.clone(), hub.seen.clone(), hub.closed.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if closed.load(std::sync::atomic::Ordering::SeqCst) {
                    return;
                }
                let (behaviour, seen) = (behaviour.clone(), seen.clone());
                // A client that goes away in the middle is its own business.
                std::thread::spawn(move || drop(serve(&stream, &behaviour, &seen)));
            }
        });
        hub
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }

    /// Takes the requests since the last call.
    pub(super) fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.closed.store(true, std::sync::atomic::Ordering::SeqCst);
        drop(TcpStream::connect(self.endpoint.trim_start_matches("http://")));
    }
}

/// Answers one request and closes the connection.
fn serve(stream: &TcpStream, behaviour: &Mutex<Behaviour>, seen: &Mutex<Vec<Seen>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default().to_owned());
    let (mut token, mut host) = (None, String::new());
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header)? == 0 || header.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':') {
            if name.eq_ignore_ascii_case("authorization") {
                token = value.trim().strip_prefix("Bearer ").map(str::to_owned);
            } else if name.eq_ignore_ascii_case("host") {
                host = value.trim().to_owned();
            }
        }
    }
    if method.is_empty() {
        return Ok(());
    }
    seen.lock().unwrap().push(Seen { method: method.clone(), path: path.clone(), token: token.clone() });
    let reply = answer(&path, token.as_deref(), &host, &mut behaviour.lock().unwrap());
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !reply.headers.iter().any(|(name, _)| name == "Content-Length") {
        head += &format!("Content-Length: {}\r\n", reply.body.len());
    }
    let mut stream = stream;
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if method != "HEAD" {
        stream.write_all(&reply.body)?;
        if reply.is_endless {
            // Until nobody listens any more.
            loop {
                stream.write_all(&reply.body)?;
            }
        }
    }
    stream.flush()
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The body comes again and again.
    is_endless: bool,
}

impl Reply {
    fn new(status: u16, headers: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self { status, headers, body: body.into(), is_endless: false }
    }

    fn json(value: &serde_json::Value) -> Self {
        Self::new(200, &[("Content-Type", "application/json")], value.to_string())
    }
}

fn answer(path: &str, token: Option<&str>, host: &str, behaviour: &mut Behaviour) -> Reply {
    if let Some((status, code)) = behaviour.always {
        return Reply::new(status, &[("X-Error-Code", code)], r#"{"error": "as told"}"#);
    }
    let path = path.split('?').next().unwrap_or_default();
    if path == "/api/whoami-v2" {
        return match (&behaviour.gated_by, token) {
            (Some(good), Some(token)) if good == token => {
                Reply::json(&serde_json::json!({"type": "user", "name": "somebody"}))
            }
            _ => Reply::new(401, &[], r#"{"error": "Invalid username or password."}"#),
        };
    }
    if let Some(name) = path.strip_prefix("/cdn/") {
        let content = behaviour.files[name].clone();
        return Reply::new(200, &[("ETag", "\"of-the-cdn\"")], content);
    }
    if let Some(rest) = path.strip_prefix("/api/models/org/model/") {
        return match rest.split_once('/') {
            Some(("revision", "main" | COMMIT | "v1")) => {
                let sha = behaviour.sha.unwrap_or(COMMIT);
                Reply::json(&serde_json::json!({"id": "org/model", "sha": sha}))
            }
            Some(("revision", _)) => {
                Reply::new(404, &[("X-Error-Code", "RevisionNotFound")], r#"{"error": "Invalid rev id"}"#)
            }
            Some(("tree", COMMIT)) => {
                let entries: Vec<serde_json::Value> = behaviour
                    .files
                    .iter()
                    .map(|(name, content)| {
                        let mut entry = serde_json::json!({"type": "file", "size": content.len(), "path": name});
                        if name.ends_with(".safetensors") {
                            entry["oid"] = lfs_oid(content).into();
                            entry["lfs"] = serde_json::json!({"size": content.len(), "pointerSize": 125 + content.len().to_string().len()});
                        } else {
                            entry["oid"] = oid(content).into();
                        }
                        entry
                    })
                    .collect();
                let mut reply = Reply::json(&serde_json::json!(entries));
                if behaviour.endless_list {
                    let next = format!("<http://{host}{path}>; rel=\"next\"");
                    reply.headers.push(("Link".into(), next));
                }
                reply
            }
            _ => Reply::new(404, &[], ""),
        };
    }
    let Some(name) = path.strip_prefix(&format!("/org/model/resolve/{COMMIT}/")) else {
        // The Hub's answer for what does not exist, to those who did not log in.
        let body = r#"{"error": "Invalid username or password."}"#;
        return Reply::new(401, &[("X-Error-Code", "RepoNotFound")], body);
    };
    if behaviour.gated_by.as_deref().is_some_and(|gate| token != Some(gate)) {
        let status = if token.is_some() { 403 } else { 401 };
        return Reply::new(status, &[("X-Error-Code", "GatedRepo")], r#"{"error": "Access is restricted"}"#);
    }
    let Some(content) = behaviour.files.get(name) else {
        return Reply::new(404, &[("X-Error-Code", "EntryNotFound")], "");
    };
    let length = content.len().to_string();
    let tag = format!("\"{}\"", etag(name, content));
    let headers = [("ETag", tag.as_str()), ("X-Repo-Commit", COMMIT), ("Content-Length", length.as_str())];
    if behaviour.redirected.iter().any(|redirected| redirected == name) {
        // Another host, as the Hub's large files are.
        let location = format!("http://{}/cdn/{name}", host.replace("127.0.0.1", "localhost"));
        let headers = [
            ("X-Linked-ETag", tag.as_str()),
            ("X-Linked-Size", length.as_str()),
            ("X-Repo-Commit", COMMIT),
            ("Location", location.as_str()),
        ];
        return Reply::new(302, &headers, "");
    }
    if behaviour.endless_redirect.as_deref() == Some(name) {
        return Reply::new(302, &[("Location", &format!("http://{host}{path}"))], "");
    }
    if behaviour.endless_body.as_deref() == Some(name) {
        let headers = [headers[0], headers[1], ("Content-Length", "1099511627776")];
        return Reply { is_endless: true, ..Reply::new(200, &headers, content.clone()) };
    }
    if behaviour.swapped_body.as_deref() == Some(name) {
        return Reply::new(200, &headers, vec![b'x'; content.len()]);
    }
    if let Some((broken, times)) = &mut behaviour.breaks_off
        && broken == name
        && *times > 0
    {
        *times -= 1;
        return Reply::new(200, &headers, &content[..content.len() / 2]);
    }
    if behaviour.wrong_body.as_deref() == Some(name) {
        return Reply::new(200, &headers[..2], "<html>sign in to this network</html>");
    }
    Reply::new(200, &headers, content.clone())
}

/// Differs wherever the content does.
fn etag(name: &str, content: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    let hash = Sha256::new().chain_update(name).chain_update(content).finalize();
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
