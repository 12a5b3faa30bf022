//! Random tests: requests whose coordinators may be lost at any moment.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use shared::protocol::{AcceptedChoice, SubmitRequest};

use super::tests::{Rig, finished, read, token};
use super::*;
use crate::engine::Generation;

/// What a coordinator computes: a token for each place, and their number.
fn expected(id: u64, choice: u32) -> Vec<u32> {
    let draw = |place: u32| (id as u32).wrapping_mul(31) ^ (choice * 7) ^ (place * 1009);
    (0..1 + draw(77) % 6).map(draw).collect()
}

/// A coordinator with its requests, and the events it sent that have not arrived.
#[derive(Default)]
struct Coordinator {
    /// Number of tokens of each choice that is not over.
    running: BTreeMap<u64, BTreeMap<u32, usize>>,
    sent: VecDeque<(u64, EngineEvent)>,
}

impl Coordinator {
    fn take(&mut self, submit: &SubmitRequest) {
        let id = submit.id.0;
        let begin = |choice: u32| match submit.accepted.get(choice as usize) {
            None => Some((choice, 0)),
            Some(AcceptedChoice::Over { tokens }) => {
                assert_eq!(*tokens as usize, expected(id, choice).len());
                None
            }
            Some(AcceptedChoice::GoesOn(tokens)) => {
                assert!(expected(id, choice).starts_with(tokens), "{tokens:?}");
                Some((choice, tokens.len()))
            }
        };
        let choices: BTreeMap<u32, usize> = (0..submit.n).filter_map(begin).collect();
        assert!(!choices.is_empty(), "nothing is left to be done");
        assert!(self.running.insert(id, choices).is_none(), "it has it already");
    }

    /// Accepts one token, or ends a choice that has all of them.
    fn step(&mut self, draw: usize) {
        let all = self.running.iter().flat_map(|(id, it)| it.keys().map(|choice| (*id, *choice)));
        let all: Vec<(u64, u32)> = all.collect();
        if all.is_empty() {
            return;
        }
        let (id, choice) = all[draw % all.len()];
        let Some(choices) = self.running.get_mut(&id) else { return };
        let Some(count) = choices.get_mut(&choice) else { return };
        match expected(id, choice).get(*count) {
            Some(next) => {
                *count += 1;
                self.sent.push_back((id, token(choice, *next)));
            }
            None => {
                choices.remove(&choice);
                self.sent.push_back((id, finished(choice)));
            }
        }
        self.running.retain(|_, choices| !choices.is_empty());
    }

