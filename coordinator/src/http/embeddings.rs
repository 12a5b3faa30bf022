//! `POST /v1/embeddings`: a vector of length 1 for each text. It is computed like a prompt without
//! output tokens.
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::ContentType;
use actix_web::web::Bytes;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde::{Serialize, Serializer};
use serde_json::Value;
use shared::metrics::labels::RejectReason;
use tokio::time::Instant;

use super::again::Again;
use super::conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{Next, RunningPrompt};
use super::params::{Common, Limits, Truncation, token_id};
use super::refused::{self, Endpoint};
use super::state::AppState;
use crate::text::model::TextModel;

/// Maximum number of inputs of one request in the engine at a time: the others wait here, so that a
/// long list does not fill the queue that all clients share.
const AT_A_TIME: usize = 64;

/// How long after its arrival a request's later inputs wait for room in the queue.
const QUEUE_PATIENCE: Duration = Duration::from_secs(600);

/// One input as the client gave it.
#[derive(Clone, Debug)]
enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// How a vector is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// A list of numbers.
    Float,
    /// Its bytes, little-endian f32, in base64: the default of OpenAI's clients.
    Base64,
}

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let arrived = state.clock.now();
    let limits = &state.limits;
    refused::check(&fields, Endpoint::Embeddings)?;
    let mut common = Common::read(&fields, limits, &state.text, &state.models)?;
    let pooling = state.text.pooling.clone();
    let pooling = pooling.map_err(|why| {
        ApiError::field("model", format!("this model's embeddings are not supported: {why}"))
    })?;
    // Nothing is sampled, so sampling parameters have no effect.
    (common.n, common.sampling.pooling) = (1, Some(pooling));
    common.stops.clear();
    let format = format(&fields)?;
    let dimensions = dimensions(&fields, &state.text)?;
    let special = fields.boolean("add_special_tokens", true)?;
    let inputs = inputs(&fields, limits, &state.text)?;
    check_answer(inputs.len(), dimensions.unwrap_or(state.text.hidden_size), limits)?;
    let id: Arc<str> = fields.response_id("embd-", limits)?.into();
    let keep = common.truncation.map(|truncation| match truncation {
        Truncation::To(max) => max.min(limits.max_model_len) as usize,
        Truncation::Fit => limits.max_model_len as usize,
    });
    let (bytes, share) = (fields.bytes(), fields.share());
    // The fields may be much larger than what is kept of them.
    drop(fields);
    let max = limits.max_model_len;
    let encode = move |text: &_| {
        let _share = share;
        encode(text, inputs, special, keep, max)
    };
    // The deadline is watched for all inputs together, and so counts once.
    let deadline = common.deadline.take();
    let encoded = state.in_time(deadline, state.with_text(bytes, encode)).await?;
    let tokens: usize = encoded.iter().map(Vec::len).sum();
    if tokens > limits.prompt_tokens {
        let max = limits.prompt_tokens;
        let message = format!("`input` has {tokens} tokens in total, the limit is {max}");
        return Err(ApiError::field("input", message));
    }
    let again = Again::new(Instant::now() + QUEUE_PATIENCE);
    let shared = Shared { state, common: &common, id: &id, arrived, dimensions, again };
    let vectors = stream::iter(encoded.into_iter().enumerate())
        .map(|(index, tokens)| shared.vector(index, tokens))
        .buffered(AT_A_TIME)
        .try_collect::<Vec<_>>();
    let vectors = state
        .in_time(deadline, vectors)
        .await
        // Counted once, however often it was retried and for however many inputs.
        .map_err(|error| match error.is_queue_full() {
            true => error.counted_as(RejectReason::QueueFull),
            false => error,
        })?;
    let usage = Usage { prompt_tokens: tokens, total_tokens: tokens };
    let model = state.models.name(&common.adapter);
    let tail = Tail { model: &model, usage };
    let (head, tail) = (serde_json::to_string(&*id), serde_json::to_string(&tail));
    let failed = |error: serde_json::Error| ApiError::internal(error.to_string());
    let pieces = pieces(&head.map_err(failed)?, &tail.map_err(failed)?, vectors, format);
    Ok(HttpResponse::Ok().content_type(ContentType::json()).streaming(stream::iter(pieces)))
}

/// What all inputs of a request share.
struct Shared<'a> {
    state: &'a AppState,
    common: &'a Common,
    id: &'a Arc<str>,
    arrived: Duration,
    dimensions: Option<u32>,
    again: Again,
}

