//! The exposition text as a Prometheus server and its linter see it.

use coordinator::metrics::exposition::{Format, Page, PageOptions};
use coordinator::metrics::observe::{RequestSummary, StepTokens};
use coordinator::metrics::{Exposition, Hub, StatLogger};
use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::metrics::catalogue::{self, CATALOGUE};
use shared::metrics::compat::Compat;
use shared::metrics::labels::{ActorState, FencedReason, FinishedReason, Method};
use shared::metrics::{Merged, RankStats, Source};
use shared::protocol::StepTimings;
use testkit::promtool::check_metrics;

use crate::rig::{config, hub, id, ms, text};
use crate::scrape::Scrape;

/// A hub in which every series of the catalogue exists.
fn full() -> Hub {
    let hub = hub();
    let replica = ReplicaId(0);
    let mut record = hub.observer().record();
    record.started("1.2.3", ms(1_700_000_000_000));
    record.actors(ActorState::Alive, 2);
    record.replicas_wanted(1);
    record.worker_up(WorkerId(0), true);
    record.device_set_aside(WorkerId(0), false);
    record.worker_reported(WorkerId(0), ms(1_700_000_000_000));
    record.replica_ready(replica, &config(100));
    record.kv_blocks(replica, 3, 100);
    hub.frontend().http_started();
    hub.frontend().http_finished("/v1/completions", Method::Post, 200, ms(30));
    record.throughput(3.5, 0.0);
    record.worker_info(WorkerId(0), "a-node", "1.2.3");
    let mut track = record.accepted(ms(0), 1, &id());
    record.scheduled(&mut track, replica, ms(1));
    record.tokens(&mut track, 0, 1, ms(2));
    record.tokens(&mut track, 0, 1, ms(5));
    let summary = RequestSummary { prompt_tokens: 7, n: 1, max_tokens: 9, cached_tokens: 2 };
    record.finished(track, FinishedReason::Stop, summary, ms(6));
    let first = StepTokens {
        prompt_computed: 5,
        prompt_cached: 2,
        generated: 1,
        looked_up: 7,
        found: 2,
        ..<_>::default()
    };
    record.step(replica, first);
    record.step(replica, StepTokens { generated: 1, ..StepTokens::default() });
    drop(record);
    let mut rank = RankStats::new(WorkerId(0));
    rank.formed(replica, 0, 1_000, ms(20));
    let stats = rank.local();
    let cpu = stats.counter(catalogue::PROCESS_CPU, ["worker-0"]);
    stats.add(cpu, 1_500_000_000);
    stats.counter(catalogue::LOG_LINES_DROPPED, ["worker-0"]);
    for (id, value) in [
        (catalogue::HOST_CPU_USAGE, 0.25),
        (catalogue::HOST_CPUS, 8.0),
        (catalogue::HOST_MEMORY_USED, 3.0),
        (catalogue::HOST_MEMORY, 9.0),
        (catalogue::PROCESS_MEMORY, 2.0),
    ] {
        let label = if id == catalogue::PROCESS_MEMORY { "worker-0" } else { "a-host" };
        let gauge = stats.gauge(id, [label]);
        stats.set(gauge, value);
    }
    rank.step(&StepTimings { step_us: 900, ..StepTimings::default() });
    let clock = std::sync::Arc::new(shared::clock::ManualClock::default());
    let actors = shared::actor::ActorRuntime::hub("coordinator", 1, clock);
    hub.with_actors(actors.stats().clone());
    hub.report(Source::Worker(WorkerId(0)), Incarnation(5), &rank.report().unwrap()).unwrap();
    hub
}

#[test]
fn every_declared_series_is_published_as_declared() {
    let text = text(&full(), Format::Text);
    let scrape = Scrape::read(&text);
    scrape.check_identities();
    let always: Vec<_> = CATALOGUE.iter().filter(|d| d.when.is_none()).map(|d| d.name).collect();
    for name in &always {
        assert!(scrape.types.contains_key(*name), "{name} is missing");
    }
    assert_eq!(scrape.types.len(), always.len(), "nothing undeclared, nothing that is not there");
    assert_eq!(Format::Text.content_type(), "text/plain; version=0.0.4");
}

