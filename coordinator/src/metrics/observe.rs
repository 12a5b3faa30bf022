//! Called by the coordinator's parts as things happen.
//!
//! [`Observer::record`] locks the cells briefly; everything recorded through one [`Recording`]
//! appears in the same scrape or not at all. An actor takes it once per step or message, not once
//! per token. Times are passed in.
//!
//! Identities that hold in every scrape, because each method changes both sides:
//! - sum of `ITERATION_TOKENS` = prompt tokens computed + tokens generated; its count = steps
//! - running + waiting + swapped = in flight
//! - finished over all reasons + in flight = accepted
//!
//! - `request`: the life of a request
//! - `adapters`: requests by adapter
//! - `cluster`: replicas, workers and actors
//! - `speculation`, `swap`: drafts; swapping to host memory
mod adapters;
mod cluster;
mod request;
mod speculation;
mod swap;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use shared::ids::{ReplicaId, WorkerId};
use shared::metrics::catalogue;
use shared::metrics::labels::{
    ActorState, ExpiryReason, FailoverReason, FencedReason, FinishedReason, GuideKind,
    HandshakeRefusal, LabelValue, LinkEnd, NO_REPLICA, PromptSource, RejectReason, WaitingReason,
};
use shared::metrics::local::PerValue;
use shared::metrics::{Counter, Exemplars, Gauge, Histogram, LocalStats, PartialSnapshot};
use shared::protocol::FrontendId;

use self::adapters::AdapterLevels;
pub use self::cluster::ReplicaConfig;
pub use self::request::{RequestSummary, RequestTrack};
use self::speculation::SpeculationCells;
use self::swap::HostCells;
use super::up_down_gauge::UpDownGauge;

/// The coordinator's cells. Clones share them.
#[derive(Clone, Debug)]
pub struct Observer {
    /// `None` measures nothing.
    cells: Option<Arc<Mutex<Cells>>>,
}

/// The locked cells. Keep it short-lived, and do not hold it across an `await`.
#[derive(Debug)]
pub struct Recording<'a> {
    observer: &'a Observer,
    cells: Option<MutexGuard<'a, Cells>>,
    /// Gaps between tokens not counted yet: their length and number. The sequences of a batch
    /// usually have equal gaps, so a step counts them at once.
    gaps: (Duration, u64),
    gap_of: Option<(Arc<str>, Duration)>,
}

