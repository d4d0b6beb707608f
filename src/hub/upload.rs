//! Uploads files to a model's repository, as one commit.

use std::io;
use std::path::PathBuf;

use hf_hub::repository::{CommitOperation, RepoTypeModel};
use hf_hub::{HFError, split_id};

use super::error::{code_and_message, unreachable};
use super::location::is_repository_id;
use super::progress::UploadMeter;
use super::repository::REQUEST_RETRIES;
use super::{HubError, HubSettings, Progress};
use crate::schema::Problem;

/// A file for a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Its name in the repository.
    pub name: String,
    /// What is in it.
    pub content: Content,
}

/// Content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// That of a file on this machine.
    File(PathBuf),
    /// Text.
    Text(String),
}

impl Upload {
    /// Its size.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn num_bytes(&self) -> io::Result<u64> {
        match &self.content {
            Content::File(path) => Ok(std::fs::metadata(path)?.len()),
            Content::Text(text) => Ok(text.len() as u64),
        }
    }

    fn operation(&self) -> CommitOperation {
        match &self.content {
            Content::File(path) => CommitOperation::add_file(&self.name, path),
            Content::Text(text) => CommitOperation::add_bytes(&self.name, text.clone().into_bytes()),
        }
    }
}

/// Checks the name of a repository to write to.
///
/// # Errors
/// A name that no repository can have, or one without its owner.
pub fn check_target(id: &str) -> Result<(), HubError> {
    if is_repository_id(id) && id.contains('/') {
        return Ok(());
    }
    let problem = Problem::new(format!("`{id}` is no name of a repository, expected OWNER/NAME"));
    Err(problem.hint("the owner is your account on the Hub, or an organisation").into())
}

/// Commits `files` to the repository `id`, which is made where there is none, private unless `is_public`. Returns its
/// address. Large files go to the Hub's storage, where what it has already is not sent again.
///
/// # Errors
/// No access token, or one that may not write; a repository that is public without `is_public`; a Hub that cannot be
/// reached or refuses. Nothing is committed then.
pub fn upload(
    id: &str,
    is_public: bool,
    files: &[Upload],
    message: &str,
    settings: &HubSettings,
    progress: Progress,
) -> Result<String, HubError> {
    check_target(id)?;
    let explain = |error| refused(&error, id, settings);
    if settings.offline {
        return Err(Problem::new("HF_HUB_OFFLINE is set").hint("unset it, or look at what --dry-run shows").into());
    }
    if settings.token.is_none() {
        return Err(Problem::new("there is no access token").hint(how_to_get_a_token(settings)).into());
    }
    let client = settings.client(REQUEST_RETRIES).map_err(explain)?;
    let (owner, name) = split_id(id);
    let repository = client.model(owner, name);
    match repository.info().send() {
        Ok(info) if info.private == Some(false) && !is_public => {
            let problem = Problem::new(format!("{id} is there, and everybody can read it"));
            return Err(problem.hint("--public writes to it; another name makes a private repository").into());
        }
        Ok(info) if info.private == Some(true) && is_public => {
            progress.note(&format!("{id} is there and private: it stays private; its page on the Hub makes it public"));
        }
        Ok(_) => progress.note(&format!("{id} is there: this is a new commit, and who can read it stays as it is")),
        Err(HFError::RepoNotFound { .. }) => {
            client
                .create_repository()
                .repo_id(id)
                .repo_type(RepoTypeModel)
                .private(!is_public)
                .send()
                .map_err(explain)?;
        }
        Err(error) => return Err(explain(error)),
    }
    let num_bytes = files.iter().map(|file| file.num_bytes().unwrap_or_default()).sum();
    let bar = progress.start(&format!("uploading {id}"), files.len(), num_bytes);
    let commit = repository.create_commit().operations(files.iter().map(Upload::operation).collect());
    let sent = commit.commit_message(message).progress(UploadMeter(bar.clone())).send();
    bar.finish_and_clear();
    sent.map_err(explain)?;
    Ok(format!("{}/{id}", settings.endpoint))
}

fn how_to_get_a_token(settings: &HubSettings) -> String {
    format!("make one with write access at {}/settings/tokens, and set HF_TOKEN to it", settings.endpoint)
}

