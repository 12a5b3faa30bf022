//! The time taken when many requests end at once; and readers that have stopped reading.
use std::sync::Arc;
use std::time::{Duration, Instant};

use coordinator::cluster::migration::QueueShare;
use coordinator::engine::{
    EngineError, EngineEvent, EventSender, FinishReason, GenerateRequest, Resumed, ResumedChoice,
    TAKEN_WITHIN,
};
use coordinator::metrics::Hub;
use coordinator::replica::core::{ReplicaCore, TICK};
use coordinator::replica::driver::DriverLimits;
use coordinator::scheduler::{Effect, Scheduler, SchedulerConfig};
use shared::ids::{Epoch, Incarnation, RequestId};
use shared::metrics::catalogue::{
    REQUEST_SUCCESS, REQUESTS_EXPIRED, REQUESTS_IN_FLIGHT, REQUESTS_RUNNING, REQUESTS_WAITING,
};
use shared::metrics::labels::{FinishedReason, LabelValue as _};
use shared::protocol::StepPlan;
use shared::sampling::SamplingParams;
use tokio::sync::mpsc;

use crate::agreement::{self, SentMessages, WORKERS, core, core_of, core_with, request, result};
use crate::rig::sizes;

const REQUESTS: u64 = 1024;
const CHOICES: u32 = 128;
/// A pass over the queue for each of 131,072 sequences would take minutes.
const MOMENT: Duration = Duration::from_secs(20);

fn long_queue() -> SchedulerConfig {
    SchedulerConfig { max_queued_requests: 1 << 16, prefix_caching: false, ..sizes() }
}

fn full_queue() -> Scheduler {
    let mut scheduler = Scheduler::new(long_queue()).unwrap();
    scheduler.replica_ready(Epoch(1), 1 << 10, 0, &mut Vec::new());
    for id in 0..REQUESTS {
        let sampling = |choice| SamplingParams { choice, ..SamplingParams::greedy() };
        let sampling = (0..CHOICES).map(sampling).collect();
        let request = GenerateRequest { id: RequestId(id), sampling, ..request() };
        scheduler.submit(request).unwrap();
    }
    assert!(scheduler.plan(&mut StepPlan::default(), &mut Vec::new()));
    scheduler
}

#[test]
fn a_thousand_requests_end_in_a_moment() {
    for error in [None, Some(EngineError::ShuttingDown)] {
        let (mut scheduler, mut effects) = (full_queue(), Vec::new());
        let (ids, began) = ((0..REQUESTS).map(RequestId), Instant::now());
        match &error {
            None => scheduler.cancel_all(ids, &mut effects),
            Some(error) => scheduler.fail_all(ids, error, &mut effects),
        }
        let took = began.elapsed();
        assert!(took < MOMENT, "{took:?}");
        let sequences = effects.iter().map(|effect| match effect {
            Effect::Dropped { seqs, error: why, .. } if *why == error => seqs.len() as u64,
            effect => panic!("{effect:?}"),
        });
        assert_eq!(sequences.sum::<u64>(), REQUESTS * u64::from(CHOICES));
        let gauges = scheduler.gauges();
        assert_eq!((gauges.in_flight, gauges.running, gauges.blocks_used), (0, 0, 0));
    }
}

/// A queue of requests that other coordinators began comes to a cache that is too small for what
/// they have written.
#[test]
fn a_hundred_thousand_sequences_that_have_outgrown_the_cache_end_in_a_moment() {
    const WRITTEN: usize = 40;
    let mut scheduler = Scheduler::new(long_queue()).unwrap();
    for id in 0..REQUESTS {
        let sampling = |choice| SamplingParams { choice, ..SamplingParams::greedy() };
        let choice = |_| ResumedChoice { tokens: vec![2; WRITTEN], end: None };
        let choices = (0..CHOICES).map(choice).collect();
        let request = GenerateRequest {
            id: RequestId(id),
            sampling: (0..CHOICES).map(sampling).collect(),
            open_ended: true,
            max_tokens: 60,
            resumed: Some(Box::new(Resumed { choices, over: Vec::new() })),
            ..request()
        };
        scheduler.submit(request).unwrap();
    }
    let (mut effects, began) = (Vec::new(), Instant::now());
    let moved = scheduler.replica_ready(Epoch(1), 2, 0, &mut effects);
    assert_eq!(moved.len() as u64, REQUESTS, "another replica may have room");
    // None has.
    for handed in moved.into_iter().rev() {
        assert!(handed.may_end_by_length());
        scheduler.adopt(handed).unwrap();
    }
    scheduler.end_outgrown(&mut effects);
    let took = began.elapsed();
    assert!(took < MOMENT, "{took:?}");
    let ended = effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Finished { reason: FinishReason::Length, .. }));
    assert_eq!(ended.count() as u64, REQUESTS * u64::from(CHOICES));
    let gauges = scheduler.gauges();
    assert_eq!((gauges.in_flight, gauges.running, gauges.waiting), (0, 0, 0));
    assert!(!scheduler.plan(&mut StepPlan::default(), &mut Vec::new()), "nothing is left");
}