/// All cells with their resolved handles.
#[derive(Debug)]
struct Cells {
    stats: LocalStats,
    /// Number of reports taken.
    reports: u64,
    fixed: GlobalSeries,
    waiting_for_replica: UpDownGauge,
    /// Names of the adapters served.
    adapters: Vec<String>,
    /// The KV cache's data type as configured, and whether prefix caching is on.
    cache: (&'static str, bool),
    replicas: BTreeMap<ReplicaId, ReplicaCells>,
    workers: BTreeMap<WorkerId, WorkerCells>,
    /// Front ends whose links ended, and when.
    lost_frontends: BTreeMap<FrontendId, Duration>,
    /// Front ends that said goodbye and are still linked.
    leaving_frontends: BTreeSet<FrontendId>,
}

/// Series that exist once.
#[derive(Debug)]
struct GlobalSeries {
    accepted: Counter,
    guided: PerValue<Counter>,
    rejected: PerValue<Counter>,
    expired: PerValue<Counter>,
    finished: PerValue<Counter>,
    replayed: PerValue<Counter>,
    in_flight: UpDownGauge,
    ttft: Histogram,
    inter_token: Histogram,
    time_per_output_token: Histogram,
    e2e: Histogram,
    pooling: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    max_generation_tokens: Histogram,
    preempted: Histogram,
    prefill_computed: Histogram,
    n: Histogram,
    best_of: Histogram,
    max_tokens: Histogram,
    prompt_throughput: Gauge,
    generation_throughput: Gauge,
    fenced: PerValue<Counter>,
    handshakes: PerValue<Counter>,
    links: PerValue<Counter>,
    actors: PerValue<Gauge>,
    scrape: Histogram,
}

/// Series of one replica.
#[derive(Debug)]
struct ReplicaCells {
    running: UpDownGauge,
    /// Requests of each adapter, of name.
    adapters: BTreeMap<String, AdapterLevels>,
    /// Whether the replica serves.
    serves: bool,
    swapped: UpDownGauge,
    waiting: [UpDownGauge; WAITING_AT_REPLICA.len()],
    prompt_tokens: Counter,
    prompt_by_source: PerValue<Counter>,
    generation_tokens: Counter,
    recomputed: Counter,
    wasted: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    steps: Counter,
    iteration_tokens: Histogram,
    straggler_gap: Histogram,
    disagreements: Counter,
    overdue: Counter,
    preemptions: Counter,
    preempted_tokens: Counter,
    failovers: PerValue<Counter>,
    up: Gauge,
    used_blocks: Gauge,
    blocks: Gauge,
    /// Set while it serves and has host memory to swap to.
    host: Option<HostCells>,
    /// Series of the present configuration.
    config: Option<Gauge>,
    /// Set if decoding is speculative.
    speculation: Option<SpeculationCells>,
}

/// What a request at a replica can wait for.
const WAITING_AT_REPLICA: [WaitingReason; 2] = [WaitingReason::Capacity, WaitingReason::Preempted];

/// Series of one worker.
#[derive(Debug)]
struct WorkerCells {
    up: Gauge,
    /// Series of the present process.
    info: Option<Gauge>,
    restarts: Counter,
    slow: Gauge,
    set_aside: Gauge,
    last_report: Gauge,
}

/// What one engine step did. Tokens that were only wasted are counted in `wasted` alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    /// Prompt tokens computed for the first time.
    pub prompt_computed: u64,
    /// Prompt tokens that were not computed, because the prefix cache had them.
    pub prompt_cached: u64,
    /// Prompt tokens of sequences in a step for the first time, all looked up in the prefix cache.
    pub looked_up: u64,
    /// How many of those it had.
    pub found: u64,
    /// Tokens accepted.
    pub generated: u64,
    /// Tokens recomputed after a preemption or failover, of prompts or not.
    pub recomputed: u64,
    /// Tokens sampled for sequences that were found to have ended, or that were preempted.
    pub wasted: u64,
}

impl Observer {
    /// Makes cells in which every series with known labels exists, at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut stats = LocalStats::new();
        let fixed = GlobalSeries::resolve(&mut stats);
        let waiting = stats
            .gauge(catalogue::REQUESTS_WAITING, [WaitingReason::NoReplica.as_str(), NO_REPLICA]);
        let waiting_for_replica = UpDownGauge::permanent(&mut stats, waiting);
        let cells = Cells {
            stats,
            reports: 0,
            fixed,
            waiting_for_replica,
            adapters: Vec::new(),
            cache: ("auto", false),
            replicas: BTreeMap::new(),
            workers: BTreeMap::new(),
            lost_frontends: BTreeMap::new(),
            leaving_frontends: BTreeSet::new(),
        };
        Self { cells: Some(Arc::new(Mutex::new(cells))) }
    }

    /// Makes cells that record nothing: to find out what recording costs.
    #[must_use]
    pub fn disabled() -> Self {
        Self { cells: None }
    }

    /// Locks the cells.
    #[must_use]
    pub fn record(&self) -> Recording<'_> {
        // A panic elsewhere leaves plain numbers behind, which stay usable.
        let cells = self.cells.as_deref();
        let cells = cells.map(|cells| cells.lock().unwrap_or_else(PoisonError::into_inner));
        Recording { observer: self, cells, gaps: (Duration::ZERO, 0), gap_of: None }
    }

    /// Like [`Observer::record`], but `None` if the cells are locked. For a thread that panics: it
    /// may have locked them itself.
    fn try_record(&self) -> Option<Recording<'_>> {
        let cells = match self.cells.as_deref().map(Mutex::try_lock) {
            None => None,
            Some(Ok(cells)) => Some(cells),
            Some(Err(TryLockError::Poisoned(error))) => Some(error.into_inner()),
            Some(Err(TryLockError::WouldBlock)) => return None,
        };
        Some(Recording { observer: self, cells, gaps: (Duration::ZERO, 0), gap_of: None })
    }

    /// Returns all totals at one moment, with a sequence number that grows with each call.
    #[must_use]
    pub fn report(&self) -> (u64, PartialSnapshot) {
        let Some(cells) = &mut self.record().cells else {
            return (0, PartialSnapshot::default());
        };
        cells.reports += 1;
        (cells.reports, cells.stats.snapshot())
    }

    /// Exemplars: requests worth looking at for their latencies.
    #[must_use]
    pub fn exemplars(&self) -> Exemplars {
        self.record().cells.as_ref().map(|cells| cells.stats.exemplars()).unwrap_or_default()
    }
}

