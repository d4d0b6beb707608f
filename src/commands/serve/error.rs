//! Refusals and failures, in the form of OpenAI's interface.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Value, json};

use crate::generate::GenerateError;

/// Why a request is not answered.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>, code: Option<&'static str>) -> Self {
        Self { status, message: message.into(), param: None, code }
    }

    /// A mistake in the request, in the parameter that is named.
    pub(super) fn wrong(message: impl Into<String>, param: Option<&str>) -> Self {
        Self { param: param.map(str::to_owned), ..Self::new(StatusCode::BAD_REQUEST, message, None) }
    }

    /// A model that is not served.
    pub(super) fn no_model(message: &str) -> Self {
        let error = Self::new(StatusCode::NOT_FOUND, message, Some("model_not_found"));
        Self { param: Some("model".to_owned()), ..error }
    }

    /// A path that is not served.
    pub(super) fn not_found(message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, message, None)
    }

    /// A path that is asked for as it does not answer.
    pub(super) fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "this path answers to another method: see `Allow`", None)
    }

    /// A body of more bytes than are read.
    pub(super) fn too_long(max_bytes: usize) -> Self {
        let message = format!("the body is longer than {max_bytes} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message, None)
    }

    /// A body that does not arrive.
    pub(super) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "the body has not arrived in time", None)
    }

    /// A prompt that is too long, whatever its tokens are.
    pub(super) fn beyond_context(what: &str, max_tokens: usize) -> Self {
        let message = format!("{what}, and the model was made for {max_tokens} tokens");
        Self::new(StatusCode::BAD_REQUEST, message, Some("context_length_exceeded"))
    }

    /// A request without the token, or for another host.
    pub(super) fn not_admitted() -> Self {
        let message =
            "this server wants `Authorization: Bearer` and its token, or to be called by a name of this machine";
        Self::new(StatusCode::UNAUTHORIZED, message, Some("invalid_api_key"))
    }

    /// Something failed here.
    pub(super) fn failed(message: &str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message, None)
    }

    /// A prompt that the model cannot continue.
    pub(super) fn of_prompt(error: &GenerateError) -> Self {
        if let GenerateError::Image(_) = error {
            return Self::failed(&error.to_string());
        }
        let code = matches!(error, GenerateError::PromptTooLong { .. }).then_some("context_length_exceeded");
        Self { code, ..Self::wrong(without_hint(&error.to_string()), None) }
    }

    /// In the words of `/v1/responses`, whose requests are read as a chat's.
    pub(super) fn of_response(mut self) -> Self {
        for (of_chat, here) in [("response_format", "text.format"), ("max_tokens", "max_output_tokens")] {
            self.message = self.message.replace(&format!("`{of_chat}`"), &format!("`{here}`"));
            self.param = self.param.map(|param| if param == of_chat { here.to_owned() } else { param });
        }
        self
    }

    /// The body of the answer.
    pub(super) fn json(&self) -> Value {
        let is_ours = self.status.is_server_error();
        let kind = if is_ours { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// A refusal without what helps on a command line alone.
pub(super) fn without_hint(text: &str) -> &str {
    text.split("\n  hint:").next().unwrap_or_default()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.json())).into_response()
    }
}
