//! Coordinators that stand by with other options or another secret than the leader's.
use std::path::{Path, PathBuf};

use testkit::client::Client;
use testkit::local_cluster::LocalCluster;

use crate::etcd::{Meeting, not_ready, serves, until};
use crate::scaling::operate;
use crate::secrets::secret_file;

fn file(folder: &Path, name: &str, text: &str) -> PathBuf {
    secret_file(folder, name, text.repeat(44).as_bytes(), 0o600)
}

async fn says(process: &LocalCluster, parts: &[&str]) {
    until(parts[0], async || {
        let log = process.log();
        parts.iter().all(|part| log.contains(part)).then_some(())
    })
    .await;
}

/// Waits until the status at the leader shows a standby like this.
async fn shown(server: &str, secret: &[&str], state: &str) {
    until(state, async || {
        let (ok, table) = operate(server, &[&["status"], secret].concat());
        (ok && table.contains(state)).then_some(())
    })
    .await;
}

async fn served_by(client: &Client) {
    until("it serves", async || serves(client).await.then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_with_another_secret_does_not_follow_a_leader_that_ends() {
    let Some(meeting) = Meeting::new().await else { return };
    let folder = tempfile::tempdir().unwrap();
    let (right, wrong) = (file(folder.path(), "right", "r"), file(folder.path(), "wrong", "w"));
    let right = ["--cluster-secret-file", right.to_str().unwrap()];
    let wrong = ["--cluster-secret-file", wrong.to_str().unwrap()];
    let mut first = meeting.coordinator_of("1", &right).await;
    let mut worker = meeting.worker_with(0, &right);
    first.wait_ready().await.unwrap();
    let stranger = meeting.coordinator_of("1", &wrong).await;
    says(&stranger, &["another cluster secret", first.base(), "--cluster-secret-file"]).await;
    shown(first.base(), &right, "standby (another cluster secret)").await;

    LocalCluster::signal(first.pid(), "TERM").unwrap();
    assert!(first.wait_end().unwrap().success(), "{}", first.log());
    tokio::time::sleep(std::time::Duration::from_secs(8)).await;
    let client = stranger.client().unwrap();
    assert!(not_ready(&client).await.is_some_and(|it| it.contains("stands by")));
    assert!(!stranger.log().contains("this coordinator leads"), "{}", stranger.log());
    // Its file is mended: it leads, and the worker is still there.
    file(folder.path(), "wrong", "r");
    served_by(&client).await;
    LocalCluster::signal(worker.pid(), "INT").unwrap();
    assert!(worker.wait_end().unwrap().success(), "{}", worker.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_handed_over_to_one_that_serves_something_else() {
    let Some(meeting) = Meeting::new().await else { return };
    let mut first = meeting.coordinator_of("1", &[]).await;
    let _worker = meeting.worker(0);
    first.wait_ready().await.unwrap();
    let _frontend = meeting.frontend().await;
    let other = meeting.coordinator_of("1", &["--served-model-name", "other"]).await;
    says(&other, &["another served model name (other, there ", first.base()]).await;
    shown(first.base(), &[], "standby (another served model name)").await;
    LocalCluster::signal(first.pid(), "TERM").unwrap();
    assert!(first.wait_end().unwrap().success(), "{}", first.log());
    assert!(first.log().contains("requests of front ends are not handed over"), "{}", first.log());
    until("it leads", async || other.log().contains("this coordinator leads").then_some(())).await;
}
