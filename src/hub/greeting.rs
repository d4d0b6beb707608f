//! Checks whether the Hub answers and whether it accepts the access token.

use std::time::{Duration, Instant};

use hf_hub::HFError;

use super::HubSettings;
use super::error::unreachable;

/// Result of asking the Hub for the name of the account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Greeting {
    /// `HF_HUB_OFFLINE` is set: no request was sent.
    Offline,
    /// The Hub answers; no token was sent.
    Anonymous {
        /// How long the answer took.
        time: Duration,
    },
    /// The Hub answers and accepts the token.
    Known {
        /// How long the answer took.
        time: Duration,
        /// Name of the account.
        account: String,
    },
    /// The Hub answers and rejects the token.
    Refused,
    /// The Hub answers with another error.
    Trouble {
        /// The Hub's message, without the token.
        reason: String,
    },
    /// The Hub does not answer.
    Unreachable {
        /// The innermost cause.
        reason: String,
    },
}

/// Asks the Hub once for the name of the account.
#[must_use]
pub fn greet(settings: &HubSettings) -> Greeting {
    if settings.offline {
        return Greeting::Offline;
    }
    let client = match settings.client(1) {
        Ok(client) => client,
        Err(error) => return Greeting::Trouble { reason: settings.redact(&error.to_string()) },
    };
    let started = Instant::now();
    let answer = client.whoami().send();
    let time = started.elapsed();
    match answer {
        Ok(user) => Greeting::Known { time, account: settings.redact(&user.username) },
        Err(HFError::AuthRequired { .. } | HFError::Forbidden { .. }) if settings.token.is_none() => {
            Greeting::Anonymous { time }
        }
        Err(HFError::AuthRequired { .. } | HFError::Forbidden { .. }) => Greeting::Refused,
        Err(HFError::Request { source, .. }) => {
            Greeting::Unreachable { reason: settings.redact(&unreachable(&settings.endpoint, &source)) }
        }
        Err(error) => Greeting::Trouble { reason: settings.redact(&error.to_string()) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::AccessToken;
    use crate::hub::fixture::{Behaviour, Hub};

    fn settings(endpoint: &str, token: Option<&str>) -> HubSettings {
        HubSettings {
            endpoint: endpoint.to_owned(),
            cache: std::env::temp_dir(),
            token: token.map(AccessToken::new),
            offline: false,
        }
    }

    #[test]
    fn accounts_wrong_tokens_and_no_token_are_told_apart() {
        let hub = Hub::start(Behaviour { gated_by: Some("good".into()), ..Behaviour::default() });
        let greet = |token| greet(&settings(&hub.endpoint, token));
        assert!(matches!(greet(Some("good")), Greeting::Known { account, .. } if account == "somebody"));
        assert_eq!(greet(Some("bad")), Greeting::Refused);
        assert!(matches!(greet(None), Greeting::Anonymous { .. }));
    }

    #[test]
    fn silence_and_trouble_are_told_apart_and_offline_asks_nobody() {
        let hub = Hub::start(Behaviour { always: Some(500), ..Behaviour::default() });
        assert!(matches!(greet(&settings(&hub.endpoint, None)), Greeting::Trouble { .. }));
        // No server listens on this port.
        assert!(matches!(greet(&settings("http://127.0.0.1:9", None)), Greeting::Unreachable { .. }));
        hub.take_seen();
        let offline = HubSettings { offline: true, ..settings(&hub.endpoint, None) };
        assert_eq!(greet(&offline), Greeting::Offline);
        assert!(hub.take_seen().is_empty());
    }
}
