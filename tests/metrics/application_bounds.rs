//! Application metrics at their bounds, and what makes room: sets of tags, names, declarations that
//! nobody uses any more, gauges that are removed, reports that are too large.
use std::time::Duration;

use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::metrics::application::{Error, GaugeMerge, Metrics};
use shared::metrics::catalogue::{OBSERVATIONS_REFUSED, RANK_WEIGHTS, REPORTS_REFUSED};
use shared::metrics::labels::ReportRefusal;
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{Limits, Merger, RankStats, SharedStats, Source, Value, decode_snapshot};

use crate::application::{refused, report, value, worker};

/// The next coordinator's merger, restored from a checkpoint.
fn next(merger: &Merger, limits: Limits) -> Merger {
    let bytes = merger.checkpoint().encode().unwrap();
    let mut next = Merger::new(limits);
    assert_eq!(next.restore(Checkpoint::decode(&bytes).unwrap()), 0);
    next
}

/// A process that has counted once under each of these tags.
fn counting(tags: &[&str]) -> Metrics {
    let metrics = Metrics::new();
    let counter = metrics.counter("c_total", "Help.", &["t"]).unwrap();
    for tag in tags {
        counter.add(1, &[*tag]).unwrap();
    }
    metrics
}

fn counted(merger: &Merger, tag: &str) -> Option<u64> {
    match value(&merger.merged(), "c_total", &[tag])? {
        Value::Counter(total) => Some(total),
        other => panic!("{other:?}"),
    }
}

/// Number of sets of tags that were left out.
fn over(merger: &Merger) -> u64 {
    merger.merged().counter_sum_of(REPORTS_REFUSED, ReportRefusal::LabelCardinality)
}

#[test]
fn a_set_of_tags_too_many_is_left_out_alone() {
    let mut merger = Merger::new(Limits { application_tag_sets: 4, ..Limits::default() });
    let metrics = counting(&["a", "b", "c", "d"]);
    merger.apply(worker(0), Incarnation(1), 1, report(&metrics)).unwrap();
    let counter = metrics.counter("c_total", "Help.", &["t"]).unwrap();
    for tag in ["a", "e"] {
        counter.add(1, &[tag]).unwrap();
    }
    for sequence in [2, 3] {
        merger.apply(worker(0), Incarnation(1), sequence, report(&metrics)).unwrap();
        let found = ["a", "b", "e"].map(|tag| counted(&merger, tag));
        assert_eq!(found, [Some(2), Some(1), None]);
        assert_eq!((over(&merger), refused(&merger.merged())), (1, Some(0)), "counted once");
    }
    let said = merger.take_warnings();
    assert!(said.len() == 1 && said[0].contains("`c_total` has 4 sets of tags"), "{said:?}");
    // Others' sets count, too, and the first report of a name is bounded like any other.
    let mut merger = Merger::new(Limits { application_tag_sets: 1, ..Limits::default() });
    merger.apply(worker(0), Incarnation(1), 1, report(&counting(&["a", "b"]))).unwrap();
    merger.apply(worker(1), Incarnation(2), 1, report(&counting(&["a", "c"]))).unwrap();
    let found = ["a", "b", "c"].map(|tag| counted(&merger, tag));
    assert_eq!((found, over(&merger)), ([Some(2), None, None], 2));
}

#[test]
fn a_metric_goes_on_under_the_sets_of_tags_of_processes_that_are_gone() {
    let limits = Limits { application_tag_sets: 4, ..Limits::default() };
    let mut merger = Merger::new(limits);
    let all = [["a", "b"], ["c", "d"], ["e", "f"]];
    for (index, tags) in (0..).zip(&all) {
        let run = Incarnation(u64::from(index));
        merger.apply(worker(index), run, 1, report(&counting(tags))).unwrap();
    }
    for index in 0..3 {
        merger.retire(worker(index), Incarnation(u64::from(index)));
    }
    for mut merger in [next(&merger, limits), merger] {
        assert_eq!(over(&merger), 2);
        merger.apply(worker(0), Incarnation(9), 1, report(&counting(&["a", "e"]))).unwrap();
        let found = ["a", "d", "e"].map(|tag| counted(&merger, tag));
        assert_eq!((found, over(&merger)), ([Some(2), Some(1), None], 3));
    }
}

/// A checkpoint may have more than the bound of this program: no total falls.
#[test]
fn restored_totals_stay_whatever_the_bound() {
    let mut merger = Merger::default();
    merger.apply(worker(0), Incarnation(1), 1, report(&counting(&["a", "b"]))).unwrap();
    merger.retire(worker(0), Incarnation(1));
    merger.apply(worker(1), Incarnation(2), 1, report(&counting(&["b", "c"]))).unwrap();
    let mut next = next(&merger, Limits { application_tag_sets: 1, ..Limits::default() });
    let found = |merger: &Merger| ["a", "b", "c", "d"].map(|tag| counted(merger, tag));
    assert_eq!(found(&next), [Some(1), Some(2), Some(1), None]);
    next.apply(worker(1), Incarnation(2), 2, report(&counting(&["b", "c", "d"]))).unwrap();
    assert_eq!(found(&next), [Some(1), Some(2), Some(1), None]);
}

