//! A replica counts as ready while its steps are answered, however long they take.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use coordinator::engine::{EventSender, GenerateRequest};
use coordinator::metrics::Hub;
use coordinator::replica::core::{ReplicaCore, ReplicaLoad};
use coordinator::scheduler::EpochEnd;
use shared::ids::{Epoch, Incarnation, RequestId};
use tokio::sync::mpsc;

use crate::agreement::{SentMessages, WORKERS, core_of, limits, request, result};
use shared::metrics::labels::FailoverReason;

/// What others see of a replica: what a step has left waiting, and what is free.
#[test]
fn a_replica_publishes_what_waits_and_what_is_free() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let load = Arc::new(ReplicaLoad::default());
    let mut core = core_of(hub.observer(), limits(), load.clone());
    let mut sent = SentMessages::default();
    let (at, events) = (Duration::from_millis(1), mpsc::channel(64).0);
    core.epoch_formed(at, Epoch(1), 6, 0, WORKERS.to_vec(), &mut sent);
    let seen = || {
        let all = [&load.taken, &load.shareable, &load.queued, &load.free_blocks];
        all.map(|it| it.load(Ordering::Relaxed))
    };
    assert_eq!(seen(), [0, 0, 0, 6]);
    let submit = |core: &mut ReplicaCore, id, sent: &mut SentMessages| {
        let long = GenerateRequest { id: RequestId(id), prompt: vec![id as u32; 30], ..request() };
        core.submit(at, long, EventSender::Local(events.clone()), sent);
    };
    // The canary is under way, and one more step may be.
    submit(&mut core, 1, &mut sent);
    assert_eq!(seen(), [1, 0, 0, 3], "one more block is kept for what runs");
    submit(&mut core, 2, &mut sent);
    assert_eq!(seen(), [2, 1, 0, 3], "no step has left it waiting");
    submit(&mut core, 3, &mut sent);
    for plan in 0..2 {
        for worker in WORKERS {
            core.step_done(at, worker, result(&sent.plans[plan].clone(), 0), &mut sent);
        }
    }
    assert_eq!(seen(), [3, 1, 1, 0], "there is room for one of them");
}

/// Times in ms: the canary is answered at 1,100, a prompt begins at 1,200; a step may take 9 s.
#[test]
fn a_replica_is_ready_while_a_step_takes_long_and_no_longer_than_steps_may() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let load = Arc::new(ReplicaLoad::default());
    let is_ready = |ms: u64| load.is_ready(Duration::from_millis(ms));
    let mut core = core_of(hub.observer(), limits(), load.clone());
    let mut sent = SentMessages::default();
    let at = Duration::from_millis;

    core.epoch_formed(at(1000), Epoch(1), 8, 0, WORKERS.to_vec(), &mut sent);
    assert!(!is_ready(1000), "the first step is under way");
    for worker in WORKERS {
        core.step_done(at(1100), worker, result(&sent.plans[0], 0), &mut sent);
    }
    assert!(is_ready(1100) && is_ready(6100) && !is_ready(6101), "canaries stopped coming");

    let (events, _tokens) = mpsc::channel(64);
    core.submit(at(1200), request(), EventSender::Local(events), &mut sent);
    assert!(sent.plans.len() > 1, "the prompt is in a step");
    for ms in [1200, 6101, 10_199] {
        assert!(is_ready(ms), "{ms}");
    }
    assert!(!is_ready(10_200), "it takes longer than steps may");

    load.doubtful.store(true, Ordering::Relaxed);
    assert!(is_ready(6100) && !is_ready(6101), "a rank is silent");
    load.doubtful.store(false, Ordering::Relaxed);
    assert!(core.epoch_ended(at(2000), Epoch(1), EpochEnd::Failed(FailoverReason::StepOverdue)));
    assert!(!is_ready(6101), "nothing is in flight any more");
    core.epoch_formed(at(2500), Epoch(2), 8, 0, WORKERS.to_vec(), &mut sent);
    assert!(!is_ready(2500), "a step of another epoch says nothing");
}
