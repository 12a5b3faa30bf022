//! Every series, declared once. No other place names one: the exposition, the merge, the log line
//! and `docs/metrics.md` read this table; recording code uses its typed constants.
//!
//! Names carry the prefix `tutti_` and base units, and pass `promtool check metrics`. Series that
//! belong to a replica carry `replica` and are added up by the query. Buckets are fixed, never
//! derived from a configuration, because histograms merge exactly only over equal bounds.
use super::definition::{
    CounterId, Definition, GaugeId, GaugeMerge, HistogramId, Kind, Owner, SeriesId, Unit,
};
use super::labels::{
    ActorState, BLOCK_SIZE, FinishedReason, Label, LabelValue, MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Method, NUM_BLOCKS, ObservationRefusal, PromptSource,
    RANK, REPLICA, ROUTE, RejectReason, ReportRefusal, STATUS, TENSOR_PARALLEL, VERSION, WORKER,
    WaitingReason,
};

/// Arrival to first token.
const TTFT_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// Between two tokens of one sequence.
const TOKEN_SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Whole requests and their parts.
const REQUEST_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
/// Parts of one engine step.
const STEP_SECONDS: &[f64] = &[
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
/// Tokens of one request.
const REQUEST_TOKENS: &[f64] = &[
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1_000.0,
    2_000.0,
    5_000.0,
    10_000.0,
    20_000.0,
    50_000.0,
    100_000.0,
    200_000.0,
    500_000.0,
    1_000_000.0,
];
/// Tokens of one engine step.
const STEP_TOKENS: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0,
    16_384.0, 32_768.0, 65_536.0,
];
/// Choices of one request.
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];

macro_rules! typed_id {
    (counter, $labels:expr) => { CounterId<{ $labels }> };
    (gauge, $labels:expr) => { GaugeId<{ $labels }> };
    (histogram, $labels:expr) => { HistogramId<{ $labels }> };
}
macro_rules! make_id {
    (counter, $series:expr) => {
        CounterId($series)
    };
    (gauge, $series:expr) => {
        GaugeId($series)
    };
    (histogram, $series:expr) => {
        HistogramId($series)
    };
}
macro_rules! kind {
    (counter) => {
        Kind::Counter
    };
    (gauge, $merge:expr) => {
        Kind::Gauge($merge)
    };
    (histogram, $bounds:expr) => {
        Kind::Histogram($bounds)
    };
}

/// Declares the table and one typed constant per row:
/// `kind(argument) ID: "name", unit, [labels], owner, "help";`
macro_rules! catalogue {
    ($($kind:ident $(($argument:expr))? $id:ident: $name:literal, $unit:ident,
       [$($label:expr),*], $owner:ident, $help:literal;)*) => {
        #[allow(
            non_camel_case_types,
            clippy::upper_case_acronyms,
            reason = "the variants are the constants' names; they only number the rows"
        )]
        enum Row {
            $($id,)*
        }

        $(
            #[doc = $help]
            pub const $id: typed_id!($kind, {
                let labels: &[Label] = &[$($label),*];
                labels.len()
            }) = make_id!($kind, SeriesId(Row::$id as u16));
        )*

        const DEFINITIONS: &[Definition] = &[$(
            Definition {
                name: $name,
                kind: kind!($kind $(, $argument)?),
                unit: Unit::$unit,
                labels: &[$($label),*],
                owner: Owner::$owner,
                help: $help,
            },
        )*];
    };
}

use GaugeMerge::{Max, Sum};

