//! Which replica gets a request, given what each publishes.
use shared::sampling::SamplingParams;

use super::*;
use crate::engine::{EngineCommand, EngineHandle};
use shared::metrics::labels::FailoverReason;

const MAX_NUM_SEQS: u32 = 16;
const BLOCK: u32 = 16;

/// What a replica publishes.
#[derive(Clone, Copy, Default)]
struct Seen {
    requests: u32,
    sequences: u32,
    /// Those that have not run, and those of them that a step has left waiting.
    shareable: u32,
    queued: u32,
    free_blocks: u32,
}

/// A request and where its events go, as they come from the front end.
fn coming(request: GenerateRequest) -> (Box<GenerateRequest>, EventSender) {
    let (handle, mut commands) = EngineHandle::channel();
    let _generation = handle.submit(request).unwrap();
    let Ok(EngineCommand::Submit { request, events }) = commands.try_recv() else {
        panic!("no request")
    };
    (request, events)
}

struct Rig {
    dispatch: Dispatch,
    loads: Vec<Arc<ReplicaLoad>>,
    submitted: u64,
}

impl Rig {
    /// Replicas that serve, each with room for so many blocks.
    fn new(blocks: &[u32]) -> Self {
        let loads: Vec<Arc<ReplicaLoad>> = blocks.iter().map(|_| Arc::default()).collect();
        let dispatch = Dispatch::new(MAX_NUM_SEQS, BLOCK);
        let mut rig = Self { dispatch, loads, submitted: 0 };
        for (id, blocks) in (0..).zip(blocks) {
            let load = rig.loads[id as usize].clone();
            rig.dispatch.started(ReplicaId(id), load);
            let (ranks, mut messages) = (vec![WorkerId(id)], Vec::new());
            rig.dispatch.ready(ReplicaId(id), Epoch(1), ranks, blocks * BLOCK, &mut messages);
            assert!(messages.is_empty());
            rig.answers(id);
            rig.sees(id, Seen { free_blocks: *blocks, ..Seen::default() });
        }
        rig
    }

    fn sees(&mut self, id: u32, seen: Seen) {
        let load = &self.loads[id as usize];
        load.in_flight.store(seen.requests, Ordering::Relaxed);
        load.sequences.store(seen.sequences, Ordering::Relaxed);
        load.shareable.store(seen.shareable, Ordering::Relaxed);
        load.queued.store(seen.queued, Ordering::Relaxed);
        load.free_blocks.store(seen.free_blocks, Ordering::Relaxed);
    }

    /// A replica answers that it gives up nothing.
    fn answers(&mut self, id: u32) {
        let known = (0..self.loads.len() as u32).map(ReplicaId);
        let mut messages = Vec::new();
        let placed = self.dispatch.place(ReplicaId(id), Vec::new(), known, &mut messages);
        assert!(messages.is_empty() && placed.unplaced.is_empty());
    }

    /// Where a request goes.
    fn submit(&mut self, prompt: u32, n: usize, max_tokens: u32, open_ended: bool) -> u32 {
        self.submitted += 1;
        // No two begin alike.
        let prompt = (0..prompt).map(|at| at + self.submitted as u32 * 100_000).collect();
        let sampling = vec![SamplingParams::greedy(); n];
        let request = GenerateRequest::new(RequestId(self.submitted), prompt, sampling, max_tokens);
        let (request, events) = coming(GenerateRequest { open_ended, ..request });
        let mut messages = Vec::new();
        self.dispatch.submit(request, events, &mut messages).unwrap();
        let [(id, ToReplica::Submit { .. })] = &messages[..] else { panic!("{messages:?}") };
        id.0
    }

    /// All requests that were sent to a replica have reached it.
    fn taken(&mut self, id: u32, requests: u32) {
        self.loads[id as usize].taken.fetch_add(requests, Ordering::Relaxed);
    }

