//! What all events and the answer of one request have in common.
//!
//! An event is written straight into the bytes that travel: at many tokens a second a tree of JSON
//! values for each costs more than everything else that is done for a token.
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use shared::clock::since_1970;

use super::state::AppState;

/// The fields that do not change while a request is answered.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: Arc<str>,
    object: &'static str,
    /// When the request was taken: equal in all events, as in OpenAI's API.
    created: u64,
    model: Arc<str>,
}

/// An event or an answer, in the order in which OpenAI's API has its fields.
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
}

impl Envelope {
    /// Of the request whose answer has this id, for the model or one of its adapters.
    #[must_use]
    pub fn new(state: &AppState, adapter: u32, id: Arc<str>, object: &'static str) -> Self {
        let model = state.models.name(adapter);
        Self { id, object, created: since_1970().as_secs(), model }
    }

    /// With choices; `usage` is left out where there is none, which is not the same as null.
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
        }
    }
}
