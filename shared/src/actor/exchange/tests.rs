//! Three processes in a star, with links that may fail at any moment: every ask is resolved exactly
//! once, and nothing is left over.
use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

const HUB: usize = 0;
/// Each spoke's link to the hub; both sides use the same number.
const LINK: PeerId = PeerId(7);

fn peer_of(node: usize) -> PeerId {
    PeerId(node as u64)
}

#[derive(Default)]
struct Star {
    nodes: [Exchange; 3],
    /// Frames in flight, by (from, to).
    wires: BTreeMap<(usize, usize), VecDeque<ActorFrame>>,
    linked: [bool; 3],
    now: Duration,
    /// Deliveries that an actor has not answered yet: (node, id).
    held: Vec<(usize, u64)>,
    resolved: BTreeMap<(usize, u64), u32>,
}

impl Star {
    /// Actor `x` lives on node x; there is no actor 3.
    fn route(&self, node: usize, actor: usize) -> Route {
        let lost = || Route::Nowhere(AskError::LinkLost("hub".to_owned()));
        match actor {
            _ if actor == node => Route::Here,
            3 if node == HUB => Route::Nowhere(AskError::NoSuchActor("3".to_owned())),
            _ if node == HUB && self.linked[actor] => Route::Peer(peer_of(actor)),
            _ if node != HUB && self.linked[node] => Route::Peer(LINK),
            _ => lost(),
        }
    }

    fn other_end(node: usize, peer: PeerId) -> usize {
        if node == HUB { peer.0 as usize } else { HUB }
    }

    fn carry_out(&mut self, node: usize, effects: Vec<Effect>) {
        let mut queue = VecDeque::from(effects);
        while let Some(effect) = queue.pop_front() {
            let mut more = Vec::new();
            match effect {
                Effect::Send { peer, frame } => {
                    let to = Self::other_end(node, peer);
                    if self.linked[node.max(to)] {
                        self.wires.entry((node, to)).or_default().push_back(frame);
                    } else if let ActorFrame::Deliver { id, .. } = frame {
                        let lost = Err(AskError::LinkLost("x".to_owned()));
                        self.nodes[node].answered(Some(peer), id, lost, &mut more);
                    }
                }
                Effect::Deliver { id, wants, .. } => match wants {
                    Wants::Delivery => {
                        self.nodes[node].answered(None, id, Ok(Vec::new()), &mut more);
                    }
                    Wants::Reply => self.held.push((node, id)),
                    Wants::Nothing => {}
                },
                Effect::Resolve { waiter, .. } => {
                    *self.resolved.entry((node, waiter)).or_default() += 1;
                }
                Effect::Lost(_) => {}
            }
            queue.extend(more);
        }
    }

    fn ask(&mut self, node: usize, actor: usize, waiter: u64, wants: Wants, ms: u64) {
        let message = Outgoing {
            to: actor.to_string(),
            wants,
            within: Duration::from_millis(ms),
            body: vec![1],
        };
        let (route, mut effects) = (self.route(node, actor), Vec::new());
        self.nodes[node].send(self.now, Origin::Here(waiter), route, message, &mut effects);
        self.carry_out(node, effects);
    }

