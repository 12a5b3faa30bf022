//! A request that is traced, from its arrival to the end of its answer; see [`crate::traces`].
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use actix_web::dev::ServiceRequest;
use actix_web::http::Method;
use shared::clock::since_1970;
use shared::protocol::{EngineError, RequestNote};

use super::params::Common;
use super::state::AppState;
use super::trace::{TraceParent, trace_state};
use crate::traces::Traces;
use crate::traces::record::{Asked, End, RequestRecord};

/// What is gathered of a request. Clones of the `Arc` around it go to all parts that know of it.
#[derive(Debug)]
pub struct RequestTrace {
    traces: Traces,
    began: Instant,
    /// `None` once it has ended.
    record: Mutex<Option<RequestRecord>>,
}

/// The paths of requests that are traced, and what they do in OpenTelemetry's terms, as far as it
/// has some.
const OPERATIONS: [(&str, &str); 13] = [
    ("/v1/completions", "text_completion"),
    ("/v1/chat/completions", "chat"),
    ("/v1/responses", "chat"),
    ("/v1/messages", "chat"),
    ("/v1/embeddings", "embeddings"),
    ("/v1/rerank", "rerank"),
    ("/v2/rerank", "rerank"),
    ("/rerank", "rerank"),
    ("/v1/score", "score"),
    ("/score", "score"),
    ("/classify", "classify"),
    ("/pooling", "pooling"),
    ("/invocations", "invocations"),
];

impl RequestTrace {
    /// Begins to trace a request, if it is one that asks the engine for something and is sampled.
    pub(super) fn begin(
        state: &AppState,
        request: &ServiceRequest,
        id: &str,
        parent: Option<&TraceParent>,
    ) -> Option<Arc<Self>> {
        let traces = state.traces.as_ref()?;
        let known = OPERATIONS.iter().find(|(route, _)| *route == request.path());
        let (route, operation) = known.filter(|_| request.method() == Method::POST)?;
        let caller = parent.map(|parent| {
            let headers = request.headers().get_all("tracestate");
            parent.caller(trace_state(headers.map(|header| header.to_str().ok())))
        });
        let place = traces.begin(caller)?;
        let record = RequestRecord::new(place, id.into(), operation, route, since_1970());
        let record = Mutex::new(Some(record));
        Some(Arc::new(Self { traces: traces.clone(), began: Instant::now(), record }))
    }

    /// A prompt runs, or tries to.
    pub fn asked(&self, state: &AppState, common: &Common, max_tokens: u32, response: &Arc<str>) {
        self.with(|record, _| {
            record.asked(|| Asked {
                model: state.models.name(&common.adapter),
                response: response.clone(),
                n: common.n,
                max_tokens,
                temperature: common.sampling.temperature,
                top_p: common.sampling.top_p,
                top_k: common.sampling.top_k,
                frequency_penalty: common.sampling.frequency_penalty,
                presence_penalty: common.sampling.presence_penalty,
                seed: common.seeded.then_some(common.sampling.seed),
                generates: common.sampling.pooling.is_none(),
            });
        });
    }

    /// The engine notes something about a prompt, which has run before if `again`.
    pub fn note(&self, note: RequestNote, again: bool) {
        self.with(|record, at| record.note(at, note, again));
    }

    /// The first token of a prompt came.
    pub fn first_token(&self) {
        self.with(|record, at| record.first_token(at));
    }

    /// A choice ended; `cached` prompt tokens were in the KV cache.
    pub fn choice_ended(&self, reason: &'static str, cached: u64) {
        self.with(|record, at| record.choice_ended(at, reason, cached));
    }

    /// The engine gave it up.
    pub fn failed(&self, error: &EngineError) {
        let (kind, is_ours) = match error {
            EngineError::QueueFull { .. } => ("queue_full", true),
            EngineError::TooLarge { .. } => ("too_large", true),
            EngineError::Unavailable { .. } => ("unavailable", true),
            EngineError::NoAdapter { .. } => ("model_not_found", false),
            EngineError::Corrupted => ("corrupted", true),
            // It may quote what was asked for.
            EngineError::Guide { .. } => ("guide", false),
            EngineError::Quarantined { .. } => ("quarantined", true),
            EngineError::ShuttingDown => ("shutting_down", true),
            EngineError::Overloaded { .. } => ("overloaded", true),
            EngineError::Broke { .. } => ("broke", true),
        };
        let message = || if is_ours { error.to_string() } else { String::new() };
        self.with(|record, _| record.failed(kind, message));
    }

    /// Its client's deadline has passed.
    pub fn expired(&self) {
        self.with(|record, _| record.failed("request_timeout", String::new));
    }

    /// It has ended: its spans are exported.
    pub(super) fn ended(&self, end: End) {
        let end = End { at: self.began.elapsed(), ..end };
        let record = self.record().take();
        if let Some(record) = record {
            self.traces.ended(record, &end);
        }
    }

    fn with(&self, change: impl FnOnce(&mut RequestRecord, Duration)) {
        let at = self.began.elapsed();
        if let Some(record) = &mut *self.record() {
            change(record, at);
        }
    }

    fn record(&self) -> MutexGuard<'_, Option<RequestRecord>> {
        // A panic elsewhere leaves a record that lacks something.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
