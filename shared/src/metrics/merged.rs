//! The merged totals of the whole cluster at one moment, for publishing.
use std::collections::BTreeMap;

use super::application::{Kind as AppKind, MergedFamily};
use super::catalogue::{CATALOGUE, REPLICA_UP};
use super::definition::{CounterId, Definition, GaugeId, GaugeMerge, HistogramId, Kind, SeriesId};
use super::labels::{LabelValue, REPLICA};
use super::snapshot::{HistogramTotals, LabelValues, PartialSnapshot, Value};

/// Merged totals, all taken under one lock: any relation that holds between two series at every
/// moment also holds here.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    series: BTreeMap<SeriesId, BTreeMap<LabelValues, Value>>,
    application: Vec<MergedFamily>,
}

impl Merged {
    /// Returns what one process has recorded, merged with nothing.
    #[must_use]
    pub fn of(snapshot: &PartialSnapshot) -> Self {
        let mut merged = Self::default();
        for series in &snapshot.series {
            if let Some(id) = SeriesId::from_index(series.id) {
                merged.add(id, &series.labels, &series.value);
            }
        }
        merged
    }

    /// Returns these totals with the gauges of `present`, which is from a later moment, with
    /// nothing of note counted in between.
    #[must_use]
    pub fn with_gauges_of(&self, present: &Self) -> Self {
        let is_gauge = |id: &SeriesId| matches!(id.definition().kind, Kind::Gauge(_));
        let is_app_gauge = |it: &&MergedFamily| matches!(it.declaration.kind, AppKind::Gauge(_));
        let totals = self.series.iter().filter(|(id, _)| !is_gauge(id));
        let gauges = present.series.iter().filter(|(id, _)| is_gauge(id));
        let series = totals.chain(gauges).map(|(id, family)| (*id, family.clone())).collect();
        let totals = self.application.iter().filter(|it| !is_app_gauge(it));
        let gauges = present.application.iter().filter(is_app_gauge);
        let mut application: Vec<_> = totals.chain(gauges).cloned().collect();
        application.sort_by(|a, b| a.declaration.name.cmp(&b.declaration.name));
        Self { series, application }
    }

    /// Returns every series that exists, by catalogue position, then label values.
    pub fn families(
        &self,
    ) -> impl Iterator<Item = (&'static Definition, &BTreeMap<LabelValues, Value>)> {
        self.series.iter().map(|(id, family)| (id.definition(), family))
    }

    /// Returns the application metrics, by name.
    #[must_use]
    pub fn application(&self) -> &[MergedFamily] {
        &self.application
    }

    pub(super) fn set_application(&mut self, application: Vec<MergedFamily>) {
        self.application = application;
    }

    /// Returns one family, if any of its series exists.
    #[must_use]
    pub fn family(&self, id: SeriesId) -> Option<&BTreeMap<LabelValues, Value>> {
        self.series.get(&id)
    }

    /// Returns one counter, if it exists.
    #[must_use]
    pub fn counter<const L: usize>(&self, id: CounterId<L>, labels: [&str; L]) -> Option<u64> {
        match self.find(id.series(), &labels)? {
            Value::Counter(total) => Some(*total),
            Value::Gauge(_) | Value::Histogram(_) => None,
        }
    }

    /// Returns the sum of a counter over all labels.
    #[must_use]
    pub fn counter_sum<const L: usize>(&self, id: CounterId<L>) -> u64 {
        self.values(id.series()).fold(0, |sum, value| match value {
            Value::Counter(total) => sum.saturating_add(*total),
            Value::Gauge(_) | Value::Histogram(_) => sum,
        })
    }

    /// Returns the sum of a counter over the series whose label of `value`'s kind has that value.
    #[must_use]
    pub fn counter_sum_of<const L: usize, V: LabelValue>(&self, id: CounterId<L>, value: V) -> u64 {
        let declared = id.series().definition().labels;
        let at = declared.iter().position(|label| label.name == V::LABEL.name);
        let family = self.series.get(&id.series()).into_iter().flatten();
        family.filter(|(labels, _)| at.is_some_and(|at| labels[at] == value.as_str())).fold(
            0,
            |sum, (_, value)| match value {
                Value::Counter(total) => sum.saturating_add(*total),
                Value::Gauge(_) | Value::Histogram(_) => sum,
            },
        )
    }

    /// Returns one gauge, if it exists.
    #[must_use]
    pub fn gauge<const L: usize>(&self, id: GaugeId<L>, labels: [&str; L]) -> Option<f64> {
        match self.find(id.series(), &labels)? {
            Value::Gauge(value) => Some(*value),
            Value::Counter(_) | Value::Histogram(_) => None,
        }
    }