impl Shared<'_> {
    /// Returns the vector of one input. Once the first inputs are under way, one that finds the
    /// queue full retries: the work done for the others would be lost.
    async fn vector(&self, index: usize, tokens: Vec<u32>) -> Result<Vec<f32>, ApiError> {
        let count = tokens.len() as u64;
        self.common.tally.prompt(count);
        let pause = |error: &ApiError| {
            let pause = error.full_for().filter(|_| index >= AT_A_TIME)?;
            // Up to a quarter more, so that requests refused together do not retry together.
            let draw = self.state.draw_seed(self.state.next_request()) % 1024;
            Some(pause + pause * draw as u32 / 4096)
        };
        let vector = self.again.ask(async || self.attempt(tokens.clone()).await, pause).await;
        vector.inspect_err(|_| self.common.tally.failed(count))
    }

    /// Makes one attempt. For each, the client has waited since the request arrived.
    async fn attempt(&self, tokens: Vec<u32>) -> Result<Vec<f32>, ApiError> {
        let arrived = self.arrived;
        let running = RunningPrompt::start(self.state, self.common, tokens, 0, arrived, self.id)?;
        Ok(unit(embedding(running).await?, self.dimensions))
    }
}

/// Writes the answer one vector at a time, with the fields in the order of OpenAI's API.
fn pieces(
    id: &str,
    tail: &str,
    vectors: Vec<Vec<f32>>,
    format: Format,
) -> impl Iterator<Item = serde_json::Result<Bytes>> + use<> {
    let head = format!("{{\"id\":{id},\"object\":\"list\",\"data\":[");
    // The rest of an object, without its opening brace.
    let tail = format!("],{}", tail.strip_prefix('{').unwrap_or(tail));
    let entries = vectors.into_iter().enumerate().map(move |(index, values)| {
        let mut text = if index > 0 { b",".to_vec() } else { Vec::new() };
        let entry = Entry { object: "embedding", index, embedding: Vector { values, format } };
        serde_json::to_writer(&mut text, &entry)?;
        Ok(Bytes::from(text))
    });
    let one = |text: String| iter::once(Ok(Bytes::from(text)));
    one(head).chain(entries).chain(one(tail))
}

/// Waits for the embedding of one input.
async fn embedding(mut running: RunningPrompt) -> Result<Vec<f32>, ApiError> {
    let mut found = None;
    while let Some(next) = running.next().await {
        if let Next::Embedding(vector) = next? {
            found = Some(vector);
        }
    }
    found.ok_or_else(|| ApiError::internal("the engine gave no embedding"))
}

/// Cuts a vector to its first `dimensions` numbers and scales it to length 1.
fn unit(mut vector: Vec<f32>, dimensions: Option<u32>) -> Vec<f32> {
    vector.truncate(dimensions.map_or(usize::MAX, |dimensions| dimensions as usize));
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    vector
}

fn format(fields: &Fields) -> Result<Format, ApiError> {
    let name = "encoding_format";
    match fields.get(name).map(|value| (value.as_str(), value)) {
        None | Some((Some("float"), _)) => Ok(Format::Float),
        Some((Some("base64"), _)) => Ok(Format::Base64),
        Some((_, other)) => Err(Fields::wrong(name, other, "\"float\" or \"base64\"")),
    }
}

fn dimensions(fields: &Fields, text: &TextModel) -> Result<Option<u32>, ApiError> {
    fields.count("dimensions", 1, hidden_size_of(text))
}

/// The most that a vector may have. If the model's size is unknown, nothing is known to be too
/// large: the whole vector is returned.
pub(super) fn hidden_size_of(text: &TextModel) -> u32 {
    if text.hidden_size == 0 { u32::MAX } else { text.hidden_size }
}

/// Checks that an answer of so many vectors is not too large.
fn check_answer(inputs: usize, width: u32, limits: &Limits) -> Result<(), ApiError> {
    let (max, width) = (limits.embedding_numbers, width.max(1) as usize);
    if inputs.saturating_mul(width) <= max {
        return Ok(());
    }
    let fit = max / width;
    let message = format!(
        "`input` has {inputs} entries, each a vector of {width} numbers: a response has room for \
         {max} numbers, or {fit} entries"
    );
    Err(ApiError::field("input", message))
}

