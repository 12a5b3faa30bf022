//! Totals that outlive the coordinator: how the next one continues from a checkpoint.
//! [`crate::merge_laws`] shows that no sequence of events loses or doubles anything.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coordinator::checkpoint::{Checkpoints, Publication};
use coordinator::http::metrics::MetricsPage;
use coordinator::metrics::exposition::{Format, PageOptions};
use coordinator::metrics::observe::{RequestSummary, StepTokens};
use coordinator::metrics::{Hub, membership};
use shared::clock::{Clock, SystemClock};
use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::membership::{EtcdOptions, View};
use shared::metrics::application::{GaugeMerge, Metrics};
use shared::metrics::catalogue::{
    ACTOR_MESSAGES, HTTP_REQUESTS, HTTP_REQUESTS_IN_FLIGHT, PROCESS_CPU, RANK_STEP,
    REQUEST_PARAMS_N, REQUEST_PROMPT_TOKENS, REQUEST_SUCCESS, REQUESTS_ACCEPTED,
    REQUESTS_IN_FLIGHT, TIME_TO_FIRST_TOKEN, TOTALS_CHECKPOINT, TOTALS_CHECKPOINT_INTERVAL,
};
use shared::metrics::labels::{FinishedReason, Method, RejectReason, ReportRefusal};
use shared::metrics::merger::checkpoint::{Checkpoint, CheckpointError};
use shared::metrics::{
    Limits, LocalStats, Merged, Merger, RankStats, ReportOutcome, Source, Value,
};
use shared::protocol::{FrontendId, StepTimings};
use tokio::sync::watch;

const OWN: (Source, Incarnation) = (Source::Coordinator, Incarnation(1));
/// Longer than a test takes.
const LONG: Duration = Duration::from_secs(3600);

/// The next coordinator's merger, restored from a checkpoint.
fn next(merger: &Merger) -> Merger {
    let bytes = merger.checkpoint().encode().unwrap();
    let mut next = Merger::default();
    assert_eq!(next.restore(Checkpoint::decode(&bytes).unwrap()), 0);
    next
}

#[test]
fn requests_in_flight_end_with_the_coordinator_that_had_them() {
    let mut stats = LocalStats::new();
    let accepted = stats.counter(REQUESTS_ACCEPTED, []);
    let stopped = stats.counter(REQUEST_SUCCESS, ["stop"]);
    let failed = stats.counter(REQUEST_SUCCESS, ["error"]);
    let in_flight = stats.gauge(REQUESTS_IN_FLIGHT, []);
    let ttft = stats.histogram(TIME_TO_FIRST_TOKEN, []);
    let prompts = stats.histogram(REQUEST_PROMPT_TOKENS, []);
    stats.add(accepted, 10);
    stats.add(stopped, 6);
    stats.add(failed, 1);
    stats.observe_n(prompts, 100.0, 7);
    stats.set(in_flight, 3.0);
    stats.observe_duration(ttft, Duration::from_millis(30));
    let mut merger = Merger::default();
    merger.apply(OWN.0, OWN.1, 1, stats.snapshot()).unwrap();
    // However often it is passed on.
    for merger in [next(&merger), next(&next(&merger))] {
        let merged = merger.merged();
        assert_eq!(merged.counter(REQUESTS_ACCEPTED, []), Some(10));
        assert_eq!(merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Stop), 6);
        assert_eq!(merged.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Error), 4);
        assert_eq!(merged.gauge(REQUESTS_IN_FLIGHT, []), None, "gauges do not outlive anybody");
        assert_eq!(merged.histogram(TIME_TO_FIRST_TOKEN, []).unwrap().count(), 1);
        let prompts = merged.histogram(REQUEST_PROMPT_TOKENS, []).unwrap();
        assert_eq!((prompts.count(), prompts.sum()), (10, 700.0), "one for each that ended");
        assert_eq!(merged.histogram(REQUEST_PARAMS_N, []).unwrap().count(), 3);
    }
}