#[test]
fn the_sets_of_tags_of_removed_gauges_make_room() {
    let mut merger = Merger::new(Limits { application_tag_sets: 2, ..Limits::default() });
    let metrics = Metrics::new();
    let depth = metrics.gauge("depth", "Help.", &["queue"], GaugeMerge::Sum).unwrap();
    for round in 1..9u64 {
        let (old, new) = ((round - 1).to_string(), round.to_string());
        depth.remove(&[&old]).unwrap();
        depth.set(1.0, &[&new]).unwrap();
        merger.apply(worker(0), Incarnation(1), round, report(&metrics)).unwrap();
        let merged = merger.merged();
        assert_eq!(value(&merged, "depth", &[&new]), Some(Value::Gauge(1.0)));
        assert_eq!(value(&merged, "depth", &[&old]), None);
    }
    assert_eq!(over(&merger), 0);
}

#[test]
fn a_removed_gauge_is_off_the_page_even_if_it_was_the_last() {
    let metrics = Metrics::new();
    let depth = metrics.gauge("depth", "Help.", &["queue"], GaugeMerge::Sum).unwrap();
    metrics.counter("c_total", "Help.", &[]).unwrap().add(1, &[]).unwrap();
    for (value, tag) in [(1.0, "a"), (2.0, "b")] {
        depth.set(value, &[tag]).unwrap();
    }
    let (mut merger, mut sequence) = (Merger::default(), 0);
    let mut shown = || {
        sequence += 1;
        merger.apply(worker(0), Incarnation(1), sequence, report(&metrics)).unwrap();
        let merged = merger.merged();
        let found = ["a", "b"].map(|tag| value(&merged, "depth", &[tag]));
        (found, merged.application().len())
    };
    let gauge = |value| Some(Value::Gauge(value));
    assert_eq!(shown(), ([gauge(1.0), gauge(2.0)], 2));
    depth.remove(&["a"]).unwrap();
    assert_eq!(shown(), ([None, gauge(2.0)], 2));
    for _ in 0..2 {
        depth.remove(&["b"]).unwrap();
        assert_eq!(shown(), ([None, None], 1));
    }
    depth.set(3.0, &["a"]).unwrap();
    assert_eq!(shown(), ([gauge(3.0), None], 2));
    assert!(depth.remove(&[]).unwrap_err().to_string().contains("[queue], 0 values"));
    // More than a process may have at a time.
    for round in 0..10_000 {
        let tag = round.to_string();
        depth.set(1.0, &[&tag]).unwrap();
        depth.remove(&[&tag]).unwrap();
    }
}

#[test]
fn a_declaration_that_nobody_uses_any_more_gives_way() {
    let observing = |bounds: &[f64]| {
        let metrics = Metrics::new();
        let seconds = metrics.histogram("h_seconds", "Help.", bounds, &[]).unwrap();
        seconds.observe(2.5, &[]).unwrap();
        metrics
    };
    let (old, new) = (observing(&[1.0, 2.0]), observing(&[1.0, 3.0]));
    let buckets = |merger: &Merger| match value(&merger.merged(), "h_seconds", &[]) {
        Some(Value::Histogram(totals)) => totals.buckets,
        other => panic!("{other:?}"),
    };
    // A worker that is gone, and the last coordinator's own process.
    for (source, passed_on) in [(worker(0), false), (worker(0), true), (Source::Coordinator, true)]
    {
        let mut merger = Merger::default();
        merger.apply(source, Incarnation(1), 1, report(&old)).unwrap();
        merger.apply(worker(1), Incarnation(2), 1, report(&new)).unwrap();
        assert_eq!((refused(&merger.merged()), buckets(&merger)), (Some(1), vec![0, 0, 1]));
        merger.take_warnings();
        if source != Source::Coordinator {
            merger.retire(source, Incarnation(1));
        }
        if passed_on {
            merger = next(&merger, Limits::default());
        }
        assert_eq!(buckets(&merger), [0, 0, 1], "totals stay until then");
        merger.apply(worker(1), Incarnation(2), 2, report(&new)).unwrap();
        assert_eq!((refused(&merger.merged()), buckets(&merger)), (Some(1), vec![0, 1, 0]));
        let said = merger.take_warnings();
        assert!(said.len() == 1 && said[0].contains("[1.0, 2.0]"), "{said:?}");
        merger.apply(worker(0), Incarnation(3), 1, report(&old)).unwrap();
        assert_eq!((refused(&merger.merged()), buckets(&merger)), (Some(2), vec![0, 1, 0]));
        let later = next(&merger, Limits::default());
        assert_eq!(buckets(&later), [0, 1, 0]);
    }
}

