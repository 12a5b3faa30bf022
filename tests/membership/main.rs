//! Membership with a real etcd: joining, leaving, crashing, and failures of etcd itself.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

use std::time::Duration;

use etcd_client::{Client, Permission};
use shared::actor::placement::keep::{Change, Kept, KeptStart, Write};
use shared::membership::kept::KeptActors;
use shared::membership::ledger::{Ledger, LedgerError};
use shared::membership::{
    Credential, DesiredState, EtcdMembership, EtcdOptions, FatalError, ProbeError, Record, Role,
    Tls, View,
};
use shared::protocol::actors::creation::{Creation, Instance, Needs, Restarted, Where};
use tempfile::TempDir;
use testkit::certificates::Certificates;
use testkit::etcd::Etcd;
use testkit::local_cluster::LocalCluster;
use tokio::sync::watch::Receiver;

const PATIENCE: Duration = Duration::from_secs(20);
/// A short lease, so that the tests need not wait long.
const TTL: Duration = Duration::from_secs(2);

fn options(etcd: &Etcd) -> EtcdOptions {
    EtcdOptions {
        endpoints: vec![etcd.endpoint()],
        cluster: "test".to_owned(),
        user: None,
        tls: None,
        lease_ttl: TTL,
    }
}

fn record(node: &str, incarnation: u64) -> Record {
    Record {
        node: node.to_owned(),
        role: Role::Worker,
        incarnation,
        address: String::new(),
        http: String::new(),
        pid: 1,
        version: "0".to_owned(),
        protocol: 0,
        model: None,
        serves: None,
    }
}

fn coordinator(node: &str, incarnation: u64) -> Record {
    let address = format!("{node}:8001");
    Record { role: Role::Coordinator, address, ..record(node, incarnation) }
}

fn join(etcd: &Etcd, record: Record) -> EtcdMembership {
    let campaign = record.role == Role::Coordinator;
    EtcdMembership::start(options(etcd), record, campaign).unwrap()
}

async fn until(view: &mut Receiver<View>, what: &str, wanted: impl Fn(&View) -> bool) -> View {
    let found = tokio::time::timeout(PATIENCE, view.wait_for(wanted)).await;
    let found = found.ok().map(|found| found.unwrap().clone());
    found.unwrap_or_else(|| panic!("{what}: {:?}", view.borrow()))
}

fn has(view: &View, node: &str) -> bool {
    view.records.contains_key(&format!("workers/{node}"))
}

async fn etcd() -> Option<(TempDir, Etcd)> {
    let folder = tempfile::tempdir().unwrap();
    let etcd = Etcd::start(folder.path()).await.unwrap()?;
    Some((folder, etcd))
}

#[tokio::test]
async fn who_joins_is_seen_and_who_leaves_or_crashes_is_gone() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let watcher = join(&etcd, record("watcher", 1));
    let mut view = watcher.view();
    let patient = EtcdOptions { lease_ttl: 3 * PATIENCE, ..options(&etcd) };
    let a = EtcdMembership::start(patient, record("a", 2), false).unwrap();
    let seen = until(&mut view, "a joins", |v| has(v, "a")).await;
    assert!(seen.connected && seen.confirmed > 1_700_000_000);
    assert_eq!(seen.records["workers/a"], record("a", 2));
    a.leave().await;
    until(&mut view, "a leaves without waiting for its lease", |v| !has(v, "a")).await;
    // A crash ends the keepalives. Dropping the handle does not stop the thread, so this revokes
    // the other process's lease instead.
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    let lease = client.lease_grant(2, None).await.unwrap().id();
    let put = etcd_client::PutOptions::new().with_lease(lease);
    let value = serde_json::to_vec(&record("crashed", 3)).unwrap();
    client.put("/test/workers/crashed", value, Some(put)).await.unwrap();
    until(&mut view, "it joins", |v| has(v, "crashed")).await;
    until(&mut view, "its lease ends", |v| !has(v, "crashed")).await;
    // A value that is not one of our records is ignored.
    client.put("/test/workers/nonsense", "{", None).await.unwrap();
    client.put("/other/workers/b", "{}", None).await.unwrap();
    let _b = join(&etcd, record("b", 4));
    let seen = until(&mut view, "b joins", |v| has(v, "b")).await;
    assert_eq!(seen.records.len(), 2, "{seen:?}");
}