#[test]
fn a_reader_that_stops_reading_is_given_up_and_a_slow_one_is_not() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut core = core(hub.observer());
    let (mut sent, mut answered) = (SentMessages::default(), 0);
    let (stopped, stopped_events) = mpsc::channel(64);
    let (slow, mut slow_events) = mpsc::channel(64);
    let ms = Duration::from_millis;
    core.submit(ms(1), request(), EventSender::Local(stopped), &mut sent);
    let other = GenerateRequest { id: RequestId(2), response_id: Arc::from("2"), ..request() };
    core.submit(ms(1), other, EventSender::Local(slow), &mut sent);
    core.epoch_formed(ms(1), Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
    let mut cancelled = None;
    // A step every 4 s, as on a very slow machine: both requests take two minutes.
    for at in (50..110_000).step_by(50).map(ms) {
        core.tick(at, &mut sent);
        if at.as_millis().is_multiple_of(4_000)
            && let Some(plan) = sent.plans.get(answered).cloned()
        {
            answered += 1;
            for worker in WORKERS {
                core.step_done(at, worker, result(&plan, 5), &mut sent);
            }
        }
        if at.as_millis().is_multiple_of(40_000) {
            assert!(matches!(slow_events.try_recv(), Ok(EngineEvent::Token { .. })), "{at:?}");
        }
        let aborted = hub.merged().counter_sum_of(REQUEST_SUCCESS, FinishedReason::Abort);
        if aborted > 0 {
            cancelled = cancelled.or(Some(at));
            assert_eq!(aborted, 1, "the slow one at {at:?}");
        }
    }
    let cancelled = cancelled.expect("it is cancelled");
    assert!((TAKEN_WITHIN..TAKEN_WITHIN + ms(10_000)).contains(&cancelled), "{cancelled:?}");
    assert!(stopped_events.is_closed());
    assert!(!slow_events.is_closed() && sent.ends.is_empty(), "{:?}", sent.ends);
}

