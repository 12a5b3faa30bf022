//! `GET /v1/models` and `GET /v1/models/{id}`: the model and its adapters, and which of them requests
//! name.
use std::sync::Arc;

use serde_json::{Value, json};
use shared::protocol::Adapter;

use super::error::ApiError;
use super::state::AppState;

/// The names that requests may give as `model`.
#[derive(Clone, Debug)]
pub struct Models {
    /// The model's own.
    base: Arc<str>,
    adapters: Arc<[(Arc<str>, Adapter)]>,
}

impl Models {
    /// A model and its adapters, in the order of their numbers.
    #[must_use]
    pub fn new(base: &str, adapters: &[Adapter]) -> Self {
        let named = |adapter: &Adapter| (adapter.name.as_str().into(), adapter.clone());
        Self { base: base.into(), adapters: adapters.iter().map(named).collect() }
    }

    /// The model's own name.
    #[must_use]
    pub fn base(&self) -> &Arc<str> {
        &self.base
    }

    /// Which adapter is named, 0 for the model alone; none when nothing has that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<u32> {
        let mut names = std::iter::once(&self.base).chain(self.adapters.iter().map(|(it, _)| it));
        names.position(|known| **known == *name).and_then(|at| u32::try_from(at).ok())
    }

    /// The name of an adapter, or of the model.
    #[must_use]
    pub fn name(&self, adapter: u32) -> &Arc<str> {
        let place = adapter.checked_sub(1).map(|place| place as usize);
        let found = place.and_then(|place| self.adapters.get(place));
        found.map_or(&self.base, |(name, _)| name)
    }
}

/// The list.
#[must_use]
pub fn list(state: &AppState) -> Value {
    let count = u32::try_from(state.models.adapters.len()).unwrap_or(u32::MAX);
    let cards: Vec<Value> = (0..=count).map(|adapter| card(state, adapter)).collect();
    json!({"object": "list", "data": cards})
}

/// One model.
///
/// # Errors
/// 404 for one that is not served.
pub fn get(state: &AppState, id: &str) -> Result<Value, ApiError> {
    let adapter = state.models.find(id).ok_or_else(|| ApiError::unknown_model(id))?;
    Ok(card(state, adapter))
}

/// As vLLM has it: an adapter's root is its folder, its parent the model.
fn card(state: &AppState, adapter: u32) -> Value {
    let Models { base, adapters } = &state.models;
    let place = adapter.checked_sub(1).map(|place| place as usize);
    let found = place.and_then(|place| adapters.get(place));
    let (id, root, parent) = match found {
        Some((name, adapter)) => (name, adapter.path.as_str(), Some(&**base)),
        None => (base, &**base, None),
    };
    json!({
        "id": &**id, "object": "model", "created": state.created,
        "owned_by": "tutti", "root": root, "parent": parent,
        "max_model_len": state.limits.max_model_len,
    })
}