#[tokio::test]
async fn etcd_frozen_and_killed_loses_nobody() {
    let Some((_folder, mut etcd)) = etcd().await else { return };
    let members: Vec<_> = (0..3u64).map(|i| join(&etcd, record(&format!("m{i}"), i))).collect();
    let mut view = members[0].view();
    let all = |v: &View| (0..3).all(|i| has(v, &format!("m{i}")));
    until(&mut view, "all join", |v| all(v) && v.connected).await;
    for kill in [false, true] {
        if kill {
            etcd.kill();
        } else {
            LocalCluster::signal(etcd.pid(), "STOP").unwrap();
        }
        let seen = until(&mut view, "etcd is missed", |v| !v.connected).await;
        assert!(all(&seen), "the last view stays");
        // Longer than the leases last.
        tokio::time::sleep(TTL + Duration::from_secs(1)).await;
        assert!(all(&view.borrow()));
        if kill {
            etcd.restart().await.unwrap();
        } else {
            LocalCluster::signal(etcd.pid(), "CONT").unwrap();
        }
        until(&mut view, "all are back", |v| all(v) && v.connected).await;
        // Whichever leases expired meanwhile, all members are registered again.
        for member in &members {
            until(&mut member.view(), "each is back", |v| all(v) && v.connected).await;
        }
    }
}

#[tokio::test]
async fn a_lease_taken_away_and_a_compacted_history_are_got_over() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let member = join(&etcd, record("m", 1));
    let mut view = member.view();
    until(&mut view, "it joins", |v| has(v, "m")).await;
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    let lease = client.get("/test/workers/m", None).await.unwrap().kvs()[0].lease();
    client.lease_revoke(lease).await.unwrap();
    let registered = async |client: &mut Client| {
        for _ in 0..200 {
            let got = client.get("/test/workers/m", None).await.unwrap();
            if got.kvs().first().is_some_and(|kv| kv.lease() != lease) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        false
    };
    assert!(registered(&mut client).await, "under a new lease");
    // The history that a watch would need is compacted: changes are noticed nevertheless.
    LocalCluster::signal(etcd.pid(), "STOP").unwrap();
    until(&mut view, "etcd is missed", |v| !v.connected).await;
    LocalCluster::signal(etcd.pid(), "CONT").unwrap();
    for i in 0..50 {
        client.put("/test/workers/x", format!("{i}"), None).await.unwrap();
    }
    let value = serde_json::to_vec(&record("late", 9)).unwrap();
    let put = client.put("/test/workers/late", value, None).await.unwrap();
    client.compact(put.header().unwrap().revision(), None).await.unwrap();
    until(&mut view, "the late one is known", |v| has(v, "late") && v.connected).await;
}

#[tokio::test]
async fn a_name_belongs_to_one_process_and_is_free_again_after_it() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let first = join(&etcd, record("same", 1));
    until(&mut first.view(), "it joins", |v| has(v, "same")).await;
    let mut second = join(&etcd, record("same", 2));
    let error = tokio::time::timeout(PATIENCE, second.failed()).await.unwrap();
    assert_eq!(error, FatalError::NameTaken { key: "workers/same".to_owned() });
    assert!(error.to_string().contains("unique"));
    // A restarted program finds the key of its previous run, and waits until that expires.
    let third = join(&etcd, record("same", 3));
    tokio::time::sleep(Duration::from_millis(700)).await;
    first.leave().await;
    let mut view = third.view();
    until(&mut view, "it takes over", |v| {
        v.records.get("workers/same").is_some_and(|record| record.incarnation == 3)
    })
    .await;
}

#[tokio::test]
async fn a_leader_whose_main_thread_is_stuck_makes_room_for_another() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let leader = join(&etcd, coordinator("c", 1));
    let mut view = leader.view();
    until(&mut view, "it leads", |v| v.leading).await;
    let standby = join(&etcd, coordinator("d", 2));
    let mut other = standby.view();
    until(&mut other, "the other knows who leads", |v| v.leader.is_some()).await;
    let stands_by = |view: &View| view.leader.is_some() && !view.leading;
    // A thread that does not beat yet may be busy with its start.
    tokio::time::sleep(2 * TTL).await;
    assert!(stands_by(&other.borrow()));
    let pulse = leader.pulse();
    let beating = tokio::spawn(pulse.clone().keep());
    tokio::time::sleep(2 * TTL).await;
    assert!(stands_by(&other.borrow()));
    beating.abort();
    until(&mut other, "the other leads", |v| v.leading).await;
    // Nor does it take another lease.
    tokio::time::sleep(TTL).await;
    assert!(!other.borrow().records.contains_key("coordinators/c"), "{:?}", other.borrow());
    let beating = tokio::spawn(pulse.keep());
    let seen = until(&mut view, "it learns who leads", |v| v.other_than(1).is_some()).await;
    assert_eq!(seen.other_than(1).map(|it| it.record.incarnation), Some(2));
    until(&mut other, "it is back", |v| v.records.contains_key("coordinators/c")).await;
    beating.abort();
}

