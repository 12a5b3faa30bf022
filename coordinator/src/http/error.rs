//! Every error a client can see, in OpenAI's shape or in Anthropic's.
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::http::header::{ALLOW, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use actix_web::{HttpResponse, ResponseError};
use serde_json::{Value, json};
use shared::ids::RequestId;
use shared::metrics::labels::RejectReason;

use super::fields::beginning;
use crate::engine::{self, EngineError};

/// Longest name or path of a client that an error repeats, in characters. A longer one is cut.
const NAME_SHOWN_MAX: usize = 256;

/// Returns the seconds after which to retry when nothing else tells: not the same for all clients.
fn soon() -> u32 {
    static REFUSED: AtomicU64 = AtomicU64::new(0);
    engine::retry_after_seconds(RequestId(REFUSED.fetch_add(1, Ordering::Relaxed)))
}

/// An error reply.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The request field at fault.
    param: Option<String>,
    code: Option<&'static str>,
    retry_after_s: Option<u32>,
    allow: Option<&'static str>,
    /// The reason that a rejected request is counted under, unless it has been counted already.
    reason: Option<RejectReason>,
    /// Whether the reply tells how to authenticate.
    challenge: bool,
    /// The id of the request, where the error is told as Anthropic's API tells errors.
    anthropic: Option<Arc<str>>,
}

/// Told where a client of Anthropic's API wants the server to keep its conversation: by this code
/// it sends the whole conversation instead.
const NO_THREADS: &str = "thread_unsupported_request";

