//! The runtimes of a hub and its spokes, over real loopback links.
//!
//! - `created`: actors created by class
mod created;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::actor::link::{Connection, LinkEvent, LinkHandle};
use crate::actor::liveness::LivenessConfig;
use crate::actor::{ActorMessage, ActorSpec, NamedActor};
use crate::clock::SystemClock;

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// More than a link's queue holds.
const MANY: usize = 1000;

/// Reasons of the links that ended.
type Ends = UnboundedReceiver<String>;

/// Both ends of a link between two runtimes.
struct Pair {
    hub: LinkHandle,
    spoke: LinkHandle,
    ends: Ends,
}

impl Pair {
    fn is_whole(&mut self) {
        if let Ok(end) = self.ends.try_recv() {
            panic!("a link ended: {end}");
        }
    }

    fn cut(self) {
        self.hub.close();
        self.spoke.close();
    }
}

fn start(
    actors: &ActorRuntime,
    node: &str,
    stream: TcpStream,
    ends: &mpsc::UnboundedSender<String>,
) -> LinkHandle {
    let peer = actors.reserve_peer();
    let (runtime, ends) = (actors.clone(), ends.clone());
    let sink = move |event| match event {
        LinkEvent::Frame(frame) => runtime.frame(peer, &frame.body),
        LinkEvent::Closed { reason } => {
            let _ = ends.send(reason.to_string());
            runtime.peer_lost(peer, &reason.to_string());
            true
        }
        _ => true,
    };
    let (config, clock) = (LivenessConfig::default(), Arc::new(SystemClock::start()));
    let link = Connection::new(stream).unwrap().start(config, clock, sink);
    actors.peer_up_as(peer, node, link.clone());
    link
}

async fn pair(hub: &ActorRuntime, spoke: &ActorRuntime, node: &str) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (dialled, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (ended, ends) = unbounded_channel();
    let hub = start(hub, node, accepted.unwrap().0, &ended);
    let spoke = start(spoke, "the hub", dialled.unwrap(), &ended);
    Pair { hub, spoke, ends }
}

fn hub() -> ActorRuntime {
    ActorRuntime::hub("hub", 1 << 40, Arc::new(SystemClock::start()))
}

fn spoke(node: &str, run: u64) -> ActorRuntime {
    ActorRuntime::spoke(node, run << 40, Arc::new(SystemClock::start()))
}

#[derive(Serialize, Deserialize)]
enum Say {
    Hello,
    Nothing,
}

impl ActorMessage for Say {
    type Reply = ();
}

/// An actor that answers only some messages.
struct Quiet;

impl NamedActor for Quiet {
    type Message = Say;

    async fn handle(&mut self, message: Say) -> Result<(), String> {
        match message {
            Say::Hello => Ok(()),
            Say::Nothing => std::future::pending().await,
        }
    }
}

fn name(number: usize) -> String {
    format!("quiet-{number}")
}

