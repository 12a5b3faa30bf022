//! `POST /v1/responses`: OpenAI's Responses API, implemented through chat. No response is stored:
//! earlier turns come in the input.
//!
//! - `input`: converts input items to the messages of a conversation
//! - `request`: converts a request to chat's fields
//! - `tools`: its tools as chat's functions, and back
//! - `output`: the output as items, and the events that report them
mod input;
mod output;
mod request;
mod tools;

use std::sync::Arc;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::{Map, Value, json};
use shared::clock::since_1970;

use self::output::{Output, Sink, Status};
pub(super) use self::request::{INCLUDE, METADATA, MOVED, SAME};
use self::tools::Offers;
use super::dialogue::{self, Form, Started};
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{Next, Piece, RunningPrompt};
use super::logprobs::{ChatLogprob, TokenNames};
use super::reading::{Reading, Said};
use super::sse::{self, EventSource, Events};
use super::state::AppState;
use crate::text::reply::Part;

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let request = request::read(state, &fields)?;
    // The fields may be much larger than what is kept of them.
    drop(fields);
    let started = dialogue::start(state, request.fields, Form::Responses).await;
    let started = started.map_err(|error| error.renamed(request::NAMES))?;
    let is_stream = started.common.stream;
    let mut answering = Answering::new(state, started, request.offers, request.echo);
    if is_stream {
        return sse::respond(answering).await;
    }
    while let Some(next) = answering.running.next().await {
        if let Next::Piece(piece) = next.map_err(|error| error.renamed(request::NAMES))? {
            answering.take(&piece, &mut None)?;
        }
    }
    answering.finish(&mut None)?;
    Ok(HttpResponse::Ok().json(answering.response(None)))
}

/// A response in progress.
#[derive(Debug)]
struct Answering {
    names: TokenNames,
    running: RunningPrompt,
    head: Head,
    output: Output,
    reading: Reading,
    /// Log-probabilities of tokens whose text has not arrived yet.
    pending: Vec<ChatLogprob>,
    /// Whether the output limit cut it.
    is_cut: bool,
    /// Whether a `stop` string cut its last call.
    cuts_call: bool,
    status: Status,
    completed_at: Option<u64>,
    /// Whether the first events were sent.
    begun: bool,
}

/// Fields that do not change while the response is in progress.
#[derive(Clone, Debug, Serialize)]
struct Head {
    id: Arc<str>,
    object: &'static str,
    created_at: u64,
    model: Arc<str>,
    background: bool,
    previous_response_id: (),
    service_tier: &'static str,
    /// Always false, whatever was requested: nothing is stored.
    store: bool,
    temperature: f32,
    top_p: f32,
    #[serde(flatten)]
    echo: Map<String, Value>,
}

/// The response so far.
#[derive(Debug, Serialize)]
struct Response<'a> {
    #[serde(flatten)]
    head: &'a Head,
    status: Status,
    completed_at: Option<u64>,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    output: &'a Output,
    usage: Option<Value>,
}

impl Answering {
    fn new(state: &AppState, started: Started, offers: Offers, echo: Map<String, Value>) -> Self {
        let Started { common, running, rules, shows_reasoning, ids, id, .. } = started;
        let head = Head {
            id: id.clone(),
            object: "response",
            created_at: since_1970().as_secs(),
            model: state.models.name(&common.adapter),
            background: false,
            previous_response_id: (),
            service_tier: "default",
            store: false,
            temperature: common.sampling.temperature,
            top_p: common.sampling.top_p,
            echo,
        };
        Self {
            // OpenAI's own API, which knows of no other names.
            names: TokenNames::new(state.text.clone(), false),
            running,
            head,
            output: Output::new(id.trim_start_matches("resp_"), ids, offers),
            reading: Reading::new(rules, shows_reasoning),
            pending: Vec::new(),
            is_cut: false,
            cuts_call: false,
            status: Status::InProgress,
            completed_at: None,
            begun: false,
        }
    }

    /// Returns the response at present; its usage is known at the end.
    fn response(&self, error: Option<&ApiError>) -> Response<'_> {
        let is_over = matches!(self.status, Status::Completed | Status::Incomplete);
        let is_cut = self.status == Status::Incomplete;
        Response {
            head: &self.head,
            status: self.status,
            completed_at: self.completed_at,
            error: error.map(ApiError::of_response),
            incomplete_details: is_cut.then(|| json!({"reason": "max_output_tokens"})),
            output: &self.output,
            usage: is_over.then(|| self.usage()),
        }
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.running.prompt_tokens, self.running.completion_tokens);
        json!({
            "input_tokens": prompt,
            // Newly cached tokens cannot be told apart from those cached before.
            "input_tokens_details": {
                "cached_tokens": self.running.cached_tokens, "cache_write_tokens": 0,
            },
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.reading.reasoning_tokens()},
            "total_tokens": prompt + completion,
        })
    }

    /// Sends the first events, once.
    fn begin(&mut self, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        self.tell("response.created", None, sink)?;
        self.tell("response.in_progress", None, sink)
    }

    fn tell(
        &mut self,
        kind: &'static str,
        error: Option<&ApiError>,
        sink: &mut Sink<'_>,
    ) -> Result<(), ApiError> {
        let number = self.output.number();
        output::tell(kind, number, &self.response(error), sink)
    }

    fn take(&mut self, piece: &Piece, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        let Said { parts, reasons, cuts_call } = self.reading.take(piece);
        self.cuts_call |= cuts_call;
        self.is_cut |= piece.finish_reason == Some("length");
        self.pending.extend(ChatLogprob::of(&self.names, piece.logprobs.as_ref()));
        let answers = parts.iter().any(|part| matches!(part, Part::Content(_)));
        if !answers && (reasons || !parts.is_empty()) {
            // They do not belong to text of the answer.
            self.pending.clear();
        }
        for part in parts {
            if !self.reading.shows(&part) {
                continue;
            }
            let is_answer = matches!(part, Part::Content(_));
            let logprobs = if is_answer { std::mem::take(&mut self.pending) } else { Vec::new() };
            self.output.take(part, logprobs, sink)?;
        }
        Ok(())
    }

    fn finish(&mut self, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        self.status = if self.is_cut { Status::Incomplete } else { Status::Completed };
        self.completed_at = (!self.is_cut).then(|| since_1970().as_secs());
        self.output.finish(self.status, self.cuts_call, sink)
    }
}

impl EventSource for Answering {
    async fn next(&mut self, out: &mut Events) -> Option<Result<(), ApiError>> {
        let next = self.running.next().await;
        let sink = &mut Some(out);
        let pushed = match next {
            Some(Err(error)) => Err(error.renamed(request::NAMES)),
            Some(Ok(Next::Piece(piece))) => self.begin(sink).and_then(|()| self.take(&piece, sink)),
            Some(Ok(Next::Prompt(_) | Next::Embedding(_))) => Ok(()),
            None => {
                let finished = self.begin(sink).and_then(|()| self.finish(sink));
                let kind = if self.is_cut { "response.incomplete" } else { "response.completed" };
                return finished.and_then(|()| self.tell(kind, None, sink)).err().map(Err);
            }
        };
        Some(pushed)
    }

    /// Appends nothing: the last event itself says that it is the last.
    fn end(&self, _: &mut Events) {}

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        let sink = &mut Some(out);
        let begun = self.begin(sink);
        self.status = Status::Failed;
        // They are JSON; if not, the stream ends without a last event, which shows that it failed.
        let _ = begun.and_then(|()| self.tell("response.failed", Some(error), sink));
    }
}
