//! Requests with structured output: their grammar is compiled first, off the link's reader task, so
//! that later requests can overtake them.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shared::ids::RequestId;

use super::{Frontends, RemoteEvents};
use crate::engine::{EngineError, EventSender, GenerateRequest, TokenGuide};
use crate::guide::{Grammar, GrammarError};
use crate::text::stream::StopRules;

/// The waiting requests of one link, with the receivers of their events: a cancelled request ends
/// at once, however long its grammar takes. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Making(Arc<Mutex<HashMap<RequestId, RemoteEvents>>>);

impl Making {
    /// Compiles the request's grammar, if it has one, then passes the request to the engine.
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
        self.lock().insert(id, events);
        let making = self.clone();
        tokio::spawn(async move {
            let made = frontends.text.grammars.make(&frontends.text, &spec).await;
            // The client may have left meanwhile, so that the front end has dropped the request.
            let Some(events) = making.take(id).filter(|events| !events.is_closed()) else { return };
            match made {
                Ok(grammar) => match frontends.guided(request, &grammar) {
                    Ok(request) => frontends.enter(request, events),
                    Err(message) => {
                        let error = EngineError::Guide { message };
                        frontends.refuse(&EventSender::Remote(events), error);
                    }
                },
                Err(error) => frontends.refuse(&EventSender::Remote(events), engine_error(error)),
            }
        });
    }

    /// Removes a request; returns whether it was there.
    pub(super) fn cancel(&self, id: RequestId) -> bool {
        self.take(id).is_some()
    }

    /// The link has ended: nobody waits for its requests.
    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn take(&self, id: RequestId) -> Option<RemoteEvents> {
        self.lock().remove(&id)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, RemoteEvents>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error that is not the request's fault becomes one upon which clients retry.
fn engine_error(error: GrammarError) -> EngineError {
    match error {
        GrammarError::Refused(message) => EngineError::Guide { message },
        GrammarError::Busy => {
            EngineError::Overloaded { message: error.to_string(), retry_after_s: 1 }
        }
        GrammarError::Broke => EngineError::Broke { message: error.to_string() },
    }
}

impl Frontends {
    /// Gives each choice of the request its guide.
    fn guided(
        &self,
        mut request: Box<GenerateRequest>,
        grammar: &Arc<Grammar>,
    ) -> Result<Box<GenerateRequest>, String> {
        let rules = StopRules { keep_special: request.keep_special, ..StopRules::default() };
        let prompt = request.goes_on.then_some(&request.prompt);
        let behind_text = self.text.stream(Arc::new(rules), prompt).has_text_before();
        let guide =
            |_| Ok::<_, String>(Box::new(grammar.guide(behind_text)?) as Box<dyn TokenGuide>);
        request.guides = request.sampling.iter().map(guide).collect::<Result<_, _>>()?;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use actix_web::ResponseError;

    use super::*;
    use crate::http::error::ApiError;

    #[test]
    fn clients_of_other_processes_get_the_same_status() {
        let status = |error| ApiError::from(engine_error(error)).status_code().as_u16();
        assert_eq!(status(GrammarError::Refused("is no grammar".to_owned())), 400);
        assert_eq!(status(GrammarError::Busy), 503);
        assert_eq!(status(GrammarError::Broke), 500);
    }
}
