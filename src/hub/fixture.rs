//! A server that speaks the Hub's protocol, for tests.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// The commit that all revisions of the served repository point to.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The commit of the conversion to Parquet.
pub(crate) const CONVERTED: &str = "89abcdef0123456789abcdef0123456789abcdef";

#[derive(Clone, Debug, Default)]
pub(crate) struct Behaviour {
    /// File contents by name; a slash in a name means a folder. Weights are served from another address, as the Hub
    /// does for large files.
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Where files of a server that is no Hub have gone, by name.
    pub(crate) moved: BTreeMap<String, String>,
    /// The card of the data set.
    pub(crate) card: Value,
    /// The files of the Hub's conversion, if there is one.
    pub(crate) converted: BTreeMap<String, Vec<u8>>,
    /// If set, files can only be read with this token.
    pub(crate) gated_by: Option<String>,
    /// Weights whose body breaks off in the middle, and how often.
    pub(crate) breaks_off: Option<(String, usize)>,
    /// Weights that get a wrong body, of another length.
    pub(crate) wrong_body: Option<String>,
    /// If set, the status of every answer.
    pub(crate) always: Option<u16>,
    /// The repositories to write to, and whether they are private.
    pub(crate) writable: BTreeMap<String, bool>,
    /// If set, the status of answers to what would write.
    pub(crate) refuses: Option<u16>,
    /// Commits that get no answer, the connection being closed.
    pub(crate) drops: usize,
}

/// A request that the server received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) token: Option<String>,
    pub(crate) body: Vec<u8>,
}

pub(crate) struct Hub {
    pub(crate) endpoint: String,
    behaviour: Arc<Mutex<Behaviour>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Hub {
    pub(crate) fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let behaviour = Arc::new(Mutex::new(behaviour));
        let hub = Self { endpoint: format!("http://127.0.0.1:{port}"), behaviour, seen: Arc::default() };
        let (behaviour, seen) = (hub.behaviour.clone(), hub.seen.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (behaviour, seen) = (behaviour.clone(), seen.clone());
                // An error of a client that disconnects early is ignored.
                std::thread::spawn(move || drop(serve(&stream, port, &behaviour, &seen)));
            }
        });
        hub
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }

    /// Returns the requests since the last call.
    pub(crate) fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

/// Answers one request and closes the connection.
fn serve(
    mut stream: &TcpStream,
    port: u16,
    behaviour: &Mutex<Behaviour>,
    seen: &Mutex<Vec<Seen>>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let lines: Vec<String> =
        reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let mut words = lines.first().into_iter().flat_map(|line| line.split(' '));
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let token = lines.iter().find_map(|line| line.strip_prefix("authorization: Bearer "));
    let (method, path, token) = (method.to_owned(), path.to_owned(), token.map(str::to_owned));
    let tag = lines.iter().find_map(|line| line.strip_prefix("if-none-match: "));
    let reply = match path.strip_prefix("/files/") {
        Some(name) => Some(plain_file(name, tag, &behaviour.lock().unwrap())),
        None if method == "POST" => written(&path, &body, &mut behaviour.lock().unwrap()),
        None => Some(answer(&path, token.as_deref(), port, &mut behaviour.lock().unwrap())),
    };
    let has_body = method != "HEAD";
    seen.lock().unwrap().push(Seen { method, path, token, body });
    let Some((mut status, mut headers, mut body)) = reply else { return Ok(()) };
    let range = lines.iter().find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-'));
    if let (Some((first, last)), 200) = (range, status) {
        status = 206;
        body = body[first.parse().unwrap()..=last.parse().unwrap()].to_vec();
    }
    if !headers.contains("Content-Length") {
        headers += &format!("Content-Length: {}\r\n", body.len());
    }
    write!(stream, "HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}\r\n")?;
    if has_body { stream.write_all(&body) } else { Ok(()) }
}

/// Status, headers and body.
type Reply = (u16, String, Vec<u8>);

fn json_reply(value: &Value) -> Reply {
    (200, "Content-Type: application/json\r\n".into(), value.to_string().into())
}

fn error_reply(status: u16, code: &str, message: &str) -> Reply {
    (status, format!("X-Error-Code: {code}\r\n"), json!({ "error": message }).to_string().into())
}

/// The answer to what would write; `None` where the connection is closed without one.
fn written(path: &str, body: &[u8], behaviour: &mut Behaviour) -> Option<Reply> {
    if let Some(status) = behaviour.always.or(behaviour.refuses) {
        return Some(error_reply(status, "", "as told"));
    }
    let asked: Value = serde_json::from_slice(body).unwrap_or_default();
    if path == "/api/repos/create" {
        let id = format!("{}/{}", asked["organization"].as_str()?, asked["name"].as_str()?);
        behaviour.writable.insert(id.clone(), asked["private"] == true);
        return Some(json_reply(&json!({"url": id})));
    }
    if path.contains("/preupload/") {
        let modes =
            asked["files"].as_array()?.iter().map(|file| json!({"path": file["path"], "uploadMode": "regular"}));
        return Some(json_reply(&json!({"files": modes.collect::<Vec<_>>()})));
    }
    if behaviour.drops > 0 {
        behaviour.drops -= 1;
        return None;
    }
    Some(json_reply(&json!({"commitOid": COMMIT})))
}

