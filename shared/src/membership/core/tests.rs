//! What a process asks of etcd, and how it reacts to answers, losses and time.
use super::super::Role;
use super::super::view::{DESIRED_KEY, LAST_LEADER_KEY, LEADER_KEY, Value};
use super::*;

const TTL: Duration = Duration::from_secs(10);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn record(incarnation: u64) -> Record {
    Record {
        node: "n".to_owned(),
        role: Role::Coordinator,
        incarnation,
        address: "h:1".to_owned(),
        http: String::new(),
        pid: 1,
        version: String::new(),
        protocol: 0,
        model: None,
        serves: None,
    }
}

fn entry(key: &str, incarnation: u64, created: i64) -> Entry {
    Entry { key: key.to_owned(), value: Value::Process(record(incarnation)), created, lease: 7 }
}

/// The key of the last leader, as written at `revision`.
fn led(by: Record, ended: bool, revision: i64) -> Entry {
    let value = Value::LastLeader(LastLeader { record: by, ended, revision });
    Entry { key: LAST_LEADER_KEY.to_owned(), value, created: 1, lease: 0 }
}

fn desired(by: u64, generation: u64) -> Entry {
    let value = Value::Desired(DesiredState { by, generation, ..DesiredState::default() });
    Entry { key: DESIRED_KEY.to_owned(), value, created: 1, lease: 0 }
}

/// A core that registered at revision 5 and is in its first session since 0 s.
fn registered() -> MembershipCore {
    let mut core = MembershipCore::new(record(1), true, TTL);
    core.leased(at(0), 7);
    core.opened(at(0), 4, Vec::new());
    assert_eq!(core.next_action(at(0)), Some(NextAction::Register));
    assert_eq!(core.found(at(0), None), Ok(Some(0)));
    core.registered();
    core.listed(at(0), 5, vec![entry("coordinators/n", 1, 5)]);
    core
}

#[test]
fn one_that_is_registered_leads_where_nobody_does() {
    let mut core = registered();
    assert_eq!(core.next_action(at(0)), Some(NextAction::Lead));
    core.listed(at(0), 6, vec![entry("coordinators/n", 1, 5), entry(LEADER_KEY, 1, 6)]);
    assert_eq!(core.next_action(at(1)), None);
    assert_eq!(core.view().own().map(|leader| leader.epoch), Some(6));
    assert!(core.view().other_than(1).is_none());
    // While etcd is away it continues as before.
    core.closed();
    assert!(!core.view().connected && core.view().own().is_some());
    core.opened(at(60), 9, vec![entry("coordinators/n", 1, 5), entry(LEADER_KEY, 2, 8)]);
    assert_eq!(core.view().other_than(1).map(|leader| leader.epoch), Some(8));
    assert!(core.view().own().is_none());
}

#[test]
fn after_etcd_was_away_whoever_led_is_first_to_run() {
    let mut led = registered();
    led.listed(at(0), 6, vec![entry("coordinators/n", 1, 5), entry(LEADER_KEY, 1, 6)]);
    let mut other = registered();
    other.listed(at(0), 6, vec![entry("coordinators/n", 1, 5), entry(LEADER_KEY, 2, 6)]);
    for core in [&mut led, &mut other] {
        core.closed();
        core.opened(at(100), 20, vec![entry("coordinators/n", 1, 5)]);
        core.registered();
    }
    assert_eq!(
        (led.next_action(at(100)), other.next_action(at(100))),
        (Some(NextAction::Lead), None)
    );
    assert_eq!(
        other.next_action(at(100) + INCUMBENT_FIRST),
        Some(NextAction::Lead),
        "but not for ever"
    );
    // A process that was started meanwhile knows just as much: that etcd was away.
    let mut started = MembershipCore::new(record(3), true, TTL);
    started.closed();
    started.leased(at(100), 7);
    started.opened(at(100), 20, Vec::new());
    started.registered();
    assert_eq!(started.next_action(at(100)), None);
    assert_eq!(started.next_action(at(100) + INCUMBENT_FIRST), Some(NextAction::Lead));
}

#[test]
fn a_watch_that_is_cut_off_from_history_is_over() {
    let mut core = registered();
    let compacted = WatchUpdate { compacted: 9, ..WatchUpdate::default() };
    assert!(compacted.is_last());
    assert!(core.changed(at(1), compacted).is_err());
    let cancelled = WatchUpdate { cancelled: Some("why".to_owned()), ..WatchUpdate::default() };
    let Err(SessionBroken(reason)) = core.changed(at(1), cancelled) else {
        panic!("it is not over")
    };
    assert!(reason.contains("why"), "{reason}");
}

