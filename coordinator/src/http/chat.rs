//! `POST /v1/chat/completions`.
use std::sync::Arc;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::{Value, json};

use super::dialogue::{self, Form, Started};
use super::envelope::Envelope;
use super::error::ApiError;
use super::generation::{Next, Piece, RunningPrompt, StopReason, usage};
use super::logprobs::chat_logprob;
use super::message::{CallIds, Delta, Lines, Message};
use super::params::{Common, Fields, StreamUsage};
use super::refused::{self, Endpoint};
use super::sse::{self, EventSource, Events};
use super::state::AppState;
use crate::text::reply::{Part, ReplyReader, ReplyRules};

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    refused::check(&fields, Endpoint::Chat)?;
    let Started { common, running, rules, shows_reasoning, told, ids, id } =
        dialogue::start(state, fields, Form::Chat).await?;
    let object = if common.stream { "chat.completion.chunk" } else { "chat.completion" };
    let envelope = Envelope::new(state, &common.adapter, id, object);
    let choice = Choice::new(rules, shows_reasoning);
    let choices = vec![choice; common.n as usize];
    let state = state.clone();
    let mut chat = Chat { state, common, envelope, running, choices, ids, told, greeted: false };
    if chat.common.stream {
        return sse::respond(chat).await;
    }
    while let Some(next) = chat.running.next().await {
        if let Next::Piece(piece) = next? {
            chat.take(piece);
        }
    }
    Ok(chat.respond_whole())
}

/// The state of one choice.
#[derive(Clone, Debug, Default)]
struct Choice {
    message: Message,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    logprobs: Vec<Value>,
    /// Parses the reply, if anything is looked for in it.
    reader: Option<ReplyReader>,
    /// What stands between the messages of the reply.
    lines: Lines,
    /// Whether reasoning that is found is shown.
    shows_reasoning: bool,
    /// Whether tools were called.
    called: bool,
}

impl Choice {
    fn new(rules: ReplyRules, shows_reasoning: bool) -> Self {
        let reader = rules.reads().then(|| ReplyReader::new(Arc::new(rules)));
        Self { reader, shows_reasoning, ..Self::default() }
    }

    /// Parses a piece; finds nothing if nothing is looked for.
    fn read(&mut self, piece: &Piece, parts: &mut Vec<Part>) {
        let Some(reader) = &mut self.reader else { return };
        reader.push(&piece.text, parts);
        if piece.finish_reason.is_some() {
            reader.finish(parts);
        }
        parts.iter_mut().for_each(|part| self.lines.join(part));
        parts.retain(|part| self.shows_reasoning || !matches!(part, Part::Reasoning(_)));
        self.called |= parts.iter().any(|part| matches!(part, Part::Call { .. }));
    }
}

#[derive(Debug)]
struct Chat {
    state: AppState,
    common: Common,
    envelope: Envelope,
    running: RunningPrompt,
    choices: Vec<Choice>,
    ids: CallIds,
    /// Whether tool calls are a finish reason.
    told: bool,
    /// Whether the first event of each choice, which names the role, was sent.
    greeted: bool,
}

/// A choice of an event.
#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: &'a Delta,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
}

