//! Traces: one span per request, exported in OpenTelemetry's protocol.
//!
//! - [`settings`]: PURE: the option and OpenTelemetry's environment variables
//! - [`sampler`]: PURE: which requests are traced
//! - [`record`]: PURE: what is gathered of a request, and the spans that it becomes
//! - [`span`], [`otlp`]: PURE: spans, and their form in messages
//! - [`retry`]: PURE: what a collector's answers mean
//! - `exporter`: the thread that sends them
//!
//! A request never waits for any of it: its spans go into a bounded queue, or are dropped and
//! counted where that is full.
mod exporter;
pub mod otlp;
pub mod record;
pub mod retry;
pub mod sampler;
pub mod settings;
pub mod span;

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shared::mix::split_mix;
use ureq::Agent;
use ureq::tls::TlsConfig;

use self::exporter::Exporter;
use self::otlp::Envelope;
use self::record::{End, Place, RequestRecord};
use self::sampler::Sampler;
use self::settings::Settings;
use self::span::{SpanId, TraceId};
use crate::metrics::FrontendStats;

/// Makes the client that asks a collector; over https with `tls`.
#[must_use]
pub fn client(settings: &Settings, tls: Option<TlsConfig>) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        // Headers with credentials are for the collector and for nobody else.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("tutti/", env!("CARGO_PKG_VERSION")))
        .timeout_global(Some(settings.timeout));
    match tls {
        Some(tls) => config.tls_config(tls).build().into(),
        None => config.build().into(),
    }
}

/// Traces requests. Clones share everything.
#[derive(Clone, Debug)]
pub struct Traces {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    sampler: Sampler,
    ids: Ids,
    exporter: Exporter,
}

/// The caller's trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The trace.
    pub trace: TraceId,
    /// The caller's span in it.
    pub span: SpanId,
    /// Whether it is sampled.
    pub sampled: bool,
    /// What other systems noted of the trace.
    pub state: Arc<str>,
}

impl Traces {
    /// Starts the thread that exports to a collector. `agent` is the client to ask it with;
    /// `process` describes this process where the settings do not.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(
        settings: &Settings,
        agent: Agent,
        process: Vec<(String, String)>,
    ) -> io::Result<Self> {
        let mut resource = process;
        resource.retain(|(key, _)| settings.resource.iter().all(|(given, _)| given != key));
        resource.extend(settings.resource.iter().cloned());
        let exporter = Exporter::start(settings, agent, Envelope::new(&resource))?;
        Ok(Self {
            shared: Arc::new(Shared { sampler: settings.sampler, ids: Ids::default(), exporter }),
        })
    }

    /// Begins to trace a request, if it is to be: returns its place in its caller's trace, or in
    /// one of its own.
    #[must_use]
    pub fn begin(&self, caller: Option<Caller>) -> Option<Place> {
        let Shared { sampler, ids, .. } = &*self.shared;
        let trace = caller.as_ref().map_or_else(|| ids.trace(), |caller| caller.trace);
        let parent = caller.as_ref().map(|caller| caller.sampled);
        sampler.samples(&trace, parent).then(|| Place {
            trace,
            span: ids.span(),
            parent: caller.as_ref().map(|caller| caller.span),
            state: caller.map(|caller| caller.state).unwrap_or_default(),
        })
    }

    /// Exports a request that has ended, without waiting for anything.
    pub fn ended(&self, record: RequestRecord, end: &End) {
        let spans = record.spans(end, || self.shared.ids.span());
        self.shared.exporter.offer(spans);
    }

    /// Sends what waits, for so long at most: the process is about to end.
    pub async fn flush(&self, patience: Duration) {
        self.shared.exporter.flush(patience).await;
    }

    /// Sets where exported and dropped spans are counted.
    pub(crate) fn count_in(&self, stats: &FrontendStats) {
        self.shared.exporter.count_in(stats);
    }
}

/// Draws ids: a sequence from a random start, in which none is ever zero.
#[derive(Debug)]
struct Ids {
    seeds: [u64; 2],
    next: AtomicU64,
}

impl Default for Ids {
    fn default() -> Self {
        let random = RandomState::new();
        Self { seeds: [random.hash_one(1), random.hash_one(2)], next: AtomicU64::new(0) }
    }
}

impl Ids {
    fn draw(&self, seed: u64) -> u64 {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        split_mix(seed, n).max(1)
    }

    fn span(&self) -> SpanId {
        self.draw(self.seeds[0]).to_be_bytes()
    }

    fn trace(&self) -> TraceId {
        let high = self.draw(self.seeds[0]).to_be_bytes();
        let low = self.draw(self.seeds[1]).to_be_bytes();
        let mut trace = TraceId::default();
        trace[..8].copy_from_slice(&high);
        trace[8..].copy_from_slice(&low);
        trace
    }
}