/// The user's view of an error of the client, without the token.
fn refused(error: &HFError, id: &str, settings: &HubSettings) -> HubError {
    let (_, message) = code_and_message(error);
    let detail = if message.is_empty() { String::new() } else { settings.redact(&format!(": {}", message.trim_end())) };
    let endpoint = &settings.endpoint;
    let input = |message: String| Problem::new(message).hint(how_to_get_a_token(settings)).into();
    match error {
        HFError::AuthRequired { .. } => input(format!("{endpoint} does not accept the access token")),
        HFError::Forbidden { .. } => input(format!("the access token may not write to {id}{detail}")),
        HFError::Conflict { .. } => {
            let problem = Problem::new(format!("{endpoint} refuses to make or change {id}{detail}"));
            problem.hint("somebody else changes it, or it is there and hidden from this account").into()
        }
        HFError::Request { source, .. } => {
            let reason = settings.redact(&unreachable(&settings.endpoint, source));
            let problem = Problem::new(format!("cannot reach {endpoint}: {reason}"));
            HubError::Failed(problem.hint("run the command again: nothing is committed until everything is there"))
        }
        error => {
            let problem = Problem::new(format!("cannot write to {id}: {}", settings.redact(&error.to_string())));
            HubError::Failed(problem.hint("run the command again later"))
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::{Value, json};

    use super::super::AccessToken;
    use super::super::fixture::{Behaviour, Hub};
    use super::*;

    fn settings(hub: &Hub) -> HubSettings {
        let token = Some(AccessToken::new("hf_secret"));
        HubSettings { endpoint: hub.endpoint.clone(), cache: std::env::temp_dir(), token, offline: false }
    }

    fn push(hub: &Hub, is_public: bool, settings: &HubSettings) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let weights = folder.path().join("w");
        std::fs::write(&weights, weights_bytes()).unwrap();
        let files = [
            Upload { name: "adapter_model.safetensors".into(), content: Content::File(weights) },
            Upload { name: "README.md".into(), content: Content::Text("# a card".into()) },
        ];
        let pushed = upload("me/new", is_public, &files, "a message", settings, Progress::Quiet);
        let pushed = pushed.map_err(|error| format!("{error} {error:?}"));
        assert!(!format!("{pushed:?}").contains("hf_secret"), "{pushed:?}");
        assert!(hub.endpoint.starts_with("http://127."));
        pushed
    }

    fn weights_bytes() -> Vec<u8> {
        (0..100_000_u32).map(|index| (index * index / 7) as u8).collect()
    }

    /// The lines of the last commit.
    fn commit(hub: &Hub) -> Vec<Value> {
        let seen = hub.take_seen();
        assert!(seen.iter().all(|seen| seen.token.as_deref() == Some("hf_secret")), "{seen:?}");
        let last = seen.last().unwrap();
        assert_eq!(last.path, "/api/models/me/new/commit/main");
        last.body.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }

    #[test]
    fn every_byte_arrives_in_one_commit_of_a_repository_that_is_private() {
        for (is_public, drops) in [(false, 0), (true, 2)] {
            let hub = Hub::start(Behaviour { drops, ..Behaviour::default() });
            let address = push(&hub, is_public, &settings(&hub)).unwrap();
            assert_eq!(address, format!("{}/me/new", hub.endpoint));
            hub.change(|behaviour| assert_eq!(behaviour.writable["me/new"], !is_public));
            let lines = commit(&hub);
            assert_eq!((lines.len(), &lines[0]["value"]["summary"]), (3, &json!("a message")));
            for (line, name, content) in [
                (&lines[1], "adapter_model.safetensors", weights_bytes()),
                (&lines[2], "README.md", b"# a card".to_vec()),
            ] {
                assert_eq!((&line["key"], &line["value"]["path"]), (&json!("file"), &json!(name)));
                assert_eq!(STANDARD.decode(line["value"]["content"].as_str().unwrap()).unwrap(), content);
            }
        }
    }

    #[test]
    fn a_repository_that_is_there_gets_a_commit_unless_it_is_public_and_that_was_not_asked_for() {
        let with = |private| {
            let writable = [("me/new".to_owned(), private)].into();
            Hub::start(Behaviour { writable, ..Behaviour::default() })
        };
        for (private, is_public) in [(true, false), (true, true), (false, true)] {
            let hub = with(private);
            push(&hub, is_public, &settings(&hub)).unwrap();
            hub.change(|behaviour| assert_eq!(behaviour.writable["me/new"], private));
            assert_eq!(commit(&hub).len(), 3);
        }
        let hub = with(false);
        let error = push(&hub, false, &settings(&hub)).unwrap_err();
        assert!(error.contains("everybody can read it") && error.contains("hint: --public"), "{error}");
        assert!(hub.take_seen().iter().all(|seen| seen.method == "GET"));
    }

    #[test]
    fn refusals_say_what_is_missing_and_name_no_token() {
        for (refuses, message) in [
            (401, "does not accept the access token\n  hint: make one with write access"),
            (403, "the access token may not write to me/new: as told\n  hint: make one with write access"),
            (409, "refuses to make or change me/new: as told"),
            (400, "cannot write to me/new: "),
        ] {
            let hub = Hub::start(Behaviour { refuses: Some(refuses), ..Behaviour::default() });
            let error = push(&hub, false, &settings(&hub)).unwrap_err();
            assert!(error.contains(message), "{refuses}: {error}");
        }
        let hub = Hub::start(Behaviour { drops: usize::MAX, ..Behaviour::default() });
        let error = push(&hub, false, &settings(&hub)).unwrap_err();
        assert!(error.contains("cannot reach http://127.0.0.1:") && error.contains("run the command again"), "{error}");

        let hub = Hub::start(Behaviour::default());
        let without = HubSettings { token: None, ..settings(&hub) };
        assert!(push(&hub, false, &without).unwrap_err().contains("there is no access token"));
        let offline = HubSettings { offline: true, ..settings(&hub) };
        assert!(push(&hub, false, &offline).unwrap_err().contains("HF_HUB_OFFLINE"));
        for name in ["new", "me/", "me/a b", "me/a/b", "-/x"] {
            assert!(check_target(name).unwrap_err().to_string().contains("expected OWNER/NAME"), "{name}");
        }
        assert_eq!(hub.take_seen(), []);
    }
}
