//! A KV cache that comes back smaller: accepted requests move to where there is room, or are told
//! that there is none, but never that they asked for too much.
use std::time::Duration;

use coordinator::cluster::candidates::Candidate;
use coordinator::cluster::migration::{Migrations, QueueShare};
use coordinator::engine::{EngineError, EngineEvent, EventSender, FinishReason, GenerateRequest};
use coordinator::metrics::Hub;
use coordinator::replica::core::ReplicaCore;
use coordinator::replica::driver::MovedRequest;
use coordinator::scheduler::EpochEnd;
use shared::ids::{Epoch, Incarnation, ReplicaId, RequestId};
use tokio::sync::mpsc;

use crate::agreement::{SentMessages, WORKERS, core, request, result};
use shared::metrics::labels::FailoverReason;

const BLOCKS: u32 = 4;

/// The events of a request that stays, and the replica that holds it.
type Stays = (mpsc::Receiver<EngineEvent>, ReplicaCore);

/// A replica with a request that needs all its blocks and one that needs one block comes back with
/// half of its blocks. Returns the requests that it gives up.
fn outgrown(hub: &Hub) -> (Vec<MovedRequest>, mpsc::Receiver<EngineEvent>, Stays) {
    let (mut core, mut sent) = (core(hub.observer()), SentMessages::default());
    let at = Duration::from_millis(1);
    let ready = |core: &mut ReplicaCore, epoch, blocks| {
        core.epoch_formed(
            at,
            Epoch(epoch),
            blocks,
            0,
            WORKERS.to_vec(),
            &mut SentMessages::default(),
        )
    };
    assert!(ready(&mut core, 1, BLOCKS).is_empty());
    let ((large, large_events), (small, small_events)) = (mpsc::channel(64), mpsc::channel(64));
    let prompt = vec![1; 16];
    let large_one = GenerateRequest {
        id: RequestId(2),
        prompt: prompt.clone(),
        max_tokens: BLOCKS * 16 - 16,
        ..request()
    };
    core.submit(at, large_one, EventSender::Local(large), &mut sent);
    let small_one = GenerateRequest { id: RequestId(3), max_tokens: 8, ..request() };
    core.submit(at, small_one, EventSender::Local(small), &mut sent);
    assert!(core.epoch_ended(at, Epoch(1), EpochEnd::Failed(FailoverReason::StepOverdue)));
    let moved = ready(&mut core, 2, BLOCKS / 2);
    (moved, large_events, (small_events, core))
}

fn candidate(id: u32, serving: bool, room: u32) -> Candidate {
    Candidate { serving, room, ..Candidate::unknown(ReplicaId(id)) }
}

#[test]
fn what_has_no_room_any_more_goes_on_where_there_is_some() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let (moved, mut large, (mut small, _replica)) = outgrown(&hub);
    assert_eq!(moved.iter().map(MovedRequest::id).collect::<Vec<_>>(), [RequestId(2)]);
    assert!(large.try_recv().is_err() && !large.is_closed(), "it is told nothing");
    assert!(small.try_recv().is_err() && !small.is_closed(), "the other one stays");
    let mut migrations = Migrations::default();
    migrations.expect(ReplicaId(0));
    let candidates = [
        candidate(0, true, BLOCKS * 8),
        candidate(1, true, BLOCKS * 16),
        candidate(2, false, u32::MAX),
    ];
    let mut placed = migrations.place(ReplicaId(0), moved, candidates.into_iter());
    assert!(placed.outgrown.is_empty() && placed.unplaced.is_empty());
    let (to, requests) = placed.by_replica.remove(0);
    assert_eq!((to, placed.by_replica.len()), (ReplicaId(1), 0));
    let (mut other, mut sent) = (core(hub.observer()), SentMessages::default());
    let at = Duration::from_millis(2);
    let none = other.epoch_formed(at, Epoch(3), BLOCKS, 0, WORKERS.to_vec(), &mut sent);
    assert!(none.is_empty());
    other.adopt(at, requests, &mut sent);
    let admitted =
        |sent: &SentMessages| sent.plans.iter().map(|plan| plan.admitted.len()).sum::<usize>();
    other.tick(at, &mut sent);
    assert_eq!(admitted(&sent), 1, "it runs there");
}

