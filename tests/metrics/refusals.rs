//! Reports that no correct source can have made are refused as a whole, counted by reason, and
//! leave the totals unchanged.
use shared::ids::{Incarnation, WorkerId};
use shared::metrics::catalogue::{
    HOST_CPUS, HTTP_REQUESTS, ITERATION_TOKENS, KV_CACHE_USAGE, OBSERVATIONS_REFUSED, RANK_STEP,
    RANK_WEIGHTS, REPORTS_REFUSED,
};
use shared::metrics::labels::{LabelValue, ReportRefusal};
use shared::metrics::{
    HistogramTotals, LabelValues, Limits, Merger, PartialSnapshot, ReportOutcome, SeriesId,
    SeriesSnapshot, Source, Value,
};
use shared::protocol::FrontendId;

const WORKER: Source = Source::Worker(WorkerId(3));
const RUN: Incarnation = Incarnation(9);

fn series(id: SeriesId, labels: &[&str], value: Value) -> SeriesSnapshot {
    let labels: LabelValues = labels.iter().map(|label| (*label).to_owned()).collect();
    SeriesSnapshot { id: id.index(), labels, value }
}

fn steps(count: u64) -> Value {
    let mut totals = HistogramTotals::empty(RANK_STEP.series().definition().buckets().len());
    totals.buckets[0] = count;
    totals.sum_nanos = u128::from(count);
    Value::Histogram(totals)
}

fn honest() -> Vec<SeriesSnapshot> {
    vec![
        series(RANK_STEP.series(), &["0", "1", "3"], steps(10)),
        series(RANK_WEIGHTS.series(), &["0", "1", "3"], Value::Gauge(5.0)),
        series(OBSERVATIONS_REFUSED.series(), &["invalid_value"], Value::Counter(4)),
    ]
}

fn report(series: Vec<SeriesSnapshot>) -> PartialSnapshot {
    PartialSnapshot { series, ..PartialSnapshot::default() }
}

