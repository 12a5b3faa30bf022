//! The text of the log line, and when it is omitted.
use std::time::Duration;

use coordinator::metrics::interval::Intervals;
use coordinator::metrics::log_line::Field;
use coordinator::metrics::observe::{ReplicaConfig, RequestSummary, StepTokens};
use coordinator::metrics::{Hub, JsonLines, LogLine, StatLogger, StatLoggers, ThroughputGauges};
use serde_json::json;
use shared::ids::{Incarnation, ReplicaId};
use shared::metrics::labels::{FinishedReason, RejectReason};
use shared::metrics::{Limits, LocalStats, Merged, Merger, Source, catalogue};

use crate::rig::{config, hub, id, ms};

const SUMMARY: RequestSummary =
    RequestSummary { prompt_tokens: 7, n: 1, max_tokens: 100, cached_tokens: 0 };

#[test]
fn the_text_is_the_one_operators_know_and_it_falls_to_zero_then_silent() {
    let hub = hub();
    let mut log = LogLine::new(Duration::ZERO, Field::DEFAULT.to_vec());
    let seconds = Duration::from_secs;
    assert!(log.lines(seconds(10), &hub.merged()).is_empty(), "idle from the start");

    let (a, b) = (ReplicaId(0), ReplicaId(1));
    let mut record = hub.observer().record();
    record.replica_ready(a, &config(300));
    record.replica_ready(b, &config(100));
    record.kv_blocks(a, 30, 300);
    record.kv_blocks(b, 20, 100);
    let mut running = record.accepted(ms(0), 1, &id());
    record.scheduled(&mut running, a, ms(0));
    let pending = record.accepted(ms(0), 1, &id());
    let third = record.accepted(ms(0), 1, &id());
    for replica in [a, b] {
        let tokens = StepTokens {
            prompt_computed: 500,
            prompt_cached: 77,
            generated: 12,
            recomputed: 3,
            ..<_>::default()
        };
        record.step(replica, tokens);
    }
    drop(record);
    // 1000 prompt and 24 generated tokens in 10 s; 50 of 400 blocks, not the mean of 10 and 20 %.
    assert_eq!(
        log.lines(seconds(20), &hub.merged()).concat(),
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 2.4 tokens/s, \
             Running: 1 reqs, Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 12.5%, \
             CPU KV cache usage: 0.0%."
    );

    let mut record = hub.observer().record();
    for track in [running, pending, third] {
        record.aborted(track, SUMMARY);
    }
    record.kv_blocks(a, 0, 300);
    record.kv_blocks(b, 0, 100);
    drop(record);
    // No step since then: only the timer makes it fall.
    assert_eq!(
        log.lines(seconds(30), &hub.merged()).concat(),
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, \
             Running: 0 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 0.0%, \
             CPU KV cache usage: 0.0%."
    );
    assert!(log.lines(seconds(40), &hub.merged()).is_empty(), "idle and said so");
    hub.observer().record().step(a, StepTokens { generated: 1, ..StepTokens::default() });
    assert!(log.lines(seconds(50), &hub.merged()).len() == 1, "awake again");
}

/// Totals of a cluster with speculative decoding: 10 drafts of 4 tokens, half of them accepted. The
/// replica that drafted is there or gone.
fn speculating(is_there: bool) -> Merged {
    let mut stats = LocalStats::new();
    for (id, count) in [
        (catalogue::SPEC_DECODE_DRAFT_TOKENS, 40),
        (catalogue::SPEC_DECODE_ACCEPTED_TOKENS, 20),
        (catalogue::SPEC_DECODE_EMITTED_TOKENS, 30),
        (catalogue::SPEC_DECODE_EMITTABLE_TOKENS, 50),
        (catalogue::GENERATION_TOKENS, 30),
    ] {
        let counter = stats.counter(id, ["0"]);
        stats.add(counter, count);
    }
    // It is a gauge, which vanishes with its replica.
    let up = stats.gauge(catalogue::REPLICA_UP, [if is_there { "0" } else { "1" }]);
    stats.set(up, 1.0);
    let mut merger = Merger::default();
    merger.apply(Source::Coordinator, Incarnation(1), 1, stats.snapshot()).unwrap();
    merger.merged()
}

