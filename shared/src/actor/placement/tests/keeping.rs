//! Actors that outlive their process and the coordinator, because etcd keeps them.
use super::super::keep::{Change, KEEP_PATIENCE, Kept, KeptStart, Write, Written};
use super::*;

const GRACE: Duration = RETURN_GRACE;

/// Nodes with these cores each, of a coordinator that keeps actors.
fn keeping(cores: &[u32]) -> Placement {
    let mut placement = nodes(cores);
    placement.keep_from_now_on();
    placement
}

fn written(placement: &mut Placement, outcome: Written) -> Vec<Effect> {
    let mut effects = Vec::new();
    placement.written(outcome, &mut effects);
    effects
}

/// Has everything written, and returns what it was.
fn stored(placement: &mut Placement) -> Vec<Write> {
    let mut all = Vec::new();
    loop {
        let writes = placement.next_to_keep();
        if writes.is_empty() {
            return all;
        }
        all.extend(writes);
        written(placement, Written::Stored);
    }
}

fn start(generation: u64, incarnation: u32, total: u32, in_a_row: u32) -> KeptStart {
    let instance = Instance { generation, incarnation };
    KeptStart { instance, restarted: Restarted { total, in_a_row }, waits: false }
}

fn put(creation: Option<Creation>, name: &str, start: KeptStart) -> Write {
    let creation = creation.map(Box::new);
    Write { name: name.to_owned(), change: Change::Put { creation, start } }
}

fn delete(name: &str) -> Write {
    Write { name: name.to_owned(), change: Change::Delete }
}

/// Has one started on `n1`, which says that it is alive.
fn started(placement: &mut Placement, wanted: Wanted) -> (Instance, Vec<Effect>) {
    let name = wanted.creation.name.clone();
    let instance = begun(&create(placement, wanted)).remove(0).1.instance;
    (instance, says(placement, NOW, 1, &name, instance, ActorLife::Alive))
}

/// The next coordinator, at its start: it finds `kept`, and then `cores` of nodes.
fn next(kept: Kept, cores: &[u32]) -> (Placement, Vec<Effect>) {
    let (mut placement, mut effects) = (Placement::default(), Vec::new());
    placement.keep_from_now_on();
    assert!(placement.resume(Duration::ZERO, kept, false, &mut effects));
    for (index, cpus) in cores.iter().enumerate() {
        let offer = NodeResources { cpus: *cpus, ..NodeResources::default() };
        let hosting = Hosting { classes: vec!["counter".to_owned()], offer };
        let peer = index as u64 + 1;
        let node = format!("n{peer}");
        placement.hosting(Duration::ZERO, home(peer), &node, hosting, &mut effects);
    }
    (placement, effects)
}

fn with_argument(name: &str) -> Creation {
    Creation { argument: vec![1, 2, 3], ..creation(name) }
}

fn report(instance: Instance, life: ActorLife, restarted: Restarted) -> Placed {
    let (name, known) = ("a".to_owned(), Some((with_argument("a"), restarted)));
    let reason = (life == ActorLife::Dead).then(|| "it failed".to_owned());
    Placed { name, instance, life, reason, known }
}

#[test]
fn a_creation_is_confirmed_when_etcd_has_it() {
    let mut placement = keeping(&[4]);
    assert!(placement.next_to_keep().is_empty());
    let instance = begun(&create(&mut placement, wanted(1, with_argument("a"))))[0].1.instance;
    // It is written while it is being started.
    let writes = placement.next_to_keep();
    let first = start(1001, 1, 0, 0);
    assert_eq!(writes, [put(Some(with_argument("a")), "a", first)]);
    assert!(placement.next_to_keep().is_empty(), "one after the other");
    assert!(answers(&says(&mut placement, NOW, 1, "a", instance, ActorLife::Alive)).is_empty());
    let will_do = Wanted { or_get: true, ..wanted(2, with_argument("a")) };
    assert!(answers(&create(&mut placement, will_do)).is_empty(), "neither are others told");
    let reply = || Ok(PlacementReply { node: "n1".to_owned() });
    assert_eq!(answers(&written(&mut placement, Written::Stored)), [(1, reply()), (2, reply())]);
    assert!(stored(&mut placement).is_empty());
    // A restart is written without what etcd has already, and nobody waits for it.
    says(&mut placement, NOW, 1, "a", instance, ActorLife::Dead);
    let instance = begun(&tick(&mut placement, NOW + ms(400)))[0].1.instance;
    let will_do = Wanted { or_get: true, ..wanted(3, with_argument("a")) };
    create(&mut placement, will_do);
    let effects = says(&mut placement, NOW + ms(400), 1, "a", instance, ActorLife::Alive);
    assert_eq!(answers(&effects), [(3, reply())]);
    assert_eq!(stored(&mut placement), [put(None, "a", start(1001, 2, 1, 1))]);
    // When it has lived for long enough, its restarts in a row are forgotten.
    assert!(placement.awaits(NOW + ms(400)));
    tick(&mut placement, NOW + ms(30_399));
    assert!(stored(&mut placement).is_empty());
    tick(&mut placement, NOW + ms(30_400));
    assert_eq!(stored(&mut placement), [put(None, "a", start(1001, 2, 1, 0))]);
    assert!(!placement.awaits(NOW + ms(30_400)));
}

