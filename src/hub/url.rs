//! Files of web addresses, kept on disk with the server's tag of their content.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::HumanBytes;
use reqwest::StatusCode;
use reqwest::blocking::{Client, Response};
use reqwest::header::{ETAG, IF_NONE_MATCH};
use sha2::{Digest as _, Sha256};

use super::error::{root_cause, unreachable};
use super::{HubError, Progress};
use crate::schema::Problem;
use crate::util::files::hex;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The file at `url`, downloaded below `folder` unless it is there with the content that the server has. A server that
/// cannot be reached does no harm to a file that is there already. Nothing of the Hub's token is sent.
///
/// # Errors
/// An address that no file has; a server that refuses, or breaks off; a folder that cannot be written.
pub fn download_url(url: &str, folder: &Path, offline: bool, progress: Progress) -> Result<PathBuf, HubError> {
    let address = Address::new(url, folder);
    if offline {
        let message = format!("HF_HUB_OFFLINE is set, and {} was not downloaded before", address.shown);
        let problem = Problem::new(message).hint("run once with the network on");
        return if address.file.is_file() { Ok(address.file) } else { Err(problem.into()) };
    }
    match address.download(progress) {
        Err(HubError::Network { endpoint, reason, .. }) if address.file.is_file() => {
            progress.note(&format!("cannot reach {endpoint} ({reason}); using the copy of an earlier run"));
            Ok(address.file)
        }
        Err(error) => Err(error),
        Ok(()) => Ok(address.file),
    }
}

struct Address<'a> {
    url: &'a str,
    /// The address without what may be secret.
    shown: &'a str,
    file: PathBuf,
    /// Holds the tag of `file`.
    tag: PathBuf,
}

impl<'a> Address<'a> {
    fn new(url: &'a str, folder: &Path) -> Self {
        let shown = url.split(['?', '#']).next().unwrap_or(url);
        let digest = hex(&Sha256::digest(url)[..16]);
        let folder = folder.join(digest);
        let file = folder.join(shown.rsplit('/').next().unwrap_or_default());
        Self { url, shown, file, tag: folder.join("etag") }
    }

    fn download(&self, progress: Progress) -> Result<(), HubError> {
        // The time of a whole request is not limited.
        let client = Client::builder().connect_timeout(CONNECT_TIMEOUT).timeout(None).build();
        let mut request = client.map_err(|error| self.unreachable(&error))?.get(self.url);
        if let (Ok(tag), true) = (std::fs::read_to_string(&self.tag), self.file.is_file()) {
            request = request.header(IF_NONE_MATCH, tag);
        }
        let answer = request.send().map_err(|error| self.unreachable(&error.without_url()))?;
        match answer.status() {
            StatusCode::NOT_MODIFIED => Ok(()),
            StatusCode::OK => self.store(answer, progress),
            status => {
                let problem = Problem::new(format!("{} answered {status}", self.shown));
                Err(if status.is_client_error() { problem.into() } else { HubError::Failed(problem) })
            }
        }
    }

    /// Writes the body under another name first, so that half a file is never taken for a whole one.
    fn store(&self, mut answer: Response, progress: Progress) -> Result<(), HubError> {
        let expected = answer.content_length();
        let size = expected.map(|bytes| format!(", {}", HumanBytes(bytes))).unwrap_or_default();
        progress.note(&format!("downloading {}{size}", self.shown));
        let tag = answer.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        let folder = self.file.parent().unwrap_or(Path::new("."));
        let failed = |error: io::Error| HubError::cache(folder, &error);
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut unfinished = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        let written = self.copy(&mut answer, unfinished.as_file_mut())?;
        if expected.is_some_and(|expected| expected != written) {
            return Err(self.broken(&io::ErrorKind::UnexpectedEof.into()));
        }
        drop(std::fs::remove_file(&self.tag));
        unfinished.persist(&self.file).map_err(|error| failed(error.error))?;
        tag.map_or(Ok(()), |tag| std::fs::write(&self.tag, tag)).map_err(failed)
    }

    /// Copies the body to a file; returns its length.
    fn copy(&self, answer: &mut Response, file: &mut File) -> Result<u64, HubError> {
        let (mut buffer, mut written) = (vec![0; 1 << 17], 0);
        loop {
            let length = answer.read(&mut buffer).map_err(|error| self.broken(&error))?;
            if length == 0 {
                return Ok(written);
            }
            let folder = self.file.parent().unwrap_or(&self.file);
            file.write_all(&buffer[..length]).map_err(|error| HubError::cache(folder, &error))?;
            written += length as u64;
        }
    }

    fn broken(&self, error: &io::Error) -> HubError {
        self.network(format!("the download broke off: {}", root_cause(error)))
    }

    fn unreachable(&self, error: &reqwest::Error) -> HubError {
        self.network(unreachable(self.url, error))
    }

    fn network(&self, reason: String) -> HubError {
        let cached = "it was not downloaded before".to_owned();
        HubError::Network { endpoint: self.shown.to_owned(), reason, cached }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::fixture::{Behaviour, Hub};

    fn hub(content: &str) -> Hub {
        let files = [("r.jsonl".to_owned(), content.as_bytes().to_vec())].into();
        Hub::start(Behaviour { files, ..Behaviour::default() })
    }

    #[test]
    fn a_file_is_downloaded_again_only_when_it_has_changed() {
        let (hub, folder) = (hub("old"), tempfile::tempdir().unwrap());
        let url = format!("{}/files/r.jsonl?key=secret", hub.endpoint);
        let get = |offline| download_url(&url, folder.path(), offline, Progress::Quiet);
        let content = || std::fs::read_to_string(get(false).unwrap()).unwrap();
        let error = get(true).unwrap_err().to_string();
        assert!(error.contains("/files/r.jsonl was not downloaded before") && !error.contains("secret"), "{error}");
        assert_eq!((content(), content()), ("old".into(), "old".into()));
        assert!(get(true).unwrap().ends_with("r.jsonl"));
        hub.change(|behaviour| drop(behaviour.files.insert("r.jsonl".into(), b"newer".to_vec())));
        assert_eq!(content(), "newer");
        assert!(hub.take_seen().iter().all(|seen| seen.token.is_none()));
        hub.change(|behaviour| behaviour.files.clear());
        let error = get(false).unwrap_err().to_string();
        assert!(error.ends_with("/files/r.jsonl answered 404 Not Found"), "{error}");
    }

    #[test]
    fn half_a_file_is_not_kept_and_a_copy_does_where_nobody_answers() {
        let (hub, folder) = (hub("a whole file"), tempfile::tempdir().unwrap());
        let url = format!("{}/files/r.jsonl", hub.endpoint);
        let get = |url: &str| download_url(url, folder.path(), false, Progress::Quiet);
        hub.change(|behaviour| behaviour.breaks_off = Some(("r.jsonl".into(), 1)));
        let error = get(&url).unwrap_err();
        assert!(matches!(error, HubError::Network { .. }), "{error}");
        assert!(error.to_string().contains("the download broke off"), "{error}");
        hub.change(|behaviour| behaviour.breaks_off = None);
        assert_eq!(std::fs::read_to_string(get(&url).unwrap()).unwrap(), "a whole file");
        // No server listens on this port.
        let error = get("http://127.0.0.1:9/x.csv").unwrap_err().to_string();
        assert!(error.contains("cannot reach http://127.0.0.1:9/x.csv"), "{error}");
    }
}
