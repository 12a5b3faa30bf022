//! A coordinator that starts without the last one's totals, while workers and front ends go on.
use std::time::Duration;

use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::metrics::application::Metrics;
use shared::metrics::catalogue::{HTTP_REQUEST_DURATION, HTTP_REQUESTS, RANK_STEP, RANK_WEIGHTS};
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{
    LocalStats, Merger, PartialSnapshot, RankStats, Source, Value, decode_snapshot,
};
use shared::protocol::{FrontendId, StepTimings};

const FRONT: Source = Source::Frontend(FrontendId(1));
const RUN: Incarnation = Incarnation(77);
const ANSWER: [&str; 3] = ["GET", "/", "200"];

/// The report of a front end that has answered so many requests, in a second each.
fn report(requests: u64) -> PartialSnapshot {
    let mut stats = LocalStats::new();
    let answers = stats.counter(HTTP_REQUESTS, ANSWER);
    stats.add(answers, requests);
    let durations = stats.histogram(HTTP_REQUEST_DURATION, ["GET", "/"]);
    stats.observe_n(durations, 1.0, requests);
    let mut snapshot = stats.snapshot();
    let metrics = Metrics::new();
    metrics.counter("app_total", "Help.", &["tag"]).unwrap().add(requests, &["x"]).unwrap();
    snapshot.application = metrics.snapshot();
    snapshot
}

/// What a merger has of the requests: all kinds of totals agree.
fn counted(merger: &Merger) -> u64 {
    let merged = merger.merged();
    let counter = merged.counter(HTTP_REQUESTS, ANSWER).unwrap();
    let durations = merged.histogram(HTTP_REQUEST_DURATION, ["GET", "/"]).unwrap();
    assert_eq!((durations.count(), durations.sum()), (counter, counter as f64));
    let [family] = merged.application() else { panic!("one family") };
    assert_eq!(family.series.values().collect::<Vec<_>>(), [&Value::Counter(counter)]);
    counter
}

/// What the next coordinator makes of the checkpoint.
fn next(merger: &Merger) -> Merger {
    let mut next = Merger::default();
    let bytes = merger.checkpoint().encode().unwrap();
    assert_eq!(next.restore(Checkpoint::decode(&bytes).unwrap()), 0);
    next
}

#[test]
fn what_was_counted_for_a_coordinator_without_a_checkpoint_does_not_count_again() {
    let mut merger = Merger::default();
    merger.has_history(FRONT, RUN);
    merger.apply(FRONT, RUN, 900, report(1_000_000)).unwrap();
    assert_eq!(counted(&merger), 0);
    merger.apply(FRONT, RUN, 901, report(1_000_003)).unwrap();
    assert_eq!(counted(&merger), 3);
    // It joins the same coordinator again, with the slot that it had there.
    merger.lost(FRONT, RUN);
    assert_eq!(counted(&merger), 3);
    merger.has_history(FRONT, RUN);
    merger.apply(FRONT, RUN, 902, report(1_000_005)).unwrap();
    assert_eq!(counted(&merger), 5);
    // Later coordinators continue with what counts, under whatever slot.
    let mut next_one = next(&next(&merger));
    assert_eq!(counted(&next_one), 5);
    let other = Source::Frontend(FrontendId(2));
    next_one.has_history(other, RUN);
    next_one.apply(other, RUN, 903, report(1_000_009)).unwrap();
    assert_eq!(counted(&next_one), 9);
    next_one.retire(other, RUN);
    assert_eq!((counted(&next_one), counted(&next(&next_one))), (9, 9));
    merger.retire(FRONT, RUN);
    assert_eq!((counted(&merger), counted(&next(&merger))), (5, 5));
}

#[test]
fn who_has_served_nobody_else_counts_from_the_start() {
    let mut merger = Merger::default();
    merger.apply(FRONT, RUN, 1, report(7)).unwrap();
    assert_eq!(counted(&merger), 7);
    // Not any more than it has: it is known here.
    merger.has_history(FRONT, RUN);
    merger.apply(FRONT, RUN, 2, report(9)).unwrap();
    assert_eq!(counted(&merger), 9);
    // One whose link ended before its first report.
    let (front, run) = (Source::Frontend(FrontendId(2)), Incarnation(78));
    merger.has_history(front, run);
    merger.lost(front, run);
    merger.apply(front, run, 1, report(1)).unwrap();
    assert_eq!(counted(&merger), 10);
}

/// Where there is a checkpoint, a process that it lacks came after it was written.
#[test]
fn with_a_checkpoint_everything_counts_whenever_that_is_read() {
    let mut last = Merger::default();
    last.apply(FRONT, RUN, 5, report(100)).unwrap();
    let bytes = last.checkpoint().encode().unwrap();
    let young = (Source::Frontend(FrontendId(2)), Incarnation(78));
    for late in [false, true] {
        let mut merger = Merger::default();
        let restore = |merger: &mut Merger| {
            assert_eq!(merger.restore(Checkpoint::decode(&bytes).unwrap()), 0);
        };
        if !late {
            restore(&mut merger);
        }
        merger.has_history(FRONT, RUN);
        merger.has_history(young.0, young.1);
        merger.apply(FRONT, RUN, 6, report(110)).unwrap();
        if late {
            restore(&mut merger);
        }
        merger.apply(young.0, young.1, 9, report(4)).unwrap();
        assert_eq!(counted(&merger), 114, "late: {late}");
        merger.apply(FRONT, RUN, 7, report(111)).unwrap();
        assert_eq!(counted(&merger), 115, "late: {late}");
    }
}

/// etcd answers late, and the front end has got another slot meanwhile.
#[test]
fn totals_that_come_late_are_not_added_to_those_under_another_slot() {
    let mut last = Merger::default();
    last.apply(FRONT, RUN, 5, report(100)).unwrap();
    let mut merger = Merger::default();
    let other = Source::Frontend(FrontendId(2));
    merger.has_history(other, RUN);
    merger.apply(other, RUN, 6, report(110)).unwrap();
    merger.restore(last.checkpoint());
    assert_eq!(counted(&merger), 110);
    merger.apply(other, RUN, 7, report(112)).unwrap();
    assert_eq!(counted(&merger), 112);
}

#[test]
fn a_worker_s_steps_begin_at_its_first_report_and_its_gauges_are_there() {
    let mut rank = RankStats::new(WorkerId(0));
    rank.formed(ReplicaId(0), 0, 5, Duration::ZERO);
    let mut merger = Merger::default();
    let source = Source::Worker(WorkerId(0));
    merger.has_history(source, RUN);
    for (steps, expected) in [(50, 0), (3, 3), (2, 5)] {
        (0..steps).for_each(|_| rank.step(&StepTimings::default()));
        let stats = rank.report().unwrap();
        let snapshot = decode_snapshot(&stats.snapshot).unwrap();
        merger.apply(source, RUN, stats.sequence, snapshot).unwrap();
        let merged = merger.merged();
        assert_eq!(merged.histogram_sum(RANK_STEP).count(), expected);
        assert_eq!(merged.gauge_sum(RANK_WEIGHTS), 5.0);
    }
}