/// Every counter, and every histogram's count, by series.
fn totals(merged: &Merged) -> BTreeMap<String, u64> {
    let mut totals = BTreeMap::new();
    for (definition, family) in merged.families() {
        for (labels, value) in family {
            let total = match value {
                Value::Counter(total) => *total,
                Value::Histogram(totals) => totals.count(),
                Value::Gauge(_) => continue,
            };
            totals.insert(format!("{}{labels:?}", definition.name), total);
        }
    }
    totals
}

/// Leaders die at any point, including between a scrape and a checkpoint.
#[test]
fn nothing_that_was_scraped_dies_with_the_leader() {
    let summary = RequestSummary { prompt_tokens: 7, n: 1, max_tokens: 100, cached_tokens: 0 };
    let mut random = 7_u64;
    let mut dice = |sides: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % sides
    };
    let (mut kept, mut seen, mut lost) = (None::<Vec<u8>>, BTreeMap::new(), 0_u64);
    for leader in 1..40 {
        let hub = Arc::new(Hub::new(Incarnation(leader), Limits::default()));
        if let Some(bytes) = &kept {
            assert_eq!(hub.restore(Checkpoint::decode(bytes).unwrap()), 0);
        }
        // Never live: etcd always answers.
        let publication = Publication::new(hub.clone(), LONG, LONG);
        publication.restored();
        let mut writing = None;
        for _ in 0..dice(60) {
            match dice(4) {
                0 => {
                    let merged = &publication.shown().unwrap().merged;
                    let now = totals(merged);
                    for (series, total) in &seen {
                        let now = now.get(series);
                        assert!(now.is_some_and(|now| now >= total), "{series}: {total}, {now:?}");
                    }
                    let of = |series: &str| now.get(series).copied().unwrap_or(0);
                    assert_eq!(
                        of("tutti_iteration_tokens[\"0\"]"),
                        of("tutti_engine_steps_total[\"0\"]"),
                        "a page is of one moment"
                    );
                    seen = now;
                }
                1 => match writing.take() {
                    None => writing = Some(publication.writing(None).unwrap().encode().unwrap()),
                    Some(bytes) => {
                        kept = Some(bytes);
                        publication.written(true);
                    }
                },
                _ => {
                    let mut recording = hub.observer().record();
                    let track = recording.accepted(Duration::ZERO, 1, &"cmpl-1".into());
                    let tokens = StepTokens { generated: 3, ..StepTokens::default() };
                    recording.step(ReplicaId(0), tokens);
                    recording.finished(track, FinishedReason::Stop, summary, Duration::ZERO);
                }
            }
        }
        let all = hub.merged().counter_sum(REQUESTS_ACCEPTED);
        let known = kept.as_ref().map_or(0, |bytes| {
            let mut merger = Merger::default();
            merger.restore(Checkpoint::decode(bytes).unwrap());
            merger.merged().counter_sum(REQUESTS_ACCEPTED)
        });
        lost += all - known;
    }
    assert!(lost > 100, "requests that no checkpoint had: {lost}");
    assert!(seen["tutti_requests_accepted_total[]"] > 100);
}

#[test]
fn every_process_of_a_large_cluster_continues_under_the_next_leader() {
    const PROCESSES: u32 = 1500;
    let report = |merger: &mut Merger, of: u32, cpu: u64| {
        let mut stats = LocalStats::new();
        let counter = stats.counter(PROCESS_CPU, [&format!("worker-{of}")]);
        stats.add(counter, cpu);
        let incarnation = Incarnation(100 + u64::from(of));
        merger.apply(Source::Worker(WorkerId(of)), incarnation, cpu, stats.snapshot())
    };
    let mut merger = Merger::default();
    for of in 0..PROCESSES {
        report(&mut merger, of, 1).unwrap();
    }
    let mut next = next(&merger);
    for of in 0..PROCESSES {
        assert_eq!(report(&mut next, of, 3), Ok(ReportOutcome::Fresh), "{of}");
    }
    assert_eq!(next.merged().counter_sum(PROCESS_CPU), u64::from(3 * PROCESSES));
}