#[test]
fn one_whose_key_is_gone_takes_another_lease() {
    let mut core = registered();
    let kind = EventKind::Delete("coordinators/n".to_owned());
    let gone = WatchUpdate { events: vec![Event { revision: 6, kind }], ..WatchUpdate::default() };
    assert!(core.changed(at(1), gone).is_err());
    assert_eq!(core.lease(), None);
    let mut core = registered();
    assert!(core.kept(at(1), Duration::ZERO).is_err());
    assert_eq!(core.lease(), None);
}

#[test]
fn a_lease_lives_from_the_sending_of_its_keepalive() {
    let mut core = registered();
    // Sent at 3 s, answered at 9 s.
    assert_eq!(core.tick(at(3)), Ok(false));
    assert_eq!(core.kept(at(9), TTL), Ok(()));
    assert_eq!(core.tick(at(12)), Ok(false));
    assert!(core.tick(at(13)).is_err(), "not 10 s after its answer");
}

#[test]
fn one_whose_main_thread_is_silent_for_longer_than_its_lease_lives_is_silent() {
    let mut core = registered();
    assert!(!core.looks_silent(at(9), None), "it is still starting, however long that takes");
    for silence in [Duration::ZERO, TTL] {
        assert!(!core.looks_silent(at(9), Some(silence)), "{silence:?}");
    }
    assert!(!core.is_stuck(at(99)));
    assert!(core.looks_silent(at(9), Some(TTL + Duration::from_millis(1))));
}

#[test]
fn one_whose_main_thread_is_still_silent_a_while_later_is_stuck() {
    let silent = Some(TTL + Duration::from_secs(50));
    let mut core = registered();
    // Many looks at once, as after a standstill, are one.
    for _ in 0..30 {
        assert!(core.looks_silent(at(60), silent));
        assert!(!core.is_stuck(at(60)));
    }
    let later = at(60) + GOES_ON_WITHIN;
    assert!(core.looks_silent(later - Duration::from_millis(1), silent));
    assert!(!core.is_stuck(later - Duration::from_millis(1)));
    assert!(core.looks_silent(later, silent) && core.is_stuck(later));
    // The end of a session changes nothing about it, a beat does.
    core.closed();
    assert!(core.looks_silent(later, silent) && core.is_stuck(later));
    assert!(!core.looks_silent(later, Some(Duration::ZERO)) && !core.is_stuck(later));
    assert!(core.looks_silent(at(90), silent) && !core.is_stuck(at(90)), "it counts anew");
}

#[test]
fn a_silent_watch_is_over_and_what_it_says_is_not_trusted_for_ever() {
    let mut core = registered();
    for now in 0..31 {
        assert_eq!(core.tick(at(now)), Ok(false), "{now}");
        assert_eq!(core.kept(at(now), TTL), Ok(()));
    }
    assert!(core.tick(at(31)).is_err());
    let mut core = registered();
    // Everything is listed again after half a minute to a minute.
    for now in 0..62 {
        let lists = core.tick(at(now)).unwrap();
        assert!((lists || now <= 60) && !(lists && now <= 30), "{now}: {lists}");
        assert_eq!(core.kept(at(now), TTL), Ok(()));
        assert_eq!(core.changed(at(now), WatchUpdate::default()), Ok(()));
    }
}

#[test]
fn a_name_of_the_last_run_is_waited_for_and_that_of_another_process_is_not() {
    let mut core = MembershipCore::new(record(1), false, TTL);
    core.leased(at(0), 7);
    core.opened(at(0), 4, vec![entry("coordinators/n", 9, 2)]);
    let owner = |incarnation| Some(KeyOwner { revision: 3, record: Some(record(incarnation)) });
    assert_eq!(core.found(at(0), owner(9)), Ok(None));
    assert_eq!(core.found(at(23), owner(9)), Ok(None));
    assert!(matches!(core.found(at(24), owner(9)), Err(FatalError::NameTaken { .. })));
    // Its own key, under an earlier lease; then nobody's.
    assert_eq!(core.found(at(25), owner(1)), Ok(Some(3)));
    assert_eq!(core.found(at(30), owner(9)), Ok(None), "counted anew");
    assert_eq!(core.found(at(60), None), Ok(Some(0)));
}