#[tokio::test]
async fn an_etcd_that_lost_its_data_learns_everything_again() {
    let Some((_folder, mut etcd)) = etcd().await else { return };
    let leader = join(&etcd, coordinator("c", 1));
    until(&mut leader.view(), "it leads", |v| v.leading).await;
    let standby = join(&etcd, coordinator("d", 2));
    let worker = join(&etcd, record("w", 3));
    let mut view = worker.view();
    let all = |v: &View| {
        v.connected
            && has(v, "w")
            && v.records.len() == 3
            && v.leader.as_ref().is_some_and(|leader| leader.record.incarnation == 1)
    };
    // etcd loses its data: newer revisions are smaller than older ones.
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    for i in 0..200 {
        client.put("/test/workers/x", format!("{i}"), None).await.unwrap();
    }
    let before = until(&mut view, "all are there", |v| all(v) && v.revision > 200).await;
    etcd.kill();
    std::fs::remove_dir_all(etcd.data()).unwrap();
    until(&mut view, "etcd is missed", |v| !v.connected).await;
    etcd.restart().await.unwrap();
    for mut view in [leader.view(), standby.view(), view] {
        let now = until(&mut view, "all are back", |v| all(v) && v.revision < 100).await;
        assert!(now.revision < before.revision);
    }
    assert!(leader.view().borrow().leading && !standby.view().borrow().leading);
}

#[tokio::test]
async fn only_the_leader_leaves_something_for_the_next_one() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let leader = join(&etcd, coordinator("c", 1));
    let mut view = leader.view();
    let seen = until(&mut view, "it leads", |v| v.leading).await;
    let epoch = seen.leader.unwrap().epoch;
    let mut ledger = Ledger::new(options(&etcd));
    assert_eq!(ledger.load().await.unwrap(), None);
    // Smaller and larger than etcd's request limit, in any order.
    let bytes = |len: usize| (0..len).map(|i| (i * 31 % 251) as u8).collect::<Vec<u8>>();
    for len in [10, 3 << 20, 1 << 19, 0, 5 << 20] {
        ledger.save(epoch, &bytes(len)).await.unwrap();
        assert_eq!(Ledger::new(options(&etcd)).load().await.unwrap(), Some(bytes(len)));
    }
    let large = ledger.save(epoch, &bytes(33 << 20)).await;
    assert!(matches!(large, Err(LedgerError::TooLarge { .. })), "{large:?}");
    // Writes with another leader's epoch are refused, and so are all writes while nobody leads.
    let mut stranger = Ledger::new(options(&etcd));
    let fenced = stranger.save(epoch + 1, &bytes(3)).await;
    assert!(matches!(fenced, Err(LedgerError::Fenced)), "{fenced:?}");
    leader.leave().await;
    let fenced = ledger.save(epoch, &bytes(3)).await;
    assert!(matches!(fenced, Err(LedgerError::Fenced)), "{fenced:?}");
    let next = join(&etcd, coordinator("d", 2));
    let seen = until(&mut next.view(), "the next leads", |v| v.leading).await;
    assert_eq!(ledger.load().await.unwrap(), Some(bytes(5 << 20)), "what was there stays");
    ledger.save(seen.leader.unwrap().epoch, &bytes(7)).await.unwrap();
    assert!(matches!(ledger.save(epoch, &bytes(8)).await, Err(LedgerError::Fenced)));
    assert_eq!(ledger.load().await.unwrap(), Some(bytes(7)));
    // Pieces that do not match the head.
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    for generation in 0..2 {
        client.put(format!("/test:totals/{generation}/0"), "x", None).await.unwrap();
    }
    let damaged = ledger.load().await;
    assert!(matches!(damaged, Err(LedgerError::Damaged(_))), "{damaged:?}");
    let epoch = next.view().borrow().leader.as_ref().unwrap().epoch;
    ledger.save(epoch, &bytes(9)).await.unwrap();
    assert_eq!(Ledger::new(options(&etcd)).load().await.unwrap(), Some(bytes(9)));
    assert!(!next.view().borrow().records.keys().any(|key| key.contains("totals")));
}

