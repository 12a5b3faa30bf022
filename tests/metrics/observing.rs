//! Records of the coordinator's parts appear in scrapes, and the identities hold in each scrape.
use std::time::Duration;

use coordinator::adapters::ServedAdapters;
use coordinator::metrics::observe::{ReplicaConfig, RequestSummary, StepTokens};
use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::metrics::compat::Compat;
use shared::metrics::labels::{
    ActorState, FailoverReason, FencedReason, FinishedReason, Method, RejectReason,
};
use shared::metrics::{RankStats, Source, catalogue};
use shared::protocol::{FrontendId, Lora, StepTimings, WorkerStats};

use crate::rig::{SUMMARY, config, hub, id, ms, scrape};

#[test]
fn a_fresh_coordinator_already_has_its_series_at_zero() {
    let scrape = scrape(&hub());
    scrape.check_identities();
    for reason in ["abort", "error", "length", "stop"] {
        let series = format!("tutti_request_success_total{{finished_reason=\"{reason}\"}}");
        assert_eq!(scrape.get(&series), 0.0);
    }
    assert_eq!(scrape.get("tutti_requests_rejected_total{reason=\"queue_full\"}"), 0.0);
    assert_eq!(scrape.get("tutti_reports_refused_total{reason=\"total_fell\"}"), 0.0);
    assert_eq!(scrape.get("tutti_time_to_first_token_seconds_count"), 0.0);
    let answered = |route: &str, status: u16| {
        format!(
            "tutti_http_requests_total{{method=\"POST\",route=\"{route}\",status=\"{status}\"}}"
        )
    };
    assert_eq!(scrape.get(&answered("/v1/chat/completions", 200)), 0.0);
    assert_eq!(scrape.get(&answered("/v1/completions", 503)), 0.0);
    for route in ["/v1/completions", "/v1/embeddings", "/v1/messages", "/rerank"] {
        assert_eq!(scrape.get(&answered(route, 504)), 0.0, "{route}");
    }
    // What others say with 503 is 529 at one route, and at no other.
    assert_eq!(scrape.get(&answered("/v1/messages", 529)), 0.0);
    for (route, never) in [("/v1/messages", 503), ("/v1/completions", 529), ("/rerank", 529)] {
        assert!(!scrape.samples.contains_key(&answered(route, never)), "{route}: {never}");
    }
}

#[test]
fn one_request_with_a_preemption_leaves_the_expected_times() {
    let hub = hub();
    let replica = ReplicaId(0);
    let mut record = hub.observer().record();
    record.replica_ready(replica, &config(100));
    let mut track = record.accepted(ms(1_000), 1, &id());
    record.routed(&mut track, replica);
    record.scheduled(&mut track, replica, ms(1_100));
    record.tokens(&mut track, 0, 1, ms(1_400));
    record.preempted(&mut track, replica, 20);
    record.scheduled(&mut track, replica, ms(1_900));
    record.tokens(&mut track, 0, 1, ms(2_000));
    // Two tokens of one step share the time since the previous token.
    record.tokens(&mut track, 0, 2, ms(2_100));
    record.finished(track, FinishedReason::Length, SUMMARY, ms(2_150));
    drop(record);

    let scrape = scrape(&hub);
    let sum = |name: &str| scrape.get(&format!("tutti_{name}_sum"));
    assert_eq!(sum("time_to_first_token_seconds"), 0.4);
    assert_eq!(sum("request_queue_time_seconds"), 0.1);
    assert_eq!(sum("request_prefill_time_seconds"), 0.3);
    assert_eq!(sum("request_decode_time_seconds"), 0.7);
    assert_eq!(sum("request_inference_time_seconds"), 1.0);
    assert_eq!(sum("e2e_request_latency_seconds"), 1.15);
    assert_eq!(sum("inter_token_latency_seconds"), 0.7);
    assert_eq!(scrape.get("tutti_inter_token_latency_seconds_count"), 3.0);
    // 50, 50 and 600 ms.
    assert_eq!(scrape.get("tutti_inter_token_latency_seconds_bucket{le=\"0.05\"}"), 2.0);
    assert_eq!(scrape.get("tutti_inter_token_latency_seconds_bucket{le=\"0.5\"}"), 2.0);
    assert_eq!(scrape.get("tutti_inter_token_latency_seconds_bucket{le=\"0.75\"}"), 3.0);
    let mean = sum("request_time_per_output_token_seconds");
    assert!((mean - 0.7 / 3.0).abs() < 1e-9, "{mean}");
    assert_eq!(sum("request_generation_tokens"), 4.0);
    assert_eq!(sum("request_prompt_tokens"), 7.0);
    assert_eq!(scrape.get("tutti_preemptions_total{replica=\"0\"}"), 1.0);
    assert_eq!(sum("request_preemptions"), 1.0);
    assert_eq!(sum("request_prefill_computed_tokens"), 7.0);
    assert_eq!(scrape.get("tutti_request_success_total{finished_reason=\"length\"}"), 1.0);
}