/// What Anthropic's API says where it has more to do than it can: a status of its own.
const OVERLOADED: u16 = 529;

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            status,
            message,
            param: None,
            code: None,
            retry_after_s: None,
            allow: None,
            reason: status.is_client_error().then_some(RejectReason::Invalid),
            challenge: false,
            anthropic: None,
        }
    }

    /// A field has a bad value: 400.
    #[must_use]
    pub fn field(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Names this field, of which the one with the bad value is a part.
    #[must_use]
    pub fn of(mut self, field: &str) -> Self {
        self.param = Some(field.to_owned());
        self
    }

    /// The body as a whole is bad: 400.
    #[must_use]
    pub fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Prompt and output do not fit the model: 400.
    #[must_use]
    pub fn context_length(param: &str, message: String) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::field(param, message) }
            .counted_as(RejectReason::TooLarge)
    }

    /// The engine's refusal of a request for which the KV cache has too few blocks: 400. It names
    /// the field that bounds the output, if that is at fault, or the prompt's.
    #[must_use]
    pub fn cache_length(prompt: &str, output: Option<&str>, needed: u32, available: u32) -> Self {
        let (asked, advice) = match output {
            Some(output) => (format!("`{prompt}` and `{output}` need"), "ask for fewer tokens"),
            None => (format!("`{prompt}` needs"), "shorten it"),
        };
        let message = format!(
            "{asked} {needed} blocks of the KV cache, which has {available}: {advice}, or serve \
             with more --kv-cache-memory"
        );
        // The engine counts it.
        Self { reason: None, ..Self::context_length(output.unwrap_or(prompt), message) }
    }

    /// A conversation that the server is to keep: 400.
    #[must_use]
    pub fn no_threads() -> Self {
        let message = "`thread` is not supported: conversations are not stored; send the earlier \
                       messages in `messages`";
        Self { code: Some(NO_THREADS), ..Self::field("thread", message) }
    }

    /// No such model: 404.
    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        let message = format!("The model `{}` does not exist", beginning(name, NAME_SHOWN_MAX));
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, message)
        }
    }

    /// No such path: 404.
    #[must_use]
    pub fn unknown_path(method: &str, path: &str) -> Self {
        let path = beginning(path, NAME_SHOWN_MAX);
        Self::new(StatusCode::NOT_FOUND, format!("Unknown request URL: {method} {path}"))
    }

    /// No API key, or an unknown one: 401.
    #[must_use]
    pub fn unknown_key() -> Self {
        let message = "A valid API key is required: `Authorization: Bearer KEY`, or \
                       `x-api-key: KEY`";
        Self {
            code: Some("invalid_api_key"),
            challenge: true,
            ..Self::new(StatusCode::UNAUTHORIZED, message)
        }
    }

    /// Only for holders of the cluster secret: 401.
    #[must_use]
    pub fn no_token() -> Self {
        let message = "A token made from the cluster's secret is required: use \
                       --cluster-secret-file FILE with the coordinator's file";
        Self { challenge: true, ..Self::new(StatusCode::UNAUTHORIZED, message) }
    }

    /// Not for this client: 403.
    #[must_use]
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// Not at this process: 404.
    #[must_use]
    pub fn not_here(message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// The body has an unsupported compression: 415.
    #[must_use]
    pub fn content_encoding(found: &str) -> Self {
        let message =
            format!("Content-Encoding is `{found}`, but compressed bodies are not supported");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
    }

    /// Wrong method: 405.
    #[must_use]
    pub fn method(method: &str, allow: &'static str) -> Self {
        let message = format!("{method} is not allowed here; use {allow}");
        Self { allow: Some(allow), ..Self::new(StatusCode::METHOD_NOT_ALLOWED, message) }
    }

    /// The body's header does not say JSON, or is missing: 415.
    #[must_use]
    pub fn content_type(found: Option<&str>) -> Self {
        let message = match found {
            None => "Content-Type is missing; it must be `application/json`".to_owned(),
            Some("") => "Content-Type is empty; it must be `application/json`".to_owned(),
            Some(found) => format!("Content-Type is `{found}`, but must be `application/json`"),
        };
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
    }

    /// The body is too large: 413.
    #[must_use]
    pub fn too_large(max: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("The body exceeds the limit of {max} bytes (--max-body-bytes)"),
        )
        .counted_as(RejectReason::TooLarge)
    }

    /// The body did not arrive in time: 408.
    #[must_use]
    pub fn too_slow(seconds: u64) -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            format!("The body did not arrive within {seconds} s"),
        )
    }

    /// The owner of an API key has reached a limit: 429, to be retried after `wait`.
    #[must_use]
    pub fn key_limit(message: impl Into<String>, wait: Duration) -> Self {
        let seconds = wait.as_secs_f64().ceil().max(1.0) as u32;
        Self {
            retry_after_s: Some(seconds),
            code: Some("rate_limit_exceeded"),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// The time that the client gave its request has expired: 504.
    #[must_use]
    pub fn expired() -> Self {
        let message = "The time that X-Request-Timeout allows for this request is over";
        Self { code: Some("request_timeout"), ..Self::new(StatusCode::GATEWAY_TIMEOUT, message) }
    }

    /// Says more.
    #[must_use]
    pub fn noting(self, more: &str) -> Self {
        Self { message: self.message + more, ..self }
    }

    /// The server's own fault: 500.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The server is at its bound: 503.
    #[must_use]
    pub fn overloaded(message: impl Into<String>) -> Self {
        Self { retry_after_s: Some(soon()), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
            .counted_as(RejectReason::Overloaded)
    }

    /// Its code, if it has one.
    #[must_use]
    pub fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// Returns the reason that a rejected request is counted under; `None` if it is counted already
    /// (the engine counts its own refusals) or is the server's own fault.
    #[must_use]
    pub fn reason(&self) -> Option<RejectReason> {
        self.reason
    }

    /// Counts it under another reason.
    #[must_use]
    pub fn counted_as(self, reason: RejectReason) -> Self {
        Self { reason: Some(reason), ..self }
    }

    /// Names the request in an error of the server, for whoever searches its log.
    #[must_use]
    pub fn of_request(self, id: &str) -> Self {
        if !self.status.is_server_error() {
            return self;
        }
        Self { message: format!("{} (request {id})", self.message), ..self }
    }

    /// Renames fields for an API that names them differently; `names` are pairs of the name here
    /// and the client's.
    #[must_use]
    pub fn renamed(self, names: &[(&str, &str)]) -> Self {
        let mut message = self.message;
        for (here, there) in names {
            message = renamed_in(&message, here, there);
        }
        let there = |param: String| {
            let name = names.iter().find(|(here, _)| *here == param);
            name.map_or(param, |(_, there)| (*there).to_owned())
        };
        Self { message, param: self.param.map(there), ..self }
    }

    /// The same, told as Anthropic's API tells errors, of the request with this id.
    #[must_use]
    pub fn for_anthropic(self, request_id: &str) -> Self {
        Self { anthropic: Some(request_id.into()), ..self }
    }

    /// The status that the client is told.
    fn told_status(&self) -> StatusCode {
        let is_full = self.status == StatusCode::SERVICE_UNAVAILABLE || self.is_queue_full();
        match StatusCode::from_u16(OVERLOADED) {
            Ok(overloaded) if is_full && self.anthropic.is_some() => overloaded,
            _ => self.status,
        }
    }

    /// The body in Anthropic's shape.
    fn anthropic_json(&self, request_id: &str) -> Value {
        let kind = match self.told_status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.as_u16() == OVERLOADED => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        // By these words clients know that a conversation must be made shorter.
        let message = match self.code {
            Some("context_length_exceeded") => format!("prompt is too long: {}", self.message),
            _ => self.message.clone(),
        };
        let mut error = json!({"type": kind, "message": message});
        if self.code == Some(NO_THREADS) {
            error["details"] = json!({"error_code": NO_THREADS, "unsupported": ["thread"]});
        }
        json!({"type": "error", "error": error, "request_id": request_id})
    }

    /// Returns code and message as in the error of a failed response of OpenAI's Responses API.
    #[must_use]
    pub fn of_response(&self) -> Value {
        let code = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_exceeded",
            status if status.is_server_error() => "server_error",
            _ => "invalid_prompt",
        };
        json!({"code": code, "message": self.message})
    }

    /// Whether the engine's queue was full: the request may be retried.
    #[must_use]
    pub fn is_queue_full(&self) -> bool {
        self.code == Some("queue_full")
    }

    /// Returns the time after which a request that found the engine's queue full may retry.
    #[must_use]
    pub fn full_for(&self) -> Option<Duration> {
        let seconds = self.retry_after_s.filter(|_| self.is_queue_full())?;
        Some(Duration::from_secs(u64::from(seconds)))
    }

    /// Returns the body, which is also the last event of a stream that fails.
    #[must_use]
    pub fn json(&self) -> Value {
        if let Some(request_id) = &self.anthropic {
            return self.anthropic_json(request_id);
        }
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            StatusCode::NOT_FOUND => "not_found_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code,
        }})
    }
}

