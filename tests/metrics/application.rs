//! Application metrics: which declarations are refused, and exact totals over processes that
//! report, repeat, die and come back. Their bounds in the cluster: [`crate::application_bounds`].
use std::collections::BTreeMap;

use proptest::prelude::*;
use shared::ids::{Incarnation, WorkerId};
use shared::metrics::application::{Error, GaugeMerge, Metrics};
use shared::metrics::catalogue::REPORTS_REFUSED;
use shared::metrics::{Merged, Merger, PartialSnapshot, Source, Value};

use coordinator::metrics::exposition::Format;

use crate::rig::{hub, text};

pub(crate) fn worker(index: u32) -> Source {
    Source::Worker(WorkerId(index))
}

pub(crate) fn report(metrics: &Metrics) -> PartialSnapshot {
    PartialSnapshot { application: metrics.snapshot(), ..PartialSnapshot::default() }
}

/// The value of one series.
pub(crate) fn value(merged: &Merged, name: &str, tags: &[&str]) -> Option<Value> {
    let family = merged.application().iter().find(|family| family.declaration.name == name)?;
    let tags: Vec<String> = tags.iter().map(|tag| (*tag).to_owned()).collect();
    family.series.get(tags.as_slice()).cloned()
}

pub(crate) fn refused(merged: &Merged) -> Option<u64> {
    merged.counter(REPORTS_REFUSED, ["application"])
}

#[test]
fn bad_declarations_say_what_is_wrong() {
    let metrics = Metrics::new();
    let counter = |name: &str| metrics.counter(name, "Help.", &[]).map(drop).unwrap_err();
    for (name, part) in [
        ("", "1 to 128"),
        ("2fast_total", "[a-zA-Z_]"),
        ("with space_total", "[a-zA-Z_]"),
        ("vllm:mine_total", "[a-zA-Z_]"),
        ("tutti_mine_total", "`tutti_` are reserved"),
        ("process_mine_total", "are reserved"),
        ("documents", "counters end with `_total`"),
    ] {
        let error = counter(name).to_string();
        assert!(error.contains(part) && error.contains(name), "{error}");
    }
    let gauge = |name: &str| {
        metrics.gauge(name, "Help.", &[], GaugeMerge::Sum).map(drop).unwrap_err().to_string()
    };
    assert!(gauge("documents_total").contains("nothing else does"));
    assert!(gauge("documents_count").contains("`_count`"));
    assert!(gauge("up").contains("Prometheus itself"));
    for name in ["uploads_total", "upstream_errors_total"] {
        metrics.counter(name, "Help.", &[]).unwrap();
    }
    metrics.gauge("upstream_seconds", "Help.", &[], GaugeMerge::Sum).unwrap();
    let tags = |tags: &[&str]| {
        metrics.counter("a_total", "Help.", tags).map(drop).unwrap_err().to_string()
    };
    assert!(tags(&["le"]).contains("meaning to Prometheus"));
    assert!(tags(&["a", "a"]).contains("twice"));
    assert!(tags(&["a-b"]).contains("[a-zA-Z_]"));
    assert!(tags(&["a"; 9]).contains("at most 8"));
    assert!(metrics.counter("a_total", "", &[]).is_err(), "a help there must be");
    let bounds = |bounds: &[f64]| {
        metrics.histogram("h_seconds", "Help.", bounds, &[]).map(drop).unwrap_err().to_string()
    };
    assert!(bounds(&[]).contains("1 to 64"));
    assert!(bounds(&[1.0, 1.0]).contains("increase"));
    assert!(bounds(&[f64::INFINITY]).contains("implied"));
}

#[test]
fn a_metric_keeps_its_kind_tags_and_bounds() {
    let metrics = Metrics::new();
    let first = metrics.counter("documents_total", "Help.", &["tenant"]).unwrap();
    first.add(1, &["a"]).unwrap();
    metrics
        .counter("documents_total", "Other words.", &["tenant"])
        .unwrap()
        .add(2, &["a"])
        .unwrap();
    let error = metrics.counter("documents_total", "Help.", &["user"]).map(drop).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("documents_total") && error.contains("[tenant]"), "{error}");
    assert!(error.contains("[user]"), "{error}");
    metrics.histogram("h_seconds", "Help.", &[1.0, 2.0], &[]).unwrap();
    let error = metrics.histogram("h_seconds", "Help.", &[1.0, 3.0], &[]).map(drop).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    let mut merger = Merger::default();
    merger.apply(worker(0), Incarnation(1), 1, report(&metrics)).unwrap();
    let merged = merger.merged();
    assert_eq!(value(&merged, "documents_total", &["a"]), Some(Value::Counter(3)));
}

