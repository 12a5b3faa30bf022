//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them: the answer
//! comes when the change is in force.
//!
//! They are for operators, who authenticate as for `/admin`; with
//! `--allow-runtime-lora-updating`, also for all who may use the API.
use actix_web::http::header::ContentType;
use actix_web::{HttpRequest, HttpResponse};
use shared::protocol::lora::{ADAPTER_NAME_MAX, ADAPTER_PATH_MAX};
use shared::protocol::{AdapterCommand, AdapterError};

use super::admin;
use super::error::ApiError;
use super::fields::Fields;
use super::state::AppState;
use crate::adapters::AdapterChanges;

/// The paths, which operators use without a key, and others perhaps with one: see [`allowed`].
pub(super) const PATHS: [&str; 2] = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

/// Returns who carries out changes, if this request may ask for them.
///
/// # Errors
/// 401 or 403.
pub(super) fn allowed<'a>(
    state: &'a AppState,
    request: &HttpRequest,
) -> Result<&'a AdapterChanges, ApiError> {
    let Some(changes) = &state.adapter_changes else {
        return Err(ApiError::unknown_path(request.method().as_str(), request.path()));
    };
    let operates = admin::operates(state.operators.as_ref(), request);
    if operates.is_ok() {
        return Ok(changes);
    }
    match state.runtime_adapters {
        true if state.keys.knows(request.headers()) => Ok(changes),
        true => Err(ApiError::unknown_key()),
        false => operates.map(|()| changes).map_err(|error| {
            error.noting("; or start the server with --allow-runtime-lora-updating")
        }),
    }
}

/// Loads an adapter.
///
/// # Errors
/// 400 naming what is wrong, 503 if it may be possible later.
pub(super) async fn load(
    changes: &AdapterChanges,
    fields: &Fields,
) -> Result<HttpResponse, ApiError> {
    let name = fields.string("lora_name", ADAPTER_NAME_MAX)?.filter(|name| !name.is_empty());
    let path = fields.string("lora_path", ADAPTER_PATH_MAX)?.filter(|path| !path.is_empty());
    let (Some(name), Some(path)) = (name, path) else {
        let missing = if name.is_none() { "lora_name" } else { "lora_path" };
        let message = "Both 'lora_name' and 'lora_path' must be provided.";
        return Err(ApiError::field(missing, message));
    };
    let replace = fields.boolean("load_inplace", false)?;
    let (name, path) = (name.to_owned(), path.to_owned());
    let success = format!("Success: LoRA adapter '{name}' added successfully.");
    change(changes, AdapterCommand::Load { name, path, replace }, success).await
}

/// Unloads an adapter.
///
/// # Errors
/// 404 if there is none of this name.
pub(super) async fn unload(
    changes: &AdapterChanges,
    fields: &Fields,
) -> Result<HttpResponse, ApiError> {
    let name = fields.string("lora_name", ADAPTER_NAME_MAX)?.filter(|name| !name.is_empty());
    let Some(name) = name else {
        let message = "'lora_name' needs to be provided to unload a LoRA adapter.";
        return Err(ApiError::field("lora_name", message));
    };
    let success = format!("Success: LoRA adapter '{name}' removed successfully.");
    change(changes, AdapterCommand::Unload { name: name.to_owned() }, success).await
}

async fn change(
    changes: &AdapterChanges,
    command: AdapterCommand,
    success: String,
) -> Result<HttpResponse, ApiError> {
    changes.ask(command).await.map_err(|error| {
        let message = error.to_string();
        match error {
            AdapterError::Unknown(_) => ApiError::not_here(&message),
            AdapterError::Taken(_) => ApiError::field("lora_name", message),
            AdapterError::Wrong(_) => ApiError::body(message),
            AdapterError::NotNow(_) => ApiError::overloaded(message),
        }
    })?;
    Ok(HttpResponse::Ok().content_type(ContentType::plaintext()).body(success))
}
