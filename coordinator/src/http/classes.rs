//! `POST /classify`: sorts texts into the classes of a model that was made for it, in vLLM's form.
use actix_web::HttpResponse;
use serde::Serialize;
use shared::clock::since_1970;

use super::embeddings::{self, Usage};
use super::error::ApiError;
use super::fields::Fields;
use super::refused::Endpoint;
use super::state::AppState;
use super::vectors::{Vectors, list};
use crate::text::model::TextModel;

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub(super) async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let asked = Vectors::read(state, &fields, Endpoint::Classify, "classify-")?;
    let texts = embeddings::inputs(&fields, &state.limits, &state.text)?;
    let (id, model) = (asked.id.clone(), asked.model.clone());
    let (all, tokens) = asked.compute_all(state, fields, texts).await?;
    let (head, tail) = frame(&id, &model, tokens)?;
    let text = state.text.clone();
    let entries = all.into_iter().enumerate().map(move |(index, probs)| {
        let likeliest = most_likely(&probs);
        let names = text.classifier.as_ref().map(|classifier| &classifier.names);
        let label = names.and_then(|names| names.get(likeliest)).cloned();
        Entry { index, label, num_classes: probs.len(), probs }
    });
    Ok(list(head, entries, tail))
}

/// What stands before and after the entries of `data`, in vLLM's form.
///
/// # Errors
/// 500.
pub(super) fn frame(id: &str, model: &str, tokens: usize) -> Result<(String, String), ApiError> {
    let failed = |error: serde_json::Error| ApiError::internal(error.to_string());
    let head = Head { id, object: "list", created: since_1970().as_secs(), model };
    let head = serde_json::to_string(&head).map_err(failed)?;
    let head = format!("{},\"data\":[", head.strip_suffix('}').unwrap_or(&head));
    let usage = serde_json::to_string(&Usage::of(tokens)).map_err(failed)?;
    Ok((head, format!("],\"usage\":{usage}}}")))
}

/// The first of those with the largest number.
fn most_likely(probs: &[f32]) -> usize {
    let better = |best: usize, index: usize| if probs[index] > probs[best] { index } else { best };
    (0..probs.len()).reduce(better).unwrap_or(0)
}

/// Why a model that sorts texts into classes does not do what was asked: what it does instead. None
/// if it is no such model.
pub(super) fn no_vectors(text: &TextModel) -> Option<String> {
    let count = text.classifier.as_ref()?.names.len();
    let instead = match count {
        1 => "judges texts and pairs of texts, with `/score`, `/rerank`,".to_owned(),
        _ => format!("sorts texts into {count} classes, with"),
    };
    Some(format!(
        "this model generates neither text nor embeddings: it {instead} `/classify` and `/pooling`"
    ))
}

/// Refuses to generate text with a model that cannot.
///
/// # Errors
/// 400 that names what the model can do.
pub(super) fn check_generates(text: &TextModel) -> Result<(), ApiError> {
    let no_head = text.lacks_head.then(|| {
        "this model generates no text, since its weights have no output head (lm_head.weight): it \
         makes embeddings, with `/v1/embeddings`"
            .to_owned()
    });
    let refusal = no_vectors(text).or(no_head);
    refusal.map_or(Ok(()), |message| Err(ApiError::field("model", message)))
}

/// An answer, before its data.
#[derive(Serialize)]
struct Head<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
}

#[derive(Serialize)]
struct Entry {
    index: usize,
    label: Option<String>,
    probs: Vec<f32>,
    num_classes: usize,
}