fn answer(path: &str, token: Option<&str>, port: u16, behaviour: &mut Behaviour) -> Reply {
    if let Some(status) = behaviour.always {
        return error_reply(status, "", "as told");
    }
    if let Some((id, private)) = behaviour.writable.iter().find(|(id, _)| path == format!("/api/models/{id}")) {
        return json_reply(&json!({"id": id, "private": private}));
    }
    if path.starts_with("/api/models/me/") {
        return error_reply(404, "RepoNotFound", "Repository not found");
    }
    if path == "/api/whoami-v2" {
        return match token {
            Some(_) if token == behaviour.gated_by.as_deref() => {
                json_reply(&json!({"type": "user", "name": "somebody"}))
            }
            _ => error_reply(401, "", "Invalid username or password."),
        };
    }
    if let Some(name) = path.strip_prefix("/cdn/") {
        return weights(name, behaviour);
    }
    let api = ["/api/models/org/model/", "/api/datasets/org/set/"];
    if let Some(rest) = api.iter().find_map(|prefix| path.strip_prefix(prefix)) {
        let entry = |(name, content): (&String, &Vec<u8>)| json!({"type": "file", "oid": "", "size": content.len(), "path": name});
        return match rest.split('?').next().and_then(|rest| rest.split_once('/')) {
            Some(("revision", "main" | COMMIT | "v1")) => {
                json_reply(&json!({"id": "org/model", "sha": COMMIT, "cardData": behaviour.card}))
            }
            Some(("revision", "refs%2Fconvert%2Fparquet")) if !behaviour.converted.is_empty() => {
                json_reply(&json!({"id": "org/set", "sha": CONVERTED}))
            }
            Some(("tree", COMMIT)) => json_reply(&behaviour.files.iter().map(entry).collect()),
            Some(("tree", CONVERTED)) => json_reply(&behaviour.converted.iter().map(entry).collect()),
            _ => error_reply(404, "RevisionNotFound", "Invalid rev id"),
        };
    }
    let resolved =
        ["/org/model", "/datasets/org/set"].iter().find_map(|id| path.strip_prefix(id)?.strip_prefix("/resolve/"));
    let Some((commit, name)) = resolved.and_then(|rest| rest.split_once('/')) else {
        // The Hub's answer to users who are not logged in, for a repository that does not exist.
        return error_reply(401, "RepoNotFound", "Invalid username or password.");
    };
    if behaviour.gated_by.as_deref().is_some_and(|gate| token != Some(gate)) {
        return error_reply(if token.is_some() { 403 } else { 401 }, "GatedRepo", "Access is restricted");
    }
    let content = if commit == COMMIT { &behaviour.files[name] } else { &behaviour.converted[name] };
    let headers = format!("X-Repo-Commit: {commit}\r\nETag: \"hash-of-{name}\"\r\n");
    if ![".safetensors", ".gguf"].iter().any(|end| name.ends_with(end)) {
        return (200, headers, content.clone());
    }
    let size = content.len();
    let linked = format!("X-Linked-ETag: \"hash-of-{name}\"\r\nX-Linked-Size: {size}\r\n");
    (302, format!("{headers}{linked}Location: http://localhost:{port}/cdn/{name}\r\n"), Vec::new())
}

fn weights(name: &str, behaviour: &mut Behaviour) -> Reply {
    let content = behaviour.files[name].clone();
    if behaviour.wrong_body.as_deref() == Some(name) {
        return (200, String::new(), "<html>sign in to this network</html>".into());
    }
    match &mut behaviour.breaks_off {
        Some((broken, times)) if broken == name && *times > 0 => {
            *times -= 1;
            (200, format!("Content-Length: {}\r\n", content.len()), content[..content.len() / 2].to_vec())
        }
        _ => (200, String::new(), content),
    }
}

/// A file of a server that is no Hub.
fn plain_file(name: &str, known_tag: Option<&str>, behaviour: &Behaviour) -> Reply {
    let name = name.split('?').next().unwrap_or(name);
    if let Some(to) = behaviour.moved.get(name) {
        return (302, format!("Location: {to}\r\n"), Vec::new());
    }
    let Some(content) = behaviour.files.get(name) else { return (404, String::new(), Vec::new()) };
    let tag = format!("\"{}\"", content.iter().map(|byte| u64::from(*byte)).sum::<u64>());
    if known_tag == Some(tag.as_str()) {
        return (304, String::new(), Vec::new());
    }
    let headers = format!("ETag: {tag}\r\n");
    if behaviour.breaks_off.as_ref().is_some_and(|(broken, _)| broken == name) {
        return (200, format!("{headers}Content-Length: {}\r\n", content.len()), content[..content.len() / 2].to_vec());
    }
    (200, headers, content.clone())
}
