//! Errors of turning a name into its files.

use hf_hub::HFError;

use super::repository::{Kind, Repository};
use crate::failure::Failure;
use crate::schema::{Problem, searched_folder};

/// Why a model or a data set is not on this machine.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name, the revision or the repository cannot be used, or the model is not in the cache while offline.
    #[error(transparent)]
    Input(#[from] Problem),
    /// The Hub or the disk refused, or a file came in another length than the Hub lists.
    #[error("{0}")]
    Failed(Problem),
    /// The Hub cannot be reached, and the cache does not have the complete model.
    #[error("cannot reach {endpoint}: {reason}\n  hint: {cached}; a local folder works without a network")]
    Network {
        /// Address of the Hub.
        endpoint: String,
        /// The innermost cause.
        reason: String,
        /// What the cache has of it.
        cached: String,
    },
}

impl HubError {
    /// The user's view of an error of the client. It contains neither addresses with a query nor the token.
    pub(super) fn explain(error: HFError, Repository { kind, id, revision, settings }: Repository<'_>) -> Self {
        let (code, message) = code_and_message(&error);
        let (endpoint, has_token) = (&settings.endpoint, settings.token.is_some());
        let detail =
            if message.is_empty() { String::new() } else { settings.redact(&format!(": {}", message.trim_end())) };
        let prefix = if kind == Kind::Model { "" } else { "datasets/" };
        let no_repository = || {
            let folder = searched_folder(id.as_ref());
            let what = if kind == Kind::Model { "folder" } else { "file or folder" };
            let message =
                format!("{id} was not found at {endpoint}, and there is no such {what} in {}", folder.display());
            let whose = if has_token { "to an account without access" } else { "without HF_TOKEN" };
            Problem::new(message)
                .hint(format!("check the name; a private repository looks like this too {whose}"))
                .into()
        };
        let server = |status: u16, hint: &str| {
            Self::Failed(Problem::new(format!("{endpoint} answered {status}{detail}")).hint(hint))
        };
        match (code.as_str(), error) {
            ("GatedRepo", _) | (_, HFError::Forbidden { .. }) => {
                let page = format!("accept its licence at {endpoint}/{prefix}{id}, then");
                let (message, hint) = if has_token {
                    let message = format!("{id} is gated, and the token that was sent gives no access to it");
                    (message, format!("{page} check that HF_TOKEN belongs to that account"))
                } else {
                    (format!("{id} is gated"), format!("{page} set HF_TOKEN to a token of that account"))
                };
                Problem::new(message).hint(hint).into()
            }
            (_, HFError::AuthRequired { .. }) if message.contains("Invalid credentials") => {
                let hint = format!(
                    "set HF_TOKEN to a valid one (made at {endpoint}/settings/tokens), or unset it for what is public"
                );
                Problem::new(format!("{endpoint} does not accept the access token")).hint(hint).into()
            }
            // Without a token the Hub answers 401 for anything that does not exist, to keep private names secret.
            ("RepoNotFound", _) | (_, HFError::AuthRequired { .. } | HFError::RepoNotFound { .. }) => no_repository(),
            // A repository without `main` counts as absent: servers that send no code do not tell the two cases apart.
            ("", HFError::RevisionNotFound { .. }) if revision == "main" => no_repository(),
            ("RevisionNotFound", _) | (_, HFError::RevisionNotFound { .. }) => {
                let problem = Problem::new(format!("{id} has no revision `{revision}`"));
                let key = if kind == Kind::Model { "`model.revision`" } else { "what follows the `@`" };
                problem.hint(format!("{key} is a branch, a tag or a commit")).into()
            }
            (_, HFError::Request { source, .. }) => Self::Network {
                endpoint: endpoint.clone(),
                reason: settings.redact(&root_cause(&source)),
                cached: String::new(),
            },
            (_, HFError::RateLimited { context, .. }) => {
                server(context.status.as_u16(), "too many requests; wait a few minutes, or set HF_TOKEN")
            }
            (_, HFError::Http { context }) => {
                server(context.status.as_u16(), "try again later; what was downloaded is kept")
            }
            (_, HFError::Io(error)) => Self::cache(&settings.cache, &error),
            (_, error) => {
                Self::Failed(Problem::new(format!("cannot download {id}: {}", settings.redact(&error.to_string()))))
            }
        }
    }

    /// The cache cannot be written or read.
    pub(super) fn cache(cache: &std::path::Path, error: &std::io::Error) -> Self {
        let problem = Problem::new(format!("cannot use the cache {}: {error}", cache.display()));
        Self::Failed(problem.hint("HF_HOME moves the cache"))
    }
}

/// The Hub's `X-Error-Code`, and its message.
pub(super) fn code_and_message(error: &HFError) -> (String, String) {
    let context = match error {
        HFError::Http { context }
        | HFError::AuthRequired { context }
        | HFError::Forbidden { context }
        | HFError::Conflict { context }
        | HFError::RateLimited { context, .. } => Some(context),
        HFError::RepoNotFound { context, .. }
        | HFError::RevisionNotFound { context, .. }
        | HFError::EntryNotFound { context, .. } => context.as_ref(),
        _ => None,
    };
    context.map_or_else(Default::default, |context| {
        (context.error_code.clone().unwrap_or_default(), context.server_message.clone().unwrap_or_default())
    })
}

/// The innermost cause, which names the reason without the address.
pub(super) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Input(problem) => problem.into(),
            _ => Self::running(error),
        }
    }
}