/// Renames a field in a message, also before the rest of its path, and no other one whose name
/// begins with its.
fn renamed_in(message: &str, here: &str, there: &str) -> String {
    let quoted = format!("`{here}");
    let mut parts = message.split(quoted.as_str());
    let mut renamed = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let goes_on = |next: char| next.is_ascii_alphanumeric() || next == '_';
        let is_other = here.ends_with(goes_on) && part.starts_with(goes_on);
        renamed.push('`');
        renamed.push_str(if is_other { here } else { there });
        renamed.push_str(part);
    }
    renamed
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        let error = match error {
            EngineError::QueueFull { retry_after_s, .. } => Self {
                retry_after_s: Some(retry_after_s),
                code: Some("queue_full"),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
            },
            EngineError::TooLarge { .. } => Self::context_length("max_tokens", message),
            EngineError::Unavailable { .. } | EngineError::ShuttingDown => {
                Self::overloaded(message)
            }
            EngineError::NoAdapter { name } => Self::unknown_model(&name),
            EngineError::Guide { .. } => Self::new(StatusCode::BAD_REQUEST, message),
            EngineError::Overloaded { retry_after_s, .. } => {
                Self { retry_after_s: Some(retry_after_s), ..Self::overloaded(message) }
            }
            EngineError::Corrupted
            | EngineError::Quarantined { .. }
            | EngineError::Broke { .. } => Self::internal(message),
        };
        Self { reason: None, ..error }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.told_status()
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.told_status());
        if let Some(seconds) = self.retry_after_s {
            response.insert_header((RETRY_AFTER, seconds.to_string()));
        }
        if self.challenge {
            response.insert_header((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        }
        if let Some(allow) = self.allow {
            response.insert_header((ALLOW, HeaderValue::from_static(allow)));
        }
        response.json(self.json())
    }
}