    /// Who is asked to give how many requests, of how many tokens each.
    fn shares(&mut self) -> Vec<(u32, u32, u32)> {
        let mut messages = Vec::new();
        self.dispatch.share_queues(&mut messages);
        let share = |(id, message): (ReplicaId, ToReplica)| match message {
            ToReplica::Share(QueueShare { most, room }) => (id.0, most, room),
            other => panic!("{other:?}"),
        };
        messages.into_iter().map(share).collect()
    }
}

const NONE: [(u32, u32, u32); 0] = [];

/// The first one's KV cache is full of six long requests, and two wait; the other has nine short
/// ones.
#[test]
fn a_request_goes_where_it_runs_at_once_and_so_does_what_waits() {
    let mut rig = Rig::new(&[100, 100]);
    let full = Seen { requests: 8, sequences: 8, shareable: 2, queued: 2, free_blocks: 1 };
    let short = Seen { requests: 9, sequences: 9, free_blocks: 70, ..Seen::default() };
    rig.sees(0, full);
    rig.sees(1, short);
    assert_eq!(rig.submit(30, 1, 10, false), 1);
    rig.taken(1, 1);
    assert_eq!(rig.shares(), [(0, 2, 70 * BLOCK)]);
    // Nothing waits there, but it has no room for the prompt.
    rig.sees(0, Seen { shareable: 0, queued: 0, ..full });
    assert_eq!(rig.submit(30, 1, 10, false), 1);
    rig.taken(1, 1);
    assert_eq!(rig.submit(5, 1, 10, false), 0, "it has for this one, and has fewer");
}

#[test]
fn what_counts_is_the_number_of_sequences() {
    let mut rig = Rig::new(&[100, 100]);
    rig.sees(0, Seen { requests: 1, sequences: 8, free_blocks: 90, ..Seen::default() });
    rig.sees(1, Seen { requests: 5, sequences: 5, free_blocks: 90, ..Seen::default() });
    assert_eq!(rig.submit(5, 1, 1, false), 1);
    rig.sees(1, Seen { requests: 13, sequences: 13, free_blocks: 90, ..Seen::default() });
    assert_eq!(rig.submit(5, 8, 1, false), 0, "there are places for all choices");
}

#[test]
fn a_burst_is_spread_before_any_replica_has_taken_its_part() {
    let mut rig = Rig::new(&[1000, 1000, 1000]);
    let mut gets = [0; 3];
    for _ in 0..12 {
        gets[rig.submit(5, 1, 10, false) as usize] += 1;
    }
    assert_eq!(gets, [4, 4, 4]);
    // The first one says what it has; the others have not come to it.
    rig.taken(0, 4);
    rig.sees(0, Seen { requests: 4, sequences: 4, free_blocks: 990, ..Seen::default() });
    assert_eq!([(); 3].map(|()| rig.submit(5, 1, 10, false)), [0, 1, 2]);
    // Their KV caches are about to be full.
    let mut rig = Rig::new(&[10, 8]);
    assert_eq!([(); 3].map(|()| rig.submit(100, 1, 10, false)), [0, 1, 0]);
}

#[test]
fn an_open_ended_request_goes_where_it_does_not_soon_end() {
    let mut rig = Rig::new(&[6000 / BLOCK, 64_000 / BLOCK]);
    rig.sees(1, Seen { requests: 3, sequences: 3, free_blocks: 2000, ..Seen::default() });
    let mut goes = |prompt, max_tokens| {
        let to = rig.submit(prompt, 1, max_tokens, true);
        rig.taken(to, 1);
        to
    };
    assert_eq!(goes(5900, 60_000), 1, "it would get 100 tokens");
    assert_eq!(goes(3000, 60_000), 1);
    assert_eq!(goes(1000, 60_000), 0, "most answers are shorter");
    assert_eq!(goes(5900, 50), 0, "it gets all that it may have");
    // The larger one does not serve.
    rig.dispatch.broke(
        ReplicaId(1),
        Epoch(1),
        EpochEnd::Failed(FailoverReason::StepOverdue),
        &mut Vec::new(),
    );
    assert_eq!(rig.submit(5900, 1, 60_000, true), 0);
    assert_eq!(rig.submit(6100, 1, 60_000, true), 1, "it has to wait for that one");
}