/// An actor with this argument, at this start.
fn kept(name: &str, argument: usize, incarnation: u32) -> Kept {
    let creation = Creation {
        name: name.to_owned(),
        class: "counter".to_owned(),
        argument: vec![b'\n'; argument],
        needs: Needs::nothing().cpus(0.5).custom("seats", 2),
        at: Where::spread().label("zone", "west"),
        max_restarts: None,
        mailbox: 8,
        start_limit_ms: 1000,
        message_limit_ms: 0,
    };
    let instance = Instance { generation: u64::MAX, incarnation };
    let restarted = Restarted { total: 7, in_a_row: 1 };
    Kept { creation, start: KeptStart { instance, restarted, waits: false } }
}

fn put(kept: &Kept) -> Write {
    let creation = Some(Box::new(kept.creation.clone()));
    let change = Change::Put { creation, start: kept.start };
    Write { name: kept.creation.name.clone(), change }
}

#[tokio::test]
async fn only_the_leader_keeps_actors_and_the_next_one_finds_them() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let leader = join(&etcd, coordinator("c", 1));
    let seen = until(&mut leader.view(), "it leads", |v| v.leading).await;
    let epoch = seen.leader.unwrap().epoch;
    let mut first = KeptActors::new(options(&etcd));
    assert!(first.load().await.unwrap().actors.is_empty());
    // More than one page, of which each is less than an answer may have.
    let name = |index: usize| format!("actor {index:02} \u{e9}");
    let mut all: Vec<Kept> = (0..70).map(|index| kept(&name(index), 60 << 10, 1)).collect();
    for some in all.chunks(8) {
        first.write(epoch, some.iter().map(put).collect()).await.unwrap();
    }
    // One is started again, one ends, and an unreadable one keeps nobody from the others.
    all[1].start.instance.incarnation = 2;
    let start = all[1].start;
    let again = Write { name: name(1), change: Change::Put { creation: None, start } };
    let ended = Write { name: name(0), change: Change::Delete };
    first.write(epoch, vec![again, ended]).await.unwrap();
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    client.put("/test:actors/created/odd", "{}", None).await.unwrap();
    leader.leave().await;
    // What is still on its way when another leads is void.
    let next = join(&etcd, coordinator("d", 2));
    let seen = until(&mut next.view(), "the next leads", |v| v.leading).await;
    let fenced = first.write(epoch, vec![put(&kept("late", 1, 1))]).await;
    assert!(matches!(fenced, Err(LedgerError::Fenced)), "{fenced:?}");
    let mut second = KeptActors::new(options(&etcd));
    let found = second.load().await.unwrap();
    assert_eq!(found.actors, all[1..]);
    assert!(matches!(&found.damaged[..], [(name, _)] if name == "odd"), "{:?}", found.damaged);
    let ended = Write { name: name(1), change: Change::Delete };
    second.write(seen.leader.unwrap().epoch, vec![ended]).await.unwrap();
    assert_eq!(second.load().await.unwrap().actors, all[2..]);
    // Nobody else is told of them.
    assert!(!next.view().borrow().records.keys().any(|key| key.contains("actor")));
}

#[tokio::test]
async fn an_etcd_with_tls_takes_those_whom_it_knows() {
    let folder = tempfile::tempdir().unwrap();
    let Some(certificates) = Certificates::make(folder.path()).unwrap() else { return };
    let Some(etcd) = Etcd::start_secure(folder.path(), &certificates).await.unwrap() else {
        return;
    };
    let read = |path| Credential::from(std::fs::read(path).unwrap());
    let (certificate, key) = certificates.pair("client");
    let identity = Some((read(certificate), read(key)));
    let tls = Tls { authority: read(certificates.authority()), identity: identity.clone() };
    let with = |tls| EtcdOptions { tls, ..options(&etcd) };
    let member = EtcdMembership::start(with(Some(tls.clone())), coordinator("c", 1), true).unwrap();
    until(&mut member.view(), "it leads", |v| v.leading).await;
    let anonymous = Tls { identity: None, ..tls.clone() };
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Certificates::make(elsewhere.path()).unwrap().unwrap();
    let deceived = Tls { authority: read(other.authority()), identity };
    for (tls, who) in [
        (Some(tls), None),
        (Some(anonymous), Some("one without a certificate")),
        (Some(deceived), Some("one who trusts somebody else")),
    ] {
        let loaded = Ledger::new(with(tls)).load().await;
        assert_eq!(loaded.is_err(), who.is_some(), "{who:?}: {loaded:?}");
    }
}

