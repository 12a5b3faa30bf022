//! An etcd that starts again under a cluster that leads and serves, and one that never answers.
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
    let since = meeting.etcd.leads_since().await;
    assert!(since.is_some());
    for _ in 0..2 {
        let connected = |s: &Scrape| sum(s, "tutti_membership_connected");
        meeting.etcd.kill();
        let missed = client.scrape_until(PATIENCE, |s| connected(s) == 0.0).await.unwrap();
        assert_eq!(connected(&missed), 0.0);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        meeting.etcd.restart().await.unwrap();
        // Its old lease would have ended by then, and others would have run.
        tokio::time::sleep(2 * LEADER_LEASE_TTL).await;
        let scrape = client.scrape().await.unwrap();
        let leads = (connected(&scrape), sum(&scrape, "tutti_membership_leading"));
        assert_eq!(leads, (1.0, 1.0), "{}", leader.log());
        assert!(stands_by().await.is_some());
        assert_eq!(meeting.etcd.leads_since().await, since, "it never ceased to lead");
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
