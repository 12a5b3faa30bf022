//! What a front end counts: its HTTP requests, and those it refuses itself.
//!
//! The coordinator's own front end and those in other processes count alike, each under its slot;
//! the totals are their sum. What the engine does with a request is counted by the coordinator,
//! wherever the request came from.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shared::metrics::labels::{
    ExpiryReason, LabelValue, Method, RejectReason, ReloadOutcome, SecretFile, SpanLoss,
};
use shared::metrics::local::PerValue;
use shared::metrics::{Counter, Histogram, LocalStats, PartialSnapshot, catalogue};

use super::up_down_gauge::UpDownGauge;

/// Routes of requests for the engine, and their usual statuses. These series exist from the start;
/// otherwise `increase()` would miss the first event of each.
pub(crate) const USUAL_ROUTES: [&str; 13] = [
    "/classify",
    "/invocations",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v2/rerank",
];
const USUAL_STATUSES: [u16; 8] = [200, 400, 413, 429, 499, 500, 503, 504];
/// The same where 503 and a full queue are 529, which leaves 429 for an API key at its limit.
const MESSAGES_STATUSES: [u16; 8] = [200, 400, 413, 429, 499, 500, 504, 529];

/// The statuses of `route` whose series exist from the start.
fn usual_statuses(route: &str) -> [u16; 8] {
    if route == "/v1/messages" { MESSAGES_STATUSES } else { USUAL_STATUSES }
}

/// A front end's cells. Clones share them.
#[derive(Clone, Debug)]
pub struct FrontendStats {
    cells: Arc<Mutex<Cells>>,
}

#[derive(Debug)]
struct Cells {
    stats: LocalStats,
    /// Number of reports taken.
    reports: u64,
    rejected: PerValue<Counter>,
    expired: PerValue<Counter>,
    connections_refused: Counter,
    reloads: BTreeMap<(SecretFile, ReloadOutcome), Counter>,
    spans_exported: Counter,
    spans_dropped: PerValue<Counter>,
    in_flight: UpDownGauge,
    /// The route is the pattern from our own route table, never the requested path, so that clients
    /// cannot create series.
    requests: BTreeMap<(&'static str, Method, u16), Counter>,
    durations: BTreeMap<(&'static str, Method), Histogram>,
}

fn reloads(stats: &mut LocalStats) -> BTreeMap<(SecretFile, ReloadOutcome), Counter> {
    let all = SecretFile::ALL
        .iter()
        .flat_map(|file| ReloadOutcome::ALL.iter().map(|outcome| (*file, *outcome)));
    all.map(|(file, outcome)| {
        let labels = [file.as_str(), outcome.as_str()];
        ((file, outcome), stats.counter(catalogue::FILE_RELOADS, labels))
    })
    .collect()
}

impl FrontendStats {
    /// Cells at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut stats = LocalStats::new();
        let in_flight = stats.gauge(catalogue::HTTP_REQUESTS_IN_FLIGHT, []);
        let (mut requests, mut durations) = (BTreeMap::new(), BTreeMap::new());
        for route in USUAL_ROUTES {
            let post = Method::Post;
            for status in usual_statuses(route) {
                let labels = [post.as_str(), route, &status.to_string()];
                let counter = stats.counter(catalogue::HTTP_REQUESTS, labels);
                requests.insert((route, post, status), counter);
            }
            let labels = [post.as_str(), route];
            let histogram = stats.histogram(catalogue::HTTP_REQUEST_DURATION, labels);
            durations.insert((route, post), histogram);
        }
        let cells = Cells {
            reports: 0,
            rejected: PerValue::new::<RejectReason>(|reason| {
                stats.counter(catalogue::REQUESTS_REJECTED, [reason])
            }),
            expired: PerValue::new::<ExpiryReason>(|reason| {
                stats.counter(catalogue::REQUESTS_EXPIRED, [reason])
            }),
            connections_refused: stats.counter(catalogue::HTTP_CONNECTIONS_REFUSED, []),
            reloads: reloads(&mut stats),
            spans_exported: stats.counter(catalogue::TRACE_SPANS_EXPORTED, []),
            spans_dropped: PerValue::new::<SpanLoss>(|reason| {
                stats.counter(catalogue::TRACE_SPANS_DROPPED, [reason])
            }),
            in_flight: UpDownGauge::permanent(&mut stats, in_flight),
            requests,
            durations,
            stats,
        };
        Self { cells: Arc::new(Mutex::new(cells)) }
    }

    /// An HTTP request came in. Pair it with [`FrontendStats::http_finished`], however it ends.
    pub fn http_started(&self) {
        let Cells { stats, in_flight, .. } = &mut *self.cells();
        in_flight.up(stats);
    }

    /// The last byte of an answer was handed over, or the client left.
    pub fn http_finished(
        &self,
        route: &'static str,
        method: Method,
        status: u16,
        duration: Duration,
    ) {
        let Cells { stats, in_flight, requests, durations, .. } = &mut *self.cells();
        in_flight.down(stats);
        let requests = *requests.entry((route, method, status)).or_insert_with(|| {
            let status = status.to_string();
            stats.counter(catalogue::HTTP_REQUESTS, [method.as_str(), route, &status])
        });
        let durations = *durations.entry((route, method)).or_insert_with(|| {
            stats.histogram(catalogue::HTTP_REQUEST_DURATION, [method.as_str(), route])
        });
        stats.add(requests, 1);
        stats.observe_duration(durations, duration);
    }

    /// A request was refused before it reached the engine.
    pub fn rejected(&self, reason: RejectReason) {
        let Cells { stats, rejected, .. } = &mut *self.cells();
        let counter = rejected.get(reason);
        stats.add(counter, 1);
    }

    /// An accepted request was given up because its time had expired.
    pub fn expired(&self, reason: ExpiryReason) {
        let Cells { stats, expired, .. } = &mut *self.cells();
        stats.add(expired.get(reason), 1);
    }

    /// A connection was closed at once because its address has its share of them.
    pub fn connection_refused(&self) {
        let Cells { stats, connections_refused, .. } = &mut *self.cells();
        stats.add(*connections_refused, 1);
    }

    /// A changed file was read again; `usable` tells whether its contents can be used.
    pub fn reloaded(&self, file: SecretFile, usable: bool) {
        let outcome = if usable { ReloadOutcome::Ok } else { ReloadOutcome::Failed };
        let Cells { stats, reloads, .. } = &mut *self.cells();
        if let Some(counter) = reloads.get(&(file, outcome)) {
            stats.add(*counter, 1);
        }
    }

    /// The collector of traces took spans.
    pub fn spans_exported(&self, spans: u64) {
        let Cells { stats, spans_exported, .. } = &mut *self.cells();
        stats.add(*spans_exported, spans);
    }

    /// Spans of traces were dropped.
    pub fn spans_dropped(&self, reason: SpanLoss, spans: u64) {
        let Cells { stats, spans_dropped, .. } = &mut *self.cells();
        stats.add(spans_dropped.get(reason), spans);
    }

    /// Returns all totals at one moment, with a sequence number that grows with each call.
    #[must_use]
    pub fn report(&self) -> (u64, PartialSnapshot) {
        let cells = &mut *self.cells();
        cells.reports += 1;
        (cells.reports, cells.stats.snapshot())
    }

    fn cells(&self) -> MutexGuard<'_, Cells> {
        // A panic elsewhere leaves plain numbers behind, which stay usable.
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for FrontendStats {
    fn default() -> Self {
        Self::new()
    }
}
