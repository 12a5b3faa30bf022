//! Actors that are created by class, in real processes that are killed: they come back elsewhere,
//! and those who ask them go on.
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use shared::actor::{ActorMessage, ActorRuntime, CreateError, CreateOptions, RemoteAddr};
use shared::membership::CoordinatorAddress;
use shared::protocol::actors::AskError;
use shared::protocol::actors::creation::{Needs, PlacementError, Where};
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::actors::{PATIENCE, Program, REPLY, actor, member, status_until};
use crate::etcd::Meeting;
use crate::scaling::operate;

/// A process that hosts the class `word-count`: `tests/embedding`. Killed on drop.
struct Host(Child);

impl Host {
    fn start(args: &[&str]) -> Self {
        let mut program = Command::new(env!("CARGO_BIN_EXE_embedding"));
        let program = program.args(args).stdin(Stdio::null()).stdout(Stdio::null());
        Self(program.spawn().unwrap())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a `word-count` takes.
#[derive(Serialize, Deserialize)]
struct Text(String);

impl ActorMessage for Text {
    type Reply = (u64, String);
}

fn text(words: &str) -> Text {
    Text(words.to_owned())
}

async fn counts(
    actors: &ActorRuntime,
    options: CreateOptions,
) -> Result<RemoteAddr<Text>, CreateError> {
    actors.create_named("word-count", &0_u64, options).await
}

fn options() -> CreateOptions {
    CreateOptions {
        needs: Needs::nothing().cpus(1.0),
        at: Where::rather("host-a"),
        max_restarts: Some(3),
        within: 2 * PATIENCE,
        ..CreateOptions::named("words")
    }
}

/// Has the actor created once both hosts are there, so that either can be killed.
async fn created_on_the_first_of_two(client: &Client, asker: &Program) -> RemoteAddr<Text> {
    let both = |s: &serde_json::Value| s["hosts"].as_array().is_some_and(|all| all.len() == 2);
    let status = status_until(client, both).await;
    assert!(both(&status), "{status}");
    let words = counts(&asker.actors, options()).await.unwrap();
    let counted = words.ask(&text("one two three"), REPLY).await;
    assert_eq!(counted, Ok((3, "host-a".to_owned())));
    words
}

/// Asks all the time, and counts the replies; every ask must get one.
struct Caller {
    replies: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl Caller {
    fn start(addr: &RemoteAddr<Text>) -> Self {
        let (replies, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopped, addr) = (replies.clone(), stop.clone(), addr.clone());
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                addr.ask_again(&text(""), 3 * PATIENCE, 10).await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Self { replies, stop, task }
    }

    async fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
        self.replies.load(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_whose_process_is_killed_comes_back_in_another() {
    let address = format!("127.0.0.1:{}", free_port());
    let listen = ["--listen", "127.0.0.1:0", "--cluster-listen", &address];
    let args = ["coordinator", "--tensor-parallel", "1", "--replicas", "1"];
    let mut coordinator = LocalCluster::spawn(&[&args[..], &listen].concat()).unwrap();
    coordinator.wait_url().await.unwrap();
    let host = |node| Host::start(&["--coordinator", &address, "--node", node, "--cpus", "2"]);
    let (a, _b) = (host("host-a"), host("host-b"));
    let asker = Program::start(address.as_str(), "asker", 9 << 40);
    let client = coordinator.client().unwrap();
    let words = created_on_the_first_of_two(&client, &asker).await;
    let (ok, table) = operate(coordinator.base(), &["actors"]);
    let is_its_row = |row: &str| row.contains(" word-count ") && row.contains(" 0  1 cpus");
    assert!(ok && table.lines().any(is_its_row), "{table}");

    // There is room for three more, and not for a fourth, which gets its place later.
    let more = |n: u32| CreateOptions { name: Some(format!("more-{n}")), ..options() };
    for n in 0..3 {
        counts(&asker.actors, more(n)).await.unwrap();
    }
    let soon = CreateOptions { within: Duration::from_millis(300), ..more(3) };
    let error = counts(&asker.actors, soon).await.unwrap_err();
    let CreateError::Refused(PlacementError::NoRoom { asked, free }) = error else {
        panic!("{error}")
    };
    let says = |node: &str| free.contains(&format!("nothing on {node}"));
    assert!(asked == "1 cpus" && says("host-a") && says("host-b"), "{asked}; {free}");
    let (actors, wanted) = (asker.actors.clone(), more(3));
    let late = tokio::spawn(async move { counts(&actors, wanted).await.map(drop) });
    let pending = |s: &serde_json::Value| actor(s, "more-3")["state"] == "pending";
    let status = status_until(&client, pending).await;
    assert!(pending(&status), "{status}");
    let (ok, said) = operate(coordinator.base(), &["actors", "kill", "more-2"]);
    assert!(ok, "{said}");
    late.await.unwrap().unwrap();
    for name in ["more-0", "more-1", "more-3"] {
        asker.actors.kill(name, false, REPLY).await.unwrap();
    }

    let (caller, began) = (Caller::start(&words), Instant::now());
    let watch = asker.actors.watch("words");
    LocalCluster::signal(a.0.id(), "KILL").unwrap();
    let again = words.ask_again(&text("four"), 2 * PATIENCE, 10).await;
    assert_eq!(again, Ok((1, "host-b".to_owned())), "after {:?}", began.elapsed());
    let back = |s: &serde_json::Value| actor(s, "words")["state"] == "alive";
    let status = status_until(&client, back).await;
    assert_eq!(actor(&status, "words")["restarts"], json!(1), "{status}");
    assert!(caller.end().await > 0);

    // Operators may end it, for now or for good.
    let (ok, said) = operate(coordinator.base(), &["actors", "kill", "words", "--restart"]);
    assert!(ok, "{said}");
    let again = words.ask_again(&text("five six"), PATIENCE, 10).await;
    assert_eq!(again, Ok((2, "host-b".to_owned())));
    let (ok, said) = operate(coordinator.base(), &["actors", "kill", "words"]);
    assert!(ok, "{said}");
    let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
    assert_eq!(reason, "it was killed");
    let error = words.ask(&text("seven"), REPLY).await.unwrap_err();
    assert_eq!(error, AskError::NoSuchActor("words".to_owned()));
    let (ok, said) = operate(coordinator.base(), &["actors", "kill", "words"]);
    assert!(!ok && said.contains("there is no actor `words`"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_coordinator_takes_over_what_the_last_one_created() {
    let Some(meeting) = Meeting::new().await else { return };
    let mut first = meeting.coordinator_of("1", &["--leader-lease", "2"]).await;
    let second = meeting.coordinator_of("1", &["--leader-lease", "2"]).await;
    let endpoint = meeting.etcd.endpoint();
    let host = |node| Host::start(&["--etcd", &endpoint, "--node", node, "--cpus", "4"]);
    let (a, b) = (host("host-a"), host("host-b"));
    let membership = member(&meeting, "asker", 9 << 40);
    let follows = CoordinatorAddress::Followed(membership.view());
    let asker = Program::start(follows, "asker", 9 << 40);
    first.wait_ready().await.unwrap();
    let client = first.client().unwrap();
    let words = created_on_the_first_of_two(&client, &asker).await;
    // These are in a process that will die together with the coordinator.
    let lasting = async |name: &str, from: u64, max_restarts| {
        let at = Where::rather("host-b");
        let named = CreateOptions { name: Some(name.to_owned()), at, max_restarts, ..options() };
        asker.actors.create_named::<Text>("word-count", &from, named).await.unwrap()
    };
    let tale = lasting("tale", 40, Some(3)).await;
    let brief = lasting("brief", 0, Some(0)).await;
    lasting("ended", 0, None).await;
    asker.actors.kill("ended", false, REPLY).await.unwrap();
    for actor in [&tale, &brief] {
        let (_, node) = actor.ask(&text("one"), REPLY).await.unwrap();
        assert_eq!(node, "host-b");
    }
    let caller = Caller::start(&words);
    LocalCluster::signal(b.0.id(), "KILL").unwrap();
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    let client = second.client().unwrap();
    // A standby has no status.
    let known =
        |s: &serde_json::Value| s["actors"].is_array() && actor(s, "words")["state"] == "alive";
    let began = Instant::now();
    while !client.get("/admin/status").await.is_ok_and(|reply| known(&reply.body)) {
        assert!(began.elapsed() < 2 * PATIENCE, "the next coordinator does not know it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The same one, with what it had counted.
    let counted = words.ask_again(&text("four"), 2 * PATIENCE, 10).await;
    assert_eq!(counted, Ok((4, "host-a".to_owned())));
    // The one whose process is gone as well is waited for, then made anew with its argument.
    let status = client.get("/admin/status").await.unwrap().body;
    assert_eq!(actor(&status, "tale")["state"], "restarting", "{status}");
    let counted = tale.ask_again(&text("two three"), 3 * PATIENCE, 10).await;
    assert_eq!(counted, Ok((42, "host-a".to_owned())));
    let counted = tale.ask(&text("four"), REPLY).await;
    assert_eq!(counted, Ok((43, "host-a".to_owned())), "there is one of it");
    for gone in ["brief", "ended"] {
        let error = asker.actors.find::<Text>(gone, REPLY).await.unwrap_err();
        let gone = PlacementError::NoSuchActor(gone.to_owned());
        assert_eq!(error, CreateError::Refused(gone));
    }
    let status = status_until(&client, known).await;
    assert_eq!(actor(&status, "tale")["restarts"], json!(1), "{status}");
    let _b = host("host-b");
    LocalCluster::signal(a.0.id(), "KILL").unwrap();
    let counted = words.ask_again(&text("five"), 2 * PATIENCE, 10).await;
    assert_eq!(counted, Ok((1, "host-b".to_owned())), "made anew where there is a process");
    assert!(caller.end().await > 0, "every ask got a reply");
    let status = status_until(&client, known).await;
    assert_eq!(actor(&status, "words")["restarts"], json!(1), "{status}");
}
