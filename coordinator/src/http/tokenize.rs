//! `POST /tokenize` and `POST /detokenize`, as vLLM has them.
use serde_json::{Value, json};

use super::conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::params::token_id;
use super::state::AppState;
use super::tools;

/// Text or a conversation to tokens.
///
/// # Errors
/// 400 naming the field.
pub async fn tokenize(state: &AppState, fields: &Fields) -> Result<Value, ApiError> {
    let limits = state.limits.clone();
    state.check_model(fields)?;
    let strings = fields.boolean("return_token_strs", false)?;
    let tokens = if fields.get("messages").is_some() {
        if fields.get("prompt").is_some() {
            return Err(ApiError::field("prompt", "`prompt` and `messages` exclude each other"));
        }
        fields.refuse("chat_template")?;
        let special = fields.boolean("add_special_tokens", false)?;
        let template = state.text.template.as_ref().ok_or_else(conversation::no_template)?;
        let tools = tools::told(fields, &limits)?;
        let conversation = conversation::read(fields, &limits, template, tools.as_ref())?;
        let bytes = fields.bytes();
        let encode = move |text: &_| conversation::encode(text, &conversation, special, None);
        state.with_text(bytes, encode).await?.tokens
    } else {
        let special = fields.boolean("add_special_tokens", true)?;
        let prompt = fields.string("prompt", limits.body_bytes)?;
        let prompt = prompt.ok_or_else(|| {
            ApiError::field("prompt", "`prompt`, a string, or `messages` is required")
        })?;
        let prompt = prompt.to_owned();
        let encode = move |text: &crate::text::model::TextModel| {
            text.encode(&prompt, special).map_err(|error| ApiError::field("prompt", error))
        };
        state.with_text(fields.bytes(), encode).await?
    };
    let strings: Option<Vec<String>> = strings.then(|| {
        let piece = |token: &u32| state.text.tokenizer.id_to_token(*token).unwrap_or_default();
        tokens.iter().map(piece).collect()
    });
    Ok(json!({
        "count": tokens.len(), "max_model_len": limits.max_model_len, "tokens": tokens,
        "token_strs": strings,
    }))
}

/// Tokens to text, special tokens too.
///
/// # Errors
/// 400 naming the field.
pub async fn detokenize(state: &AppState, fields: &Fields) -> Result<Value, ApiError> {
    state.check_model(fields)?;
    let list = fields.get("tokens").and_then(Value::as_array);
    let tokens: Option<Vec<u32>> =
        list.and_then(|list| list.iter().map(|id| token_id(id, &state.text)).collect());
    let tokens = tokens.ok_or_else(|| {
        let max = state.text.vocab_size - 1;
        ApiError::field("tokens", format!("`tokens` must be a list of token ids from 0 to {max}"))
    })?;
    let decode = move |text: &crate::text::model::TextModel| {
        text.tokenizer
            .decode(&tokens, false)
            .map_err(|error| ApiError::field("tokens", error.to_string()))
    };
    Ok(json!({"prompt": state.with_text(fields.bytes(), decode).await?}))
}
