//! Small files at web addresses that rows name, kept on disk.
//!
//! Rows come from strangers, so only hosts of the internet are asked: neither this machine, nor its network, nor what a cloud tells its
//! machines about themselves. Names are resolved here, and a connection goes to an address that was looked at, also behind a redirect;
//! a proxy, which would resolve names by itself, is not asked.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use reqwest::blocking::{Client, Response};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::LOCATION;
use reqwest::{StatusCode, Url, redirect};
use sha2::{Digest as _, Sha256};

use super::HubSettings;
use super::error::root_cause;
use crate::util::files::{MAX_CACHE_BYTES, UNFINISHED_SUFFIX, hex, tidy};

const SUFFIX: &str = ".image";
/// Bytes before a kept file: SHA-256 of it.
const DIGEST_BYTES: usize = 32;
const MOST_BYTES: u64 = 32 << 20;
/// For a file with all redirects to it.
const MOST_TIME: Duration = Duration::from_mins(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const MOST_REDIRECTS: usize = 5;
/// Before a file is asked for again.
const PAUSE: Duration = Duration::from_secs(1);
/// A host that failed so often, and nothing else, is not asked any more.
const MOST_FAILURES: usize = 3;

/// Fetches files, each once.
#[derive(Debug)]
pub struct PublicFiles {
    /// Where they are kept, if anywhere.
    folder: Option<PathBuf>,
    /// Why none is fetched that is not there yet.
    refusal: Option<&'static str>,
    most_bytes: u64,
    most_time: Duration,
    /// Whether this machine is asked too, and without https: in tests alone.
    asks_this_machine: bool,
    client: OnceLock<Client>,
    found: Mutex<Failures>,
}

#[derive(Debug, Default)]
struct Failures {
    /// Why, by address.
    of_files: HashMap<String, String>,
    /// How many, by host.
    of_hosts: HashMap<String, usize>,
}

/// Why there is no file.
struct Fault {
    reason: String,
    /// Whether another try may go better.
    passes: bool,
    /// Whether its host could not be reached.
    is_of_host: bool,
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Self { reason, passes: false, is_of_host: false }
    }
}

impl PublicFiles {
    /// Files that are kept in `folder`; not fetched where the Hub is not asked either.
    #[must_use]
    pub fn new(folder: Option<PathBuf>) -> Self {
        let offline = "HF_HUB_OFFLINE is set, and it was not fetched before\n  hint: run once with the network on";
        Self {
            folder,
            refusal: HubSettings::from_env().offline.then_some(offline),
            most_bytes: MOST_BYTES,
            most_time: MOST_TIME,
            asks_this_machine: false,
            client: OnceLock::new(),
            found: Mutex::default(),
        }
    }

    /// Those alone that are kept already.
    #[must_use]
    pub fn kept_alone(self) -> Self {
        Self { refusal: Some("was not fetched yet: `lora-train check` does it"), ..self }
    }

    #[cfg(test)]
    pub(crate) fn of_this_machine(folder: &Path) -> Self {
        Self { asks_this_machine: true, refusal: None, ..Self::new(Some(folder.to_owned())) }
    }

