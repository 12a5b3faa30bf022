//! Fields common to all events and to the answer of one request.
//!
//! Events are written straight to the bytes that are sent: at many tokens a second, building a tree
//! of JSON values for each would cost more than all other work per token.
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use shared::clock::since_1970;

use super::prompt_logprobs::PromptLogprobs;
use super::state::AppState;
use crate::adapters::AdapterUse;

/// The fields that stay the same while a request is answered.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: Arc<str>,
    object: &'static str,
    /// When the request arrived; equal in all events, as in OpenAI's API.
    created: u64,
    model: Arc<str>,
}

/// An event or an answer, with the fields in the order of OpenAI's API.
#[derive(Debug, Serialize)]
pub struct Answer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    /// Always null.
    system_fingerprint: (),
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<&'a PromptLogprobs>,
}

impl<'a, C> Answer<'a, C> {
    /// Adds what the client wants to know of the prompt.
    #[must_use]
    pub fn of_prompt(self, ids: Option<&'a [u32]>, logprobs: Option<&'a PromptLogprobs>) -> Self {
        Self { prompt_token_ids: ids, prompt_logprobs: logprobs, ..self }
    }
}

impl Envelope {
    /// Makes the envelope of the answer with this id, for the model or one of its adapters.
    #[must_use]
    pub fn new(state: &AppState, adapter: &AdapterUse, id: Arc<str>, object: &'static str) -> Self {
        let model = state.models.name(adapter);
        Self { id, object, created: since_1970().as_secs(), model }
    }

    /// Adds choices; without `usage` the field is left out, which differs from null.
    pub fn with<'a, C: Serialize>(
        &'a self,
        choices: &'a [C],
        usage: Option<&'a Value>,
    ) -> Answer<'a, C> {
        Answer {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            system_fingerprint: (),
            choices,
            usage,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}