#[test]
fn speculation_has_a_line_of_its_own_and_ratios_of_sums() {
    let merged = speculating(true);
    assert_eq!(merged.gauge(catalogue::SPEC_DECODE_ACCEPTANCE, ["0"]), Some(0.5));
    assert_eq!(merged.gauge(catalogue::SPEC_DECODE_EFFICIENCY, ["0"]), Some(0.6));
    let mut log = LogLine::new(Duration::ZERO, vec![Field::Running]);
    assert_eq!(
        log.lines(Duration::from_secs(5), &merged),
        [
            "Running: 0 reqs.",
            "Speculative metrics: Draft acceptance rate: 0.500, System efficiency: 0.600, \
             Number of speculative tokens: 4, Number of accepted tokens: 20, \
             Number of draft tokens: 40, Number of emitted tokens: 30."
        ]
    );
    // The counters of a replica that is gone stay, its ratios do not.
    let gone = speculating(false);
    assert_eq!(gone.counter(catalogue::SPEC_DECODE_ACCEPTED_TOKENS, ["0"]), Some(20));
    assert_eq!(gone.gauge(catalogue::SPEC_DECODE_ACCEPTANCE, ["0"]), None);
    assert_eq!(gone.gauge(catalogue::SPEC_DECODE_EFFICIENCY, ["0"]), None);
    // Without drafts there is no ratio: neither 0 nor a division by 0.
    let none = Merger::default().merged();
    assert_eq!(none.gauge(catalogue::SPEC_DECODE_ACCEPTANCE, ["0"]), None);
}

#[test]
fn fields_are_chosen_and_means_are_of_the_interval() {
    let hub = hub();
    let replica = ReplicaId(0);
    let fields = vec![Field::Finished, Field::Ttft, Field::InterToken, Field::E2e, Field::Workers];
    let mut log = LogLine::new(Duration::ZERO, fields);
    let mut intervals = Intervals::new(Duration::ZERO);
    for (round, scale) in [(1u64, 1u64), (2, 10)] {
        let mut record = hub.observer().record();
        let mut track = record.accepted(ms(0), 1, &id());
        record.scheduled(&mut track, replica, ms(0));
        record.tokens(&mut track, 0, 1, ms(100 * scale));
        record.tokens(&mut track, 0, 1, ms(150 * scale));
        record.step(replica, StepTokens { generated: 2, ..StepTokens::default() });
        record.finished(track, FinishedReason::Stop, SUMMARY, ms(200 * scale));
        drop(record);
        let now = Duration::from_secs(10 * round);
        let merged = hub.merged();
        // The second round's means cover only the second round.
        let seconds = |millis: u64| (millis * scale) as f64 / 1000.0;
        assert_eq!(
            log.lines(now, &merged),
            [format!(
                "Finished: 1 reqs, Avg time to first token: {:.4} s, \
                 Avg inter-token latency: {:.4} s, Avg end-to-end latency: {:.4} s, Workers: 0.",
                seconds(100),
                seconds(50),
                seconds(200)
            )]
        );
        let interval = intervals.next(now, &merged).unwrap();
        assert_eq!((interval.finished, interval.generation_throughput), (1, 0.2));
        assert!(intervals.next(now, &merged).is_none(), "no time has passed");
    }
    let idle = intervals.next(Duration::from_secs(30), &hub.merged()).unwrap();
    assert!(idle.is_idle() && idle.ttft.is_none());
}