#[test]
fn one_that_led_does_not_lead_again_after_another() {
    let own = || entry("coordinators/n", 1, 5);
    let mut core = registered();
    core.listed(at(0), 6, vec![own(), entry(LEADER_KEY, 1, 6), led(record(1), false, 6)]);
    assert_eq!(core.last_leader_revision(), 6);
    // Its lease ended and nobody led: then it leads, on condition that this is still so.
    core.listed(at(1), 7, vec![own(), led(record(1), false, 6)]);
    assert_eq!((core.next_action(at(1)), core.last_leader_revision()), (Some(NextAction::Lead), 6));
    assert_eq!(core.view().other_than(1), None);
    // Another came and went.
    core.listed(at(2), 9, vec![own(), led(record(2), true, 8)]);
    assert_eq!(core.next_action(at(60)), None);
    assert_eq!(core.view().other_than(1).map(|it| it.record.incarnation), Some(2));
    // A process that never led may run.
    let mut core = registered();
    core.listed(at(2), 9, vec![own(), led(record(2), false, 8)]);
    assert_eq!((core.next_action(at(2)), core.last_leader_revision()), (Some(NextAction::Lead), 8));
}

#[test]
fn one_that_begins_where_somebody_may_still_serve_lets_that_one_run_first() {
    let other = || Record { node: "m".to_owned(), ..record(2) };
    let begun = |led: Entry| {
        let mut core = MembershipCore::new(record(1), true, TTL);
        core.leased(at(0), 7);
        core.opened(at(0), 9, vec![led]);
        core.registered();
        core
    };
    let waits = begun(led(other(), false, 8));
    assert_eq!(waits.next_action(at(4)), None);
    assert_eq!(waits.next_action(INCUMBENT_FIRST), Some(NextAction::Lead), "but not for ever");
    // The last leader said that it ends, or was this program's last run, whose name is free again.
    assert_eq!(begun(led(other(), true, 8)).next_action(at(0)), Some(NextAction::Lead));
    assert_eq!(begun(led(record(2), false, 8)).next_action(at(0)), Some(NextAction::Lead));
}

#[test]
fn what_the_leader_was_told_is_stored_while_it_leads_and_until_it_is_there() {
    let own = || entry("coordinators/n", 1, 5);
    let leads = || vec![own(), entry(LEADER_KEY, 1, 6), led(record(1), false, 6)];
    let mut core = registered();
    // Commands from before it led count once it leads.
    core.desire(DesiredState { generation: 4, ..DesiredState::default() });
    core.listed(at(0), 5, vec![own(), entry(LEADER_KEY, 2, 3)]);
    assert_eq!((core.next_action(at(0)), core.to_store()), (None, None));
    core.listed(at(0), 6, leads());
    assert_eq!(core.next_action(at(0)), Some(NextAction::Store));
    let (epoch, stored) = core.to_store().unwrap();
    assert_eq!((epoch, stored.by, stored.generation), (6, 1, 4));
    core.listed(at(0), 7, [leads(), vec![desired(1, 4)]].concat());
    assert_eq!(core.next_action(at(0)), None);
    assert!(core.view().desired.as_ref().unwrap().has(1, 4));
    // Another command; and an etcd that has lost its data, with another epoch.
    core.desire(DesiredState { generation: 5, ..DesiredState::default() });
    assert_eq!(core.to_store().map(|(epoch, it)| (epoch, it.generation)), Some((6, 5)));
    core.closed();
    core.leased(at(9), 8);
    let leader = Entry { lease: 8, ..entry(LEADER_KEY, 1, 3) };
    core.opened(at(9), 3, vec![entry("coordinators/n", 1, 2), leader]);
    core.registered();
    assert_eq!(core.to_store().map(|(epoch, it)| (epoch, it.generation)), Some((3, 5)));
}

#[test]
fn an_etcd_that_was_silent_for_half_a_lease_was_away() {
    let other = || Record { node: "m".to_owned(), ..record(2) };
    let leaves = |silent: u64| {
        let mut core = registered();
        let leader = entry(LEADER_KEY, 2, 6);
        core.listed(at(0), 6, vec![entry("coordinators/n", 1, 5), leader, led(other(), false, 6)]);
        assert_eq!(core.tick(at(3)), Ok(false));
        assert_eq!(core.kept(at(3), TTL), Ok(()));
        let kind = EventKind::Delete(LEADER_KEY.to_owned());
        let gone =
            WatchUpdate { events: vec![Event { revision: 7, kind }], ..WatchUpdate::default() };
        assert_eq!(core.changed(at(3 + silent), gone), Ok(()));
        core
    };
    assert_eq!(
        leaves(5).next_action(at(8)),
        Some(NextAction::Lead),
        "its lease ended while etcd was there"
    );
    let core = leaves(6);
    assert_eq!(
        (core.next_action(at(9)), core.next_action(at(9) + INCUMBENT_FIRST)),
        (None, Some(NextAction::Lead))
    );
}

