//! `POST /reset_prefix_cache`: empties the prefix cache, as vLLM's path of this name.
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::json;

use super::super::error::ApiError;
use super::super::state::AppState;
use super::{allowed, gone};
use crate::cluster::actor::ResetPrefixCache;

/// What vLLM can do besides, and this server cannot: requests may only say that they do not want
/// it.
pub(in super::super) const NEVER: [&str; 2] = ["reset_running_requests", "reset_external"];

pub(super) async fn reset(
    state: Data<AppState>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let admin = allowed(&state, &request)?;
    check(request.query_string())?;
    admin.cluster.send(ResetPrefixCache).await.map_err(gone)?;
    Ok(HttpResponse::Ok().json(json!({"success": true})))
}

/// Checks that a query asks for nothing more than this.
fn check(query: &str) -> Result<(), ApiError> {
    let asked = web::Query::<Vec<(String, String)>>::from_query(query)
        .map_err(|error| ApiError::field("query", error.to_string()))?;
    for (name, value) in asked.iter() {
        if !NEVER.contains(&name.as_str()) {
            let name: String = name.chars().take(64).collect();
            let message = format!("`{name}` is unknown here: there are {}", NEVER.join(", "));
            return Err(ApiError::field(&name, message));
        }
        // As vLLM reads it: Python's clients write `False`.
        match value.to_ascii_lowercase().as_str() {
            "false" | "0" | "f" | "n" | "no" | "off" => {}
            "true" | "1" | "t" | "y" | "yes" | "on" => {
                return Err(ApiError::field(name, format!("`{name}` is not supported")));
            }
            _ => {
                return Err(ApiError::field(name, format!("`{name}` must be true or false")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_vllm_can_do_besides_is_refused_however_it_is_written() {
        for no in ["false", "False", "0", "f", "N", "no", "OFF"] {
            let query = format!("reset_running_requests={no}&reset_external={no}");
            assert!(check(&query).is_ok(), "{no}");
        }
        assert!(check("").is_ok());
        for (query, says) in [
            ("reset_running_requests=True", "`reset_running_requests` is not supported"),
            ("reset_external=1", "`reset_external` is not supported"),
            ("reset_external=maybe", "`reset_external` must be true or false"),
            ("reset_external=", "`reset_external` must be true or false"),
            ("reset_all=false", "`reset_all` is unknown"),
        ] {
            let error = check(query).unwrap_err().to_string();
            assert!(error.contains(says), "{query}: {error}");
        }
    }
}
