//! `GET /v1/models` and `GET /v1/models/{id}`: the model and its adapters, and which of them a
//! request names.
use std::sync::Arc;

use serde_json::{Value, json};
use shared::protocol::{Adapter, Serving};

use super::error::ApiError;
use super::state::AppState;

/// The names that requests may give as `model`.
#[derive(Clone, Debug, Default)]
pub struct Models {
    /// The model's own names. Answers use the first.
    names: Arc<[Arc<str>]>,
    /// Its folder.
    folder: Arc<str>,
    adapters: Arc<[(Arc<str>, Adapter)]>,
}

impl Models {
    /// Collects the names of what is served.
    #[must_use]
    pub fn of(serving: &Serving) -> Self {
        let names = [&serving.served_model_name].into_iter().chain(&serving.model_aliases);
        let named = |adapter: &Adapter| (adapter.name.as_str().into(), adapter.clone());
        Self {
            names: names.map(|name| name.as_str().into()).collect(),
            folder: serving.model.as_str().into(),
            adapters: serving.adapters.iter().map(named).collect(),
        }
    }

    /// Returns all names.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<str>> {
        self.names.iter().chain(self.adapters.iter().map(|(name, _)| name))
    }

    /// Returns the adapter with this name, 0 for the model alone; `None` if nothing has that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<u32> {
        if self.names.iter().any(|known| **known == *name) {
            return Some(0);
        }
        let place = self.adapters.iter().position(|(known, _)| **known == *name)?;
        u32::try_from(place + 1).ok()
    }

    /// Returns the name of an adapter, or of the model if it is 0.
    #[must_use]
    pub fn name(&self, adapter: u32) -> Arc<str> {
        let place = adapter.checked_sub(1).map(|place| place as usize);
        let found = place.and_then(|place| self.adapters.get(place));
        found.map(|(name, _)| name).or(self.names.first()).cloned().unwrap_or_default()
    }

    /// Lists everything that has a name, as vLLM does: the root is the model's or the adapter's
    /// folder, and an adapter's parent is the model.
    fn cards(&self, state: &AppState) -> Vec<Value> {
        let card = |id: &str, root: &str, parent: Option<&str>| {
            json!({
                "id": id, "object": "model", "created": state.created,
                "owned_by": "tutti", "root": root, "parent": parent,
                "max_model_len": state.limits.max_model_len,
            })
        };
        let models = self.names.iter().map(|name| card(name, &self.folder, None));
        let parent = self.names.first().map(|name| &**name);
        let adapters = self.adapters.iter();
        models.chain(adapters.map(|(name, it)| card(name, &it.path, parent))).collect()
    }
}

/// Returns the list.
#[must_use]
pub fn list(state: &AppState) -> Value {
    json!({"object": "list", "data": state.models.cards(state)})
}

/// Returns one model.
///
/// # Errors
/// 404 if it is not served.
pub fn get(state: &AppState, id: &str) -> Result<Value, ApiError> {
    let card = state.models.cards(state).into_iter().find(|card| card["id"] == id);
    card.ok_or_else(|| ApiError::unknown_model(id))
}
