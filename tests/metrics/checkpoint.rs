//! Totals that outlive the coordinator: what the next one makes of a checkpoint. That no sequence of
//! events loses or doubles anything is in [`crate::merge_laws`].
use std::time::Duration;

use shared::ids::{Incarnation, WorkerId};
use shared::metrics::application::Metrics;
use shared::metrics::catalogue::{
    ACTOR_MESSAGES, HTTP_REQUESTS, PROCESS_CPU, RANK_STEP, REQUEST_SUCCESS, REQUESTS_ACCEPTED,
    REQUESTS_IN_FLIGHT, TIME_TO_FIRST_TOKEN,
};
use shared::metrics::labels::FinishedReason;
use shared::metrics::merger::checkpoint::{Checkpoint, CheckpointError};
use shared::metrics::{LocalStats, Merger, Source, Value};
use shared::protocol::FrontendId;

const OWN: (Source, Incarnation) = (Source::Coordinator, Incarnation(1));

/// What the next coordinator starts with.
fn next(merger: &Merger) -> Merger {
    let bytes = merger.checkpoint().encode().unwrap();
    let mut next = Merger::default();
    assert_eq!(next.restore(Checkpoint::decode(&bytes).unwrap()), 0);
    next
}

#[test]
fn requests_in_flight_end_with_the_coordinator_that_had_them() {
    let mut stats = LocalStats::new();
    let accepted = stats.counter(REQUESTS_ACCEPTED, []);
    let stopped = stats.counter(REQUEST_SUCCESS, ["stop"]);
    let failed = stats.counter(REQUEST_SUCCESS, ["error"]);
    let in_flight = stats.gauge(REQUESTS_IN_FLIGHT, []);
    let ttft = stats.histogram(TIME_TO_FIRST_TOKEN, []);
    stats.add(accepted, 10);
    stats.add(stopped, 6);
    stats.add(failed, 1);
    stats.set(in_flight, 3.0);
    stats.observe_duration(ttft, Duration::from_millis(30));
    let mut merger = Merger::default();
    merger.apply(OWN.0, OWN.1, 1, stats.snapshot()).unwrap();
    // However often it is handed on.
    for merger in [next(&merger), next(&next(&merger))] {
        let merged = merger.merged();
        assert_eq!(merged.counter(REQUESTS_ACCEPTED, []), Some(10));
        assert_eq!(merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Stop), 6);
        assert_eq!(merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Error), 4);
        assert_eq!(merged.gauge(REQUESTS_IN_FLIGHT, []), None, "gauges do not outlive anybody");
        assert_eq!(merged.histogram(TIME_TO_FIRST_TOKEN, []).unwrap().count(), 1);
    }
}

#[test]
fn a_front_end_that_gets_another_slot_is_counted_once() {
    let front_end = |slot: u32, sequence: u64, requests: u64, cpu: u64| {
        let mut stats = LocalStats::new();
        let answers = stats.counter(HTTP_REQUESTS, ["GET", "/", "200"]);
        stats.add(answers, requests);
        let cpu_of = stats.counter(PROCESS_CPU, [&format!("frontend-{slot}")]);
        stats.add(cpu_of, cpu);
        (Source::Frontend(FrontendId(slot)), Incarnation(77), sequence, stats.snapshot())
    };
    let mut merger = Merger::default();
    let (source, incarnation, sequence, snapshot) = front_end(1, 5, 100, 9);
    merger.apply(source, incarnation, sequence, snapshot).unwrap();
    let mut next = next(&merger);
    let answers = |merger: &Merger| merger.merged().counter(HTTP_REQUESTS, ["GET", "/", "200"]);
    assert_eq!(answers(&next), Some(100), "before it reports");
    let (source, incarnation, sequence, snapshot) = front_end(2, 6, 120, 4);
    next.apply(source, incarnation, sequence, snapshot).unwrap();
    assert_eq!(answers(&next), Some(120));
    let cpu = |name| next.merged().counter(PROCESS_CPU, [name]);
    assert_eq!((cpu("frontend-1"), cpu("frontend-2")), (Some(9), Some(4)));
    next.retire(source, incarnation);
    assert_eq!(answers(&next), Some(120));
}

#[test]
fn a_worker_that_gets_another_slot_and_its_own_again_is_counted_once() {
    let worker = |slot: u32, sequence: u64, steps: u64, messages: u64| {
        let mut stats = LocalStats::new();
        let step = stats.histogram(RANK_STEP, ["0", "0", &slot.to_string()]);
        (0..steps).for_each(|_| stats.observe_duration(step, Duration::from_millis(1)));
        let of_actors = stats.counter(ACTOR_MESSAGES, []);
        stats.add(of_actors, messages);
        let mut snapshot = stats.snapshot();
        let metrics = Metrics::new();
        metrics.counter("app_total", "Help.", &[]).unwrap().add(messages, &[]).unwrap();
        snapshot.application = metrics.snapshot();
        (Source::Worker(WorkerId(slot)), Incarnation(77), sequence, snapshot)
    };
    let check = |merger: &Merger, steps: u64, messages: u64| {
        let merged = merger.merged();
        assert_eq!(merged.histogram_sum(RANK_STEP).count(), steps);
        assert_eq!(merged.counter(ACTOR_MESSAGES, []), Some(messages));
        let [family] = merged.application() else { panic!("one family") };
        let series: Vec<&Value> = family.series.values().collect();
        assert_eq!(series, [&Value::Counter(messages)]);
    };
    let mut merger = Merger::default();
    // Of each slot its own steps, of the process whatever it has counted by then.
    let reports = [(0, 9, 5, 10, 5), (1, 3, 2, 15, 7), (0, 10, 6, 20, 8)];
    for (slot, sequence, of_slot, messages, steps) in reports {
        let (source, incarnation, sequence, snapshot) = worker(slot, sequence, of_slot, messages);
        let before = merger.merged().histogram_sum(RANK_STEP).count();
        merger = next(&merger);
        assert_eq!(merger.merged().histogram_sum(RANK_STEP).count(), before);
        merger.apply(source, incarnation, sequence, snapshot).unwrap();
        check(&merger, steps, messages);
    }
    let (source, incarnation, ..) = worker(0, 0, 0, 0);
    merger.retire(source, incarnation);
    check(&merger, 8, 20);
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let bytes = Merger::default().checkpoint().encode().unwrap();
    assert!(Checkpoint::decode(&bytes).is_ok());
    assert!(Checkpoint::decode(&bytes[..bytes.len() - 1]).is_err());
    assert!(Checkpoint::decode(&[]).is_err());
    let mut other = bytes.clone();
    other[0] = 9;
    assert_eq!(Checkpoint::decode(&other), Err(CheckpointError::OtherForm(9)));
    let large = vec![1; (16 << 20) + 1];
    assert_eq!(Checkpoint::decode(&large), Err(CheckpointError::TooLarge(large.len())));
}
