//! What happened between two readings of the totals: the figures of every periodic logger.
use std::time::Duration;

use shared::metrics::catalogue::{
    E2E_REQUEST_LATENCY, GENERATION_TOKENS, HOST_KV_CACHE_BLOCKS, HOST_KV_CACHE_BLOCKS_USED,
    INTER_TOKEN_LATENCY, KV_CACHE_BLOCKS, KV_CACHE_BLOCKS_USED, PREEMPTIONS,
    PROMPT_TOKENS_BY_SOURCE, REPLICA_UP, REQUEST_SUCCESS, REQUESTS_IN_FLIGHT, REQUESTS_REJECTED,
    REQUESTS_RUNNING, REQUESTS_SWAPPED, REQUESTS_WAITING, SPEC_DECODE_ACCEPTED_TOKENS,
    SPEC_DECODE_DRAFT_TOKENS, SPEC_DECODE_EMITTABLE_TOKENS, SPEC_DECODE_EMITTED_TOKENS,
    TIME_TO_FIRST_TOKEN, WORKER_UP,
};
use shared::metrics::labels::{FinishedReason, PromptSource};
use shared::metrics::{HistogramTotals, Merged};

/// Totals to subtract from the next ones.
#[derive(Clone, Debug, Default)]
struct Totals {
    prompt: u64,
    generation: u64,
    preemptions: u64,
    finished: u64,
    failed: u64,
    aborted: u64,
    rejected: u64,
    ttft: HistogramTotals,
    inter_token: HistogramTotals,
    e2e: HistogramTotals,
}

impl Totals {
    fn of(merged: &Merged) -> Self {
        Self {
            prompt: merged.counter_sum_of(PROMPT_TOKENS_BY_SOURCE, PromptSource::LocalCompute),
            generation: merged.counter_sum(GENERATION_TOKENS),
            preemptions: merged.counter_sum(PREEMPTIONS),
            finished: merged.counter_sum(REQUEST_SUCCESS),
            failed: merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Error),
            aborted: merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Abort),
            rejected: merged.counter_sum(REQUESTS_REJECTED),
            ttft: merged.histogram_sum(TIME_TO_FIRST_TOKEN),
            inter_token: merged.histogram_sum(INTER_TOKEN_LATENCY),
            e2e: merged.histogram_sum(E2E_REQUEST_LATENCY),
        }
    }
}

/// Remembers the last reading.
#[derive(Clone, Debug)]
pub struct Intervals {
    at: Duration,
    last: Totals,
}

/// The figures of one interval. Rates and means cover the interval, everything else its end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Interval {
    /// Its length in seconds.
    pub seconds: f64,
    /// Prompt tokens computed per second; cache hits do not count.
    pub prompt_throughput: f64,
    /// Tokens generated per second.
    pub generation_throughput: f64,
    /// Requests in a batch.
    pub running: f64,
    /// Requests in host memory.
    pub swapped: f64,
    /// Requests waiting.
    pub pending: f64,
    /// Share of KV blocks in use, 0 to 1, over all replicas.
    pub kv_usage: f64,
    /// The same for host memory.
    pub host_kv_usage: f64,
    /// Preemptions in the interval.
    pub preemptions: u64,
    /// Accepted requests that have not ended.
    pub in_flight: f64,
    /// Requests that ended in the interval, in any way.
    pub finished: u64,
    /// How many of those the server gave up.
    pub failed: u64,
    /// How many of those were left by their clients.
    pub aborted: u64,
    /// Requests not accepted in the interval.
    pub rejected: u64,
    /// Mean time to first token in seconds, over requests that got it in the interval.
    pub ttft: Option<f64>,
    /// Mean time between tokens in seconds.
    pub inter_token: Option<f64>,
    /// Mean end-to-end latency in seconds.
    pub e2e: Option<f64>,
    /// Replicas that serve.
    pub replicas: f64,
    /// Workers that are linked.
    pub workers: f64,
    /// Speculative decoding since the start, if there is any.
    pub speculation: Option<Speculation>,
}

/// Speculative decoding since the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speculation {
    /// Tokens drafted.
    pub draft: u64,
    /// Tokens accepted of those.
    pub accepted: u64,
    /// Tokens emitted.
    pub emitted: u64,
    /// Tokens that would have been emitted had every draft been accepted.
    pub emittable: u64,
}

impl Intervals {
    /// Starts the first interval at `now`, with totals at 0.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self { at: now, last: Totals::default() }
    }

    /// Starts an interval at `now`, after what is in `merged`.
    pub fn begin(&mut self, now: Duration, merged: &Merged) {
        *self = Self { at: now, last: Totals::of(merged) };
    }

    /// Ends the interval at `now` and starts the next; `None` if no time has passed.
    pub fn next(&mut self, now: Duration, merged: &Merged) -> Option<Interval> {
        let seconds = now.saturating_sub(self.at).as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let last = std::mem::replace(&mut self.last, Totals::of(merged));
        let now_totals = &self.last;
        self.at = now;
        let grown = |now: u64, before: u64| now.saturating_sub(before);
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let draft = merged.counter_sum(SPEC_DECODE_DRAFT_TOKENS);
        let speculation = (draft > 0).then(|| Speculation {
            draft,
            accepted: merged.counter_sum(SPEC_DECODE_ACCEPTED_TOKENS),
            emitted: merged.counter_sum(SPEC_DECODE_EMITTED_TOKENS),
            emittable: merged.counter_sum(SPEC_DECODE_EMITTABLE_TOKENS),
        });
        Some(Interval {
            seconds,
            prompt_throughput: grown(now_totals.prompt, last.prompt) as f64 / seconds,
            generation_throughput: grown(now_totals.generation, last.generation) as f64 / seconds,
            running: merged.gauge_sum(REQUESTS_RUNNING),
            swapped: merged.gauge_sum(REQUESTS_SWAPPED),
            pending: merged.gauge_sum(REQUESTS_WAITING),
            kv_usage: share(
                merged.gauge_sum(KV_CACHE_BLOCKS_USED),
                merged.gauge_sum(KV_CACHE_BLOCKS),
            ),
            host_kv_usage: share(
                merged.gauge_sum(HOST_KV_CACHE_BLOCKS_USED),
                merged.gauge_sum(HOST_KV_CACHE_BLOCKS),
            ),
            preemptions: grown(now_totals.preemptions, last.preemptions),
            in_flight: merged.gauge_sum(REQUESTS_IN_FLIGHT),
            finished: grown(now_totals.finished, last.finished),
            failed: grown(now_totals.failed, last.failed),
            aborted: grown(now_totals.aborted, last.aborted),
            rejected: grown(now_totals.rejected, last.rejected),
            ttft: mean(&now_totals.ttft, &last.ttft),
            inter_token: mean(&now_totals.inter_token, &last.inter_token),
            e2e: mean(&now_totals.e2e, &last.e2e),
            replicas: merged.gauge_sum(REPLICA_UP),
            workers: merged.gauge_sum(WORKER_UP),
            speculation,
        })
    }
}

impl Interval {
    /// Whether nothing happened and nothing is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.prompt_throughput
            + self.generation_throughput
            + self.running
            + self.swapped
            + self.pending
            == 0.0
    }
}

fn mean(now: &HistogramTotals, before: &HistogramTotals) -> Option<f64> {
    let count = now.count().saturating_sub(before.count());
    (count > 0).then(|| (now.sum() - before.sum()) / count as f64)
}