fn inputs(fields: &Fields, limits: &Limits, text: &TextModel) -> Result<Vec<Input>, ApiError> {
    let (name, max, ids) = ("input", limits.inputs, text.vocab_size - 1);
    let wrong = || {
        let message = format!(
            "`{name}` must be a string, a list of 1 to {max} strings, a list of token ids from 0 \
             to {ids}, or a list of 1 to {max} such lists; none may be empty"
        );
        ApiError::field(name, message)
    };
    let one = |value: &Value| match value {
        Value::String(text) if !text.is_empty() => Ok(Input::Text(text.clone())),
        Value::Array(list) if !list.is_empty() => {
            let ids: Option<Vec<u32>> = list.iter().map(|id| token_id(id, text)).collect();
            ids.map(Input::Tokens).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    };
    match fields.get(name) {
        None => Err(ApiError::field(name, "`input` is required")),
        Some(Value::Array(list)) if !list.first().is_some_and(Value::is_number) => {
            if !(1..=max).contains(&list.len()) {
                return Err(wrong());
            }
            list.iter().map(one).collect()
        }
        Some(value) => Ok(vec![one(value)?]),
    }
}

/// Tokenizes inputs: keeps at most `keep` tokens of each if given, otherwise rejects inputs of more
/// than `max`.
fn encode(
    model: &TextModel,
    inputs: Vec<Input>,
    special: bool,
    keep: Option<usize>,
    max: u32,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let name = "input";
    let failed = |error: String| ApiError::field(name, error);
    let encode = |(index, input)| {
        let tokens = match (input, keep) {
            (Input::Text(text), Some(keep)) => {
                model.encode_beginning(&text, special, keep).map_err(failed)?
            }
            (Input::Text(text), None) => {
                conversation::check_fits(model, name, &text, Some(max))?;
                model.encode(&text, special).map_err(failed)?
            }
            (Input::Tokens(mut tokens), keep) => {
                tokens.truncate(keep.unwrap_or(usize::MAX));
                tokens
            }
        };
        if tokens.is_empty() {
            return Err(failed(format!("`{name}[{index}]` has no tokens")));
        }
        if tokens.len() > max as usize {
            let message = format!(
                "This model's maximum context length is {max} tokens. However, `{name}[{index}]` \
                 has {} tokens. Please reduce it, or set `truncate_prompt_tokens`.",
                tokens.len()
            );
            return Err(ApiError::context_length(name, message));
        }
        Ok(tokens)
    };
    inputs.into_iter().enumerate().map(encode).collect()
}

/// The rest of the answer, after the vectors.
#[derive(Serialize)]
struct Tail<'a> {
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Entry {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

struct Vector {
    values: Vec<f32>,
    format: Format,
}

impl Serialize for Vector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.format {
            Format::Float => self.values.serialize(serializer),
            Format::Base64 => {
                let bytes: Vec<u8> = self.values.iter().flat_map(|it| it.to_le_bytes()).collect();
                serializer.serialize_str(&BASE64_STANDARD.encode(bytes))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::access::Tally;
    use super::super::state::tests::state_of;
    use super::*;
    use crate::engine::{EngineCommand, EngineError, EngineEvent, EngineHandle, FinishReason};

    #[actix_rt::test]
    async fn the_tokens_of_an_input_that_is_asked_for_again_are_counted_once() {
        let (engine, mut commands) = EngineHandle::channel();
        let (state, _hub) = state_of(engine);
        // After the first inputs, every second request finds the queue full.
        let asked = actix_rt::spawn(async move {
            let mut asked = 0;
            while let Some(command) = commands.recv().await {
                let EngineCommand::Submit { events, .. } = command else { continue };
                asked += 1;
                let full = EngineError::QueueFull { queued: 1, max: 1, retry_after_s: 0 };
                let (choice, reason, cached) = (0, FinishReason::Complete, 0);
                let answer = match asked > AT_A_TIME && asked % 2 == 0 {
                    true => vec![EngineEvent::Failed(full)],
                    false => vec![
                        EngineEvent::Embedding(vec![1.0]),
                        EngineEvent::Finished { choice, reason, cached },
                    ],
                };
                answer.into_iter().for_each(|event| events.send(event).unwrap());
            }
            asked
        });
        let body = serde_json::json!({"input": vec![[5, 6, 7]; AT_A_TIME + 20]}).to_string();
        let tally = Tally::counting();
        let fields = Fields::parse(body.as_bytes(), &state.limits).unwrap();
        let answer = respond(&state, fields.counted_in(tally.clone())).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(tally.counted(), Some((3 * (AT_A_TIME as u64 + 20), 0)));
        drop(state);
        assert!(asked.await.unwrap() > AT_A_TIME + 20, "some were asked for again");
    }
}