#[test]
fn what_may_not_be_started_again_is_not_kept() {
    let mut placement = keeping(&[4]);
    let (_, effects) =
        started(&mut placement, wanted(1, Creation { max_restarts: Some(0), ..creation("a") }));
    assert_eq!(answers(&effects).len(), 1);
    // Nor is what has not begun: its creator asks again.
    create(&mut placement, wanted(2, Creation { at: Where::node("n9"), ..creation("b") }));
    assert!(stored(&mut placement).is_empty());
    // Nor anything, without etcd.
    let mut placement = nodes(&[4]);
    alive(&mut placement, creation("a"));
    assert!(!placement.has_to_keep() && placement.next_to_keep().is_empty());
}

#[test]
fn an_etcd_that_is_away_holds_up_nobody_for_long_and_gets_all_when_it_is_back() {
    let mut placement = keeping(&[9]);
    let (_, effects) = started(&mut placement, wanted(1, creation("a")));
    assert!(answers(&effects).is_empty());
    assert_eq!(placement.next_to_keep().len(), 1);
    assert!(answers(&written(&mut placement, Written::Failed)).is_empty(), "it is tried again");
    assert!(answers(&tick(&mut placement, NOW + KEEP_PATIENCE - ms(1))).is_empty());
    assert!(placement.awaits(NOW));
    assert_eq!(answers(&tick(&mut placement, NOW + KEEP_PATIENCE)).len(), 1);
    // From now on nobody waits, neither those who create nor those who kill.
    let (_, effects) = started(&mut placement, wanted(2, creation("b")));
    assert_eq!(answers(&effects).len(), 1);
    let mut effects = Vec::new();
    placement.kill(NOW, 3, "a", false, &mut effects).unwrap();
    assert_eq!(answers(&effects).len(), 1);
    // One that came and went meanwhile leaves no trace.
    started(&mut placement, wanted(4, creation("c")));
    placement.kill(NOW, 5, "c", false, &mut effects).unwrap();
    // What may have arrived is undone.
    let b = put(Some(creation("b")), "b", start(1002, 1, 0, 0));
    assert_eq!(placement.next_to_keep(), [delete("a"), b]);
    written(&mut placement, Written::Stored);
    assert!(stored(&mut placement).is_empty());
    // It answers: the next creation waits for it.
    let (_, effects) = started(&mut placement, wanted(6, creation("d")));
    assert!(answers(&effects).is_empty());
    // But not for longer than its creator.
    let within = ms(500);
    let (_, effects) = started(&mut placement, Wanted { within, ..wanted(7, creation("e")) });
    assert!(answers(&effects).is_empty());
    let effects = tick(&mut placement, NOW + within);
    assert!(matches!(answers(&effects)[..], [(7, Ok(_))]), "{effects:?}");
}

#[test]
fn one_that_leads_no_more_confirms_nothing() {
    let mut placement = keeping(&[4]);
    let (instance, _) = started(&mut placement, wanted(1, creation("a")));
    assert_eq!(placement.next_to_keep().len(), 1);
    assert!(answers(&written(&mut placement, Written::Fenced)).is_empty());
    assert!(answers(&tick(&mut placement, NOW + KEEP_PATIENCE)).is_empty());
    let effects = tick(&mut placement, NOW + Duration::from_secs(10));
    assert!(matches!(answers(&effects)[..], [(1, Err(PlacementError::NotStarted(_)))]));
    assert_eq!(ended(&effects), [(home(1), instance, EndHow::Kill)]);
}

