//! `POST /v1/embeddings`: a vector of length 1 for each text.
use actix_web::HttpResponse;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;
use super::limits::Limits;
use super::params::token_id;
use super::refused::Endpoint;
use super::state::AppState;
use super::vectors::{Group, Input, Texts, Vectors, list};
use crate::text::model::TextModel;

/// How a vector is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
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
    let mut asked = Vectors::read(state, &fields, Endpoint::Embeddings, "embd-")?;
    let format = format(&fields)?;
    asked.dimensions = dimensions(&fields, &state.text)?;
    let texts = inputs(&fields, &state.limits, &state.text)?;
    let (id, model) = (asked.id.clone(), asked.model.clone());
    let (vectors, tokens) = asked.compute_all(state, fields, texts).await?;
    let tail = Tail { model: &model, usage: Usage::of(tokens) };
    let (id, tail) = (serde_json::to_string(&*id), serde_json::to_string(&tail));
    let failed = |error: serde_json::Error| ApiError::internal(error.to_string());
    // The fields stand in the order of OpenAI's API.
    let head = format!("{{\"id\":{},\"object\":\"list\",\"data\":[", id.map_err(failed)?);
    // The rest of an object, without its opening brace.
    let tail = tail.map_err(failed)?;
    let tail = format!("],{}", tail.strip_prefix('{').unwrap_or(&tail));
    let entries = vectors.into_iter().enumerate().map(move |(index, values)| Entry {
        object: "embedding",
        index,
        embedding: Vector { values, format },
    });
    Ok(list(head, entries, tail))
}

/// Reads how vectors are to be written.
///
/// # Errors
/// 400.
pub(super) fn format(fields: &Fields) -> Result<Format, ApiError> {
    let name = "encoding_format";
    match fields.get(name).map(|value| (value.as_str(), value)) {
        None | Some((Some("float"), _)) => Ok(Format::Float),
        Some((Some("base64"), _)) => Ok(Format::Base64),
        Some((_, other)) => Err(Fields::wrong(name, other, "\"float\" or \"base64\"")),
    }
}

/// Reads how many numbers of each vector are wanted.
///
/// # Errors
/// 400.
pub(super) fn dimensions(fields: &Fields, text: &TextModel) -> Result<Option<u32>, ApiError> {
    fields.count("dimensions", 1, hidden_size_of(text))
}

/// The most that a vector may have. If the model's size is unknown, nothing is known to be too
/// large: the whole vector is returned.
pub(super) fn hidden_size_of(text: &TextModel) -> u32 {
    if text.hidden_size == 0 { u32::MAX } else { text.hidden_size }
}

/// Reads `input`, in all its forms.
///
/// # Errors
/// 400.
pub(super) fn inputs(
    fields: &Fields,
    limits: &Limits,
    text: &TextModel,
) -> Result<Texts, ApiError> {
    let (name, max, ids) = ("input", limits.inputs, text.vocab_size - 1);
    let wrong = || {
        let message = format!(
            "`{name}` must be a string, a list of 1 to {max} strings, a list of token ids from 0 \
             to {ids}, or a list of 1 to {max} such lists; no list may be empty"
        );
        ApiError::field(name, message)
    };
    let one = |value: &Value| match value {
        Value::String(text) => Ok(Input::Text(text.as_str().into())),
        Value::Array(list) if !list.is_empty() => {
            let ids: Option<Vec<u32>> = list.iter().map(|id| token_id(id, text)).collect();
            ids.map(Input::Tokens).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    };
    let inputs: Vec<Input> = match fields.get(name) {
        None => return Err(ApiError::field(name, "`input` is required")),
        Some(Value::Array(list)) if !list.first().is_some_and(Value::is_number) => {
            if !(1..=max).contains(&list.len()) {
                return Err(wrong());
            }
            list.iter().map(one).collect::<Result<Vec<_>, _>>()?
        }
        Some(value) => vec![one(value)?],
    };
    Ok(Texts::Each(vec![Group { field: name, inputs, keep: None }]))
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

/// What a request for vectors used.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) total_tokens: usize,
}

impl Usage {
    /// Of so many tokens.
    pub(super) fn of(tokens: usize) -> Self {
        Self { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// A vector as it is written.
pub(super) struct Vector {
    pub(super) values: Vec<f32>,
    pub(super) format: Format,
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
    use super::super::vectors::AT_A_TIME;
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
