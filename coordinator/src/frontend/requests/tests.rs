//! Requests in virtual time when their coordinator is lost.
use shared::metrics::Merged;
use shared::metrics::catalogue::{REQUESTS_EXPIRED, REQUESTS_REJECTED};
use shared::protocol::{AcceptedChoice, FinishReason, SubmitRequest};
use shared::sampling::SamplingParams;

use super::*;
use crate::engine::{EngineHandle, GenerateRequest, Generation};

const SECOND: Duration = Duration::from_secs(1);

/// Requests, the HTTP side's handle to them, and its pending commands.
pub(super) struct Rig {
    pub(super) requests: Requests,
    engine: EngineHandle,
    commands: Box<dyn FnMut() -> Option<EngineCommand>>,
    pub(super) now: Duration,
    pub(super) link: LinkNumber,
}

impl Rig {
    pub(super) fn new() -> Self {
        let (engine, mut commands) = EngineHandle::channel();
        let mut requests = Requests::new(FrontendStats::new());
        let link = requests.linked(Duration::ZERO, false);
        let commands = Box::new(move || commands.try_recv().ok());
        Self { requests, engine, commands, now: Duration::ZERO, link }
    }

    /// Handles all commands.
    pub(super) fn take(&mut self) {
        while let Some(command) = (self.commands)() {
            self.requests.command(self.now, command);
        }
    }

    pub(super) fn ask(&mut self, id: u64, n: u32, max_tokens: u32) -> Generation {
        let sampling = |choice| SamplingParams { choice, ..SamplingParams::greedy() };
        let sampling = (0..n).map(sampling).collect();
        let request = GenerateRequest::new(RequestId(id), vec![1; 4], sampling, max_tokens);
        let generation = self.engine.submit(request).unwrap();
        self.take();
        generation
    }

    pub(super) fn next(&mut self) -> Option<FromFrontend> {
        self.requests.next(self.now)
    }