#[test]
fn json_lines_say_the_same_in_numbers() {
    let merged = speculating(true);
    let out = tempfile::NamedTempFile::new().unwrap();
    let writer = Box::new(out.reopen().unwrap());
    let start = Duration::from_secs(1_700_000_000);
    let mut json = JsonLines::new(Duration::ZERO, start, writer);
    let object = json.object(Duration::from_secs(10), &merged).unwrap();
    assert_eq!(object["time"], 1_700_000_010.0);
    assert_eq!(object["generation_tokens_per_second"], 3.0);
    assert_eq!(object["spec_decode_accepted_tokens"], 20);
    assert!(object["time_to_first_token_seconds"].is_null(), "no request, no mean");
    StatLogger::log(&mut json, Duration::from_secs(20), &merged);
    let line = std::fs::read_to_string(out.path()).unwrap();
    let line: serde_json::Value = serde_json::from_str(line.trim()).unwrap();
    assert_eq!(
        (&line["interval_seconds"], &line["prompt_tokens_per_second"]),
        (&10.0.into(), &0.0.into())
    );
}

/// JSON lines contain as much as the page: swapped requests, and how failed requests ended.
#[test]
fn json_has_what_went_wrong_in_the_interval() {
    let hub = hub();
    let replica = ReplicaId(0);
    let mut lines = JsonLines::new(Duration::ZERO, Duration::ZERO, Box::new(std::io::sink()));
    let mut running = Vec::new();
    for round in 1..3 {
        let mut record = hub.observer().record();
        record.replica_ready(replica, &ReplicaConfig { host_blocks: 8, ..config(10) });
        let mut tracks: Vec<_> = (0..6).map(|_| record.accepted(ms(0), 1, &id())).collect();
        record.swapped_out(&mut tracks[0], replica, 2);
        record.host_kv_blocks(replica, 2);
        for track in tracks.drain(1..4) {
            record.aborted(track, SUMMARY);
        }
        for track in tracks.drain(1..3) {
            record.failed(track, SUMMARY);
        }
        for _ in 0..4 {
            record.rejected(RejectReason::Overloaded);
        }
        drop(record);
        let object = lines.object(Duration::from_secs(10 * round), &hub.merged()).unwrap();
        for (name, value) in [
            ("requests_swapped", json!(round as f64)),
            ("requests_in_flight", json!(round as f64)),
            ("host_kv_cache_usage_ratio", json!(0.25)),
            ("requests_finished", json!(5)),
            ("requests_failed", json!(2)),
            ("requests_aborted", json!(3)),
            ("requests_rejected", json!(4)),
        ] {
            assert_eq!(object[name], value, "{name} of round {round}");
        }
        running.extend(tracks);
    }
}

#[test]
fn totals_of_a_leader_before_are_of_no_interval() {
    let before = Hub::new(Incarnation(1), Limits::default());
    let tokens = StepTokens { generated: 1000, prompt_computed: 500, ..StepTokens::default() };
    before.observer().record().step(ReplicaId(0), tokens);
    let hub = Hub::new(Incarnation(2), Limits::default());
    hub.restore(before.checkpoint());

    let gauges: Box<dyn StatLogger> =
        Box::new(ThroughputGauges::new(Duration::ZERO, hub.observer().clone()));
    let seconds = Duration::from_secs;
    let mut loggers = StatLoggers::new(vec![gauges], seconds(10), Duration::ZERO);
    loggers.begin(Duration::ZERO, &hub.merged());
    hub.observer().record().step(ReplicaId(0), StepTokens { generated: 20, ..tokens });
    loggers.tick(seconds(10), || hub.merged());
    let merged = hub.merged();
    assert_eq!(merged.counter_sum(catalogue::GENERATION_TOKENS), 1020);
    assert_eq!(merged.gauge_sum(catalogue::GENERATION_THROUGHPUT), 2.0);
    assert_eq!(merged.gauge_sum(catalogue::PROMPT_THROUGHPUT), 50.0);
    assert_eq!(hub.restorations(), 1);
}
