//! PURE: merges the reports of all sources.
//!
//! State: the newest snapshot of each live (source, incarnation); for all retired ones, their
//! added-up counters and histograms. A total is retired + live, so it cannot fall when a source
//! goes; its gauges vanish with it. A report is taken or refused as a whole, except for series
//! beyond the bound on label sets: only those are left out, because otherwise one label value too
//! many would hide everything.
mod baseline;
pub mod checkpoint;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};

use self::baseline::Baseline;
use super::application::{Applications, Family, TagSets};
use super::catalogue::REPORTS_REFUSED;
use super::definition::{Definition, GaugeMerge, Kind, Owner, SeriesId};
use super::labels::{LabelValue, PROCESS_NAME, ReportRefusal, WORKER_NAME};
use super::merged::Merged;
use super::snapshot::{LabelValues, PartialSnapshot, SeriesSnapshot, Value};
use crate::ids::{Incarnation, WorkerId};
use crate::protocol::FrontendId;

/// Who reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Source {
    /// This process.
    Coordinator,
    /// A worker, by its slot.
    Worker(WorkerId),
    /// A front end, by its slot: the one in this process (slot 0) or a separate process.
    Frontend(FrontendId),
}

impl Source {
    /// Whether the same process can be the one under this coordinator and the other under another:
    /// workers and front ends can get other slots.
    pub(super) fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Worker(_), Self::Worker(_)) => true,
            (Self::Frontend(one), Self::Frontend(other)) => (one.0 == 0) == (other.0 == 0),
            _ => self == other,
        }
    }

    /// Whether a process that is gone for good under the one is so under the other. What a worker
    /// counted under an earlier slot is closed when that slot is.
    fn ends_with(self, other: Self) -> bool {
        self == other || matches!(self, Self::Frontend(_)) && self.is_like(other)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinator => f.write_str("coordinator"),
            Self::Worker(worker) => worker.fmt(f),
            Self::Frontend(frontend) => frontend.fmt(f),
        }
    }
}

/// Bounds of the merger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of label sets per series name: for counters and histograms over all sources
    /// and all time, for gauges over the current sources.
    pub label_sets: usize,
    /// Number of retired incarnations remembered per source, so that a late report from one of them
    /// is refused rather than counted again.
    pub retired_incarnations: usize,
    /// Maximum number of lost incarnations; beyond it, the one lost first is retired. A change of
    /// the leader loses all of them until they report again, and no report of a retired one counts.
    pub lost: usize,
    /// Maximum number of names of application metrics: those in use, and those with totals.
    pub application_names: usize,
    /// Maximum number of sets of tags per application metric, as of label sets.
    pub application_tag_sets: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            label_sets: 16_384,
            retired_incarnations: 64,
            lost: 4096,
            application_names: 1024,
            application_tag_sets: 4096,
        }
    }
}

/// Effect of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportOutcome {
    /// It is now the newest report of its incarnation.
    Fresh,
    /// A newer report was already here; nothing changed.
    Stale,
}

/// Why a report was refused; nothing in it was merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stats report was refused: {}{}", .reason.as_str(), named(*.series))]
pub struct ReportRefused {
    /// The reason.
    pub reason: ReportRefusal,
    /// The first series at fault, if it is one of ours.
    pub series: Option<SeriesId>,
}

fn named(series: Option<SeriesId>) -> String {
    series.map(|id| format!(" ({})", id.definition().name)).unwrap_or_default()
}

