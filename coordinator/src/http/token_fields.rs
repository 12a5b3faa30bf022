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
}

impl TokenFields {
    /// Reads the fields.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn read(fields: &Fields, limits: &Limits) -> Result<Self, ApiError> {
        let named_by_id = fields.boolean("return_tokens_as_token_ids", limits.tokens_by_id)?;
        Ok(Self { ids: fields.boolean("return_token_ids", false)?, named_by_id })
    }
}