    fn shut_down(&mut self) {
        for id in std::mem::take(&mut self.running).into_keys() {
            self.sent.push_back((id, EngineEvent::Failed(EngineError::ShuttingDown)));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Happens {
    Ask(u32),
    Step(usize),
    Arrive(usize),
    Send,
    ShutDown,
    Lose,
    Link,
    Leave(usize),
    Look,
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        3 => (1u32..4).prop_map(Happens::Ask),
        16 => any::<usize>().prop_map(Happens::Step),
        8 => (1usize..6).prop_map(Happens::Arrive),
        8 => Just(Happens::Send),
        1 => Just(Happens::ShutDown),
        2 => Just(Happens::Lose),
        4 => Just(Happens::Link),
        1 => any::<usize>().prop_map(Happens::Leave),
        2 => Just(Happens::Look),
    ]
}

/// A front end with its clients and the coordinators it is linked to, one after another.
struct Play {
    rig: Rig,
    coordinator: Option<Coordinator>,
    /// Events of broken links that had not arrived: they arrive anyway, too late.
    stale: Vec<(LinkNumber, u64, EngineEvent)>,
    clients: BTreeMap<u64, (u32, Generation, Vec<EngineEvent>)>,
    gone: BTreeSet<u64>,
    lost: BTreeMap<u64, u32>,
    next: u64,
}

impl Play {
    fn new() -> Self {
        let (rig, coordinator) = (Rig::new(), Some(Coordinator::default()));
        let (stale, clients, gone) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        Self { rig, coordinator, stale, clients, gone, lost: BTreeMap::new(), next: 0 }
    }

    fn send(&mut self) {
        while let Some(coordinator) = &mut self.coordinator {
            match self.rig.next() {
                Some(FromFrontend::Submit(submit)) => {
                    assert!(!self.gone.contains(&submit.id.0), "its client has left");
                    coordinator.take(&submit);
                }
                Some(FromFrontend::Cancel(id)) => {
                    assert!(self.gone.contains(&id.0), "its client waits");
                    coordinator.running.remove(&id.0);
                }
                Some(other) => panic!("{other:?}"),
                None => return,
            }
        }
    }

    fn arrive(&mut self, most: usize) {
        let Some(coordinator) = &mut self.coordinator else { return };
        let most = most.min(coordinator.sent.len());
        for (id, event) in coordinator.sent.drain(..most) {
            self.rig.deliver(id, event);
        }
        self.read();
    }

    /// Clients read what there is.
    fn read(&mut self) {
        for (id, (_, generation, got)) in &mut self.clients {
            if !self.gone.contains(id) {
                got.append(&mut read(generation));
            }
        }
    }

    fn lose(&mut self) {
        let Some(coordinator) = self.coordinator.take() else { return };
        for id in self.rig.requests.live.keys() {
            *self.lost.entry(id.0).or_default() += 1;
        }
        let link = self.rig.link;
        self.stale.extend(coordinator.sent.into_iter().map(|(id, event)| (link, id, event)));
        self.rig.lose();
    }

    fn happen(&mut self, what: Happens) {
        self.rig.now += Duration::from_millis(3);
        match what {
            Happens::Ask(n) => {
                let generation = self.rig.ask(self.next, n, 9);
                self.clients.insert(self.next, (n, generation, Vec::new()));
                self.next += 1;
            }
            Happens::Step(draw) => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.step(draw);
                }
            }
            Happens::Arrive(most) => self.arrive(most),
            Happens::Send => self.send(),
            Happens::ShutDown => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.shut_down();
                }
            }
            Happens::Lose => self.lose(),
            Happens::Link => {
                if self.coordinator.is_none() {
                    self.coordinator = Some(Coordinator::default());
                    self.rig.link();
                }
                for (link, id, event) in self.stale.drain(..) {
                    self.rig.requests.deliver(self.rig.now, link, RequestId(id), event);
                }
            }
            Happens::Leave(draw) => {
                if let Some(id) = self.next.checked_sub(1).map(|last| draw as u64 % (last + 1))
                    && self.gone.insert(id)
                    && let Some((_, generation, _)) = self.clients.get_mut(&id)
                {
                    generation.cancel();
                    self.rig.take();
                }
            }
            Happens::Look => {
                self.rig.requests.find_gone(self.rig.now);
                self.rig.requests.give_up(self.rig.now, None);
            }
        }
    }

    /// A coordinator that stays does the rest.
    fn end(&mut self) {
        self.lose();
        self.happen(Happens::Link);
        self.send();
        while let Some(coordinator) = &mut self.coordinator
            && !(coordinator.running.is_empty() && coordinator.sent.is_empty())
        {
            coordinator.step(0);
            self.arrive(usize::MAX);
            self.send();
        }
        self.read();
    }

    fn check(&self) {
        for (id, (n, _, got)) in &self.clients {
            if self.gone.contains(id) {
                continue;
            }
            let failed = matches!(got.last(), Some(EngineEvent::Failed(_)));
            let lost = self.lost.get(id).copied().unwrap_or(0);
            assert_eq!(failed, lost > LOST_MAX, "request {id}, lost {lost} times: {got:?}");
            for choice in 0..*n {
                let mut events = expected(*id, choice).into_iter().map(|it| token(choice, it));
                let of = |event: &&EngineEvent| match event {
                    EngineEvent::Token { choice: of, .. }
                    | EngineEvent::Finished { choice: of, .. } => *of == choice,
                    _ => false,
                };
                let mut ended = false;
                for event in got.iter().filter(of) {
                    assert!(!ended, "{event:?} behind the end of {choice} of {id}");
                    let expected = events.next();
                    ended = expected.is_none();
                    let expected = expected.unwrap_or_else(|| finished(choice));
                    assert_eq!(*event, expected, "choice {choice} of request {id}");
                }
                assert!(ended || failed, "choice {choice} of request {id} did not end");
            }
        }
        assert_eq!((self.rig.requests.live.len(), self.rig.requests.live_tokens), (0, 0));
        assert!(!self.rig.requests.has_held());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    /// Whatever is lost, and whenever: no choice misses or repeats a token, and each choice ends
    /// once.
    #[test]
    fn every_client_gets_every_token_once(all in prop::collection::vec(happens(), 0..200)) {
        let mut play = Play::new();
        for what in all {
            play.happen(what);
        }
        play.end();
        play.check();
    }
}