/// Whole families, byte by byte: labels, order, cumulative buckets, numbers.
#[test]
fn families_are_written_as_the_format_says() {
    let text = text(&full(), Format::Text);
    let golden = "\
# HELP tutti_iteration_tokens Tokens per engine step: prompt tokens computed plus tokens generated, once per step.
# TYPE tutti_iteration_tokens histogram
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"1.0\"} 1
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"2.0\"} 1
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"4.0\"} 1
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"8.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"16.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"32.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"64.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"128.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"256.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"512.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"1024.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"2048.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"4096.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"8192.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"16384.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"32768.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"65536.0\"} 2
tutti_iteration_tokens_bucket{model_name=\"demo\",replica=\"0\",le=\"+Inf\"} 2
tutti_iteration_tokens_sum{model_name=\"demo\",replica=\"0\"} 7
tutti_iteration_tokens_count{model_name=\"demo\",replica=\"0\"} 2
# HELP tutti_kv_cache_blocks KV blocks in total.
# TYPE tutti_kv_cache_blocks gauge
tutti_kv_cache_blocks{model_name=\"demo\",replica=\"0\"} 100
# HELP tutti_kv_cache_usage_ratio Fraction of KV blocks in use, 0 to 1. Across replicas, divide the sums; do not average.
# TYPE tutti_kv_cache_usage_ratio gauge
tutti_kv_cache_usage_ratio{model_name=\"demo\",replica=\"0\"} 0.03
# HELP tutti_kv_cache_used_blocks KV blocks that requests hold now.
# TYPE tutti_kv_cache_used_blocks gauge
tutti_kv_cache_used_blocks{model_name=\"demo\",replica=\"0\"} 3
";
    assert!(text.contains(golden), "{text}");
    let golden = "\
# TYPE tutti_request_success_total counter
tutti_request_success_total{model_name=\"demo\",finished_reason=\"abort\"} 0
tutti_request_success_total{model_name=\"demo\",finished_reason=\"error\"} 0
tutti_request_success_total{model_name=\"demo\",finished_reason=\"handed_over\"} 0
tutti_request_success_total{model_name=\"demo\",finished_reason=\"length\"} 0
tutti_request_success_total{model_name=\"demo\",finished_reason=\"stop\"} 1
";
    assert!(text.contains(golden), "{text}");
    let info = "tutti_cache_config_info{model_name=\"demo\",block_size=\"16\",cache_dtype=\"auto\",\
                enable_prefix_caching=\"false\",max_model_len=\"4096\",\
                max_num_batched_tokens=\"2048\",max_num_seqs=\"64\",num_blocks=\"100\",\
                num_host_blocks=\"0\",replica=\"0\",tensor_parallel=\"2\"} 1\n";
    assert!(text.contains(info), "{text}");
    // Seconds are counted in integers.
    assert!(text.contains("tutti_process_cpu_seconds_total{process=\"worker-0\"} 1.5\n"), "{text}");
}

/// The same in OpenMetrics: counters without `_total` in their heads, exemplars, an end.
#[test]
fn open_metrics_has_exemplars_and_an_end() {
    let page = text(&full(), Format::OpenMetrics);
    assert!(page.ends_with("\n# EOF\n") && page.matches("# EOF").count() == 1);
    let golden = "\
# HELP tutti_request_success Accepted requests that ended, by reason; abort and error included. handed_over: with its coordinator, and the next one goes on with it and accepts it anew.
# TYPE tutti_request_success counter
tutti_request_success_total{model_name=\"demo\",finished_reason=\"abort\"} 0
";
    assert!(page.contains(golden), "{page}");
    let golden = "\
# TYPE tutti_time_to_first_token_seconds histogram
# UNIT tutti_time_to_first_token_seconds seconds
tutti_time_to_first_token_seconds_bucket{model_name=\"demo\",le=\"0.001\"} 0
tutti_time_to_first_token_seconds_bucket{model_name=\"demo\",le=\"0.0025\"} 1 \
     # {request_id=\"cmpl-7\"} 0.002 1700000000.002
";
    assert!(page.contains(golden), "{page}");
    assert!(!text(&full(), Format::Text).contains("request_id"), "not in the text format");
}

#[test]
fn the_format_is_the_one_that_the_scraper_prefers() {
    let cases = [
        ("", Format::Text),
        ("*/*", Format::Text),
        ("application/openmetrics-text", Format::OpenMetrics),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", Format::Text),
        // The headers of Prometheus 2 and 3.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;\
             q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            Format::OpenMetrics,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
             application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
             text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            Format::OpenMetrics,
        ),
        ("application/openmetrics-text;version=9.0.0, text/plain;q=0.1", Format::Text),
        ("application/openmetrics-text;q=0, text/plain;q=0.1", Format::Text),
        ("application/openmetrics-text;q=nonsense", Format::Text),
        ("image/png", Format::Text),
    ];
    for (accept, format) in cases {
        assert_eq!(Format::negotiate(accept), format, "{accept}");
    }
}

/// The metric names of other servers: the same data, their labels.
#[test]
fn other_servers_names_come_from_the_same_totals() {
    let hub = full();
    let options = PageOptions {
        model_name: "demo".to_owned(),
        compat: vec![Compat::Vllm, Compat::Aphrodite],
        ..PageOptions::default()
    };
    let merged = hub.merged();
    let mut page = String::new();
    Page { merged: &merged, own: &Merged::default(), exemplars: &Vec::new(), gathered: &[] }
        .render(Format::Text, &options, &mut page);
    let scrape = Scrape::read(&page);
    scrape.check_identities();
    for (series, value) in [
        ("vllm:num_requests_running{engine=\"0\"}", 0.0),
        ("vllm:kv_cache_usage_perc{engine=\"0\"}", 0.03),
        ("vllm:prompt_tokens_total{engine=\"0\"}", 7.0),
        ("vllm:generation_tokens_total{engine=\"0\"}", 2.0),
        ("vllm:request_success_total{finished_reason=\"stop\"}", 1.0),
        ("vllm:request_success_total{finished_reason=\"abort\"}", 0.0),
        ("vllm:iteration_tokens_total_sum{engine=\"0\"}", 7.0),
        ("vllm:num_requests_waiting_by_reason{engine=\"none\",reason=\"deferred\"}", 0.0),
        ("vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"}", 0.0),
        (
            "vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",\
             enable_prefix_caching=\"False\",engine=\"0\",num_cpu_blocks=\"0\",\
             num_gpu_blocks=\"100\"}",
            1.0,
        ),
        ("vllm:prompt_tokens_cached_total{engine=\"0\"}", 2.0),
        ("vllm:request_num_preemptions_count", 1.0),
        ("vllm:request_prefill_kv_computed_tokens_sum", 5.0),
        ("vllm:inter_token_latency_seconds_count", 1.0),
        ("aphrodite:num_requests_waiting", 0.0),
        ("aphrodite:gpu_cache_usage_perc", 0.03),
        ("aphrodite:prompt_tokens_total", 7.0),
        ("aphrodite:avg_prompt_throughput_toks_per_s", 3.5),
        ("aphrodite:request_params_best_of_sum", 1.0),
        ("aphrodite:time_to_first_token_seconds_sum", 0.002),
    ] {
        assert_eq!(scrape.get(series), value, "{series}");
    }
    // A series that does not exist is not published under another name either.
    let absent: Vec<_> = [Compat::Vllm, Compat::Aphrodite]
        .iter()
        .flat_map(|compat| compat.aliases())
        .filter(|alias| alias.source().definition().when.is_some())
        .map(|alias| alias.name)
        .collect();
    assert!(absent.contains(&"aphrodite:num_requests_swapped") && absent.len() > 5);
    for name in absent {
        assert!(!scrape.types.contains_key(name), "{name}");
    }
    for compat in [Compat::Vllm, Compat::Aphrodite] {
        for alias in compat.aliases() {
            let there = scrape.types.contains_key(alias.name);
            assert_eq!(there, alias.source().definition().when.is_none(), "{}", alias.name);
        }
    }
}

/// A reader that expects one series per name, of a single server, gets the cluster's.
#[test]
fn a_cluster_is_one_server_to_those_who_look_for_one() {
    let hub = full();
    let mut record = hub.observer().record();
    record.replica_ready(ReplicaId(1), &config(300));
    record.kv_blocks(ReplicaId(1), 37, 300);
    let mut tracks: Vec<_> = (0..3).map(|_| record.accepted(ms(0), 1, &id())).collect();
    for (track, replica) in tracks.iter_mut().zip([0, 1, 1]) {
        record.routed(track, ReplicaId(replica));
    }
    record.scheduled(&mut tracks[1], ReplicaId(1), ms(1));
    drop(record);
    let options = PageOptions {
        model_name: "demo".to_owned(),
        compat: vec![Compat::VllmCluster],
        ..PageOptions::default()
    };
    let merged = hub.merged();
    let mut page = String::new();
    Page { merged: &merged, own: &Merged::default(), exemplars: &Vec::new(), gathered: &[] }
        .render(Format::Text, &options, &mut page);
    assert!(!page.contains("engine="), "{page}");
    let scrape = Scrape::read(&page);
    for (series, value) in [
        ("vllm:num_requests_running", 1.0),
        ("vllm:num_requests_waiting", 2.0),
        // 3 of 100 and 37 of 300.
        ("vllm:kv_cache_usage_perc", 0.1),
    ] {
        assert_eq!(scrape.get(series), value, "{series}");
        assert_eq!(page.matches(&format!("\n{series}{{")).count(), 1, "{series}");
    }
}

#[test]
fn the_prometheus_logger_holds_the_last_text() {
    let hub = full();
    let mut logger = Exposition::default();
    logger.log(ms(0), &hub.merged());
    let first = logger.text().to_owned();
    hub.observer().record().fenced_frame(FencedReason::NoRank);
    logger.log(ms(0), &hub.merged());
    assert_eq!(
        first.lines().count(),
        logger.text().lines().count(),
        "nothing is left of the first"
    );
    assert!(logger.text().contains("tutti_fenced_frames_total{reason=\"no_rank\"} 1\n"));
}

/// `promtool check metrics` reports nothing. The tool comes with the Prometheus server; without it,
/// this test passes on a developer's machine and fails in continuous integration.
#[test]
fn promtool_finds_nothing_to_complain_about() {
    let text = text(&full(), Format::Text);
    let Some(said) = check_metrics(&text).unwrap() else { return };
    assert!(said.is_empty(), "{said}");
}
