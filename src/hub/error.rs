//! Errors of turning a name into its files.

use hf_hub::HFError;

use crate::schema::Problem;
use crate::util::failure::Failure;

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

/// Why `address` cannot be reached, with the proxy that was asked in its place.
pub(super) fn unreachable(address: &str, error: &dyn std::error::Error) -> String {
    let reason = root_cause(error);
    match proxy(address, |name| std::env::var(name).ok()) {
        Some((variable, proxy)) => format!("{reason}, by way of the proxy {proxy} that {variable} names"),
        None => reason,
    }
}

/// The variable that names the proxy for `address`, and the proxy without its password; as reqwest reads them.
fn proxy(address: &str, variable: impl Fn(&str) -> Option<String>) -> Option<(String, String)> {
    let url = reqwest::Url::parse(address).ok()?;
    let host = url.host_str()?;
    let first = |name: &str| {
        let names = [name.to_owned(), name.to_lowercase()];
        names.into_iter().find_map(|name| Some((variable(&name).filter(|value| !value.is_empty())?, name)))
    };
    let is_excepted = |entry: &str| {
        let entry = entry.trim().trim_start_matches('.');
        entry == "*" || (!entry.is_empty() && (host == entry || host.ends_with(&format!(".{entry}"))))
    };
    if first("NO_PROXY").is_some_and(|(hosts, _)| hosts.split(',').any(is_excepted)) {
        return None;
    }
    let (proxy, name) =
        first(if url.scheme() == "https" { "HTTPS_PROXY" } else { "HTTP_PROXY" }).or_else(|| first("ALL_PROXY"))?;
    let shown = match proxy.rsplit_once('@') {
        Some((before, host)) => format!("{}***@{host}", before.find("://").map_or("", |at| &before[..at + 3])),
        None => proxy,
    };
    Some((name, shown))
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Input(problem) => problem.into(),
            _ => Self::running(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxy_that_was_asked_is_named_without_its_password() {
        let asked = |address: &str, variables: &[(&str, &str)]| {
            let value = |name: &str| Some(variables.iter().find(|(known, _)| *known == name)?.1.to_owned());
            proxy(address, value).map(|(name, proxy)| format!("{name} {proxy}"))
        };
        let hub = "https://huggingface.co";
        for (address, variables, expected) in [
            (hub, &[("HTTPS_PROXY", "http://127.0.0.1:9")][..], Some("HTTPS_PROXY http://127.0.0.1:9")),
            (hub, &[("https_proxy", "http://me:secret@proxy:8080")], Some("https_proxy http://***@proxy:8080")),
            (hub, &[("all_proxy", "socks5://p:1")], Some("all_proxy socks5://p:1")),
            ("http://mirror.lan/hf", &[("HTTP_PROXY", "p:3128")], Some("HTTP_PROXY p:3128")),
            (hub, &[("HTTP_PROXY", "http://p"), ("HTTPS_PROXY", "")], None),
            (hub, &[("HTTPS_PROXY", "http://p"), ("NO_PROXY", "a.b, .huggingface.co")], None),
            ("https://xhuggingface.co", &[("HTTPS_PROXY", "p"), ("no_proxy", "huggingface.co")], Some("HTTPS_PROXY p")),
            (hub, &[], None),
        ] {
            assert_eq!(asked(address, variables).as_deref(), expected, "{address} {variables:?}");
        }
    }
}
