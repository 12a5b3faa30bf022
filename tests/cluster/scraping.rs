//! What operators see of a running cluster: formats, a separate listener for scrapers, other
//! servers' metric names, the log line, JSON logs, metrics of applications.
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use shared::actor::ActorRuntime;
use shared::clock::SystemClock;
use shared::log::SharedLog;
use shared::metrics::application::{GaugeMerge, Metrics};
use shared::protocol::NodeResources;
use testkit::fleet::Fleet;
use testkit::scrape::Scrape;
use worker::device::{CpuDevice, DeviceChoice};
use worker::health::WorkerHealth;
use worker::run::WorkerOptions;

use crate::{STORY, greedy, up};

const PATIENCE: Duration = Duration::from_secs(20);

/// GETs with curl, which negotiates and decodes as scrapers do; returns head and body.
pub(crate) fn curl(args: &[&str], url: &str) -> (String, String) {
    let output = Command::new("curl").args(["-s", "-D", "-"]).args(args).arg(url).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scraper_gets_the_format_it_asks_for() {
    let port = testkit::fleet::free_port();
    let listen = format!("127.0.0.1:{port}");
    let cluster = up(&["--metrics-listen", &listen, "--metrics-compat", "vllm,aphrodite"]).await;
    let client = cluster.client().unwrap();
    let reply = client.post("/v1/completions", &greedy(STORY, 12)).await.unwrap().body;
    let id = reply["id"].as_str().unwrap();
    for base in [cluster.base().to_owned(), format!("http://{listen}")] {
        let url = format!("{base}/metrics");
        let (head, body) = curl(&[], &url);
        assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
        assert!(!head.contains("content-encoding") && !body.contains("# EOF"), "{head}");
        let (head, body) = curl(&["--compressed"], &url);
        assert!(head.contains("content-encoding: gzip"), "{head}");
        assert!(body.contains("# TYPE tutti_requests_accepted_total counter"), "it decodes");
        let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
        let (head, body) = curl(&["-H", accept], &url);
        assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
        assert!(body.ends_with("# EOF\n"));
        let exemplar = format!("# {{request_id=\"{id}\"}}");
        let mut lines = body.lines().filter(|line| line.contains(&exemplar));
        assert!(lines.any(|l| l.starts_with("tutti_e2e_request_latency_seconds_bucket")), "{id}");

        let scrape = Scrape::parse(&curl(&[], &url).1).unwrap();
        let model = [("model_name", "demo")];
        for name in ["vllm:generation_tokens_total", "aphrodite:generation_tokens_total"] {
            assert_eq!(scrape.sum(name, &model), 12.0, "{name}");
        }
        assert_eq!(scrape.sum("tutti_generation_tokens_total", &model), 12.0);
        assert!(scrape.has("vllm:num_requests_waiting", &[("engine", "0")]));
        assert!(scrape.sum("process_resident_memory_bytes", &[]) > 1e6);
    }
    // The listener for scrapers serves nothing else except probes.
    let status = |path: &str| curl(&[], &format!("http://{listen}{path}")).0;
    assert!(status("/v1/models").contains("404"));
    for probe in ["/live", "/health", "/ready"] {
        assert!(status(probe).starts_with("http/1.1 200"), "{probe}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statistics_are_logged_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stats.jsonl");
    let fields = "running,ttft,finished,replicas";
    let cluster = up(&[
        "--log-stats-interval",
        "1",
        "--log-stats-fields",
        fields,
        "--log-stats-json",
        file.to_str().unwrap(),
    ])
    .await;
    let client = cluster.client().unwrap();
    // Of one token: the first one and the end are in the same interval, however slow the machine.
    client.post("/v1/completions", &greedy(STORY, 1)).await.unwrap();
    let wanted = "Finished: 1 reqs, Replicas: 1.";
    let began = Instant::now();
    let objects = loop {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let objects: Vec<Value> =
            text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let finished = |o: &Value| o["requests_finished"] == 1;
        if objects.iter().any(finished) && objects.len() > 2 && cluster.log().contains(wanted) {
            break objects;
        }
        assert!(began.elapsed() < PATIENCE, "{text}\n{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let busy = objects.iter().find(|object| object["requests_finished"] == 1).unwrap();
    assert!(busy["generation_tokens_per_second"].as_f64().unwrap() > 0.0, "{busy}");
    assert!(busy["time_to_first_token_seconds"].as_f64().unwrap() > 0.0, "{busy}");
    assert!(busy["time"].as_f64().unwrap() > 1.7e9, "{busy}");
    // Rates fall to zero by the timer, without another step, and so do the deprecated gauges.
    let idle = |s: &Scrape| {
        s.has("tutti_generation_throughput_tokens_per_second", &[])
            && s.sum("tutti_generation_throughput_tokens_per_second", &[]) == 0.0
    };
    assert!(idle(&client.scrape_until(PATIENCE, idle).await.unwrap()));
    let log = cluster.log();
    let line = log.lines().find(|line| line.contains(wanted)).unwrap();
    let first = line.split("Running: 0 reqs, Avg time to first token: ").nth(1).unwrap();
    assert!(first.starts_with(|it: char| it.is_ascii_digit()), "{line}");
    let lines = log.lines().filter(|line| line.contains("Running: ")).count();
    assert!(lines <= 3, "quiet when idle:\n{log}");
}

/// Runs a worker in this process, like a program that embeds one, until the test ends.
fn embed_worker(coordinator: &str, node: &str, application: Metrics) {
    let options = WorkerOptions {
        coordinator: coordinator.into(),
        node: node.to_owned(),
        host: node.to_owned(),
        device: DeviceChoice::Cpu(CpuDevice { threads: 1 }),
        collective_listen: None,
        incarnation: std::process::id().into(),
        application,
        nvml: None,
        secret: None,
        log: SharedLog::default(),
        offer: NodeResources::default(),
        actors: ActorRuntime::spoke(node, 1, Arc::new(SystemClock::start())),
        hub: Err("none".to_owned()),
        drain_timeout: worker::run::DRAIN_TIMEOUT,
        health: WorkerHealth::default(),
    };
    std::thread::spawn(move || {
        actix_web::rt::System::new().block_on(async move {
            let _ = worker::run::run(options, std::future::pending()).await;
        });
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_application_counts_anywhere_is_on_the_same_page() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let client = fleet.client().unwrap();
    let processes = [Metrics::new(), Metrics::new(), Metrics::new()];
    for (index, metrics) in processes.iter().enumerate() {
        embed_worker(fleet.address(), &format!("embedded-{index}"), metrics.clone());
        let documents = metrics.counter("rag_documents_total", "Documents read.", &["tenant"]);
        documents.unwrap().add(10, &["acme"]).unwrap();
        let size = metrics.gauge("rag_index_bytes", "Size.", &[], GaugeMerge::Sum).unwrap();
        size.set(100.0, &[]).unwrap();
        let seconds = metrics.histogram("rag_seconds", "Time.", &[0.1, 1.0], &[]).unwrap();
        seconds.observe(0.5, &[]).unwrap();
    }
    // The last process uses the others' metric name with a different meaning.
    let odd = processes[2].gauge("rag_queue", "Queue.", &["a"], GaugeMerge::Max).unwrap();
    let first = processes[0].gauge("rag_queue", "Queue.", &["b"], GaugeMerge::Max).unwrap();
    first.set(1.0, &["x"]).unwrap();
    let there = |s: &Scrape| {
        s.sum("rag_documents_total", &[("tenant", "acme")]) == 30.0 && s.has("rag_queue", &[])
    };
    let scrape = client.scrape_until(PATIENCE, there).await.unwrap();
    assert!(there(&scrape), "{}", fleet.coordinator.log());
    assert_eq!(scrape.sum("rag_index_bytes", &[]), 300.0);
    assert_eq!(scrape.sum("rag_seconds_count", &[]), 3.0);
    assert_eq!(scrape.sum("rag_seconds_bucket", &[("le", "0.1")]), 0.0);
    odd.set(5.0, &["y"]).unwrap();
    let refused =
        |s: &Scrape| s.sum("tutti_reports_refused_total", &[("reason", "application")]) > 0.0;
    let scrape = client.scrape_until(PATIENCE, refused).await.unwrap();
    assert!(refused(&scrape));
    assert_eq!(scrape.sum("rag_queue", &[]), 1.0, "the first declaration holds");
    assert_eq!(scrape.sum("rag_documents_total", &[]), 30.0, "the rest of its report is taken");
    let log = fleet.coordinator.log();
    assert!(log.contains("application metric `rag_queue` is refused"), "{log}");
}