/// Merges reports.
#[derive(Debug)]
pub struct Merger {
    limits: Limits,
    live: BTreeMap<(Source, Incarnation), LiveSource>,
    /// Counters and histograms of retired incarnations.
    retired: BTreeMap<SeriesId, BTreeMap<LabelValues, Value>>,
    gone: BTreeMap<Source, VecDeque<Incarnation>>,
    /// Lost incarnations that have not reported again, longest lost first.
    lost: VecDeque<(Source, Incarnation)>,
    /// Linked incarnations that have not reported yet and whose first report is a baseline.
    histories: BTreeSet<(Source, Incarnation)>,
    /// Whether the totals of an earlier coordinator are here.
    restored: bool,
    applications: Applications,
    /// Known label sets, for their bound. Those of vanished gauges stay until their room is needed.
    label_sets: BTreeMap<SeriesId, BTreeSet<LabelValues>>,
    /// Series that have reached the bound.
    full: BTreeSet<SeriesId>,
    warnings: Vec<String>,
    /// Counts by [`ReportRefusal::position`].
    refused: Vec<u64>,
}

#[derive(Debug)]
struct LiveSource {
    sequence: u64,
    /// Its link is lost: its gauges do not count until it reports again.
    lost: bool,
    series: Vec<SeriesSnapshot>,
    /// Label sets in its last report that were beyond the bound.
    left_out: LabelSets,
    application: Vec<Family>,
    /// The same of its application metrics.
    tags_left_out: TagSets,
    /// What it had counted before its first report, which does not count.
    baseline: Baseline,
    /// It reports series that are not known here; this was logged.
    other_catalogue: bool,
}

type LabelSets = BTreeSet<(SeriesId, LabelValues)>;

