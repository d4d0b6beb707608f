//! Settings of the Hub from environment variables.

use std::fmt;
use std::path::PathBuf;

use hf_hub::{HFClient, HFClientSync, HFError};

/// Addresses of the Hub and its cache, and the access token.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Address of the Hub, without a slash at the end.
    pub endpoint: String,
    /// Folder in which repositories are cached.
    pub cache: PathBuf,
    /// Access token.
    pub token: Option<AccessToken>,
    /// Whether to never use the network.
    pub offline: bool,
}

/// An access token; no message ever shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken(String);

impl AccessToken {
    /// Wraps a token.
    #[must_use]
    pub fn new(token: impl Into<String>) -> Self {
        Self(token.into())
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

impl HubSettings {
    /// Reads the environment of this process.
    #[must_use]
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads variables as Hugging Face's Python library does. An empty variable counts as absent.
    #[must_use]
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let folder = |name: &str| variable(name).map(PathBuf::from);
        let home = folder("HF_HOME").unwrap_or_else(|| {
            let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
            caches.unwrap_or_else(std::env::temp_dir).join("huggingface")
        });
        let is_set = |name: &str| {
            variable(name)
                .is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
        };
        let token = if is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            None
        } else {
            variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
                let file = folder("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
                std::fs::read_to_string(file).ok()
            })
        };
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        Self {
            endpoint: variable("HF_ENDPOINT")
                .unwrap_or_else(|| "https://huggingface.co".to_owned())
                .trim_end_matches('/')
                .to_owned(),
            cache: folder("HF_HUB_CACHE")
                .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| home.join("hub")),
            token: token.map(AccessToken),
            offline: is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"),
        }
    }

    /// A client of the Hub that repeats a request up to `retries` times if no server answers.
    pub(super) fn client(&self, retries: usize) -> Result<HFClientSync, HFError> {
        let client = HFClient::builder().endpoint(&self.endpoint).cache_dir(&self.cache).retry_max_attempts(retries);
        match &self.token {
            Some(token) => client.token(&token.0).build_sync(),
            None => client.build_sync(),
        }
    }

    /// The text with the token removed, in case it contains it.
    pub(super) fn redact(&self, text: &str) -> String {
        match &self.token {
            Some(token) => text.replace(&token.0, "***"),
            None => text.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> HubSettings {
        HubSettings::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_where_the_python_library_has_it() {
        let cache = |variables: &[(&str, &str)]| settings(variables).cache;
        assert_eq!(cache(&[("HOME", "/home/me")]), PathBuf::from("/home/me/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/hf/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), PathBuf::from("/c"));
    }

    #[test]
    fn the_token_comes_from_its_variable_or_file_and_is_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).token, Some(AccessToken::new("hf_file")));
        let both = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_variable")]);
        assert_eq!(both.token, Some(AccessToken::new("hf_variable")));
        assert!(!format!("{both:?}").contains("hf_variable"));
        assert_eq!(both.redact("Bearer hf_variable"), "Bearer ***");
        let off = settings(&[("HF_HOME", home), ("HF_TOKEN", "x"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]);
        assert_eq!(off.token, None);
    }

    #[test]
    fn endpoint_and_offline_follow_their_variables() {
        assert_eq!(settings(&[]).endpoint, "https://huggingface.co");
        assert_eq!(settings(&[("HF_ENDPOINT", "http://mirror/")]).endpoint, "http://mirror");
        assert!(!settings(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(settings(&[("HF_HUB_OFFLINE", "true")]).offline);
    }
}