/// What it counts by slot begins again under another slot, and continues under one that it had.
#[test]
fn a_front_end_that_gets_another_slot_and_its_own_again_is_counted_once() {
    let front_end = |slot: u32, sequence: u64, requests: u64, cpu: u64| {
        let mut stats = LocalStats::new();
        let answers = stats.counter(HTTP_REQUESTS, ["GET", "/", "200"]);
        stats.add(answers, requests);
        // Series that any process may have, without its name.
        let messages = stats.counter(ACTOR_MESSAGES, []);
        stats.add(messages, 2 * requests);
        let cpu_of = stats.counter(PROCESS_CPU, [&format!("frontend-{slot}")]);
        stats.add(cpu_of, cpu);
        let mut snapshot = stats.snapshot();
        let metrics = Metrics::new();
        metrics.counter("app_total", "Help.", &[]).unwrap().add(3 * requests, &[]).unwrap();
        snapshot.application = metrics.snapshot();
        (Source::Frontend(FrontendId(slot)), Incarnation(77), sequence, snapshot)
    };
    let check = |merger: &Merger, requests: u64, cpu: [Option<u64>; 2]| {
        let merged = merger.merged();
        let of = |id| merged.counter(id, []);
        assert_eq!(merged.counter(HTTP_REQUESTS, ["GET", "/", "200"]), Some(requests));
        assert_eq!(of(ACTOR_MESSAGES), Some(2 * requests));
        let [family] = merged.application() else { panic!("one family") };
        assert_eq!(family.series.values().collect::<Vec<_>>(), [&Value::Counter(3 * requests)]);
        let found = ["frontend-1", "frontend-2"].map(|name| merged.counter(PROCESS_CPU, [name]));
        assert_eq!(found, cpu);
    };
    let reports = [
        (1, 5, 100, 9, [Some(9), None]),
        (2, 6, 120, 4, [Some(9), Some(4)]),
        (1, 7, 130, 11, [Some(11), Some(4)]),
    ];
    let mut merger = Merger::default();
    let mut before = None;
    for (slot, sequence, requests, cpu, expected) in reports {
        let (source, incarnation, sequence, snapshot) = front_end(slot, sequence, requests, cpu);
        merger = next(&merger);
        if let Some((requests, cpu)) = before.replace((requests, expected)) {
            check(&merger, requests, cpu);
        }
        merger.apply(source, incarnation, sequence, snapshot).unwrap();
        check(&merger, requests, expected);
    }
    let (source, incarnation, sequence, snapshot) = front_end(2, 8, 140, 5);
    merger.retire(Source::Frontend(FrontendId(1)), incarnation);
    check(&merger, 130, [Some(11), Some(4)]);
    assert_eq!(merger.lost_sources().count(), 0, "it is over under each slot");
    let merger = &mut next(&merger);
    assert!(merger.is_retired(source, incarnation));
    let late = merger.apply(source, incarnation, sequence, snapshot).unwrap_err();
    assert_eq!(late.reason, ReportRefusal::Retired, "under whatever slot");
    check(merger, 130, [Some(11), Some(4)]);
}

