//! PURE: what is gathered of one request, and the spans that it becomes: the request, with what
//! happened to it as events, and as its parts how long it waited, its prompt was computed and its
//! answer was generated.
//!
//! Names are vLLM's where it has some, and those of OpenTelemetry's conventions for generative AI
//! and HTTP; what only this server has begins with `tutti.`. No text of prompts or answers.
use std::sync::Arc;
use std::time::Duration;

use shared::ids::ReplicaId;
use shared::protocol::RequestNote;

use super::span::{Event, Kind, Parent, Span, SpanId, Status, TraceId, Value};

/// The request's span, by vLLM's name.
const REQUEST: &str = "llm_request";
/// Maximum number of events of a request: later ones only count.
const EVENTS_MAX: usize = 128;
/// Maximum number of reasons for which choices ended.
const REASONS_MAX: usize = 128;
/// Longest explanation of a failure, in bytes.
const MESSAGE_MAX: usize = 1024;

/// Where a request's span is in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The trace.
    pub trace: TraceId,
    /// The request's own span.
    pub span: SpanId,
    /// The caller's span.
    pub parent: Option<SpanId>,
    /// The caller's `tracestate`.
    pub state: Arc<str>,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// The model, or adapter.
    pub model: Arc<str>,
    /// The id of the response.
    pub response: Arc<str>,
    /// Choices per prompt.
    pub n: u32,
    /// Most tokens of each choice.
    pub max_tokens: u32,
    /// Sampling parameters.
    pub temperature: f32,
    /// Likewise.
    pub top_p: f32,
    /// Likewise; 0 for all tokens.
    pub top_k: u32,
    /// Likewise.
    pub frequency_penalty: f32,
    /// Likewise.
    pub presence_penalty: f32,
    /// Set if the client named it.
    pub seed: Option<u64>,
    /// Whether text is generated.
    pub generates: bool,
}

/// How a request ended.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// How long after its beginning.
    pub at: Duration,
    /// The status of its answer.
    pub status: u16,
    /// Whether all of the answer was sent.
    pub sent: bool,
    /// Tokens of the prompts and of the answer, if prompts ran.
    pub tokens: Option<(u64, u64)>,
    /// Number of the API key.
    pub key: Option<u64>,
    /// The code of the error that it was answered with.
    pub code: Option<&'static str>,
}

/// See the module's documentation. Times are since the request's beginning.
#[derive(Debug)]
pub struct RequestRecord {
    place: Place,
    /// The id that its client knows.
    request: Arc<str>,
    /// What kind of work it is.
    operation: &'static str,
    route: &'static str,
    /// When it began, since 1970.
    began: Duration,
    asked: Option<Asked>,
    /// Where it runs, or ran last, and with how many ranks.
    replica: Option<(ReplicaId, u32)>,
    first_scheduled: Option<Duration>,
    first_token: Option<Duration>,
    /// When the last choice ended.
    done: Option<Duration>,
    /// Prompt tokens that the KV cache had.
    cached: u64,
    reasons: Vec<&'static str>,
    preemptions: u64,
    /// How often its replica broke, or its coordinator.
    failovers: u64,
    drafts: (u64, u64),
    events: Vec<Event>,
    /// What kind of failure ended it, and an explanation.
    failure: Option<(&'static str, String)>,
}

impl RequestRecord {
    /// Begins with a request that arrived at `began` since 1970.
    #[must_use]
    pub fn new(
        place: Place,
        request: Arc<str>,
        operation: &'static str,
        route: &'static str,
        began: Duration,
    ) -> Self {
        Self {
            place,
            request,
            operation,
            route,
            began,
            asked: None,
            replica: None,
            first_scheduled: None,
            first_token: None,
            done: None,
            cached: 0,
            reasons: Vec::new(),
            preemptions: 0,
            failovers: 0,
            drafts: (0, 0),
            events: Vec::new(),
            failure: None,
        }
    }

    /// A prompt of it runs. Of several, the first says what is asked.
    pub fn asked(&mut self, asked: impl FnOnce() -> Asked) {
        self.asked.get_or_insert_with(asked);
    }

