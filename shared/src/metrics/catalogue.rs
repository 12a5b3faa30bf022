//! Every series, declared once. No other place names one: the exposition, the merge, the log line
//! and `docs/metrics.md` read this table; recording code uses its typed constants.
//!
//! Names have the prefix `tutti_` and base units, and pass `promtool check metrics`. Series of a
//! replica have the label `replica`; queries add them up. Buckets are fixed, never derived from the
//! configuration, because histograms merge exactly only if their bounds are equal.
use super::definition::{
    CounterId, Definition, GaugeId, GaugeMerge, HistogramId, Kind, Owner, SeriesId, Unit,
};
use super::labels::{
    ADAPTER, ALGORITHM, ActorState, BLOCK_SIZE, CACHE_DTYPE, ENABLE_PREFIX_CACHING, ExpiryReason,
    FRONTEND, FailoverReason, FencedReason, FinishedReason, GPU, GuideKind, HOST, HandshakeRefusal,
    Label, LabelValue, LinkEnd, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MemberRole,
    MessageRefusal, Method, NAME, NODE, NUM_BLOCKS, NUM_HOST_BLOCKS, ObservationRefusal, POSITION,
    PROCESS, PromptSource, RANK, REPLICA, ROUTE, RejectReason, ReloadOutcome, ReportRefusal,
    STATUS, SecretFile, SpanLoss, SwapDirection, TENSOR_PARALLEL, UUID, VERSION, WORKER,
    WaitingReason,
};

mod buckets;
mod frontend_page;

pub use self::frontend_page::FRONTEND_PAGE;

use self::buckets::{
    CHOICES, REQUEST_SECONDS, REQUEST_TOKENS, STEP_SECONDS, STEP_TOKENS, TOKEN_SECONDS,
    TTFT_SECONDS,
};

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

macro_rules! is_given {
    () => {
        false
    };
    ($given:ident) => {
        true
    };
}
macro_rules! text_or_none {
    () => {
        None
    };
    ($text:literal) => {
        Some($text)
    };
}

/// Declares the table and one typed constant per row:
/// `kind(argument) ID: "name", unit, model [labels], owner, "help", when "condition";`
/// where `model` marks series that also carry the served model's name, and `when` is the condition
/// under which a series appears that does not always exist.
macro_rules! catalogue {
    ($($kind:ident $(($argument:expr))? $id:ident: $name:literal, $unit:ident,
       $($model:ident)? [$($label:expr),*], $owner:ident, $help:literal
       $(, when $when:literal)?;)*) => {
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
                model: is_given!($($model)?),
                labels: &[$($label),*],
                owner: Owner::$owner,
                help: $help,
                when: text_or_none!($($when)?),
            },
        )*];
    };
}

use GaugeMerge::{Max, Ratio, Sum};