#[test]
fn names_that_nobody_uses_make_room_and_totals_keep_theirs() {
    let mut merger = Merger::new(Limits { application_names: 2, ..Limits::default() });
    merger.apply(worker(1), Incarnation(100), 1, report(&counting(&["a"]))).unwrap();
    merger.retire(worker(1), Incarnation(100));
    let gauge = |merger: &mut Merger, source, run, name: &str| {
        let metrics = Metrics::new();
        metrics.gauge(name, "Help.", &[], GaugeMerge::Sum).unwrap().set(1.0, &[]).unwrap();
        merger.apply(source, Incarnation(run), 1, report(&metrics)).unwrap();
        value(&merger.merged(), name, &[]).is_some()
    };
    for run in 1..6 {
        assert!(gauge(&mut merger, worker(0), run, &format!("gauge_{run}")));
        assert!(!gauge(&mut merger, worker(1), 10 + run, "one_more"), "two are in use");
        merger.retire(worker(1), Incarnation(10 + run));
        merger.retire(worker(0), Incarnation(run));
    }
    assert_eq!((counted(&merger, "a"), refused(&merger.merged())), (Some(1), Some(5)));
}

#[test]
fn no_two_metrics_are_published_under_one_name() {
    let metrics = Metrics::new();
    let counter = |name: &str| metrics.counter(name, "Help.", &[]).map(drop);
    let gauge = |name: &str| metrics.gauge(name, "Help.", &[], GaugeMerge::Sum).map(drop);
    let histogram = |name: &str| metrics.histogram(name, "Help.", &[1.0], &[]).map(drop);
    counter("jobs_total").unwrap();
    histogram("parts").unwrap();
    for refused in [
        gauge("jobs"),
        histogram("jobs"),
        counter("jobs_total_total"),
        counter("parts_total"),
        counter("parts_bucket_total"),
        counter("parts_sum_total"),
        counter("parts_count_total"),
    ] {
        assert!(matches!(refused, Err(Error::Taken { .. })), "{refused:?}");
    }
    let said = gauge("jobs").unwrap_err().to_string();
    assert!(said.contains("`jobs`") && said.contains("`jobs_total`"), "{said}");
    counter("jobs_done_total").unwrap();
    gauge("job").unwrap();
    gauge("jobs_waiting").unwrap();

    // The same between processes.
    let (counting, setting) = (Metrics::new(), Metrics::new());
    counting.counter("jobs_total", "Help.", &[]).unwrap().add(1, &[]).unwrap();
    setting.gauge("jobs", "Help.", &[], GaugeMerge::Sum).unwrap().set(7.0, &[]).unwrap();
    let mut merger = Merger::default();
    merger.apply(worker(0), Incarnation(1), 1, report(&counting)).unwrap();
    merger.apply(worker(1), Incarnation(2), 1, report(&setting)).unwrap();
    let shown = |merger: &Merger| {
        let merged = merger.merged();
        let names = merged.application().iter().map(|it| it.declaration.name.clone());
        (names.collect::<Vec<_>>(), refused(&merged))
    };
    assert_eq!(shown(&merger), (vec!["jobs_total".to_owned()], Some(1)));
    let said = merger.take_warnings();
    assert!(said.len() == 1 && said[0].contains("`jobs_total`"), "{said:?}");
    merger.retire(worker(0), Incarnation(1));
    merger.apply(worker(1), Incarnation(2), 2, report(&setting)).unwrap();
    assert_eq!(shown(&merger), (vec!["jobs".to_owned()], Some(1)));
}

/// As many metrics as a process may have, each declared as long as it may be.
fn longest() -> Metrics {
    let metrics = Metrics::new();
    let tags = (0..8).map(|tag| format!("tag_{tag}_{}", "x".repeat(122))).collect::<Vec<_>>();
    let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
    for at in 0..256 {
        let (name, help) = (format!("m{at:0>127}"), "h".repeat(200));
        let gauge = metrics.gauge(&name, &help, &tags, GaugeMerge::Sum).unwrap();
        gauge.set(1.0, &["t"; 8]).unwrap();
    }
    metrics
}

#[test]
fn a_report_without_room_for_the_application_has_everything_else() {
    let metrics = longest();
    assert!(shared::metrics::encode_snapshot(&report(&metrics)).is_err(), "too large");
    let mut rank =
        RankStats::new(WorkerId(0)).with_process(SharedStats::default(), metrics.clone());
    rank.formed(ReplicaId(0), 0, 5, Duration::ZERO);
    let mut merger = Merger::default();
    for count in 1..4 {
        let stats = rank.report().unwrap();
        let snapshot = decode_snapshot(&stats.snapshot).unwrap();
        merger.apply(worker(0), Incarnation(1), stats.sequence, snapshot).unwrap();
        let merged = merger.merged();
        assert_eq!(merged.gauge_sum(RANK_WEIGHTS), 5.0);
        assert!(merged.application().is_empty());
        assert_eq!(merged.counter(OBSERVATIONS_REFUSED, ["too_large"]), Some(count));
    }
    let said = metrics.take_warning().unwrap();
    assert!(said.contains("without the application's metrics"), "{said}");
    assert_eq!(metrics.take_warning(), None, "once");
}
