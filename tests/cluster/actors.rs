//! Named actors across real processes: messages, full mailboxes, deadlines, failures, deaths.
//!
//! Programs that embed a worker run in threads of this test; the coordinator between them is a
//! separate process, and their messages travel over real links.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shared::actor::supervise::RestartPolicy;
use shared::actor::{ActorMessage, ActorRuntime, ActorSpec, NamedActor};
use shared::clock::SystemClock;
use shared::log::SharedLog;
use shared::membership::{CoordinatorAddress, EtcdMembership, EtcdOptions, Record, Role};
use shared::metrics::application::Metrics;
use shared::protocol::NodeResources;
use shared::protocol::actors::AskError;
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;
use tokio::sync::oneshot;
use worker::health::WorkerHealth;
use worker::run::WorkerOptions;

use crate::etcd::Meeting;
use crate::scaling::operate;
use crate::{STORY, greedy, up};

/// Time limit for a reply; generous enough for a busy machine.
pub(crate) const REPLY: Duration = Duration::from_secs(10);
/// Time limit that is generous enough for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A program that embeds a worker, on its own thread.
pub(crate) struct Program {
    pub(crate) actors: ActorRuntime,
    stop: Option<oneshot::Sender<String>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Program {
    pub(crate) fn start(coordinator: impl Into<CoordinatorAddress>, node: &str, run: u64) -> Self {
        let coordinator = coordinator.into();
        let actors = ActorRuntime::spoke(node, run, Arc::new(SystemClock::start()));
        let (stop, stopped) = oneshot::channel();
        let options = WorkerOptions {
            coordinator,
            node: node.to_owned(),
            host: node.to_owned(),
            device: worker::device::DeviceChoice::Cpu(worker::device::CpuDevice { threads: 1 }),
            collective_listen: None,
            incarnation: run,
            application: Metrics::new(),
            nvml: None,
            secret: None,
            log: SharedLog::default(),
            offer: NodeResources::default(),
            actors: actors.clone(),
            hub: Err("none".to_owned()),
            drain_timeout: Duration::from_secs(2),
            health: WorkerHealth::default(),
        };
        let thread = std::thread::spawn(move || {
            actix_web::rt::System::new().block_on(async move {
                let stop = async { stopped.await.unwrap_or_default() };
                let _ = worker::run::run(options, stop).await;
            });
        });
        Self { actors, stop: Some(stop), thread: Some(thread) }
    }

    fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send("the test is over".to_owned());
        }
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

#[derive(Serialize, Deserialize)]
enum Sum {
    Add(u64),
    Sleep(u64),
    Fail(String),
    Panic,
}

impl ActorMessage for Sum {
    type Reply = u64;
}

/// What a test is told of an adder, wherever it runs.
#[derive(Debug, Default)]
struct Seen {
    /// How often it was made.
    made: AtomicU32,
    /// Number of its handlers that began to sleep.
    sleeps: AtomicU32,
}

impl Seen {
    fn made(&self) -> u32 {
        self.made.load(Ordering::Relaxed)
    }

