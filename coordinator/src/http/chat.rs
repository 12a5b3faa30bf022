//! `POST /v1/chat/completions`.
use std::slice;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::{Value, json};

use super::dialogue::{self, Form, Started};
use super::envelope::Envelope;
use super::error::ApiError;
use super::generation::{Next, Piece, RunningPrompt, StopReason, usage};
use super::logprobs::{ChatLogprob, ChatLogprobs, TokenNames};
use super::message::{CallIds, Delta, Lines, Message};
use super::params::{Common, Fields, StreamUsage};
use super::prompt_logprobs::PromptLogprobs;
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
    let Started { common, running, rules, shows_reasoning, told, ids, id, prompt } =
        dialogue::start(state, fields, Form::Chat).await?;
    let object = if common.stream { "chat.completion.chunk" } else { "chat.completion" };
    let envelope = Envelope::new(state, &common.adapter, id, object);
    let wanted = common.tokens;
    let choice = Choice::new(Reading::new(rules, shows_reasoning), wanted.ids);
    let mut chat = Chat {
        names: TokenNames::new(state.text.clone(), wanted.named_by_id),
        prompt,
        prompt_logprobs: wanted
            .prompt_logprobs
            .map(|alternatives| PromptLogprobs::new(state.text.clone(), alternatives)),
        choices: vec![choice; common.n as usize],
        common,
        envelope,
        running,
        ids,
        told,
        greeted: false,
    };
    if chat.common.stream {
        return sse::respond(chat).await;
    }
    while let Some(next) = chat.running.next().await {
        match next? {
            Next::Piece(piece) => chat.take(piece),
            Next::Prompt(tokens) => {
                if let Some(all) = &mut chat.prompt_logprobs {
                    all.extend(tokens);
                }
            }
            Next::Embedding(_) => {}
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
    /// The ids of its tokens, if the client wants them.
    token_ids: Option<Vec<u32>>,
    reading: Reading,
    /// What stands between the messages of the reply.
    lines: Lines,
    /// Whether tools were called, and none of the calls was cut by a `stop` string.
    called: bool,
}

impl Choice {
    fn new(reading: Reading, has_ids: bool) -> Self {
        Self {
            message: Message::default(),
            finish_reason: None,
            stop_reason: None,
            logprobs: Vec::new(),
            token_ids: has_ids.then(Vec::new),
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
    /// The ids of the prompt's tokens, if the client wants them.
    prompt: Option<Vec<u32>>,
    prompt_logprobs: Option<PromptLogprobs>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

/// A choice of the whole answer.
#[derive(Serialize)]
struct WholeChoice<'a> {
    index: u32,
    message: Value,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
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
        choice.token_ids.iter_mut().for_each(|ids| ids.extend(piece.token));
        let reason = self.finish_reason(&piece);
        if let Some(choice) = self.choices.get_mut(piece.choice as usize) {
            choice.finish_reason = reason.or(choice.finish_reason);
        }
    }

    fn usage(&self) -> Value {
        self.usage_after(self.running.completion_tokens)
    }

    /// What was used after so many tokens.
    fn usage_after(&self, completion: u64) -> Value {
        let mut usage = usage(self.running.prompt_tokens, self.running.cached_tokens, completion);
        let reasoning = self.choices.iter().map(|choice| choice.reading.reasoning_tokens());
        usage["completion_tokens_details"] = json!({"reasoning_tokens": reasoning.sum::<u64>()});
        usage
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
                token_ids: choice.token_ids.as_deref(),
            })
            .collect();
        let usage = self.usage();
        let answer = self.envelope.with(&choices, Some(&usage));
        let (ids, logprobs) = (self.prompt.as_deref(), self.prompt_logprobs.as_ref());
        HttpResponse::Ok().json(answer.of_prompt(ids, logprobs))
    }

    /// Appends an event sent after so many tokens, with the ids of the prompt's tokens, if they are
    /// to be told.
    fn push(
        &self,
        choice: ChunkChoice<'_>,
        completion: u64,
        prompt: Option<&[u32]>,
        out: &mut Events,
    ) -> Result<(), ApiError> {
        let usage = match self.common.usage {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(Value::Null),
            StreamUsage::Every => Some(self.usage_after(completion)),
        };
        out.push(&self.envelope.with(&[choice], usage.as_ref()).of_prompt(prompt, None))
    }

    /// Appends the first event of each choice, which names the role; the very first tells of the
    /// prompt.
    fn greet(&mut self, out: &mut Events) -> Result<(), ApiError> {
        if std::mem::replace(&mut self.greeted, true) {
            return Ok(());
        }
        let delta = &Delta::greeting();
        (0..self.common.n).try_for_each(|index| {
            let (logprobs, finish_reason, stop_reason, token_ids) = (None, None, None, None);
            let choice =
                ChunkChoice { index, delta, logprobs, finish_reason, stop_reason, token_ids };
            self.push(choice, 0, self.prompt.as_deref().filter(|_| index == 0), out)
        })
    }

    /// Appends the event of a piece; none for a piece that only holds text back, unless its token
    /// is told.
    fn push_piece(&mut self, piece: &Piece, out: &mut Events) -> Result<(), ApiError> {
        let entry = ChatLogprob::of(&self.names, piece.logprobs.as_ref());
        let logprobs = entry.as_ref().map(|entry| ChatLogprobs::of(slice::from_ref(entry)));
        let delta = self.delta(piece);
        let (index, finish_reason) = (piece.choice, self.finish_reason(piece));
        let token_ids = piece.token_ids(self.common.tokens);
        let is_silent = delta.is_empty() && finish_reason.is_none();
        if is_silent && logprobs.is_none() && token_ids.is_none() {
            return Ok(());
        }
        let (delta, stop_reason) = (&delta, piece.stop_reason.as_ref());
        let choice = ChunkChoice { index, delta, logprobs, finish_reason, stop_reason, token_ids };
        self.push(choice, self.running.completion_tokens, None, out)
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