    /// The next message, which must submit a request.
    fn submitted(&mut self) -> Box<SubmitRequest> {
        match self.next() {
            Some(FromFrontend::Submit(submit)) => submit,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn deliver(&mut self, id: u64, event: EngineEvent) {
        self.requests.deliver(self.now, self.link, RequestId(id), event);
    }

    pub(super) fn lose(&mut self) {
        self.requests.link_lost(self.now);
    }

    pub(super) fn link(&mut self) {
        self.link = self.requests.linked(self.now, true);
        self.requests.replica_serves();
    }
}

pub(super) fn token(choice: u32, token: u32) -> EngineEvent {
    EngineEvent::Token { choice, token, logprobs: None }
}

pub(super) fn finished(choice: u32) -> EngineEvent {
    EngineEvent::Finished { choice, reason: FinishReason::Length, cached: 0 }
}

/// Reads what has arrived for the client.
pub(super) fn read(generation: &mut Generation) -> Vec<EngineEvent> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut events = Vec::new();
    while let std::task::Poll::Ready(Some(event)) = generation.poll_next(&mut context) {
        events.push(event);
    }
    events
}

#[test]
fn a_stream_goes_on_at_the_next_coordinator_with_what_it_has() {
    let mut rig = Rig::new();
    let mut client = rig.ask(1, 2, 9);
    assert_eq!(rig.submitted().accepted, []);
    rig.deliver(1, token(0, 5));
    rig.deliver(1, token(1, 6));
    rig.deliver(1, finished(1));
    let old = rig.link;
    rig.lose();
    assert_eq!(rig.requests.live_tokens, 0);
    rig.now = 10 * SECOND;
    rig.link = rig.requests.linked(rig.now, true);
    assert_eq!(rig.next(), None, "no replica serves yet");
    rig.requests.replica_serves();
    let again = rig.submitted();
    let goes_on = AcceptedChoice::GoesOn(vec![5]);
    assert_eq!(again.accepted, [goes_on, AcceptedChoice::Over { tokens: 1 }]);
    assert_eq!(again.waited_us, 10_000_000);
    // Events of the old link no longer count.
    rig.requests.deliver(rig.now, old, RequestId(1), token(0, 99));
    rig.deliver(1, token(0, 7));
    rig.deliver(1, finished(0));
    let all = [token(0, 5), token(1, 6), finished(1), token(0, 7), finished(0)];
    assert_eq!(read(&mut client), all);
    assert_eq!((rig.requests.live.len(), rig.requests.live_tokens), (0, 0));
}

#[test]
fn a_coordinator_that_ends_has_its_streams_go_on_elsewhere() {
    let mut rig = Rig::new();
    let mut client = rig.ask(1, 1, 9);
    rig.submitted();
    rig.deliver(1, token(0, 5));
    rig.deliver(1, EngineEvent::Failed(EngineError::ShuttingDown));
    let late = rig.ask(2, 1, 9);
    assert_eq!(rig.next(), None, "nothing goes to one that ends");
    rig.lose();
    rig.link();
    assert_eq!(rig.submitted().accepted, [AcceptedChoice::GoesOn(vec![5])]);
    assert_eq!(rig.submitted().id, RequestId(2));
    rig.deliver(1, token(0, 6));
    assert_eq!(read(&mut client), [token(0, 5), token(0, 6)]);
    drop(late);
}

#[test]
fn a_request_that_loses_every_coordinator_is_suspected() {
    let mut rig = Rig::new();
    let mut client = rig.ask(1, 1, 9);
    for _ in 0..LOST_MAX {
        rig.submitted();
        rig.deliver(1, token(0, 5));
        rig.lose();
        rig.link();
    }
    assert_eq!(rig.submitted().accepted, [AcceptedChoice::GoesOn(vec![5, 5])]);
    assert_eq!(read(&mut client).len(), 2);
    rig.lose();
    let events = read(&mut client);
    let [EngineEvent::Failed(EngineError::Unavailable { message })] = &*events else {
        panic!("{events:?}")
    };
    assert!(message.contains("the link to the coordinator ended; so did those"), "{message}");
    rig.link();
    assert_eq!(rig.next(), None);
}

#[test]
fn who_leaves_is_not_sent_again_and_frees_its_place() {
    let mut rig = Rig::new();
    let mut clients: Vec<Option<Generation>> = (0..4).map(|id| Some(rig.ask(id, 1, 9))).collect();
    for _ in 0..4 {
        rig.submitted();
    }
    rig.deliver(0, token(0, 1));
    // One leaves while live, one while held, and one whose command is lost.
    clients[0] = None;
    rig.take();
    assert_eq!(rig.next(), Some(FromFrontend::Cancel(RequestId(0))));
    rig.lose();
    clients[1] = None;
    rig.take();
    clients[2] = None;
    assert!((rig.commands)().is_some());
    rig.link();
    assert_eq!(rig.submitted().id, RequestId(3));
    assert_eq!(rig.next(), None);
    assert!(!rig.requests.has_held());
}

#[test]
fn what_is_held_for_too_long_ends_and_counts_by_whether_it_had_begun() {
    let mut rig = Rig::new();
    let mut clients = [rig.ask(1, 1, 9), rig.ask(2, 1, 9)];
    let counted = |rig: &Rig| {
        let (_, snapshot) = rig.requests.stats.report();
        let merged = Merged::of(&snapshot);
        let rejected = merged.counter_sum_of(REQUESTS_REJECTED, RejectReason::Unavailable);
        (rejected, merged.counter_sum_of(REQUESTS_EXPIRED, ExpiryReason::NoCoordinator))
    };
    rig.submitted();
    rig.submitted();
    rig.deliver(1, token(0, 1));
    rig.lose();
    rig.now = HELD_FOR - SECOND;
    rig.requests.give_up(rig.now, None);
    assert_eq!(read(&mut clients[1]), []);
    rig.now = HELD_FOR;
    rig.requests.give_up(rig.now, None);
    // Clients are not told which coordinator there was, nor what the system said of the link.
    for client in &mut clients {
        assert_eq!(read(client).pop(), Some(EngineEvent::Failed(no_coordinator())));
    }
    assert_eq!(counted(&rig), (1, 1));
    assert!(!rig.requests.has_held());
}

#[test]
fn tokens_that_are_kept_have_a_bound() {
    let mut rig = Rig::new();
    rig.requests.live_tokens_max = 10;
    let mut clients = [rig.ask(1, 1, 9), rig.ask(2, 1, 9), rig.ask(3, 1, 9)];
    for _ in 0..3 {
        rig.submitted();
    }
    // Two prompts of four tokens are kept; the third is not, nor is what outgrows the bound.
    assert_eq!(rig.requests.live_tokens, 8);
    for at in 0..3 {
        rig.deliver(1, token(0, at));
    }
    assert_eq!(rig.requests.live_tokens, 4);
    rig.deliver(2, token(0, 7));
    rig.deliver(3, token(0, 8));
    rig.lose();
    assert_eq!(read(&mut clients[0]).len(), 4);
    assert_eq!(read(&mut clients[1]), [token(0, 7)]);
    let third = read(&mut clients[2]);
    let [_, EngineEvent::Failed(EngineError::Unavailable { message })] = &*third else {
        panic!("{third:?}")
    };
    assert!(message.contains("too many tokens"), "{message}");
    rig.link();
    assert_eq!(rig.submitted().accepted, [AcceptedChoice::GoesOn(vec![7])]);
    assert_eq!(rig.next(), None);
}

/// A client whose own cancellation did not fit into the command queue.
#[test]
fn a_request_without_its_client_is_cancelled_with_its_next_event_or_soon() {
    let mut rig = Rig::new();
    let mut clients: Vec<Option<Generation>> = (0..4).map(|id| Some(rig.ask(id, 1, 9))).collect();
    for _ in 0..4 {
        rig.submitted();
    }
    for client in clients.iter_mut().take(3) {
        *client = None;
        assert!((rig.commands)().is_some(), "lost");
    }
    rig.deliver(1, token(0, 1));
    rig.deliver(3, token(0, 1));
    assert_eq!(rig.requests.gone, [RequestId(1)]);
    rig.requests.find_gone(rig.now);
    rig.requests.gone.sort_unstable();
    assert_eq!(rig.requests.gone, [0, 1, 2].map(RequestId));
    rig.requests.find_gone(rig.now);
    let (gone, live) = (rig.requests.gone.len(), rig.requests.live.len());
    assert_eq!((gone, live), (3, 1), "each once");
}
