//! The text as a Prometheus server and its own linter see it.
use std::io::Write;
use std::process::{Command, Stdio};

use coordinator::metrics::observe::{RequestSummary, StepTokens};
use coordinator::metrics::{Exposition, Hub, StatLogger, exposition};
use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::metrics::RankStats;
use shared::metrics::catalogue::CATALOGUE;
use shared::metrics::labels::{ActorState, FinishedReason, Method};
use shared::protocol::StepTimings;

use crate::observing::{config, hub, ms};
use crate::scrape::Scrape;

/// A hub in which every series of the catalogue exists.
fn full() -> Hub {
    let hub = hub();
    let replica = ReplicaId(0);
    let mut record = hub.observer().record();
    record.started("1.2.3", ms(1_700_000_000_000));
    record.actors(ActorState::Alive, 2);
    record.worker_up(WorkerId(0), true);
    record.worker_reported(WorkerId(0), ms(1_700_000_000_000));
    record.replica_ready(replica, &config(100));
    record.kv_blocks(replica, 3, 100);
    record.http_started();
    record.http_finished("/v1/completions", Method::Post, 200, ms(30));
    let mut track = record.accepted(ms(0), 1);
    record.scheduled(&mut track, replica, ms(1));
    record.tokens(&mut track, 0, 1, ms(2));
    record.tokens(&mut track, 0, 1, ms(5));
    let summary = RequestSummary { prompt_tokens: 7, n: 1, max_tokens: 9 };
    record.finished(track, FinishedReason::Stop, summary, ms(6));
    let first = StepTokens { prompt_computed: 5, prompt_cached: 2, generated: 1, recomputed: 0 };
    record.step(replica, first);
    record.step(replica, StepTokens { generated: 1, ..StepTokens::default() });
    drop(record);
    let mut rank = RankStats::new(WorkerId(0));
    rank.formed(replica, 0, 1_000, ms(20));
    rank.step(&StepTimings { step_us: 900, ..StepTimings::default() });
    hub.report(WorkerId(0), Incarnation(5), &rank.report().unwrap()).unwrap();
    hub
}

#[test]
fn every_declared_series_is_published_as_declared() {
    let text = exposition::render(&full().merged()).unwrap();
    let scrape = Scrape::read(&text);
    scrape.check_identities();
    let declared: Vec<_> = CATALOGUE.iter().map(|d| d.name).collect();
    for name in &declared {
        assert!(scrape.types.contains_key(*name), "{name} is missing");
    }
    assert_eq!(scrape.types.len(), declared.len(), "nothing undeclared");
    assert_eq!(exposition::CONTENT_TYPE, "text/plain; version=0.0.4");
}

/// Whole families, byte by byte: labels, order, cumulative buckets, numbers.
#[test]
fn families_are_written_as_the_format_says() {
    let text = exposition::render(&full().merged()).unwrap();
    let golden = "\
# HELP tutti_iteration_tokens Tokens per engine step: prompt tokens computed plus tokens generated, once per step.
# TYPE tutti_iteration_tokens histogram
tutti_iteration_tokens_bucket{replica=\"0\",le=\"1\"} 1
tutti_iteration_tokens_bucket{replica=\"0\",le=\"2\"} 1
tutti_iteration_tokens_bucket{replica=\"0\",le=\"4\"} 1
tutti_iteration_tokens_bucket{replica=\"0\",le=\"8\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"16\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"32\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"64\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"128\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"256\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"512\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"1024\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"2048\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"4096\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"8192\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"16384\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"32768\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"65536\"} 2
tutti_iteration_tokens_bucket{replica=\"0\",le=\"+Inf\"} 2
tutti_iteration_tokens_sum{replica=\"0\"} 7
tutti_iteration_tokens_count{replica=\"0\"} 2
# HELP tutti_kv_cache_blocks KV blocks there are.
# TYPE tutti_kv_cache_blocks gauge
tutti_kv_cache_blocks{replica=\"0\"} 100
# HELP tutti_kv_cache_usage_ratio KV blocks used of those there are, 0 to 1. Over replicas divide the sums, do not average.
# TYPE tutti_kv_cache_usage_ratio gauge
tutti_kv_cache_usage_ratio{replica=\"0\"} 0.03
# HELP tutti_kv_cache_used_blocks KV blocks that requests hold now.
# TYPE tutti_kv_cache_used_blocks gauge
tutti_kv_cache_used_blocks{replica=\"0\"} 3
";
    assert!(text.contains(golden), "{text}");
    let golden = "\
# TYPE tutti_request_success_total counter
tutti_request_success_total{finished_reason=\"abort\"} 0
tutti_request_success_total{finished_reason=\"error\"} 0
tutti_request_success_total{finished_reason=\"length\"} 0
tutti_request_success_total{finished_reason=\"stop\"} 1
";
    assert!(text.contains(golden), "{text}");
    let info = "tutti_cache_config_info{block_size=\"16\",max_model_len=\"4096\",\
                max_num_batched_tokens=\"2048\",max_num_seqs=\"64\",num_blocks=\"100\",\
                replica=\"0\",tensor_parallel=\"2\"} 1\n";
    assert!(text.contains(info), "{text}");
}

#[test]
fn the_prometheus_logger_holds_the_last_text() {
    let hub = full();
    let mut logger = Exposition::default();
    logger.log(ms(0), &hub.merged());
    let first = logger.text().to_owned();
    hub.observer().record().fenced_frames(41);
    logger.log(ms(0), &hub.merged());
    assert_eq!(
        first.lines().count(),
        logger.text().lines().count(),
        "nothing is left of the first"
    );
    assert!(logger.text().contains("tutti_fenced_frames_total 41\n"));
}

/// `promtool check metrics` finds nothing. The tool comes with the Prometheus server; without it
/// this checks nothing on a developer's machine and fails in continuous integration.
#[test]
fn promtool_finds_nothing_to_complain_about() {
    let text = exposition::render(&full().merged()).unwrap();
    let child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("promtool is not here ({error}); the linter was not asked");
            return;
        }
        Err(error) => panic!("promtool is needed in continuous integration: {error}"),
    };
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.is_empty(), "{said}");
}