impl Default for Merger {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl Merger {
    /// Creates a merger that has seen nothing.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            live: BTreeMap::new(),
            retired: BTreeMap::new(),
            gone: BTreeMap::new(),
            lost: VecDeque::new(),
            histories: BTreeSet::new(),
            restored: false,
            applications: Applications::new(limits),
            label_sets: BTreeMap::new(),
            full: BTreeSet::new(),
            warnings: Vec::new(),
            refused: vec![0; ReportRefusal::ALL.len()],
        }
    }

    /// Applies a report. `sequence` grows with every report of an incarnation; a report that is not
    /// newer than the last one applied changes nothing.
    ///
    /// # Errors
    /// Returns [`ReportRefused`], and counts it, if this source, continuing from its last report,
    /// cannot have made the report. Series beyond the bound on label sets are left out; each counts
    /// as one refusal.
    pub fn apply(
        &mut self,
        source: Source,
        incarnation: Incarnation,
        sequence: u64,
        snapshot: PartialSnapshot,
    ) -> Result<ReportOutcome, ReportRefused> {
        let key = (source, incarnation);
        let is_over = |gone: &VecDeque<Incarnation>| gone.contains(&incarnation);
        if self.gone.get(&source).is_some_and(is_over)
            || !self.live.contains_key(&key) && self.is_retired(source, incarnation)
        {
            return Err(self.refuse(ReportRefusal::Retired, None));
        }
        self.follow(source, incarnation);
        let last = self.live.get(&(source, incarnation));
        if last.is_some_and(|last| last.sequence >= sequence) {
            return Ok(ReportOutcome::Stale);
        }
        let before = last.map_or(&[][..], |last| &last.series);
        let new = match check(source, before, &snapshot.series) {
            Ok(new) => new,
            Err((reason, series)) => return Err(self.refuse(reason, series)),
        };
        let PartialSnapshot { mut series, mut application, unknown } = snapshot;
        let other_catalogue = !unknown.is_empty();
        let last = self.live.get(&(source, incarnation));
        if other_catalogue && !last.is_some_and(|last| last.other_catalogue) {
            self.refused[ReportRefusal::CatalogueMismatch.position()] += 1;
            self.warnings.push(left_out_of(source, &unknown));
        }
        let left_out = self.admit_label_sets((source, incarnation), &series, new);
        let before = self.live.get(&(source, incarnation));
        if !left_out.is_empty() {
            let known = |it: &&(SeriesId, LabelValues)| {
                before.is_some_and(|before| before.left_out.contains(*it))
            };
            let newly = left_out.len() - left_out.iter().filter(known).count();
            self.refused[ReportRefusal::LabelCardinality.position()] += newly as u64;
            series.retain(|it| {
                let id = SeriesId::from_index(it.id);
                !id.is_some_and(|id| left_out.contains(&(id, LabelValues::clone(&it.labels))))
            });
        }
        let last = before.map_or(&[][..], |before| &before.application);
        let mut tags_left_out = TagSets::new();
        if !application.is_empty() || !last.is_empty() {
            let others = self.live.iter().filter(|(of, _)| **of != key);
            let others = others.map(|(_, live)| live.application.as_slice());
            let name = source.to_string();
            let (refused, over) = self.applications.admit(&name, last, &mut application, others);
            self.refused[ReportRefusal::Application.position()] += refused as u64;
            let known = |it: &&(String, LabelValues)| {
                before.is_some_and(|before| before.tags_left_out.contains(*it))
            };
            let newly = over.len() - over.iter().filter(known).count();
            self.refused[ReportRefusal::LabelCardinality.position()] += newly as u64;
            tags_left_out = over;
        }
        let has_history = self.histories.remove(&key);
        let baseline = match self.live.get_mut(&key) {
            Some(last) => std::mem::take(&mut last.baseline),
            None if has_history => Baseline::of(&series, &application),
            None => Baseline::default(),
        };
        let live = LiveSource {
            sequence,
            lost: false,
            series,
            left_out,
            application,
            tags_left_out,
            baseline,
            other_catalogue,
        };
        if self.live.insert(key, live).is_some_and(|old| old.lost) {
            self.lost.retain(|lost| *lost != key);
        }
        Ok(ReportOutcome::Fresh)
    }

    /// Handles the loss of the link to an incarnation: its gauges vanish, its totals stay, and it
    /// continues from them if it reports again.
    pub fn lost(&mut self, source: Source, incarnation: Incarnation) {
        self.histories.remove(&(source, incarnation));
        let Some(live) = self.live.get_mut(&(source, incarnation)) else { return };
        if std::mem::replace(&mut live.lost, true) {
            return;
        }
        live.series.retain(|series| !matches!(series.value, Value::Gauge(_)));
        self.applications.lose(&mut live.application);
        self.lost.push_back((source, incarnation));
        if self.lost.len() > self.limits.lost
            && let Some(key) = self.lost.pop_front()
        {
            self.close(key);
        }
    }

    /// Retires an incarnation that is gone for good: its totals stay, its gauges vanish, and later
    /// reports from it are refused; those of a front end under whatever slot it had. Repeating this
    /// changes nothing.
    pub fn retire(&mut self, source: Source, incarnation: Incarnation) {
        self.close((source, incarnation));
        let is_its = |key: &(Source, Incarnation)| key.1 == incarnation && key.0.ends_with(source);
        let others: Vec<(Source, Incarnation)> =
            self.live.keys().filter(|key| is_its(key)).copied().collect();
        others.into_iter().for_each(|key| self.close(key));
    }

    /// Retires an incarnation under this slot alone.
    fn close(&mut self, key: (Source, Incarnation)) {
        let (source, incarnation) = key;
        let gone = self.gone.entry(source).or_default();
        if !gone.contains(&incarnation) {
            gone.push_back(incarnation);
            if gone.len() > self.limits.retired_incarnations {
                gone.pop_front();
            }
        }
        self.histories.remove(&key);
        let Some(live) = self.live.remove(&key) else { return };
        if live.lost {
            self.lost.retain(|lost| *lost != key);
        }
        self.applications.retire(&live.counted_application());
        live.counted().for_each(|series| checkpoint::add(&mut self.retired, &series));
    }

    /// Whether an incarnation is known to be gone for good; a front end under whatever slot it had.
    #[must_use]
    pub fn is_retired(&self, source: Source, incarnation: Incarnation) -> bool {
        let mut gone = self.gone.iter().filter(|(of, _)| of.ends_with(source));
        gone.any(|(_, gone)| gone.contains(&incarnation))
    }

    /// Returns the incarnations whose links are lost and whose totals are not closed, the one lost
    /// first first.
    pub fn lost_sources(&self) -> impl Iterator<Item = (Source, Incarnation)> {
        self.lost.iter().copied()
    }

    /// Counts a report that was refused before [`Merger::apply`].
    pub fn refuse(&mut self, reason: ReportRefusal, series: Option<SeriesId>) -> ReportRefused {
        self.refused[reason.position()] += 1;
        ReportRefused { reason, series }
    }

    /// Returns descriptions, each once, of refused and replaced application metrics and of series
    /// with too many label sets.
    pub fn take_warnings(&mut self) -> Vec<String> {
        let mut warnings = std::mem::take(&mut self.warnings);
        warnings.extend(self.applications.take_warnings());
        warnings
    }

    /// Returns the current totals.
    #[must_use]
    pub fn merged(&self) -> Merged {
        let mut merged = Merged::default();
        for (id, family) in &self.retired {
            for (labels, value) in family {
                merged.add(*id, labels, value);
            }
        }
        for live in self.live.values() {
            for series in live.counted() {
                if live.lost && matches!(series.value, Value::Gauge(_)) {
                    continue;
                }
                if let Some(id) = SeriesId::from_index(series.id) {
                    merged.add(id, &series.labels, &series.value);
                }
            }
        }
        for reason in ReportRefusal::ALL {
            let labels = LabelValues::from([reason.as_str().to_owned()]);
            let count = Value::Counter(self.refused[reason.position()]);
            merged.add(REPORTS_REFUSED.series(), &labels, &count);
        }
        merged.add_ratios();
        let live = self.live.values().map(LiveSource::counted_application);
        merged.set_application(self.applications.merged(live));
        merged
    }

    /// Remembers the label sets in `new`, which are those in `series` that the last report of `key`
    /// did not have, as far as the bound allows; returns those beyond it.
    fn admit_label_sets(
        &mut self,
        key: (Source, Incarnation),
        series: &[SeriesSnapshot],
        new: Vec<(SeriesId, LabelValues)>,
    ) -> LabelSets {
        let max = self.limits.label_sets;
        let (mut over, mut counted) = (LabelSets::new(), BTreeSet::new());
        for (id, labels) in &new {
            let known = self.label_sets.entry(*id).or_default();
            if known.contains(labels) {
                continue;
            }
            if known.len() >= max && is_gauge(*id) && counted.insert(*id) {
                // Label sets that no source reports any more make room.
                let others = self.live.iter().filter(|(of, _)| **of != key);
                let others = others.flat_map(|(_, live)| &live.series);
                let there = others.chain(series).filter(|it| it.id == id.index());
                let there: BTreeSet<_> = there.map(|it| LabelValues::clone(&it.labels)).collect();
                known.retain(|labels| there.contains(labels));
                if known.len() < max {
                    self.full.remove(id);
                }
            }
            if known.len() < max {
                known.insert(LabelValues::clone(labels));
                continue;
            }
            over.insert((*id, LabelValues::clone(labels)));
            if self.full.insert(*id) {
                let name = id.definition().name;
                self.warnings.push(format!("{name} has {max} label sets; more are left out"));
            }
        }
        over
    }
}

