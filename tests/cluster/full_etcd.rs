//! How much etcd has to store, and what happens when it is full.
use std::process::Command;
use std::time::{Duration, Instant};

use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client as EtcdClient};
use testkit::etcd::Etcd;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::models::repository;

use crate::etcd::{Meeting, PATIENCE, serves, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_cluster_writes_next_to_nothing() {
    let Some(meeting) = Meeting::new().await else { return };
    let mut leader = meeting.coordinator_of("1", &["--checkpoint-interval", "1"]).await;
    let _workers: Vec<_> = (0..2).map(|index| meeting.worker(index)).collect();
    leader.wait_ready().await.unwrap();
    let client = leader.client().unwrap();
    let age = |scrape: &testkit::scrape::Scrape| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_secs_f64() - scrape.sum("tutti_totals_checkpoint_timestamp_seconds", &[])
    };
    let both = |s: &testkit::scrape::Scrape| s.sum("tutti_replica_up", &[]) == 2.0;
    client.scrape_until(PATIENCE, both).await.unwrap();
    assert!(serves(&client).await);
    // Until the changes are written.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (before, began) = (meeting.etcd.revision().await.unwrap(), Instant::now());
    let idle = Duration::from_secs(20);
    while began.elapsed() < idle {
        // Probes and scrapes cause no writes.
        assert_eq!(client.get("/ready").await.unwrap().status, 200);
        let scrape = client.scrape().await.unwrap();
        assert!(age(&scrape) < 10.0, "the totals look as if nobody wrote them: {}", age(&scrape));
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let written = meeting.etcd.revision().await.unwrap() - before;
    // A piece and a head every 12 intervals, so twice in 20 s. One at every interval would be 40
    // writes.
    assert!(written <= 6, "{written} writes in {idle:?}");
    // Changes are written one interval later, as usual: if each took 12, three would take longer.
    let accepted = |s: &testkit::scrape::Scrape| s.sum("tutti_requests_accepted_total", &[]);
    let asked = Instant::now();
    for _ in 0..3 {
        let was = accepted(&client.scrape().await.unwrap());
        assert!(serves(&client).await);
        let more = |s: &testkit::scrape::Scrape| accepted(s) > was;
        assert!(more(&client.scrape_until(PATIENCE, more).await.unwrap()));
    }
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    assert!(meeting.etcd.revision().await.unwrap() > before + written);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_etcd_is_named_with_its_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = Etcd::start_small(folder.path(), 16 << 20).await.unwrap() else { return };
    let endpoint = etcd.endpoint();
    let spawn = |args: &[&str]| LocalCluster::spawn(&[args, &["--etcd", &endpoint]].concat());
    let any = "127.0.0.1:0";
    let coordinator = ["coordinator", "--listen", any, "--cluster-listen", any];
    let one = ["--tensor-parallel", "1", "--checkpoint-interval", "1"];
    let mut leader = spawn(&[&coordinator[..], &one].concat()).unwrap();
    let _worker = spawn(&["worker", "--node", "before", "--threads", "1"]).unwrap();
    leader.wait_ready().await.unwrap();
    let client = leader.client().unwrap();
    // Another client fills it.
    let mut filler = EtcdClient::connect([&endpoint], None).await.unwrap();
    let value = vec![7u8; 1 << 20];
    let full = async {
        for at in 0.. {
            if filler.put(format!("/other/{at}"), value.clone(), None).await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, full).await.expect("it is full");

    // The cluster keeps serving, and every role reports the problem.
    assert!(serves(&client).await);
    until("the leader says so", async || leader.log().contains("etcdctl defrag").then_some(()))
        .await;
    assert!(leader.log().contains("etcd is full"), "{}", leader.log());
    let worker = spawn(&["worker", "--node", "after", "--threads", "1"]).unwrap();
    let standby = spawn(&coordinator).unwrap();
    let frontend = spawn(&["frontend", "--listen", any]).unwrap();
    for (role, process) in [("worker", &worker), ("standby", &standby), ("front end", &frontend)] {
        until(role, async || process.log().contains("etcdctl defrag").then_some(())).await;
    }
    // Logged once, not at every attempt.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(worker.log().matches("nobody can join or take over").count(), 1, "{}", worker.log());
    let doctor = Command::new(tutti_binary())
        .args(["doctor", "--etcd", &endpoint, "--listen", any, "--cluster-listen", any])
        .current_dir(repository())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let line =
        said.lines().find(|line| line.contains("NOSPACE")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.starts_with("fail") && line.contains("etcdctl alarm disarm"), "{line}");

    // After the remedy in the message, everyone can join.
    let all = etcd_client::DeleteOptions::new().with_prefix();
    let deleted = filler.delete("/other/", Some(all)).await.unwrap();
    let revision = deleted.header().unwrap().revision();
    filler.compact(revision, None).await.unwrap();
    filler.defragment().await.unwrap();
    let (kind, all) = (AlarmType::Nospace, AlarmType::None);
    for alarm in filler.alarm(AlarmAction::Get, all, None).await.unwrap().alarms() {
        let mut member = AlarmOptions::new();
        member.with_member(alarm.member_id());
        filler.alarm(AlarmAction::Deactivate, kind, Some(member)).await.unwrap();
    }
    until("the worker joins", async || {
        let scrape = client.scrape().await.ok()?;
        (scrape.sum("tutti_worker_up", &[]) == 2.0).then_some(())
    })
    .await;
}