#[test]
fn what_was_killed_is_dead_when_etcd_has_it_no_more() {
    let mut placement = keeping(&[4]);
    started(&mut placement, wanted(1, creation("a")));
    // Killed while the write of its creation is on its way.
    assert_eq!(placement.next_to_keep().len(), 1);
    let mut effects = Vec::new();
    placement.kill(NOW, 2, "a", false, &mut effects).unwrap();
    assert!(matches!(answers(&effects)[..], [(1, Err(_))]), "{effects:?}");
    assert!(answers(&written(&mut placement, Written::Stored)).is_empty(), "etcd has it");
    assert_eq!(placement.next_to_keep(), [delete("a")]);
    let reply = Ok(PlacementReply { node: "n1".to_owned() });
    assert_eq!(answers(&written(&mut placement, Written::Stored)), [(2, reply.clone())]);
    // Another takes its name: what etcd has then is that one.
    started(&mut placement, wanted(3, creation("b")));
    stored(&mut placement);
    let mut effects = Vec::new();
    placement.kill(NOW, 4, "b", false, &mut effects).unwrap();
    started(&mut placement, wanted(5, creation("b")));
    assert_eq!(placement.next_to_keep(), [put(Some(creation("b")), "b", start(1005, 1, 0, 0))]);
    assert!(answers(&effects).is_empty());
    let answers = answers(&written(&mut placement, Written::Stored));
    assert!(matches!(answers[..], [(4, Ok(_)), (5, Ok(_))]), "{answers:?}");
    // One that ends by itself is not kept either.
    let once = Creation { max_restarts: Some(1), ..creation("c") };
    let (mut instance, mut now) = (started(&mut placement, wanted(6, once)).0, NOW);
    stored(&mut placement);
    for _ in 0..2 {
        says(&mut placement, now, 1, "c", instance, ActorLife::Dead);
        now += ms(400);
        if let Some((_, begin)) = begun(&tick(&mut placement, now)).pop() {
            instance = begin.instance;
            says(&mut placement, now, 1, "c", instance, ActorLife::Alive);
        }
    }
    assert_eq!(stored(&mut placement), [delete("c")]);
}

#[test]
fn what_no_process_reports_in_time_is_started_again() {
    let kept = Kept { creation: with_argument("a"), start: start(7, 3, 4, 1) };
    let (mut placement, effects) = next(kept, &[4]);
    let told = life(&effects).unwrap();
    assert_eq!((told.life, told.restarts), (ActorLife::Restarting, 4));
    assert!(told.reason.unwrap().contains("no process has reported it"));
    assert!(placement.is_away("a") && placement.awaits(Duration::ZERO));
    assert!(stored(&mut placement).is_empty(), "etcd has all that is known");
    // Its name is taken.
    let mut effects = Vec::new();
    placement.create(ms(1), wanted(1, creation("a")), None, &mut effects);
    assert!(matches!(answers(&effects)[..], [(1, Err(PlacementError::NameTaken(_)))]));
    let will_do = Wanted { or_get: true, ..wanted(2, creation("a")) };
    placement.create(GRACE - ms(5000), will_do, None, &mut Vec::new());
    assert!(begun(&tick(&mut placement, GRACE - ms(1))).is_empty());
    let effects = tick(&mut placement, GRACE);
    assert!(effects.contains(&Effect::Restarted), "it counts");
    let (at, begin) = begun(&tick(&mut placement, GRACE + ms(400))).remove(0);
    assert_eq!((at, &begin.creation), (home(1), &with_argument("a")));
    assert_eq!(begin.instance, Instance { generation: 7, incarnation: 4 });
    assert_eq!(begin.restarted, Restarted { total: 5, in_a_row: 2 });
    assert_eq!(stored(&mut placement), [put(None, "a", start(7, 4, 5, 2))]);
    let effects = says(&mut placement, GRACE + ms(400), 1, "a", begin.instance, ActorLife::Alive);
    assert!(matches!(answers(&effects)[..], [(2, Ok(_))]), "{effects:?}");
    // Its process was only away for long.
    let mut effects = Vec::new();
    let late =
        report(Instance { generation: 7, incarnation: 3 }, ActorLife::Alive, begin.restarted);
    placement.placed(GRACE + ms(500), home(9), "n9", late, false, &mut effects);
    assert_eq!(ended(&effects).len(), 1);
    assert_eq!(ended(&effects)[0].0, home(9));
}

