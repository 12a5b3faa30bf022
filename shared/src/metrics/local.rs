//! Cells in which one thread counts.
//!
//! A series with its label values is resolved once into a handle. Recording through a handle is an
//! index and an addition: no string, no hash, no lock, no allocation. To share a [`LocalStats`]
//! between threads, put it behind one lock, as [`SharedStats`] does.
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::catalogue::OBSERVATIONS_REFUSED;
use super::definition::{CounterId, GaugeId, HistogramId, SeriesId};
use super::labels::{Label, LabelValue, ObservationRefusal};
use super::snapshot::{
    HistogramTotals, LabelValues, NANOS_PER_UNIT, PartialSnapshot, SeriesSnapshot, Value,
};

/// A resolved counter; valid for the [`LocalStats`] that resolved it.
#[derive(Clone, Copy, Debug)]
pub struct Counter(usize);

/// A resolved gauge; valid for the [`LocalStats`] that resolved it.
#[derive(Clone, Copy, Debug)]
pub struct Gauge(usize);

/// A resolved histogram; valid for the [`LocalStats`] that resolved it.
#[derive(Clone, Copy, Debug)]
pub struct Histogram(usize);

/// Index of a handle that records nothing: a refused label value resolves to it.
const NOWHERE: usize = usize::MAX;

/// The cells of one thread.
#[derive(Clone, Debug)]
pub struct LocalStats {
    /// Sorted by (id, labels): the canonical order of a snapshot.
    index: Vec<Entry>,
    counters: Vec<u64>,
    /// `None` is an absent series.
    gauges: Vec<Option<f64>>,
    /// Cells of removed gauges, for reuse.
    free_gauges: Vec<usize>,
    histograms: Vec<HistogramCell>,
    refused: PerValue<Counter>,
}

/// Cells that several threads count in.
#[derive(Clone, Debug, Default)]
pub struct SharedStats(Arc<Mutex<LocalStats>>);

impl SharedStats {
    /// Shares these cells; clones refer to the same ones.
    #[must_use]
    pub fn of(stats: LocalStats) -> Self {
        Self(Arc::new(Mutex::new(stats)))
    }

