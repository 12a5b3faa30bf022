//! Running totals: one process's series at one moment. [`super::report`] encodes them.
//!
//! Histograms carry one count per bucket (not cumulative). The last bucket is for everything above
//! the last bound, so the number of observations is the sum of the counts and cannot disagree with
//! them. Sums are integers in units of 1e-9: adding integers is associative, so a merged total
//! cannot fall by rounding when a source is retired or reports arrive in another order.
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::application::Family;

/// Number of integer steps in [`HistogramTotals::sum_nanos`] per unit.
pub const NANOS_PER_UNIT: u128 = 1_000_000_000;

/// Label values of one series, in the order of its declaration.
pub type LabelValues = Arc<[String]>;

/// One source's series at one moment, sorted by (id, labels), each once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartialSnapshot {
    /// The series.
    pub series: Vec<SeriesSnapshot>,
    /// Metrics of the application, sorted by name.
    pub application: Vec<Family>,
    /// Names of the source's series that our catalogue lacks or declares differently: left out.
    pub unknown: Vec<String>,
}

impl PartialSnapshot {
    /// Adds the series of another part of the same process. Counters and histograms that both have
    /// are added up; a gauge belongs to only one part.
    pub fn add(&mut self, other: Self) {
        for series in other.series {
            let key = (series.id, &series.labels);
            match self.series.binary_search_by(|held| (held.id, &held.labels).cmp(&key)) {
                Err(place) => self.series.insert(place, series),
                Ok(place) => match (&mut self.series[place].value, series.value) {
                    (Value::Counter(held), Value::Counter(value)) => {
                        *held = held.saturating_add(value);
                    }
                    (Value::Histogram(held), Value::Histogram(value)) => held.add(&value),
                    (held, value) => *held = value,
                },
            }
        }
        self.application.extend(other.application);
    }
}

/// One series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesSnapshot {
    /// Position in the catalogue.
    pub id: u16,
    /// Label values.
    pub labels: LabelValues,
    /// The value.
    pub value: Value,
}

/// A value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Value {
    /// A total since the process started.
    Counter(u64),
    /// A current value.
    Gauge(f64),
    /// Observations since the process started.
    Histogram(HistogramTotals),
}

/// A histogram's totals.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistogramTotals {
    /// Observations per bucket, one more than there are bounds.
    pub buckets: Vec<u64>,
    /// Sum of the observed values in 1e-9 units.
    pub sum_nanos: u128,
}

impl HistogramTotals {
    /// Creates the totals of a histogram with `bounds` bounds and no observations.
    #[must_use]
    pub fn empty(bounds: usize) -> Self {
        Self { buckets: vec![0; bounds + 1], sum_nanos: 0 }
    }

    /// Number of observations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Sum of the observed values. Exact for integers below 2^53, and never falls unless
    /// `sum_nanos` does.
    #[must_use]
    pub fn sum(&self) -> f64 {
        // Converted in two parts: `sum_nanos as f64` alone would round integers above 9e6.
        let whole = self.sum_nanos / NANOS_PER_UNIT;
        let rest = self.sum_nanos % NANOS_PER_UNIT;
        whole as f64 + rest as f64 / NANOS_PER_UNIT as f64
    }

    /// Adds the observations of `other`, which has the same number of buckets.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine = mine.saturating_add(*theirs);
        }
        self.sum_nanos = self.sum_nanos.saturating_add(other.sum_nanos);
    }

    /// Whether nothing in `self` is lower than in `before`.
    #[must_use]
    pub fn continues(&self, before: &Self) -> bool {
        self.sum_nanos >= before.sum_nanos
            && self.buckets.len() == before.buckets.len()
            && self.buckets.iter().zip(&before.buckets).all(|(now, then)| now >= then)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_convert_exactly_where_it_matters() {
        let totals = |sum_nanos| HistogramTotals { buckets: vec![0], sum_nanos };
        assert_eq!(totals(9_007_199_254_740_991 * NANOS_PER_UNIT).sum(), 9_007_199_254_740_991.0);
        assert_eq!(totals(1_500_000_000).sum(), 1.5);
        // Just below and at an integer: the order is kept.
        let below = totals(4_000_000_000_000_000 * NANOS_PER_UNIT - 1).sum();
        assert!(below <= totals(4_000_000_000_000_000 * NANOS_PER_UNIT).sum());
    }
}