    /// Something happened to a prompt of it, which has run before if `again`.
    pub fn note(&mut self, at: Duration, note: RequestNote, again: bool) {
        match note {
            RequestNote::Scheduled { replica, ranks } => {
                self.replica = Some((replica, ranks));
                self.first_scheduled.get_or_insert(at);
                if again {
                    self.event(at, "resumed", &[of(replica), ("tutti.ranks", ranks.into())]);
                }
            }
            RequestNote::Preempted { replica } => {
                self.preemptions += 1;
                self.event(at, "preempted", &[of(replica)]);
            }
            RequestNote::Interrupted { replica, failed } => {
                self.failovers += u64::from(failed);
                let name = if failed { "replica_failed" } else { "replica_paused" };
                self.event(at, name, &[of(replica)]);
            }
            RequestNote::CoordinatorLost => {
                self.failovers += 1;
                self.event(at, "coordinator_lost", &[]);
            }
            RequestNote::Drafted { tokens, accepted } => {
                self.drafts.0 += tokens;
                self.drafts.1 += accepted;
            }
        }
    }

    /// Its first token came.
    pub fn first_token(&mut self, at: Duration) {
        self.first_token.get_or_insert(at);
    }

    /// A choice of it ended.
    pub fn choice_ended(&mut self, at: Duration, reason: &'static str, cached: u64) {
        self.done = Some(at);
        self.cached += cached;
        // Who asks for a vector gets it, or an error.
        let generates = self.asked.as_ref().is_none_or(|asked| asked.generates);
        if generates && self.reasons.len() < REASONS_MAX {
            self.reasons.push(reason);
        }
    }

    /// It failed. Of several failures the first counts.
    pub fn failed(&mut self, kind: &'static str, message: impl FnOnce() -> String) {
        self.failure.get_or_insert_with(|| {
            let mut message = message();
            message.truncate(message.floor_char_boundary(MESSAGE_MAX));
            (kind, message)
        });
    }