    /// Whether files are kept.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.folder.is_some()
    }

    /// Whether files are fetched that are not there yet.
    #[must_use]
    pub fn fetches(&self) -> bool {
        self.refusal.is_none()
    }

    /// The file at an address; one that is not as wanted is not kept.
    ///
    /// # Errors
    /// An address that is not https, or not of a host of the internet; a host that refuses or cannot be reached; a file that is too
    /// large or comes too slowly.
    pub fn get(&self, address: &str, is_wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<u8>, String> {
        let url = self.checked(Url::parse(address).map_err(|error| format!("is no web address: {error}"))?)?;
        let kept = self.folder.as_ref().map(|folder| folder.join(hex(&Sha256::digest(address)) + SUFFIX));
        if let Some(bytes) = kept.as_deref().and_then(read_kept) {
            return Ok(bytes);
        }
        if let Some(refusal) = self.refusal {
            return Err(refusal.to_owned());
        }
        let host = url.host_str().unwrap_or_default().to_owned();
        self.known_failure(address, &host).map_or(Ok(()), Err)?;
        let fetched = self.fetch(&url).or_else(|fault| {
            if !fault.passes {
                return Err(fault);
            }
            std::thread::sleep(PAUSE);
            self.fetch(&url)
        });
        let failures = &mut *self.found.lock().unwrap_or_else(PoisonError::into_inner);
        match fetched {
            Ok(bytes) => {
                failures.of_hosts.insert(host, 0);
                let kept = kept.filter(|_| is_wanted(&bytes)).map_or(Ok(()), |path| keep(&path, &bytes));
                kept.map(|()| bytes).map_err(|error| format!("cannot be kept in the cache: {error}"))
            }
            Err(Fault { reason, is_of_host, .. }) => {
                *failures.of_hosts.entry(host).or_default() += usize::from(is_of_host);
                failures.of_files.insert(address.to_owned(), reason.clone());
                Err(reason)
            }
        }
    }

    fn known_failure(&self, address: &str, host: &str) -> Option<String> {
        let failures = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let of_host = failures.of_hosts.get(host).filter(|count| **count >= MOST_FAILURES);
        let of_host = of_host.map(|_| format!("cannot be fetched: {host} could not be reached {MOST_FAILURES} times"));
        failures.of_files.get(address).cloned().or(of_host)
    }

    /// An address that may be asked.
    fn checked(&self, url: Url) -> Result<Url, String> {
        let is_http = url.scheme() == "http";
        if url.scheme() != "https" && !(is_http && self.asks_this_machine) {
            return Err(if is_http {
                "is at an address without https: it could be changed on its way\n  hint: write https:// if its host has that, or \
                 download it and name the file"
            } else {
                "is at an address of another kind than https\n  hint: download it, and name the file"
            }
            .to_owned());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("has a user's name in its address\n  hint: download it, and name the file".to_owned());
        }
        // Numbers are not resolved.
        let host = url.host_str().unwrap_or_default();
        match host.trim_matches(['[', ']']).parse() {
            Ok(number) if !may_ask(number, self.asks_this_machine) => {
                Err(format!("cannot be fetched: {}", not_public(host, number)))
            }
            _ => Ok(url),
        }
    }

    fn client(&self) -> Result<&Client, String> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        // Before the first that is new.
        if let Some(folder) = &self.folder {
            tidy(folder, SUFFIX, MAX_CACHE_BYTES, Path::new(""));
        }
        let resolver = PublicHosts { asks_this_machine: self.asks_this_machine };
        let client = Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .dns_resolver(Arc::new(resolver))
            .user_agent(concat!("lora-train/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT);
        let client = client.build().map_err(|error| root_cause(&error))?;
        Ok(self.client.get_or_init(|| client))
    }

    fn fetch(&self, url: &Url) -> Result<Vec<u8>, Fault> {
        let (client, start) = (self.client()?, Instant::now());
        let mut url = url.clone();
        for _ in 0..=MOST_REDIRECTS {
            let left = self.most_time.saturating_sub(start.elapsed());
            let answer = client.get(url.clone()).timeout(left).send().map_err(|error| {
                let is_of_host = error.is_connect();
                let reason = format!("cannot be fetched: {}", root_cause(&error.without_url()));
                Fault { reason, passes: !is_of_host, is_of_host }
            })?;
            let status = answer.status();
            if status.is_redirection() {
                let to =
                    answer.headers().get(LOCATION).and_then(|to| to.to_str().ok()).and_then(|to| url.join(to).ok());
                let to = to.ok_or_else(|| format!("cannot be fetched: {status} without an address"))?;
                url = self.checked(to).map_err(|reason| format!("is redirected, and {reason}"))?;
                continue;
            }
            if status != StatusCode::OK {
                let passes = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
                return Err(Fault { passes, ..format!("cannot be fetched: its host answered {status}").into() });
            }
            return self.body(answer, start);
        }
        Err(format!("is redirected more than {MOST_REDIRECTS} times").into())
    }

    fn body(&self, mut answer: Response, start: Instant) -> Result<Vec<u8>, Fault> {
        let too_large =
            || Fault::from(format!("has more than {} bytes, too many for an image from the web", self.most_bytes));
        if answer.content_length().is_some_and(|bytes| bytes > self.most_bytes) {
            return Err(too_large());
        }
        let (mut bytes, mut block) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let read = answer.read(&mut block);
            if start.elapsed() >= self.most_time {
                return Err(format!("cannot be fetched: it takes more than {} s", self.most_time.as_secs()).into());
            }
            let length = read.map_err(|error| {
                let reason = format!("cannot be fetched: it broke off: {}", root_cause(&error));
                Fault { reason, passes: true, is_of_host: false }
            })?;
            if length == 0 {
                return Ok(bytes);
            }
            bytes.extend(&block[..length]);
            if bytes.len() as u64 > self.most_bytes {
                return Err(too_large());
            }
        }
    }
}