#[test]
fn the_lead_goes_over_to_a_new_lease() {
    let own = |lease| Entry { lease, ..entry("coordinators/n", 1, 5) };
    let leader = |lease| Entry { lease, ..entry(LEADER_KEY, 1, 6) };
    let mut core = registered();
    core.listed(at(0), 6, vec![own(7), leader(7)]);
    assert_eq!(core.next_action(at(1)), None);
    // etcd says that the lease is gone, and still has its keys.
    core.closed();
    core.lease_over();
    core.leased(at(2), 8);
    core.opened(at(2), 9, vec![own(7), leader(7)]);
    assert_eq!(core.next_action(at(2)), Some(NextAction::Register), "first its own");
    core.registered();
    assert_eq!(core.next_action(at(2)), Some(NextAction::Hold(6)));
    core.listed(at(2), 10, vec![own(8), leader(8)]);
    assert_eq!(core.next_action(at(2)), None);
    // Another leader's key is not touched.
    core.listed(at(3), 12, vec![own(8), Entry { lease: 7, ..entry(LEADER_KEY, 2, 11) }]);
    assert_eq!(core.next_action(at(3)), None);
}

fn serving(incarnation: u64, secret: &str) -> Record {
    let serves = Serves {
        names: vec!["m".to_owned()],
        model: None,
        text: 1,
        max_model_len: 8,
        tensor_parallel: 1,
        dtypes: String::new(),
        secrets: vec![secret.to_owned()],
    };
    let node = format!("n{incarnation}");
    Record { node, serves: Some(Box::new(serves)), ..record(incarnation) }
}

/// Keys while run 2 leads, and after it.
fn led_by(leader: &Record, own: &Record, leads: bool, ended: bool) -> Vec<Entry> {
    let put = |key: &str, record: &Record| {
        let value = Value::Process(record.clone());
        Entry { key: key.to_owned(), value, created: 3, lease: 7 }
    };
    let mut entries = vec![put("coordinators/n1", own), led(leader.clone(), ended, 3)];
    if leads {
        entries.push(put(LEADER_KEY, leader));
        entries.push(put("coordinators/n2", leader));
    }
    entries
}

#[test]
fn one_that_shares_no_secret_with_the_leader_does_not_follow_it() {
    let own = serving(1, "a");
    for (secret, follows) in [("a", true), ("b", false)] {
        for ended in [true, false] {
            let leader = serving(2, secret);
            let mut core = MembershipCore::new(own.clone(), true, TTL);
            core.leased(at(0), 7);
            core.opened(at(0), 4, led_by(&leader, &own, true, false));
            core.registered();
            assert_eq!(core.next_action(at(9)), None);
            core.listed(at(9), 6, led_by(&leader, &own, false, ended));
            let lead = follows.then_some(NextAction::Lead);
            assert_eq!(core.next_action(at(99)), lead, "{secret} {ended}");
        }
    }
    // It never saw that leader: it was started for a cluster that nobody leads.
    let mut core = MembershipCore::new(own.clone(), true, TTL);
    core.leased(at(0), 7);
    core.opened(at(0), 4, led_by(&serving(2, "b"), &own, false, true));
    core.registered();
    assert_eq!(core.next_action(at(0)), Some(NextAction::Lead));
}

#[test]
fn one_whose_secrets_change_says_so_and_then_follows_the_leader() {
    let (own, leader) = (serving(1, "a"), serving(2, "b"));
    let mut core = MembershipCore::new(own.clone(), true, TTL);
    core.leased(at(0), 7);
    core.opened(at(0), 4, led_by(&leader, &own, true, false));
    core.registered();
    let names = |core: &MembershipCore, own: &Record| {
        let found = core.view().differences(own);
        found.iter().map(super::super::serves::Difference::what).collect::<Vec<_>>()
    };
    assert_eq!(names(&core, &own), ["cluster secret"]);
    let new = serving(1, "b");
    core.serves(*new.serves.clone().unwrap());
    assert_eq!(core.next_action(at(1)), Some(NextAction::Register));
    assert_eq!(core.record(), &new);
    core.registered();
    core.listed(at(1), 5, led_by(&leader, &new, true, false));
    assert!(names(&core, &own).is_empty(), "the record that is registered counts");
    core.listed(at(2), 6, led_by(&leader, &new, false, true));
    assert_eq!(core.next_action(at(2)), Some(NextAction::Lead));
}

#[test]
fn a_record_that_does_not_say_what_it_serves_can_be_read() {
    let old = serde_json::to_string(&record(1)).unwrap();
    assert!(!old.contains("serves"), "{old}");
    assert_eq!(serde_json::from_str::<Record>(&old).unwrap(), record(1));
    let new = serde_json::to_string(&serving(1, "a")).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&new).unwrap(), serving(1, "a"));
}