    /// Returns the sum of a gauge over all labels; meaningless for a ratio.
    #[must_use]
    pub fn gauge_sum<const L: usize>(&self, id: GaugeId<L>) -> f64 {
        self.values(id.series()).fold(0.0, |sum, value| match value {
            Value::Gauge(value) => sum + value,
            Value::Counter(_) | Value::Histogram(_) => sum,
        })
    }

    /// Returns one histogram, if it exists.
    #[must_use]
    pub fn histogram<const L: usize>(
        &self,
        id: HistogramId<L>,
        labels: [&str; L],
    ) -> Option<&HistogramTotals> {
        match self.find(id.series(), &labels)? {
            Value::Histogram(totals) => Some(totals),
            Value::Counter(_) | Value::Gauge(_) => None,
        }
    }

    /// Returns the sum of a histogram over all labels.
    #[must_use]
    pub fn histogram_sum<const L: usize>(&self, id: HistogramId<L>) -> HistogramTotals {
        let mut sum = HistogramTotals::empty(id.series().definition().buckets().len());
        for value in self.values(id.series()) {
            if let Value::Histogram(totals) = value {
                sum.add(totals);
            }
        }
        sum
    }

    /// Merges in one value by the series' rule.
    pub(super) fn add(&mut self, id: SeriesId, labels: &LabelValues, value: &Value) {
        let family = self.series.entry(id).or_default();
        match family.get_mut(labels) {
            Some(held) => merge(id.definition().kind, held, value),
            None => {
                family.insert(LabelValues::clone(labels), value.clone());
            }
        }
    }

    /// Computes the ratios; call it once, after everything was added. Those of counters vanish, as
    /// all gauges do, with the replica whose counters stay.
    pub(super) fn add_ratios(&mut self) {
        for (index, definition) in CATALOGUE.iter().enumerate() {
            let Kind::Gauge(GaugeMerge::Ratio { numerator, denominator }) = definition.kind else {
                continue;
            };
            let (Some(parts), Some(wholes)) =
                (self.series.get(&numerator), self.series.get(&denominator))
            else {
                continue;
            };
            let replica = definition.labels.iter().position(|it| it.name == REPLICA.name);
            let replica = replica.filter(|_| numerator.definition().kind == Kind::Counter);
            let ups = self.series.get(&REPLICA_UP.series());
            let is_there = |labels: &LabelValues| {
                let Some(replica) = replica.and_then(|at| labels.get(at)) else { return true };
                ups.is_some_and(|ups| ups.contains_key(std::slice::from_ref(replica)))
            };
            let ratios: BTreeMap<LabelValues, Value> = wholes
                .iter()
                .filter(|(labels, _)| is_there(labels))
                .filter_map(|(labels, whole)| {
                    let (part, whole) = (scalar(parts.get(labels)?)?, scalar(whole)?);
                    let ratio = Value::Gauge(part / whole);
                    (whole > 0.0).then(|| (LabelValues::clone(labels), ratio))
                })
                .collect();
            if let Some(id) = u16::try_from(index).ok().and_then(SeriesId::from_index)
                && !ratios.is_empty()
            {
                self.series.insert(id, ratios);
            }
        }
    }

    fn values(&self, id: SeriesId) -> impl Iterator<Item = &Value> {
        self.series.get(&id).into_iter().flat_map(BTreeMap::values)
    }

    fn find(&self, id: SeriesId, labels: &[&str]) -> Option<&Value> {
        let family = self.series.get(&id)?;
        let wanted: Vec<String> = labels.iter().map(|label| (*label).to_owned()).collect();
        family.get(wanted.as_slice())
    }
}

/// Returns a counter's or gauge's value as one number.
pub(super) fn scalar(value: &Value) -> Option<f64> {
    match value {
        Value::Counter(total) => Some(*total as f64),
        Value::Gauge(value) => Some(*value),
        Value::Histogram(_) => None,
    }
}

/// Merges `value` into `held`. Their kinds were checked when the report was applied.
pub(super) fn merge(kind: Kind, held: &mut Value, value: &Value) {
    match (held, value) {
        (Value::Counter(held), Value::Counter(value)) => *held = held.saturating_add(*value),
        (Value::Histogram(held), Value::Histogram(value)) => held.add(value),
        (Value::Gauge(held), Value::Gauge(value)) => match kind {
            Kind::Gauge(GaugeMerge::Max) => *held = held.max(*value),
            _ => *held += value,
        },
        _ => {}
    }
}