#[tokio::test]
async fn certificates_that_are_replaced_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let Some(certificates) = Certificates::make(folder.path()).unwrap() else { return };
    let Some(mut etcd) = Etcd::start_secure(folder.path(), &certificates).await.unwrap() else {
        return;
    };
    let (certificate, key) = certificates.pair("client");
    let files = [certificates.authority(), certificate, key];
    let followed = files.clone().map(|path| {
        let name = path.display().to_string();
        let read = move || std::fs::read(&path).map_err(|error| error.to_string());
        Credential::read_again(name, read).unwrap()
    });
    let kept = files.map(|path| Credential::from(std::fs::read(path).unwrap()));
    let member = |[authority, certificate, key]: [Credential; 3], node| {
        let tls = Some(Tls { authority, identity: Some((certificate, key)) });
        let options = EtcdOptions { tls, ..options(&etcd) };
        EtcdMembership::start(options, record(node, 1), false).unwrap()
    };
    let (follows, keeps) = (member(followed, "follows"), member(kept, "keeps"));
    for member in [&follows, &keeps] {
        until(&mut member.view(), "it joins", |v| v.connected).await;
    }
    etcd.kill();
    for member in [&follows, &keeps] {
        until(&mut member.view(), "it notices", |v| !v.connected).await;
    }
    // Another authority, and other certificates by it.
    Certificates::make(folder.path()).unwrap().unwrap();
    etcd.restart().await.unwrap();
    until(&mut follows.view(), "it has read them", |v| v.connected).await;
    tokio::time::sleep(TTL).await;
    assert!(!keeps.view().borrow().connected, "the old ones are of no use");
}

#[tokio::test]
async fn an_etcd_with_users_gives_each_what_is_theirs() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    for user in ["root", "tutti"] {
        client.user_add(user, "secret", None).await.unwrap();
        client.role_add(user).await.unwrap();
        client.user_grant_role(user, user).await.unwrap();
    }
    // The permissions that docs/operations.md lists.
    for prefix in ["/test/", "/test:totals/", "/test:actors/"] {
        let permission = Permission::read_write(prefix).with_prefix();
        client.role_grant_permission("tutti", permission).await.unwrap();
    }
    client.auth_enable().await.unwrap();
    let as_user = |password: &str, cluster: &str| EtcdOptions {
        user: Some(("tutti".to_owned(), password.to_owned().into())),
        cluster: cluster.to_owned(),
        ..options(&etcd)
    };
    let known = as_user("secret", "test");
    assert!(!format!("{known:?}").contains("secret"));
    let member = EtcdMembership::start(known.clone(), coordinator("c", 1), true).unwrap();
    let seen = until(&mut member.view(), "it leads", |v| v.leading).await;
    let mut ledger = Ledger::new(known);
    ledger.save(seen.leader.unwrap().epoch, b"x").await.unwrap();
    assert_eq!(ledger.load().await.unwrap(), Some(b"x".to_vec()));
    let denied = KeptActors::new(as_user("secret", "other")).load().await;
    assert!(matches!(denied, Err(LedgerError::Denied(_))), "{denied:?}");
    for refused in [as_user("wrong", "test"), as_user("secret", "other"), options(&etcd)] {
        let loaded = Ledger::new(refused).load().await;
        assert!(loaded.is_err(), "{loaded:?}");
    }
    // It stays for longer than its lease, then leaves.
    tokio::time::sleep(TTL * 2).await;
    let view = member.view().borrow().clone();
    assert!(view.leading && view.connected);
    member.leave().await;
}