/// Describes the series in a report that are not known here.
fn left_out_of(source: Source, unknown: &[String]) -> String {
    let some: Vec<&str> = unknown.iter().take(5).map(String::as_str).collect();
    let more = match unknown.len().saturating_sub(some.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "{source} is of another version: its series {}{more} are unknown or different here, and \
         are left out",
        some.join(", ")
    )
}

fn is_gauge(id: SeriesId) -> bool {
    matches!(id.definition().kind, Kind::Gauge(_))
}

type ReportFault = (ReportRefusal, Option<SeriesId>);

/// Compares a report with the last one of its incarnation, in one walk over both, which are sorted.
/// Returns the label sets that are new in it.
fn check(
    source: Source,
    before: &[SeriesSnapshot],
    now: &[SeriesSnapshot],
) -> Result<Vec<(SeriesId, LabelValues)>, ReportFault> {
    if !now.is_sorted_by(|a, b| (a.id, &a.labels) < (b.id, &b.labels)) {
        return Err((ReportRefusal::Malformed, None));
    }
    let mut new = Vec::new();
    let mut before = before.iter().peekable();
    for series in now {
        let key = (series.id, &series.labels);
        let id = SeriesId::from_index(series.id).ok_or((ReportRefusal::UnknownSeries, None))?;
        let definition = id.definition();
        check_value(definition, &series.value).map_err(|reason| (reason, Some(id)))?;
        while let Some(missing) = before.next_if(|old| (old.id, &old.labels) < key) {
            must_be_gauge(missing)?;
        }
        match before.next_if(|old| (old.id, &old.labels) == key) {
            Some(old) => {
                if !continues(&series.value, &old.value) {
                    return Err((ReportRefusal::TotalFell, Some(id)));
                }
            }
            None => {
                check_labels(source, definition, &series.labels)
                    .map_err(|reason| (reason, Some(id)))?;
                new.push((id, LabelValues::clone(&series.labels)));
            }
        }
    }
    before.try_for_each(must_be_gauge)?;
    Ok(new)
}