#[test]
fn a_worker_that_gets_another_slot_and_its_own_again_is_counted_once() {
    let worker = |slot: u32, sequence: u64, steps: u64, messages: u64| {
        let mut stats = LocalStats::new();
        let step = stats.histogram(RANK_STEP, ["0", "0", &slot.to_string()]);
        (0..steps).for_each(|_| stats.observe_duration(step, Duration::from_millis(1)));
        let of_actors = stats.counter(ACTOR_MESSAGES, []);
        stats.add(of_actors, messages);
        let mut snapshot = stats.snapshot();
        let metrics = Metrics::new();
        metrics.counter("app_total", "Help.", &[]).unwrap().add(messages, &[]).unwrap();
        snapshot.application = metrics.snapshot();
        (Source::Worker(WorkerId(slot)), Incarnation(77), sequence, snapshot)
    };
    let check = |merger: &Merger, steps: u64, messages: u64| {
        let merged = merger.merged();
        assert_eq!(merged.histogram_sum(RANK_STEP).count(), steps);
        assert_eq!(merged.counter(ACTOR_MESSAGES, []), Some(messages));
        let [family] = merged.application() else { panic!("one family") };
        let series: Vec<&Value> = family.series.values().collect();
        assert_eq!(series, [&Value::Counter(messages)]);
    };
    let mut merger = Merger::default();
    // Steps are counted per slot, everything else per process.
    let reports = [(0, 9, 5, 10, 5), (1, 3, 2, 15, 7), (0, 10, 6, 20, 8)];
    for (slot, sequence, of_slot, messages, steps) in reports {
        let (source, incarnation, sequence, snapshot) = worker(slot, sequence, of_slot, messages);
        let before = merger.merged().histogram_sum(RANK_STEP).count();
        merger = next(&merger);
        assert_eq!(merger.merged().histogram_sum(RANK_STEP).count(), before);
        merger.apply(source, incarnation, sequence, snapshot).unwrap();
        check(&merger, steps, messages);
    }
    let (source, incarnation, ..) = worker(0, 0, 0, 0);
    merger.retire(source, incarnation);
    check(&merger, 8, 20);
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let bytes = Merger::default().checkpoint().encode().unwrap();
    assert!(Checkpoint::decode(&bytes).is_ok());
    assert!(Checkpoint::decode(&bytes[..bytes.len() - 1]).is_err());
    assert!(Checkpoint::decode(&[]).is_err());
    let mut other = bytes.clone();
    other[0] = 9;
    assert_eq!(Checkpoint::decode(&other), Err(CheckpointError::OtherForm(9)));
    let large = vec![1; (16 << 20) + 1];
    assert_eq!(Checkpoint::decode(&large), Err(CheckpointError::TooLarge(large.len())));
}

/// A history that is restored late would look like that many requests at once.
#[test]
fn a_leader_shows_no_totals_before_it_knows_what_was_left() {
    let accept = |hub: &Hub| {
        for _ in 0..3 {
            drop(hub.observer().record().accepted(Duration::ZERO, 1, &"r".into()));
        }
    };
    let before = Hub::new(Incarnation(1), Limits::default());
    accept(&before);
    let hub = Arc::new(Hub::new(Incarnation(2), Limits::default()));
    let publication = Arc::new(Publication::new(hub.clone(), LONG, LONG));
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let (_view, seen) = watch::channel(View { leading: true, ..View::default() });
    hub.membership().with(|stats| membership::record(stats, &seen.borrow()));
    let page = MetricsPage::new(hub.clone(), clock, PageOptions::default()).of_leader(
        Some(publication.clone()),
        seen,
        Incarnation(2),
    );
    let accepted = || {
        let page = page.render(Format::Text);
        assert!(page.contains("tutti_membership_leading 1"), "{page}");
        let line = page.lines().find(|line| line.starts_with("tutti_requests_accepted_total{"));
        line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
    };
    accept(&hub);
    assert_eq!(accepted(), None);
    hub.restore(before.checkpoint());
    assert_eq!(accepted(), None, "not before the moment with everything");
    publication.restored();
    assert_eq!(accepted().as_deref(), Some("6"));
}

/// An etcd that never accepts a checkpoint is treated like one that stops accepting them.
#[test]
fn totals_that_were_never_written_have_an_age() {
    let hub = Arc::new(Hub::new(OWN.1, Limits::default()));
    let nobody = EtcdOptions {
        endpoints: vec!["http://127.0.0.1:1".to_owned()],
        cluster: "tutti".to_owned(),
        user: None,
        tls: None,
        lease_ttl: Duration::from_secs(5),
    };
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let (_view, seen) = watch::channel(View::default());
    let interval = Duration::from_secs(7);
    let checkpoints = Checkpoints::start(hub.clone(), seen, nobody, interval).unwrap();
    let own = Merged::of(&hub.membership().snapshot());
    let written = own.gauge(TOTALS_CHECKPOINT, []).unwrap();
    assert!((began..began + 60.0).contains(&written), "{written} of {began}");
    assert_eq!(own.gauge(TOTALS_CHECKPOINT_INTERVAL, []), Some(7.0));
    assert!(checkpoints.publication().shown().is_none());
}