#[test]
fn it_waits_where_there_may_be_room_and_else_is_told_that_there_is_none() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let place = |candidates: &[Candidate]| {
        let (moved, large, _small) = outgrown(&hub);
        let mut migrations = Migrations::default();
        migrations.expect(ReplicaId(0));
        (migrations.place(ReplicaId(0), moved, candidates.iter().copied()), large)
    };
    let here = candidate(0, true, BLOCKS * 8);
    let (placed, _) = place(&[here, candidate(1, true, 8), candidate(2, false, BLOCKS * 16)]);
    assert_eq!((placed.by_replica[0].0, placed.by_replica.len()), (ReplicaId(2), 1));
    // The only replica with room has a silent rank: most silences end, and others have room later.
    let doubtful = |id, room| Candidate { doubtful: true, ..candidate(id, true, room) };
    let (placed, _) = place(&[here, doubtful(1, BLOCKS * 16), candidate(2, false, BLOCKS * 16)]);
    assert_eq!((placed.by_replica[0].0, placed.by_replica.len()), (ReplicaId(1), 1));
    let (placed, _) = place(&[here, doubtful(1, BLOCKS * 16), candidate(2, true, BLOCKS * 16)]);
    assert_eq!((placed.by_replica[0].0, placed.by_replica.len()), (ReplicaId(2), 1));
    // No other replica has room, or ever had.
    let (placed, _) = place(&[here, candidate(1, true, 8), candidate(2, false, 8)]);
    assert!(placed.by_replica.is_empty());
    assert_eq!((placed.outgrown.len(), placed.outgrown[0].1), (1, BLOCKS * 8));
    // A replica that took the request before it knew how many blocks it would have says the same.
    let (moved, mut large, _small) = outgrown(&hub);
    let (mut other, mut sent) = (core(hub.observer()), SentMessages::default());
    let at = Duration::from_millis(2);
    let none = other.epoch_formed(at, Epoch(3), 2, 0, WORKERS.to_vec(), &mut sent);
    assert!(none.is_empty());
    other.adopt(at, moved, &mut sent);
    let Ok(EngineEvent::Failed(EngineError::Unavailable { message })) = large.try_recv() else {
        panic!("not unavailable")
    };
    assert!(message.contains("the 4 blocks") && message.contains("has 2"), "{message}");
}

/// A replica with a request without a bound, which has written more than half of the cache when
/// the replica comes back with half of it. Returns what it gives up.
fn outgrown_without_bound(
    hub: &Hub,
) -> (Vec<MovedRequest>, mpsc::Receiver<EngineEvent>, ReplicaCore) {
    let (mut core, mut sent) = (core(hub.observer()), SentMessages::default());
    let at = Duration::from_millis(1);
    core.epoch_formed(at, Epoch(1), BLOCKS, 0, WORKERS.to_vec(), &mut sent);
    let (sender, events) = mpsc::channel(64);
    let open = GenerateRequest {
        prompt: vec![1; 16],
        max_tokens: BLOCKS * 16 - 16,
        open_ended: true,
        ..request()
    };
    core.submit(at, open, EventSender::Local(sender), &mut sent);
    let mut answered = 0;
    while events.len() < 20 {
        let plan = sent.plans[answered].clone();
        answered += 1;
        WORKERS.iter().for_each(|it| core.step_done(at, *it, result(&plan, 5), &mut sent));
    }
    assert!(core.epoch_ended(at, Epoch(1), EpochEnd::Failed(FailoverReason::StepOverdue)));
    let half = BLOCKS / 2;
    let moved = core.epoch_formed(at, Epoch(2), half, 0, WORKERS.to_vec(), &mut sent);
    (moved, events, core)
}