impl Chat {
    /// Returns why a choice is finished, which may be that it called tools.
    fn finish_reason(&self, piece: &Piece) -> Option<&'static str> {
        let called = self.choices.get(piece.choice as usize).is_some_and(|choice| choice.called);
        match piece.finish_reason {
            Some("stop") if called && self.told => Some("tool_calls"),
            reason => reason,
        }
    }

    fn take(&mut self, piece: Piece) {
        let Some(choice) = self.choices.get_mut(piece.choice as usize) else { return };
        let mut parts = Vec::new();
        choice.read(&piece, &mut parts);
        if choice.reader.is_none() {
            choice.message.push(&piece.text);
        }
        parts.into_iter().for_each(|part| choice.message.take(part));
        choice.stop_reason = piece.stop_reason.clone().or_else(|| choice.stop_reason.take());
        let entry = piece.logprobs.as_ref().map(|token| chat_logprob(&self.state.text, token));
        choice.logprobs.extend(entry);
        let reason = self.finish_reason(&piece);
        if let Some(choice) = self.choices.get_mut(piece.choice as usize) {
            choice.finish_reason = reason.or(choice.finish_reason);
        }
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.running.prompt_tokens, self.running.completion_tokens);
        usage(prompt, self.running.cached_tokens, completion)
    }

    fn respond_whole(&self) -> HttpResponse {
        let wanted = self.common.sampling.logprobs.is_some();
        let choices: Vec<Value> = (0..)
            .zip(&self.choices)
            .map(|(index, choice)| {
                json!({
                    "index": index,
                    "message": choice.message.json(&self.ids, index),
                    "logprobs": wanted.then(|| json!({"content": choice.logprobs, "refusal": null})),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                })
            })
            .collect();
        HttpResponse::Ok().json(self.envelope.with(&choices, Some(&self.usage())))
    }

    /// Appends an event sent after so many tokens.
    fn push(
        &self,
        choice: ChunkChoice<'_>,
        completion: u64,
        out: &mut Events,
    ) -> Result<(), ApiError> {
        let usage = match self.common.usage {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(Value::Null),
            StreamUsage::Every => {
                Some(usage(self.running.prompt_tokens, self.running.cached_tokens, completion))
            }
        };
        out.push(&self.envelope.with(&[choice], usage.as_ref()))
    }

    /// Appends the first event of each choice, which names the role.
    fn greet(&mut self, out: &mut Events) -> Result<(), ApiError> {
        if std::mem::replace(&mut self.greeted, true) {
            return Ok(());
        }
        let delta = &Delta::greeting();
        (0..self.common.n).try_for_each(|index| {
            let (logprobs, finish_reason, stop_reason) = (None, None, None);
            self.push(ChunkChoice { index, delta, logprobs, finish_reason, stop_reason }, 0, out)
        })
    }

    /// Appends the event of a piece; none for a piece that only holds text back.
    fn push_piece(&mut self, mut piece: Piece, out: &mut Events) -> Result<(), ApiError> {
        let entry = piece.logprobs.as_ref().map(|token| chat_logprob(&self.state.text, token));
        let logprobs = entry.map(|entry| json!({"content": [entry], "refusal": null}));
        let delta = self.delta(&mut piece);
        let (index, finish_reason) = (piece.choice, self.finish_reason(&piece));
        if delta.is_empty() && logprobs.is_none() && finish_reason.is_none() {
            return Ok(());
        }
        let stop_reason = piece.stop_reason.as_ref();
        let choice = ChunkChoice { index, delta: &delta, logprobs, finish_reason, stop_reason };
        self.push(choice, self.running.completion_tokens, out)
    }

    fn delta(&mut self, piece: &mut Piece) -> Delta {
        let choice = self.choices.get_mut(piece.choice as usize);
        let Some(choice) = choice.filter(|choice| choice.reader.is_some()) else {
            return Delta::of(std::mem::take(&mut piece.text));
        };
        let (mut parts, mut delta) = (Vec::new(), Delta::default());
        choice.read(piece, &mut parts);
        parts.into_iter().for_each(|part| delta.take(part, &self.ids, piece.choice));
        delta
    }
}

impl EventSource for Chat {
    async fn next(&mut self, out: &mut Events) -> Option<Result<(), ApiError>> {
        let pushed = match self.running.next().await {
            Some(Err(error)) => Err(error),
            Some(Ok(Next::Piece(piece))) => {
                self.greet(out).and_then(|()| self.push_piece(piece, out))
            }
            Some(Ok(Next::Prompt(_) | Next::Embedding(_))) => Ok(()),
            None if self.common.usage != StreamUsage::Never => {
                return out.push_last(&self.envelope.with::<Value>(&[], Some(&self.usage())));
            }
            None => return None,
        };
        Some(pushed)
    }
}