/// Counts that an idle cluster produces by itself are not worth a checkpoint; all others are.
#[test]
fn an_idle_cluster_has_no_news() {
    let hub = Arc::new(Hub::new(OWN.1, Limits::default()));
    let publication = Publication::new(hub.clone(), LONG, LONG);
    assert!(publication.writing(None).is_some());
    publication.written(true);
    let written = hub.checkpoint();
    let (worker, run) = (Source::Worker(WorkerId(0)), Incarnation(7));
    let mut rank = RankStats::new(WorkerId(0));
    rank.formed(ReplicaId(0), 0, 1_000, Duration::from_millis(20));
    hub.report(worker, run, &rank.report().unwrap()).unwrap();
    assert!(hub.checkpoint().has_news_since(&written), "a worker has come");

    let written = publication.writing(Some(&written)).unwrap();
    publication.written(true);
    let accepted = |page: &Merged| page.counter(REQUESTS_ACCEPTED, []);
    let cpu = |page: &Merged| page.counter(PROCESS_CPU, ["coordinator"]);
    let in_flight = |page: &Merged| page.gauge(HTTP_REQUESTS_IN_FLIGHT, []);
    let before = publication.shown().unwrap();
    // Steps of idle replicas, CPU time, probes, scrapes, gauges.
    rank.step(&StepTimings { step_us: 900, ..StepTimings::default() });
    hub.report(worker, run, &rank.report().unwrap()).unwrap();
    hub.process().with(|stats| {
        let cpu = stats.counter(PROCESS_CPU, ["coordinator"]);
        stats.add(cpu, 1_000_000_000);
    });
    for route in ["/ready", "/metrics", "/health", "/load"] {
        hub.frontend().http_started();
        hub.frontend().http_finished(route, Method::Get, 200, Duration::from_millis(1));
    }
    hub.observer().record().scraped(Duration::from_millis(3));
    hub.frontend().http_started();
    let waiting = hub.application().gauge("waiting", "Waiting.", &[], GaugeMerge::Sum).unwrap();
    for value in [1.0, 2.0] {
        waiting.set(value, &[]).unwrap();
        assert!(!hub.checkpoint().has_news_since(&written), "{value}");
    }
    assert!(publication.writing(Some(&written)).is_none());
    let page = publication.shown().unwrap();
    // Totals as in etcd, current gauges.
    assert_eq!((cpu(&page.merged), cpu(&before.merged)), (None, None));
    assert_eq!(in_flight(&page.merged), Some(1.0));
    assert_eq!(in_flight(&before.merged), Some(0.0));

    // Each of these alone is news.
    let news: [fn(&Hub); 4] = [
        |hub| drop(hub.observer().record().accepted(Duration::ZERO, 1, &"r".into())),
        |hub| hub.frontend().rejected(RejectReason::QueueFull),
        |hub| {
            let took = Duration::from_millis(1);
            hub.frontend().http_finished("/v1/completions", Method::Post, 400, took);
        },
        |hub| {
            let told = hub.application().counter("stories_total", "Told.", &[]).unwrap();
            told.add(1, &[]).unwrap();
        },
    ];
    for (at, happens) in news.into_iter().enumerate() {
        let written = hub.checkpoint();
        assert!(!hub.checkpoint().has_news_since(&written));
        happens(&hub);
        assert!(hub.checkpoint().has_news_since(&written), "{at}");
    }
    let written = publication.writing(Some(&written)).unwrap();
    publication.written(true);
    assert_eq!(accepted(&publication.shown().unwrap().merged), Some(1));
    hub.retire(worker, run);
    assert!(hub.checkpoint().has_news_since(&written), "a worker has gone");
}