catalogue! {
    // Requests, each counted once, by the coordinator.
    counter REQUESTS_ACCEPTED: "tutti_requests_accepted_total", Requests, model [], Coordinator,
        "Requests accepted into the queue; a front end's request that the next leader continues is \
         counted once by each. Equals finished by reason plus in flight.";
    counter REQUESTS_REJECTED: "tutti_requests_rejected_total", Requests,
        model [RejectReason::LABEL], Frontend,
        "Requests rejected before any of their answer, by the reason given to the client; not counted as accepted, unless their coordinator was lost.";
    counter REQUESTS_EXPIRED: "tutti_requests_expired_total", Requests,
        model [ExpiryReason::LABEL], Frontend,
        "Requests given up because their time was up: the client's own limit or the queue's; or because their coordinator was lost and none went on with them.";
    counter REQUEST_SUCCESS: "tutti_request_success_total", Requests,
        model [FinishedReason::LABEL], Coordinator,
        "Accepted requests that ended, by reason; abort and error included. handed_over: with its coordinator, and the next one goes on with it and accepts it anew.";
    counter REQUESTS_GUIDED: "tutti_requests_guided_total", Requests,
        model [GuideKind::LABEL], Coordinator,
        "Accepted requests whose output is constrained, reasoning bounded or words forbidden, by what constrains it.";
    gauge(Sum) REQUESTS_IN_FLIGHT: "tutti_requests_in_flight", Requests, model [], Coordinator,
        "Accepted requests that have not ended. Equals running plus waiting plus swapped.";
    gauge(Sum) REQUESTS_RUNNING: "tutti_requests_running", Requests, model [REPLICA], Coordinator,
        "Requests in a replica's batch now.";
    gauge(Sum) REQUESTS_WAITING: "tutti_requests_waiting", Requests,
        model [WaitingReason::LABEL, REPLICA], Coordinator,
        "Requests waiting now, by what they wait for; replica is none before one is chosen.";
    gauge(Sum) REQUESTS_SWAPPED: "tutti_requests_swapped", Requests, model [REPLICA], Coordinator,
        "Requests whose KV blocks are in host memory now.", when "requests are swapped";
    counter REQUESTS_REPLAYED: "tutti_requests_replayed_total", Requests,
        model [FailoverReason::LABEL], Coordinator,
        "Requests continued elsewhere from their accepted tokens after their replica broke, by why \
         it broke.";
    gauge(Sum) LORA_REQUESTS: "tutti_lora_requests", Requests, model [ADAPTER, REPLICA],
        Coordinator, "Requests in a replica's batch now, by LoRA adapter.",
        when "LoRA adapters are served";
    gauge(Sum) LORA_REQUESTS_WAITING: "tutti_lora_requests_waiting", Requests,
        model [ADAPTER, REPLICA], Coordinator,
        "Requests that a replica holds outside its batch now, waiting or swapped, by LoRA adapter.",
        when "LoRA adapters are served";

    // Tokens, counted when the coordinator accepts them: once, however many ranks or retries there
    // are.
    counter PROMPT_TOKENS: "tutti_prompt_tokens_total", Tokens, model [REPLICA], Coordinator,
        "Prompt tokens processed for the first time, computed or from a cache, once per choice \
         (n).";
    counter PROMPT_TOKENS_BY_SOURCE: "tutti_prompt_tokens_by_source_total", Tokens,
        model [REPLICA, PromptSource::LABEL], Coordinator,
        "Prompt tokens by where their keys and values came from; adds up to the prompt tokens.";
    counter PREFIX_CACHE_QUERIES: "tutti_prefix_cache_query_tokens_total", Tokens,
        model [REPLICA], Coordinator,
        "Prompt tokens looked up in the prefix cache, once per choice of a request.";
    counter PREFIX_CACHE_HITS: "tutti_prefix_cache_hit_tokens_total", Tokens, model [REPLICA],
        Coordinator, "Prompt tokens found in the prefix cache, once per choice of a request.";
    counter GENERATION_TOKENS: "tutti_generation_tokens_total", Tokens, model [REPLICA],
        Coordinator, "Tokens generated and accepted.";
    counter TOKENS_RECOMPUTED: "tutti_tokens_recomputed_total", Tokens, model [REPLICA],
        Coordinator,
        "Tokens recomputed after a preemption, a failover or another leader's end, prompts \
         included; not counted in any other token series. After another leader's end, only of \
         requests that had a token.";
    counter TOKENS_WASTED: "tutti_tokens_wasted_total", Tokens, model [REPLICA], Coordinator,
        "Tokens sampled but not accepted, because steps run ahead: their sequence had ended or was \
         preempted; not counted in any other token series.";
    gauge(Sum) PROMPT_THROUGHPUT: "tutti_prompt_throughput_tokens_per_second", Tokens, model [],
        Coordinator,
        "Deprecated, use rate(): prompt tokens computed per second of the last log interval.";
    gauge(Sum) GENERATION_THROUGHPUT: "tutti_generation_throughput_tokens_per_second", Tokens,
        model [], Coordinator,
        "Deprecated, use rate(): tokens generated per second of the last log interval.";

    // Engine steps.
    counter ENGINE_STEPS: "tutti_engine_steps_total", Steps, model [REPLICA], Coordinator,
        "Engine steps completed.";
    histogram(STEP_TOKENS) ITERATION_TOKENS: "tutti_iteration_tokens", Tokens, model [REPLICA],
        Coordinator,
        "Tokens per engine step: prompt tokens computed plus tokens generated, once per step.";
    histogram(STEP_SECONDS) RANK_STRAGGLER_GAP: "tutti_rank_straggler_gap_seconds", Seconds,
        model [REPLICA], Coordinator,
        "Per engine step: slowest rank's forward time minus fastest rank's.";
    counter RANK_DISAGREEMENTS: "tutti_rank_disagreements_total", Events, model [REPLICA],
        Coordinator,
        "Times the ranks of a replica had different tokens of one step; it was formed again.";
    counter STEPS_OVERDUE: "tutti_steps_overdue_total", Events, model [REPLICA], Coordinator,
        "Steps given up because they took much longer than such steps do, or longer than --step-timeout; the replica was formed again.";
    counter PREEMPTIONS: "tutti_preemptions_total", Events, model [REPLICA], Coordinator,
        "Sequences (choices of requests) put back from the batch into the queue for lack of KV blocks.";
    counter PREEMPTED_TOKENS: "tutti_preempted_tokens_total", Tokens, model [REPLICA], Coordinator,
        "Computed tokens whose KV blocks were given up by preemptions.";

    counter PREEMPTIONS_SWAPPED: "tutti_preemptions_swapped_total", Events, model [REPLICA],
        Coordinator,
        "Preemptions of tutti_preemptions_total whose KV blocks went to host memory; those of the \
         others are recomputed.",
        when "requests are swapped";
    counter KV_SWAPPED_BLOCKS: "tutti_kv_swapped_blocks_total", Blocks,
        model [SwapDirection::LABEL, REPLICA], Coordinator,
        "KV blocks copied to host memory (out) and back (in).", when "requests are swapped";

    // Speculative decoding: the coordinator's verdict on each draft when its step was answered.
    counter SPEC_DECODE_DRAFTS: "tutti_spec_decode_drafts_total", Events, model [REPLICA],
        Coordinator, "Drafts verified, each of one or more tokens.",
        when "decoding is speculative";
    counter SPEC_DECODE_DRAFT_TOKENS: "tutti_spec_decode_draft_tokens_total", Tokens,
        model [REPLICA], Coordinator, "Tokens drafted.", when "decoding is speculative";
    counter SPEC_DECODE_ACCEPTED_TOKENS: "tutti_spec_decode_accepted_tokens_total", Tokens,
        model [REPLICA], Coordinator, "Drafted tokens accepted.", when "decoding is speculative";
    counter SPEC_DECODE_ACCEPTED_PER_POSITION:
        "tutti_spec_decode_accepted_tokens_per_position_total", Tokens,
        model [POSITION, REPLICA], Coordinator,
        "Drafted tokens accepted, by their place in the draft, from 0; adds up to those accepted.",
        when "decoding is speculative";
    counter SPEC_DECODE_EMITTED_TOKENS: "tutti_spec_decode_emitted_tokens_total", Tokens,
        model [REPLICA], Coordinator,
        "Tokens emitted by drafts: those accepted and one more per draft, except where the text \
         ended before.",
        when "decoding is speculative";
    counter SPEC_DECODE_EMITTABLE_TOKENS: "tutti_spec_decode_emittable_tokens_total", Tokens,
        model [REPLICA], Coordinator,
        "Tokens that drafts would emit if all were accepted: those drafted and one more per draft.",
        when "decoding is speculative";
    gauge(Ratio {
        numerator: SPEC_DECODE_ACCEPTED_TOKENS.series(),
        denominator: SPEC_DECODE_DRAFT_TOKENS.series(),
    }) SPEC_DECODE_ACCEPTANCE: "tutti_spec_decode_draft_acceptance_ratio", Ratio, model [REPLICA],
        Coordinator, "Fraction of drafted tokens that were accepted, over all time.",
        when "decoding is speculative";
    gauge(Ratio {
        numerator: SPEC_DECODE_EMITTED_TOKENS.series(),
        denominator: SPEC_DECODE_EMITTABLE_TOKENS.series(),
    }) SPEC_DECODE_EFFICIENCY: "tutti_spec_decode_efficiency_ratio", Ratio, model [REPLICA],
        Coordinator,
            "Tokens emitted by drafts as a fraction of those that could have been, over all time.",
        when "decoding is speculative";

    // Latencies, counted from arrival; they survive the loss of a replica.
    histogram(TTFT_SECONDS) TIME_TO_FIRST_TOKEN: "tutti_time_to_first_token_seconds", Seconds,
        model [], Coordinator,
        "Arrival to first token, once per request, by the coordinator that accepted that token.";
    histogram(TOKEN_SECONDS) INTER_TOKEN_LATENCY: "tutti_inter_token_latency_seconds", Seconds,
        model [], Coordinator,
        "Time between two tokens of one choice, once per gap; not if another leader accepted the \
         first of them.";
    histogram(TOKEN_SECONDS) REQUEST_TIME_PER_OUTPUT_TOKEN:
        "tutti_request_time_per_output_token_seconds", Seconds, model [], Coordinator,
        "Mean time per output token after the first, once per request that ended by stop or length.";
    histogram(REQUEST_SECONDS) E2E_REQUEST_LATENCY: "tutti_e2e_request_latency_seconds", Seconds,
        model [], Coordinator,
        "Arrival to end, once per request for text that ended by stop or length.";
    histogram(REQUEST_SECONDS) EMBEDDING_LATENCY: "tutti_embedding_latency_seconds", Seconds,
        model [], Coordinator,
        "Arrival of a call for embeddings, classes, a ranking or scores to what the model makes of one \
         of its inputs, once per input; not counted in any other latency.";
    histogram(REQUEST_SECONDS) REQUEST_QUEUE_TIME: "tutti_request_queue_time_seconds", Seconds,
        model [], Coordinator,
        "Arrival to first scheduling, once per request for text that came so far, however it ends.";
    histogram(REQUEST_SECONDS) REQUEST_PREFILL_TIME: "tutti_request_prefill_time_seconds", Seconds,
        model [], Coordinator,
        "First scheduling to first token, of requests that ended by stop or length.";
    histogram(REQUEST_SECONDS) REQUEST_DECODE_TIME: "tutti_request_decode_time_seconds", Seconds,
        model [], Coordinator,
        "First to last token, preemptions included, of requests that ended by stop or length.";
    histogram(REQUEST_SECONDS) REQUEST_INFERENCE_TIME: "tutti_request_inference_time_seconds",
        Seconds, model [], Coordinator,
        "First scheduling to last token, of requests that ended by stop or length.";

    // Sizes and parameters of requests.
    histogram(REQUEST_TOKENS) REQUEST_PROMPT_TOKENS: "tutti_request_prompt_tokens", Tokens,
        model [], Coordinator,
            "Prompt tokens of a request, once when it ends; 0 for one that ended with its \
             coordinator or its replica's actor.";
    histogram(REQUEST_TOKENS) REQUEST_GENERATION_TOKENS: "tutti_request_generation_tokens", Tokens,
        model [], Coordinator,
        "Tokens accepted over all choices of a request, once when it ends for any reason.";
    histogram(REQUEST_TOKENS) REQUEST_MAX_NUM_GENERATION_TOKENS:
        "tutti_request_max_num_generation_tokens", Tokens, model [], Coordinator,
        "Tokens accepted of a request's longest choice, once when it ends for any reason.";
    histogram(CHOICES) REQUEST_PREEMPTIONS: "tutti_request_preemptions", Events,
        model [], Coordinator,
        "How often sequences of a request were preempted, once when it ends for any reason.";
    histogram(REQUEST_TOKENS) REQUEST_PREFILL_COMPUTED_TOKENS:
        "tutti_request_prefill_computed_tokens", Tokens, model [], Coordinator,
        "Prompt tokens of a request that the KV cache did not have, over all choices, once when it ends by stop or length.";
    histogram(CHOICES) REQUEST_PARAMS_N: "tutti_request_params_n", Value, model [], Coordinator,
        "The parameter n, once when a request ends for any reason.";
    histogram(CHOICES) REQUEST_PARAMS_BEST_OF: "tutti_request_params_best_of", Value, model [],
        Coordinator,
        "The parameter best_of (n where it is not given), once when a request ends for any reason.";
    histogram(REQUEST_TOKENS) REQUEST_PARAMS_MAX_TOKENS: "tutti_request_params_max_tokens", Tokens,
        model [], Coordinator, "The parameter max_tokens, once when a request ends for any reason; \
        0 for one that ended with its replica's actor.";

    // KV cache, per replica: all ranks have the same blocks, so they are counted once.
    gauge(Sum) KV_CACHE_BLOCKS_USED: "tutti_kv_cache_used_blocks", Blocks, model [REPLICA],
        Coordinator, "KV blocks that requests hold now.";
    gauge(Sum) KV_CACHE_BLOCKS: "tutti_kv_cache_blocks", Blocks, model [REPLICA], Coordinator,
        "KV blocks in total.";
    gauge(Ratio {
        numerator: KV_CACHE_BLOCKS_USED.series(),
        denominator: KV_CACHE_BLOCKS.series(),
    }) KV_CACHE_USAGE: "tutti_kv_cache_usage_ratio", Ratio, model [REPLICA], Coordinator,
        "Fraction of KV blocks in use, 0 to 1. Across replicas, divide the sums; do not average.";
    gauge(Sum) HOST_KV_CACHE_BLOCKS_USED: "tutti_host_kv_cache_used_blocks", Blocks,
        model [REPLICA], Coordinator, "KV blocks in host memory that requests hold now.",
        when "requests are swapped";
    gauge(Sum) HOST_KV_CACHE_BLOCKS: "tutti_host_kv_cache_blocks", Blocks, model [REPLICA],
        Coordinator, "KV blocks in host memory in total.", when "requests are swapped";
    gauge(Ratio {
        numerator: HOST_KV_CACHE_BLOCKS_USED.series(),
        denominator: HOST_KV_CACHE_BLOCKS.series(),
    }) HOST_KV_CACHE_USAGE: "tutti_host_kv_cache_usage_ratio", Ratio, model [REPLICA], Coordinator,
        "Fraction of KV blocks in host memory in use, 0 to 1.", when "requests are swapped";
    gauge(Max) CACHE_CONFIG_INFO: "tutti_cache_config_info", Info,
        model [BLOCK_SIZE, CACHE_DTYPE, ENABLE_PREFIX_CACHING, MAX_MODEL_LEN,
         MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, NUM_BLOCKS, NUM_HOST_BLOCKS, REPLICA,
         TENSOR_PARALLEL],
        Coordinator, "Sizes and options of a replica's engine, while it serves.";

    // Ranks, labelled and never deduplicated.
    histogram(STEP_SECONDS) RANK_STEP: "tutti_rank_step_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank, "Plan received to result handed back, per step.";
    histogram(STEP_SECONDS) RANK_FORWARD: "tutti_rank_forward_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank, "Forward pass without collectives, per step.";
    histogram(STEP_SECONDS) RANK_COLLECTIVE: "tutti_rank_collective_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank,
        "Waiting for and exchanging data with other ranks, per step. Where GPUs exchange data by \
         themselves, their time may be counted for the next step, and what NCCL exchanges within \
         CUDA graphs is not measured: that is an unknown part of the forward pass.";
    counter RANK_COLLECTIVE_BYTES: "tutti_rank_collective_bytes_total", Bytes,
        model [ALGORITHM, RANK, REPLICA, WORKER], EveryRank,
        "Bytes of partial sums and logits that a rank exchanged with other ranks, by algorithm: \
         host (through host memory or TCP), nccl, one_shot and two_shot (own kernels that access \
         other GPUs' memory).",
        when "replicas have several ranks";
    counter RANK_COLLECTIVE_ABORTS: "tutti_rank_collective_aborts_total", Events,
        model [RANK, REPLICA, WORKER], EveryRank,
        "Exchanges with other ranks that were not completed: aborted, failed, or not finished in \
         time.";
    histogram(STEP_SECONDS) RANK_SAMPLE: "tutti_rank_sample_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank, "Choosing tokens, per step.";
    histogram(STEP_SECONDS) RANK_MASKS: "tutti_rank_mask_wait_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank,
        "Waiting for masks of structured output when a step was computed, or on its way through a GPU, per step that has some.";
    histogram(STEP_SECONDS) RANK_DRAFT: "tutti_rank_draft_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank,
        "Drafting by the draft model (rank 0), per step that drafts; prompt tokens that it had \
         missed included.",
        when "a draft model drafts";
    histogram(STEP_SECONDS) RANK_IDLE: "tutti_rank_idle_seconds", Seconds,
        model [RANK, REPLICA, WORKER], EveryRank,
        "The executor had nothing to do before a step, per step that has sequences.";
    gauge(Sum) RANK_WEIGHTS: "tutti_rank_weights_bytes", Bytes, model [RANK, REPLICA, WORKER],
        EveryRank, "Weights that a rank holds.";
    gauge(Max) RANK_LOAD: "tutti_rank_load_seconds", Seconds, model [RANK, REPLICA, WORKER],
        EveryRank, "Time the last load of a rank's weights took; 0 when they were kept.";

    // Cluster.
    gauge(Max) REPLICA_UP: "tutti_replica_up", Items, model [REPLICA], Coordinator,
        "1 while a replica serves, 0 while it is being formed again.";
    gauge(Max) REPLICAS_WANTED: "tutti_replicas_wanted", Items, model [], Coordinator,
        "Replicas wanted by --replicas or tutti scale; without either, the replicas that exist, \
         serving or not.";
    counter FAILOVERS: "tutti_failovers_total", Events,
        model [FailoverReason::LABEL, REPLICA], Coordinator,
        "Times a serving replica broke and its requests were moved, by why it broke.";
    counter FENCED_FRAMES: "tutti_fenced_frames_total", Events, [FencedReason::LABEL], Coordinator,
        "Results of steps that had no effect, by reason: their worker had no rank, their epoch is \
         over, or they came twice.";
    gauge(Max) WORKER_UP: "tutti_worker_up", Items, [WORKER], Coordinator,
        "1 while a worker is linked, 0 for ten minutes after it is gone, unless it was drained.";
    gauge(Max) WORKER_INFO: "tutti_worker_info", Info, [NODE, VERSION, WORKER], Coordinator,
        "The node name and version of a linked worker.";
    gauge(Max) SLOW_RANKS: "tutti_slow_ranks", Items, [WORKER], Coordinator,
        "1 for a worker that takes more than 3 times as long as the others of its replica, for 30 \
         s; 0 again when it has lost its rank, or was not seen to be slow for 2 minutes, as while \
         its replica is idle.";
    gauge(Max) DEVICES_SET_ASIDE: "tutti_devices_set_aside", Items, [WORKER], Coordinator,
        "1 for a linked worker that gets no rank for a while because its device failed repeatedly.";
    counter WORKER_RESTARTS: "tutti_worker_restarts_total", Events, [WORKER], Coordinator,
        "Times a worker came back as another process.";
    gauge(Max) WORKER_LAST_REPORT: "tutti_worker_last_report_timestamp_seconds", Seconds, [WORKER],
        Coordinator, "When a worker's stats last arrived, in seconds since 1970.";
    gauge(Max) FRONTEND_UP: "tutti_frontend_up", Items, [FRONTEND], Coordinator,
        "1 while a front end of its own process is linked, 0 for ten minutes after it was lost.", when "front ends join";
    gauge(Max) FRONTEND_LAST_REPORT: "tutti_frontend_last_report_timestamp_seconds", Seconds,
        [FRONTEND], Coordinator, "When a front end's stats last arrived, in seconds since 1970.",
        when "front ends join";
    counter HANDSHAKES_REFUSED: "tutti_handshakes_refused_total", Events,
        [HandshakeRefusal::LABEL], Coordinator,
        "Connections to --cluster-listen that did not become a worker's or front end's link, by reason.";
    counter LINKS_ENDED: "tutti_links_ended_total", Events, [LinkEnd::LABEL], Coordinator,
        "Links of workers and front ends that ended, by how.";
    gauge(Sum) ACTORS: "tutti_actors", Items, [ActorState::LABEL], Coordinator,
        "Actors by state: workers, replicas, front ends and named actors of applications.";
    counter ACTOR_RESTARTS: "tutti_actor_restarts_total", Events, [], Process,
        "Times a named actor was started again in its process because it had failed.";
    counter ACTOR_MESSAGES: "tutti_actor_messages_total", Events, [], Process,
        "Messages put into mailboxes of named actors.";
    counter ACTOR_MESSAGES_REFUSED: "tutti_actor_messages_refused_total", Events,
        [MessageRefusal::LABEL], Process,
        "Messages to named actors that had no effect, by reason; the sender was told.";

    // Membership through etcd, as the coordinator sees it.
    gauge(Max) MEMBERSHIP_CONNECTED: "tutti_membership_connected", Items, [], Coordinator,
        "1 while etcd answers the coordinator, 0 while it continues with what it last knew.",
        when "the cluster meets through etcd";
    gauge(Max) MEMBERSHIP_CONFIRMED: "tutti_membership_confirmed_timestamp_seconds", Seconds, [],
        Coordinator,
        "When etcd last confirmed what the coordinator knows of the cluster, in seconds since 1970.",
        when "the cluster meets through etcd";
    gauge(Max) MEMBERSHIP_LEADING: "tutti_membership_leading", Items, [], Coordinator,
        "1 at the coordinator that leads, 0 at one that stands by or lost its lease.",
        when "the cluster meets through etcd";
    gauge(Max) MEMBERSHIP_MEMBERS: "tutti_membership_members", Items, [MemberRole::LABEL],
        Coordinator, "Processes registered with etcd, those that stand by included.",
        when "the cluster meets through etcd";
    gauge(Max) TOTALS_CHECKPOINT: "tutti_totals_checkpoint_timestamp_seconds", Seconds, [],
        Coordinator,
        "When etcd last had the totals for the next leader, written or unchanged, in seconds since 1970; first when this leader began.",
        when "the cluster meets through etcd";
    gauge(Max) TOTALS_CHECKPOINT_INTERVAL: "tutti_totals_checkpoint_interval_seconds", Seconds, [],
        Coordinator, "How often the totals are written to etcd (--checkpoint-interval).",
        when "the cluster meets through etcd";

    // HTTP.
    counter HTTP_REQUESTS: "tutti_http_requests_total", Requests, [Method::LABEL, ROUTE, STATUS],
        Frontend,
        "HTTP requests answered; status 499: the client left before the end of its answer.";
    histogram(REQUEST_SECONDS) HTTP_REQUEST_DURATION: "tutti_http_request_duration_seconds",
        Seconds, [Method::LABEL, ROUTE], Frontend,
        "HTTP request received to the end of its answer; for a stream, its last event.";
    gauge(Sum) HTTP_REQUESTS_IN_FLIGHT: "tutti_http_requests_in_flight", Requests, [], Frontend,
        "HTTP requests whose answers, streams included, have not ended.";
    counter HTTP_CONNECTIONS_REFUSED: "tutti_http_connections_refused_total", Events, [], Frontend,
        "HTTP connections that were closed at once because their address had reached its limit.";
    counter FILE_RELOADS: "tutti_secret_file_reloads_total", Events,
        [SecretFile::LABEL, ReloadOutcome::LABEL], Frontend,
        "Files of API keys and of TLS that were read again because they changed, by outcome.";

    counter TRACE_SPANS_EXPORTED: "tutti_trace_spans_exported_total", Events, [], Frontend,
        "Spans of traces that the collector has taken (--otlp-traces-endpoint).";
    counter TRACE_SPANS_DROPPED: "tutti_trace_spans_dropped_total", Events, [SpanLoss::LABEL],
        Frontend, "Spans of traces that were dropped, by reason; requests never wait for them.";

    // Processes, hosts and devices. Processes on one host see the same host: maximum, not sum.
    counter PROCESS_CPU: "tutti_process_cpu_seconds_total", Seconds, [PROCESS], Process,
        "CPU time of a process's threads, user and system.";
    gauge(Max) PROCESS_MEMORY: "tutti_process_resident_memory_bytes", Bytes, [PROCESS], Process,
        "Resident memory of a process.";
    gauge(Max) PROCESS_MEMORY_LIMIT: "tutti_process_memory_limit_bytes", Bytes, [PROCESS], Process,
        "Memory limit of a process's control group, such as its container, for all processes in it \
         together.",
        when "a control group bounds memory";
    gauge(Max) PROCESS_MEMORY_LIMIT_USED: "tutti_process_memory_limit_used_bytes", Bytes, [PROCESS],
        Process,
        "Memory in use of tutti_process_memory_limit_bytes, by all processes of the control group \
         together, without what the kernel can take back: file pages and slab caches.",
        when "a control group bounds memory";
    counter LOG_LINES_DROPPED: "tutti_log_lines_dropped_total", Events, [PROCESS], Process,
        "Lines of a process's log that were not written to its stderr because its reader was too \
         slow.";
    gauge(Max) HOST_CPU_USAGE: "tutti_host_cpu_usage_ratio", Ratio, [HOST], Process,
        "Share of a host's cores in use since the last report, 0 to 1.";
    gauge(Max) HOST_CPUS: "tutti_host_cpus", Items, [HOST], Process, "Cores of a host.";
    gauge(Max) HOST_MEMORY_USED: "tutti_host_memory_used_bytes", Bytes, [HOST], Process,
        "Memory in use on a host.";
    gauge(Max) HOST_MEMORY: "tutti_host_memory_bytes", Bytes, [HOST], Process,
        "Memory of a host.";
    gauge(Max) GPU_INFO: "tutti_gpu_info", Info, [GPU, HOST, NAME, UUID], Process,
        "The name of a GPU, by NVML.", when "NVML finds a GPU";
    gauge(Max) GPU_UTILIZATION: "tutti_gpu_utilization_ratio", Ratio, [GPU, HOST, UUID], Process,
        "Share of the last sample period in which a GPU ran a kernel, 0 to 1, by NVML.",
        when "NVML finds a GPU";
    gauge(Max) GPU_MEMORY_USED: "tutti_gpu_memory_used_bytes", Bytes, [GPU, HOST, UUID], Process,
        "Device memory in use on a GPU, by NVML.", when "NVML finds a GPU";
    gauge(Max) GPU_MEMORY: "tutti_gpu_memory_bytes", Bytes, [GPU, HOST, UUID], Process,
        "Device memory of a GPU, by NVML.", when "NVML finds a GPU";
    gauge(Max) GPU_TEMPERATURE: "tutti_gpu_temperature_celsius", Celsius, [GPU, HOST, UUID],
        Process,
        "Temperature of a GPU, by NVML.", when "NVML finds a GPU";
    gauge(Max) GPU_POWER: "tutti_gpu_power_watts", Watts, [GPU, HOST, UUID], Process,
        "Power drawn by a GPU, by NVML.", when "NVML finds a GPU";

    // The metrics themselves.
    counter REPORTS_REFUSED: "tutti_reports_refused_total", Events, [ReportRefusal::LABEL],
        Coordinator, "Stats reports of workers and front ends not merged, by reason.";
    counter OBSERVATIONS_REFUSED: "tutti_observations_refused_total", Events,
        [ObservationRefusal::LABEL], Process, "Values not recorded because they are invalid. \
        too_large: reports that had no room for the metrics of the process's application.";
    histogram(STEP_SECONDS) SCRAPE_DURATION: "tutti_scrape_duration_seconds", Seconds, [],
        Coordinator, "Merging and rendering one scrape; visible from the next scrape on.";
    gauge(Max) BUILD_INFO: "tutti_build_info", Info, [VERSION], Coordinator,
        "The coordinator's version.";
    gauge(Max) PROCESS_START_TIME: "tutti_process_start_time_seconds", Seconds, [], Coordinator,
        "When the coordinator started, in seconds since 1970.";
}