/// A pass over the queue for each client would take minutes.
#[test]
fn many_clients_that_leave_one_by_one_leave_in_a_moment() {
    const WAITING: u64 = 40_000;
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let config = SchedulerConfig { max_queued_requests: 1 << 16, ..agreement::config() };
    let limits = agreement::limits();
    let mut core = core_with(config, hub.observer(), limits, Arc::default());
    let (mut sent, secs) = (SentMessages::default(), Duration::from_secs);
    let mut events = Vec::new();
    for id in 0..WAITING {
        let (sender, taken) = mpsc::channel(64);
        events.push(taken);
        let request = GenerateRequest { id: RequestId(id), ..request() };
        core.submit(secs(1), request, EventSender::Local(sender), &mut sent);
    }
    core.epoch_formed(secs(1), Epoch(1), 64, 0, WORKERS.to_vec(), &mut sent);
    let aborted = || hub.merged().counter_sum_of(REQUEST_SUCCESS, FinishedReason::Abort);
    let began = Instant::now();
    (0..WAITING).for_each(|id| core.cancel(secs(2), RequestId(id), &mut sent));
    assert!(aborted() >= 4, "what runs is cancelled at once");
    // Another replica does not continue those that are about to be dropped.
    let moved = core.share(secs(2), QueueShare { most: 100, room: 1000 }, &mut sent);
    assert!(moved.is_empty(), "{}", moved.len());
    for at in 1..=20 {
        core.tick(secs(2) + at * TICK, &mut sent);
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(aborted(), WAITING, "each once");
}

/// Submits so many requests; what their clients receive.
fn submit(
    core: &mut ReplicaCore,
    at: Duration,
    count: u64,
    sent: &mut SentMessages,
) -> Vec<mpsc::Receiver<EngineEvent>> {
    let client = |id| {
        let (sender, taken) = mpsc::channel(64);
        let request = GenerateRequest { id: RequestId(id), ..request() };
        core.submit(at, request, EventSender::Local(sender), sent);
        taken
    };
    (0..count).map(client).collect()
}

/// Beside a long queue, clients that leave without a word are missed as soon as without it, if
/// their requests run, and within a second otherwise.
#[test]
fn clients_that_vanish_are_missed_beside_a_long_queue() {
    const WAITING: u64 = 5_000;
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let config = SchedulerConfig { max_queued_requests: 1 << 16, ..agreement::config() };
    let mut core = core_with(config, hub.observer(), agreement::limits(), Arc::default());
    let (mut sent, at) = (SentMessages::default(), Duration::from_secs(1));
    core.epoch_formed(at, Epoch(1), 64, 0, WORKERS.to_vec(), &mut sent);
    let mut events = submit(&mut core, at, WAITING, &mut sent);
    let aborted = || hub.merged().counter_sum_of(REQUEST_SUCCESS, FinishedReason::Abort);
    core.tick(at + TICK, &mut sent);
    // Four run: the first ones. The last one waits.
    drop((events.pop(), events.remove(0)));
    core.tick(at + 2 * TICK, &mut sent);
    assert_eq!(aborted(), 1, "the one that runs");
    for tick in 3..=20 {
        core.tick(at + tick * TICK, &mut sent);
    }
    assert_eq!(aborted(), 2);
}

/// A replica's actor panics, and its requests with it.
#[test]
fn requests_that_are_lost_with_their_replica_are_in_flight_no_more() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut core = core(hub.observer());
    let (mut sent, at) = (SentMessages::default(), Duration::from_secs(1));
    core.epoch_formed(at, Epoch(1), 8, 0, WORKERS.to_vec(), &mut sent);
    // One is in both steps in flight, and four wait.
    let events = submit(&mut core, at, 5, &mut sent);
    let held = || {
        let merged = hub.merged();
        [
            merged.gauge_sum(REQUESTS_IN_FLIGHT),
            merged.gauge_sum(REQUESTS_RUNNING),
            merged.gauge_sum(REQUESTS_WAITING),
        ]
    };
    assert_eq!(held(), [5.0, 1.0, 4.0]);
    drop(core);
    assert_eq!(held(), [0.0; 3]);
    let merged = hub.merged();
    assert_eq!(merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Error), 5);
    assert_eq!(merged.counter_sum(REQUEST_SUCCESS), 5, "each once");
    assert!(events.iter().all(mpsc::Receiver::is_closed));
}

/// Searching for each among those already handed over would take minutes.
#[test]
fn a_long_queue_is_handed_over_in_a_moment() {
    const WAITING: u64 = 60_000;
    let mut scheduler = Scheduler::new(long_queue()).unwrap();
    for id in 0..WAITING {
        let sampling = |choice| SamplingParams { choice, ..SamplingParams::greedy() };
        // Every tenth request has two choices.
        let sampling = (0..1 + u32::from(id % 10 == 0)).map(sampling).collect();
        scheduler.submit(GenerateRequest { id: RequestId(id), sampling, ..request() }).unwrap();
    }
    let began = Instant::now();
    let handed = scheduler.hand_over();
    let took = began.elapsed();
    assert!(took < MOMENT, "{took:?}");
    assert!(handed.iter().map(|it| it.id().0).eq(0..WAITING), "oldest first, each once");
    let choices = handed.iter().map(|it| it.sequences().count() as u64).sum::<u64>();
    assert_eq!(choices, WAITING + WAITING / 10);
    assert_eq!(scheduler.gauges().in_flight, 0);
}

/// Looking at all that wait there for each of them would take minutes.
#[test]
fn many_that_ran_elsewhere_are_shared_in_a_moment() {
    const MANY: u64 = 20_000;
    let mut here = Scheduler::new(long_queue()).unwrap();
    let mut other = Scheduler::new(long_queue()).unwrap();
    for id in 0..MANY {
        let choice = ResumedChoice { tokens: vec![7], end: None };
        let resumed = Some(Box::new(Resumed { choices: vec![choice], over: Vec::new() }));
        here.submit(GenerateRequest { id: RequestId(id), resumed, ..request() }).unwrap();
        other.submit(GenerateRequest { id: RequestId(MANY + id), ..request() }).unwrap();
    }
    let began = Instant::now();
    let shared = here.share(u32::MAX, u32::MAX);
    shared.into_iter().for_each(|handed| drop(other.adopt(handed).unwrap()));
    let took = began.elapsed();
    assert!(took < MOMENT, "{took:?}");
    let waiting = other.share(u32::MAX, u32::MAX);
    assert!(waiting.iter().map(|it| it.id().0).eq(0..2 * MANY), "those that ran go first");
}