/// A counter or histogram that is no longer reported has fallen to nothing.
fn must_be_gauge(missing: &SeriesSnapshot) -> Result<(), ReportFault> {
    match missing.value {
        Value::Gauge(_) => Ok(()),
        Value::Counter(_) | Value::Histogram(_) => {
            Err((ReportRefusal::TotalFell, SeriesId::from_index(missing.id)))
        }
    }
}

fn continues(now: &Value, before: &Value) -> bool {
    match (now, before) {
        (Value::Counter(now), Value::Counter(before)) => now >= before,
        (Value::Histogram(now), Value::Histogram(before)) => now.continues(before),
        (Value::Gauge(_), Value::Gauge(_)) => true,
        _ => false,
    }
}

fn check_value(definition: &Definition, value: &Value) -> Result<(), ReportRefusal> {
    match (definition.kind, value) {
        // Ratios are computed here, never reported.
        (Kind::Gauge(GaugeMerge::Ratio { .. }), _) => Err(ReportRefusal::UnknownSeries),
        (Kind::Counter, Value::Counter(_)) => Ok(()),
        (Kind::Gauge(_), Value::Gauge(value)) if value.is_finite() => Ok(()),
        (Kind::Gauge(_), Value::Gauge(_)) => Err(ReportRefusal::NotFinite),
        (Kind::Histogram(bounds), Value::Histogram(totals)) => {
            if totals.buckets.len() == bounds.len() + 1 {
                Ok(())
            } else {
                Err(ReportRefusal::BucketMismatch)
            }
        }
        _ => Err(ReportRefusal::UnknownSeries),
    }
}

/// Checks that these are the declared labels and that `source` may report under them.
fn check_labels(
    source: Source,
    definition: &Definition,
    values: &[String],
) -> Result<(), ReportRefusal> {
    let declared = definition.labels;
    if declared.len() != values.len()
        || !declared.iter().zip(values).all(|(label, value)| label.allows(value))
    {
        return Err(ReportRefusal::UnknownLabel);
    }
    let value_of = |name: &str| {
        declared.iter().zip(values).find(|(label, _)| label.name == name).map(|(_, value)| value)
    };
    let owns = match (definition.owner, source) {
        (Owner::Process, _) => {
            value_of(PROCESS_NAME).is_none_or(|process| *process == source.to_string())
        }
        (Owner::Coordinator | Owner::Frontend, Source::Coordinator)
        | (Owner::Frontend, Source::Frontend(_)) => true,
        // A worker speaks only for itself.
        (Owner::EveryRank, Source::Worker(worker)) => {
            value_of(WORKER_NAME).is_none_or(|value| *value == worker.0.to_string())
        }
        _ => false,
    };
    if owns { Ok(()) } else { Err(ReportRefusal::NotOwner) }
}
