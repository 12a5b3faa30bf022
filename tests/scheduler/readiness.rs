//! A replica counts as ready while its steps are answered, however long they take.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use coordinator::engine::EventSender;
use coordinator::metrics::Hub;
use coordinator::replica::core::ReplicaLoad;
use coordinator::scheduler::EpochEnd;
use shared::ids::{Epoch, Incarnation};
use tokio::sync::mpsc;

use crate::agreement::{SentMessages, WORKERS, core_of, limits, request, result};

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
    assert!(core.epoch_ended(at(2000), Epoch(1), EpochEnd::Failed));
    assert!(!is_ready(6101), "nothing is in flight any more");
    core.epoch_formed(at(2500), Epoch(2), 8, 0, WORKERS.to_vec(), &mut sent);
    assert!(!is_ready(2500), "a step of another epoch says nothing");
}