impl Default for Observer {
    fn default() -> Self {
        Self::new()
    }
}

impl Recording<'_> {
    /// A replica completed a step: one observation, whatever it did and however many ranks it has.
    pub fn step(&mut self, replica: ReplicaId, tokens: StepTokens) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.add(cells.steps, 1);
        stats.observe_count(
            cells.iteration_tokens,
            tokens.prompt_computed.saturating_add(tokens.generated),
        );
        stats.add(cells.prompt_tokens, tokens.prompt_computed + tokens.prompt_cached);
        let by_source = &cells.prompt_by_source;
        stats.add(by_source.get(PromptSource::LocalCompute), tokens.prompt_computed);
        stats.add(by_source.get(PromptSource::LocalCacheHit), tokens.prompt_cached);
        stats.add(cells.generation_tokens, tokens.generated);
        stats.add(cells.recomputed, tokens.recomputed);
        stats.add(cells.wasted, tokens.wasted);
        stats.add(cells.prefix_queries, tokens.looked_up);
        stats.add(cells.prefix_hits, tokens.found);
    }

    /// Sets how KV caches are used: their data type as configured, and whether prefixes are looked
    /// up. Call it before there are replicas.
    pub fn cache(&mut self, dtype: &'static str, prefix_caching: bool) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.cache = (dtype, prefix_caching);
    }

    /// The slowest rank of a step took `gap` longer than the fastest.
    pub fn straggler_gap(&mut self, replica: ReplicaId, gap: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.observe_duration(cells.straggler_gap, gap);
    }

    /// The ranks of a replica disagreed on a step's tokens.
    pub fn ranks_disagreed(&mut self, replica: ReplicaId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.add(cells.disagreements, 1);
    }

    /// A step of a replica took too long.
    pub fn step_overdue(&mut self, replica: ReplicaId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.add(cells.overdue, 1);
    }

    /// Sets a replica's numbers of KV blocks.
    pub fn kv_blocks(&mut self, replica: ReplicaId, used: u32, total: u32) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.set(cells.used_blocks, f64::from(used));
        stats.set(cells.blocks, f64::from(total));
    }

    /// Sets the tokens per second of the last log interval.
    pub fn throughput(&mut self, prompt: f64, generation: f64) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let Cells { stats, fixed, .. } = cells;
        stats.set(fixed.prompt_throughput, prompt);
        stats.set(fixed.generation_throughput, generation);
    }

    /// Merging and rendering a scrape took this long.
    pub fn scraped(&mut self, duration: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let Cells { stats, fixed, .. } = cells;
        stats.observe_duration(fixed.scrape, duration);
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.count_gaps();
    }
}

