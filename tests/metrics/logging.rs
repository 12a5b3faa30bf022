//! The log line's text and its silence.
use std::time::Duration;

use coordinator::metrics::LogLine;
use coordinator::metrics::log_line::Field;
use coordinator::metrics::observe::{RequestSummary, StepTokens};
use shared::ids::ReplicaId;

use crate::observing::{config, hub, id, ms};

const SUMMARY: RequestSummary = RequestSummary { prompt_tokens: 7, n: 1, max_tokens: 100 };

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
        let tokens =
            StepTokens { prompt_computed: 500, prompt_cached: 77, generated: 12, recomputed: 3 };
        record.step(replica, tokens);
    }
    drop(record);
    // 1000 prompt and 24 generated tokens in 10 s; 50 of 400 blocks, not the mean of 10 and 20 %.
    assert_eq!(
        log.lines(seconds(20), &hub.merged()).concat(),
        concat!(
            "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 2.4 tokens/s, \
             Running: 1 reqs, Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 12.5%, \
             CPU KV cache usage: 0.0%."
        )
    );

    let mut record = hub.observer().record();
    for track in [running, pending, third] {
        record.aborted(track, SUMMARY);
    }
    record.kv_blocks(a, 0, 300);
    record.kv_blocks(b, 0, 100);
    drop(record);
    // No step since: the timer alone makes it fall.
    assert_eq!(
        log.lines(seconds(30), &hub.merged()).concat(),
        concat!(
            "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, \
             Running: 0 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 0.0%, \
             CPU KV cache usage: 0.0%."
        )
    );
    assert!(log.lines(seconds(40), &hub.merged()).is_empty(), "idle and said so");
    hub.observer().record().step(a, StepTokens { generated: 1, ..StepTokens::default() });
    assert!(log.lines(seconds(50), &hub.merged()).len() == 1, "awake again");
}
