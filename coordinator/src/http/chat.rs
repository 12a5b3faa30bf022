//! `POST /v1/chat/completions`.
use std::sync::Arc;

use actix_web::HttpResponse;
use serde_json::{Value, json};

use super::conversation::{self, Told};
use super::error::ApiError;
use super::generation::{Next, Piece, RunningPrompt, usage};
use super::logprobs::chat_logprob;
use super::params::{Common, Fields};
use super::refused::{self, Endpoint};
use super::sse::{self, EventSource};
use super::state::{AppState, since_1970};

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and what the engine refuses.
pub async fn respond(state: &AppState, fields: &Fields) -> Result<HttpResponse, ApiError> {
    let arrived = state.clock.now();
    let limits = &state.limits;
    let mut common = Common::read(fields, limits, &state.text, &state.model_name)?;
    refused::check(fields, Endpoint::Chat)?;
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
    let conversation = conversation::read(fields, limits, template, Told::AndCalled)?;
    let special = fields.boolean("add_special_tokens", false)?;
    let id: Arc<str> = fields.response_id("chatcmpl", limits)?.into();
    let (bytes, fit) = (conversation.bytes(), common.fit(limits));
    let encode = move |text: &_| conversation::encode_within(text, &conversation, special, fit);
    let mut tokens = state.with_text(bytes, encode).await?;
    if tokens.is_empty() {
        return Err(ApiError::field("messages", "`messages` give an empty prompt"));
    }
    common.truncate(&mut tokens, limits);
    let max_tokens = common.output_tokens("messages", tokens.len(), limits)?;
    let running = RunningPrompt::start(state, &common, tokens, max_tokens, arrived, &id)?;
    let choices = vec![Choice::default(); common.n as usize];
    let mut chat =
        Chat { state: state.clone(), common, id, running, choices, greeted: false, ended: false };
    if chat.common.stream {
        return sse::respond(chat).await;
    }
    while let Some(next) = chat.running.next().await {
        if let Next::Piece(piece) = next? {
            chat.take(&piece);
        }
    }
    Ok(HttpResponse::Ok().json(chat.whole()))
}

#[derive(Clone, Debug, Default)]
struct Choice {
    text: String,
    finish_reason: Option<&'static str>,
    logprobs: Vec<Value>,
}

#[derive(Debug)]
struct Chat {
    state: AppState,
    common: Common,
    id: Arc<str>,
    running: RunningPrompt,
    choices: Vec<Choice>,
    /// The first event of each choice, which names the role, was sent.
    greeted: bool,
    ended: bool,
}

impl Chat {
    fn take(&mut self, piece: &Piece) {
        let Some(choice) = self.choices.get_mut(piece.choice as usize) else { return };
        choice.text.push_str(&piece.text);
        choice.finish_reason = piece.finish_reason.or(choice.finish_reason);
        let entry = piece.logprobs.as_ref().map(|token| chat_logprob(&self.state.text, token));
        choice.logprobs.extend(entry);
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.running.prompt_tokens, self.running.completion_tokens);
        usage(prompt, self.running.cached_tokens, completion)
    }

    fn envelope(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": &*self.id, "object": object, "created": since_1970(),
            "model": &*self.state.model_name, "system_fingerprint": null, "choices": choices,
        })
    }

    fn whole(&self) -> Value {
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
                })
            })
            .collect();
        let mut answer = self.envelope("chat.completion", Value::Array(choices));
        answer["usage"] = self.usage();
        answer
    }

    fn event(&self, index: u32, delta: &Value, logprobs: &Value, finish: Option<&str>) -> Value {
        let choice = json!({
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        });
        let mut event = self.envelope("chat.completion.chunk", json!([choice]));
        if self.common.include_usage {
            event["usage"] = Value::Null;
        }
        event
    }

    /// The event of a piece; none for a piece that only holds text back.
    fn event_of(&self, piece: &Piece) -> Option<Value> {
        let entry = piece.logprobs.as_ref().map(|token| chat_logprob(&self.state.text, token));
        let logprobs =
            entry.map_or(Value::Null, |entry| json!({"content": [entry], "refusal": null}));
        if piece.text.is_empty() && logprobs.is_null() && piece.finish_reason.is_none() {
            return None;
        }
        let delta = if piece.text.is_empty() { json!({}) } else { json!({"content": piece.text}) };
        Some(self.event(piece.choice, &delta, &logprobs, piece.finish_reason))
    }
}

impl EventSource for Chat {
    async fn next(&mut self) -> Option<Result<Vec<Value>, ApiError>> {
        while !self.ended {
            let next = self.running.next().await;
            let mut events = Vec::new();
            match next {
                Some(Err(error)) => {
                    self.ended = true;
                    return Some(Err(error));
                }
                Some(Ok(Next::Piece(piece))) => {
                    if !self.greeted {
                        self.greeted = true;
                        let delta = json!({"role": "assistant", "content": ""});
                        events.extend(
                            (0..self.common.n)
                                .map(|index| self.event(index, &delta, &Value::Null, None)),
                        );
                    }
                    events.extend(self.event_of(&piece));
                }
                Some(Ok(Next::Prompt(_))) => {}
                None => {
                    self.ended = true;
                    if self.common.include_usage {
                        let mut last = self.envelope("chat.completion.chunk", json!([]));
                        last["usage"] = self.usage();
                        events.push(last);
                    }
                }
            }
            if !events.is_empty() {
                return Some(Ok(events));
            }
        }
        None
    }
}