#[tokio::test]
async fn each_role_needs_the_rights_that_the_documents_list_and_no_more() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    let all = ["/test/", "/test:totals/", "/test:actors/"];
    let of_coordinators = [
        "/test/coordinators/",
        "/test/leader",
        "/test/led",
        "/test/desired",
        "/test:totals/",
        "/test:actors/",
    ];
    // Who reads and who writes what, as docs/operations.md says.
    let rights: [(&str, &[&str], &[&str]); 5] = [
        ("root", &[], &[]),
        ("coordinator", &all, &of_coordinators),
        ("worker", &["/test/"], &["/test/workers/"]),
        ("frontend", &["/test/"], &["/test/frontends/"]),
        ("operator", &["/test/"], &[]),
    ];
    for (user, read, written) in rights {
        client.user_add(user, "secret", None).await.unwrap();
        client.role_add(user).await.unwrap();
        client.user_grant_role(user, user).await.unwrap();
        let of_key = |key: &str, right: Permission| {
            if key.ends_with('/') { right.with_prefix() } else { right }
        };
        // A later right for the same keys replaces an earlier one.
        let reads = |key: &&&str| !written.contains(*key);
        let read_only = read.iter().filter(reads).map(|key| of_key(key, Permission::read(*key)));
        let written = written.iter().map(|key| match read.contains(key) {
            true => of_key(key, Permission::read_write(*key)),
            false => of_key(key, Permission::write(*key)),
        });
        for permission in read_only.chain(written) {
            client.role_grant_permission(user, permission).await.unwrap();
        }
    }
    client.auth_enable().await.unwrap();
    let of = |user: &str| EtcdOptions {
        user: Some((user.to_owned(), "secret".to_owned().into())),
        ..options(&etcd)
    };
    for (user, role) in
        [("coordinator", Role::Coordinator), ("worker", Role::Worker), ("frontend", Role::Frontend)]
    {
        assert_eq!(of(user).probe(PATIENCE).await, Ok(vec![role]));
    }
    let denied = of("operator").probe(PATIENCE).await;
    assert!(matches!(denied, Err(ProbeError::NotAllowed(_))), "{denied:?}");

    let join = |user: &str, record: Record| {
        let campaign = record.role == Role::Coordinator;
        EtcdMembership::start(of(user), record, campaign).unwrap()
    };
    let leader = join("coordinator", coordinator("c", 1));
    let mut view = leader.view();
    let epoch = until(&mut view, "it leads", |v| v.leading).await.leader.unwrap().epoch;
    let worker = join("worker", record("w", 2));
    let frontend = join("frontend", Record { role: Role::Frontend, ..record("f", 3) });
    until(&mut view, "both join", |v| v.records.len() == 3).await;
    leader.desires().send_replace(Some(DesiredState { generation: 1, ..DesiredState::default() }));
    until(&mut view, "commands are stored", |v| v.desired.is_some()).await;
    let mut ledger = Ledger::new(of("coordinator"));
    ledger.save(epoch, b"x").await.unwrap();
    assert_eq!(ledger.load().await.unwrap(), Some(b"x".to_vec()));
    let mut actors = KeptActors::new(of("coordinator"));
    let ended = Write { name: "b".to_owned(), change: Change::Delete };
    actors.write(epoch, vec![put(&kept("a", 1, 1)), ended]).await.unwrap();
    assert_eq!(actors.load().await.unwrap().actors, [kept("a", 1, 1)]);
    let found = of("operator").leader(PATIENCE).await.unwrap();
    assert_eq!(found.map(|it| it.incarnation), Some(1));
    // Nobody needs the others' rights to leave.
    worker.leave().await;
    frontend.leave().await;
    until(&mut view, "both leave at once", |v| v.records.len() == 1).await;
    leader.leave().await;
    assert_eq!(of("operator").leader(PATIENCE).await, Ok(None));
}

#[tokio::test]
async fn what_is_there_outlives_a_writer_that_cannot_read_it() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let leader = join(&etcd, coordinator("c", 1));
    let seen = until(&mut leader.view(), "it leads", |v| v.leading).await;
    let epoch = seen.leader.unwrap().epoch;
    Ledger::new(options(&etcd)).save(epoch, b"first").await.unwrap();
    // A writer that may read the leader and write everything except the head: its first request is
    // refused, and so are some of the following ones.
    let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
    for user in ["root", "tutti"] {
        client.user_add(user, "secret", None).await.unwrap();
        client.role_add(user).await.unwrap();
        client.user_grant_role(user, user).await.unwrap();
    }
    let leads = Permission::read("/test/").with_prefix();
    client.role_grant_permission("tutti", leads).await.unwrap();
    for pieces in ["/test:totals/0/", "/test:totals/1/"] {
        let pieces = Permission::read_write(pieces).with_prefix();
        client.role_grant_permission("tutti", pieces).await.unwrap();
    }
    client.auth_enable().await.unwrap();
    let user = |name: &str| EtcdOptions {
        user: Some((name.to_owned(), "secret".to_owned().into())),
        ..options(&etcd)
    };
    let saved = Ledger::new(user("tutti")).save(epoch, b"second").await;
    assert!(matches!(saved, Err(LedgerError::Denied(_))), "{saved:?}");
    let loaded = Ledger::new(user("root")).load().await;
    assert_eq!(loaded.unwrap(), Some(b"first".to_vec()));
}

