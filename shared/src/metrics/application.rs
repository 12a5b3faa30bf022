//! Application metrics: counted by programs that embed the runtime, merged and published like ours.
//!
//! Any actor of any node declares a counter, gauge or histogram with tags on its process's
//! [`Metrics`] and records through the handle. Totals are sent with the process's reports; equal
//! tags of all processes become one series: counters and histograms add up, gauges merge by their
//! declared rule. When a process dies, its totals stay and its gauges vanish. Names, tags and
//! buckets are those of the first declaration, as long as any process of the cluster uses it; then
//! another one takes its place and begins at zero.
//!
//! ```
//! use shared::metrics::application::{GaugeMerge, Metrics};
//!
//! let metrics = Metrics::new();
//! let documents = metrics.counter("rag_documents_total", "Documents read.", &["tenant"])?;
//! documents.add(3, &["acme"])?;
//! let index = metrics.gauge("rag_index_bytes", "Size of the index.", &[], GaugeMerge::Sum)?;
//! index.set(1e9, &[])?;
//! // The index is gone; so is its series, until it is set again.
//! index.remove(&[])?;
//! let seconds = metrics.histogram("rag_seconds", "Time to answer.", &[0.1, 1.0, 10.0], &[])?;
//! seconds.observe(0.3, &[])?;
//! # Ok::<(), shared::metrics::application::Error>(())
//! ```
mod declaration;
mod merge;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

pub use self::declaration::{Declaration, Error, GaugeMerge, Kind};
pub use self::merge::MergedFamily;
pub(super) use self::merge::{Applications, TagSets};
use super::snapshot::{HistogramTotals, LabelValues, NANOS_PER_UNIT, Value};

/// Maximum number of metrics per process.
pub const METRICS_MAX: usize = 256;
/// Maximum number of values in a process's metrics: one per counter or gauge and set of tags, one
/// per bucket of a histogram.
pub const CELLS_MAX: usize = 8192;
/// Maximum total length of a process's tag values, in bytes.
pub const TAG_BYTES_MAX: usize = 64 << 10;

/// One declared metric with its series, as sent to the coordinator; series are sorted by tags.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Family {
    /// What it is declared as.
    pub declaration: Declaration,
    /// Its values.
    pub series: Vec<(LabelValues, Value)>,
}

impl Family {
    /// Whether it is a gauge.
    pub(super) fn is_gauge(&self) -> bool {
        matches!(self.declaration.kind, Kind::Gauge(_))
    }
}

/// A process's application metrics. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Metrics by name.
    metrics: BTreeMap<String, Declared>,
    cells: usize,
    tag_bytes: usize,
    /// Number of the process's reports that had no room for these metrics.
    left_out: u64,
    /// What the log has to be told of that, once.
    warning: Option<String>,
}

#[derive(Debug)]
struct Declared {
    declaration: Declaration,
    series: BTreeMap<LabelValues, Value>,
}

/// A counter: a total that only grows.
#[derive(Clone, Debug)]
pub struct Counter(Handle);

/// A gauge: a current value.
#[derive(Clone, Debug)]
pub struct Gauge(Handle);

/// A histogram: observations counted in buckets.
#[derive(Clone, Debug)]
pub struct Histogram(Handle);

#[derive(Clone, Debug)]
struct Handle {
    metrics: Metrics,
    name: Arc<str>,
}

impl Metrics {
    /// Creates an empty set of metrics.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a counter; its name ends with `_total`. Declaring it again gives the same counter.
    ///
    /// # Errors
    /// [`Error`], also if the name is taken by a metric of another kind or with other tags, or if
    /// both would be published under one name (a counter `jobs_total` and a gauge `jobs`).
    pub fn counter(&self, name: &str, help: &str, tags: &[&str]) -> Result<Counter, Error> {
        self.declare(Declaration::new(name, help, tags, Kind::Counter)?).map(Counter)
    }

    /// Declares a gauge. Declaring it again gives the same gauge.
    ///
    /// # Errors
    /// Same as [`Metrics::counter`].
    pub fn gauge(
        &self,
        name: &str,
        help: &str,
        tags: &[&str],
        merge: GaugeMerge,
    ) -> Result<Gauge, Error> {
        self.declare(Declaration::new(name, help, tags, Kind::Gauge(merge))?).map(Gauge)
    }

    /// Declares a histogram whose buckets have the upper bounds `bounds`; a bucket for everything
    /// above is implied. Declaring it again gives the same histogram.
    ///
    /// # Errors
    /// Same as [`Metrics::counter`].
    pub fn histogram(
        &self,
        name: &str,
        help: &str,
        bounds: &[f64],
        tags: &[&str],
    ) -> Result<Histogram, Error> {
        let kind = Kind::Histogram(bounds.to_vec());
        self.declare(Declaration::new(name, help, tags, kind)?).map(Histogram)
    }

