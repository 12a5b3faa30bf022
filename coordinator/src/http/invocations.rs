//! `POST /invocations`, the one path that Amazon SageMaker sends requests to, as in vLLM: the
//! fields tell which API they are of.
use actix_web::HttpResponse;

use super::error::ApiError;
use super::fields::Fields;
use super::state::AppState;
use super::{chat, classes, completions, embeddings, scores};

/// Answers a request of any of these APIs.
///
/// # Errors
/// Those of the API, and 400 if the fields are those of none.
pub(super) async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let has = |name: &str| fields.get(name).is_some();
    if has("messages") {
        chat::respond(state, fields).await
    } else if has("prompt") {
        completions::respond(state, fields).await
    } else if has("input") && state.text.classifier.is_some() {
        classes::respond(state, fields).await
    } else if has("input") {
        embeddings::respond(state, fields).await
    } else if has("query") {
        scores::rerank(state, fields).await
    } else if scores::PAIRS.iter().any(|(left, right)| has(left) || has(right)) {
        scores::score(state, fields).await
    } else {
        let message = "`messages` (chat), `prompt` (completions), `input` (embeddings, or \
                       classes), `query` (rerank) or `text_1` (score) is required";
        Err(ApiError::field("messages", message))
    }
}