    /// Delivers the oldest frame of a wire.
    fn deliver(&mut self, from: usize, to: usize) {
        let Some(frame) = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front) else {
            return;
        };
        let peer = if to == HUB { peer_of(from) } else { LINK };
        let mut effects = Vec::new();
        match frame {
            ActorFrame::Deliver { id, to: actor, wants, within_ms, body } => {
                let within = Duration::from_millis(within_ms.into());
                let route = self.route(to, actor.parse().unwrap_or(3));
                let message = Outgoing { to: actor, wants, within, body };
                let origin = Origin::Peer(peer, id);
                self.nodes[to].send(self.now, origin, route, message, &mut effects);
            }
            ActorFrame::Answer { id, outcome } => {
                self.nodes[to].answered(Some(peer), id, outcome, &mut effects);
            }
            _ => {}
        }
        self.carry_out(to, effects);
    }

    fn cut(&mut self, spoke: usize) {
        self.linked[spoke] = false;
        for (a, b) in [(spoke, HUB), (HUB, spoke)] {
            self.wires.remove(&(a, b));
            let peer = if a == HUB { peer_of(spoke) } else { LINK };
            let mut effects = Vec::new();
            self.nodes[a].peer_lost(peer, "x", &mut effects);
            self.carry_out(a, effects);
        }
    }

    fn pass(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        for node in 0..3 {
            let mut effects = Vec::new();
            self.nodes[node].tick(self.now, &mut effects);
            self.carry_out(node, effects);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Ask { node: usize, actor: usize, wants: Wants, ms: u64 },
    Deliver(usize, usize),
    Answer { which: prop::sample::Index, fails: bool, twice: bool },
    Cut(usize),
    Link(usize),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let wants = prop_oneof![Just(Wants::Nothing), Just(Wants::Delivery), Just(Wants::Reply)];
    let wire = prop_oneof![Just((0, 1)), Just((1, 0)), Just((0, 2)), Just((2, 0))];
    prop_oneof![
        4 => (0..3usize, 0..4usize, wants, 0..200u64)
            .prop_map(|(node, actor, wants, ms)| Step::Ask { node, actor, wants, ms }),
        8 => wire.prop_map(|(from, to)| Step::Deliver(from, to)),
        3 => (any::<prop::sample::Index>(), any::<bool>(), any::<bool>())
            .prop_map(|(which, fails, twice)| Step::Answer { which, fails, twice }),
        1 => (1..3usize).prop_map(Step::Cut),
        2 => (1..3usize).prop_map(Step::Link),
        1 => (0..60u64).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_ask_is_resolved_exactly_once(steps in prop::collection::vec(step(), 1..120)) {
        let mut star = Star { linked: [true; 3], ..Star::default() };
        let (mut waiters, mut next) = (Vec::new(), 0);
        for step in steps {
            match step {
                Step::Ask { node, actor, wants, ms } => {
                    next += 1;
                    if wants != Wants::Nothing {
                        waiters.push((node, next));
                    }
                    star.ask(node, actor, next, wants, ms);
                }
                Step::Deliver(from, to) => star.deliver(from, to),
                Step::Answer { which, fails, twice } if !star.held.is_empty() => {
                    let at = which.index(star.held.len());
                    let (node, id) = star.held.swap_remove(at);
                    let outcome = if fails { Err(AskError::Failed("x".to_owned())) } else { Ok(vec![2]) };
                    let mut effects = Vec::new();
                    star.nodes[node].answered(None, id, outcome.clone(), &mut effects);
                    if twice {
                        prop_assert!(!star.nodes[node].answered(None, id, outcome, &mut effects));
                    }
                    star.carry_out(node, effects);
                }
                Step::Answer { .. } => {}
                Step::Cut(spoke) => star.cut(spoke),
                Step::Link(spoke) => star.linked[spoke] = true,
                Step::Pass(ms) => star.pass(ms),
            }
            for (who, times) in &star.resolved {
                prop_assert_eq!(*times, 1, "{:?}", who);
            }
        }
        star.pass(1000);
        for waiter in &waiters {
            prop_assert_eq!(star.resolved.get(waiter), Some(&1), "{:?}", waiter);
        }
        // A message that was forwarded late may wait for its own deadline.
        for _ in 0..2000 {
            for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
                star.deliver(from, to);
            }
        }
        star.pass(1000);
        prop_assert_eq!(star.resolved.len(), waiters.len());
        prop_assert!(star.nodes.iter().all(|node| node.outstanding() == 0));
        prop_assert!(star.nodes.iter().all(|node| node.of_peers.is_empty()));
    }
}

fn message(wants: Wants) -> Outgoing {
    let within = Duration::from_secs(1);
    Outgoing { to: "a".to_owned(), wants, within, body: Vec::new() }
}

#[test]
fn one_peer_cannot_take_all_places_and_there_is_an_end() {
    let mut exchange = Exchange::default();
    let mut ask = |origin| {
        let mut effects = Vec::new();
        exchange.send(Duration::ZERO, origin, Route::Here, message(Wants::Reply), &mut effects);
        matches!(effects[0], Effect::Deliver { .. })
    };
    let taken = (0..ASKS_MAX as u64).filter(|id| ask(Origin::Peer(PeerId(1), *id))).count();
    assert_eq!(taken, ASKS_PER_PEER);
    let taken = (0..2 * ASKS_MAX as u64).filter(|id| ask(Origin::Here(*id))).count();
    assert_eq!(taken, ASKS_MAX - ASKS_PER_PEER);
    assert!(!ask(Origin::Peer(PeerId(2), 0)));
}

#[test]
fn an_answer_counts_only_from_where_the_ask_went() {
    let mut exchange = Exchange::default();
    let mut effects = Vec::new();
    let route = Route::Peer(PeerId(3));
    exchange.send(Duration::ZERO, Origin::Here(1), route, message(Wants::Reply), &mut effects);
    let Effect::Send { frame: ActorFrame::Deliver { id, .. }, .. } = effects.remove(0) else {
        panic!("it is sent");
    };
    assert!(!exchange.answered(Some(PeerId(4)), id, Ok(Vec::new()), &mut effects));
    assert!(!exchange.answered(None, id, Ok(Vec::new()), &mut effects));
    assert!(effects.is_empty());
    assert!(exchange.answered(Some(PeerId(3)), id, Ok(vec![9]), &mut effects));
    assert_eq!(effects, [Effect::Resolve { waiter: 1, outcome: Ok(vec![9]) }]);
}
