//! `POST /pooling`, in vLLM's form: what the model makes of each text. A number for each class of a
//! model that has them, or else an embedding.
use actix_web::HttpResponse;
use serde::Serialize;

use super::classes::frame;
use super::embeddings::{self, Vector};
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
    let mut asked = Vectors::read(state, &fields, Endpoint::Pooling, "pool-")?;
    let format = embeddings::format(&fields)?;
    let task = task_of(&state.text);
    if let Some(said) = fields.get("task").filter(|said| **said != task) {
        return Err(Fields::wrong("task", said, &format!("\"{task}\" for this model")));
    }
    asked.dimensions = embeddings::dimensions(&fields, &state.text)?;
    if asked.dimensions.is_some() && state.text.classifier.is_some() {
        let message = "`dimensions` is not supported by this model, which has classes";
        return Err(ApiError::field("dimensions", message));
    }
    let texts = embeddings::inputs(&fields, &state.limits, &state.text)?;
    let (id, model) = (asked.id.clone(), asked.model.clone());
    let (all, tokens) = asked.compute_all(state, fields, texts).await?;
    let (head, tail) = frame(&id, &model, tokens)?;
    let entries = all.into_iter().enumerate().map(move |(index, values)| Entry {
        index,
        object: "pooling",
        data: Vector { values, format },
    });
    Ok(list(head, entries, tail))
}

/// vLLM's word for what the model makes of a text.
pub(super) fn task_of(text: &TextModel) -> &'static str {
    if text.classifier.is_some() { "classify" } else { "embed" }
}

#[derive(Serialize)]
struct Entry {
    index: usize,
    object: &'static str,
    data: Vector,
}
