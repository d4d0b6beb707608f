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

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Input(problem) => problem.into(),
            _ => Self::running(error),
        }
    }
}