#[test]
fn what_a_process_reports_goes_first() {
    let restarted = Restarted { total: 6, in_a_row: 0 };
    for incarnation in [3, 5] {
        let kept = Kept { creation: with_argument("a"), start: start(7, 3, 6, 0) };
        let (mut placement, _) = next(kept, &[4]);
        let instance = Instance { generation: 7, incarnation };
        let lives = report(instance, ActorLife::Alive, restarted);
        let mut effects = Vec::new();
        placement.placed(ms(500), home(1), "n1", lives, false, &mut effects);
        let told = life(&effects).unwrap();
        assert_eq!((told.life, told.restarts), (ActorLife::Alive, 6));
        assert!(begun(&tick(&mut placement, GRACE + ms(400))).is_empty());
        let news = (incarnation == 5).then(|| put(None, "a", start(7, 5, 6, 0)));
        assert_eq!(stored(&mut placement), news.into_iter().collect::<Vec<_>>());
    }
    // One that says that it is dead is started again when no process can still say that it runs a
    // later start.
    let kept = Kept { creation: with_argument("a"), start: start(7, 3, 6, 0) };
    let (mut placement, _) = next(kept, &[4]);
    let dead = report(Instance { generation: 7, incarnation: 3 }, ActorLife::Dead, restarted);
    placement.placed(ms(500), home(1), "n1", dead, false, &mut Vec::new());
    assert!(begun(&tick(&mut placement, GRACE - ms(1))).is_empty());
    assert_eq!(begun(&tick(&mut placement, GRACE))[0].1.instance.incarnation, 4);
    // A start before the last that etcd knows is over, and so is another actor of that name.
    let kept = Kept { creation: with_argument("a"), start: start(7, 3, 6, 0) };
    let (mut placement, _) = next(kept, &[4]);
    for (generation, incarnation) in [(7, 2), (8, 4)] {
        let old = report(Instance { generation, incarnation }, ActorLife::Alive, restarted);
        let mut effects = Vec::new();
        placement.placed(ms(500), home(1), "n1", old, false, &mut effects);
        assert_eq!(ended(&effects).len(), 1, "{generation} {incarnation}");
    }
}

#[test]
fn a_start_that_etcd_does_not_have_is_taken_over_after_a_report_of_the_one_before() {
    let instance = |incarnation| Instance { generation: 7, incarnation };
    // The first was kept, or nothing is known of it.
    for kept in [true, false] {
        let mut placement = if kept {
            let kept = Kept { creation: with_argument("a"), start: start(7, 3, 0, 0) };
            next(kept, &[4, 4, 4]).0
        } else {
            keeping(&[4, 4, 4])
        };
        placement.settle(Duration::ZERO);
        let dead = report(instance(3), ActorLife::Dead, Restarted::default());
        placement.placed(ms(500), home(1), "n1", dead, false, &mut Vec::new());
        assert!(begun(&tick(&mut placement, ms(900))).is_empty());
        let restarted = Restarted { total: 1, in_a_row: 1 };
        let lives = report(instance(4), ActorLife::Alive, restarted);
        let mut effects = Vec::new();
        placement.placed(ms(1000), home(2), "n2", lives, false, &mut effects);
        assert!(ended(&effects).is_empty(), "{effects:?}");
        let told = life(&effects).unwrap();
        assert_eq!((told.life, told.restarts), (ActorLife::Alive, 1));
        let effects = tick(&mut placement, GRACE + ms(400));
        assert!(begun(&effects).is_empty() && ended(&effects).is_empty());
        let creation = (!kept).then(|| with_argument("a"));
        assert_eq!(stored(&mut placement), [put(creation, "a", start(7, 4, 1, 1))]);
    }
}

#[test]
fn one_that_is_to_be_started_again_before_it_is_back_waits_for_reports_of_it() {
    let kept = Kept { creation: with_argument("a"), start: start(7, 3, 0, 0) };
    let (mut placement, _) = next(kept, &[4]);
    let mut effects = Vec::new();
    placement.kill(ms(1), 1, "a", true, &mut effects).unwrap();
    assert_eq!(answers(&effects).len(), 1);
    assert!(begun(&tick(&mut placement, GRACE - ms(1))).is_empty());
    let begin = begun(&tick(&mut placement, GRACE)).remove(0).1;
    assert_eq!((begin.instance.incarnation, begin.restarted.total), (4, 1));
}

