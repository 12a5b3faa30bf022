//! An etcd that starts again under a cluster that leads and serves, and one that never answers.
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shared::membership::LEADER_LEASE_TTL;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;

use crate::etcd::{Meeting, PATIENCE, load, not_ready, sum, until};

/// With the usual leases: the leader's lease outlives the outage, so nothing may end because of it,
/// although etcd refused the first attempts to reconnect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_starts_again_takes_the_lead_from_nobody() {
    let Some(mut meeting) = Meeting::new().await else { return };
    let mut leader = meeting.coordinator(&[]).await;
    let _workers = [meeting.worker(0), meeting.worker(1)];
    leader.wait_ready().await.unwrap();
    let standby = meeting.coordinator(&[]).await;
    let standbys = standby.client().unwrap();
    let stands_by =
        async || not_ready(&standbys).await.filter(|message| message.contains(leader.base()));
    until("the standby knows who leads", stands_by).await;
    let client = leader.client().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let load = load(client.clone(), stop.clone());
    let mut since = meeting.etcd.leads_since().await.unwrap();
    assert!(since.is_some());
    let (mut rounds, mut stalls) = (0, 0);
    while rounds < 2 {
        let connected = |s: &Scrape| sum(s, "tutti_membership_connected");
        meeting.etcd.kill();
        let missed = client.scrape_until(PATIENCE, |s| connected(s) == 0.0).await.unwrap();
        assert_eq!(connected(&missed), 0.0);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let began = Instant::now();
        meeting.etcd.restart().await.unwrap();
        let started = began.elapsed();
        // Its old lease would have ended by then, and others would have run.
        let slowest = meeting.etcd.slowest_answer(2 * LEADER_LEASE_TTL).await;
        let leads = |s: &Scrape| (connected(s), sum(s, "tutti_membership_leading"));
        let scrape = client.scrape_until(PATIENCE, |s| leads(s) == (1.0, 1.0)).await.unwrap();
        assert_eq!(leads(&scrape), (1.0, 1.0), "{}", leader.log());
        assert!(stands_by().await.is_some());
        let asked = Instant::now();
        let leads = meeting.etcd.leads_since().await.unwrap();
        let slowest = slowest.max(asked.elapsed());
        let stood_still = slowest > LEADER_LEASE_TTL / 2 || started > LEADER_LEASE_TTL;
        if leads != since && stood_still && stalls < 3 {
            // An etcd that stood still for as long as a lease lives ends it before it reads what
            // was to keep it alive, as on a machine that is too busy. For a moment nobody leads;
            // then the same coordinator does, and that is all that it can do.
            let again = async || meeting.etcd.leads_since().await.unwrap();
            since = Some(until("it leads again", again).await);
            stalls += 1;
            continue;
        }
        assert_eq!(leads, since, "it never ceased to lead: {slowest:?}, {}", leader.log());
        rounds += 1;
    }
    stop.store(true, Ordering::Relaxed);
    let (count, failures) = load.await.unwrap();
    assert!(count > 10 && failures.is_empty(), "{count} requests: {failures:?}");
    assert_eq!(standby.log().matches("this coordinator leads").count(), 0, "{}", standby.log());
}

/// Each attempt takes longer than the longest wait between two of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_takes_connections_and_says_nothing_is_complained_of_once_a_minute() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let worker = LocalCluster::spawn(&["worker", "--device", "cpu", "--etcd", &url]).unwrap();
    let complaints = || worker.log().matches("etcd does not answer").count();
    until("it complains", async || (complaints() > 0).then_some(())).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(complaints(), 1, "{}", worker.log());
}
