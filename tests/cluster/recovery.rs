//! How long clients wait when something breaks: real processes under a steady load of streams.
//!
//! The normal run breaks each thing once or twice, with generous bounds. The figures in
//! docs/benchmarks.md come from the long run, which is otherwise ignored; the command is there.
#![allow(clippy::print_stdout, reason = "prints the figures, and why it skips")]
use std::time::{Duration, Instant};

use testkit::client::Client;
use testkit::etcd::Etcd;
use testkit::fleet::Fleet;
use testkit::hosts::Hosts;
use testkit::load::{Load, Seen};
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;
use testkit::stopped::Stopped;

/// Tokens per request.
const TOKENS: u32 = 96;
/// Time limit for everything to recover.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit for thousands of steps, which must be so many, but need not be fast.
const LEARNS: Duration = Duration::from_secs(180);

/// Pause between two failures.
const CALM: Duration = Duration::from_secs(4);

/// Limits on what clients may notice.
struct Bounds {
    runs: usize,
    /// Pause of a client between two requests: tests share their cores, figures do not.
    rest: Duration,
    killed: Duration,
    frozen: Duration,
    hung: Duration,
    /// Where it hangs for good, and another takes its place.
    replaced: Duration,
}

const SHORT: Bounds = Bounds {
    runs: 2,
    rest: Duration::from_millis(250),
    killed: Duration::from_secs(12),
    frozen: Duration::from_secs(15),
    hung: Duration::from_secs(20),
    replaced: Duration::from_secs(30),
};
const LONG: Bounds = Bounds {
    runs: 20,
    rest: Duration::ZERO,
    killed: Duration::from_secs(3),
    frozen: Duration::from_secs(6),
    hung: Duration::from_secs(7),
    replaced: Duration::from_secs(12),
};

/// Prints the longest pause of each of a case's runs.
fn report(case: &str, seen: &Seen, mut pauses: Vec<Duration>, bound: Duration) {
    assert!(seen.failures.is_empty(), "{case}: {:?}", seen.failures);
    pauses.sort_unstable();
    let at = |part: f64| pauses[((pauses.len() as f64 * part).ceil() as usize).max(1) - 1];
    let (half, most, max) = (at(0.5), at(0.99), at(1.0));
    let seconds = |it: Duration| format!("{:.2} s", it.as_secs_f64());
    println!(
        "| {case} | {} | {} | 0 | {} | {} | {} |",
        pauses.len(),
        seen.good,
        seconds(half),
        seconds(most),
        seconds(max)
    );
    assert!(most < bound, "{case}: p99 {most:?}, at most {bound:?} is wanted: {pauses:?}");
}