fn failure(events: &mut mpsc::Receiver<EngineEvent>) -> Option<EngineError> {
    std::iter::from_fn(|| events.try_recv().ok()).find_map(|event| match event {
        EngineEvent::Failed(error) => Some(error),
        _ => None,
    })
}

#[test]
fn who_waits_too_long_for_a_first_step_is_told_and_who_runs_goes_on() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let wait = Some(Duration::from_secs(3));
    let limits = DriverLimits { max_queue_wait: wait, ..agreement::limits() };
    let mut core = core_of(hub.observer(), limits, Arc::default());
    let (mut sent, secs) = (SentMessages::default(), Duration::from_secs);
    core.epoch_formed(secs(1), Epoch(1), 8, 0, WORKERS.to_vec(), &mut sent);
    // Four run, the fifth waits. Their clients have waited for longer: for other texts, say.
    let mut events: Vec<_> = (0..5)
        .map(|id| {
            let (sender, events) = mpsc::channel(64);
            let request = GenerateRequest { id: RequestId(id), arrived: secs(1), ..request() };
            let at = secs(2);
            core.submit(at, request, EventSender::Local(sender), &mut sent);
            events
        })
        .collect();
    for worker in WORKERS {
        core.step_done(secs(2), worker, result(&sent.plans[0], 0), &mut sent);
    }
    core.tick(Duration::from_millis(4_900), &mut sent);
    assert!(events.iter_mut().all(|events| failure(events).is_none()));
    core.tick(secs(5), &mut sent);
    let told: Vec<_> = events.iter_mut().map(failure).collect();
    let (ran, waited) = told.split_at(4);
    assert!(ran.iter().all(Option::is_none), "{told:?}");
    for error in waited {
        let Some(EngineError::Overloaded { message, retry_after_s }) = error else {
            panic!("{told:?}")
        };
        assert!(message.contains("over 3 s") && (1..=60).contains(retry_after_s), "{error:?}");
    }
    let merged = hub.merged();
    assert_eq!(merged.counter(REQUESTS_EXPIRED, ["queue_wait"]), Some(1));
    let failed = merged.counter(REQUEST_SUCCESS, [FinishedReason::Error.as_str()]);
    assert_eq!(failed, Some(1));
}

#[test]
fn who_finds_the_queue_full_is_told_when_to_come_again_by_the_pace_of_late() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut core = core(hub.observer());
    let (mut sent, secs) = (SentMessages::default(), Duration::from_secs);
    let told =
        |core: &mut ReplicaCore, sent: &mut SentMessages, at: u64, ids: std::ops::Range<u64>| {
            ids.filter_map(|id| {
                let (sender, mut events) = mpsc::channel(64);
                let request = GenerateRequest { id: RequestId(id), ..request() };
                core.submit(secs(at), request, EventSender::Local(sender), sent);
                match failure(&mut events) {
                    Some(EngineError::QueueFull { retry_after_s, .. }) => Some(retry_after_s),
                    _ => None,
                }
            })
            .collect::<Vec<u32>>()
        };
    // Four may wait; none ends.
    let full = told(&mut core, &mut sent, 1, 0..40);
    assert_eq!(full.len(), 36);
    assert!(full.iter().all(|wait| (45..=60).contains(wait)), "{full:?}");
    let apart: std::collections::BTreeSet<_> = full.iter().collect();
    assert!(apart.len() > 4, "they do not come again together: {full:?}");
    // Those that waited leave, but still nobody finishes anything.
    (0..4).for_each(|id| core.cancel(secs(2), RequestId(id), &mut sent));
    core.tick(secs(2), &mut sent);
    let full = told(&mut core, &mut sent, 2, 40..80);
    assert!(full.len() == 36 && full.iter().all(|wait| (45..=60).contains(wait)), "{full:?}");
    // The next four run and end within one second: so would four others.
    core.epoch_formed(secs(3), Epoch(1), 8, 0, WORKERS.to_vec(), &mut sent);
    (40..44).for_each(|id| core.cancel(secs(3), RequestId(id), &mut sent));
    let full = told(&mut core, &mut sent, 3, 80..120);
    assert!(full.len() >= 32 && full.iter().all(|wait| (1..=2).contains(wait)), "{full:?}");
}
