//! Requests of a link whose output must be something: a grammar is made first, off the task that
//! reads the link, so that others pass them.
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use shared::ids::RequestId;

use super::{Frontends, RemoteEvents};
use crate::engine::{EngineError, EventSender, GenerateRequest, TokenGuide};
use crate::guide::Grammar;
use crate::http::error::ApiError;

/// Those of one link. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Making(Arc<Mutex<HashSet<RequestId>>>);

impl Making {
    /// Hands the request to the engine as soon as it has its guides.
    pub(super) fn make(
        &self,
        frontends: Arc<Frontends>,
        request: Box<GenerateRequest>,
        events: RemoteEvents,
    ) {
        let Some(spec) = request.guide_spec.clone() else {
            return frontends.enter(request, events);
        };
        let id = request.id;
        self.insert(id);
        let making = self.clone();
        tokio::spawn(async move {
            let text = frontends.text.clone();
            let make = move || {
                let made = text.guides().and_then(|guides| guides.make(&spec));
                made.map_err(ApiError::body)
            };
            let made = frontends.texts.run(request_bytes(&request), make).await;
            // Its client may have left meanwhile: the front end has forgotten it.
            if making.cancel(id) {
                match made {
                    Ok(grammar) => frontends.enter(guided(request, &grammar), events),
                    Err(error) => {
                        let message = error.to_string();
                        let error = match error.is_invalid() {
                            true => EngineError::Guide { message },
                            // Too much waits.
                            false => EngineError::Unavailable { message },
                        };
                        frontends.refuse(&EventSender::Remote(events), error);
                    }
                }
            }
        });
    }

    /// Takes a request out; returns whether it was there.
    pub(super) fn cancel(&self, id: RequestId) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn insert(&self, id: RequestId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }
}

fn request_bytes(request: &GenerateRequest) -> usize {
    request.guide_spec.as_ref().map_or(0, |spec| spec.bytes())
}

fn guided(mut request: Box<GenerateRequest>, grammar: &Arc<Grammar>) -> Box<GenerateRequest> {
    let guide = |_| Box::new(grammar.guide()) as Box<dyn TokenGuide>;
    request.guides = request.sampling.iter().map(guide).collect();
    request
}