    /// Returns the current values, sorted by name.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Family> {
        let families = self.inner();
        let families = families.metrics.values().filter(|declared| !declared.series.is_empty());
        families
            .map(|declared| Family {
                declaration: declared.declaration.clone(),
                series: declared
                    .series
                    .iter()
                    .map(|(tags, value)| (LabelValues::clone(tags), value.clone()))
                    .collect(),
            })
            .collect()
    }

    /// Returns what the log should say, once per process, if reports have no room for these
    /// metrics.
    #[must_use]
    pub fn take_warning(&self) -> Option<String> {
        self.inner().warning.take()
    }

    /// Number of the process's reports that had no room for these metrics.
    pub(super) fn left_out(&self) -> u64 {
        self.inner().left_out
    }

    /// Counts a report that had no room for these metrics, for the given reason.
    pub(super) fn leave_out(&self, reason: &str) {
        let inner = &mut *self.inner();
        if inner.left_out == 0 {
            inner.warning =
                Some(format!("reports are sent without the application's metrics: {reason}"));
        }
        inner.left_out = inner.left_out.saturating_add(1);
    }

    fn declare(&self, declaration: Declaration) -> Result<Handle, Error> {
        let inner = &mut *self.inner();
        let name: Arc<str> = declaration.name.as_str().into();
        match inner.metrics.get(&declaration.name) {
            Some(known) if known.declaration.same(&declaration) => {}
            Some(known) => {
                return Err(Error::Changed {
                    name: declaration.name.clone(),
                    was: known.declaration.to_string(),
                    now: declaration.to_string(),
                });
            }
            None if inner.metrics.len() >= METRICS_MAX => {
                return Err(Error::TooMany { what: "metrics", max: METRICS_MAX });
            }
            None => {
                let mut others = inner.metrics.values().map(|it| &it.declaration);
                if let Some(other) = others.find(|other| other.clashes_with(&declaration)) {
                    return Err(Error::Taken {
                        name: declaration.name.clone(),
                        by: other.name.clone(),
                    });
                }
                let declared = Declared { declaration, series: BTreeMap::new() };
                inner.metrics.insert(declared.declaration.name.clone(), declared);
            }
        }
        Ok(Handle { metrics: self.clone(), name })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves plain numbers behind, which stay usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handle {
    /// Changes the value under these tags; creates it if it is new.
    fn record(&self, tags: &[&str], change: impl FnOnce(&mut Value)) -> Result<(), Error> {
        let inner = &mut *self.metrics.inner();
        let Some(declared) = inner.metrics.get_mut(&*self.name) else { return Ok(()) };
        let key: LabelValues = tags.iter().map(|tag| (*tag).to_owned()).collect();
        if let Some(value) = declared.series.get_mut(&key) {
            change(value);
            return Ok(());
        }
        declared.declaration.check_tags(tags)?;
        let mut value = declared.declaration.kind.empty();
        let cells = match &value {
            Value::Counter(_) | Value::Gauge(_) => 1,
            Value::Histogram(totals) => totals.buckets.len(),
        };
        let tag_bytes: usize = tags.iter().map(|tag| tag.len()).sum();
        if inner.cells + cells > CELLS_MAX {
            return Err(Error::TooMany { what: "values and buckets", max: CELLS_MAX });
        }
        if inner.tag_bytes + tag_bytes > TAG_BYTES_MAX {
            return Err(Error::TooMany { what: "bytes of tags", max: TAG_BYTES_MAX });
        }
        inner.cells += cells;
        inner.tag_bytes += tag_bytes;
        change(&mut value);
        declared.series.insert(key, value);
        Ok(())
    }

    /// Removes a gauge's value under these tags, if there is one.
    fn remove(&self, tags: &[&str]) -> Result<(), Error> {
        let inner = &mut *self.metrics.inner();
        let Some(declared) = inner.metrics.get_mut(&*self.name) else { return Ok(()) };
        declared.declaration.check_tags(tags)?;
        let key: LabelValues = tags.iter().map(|tag| (*tag).to_owned()).collect();
        if declared.series.remove(&key).is_some() {
            let tag_bytes: usize = tags.iter().map(|tag| tag.len()).sum();
            inner.cells = inner.cells.saturating_sub(1);
            inner.tag_bytes = inner.tag_bytes.saturating_sub(tag_bytes);
        }
        Ok(())
    }
}

impl Counter {
    /// Adds `n` under these tags, given in the order of the declaration.
    ///
    /// # Errors
    /// If tags are missing, surplus or too long, or there are too many sets of tags.
    pub fn add(&self, n: u64, tags: &[&str]) -> Result<(), Error> {
        self.0.record(tags, |value| {
            if let Value::Counter(total) = value {
                *total = total.saturating_add(n);
            }
        })
    }
}

impl Gauge {
    /// Sets the value under these tags, given in the order of the declaration.
    ///
    /// # Errors
    /// Same as [`Counter::add`], and for a value that is not finite.
    pub fn set(&self, to: f64, tags: &[&str]) -> Result<(), Error> {
        if !to.is_finite() {
            return Err(Error::Value { name: self.0.name.to_string(), value: to });
        }
        self.0.record(tags, |value| *value = Value::Gauge(to))
    }

    /// Removes the series under these tags until it is set again: what it describes is no longer
    /// there. The tags take no room then. Removing one that is not there changes nothing.
    ///
    /// # Errors
    /// If tags are missing, surplus or too long.
    pub fn remove(&self, tags: &[&str]) -> Result<(), Error> {
        self.0.remove(tags)
    }
}

impl Histogram {
    /// Observes a value under these tags, given in the order of the declaration.
    ///
    /// # Errors
    /// Same as [`Counter::add`], and for a value that is negative or not finite.
    pub fn observe(&self, observed: f64, tags: &[&str]) -> Result<(), Error> {
        if !observed.is_finite() || observed < 0.0 {
            return Err(Error::Value { name: self.0.name.to_string(), value: observed });
        }
        let bounds = {
            let inner = self.0.metrics.inner();
            match inner.metrics.get(&*self.0.name).map(|declared| &declared.declaration.kind) {
                Some(Kind::Histogram(bounds)) => bounds.partition_point(|le| *le < observed),
                _ => return Ok(()),
            }
        };
        self.0.record(tags, |value| {
            if let Value::Histogram(HistogramTotals { buckets, sum_nanos }) = value {
                if let Some(count) = buckets.get_mut(bounds) {
                    *count = count.saturating_add(1);
                }
                let nanos = (observed * NANOS_PER_UNIT as f64).round() as u128;
                *sum_nanos = sum_nanos.saturating_add(nanos);
            }
        })
    }
}
