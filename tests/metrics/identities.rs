//! Identities between series hold in every scrape, whatever happens to requests and who scrapes.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coordinator::metrics::observe::{ReplicaConfig, RequestTrack, StepTokens};
use proptest::prelude::*;
use shared::ids::ReplicaId;
use shared::metrics::catalogue;
use shared::metrics::labels::{FailoverReason, FinishedReason};

use crate::rig::{SUMMARY, config, hub, id, ms, scrape};

/// What can happen to a request, chosen at random.
#[derive(Clone, Copy, Debug)]
enum Event {
    Accept,
    Route(usize, u32),
    Schedule(usize, u32),
    Preempt(usize, u32),
    Swap(usize, u32),
    Replay(usize),
    Finish(usize),
    Abort(usize),
    Fail(usize),
    Drop(usize),
    Step(u32, u64, u64),
    Ready(u32),
    Gone(u32),
}

fn event() -> impl Strategy<Value = Event> {
    let replica = 0u32..3;
    let request = 0usize..64;
    prop_oneof![
        4 => Just(Event::Accept),
        2 => (request.clone(), replica.clone()).prop_map(|(i, r)| Event::Route(i, r)),
        3 => (request.clone(), replica.clone()).prop_map(|(i, r)| Event::Schedule(i, r)),
        1 => (request.clone(), replica.clone()).prop_map(|(i, r)| Event::Preempt(i, r)),
        1 => (request.clone(), replica.clone()).prop_map(|(i, r)| Event::Swap(i, r)),
        1 => request.clone().prop_map(Event::Replay),
        1 => request.clone().prop_map(Event::Finish),
        1 => request.clone().prop_map(Event::Abort),
        1 => request.clone().prop_map(Event::Fail),
        1 => request.prop_map(Event::Drop),
        2 => (replica.clone(), 0u64..100, 0u64..100).prop_map(|(r, p, g)| Event::Step(r, p, g)),
        1 => replica.clone().prop_map(Event::Ready),
        1 => replica.prop_map(Event::Gone),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever the order of events, the identities hold after each and no total decreases.
    #[test]
    fn identities_hold_after_every_event(events in prop::collection::vec(event(), 1..60)) {
        let hub = hub();
        let mut tracks: Vec<RequestTrack> = Vec::new();
        let mut last = scrape(&hub);
        let mut accepted = 0.0;
        for (at, event) in events.into_iter().enumerate() {
            let now = ms(at as u64 * 10);
            let mut dropped = None;
            let mut record = hub.observer().record();
            let picked = |i: usize| (!tracks.is_empty()).then(|| i % tracks.len().max(1));
            match event {
                Event::Accept => {
                    tracks.push(record.accepted(now, 1, &id()));
                    accepted += 1.0;
                }
                Event::Route(i, r) => {
                    if let Some(i) = picked(i) {
                        record.routed(&mut tracks[i], ReplicaId(r));
                    }
                }
                Event::Schedule(i, r) => {
                    if let Some(i) = picked(i) {
                        record.scheduled(&mut tracks[i], ReplicaId(r), now);
                    }
                }
                Event::Preempt(i, r) => {
                    if let Some(i) = picked(i) {
                        record.preempted(&mut tracks[i], ReplicaId(r), 3);
                    }
                }
                Event::Swap(i, r) => {
                    if let Some(i) = picked(i) {
                        record.swapped_out(&mut tracks[i], ReplicaId(r), 2);
                        record.swapped_in(ReplicaId(r), 2);
                        record.host_kv_blocks(ReplicaId(r), 2);
                    }
                }
                Event::Replay(i) => {
                    if let Some(i) = picked(i) {
                        record.interrupted(&mut tracks[i], Some(FailoverReason::RankLost));
                    }
                }
                Event::Finish(i) => {
                    if let Some(i) = picked(i) {
                        let track = tracks.swap_remove(i);
                        record.finished(track, FinishedReason::Stop, SUMMARY, now);
                    }
                }
                Event::Abort(i) => {
                    if let Some(i) = picked(i) {
                        record.aborted(tracks.swap_remove(i), SUMMARY);
                    }
                }
                Event::Fail(i) => {
                    if let Some(i) = picked(i) {
                        record.failed(tracks.swap_remove(i), SUMMARY);
                    }
                }
                Event::Drop(i) => dropped = picked(i).map(|i| tracks.swap_remove(i)),
                Event::Step(r, prompt_computed, generated) => {
                    let (prompt_cached, recomputed) = (3, 9);
                    let tokens =
                        StepTokens { prompt_computed, prompt_cached, generated, recomputed, ..<_>::default() };
                    record.step(ReplicaId(r), tokens);
                }
                Event::Ready(r) => {
                    let config = ReplicaConfig { host_blocks: 8 * (r % 2), ..config(10) };
                    record.replica_ready(ReplicaId(r), &config);
                }
                Event::Gone(r) => record.failover(ReplicaId(r), FailoverReason::RankLost),
            }
            drop(record);
            // As an actor that panics drops it: not while anything is recorded.
            drop(dropped);
            let scrape = scrape(&hub);
            scrape.check_identities();
            prop_assert_eq!(scrape.get("tutti_requests_accepted_total"), accepted);
            prop_assert_eq!(scrape.get("tutti_requests_in_flight"), tracks.len() as f64);
            for (series, total) in last.totals() {
                prop_assert!(scrape.get(series) >= total, "{} fell", series);
            }
            last = scrape;
        }
    }
}

#[test]
fn identities_hold_in_scrapes_under_load() {
    let hub = hub();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for replica in 0..3u32 {
            let (hub, stop) = (&hub, &stop);
            scope.spawn(move || {
                let replica = ReplicaId(replica);
                while !stop.load(Ordering::Relaxed) {
                    let mut track = hub.observer().record().accepted(ms(0), 1, &id());
                    let mut record = hub.observer().record();
                    record.scheduled(&mut track, replica, ms(1));
                    let tokens = StepTokens { prompt_computed: 5, generated: 1, ..<_>::default() };
                    record.step(replica, tokens);
                    record.tokens(&mut track, 0, 1, ms(2));
                    drop(record);
                    let mut record = hub.observer().record();
                    record.finished(track, FinishedReason::Stop, SUMMARY, ms(3));
                }
            });
        }
        for _ in 0..100 {
            scrape(&hub).check_identities();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let last = scrape(&hub);
    assert!(last.get("tutti_requests_accepted_total") > 0.0);
    assert_eq!(last.get("tutti_requests_in_flight"), 0.0);
    assert_eq!(
        last.get("tutti_request_generation_tokens_sum"),
        last.sum("tutti_generation_tokens_total")
    );
}

/// Of two simultaneous scrapes, the second draws nothing before the first has merged what it drew:
/// otherwise parts of one could be newer than those of the other, and the later totals lower.
#[test]
fn scrapes_at_once_do_not_refuse_the_coordinator_s_own_totals() {
    let hub = hub();
    let (before, _) = hub.observer().report();
    std::thread::scope(|scope| {
        hub.process().with(|_| {
            // The first waits here: it has drawn the observer's totals, and the process's are
            // locked.
            for _ in 0..2 {
                scope.spawn(|| hub.merged());
            }
            std::thread::sleep(Duration::from_millis(500));
            let (drawn, _) = hub.observer().report();
            assert!(drawn <= before + 2, "{} scrapes have drawn at once", drawn - before - 1);
        });
    });
    let refused = hub.merged().counter(catalogue::REPORTS_REFUSED, ["total_fell"]);
    assert_eq!(refused, Some(0));
}