    fn event(&mut self, at: Duration, name: &'static str, attributes: &[(&'static str, Value)]) {
        if self.events.len() < EVENTS_MAX {
            let (at, attributes) = (self.began + at, attributes.to_vec());
            self.events.push(Event { at, name, attributes });
        }
    }

    /// Makes its spans, the first of which is its own; `draw` draws the ids of the others.
    #[must_use]
    pub fn spans(self, end: &End, mut draw: impl FnMut() -> SpanId) -> Vec<Span> {
        let (status, error) = self.outcome(end);
        let attributes = self.attributes(end, error);
        let Self { place, began, .. } = &self;
        let own = Span {
            trace: place.trace,
            id: place.span,
            parent: place.parent.map(|id| Parent { id, remote: true }),
            state: place.state.clone(),
            name: REQUEST,
            kind: Kind::Server,
            start: *began,
            end: *began + end.at,
            attributes,
            events: self.events.clone(),
            status,
        };
        let mut spans = vec![own];
        for (name, from, to) in self.phases(end).into_iter().flatten() {
            spans.push(Span {
                trace: place.trace,
                id: draw(),
                parent: Some(Parent { id: place.span, remote: false }),
                state: place.state.clone(),
                name,
                kind: Kind::Internal,
                start: *began + from,
                end: *began + to.max(from),
                attributes: Vec::new(),
                events: Vec::new(),
                status: Status::Unset,
            });
        }
        spans
    }

    /// The parts of its life that are known, each with its beginning and end.
    fn phases(&self, end: &End) -> [Option<(&'static str, Duration, Duration)>; 3] {
        let (scheduled, first) = (self.first_scheduled, self.first_token);
        let done = self.done.unwrap_or(end.at);
        // A phase that its request did not survive ends with it. Who has tokens did not wait all
        // the time, even if nobody noted until when.
        let waits = scheduled.is_some() || (self.asked.is_some() && first.is_none());
        [
            waits.then(|| ("queue", Duration::ZERO, scheduled.unwrap_or(end.at))),
            scheduled.map(|from| ("prefill", from, first.unwrap_or(done))),
            first.map(|from| ("decode", from, done)),
        ]
    }

    /// Returns whether it failed by the server's fault, and what kind of failure ended it, if any.
    fn outcome(&self, end: &End) -> (Status, Option<Value>) {
        let message = self.failure.as_ref().map_or("", |(_, message)| message).to_owned();
        // As for HTTP in general: a client's mistake is no failure of the server.
        let is_ours = end.status >= 500 || (self.failure.is_some() && end.status < 400);
        let status = if is_ours { Status::Error(message) } else { Status::Unset };
        let kind = match (&self.failure, end.code) {
            (Some((kind, _)), _) => Some((*kind).into()),
            (None, Some(code)) => Some(code.into()),
            (None, None) if end.status >= 400 && end.status != CLIENT_LEFT => {
                Some(end.status.to_string().as_str().into())
            }
            (None, None) => (!end.sent).then(|| "cancelled".into()),
        };
        (status, kind)
    }

    fn attributes(&self, end: &End, error: Option<Value>) -> Vec<(&'static str, Value)> {
        let mut all: Vec<(&'static str, Value)> = vec![
            ("gen_ai.operation.name", self.operation.into()),
            ("gen_ai.provider.name", "tutti".into()),
            ("http.request.method", "POST".into()),
            ("http.route", self.route.into()),
            ("http.response.status_code", u32::from(end.status).into()),
        ];
        let mut put = |name, value: Option<Value>| all.extend(value.map(|value| (name, value)));
        put("error.type", error);
        let request = self.asked.as_ref().map_or(&self.request, |asked| &asked.response);
        put("gen_ai.request.id", Some(request.clone().into()));
        if let Some(asked) = &self.asked {
            put("gen_ai.response.id", Some(asked.response.clone().into()));
            put("gen_ai.request.model", Some(asked.model.clone().into()));
            put("gen_ai.response.model", Some(asked.model.clone().into()));
            if asked.generates {
                put("gen_ai.request.n", Some(asked.n.into()));
                put("gen_ai.request.choice.count", (asked.n > 1).then(|| asked.n.into()));
                put("gen_ai.request.max_tokens", Some(asked.max_tokens.into()));
                put("gen_ai.request.temperature", Some(asked.temperature.into()));
                put("gen_ai.request.top_p", Some(asked.top_p.into()));
                put("gen_ai.request.top_k", (asked.top_k > 0).then(|| asked.top_k.into()));
                let penalty = |penalty: f32| (penalty != 0.0).then(|| penalty.into());
                put("gen_ai.request.frequency_penalty", penalty(asked.frequency_penalty));
                put("gen_ai.request.presence_penalty", penalty(asked.presence_penalty));
                let seed = asked.seed.map(|seed| Value::Int(seed.cast_signed()));
                put("gen_ai.request.seed", seed);
            }
        }
        if let Some((prompt, output)) = end.tokens {
            put("gen_ai.usage.prompt_tokens", Some(prompt.into()));
            put("gen_ai.usage.completion_tokens", Some(output.into()));
            put("gen_ai.usage.input_tokens", Some(prompt.into()));
            put("gen_ai.usage.output_tokens", Some(output.into()));
            put("gen_ai.usage.cache_read.input_tokens", Some(self.cached.into()));
        }
        let reasons = (!self.reasons.is_empty()).then(|| Value::Texts(self.reasons.clone()));
        put("gen_ai.response.finish_reasons", reasons);
        let (scheduled, first) = (self.first_scheduled, self.first_token);
        let since =
            |to: Option<Duration>, from: Option<Duration>| Some(to?.saturating_sub(from?).into());
        put("gen_ai.latency.e2e", Some(end.at.into()));
        put("gen_ai.latency.time_in_queue", scheduled.map(Into::into));
        put("gen_ai.latency.time_to_first_token", first.map(Into::into));
        put("gen_ai.latency.time_in_model_prefill", since(first, scheduled));
        put("gen_ai.latency.time_in_model_decode", since(self.done, first));
        put("gen_ai.latency.time_in_model_inference", since(self.done, scheduled));
        if let Some((replica, ranks)) = self.replica {
            put("tutti.replica", Some(replica.0.into()));
            put("tutti.ranks", Some(ranks.into()));
            put("tutti.preemptions", Some(self.preemptions.into()));
            put("tutti.failovers", Some(self.failovers.into()));
        }
        if self.drafts.0 > 0 {
            put("tutti.drafts.tokens", Some(self.drafts.0.into()));
            put("tutti.drafts.accepted", Some(self.drafts.1.into()));
        }
        put("tutti.api_key", end.key.map(Into::into));
        all
    }
}

/// Status of a request whose client left before there was one.
pub const CLIENT_LEFT: u16 = 499;

/// The attribute that names a replica.
fn of(replica: ReplicaId) -> (&'static str, Value) {
    ("tutti.replica", replica.0.into())
}

#[cfg(test)]
mod tests;