#[test]
fn an_embedding_is_a_request_and_has_a_latency_of_its_own() {
    let hub = hub();
    let mut record = hub.observer().record();
    let mut track = record.accepted(ms(100), 1, &id()).pooling(true);
    record.scheduled(&mut track, ReplicaId(0), ms(400));
    record.finished(
        track,
        FinishedReason::Stop,
        RequestSummary { max_tokens: 0, ..SUMMARY },
        ms(900),
    );
    drop(record);
    let scrape = scrape(&hub);
    scrape.check_identities();
    assert_eq!(scrape.get("tutti_embedding_latency_seconds_sum"), 0.8);
    assert_eq!(scrape.get("tutti_request_success_total{finished_reason=\"stop\"}"), 1.0);
    assert_eq!(scrape.get("tutti_request_prompt_tokens_sum"), 7.0);
    for of_text in [
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
        "time_to_first_token",
    ] {
        assert_eq!(scrape.get(&format!("tutti_{of_text}_seconds_count")), 0.0, "{of_text}");
    }
}

#[test]
fn choices_are_separate_streams_of_tokens() {
    let hub = hub();
    let mut record = hub.observer().record();
    let mut track = record.accepted(ms(0), 2, &id());
    record.scheduled(&mut track, ReplicaId(0), ms(0));
    for now in [100, 200, 300] {
        record.tokens(&mut track, 0, 1, ms(now));
        record.tokens(&mut track, 1, 1, ms(now));
    }
    let summary = RequestSummary { n: 2, cached_tokens: 6, ..SUMMARY };
    record.finished(track, FinishedReason::Stop, summary, ms(300));
    drop(record);
    let scrape = scrape(&hub);
    assert_eq!(scrape.get("tutti_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(scrape.get("tutti_inter_token_latency_seconds_count"), 4.0);
    assert_eq!(scrape.get("tutti_inter_token_latency_seconds_sum"), 0.4);
    assert_eq!(scrape.get("tutti_request_time_per_output_token_seconds_sum"), 0.1);
    assert_eq!(scrape.get("tutti_request_prompt_tokens_sum"), 7.0);
    assert_eq!(scrape.get("tutti_request_params_n_sum"), 2.0);
    assert_eq!(scrape.get("tutti_request_prefill_computed_tokens_sum"), 8.0);
}

#[test]
fn aborts_and_failures_count_but_have_no_latency() {
    let hub = hub();
    let mut record = hub.observer().record();
    for end in 0..2 {
        let mut track = record.accepted(ms(0), 1, &id());
        record.scheduled(&mut track, ReplicaId(0), ms(5));
        record.tokens(&mut track, 0, 1, ms(10));
        if end == 0 {
            record.aborted(track, SUMMARY);
        } else {
            record.failed(track, SUMMARY);
        }
    }
    record.rejected(RejectReason::QueueFull);
    drop(record);
    let scrape = scrape(&hub);
    scrape.check_identities();
    assert_eq!(scrape.get("tutti_requests_in_flight"), 0.0);
    assert_eq!(scrape.get("tutti_request_success_total{finished_reason=\"abort\"}"), 1.0);
    assert_eq!(scrape.get("tutti_request_success_total{finished_reason=\"error\"}"), 1.0);
    assert_eq!(scrape.get("tutti_requests_rejected_total{reason=\"queue_full\"}"), 1.0);
    assert_eq!(scrape.get("tutti_requests_accepted_total"), 2.0);
    assert_eq!(scrape.get("tutti_e2e_request_latency_seconds_count"), 0.0);
    // What was observed before the requests ended still counts.
    assert_eq!(scrape.get("tutti_time_to_first_token_seconds_count"), 2.0);
    assert_eq!(scrape.get("tutti_request_queue_time_seconds_count"), 2.0);
    assert_eq!(scrape.get("tutti_request_queue_time_seconds_sum"), 0.01);
    assert_eq!(scrape.get("tutti_request_generation_tokens_sum"), 2.0);
}

/// As the requests of a replica whose actor panics.
#[test]
fn a_request_that_is_dropped_has_sizes_as_any_that_failed() {
    let hub = hub();
    let mut record = hub.observer().record();
    let mut track = record.accepted(ms(0), 2, &id());
    record.scheduled(&mut track, ReplicaId(0), ms(1));
    record.tokens(&mut track, 0, 3, ms(2));
    record.tokens(&mut track, 1, 1, ms(2));
    record.preempted(&mut track, ReplicaId(0), 5);
    let other = record.accepted(ms(0), 1, &id());
    record.handed_over(other);
    drop(record);
    drop(track);
    let scrape = scrape(&hub);
    scrape.check_identities();
    assert_eq!(scrape.get("tutti_request_success_total{finished_reason=\"error\"}"), 1.0);
    for (size, sum) in [
        ("prompt_tokens", 0.0),
        ("generation_tokens", 4.0),
        ("max_num_generation_tokens", 3.0),
        ("preemptions", 1.0),
        ("params_n", 2.0),
        ("params_best_of", 2.0),
        ("params_max_tokens", 0.0),
    ] {
        assert_eq!(scrape.get(&format!("tutti_request_{size}_count")), 1.0, "{size}");
        assert_eq!(scrape.get(&format!("tutti_request_{size}_sum")), sum, "{size}");
    }
}

#[test]
fn a_broken_replica_keeps_its_totals_and_loses_its_gauges() {
    let hub = hub();
    let (broken, other) = (ReplicaId(0), ReplicaId(1));
    let mut record = hub.observer().record();
    record.replica_ready(broken, &config(100));
    record.replica_ready(other, &config(50));
    record.kv_blocks(broken, 25, 100);
    record.kv_blocks(other, 10, 50);
    let mut track = record.accepted(ms(0), 1, &id());
    record.routed(&mut track, broken);
    record.scheduled(&mut track, broken, ms(1));
    let tokens = StepTokens { prompt_computed: 5, generated: 1, ..StepTokens::default() };
    record.step(broken, tokens);
    drop(record);
    let before = scrape(&hub);
    before.check_identities();
    assert_eq!(before.get("tutti_kv_cache_usage_ratio{replica=\"0\"}"), 0.25);
    assert_eq!(before.get("tutti_kv_cache_usage_ratio{replica=\"1\"}"), 0.2);
    assert_eq!(before.get("tutti_requests_running{replica=\"0\"}"), 1.0);
    assert_eq!(before.matching("tutti_cache_config_info").count(), 2);

    hub.observer().record().failover(broken, FailoverReason::RankLost);
    // Not moved yet: it still counts, exactly once.
    let during = scrape(&hub);
    during.check_identities();
    assert_eq!(during.get("tutti_requests_running{replica=\"0\"}"), 1.0);

    hub.observer().record().interrupted(&mut track, Some(FailoverReason::RankLost));
    let after = scrape(&hub);
    after.check_identities();
    let gauges_of_broken: Vec<_> = after
        .samples
        .keys()
        .filter(|series| series.contains("replica=\"0\""))
        .filter(|series| after.totals().all(|(total, _)| total != *series))
        .collect();
    assert_eq!(gauges_of_broken, ["tutti_replica_up{replica=\"0\"}"], "and that one is 0");
    assert_eq!(after.get(gauges_of_broken[0]), 0.0);
    assert_eq!(after.get("tutti_generation_tokens_total{replica=\"0\"}"), 1.0);
    assert_eq!(after.get("tutti_failovers_total{reason=\"rank_lost\",replica=\"0\"}"), 1.0);
    assert_eq!(after.get("tutti_requests_replayed_total{reason=\"rank_lost\"}"), 1.0);
    // An intended pause is not a failure.
    hub.observer().record().interrupted(&mut track, None);
    assert_eq!(scrape(&hub).get("tutti_requests_replayed_total{reason=\"rank_lost\"}"), 1.0);
    assert_eq!(after.get("tutti_requests_waiting{reason=\"no_replica\",replica=\"none\"}"), 1.0);

    let mut record = hub.observer().record();
    record.replica_ready(broken, &config(80));
    record.scheduled(&mut track, other, ms(9));
    record.aborted(track, SUMMARY);
    drop(record);
    let again = scrape(&hub);
    again.check_identities();
    assert_eq!(again.get("tutti_kv_cache_blocks{replica=\"0\"}"), 80.0);
    assert_eq!(again.get("tutti_requests_running{replica=\"0\"}"), 0.0);
    assert_eq!(again.matching("tutti_cache_config_info").count(), 2);
}

#[test]
fn ranks_are_labelled_and_their_reports_survive_them() {
    let hub = hub();
    let replica = ReplicaId(3);
    let mut ranks: Vec<_> = (0..2).map(|worker| RankStats::new(WorkerId(worker))).collect();
    for (rank, stats) in ranks.iter_mut().enumerate() {
        stats.formed(replica, rank as u32, 1_000, ms(250));
        for _ in 0..4 {
            stats.step(&StepTimings {
                step_us: 1_000,
                forward_us: 700,
                collective_us: 200,
                sample_us: if rank == 0 { 100 } else { 0 },
                masks_us: (rank == 0).then_some(25),
                draft_us: (rank == 0).then_some(40),
                idle_us: 50,
            });
        }
        let report = stats.report().unwrap();
        hub.report(Source::Worker(WorkerId(rank as u32)), Incarnation(7), &report).unwrap();
        hub.report(Source::Worker(WorkerId(rank as u32)), Incarnation(7), &WorkerStats::default())
            .unwrap();
    }
    let of = |name: &str, rank: u32| {
        format!("{name}{{rank=\"{rank}\",replica=\"3\",worker=\"{rank}\"}}")
    };
    let live = scrape(&hub);
    for rank in 0..2 {
        assert_eq!(live.get(&of("tutti_rank_step_seconds_count", rank)), 4.0);
        assert_eq!(live.get(&of("tutti_rank_collective_seconds_sum", rank)), 0.0008);
        assert_eq!(live.get(&of("tutti_rank_weights_bytes", rank)), 1_000.0);
    }
    // A rank that does not draft has no such series.
    assert_eq!(live.get(&of("tutti_rank_draft_seconds_count", 0)), 4.0);
    assert_eq!(live.matching("tutti_rank_draft_seconds_count").count(), 1);
    // Exchanges are timed by their way; if the time is unknown, nothing is observed.
    ranks[0].exchanged("host", 100);
    ranks[0].exchanged("nccl", 7);
    ranks[0].exchanged("host", 23);
    ranks[0].broken_off(2);
    ranks[0].times_exchanges(false);
    ranks[0].step(&StepTimings { step_us: 1_000, ..StepTimings::default() });
    let report = ranks[0].report().unwrap();
    hub.report(Source::Worker(WorkerId(0)), Incarnation(7), &report).unwrap();
    let page = scrape(&hub);
    let bytes = |way: &str| {
        page.get(&format!(
            "tutti_rank_collective_bytes_total{{algorithm=\"{way}\",rank=\"0\",replica=\"3\",worker=\"0\"}}"
        ))
    };
    assert_eq!((bytes("host"), bytes("nccl")), (123.0, 7.0));
    assert_eq!(page.get(&of("tutti_rank_collective_aborts_total", 0)), 2.0);
    assert_eq!(page.get(&of("tutti_rank_collective_aborts_total", 1)), 0.0);
    assert_eq!(page.get(&of("tutti_rank_step_seconds_count", 0)), 5.0);
    assert_eq!(page.get(&of("tutti_rank_collective_seconds_count", 0)), 4.0);
    assert_eq!(live.get(&of("tutti_rank_sample_seconds_count", 0)), 4.0);
    assert_eq!(live.get(&of("tutti_rank_sample_seconds_count", 1)), 0.0);
    assert_eq!(live.get(&of("tutti_rank_mask_wait_seconds_sum", 0)), 0.0001);
    assert_eq!(live.get(&of("tutti_rank_mask_wait_seconds_count", 1)), 0.0);
    assert_eq!(page.get(&of("tutti_rank_mask_wait_seconds_count", 0)), 4.0, "not by free steps");

    hub.retire(Source::Worker(WorkerId(1)), Incarnation(7));
    let after = scrape(&hub);
    assert_eq!(after.get(&of("tutti_rank_step_seconds_count", 1)), 4.0);
    assert!(!after.samples.contains_key(&of("tutti_rank_weights_bytes", 1)));

    // Another process takes the slot and counts from zero.
    let mut again = RankStats::new(WorkerId(1));
    again.formed(replica, 1, 1_000, ms(0));
    again.step(&StepTimings::default());
    hub.report(Source::Worker(WorkerId(1)), Incarnation(8), &again.report().unwrap()).unwrap();
    assert_eq!(scrape(&hub).get(&of("tutti_rank_step_seconds_count", 1)), 5.0);
}

#[test]
fn cluster_and_http_events_come_out() {
    let hub = hub();
    let mut record = hub.observer().record();
    record.worker_up(WorkerId(4), true);
    record.worker_reported(WorkerId(4), Duration::from_millis(1_700_000_000_500));
    record.worker_restarted(WorkerId(4));
    record.actors(ActorState::Alive, 3);
    record.fenced_frame(FencedReason::Repeated);
    record.fenced_frame(FencedReason::Repeated);
    record.started("1.2.3", Duration::from_secs(1_700_000_000));
    hub.frontend().http_started();
    hub.frontend().http_started();
    hub.frontend().http_finished("/v1/completions", Method::Post, 200, ms(20));
    record.straggler_gap(ReplicaId(0), Duration::from_micros(80));
    record.ranks_disagreed(ReplicaId(0));
    record.rank_slow(WorkerId(4), true);
    record.device_set_aside(WorkerId(4), true);
    record.scraped(ms(3));
    drop(record);
    let up = scrape(&hub);
    assert_eq!(up.get("tutti_worker_up{worker=\"4\"}"), 1.0);
    let at = "tutti_worker_last_report_timestamp_seconds{worker=\"4\"}";
    assert_eq!(up.get(at), 1_700_000_000.5);
    assert_eq!(up.get("tutti_actors{state=\"alive\"}"), 3.0);
    assert_eq!(up.get("tutti_fenced_frames_total{reason=\"repeated\"}"), 2.0);
    assert_eq!(up.get("tutti_build_info{version=\"1.2.3\"}"), 1.0);
    assert_eq!(up.get("tutti_http_requests_in_flight"), 1.0);
    let answered =
        "tutti_http_requests_total{method=\"POST\",route=\"/v1/completions\",status=\"200\"}";
    assert_eq!(up.get(answered), 1.0);
    assert_eq!(up.get("tutti_rank_straggler_gap_seconds_sum{replica=\"0\"}"), 0.00008);

    assert_eq!(up.get("tutti_rank_disagreements_total{replica=\"0\"}"), 1.0);
    assert_eq!(up.get("tutti_slow_ranks{worker=\"4\"}"), 1.0);
    assert_eq!(up.get("tutti_devices_set_aside{worker=\"4\"}"), 1.0);

    hub.observer().record().worker_up(WorkerId(4), false);
    let down = scrape(&hub);
    assert_eq!(down.get("tutti_worker_up{worker=\"4\"}"), 0.0);
    assert_eq!(down.matching("tutti_slow_ranks").count(), 0);
    assert_eq!(down.matching("tutti_devices_set_aside").count(), 0);
    // Its device may still be set aside when it is back.
    hub.observer().record().worker_up(WorkerId(4), true);
    let back = scrape(&hub);
    assert_eq!(back.get("tutti_slow_ranks{worker=\"4\"}"), 0.0);
    assert_eq!(back.matching("tutti_devices_set_aside").count(), 0);
    hub.observer().record().device_set_aside(WorkerId(4), true);
    hub.observer().record().worker_gone(WorkerId(4));
    let gone = scrape(&hub);
    assert_eq!(gone.matching("tutti_worker_up").count(), 0);
    assert_eq!(gone.matching("tutti_slow_ranks").count(), 0);
    assert_eq!(gone.matching("tutti_devices_set_aside").count(), 0);
    assert_eq!(gone.get("tutti_worker_restarts_total{worker=\"4\"}"), 1.0);
}

#[test]
fn what_is_swapped_is_shown_where_there_is_host_memory_for_it() {
    let hub = hub();
    let (with, without) = (ReplicaId(1), ReplicaId(2));
    let mut record = hub.observer().record();
    record.replica_ready(with, &ReplicaConfig { host_blocks: 8, ..config(10) });
    record.replica_ready(without, &config(10));
    let mut track = record.accepted(ms(0), 1, &id());
    record.routed(&mut track, with);
    record.scheduled(&mut track, with, ms(1));
    drop(record);
    let before = scrape(&hub);
    for series in ["requests_swapped", "host_kv_cache_used_blocks", "host_kv_cache_usage_ratio"] {
        assert_eq!(before.get(&format!("tutti_{series}{{replica=\"1\"}}")), 0.0);
        assert_eq!(before.matching(&format!("tutti_{series}")).count(), 1, "{series} of replica 2");
    }
    let mut record = hub.observer().record();
    record.swapped_out(&mut track, with, 3);
    record.host_kv_blocks(with, 3);
    drop(record);
    let out = scrape(&hub);
    out.check_identities();
    for (series, value) in [
        ("tutti_requests_swapped{replica=\"1\"}", 1.0),
        ("tutti_requests_running{replica=\"1\"}", 0.0),
        ("tutti_host_kv_cache_used_blocks{replica=\"1\"}", 3.0),
        ("tutti_host_kv_cache_blocks{replica=\"1\"}", 8.0),
        ("tutti_host_kv_cache_usage_ratio{replica=\"1\"}", 0.375),
        ("tutti_kv_swapped_blocks_total{direction=\"out\",replica=\"1\"}", 3.0),
        ("tutti_kv_swapped_blocks_total{direction=\"in\",replica=\"1\"}", 0.0),
        ("tutti_preemptions_total{replica=\"1\"}", 1.0),
        ("tutti_preemptions_swapped_total{replica=\"1\"}", 1.0),
        ("tutti_preempted_tokens_total{replica=\"1\"}", 0.0),
    ] {
        assert_eq!(out.get(series), value, "{series}");
    }
    let mut record = hub.observer().record();
    record.swapped_in(with, 2);
    record.scheduled(&mut track, with, ms(5));
    record.host_kv_blocks(with, 0);
    drop(record);
    let back = scrape(&hub);
    assert_eq!(back.get("tutti_requests_swapped{replica=\"1\"}"), 0.0);
    assert_eq!(back.get("tutti_kv_swapped_blocks_total{direction=\"in\",replica=\"1\"}"), 2.0);
    // What describes the current state ends with the epoch; totals stay.
    let mut record = hub.observer().record();
    record.failover(with, FailoverReason::RankLost);
    record.interrupted(&mut track, Some(FailoverReason::RankLost));
    record.finished(track, FinishedReason::Stop, SUMMARY, ms(9));
    drop(record);
    let gone = scrape(&hub);
    assert_eq!(gone.matching("tutti_host_kv_cache_blocks").count(), 0);
    assert_eq!(gone.matching("tutti_requests_swapped").count(), 0);
    assert_eq!(gone.get("tutti_preemptions_swapped_total{replica=\"1\"}"), 1.0);
}

#[test]
fn a_front_end_that_is_lost_is_missed_for_a_while_and_one_that_says_goodbye_is_not() {
    let hub = hub();
    let up = |of: u32| hub.merged().gauge(catalogue::FRONTEND_UP, [&of.to_string()]);
    let (first, second) = (FrontendId(1), FrontendId(2));
    let patience = ms(600);
    hub.observer().record().frontend_up(first);
    hub.observer().record().frontend_up(second);
    hub.observer().record().frontend_down(first, ms(100));
    hub.observer().record().frontend_leaves(second);
    hub.observer().record().frontend_down(second, ms(100));
    assert_eq!((up(1), up(2)), (Some(0.0), None));
    hub.observer().record().forget_frontends(ms(699), patience);
    assert_eq!(up(1), Some(0.0));
    hub.observer().record().forget_frontends(ms(700), patience);
    assert_eq!(up(1), None);
    // Back in time: it stays up.
    hub.observer().record().frontend_up(first);
    hub.observer().record().frontend_down(first, ms(1000));
    hub.observer().record().frontend_up(first);
    hub.observer().record().forget_frontends(ms(9000), patience);
    assert_eq!(up(1), Some(1.0));
    // A goodbye counts only for the link on which it arrived.
    hub.observer().record().frontend_leaves(first);
    hub.observer().record().frontend_up(first);
    hub.observer().record().frontend_down(first, ms(9100));
    assert_eq!(up(1), Some(0.0));
}

#[test]
fn requests_of_adapters_are_counted_while_they_run() {
    let hub = hub();
    let replica = ReplicaId(0);
    let mut record = hub.observer().record();
    record.adapters(["sql", "chat"].into_iter());
    record.replica_ready(replica, &config(100));
    let list = [("sql".into(), "/a".into()), ("chat".into(), "/b".into())];
    let served = ServedAdapters::of(&Lora::fixed(list, 8).adapters);
    let used = |name: &str| served.find(name).unwrap_or_default();
    let accepted = |name| record.accepted(ms(0), 1, &id()).with_adapter(used(name));
    let mut tracks: Vec<_> = ["", "sql", "sql", "chat"].map(accepted).into();
    for track in &mut tracks {
        record.routed(track, replica);
        record.scheduled(track, replica, ms(1));
    }
    drop(record);
    let counts = || {
        let scrape = scrape(&hub);
        let of = |adapter: &str| {
            scrape.get(&format!("tutti_lora_requests{{adapter=\"{adapter}\",replica=\"0\"}}"))
        };
        (of("sql"), of("chat"))
    };
    // As a gateway sees it: one series, however many replicas.
    let told = || {
        let merged = hub.merged();
        let families: Vec<_> = Compat::VllmCluster.families(&merged).collect();
        let family = families.iter().find(|it| it.name == "vllm:lora_requests_info").unwrap();
        let series: Vec<_> = family.series.keys().map(|labels| labels.join("|")).collect();
        series.join(" and ")
    };
    assert_eq!(counts(), (2.0, 1.0));
    assert_eq!(told(), "2|chat,sql|");
    let mut record = hub.observer().record();
    record.preempted(&mut tracks[1], replica, 3);
    record.finished(tracks.remove(3), FinishedReason::Stop, SUMMARY, ms(2));
    drop(record);
    assert_eq!(counts(), (1.0, 0.0));
    assert_eq!(told(), "2|sql|sql");
    let mut record = hub.observer().record();
    record.scheduled(&mut tracks[1], replica, ms(3));
    record.interrupted(&mut tracks[2], Some(FailoverReason::RankLost));
    drop(record);
    assert_eq!(counts(), (1.0, 0.0));
    let mut record = hub.observer().record();
    tracks.into_iter().for_each(|track| record.aborted(track, SUMMARY));
    drop(record);
    assert_eq!(counts(), (0.0, 0.0), "there while the replica serves");
    assert_eq!(told(), "2||");
}

/// The name of an adapter is no word to translate, even if another label has it.
#[test]
fn adapters_have_their_own_names_under_other_servers_names() {
    let (hub, replica) = (hub(), ReplicaId(0));
    let names = ["capacity", "preempted", "true"];
    let list = names.map(|name| (name.into(), "/a".into()));
    let served = ServedAdapters::of(&Lora::fixed(list, 8).adapters);
    let used = |name: &str| served.find(name).unwrap_or_default();
    let mut record = hub.observer().record();
    record.adapters(names.into_iter());
    record.replica_ready(replica, &config(100));
    let accepted = |name| record.accepted(ms(0), 1, &id()).with_adapter(used(name));
    let mut tracks = names.map(accepted);
    for track in &mut tracks {
        record.routed(track, replica);
        record.scheduled(track, replica, ms(1));
    }
    record.preempted(&mut tracks[2], replica, 3);
    drop(record);
    let merged = hub.merged();
    let families: Vec<_> = Compat::Vllm.families(&merged).collect();
    let told = |name: &str| -> Vec<String> {
        let family = families.iter().find(|it| it.name == name).unwrap();
        family.series.keys().map(|labels| labels.join("|")).collect()
    };
    assert_eq!(told("vllm:lora_requests_info"), ["3|capacity,preempted|true"]);
    // The reasons are words of ours.
    let reasons = told("vllm:num_requests_waiting_by_reason");
    assert_eq!(reasons, ["0|capacity", "none|deferred"]);
}
