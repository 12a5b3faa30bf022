//! Every query of dashboards and rules, sent to a real Prometheus that scrapes a real cluster.
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fake_nvml::fake_nvml;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use testkit::models::repository;

use crate::files::{self, Query, Rule};
use crate::prometheus::Prometheus;
use crate::promql::{definition, label_values, selectors, substitute};

/// Duration of the load: long enough for rates, shorter than the window that replaces Grafana's
/// variables.
const LOAD: Duration = Duration::from_secs(12);

/// Sends requests of every kind until `LOAD` is over.
async fn load(client: &Client) {
    let began = Instant::now();
    let mut seed = 0;
    while began.elapsed() < LOAD {
        seed += 1;
        let body = json!({
            "model": "demo", "prompt": "Once upon a time, there was a little fox named Pip.",
            "max_tokens": 24, "temperature": 0.8, "seed": seed,
        });
        let mut streaming = body.clone();
        streaming["stream"] = json!(true);
        let mut abandoned = streaming.clone();
        abandoned["max_tokens"] = json!(600);
        abandoned["ignore_eos"] = json!(true);
        let mut guided = body.clone();
        guided["structured_outputs"] = json!({ "choice": ["a fox", "a rabbit"] });
        let (whole, guided, stream, ()) = tokio::join!(
            client.post("/v1/completions", &body),
            client.post("/v1/completions", &guided),
            client.stream("/v1/completions", &streaming),
            // Few enough that no alert fires.
            async {
                if seed % 3 == 0 {
                    abandon(client, &abandoned).await;
                }
            },
        );
        assert_eq!((whole.unwrap().status, guided.unwrap().status), (200, 200));
        assert!(stream.unwrap().done);
        let bad = client.post("/v1/completions", &json!({"model": "demo", "prompt": 7})).await;
        assert_eq!(bad.unwrap().status, 400);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Starts a stream and leaves after its first bytes.
async fn abandon(client: &Client, body: &Value) {
    let response = client.open("/v1/completions", body).await.unwrap();
    assert!(response.bytes_stream().next().await.is_some());
}

/// Conditions for optional series that this test's cluster meets.
const MET: [&str; 2] = ["NVML finds a GPU", "front ends join"];

/// Whether `name` appears only under a condition that this cluster does not meet.
fn is_conditional(name: &str) -> bool {
    let when = definition(name).and_then(|definition| definition.when);
    when.is_some_and(|when| !MET.contains(&when))
}

/// Whether a query may have an empty result, because all its series are conditional.
fn may_be_empty(query: &str) -> bool {
    let found = selectors(query);
    !found.is_empty() && found.iter().all(|found| is_conditional(found.name))
}

/// Finds a problem in the result of a query that must have one.
async fn query_problem(server: &Prometheus, query: &Query) -> Option<String> {
    let sent = substitute(&query.expr);
    let problem = match server.query(&sent).await {
        Err(error) => error,
        Ok(values) if values.is_empty() && !may_be_empty(&query.expr) => "no data".to_owned(),
        Ok(_) => return None,
    };
    Some(format!("{}: {problem}: {sent}", query.place))
}

/// Finds a problem in the values of a dashboard's variable.
async fn variable_problem(server: &Prometheus, variable: &Query) -> Option<String> {
    let sent = substitute(&variable.expr);
    let problem = match label_values(&sent) {
        None => "is not label_values(SERIES, LABEL)".to_owned(),
        Some((series, label)) => match server.label_values(series, label).await {
            Err(error) => error,
            Ok(0) => "no value".to_owned(),
            Ok(_) => return None,
        },
    };
    Some(format!("{}: {problem}: {sent}", variable.place))
}

/// Finds a problem of an alert: on a healthy cluster it must not fire, but its series must exist.
async fn alert_problem(server: &Prometheus, alert: &Rule) -> Option<String> {
    let values = match server.query(&alert.expr).await {
        Err(error) => return Some(format!("{}: {error}", alert.name)),
        Ok(values) => values,
    };
    // The test machine may really be short of a resource.
    if !values.is_empty() && alert.group != "tutti-hardware" {
        return Some(format!("{}: a healthy cluster raises it: {values:?}", alert.name));
    }
    let mut exists = may_be_empty(&alert.expr);
    for selector in selectors(&alert.expr) {
        exists |= !server.query(selector.name).await.unwrap_or_default().is_empty();
    }
    (!exists).then(|| format!("{}: none of its series exists", alert.name))
}

/// Returns the rules that the server itself could not evaluate.
async fn rule_health(server: &Prometheus) -> Vec<String> {
    let data = server.get("/api/v1/rules").await.unwrap();
    let mut problems = Vec::new();
    let mut evaluated = 0;
    for rule in files::list(&data["groups"]).iter().flat_map(|group| files::list(&group["rules"])) {
        evaluated += 1;
        if rule["health"] != "ok" {
            problems.push(format!("{}: {} {}", rule["name"], rule["health"], rule["lastError"]));
        }
    }
    assert_eq!(evaluated, files::rules().len(), "the server has every rule");
    problems
}

/// Waits until the recording rules have been evaluated over the load.
async fn wait_recorded(server: &Prometheus) {
    let began = Instant::now();
    let recorded: Vec<Rule> = files::rules().into_iter().filter(|rule| !rule.is_alert).collect();
    let mut next = 0;
    while next < recorded.len() && began.elapsed() < Duration::from_secs(10) {
        if server.query(&recorded[next].name).await.unwrap_or_default().is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        } else {
            next += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_has_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let library = fake_nvml(folder.path()).unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let nvml = library.to_str().unwrap();
    let cluster =
        LocalCluster::up(&["--cluster-listen", &address, "--nvml-lib", nvml]).await.unwrap();
    let mut frontend =
        LocalCluster::spawn(&["frontend", "--coordinator", &address, "--listen", "127.0.0.1:0"])
            .unwrap();
    frontend.wait_ready().await.unwrap();
    let target = cluster.base().trim_start_matches("http://");
    let [config, ..] = &files::prometheus_configs()[..] else { panic!("no configuration") };
    let Some(server) = Prometheus::start(target, config).await else { return };
    load(&cluster.client().unwrap()).await;
    wait_recorded(&server).await;

    let mut problems = Vec::new();
    for dashboard in files::dashboards() {
        for query in dashboard.queries() {
            problems.extend(query_problem(&server, &query).await);
        }
        for variable in dashboard.variables() {
            problems.extend(variable_problem(&server, &variable).await);
        }
    }
    for rule in files::rules() {
        if rule.is_alert {
            problems.extend(alert_problem(&server, &rule).await);
        } else {
            for expr in [rule.expr, rule.name.clone()] {
                let query = Query { place: rule.name.clone(), expr };
                problems.extend(query_problem(&server, &query).await);
            }
        }
    }
    for query in files::scaling() {
        problems.extend(query_problem(&server, &query).await);
    }
    problems.extend(rule_health(&server).await);
    problems.extend(identity_problems(&server).await);
    crate::assert_none("queries", &problems);
    the_checks_can_fail(&server).await;
}

/// The autoscaler's queries must have a result, above all without workers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_is_known_where_no_replica_serves() {
    let listen = ["--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"];
    let model = repository().join("models/demo");
    let model = ["coordinator", "--tensor-parallel", "1", "--model", model.to_str().unwrap()];
    let mut cluster = LocalCluster::spawn(&[&model[..], &listen].concat()).unwrap();
    cluster.wait_url().await.unwrap();
    let target = cluster.base().trim_start_matches("http://");
    let [config, ..] = &files::prometheus_configs()[..] else { panic!("no configuration") };
    let Some(server) = Prometheus::start(target, config).await else { return };
    let began = Instant::now();
    while server.query("max(up) == 1").await.unwrap_or_default().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20), "nothing is scraped");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let running = server.query("sum(tutti_requests_running)").await.unwrap();
    assert!(running.is_empty(), "no replica has a series: {running:?}");
    let queries = files::scaling();
    assert!(!queries.is_empty());
    for query in queries {
        assert_eq!(server.query(&query.expr).await, Ok(vec![0.0]), "{}", query.expr);
    }
}