#[test]
fn a_start_that_etcd_does_not_have_and_that_is_over_counts() {
    let instance = Instance { generation: 7, incarnation: 4 };
    // Its restarts are used up.
    let kept = || Kept { creation: with_argument("a"), start: start(7, 3, 1, 1) };
    let used_up = Restarted { total: 2, in_a_row: 2 };
    let (mut placement, _) = next(kept(), &[4]);
    let mut effects = Vec::new();
    let dead = report(instance, ActorLife::Dead, used_up);
    placement.placed(ms(500), home(1), "n1", dead, false, &mut effects);
    assert_eq!(life(&effects).unwrap().life, ActorLife::Dead);
    assert_eq!(stored(&mut placement), [delete("a")]);
    assert!(begun(&tick(&mut placement, GRACE)).is_empty());
    // They are not: whether the start before was reported first, or not.
    for before in [false, true] {
        let (mut placement, _) = next(Kept { start: start(7, 3, 0, 0), ..kept() }, &[4]);
        if before {
            let first = Instance { incarnation: 3, ..instance };
            let dead = report(first, ActorLife::Dead, Restarted::default());
            placement.placed(ms(400), home(1), "n1", dead, false, &mut Vec::new());
        }
        let dead = report(instance, ActorLife::Dead, Restarted { total: 1, in_a_row: 1 });
        placement.placed(ms(500), home(1), "n1", dead, false, &mut Vec::new());
        let waits = KeptStart { waits: true, ..start(7, 4, 2, 2) };
        assert_eq!(stored(&mut placement), [put(None, "a", waits)]);
        assert!(begun(&tick(&mut placement, GRACE - ms(1))).is_empty());
        let begin = begun(&tick(&mut placement, GRACE)).remove(0).1;
        assert_eq!(begin.instance.incarnation, 5, "no start is used twice");
        assert_eq!(begin.restarted, Restarted { total: 2, in_a_row: 2 });
    }
}

#[test]
fn restarts_that_are_used_up_are_so_at_the_next_coordinator() {
    let kept = Kept { creation: creation("a"), start: start(7, 3, 2, 2) };
    let (mut placement, _) = next(kept, &[4]);
    let effects = tick(&mut placement, GRACE);
    assert!(begun(&effects).is_empty());
    assert_eq!(life(&effects).unwrap().life, ActorLife::Dead);
    assert_eq!(stored(&mut placement), [delete("a")]);
}

#[test]
fn one_that_waited_for_a_place_waits_on_and_that_is_no_restart() {
    let mut placement = keeping(&[4]);
    let (instance, _) = started(&mut placement, wanted(1, creation("a")));
    stored(&mut placement);
    let mut effects = Vec::new();
    placement.drains(NOW, home(1), true, &mut effects);
    says(&mut placement, NOW, 1, "a", instance, ActorLife::Dead);
    let waits = KeptStart { waits: true, ..start(1001, 1, 0, 0) };
    assert_eq!(stored(&mut placement), [put(None, "a", waits)]);
    let (mut placement, _) = next(Kept { creation: creation("a"), start: waits }, &[4]);
    assert!(begun(&tick(&mut placement, GRACE - ms(1))).is_empty());
    let begin = begun(&tick(&mut placement, GRACE)).remove(0).1;
    assert_eq!((begin.instance.incarnation, begin.restarted.total), (2, 0));
    // Without a process that hosts its class it waits for one, for as long as it takes.
    let (mut placement, _) = next(Kept { creation: creation("a"), start: waits }, &[]);
    let day = Duration::from_secs(86_400);
    tick(&mut placement, day);
    assert!(!placement.awaits(day) && placement.created("a").is_some());
    assert_eq!(begun(&offer(&mut placement, 1, 4)).len(), 1);
}

#[test]
fn one_that_died_while_nobody_led_is_kept_while_it_waits_for_a_place() {
    let mut placement = keeping(&[]);
    let instance = Instance { generation: 7, incarnation: 3 };
    let dead = report(instance, ActorLife::Dead, Restarted::default());
    placement.placed(NOW, home(1), "n1", dead, false, &mut Vec::new());
    let waits = KeptStart { waits: true, ..start(7, 3, 1, 1) };
    assert_eq!(stored(&mut placement), [put(Some(with_argument("a")), "a", waits)]);
}

