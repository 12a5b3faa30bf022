//! `GET /v1/models` and `GET /v1/models/{id}`.
use serde_json::{Value, json};

use super::error::ApiError;
use super::state::AppState;

/// The list.
#[must_use]
pub fn list(state: &AppState) -> Value {
    json!({"object": "list", "data": [card(state)]})
}

/// One model.
///
/// # Errors
/// 404 for another than the served one.
pub fn get(state: &AppState, id: &str) -> Result<Value, ApiError> {
    if id == &*state.model_name { Ok(card(state)) } else { Err(ApiError::unknown_model(id)) }
}

fn card(state: &AppState) -> Value {
    json!({
        "id": &*state.model_name, "object": "model", "created": state.created,
        "owned_by": "tutti", "root": &*state.model_name, "parent": null,
        "max_model_len": state.limits.max_model_len,
    })
}