/// A kept file, if it is whole, which is used now.
fn read_kept(path: &Path) -> Option<Vec<u8>> {
    let mut file = File::open(path).ok()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).ok()?;
    let (digest, content) = bytes.split_at_checked(DIGEST_BYTES)?;
    if Sha256::digest(content)[..] != *digest {
        return None;
    }
    drop(file.set_modified(SystemTime::now()));
    Some(bytes.split_off(DIGEST_BYTES))
}

fn keep(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().suffix(UNFINISHED_SUFFIX).tempfile_in(folder)?;
    file.write_all(&Sha256::digest(bytes))?;
    file.write_all(bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Finds hosts of the internet alone.
struct PublicHosts {
    asks_this_machine: bool,
}

impl Resolve for PublicHosts {
    fn resolve(&self, name: Name) -> Resolving {
        let (name, asks_this_machine) = (name.as_str().to_owned(), self.asks_this_machine);
        let found = tokio::task::spawn_blocking(move || {
            let found: Vec<SocketAddr> = (name.as_str(), 0).to_socket_addrs()?.collect();
            let refused = |found: &&SocketAddr| !may_ask(found.ip(), asks_this_machine);
            match found.iter().find(refused) {
                Some(refused) => Err(io::Error::other(not_public(&name, refused.ip()))),
                None => Ok(Box::new(found.into_iter()) as Addrs),
            }
        });
        Box::pin(async { Ok(found.await??) })
    }
}

fn not_public(host: &str, number: IpAddr) -> String {
    format!("its host {host} is {number}, which is not of the internet\n  hint: download it, and name the file")
}

fn may_ask(number: IpAddr, asks_this_machine: bool) -> bool {
    is_public(number) || (asks_this_machine && number.is_loopback())
}

/// Whether an address is one of the internet: of none of IANA's special-purpose registries (RFC 6890), nor of a cloud for its machines.
fn is_public(number: IpAddr) -> bool {
    match number {
        IpAddr::V4(number) => is_public_v4(number),
        IpAddr::V6(number) => is_public_v6(number),
    }
}

fn is_public_v4(number: Ipv4Addr) -> bool {
    // This network, and what is reserved; shared with a provider; assignments of protocols; relays to IPv6; measurements; Azure's
    // for its machines.
    let is_special = matches!(
        number.octets(),
        [0 | 240..=255, ..]
            | [100, 64..=127, ..]
            | [192, 0, 0, _]
            | [192, 88, 99, _]
            | [198, 18..=19, ..]
            | [168, 63, 129, 16]
    );
    let is_local = number.is_private() || number.is_loopback() || number.is_link_local();
    !(is_special || is_local || number.is_documentation() || number.is_multicast())
}

fn is_public_v6(number: Ipv6Addr) -> bool {
    // What stands for an address of IPv4, as it is or behind a translator, is that.
    let [.., a, b] = number.segments();
    let [[a, b], [c, d]] = [a, b].map(u16::to_be_bytes);
    match number.segments() {
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => is_public_v4(Ipv4Addr::new(a, b, c, d)),
        // Of protocols, Teredo among them; of documentation; made of IPv4.
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x2002, ..] | [0x3fff, 0..=0xfff, ..] => false,
        [0x2000..=0x3fff, ..] => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
