//! What becomes of created actors, one event after the other.
//!
//! - `keeping`: what etcd keeps for the next coordinator
//! - `properties`: random histories
mod keeping;
mod properties;

use std::time::Duration;

use super::*;
use crate::actor::exchange::PeerId;
use crate::protocol::NodeResources;
use crate::protocol::actors::creation::{Needs, Placed, Where};

const NOW: Duration = Duration::from_secs(100);

fn home(peer: u64) -> Home {
    Home::Peer(PeerId(peer))
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn creation(name: &str) -> Creation {
    Creation {
        name: name.to_owned(),
        class: "counter".to_owned(),
        argument: Vec::new(),
        needs: Needs::nothing().cpus(1.0),
        at: Where::pack(),
        max_restarts: Some(2),
        mailbox: 8,
        start_limit_ms: 1000,
        message_limit_ms: 0,
    }
}

fn wanted(asker: u64, creation: Creation) -> Wanted {
    let within = Duration::from_secs(10);
    let generation = 1000 + asker;
    Wanted { asker, creation, generation, again: false, or_get: false, within }
}

/// A placement whose nodes `n1`, `n2` .. offer this many cores each.
fn nodes(cores: &[u32]) -> Placement {
    let mut placement = Placement::default();
    for (index, cpus) in cores.iter().enumerate() {
        let peer = index as u64 + 1;
        offer(&mut placement, peer, *cpus);
    }
    placement
}

fn offer(placement: &mut Placement, peer: u64, cpus: u32) -> Vec<Effect> {
    let labels = [("zone".to_owned(), format!("z{peer}"))].into();
    let offer = NodeResources { cpus, labels, ..NodeResources::default() };
    let hosting = Hosting { classes: vec!["counter".to_owned()], offer };
    let mut effects = Vec::new();
    placement.hosting(NOW, home(peer), &format!("n{peer}"), hosting, &mut effects);
    effects
}

fn create(placement: &mut Placement, wanted: Wanted) -> Vec<Effect> {
    let mut effects = Vec::new();
    placement.create(NOW, wanted, None, &mut effects);
    effects
}

fn begun(effects: &[Effect]) -> Vec<(Home, Begin)> {
    let begun = effects.iter().filter_map(|effect| match effect {
        Effect::Begin { home, begin } => Some((*home, (**begin).clone())),
        _ => None,
    });
    begun.collect()
}

fn answers(effects: &[Effect]) -> Vec<(u64, Result<PlacementReply, PlacementError>)> {
    let answers = effects.iter().filter_map(|effect| match effect {
        Effect::Answer { asker, outcome } => Some((*asker, outcome.clone())),
        _ => None,
    });
    answers.collect()
}

fn ended(effects: &[Effect]) -> Vec<(Home, Instance, EndHow)> {
    let ended = effects.iter().filter_map(|effect| match effect {
        Effect::End { home, instance, how, .. } => Some((*home, *instance, *how)),
        _ => None,
    });
    ended.collect()
}

fn life(effects: &[Effect]) -> Option<ActorReport> {
    effects.iter().rev().find_map(|effect| match effect {
        Effect::Publish { report, .. } => Some(report.clone()),
        _ => None,
    })
}

fn says(
    placement: &mut Placement,
    now: Duration,
    peer: u64,
    name: &str,
    instance: Instance,
    life: ActorLife,
) -> Vec<Effect> {
    let reason = (life == ActorLife::Dead).then(|| "it panicked".to_owned());
    let placed = Placed { name: name.to_owned(), instance, life, reason, known: None };
    let mut effects = Vec::new();
    placement.placed(now, home(peer), &format!("n{peer}"), placed, false, &mut effects);
    effects
}

fn tick(placement: &mut Placement, now: Duration) -> Vec<Effect> {
    let mut effects = Vec::new();
    placement.tick(now, &mut effects);
    effects
}

/// Creates an actor that is alive on `n1`.
fn alive(placement: &mut Placement, creation: Creation) -> Instance {
    let name = creation.name.clone();
    let effects = create(placement, wanted(1, creation));
    let (at, begin) = begun(&effects).remove(0);
    assert_eq!(at, home(1));
    let effects = says(placement, NOW, 1, &name, begin.instance, ActorLife::Alive);
    let node = "n1".to_owned();
    assert_eq!(answers(&effects), [(1, Ok(PlacementReply { node }))]);
    begin.instance
}

#[test]
fn an_actor_is_created_where_its_class_is_hosted_and_there_is_room() {
    let mut placement = nodes(&[1, 2]);
    let effects = create(&mut placement, wanted(1, creation("a")));
    // Packing fills one after another; spreading takes the emptiest.
    assert_eq!(begun(&effects)[0].0, home(1));
    assert_eq!(life(&effects).unwrap().life, ActorLife::Starting);
    let small = |name: &str, at| {
        let needs = Needs::nothing().cpus(0.5);
        Creation { needs, at, ..creation(name) }
    };
    let places: Vec<Home> = [Where::pack(), Where::pack(), Where::spread(), Where::pack()]
        .into_iter()
        .enumerate()
        .map(|(index, at)| {
            let name = format!("b{index}");
            let wanted = wanted(2 + index as u64, small(&name, at));
            begun(&create(&mut placement, wanted))[0].0
        })
        .collect();
    assert_eq!(places, [home(2); 4], "the first node is full");
    let mut placement = nodes(&[4, 4]);
    let places: Vec<Home> = (0..4)
        .map(|index| {
            let name = format!("c{index}");
            begun(&create(&mut placement, wanted(index, small(&name, Where::spread()))))[0].0
        })
        .collect();
    assert_eq!(places, [home(1), home(2), home(1), home(2)]);
    let at = |at: Where| Creation { at, ..creation("d") };
    let on = |placement: &mut Placement, number: u64, at_| {
        let creation = Creation { name: format!("d{number}"), ..at(at_) };
        begun(&create(placement, wanted(50 + number, creation)))[0].0
    };
    assert_eq!(on(&mut placement, 0, Where::node("n2")), home(2));
    assert_eq!(on(&mut placement, 1, Where::pack().label("zone", "z2")), home(2));
    assert_eq!(on(&mut placement, 2, Where::rather("n1")), home(1));
    assert_eq!(on(&mut placement, 3, Where::rather("elsewhere")), home(2), "the fullest with room");
}

#[test]
fn one_that_cannot_be_placed_says_why_and_is_called_off() {
    let mut placement = nodes(&[1, 2]);
    let of_class = |class: &str| Creation { class: class.to_owned(), ..creation("a") };
    let needs = Needs::nothing().cpus(2.5).gpus(1.0).memory(3 << 30).custom("seats", 2);
    let cases = [
        (of_class("nobody's"), "no process hosts the class `nobody's`"),
        (
            Creation { at: Where::node("n9"), ..creation("b") },
            "it may be placed on node n9; the class is hosted by n1, n2",
        ),
        (
            Creation { needs, ..creation("c") },
            "it needs 2.5 cpus, 1 gpus, 3072 MiB of memory, 2 seats; free are 1 cpus on n1; 2 cpus \
             on n2",
        ),
    ];
    for (index, (creation, why)) in cases.into_iter().enumerate() {
        let (asker, name) = (1 + index as u64, creation.name.clone());
        let effects = create(&mut placement, wanted(asker, creation));
        assert!(begun(&effects).is_empty() && answers(&effects).is_empty());
        let report = life(&effects).unwrap();
        assert_eq!(report.life, ActorLife::Pending);
        assert!(report.reason.unwrap().contains(why));
        assert!(answers(&tick(&mut placement, NOW + ms(9_999))).is_empty());
        let effects = tick(&mut placement, NOW + ms(10_000));
        let [(answered, Err(error))] = &answers(&effects)[..] else { panic!("{effects:?}") };
        assert_eq!((*answered, error.to_string().as_str()), (asker, why));
        assert_eq!(life(&effects).unwrap().life, ActorLife::Dead);
        assert!(placement.created(&name).is_none());
    }
    assert!(!placement.awaits(NOW));
}

#[test]
fn one_that_waits_is_placed_when_there_is_room() {
    let mut placement = nodes(&[1]);
    let first = alive(&mut placement, creation("a"));
    assert!(begun(&create(&mut placement, wanted(2, creation("b")))).is_empty());
    assert!(begun(&create(&mut placement, wanted(3, creation("c")))).is_empty());
    let mut effects = Vec::new();
    placement.kill(NOW, 9, "a", false, &mut effects).unwrap();
    assert_eq!(ended(&effects), [(home(1), first, EndHow::Kill)]);
    assert!(begun(&effects).is_empty(), "what it takes is free when it is dead");
    let effects = says(&mut placement, NOW, 1, "a", first, ActorLife::Dead);
    let begun_now = begun(&effects);
    assert_eq!(begun_now.len(), 1);
    assert_eq!(begun_now[0].1.creation.name, "b", "the first that waited");
    let effects = offer(&mut placement, 2, 1);
    assert_eq!(begun(&effects)[0].0, home(2), "a node that joins");
}

#[test]
fn one_that_is_due_is_awaited_until_a_place_was_looked_for() {
    let mut placement = nodes(&[1]);
    let instance = alive(&mut placement, creation("a"));
    says(&mut placement, NOW, 1, "a", instance, ActorLife::Dead);
    // The clock may have gone on since then.
    let later = NOW + Duration::from_secs(60);
    assert!(placement.awaits(later));
    assert_eq!(begun(&tick(&mut placement, later)).len(), 1);
    assert!(!placement.awaits(later));
    placement.lost(later, home(1), "cut", &mut Vec::new());
    tick(&mut placement, later + LOST_GRACE);
    let day = later + Duration::from_secs(86_400);
    assert!(placement.awaits(day));
    assert!(begun(&tick(&mut placement, day)).is_empty());
    assert!(!placement.awaits(day), "not before there is more room");
    offer(&mut placement, 2, 1);
    assert!(placement.awaits(day));
    assert_eq!(begun(&tick(&mut placement, day)).len(), 1);
}

#[test]
fn one_that_fails_is_started_again_up_to_its_limit_rather_elsewhere() {
    let mut placement = nodes(&[4, 4]);
    let mut instance = alive(&mut placement, creation("a"));
    let (mut now, mut at) = (NOW, 1);
    for restart in 1..=2 {
        let effects = says(&mut placement, now, at, "a", instance, ActorLife::Dead);
        let report = life(&effects).unwrap();
        assert_eq!((report.life, report.restarts), (ActorLife::Restarting, restart));
        assert_eq!(report.reason.as_deref(), Some("it panicked"));
        assert!(begun(&effects).is_empty(), "after a while");
        now += ms(400);
        let effects = tick(&mut placement, now);
        let (there, begin) = begun(&effects).remove(0);
        assert_ne!(there, home(at), "not where it failed, if there is another");
        assert_eq!(begin.instance.incarnation, 1 + restart);
        assert_eq!(begin.restarted.total, restart);
        (instance, at) = (begin.instance, 3 - at);
        says(&mut placement, now, at, "a", instance, ActorLife::Alive);
    }
    let effects = says(&mut placement, now, at, "a", instance, ActorLife::Dead);
    let report = life(&effects).unwrap();
    assert_eq!(report.life, ActorLife::Dead);
    assert_eq!(report.reason.as_deref(), Some("it panicked; it ended 3 times in a row"));
    assert!(placement.created("a").is_none());
}

#[test]
fn one_whose_restarts_hang_before_it_is_made_is_given_up_after_its_limit() {
    let mut placement = nodes(&[4]);
    let slow = Creation { start_limit_ms: 40_000, ..creation("a") };
    let mut instance = alive(&mut placement, slow);
    let mut now = NOW;
    for restart in 1..=2 {
        let effects = says(&mut placement, now, 1, "a", instance, ActorLife::Dead);
        assert_eq!(life(&effects).unwrap().restarts, restart);
        now += ms(400);
        instance = begun(&tick(&mut placement, now)).remove(0).1.instance;
        // Longer than a life that counts as stable.
        now += ms(40_000);
    }
    let effects = says(&mut placement, now, 1, "a", instance, ActorLife::Dead);
    let report = life(&effects).unwrap();
    assert_eq!(report.life, ActorLife::Dead);
    assert_eq!(report.reason.as_deref(), Some("it panicked; it ended 3 times in a row"));
}

#[test]
fn one_that_a_process_does_not_take_is_placed_elsewhere() {
    let mut placement = nodes(&[4, 4]);
    let effects = create(&mut placement, wanted(1, creation("a")));
    let instance = begun(&effects)[0].1.instance;
    let effects = says(&mut placement, NOW, 1, "a", instance, ActorLife::Pending);
    assert!(answers(&effects).is_empty() && begun(&effects).is_empty());
    assert_eq!(placement.hosts().map(Host::actors).sum::<usize>(), 0, "it takes nothing there");
    let effects = tick(&mut placement, NOW + LOST_GRACE);
    let (at, begin) = begun(&effects).remove(0);
    assert_eq!((at, begin.restarted.total), (home(2), 0), "that is no restart");
    let effects = says(&mut placement, NOW, 2, "a", begin.instance, ActorLife::Alive);
    assert_eq!(answers(&effects), [(1, Ok(PlacementReply { node: "n2".to_owned() }))]);
}

#[test]
fn one_that_no_process_takes_is_tried_less_and_less_often_until_another_process_joins() {
    let mut placement = nodes(&[4]);
    let lived = alive(&mut placement, creation("a"));
    says(&mut placement, NOW, 1, "a", lived, ActorLife::Dead);
    let mut now = NOW + ms(400);
    let mut instance = begun(&tick(&mut placement, now)).remove(0).1.instance;
    for seconds in [1, 2, 4, 8, 16, 32, 32, 32] {
        says(&mut placement, now, 1, "a", instance, ActorLife::Pending);
        let due = now + ms(seconds * 1000);
        assert!(begun(&tick(&mut placement, due - ms(1))).is_empty(), "before {seconds} s");
        let again = begun(&tick(&mut placement, due)).remove(0).1;
        assert_eq!(again.restarted.total, 1, "that is no restart");
        (instance, now) = (again.instance, due);
    }
    says(&mut placement, now, 1, "a", instance, ActorLife::Pending);
    let (at, begin) = begun(&offer(&mut placement, 2, 4)).remove(0);
    assert_eq!(at, home(2));
    // Once it has lived it begins anew.
    let later = now + ms(100_000);
    says(&mut placement, later, 2, "a", begin.instance, ActorLife::Alive);
    says(&mut placement, later, 2, "a", begin.instance, ActorLife::Dead);
    let instance = begun(&tick(&mut placement, later + ms(400))).remove(0).1.instance;
    says(&mut placement, later + ms(400), 1, "a", instance, ActorLife::Pending);
    assert_eq!(begun(&tick(&mut placement, later + ms(1_400))).len(), 1);
}

#[test]
fn one_that_cannot_be_made_is_not_tried_again() {
    let mut placement = nodes(&[4]);
    let effects = create(&mut placement, wanted(1, creation("a")));
    let instance = begun(&effects)[0].1.instance;
    let effects = says(&mut placement, NOW, 1, "a", instance, ActorLife::Dead);
    let [(1, Err(PlacementError::NotStarted(reason)))] = &answers(&effects)[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(reason, "it panicked");
    assert_eq!(life(&effects).unwrap().life, ActorLife::Dead);
}

#[test]
fn a_link_that_is_back_in_a_moment_costs_nothing_and_a_lost_node_a_restart() {
    let mut placement = nodes(&[4, 4]);
    let instance = alive(&mut placement, creation("a"));
    let lose = |placement: &mut Placement, now, peer| {
        let mut effects = Vec::new();
        placement.lost(now, home(peer), "the link to n1 is gone", &mut effects);
        effects
    };
    let effects = lose(&mut placement, NOW, 1);
    assert_eq!(life(&effects).unwrap().life, ActorLife::Restarting);
    assert!(begun(&tick(&mut placement, NOW + ms(900))).is_empty());
    // Over another link, under another number.
    let known = Some((creation("a"), Restarted::default()));
    let again = Placed {
        name: "a".to_owned(),
        instance,
        life: ActorLife::Alive,
        reason: None,
        known: known.clone(),
    };
    let mut effects = Vec::new();
    placement.placed(NOW + ms(950), home(7), "n1", again.clone(), false, &mut effects);
    let report = life(&effects).unwrap();
    assert_eq!((report.life, report.restarts), (ActorLife::Alive, 0));
    // Gone for longer: started elsewhere, and the first one is ended when it is back.
    lose(&mut placement, NOW + ms(1000), 7);
    assert!(begun(&tick(&mut placement, NOW + ms(2100))).is_empty(), "the backoff");
    let effects = tick(&mut placement, NOW + ms(2500));
    let (at, begin) = begun(&effects).remove(0);
    assert_eq!((at, begin.instance.incarnation), (home(2), 2));
    let mut effects = Vec::new();
    placement.placed(NOW + ms(2600), home(8), "n1", again, false, &mut effects);
    assert_eq!(ended(&effects), [(home(8), instance, EndHow::Kill)]);
}

#[test]
fn a_drained_node_s_actors_move_without_counting_as_failures() {
    let mut placement = nodes(&[4, 4]);
    let moving = alive(&mut placement, Creation { max_restarts: Some(0), ..creation("a") });
    let fixed = Creation { at: Where::node("n1"), ..creation("b") };
    let effects = create(&mut placement, wanted(2, fixed));
    let fixed = begun(&effects)[0].1.instance;
    says(&mut placement, NOW, 1, "b", fixed, ActorLife::Alive);
    let mut effects = Vec::new();
    placement.drains(NOW, home(1), true, &mut effects);
    let finish = |instance| (home(1), instance, EndHow::Finish);
    assert_eq!(ended(&effects), [finish(moving), finish(fixed)]);
    assert!(begun(&effects).is_empty(), "when it has finished its messages");
    let effects = says(&mut placement, NOW, 1, "a", moving, ActorLife::Dead);
    let (at, begin) = begun(&effects).remove(0);
    assert_eq!((at, begin.restarted.total), (home(2), 0));
    let report = life(&says(&mut placement, NOW, 1, "b", fixed, ActorLife::Dead)).unwrap();
    assert_eq!(report.life, ActorLife::Dead);
    assert!(report.reason.unwrap().contains("its node drains"));
    // It stays after all, and may take some again.
    placement.drains(NOW, home(1), false, &mut Vec::new());
    let back = Creation { at: Where::node("n1"), ..creation("c") };
    assert_eq!(begun(&create(&mut placement, wanted(3, back)))[0].0, home(1));
}

/// A worker and a front end of one node have the same name.
#[test]
fn what_drains_is_one_process_until_its_link_ends() {
    let mut placement = nodes(&[1]);
    let hosting = |placement: &mut Placement, peer: u64| {
        let offer = NodeResources { cpus: 1, ..NodeResources::default() };
        let hosting = Hosting { classes: vec!["counter".to_owned()], offer };
        placement.hosting(NOW, home(peer), "n1", hosting, &mut Vec::new());
    };
    hosting(&mut placement, 2);
    placement.drains(NOW, home(1), true, &mut Vec::new());
    let draining = |placement: &Placement| {
        placement.hosts.iter().map(|(home, host)| (*home, host.draining)).collect::<Vec<_>>()
    };
    assert_eq!(draining(&placement), [(home(1), true), (home(2), false)]);
    let at = |name: &str| Creation { at: Where::node("n1"), ..creation(name) };
    assert_eq!(begun(&create(&mut placement, wanted(1, at("a"))))[0].0, home(2));
    // What it says again over the same link changes nothing.
    hosting(&mut placement, 1);
    assert_eq!(draining(&placement), [(home(1), true), (home(2), false)]);
    // The next process of that node may stay.
    placement.lost(NOW, home(1), "it has left", &mut Vec::new());
    hosting(&mut placement, 3);
    assert_eq!(draining(&placement), [(home(2), false), (home(3), false)]);
    assert!(placement.drained.is_empty());
    // Those that were told first are forgotten first, whatever they are called.
    let many = DRAINED_MAX as u64 + 2;
    let told = |placement: &mut Placement, peer: u64| {
        placement.drains(NOW, home(peer), true, &mut Vec::new());
    };
    (10..10 + many).rev().for_each(|peer| told(&mut placement, peer));
    assert_eq!(placement.drained.len(), DRAINED_MAX);
    let known = |peer| placement.drained.contains(&home(peer));
    assert!(known(10) && !known(9 + many) && !known(8 + many));
}

#[test]
fn a_process_that_leaves_by_itself_moves_its_actors_and_may_be_back() {
    let mut placement = nodes(&[4, 4]);
    let moving = alive(&mut placement, Creation { max_restarts: Some(0), ..creation("a") });
    let fixed = Creation { at: Where::node("n1"), ..creation("b") };
    let fixed = begun(&create(&mut placement, wanted(2, fixed)))[0].1.instance;
    says(&mut placement, NOW, 1, "b", fixed, ActorLife::Alive);
    let mut effects = Vec::new();
    let none = Hosting { classes: Vec::new(), offer: NodeResources::default() };
    placement.hosting(NOW, home(1), "n1", none, &mut effects);
    let effects = says(&mut placement, NOW, 1, "a", moving, ActorLife::Draining);
    assert!(begun(&effects).is_empty() && ended(&effects).is_empty());
    assert_eq!(life(&effects).unwrap().life, ActorLife::Draining);
    says(&mut placement, NOW, 1, "b", fixed, ActorLife::Draining);
    let (at, begin) = begun(&says(&mut placement, NOW, 1, "a", moving, ActorLife::Dead)).remove(0);
    assert_eq!((at, begin.restarted.total), (home(2), 0));
    let report = life(&says(&mut placement, NOW, 1, "b", fixed, ActorLife::Dead)).unwrap();
    assert_eq!(report.life, ActorLife::Restarting, "it waits for its node");
    let mut effects = Vec::new();
    placement.lost(NOW, home(1), "it left", &mut effects);
    assert!(begun(&effects).is_empty());
    let effects = offer(&mut placement, 1, 4);
    assert_eq!(begun(&effects)[0].0, home(1));
}

#[test]
fn the_next_coordinator_adopts_what_runs_and_creates_nothing_twice() {
    let mut first = nodes(&[4, 4]);
    let instance = alive(&mut first, creation("a"));
    let mut second = Placement::default();
    second.settle(Duration::ZERO);
    let now = ms(200);
    // The asker's link was there first, and so was another who wants the name.
    let mut effects = Vec::new();
    let resent = Wanted { again: true, ..wanted(1, creation("a")) };
    second.create(now, resent, None, &mut effects);
    let hosting = Hosting {
        classes: vec!["counter".to_owned()],
        offer: NodeResources { cpus: 9, ..NodeResources::default() },
    };
    second.hosting(now, home(2), "n2", hosting, &mut effects);
    assert!(begun(&effects).is_empty(), "the one that runs it may not be linked yet");
    let placed = Placed {
        name: "a".to_owned(),
        instance,
        life: ActorLife::Alive,
        reason: None,
        known: Some((creation("a"), Restarted { total: 5, in_a_row: 2 })),
    };
    let mut effects = Vec::new();
    second.placed(now, home(1), "n1", placed, false, &mut effects);
    assert_eq!(answers(&effects), [(1, Ok(PlacementReply { node: "n1".to_owned() }))]);
    assert_eq!(life(&effects).unwrap().restarts, 5);
    // It goes on where the first left off: two restarts in a row were all it had.
    let effects = says(&mut second, now, 1, "a", instance, ActorLife::Dead);
    assert_eq!(life(&effects).unwrap().life, ActorLife::Dead);
}

#[test]
fn of_two_starts_of_one_actor_the_later_counts() {
    let instance = |incarnation| Instance { generation: 7, incarnation };
    let placed = |incarnation| Placed {
        name: "a".to_owned(),
        instance: instance(incarnation),
        life: ActorLife::Alive,
        reason: None,
        known: Some((creation("a"), Restarted::default())),
    };
    let mut placement = Placement::default();
    let mut effects = Vec::new();
    placement.placed(NOW, home(1), "n1", placed(1), false, &mut effects);
    assert!(ended(&effects).is_empty());
    placement.placed(NOW, home(2), "n2", placed(2), false, &mut effects);
    assert_eq!(ended(&effects), [(home(1), instance(1), EndHow::Kill)]);
    let mut effects = Vec::new();
    placement.placed(NOW, home(3), "n3", placed(2), false, &mut effects);
    assert_eq!(ended(&effects), [(home(3), instance(2), EndHow::Kill)]);
    // One that was killed meanwhile does not come back.
    let mut effects = Vec::new();
    placement.lost(NOW, home(2), "cut", &mut effects);
    placement.kill(NOW, 9, "a", false, &mut effects).unwrap();
    let mut effects = Vec::new();
    placement.placed(NOW, home(4), "n2", placed(2), false, &mut effects);
    assert_eq!(ended(&effects), [(home(4), instance(2), EndHow::Kill)]);
    assert!(placement.created("a").is_none());
}

#[test]
fn a_name_is_given_once_and_a_request_that_is_repeated_creates_one() {
    let mut placement = nodes(&[4]);
    alive(&mut placement, creation("a"));
    let effects = create(&mut placement, wanted(2, creation("a")));
    let taken = PlacementError::NameTaken("n1".to_owned());
    assert_eq!(answers(&effects), [(2, Err(taken))]);
    let effects = create(&mut placement, Wanted { or_get: true, ..wanted(3, creation("a")) });
    assert_eq!(answers(&effects), [(3, Ok(PlacementReply { node: "n1".to_owned() }))]);
    let repeated = Wanted { asker: 4, again: true, ..wanted(1, creation("a")) };
    let effects = create(&mut placement, repeated);
    assert_eq!(answers(&effects), [(4, Ok(PlacementReply { node: "n1".to_owned() }))]);
    let mut effects = Vec::new();
    placement.create(NOW, wanted(5, creation("b")), Some("n9"), &mut effects);
    let taken = PlacementError::NameTaken("n9".to_owned());
    assert_eq!(answers(&effects), [(5, Err(taken))]);
    for wrong in ["", "worker/n1", "log:n1", &"x".repeat(200)] {
        let effects = create(&mut placement, wanted(6, creation(wrong)));
        assert!(matches!(answers(&effects)[..], [(6, Err(PlacementError::Invalid(_)))]), "{wrong}");
    }
}

#[test]
fn a_living_actor_of_the_class_will_do_for_those_who_said_so() {
    let instance = Instance { generation: 7, incarnation: 1 };
    let lives = |class: &str| {
        let creation = Creation { class: class.to_owned(), ..creation("a") };
        let known = Some((creation, Restarted::default()));
        let name = "a".to_owned();
        Placed { name, instance, life: ActorLife::Alive, reason: None, known }
    };
    let reply = Ok(PlacementReply { node: "n1".to_owned() });
    let taken = Err(PlacementError::NameTaken("n1".to_owned()));
    let cases = [("counter", true, &reply), ("counter", false, &taken), ("other", true, &taken)];
    for (class, or_get, expected) in cases {
        let mut placement = Placement::default();
        create(&mut placement, Wanted { or_get, ..wanted(1, creation("a")) });
        create(&mut placement, Wanted { or_get: true, ..wanted(2, creation("a")) });
        let mut effects = Vec::new();
        placement.placed(NOW, home(1), "n1", lives(class), false, &mut effects);
        let mut answers = answers(&effects);
        answers.sort_by_key(|(asker, _)| *asker);
        let second = if class == "counter" { &reply } else { &taken };
        assert_eq!(answers, [(1, expected.clone()), (2, second.clone())], "{class} {or_get}");
    }
}

#[test]
fn a_process_has_a_bound_and_the_refusal_says_so() {
    let mut placement = nodes(&[1]);
    let small = |name: &str| Creation { needs: Needs::nothing(), ..creation(name) };
    for number in 0..room::HOSTED_MAX as u64 {
        let effects = create(&mut placement, wanted(number, small(&format!("a{number}"))));
        assert_eq!(begun(&effects).len(), 1, "{number}");
    }
    let effects = create(&mut placement, wanted(9999, small("more")));
    assert!(begun(&effects).is_empty());
    let reason = life(&effects).unwrap().reason.unwrap();
    assert!(reason.ends_with("free are nothing on n1 (it runs 256 actors, the limit)"), "{reason}");
}

#[test]
fn those_who_wait_for_one_actor_have_a_bound() {
    let mut placement = Placement::default();
    create(&mut placement, wanted(0, creation("a")));
    for number in 1..=ASKS_MAX as u64 {
        let effects =
            create(&mut placement, Wanted { or_get: true, ..wanted(number, creation("a")) });
        assert!(answers(&effects).is_empty(), "{number}");
    }
    let more = Wanted { or_get: true, ..wanted(1_000_000, creation("a")) };
    let effects = create(&mut placement, more);
    assert!(
        matches!(answers(&effects)[..], [(1_000_000, Err(PlacementError::Full(_)))]),
        "{effects:?}"
    );
}

#[test]
fn what_is_kept_has_bounds() {
    let mut placement = Placement::default();
    let most = CREATED_BYTES_MAX / (1024 + 60_000);
    for number in 0..most + 10 {
        let argument = vec![0; 60_000];
        let creation = Creation { argument, ..creation(&format!("a{number}")) };
        let effects = create(&mut placement, wanted(number as u64, creation));
        assert_eq!(answers(&effects).is_empty(), number < most, "{number}");
    }
    let effects = tick(&mut placement, NOW + Duration::from_secs(60));
    assert_eq!(answers(&effects).len(), most);
    for number in 0..CREATED_MAX + 10 {
        let effects = create(
            &mut placement,
            wanted(1_000_000 + number as u64, creation(&format!("b{number}"))),
        );
        assert_eq!(answers(&effects).is_empty(), number < CREATED_MAX, "{number}");
    }
}
