//! `POST /v1/chat/completions`.
use std::slice;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::Value;

use super::dialogue::{self, Form, Started};
use super::envelope::Envelope;
use super::error::ApiError;
use super::generation::{Next, Piece, RunningPrompt, StopReason, usage};
use super::logprobs::{ChatLogprob, ChatLogprobs, TokenNames};
use super::message::{CallIds, Delta, Lines, Message};
use super::params::{Common, Fields, StreamUsage};
use super::reading::{Reading, Said};
use super::refused::{self, Endpoint};
use super::sse::{self, EventSource, Events};
use super::state::AppState;
use crate::text::reply::Part;

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
    let choice = Choice::new(Reading::new(rules, shows_reasoning));
    let choices = vec![choice; common.n as usize];
    let names = TokenNames::new(state.text.clone(), common.tokens.named_by_id);
    let mut chat = Chat { names, common, envelope, running, choices, ids, told, greeted: false };
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
#[derive(Clone, Debug)]
struct Choice {
    message: Message,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    logprobs: Vec<ChatLogprob>,
    reading: Reading,
    /// What stands between the messages of the reply.
    lines: Lines,
    /// Whether tools were called, and none of the calls was cut by a `stop` string.
    called: bool,
}

impl Choice {
    fn new(reading: Reading) -> Self {
        Self {
            message: Message::default(),
            finish_reason: None,
            stop_reason: None,
            logprobs: Vec::new(),
            reading,
            lines: Lines::default(),
            called: false,
        }
    }

    /// Reads a piece; returns the parts that the client is told of.
    fn read(&mut self, piece: &Piece) -> Vec<Part> {
        let Said { mut parts, cuts_call, .. } = self.reading.take(piece);
        parts.iter_mut().for_each(|part| self.lines.join(part));
        parts.retain(|part| self.reading.shows(part));
        self.called |= parts.iter().any(|part| matches!(part, Part::Call { .. }));
        self.called &= !cuts_call;
        parts
    }
}

#[derive(Debug)]
struct Chat {
    /// How log-probabilities tell tokens.
    names: TokenNames,
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
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
}

/// A choice of the whole answer.
#[derive(Serialize)]
struct WholeChoice<'a> {
    index: u32,
    message: Value,
    logprobs: Option<ChatLogprobs<'a>>,
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
        choice.read(&piece).into_iter().for_each(|part| choice.message.take(part));
        choice.stop_reason = piece.stop_reason.clone().or_else(|| choice.stop_reason.take());
        choice.logprobs.extend(ChatLogprob::of(&self.names, piece.logprobs.as_ref()));
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
        let choices: Vec<WholeChoice<'_>> = (0..)
            .zip(&self.choices)
            .map(|(index, choice)| WholeChoice {
                index,
                message: choice.message.json(&self.ids, index),
                logprobs: wanted.then(|| ChatLogprobs::of(&choice.logprobs)),
                finish_reason: choice.finish_reason,
                stop_reason: choice.stop_reason.as_ref(),
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
    fn push_piece(&mut self, piece: &Piece, out: &mut Events) -> Result<(), ApiError> {
        let entry = ChatLogprob::of(&self.names, piece.logprobs.as_ref());
        let logprobs = entry.as_ref().map(|entry| ChatLogprobs::of(slice::from_ref(entry)));
        let delta = self.delta(piece);
        let (index, finish_reason) = (piece.choice, self.finish_reason(piece));
        if delta.is_empty() && logprobs.is_none() && finish_reason.is_none() {
            return Ok(());
        }
        let stop_reason = piece.stop_reason.as_ref();
        let choice = ChunkChoice { index, delta: &delta, logprobs, finish_reason, stop_reason };
        self.push(choice, self.running.completion_tokens, out)
    }

    fn delta(&mut self, piece: &Piece) -> Delta {
        let mut delta = Delta::default();
        let choice = self.choices.get_mut(piece.choice as usize);
        let parts = choice.map(|choice| choice.read(piece)).into_iter().flatten();
        parts.for_each(|part| delta.take(part, &self.ids, piece.choice));
        delta
    }
}

impl EventSource for Chat {
    async fn next(&mut self, out: &mut Events) -> Option<Result<(), ApiError>> {
        let pushed = match self.running.next().await {
            Some(Err(error)) => Err(error),
            Some(Ok(Next::Piece(piece))) => {
                self.greet(out).and_then(|()| self.push_piece(&piece, out))
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
