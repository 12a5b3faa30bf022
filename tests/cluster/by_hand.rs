//! A coordinator and workers started one by one, as on several machines.
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::{STORY, greedy, text, up};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_started_by_hand_serve_the_same_text_over_tcp() {
    let expected = {
        let cluster = up(&[]).await;
        let client = cluster.client().unwrap();
        client.post("/v1/completions", &greedy(STORY, 40)).await.unwrap().body
    };
    let address = format!("127.0.0.1:{}", free_port());
    let workers: Vec<LocalCluster> = ["one", "two"]
        .iter()
        .map(|node| {
            // Workers may start before the coordinator: they dial until it answers. Different host
            // ids make them connect over TCP, as on two machines.
            LocalCluster::spawn(&[
                "worker",
                "--coordinator",
                &address,
                "--node",
                node,
                "--host-id",
                node,
            ])
            .unwrap()
        })
        .collect();
    let mut coordinator = LocalCluster::spawn(&[
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        &address,
    ])
    .unwrap();
    coordinator.wait_ready().await.unwrap();
    let client = coordinator.client().unwrap();
    let reply = client.post("/v1/completions", &greedy(STORY, 40)).await.unwrap();
    assert_eq!(text(&reply.body), text(&expected));
    for worker in &workers {
        assert!(worker.log().contains("tcp"), "{}", worker.log());
    }
}
