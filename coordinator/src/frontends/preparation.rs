//! Requests that need something made before the engine gets them: the grammar of structured output,
//! guides and, if they are resumed, the state of their stop checks and guides. This happens off the
//! link's reader task, so that later requests can overtake them.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shared::ids::RequestId;
use tokio::sync::Semaphore;

use super::resume::resume;
use super::{Frontends, RemoteEvents};
use crate::engine::{EngineError, EventSender, GenerateRequest, TokenGuide, retry_after_seconds};
use crate::guide::{self, Grammar, GrammarError};
use crate::text::stream::StopRules;

/// Maximum number of a link's requests whose accepted tokens are replayed at a time: there are
/// thousands after a change of coordinators, and the cores are needed for other work.
const REPLAYED_MAX: usize = 2;
/// Maximum number of a link's resumed requests that wait for their grammars at a time: the compiler
/// takes a bounded number, of which new requests need some.
const COMPILED_MAX: usize = 64;
/// Up to this many end tokens are compared with what was accepted in no time.
const END_TOKENS_FEW: usize = 64;
/// Pause before a resumed request retries a grammar that could not be made for want of room.
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// The waiting requests of one link, with the receivers of their events: a cancelled request ends
/// at once, however long its grammar takes. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingRequests {
    waiting: Arc<Mutex<HashMap<RequestId, RemoteEvents>>>,
    pub(super) turns: Arc<Turns>,
}

/// Bounds what is done at a time for resumed requests. A turn is held only while its work is done:
/// a grammar can take a minute, and most streams need none.
#[derive(Debug)]
pub(super) struct Turns {
    pub(super) compiling: Semaphore,
    pub(super) replaying: Semaphore,
}

impl Default for Turns {
    fn default() -> Self {
        let (compiling, replaying) = (Semaphore::new(COMPILED_MAX), Semaphore::new(REPLAYED_MAX));
        Self { compiling, replaying }
    }
}

/// What a request is told whose client has left: nobody hears it.
fn unwanted() -> EngineError {
    EngineError::Broke { message: "nobody waits for it any more".to_owned() }
}

impl PendingRequests {
    /// Whether something must be made for a request first.
    pub(super) fn is_needed_for(request: &GenerateRequest) -> bool {
        request.is_guided() || request.resumed.is_some()
    }

    /// Makes what the request needs, then passes it to the engine.
    pub(super) fn prepare(
        &self,
        frontends: Arc<Frontends>,
        request: Box<GenerateRequest>,
        events: RemoteEvents,
    ) {
        let (id, goes_on) = (request.id, request.resumed.is_some());
        self.lock().insert(id, events);
        let pending = self.clone();
        tokio::spawn(async move {
            let is_wanted = || pending.has(id);
            let made = frontends.prepare(request, &pending.turns, is_wanted).await;
            // The client may have left meanwhile, so that the front end has dropped the request.
            let Some(events) = pending.take(id).filter(|events| !events.is_closed()) else {
                return;
            };
            match made {
                // Its client has part of the answer: it must not fail because of momentary load.
                Ok(request) if goes_on => frontends.submit_when_room(request, events).await,
                Ok(request) => frontends.submit_to_engine(request, events),
                Err(error) => frontends.refuse(&EventSender::Remote(events), error),
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

    fn has(&self, id: RequestId) -> bool {
        self.lock().contains_key(&id)
    }

    fn take(&self, id: RequestId) -> Option<RemoteEvents> {
        self.lock().remove(&id)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, RemoteEvents>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maps the error; one that is not the request's fault makes clients retry.
fn engine_error(id: RequestId, error: GrammarError) -> EngineError {
    match error {
        GrammarError::Refused(message) => EngineError::Guide { message },
        GrammarError::Busy => EngineError::Overloaded {
            message: error.to_string(),
            retry_after_s: retry_after_seconds(id),
        },
        GrammarError::Broke => EngineError::Broke { message: error.to_string() },
    }
}

impl Frontends {
    /// Returns the request with everything it needs. A resumed request waits while too much is
    /// being made for others, as long as it `is_wanted`.
    pub(super) async fn prepare(
        self: &Arc<Self>,
        mut request: Box<GenerateRequest>,
        turns: &Turns,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Box<GenerateRequest>, EngineError> {
        let goes_on = request.resumed.is_some();
        let grammar = match request.guide_spec.clone() {
            Some(spec) => {
                let _turn = if goes_on { Some(turns.compiling.acquire().await) } else { None };
                let grammar = loop {
                    // Its client may have left while it waited.
                    if goes_on && !is_wanted() {
                        return Err(unwanted());
                    }
                    let made = self.text.grammars.compile(&self.text, &spec).await;
                    if !goes_on || !matches!(made, Err(GrammarError::Busy)) {
                        break made;
                    }
                    tokio::time::sleep(BUSY_PAUSE).await;
                };
                Some(grammar.map_err(|error| engine_error(request.id, error))?)
            }
            None => None,
        };
        let guides = self.guides(&request, grammar.as_ref());
        let guides = guides.map_err(|message| EngineError::Guide { message })?;
        if !goes_on {
            request.guides = guides;
            return Ok(request);
        }
        let max = self.serving.max_model_len;
        let few = request.end_tokens.len() <= END_TOKENS_FEW;
        if guides.is_empty() && request.stop_checks.is_empty() && few {
            resume(&mut request, guides, max)?;
            return Ok(request);
        }
        let _turn = turns.replaying.acquire().await;
        if !is_wanted() {
            return Err(unwanted());
        }
        // Detokenizes up to a whole context; must not block other tasks.
        let resumed = tokio::task::spawn_blocking(move || {
            resume(&mut request, guides, max)?;
            Ok(request)
        });
        let message = "resuming from the accepted tokens was interrupted";
        let broke = |_| Err(EngineError::Broke { message: message.to_owned() });
        resumed.await.unwrap_or_else(broke)
    }

    /// Makes a guide for each choice that is not over, if the request is guided.
    fn guides(
        &self,
        request: &GenerateRequest,
        grammar: Option<&Arc<Grammar>>,
    ) -> Result<Vec<Box<dyn TokenGuide>>, String> {
        let (choices, thinking) = (request.sampling.len(), request.thinking.as_ref());
        let bad_words = request.bad_words.as_ref().map(|words| (words, self.text.vocab_size));
        if grammar.is_none() {
            // Only grammars ask what text precedes, for which that has to be decoded.
            return guide::guides(choices, None, thinking, bad_words, false);
        }
        let rules = StopRules { keep_special: request.keep_special, ..StopRules::default() };
        let prompt = request.goes_on.then_some(&request.prompt);
        let behind_text = self.text.stream(Arc::new(rules), prompt).has_text_before();
        guide::guides(choices, grammar, thinking, bad_words, behind_text)
    }
}

#[cfg(test)]
mod tests {
    use actix_web::ResponseError;

    use super::*;
    use crate::http::error::ApiError;

    #[test]
    fn clients_of_other_processes_get_the_same_status() {
        let status =
            |error| ApiError::from(engine_error(RequestId(1), error)).status_code().as_u16();
        assert_eq!(status(GrammarError::Refused("is not a grammar".to_owned())), 400);
        assert_eq!(status(GrammarError::Busy), 503);
        assert_eq!(status(GrammarError::Broke), 500);
    }
}