#[test]
fn bad_values_and_tags_are_refused_and_change_nothing() {
    let metrics = Metrics::new();
    let counter = metrics.counter("c_total", "Help.", &["tenant"]).unwrap();
    let gauge = metrics.gauge("g", "Help.", &[], GaugeMerge::Sum).unwrap();
    let histogram = metrics.histogram("h_seconds", "Help.", &[1.0], &[]).unwrap();
    let long = "x".repeat(129);
    assert!(counter.add(1, &[]).unwrap_err().to_string().contains("[tenant], 0 values"));
    assert!(counter.add(1, &[&long]).unwrap_err().to_string().contains("129 bytes"));
    assert!(gauge.set(f64::NAN, &[]).is_err());
    assert!(
        histogram.observe(-1.0, &[]).is_err() && histogram.observe(f64::INFINITY, &[]).is_err()
    );
    assert!(metrics.snapshot().is_empty(), "nothing was recorded");
    let mut made = 0;
    let bound = loop {
        match counter.add(1, &[&format!("tenant-{made}")]) {
            Ok(()) => made += 1,
            Err(error) => break error.to_string(),
        }
    };
    assert!(bound.contains("8192") || bound.contains("65536"), "{bound}");
    assert!(made > 1000, "{made}");
    counter.add(1, &["tenant-0"]).unwrap();
    let bytes = shared::metrics::encode_snapshot(&report(&metrics));
    assert!(bytes.is_ok(), "as many sets of tags as the bounds allow can be sent");
}

#[test]
fn processes_add_up_and_the_first_declaration_holds() {
    let mut merger = Merger::default();
    let mut apply = |index: u32, sequence, metrics: &Metrics| {
        merger
            .apply(worker(index), Incarnation(u64::from(index)), sequence, report(metrics))
            .unwrap();
        let unsaid = merger.take_warnings();
        (merger.merged(), unsaid)
    };
    let all: Vec<Metrics> = (0..3).map(|_| Metrics::new()).collect();
    for (metrics, n) in all.iter().zip([1u64, 10, 100]) {
        metrics.counter("c_total", "Help.", &["t"]).unwrap().add(n, &["x"]).unwrap();
        let gauges = [("sum", GaugeMerge::Sum), ("max", GaugeMerge::Max), ("min", GaugeMerge::Min)];
        for (name, merge) in gauges {
            metrics.gauge(name, "Help.", &[], merge).unwrap().set(n as f64, &[]).unwrap();
        }
        let histogram = metrics.histogram("h_seconds", "Help.", &[5.0, 50.0], &[]).unwrap();
        histogram.observe(n as f64, &[]).unwrap();
    }
    apply(0, 1, &all[0]);
    apply(1, 1, &all[1]);
    let (merged, unsaid) = apply(2, 1, &all[2]);
    assert!(unsaid.is_empty() && refused(&merged) == Some(0));
    assert_eq!(value(&merged, "c_total", &["x"]), Some(Value::Counter(111)));
    assert_eq!(value(&merged, "sum", &[]), Some(Value::Gauge(111.0)));
    assert_eq!(value(&merged, "max", &[]), Some(Value::Gauge(100.0)));
    assert_eq!(value(&merged, "min", &[]), Some(Value::Gauge(1.0)));
    let Some(Value::Histogram(totals)) = value(&merged, "h_seconds", &[]) else { panic!() };
    assert_eq!((totals.buckets.as_slice(), totals.sum()), (&[1, 1, 1][..], 111.0));

    // Another process uses the name for something else: that metric is refused, logged once and
    // counted; the rest of the report is accepted.
    let odd = Metrics::new();
    odd.gauge("c_total2", "Help.", &[], GaugeMerge::Sum).unwrap().set(1.0, &[]).unwrap();
    odd.counter("c_total", "Help.", &["other"]).unwrap().add(5, &["x"]).unwrap();
    odd.histogram("h_seconds", "Help.", &[5.0], &[]).unwrap().observe(1.0, &[]).unwrap();
    let (merged, unsaid) = apply(7, 1, &odd);
    assert_eq!(unsaid.len(), 2, "{unsaid:?}");
    assert!(unsaid[0].contains("worker-7") && unsaid[0].contains("[other]"), "{unsaid:?}");
    assert_eq!(refused(&merged), Some(2));
    assert_eq!(value(&merged, "c_total", &["x"]), Some(Value::Counter(111)));
    assert_eq!(value(&merged, "c_total2", &[]), Some(Value::Gauge(1.0)));
    let (merged, unsaid) = apply(7, 2, &odd);
    assert!(unsaid.is_empty(), "once");
    assert_eq!(refused(&merged), Some(4));
}