/// Applies `bad` after a correct report.
fn refused(bad: PartialSnapshot, reason: ReportRefusal) {
    let mut merger = Merger::default();
    assert_eq!(merger.apply(WORKER, RUN, 1, report(honest())), Ok(ReportOutcome::Fresh));
    let before = merger.merged();
    let refusal = merger.apply(WORKER, RUN, 2, bad).unwrap_err();
    assert_eq!(refusal.reason, reason, "{refusal}");
    let after = merger.merged();
    for refusal in ReportRefusal::ALL {
        let counted = after.counter(REPORTS_REFUSED, [refusal.as_str()]);
        assert_eq!(counted, Some(u64::from(*refusal == reason)), "{refusal:?}");
    }
    let others = |merged: &shared::metrics::Merged| {
        merged
            .families()
            .filter(|(definition, _)| definition.name != "tutti_reports_refused_total")
            .map(|(definition, family)| (definition.name, family.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(others(&before), others(&after), "nothing of it was merged");
    // A correct one continues where the last one ended.
    assert_eq!(merger.apply(WORKER, RUN, 3, report(honest())), Ok(ReportOutcome::Fresh));
}

fn with(index: usize, value: Value) -> PartialSnapshot {
    let mut series = honest();
    series[index].value = value;
    report(series)
}

/// An unknown series does not affect known ones; it is logged and counted once.
#[test]
fn another_catalogue() {
    let mut merger = Merger::default();
    let newer = |run, sequence, merger: &mut Merger| {
        let unknown = vec!["tutti_of_tomorrow_total".to_owned()];
        let snapshot = PartialSnapshot { unknown, ..report(honest()) };
        merger.apply(WORKER, run, sequence, snapshot).unwrap();
        let merged = merger.merged();
        let label = ReportRefusal::CatalogueMismatch;
        (merged.histogram_sum(RANK_STEP).count(), merged.counter_sum_of(REPORTS_REFUSED, label))
    };
    assert_eq!(newer(RUN, 1, &mut merger), (10, 1));
    let said = merger.take_warnings();
    assert!(said.len() == 1 && said[0].contains("tutti_of_tomorrow_total"), "{said:?}");
    assert_eq!(newer(RUN, 2, &mut merger), (10, 1));
    assert!(merger.take_warnings().is_empty());
    merger.retire(WORKER, RUN);
    assert_eq!(newer(Incarnation(10), 1, &mut merger), (20, 2));
}

#[test]
fn falling_totals() {
    refused(with(0, steps(9)), ReportRefusal::TotalFell);
    refused(with(2, Value::Counter(3)), ReportRefusal::TotalFell);
    // Only the sum decreases; one bucket decreases while another grows.
    let Value::Histogram(mut totals) = steps(10) else { unreachable!() };
    totals.sum_nanos -= 1;
    refused(with(0, Value::Histogram(totals.clone())), ReportRefusal::TotalFell);
    totals.sum_nanos += 100;
    totals.buckets[0] -= 1;
    totals.buckets[1] += 50;
    refused(with(0, Value::Histogram(totals)), ReportRefusal::TotalFell);
}

#[test]
fn totals_that_disappear() {
    for missing in [0, 2] {
        let mut series = honest();
        series.remove(missing);
        refused(report(series), ReportRefusal::TotalFell);
    }
}

#[test]
fn gauges_may_disappear() {
    let mut merger = Merger::default();
    merger.apply(WORKER, RUN, 1, report(honest())).unwrap();
    let mut series = honest();
    series.remove(1);
    assert_eq!(merger.apply(WORKER, RUN, 2, report(series)), Ok(ReportOutcome::Fresh));
    assert_eq!(merger.merged().gauge(RANK_WEIGHTS, ["0", "1", "3"]), None);
}

#[test]
fn values_that_are_not_numbers() {
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(with(1, Value::Gauge(value)), ReportRefusal::NotFinite);
    }
}

#[test]
fn other_buckets() {
    let bad = HistogramTotals { buckets: vec![10, 0], sum_nanos: 10 };
    refused(with(0, Value::Histogram(bad)), ReportRefusal::BucketMismatch);
}

#[test]
fn series_that_do_not_exist() {
    let mut series = honest();
    series.push(SeriesSnapshot { id: u16::MAX, ..series[2].clone() });
    refused(report(series), ReportRefusal::UnknownSeries);
    // Another kind, and a ratio, which is never reported.
    refused(with(1, Value::Counter(1)), ReportRefusal::UnknownSeries);
    let mut series = honest();
    series.insert(0, self::series(KV_CACHE_USAGE.series(), &["0"], Value::Gauge(0.5)));
    refused(report(series), ReportRefusal::UnknownSeries);
}

#[test]
fn series_of_others() {
    // If workers reported tokens, they would be multiplied by the number of ranks.
    let mut totals = HistogramTotals::empty(ITERATION_TOKENS.series().definition().buckets().len());
    totals.buckets[0] = 1;
    let mut list = honest();
    list.insert(0, series(ITERATION_TOKENS.series(), &["0"], Value::Histogram(totals)));
    refused(report(list), ReportRefusal::NotOwner);
    // A worker that reports series of another one.
    let mut list = honest();
    list.insert(1, series(RANK_STEP.series(), &["0", "1", "4"], steps(1)));
    refused(report(list), ReportRefusal::NotOwner);
}

#[test]
fn labels_that_are_not_declared() {
    let last = |labels: &[&str]| {
        let mut list = honest();
        list.push(series(OBSERVATIONS_REFUSED.series(), labels, Value::Counter(1)));
        report(list)
    };
    refused(last(&["mood"]), ReportRefusal::UnknownLabel);
    refused(last(&["invalid_value", "more"]), ReportRefusal::UnknownLabel);
    let mut list = honest();
    let long = "9".repeat(200);
    list.insert(1, series(RANK_STEP.series(), &["0", &long, "3"], steps(1)));
    refused(report(list), ReportRefusal::UnknownLabel);
}

#[test]
fn series_out_of_order_or_twice() {
    let mut list = honest();
    list.swap(0, 1);
    refused(report(list), ReportRefusal::Malformed);
    let mut list = honest();
    list.push(list[2].clone());
    refused(report(list), ReportRefusal::Malformed);
}

#[test]
fn more_label_sets_than_allowed() {
    let limits = Limits { label_sets: 2, ..Limits::default() };
    let mut merger = Merger::new(limits);
    let front = Source::Frontend(FrontendId(0));
    let answers = |statuses: &[&str]| {
        report(
            statuses
                .iter()
                .map(|status| {
                    series(HTTP_REQUESTS.series(), &["GET", "/", status], Value::Counter(1))
                })
                .collect(),
        )
    };
    merger.apply(front, RUN, 1, answers(&["200", "404"])).unwrap();
    // The same series from elsewhere are not new.
    merger.apply(Source::Frontend(FrontendId(1)), RUN, 1, answers(&["200", "404"])).unwrap();
    let count = |merger: &Merger| {
        let refused = merger.merged();
        let label = ReportRefusal::LabelCardinality;
        (refused.counter_sum(HTTP_REQUESTS), refused.counter_sum_of(REPORTS_REFUSED, label))
    };
    assert_eq!(count(&merger), (4, 0));
    // Series beyond the bound are left out. The rest of the report counts, now and later.
    let mut more = answers(&["200", "404", "500"]);
    more.series[0].value = Value::Counter(5);
    assert_eq!(merger.apply(front, RUN, 2, more.clone()), Ok(ReportOutcome::Fresh));
    assert_eq!(count(&merger), (8, 1));
    more.series[0].value = Value::Counter(7);
    assert_eq!(merger.apply(front, RUN, 3, more), Ok(ReportOutcome::Fresh));
    assert_eq!(count(&merger), (10, 1), "each is refused once, however often it is reported");
    let said = merger.take_warnings();
    assert!(said.len() == 1 && said[0].contains("tutti_http_requests_total has 2"), "{said:?}");
    // The slot's next process continues with the known series.
    merger.retire(front, RUN);
    merger.apply(front, Incarnation(10), 1, answers(&["200", "404", "500"])).unwrap();
    assert_eq!(count(&merger).0, 12);
}

/// Names come and go: those that are gone take no room from current ones.
#[test]
fn label_sets_of_gauges_are_those_of_what_is_there() {
    let limits = Limits { label_sets: 2, ..Limits::default() };
    let mut merger = Merger::new(limits);
    let hosts = |hosts: &[&str]| {
        let gauge = |host: &&str| series(HOST_CPUS.series(), &[host], Value::Gauge(8.0));
        report(hosts.iter().map(gauge).collect())
    };
    let shown = |merger: &Merger| {
        let merged = merger.merged();
        let family = merged.family(HOST_CPUS.series()).into_iter().flatten();
        let names = family.map(|(labels, _)| labels.concat()).collect::<String>();
        (names, merged.counter_sum_of(REPORTS_REFUSED, ReportRefusal::LabelCardinality))
    };
    let other = Source::Worker(WorkerId(7));
    merger.apply(WORKER, RUN, 1, hosts(&["a"])).unwrap();
    merger.apply(other, RUN, 1, hosts(&["b"])).unwrap();
    // Successive processes in one slot, each on another host.
    for (run, host) in (10..).zip(["c", "d", "e", "f"]) {
        merger.retire(WORKER, Incarnation(run - 1));
        merger.apply(WORKER, Incarnation(run), 1, hosts(&[host])).unwrap();
        assert_eq!(shown(&merger), (format!("b{host}"), 0));
    }
    // One process that reports another name, and one whose link ended.
    merger.apply(WORKER, Incarnation(13), 2, hosts(&["g"])).unwrap();
    assert_eq!(shown(&merger), ("bg".to_owned(), 0));
    merger.lost(other, RUN);
    merger.apply(WORKER, Incarnation(13), 3, hosts(&["g", "h"])).unwrap();
    assert_eq!(shown(&merger), ("gh".to_owned(), 0));
    // There is no room for it when it comes back; later there is room.
    merger.apply(other, RUN, 2, hosts(&["b"])).unwrap();
    merger.apply(other, RUN, 3, hosts(&["b"])).unwrap();
    assert_eq!(shown(&merger), ("gh".to_owned(), 1));
    merger.apply(WORKER, Incarnation(13), 4, hosts(&["g"])).unwrap();
    merger.apply(other, RUN, 4, hosts(&["b"])).unwrap();
    assert_eq!(shown(&merger), ("bg".to_owned(), 1));
}

#[test]
fn reports_after_retirement() {
    let mut merger = Merger::default();
    merger.apply(WORKER, RUN, 1, report(honest())).unwrap();
    merger.retire(WORKER, RUN);
    merger.retire(WORKER, RUN);
    let refusal = merger.apply(WORKER, RUN, 2, report(honest())).unwrap_err();
    assert_eq!(refusal.reason, ReportRefusal::Retired);
    assert_eq!(merger.merged().counter_sum(OBSERVATIONS_REFUSED), 4);
    // The next process of the same slot adds to it.
    merger.apply(WORKER, Incarnation(10), 1, report(honest())).unwrap();
    assert_eq!(merger.merged().counter_sum(OBSERVATIONS_REFUSED), 8);
    assert_eq!(merger.merged().histogram_sum(RANK_STEP).count(), 20);
}
