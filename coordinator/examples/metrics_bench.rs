//! Measures the cost of metrics: `metrics_bench scrape WORKERS` and
//! `metrics_bench step on|off BATCH STEPS`.
//!
//! `scrape` merges and renders the page of a cluster with that many simulated workers, in both
//! formats. `step` drives one replica's scheduler through that many decode steps of a full batch;
//! run it with metrics on and off under `perf stat -e instructions:u` and subtract.
#![allow(clippy::print_stdout, reason = "a benchmark's output")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark ends by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use coordinator::engine::{EngineEvent, EventSender, GenerateRequest};
use coordinator::http::metrics::MetricsPage;
use coordinator::metrics::exposition::{Format, PageOptions};
use coordinator::metrics::observe::ReplicaConfig;
use coordinator::metrics::{Hub, Observer};
use coordinator::replica::driver::{DriverLimits, ReplicaDriver};
use coordinator::scheduler::{Scheduler, SchedulerConfig};
use shared::clock::SystemClock;
use shared::ids::{Epoch, Incarnation, ReplicaId, RequestId, WorkerId};
use shared::metrics::{Limits, RankStats, Source};
use shared::protocol::{
    EngineConfig, KvCacheDtype, SequenceOutput, StepPlan, StepResult, StepTimings, WorkerStats,
};
use shared::sampling::SamplingParams;
use tokio::sync::mpsc;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u32| {
        words.get(index).and_then(|word| word.parse().ok()).unwrap_or(default)
    };
    match words.first().map(String::as_str) {
        Some("scrape") => scrape(number(1, 1000)),
        Some("step") => {
            let on = words.get(1).is_none_or(|word| word != "off");
            step(on, number(2, 32), number(3, 20_000));
        }
        _ => println!("metrics_bench scrape WORKERS | metrics_bench step on|off BATCH STEPS"),
    }
}

/// Renders a page of `workers` workers, two per replica, each with stats of steps.
fn scrape(workers: u32) {
    let hub = Arc::new(Hub::new(Incarnation(1), Limits::default()));
    for index in 0..workers {
        let (worker, replica) = (WorkerId(index), ReplicaId(index / 2));
        let mut rank = RankStats::new(worker);
        rank.formed(replica, index % 2, 1 << 30, Duration::from_secs(3));
        for step in 0..200u64 {
            rank.step(&StepTimings {
                step_us: 900 + step * 7,
                forward_us: 700 + step * 5,
                collective_us: 60 + step,
                sample_us: 40,
                masks_us: None,
                draft_us: None,
                idle_us: 3 * step,
            });
        }
        let report = rank.report().expect("a small report");
        hub.report(Source::Worker(worker), Incarnation(7), &report).expect("an honest report");
        let mut record = hub.observer().record();
        record.worker_up(worker, true);
        record.worker_info(worker, &format!("node-{index}"), "0.1.0");
        record.worker_reported(worker, Duration::from_secs(1_700_000_000));
        if index % 2 == 0 {
            let (engine, num_blocks, host_blocks) = (engine(), 4096, 0);
            let config = ReplicaConfig { engine, num_blocks, host_blocks, tensor_parallel: 2 };
            record.replica_ready(replica, &config);
        }
    }
    let options = PageOptions { model_name: "model".to_owned(), ..PageOptions::default() };
    let page = MetricsPage::new(hub.clone(), Arc::new(SystemClock::start()), options);
    for format in [Format::Text, Format::OpenMetrics] {
        let mut merges = Vec::new();
        let mut pages = Vec::new();
        let mut text = String::new();
        for _ in 0..41 {
            let began = Instant::now();
            std::hint::black_box(hub.merged());
            merges.push(began.elapsed());
            let began = Instant::now();
            text = page.render(format);
            pages.push(began.elapsed());
        }
        println!(
            "{workers} workers, {format:?}: {} lines, {:.1} MB; merge {:.1} ms, whole scrape {:.1} ms \
             (medians of 41; worst {:.1} ms)",
            text.lines().count(),
            text.len() as f64 / 1e6,
            median(&mut merges),
            median(&mut pages),
            pages.last().map_or(0.0, |worst| worst.as_secs_f64() * 1e3),
        );
    }
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn engine() -> EngineConfig {
    EngineConfig {
        block_size: 16,
        max_model_len: 1 << 20,
        max_num_seqs: 256,
        max_num_batched_tokens: 8192,
        kv_cache_bytes: 1 << 30,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    }
}

/// Runs `steps` decode steps of `batch` sequences.
fn step(on: bool, batch: u32, steps: u32) {
    let engine = engine();
    let config = SchedulerConfig {
        block_size: engine.block_size,
        max_model_len: engine.max_model_len,
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
        max_mixed_prefill_tokens: None,
        max_queued_requests: 1024,
        prefix_caching: false,
        prefix_states: None,
        hidden_size: 2,
        vocab_size: u32::MAX,
        speculation: None,
        max_steps_in_flight: 2,
    };
    let scheduler = Scheduler::new(config).expect("sizes that fit");
    let observer = if on { Observer::new() } else { Observer::disabled() };
    let limits = DriverLimits {
        step_timeout: Duration::from_secs(60),
        step_floor: Duration::from_secs(60),
        unavailable_timeout: Duration::from_secs(60),
        max_queue_wait: None,
    };
    let mut now = Duration::ZERO;
    let mut driver = ReplicaDriver::new(now, ReplicaId(0), scheduler, observer, limits);
    driver.ready(now, Epoch(1), 1 << 20, 0);
    let mut rank = RankStats::new(WorkerId(0));
    rank.formed(ReplicaId(0), 0, 1, Duration::ZERO);
    let mut receivers = Vec::new();
    for id in 0..batch {
        let (sender, receiver) = mpsc::channel::<EngineEvent>(64);
        receivers.push(receiver);
        driver.submit(Duration::ZERO, request(id, steps + 10), EventSender::Local(sender));
    }
    let mut plan = StepPlan::default();
    let began = Instant::now();
    for _ in 0..steps {
        now += Duration::from_micros(900);
        if driver.next_plan(now, &mut plan) {
            let outputs = plan.sequences.iter().filter(|entry| entry.sample);
            let outputs = outputs.map(|entry| SequenceOutput {
                seq: entry.seq,
                position: entry.start + entry.count,
                token: Some(7),
                logprobs: None,
                prompt_logprobs: Vec::new(),
                prompt_start: 0,
                corrupted: false,
                embedding: Vec::new(),
            });
            let result = StepResult {
                epoch: plan.epoch,
                step: plan.step,
                outputs: outputs.collect(),
                drafted: Vec::new(),
                digest: 0,
                timings: StepTimings::default(),
                stats: WorkerStats::default(),
            };
            if on {
                rank.step(&StepTimings { step_us: 900, forward_us: 800, ..Default::default() });
            }
            driver.apply(now, result);
        }
        for receiver in &mut receivers {
            while receiver.try_recv().is_ok() {}
        }
    }
    let us = began.elapsed().as_secs_f64() * 1e6 / f64::from(steps);
    println!("metrics {}: batch {batch}, {us:.2} us a step", if on { "on" } else { "off" });
}

fn request(id: u32, max_tokens: u32) -> GenerateRequest {
    GenerateRequest::new(
        RequestId(u64::from(id)),
        vec![1, 2, 3, 4],
        vec![SamplingParams::default()],
        max_tokens,
    )
}