#[test]
fn what_has_no_bound_goes_on_where_there_is_room_and_else_ends_with_what_it_has() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let (here, small) = (candidate(0, true, BLOCKS * 8), candidate(1, true, BLOCKS * 8));
    let unknown = candidate(2, false, u32::MAX);
    let ends = |candidates: &[Candidate], at: u32| {
        let (moved, mut events, mut core) = outgrown_without_bound(&hub);
        assert_eq!(moved.len(), 1);
        let mut migrations = Migrations::default();
        migrations.expect(ReplicaId(0));
        let mut placed = migrations.place_or_end(ReplicaId(0), moved, candidates);
        assert!(placed.outgrown.is_empty() && placed.unplaced.is_empty());
        let (to, requests) = placed.by_replica.remove(0);
        assert_eq!((to, placed.by_replica.len()), (ReplicaId(at), 0));
        if at != 0 {
            return;
        }
        let tokens = |events: &mut mpsc::Receiver<EngineEvent>| -> Vec<EngineEvent> {
            std::iter::from_fn(|| events.try_recv().ok()).collect()
        };
        assert!(tokens(&mut events).iter().all(|it| matches!(it, EngineEvent::Token { .. })));
        core.adopt(Duration::from_millis(2), requests, &mut SentMessages::default());
        let [EngineEvent::Finished { choice: 0, reason: FinishReason::Length, .. }] =
            tokens(&mut events)[..]
        else {
            panic!("it does not end")
        };
    };
    ends(&[here, candidate(1, true, BLOCKS * 16), unknown], 1);
    // One that has never served may never come.
    ends(&[here, small, unknown], 0);
    ends(&[here], 0);
    // Where it was does not serve any more: another one ends it, unless there may be room again.
    let broken = |room| candidate(0, false, room);
    ends(&[broken(BLOCKS * 8), small], 1);
    ends(&[broken(BLOCKS * 16), small], 0);
    // One whose client leaves while it is on its way has nothing to end.
    let (moved, ..) = outgrown_without_bound(&hub);
    let mut migrations = Migrations::default();
    migrations.expect(ReplicaId(0));
    migrations.cancelled(moved[0].id());
    let placed = migrations.place_or_end(ReplicaId(0), moved, &[here]);
    assert_eq!((placed.cancelled.len(), placed.by_replica.len()), (1, 0));
    // A request with a bound is told that there is no room.
    let (moved, ..) = outgrown(&hub);
    migrations.expect(ReplicaId(0));
    let placed = migrations.place_or_end(ReplicaId(0), moved, &[here, small]);
    assert_eq!((placed.outgrown.len(), placed.by_replica.len()), (1, 0));
}

#[test]
fn what_moves_goes_first_where_the_batch_has_places() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let place = |places: [u32; 2]| {
        let (moved, _large, _small) = outgrown(&hub);
        let mut migrations = Migrations::default();
        migrations.expect(ReplicaId(0));
        // Few requests can be many sequences.
        let of = |id: u32, load, free_seqs| Candidate {
            load,
            free_seqs,
            ..candidate(id, true, BLOCKS * 16)
        };
        let candidates = [of(1, 2, places[0]), of(2, 5, places[1])];
        migrations.place(ReplicaId(0), moved, candidates.into_iter()).by_replica[0].0.0
    };
    assert_eq!(place([0, 1]), 2);
    assert_eq!(place([1, 1]), 1, "both have places: the one with fewer requests");
    assert_eq!(place([0, 0]), 1, "none has");
}

#[test]
fn what_is_shared_waits_for_a_replica_from_then_on() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let (mut from, mut sent) = (core(hub.observer()), SentMessages::default());
    let formed = Duration::from_millis(1);
    from.epoch_formed(formed, Epoch(1), BLOCKS * 4, 0, WORKERS.to_vec(), &mut sent);
    let late = Duration::from_secs(60);
    let (events, mut ends) = mpsc::channel(64);
    for id in 1..=3 {
        let queued = GenerateRequest { id: RequestId(id), ..request() };
        from.submit(late, queued, EventSender::Local(events.clone()), &mut sent);
    }
    let shared = from.share(late, QueueShare { most: 2, room: u32::MAX }, &mut sent);
    assert!(!shared.is_empty(), "two steps are in flight; the others wait");
    // The one that was to serve them has broken meanwhile.
    let mut to = core(hub.observer());
    to.adopt(late, shared, &mut sent);
    to.tick(late + Duration::from_secs(8), &mut sent);
    assert!(ends.try_recv().is_err(), "it has not waited for 9 s");
    to.tick(late + Duration::from_secs(9), &mut sent);
    assert!(matches!(ends.try_recv(), Ok(EngineEvent::Failed(EngineError::Unavailable { .. }))));
}

#[test]
fn a_replica_that_answers_no_more_leaves_nothing_behind() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let candidates = [candidate(1, true, u32::MAX)];
    let place = |migrations: &mut Migrations| {
        let (moved, _large, _small) = outgrown(&hub);
        migrations.place(ReplicaId(0), moved, candidates.into_iter())
    };
    let mut migrations = Migrations::default();
    migrations.expect(ReplicaId(0));
    migrations.expect(ReplicaId(7));
    migrations.cancelled(RequestId(2));
    assert_eq!(place(&mut migrations).cancelled.len(), 1, "it was cancelled on its way");
    migrations.expect(ReplicaId(0));
    assert_eq!(place(&mut migrations).cancelled.len(), 1, "one more may be on its way");
    // That replica's actor has panicked: a request that comes again under the same id is not
    // cancelled for ever.
    migrations.gone(ReplicaId(7));
    migrations.expect(ReplicaId(0));
    assert_eq!(place(&mut migrations).cancelled.len(), 0);
}