#[test]
fn a_replica_that_has_nothing_that_fits_is_not_asked_again_in_vain() {
    let mut rig = Rig::new(&[1000, 1000, 50]);
    let busy = |queued, free_blocks| Seen {
        requests: 16 + queued,
        sequences: 16 + queued,
        shareable: queued,
        queued,
        free_blocks,
    };
    rig.sees(0, busy(3, 0));
    rig.sees(1, busy(2, 0));
    let room = 50 * BLOCK;
    assert_eq!(rig.shares(), [(0, 3, room), (1, 2, room)]);
    assert_eq!(rig.shares(), NONE, "they have not answered");
    // All of the first one's are too large; the other gives up one.
    rig.answers(0);
    rig.sees(1, busy(1, 0));
    rig.answers(1);
    assert_eq!(rig.shares()[0], (1, 1, room));
    rig.answers(1);
    rig.answers(0);
    // Something comes that may fit.
    let running = rig.dispatch.running.get_mut(&ReplicaId(0)).unwrap();
    running.sends(Demand { sequences: 1, begins: 1, needed: 1, wanted: 1 });
    assert_eq!(rig.shares()[0].0, 0);
}

#[test]
fn what_waits_for_a_step_that_takes_long_is_shared_too() {
    let mut rig = Rig::new(&[100, 100]);
    // It came while a step was under way, so none has left it waiting.
    rig.sees(0, Seen { requests: 2, sequences: 2, shareable: 1, queued: 0, free_blocks: 90 });
    rig.sees(1, Seen { requests: 5, sequences: 5, free_blocks: 90, ..Seen::default() });
    assert_eq!(rig.shares(), NONE, "the step may be over in a moment");
    assert_eq!(rig.shares(), [(0, 1, 90 * BLOCK)]);
}

#[test]
fn silent_ranks_epochs_and_ends_are_told_to_those_whom_they_concern() {
    let mut rig = Rig::new(&[100, 100]);
    rig.dispatch.silent(WorkerId(0));
    assert!(rig.loads[0].doubtful.load(Ordering::Relaxed));
    assert_eq!(rig.submit(5, 1, 1, false), 1);
    rig.dispatch.not_silent(WorkerId(0));
    assert!(!rig.loads[0].doubtful.load(Ordering::Relaxed));
    assert_eq!(rig.submit(5, 1, 1, false), 0);
    assert_eq!(rig.dispatch.replica_of(WorkerId(1), Some(ReplicaId(0))), Some(ReplicaId(1)));
    let mut messages = Vec::new();
    rig.dispatch.broke(ReplicaId(1), Epoch(1), EpochEnd::Planned, &mut messages);
    assert!(matches!(messages[..], [(ReplicaId(1), ToReplica::EpochEnded { .. })]));
    assert_eq!((rig.dispatch.epoch(ReplicaId(1)), rig.dispatch.serving().count()), (None, 1));
    assert_eq!(rig.dispatch.room(ReplicaId(1)), Some(1600), "it may have as much again");
    // What waits there may go on here.
    let mut messages = Vec::new();
    rig.dispatch.ready(ReplicaId(0), Epoch(2), vec![WorkerId(0)], 160, &mut messages);
    assert!(matches!(messages[..], [(ReplicaId(1), ToReplica::GiveUp)]));
    let mut messages = Vec::new();
    rig.dispatch.cancel(RequestId(1), &mut messages);
    assert_eq!(messages.len(), 2);
    rig.dispatch.removed(ReplicaId(1), &mut messages);
    assert!(matches!(messages[2], (ReplicaId(1), ToReplica::Retire)));
    assert_eq!(rig.dispatch.crashed(ReplicaId(0)), Some(Epoch(2)));
    let greedy = vec![SamplingParams::greedy()];
    let (request, events) = coming(GenerateRequest::new(RequestId(9), vec![1], greedy, 1));
    assert!(rig.dispatch.submit(request, events, &mut messages).is_err());
}
