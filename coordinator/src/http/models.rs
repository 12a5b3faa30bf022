//! `GET /v1/models` and `GET /v1/models/{id}`: the model and its adapters, and which of them a
//! request names.
use std::sync::Arc;

use serde_json::{Value, json};
use shared::protocol::Serving;

use super::error::ApiError;
use super::state::AppState;
use crate::adapters::{AdapterUse, ServedAdapters};

/// Number of names that the error of another name shows.
const NAMES_SHOWN: usize = 8;

/// The names that requests may give as `model`.
#[derive(Clone, Debug, Default)]
pub struct Models {
    /// The model's own names. Answers use the first.
    names: Arc<[Arc<str>]>,
    /// Its folder.
    folder: Arc<str>,
    adapters: ServedAdapters,
}

impl Models {
    /// Collects the names of what is served; the adapters may change.
    #[must_use]
    pub fn of(serving: &Serving, adapters: ServedAdapters) -> Self {
        let names = [&serving.served_model_name].into_iter().chain(&serving.model_aliases);
        Self {
            names: names.map(|name| name.as_str().into()).collect(),
            folder: serving.model.as_str().into(),
            adapters,
        }
    }

    /// Returns all names.
    pub(super) fn all(&self) -> Vec<String> {
        let adapters = self.adapters.all().into_iter().map(|adapter| adapter.name);
        self.names.iter().map(|name| name.to_string()).chain(adapters).collect()
    }

    /// Returns the adapter with this name, none for the model alone; `None` if nothing has that
    /// name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<AdapterUse> {
        if self.names.iter().any(|known| **known == *name) {
            return Some(AdapterUse::default());
        }
        self.adapters.find(name)
    }

    /// The error of a name that nothing has, with some that something has.
    pub(super) fn unknown(&self, name: &str) -> ApiError {
        let names = self.all();
        let shown = names.iter().take(NAMES_SHOWN).map(|name| format!("`{name}`"));
        let mut served = shown.collect::<Vec<_>>().join(", ");
        if names.len() > NAMES_SHOWN {
            served.push_str(", ..");
        }
        ApiError::unknown_model(name).noting(&format!("; served here: {served}"))
    }

    /// Returns the name of an adapter, or of the model if there is none.
    #[must_use]
    pub fn name(&self, adapter: &AdapterUse) -> Arc<str> {
        let own = || self.names.first().cloned().unwrap_or_default();
        adapter.name().map_or_else(own, Into::into)
    }

    /// Lists everything that has a name, as vLLM does: the root is the model's or the adapter's
    /// folder, and an adapter's parent is the model.
    fn cards(&self, state: &AppState) -> Vec<Value> {
        let classes = state.text.classifier.as_ref().map(|classifier| classifier.names.len());
        let card = |id: &str, root: &str, parent: Option<&str>| {
            let mut card = json!({
                "id": id, "object": "model", "created": state.created,
                "owned_by": "tutti", "root": root, "parent": parent,
                "max_model_len": state.limits.max_model_len,
            });
            // Of a model that does something else than to generate text.
            if let Some(classes) = classes {
                card["task"] = "classify".into();
                card["num_classes"] = classes.into();
            }
            card
        };
        let models = self.names.iter().map(|name| card(name, &self.folder, None));
        let parent = self.names.first().map(|name| &**name);
        let adapters = self.adapters.all();
        let adapters = adapters.iter().map(|it| card(&it.name, &it.path, parent));
        models.chain(adapters).collect()
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
    card.ok_or_else(|| state.models.unknown(id))
}