#[test]
fn they_are_on_the_page_beside_ours() {
    let hub = hub();
    let metrics = hub.application();
    metrics
        .counter("rag_documents_total", "Documents.", &["t"])
        .unwrap()
        .add(2, &["a\"b"])
        .unwrap();
    metrics.histogram("rag_seconds", "Time.", &[0.5], &[]).unwrap().observe(0.25, &[]).unwrap();
    for format in [Format::Text, Format::OpenMetrics] {
        let page = text(&hub, format);
        assert!(page.contains("rag_documents_total{t=\"a\\\"b\"} 2\n"), "{page}");
        assert!(page.contains("rag_seconds_bucket{le=\"0.5\"} 1\n"));
        assert!(page.contains("rag_seconds_sum 0.25\nrag_seconds_count 1\n"));
    }
}

/// An event of a process in the property test.
#[derive(Clone, Debug)]
enum Event {
    Count { process: usize, tag: usize, n: u64 },
    Report { process: usize },
    Repeat { process: usize },
    Lose { process: usize },
    Restart { process: usize },
}

fn event() -> impl Strategy<Value = Event> {
    let process = 0..3usize;
    prop_oneof![
        4 => (process.clone(), 0..3usize, 1..50u64)
            .prop_map(|(process, tag, n)| Event::Count { process, tag, n }),
        4 => process.clone().prop_map(|process| Event::Report { process }),
        2 => process.clone().prop_map(|process| Event::Repeat { process }),
        1 => process.clone().prop_map(|process| Event::Lose { process }),
        1 => process.prop_map(|process| Event::Restart { process }),
    ]
}

struct Process {
    metrics: Metrics,
    incarnation: u64,
    sequence: u64,
    sent: Vec<(u64, PartialSnapshot)>,
    /// Totals that its reports have contained so far, by tag.
    told: BTreeMap<usize, u64>,
    counted: BTreeMap<usize, u64>,
}

impl Process {
    fn new(incarnation: u64) -> Self {
        Self {
            metrics: Metrics::new(),
            incarnation,
            sequence: 0,
            sent: Vec::new(),
            told: BTreeMap::new(),
            counted: BTreeMap::new(),
        }
    }
}

proptest! {
    /// A naive observer adds up all reported events. Whatever is repeated, lost or restarted, the
    /// merged counter equals that sum and never decreases.
    #[test]
    fn merged_counters_equal_a_naive_observers(events in prop::collection::vec(event(), 1..120)) {
        let mut merger = Merger::default();
        let mut processes: Vec<Process> = (0..3).map(|i| Process::new(i + 1)).collect();
        let mut gone: BTreeMap<usize, u64> = BTreeMap::new();
        let mut last = 0;
        let mut next_incarnation = 10;
        for event in events {
            match event {
                Event::Count { process, tag, n } => {
                    let process = &mut processes[process];
                    let counter = process.metrics.counter("c_total", "Help.", &["t"]).unwrap();
                    counter.add(n, &[&tag.to_string()]).unwrap();
                    *process.counted.entry(tag).or_default() += n;
                }
                Event::Report { process: index } => {
                    let process = &mut processes[index];
                    process.sequence += 1;
                    let snapshot = report(&process.metrics);
                    process.sent.push((process.sequence, snapshot.clone()));
                    let source = worker(index as u32);
                    let incarnation = Incarnation(process.incarnation);
                    merger.apply(source, incarnation, process.sequence, snapshot).unwrap();
                    process.told = process.counted.clone();
                }
                Event::Repeat { process: index } => {
                    let process = &processes[index];
                    for (sequence, snapshot) in &process.sent {
                        let incarnation = Incarnation(process.incarnation);
                        let source = worker(index as u32);
                        merger.apply(source, incarnation, *sequence, snapshot.clone()).unwrap();
                    }
                }
                Event::Lose { process: index } => {
                    merger.lost(worker(index as u32), Incarnation(processes[index].incarnation));
                }
                Event::Restart { process: index } => {
                    next_incarnation += 1;
                    let old = std::mem::replace(&mut processes[index], Process::new(next_incarnation));
                    merger.retire(worker(index as u32), Incarnation(old.incarnation));
                    for (tag, n) in old.told {
                        *gone.entry(tag).or_default() += n;
                    }
                }
            }
            let merged = merger.merged();
            let mut expected = gone.clone();
            for process in &processes {
                for (tag, n) in &process.told {
                    *expected.entry(*tag).or_default() += n;
                }
            }
            for (tag, n) in &expected {
                let got = value(&merged, "c_total", &[&tag.to_string()]);
                prop_assert_eq!(got, Some(Value::Counter(*n)), "tag {}", tag);
            }
            let total: u64 = expected.values().sum();
            prop_assert!(total >= last);
            last = total;
        }
    }
}
