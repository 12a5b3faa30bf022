//! PURE: what a process had counted before it came to this merger.
//!
//! A coordinator that starts without the totals of the last one begins at zero, while workers and
//! front ends go on and report what they have counted since they started. Their first report here
//! is then where counting begins: otherwise weeks would be counted within seconds.
use std::borrow::Cow;

use super::{LiveSource, Merger, Source};
use crate::ids::Incarnation;
use crate::metrics::application::Family;
use crate::metrics::snapshot::{SeriesSnapshot, Value};

/// Totals that do not count here; sorted as in a snapshot, without gauges.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Baseline {
    pub(super) series: Vec<SeriesSnapshot>,
    pub(super) application: Vec<Family>,
}

impl Baseline {
    /// Everything in a report.
    pub(super) fn of(series: &[SeriesSnapshot], application: &[Family]) -> Self {
        let total = |it: &&SeriesSnapshot| !matches!(it.value, Value::Gauge(_));
        Self {
            series: series.iter().filter(total).cloned().collect(),
            application: application.to_vec(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.series.is_empty() && self.application.is_empty()
    }
}

impl LiveSource {
    /// Its series with what counts of them here.
    pub(super) fn counted(&self) -> impl Iterator<Item = Cow<'_, SeriesSnapshot>> {
        let before = &self.baseline.series;
        self.series.iter().map(move |series| {
            let key = (series.id, &series.labels);
            let place = before.binary_search_by(|it| (it.id, &it.labels).cmp(&key));
            match place.ok().and_then(|place| before.get(place)) {
                Some(before) => Cow::Owned(SeriesSnapshot {
                    value: grown(&series.value, &before.value),
                    ..series.clone()
                }),
                None => Cow::Borrowed(series),
            }
        })
    }

    /// The same of its application metrics.
    pub(super) fn counted_application(&self) -> Cow<'_, [Family]> {
        if self.baseline.application.is_empty() {
            return Cow::Borrowed(&self.application);
        }
        let mut families = self.application.clone();
        for family in &mut families {
            let name = &family.declaration.name;
            let mut before = self.baseline.application.iter();
            let Some(before) = before.find(|it| it.declaration.name == *name) else { continue };
            for (tags, value) in &mut family.series {
                if let Ok(place) = before.series.binary_search_by(|(held, _)| held.cmp(tags)) {
                    *value = grown(value, &before.series[place].1);
                }
            }
        }
        Cow::Owned(families)
    }
}

/// What was counted since; a gauge stays as it is.
fn grown(now: &Value, before: &Value) -> Value {
    match (now, before) {
        (Value::Counter(now), Value::Counter(before)) => {
            Value::Counter(now.saturating_sub(*before))
        }
        (Value::Histogram(now), Value::Histogram(before)) => {
            let mut totals = now.clone();
            totals.sum_nanos = totals.sum_nanos.saturating_sub(before.sum_nanos);
            for (now, before) in totals.buckets.iter_mut().zip(&before.buckets) {
                *now = now.saturating_sub(*before);
            }
            Value::Histogram(totals)
        }
        (now, _) => now.clone(),
    }
}

impl Merger {
    /// A process that has counted for an earlier coordinator joins. Unless that one's totals are
    /// restored here, only what it counts after its first report is added.
    pub fn has_history(&mut self, source: Source, incarnation: Incarnation) {
        let is_here = self.live.keys().any(|(of, run)| *run == incarnation && of.is_like(source));
        if !self.restored && !is_here {
            self.histories.insert((source, incarnation));
        }
    }

    /// Earlier totals are here after all, and everything counts: they have what processes counted
    /// before, except of those that came after they were written.
    pub(super) fn count_histories(&mut self) {
        self.restored = true;
        self.histories.clear();
        for live in self.live.values_mut() {
            live.baseline = Baseline::default();
        }
    }
}
