//! Checks names, deaths and watches against a model, under any order of reports, watches and lost
//! links.
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn report(name: &str, generation: u64, life: ActorLife) -> ActorReport {
    ActorReport {
        name: name.to_owned(),
        kind: "k".to_owned(),
        generation,
        life,
        restarts: 0,
        max_restarts: Some(3),
        reason: (life == ActorLife::Dead).then(|| "it fell".to_owned()),
    }
}

const NOW: Duration = Duration::ZERO;
const A: Home = Home::Peer(PeerId(1));
const B: Home = Home::Peer(PeerId(2));

fn told(registry: &mut Registry, home: Home, report: ActorReport) -> (bool, Vec<Watcher>) {
    let mut notices = Vec::new();
    let taken = registry.report(home, "n", report, &mut notices).is_ok();
    (taken, notices.into_iter().map(|notice| notice.watcher).collect())
}

#[test]
fn a_name_is_one_living_actor_s() {
    let mut registry = Registry::default();
    assert!(told(&mut registry, A, report("x", 1, ActorLife::Alive)).0);
    assert!(!told(&mut registry, B, report("x", 2, ActorLife::Alive)).0, "taken");
    assert!(!told(&mut registry, B, report("worker/x", 2, ActorLife::Alive)).0, "reserved");
    assert!(told(&mut registry, Home::Here, report("worker/x", 2, ActorLife::Alive)).0);
    assert!(!told(&mut registry, A, report("", 2, ActorLife::Alive)).0);
    assert!(!told(&mut registry, A, report("a\nb", 2, ActorLife::Alive)).0);
    assert_eq!(registry.find("x"), Some(A));
    told(&mut registry, A, report("x", 1, ActorLife::Dead));
    assert_eq!(registry.find("x"), None);
    assert!(told(&mut registry, B, report("x", 2, ActorLife::Alive)).0, "free again");
    let known = registry.list().find(|known| known.report.name == "x").unwrap();
    assert_eq!((known.home, known.restarts), (B, 1));
}

#[test]
fn a_watch_means_one_actor_and_not_its_successor() {
    let mut registry = Registry::default();
    told(&mut registry, A, report("x", 1, ActorLife::Alive));
    let watcher = (B, 9);
    assert_eq!(registry.watch(NOW, watcher, "x", None), Ok(Watching::Alive { generation: 1 }));
    assert_eq!(told(&mut registry, A, report("x", 1, ActorLife::Restarting)).1, []);
    // Its process gives the name to another actor, so the first one is dead.
    assert_eq!(told(&mut registry, A, report("x", 2, ActorLife::Alive)).1, [watcher]);
    assert!(matches!(registry.watch(NOW, watcher, "x", Some(1)), Ok(Watching::Over { .. })));
    assert!(matches!(registry.watch(NOW, watcher, "y", None), Ok(Watching::Over { .. })));
    assert_eq!(registry.watches(), 0);
}

#[test]
fn one_that_lived_under_another_hub_is_waited_for() {
    let (soon, late) = (RETURN_GRACE / 2, RETURN_GRACE);
    let mut registry = Registry::default();
    let mut notices = Vec::new();
    for (id, name) in [(1, "x"), (2, "y"), (3, "z"), (4, "gone"), (5, "never")] {
        assert_eq!(registry.watch(NOW, (B, id), name, Some(1)), Ok(Watching::Awaited));
    }
    registry.tick(soon, &mut notices);
    assert_eq!((notices.len(), registry.watches()), (0, 5));
    assert_eq!(told(&mut registry, A, report("x", 1, ActorLife::Alive)).1, []);
    assert_eq!(registry.take_found(), [((B, 1), 1)]);
    assert_eq!(told(&mut registry, A, report("y", 2, ActorLife::Alive)).1, [(B, 2)], "another");
    assert_eq!(told(&mut registry, A, report("gone", 1, ActorLife::Dead)).1, [(B, 4)]);
    registry.unwatch((B, 3));
    registry.tick(late, &mut notices);
    assert_eq!(notices.iter().map(|it| it.watcher).collect::<Vec<_>>(), [(B, 5)]);
    assert!(!registry.awaits());
    // From here on it is an ordinary watch.
    assert_eq!(told(&mut registry, A, report("x", 1, ActorLife::Dead)).1, [(B, 1)]);
    assert_eq!(registry.watches(), 0);

    // A watch without a generation waits only while processes may still link, and no longer.
    let mut registry = Registry::default();
    assert!(matches!(registry.watch(NOW, (B, 1), "x", None), Ok(Watching::Over { .. })));
    registry.settle(NOW);
    assert_eq!(registry.watch(soon, (B, 1), "x", None), Ok(Watching::Awaited));
    assert!(matches!(registry.watch(late, (B, 2), "x", None), Ok(Watching::Over { .. })));
    let mut notices = Vec::new();
    registry.peer_lost(PeerId(2), "gone", &mut notices);
    assert_eq!((notices.len(), registry.watches(), registry.awaits()), (0, 0, false));
}

#[test]
fn a_lost_link_is_a_death_and_its_return_a_life() {
    let mut registry = Registry::default();
    told(&mut registry, A, report("x", 1, ActorLife::Alive));
    let _ = registry.watch(NOW, (Home::Here, 1), "x", None);
    let _ = registry.watch(NOW, (A, 1), "x", None);
    let mut notices = Vec::new();
    registry.peer_lost(PeerId(1), "gone", &mut notices);
    assert_eq!(notices, [Notice { watcher: (Home::Here, 1), reason: "gone".to_owned() }]);
    assert!(told(&mut registry, B, report("x", 1, ActorLife::Alive)).0);
    assert_eq!(registry.find("x"), Some(B));
    assert_eq!(registry.list().next().unwrap().restarts, 0, "it was never restarted");
}

