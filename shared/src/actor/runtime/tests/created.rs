//! Actors created by class, over real loopback links.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::super::*;
use super::{PATIENCE, hub, pair, spoke, until};
use crate::actor::{ActorClass, ActorContext, ActorSpec, CreateError, CreateOptions, NamedActor};
use crate::clock::SystemClock;
use crate::protocol::NodeResources;
use crate::protocol::actors::creation::{Needs, PlacementError, Where};

/// Where a handler stays until its test lets it go on, so that none of them has to be quick.
struct Gate {
    is_reached: AtomicBool,
    is_open: AtomicBool,
}

/// Messages name them by their indices; each is of one test.
static GATES: [Gate; 4] = [const { Gate::closed() }; 4];

impl Gate {
    const fn closed() -> Self {
        Self { is_reached: AtomicBool::new(false), is_open: AtomicBool::new(false) }
    }

    /// Waits until a handler is there.
    async fn reached(&self) {
        until("a handler is at its gate", || self.is_reached.load(Ordering::Relaxed)).await;
    }

    fn open(&self) {
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// Blocks this thread, for longer than tests wait for anything that it may hold up.
    fn block(&self) -> Result<(), String> {
        self.is_reached.store(true, Ordering::Relaxed);
        let began = Instant::now();
        while !self.is_open.load(Ordering::Relaxed) {
            if began.elapsed() > 2 * PATIENCE {
                return Err("nobody opens its gate".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    async fn wait(&self) {
        self.is_reached.store(true, Ordering::Relaxed);
        until("its gate is open", || self.is_open.load(Ordering::Relaxed)).await;
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
enum Do {
    Add(u64),
    Fail,
    /// Fails for a reason that fits no frame.
    FailAtLength,
    Panic,
    /// Blocks its thread at this gate, as a computation does.
    Block(usize),
    /// Waits at this gate, as a handler that asks others does.
    WaitAt(usize),
    /// Waits for good.
    Wait,
    WhereAreYou,
}

impl ActorMessage for Do {
    type Reply = (u64, String);
}

struct Counter {
    total: u64,
    node: String,
}

impl NamedActor for Counter {
    type Message = Do;

    async fn handle(&mut self, message: Do) -> Result<(u64, String), String> {
        match message {
            Do::Add(n) => self.total += n,
            Do::Fail => return Err("out of luck".to_owned()),
            Do::FailAtLength => return Err("x".repeat(2 << 20)),
            Do::Panic => panic!("on purpose"),
            Do::Block(gate) => GATES[gate].block()?,
            Do::WaitAt(gate) => GATES[gate].wait().await,
            Do::Wait => tokio::time::sleep(Duration::from_secs(3600)).await,
            Do::WhereAreYou => {}
        }
        Ok((self.total, self.node.clone()))
    }
}

impl ActorClass for Counter {
    const CLASS: &'static str = "counter";
    type Argument = Option<u64>;

    fn create(from: Option<u64>, context: ActorContext) -> Result<Self, String> {
        let total = from.ok_or("there is nothing to count from")?;
        Ok(Self { total, node: context.node })
    }
}

fn hosts(actors: &ActorRuntime, cpus: u32) {
    actors.offer(NodeResources { cpus, ..NodeResources::default() }).unwrap();
    actors.host::<Counter>().unwrap();
}

fn one_cpu(name: &str) -> CreateOptions {
    let needs = Needs::nothing().cpus(1.0);
    CreateOptions { needs, within: PATIENCE, ..CreateOptions::named(name) }
}

const SOON: Duration = Duration::from_millis(300);

#[tokio::test]
async fn an_actor_is_created_in_another_process_and_counts_there() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 1);
    let (_a_link, _b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    let addr = b.create::<Counter>(&Some(40), one_cpu("counter")).await.unwrap();
    assert_eq!(addr.ask(&Do::Add(2), PATIENCE).await, Ok((42, "a".to_owned())));
    // Others find it by name: the process that hosts it, the hub, a third one.
    for from in [&a, &b, &hub] {
        let found = from.find::<Do>("counter", PATIENCE).await.unwrap();
        assert_eq!(found.ask(&Do::Add(0), PATIENCE).await.unwrap().0, 42);
    }
    let listed = hub.list();
    assert_eq!((listed[0].node.as_str(), listed[0].report.life), ("a", ActorLife::Alive));
    assert_eq!(hub.created()[0].needs, "1 cpus");
    let host = &hub.class_hosts()[0];
    assert_eq!((host.actors, host.used.as_str(), host.free.as_str()), (1, "1 cpus", "nothing"));
    // No room, no class, no such argument, a name that is taken.
    let refused = async |class: &str, argument: Option<u64>, options| {
        let created = b.create_named::<Do>(class, &argument, options).await;
        match created.unwrap_err() {
            CreateError::Refused(error) => error,
            error => panic!("{error}"),
        }
    };
    let soon = |name: &str| CreateOptions { within: SOON, ..one_cpu(name) };
    let error = refused("counter", Some(0), soon("second")).await;
    let (asked, free) = ("1 cpus".to_owned(), "nothing on a".to_owned());
    assert_eq!(error, PlacementError::NoRoom { asked, free });
    let error = refused("nobody's", Some(0), soon("third")).await;
    assert_eq!(error, PlacementError::NoHost("nobody's".to_owned()));
    let error = refused("counter", Some(0), soon("counter")).await;
    assert_eq!(error, PlacementError::NameTaken("a".to_owned()));
    let free = CreateOptions::named("fourth");
    let error = refused("counter", None, free).await;
    let reason = "there is nothing to count from".to_owned();
    assert_eq!(error, PlacementError::NotStarted(reason));
    // The hub creates, too, and one that is there will do.
    let again = CreateOptions { or_get: true, ..one_cpu("counter") };
    let same = hub.create::<Counter>(&Some(0), again).await.unwrap();
    assert_eq!(same.ask(&Do::Add(0), PATIENCE).await.unwrap().0, 42);
}

#[tokio::test]
async fn one_without_a_name_gets_one_whatever_its_class_is_called() {
    let hub = hub();
    for class in ["shop/cart", "log:", &"\u{e4}".repeat(64)] {
        let options = CreateOptions { within: SOON, ..CreateOptions::default() };
        let created = hub.create_named::<Do>(class, &Some(0_u64), options).await;
        // It was looked for a place, as for any other.
        let nowhere = CreateError::Refused(PlacementError::NoHost(class.to_owned()));
        assert_eq!(created.err(), Some(nowhere), "{class}");
    }
}

#[tokio::test]
async fn one_whose_process_is_gone_comes_back_in_another_and_its_callers_go_on() {
    let (hub, a, b, c) = (hub(), spoke("a", 2), spoke("b", 3), spoke("c", 4));
    hosts(&a, 1);
    hosts(&b, 1);
    let a_link = pair(&hub, &a, "a").await;
    let _c_link = pair(&hub, &c, "c").await;
    let options = CreateOptions { max_restarts: Some(1), ..one_cpu("counter") };
    let addr = c.create::<Counter>(&Some(1), options).await.unwrap();
    let mut watch = c.watch("counter");
    assert_eq!(addr.ask(&Do::WhereAreYou, PATIENCE).await, Ok((1, "a".to_owned())));
    let b_link = pair(&hub, &b, "b").await;
    a_link.cut();
    let found = addr.ask_again(&Do::WhereAreYou, PATIENCE, 1).await;
    assert_eq!(found, Ok((1, "b".to_owned())), "made anew elsewhere");
    assert!(tokio::time::timeout(SOON, &mut watch).await.is_err(), "it is not dead");
    // The first process was only unreachable: what it still runs is ended.
    assert_eq!(a.state().hosted.len(), 1);
    let _a_link = pair(&hub, &a, "a").await;
    until("the first start ends", || a.state().hosted.is_empty()).await;
    assert_eq!(addr.ask(&Do::WhereAreYou, PATIENCE).await, Ok((1, "b".to_owned())));
    // One restart was allowed.
    b_link.cut();
    let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
    assert!(reason.contains("the link to b is gone"), "{reason}");
    let error = addr.ask(&Do::Add(1), PATIENCE).await.unwrap_err();
    assert_eq!(error, AskError::NoSuchActor("counter".to_owned()));
}

#[tokio::test]
async fn one_that_fails_is_made_anew_and_one_that_is_killed_is_dead() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 4);
    let (_a_link, _b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    let options = CreateOptions { max_restarts: Some(3), ..one_cpu("counter") };
    let addr = b.create::<Counter>(&Some(5), options).await.unwrap();
    for (message, reason) in [(Do::Fail, "out of luck"), (Do::Panic, "on purpose")] {
        assert_eq!(addr.ask_again(&Do::Add(1), PATIENCE, 0).await.unwrap().0, 6);
        let error = addr.ask(&message, PATIENCE).await.unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    assert_eq!(addr.ask_again(&Do::Add(1), PATIENCE, 0).await.unwrap().0, 6);
    assert_eq!(hub.list()[0].restarts, 2);
    // Killed, it comes back only if that is wanted.
    b.kill("counter", true, PATIENCE).await.unwrap();
    assert_eq!(addr.ask_again(&Do::Add(2), PATIENCE, 0).await.unwrap().0, 7);
    let watch = b.watch("counter");
    hub.kill("counter", false, PATIENCE).await.unwrap();
    let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
    assert_eq!(reason, "it was killed");
    until("it is gone", || a.state().hosted.is_empty()).await;
    until("its core is free", || hub.class_hosts()[0].free == "4 cpus").await;
    let error = b.kill("counter", false, PATIENCE).await.unwrap_err();
    let nobody = PlacementError::NoSuchActor("counter".to_owned());
    assert_eq!(error, CreateError::Refused(nobody));
    // One that a program spawned can be killed as well, even while it waits; none of the cluster.
    let made = Arc::new(AtomicU32::new(0));
    let count = made.clone();
    let make = move || {
        count.fetch_add(1, Ordering::Relaxed);
        Counter { total: 0, node: String::new() }
    };
    a.spawn(ActorSpec::new("own", "counter"), make).unwrap();
    until("it is known", || hub.list().iter().any(|known| known.report.name == "own")).await;
    let (addr, watch) = (b.addr::<Do>("own"), b.watch("own"));
    let waiting = tokio::spawn(async move { addr.ask(&Do::Wait, PATIENCE).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    b.kill("own", true, PATIENCE).await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(AskError::Failed(_))));
    assert_eq!(tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap(), "it was killed");
    assert_eq!(made.load(Ordering::Relaxed), 1);
    for own in ["worker/a", "log:a"] {
        let error = b.kill(own, false, PATIENCE).await.unwrap_err();
        assert_eq!(error, CreateError::Refused(PlacementError::NotYours(own.to_owned())));
    }
}

#[tokio::test]
async fn a_reason_of_any_length_is_shortened_and_the_death_is_known() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 4);
    let (_a_link, _b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    let options = CreateOptions { max_restarts: Some(0), ..one_cpu("counter") };
    let addr = b.create::<Counter>(&Some(0), options).await.unwrap();
    let watch = b.watch("counter");
    let asked = tokio::time::timeout(PATIENCE, addr.ask(&Do::FailAtLength, 2 * PATIENCE)).await;
    let error = asked.expect("long before its deadline").unwrap_err();
    assert!(matches!(&error, AskError::Failed(reason) if reason.len() == REASON_MAX), "{error}");
    let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
    assert_eq!(reason.len(), REASON_MAX);
    until("it is gone", || a.state().hosted.is_empty() && hub.created().is_empty()).await;
}

#[tokio::test]
async fn a_handler_that_hangs_is_given_up_and_holds_up_nobody() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 4);
    let (mut a_link, _b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    let limit = Duration::from_millis(500);
    let hangs =
        CreateOptions { max_restarts: Some(5), message_limit: Some(limit), ..one_cpu("hangs") };
    let hangs = b.create::<Counter>(&Some(0), hangs).await.unwrap();
    let other = b.create::<Counter>(&Some(0), one_cpu("other")).await.unwrap();
    let threads = || a.state().controller.as_ref().unwrap().threads().load(Ordering::Relaxed);
    for message in [Do::Wait, Do::Block(0)] {
        assert_eq!(hangs.ask_again(&Do::Add(1), PATIENCE, 0).await.unwrap().0, 1);
        // Neither handler has returned by then.
        let error = hangs.ask(&message, PATIENCE).await.unwrap_err();
        assert_eq!(error, AskError::Failed("a message took over 500 ms".to_owned()));
        let reply = other.ask(&Do::Add(1), PATIENCE).await;
        assert!(reply.is_ok(), "{reply:?}");
    }
    assert_eq!(hangs.ask_again(&Do::Add(1), PATIENCE, 0).await.unwrap().0, 1);
    until("only the one that blocks is left behind in its handler", || threads() == 3).await;
    GATES[0].open();
    until("its handler returns", || threads() == 2).await;
    a_link.is_whole();
    // So is one that is spawned, if its handler waits.
    let spec = ActorSpec { message_limit: Some(limit), ..ActorSpec::new("own", "counter") };
    a.spawn(spec, || Counter { total: 0, node: String::new() }).unwrap();
    let error = a.addr::<Do>("own").ask(&Do::Wait, PATIENCE).await.unwrap_err();
    assert_eq!(error, AskError::Failed("a message took over 500 ms".to_owned()));
}

/// Time passes five times as fast: a hub that has taken over waits for 15 s.
#[derive(Debug)]
struct Hasty(SystemClock);

impl Clock for Hasty {
    fn now(&self) -> Duration {
        self.0.now() * 5
    }
}

#[tokio::test]
async fn the_next_hub_finds_what_runs_and_a_request_on_its_way_is_not_done_twice() {
    let (first, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 1);
    let (a_link, b_link) = (pair(&first, &a, "a").await, pair(&first, &b, "b").await);
    let options = CreateOptions { max_restarts: None, ..one_cpu("counter") };
    let addr = b.create::<Counter>(&Some(0), options).await.unwrap();
    addr.ask(&Do::Add(3), PATIENCE).await.unwrap();
    // Another one waits for room when the first hub is gone.
    let waits = {
        let b = b.clone();
        tokio::spawn(async move { b.create::<Counter>(&Some(100), one_cpu("waits")).await })
    };
    until("it is pending", || first.list().len() == 2).await;
    b_link.cut();
    a_link.cut();
    until("the links are gone", || a.state().peers.is_empty() && b.state().peers.is_empty()).await;
    let second = ActorRuntime::hub("hub", 5 << 40, Arc::new(Hasty(SystemClock::start())));
    second.settle();
    let _b_link = pair(&second, &b, "b").await;
    let early = addr.ask(&Do::Add(0), PATIENCE).await.unwrap_err();
    assert_eq!(early, AskError::Unavailable("counter".to_owned()), "it is not known yet");
    let _a_link = pair(&second, &a, "a").await;
    assert_eq!(addr.ask_again(&Do::Add(0), PATIENCE, 0).await.unwrap().0, 3, "it kept its state");
    b.kill("counter", false, PATIENCE).await.unwrap();
    let waited = tokio::time::timeout(PATIENCE, waits).await.unwrap().unwrap().unwrap();
    assert_eq!(waited.ask(&Do::Add(0), PATIENCE).await.unwrap().0, 100);
    assert_eq!(a.state().hosted.len(), 1);
}

#[tokio::test]
async fn a_drained_node_s_actor_finishes_and_moves() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 1);
    let (_a_link, _b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    let at = CreateOptions { at: Where::rather("a"), ..one_cpu("counter") };
    let addr = b.create::<Counter>(&Some(0), at).await.unwrap();
    hosts(&b, 1);
    let busy = {
        let addr = addr.clone();
        tokio::spawn(async move { addr.ask(&Do::Block(1), PATIENCE).await })
    };
    GATES[1].reached().await;
    let of_a = hub.state().peers.iter().find(|(_, peer)| peer.node == "a").map(|(id, _)| *id);
    hub.drains(of_a.unwrap(), true);
    let drains = || a.state().hosted.values().all(|it| it.life == ActorLife::Draining);
    until("its process knows", drains).await;
    GATES[1].open();
    assert_eq!(busy.await.unwrap(), Ok((0, "a".to_owned())), "what it had is finished");
    let moved = addr.ask_again(&Do::WhereAreYou, PATIENCE, 0).await;
    assert_eq!(moved, Ok((0, "b".to_owned())));
    assert_eq!(hub.list()[0].restarts, 0);
}

#[tokio::test]
async fn a_process_that_leaves_finishes_what_it_has_and_its_actors_move() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    hosts(&a, 1);
    let (_a_link, _b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    let at = CreateOptions { at: Where::rather("a"), ..one_cpu("counter") };
    let created = b.create::<Counter>(&Some(0), at).await.unwrap();
    let only_here = CreateOptions {
        needs: Needs::nothing(),
        at: Where::node("a"),
        within: PATIENCE,
        ..CreateOptions::named("only-a")
    };
    b.create::<Counter>(&Some(0), only_here).await.unwrap();
    hosts(&b, 1);
    let own = ActorSpec::new("own", "counter");
    a.spawn(own, || Counter { total: 7, node: "a".to_owned() }).unwrap();
    a.spawn(ActorSpec::new("log:a", "log"), || Counter { total: 1, node: String::new() }).unwrap();
    until("it is known", || hub.list().iter().any(|known| known.report.name == "own")).await;
    let spawned = b.addr::<Do>("own");
    let busy = [created.clone(), spawned.clone()].map(|addr| {
        // A spawned one shares its thread with this test.
        let stays = if addr.name() == "own" { Do::WaitAt(2) } else { Do::Block(3) };
        tokio::spawn(async move { addr.ask(&stays, PATIENCE).await })
    });
    GATES[2].reached().await;
    GATES[3].reached().await;
    assert!(!a.finish(Duration::from_millis(100)).await, "it is still at work");
    let more =
        a.spawn(ActorSpec::new("more", "counter"), || Counter { total: 0, node: "a".to_owned() });
    assert_eq!(more.err(), Some(RegistryError::Leaving), "nobody would end it");
    let reported = |name: &str, life| {
        hub.list().iter().any(|it| it.report.name == name && it.report.life == life)
    };
    until("the hub knows that it finishes", || reported("counter", ActorLife::Draining)).await;
    let late = b.create::<Counter>(&Some(0), one_cpu("late")).await;
    assert!(late.is_ok(), "there is room on b until the other one moves");
    b.kill("late", false, PATIENCE).await.unwrap();
    GATES[2].open();
    GATES[3].open();
    assert!(a.finish(PATIENCE).await);
    for (asked, total) in busy.into_iter().zip([0, 7]) {
        // The link is still there, and so is the reply.
        assert_eq!(asked.await.unwrap(), Ok((total, "a".to_owned())));
    }
    let moved = created.ask_again(&Do::WhereAreYou, PATIENCE, 0).await;
    assert_eq!(moved, Ok((0, "b".to_owned())));
    // It answers on b as soon as it runs there, which may be before the hub hears that it does.
    until("the hub knows that it runs on b", || reported("counter", ActorLife::Alive)).await;
    until("the hub knows that the other ended", || reported("own", ActorLife::Dead)).await;
    let known = hub.list();
    let life = |name: &str| {
        let report = &known.iter().find(|it| it.report.name == name).unwrap().report;
        (report.life, report.restarts)
    };
    assert_eq!(life("counter"), (ActorLife::Alive, 0), "that is no restart");
    assert_eq!(life("only-a"), (ActorLife::Restarting, 0), "its node may be back");
    assert!(matches!(spawned.ask(&Do::Add(1), PATIENCE).await, Err(AskError::NoSuchActor(_))));
    let log = b.addr::<Do>("log:a").ask(&Do::Add(1), PATIENCE).await;
    assert_eq!(log.unwrap().0, 2, "the cluster's own goes on to the end");
    assert!(a.state().hosted.is_empty());
}