/// All series, in the order of the documentation.
pub static CATALOGUE: &[Definition] = DEFINITIONS;

/// Hashes by catalogue position. The hash of a series differs between two programs if its labels,
/// kind or bucket bounds do, so that its totals must not be added up.
pub(super) static FORMS: [u64; DEFINITIONS.len()] = {
    let mut forms = [0; DEFINITIONS.len()];
    let mut row = 0;
    while row < forms.len() {
        forms[row] = form(&DEFINITIONS[row]);
        row += 1;
    }
    forms
};

/// FNV-1a hash of everything that decides whether two totals may be added.
const fn form(definition: &Definition) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325;
    state = hash_bytes(state, definition.name.as_bytes());
    let mut label = 0;
    while label < definition.labels.len() {
        state = hash_bytes(state, definition.labels[label].name.as_bytes());
        label += 1;
    }
    match definition.kind {
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
    }
}

const fn hash_bytes(mut state: u64, bytes: &[u8]) -> u64 {
    let mut index = 0;
    while index < bytes.len() {
        state = (state ^ bytes[index] as u64).wrapping_mul(0x0100_0000_01b3);
        index += 1;
    }
    // Terminates the field, so that "ab","c" and "a","bc" differ.
    (state ^ 0xff).wrapping_mul(0x0100_0000_01b3)
}