#[test]
fn what_an_operator_kills_before_it_is_back_does_not_come_back() {
    let kept = Kept { creation: with_argument("a"), start: start(7, 3, 0, 0) };
    let (mut placement, _) = next(kept, &[4]);
    let mut effects = Vec::new();
    placement.kill(ms(1), 1, "a", false, &mut effects).unwrap();
    assert!(answers(&effects).is_empty());
    assert_eq!(placement.next_to_keep(), [delete("a")]);
    assert_eq!(answers(&written(&mut placement, Written::Stored)).len(), 1);
    let instance = Instance { generation: 7, incarnation: 3 };
    let mut effects = Vec::new();
    let lives = report(instance, ActorLife::Alive, Restarted::default());
    placement.placed(ms(500), home(1), "n1", lives, false, &mut effects);
    assert_eq!(ended(&effects), [(home(1), instance, EndHow::Kill)]);
    assert!(stored(&mut placement).is_empty());
}

#[test]
fn one_that_is_read_late_gives_way_to_what_is_there() {
    let kept =
        |generation| Kept { creation: with_argument("a"), start: start(generation, 3, 0, 0) };
    let resume = |placement: &mut Placement, kept, taken| {
        let mut effects = Vec::new();
        (placement.resume(NOW, kept, taken, &mut effects), effects)
    };
    // Another has the name: etcd will have that one.
    let mut placement = keeping(&[4]);
    started(&mut placement, wanted(1, creation("a")));
    assert!(!resume(&mut placement, kept(7), false).0);
    assert_eq!(stored(&mut placement), [put(Some(creation("a")), "a", start(1001, 1, 0, 0))]);
    // Or one that was not created.
    let mut placement = keeping(&[4]);
    assert!(!resume(&mut placement, kept(7), true).0);
    assert_eq!(stored(&mut placement), [delete("a")]);
    // One that waits for a place gives way itself.
    let mut placement = keeping(&[]);
    create(&mut placement, wanted(1, creation("a")));
    create(&mut placement, Wanted { or_get: true, ..wanted(2, creation("a")) });
    let (taken, effects) = resume(&mut placement, kept(7), false);
    assert!(taken && matches!(answers(&effects)[..], [(1, Err(_))]), "{effects:?}");
    // Unless it is the same one, whose creator had no answer.
    let mut placement = keeping(&[]);
    create(&mut placement, Wanted { again: true, ..wanted(1, with_argument("a")) });
    let (taken, effects) = resume(&mut placement, kept(1001), false);
    assert!(taken && answers(&effects).is_empty());
    let mut effects = Vec::new();
    let instance = Instance { generation: 1001, incarnation: 3 };
    let lives = report(instance, ActorLife::Alive, Restarted::default());
    placement.placed(NOW, home(1), "n1", lives, false, &mut effects);
    assert!(matches!(answers(&effects)[..], [(1, Ok(_))]), "{effects:?}");
}

#[test]
fn an_etcd_that_lost_its_data_gets_it_again() {
    let mut placement = keeping(&[9]);
    started(&mut placement, wanted(1, creation("a")));
    stored(&mut placement);
    placement.keep_anew(vec!["old".to_owned()]);
    let a = put(Some(creation("a")), "a", start(1001, 1, 0, 0));
    let mut writes = stored(&mut placement);
    writes.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(writes, [a, delete("old")]);
}

#[test]
fn what_is_written_at_once_and_what_may_be_there_have_bounds() {
    let mut placement = keeping(&[2; 16]);
    let small = |number: u64| {
        let needs = Needs::nothing();
        Creation { needs, ..creation(&format!("a{number:05}")) }
    };
    for number in 0..40 {
        create(&mut placement, wanted(number, small(number)));
    }
    assert_eq!(placement.next_to_keep().len(), 32);
    written(&mut placement, Written::Stored);
    assert_eq!(stored(&mut placement).len(), 8);
    for number in 100..110 {
        let argument = vec![0; 64 << 10];
        create(&mut placement, wanted(number, Creation { argument, ..small(number) }));
    }
    assert_eq!(placement.next_to_keep().len(), 7, "512 KiB");
    // An etcd that takes everything and says nothing, and actors that come and go.
    let mut placement = keeping(&[2]);
    let mut names = BTreeSet::new();
    for number in 0..500 {
        let (instance, _) = started(&mut placement, wanted(number, small(number)));
        let name = small(number).name;
        names.extend(placement.next_to_keep().into_iter().map(|write| write.name));
        written(&mut placement, Written::Failed);
        placement.kill(NOW, 1000 + number, &name, false, &mut Vec::new()).unwrap();
        says(&mut placement, NOW, 1, &name, instance, ActorLife::Dead);
    }
    assert!(names.len() <= 32, "{}", names.len());
    assert_eq!(stored(&mut placement).len(), names.len());
    assert!(!placement.has_to_keep());
}