/// Checks that the cluster's series have no `instance`, so that they continue under the next
/// leader, and that a process's series have one.
async fn identity_problems(server: &Prometheus) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, of_process) in [
        ("tutti_requests_accepted_total", false),
        ("process_start_time_seconds", true),
        ("up", true),
    ] {
        for (matcher, wanted) in [("instance!=\"\"", of_process), ("instance=\"\"", !of_process)] {
            let found = server.query(&format!("{name}{{{matcher}}}")).await.unwrap_or_default();
            if found.is_empty() == wanted {
                problems.push(format!("{name}{{{matcher}}}: {} series", found.len()));
            }
        }
        let helper = server.query(&format!("{name}{{__tmp_instance!=\"\"}}")).await;
        if helper.is_ok_and(|found| !found.is_empty()) {
            problems.push(format!("{name} has a label that is none"));
        }
    }
    problems
}

/// Checks that each check detects its problem, with the server that the test already has.
async fn the_checks_can_fail(server: &Prometheus) {
    let query = |expr: &str| Query { place: "x".to_owned(), expr: expr.to_owned() };
    for bad in [
        "sum(rate(tutti_generation_tokens_total[30s])",
        "sum(tutti_generated_tokens_total)",
        "sum(tutti_requests_running{replica=\"7\"})",
        "sum(tutti_requests_waiting * 0) / sum(tutti_requests_waiting * 0)",
        "sum by (le) (rate(tutti_iteration_tokens_total[30s]))",
        "sum(tutti_worker_up) + sum(tutti_requests_swapped)",
    ] {
        assert!(query_problem(server, &query(bad)).await.is_some(), "{bad}");
    }
    assert!(query_problem(server, &query("sum(tutti_requests_swapped)")).await.is_none());
    for bad in ["label_values(tutti_cache_config_info, engine)", "label_values(replica)"] {
        assert!(variable_problem(server, &query(bad)).await.is_some(), "{bad}");
    }
    let alert = |expr: &str| Rule {
        group: "tutti-cluster".to_owned(),
        name: "x".to_owned(),
        is_alert: true,
        expr: expr.to_owned(),
        severity: String::new(),
        summary: String::new(),
        description: String::new(),
    };
    for bad in ["tutti_worker_up == 1", "tutti_workers_up == 0", "tutti_worker_up =="] {
        assert!(alert_problem(server, &alert(bad)).await.is_some(), "{bad}");
    }
}
