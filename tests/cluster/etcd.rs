//! Coordinators, workers and front ends that meet through a real etcd: one coordinator leads, the
//! next takes over, and etcd itself may be unreachable.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde_json::json;
use shared::clock::since_1970;
use tempfile::TempDir;
use testkit::client::Client;
use testkit::etcd::Etcd;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;
use testkit::stopped::Stopped;
pub(crate) use testkit::wait::until;

use crate::counters::check_invariants;
use crate::front_ends::fixed;
use crate::{STORY, greedy, text};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// An etcd; processes are started with nothing but its address.
pub(crate) struct Meeting {
    pub(crate) etcd: Etcd,
    _folder: TempDir,
}

impl Meeting {
    pub(crate) async fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(folder.path()).await.unwrap()?;
        Some(Self { etcd, _folder: folder })
    }

    fn spawn(&self, args: &[&str]) -> LocalCluster {
        let endpoint = self.etcd.endpoint();
        LocalCluster::spawn(&[args, &["--etcd", &endpoint]].concat()).unwrap()
    }

    /// A coordinator that is up, whether it leads or stands by.
    pub(crate) async fn coordinator(&self, args: &[&str]) -> LocalCluster {
        self.coordinator_of("2", args).await
    }

    /// A coordinator of replicas with this many ranks.
    pub(crate) async fn coordinator_of(&self, degree: &str, args: &[&str]) -> LocalCluster {
        let (any, all) = ("127.0.0.1:0", ["coordinator", "--tensor-parallel", degree]);
        let listen = ["--listen", any, "--cluster-listen", any];
        let mut coordinator = self.spawn(&[&all[..], &listen, args].concat());
        coordinator.wait_url().await.unwrap();
        coordinator
    }

    pub(crate) fn worker(&self, index: usize) -> LocalCluster {
        self.worker_with(index, &[])
    }

    pub(crate) fn worker_with(&self, index: usize, args: &[&str]) -> LocalCluster {
        let node = format!("worker-{index}");
        self.spawn(&[&["worker", "--node", &node, "--threads", "1"], args].concat())
    }

    pub(crate) async fn frontend(&self) -> LocalCluster {
        let mut frontend = self.spawn(&["frontend", "--listen", "127.0.0.1:0"]);
        frontend.wait_ready().await.unwrap();
        frontend
    }
}

/// The message of `/ready` when it answers 503.
pub(crate) async fn not_ready(client: &Client) -> Option<String> {
    let reply = client.get("/ready").await.ok()?;
    (reply.status == 503).then(|| reply.body["message"].as_str().unwrap_or("").to_owned())
}

pub(crate) async fn serves(client: &Client) -> bool {
    let reply = client.post("/v1/completions", &greedy(STORY, 4)).await;
    reply.is_ok_and(|reply| reply.status == 200)
}