fn head() {
    println!("| case | runs | requests | lost or changed | pause p50 | p99 | max |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
}

/// Waits until this many workers and replicas are up and the load continues.
async fn whole(client: &Client, workers: f64, replicas: f64) {
    let up = |s: &Scrape| {
        s.sum("tutti_worker_up", &[]) == workers && s.sum("tutti_replica_up", &[]) == replicas
    };
    let scrape = client.scrape_until(PATIENCE, up).await.unwrap();
    assert!(up(&scrape), "not whole again within {PATIENCE:?}");
    tokio::time::sleep(Duration::from_millis(300)).await;
}

/// The index in `fleet.workers` of the process that is a rank.
async fn a_rank(client: &Client, run: usize) -> usize {
    let status = client.get("/admin/status").await.unwrap().body;
    let nodes = status["nodes"].as_array().unwrap();
    let ranks: Vec<&str> = nodes
        .iter()
        .filter(|node| node["rank"].is_number())
        .map(|node| node["node"].as_str().unwrap())
        .collect();
    ranks[run % ranks.len()].trim_start_matches("worker-").parse().unwrap()
}

/// In each run kills a rank, or freezes and thaws it.
async fn ranks(bounds: &Bounds, runs: usize, replicas: u32, freezes: bool) {
    let max = replicas.to_string();
    let mut fleet = Fleet::start(&["--replicas", &max], 4, 0).await.unwrap();
    let client = fleet.client().unwrap();
    whole(&client, 4.0, f64::from(replicas)).await;
    let load = Load::start(std::slice::from_ref(&client), 4, TOKENS, bounds.rest).await.unwrap();
    let mut moments = Vec::new();
    for run in 0..runs {
        let victim = a_rank(&client, run).await;
        let pid = fleet.workers[victim].pid();
        let broken = Instant::now();
        if freezes {
            LocalCluster::signal(pid, "STOP").unwrap();
            tokio::time::sleep(Duration::from_secs(8)).await;
            LocalCluster::signal(pid, "CONT").unwrap();
        } else {
            LocalCluster::signal(pid, "KILL").unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            fleet.restart_worker(u32::try_from(victim).unwrap()).unwrap();
        }
        whole(&client, 4.0, f64::from(replicas)).await;
        moments.push((broken, Instant::now()));
        if run + 1 < runs {
            // Repeated failures are answered more and more slowly.
            tokio::time::sleep(CALM).await;
        }
    }
    let seen = load.stop().await;
    let pauses = moments.iter().map(|(from, until)| seen.longest(*from, *until)).collect();
    let spares = if replicas == 2 { "2 replicas" } else { "1 replica, 2 spares" };
    let what = if freezes { "rank frozen for 8 s" } else { "rank killed" };
    let bound = if freezes { bounds.frozen } else { bounds.killed };
    report(&format!("{what}, {spares}"), &seen, pauses, bound);
    let scrape = client.scrape().await.unwrap();
    assert!(scrape.sum("tutti_failovers_total", &[]) >= runs as f64, "something broke");
}

/// A rank computes no more, while its process answers as ever: the thread that computes is stopped.
/// Returns the pause, or why no thread can be stopped here.
async fn hung_rank() -> Result<(Seen, Duration), String> {
    let fleet = Fleet::start(&["--tensor-parallel", "1", "--replicas", "2"], 2, 0).await.unwrap();
    let client = fleet.client().unwrap();
    whole(&client, 2.0, 2.0).await;
    let load = Load::start(std::slice::from_ref(&client), 4, TOKENS, Duration::ZERO).await.unwrap();
    // Until it is known how long steps take: of seldom sizes, by what others compute.
    let steps = |s: &Scrape| s.sum("tutti_engine_steps_total", &[]) > 2000.0;
    assert!(steps(&client.scrape_until(LEARNS, steps).await.unwrap()));
    let victim = fleet.workers[a_rank(&client, 0).await].pid();
    let hangs = Instant::now();
    let stopped = Stopped::thread(victim, "executor")?;
    let overdue = |s: &Scrape| s.sum("tutti_steps_overdue_total", &[]) == 1.0;
    assert!(overdue(&client.scrape_until(PATIENCE, overdue).await.unwrap()));
    // Until the other replica has its requests. Not for long: then its process would be ended.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let until = Instant::now();
    drop(stopped);
    whole(&client, 2.0, 2.0).await;
    let seen = load.stop().await;
    let scrape = client.scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_steps_overdue_total", &[]), 1.0, "it was found once");
    assert_eq!(scrape.sum("tutti_worker_restarts_total", &[]), 0.0);
    let pause = seen.longest(hangs, until);
    if pause >= SHORT.hung {
        println!("{}", fleet.coordinator.log());
    }
    Ok((seen, pause))
}

/// A rank of the only replica computes no more, and stays so. Returns the pause until a spare has
/// its place, or why no thread can be stopped here.
async fn rank_hung_for_good() -> Result<(Seen, Duration), String> {
    let fleet = Fleet::start(&["--tensor-parallel", "1", "--replicas", "1"], 2, 0).await.unwrap();
    let client = fleet.client().unwrap();
    whole(&client, 2.0, 1.0).await;
    let load = Load::start(std::slice::from_ref(&client), 4, TOKENS, Duration::ZERO).await.unwrap();
    let steps = |s: &Scrape| s.sum("tutti_engine_steps_total", &[]) > 1500.0;
    assert!(steps(&client.scrape_until(LEARNS, steps).await.unwrap()));
    let victim = a_rank(&client, 0).await;
    let hangs = Instant::now();
    let stopped = Stopped::thread(fleet.workers[victim].pid(), "executor")?;
    // Whoever has the rank then answers.
    let reply = client.post("/v1/completions", &crate::greedy(crate::STORY, 4)).await.unwrap();
    let until = Instant::now();
    assert_eq!(reply.status, 200, "{}\n{}", reply.body, fleet.coordinator.log());
    assert_ne!(a_rank(&client, 0).await, victim, "{}", fleet.coordinator.log());
    let scrape = client.scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_worker_up", &[]), 2.0, "its process answers all the while");
    drop(stopped);
    let seen = load.stop().await;
    let pause = seen.longest(hangs, until);
    Ok((seen, pause))
}

/// Cuts the network of a host with a replica's workers, then restores it.
async fn cut_links(bounds: &Bounds, runs: usize) {
    let hosts = match Hosts::new(2) {
        Ok(hosts) => hosts,
        Err(reason) => return println!("no hosts to cut off from each other here: {reason}"),
    };
    let listen = format!("{}:0", hosts.gateway());
    let port = testkit::fleet::free_port();
    let cluster = format!("{}:{port}", hosts.gateway());
    let coordinator =
        ["coordinator", "--listen", &listen, "--cluster-listen", &cluster, "--insecure-no-auth"];
    let mut coordinator = LocalCluster::spawn(&coordinator).unwrap();
    let mut workers = Vec::new();
    for index in 0..4 {
        let (host, node) = (index / 2, format!("worker-{index}"));
        let id = format!("host-{host}");
        let name = ["--node", &node, "--host-id", &id, "--threads", "1"];
        let args = [&["worker", "--coordinator", &cluster][..], &name].concat();
        workers.push(LocalCluster::spawn_in(&hosts.prefix(host), &args).unwrap());
        if index == 1 {
            // The first replica is entirely on this host.
            coordinator.wait_ready().await.unwrap();
        }
    }
    let client = coordinator.client().unwrap();
    whole(&client, 4.0, 2.0).await;
    let load = Load::start(std::slice::from_ref(&client), 4, TOKENS, bounds.rest).await.unwrap();
    let mut moments = Vec::new();
    for run in 0..runs {
        let broken = Instant::now();
        hosts.cut(run % 2).unwrap();
        tokio::time::sleep(Duration::from_secs(8)).await;
        hosts.mend(run % 2).unwrap();
        whole(&client, 4.0, 2.0).await;
        moments.push((broken, Instant::now()));
    }
    let seen = load.stop().await;
    let pauses = moments.iter().map(|(from, until)| seen.longest(*from, *until)).collect();
    report("host cut off for 8 s, 2 replicas", &seen, pauses, bounds.frozen);
}

/// Coordinators that meet through etcd, with workers and a front end.
struct Meeting {
    etcd: Vec<Etcd>,
    endpoints: String,
    _folder: tempfile::TempDir,
}

impl Meeting {
    async fn new(members: usize) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start_cluster(folder.path(), members).await.unwrap()?;
        let endpoints: Vec<String> = etcd.iter().map(Etcd::endpoint).collect();
        Some(Self { etcd, endpoints: endpoints.join(","), _folder: folder })
    }

    fn spawn(&self, args: &[&str]) -> LocalCluster {
        LocalCluster::spawn(&[args, &["--etcd", &self.endpoints]].concat()).unwrap()
    }

    async fn coordinator(&self) -> LocalCluster {
        let any = "127.0.0.1:0";
        let args = ["coordinator", "--replicas", "2", "--listen", any, "--cluster-listen", any];
        let mut coordinator = self.spawn(&args);
        coordinator.wait_url().await.unwrap();
        coordinator
    }

    fn workers(&self) -> Vec<LocalCluster> {
        let worker =
            |index| self.spawn(&["worker", "--node", &format!("worker-{index}"), "--threads", "1"]);
        (0..4).map(worker).collect()
    }

    async fn frontend(&self) -> LocalCluster {
        let mut frontend = self.spawn(&["frontend", "--listen", "127.0.0.1:0"]);
        frontend.wait_ready().await.unwrap();
        frontend
    }
}