impl Recording<'_> {
    /// Notes a gap between two tokens of a request.
    fn record_gap(&mut self, gap: Duration, request: &Arc<str>, now: Duration) {
        if self.gaps.0 != gap {
            self.count_gaps();
            self.gaps.0 = gap;
        }
        if self.gaps.1 == 0 {
            self.gap_of = Some((request.clone(), now));
        }
        self.gaps.1 += 1;
    }

    fn count_gaps(&mut self) {
        let (gap, count) = std::mem::take(&mut self.gaps);
        let (Some(cells), Some((request, now))) = (&mut self.cells, self.gap_of.take()) else {
            return;
        };
        let Cells { stats, fixed, .. } = &mut **cells;
        stats.observe_exemplar(fixed.inter_token, gap, count, &request, now);
    }
}

impl Cells {
    /// Returns a replica's cells, created at its first event, and the cells they index.
    fn replica(&mut self, replica: ReplicaId) -> (&mut ReplicaCells, &mut LocalStats) {
        let Self { stats, adapters, replicas, .. } = self;
        let resolve = || ReplicaCells::resolve(stats, adapters, replica);
        (replicas.entry(replica).or_insert_with(resolve), stats)
    }
}

impl ReplicaCells {
    /// Sets whether the replica serves; its load is then published even when it is 0.
    fn serves(&mut self, stats: &mut LocalStats, serves: bool) {
        for level in [&mut self.running].into_iter().chain(&mut self.waiting) {
            level.show_zero(stats, serves);
        }
        self.serves = serves;
        for levels in self.adapters.values_mut() {
            levels.serves(stats, serves);
        }
        stats.set(self.up, if serves { 1.0 } else { 0.0 });
    }
}

impl GlobalSeries {
    fn resolve(stats: &mut LocalStats) -> Self {
        let in_flight = stats.gauge(catalogue::REQUESTS_IN_FLIGHT, []);
        Self {
            accepted: stats.counter(catalogue::REQUESTS_ACCEPTED, []),
            guided: PerValue::new::<GuideKind>(|kind| {
                stats.counter(catalogue::REQUESTS_GUIDED, [kind])
            }),
            rejected: PerValue::new::<RejectReason>(|reason| {
                stats.counter(catalogue::REQUESTS_REJECTED, [reason])
            }),
            expired: PerValue::new::<ExpiryReason>(|reason| {
                stats.counter(catalogue::REQUESTS_EXPIRED, [reason])
            }),
            finished: PerValue::new::<FinishedReason>(|reason| {
                stats.counter(catalogue::REQUEST_SUCCESS, [reason])
            }),
            replayed: PerValue::new::<FailoverReason>(|reason| {
                stats.counter(catalogue::REQUESTS_REPLAYED, [reason])
            }),
            in_flight: UpDownGauge::permanent(stats, in_flight),
            ttft: stats.histogram(catalogue::TIME_TO_FIRST_TOKEN, []),
            inter_token: stats.histogram(catalogue::INTER_TOKEN_LATENCY, []),
            time_per_output_token: stats.histogram(catalogue::REQUEST_TIME_PER_OUTPUT_TOKEN, []),
            e2e: stats.histogram(catalogue::E2E_REQUEST_LATENCY, []),
            pooling: stats.histogram(catalogue::EMBEDDING_LATENCY, []),
            queue: stats.histogram(catalogue::REQUEST_QUEUE_TIME, []),
            prefill: stats.histogram(catalogue::REQUEST_PREFILL_TIME, []),
            decode: stats.histogram(catalogue::REQUEST_DECODE_TIME, []),
            inference: stats.histogram(catalogue::REQUEST_INFERENCE_TIME, []),
            prompt_tokens: stats.histogram(catalogue::REQUEST_PROMPT_TOKENS, []),
            generation_tokens: stats.histogram(catalogue::REQUEST_GENERATION_TOKENS, []),
            max_generation_tokens: stats
                .histogram(catalogue::REQUEST_MAX_NUM_GENERATION_TOKENS, []),
            preempted: stats.histogram(catalogue::REQUEST_PREEMPTIONS, []),
            prefill_computed: stats.histogram(catalogue::REQUEST_PREFILL_COMPUTED_TOKENS, []),
            n: stats.histogram(catalogue::REQUEST_PARAMS_N, []),
            best_of: stats.histogram(catalogue::REQUEST_PARAMS_BEST_OF, []),
            max_tokens: stats.histogram(catalogue::REQUEST_PARAMS_MAX_TOKENS, []),
            prompt_throughput: stats.gauge(catalogue::PROMPT_THROUGHPUT, []),
            generation_throughput: stats.gauge(catalogue::GENERATION_THROUGHPUT, []),
            fenced: PerValue::new::<FencedReason>(|reason| {
                stats.counter(catalogue::FENCED_FRAMES, [reason])
            }),
            handshakes: PerValue::new::<HandshakeRefusal>(|reason| {
                stats.counter(catalogue::HANDSHAKES_REFUSED, [reason])
            }),
            links: PerValue::new::<LinkEnd>(|reason| {
                stats.counter(catalogue::LINKS_ENDED, [reason])
            }),
            actors: PerValue::new::<ActorState>(|state| stats.gauge(catalogue::ACTORS, [state])),
            scrape: stats.histogram(catalogue::SCRAPE_DURATION, []),
        }
    }
}