catalogue! {
    // Requests. Each is counted once, by the coordinator.
    counter REQUESTS_ACCEPTED: "tutti_requests_accepted_total", Requests, [], Coordinator,
        "Requests taken into the queue. Equals finished by reason plus in flight.";
    counter REQUESTS_REJECTED: "tutti_requests_rejected_total", Requests, [RejectReason::LABEL],
        Coordinator, "Requests not taken, by reason; never counted as accepted.";
    counter REQUEST_SUCCESS: "tutti_request_success_total", Requests, [FinishedReason::LABEL],
        Coordinator, "Accepted requests that ended, by reason; abort and error included.";
    gauge(Sum) REQUESTS_IN_FLIGHT: "tutti_requests_in_flight", Requests, [], Coordinator,
        "Accepted requests that have not ended. Equals running plus waiting plus swapped.";
    gauge(Sum) REQUESTS_RUNNING: "tutti_requests_running", Requests, [REPLICA], Coordinator,
        "Requests in a replica's batch now.";
    gauge(Sum) REQUESTS_WAITING: "tutti_requests_waiting", Requests, [WaitingReason::LABEL, REPLICA],
        Coordinator, "Requests waiting now, by what for; replica is none before one was chosen.";
    gauge(Sum) REQUESTS_SWAPPED: "tutti_requests_swapped", Requests, [REPLICA], Coordinator,
        "Requests whose KV blocks are in host memory now.";
    counter REQUESTS_REPLAYED: "tutti_requests_replayed_total", Requests, [], Coordinator,
        "Requests continued elsewhere from their accepted tokens after their replica broke.";

    // Tokens. Counted as the coordinator accepts them, so once, whatever ranks or retries there are.
    counter PROMPT_TOKENS: "tutti_prompt_tokens_total", Tokens, [REPLICA], Coordinator,
        "Prompt tokens processed for the first time, computed or from a cache.";
    counter PROMPT_TOKENS_BY_SOURCE: "tutti_prompt_tokens_by_source_total", Tokens,
        [REPLICA, PromptSource::LABEL], Coordinator,
        "Prompt tokens by where their keys and values came from; adds up to the prompt tokens.";
    counter GENERATION_TOKENS: "tutti_generation_tokens_total", Tokens, [REPLICA], Coordinator,
        "Tokens generated and accepted.";
    counter TOKENS_RECOMPUTED: "tutti_tokens_recomputed_total", Tokens, [REPLICA], Coordinator,
        "Tokens computed again after a preemption or failover; in no other token series.";

    // Engine steps.
    counter ENGINE_STEPS: "tutti_engine_steps_total", Steps, [REPLICA], Coordinator,
        "Engine steps completed.";
    histogram(STEP_TOKENS) ITERATION_TOKENS: "tutti_iteration_tokens", Tokens, [REPLICA],
        Coordinator,
        "Tokens per engine step: prompt tokens computed plus tokens generated, once per step.";
    histogram(STEP_SECONDS) RANK_STRAGGLER_GAP: "tutti_rank_straggler_gap_seconds", Seconds,
        [REPLICA], Coordinator, "Per engine step: slowest rank's time minus fastest rank's.";
    counter PREEMPTIONS: "tutti_preemptions_total", Events, [REPLICA], Coordinator,
        "Requests put back from the batch into the queue for lack of KV blocks.";

    // Latencies. They start at arrival and survive the loss of a replica.
    histogram(TTFT_SECONDS) TIME_TO_FIRST_TOKEN: "tutti_time_to_first_token_seconds", Seconds, [],
        Coordinator, "Arrival to first token, once per request.";
    histogram(TOKEN_SECONDS) INTER_TOKEN_LATENCY: "tutti_inter_token_latency_seconds", Seconds, [],
        Coordinator, "Between two tokens of one choice, once per gap.";
    histogram(TOKEN_SECONDS) REQUEST_TIME_PER_OUTPUT_TOKEN:
        "tutti_request_time_per_output_token_seconds", Seconds, [], Coordinator,
        "Mean time per output token after the first, once per request that ended by stop or length.";
    histogram(REQUEST_SECONDS) E2E_REQUEST_LATENCY: "tutti_e2e_request_latency_seconds", Seconds,
        [], Coordinator, "Arrival to end, once per request that ended by stop or length.";
    histogram(REQUEST_SECONDS) REQUEST_QUEUE_TIME: "tutti_request_queue_time_seconds", Seconds, [],
        Coordinator, "Arrival to first scheduling, of requests that ended by stop or length.";
    histogram(REQUEST_SECONDS) REQUEST_PREFILL_TIME: "tutti_request_prefill_time_seconds", Seconds,
        [], Coordinator, "First scheduling to first token, of requests that ended by stop or length.";
    histogram(REQUEST_SECONDS) REQUEST_DECODE_TIME: "tutti_request_decode_time_seconds", Seconds,
        [], Coordinator,
        "First to last token, preemptions included, of requests that ended by stop or length.";
    histogram(REQUEST_SECONDS) REQUEST_INFERENCE_TIME: "tutti_request_inference_time_seconds",
        Seconds, [], Coordinator,
        "First scheduling to last token, of requests that ended by stop or length.";

    // Sizes and parameters of requests.
    histogram(REQUEST_TOKENS) REQUEST_PROMPT_TOKENS: "tutti_request_prompt_tokens", Tokens, [],
        Coordinator, "Prompt tokens of a request, once when it ends for any reason.";
    histogram(REQUEST_TOKENS) REQUEST_GENERATION_TOKENS: "tutti_request_generation_tokens", Tokens,
        [], Coordinator,
        "Tokens accepted over all choices of a request, once when it ends for any reason.";
    histogram(CHOICES) REQUEST_PARAMS_N: "tutti_request_params_n", Value, [], Coordinator,
        "The parameter n, once when a request ends for any reason.";
    histogram(REQUEST_TOKENS) REQUEST_PARAMS_MAX_TOKENS: "tutti_request_params_max_tokens", Tokens,
        [], Coordinator, "The parameter max_tokens, once when a request ends for any reason.";

    // KV cache, per replica: every rank has the same blocks, so they are counted once.
    gauge(Sum) KV_CACHE_BLOCKS_USED: "tutti_kv_cache_used_blocks", Blocks, [REPLICA], Coordinator,
        "KV blocks that requests hold now.";
    gauge(Sum) KV_CACHE_BLOCKS: "tutti_kv_cache_blocks", Blocks, [REPLICA], Coordinator,
        "KV blocks there are.";
    gauge(GaugeMerge::Ratio {
        numerator: KV_CACHE_BLOCKS_USED.series(),
        denominator: KV_CACHE_BLOCKS.series(),
    }) KV_CACHE_USAGE: "tutti_kv_cache_usage_ratio", Ratio, [REPLICA], Coordinator,
        "KV blocks used of those there are, 0 to 1. Over replicas divide the sums, do not average.";
    gauge(Max) CACHE_CONFIG_INFO: "tutti_cache_config_info", Info,
        [BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, NUM_BLOCKS, REPLICA,
         TENSOR_PARALLEL],
        Coordinator, "Sizes of a replica's engine, while it serves.";

    // Ranks. Every rank is real: labelled, never deduplicated.
    histogram(STEP_SECONDS) RANK_STEP: "tutti_rank_step_seconds", Seconds, [RANK, REPLICA, WORKER],
        EveryRank, "Plan received to result handed back, per step.";
    histogram(STEP_SECONDS) RANK_FORWARD: "tutti_rank_forward_seconds", Seconds,
        [RANK, REPLICA, WORKER], EveryRank, "Forward pass without collectives, per step.";
    histogram(STEP_SECONDS) RANK_COLLECTIVE: "tutti_rank_collective_seconds", Seconds,
        [RANK, REPLICA, WORKER], EveryRank, "Waiting for and exchanging with other ranks, per step.";
    histogram(STEP_SECONDS) RANK_SAMPLE: "tutti_rank_sample_seconds", Seconds,
        [RANK, REPLICA, WORKER], EveryRank, "Choosing tokens, per step.";
    histogram(STEP_SECONDS) RANK_IDLE: "tutti_rank_idle_seconds", Seconds, [RANK, REPLICA, WORKER],
        EveryRank, "The executor had nothing to do before a step, per step.";
    gauge(Sum) RANK_WEIGHTS: "tutti_rank_weights_bytes", Bytes, [RANK, REPLICA, WORKER], EveryRank,
        "Weights that a rank holds.";
    gauge(Max) RANK_LOAD: "tutti_rank_load_seconds", Seconds, [RANK, REPLICA, WORKER], EveryRank,
        "Time the last load of a rank's weights took; 0 when they were kept.";

    // Cluster.
    counter FAILOVERS: "tutti_failovers_total", Events, [REPLICA], Coordinator,
        "Times a serving replica broke and its requests were moved.";
    counter FENCED_FRAMES: "tutti_fenced_frames_total", Events, [], Coordinator,
        "Frames dropped because their epoch is over.";
    gauge(Max) WORKER_UP: "tutti_worker_up", Items, [WORKER], Coordinator,
        "1 while a worker is linked, 0 while one is expected and is not.";
    counter WORKER_RESTARTS: "tutti_worker_restarts_total", Events, [WORKER], Coordinator,
        "Times a worker came back as another process.";
    gauge(Max) WORKER_LAST_REPORT: "tutti_worker_last_report_timestamp_seconds", Seconds, [WORKER],
        Coordinator, "When a worker's stats last arrived, in seconds since 1970.";
    gauge(Sum) ACTORS: "tutti_actors", Items, [ActorState::LABEL], Coordinator,
        "Actors by state.";

    // HTTP.
    counter HTTP_REQUESTS: "tutti_http_requests_total", Requests, [Method::LABEL, ROUTE, STATUS],
        Frontend, "HTTP requests answered.";
    histogram(REQUEST_SECONDS) HTTP_REQUEST_DURATION: "tutti_http_request_duration_seconds",
        Seconds, [Method::LABEL, ROUTE], Frontend,
        "HTTP request received to the last byte of its answer handed over.";
    gauge(Sum) HTTP_REQUESTS_IN_FLIGHT: "tutti_http_requests_in_flight", Requests, [], Frontend,
        "HTTP requests being answered now.";

    // The metrics themselves.
    counter REPORTS_REFUSED: "tutti_reports_refused_total", Events, [ReportRefusal::LABEL],
        Coordinator, "Stats reports of workers and front ends not merged, by reason.";
    counter OBSERVATIONS_REFUSED: "tutti_observations_refused_total", Events,
        [ObservationRefusal::LABEL], Process, "Values not recorded because they make no sense.";
    histogram(STEP_SECONDS) SCRAPE_DURATION: "tutti_scrape_duration_seconds", Seconds, [],
        Coordinator, "Merging and rendering one scrape; visible from the next scrape on.";
    gauge(Max) BUILD_INFO: "tutti_build_info", Info, [VERSION], Coordinator,
        "The coordinator's version.";
    gauge(Max) PROCESS_START_TIME: "tutti_process_start_time_seconds", Seconds, [], Coordinator,
        "When the coordinator started, in seconds since 1970.";
}