    /// Waits until as many handlers sleep or have slept.
    async fn sleeps(&self, handlers: u32) {
        let began = Instant::now();
        while self.sleeps.load(Ordering::Relaxed) < handlers {
            assert!(began.elapsed() < PATIENCE, "the message does not arrive");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Sums the numbers it receives.
#[derive(Default)]
struct Adder {
    total: u64,
    seen: Arc<Seen>,
}

impl NamedActor for Adder {
    type Message = Sum;

    async fn handle(&mut self, message: Sum) -> Result<u64, String> {
        match message {
            Sum::Add(n) => self.total += n,
            Sum::Sleep(ms) => {
                self.seen.sleeps.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(ms)).await;
            }
            Sum::Fail(reason) => return Err(reason),
            Sum::Panic => panic!("on purpose"),
        }
        Ok(self.total)
    }
}

fn adder(actors: &ActorRuntime, spec: ActorSpec) -> Arc<Seen> {
    let seen = Arc::new(Seen::default());
    let its = seen.clone();
    actors
        .spawn(spec, move || {
            its.made.fetch_add(1, Ordering::Relaxed);
            Adder { total: 0, seen: its.clone() }
        })
        .unwrap();
    seen
}

/// A program's entry in etcd, by which it follows the leader.
pub(crate) fn member(meeting: &Meeting, node: &str, run: u64) -> EtcdMembership {
    let options = EtcdOptions {
        endpoints: vec![meeting.etcd.endpoint()],
        cluster: "tutti".to_owned(),
        user: None,
        tls: None,
        lease_ttl: Duration::from_secs(10),
    };
    let record = Record {
        node: node.to_owned(),
        role: Role::Worker,
        incarnation: run,
        address: String::new(),
        http: String::new(),
        pid: std::process::id(),
        version: String::new(),
        protocol: 0,
        model: None,
        serves: None,
    };
    EtcdMembership::start(options, record, false).unwrap()
}

async fn two_programs(fleet: &Fleet) -> (Program, Program) {
    let (a, b) = (
        Program::start(fleet.address(), "program-a", 1 << 40),
        Program::start(fleet.address(), "program-b", 2 << 40),
    );
    (a, b)
}

/// Asks until the actor is known everywhere; returns its total.
async fn total(actors: &ActorRuntime, name: &str) -> u64 {
    let addr = actors.addr::<Sum>(name);
    let began = Instant::now();
    loop {
        match addr.ask(&Sum::Add(0), REPLY).await {
            Ok(total) => return total,
            Err(error) if began.elapsed() > PATIENCE => panic!("{error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

pub(crate) async fn status_until(client: &Client, wanted: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let status = client.get("/admin/status").await.unwrap().body;
        if wanted(&status) || began.elapsed() > PATIENCE {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) fn actor<'a>(status: &'a Value, name: &str) -> &'a Value {
    let all = status["actors"].as_array().unwrap();
    all.iter().find(|actor| actor["name"] == name).unwrap_or(&Value::Null)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_reach_an_actor_of_another_process_and_every_ask_ends() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let (a, b) = two_programs(&fleet).await;
    let spec = ActorSpec { mailbox: 4, ..ActorSpec::new("sum", "adder") };
    let seen = adder(&a.actors, spec);
    assert_eq!(total(&a.actors, "sum").await, 0, "in its own process");
    assert_eq!(total(&b.actors, "sum").await, 0, "in another");
    let addr = b.actors.addr::<Sum>("sum");
    for n in 1..=10 {
        assert_eq!(addr.ask(&Sum::Add(n), REPLY).await, Ok(n * (n + 1) / 2));
    }
    // Tells are delivered in order over one link each way, so the ask comes after them.
    for _ in 0..3 {
        addr.tell(&Sum::Add(100)).unwrap();
    }
    assert_eq!(addr.ask(&Sum::Add(0), REPLY).await, Ok(355));
    assert_eq!(addr.deliver(&Sum::Add(1), REPLY).await, Ok(()));
    // A name without an actor, a message of the wrong type, a deadline.
    let nobody = b.actors.addr::<Sum>("nobody");
    let error = nobody.ask(&Sum::Add(1), REPLY).await.unwrap_err();
    assert_eq!(error, AskError::NoSuchActor("nobody".to_owned()));
    let other = b.actors.addr::<Wrong>("sum");
    let error = other.ask(&Wrong("not a sum".to_owned()), REPLY).await.unwrap_err();
    assert!(matches!(error, AskError::Malformed(_)), "{error}");
    let began = Instant::now();
    let late = addr.ask(&Sum::Sleep(3000), Duration::from_millis(500)).await.unwrap_err();
    assert!(matches!(late, AskError::Deadline(500)), "{late}");
    assert!(began.elapsed() < Duration::from_millis(2500), "{:?}", began.elapsed());
    // It is still sleeping: its mailbox fills up, and each further sender gets an error at once.
    let mut full = 0;
    for _ in 0..20 {
        match addr.deliver(&Sum::Add(0), REPLY).await {
            Ok(()) => {}
            Err(AskError::MailboxFull(name)) if name == "sum" => full += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(full, 16, "4 fit");
    assert_eq!(seen.made(), 1, "none of this is a failure");
    // All of these are counted.
    let client = fleet.client().unwrap();
    let refused =
        |reason: &'static str| ("tutti_actor_messages_refused_total", [("reason", reason)]);
    let scrape = client
        .scrape_until(PATIENCE, |s| {
            let (name, labels) = refused("mailbox_full");
            s.sum(name, &labels) >= 16.0 && s.sum("tutti_actor_messages_total", &[]) >= 15.0
        })
        .await
        .unwrap();
    for reason in ["mailbox_full", "no_such_actor", "malformed", "deadline"] {
        let (name, labels) = refused(reason);
        assert!(scrape.sum(name, &labels) >= 1.0, "{reason}");
    }
    assert!(scrape.sum("tutti_actor_messages_total", &[]) >= 15.0);
    // A process that is drained first finishes what its actors have.
    total(&b.actors, "sum").await;
    let slow = tokio::spawn(async move { addr.ask(&Sum::Sleep(1000), REPLY).await });
    seen.sleeps(2).await;
    let (ok, said) = operate(fleet.coordinator.base(), &["drain", "program-a"]);
    assert!(ok, "{said}");
    let reply = slow.await.unwrap();
    assert!(reply.is_ok(), "{reply:?}");
}

#[derive(Serialize, Deserialize)]
struct Wrong(String);

impl ActorMessage for Wrong {
    type Reply = ();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_actor_that_fails_is_made_anew_until_it_fails_too_often() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let (a, b) = two_programs(&fleet).await;
    let restarts = RestartPolicy {
        max_restarts: 2,
        backoff_min: Duration::from_millis(10),
        ..RestartPolicy::default()
    };
    let seen = adder(&a.actors, ActorSpec { restarts, ..ActorSpec::new("fragile", "adder") });
    total(&b.actors, "fragile").await;
    let client = fleet.client().unwrap();
    let watch = b.actors.watch("fragile");
    let addr = b.actors.addr::<Sum>("fragile");
    assert_eq!(addr.ask(&Sum::Add(7), REPLY).await, Ok(7));
    let error = addr.ask(&Sum::Fail("out of luck".to_owned()), PATIENCE).await.unwrap_err();
    assert_eq!(error, AskError::Failed("out of luck".to_owned()));
    assert_eq!(addr.ask(&Sum::Add(1), PATIENCE).await, Ok(1), "made anew, from zero");
    let status = status_until(&client, |s| actor(s, "fragile")["restarts"] == 1).await;
    let listed = actor(&status, "fragile");
    assert_eq!((&listed["state"], &listed["max_restarts"]), (&json!("alive"), &json!(2)));
    assert_eq!((&listed["node"], &listed["kind"]), (&json!("program-a"), &json!("adder")));
    let error = addr.ask(&Sum::Panic, PATIENCE).await.unwrap_err();
    assert!(error.to_string().contains("on purpose"), "{error}");
    assert_eq!(addr.ask(&Sum::Add(2), PATIENCE).await, Ok(2));
    let error = addr.ask(&Sum::Panic, PATIENCE).await.unwrap_err();
    assert!(matches!(error, AskError::Failed(_)), "{error}");
    // The third failure in a row is one too many: watchers are told, and the actor is dead.
    let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
    assert!(reason.contains("on purpose") && reason.contains("3 times in a row"), "{reason}");
    assert_eq!(seen.made(), 3);
    let error = addr.ask(&Sum::Add(1), REPLY).await.unwrap_err();
    assert_eq!(error, AskError::NoSuchActor("fragile".to_owned()));
    let dead = |s: &Value| actor(s, "fragile")["state"] == "dead";
    let status = status_until(&client, dead).await;
    assert!(dead(&status), "{status}");
    let (ok, table) = operate(fleet.coordinator.base(), &["status"]);
    let is_its_row = |row: &str| row.starts_with("fragile ") && row.contains(" 2  it panicked");
    assert!(ok && table.lines().any(is_its_row), "{table}");
    // The actor's process counts restarts, the coordinator counts states; they report at different
    // times.
    let counted = |s: &testkit::scrape::Scrape| {
        let dead = s.sum("tutti_actors", &[("state", "dead")]);
        (s.sum("tutti_actor_restarts_total", &[]), dead)
    };
    let all = |s: &testkit::scrape::Scrape| counted(s) == (2.0, 1.0);
    let scrape = client.scrape_until(PATIENCE, all).await.unwrap();
    assert_eq!(counted(&scrape), (2.0, 1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_ends_takes_its_actors_along_and_nobody_waits_for_them() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let (mut a, b) = two_programs(&fleet).await;
    let mortal = adder(&a.actors, ActorSpec::new("mortal", "adder"));
    total(&b.actors, "mortal").await;
    // The name is taken in every process.
    assert!(a.actors.spawn(ActorSpec::new("mortal", "adder"), Adder::default).is_err());
    let watches = [b.actors.watch("mortal"), b.actors.watch("worker/program-a")];
    let waiting = {
        let addr = b.actors.addr::<Sum>("mortal");
        tokio::spawn(async move { addr.ask(&Sum::Sleep(60_000), 3 * PATIENCE).await })
    };
    // Of what its handlers do, it finishes what takes less than it has time for.
    let brief_seen = adder(&a.actors, ActorSpec::new("brief", "adder"));
    total(&b.actors, "brief").await;
    let brief = {
        let addr = b.actors.addr::<Sum>("brief");
        tokio::spawn(async move { addr.ask(&Sum::Sleep(1000), REPLY).await })
    };
    mortal.sleeps(1).await;
    brief_seen.sleeps(1).await;
    let began = Instant::now();
    a.stop();
    assert!(brief.await.unwrap().is_ok());
    let error = waiting.await.unwrap().unwrap_err();
    assert!(
        matches!(error, AskError::LinkLost(_) | AskError::Failed(_)),
        "told at once and not at its deadline: {error}"
    );
    for watch in watches {
        let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
        assert!(!reason.is_empty());
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    // Later asks and watches are told, too.
    let addr = b.actors.addr::<Sum>("mortal");
    let error = addr.ask(&Sum::Add(1), REPLY).await.unwrap_err();
    assert_eq!(error, AskError::NoSuchActor("mortal".to_owned()));
    let reason = tokio::time::timeout(PATIENCE, b.actors.watch("mortal")).await.unwrap().unwrap();
    assert!(!reason.is_empty());
    let never = tokio::time::timeout(PATIENCE, b.actors.watch("never was")).await;
    let never = never.unwrap().unwrap();
    assert!(never.contains("no such actor"), "{never}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watched_actor_lives_on_under_the_next_coordinator() {
    let Some(meeting) = Meeting::new().await else { return };
    let mut first = meeting.coordinator_of("1", &["--leader-lease", "2"]).await;
    let second = meeting.coordinator_of("1", &["--leader-lease", "2"]).await;
    let runs = [("program-a", 1_u64 << 40), ("program-b", 2 << 40)];
    let members = runs.map(|(node, run)| member(&meeting, node, run));
    let start = |at: usize| {
        let (node, run) = runs[at];
        Program::start(CoordinatorAddress::Followed(members[at].view()), node, run)
    };
    let (mut a, b) = (start(0), start(1));
    first.wait_ready().await.unwrap();
    for name in ["sum", "other"] {
        adder(&a.actors, ActorSpec::new(name, "adder"));
        total(&b.actors, name).await;
    }
    let mut watches = ["sum", "worker/program-a"].map(|name| b.actors.watch(name));
    // Both are known before the coordinator dies.
    tokio::time::sleep(Duration::from_millis(500)).await;
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    // Watched while there is no leader, or while the next one knows nobody yet.
    let mut late = b.actors.watch("other");
    let client = second.client().unwrap();
    let began = Instant::now();
    while client.get("/ready").await.is_ok_and(|reply| reply.status != 200) {
        assert!(began.elapsed() < PATIENCE, "the standby does not serve");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    total(&b.actors, "sum").await;
    for watch in watches.iter_mut().chain([&mut late]) {
        let dead = tokio::time::timeout(Duration::from_millis(700), watch).await;
        assert!(dead.is_err(), "it lives: {dead:?}");
    }
    a.stop();
    for watch in watches.into_iter().chain([late]) {
        let reason = tokio::time::timeout(PATIENCE, watch).await.unwrap().unwrap();
        assert!(!reason.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_application_that_says_too_much_breaks_no_link() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let (a, b) = two_programs(&fleet).await;
    adder(&a.actors, ActorSpec::new("sum", "adder"));
    total(&b.actors, "sum").await;
    let watches = ["worker/program-a", "worker/program-b"].map(|name| a.actors.watch(name));
    let client = fleet.client().unwrap();
    let coordinator = fleet.coordinator.pid();
    // Sends as fast as it can while the coordinator is frozen now and then: messages sent meanwhile
    // arrive all at once.
    let flood = {
        let addr = b.actors.addr::<Sum>("sum");
        std::thread::spawn(move || {
            let (began, mut said) = (Instant::now(), 0_u64);
            while began.elapsed() < Duration::from_secs(4) {
                match addr.tell(&Sum::Add(1)) {
                    Ok(()) => said += 1,
                    Err(AskError::MailboxFull(_)) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
            said
        })
    };
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        LocalCluster::signal(coordinator, "STOP").unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        LocalCluster::signal(coordinator, "CONT").unwrap();
        let reply = client.post("/v1/completions", &greedy(STORY, 4)).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    let said = tokio::task::spawn_blocking(|| flood.join().unwrap()).await.unwrap();
    assert!(said > 20_000, "{said} messages are no flood");
    // Everyone is still there; the last messages are still in transit.
    let (addr, began) = (b.actors.addr::<Sum>("sum"), Instant::now());
    while let Err(error) = addr.ask(&Sum::Add(0), PATIENCE).await {
        assert!(matches!(error, AskError::MailboxFull(_)), "{error}");
        assert!(began.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for watch in watches {
        let dead = tokio::time::timeout(Duration::from_millis(100), watch).await;
        assert!(dead.is_err(), "{dead:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cluster_s_own_actors_have_names_and_states() {
    let cluster = up(&["--workers", "3", "--tensor-parallel", "2", "--threads", "1"]).await;
    let client = cluster.client().unwrap();
    let alive = |status: &Value| {
        ["worker/local-0", "worker/local-1", "worker/local-2", "replica/0"]
            .iter()
            .all(|name| actor(status, name)["state"] == "alive")
    };
    let status = status_until(&client, alive).await;
    assert!(alive(&status), "{status}");
    let supervised = |s: &Value| actor(s, "worker/local-0")["max_restarts"] == json!(10);
    let status = status_until(&client, supervised).await;
    assert!(supervised(&status), "{status}");
    assert!(actor(&status, "replica/0")["epoch"].as_u64().unwrap() >= 1);
    // The workers' log actors are listed, too.
    assert_eq!(actor(&status, "log:local-0")["kind"], "log");
    let rank = status["replicas"][0]["ranks"][0].as_u64().unwrap();
    let nodes = status["nodes"].as_array().unwrap();
    let node = nodes.iter().find(|node| node["slot"] == json!(rank)).unwrap();
    let name = format!("worker/{}", node["node"].as_str().unwrap());
    LocalCluster::signal(node["pid"].as_u64().unwrap() as u32, "KILL").unwrap();
    let back = |s: &Value| actor(s, &name)["restarts"] == 1 && actor(s, &name)["state"] == "alive";
    let status = status_until(&client, back).await;
    assert!(back(&status), "{status}");
    let again = |s: &Value| {
        let replica = actor(s, "replica/0");
        replica["state"] == "alive" && replica["restarts"].as_u64() >= Some(1)
    };
    let status = status_until(&client, again).await;
    assert!(again(&status), "{status}");
    let scrape = client
        .scrape_until(PATIENCE, |s| s.sum("tutti_actors", &[("state", "alive")]) == 7.0)
        .await
        .unwrap();
    assert_eq!(
        scrape.sum("tutti_actors", &[("state", "alive")]),
        7.0,
        "3 workers, 3 logs, 1 replica"
    );
}
