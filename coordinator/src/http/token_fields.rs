//! vLLM's fields of completions and chat for clients that work with tokens rather than text, such
//! as those that train a model on its answers.
use super::error::ApiError;
use super::fields::Fields;
use super::limits::Limits;

/// What a request wants to know of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenFields {
    /// The ids of the prompt's tokens and of those generated.
    pub ids: bool,
    /// In log-probabilities, tokens are told by their ids.
    pub named_by_id: bool,
    /// The log-probabilities of the prompt's tokens, with so many alternatives.
    pub prompt_logprobs: Option<u32>,
}

impl TokenFields {
    /// Reads the fields of a request whose answer is streamed, or not.
    ///
    /// # Errors
    /// 400 naming field and bound.
    pub fn read(fields: &Fields, limits: &Limits, stream: bool) -> Result<Self, ApiError> {
        let name = "prompt_logprobs";
        let prompt_logprobs = fields.count(name, 0, limits.logprobs)?;
        // As in vLLM, whose streams have no place for them.
        if stream && prompt_logprobs.is_some() {
            let message = format!("`{name}` is allowed only without `stream`");
            return Err(ApiError::field(name, message));
        }
        let named_by_id = fields.boolean("return_tokens_as_token_ids", limits.tokens_by_id)?;
        Ok(Self { ids: fields.boolean("return_token_ids", false)?, named_by_id, prompt_logprobs })
    }
}