impl ReplicaCells {
    fn resolve(stats: &mut LocalStats, adapters: &[String], replica: ReplicaId) -> Self {
        let name = replica.0.to_string();
        let label = [name.as_str()];
        let running = stats.gauge(catalogue::REQUESTS_RUNNING, label);
        let swapped = stats.gauge(catalogue::REQUESTS_SWAPPED, label);
        Self {
            running: UpDownGauge::new(running),
            adapters: adapters
                .iter()
                .map(|adapter| (adapter.clone(), AdapterLevels::resolve(stats, adapter, &name)))
                .collect(),
            serves: false,
            swapped: UpDownGauge::new(swapped),
            waiting: WAITING_AT_REPLICA.map(|reason| {
                let labels = [reason.as_str(), &name];
                UpDownGauge::new(stats.gauge(catalogue::REQUESTS_WAITING, labels))
            }),
            prompt_tokens: stats.counter(catalogue::PROMPT_TOKENS, label),
            prompt_by_source: PerValue::new::<PromptSource>(|source| {
                stats.counter(catalogue::PROMPT_TOKENS_BY_SOURCE, [&name, source])
            }),
            generation_tokens: stats.counter(catalogue::GENERATION_TOKENS, label),
            recomputed: stats.counter(catalogue::TOKENS_RECOMPUTED, label),
            wasted: stats.counter(catalogue::TOKENS_WASTED, label),
            prefix_queries: stats.counter(catalogue::PREFIX_CACHE_QUERIES, label),
            prefix_hits: stats.counter(catalogue::PREFIX_CACHE_HITS, label),
            steps: stats.counter(catalogue::ENGINE_STEPS, label),
            iteration_tokens: stats.histogram(catalogue::ITERATION_TOKENS, label),
            straggler_gap: stats.histogram(catalogue::RANK_STRAGGLER_GAP, label),
            disagreements: stats.counter(catalogue::RANK_DISAGREEMENTS, label),
            overdue: stats.counter(catalogue::STEPS_OVERDUE, label),
            preemptions: stats.counter(catalogue::PREEMPTIONS, label),
            preempted_tokens: stats.counter(catalogue::PREEMPTED_TOKENS, label),
            failovers: PerValue::new::<FailoverReason>(|reason| {
                stats.counter(catalogue::FAILOVERS, [reason, &name])
            }),
            up: stats.gauge(catalogue::REPLICA_UP, label),
            used_blocks: stats.gauge(catalogue::KV_CACHE_BLOCKS_USED, label),
            blocks: stats.gauge(catalogue::KV_CACHE_BLOCKS, label),
            host: None,
            config: None,
            speculation: None,
        }
    }
}
