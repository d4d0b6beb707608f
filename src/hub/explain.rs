//! Turns the errors of the Hub's client into errors that the user understands.

use hf_hub::HFError;

use super::{HubError, HubSettings};

/// The user's view of an error. It contains neither addresses with a query nor the token.
pub(super) fn explain(error: HFError, id: &str, revision: &str, settings: &HubSettings) -> HubError {
    let (code, message) = code_and_message(&error);
    let (id, endpoint, has_token) = (id.to_owned(), settings.endpoint.clone(), settings.token.is_some());
    let detail = if message.is_empty() { String::new() } else { settings.redact(&format!(": {}", message.trim_end())) };
    match (code.as_str(), error) {
        ("GatedRepo", _) | (_, HFError::Forbidden { .. }) => HubError::Gated { id, endpoint, has_token },
        (_, HFError::AuthRequired { .. }) if message.contains("Invalid credentials") => HubError::BadToken { endpoint },
        // Without a token the Hub answers 401 for anything that does not exist, to keep private names secret.
        ("RepoNotFound", _) | (_, HFError::AuthRequired { .. } | HFError::RepoNotFound { .. }) => {
            HubError::NoRepository { id, endpoint, has_token }
        }
        // A repository without `main` counts as absent: servers that send no code do not tell the two cases apart.
        ("", HFError::RevisionNotFound { .. }) if revision == "main" => {
            HubError::NoRepository { id, endpoint, has_token }
        }
        ("RevisionNotFound", _) | (_, HFError::RevisionNotFound { .. }) => {
            HubError::NoRevision { id, revision: revision.to_owned() }
        }
        (_, HFError::Request { source, .. }) => {
            HubError::Network { endpoint, reason: settings.redact(&root_cause(&source)), cached: String::new() }
        }
        (_, HFError::RateLimited { context, .. }) => {
            let hint = "too many requests; wait a few minutes, or set HF_TOKEN";
            HubError::Server { endpoint, status: context.status.as_u16(), detail, hint }
        }
        (_, HFError::Http { context }) => {
            let hint = "try again later; what was downloaded is kept";
            HubError::Server { endpoint, status: context.status.as_u16(), detail, hint }
        }
        (_, HFError::Io(source)) => HubError::Cache { cache: settings.cache.clone(), source },
        (_, error) => HubError::Other { id, reason: settings.redact(&error.to_string()) },
    }
}

/// The Hub's `X-Error-Code`, and its message.
fn code_and_message(error: &HFError) -> (String, String) {
    let context = match error {
        HFError::Http { context }
        | HFError::AuthRequired { context }
        | HFError::Forbidden { context }
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