/// Every series, in the order of the documentation.
pub static CATALOGUE: &[Definition] = DEFINITIONS;

/// Differs when names, kinds, labels or bucket bounds differ: reports of a source with another
/// hash are refused rather than added up wrongly.
pub const CATALOGUE_HASH: u64 = hash(DEFINITIONS);

/// FNV-1a over everything that decides whether two totals may be added.
const fn hash(definitions: &[Definition]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325;
    let mut row = 0;
    while row < definitions.len() {
        let definition = &definitions[row];
        state = hash_bytes(state, definition.name.as_bytes());
        let mut label = 0;
        while label < definition.labels.len() {
            state = hash_bytes(state, definition.labels[label].name.as_bytes());
            label += 1;
        }
        state = match definition.kind {
            Kind::Counter => hash_bytes(state, b"counter"),
            Kind::Gauge(_) => hash_bytes(state, b"gauge"),
            Kind::Histogram(bounds) => {
                let mut bound = 0;
                while bound < bounds.len() {
                    state = hash_bytes(state, &bounds[bound].to_bits().to_le_bytes());
                    bound += 1;
                }
                hash_bytes(state, b"histogram")
            }
        };
        row += 1;
    }
    state
}

const fn hash_bytes(mut state: u64, bytes: &[u8]) -> u64 {
    let mut index = 0;
    while index < bytes.len() {
        state = (state ^ bytes[index] as u64).wrapping_mul(0x0100_0000_01b3);
        index += 1;
    }
    // Ends the field, so that "ab","c" and "a","bc" differ.
    (state ^ 0xff).wrapping_mul(0x0100_0000_01b3)
}
