//! Which workers form a replica: labels, resources and spares, as options of real processes.
use serde_json::Value;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::scaling::operate;

/// Starts a coordinator with `args`, and one worker per entry of `workers`, on different hosts,
/// with its options.
async fn cluster(args: &[&str], workers: &[&[&str]]) -> (LocalCluster, Vec<LocalCluster>) {
    let address = format!("127.0.0.1:{}", free_port());
    let mut all = vec!["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", &address];
    all.extend(args);
    let mut coordinator = LocalCluster::spawn(&all).unwrap();
    let spawn = |(index, options): (usize, &&[&str])| {
        let (node, host) = (format!("w{index}"), format!("host-{index}"));
        let mut all = vec!["worker", "--coordinator", &address, "--threads", "1"];
        all.extend(["--node", &node, "--host-id", &host]);
        all.extend(*options);
        LocalCluster::spawn(&all).unwrap()
    };
    let workers = workers.iter().enumerate().map(spawn).collect();
    coordinator.wait_ready().await.unwrap();
    (coordinator, workers)
}

/// The cluster's status once `wanted` holds, or after a time limit.
async fn status(server: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    for _ in 0..400 {
        let (ok, said) = operate(server, &["status", "--json"]);
        assert!(ok, "{said}");
        last = serde_json::from_str(&said).unwrap();
        if wanted(&last) {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    last
}

/// The node names of each replica's ranks, sorted.
fn groups(status: &Value) -> Vec<Vec<String>> {
    let nodes = status["nodes"].as_array().unwrap();
    let name = |slot: &Value| {
        let node = nodes.iter().find(|node| node["slot"] == *slot && node["role"] == "worker");
        node.map_or_else(String::new, |node| node["node"].as_str().unwrap().to_owned())
    };
    let mut groups: Vec<Vec<String>> = status["replicas"]
        .as_array()
        .unwrap()
        .iter()
        .map(|replica| {
            let mut names: Vec<_> = replica["ranks"].as_array().unwrap().iter().map(name).collect();
            names.sort_unstable();
            names
        })
        .collect();
    groups.sort_unstable();
    groups
}

fn spares(status: &Value) -> Vec<&str> {
    let nodes = status["nodes"].as_array().unwrap().iter();
    let spare = nodes.filter(|node| node["state"] == "spare");
    let mut names: Vec<_> = spare.map(|node| node["node"].as_str().unwrap()).collect();
    names.sort_unstable();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_are_of_one_rack_and_have_what_they_need() {
    // The first workers do not wait for others: only two are near each other and able to serve.
    let args = ["--tensor-parallel", "2", "--placement-labels", "rack"];
    let args = [&args[..], &["--rank-resources", "slot=1", "--replicas", "1"]].concat();
    let workers: [&[&str]; 4] = [
        &["--label", "rack=r0", "--resource", "other=5"],
        &["--label", "rack=r1,zone=a", "--resource", "slot=1"],
        &["--label", "rack=r0"],
        &["--label", "rack=r1", "--resource", "slot=2"],
    ];
    let (coordinator, _workers) = cluster(&args, &workers).await;
    let four = |s: &Value| s["nodes"].as_array().is_some_and(|nodes| nodes.len() == 4);
    let status = status(coordinator.base(), four).await;
    assert_eq!(groups(&status), [["w1", "w3"]], "{status}");
    assert_eq!(spares(&status), ["w0", "w2"]);
    let nodes = status["nodes"].as_array().unwrap();
    let w1 = nodes.iter().find(|node| node["node"] == "w1").unwrap();
    assert_eq!(w1["offer"]["labels"]["zone"], "a");
    assert_eq!(w1["offer"]["custom"]["slot"], 1);
    assert!(w1["offer"]["cpus"].as_u64().unwrap() >= 1, "{w1}");
    assert!(w1["offer"]["memory_bytes"].as_u64().unwrap() > 1 << 20, "{w1}");
    assert!(coordinator.log().contains("too few resources to be a rank"), "{}", coordinator.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spares_are_kept_for_gaps_and_fill_them() {
    let args = ["--tensor-parallel", "1", "--spares", "2"];
    let (coordinator, workers) = cluster(&args, &[&[], &[], &[]]).await;
    let three = |s: &Value| s["nodes"].as_array().is_some_and(|nodes| nodes.len() == 3);
    let now = status(coordinator.base(), three).await;
    assert_eq!((groups(&now).len(), spares(&now).len()), (1, 2), "{now}");
    let serving = groups(&now)[0][0].clone();
    let index: usize = serving[1..].parse().unwrap();
    LocalCluster::signal(workers[index].pid(), "KILL").unwrap();
    let moved = |s: &Value| {
        let groups = groups(s);
        groups.len() == 1
            && groups[0] != [serving.clone()]
            && s["replicas"][0]["state"] == "serving"
    };
    let now = status(coordinator.base(), moved).await;
    assert!(moved(&now), "{now}");
    assert_eq!(spares(&now).len(), 1);
}