    /// Calls `record` with the cells.
    pub fn with<R>(&self, record: impl FnOnce(&mut LocalStats) -> R) -> R {
        // A panic elsewhere leaves plain numbers behind, which stay usable.
        record(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes all totals.
    #[must_use]
    pub fn snapshot(&self) -> PartialSnapshot {
        self.with(|stats| stats.snapshot())
    }
}

#[derive(Clone, Debug)]
struct Entry {
    id: SeriesId,
    labels: LabelValues,
    cell: Cell,
}

#[derive(Clone, Copy, Debug)]
enum Cell {
    Counter(usize),
    Gauge(usize),
    Histogram(usize),
}

#[derive(Clone, Debug)]
struct HistogramCell {
    bounds: &'static [f64],
    totals: HistogramTotals,
    /// Exemplars by bucket; empty for histograms without exemplars.
    exemplars: Vec<Option<Exemplar>>,
}

/// One observation of a bucket, with its request.
#[derive(Clone, Debug, PartialEq)]
pub struct Exemplar {
    /// Id of the response, as the client saw it.
    pub request_id: Arc<str>,
    /// The value observed.
    pub value: f64,
    /// Time of the observation, by the process's clock.
    pub at: Duration,
}

/// The exemplars of a process: series, label values, bucket, exemplar.
pub type Exemplars = Vec<(SeriesId, LabelValues, usize, Exemplar)>;

/// An exemplar older than this is replaced, so that a busy histogram rarely pays for one.
const EXEMPLAR_AGE: Duration = Duration::from_secs(1);

impl Default for LocalStats {
    fn default() -> Self {
        Self::new()
    }
}

impl LocalStats {
    /// Creates cells with only the series of refused observations.
    #[must_use]
    pub fn new() -> Self {
        let mut stats = Self::uncounted();
        stats.refused = PerValue::new::<ObservationRefusal>(|value| {
            stats.counter(OBSERVATIONS_REFUSED, [value])
        });
        stats
    }

    /// Creates cells without any series; refused values are not counted. For cells that are shown
    /// beside merged totals, which already have the series of refused observations.
    #[must_use]
    pub fn uncounted() -> Self {
        let refused = PerValue::new::<ObservationRefusal>(|_| Counter(NOWHERE));
        Self {
            index: Vec::new(),
            counters: Vec::new(),
            gauges: Vec::new(),
            free_gauges: Vec::new(),
            histograms: Vec::new(),
            refused,
        }
    }

    /// Resolves a counter, which exists from then on and starts at 0. A label value outside its
    /// declared set is counted as refused and gives a handle that records nothing.
    pub fn counter<const L: usize>(&mut self, id: CounterId<L>, labels: [&str; L]) -> Counter {
        let cell = self.resolve(id.series(), &labels, |stats| {
            stats.counters.push(0);
            Cell::Counter(stats.counters.len() - 1)
        });
        Counter(if let Some(Cell::Counter(cell)) = cell { cell } else { NOWHERE })
    }

    /// Resolves a gauge, absent until it is set. Label values: see [`LocalStats::counter`].
    pub fn gauge<const L: usize>(&mut self, id: GaugeId<L>, labels: [&str; L]) -> Gauge {
        let cell = self.resolve(id.series(), &labels, |stats| {
            Cell::Gauge(stats.free_gauges.pop().unwrap_or_else(|| {
                stats.gauges.push(None);
                stats.gauges.len() - 1
            }))
        });
        Gauge(if let Some(Cell::Gauge(cell)) = cell { cell } else { NOWHERE })
    }

    /// Resolves a histogram, which exists from then on and starts empty. Label values: see
    /// [`LocalStats::counter`].
    pub fn histogram<const L: usize>(
        &mut self,
        id: HistogramId<L>,
        labels: [&str; L],
    ) -> Histogram {
        let bounds = id.series().definition().buckets();
        let cell = self.resolve(id.series(), &labels, |stats| {
            let totals = HistogramTotals::empty(bounds.len());
            let exemplars = Vec::new();
            stats.histograms.push(HistogramCell { bounds, totals, exemplars });
            Cell::Histogram(stats.histograms.len() - 1)
        });
        Histogram(if let Some(Cell::Histogram(cell)) = cell { cell } else { NOWHERE })
    }

    /// Adds `n` to a counter.
    pub fn add(&mut self, counter: Counter, n: u64) {
        if let Some(total) = self.counters.get_mut(counter.0) {
            *total = total.saturating_add(n);
        }
    }

    /// Sets a gauge. A value that is not finite is refused, and the old one stays.
    pub fn set(&mut self, gauge: Gauge, value: f64) {
        if !value.is_finite() {
            self.refuse(ObservationRefusal::InvalidValue);
        } else if let Some(cell) = self.gauges.get_mut(gauge.0) {
            *cell = Some(value);
        }
    }

    /// Removes a gauge's series until it is set again.
    pub fn clear(&mut self, gauge: Gauge) {
        if let Some(cell) = self.gauges.get_mut(gauge.0) {
            *cell = None;
        }
    }

    /// Forgets a gauge's series, for labels that may not come again, such as names. Its handle must
    /// not be used any more; to get the series back, resolve it again.
    pub fn remove(&mut self, gauge: Gauge) {
        let place = self
            .index
            .iter()
            .position(|entry| matches!(entry.cell, Cell::Gauge(cell) if cell == gauge.0));
        if let Some(place) = place {
            self.index.remove(place);
            self.clear(gauge);
            self.free_gauges.push(gauge.0);
        }
    }

    /// Observes `value` once.
    pub fn observe(&mut self, histogram: Histogram, value: f64) {
        self.observe_n(histogram, value, 1);
    }

    /// Observes `value` `n` times. A value that is negative or not finite is refused, which counts
    /// once.
    pub fn observe_n(&mut self, histogram: Histogram, value: f64, n: u64) {
        if !value.is_finite() || value < 0.0 {
            self.refuse(ObservationRefusal::InvalidValue);
            return;
        }
        // Saturates: an observation of 3.4e29 is as wrong as any above it.
        let nanos = (value * NANOS_PER_UNIT as f64).round() as u128;
        self.record(histogram, value, nanos, n);
    }

    /// Observes an integer, exactly.
    pub fn observe_count(&mut self, histogram: Histogram, value: u64) {
        self.record(histogram, value as f64, u128::from(value) * NANOS_PER_UNIT, 1);
    }

    /// Observes a duration in seconds, exactly.
    pub fn observe_duration(&mut self, histogram: Histogram, value: Duration) {
        self.record(histogram, value.as_secs_f64(), value.as_nanos(), 1);
    }

    /// Observes a duration `n` times, exactly; now and then keeps its request as an exemplar.
    pub fn observe_exemplar(
        &mut self,
        histogram: Histogram,
        value: Duration,
        n: u64,
        request_id: &Arc<str>,
        now: Duration,
    ) {
        let (seconds, nanos) = (value.as_secs_f64(), value.as_nanos());
        let Some(bucket) = self.record(histogram, seconds, nanos, n) else { return };
        let Some(cell) = self.histograms.get_mut(histogram.0) else { return };
        let value = seconds;
        if cell.exemplars.is_empty() {
            cell.exemplars.resize(cell.bounds.len() + 1, None);
        }
        let Some(held) = cell.exemplars.get_mut(bucket) else { return };
        let young = |held: &Exemplar| now.saturating_sub(held.at) < EXEMPLAR_AGE;
        if !held.as_ref().is_some_and(young) {
            let request_id = request_id.clone();
            *held = Some(Exemplar { request_id, value, at: now });
        }
    }

    /// Returns all exemplars.
    #[must_use]
    pub fn exemplars(&self) -> Exemplars {
        let mut all = Vec::new();
        for entry in &self.index {
            let Cell::Histogram(cell) = entry.cell else { continue };
            for (bucket, exemplar) in self.histograms[cell].exemplars.iter().enumerate() {
                let labels = LabelValues::clone(&entry.labels);
                all.extend(exemplar.clone().map(|held| (entry.id, labels, bucket, held)));
            }
        }
        all
    }

    /// Takes a snapshot of all totals. Costs one allocation per histogram.
    #[must_use]
    pub fn snapshot(&self) -> PartialSnapshot {
        let series = self.index.iter().filter_map(|entry| {
            let value = match entry.cell {
                Cell::Counter(cell) => Value::Counter(self.counters[cell]),
                Cell::Gauge(cell) => Value::Gauge(self.gauges[cell]?),
                Cell::Histogram(cell) => Value::Histogram(self.histograms[cell].totals.clone()),
            };
            let labels = LabelValues::clone(&entry.labels);
            Some(SeriesSnapshot { id: entry.id.index(), labels, value })
        });
        PartialSnapshot { series: series.collect(), ..PartialSnapshot::default() }
    }

    /// Records an observation and returns its bucket.
    fn record(&mut self, histogram: Histogram, value: f64, nanos: u128, n: u64) -> Option<usize> {
        let cell = self.histograms.get_mut(histogram.0)?;
        // `le` is inclusive: the first bucket whose bound is not below the value.
        let bucket = cell.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = cell.totals.buckets.get_mut(bucket) {
            *count = count.saturating_add(n);
        }
        let sum = &mut cell.totals.sum_nanos;
        *sum = sum.saturating_add(nanos.saturating_mul(u128::from(n)));
        Some(bucket)
    }

    fn refuse(&mut self, reason: ObservationRefusal) {
        let counter = self.refused.get(reason);
        self.add(counter, 1);
    }

    /// Finds or makes the cell of (id, labels); `None` if a label value is not legal.
    fn resolve(
        &mut self,
        id: SeriesId,
        labels: &[&str],
        make: impl FnOnce(&mut Self) -> Cell,
    ) -> Option<Cell> {
        let declared: &[Label] = id.definition().labels;
        if !declared.iter().zip(labels).all(|(label, value)| label.allows(value)) {
            self.refuse(ObservationRefusal::UnknownLabel);
            return None;
        }
        let place = self.index.binary_search_by(|entry| {
            let held = entry.labels.iter().map(String::as_str);
            entry.id.cmp(&id).then_with(|| held.cmp(labels.iter().copied()))
        });
        match place {
            Ok(at) => Some(self.index[at].cell),
            Err(at) => {
                let cell = make(self);
                let labels = labels.iter().map(|value| (*value).to_owned()).collect();
                self.index.insert(at, Entry { id, labels, cell });
                Some(cell)
            }
        }
    }
}

/// One handle for every value of a closed label, so that each series exists from the start and
/// `rate()` sees its first event.
#[derive(Clone, Debug)]
pub struct PerValue<H>(Vec<H>);

impl<H: Copy> PerValue<H> {
    /// Resolves a handle for each value of `V`.
    pub fn new<V: LabelValue>(mut resolve: impl FnMut(&'static str) -> H) -> Self {
        Self(V::ALL.iter().map(|value| resolve(value.as_str())).collect())
    }

    /// Returns the handle of `value`, a value of the label this was made for.
    #[must_use]
    pub fn get<V: LabelValue>(&self, value: V) -> H {
        self.0[value.position()]
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalogue::{ITERATION_TOKENS, KV_CACHE_BLOCKS, REQUEST_SUCCESS};
    use super::*;

    fn refused(stats: &LocalStats, reason: ObservationRefusal) -> u64 {
        stats.counters[stats.refused.get(reason).0]
    }

    #[test]
    fn a_bound_is_inclusive_and_the_last_bucket_takes_the_rest() {
        let mut stats = LocalStats::new();
        let histogram = stats.histogram(ITERATION_TOKENS, ["0"]);
        for value in [1, 2, 3, 65_536, 65_537] {
            stats.observe_count(histogram, value);
        }
        let totals = &stats.histograms[histogram.0].totals;
        assert_eq!(totals.buckets[..3], [1, 1, 1]);
        assert_eq!(totals.buckets[totals.buckets.len() - 2..], [1, 1]);
        assert_eq!(totals.sum(), 131_079.0);
    }

    #[test]
    fn values_that_make_no_sense_are_counted_and_change_nothing() {
        let mut stats = LocalStats::new();
        let histogram = stats.histogram(ITERATION_TOKENS, ["0"]);
        let gauge = stats.gauge(KV_CACHE_BLOCKS, ["0"]);
        stats.set(gauge, 5.0);
        for value in [f64::NAN, f64::INFINITY, -0.5] {
            stats.observe(histogram, value);
        }
        stats.set(gauge, f64::NAN);
        assert_eq!(refused(&stats, ObservationRefusal::InvalidValue), 4);
        assert_eq!(stats.histograms[histogram.0].totals.count(), 0);
        assert_eq!(stats.gauges[gauge.0], Some(5.0));
    }

    #[test]
    fn an_unknown_label_value_records_nothing() {
        let mut stats = LocalStats::new();
        let before = stats.snapshot().series.len();
        let counter = stats.counter(REQUEST_SUCCESS, ["exploded"]);
        stats.add(counter, 1);
        assert_eq!(refused(&stats, ObservationRefusal::UnknownLabel), 1);
        assert_eq!(stats.snapshot().series.len(), before);
    }

    #[test]
    fn uncounted_cells_have_what_is_resolved_and_no_more() {
        let mut stats = LocalStats::uncounted();
        assert_eq!(stats.snapshot().series.len(), 0);
        let gauge = stats.gauge(KV_CACHE_BLOCKS, ["0"]);
        stats.set(gauge, 1.0);
        stats.set(gauge, f64::NAN);
        let counter = stats.counter(REQUEST_SUCCESS, ["exploded"]);
        stats.add(counter, 1);
        assert_eq!((stats.snapshot().series.len(), stats.gauges[gauge.0]), (1, Some(1.0)));
    }

    #[test]
    fn a_cleared_gauge_is_absent() {
        let mut stats = LocalStats::new();
        let gauge = stats.gauge(KV_CACHE_BLOCKS, ["0"]);
        let before = stats.snapshot().series.len();
        stats.set(gauge, 1.0);
        assert_eq!(stats.snapshot().series.len(), before + 1);
        stats.clear(gauge);
        assert_eq!(stats.snapshot().series.len(), before);
    }

    #[test]
    fn a_removed_gauge_leaves_nothing_behind() {
        let mut stats = LocalStats::new();
        let kept = stats.gauge(KV_CACHE_BLOCKS, ["kept"]);
        stats.set(kept, 5.0);
        let (before, cells) = (stats.snapshot(), (stats.index.len(), stats.gauges.len() + 1));
        for round in 0..100 {
            let gauge = stats.gauge(KV_CACHE_BLOCKS, [&round.to_string()]);
            stats.set(gauge, 1.0);
            assert_eq!(stats.snapshot().series.len(), before.series.len() + 1);
            stats.remove(gauge);
        }
        assert_eq!(stats.snapshot(), before);
        assert_eq!((stats.index.len(), stats.gauges.len()), cells);
    }

    #[test]
    fn resolving_twice_gives_one_series_in_sorted_order() {
        let mut stats = LocalStats::new();
        for replica in ["2", "0", "1", "0"] {
            let histogram = stats.histogram(ITERATION_TOKENS, [replica]);
            stats.observe_n(histogram, 0.5, 3);
        }
        let snapshot = stats.snapshot();
        let keys: Vec<_> = snapshot.series.iter().map(|s| (s.id, s.labels.clone())).collect();
        assert!(keys.is_sorted());
        let counts: Vec<_> = snapshot
            .series
            .iter()
            .filter_map(|series| match &series.value {
                Value::Histogram(totals) => Some((series.labels[0].as_str(), totals.count())),
                _ => None,
            })
            .collect();
        assert_eq!(counts, [("0", 6), ("1", 3), ("2", 3)]);
    }
}