#[test]
fn the_dead_are_remembered_in_bounded_number() {
    let mut registry = Registry::default();
    for n in 0..1000 {
        let name = format!("x{n}");
        told(&mut registry, A, report(&name, 1, ActorLife::Alive));
        told(&mut registry, A, report(&name, 1, ActorLife::Dead));
    }
    assert_eq!(registry.list().count(), DEAD_MAX);
    assert_eq!(registry.dead.len(), DEAD_MAX);
    assert!(registry.list().any(|known| known.report.name == "x999"));
}

#[derive(Clone, Debug)]
enum Step {
    Report { home: u64, name: u8, generation: u64, life: u8 },
    Watch { watcher: (u64, u64), name: u8 },
    Unwatch { watcher: (u64, u64) },
    Lost(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let watcher = || (1..4u64, 0..6u64);
    prop_oneof![
        5 => (1..4u64, 0..4u8, 1..4u64, 0..3u8).prop_map(|(home, name, generation, life)| {
            Step::Report { home, name, generation, life }
        }),
        3 => (watcher(), 0..5u8).prop_map(|(watcher, name)| Step::Watch { watcher, name }),
        1 => watcher().prop_map(|watcher| Step::Unwatch { watcher }),
        1 => (1..4u64).prop_map(Step::Lost),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// An active watch gets one notice when its actor's life ends, and none otherwise; an actor is
    /// found where its last report came from.
    #[test]
    fn watches_are_told_once(steps in prop::collection::vec(step(), 1..80)) {
        let mut registry = Registry::default();
        let mut waiting: BTreeSet<Watcher> = BTreeSet::new();
        for step in steps {
            let mut notices = Vec::new();
            match step {
                Step::Report { home, name, generation, life } => {
                    let life = [ActorLife::Alive, ActorLife::Restarting, ActorLife::Dead][life as usize];
                    let (name, home) = (name.to_string(), Home::Peer(PeerId(home)));
                    let before = registry.find(&name);
                    let taken = registry
                        .report(home, "n", report(&name, generation, life), &mut notices)
                        .is_ok();
                    if taken && life != ActorLife::Dead {
                        prop_assert_eq!(registry.find(&name), Some(home));
                    }
                    if !taken {
                        prop_assert_eq!(registry.find(&name), before);
                        prop_assert!(notices.is_empty());
                    }
                }
                Step::Watch { watcher: (peer, id), name } => {
                    let watcher = (Home::Peer(PeerId(peer)), id);
                    if waiting.contains(&watcher) {
                        continue; // A number is used only once.
                    }
                    let lives = registry.find(&name.to_string()).is_some();
                    let alive = matches!(
                        registry.watch(NOW, watcher, &name.to_string(), None),
                        Ok(Watching::Alive { .. })
                    );
                    prop_assert_eq!(lives, alive);
                    if alive {
                        waiting.insert(watcher);
                    }
                }
                Step::Unwatch { watcher: (peer, id) } => {
                    let watcher = (Home::Peer(PeerId(peer)), id);
                    registry.unwatch(watcher);
                    waiting.remove(&watcher);
                }
                Step::Lost(peer) => {
                    waiting.retain(|(home, _)| *home != Home::Peer(PeerId(peer)));
                    registry.peer_lost(PeerId(peer), "gone", &mut notices);
                    let here = registry.list().filter(|known| {
                        known.home == Home::Peer(PeerId(peer)) && known.report.life != ActorLife::Dead
                    });
                    prop_assert_eq!(here.count(), 0);
                }
            }
            for notice in notices {
                prop_assert!(waiting.remove(&notice.watcher), "told though not waiting");
            }
            prop_assert_eq!(registry.watches(), waiting.len());
            // Nobody watches the dead.
            for name in registry.watches.values() {
                prop_assert!(registry.find(name).is_some(), "{} is dead", name);
            }
        }
    }
}

#[test]
fn a_watch_is_in_both_lists_or_in_none() {
    let (mut registry, mut notices) = (Registry::default(), Vec::new());
    let whole = |registry: &Registry| {
        let listed: usize = registry.watchers.values().map(BTreeSet::len).sum();
        assert_eq!(listed, registry.watches());
        assert!(registry.watchers.values().all(|watchers| !watchers.is_empty()));
        listed
    };
    let (peer, other) = (PeerId(1), PeerId(2));
    for name in ["a", "b", "c"] {
        registry.report(Home::Here, "n", report(name, 1, ActorLife::Alive), &mut notices).unwrap();
        for id in 0..10 {
            let watcher = (Home::Peer(peer), id + 10 * u64::from(name.as_bytes()[0]));
            registry.watch(NOW, watcher, name, None).unwrap();
            registry.watch(NOW, watcher, name, None).unwrap();
            registry.watch(NOW, (Home::Peer(other), watcher.1), name, None).unwrap();
        }
    }
    assert_eq!(whole(&registry), 60);
    // The same watch number, now for another actor.
    let number = (Home::Peer(peer), 10 * u64::from(b'a'));
    registry.watch(NOW, number, "b", None).unwrap();
    assert_eq!(whole(&registry), 60);
    registry.unwatch(number);
    registry.unwatch(number);
    assert_eq!(whole(&registry), 59);
    registry.report(Home::Here, "n", report("a", 1, ActorLife::Dead), &mut notices).unwrap();
    assert_eq!((whole(&registry), notices.len()), (40, 19));
    registry.peer_lost(peer, "gone", &mut notices);
    assert_eq!((whole(&registry), notices.len()), (20, 19));
    registry.peer_lost(other, "gone", &mut notices);
    assert_eq!(whole(&registry), 0);
}
