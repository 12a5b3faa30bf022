//! `POST /v1/chat/completions`.
use std::sync::Arc;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::{Value, json};

use super::conversation::{self, Told};
use super::envelope::Envelope;
use super::error::ApiError;
use super::generation::{Next, Piece, RunningPrompt, StopReason, usage};
use super::logprobs::chat_logprob;
use super::params::{Common, Fields};
use super::refused::{self, Endpoint};
use super::sse::{self, EventSource, Events};
use super::state::AppState;

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and what the engine refuses.
pub async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let arrived = state.clock.now();
    let limits = &state.limits;
    let mut common = Common::read(&fields, limits, &state.text, &state.model_name)?;
    refused::check(&fields, Endpoint::Chat)?;
    let wanted = fields.boolean("logprobs", false)?;
    let top = fields.count("top_logprobs", 0, limits.top_logprobs)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs`: true"));
    }
    common.sampling.logprobs = wanted.then_some(top.unwrap_or(0));
    let max_tokens = fields.count("max_tokens", 1, limits.max_model_len)?;
    common.max_tokens =
        fields.count("max_completion_tokens", 1, limits.max_model_len)?.or(max_tokens);
    let template = state.text.template.as_ref().ok_or_else(conversation::no_template)?;
    let conversation = conversation::read(&fields, limits, template, Told::AndCalled)?;
    let special = fields.boolean("add_special_tokens", false)?;
    let id: Arc<str> = fields.response_id("chatcmpl", limits)?.into();
    let (bytes, fit) = (fields.bytes(), common.fit(limits));
    // It may be much larger than what is kept of it.
    drop(fields);
    let encode = move |text: &_| conversation::encode_within(text, &conversation, special, fit);
    let mut tokens = state.with_text(bytes, encode).await?;
    if tokens.is_empty() {
        return Err(ApiError::field("messages", "`messages` give an empty prompt"));
    }
    common.truncate(&mut tokens, limits);
    let max_tokens = common.output_tokens("messages", tokens.len(), limits)?;
    limits.check_prompts(tokens.len() * common.n as usize)?;
    let running = RunningPrompt::start(state, &common, tokens, max_tokens, arrived, &id)?;
    let object = if common.stream { "chat.completion.chunk" } else { "chat.completion" };
    let envelope = Envelope::new(state, id, object);
    let choices = vec![Choice::default(); common.n as usize];
    let state = state.clone();
    let mut chat = Chat { state, common, envelope, running, choices, greeted: false };
    if chat.common.stream {
        return sse::respond(chat).await;
    }
    while let Some(next) = chat.running.next().await {
        if let Next::Piece(piece) = next? {
            chat.take(&piece);
        }
    }
    Ok(chat.respond_whole())
}

#[derive(Clone, Debug, Default)]
struct Choice {
    text: String,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    logprobs: Vec<Value>,
}

#[derive(Debug)]
struct Chat {
    state: AppState,
    common: Common,
    envelope: Envelope,
    running: RunningPrompt,
    choices: Vec<Choice>,
    /// The first event of each choice, which names the role, was sent.
    greeted: bool,
}

/// A choice of an event.
#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
}

/// What an event adds to a choice's message.
#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl Chat {
    fn take(&mut self, piece: &Piece) {
        let Some(choice) = self.choices.get_mut(piece.choice as usize) else { return };
        choice.text.push_str(&piece.text);
        choice.finish_reason = piece.finish_reason.or(choice.finish_reason);
        choice.stop_reason = piece.stop_reason.clone().or_else(|| choice.stop_reason.take());
        let entry = piece.logprobs.as_ref().map(|token| chat_logprob(&self.state.text, token));
        choice.logprobs.extend(entry);
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.running.prompt_tokens, self.running.completion_tokens);
        usage(prompt, self.running.cached_tokens, completion)
    }

    fn respond_whole(&self) -> HttpResponse {
        let wanted = self.common.sampling.logprobs.is_some();
        let choices: Vec<Value> = self
            .choices
            .iter()
            .enumerate()
            .map(|(index, choice)| {
                json!({
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": null},
                    "logprobs": wanted.then(|| json!({"content": choice.logprobs, "refusal": null})),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                })
            })
            .collect();
        HttpResponse::Ok().json(self.envelope.with(&choices, Some(&self.usage())))
    }

    fn push(&self, choice: ChunkChoice<'_>, out: &mut Events) -> Result<(), ApiError> {
        let usage = self.common.include_usage.then_some(&Value::Null);
        out.push(&self.envelope.with(&[choice], usage))
    }

    /// The first event of each choice, which names the role.
    fn greet(&mut self, out: &mut Events) -> Result<(), ApiError> {
        if std::mem::replace(&mut self.greeted, true) {
            return Ok(());
        }
        (0..self.common.n).try_for_each(|index| {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            let (logprobs, finish_reason, stop_reason) = (None, None, None);
            self.push(ChunkChoice { index, delta, logprobs, finish_reason, stop_reason }, out)
        })
    }

    /// The event of a piece; none for a piece that only holds text back.
    fn push_piece(&self, piece: &Piece, out: &mut Events) -> Result<(), ApiError> {
        let entry = piece.logprobs.as_ref().map(|token| chat_logprob(&self.state.text, token));
        let logprobs = entry.map(|entry| json!({"content": [entry], "refusal": null}));
        if piece.text.is_empty() && logprobs.is_none() && piece.finish_reason.is_none() {
            return Ok(());
        }
        let content = Some(piece.text.as_str()).filter(|text| !text.is_empty());
        let (index, finish_reason) = (piece.choice, piece.finish_reason);
        let delta = Delta { role: None, content };
        let stop_reason = piece.stop_reason.as_ref();
        self.push(ChunkChoice { index, delta, logprobs, finish_reason, stop_reason }, out)
    }
}

impl EventSource for Chat {
    async fn next(&mut self, out: &mut Events) -> Option<Result<(), ApiError>> {
        let pushed = match self.running.next().await {
            Some(Err(error)) => Err(error),
            Some(Ok(Next::Piece(piece))) => {
                self.greet(out).and_then(|()| self.push_piece(&piece, out))
            }
            Some(Ok(Next::Prompt(_))) => Ok(()),
            None if self.common.include_usage => {
                return out.push_last(&self.envelope.with::<Value>(&[], Some(&self.usage())));
            }
            None => return None,
        };
        Some(pushed)
    }
}
