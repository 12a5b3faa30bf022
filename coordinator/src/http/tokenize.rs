//! `POST /tokenize` and `POST /detokenize`, as in vLLM. Work that grows with the text runs off the
//! threads that serve connections, including the answer's JSON.
use serde::Serialize;
use serde_json::{Value, json};

use super::conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::params::token_id;
use super::state::AppState;
use super::tools;
use crate::text::model::TextModel;
use crate::text::reply::Reasoning;

/// Tokenizes text or a conversation; returns JSON.
///
/// # Errors
/// 400 naming the field.
pub async fn tokenize(state: &AppState, fields: Fields) -> Result<String, ApiError> {
    let limits = state.limits.clone();
    state.check_model(&fields)?;
    let strings = fields.boolean("return_token_strs", false)?;
    let tokens = if fields.get("messages").is_some() {
        if fields.get("prompt").is_some() {
            return Err(ApiError::field("prompt", "`prompt` and `messages` cannot be combined"));
        }
        fields.refuse("chat_template")?;
        let special = fields.boolean("add_special_tokens", false)?;
        let template = state.text.template.as_ref().ok_or_else(conversation::no_template)?;
        let tools = tools::told(&fields, &limits)?;
        let conversation = conversation::read(&fields, &limits, template, tools.as_ref())?;
        let bytes = fields.bytes();
        let encode = move |text: &_| {
            conversation::encode(text, &conversation, special, None, Reasoning::Untold, false)
        };
        state.with_text(bytes, encode).await?.tokens
    } else {
        let special = fields.boolean("add_special_tokens", true)?;
        let prompt = fields.string("prompt", limits.body_bytes)?;
        let prompt = prompt.ok_or_else(|| {
            ApiError::field("prompt", "`prompt`, a string, or `messages` is required")
        })?;
        let prompt = prompt.to_owned();
        let encode = move |text: &TextModel| {
            text.encode(&prompt, special).map_err(|error| ApiError::field("prompt", error))
        };
        state.with_text(fields.bytes(), encode).await?
    };
    let max_model_len = limits.max_model_len;
    let (count, bytes) = (tokens.len(), tokens.len() * size_of::<u32>());
    let write = move |text: &TextModel| {
        let strings: Option<Vec<String>> = strings.then(|| {
            let piece = |token: &u32| text.tokenizer.id_to_token(*token).unwrap_or_default();
            tokens.iter().map(piece).collect()
        });
        let answer = Tokens { count, max_model_len, tokens: &tokens, token_strs: strings };
        serde_json::to_string(&answer).map_err(|error| ApiError::internal(error.to_string()))
    };
    state.with_text(bytes, write).await
}

/// The answer of `/tokenize`.
#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: u32,
    tokens: &'a [u32],
    token_strs: Option<Vec<String>>,
}

/// Detokenizes tokens, including special ones; returns JSON.
///
/// # Errors
/// 400 naming the field.
pub async fn detokenize(state: &AppState, fields: Fields) -> Result<String, ApiError> {
    state.check_model(&fields)?;
    let bytes = fields.bytes();
    let decode = move |text: &TextModel| {
        let list = fields.get("tokens").and_then(Value::as_array);
        let tokens: Option<Vec<u32>> =
            list.and_then(|list| list.iter().map(|id| token_id(id, text)).collect());
        let tokens = tokens.ok_or_else(|| {
            let max = text.vocab_size - 1;
            let expected = format!("`tokens` must be a list of token ids from 0 to {max}");
            ApiError::field("tokens", expected)
        })?;
        let decoded = text.tokenizer.decode(&tokens, false);
        let prompt = decoded.map_err(|error| ApiError::field("tokens", error.to_string()))?;
        Ok(json!({"prompt": prompt}).to_string())
    };
    state.with_text(bytes, decode).await
}