#[tokio::test]
async fn one_of_three_leads_and_the_next_takes_over_under_a_larger_epoch() {
    let Some((_folder, etcd)) = etcd().await else { return };
    let mut all: Vec<(u64, EtcdMembership)> =
        (1..=3u64).map(|i| (i, join(&etcd, coordinator(&format!("c{i}"), i)))).collect();
    let worker = join(&etcd, record("w", 9));
    let mut view = worker.view();
    let mut epochs = Vec::new();
    while !all.is_empty() {
        let seen = until(&mut view, "someone leads", |v| {
            v.leader.as_ref().is_some_and(|l| {
                all.iter().any(|(incarnation, _)| *incarnation == l.record.incarnation)
            })
        })
        .await;
        let leader = seen.leader.unwrap();
        assert_eq!(leader.record.address, format!("c{}:8001", leader.record.incarnation));
        epochs.push(leader.epoch);
        let mut leading = 0;
        for (incarnation, member) in &all {
            let mut own = member.view();
            let same = |v: &View| {
                v.connected && v.leader.as_ref().is_some_and(|l| l.epoch == leader.epoch)
            };
            let own = until(&mut own, "all agree", same).await;
            assert_eq!(own.leading, *incarnation == leader.record.incarnation);
            leading += u32::from(own.leading);
        }
        assert_eq!(leading, 1);
        let at = all.iter().position(|(i, _)| *i == leader.record.incarnation).unwrap();
        all.remove(at).1.leave().await;
    }
    assert!(epochs.windows(2).all(|pair| pair[0] < pair[1]), "{epochs:?}");
    until(&mut view, "nobody leads", |v| v.leader.is_none()).await;
}

/// Starts a proxy to etcd with this delay in each direction; returns its address.
async fn slow_way_to(etcd: &Etcd, delay: Duration) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let way = format!("http://{}", listener.local_addr().unwrap());
    let to = etcd.endpoint().trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = tokio::net::TcpStream::connect(&to).await.unwrap();
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::spawn(delayed(near_in, far_out, delay));
            tokio::spawn(delayed(far_in, near_out, delay));
        }
    });
    way
}

async fn delayed(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    delay: Duration,
) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (queue, mut held) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some((due, bytes)) = held.recv().await {
            let bytes: Vec<u8> = bytes;
            tokio::time::sleep_until(due).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    });
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let due = tokio::time::Instant::now() + delay;
        if queue.send((due, buffer[..count].to_vec())).is_err() {
            return;
        }
    }
}

/// Registering and taking the lead take several requests in sequence, which together last longer
/// than the lease.
#[tokio::test]
async fn an_etcd_that_answers_slowly_costs_nobody_the_lease() {
    let Some((_folder, etcd)) = etcd().await else { return };
    // A fresh start takes three requests within one lease; registering and taking the lead take
    // five more.
    let way = slow_way_to(&etcd, Duration::from_millis(500)).await;
    let ttl = Duration::from_secs(4);
    let slow = EtcdOptions { endpoints: vec![way], lease_ttl: ttl, ..options(&etcd) };
    let leader = EtcdMembership::start(slow, coordinator("slow", 7), true).unwrap();
    let watcher = join(&etcd, record("watcher", 1));
    let mut view = watcher.view();
    let leads = |v: &View| v.leader.as_ref().is_some_and(|it| it.record.node == "slow");
    let led = tokio::time::timeout(3 * PATIENCE, view.wait_for(leads)).await;
    let epoch = led.expect("it leads").unwrap().leader.as_ref().unwrap().epoch;
    // For several lease times.
    let end = tokio::time::Instant::now() + 3 * ttl;
    while tokio::time::Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let leader = view.borrow().leader.clone();
        assert_eq!(leader.map(|it| it.epoch), Some(epoch), "it has lost its lease");
    }
    drop(leader);
}