/// Index of a member of etcd that leads or does not, once there is a leader: while they elect
/// one, all of them may say that they do not lead, or give no answer.
async fn member_that(etcd: &[Etcd], leads: bool) -> usize {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let mut all = Vec::new();
        for member in etcd {
            all.push(member.leads().await);
        }
        let one_leads = all.iter().filter(|it| **it == Some(true)).count() == 1;
        if let Some(index) = all.iter().rposition(|it| *it == Some(leads)).filter(|_| one_leads) {
            return index;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("etcd has no leader, or no followers");
}

/// Kills or freezes members of etcd in turn, under load.
async fn etcd_members(bounds: &Bounds, lasts: Duration, members: usize) {
    let Some(mut meeting) = Meeting::new(members).await else { return };
    let mut coordinator = meeting.coordinator().await;
    let _workers = meeting.workers();
    coordinator.wait_ready().await.unwrap();
    let client = coordinator.client().unwrap();
    whole(&client, 4.0, 2.0).await;
    let frontend = meeting.frontend().await;
    let servers = [client.clone(), frontend.client().unwrap()];
    let load = Load::start(&servers, 2, TOKENS, bounds.rest).await.unwrap();
    let first = Instant::now();
    let leads = |s: &Scrape| {
        let sum = |name| s.sum(name, &[]);
        sum("tutti_membership_connected") == 1.0 && sum("tutti_membership_leading") == 1.0
    };
    if members == 1 {
        LocalCluster::signal(meeting.etcd[0].pid(), "STOP").unwrap();
        tokio::time::sleep(lasts).await;
        LocalCluster::signal(meeting.etcd[0].pid(), "CONT").unwrap();
    } else {
        // A follower first, then the leader.
        for leads in [false, true] {
            let chosen = member_that(&meeting.etcd, leads).await;
            meeting.etcd[chosen].kill();
            tokio::time::sleep(lasts).await;
            // Nobody has left, and new processes can join.
            let late = meeting.frontend().await;
            assert_eq!(late.client().unwrap().get("/ready").await.unwrap().status, 200);
            meeting.etcd[chosen].restart().await.unwrap();
        }
    }
    let scrape = client.scrape_until(PATIENCE, leads).await.unwrap();
    assert!(leads(&scrape), "the same coordinator leads:\n{}", coordinator.log());
    assert_eq!(scrape.sum("tutti_worker_up", &[]), 4.0);
    assert_eq!(scrape.sum("tutti_failovers_total", &[]), 0.0);
    let last = Instant::now();
    let seen = load.stop().await;
    let case = match members {
        1 => format!("etcd stopped for {} s", lasts.as_secs()),
        _ => "a follower, then the leader of 3 etcd members killed".to_owned(),
    };
    let pauses = vec![seen.longest(first, last)];
    report(&case, &seen, pauses, Duration::from_secs(5));
}

/// Kills the leading coordinator under a load of streams through a front end; measures the time
/// until the next one serves, and the pauses of those streams.
async fn coordinators(bounds: &Bounds, runs: usize, bound: Duration) {
    let Some(meeting) = Meeting::new(1).await else { return };
    let mut leader = meeting.coordinator().await;
    let _workers = meeting.workers();
    leader.wait_ready().await.unwrap();
    let follower = meeting.frontend().await;
    let frontend = follower.client().unwrap();
    let load = Load::start(std::slice::from_ref(&frontend), 4, TOKENS, bounds.rest).await.unwrap();
    let (mut took, mut moments) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        whole(&leader.client().unwrap(), 4.0, 2.0).await;
        let standby = meeting.coordinator().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        LocalCluster::signal(leader.pid(), "KILL").unwrap();
        let died = Instant::now();
        leader = standby;
        for client in [&leader.client().unwrap(), &frontend] {
            let body = crate::greedy(crate::STORY, 4);
            while !client.post("/v1/completions", &body).await.is_ok_and(|it| it.status == 200) {
                assert!(died.elapsed() < PATIENCE, "nobody serves: {}", leader.log());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        took.push(died.elapsed());
        moments.push((died, Instant::now()));
    }
    let seen = load.stop().await;
    let pauses = moments.iter().map(|(from, until)| seen.longest(*from, *until)).collect();
    report("leader killed: until the next one serves", &seen, took, bound);
    report("leader killed: streams of a front end", &seen, pauses, bound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_see_a_pause_when_a_rank_breaks_and_nothing_else() {
    head();
    ranks(&SHORT, SHORT.runs, 2, false).await;
    ranks(&SHORT, 1, 1, false).await;
    ranks(&SHORT, 1, 2, true).await;
}

/// Without `--step-timeout`, which would take 60 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_hangs_while_its_process_lives_is_found_within_seconds() {
    match hung_rank().await {
        Ok((seen, pause)) => report("rank hangs, 2 replicas", &seen, vec![pause], SHORT.hung),
        Err(reason) => println!("no thread can be stopped here: {reason}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_hangs_for_good_gives_way_within_seconds() {
    let case = "rank hangs for good, 1 replica, 1 spare";
    match rank_hung_for_good().await {
        Ok((seen, pause)) => report(case, &seen, vec![pause], SHORT.replaced),
        Err(reason) => println!("no thread can be stopped here: {reason}"),
    }
}

/// Nobody else can have its rank: it is told to end, and its exit code says that it failed, so that
/// whoever supervises it starts it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_hangs_for_good_ends_as_one_that_failed() {
    // A step of an idle replica shows it, too.
    let args = ["--tensor-parallel", "1", "--step-timeout", "2"];
    let mut fleet = Fleet::start(&args, 1, 0).await.unwrap();
    let client = fleet.client().unwrap();
    whole(&client, 1.0, 1.0).await;
    let hangs = Instant::now();
    let stopped = match Stopped::thread(fleet.workers[0].pid(), "executor") {
        Ok(stopped) => stopped,
        Err(reason) => return println!("no thread can be stopped here: {reason}"),
    };
    let gone = |s: &Scrape| s.sum("tutti_worker_up", &[]) == 0.0;
    assert!(gone(&client.scrape_until(PATIENCE, gone).await.unwrap()));
    let lasted = hangs.elapsed();
    let log = fleet.coordinator.log();
    assert!(lasted < Duration::from_secs(20), "{lasted:?}\n{log}");
    assert!(log.contains("did not answer while its replica was formed"), "{log}");
    // The process is there as long as whoever has stopped its thread.
    drop(stopped);
    let status = fleet.workers[0].wait_end().unwrap();
    assert_eq!(status.code(), Some(1), "{}", fleet.workers[0].log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_cut_off_costs_a_pause() {
    cut_links(&SHORT, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_front_end_outlive_leaders() {
    head();
    coordinators(&SHORT, SHORT.runs, Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_etcd_may_die() {
    etcd_members(&SHORT, Duration::from_secs(3), 3).await;
}

/// Number of runs per case in the long run.
fn runs() -> usize {
    let runs = std::env::var("TUTTI_RECOVERY_RUNS").ok().and_then(|it| it.parse().ok());
    runs.unwrap_or(LONG.runs)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_killed_ranks() {
    head();
    ranks(&LONG, runs(), 2, false).await;
    ranks(&LONG, runs(), 1, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_hung_ranks() {
    each("rank hangs, 2 replicas", LONG.hung, hung_rank).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_ranks_that_hang_for_good() {
    each("rank hangs for good, 1 replica, 1 spare", LONG.replaced, rank_hung_for_good).await;
}

/// The figures of a case whose runs have a cluster each.
async fn each(
    case: &str,
    bound: Duration,
    run: impl AsyncFn() -> Result<(Seen, Duration), String>,
) {
    head();
    let (mut all, mut pauses) = (Seen::default(), Vec::new());
    for _ in 0..runs() {
        let (seen, pause) = run().await.unwrap();
        all.good += seen.good;
        all.failures.extend(seen.failures);
        pauses.push(pause);
    }
    report(case, &all, pauses, bound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_frozen_ranks() {
    head();
    ranks(&LONG, runs(), 2, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_frozen_ranks_and_spares() {
    head();
    ranks(&LONG, runs(), 1, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_cut_links() {
    head();
    cut_links(&LONG, runs()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_etcd() {
    head();
    etcd_members(&LONG, Duration::from_secs(60), 1).await;
    etcd_members(&LONG, Duration::from_secs(10), 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the long run: minutes, for docs/benchmarks.md"]
async fn figures_of_killed_coordinators() {
    head();
    coordinators(&LONG, runs(), Duration::from_secs(10)).await;
}