/// The text of a greedy completion.
async fn story(client: &Client) -> String {
    let reply = client.post("/v1/completions", &greedy(STORY, 24)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    text(&reply.body).to_owned()
}

/// A stream that does not end by itself during the test.
async fn long_stream(client: &Client) -> reqwest::Response {
    let mut body = greedy(STORY, 900);
    body["stream"] = json!(true);
    body["ignore_eos"] = json!(true);
    let mut response = client.open("/v1/completions", &body).await.unwrap();
    assert!(response.chunk().await.unwrap().is_some(), "it has begun");
    response
}

/// Reads a stream to its end, which must come and must be an error.
async fn ends_badly(response: reqwest::Response) {
    let mut bytes = response.bytes_stream();
    let mut all = Vec::new();
    let reading = async {
        while let Some(Ok(chunk)) = bytes.next().await {
            all.extend_from_slice(&chunk);
        }
    };
    assert!(tokio::time::timeout(PATIENCE, reading).await.is_ok(), "the stream went silent");
    assert!(!String::from_utf8_lossy(&all).contains("[DONE]"), "900 tokens were not wanted");
}

/// Reads a stream to its orderly end.
async fn ends_well(response: reqwest::Response) {
    let rest = String::from_utf8(response.bytes().await.unwrap().to_vec()).unwrap();
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
}

pub(crate) fn sum(scrape: &Scrape, name: &str) -> f64 {
    scrape.sum(name, &[])
}

/// Durations of the last loads, in seconds, by worker slot.
fn loads(scrape: &Scrape) -> Vec<(String, f64)> {
    let of = |sample: &&testkit::scrape::Sample| sample.name == "tutti_rank_load_seconds";
    let samples = scrape.samples().iter().filter(of);
    let mut loads: Vec<_> =
        samples.map(|sample| (sample.labels["worker"].clone(), sample.value)).collect();
    loads.sort_by(|a, b| a.0.cmp(&b.0));
    loads
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_takes_over_and_workers_keep_their_weights() {
    let Some(meeting) = Meeting::new().await else { return };
    // Workers may start before any coordinator leads.
    let workers: Vec<_> = (0..4).map(|index| meeting.worker(index)).collect();
    let mut first = meeting.coordinator(&[]).await;
    first.wait_ready().await.unwrap();
    let leader = first.client().unwrap();
    let both = |s: &Scrape| sum(s, "tutti_replica_up") == 2.0 && loads(s).len() == 4;
    let scrape = leader.scrape_until(PATIENCE, both).await.unwrap();
    assert!(both(&scrape) && loads(&scrape).iter().all(|(_, seconds)| *seconds > 0.0));
    let second = meeting.coordinator(&[]).await;
    let standby = second.client().unwrap();

    // The standby lives, and says that it does not serve and which coordinator does.
    assert_eq!(standby.get("/live").await.unwrap().status, 200);
    until("the standby knows who leads", async || {
        not_ready(&standby).await.filter(|message| message.contains(first.base()))
    })
    .await;
    let refused = standby.post("/v1/completions", &greedy(STORY, 4)).await.unwrap();
    assert_eq!(refused.status, 503);
    assert!(refused.body["error"]["message"].as_str().unwrap().contains(first.base()));
    let scrape = standby.scrape().await.unwrap();
    assert!(scrape.has("tutti_membership_leading", &[]));
    assert_eq!(sum(&scrape, "tutti_membership_leading"), 0.0);
    assert!(!scrape.has("tutti_requests_accepted_total", &[]), "no totals that begin at zero");
    let frontend = meeting.frontend().await;
    let frontend = frontend.client().unwrap();
    let before = story(&frontend).await;
    assert_eq!(before, story(&leader).await);
    let members = |s: &Scrape, role| s.sum("tutti_membership_members", &[("role", role)]);
    let all = |s: &Scrape| {
        members(s, "coordinator") == 2.0
            && members(s, "worker") == 4.0
            && members(s, "frontend") == 1.0
    };
    let scrape = leader.scrape_until(PATIENCE, all).await.unwrap();
    assert!(all(&scrape) && sum(&scrape, "tutti_membership_leading") == 1.0);

    let status = leader.get("/admin/status").await.unwrap().body;
    let coordinators = status["nodes"].as_array().unwrap().iter();
    let coordinators = coordinators.filter(|node| node["role"] == "coordinator");
    let mut states: Vec<_> = coordinators.map(|node| node["state"].as_str().unwrap()).collect();
    states.sort_unstable();
    assert_eq!(states, ["leading", "standby"]);

    let (of_leader, of_frontend) = (long_stream(&leader).await, long_stream(&frontend).await);
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    let died = Instant::now();
    ends_badly(of_leader).await;
    until("the standby serves", async || serves(&standby).await.then_some(())).await;
    let took = died.elapsed();
    assert!(took < Duration::from_secs(25), "{took:?}");
    until("the front end follows", async || serves(&frontend).await.then_some(())).await;
    assert_eq!(story(&frontend).await, before);
    ends_well(of_frontend).await;
    // The workers' first reports are from before they were formed again.
    let settled = |s: &Scrape| both(s) && loads(s).iter().all(|(_, seconds)| *seconds == 0.0);
    let scrape = standby.scrape_until(PATIENCE, settled).await.unwrap();
    let kept: Vec<_> = ["0", "1", "2", "3"].map(|slot| (slot.to_owned(), 0.0)).into();
    assert_eq!(loads(&scrape), kept, "nothing was loaded again, and all have their slots");
    assert_eq!(sum(&scrape, "tutti_membership_leading"), 1.0);
    assert_eq!(sum(&scrape, "tutti_worker_up"), 4.0);

    // The first coordinator, started again, stands by. The second one, told to end, finishes its
    // requests and then hands over at once.
    let again = meeting.coordinator(&[]).await;
    let client = again.client().unwrap();
    until("it stands by", async || {
        not_ready(&client).await.filter(|message| message.contains(second.base()))
    })
    .await;
    let mut second = second;
    let streams = [long_stream(&standby).await, long_stream(&frontend).await];
    LocalCluster::signal(second.pid(), "TERM").unwrap();
    for stream in streams {
        ends_well(stream).await;
    }
    assert!(second.wait_end().unwrap().success(), "{}", second.log());
    until("it leads", async || serves(&client).await.then_some(())).await;
    assert_eq!(story(&client).await, before);
    for mut worker in workers {
        LocalCluster::signal(worker.pid(), "INT").unwrap();
        assert!(worker.wait_end().unwrap().success(), "{}", worker.log());
    }
}

/// Sends requests one after another until told to stop; returns how many, and what failed.
pub(crate) fn load(
    client: Client,
    stop: Arc<AtomicBool>,
) -> tokio::task::JoinHandle<(u32, Vec<String>)> {
    tokio::spawn(async move {
        let (mut count, mut failures) = (0, Vec::new());
        while !stop.load(Ordering::Relaxed) {
            count += 1;
            match client.post("/v1/completions", &greedy(STORY, 32)).await {
                Ok(reply) if reply.status == 200 => {}
                Ok(reply) => failures.push(format!("{}: {}", reply.status, reply.body)),
                Err(error) => failures.push(error.to_string()),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        (count, failures)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_etcd_everything_goes_on_and_with_it_again_new_workers_join() {
    let Some(mut meeting) = Meeting::new().await else { return };
    // Leases end while etcd is away.
    let lease = ["--leader-lease", "2"];
    let mut leader = meeting.coordinator(&lease).await;
    let workers: Vec<_> = (0..2).map(|index| meeting.worker(index)).collect();
    leader.wait_ready().await.unwrap();
    let standby = meeting.coordinator(&lease).await;
    let standby = standby.client().unwrap();
    let frontend = meeting.frontend().await;
    let client = leader.client().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let loads =
        [client.clone(), frontend.client().unwrap()].map(|client| load(client, stop.clone()));
    let polls = Arc::new(AtomicU64::new(0));
    let readiness = {
        let (client, stop, polls) = (client.clone(), stop.clone(), polls.clone());
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(client.get("/ready").await.unwrap().status, 200);
                polls.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    };
    let connected = |s: &Scrape| sum(s, "tutti_membership_connected");
    let mut late = Vec::new();
    for kill in [false, true] {
        if kill {
            meeting.etcd.kill();
        } else {
            LocalCluster::signal(meeting.etcd.pid(), "STOP").unwrap();
        }
        let missed = client.scrape_until(PATIENCE, |s| connected(s) == 0.0).await.unwrap();
        assert_eq!(connected(&missed), 0.0, "the leader says that etcd is away");
        // This one knows no other process yet: it waits for etcd.
        late.push(meeting.worker(workers.len() + late.len()));
        let up = 2.0 + late.len() as f64;
        let old = |s: &Scrape| {
            since_1970().as_secs_f64() - sum(s, "tutti_membership_confirmed_timestamp_seconds")
                > 8.0
                && sum(s, "tutti_worker_up") == up - 1.0
        };
        let scrape = client.scrape_until(PATIENCE, old).await.unwrap();
        assert!(old(&scrape), "the age of what is known shows, and those that were there stay");
        assert_eq!(client.get("/ready").await.unwrap().status, 200);
        if kill {
            meeting.etcd.restart().await.unwrap();
        } else {
            LocalCluster::signal(meeting.etcd.pid(), "CONT").unwrap();
        }
        let back = |s: &Scrape| {
            connected(s) == 1.0
                && sum(s, "tutti_membership_leading") == 1.0
                && sum(s, "tutti_worker_up") == up
                && s.sum("tutti_membership_members", &[("role", "worker")]) == up
        };
        let scrape = client.scrape_until(PATIENCE, back).await.unwrap();
        assert!(back(&scrape), "the same leader, and the new worker: {}", leader.log());
        until("the standby stands by", async || {
            not_ready(&standby).await.filter(|message| message.contains(leader.base()))
        })
        .await;
    }
    let polled = polls.load(Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    readiness.await.unwrap();
    assert!(polled > 20, "{polled}");
    for load in loads {
        let (count, failures) = load.await.unwrap();
        assert!(count > 10 && failures.is_empty(), "{count} requests: {failures:?}");
    }
    for worker in &workers {
        assert_eq!(worker.log().matches(" joined ").count(), 1, "{}", worker.log());
    }
    // A worker that starts under the name of one that has just died need not wait for that one's
    // lease.
    LocalCluster::signal(late[1].pid(), "KILL").unwrap();
    let gone = |s: &Scrape| sum(s, "tutti_worker_up") == 3.0;
    let scrape = client.scrape_until(PATIENCE, gone).await.unwrap();
    assert!(gone(&scrape), "{}\n{}", sum(&scrape, "tutti_worker_up"), leader.log());
    let began = Instant::now();
    late[1] = meeting.worker(3);
    let back = |s: &Scrape| sum(s, "tutti_worker_up") == 4.0;
    assert!(back(&client.scrape_until(PATIENCE, back).await.unwrap()));
    assert!(began.elapsed() < Duration::from_millis(9500), "{:?}", began.elapsed());
}

/// Every total that does not depend on time, by series.
async fn totals(client: &Client) -> BTreeMap<String, f64> {
    of_page(&client.metrics_page().await.unwrap())
}

fn of_page(page: &str) -> BTreeMap<String, f64> {
    let scrape = Scrape::parse(page).unwrap();
    check_invariants(&scrape);
    fixed(&scrape, page, true)
}

fn assert_none_fell(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) {
    let fell: Vec<_> = before
        .iter()
        .filter(|(series, value)| after.get(*series).is_none_or(|after| after < value))
        .map(|(series, value)| (series, value, after.get(series)))
        .collect();
    assert!(fell.is_empty(), "{fell:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_go_on_under_the_next_leader() {
    let Some(meeting) = Meeting::new().await else { return };
    let quick = ["--leader-lease", "2", "--checkpoint-interval", "1"];
    let mut first = meeting.coordinator(&quick).await;
    let _workers = [meeting.worker(0), meeting.worker(1)];
    first.wait_ready().await.unwrap();
    let second = meeting.coordinator(&quick).await;
    let frontend = meeting.frontend().await;
    let (leader, frontend) = (first.client().unwrap(), frontend.client().unwrap());
    let ask = async |client: &Client, count: u32| {
        for _ in 0..count {
            story(client).await;
        }
    };
    ask(&leader, 5).await;
    ask(&frontend, 5).await;
    let route = [("route", "/v1/completions")];
    let reported = |s: &Scrape| s.sum("tutti_http_requests_total", &route) == 10.0;
    assert!(reported(&leader.scrape_until(PATIENCE, reported).await.unwrap()));
    let before = totals(&leader).await;
    // What is counted from here on may be lost, but nothing that was seen. A running request ends
    // with its coordinator.
    let (seen, stop) = (Arc::new(Mutex::new(before)), Arc::new(AtomicBool::new(false)));
    let (scrapes, mut scraped) = tokio::sync::watch::channel(());
    let scraper = {
        let (leader, seen, stop) = (leader.clone(), seen.clone(), stop.clone());
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let Ok(page) = leader.metrics_page().await else { return };
                let now = of_page(&page);
                let before = std::mem::replace(&mut *seen.lock().unwrap(), now.clone());
                assert_none_fell(&before, &now);
                scrapes.send_replace(());
            }
        })
    };
    for _ in 0..4 {
        ask(&leader, 3).await;
        scraped.changed().await.unwrap();
    }
    let stream = long_stream(&leader).await;
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    stop.store(true, Ordering::Relaxed);
    scraper.await.unwrap();
    let before = seen.lock().unwrap().clone();
    ends_badly(stream).await;
    let leader = second.client().unwrap();
    until("the next leader serves", async || serves(&leader).await.then_some(())).await;
    assert_none_fell(&before, &totals(&leader).await);
    let answered = |s: &Scrape| s.sum("tutti_requests_accepted_total", &[]) >= 11.0;
    let scrape = leader.scrape_until(PATIENCE, answered).await.unwrap();
    assert_none_fell(&before, &totals(&leader).await);
    let accepted = sum(&scrape, "tutti_requests_accepted_total");
    assert!(
        (11.0..=24.0).contains(&accepted),
        "10 of the old, what it stored of 13 more, 1 of the new: {accepted}"
    );
    // The front end's own counts continue: it lost nothing, and is counted once.
    until("the front end follows", async || serves(&frontend).await.then_some(())).await;

    // A coordinator that ends in order hands over everything.
    let third = meeting.coordinator(&quick).await;
    ask(&leader, 2).await;
    // A page is as old as the checkpoint that it shows.
    let now = since_1970().as_secs_f64();
    let present = |s: &Scrape| {
        sum(s, "tutti_totals_checkpoint_timestamp_seconds") > now + 1.5
            && sum(s, "tutti_requests_in_flight") == 0.0
    };
    assert!(present(&leader.scrape_until(PATIENCE, present).await.unwrap()));
    let before = totals(&leader).await;
    LocalCluster::signal(second.pid(), "INT").unwrap();
    let leader = third.client().unwrap();
    let leads = until("the next one leads", async || {
        let scrape = leader.scrape().await.ok()?;
        scrape.has("tutti_requests_accepted_total", &[]).then_some(scrape)
    })
    .await;
    let count = |name: &str| {
        before.iter().filter(|(series, _)| series.starts_with(name)).map(|(_, v)| v).sum::<f64>()
    };
    for name in ["tutti_requests_accepted_total", "tutti_generation_tokens_total"] {
        assert_eq!(sum(&leads, name), count(name), "{name}");
    }
    until("it serves", async || serves(&leader).await.then_some(())).await;
    assert_none_fell(&before, &totals(&leader).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_missed_its_end_stops_when_it_learns_of_the_next() {
    let Some(meeting) = Meeting::new().await else { return };
    let lease = ["--leader-lease", "2"];
    let mut first = meeting.coordinator(&lease).await;
    let _workers = [meeting.worker(0), meeting.worker(1)];
    first.wait_ready().await.unwrap();
    let second = meeting.coordinator(&lease).await;
    let client = second.client().unwrap();
    until("the standby knows who leads", async || not_ready(&client).await).await;
    let stream = long_stream(&first.client().unwrap()).await;
    LocalCluster::signal(first.pid(), "STOP").unwrap();
    until("the standby serves", async || serves(&client).await.then_some(())).await;
    // It is asked before it can know.
    let ask = |client: Client| async move { client.metrics_page().await };
    let scrapes = [(); 4].map(|()| tokio::spawn(ask(first.client().unwrap())));
    tokio::time::sleep(Duration::from_millis(300)).await;
    LocalCluster::signal(first.pid(), "CONT").unwrap();
    for scrape in scrapes {
        let page = match scrape.await.unwrap() {
            // By a clock that stood still as well, the request may seem to have come too late.
            Err(error) if error.to_string().contains("408") => continue,
            page => page.unwrap(),
        };
        let total = page.lines().find(|line| line.starts_with("tutti_requests_accepted_total{"));
        assert_eq!(total, None, "the totals are on the next leader's page");
        assert!(page.contains("\ntutti_membership_connected"), "{page}");
    }
    ends_badly(stream).await;
    let status = first.wait_end().unwrap();
    assert_eq!(status.code(), Some(75), "{}", first.log());
    until("it says why", async || first.log().contains("leads now").then_some(())).await;
    let both = |s: &Scrape| sum(s, "tutti_worker_up") == 2.0;
    assert!(both(&client.scrape_until(PATIENCE, both).await.unwrap()));
    assert!(serves(&client).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_whose_main_thread_is_stuck_does_not_keep_the_lead() {
    let Some(meeting) = Meeting::new().await else { return };
    let lease = ["--leader-lease", "2"];
    let mut first = meeting.coordinator(&lease).await;
    let _workers = [meeting.worker(0), meeting.worker(1)];
    first.wait_ready().await.unwrap();
    let second = meeting.coordinator(&lease).await;
    let client = second.client().unwrap();
    until("the standby knows who leads", async || not_ready(&client).await).await;
    let stopped = match Stopped::main_thread(first.pid()) {
        Ok(stopped) => stopped,
        Err(reason) => return println!("no thread can be stopped here: {reason}"),
    };
    // Its other threads go on, which proves nothing.
    assert_eq!(first.client().unwrap().get("/version").await.unwrap().status, 200);
    until("the standby leads", async || {
        second.log().contains("this coordinator leads").then_some(())
    })
    .await;
    until("the standby serves", async || serves(&client).await.then_some(())).await;
    drop(stopped);
    let status = first.wait_end().unwrap();
    assert_eq!(status.code(), Some(75), "{}", first.log());
    until("it says why", async || first.log().contains("the main thread is stuck").then_some(()))
        .await;
    assert!(serves(&client).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_coordinators_at_one_address_the_second_ends() {
    let Some(meeting) = Meeting::new().await else { return };
    let address = format!("127.0.0.1:{}", free_port());
    let args = ["--leader-lease", "2", "--advertise", &address];
    let first = meeting.coordinator(&args).await;
    until("it leads", async || first.log().contains("this coordinator leads").then_some(())).await;
    let mut second = meeting.coordinator(&args).await;
    let status = second.wait_end().unwrap();
    assert_eq!(status.code(), Some(78), "{}", second.log());
    until("it says why", async || second.log().contains("names must be unique").then_some(()))
        .await;
    assert_eq!(first.log().matches("this coordinator leads").count(), 1);
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let etcd = format!("http://127.0.0.1:{}", free_port());
    let refused = |args: &[&str], words: &[&str]| {
        let mut process = LocalCluster::spawn(args).unwrap();
        let status = process.wait_end().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let log = process.log();
        assert_eq!(status.code(), Some(2), "{log}");
        assert!(words.iter().all(|word| log.contains(word)), "{log}");
    };
    let both = ["--coordinator", "127.0.0.1:1", "--etcd", &etcd];
    for role in ["worker", "frontend"] {
        refused(&[&[role], &both[..]].concat(), &["--coordinator", "--etcd", "cannot be combined"]);
    }
    refused(&["worker", "--etcd", "127.0.0.1:2379"], &["--etcd", "http://HOST:PORT"]);
    refused(&["coordinator", "--advertise", "h:1"], &["--advertise", "--etcd"]);
    let any = ["--listen", "127.0.0.1:0", "--cluster-listen", "0.0.0.0:0", "--insecure-no-auth"];
    refused(&[&["coordinator", "--etcd", &etcd], &any[..]].concat(), &["--advertise HOST:PORT"]);
}