fn spawn_many(actors: &ActorRuntime) {
    for number in 0..MANY {
        actors.spawn(ActorSpec::new(&name(number), "quiet"), || Quiet).unwrap();
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// Asks each of the many actors once, a few at a time, so that the messages do not fill the link.
async fn ask_many(
    from: &ActorRuntime,
    deadline: Duration,
) -> Vec<tokio::task::JoinHandle<Result<(), AskError>>> {
    let mut asks = Vec::new();
    for number in 0..MANY {
        let addr = from.addr::<Say>(&name(number));
        asks.push(tokio::spawn(async move { addr.ask(&Say::Nothing, deadline).await }));
        if number % 50 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    asks
}

#[tokio::test]
async fn a_thousand_actors_and_watches_are_told_of_at_once() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    spawn_many(&a);
    let mut a_link = pair(&hub, &a, "a").await;
    until("all are known", || hub.list().len() == MANY).await;
    // Watches that exist before the link, as after a change of hub.
    let watches: Vec<DeathWatch> = (0..MANY).map(|number| b.watch(&name(number))).collect();
    let mut b_link = pair(&hub, &b, "b").await;
    until("all are watched", || hub.state().registry.watches() == MANY).await;
    a_link.is_whole();
    // All die at once.
    a_link.cut();
    let told = futures_util::future::join_all(watches);
    let told = tokio::time::timeout(PATIENCE, told).await.expect("all watchers are told");
    let gone = |reason: &String| reason.contains("the link to a is gone");
    assert!(told.iter().all(|told| told.as_ref().is_ok_and(gone)), "{:?}", told[0]);
    b_link.is_whole();
}

#[tokio::test]
async fn a_thousand_asks_that_fail_at_once_are_all_told() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    spawn_many(&a);
    let (a_link, mut b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    until("all are known", || hub.list().len() == MANY).await;
    let asks = ask_many(&b, PATIENCE).await;
    until("all are on their way", || hub.state().exchange.outstanding() == MANY).await;
    a_link.cut();
    for ask in asks {
        let error = ask.await.unwrap().unwrap_err();
        assert!(matches!(&error, AskError::LinkLost(node) if node == "a"), "{error}");
    }
    b_link.is_whole();
}

#[tokio::test]
async fn a_thousand_deadlines_at_once_end_no_link() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    spawn_many(&a);
    let (mut a_link, mut b_link) = (pair(&hub, &a, "a").await, pair(&hub, &b, "b").await);
    until("all are known", || hub.list().len() == MANY).await;
    let asks = ask_many(&b, Duration::from_secs(3)).await;
    for ask in asks {
        let error = ask.await.unwrap().unwrap_err();
        assert!(matches!(error, AskError::Deadline(_)), "{error}");
    }
    until("nothing is under way", || hub.state().exchange.outstanding() == 0).await;
    let addr = b.addr::<Say>("nobody");
    let error = addr.ask(&Say::Hello, PATIENCE).await.unwrap_err();
    assert_eq!(error, AskError::NoSuchActor("nobody".to_owned()));
    a_link.is_whole();
    b_link.is_whole();
}

#[tokio::test]
async fn who_asks_again_waits_for_an_actor_whose_process_links_later() {
    let (hub, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    a.spawn(ActorSpec::new("late", "quiet"), || Quiet).unwrap();
    // As after a restart of the coordinator: the asker's link is back first.
    let _b_link = pair(&hub, &b, "b").await;
    let addr = b.addr::<Say>("late");
    let unknown = AskError::NoSuchActor("late".to_owned());
    assert_eq!(addr.ask(&Say::Hello, PATIENCE).await, Err(unknown));
    let asked = tokio::spawn(async move { addr.ask_again(&Say::Hello, PATIENCE, 0).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!asked.is_finished(), "it may still turn up");
    let _a_link = pair(&hub, &a, "a").await;
    assert_eq!(asked.await.unwrap(), Ok(()));
    // Who is nobody's is asked until the deadline.
    let nobody = b.addr::<Say>("nobody");
    let asked = nobody.ask_again(&Say::Hello, Duration::from_millis(200), 0);
    assert!(asked.await.is_err());
}

#[tokio::test]
async fn an_actor_whose_task_is_dropped_is_dead() {
    let hub = hub();
    let (runtime, spawned) = (hub.clone(), oneshot::channel());
    let (go, gone) = std::sync::mpsc::channel::<()>();
    // The program's tokio runtime ends before the process does.
    let program = std::thread::spawn(move || {
        let tokio = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio.block_on(async {
            runtime.spawn(ActorSpec::new("short", "quiet"), || Quiet).unwrap();
            let _ = spawned.0.send(());
        });
        let _ = gone.recv();
    });
    spawned.1.await.unwrap();
    let watch = hub.watch("short");
    drop(go);
    let reason = tokio::time::timeout(PATIENCE, watch).await.expect("its watcher is told").unwrap();
    assert!(reason.contains("its task was dropped"), "{reason}");
    program.join().unwrap();
    // The name is free again.
    hub.spawn(ActorSpec::new("short", "quiet"), || Quiet).unwrap();
    assert_eq!(hub.addr::<Say>("short").ask(&Say::Hello, PATIENCE).await, Ok(()));
}

#[tokio::test]
async fn deadlines_are_kept_by_one_thread() {
    let hub = hub();
    hub.spawn(ActorSpec::new("quiet", "quiet"), || Quiet).unwrap();
    let mut threads = Vec::new();
    for _ in 0..5 {
        // The actor has not answered the previous message, so it gets no other one.
        let addr = hub.addr::<Say>("quiet");
        let error = addr.ask(&Say::Nothing, Duration::from_millis(10)).await.unwrap_err();
        assert!(matches!(error, AskError::Deadline(10)), "{error}");
        until("nothing is looked at", || !hub.state().ticks).await;
        threads.push(hub.state().ticker.as_ref().unwrap().id());
    }
    assert!(threads.iter().all(|id| *id == threads[0]), "{threads:?}");
}

#[tokio::test]
async fn a_watch_outlives_a_change_of_the_hub() {
    let (first, a, b) = (hub(), spoke("a", 2), spoke("b", 3));
    for name in ["stays", "goes"] {
        a.spawn(ActorSpec::new(name, "quiet"), || Quiet).unwrap();
    }
    let links = [pair(&first, &a, "a").await, pair(&first, &b, "b").await];
    until("both are known", || first.list().len() == 2).await;
    let (mut stays, goes) = (b.watch("stays"), b.watch("goes"));
    until("both are watched", || {
        b.state().watches.values().all(|watch| watch.generation.is_some())
    })
    .await;
    links.into_iter().for_each(Pair::cut);
    until("the links are gone", || a.state().peers.is_empty() && b.state().peers.is_empty()).await;
    // One actor ends while there is no leader. The watcher reconnects first, to a hub that knows
    // nobody yet.
    a.stop("goes");
    let second = hub();
    second.settle();
    let mut of_b = pair(&second, &b, "b").await;
    until("the watches are there", || second.state().registry.watches() == 2).await;
    let unknown = b.watch("not here yet");
    until("it is there, too", || second.state().registry.watches() == 3).await;
    let moment = Duration::from_millis(300);
    assert!(tokio::time::timeout(moment, &mut stays).await.is_err(), "nobody said that it is dead");
    let of_a = pair(&second, &a, "a").await;
    // All that the new hub learns about the ended actor is its death.
    let goes = tokio::time::timeout(PATIENCE, goes).await.expect("it is dead").unwrap();
    assert!(!goes.is_empty());
    a.spawn(ActorSpec::new("not here yet", "quiet"), || Quiet).unwrap();
    until("it is found", || {
        let state = b.state();
        let found = state.watches.values().all(|watch| watch.generation.is_some());
        found && state.watches.len() == 2
    })
    .await;
    assert!(tokio::time::timeout(moment, &mut stays).await.is_err());
    assert!(!second.state().registry.awaits());
    of_b.is_whole();
    of_a.cut();
    for watch in [stays, unknown] {
        let reason = tokio::time::timeout(PATIENCE, watch).await.expect("told").unwrap();
        assert!(reason.contains("the link to a is gone"), "{reason}");
    }
}
