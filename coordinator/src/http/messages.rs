//! `POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API, on the way
//! that chat goes.
//!
//! - `input`: turns of blocks as the messages of a conversation
//! - `request`: a request in chat's fields
//! - `output`: what was said as blocks, and the events that tell of them
mod input;
mod output;
mod request;

use std::sync::Arc;

use actix_web::HttpResponse;
use actix_web::http::header::HeaderName;
use serde::Serialize;
use serde_json::{Value, json};

use self::output::{Output, Sink};
pub(super) use self::request::{MOVED, SAME};
use super::conversation;
use super::dialogue::{self, Form, Started};
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{Next, Piece, RunningPrompt, StopReason};
use super::reading::Reading;
use super::sse::{self, EventSource, Events};
use super::state::AppState;
use super::tools::Tools;
use crate::text::reply::Reasoning;

/// Where the API is.
const PATH: &str = "/v1/messages";
/// What says a request's id there.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Sent in silence.
const PING: &[u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

/// Whether errors of this path are told as Anthropic's API tells them.
#[must_use]
pub(super) fn is_at(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and what the engine refuses.
pub async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let request_id = fields.request_id().to_owned();
    let request = request::read(state, &fields)?;
    // It may be much larger than what is kept of it.
    drop(fields);
    let Some(max_tokens) = request.max_tokens else {
        return Err(ApiError::field("max_tokens", "`max_tokens` is required"));
    };
    let started = dialogue::start(state, request.fields, Form::Messages).await;
    let started = started.map_err(|error| error.renamed(request::NAMES))?;
    let is_stream = started.common.stream;
    let mut answering = Answering::new(state, started, max_tokens, request_id);
    if is_stream {
        return sse::respond(answering).await;
    }
    while let Some(next) = answering.running.next().await {
        if let Next::Piece(piece) = next.map_err(|error| error.renamed(request::NAMES))? {
            answering.take(piece, &mut None)?;
        }
    }
    answering.output.finish(&mut None)?;
    let content = answering.output.json();
    let usage = answering.usage();
    Ok(HttpResponse::Ok().json(answering.message(content, usage)))
}

/// Says how many tokens a request's prompt has. It does not reach the engine.
///
/// # Errors
/// Everything a client can do wrong.
pub async fn count_tokens(state: &AppState, fields: Fields) -> Result<String, ApiError> {
    state.check_model(&fields)?;
    let request = request::read(state, &fields)?.fields;
    let renamed = |error: ApiError| error.renamed(request::NAMES);
    let template = state.text.template.as_ref().ok_or_else(conversation::no_template)?;
    let tools = Tools::read(&request, &state.limits).map_err(renamed)?;
    let conversation = conversation::read(&request, &state.limits, template, tools.told());
    let conversation = conversation.map_err(renamed)?;
    let special = request.boolean("add_special_tokens", false)?;
    let encode = move |text: &_| {
        conversation::encode(text, &conversation, special, None, Reasoning::Untold, false)
    };
    let rendered = state.with_text(fields.bytes(), encode).await.map_err(renamed)?;
    Ok(json!({"input_tokens": rendered.tokens.len()}).to_string())
}

/// A message that is being given.
#[derive(Debug)]
struct Answering {
    running: RunningPrompt,
    id: Arc<str>,
    model: Arc<str>,
    request_id: String,
    reading: Reading,
    output: Output,
    /// Most tokens that were asked for, or that the operator lets an answer have.
    max_tokens: u32,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    /// The first event was sent.
    begun: bool,
}

/// The message.
#[derive(Debug, Serialize)]
struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: Value,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Value,
}

impl Answering {
    fn new(state: &AppState, started: Started, max_tokens: u32, request_id: String) -> Self {
        let Started { common, running, rules, shows_reasoning, ids, id, .. } = started;
        let operators = state.text.defaults.max_new_tokens.unwrap_or(u32::MAX);
        Self {
            running,
            id,
            model: state.models.name(&common.adapter),
            request_id,
            reading: Reading::new(rules, shows_reasoning),
            output: Output::new(ids),
            max_tokens: max_tokens.min(operators),
            finish_reason: None,
            stop_reason: None,
            begun: false,
        }
    }

    /// The message now.
    fn message(&self, content: Value, usage: Value) -> Message<'_> {
        let (stop_reason, stop_sequence) = self.stop();
        Message {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.model,
            content,
            stop_reason,
            stop_sequence,
            usage,
        }
    }

    /// Why the message is over, once it is, and the string that ended it.
    fn stop(&self) -> (Option<&'static str>, Option<&str>) {
        let Some(reason) = self.finish_reason else { return (None, None) };
        let reason = match (reason, &self.stop_reason) {
            (_, Some(StopReason::Text(text))) => return (Some("stop_sequence"), Some(text)),
            // What the model's length or its cache left was less.
            ("length", _) if self.running.completion_tokens < u64::from(self.max_tokens) => {
                "model_context_window_exceeded"
            }
            ("length", _) => "max_tokens",
            _ if self.output.has_calls() => "tool_use",
            _ => "end_turn",
        };
        (Some(reason), None)
    }

    /// What was used so far; what the cache had is known at the end.
    fn usage(&self) -> Value {
        let cached = self.running.cached_tokens;
        json!({
            "input_tokens": self.running.prompt_tokens.saturating_sub(cached),
            // What is kept of a prompt is not told apart from what was kept before.
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.running.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.reading.reasoning_tokens()},
        })
    }

    /// The first event, once.
    fn begin(&mut self, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        let Some(events) = sink else { return Ok(()) };
        // Before it is known why it ends.
        let message = Message {
            stop_reason: None,
            stop_sequence: None,
            ..self.message(json!([]), self.usage())
        };
        events.push_named("message_start", &json!({"type": "message_start", "message": message}))
    }

    fn take(&mut self, piece: Piece, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        for part in self.reading.take(&piece).parts {
            if self.reading.shows(&part) {
                self.output.take(part, sink)?;
            }
        }
        self.finish_reason = piece.finish_reason.or(self.finish_reason);
        self.stop_reason = piece.stop_reason.or(self.stop_reason.take());
        Ok(())
    }

    /// The last events.
    fn finish(&mut self, out: &mut Events) -> Result<(), ApiError> {
        let sink = &mut Some(out);
        self.begin(sink)?;
        self.output.finish(sink)?;
        let (stop_reason, stop_sequence) = self.stop();
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let event = json!({"type": "message_delta", "delta": delta, "usage": self.usage()});
        let Some(out) = sink else { return Ok(()) };
        out.push_named("message_delta", &event)?;
        out.push_named("message_stop", &json!({"type": "message_stop"}))
    }
}

impl EventSource for Answering {
    async fn next(&mut self, out: &mut Events) -> Option<Result<(), ApiError>> {
        let next = self.running.next().await;
        let sink = &mut Some(&mut *out);
        Some(match next {
            Some(Err(error)) => Err(error.renamed(request::NAMES)),
            Some(Ok(Next::Piece(piece))) => self.begin(sink).and_then(|()| self.take(piece, sink)),
            Some(Ok(Next::Prompt(_) | Next::Embedding(_))) => Ok(()),
            None => return self.finish(out).err().map(Err),
        })
    }

    fn ping(&self) -> &'static [u8] {
        PING
    }

    /// Nothing: the last event says by itself that it is the last.
    fn end(&self, _: &mut Events) {}

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        let error = error.clone().for_anthropic(&self.request_id);
        // It is JSON, or the stream ends without a last event, which says that it failed.
        let _ = out.push_named("error", &error.json());
    }
}
