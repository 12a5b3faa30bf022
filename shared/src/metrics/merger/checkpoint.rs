//! PURE: totals that outlive the process that merged them.
//!
//! A checkpoint holds what a merger has counted. The totals of retired sources include the writer's
//! own, since it will be gone when the checkpoint is read. Those of every other process are kept
//! apart, since it goes on under the reader and reports again what is in here. Series are
//! identified by name, so that another version of the program can take those it knows.
mod news;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::baseline::Baseline;
use super::{LabelSets, LiveSource, Merger, Source, check_labels, check_value};
use crate::ids::Incarnation;
use crate::metrics::application::{Family, TagSets};
use crate::metrics::catalogue::{
    CATALOGUE, REPORTS_REFUSED, REQUEST_GENERATION_TOKENS, REQUEST_MAX_NUM_GENERATION_TOKENS,
    REQUEST_PARAMS_BEST_OF, REQUEST_PARAMS_MAX_TOKENS, REQUEST_PARAMS_N, REQUEST_PREEMPTIONS,
    REQUEST_PROMPT_TOKENS, REQUEST_SUCCESS, REQUESTS_ACCEPTED,
};
use crate::metrics::definition::{HistogramId, Kind, SeriesId};
use crate::metrics::labels::{
    FinishedReason, LabelValue as _, PROCESS_NAME, ReportRefusal, WORKER_NAME,
};
use crate::metrics::merged::merge;
use crate::metrics::snapshot::{HistogramTotals, LabelValues, SeriesSnapshot, Value};
use crate::protocol::FrontendId;
use crate::wire::codec::{self, CodecError};

/// Version of the format; checkpoints of another version are refused.
const FORM: u16 = 1;
/// The version of one with baselines behind everything else: older programs would count what lies
/// below those.
const FORM_WITH_BASELINES: u16 = 2;

/// Histograms with one observation per ended request, whatever the reason it ended.
const ONCE_PER_REQUEST: [HistogramId<0>; 7] = [
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_MAX_NUM_GENERATION_TOKENS,
    REQUEST_PREEMPTIONS,
    REQUEST_PARAMS_N,
    REQUEST_PARAMS_BEST_OF,
    REQUEST_PARAMS_MAX_TOKENS,
];

/// Maximum size of an encoded checkpoint, in bytes.
pub const MAX_CHECKPOINT_BYTES: usize = 16 << 20;

/// Totals of a merger; see the module's documentation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    form: u16,
    retired: Vec<Total>,
    live: Vec<LiveTotals>,
    gone: Vec<(Source, Vec<Incarnation>)>,
    applications: Vec<Family>,
    /// What does not count of processes that go on, where there is such a thing.
    #[serde(skip)]
    baselines: Vec<LiveTotals>,
}

/// One counter or histogram.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Total {
    name: String,
    labels: LabelValues,
    value: Value,
}

/// Totals of a process that goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct LiveTotals {
    source: Source,
    incarnation: Incarnation,
    sequence: u64,
    series: Vec<Total>,
    application: Vec<Family>,
}

/// Why a checkpoint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// It is too large.
    #[error("a checkpoint of {0} bytes exceeds the limit of {MAX_CHECKPOINT_BYTES} bytes")]
    TooLarge(usize),
    /// Another version of the program wrote it.
    #[error("the checkpoint has form {0}, this program reads form {FORM}")]
    OtherForm(u16),
    /// It cannot be encoded or decoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

impl Checkpoint {
    /// Encodes the checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError::TooLarge`].
    pub fn encode(&self) -> Result<Vec<u8>, CheckpointError> {
        let bytes = match self.form {
            FORM_WITH_BASELINES => codec::encode(&(self, &self.baselines))?,
            _ => codec::encode(self)?,
        };
        if bytes.len() > MAX_CHECKPOINT_BYTES {
            return Err(CheckpointError::TooLarge(bytes.len()));
        }
        Ok(bytes)
    }

    /// Decodes a checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, CheckpointError> {
        if bytes.len() > MAX_CHECKPOINT_BYTES {
            return Err(CheckpointError::TooLarge(bytes.len()));
        }
        // Decoded values are larger than encoded ones, so the decoder's own bound is wider.
        const DECODED_MAX: usize = 16 * MAX_CHECKPOINT_BYTES;
        // Check the version first: what follows may have another layout.
        match u16::from(bytes.first().copied().unwrap_or(0)) {
            FORM => Ok(codec::decode::<Self, DECODED_MAX>(bytes)?),
            FORM_WITH_BASELINES => {
                let (checkpoint, baselines) =
                    codec::decode::<(Self, Vec<LiveTotals>), DECODED_MAX>(bytes)?;
                Ok(Self { baselines, ..checkpoint })
            }
            found => Err(CheckpointError::OtherForm(found)),
        }
    }
}

/// Whether a source ends together with the process that merges.
fn is_own(source: Source) -> bool {
    matches!(source, Source::Coordinator | Source::Frontend(FrontendId(0)))
}

impl Merger {
    /// Returns what has been counted, for the process that comes after this one.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        let mut retired = self.retired.clone();
        let mut applications = self.applications.totals();
        let (mut live, mut baselines) = (Vec::new(), Vec::new());
        for ((source, incarnation), totals) in &self.live {
            if is_own(*source) {
                for series in &totals.series {
                    add(&mut retired, series);
                }
                applications.extend(without_gauges(&totals.application).cloned());
                continue;
            }
            let of = |series: &[SeriesSnapshot], application: &[Family]| LiveTotals {
                source: *source,
                incarnation: *incarnation,
                sequence: totals.sequence,
                series: series.iter().filter_map(total).collect(),
                application: without_gauges(application).cloned().collect(),
            };
            live.push(of(&totals.series, &totals.application));
            if !totals.baseline.is_empty() {
                baselines.push(of(&totals.baseline.series, &totals.baseline.application));
            }
        }
        for reason in ReportRefusal::ALL {
            let labels = LabelValues::from([reason.as_str().to_owned()]);
            let value = Value::Counter(self.refused[reason.position()]);
            let family = retired.entry(REPORTS_REFUSED.series()).or_default();
            merge(Kind::Counter, family.entry(labels).or_insert(Value::Counter(0)), &value);
        }
        let retired = retired.iter().flat_map(|(id, family)| {
            let name = id.definition().name;
            family.iter().map(move |(labels, value)| Total {
                name: name.to_owned(),
                labels: LabelValues::clone(labels),
                value: value.clone(),
            })
        });
        let mut gone = self.gone.clone();
        for (source, incarnation) in self.live.keys().filter(|(source, _)| is_own(*source)) {
            gone.entry(*source).or_default().push_back(*incarnation);
        }
        let gone = gone.into_iter().map(|(source, gone)| (source, gone.into()));
        Checkpoint {
            form: if baselines.is_empty() { FORM } else { FORM_WITH_BASELINES },
            retired: retired.collect(),
            live,
            gone: gone.collect(),
            applications,
            baselines,
        }
    }

    /// Continues from a checkpoint. Requests that were in flight when it was made have ended with
    /// their process: they count as errors. Returns the number of series that this program does not
    /// know.
    pub fn restore(&mut self, checkpoint: Checkpoint) -> usize {
        self.count_histories();
        let mut unknown = 0;
        for total in checkpoint.retired {
            match known(None, total) {
                Some(series) => add(&mut self.retired, &series),
                None => unknown += 1,
            }
        }
        self.end_requests();
        self.applications.restore(checkpoint.applications);
        for (source, incarnations) in checkpoint.gone {
            let gone = self.gone.entry(source).or_default();
            for incarnation in incarnations {
                if !gone.contains(&incarnation) {
                    gone.push_back(incarnation);
                }
            }
            let over = gone.len().saturating_sub(self.limits.retired_incarnations);
            gone.drain(..over);
        }
        for mut totals in checkpoint.live {
            let key = (totals.source, totals.incarnation);
            let (mut series, without) = known_series(&mut totals);
            unknown += without;
            let mut application = totals.application;
            // A process that has already reported here has newer totals; those of a slot that it
            // has left stay.
            if self.live.contains_key(&key) {
                continue;
            }
            let is_its = |of: &(Source, Incarnation)| of.1 == key.1 && of.0.is_like(key.0);
            if self.live.iter().any(|(of, live)| !live.lost && is_its(of)) {
                series.retain(is_of_slot);
                application.clear();
            }
            self.applications.adopt(&key.0.to_string(), &mut application);
            let live = LiveSource { sequence: totals.sequence, series, application, ..lost() };
            self.live.insert(key, live);
            self.lost.push_back(key);
        }
        for mut totals in checkpoint.baselines {
            let (series, _) = known_series(&mut totals);
            if let Some(live) = self.live.get_mut(&(totals.source, totals.incarnation)) {
                live.baseline = Baseline { series, application: totals.application };
            }
        }
        while self.lost.len() > self.limits.lost
            && let Some(key) = self.lost.pop_front()
        {
            self.close(key);
        }
        self.know_label_sets();
        unknown
    }

    /// Counts accepted requests that have not ended as failed.
    fn end_requests(&mut self) {
        let sum = |id: SeriesId| {
            self.retired.get(&id).into_iter().flatten().fold(0u64, |sum, (_, value)| match value {
                Value::Counter(total) => sum.saturating_add(*total),
                Value::Gauge(_) | Value::Histogram(_) => sum,
            })
        };
        let (accepted, ended) = (sum(REQUESTS_ACCEPTED.series()), sum(REQUEST_SUCCESS.series()));
        let over = accepted.saturating_sub(ended);
        let labels = LabelValues::from([FinishedReason::Error.as_str().to_owned()]);
        let Some(id) = index_of(REQUEST_SUCCESS.series().definition().name) else { return };
        add(&mut self.retired, &SeriesSnapshot { id, labels, value: Value::Counter(over) });
        // Their sizes and parameters are lost, but they must be counted.
        for histogram in ONCE_PER_REQUEST {
            let definition = histogram.series().definition();
            let Some(id) = index_of(definition.name) else { continue };
            let mut totals = HistogramTotals::empty(definition.buckets().len());
            if let Some(lowest) = totals.buckets.first_mut() {
                *lowest = over;
            }
            let value = Value::Histogram(totals);
            add(&mut self.retired, &SeriesSnapshot { id, labels: LabelValues::default(), value });
        }
    }

    /// Counts restored label sets towards their bound, too.
    fn know_label_sets(&mut self) {
        for (id, family) in &self.retired {
            self.label_sets.entry(*id).or_default().extend(family.keys().cloned());
        }
        for series in self.live.values().flat_map(|live| &live.series) {
            if let Some(id) = SeriesId::from_index(series.id) {
                self.label_sets.entry(id).or_default().insert(LabelValues::clone(&series.labels));
            }
        }
    }

    /// Lets a process whose totals are here under another slot continue with them. What it counts
    /// by slot stays with that one: under a slot that it had before, it reports the totals that it
    /// had there. Its other series belong to the process and must continue from their values under
    /// the other slot; otherwise they would count twice.
    pub(super) fn follow(&mut self, source: Source, incarnation: Incarnation) {
        let key = (source, incarnation);
        if self.live.get(&key).is_some_and(|live| !live.lost) {
            return;
        }
        let other = self.live.iter_mut().find(|((of, run), live)| {
            let is_other = *run == incarnation && *of != source && of.is_like(source);
            let rest = || live.series.iter().any(|series| !is_of_slot(series));
            is_other && live.lost && (!live.application.is_empty() || rest())
        });
        let Some((_, other)) = other else { return };
        let application = std::mem::take(&mut other.application);
        let rest = split_off_rest(&mut other.series);
        let before = Baseline {
            series: split_off_rest(&mut other.baseline.series),
            application: std::mem::take(&mut other.baseline.application),
        };
        let live = self.live.entry(key).or_insert_with(|| {
            self.lost.push_back(key);
            lost()
        });
        join_rest(&mut live.series, rest);
        join_rest(&mut live.baseline.series, before.series);
        live.application = application;
        live.baseline.application = before.application;
    }
}

/// Returns what an application counts: its gauges outlive nobody.
fn without_gauges(families: &[Family]) -> impl Iterator<Item = &Family> {
    families.iter().filter(|family| !family.is_gauge())
}

/// The state of a process whose link is lost, without totals.
fn lost() -> LiveSource {
    LiveSource {
        sequence: 0,
        lost: true,
        series: Vec::new(),
        left_out: LabelSets::new(),
        application: Vec::new(),
        tags_left_out: TagSets::new(),
        baseline: Baseline::default(),
        other_catalogue: false,
    }
}

/// Takes the series out that do not belong to a slot.
fn split_off_rest(series: &mut Vec<SeriesSnapshot>) -> Vec<SeriesSnapshot> {
    let (stays, rest) = std::mem::take(series).into_iter().partition(is_of_slot);
    *series = stays;
    rest
}

/// Puts them to those of another slot, in place of what was there.
fn join_rest(series: &mut Vec<SeriesSnapshot>, rest: Vec<SeriesSnapshot>) {
    series.retain(is_of_slot);
    series.extend(rest);
    series.sort_by(|a, b| (a.id, &a.labels).cmp(&(b.id, &b.labels)));
}

/// Whether a series is labelled with a slot, and so belongs to it.
fn is_of_slot(series: &SeriesSnapshot) -> bool {
    let labels = SeriesId::from_index(series.id).map_or(&[][..], |id| id.definition().labels);
    labels.iter().any(|label| label.name == PROCESS_NAME || label.name == WORKER_NAME)
}

/// Adds a counter or histogram to totals; gauges are skipped.
pub(super) fn add(
    totals: &mut BTreeMap<SeriesId, BTreeMap<LabelValues, Value>>,
    series: &SeriesSnapshot,
) {
    let Some(id) = SeriesId::from_index(series.id) else { return };
    if matches!(series.value, Value::Gauge(_)) {
        return;
    }
    let family = totals.entry(id).or_default();
    match family.get_mut(&series.labels) {
        Some(held) => merge(id.definition().kind, held, &series.value),
        None => {
            family.insert(LabelValues::clone(&series.labels), series.value.clone());
        }
    }
}

fn total(series: &SeriesSnapshot) -> Option<Total> {
    let id = SeriesId::from_index(series.id)?;
    if matches!(series.value, Value::Gauge(_)) {
        return None;
    }
    let labels = LabelValues::clone(&series.labels);
    Some(Total { name: id.definition().name.to_owned(), labels, value: series.value.clone() })
}

/// Takes the series that the catalogue has and that their source may report, sorted; also returns
/// how many others there are.
fn known_series(totals: &mut LiveTotals) -> (Vec<SeriesSnapshot>, usize) {
    let (source, all) = (totals.source, std::mem::take(&mut totals.series));
    let of = all.len();
    let mut series: Vec<SeriesSnapshot> =
        all.into_iter().filter_map(|total| known(Some(source), total)).collect();
    let unknown = of - series.len();
    series.sort_by(|a, b| (a.id, &a.labels).cmp(&(b.id, &b.labels)));
    series.dedup_by(|a, b| (a.id, &a.labels) == (b.id, &b.labels));
    (series, unknown)
}

/// Finds the series of a total, if the catalogue has the same one and `source` may report it.
fn known(source: Option<Source>, total: Total) -> Option<SeriesSnapshot> {
    let id = index_of(&total.name)?;
    let definition = SeriesId::from_index(id)?.definition();
    check_value(definition, &total.value).ok()?;
    let labels = match source {
        Some(source) => check_labels(source, definition, &total.labels).is_ok(),
        None => definition.labels.len() == total.labels.len(),
    };
    (labels && !matches!(total.value, Value::Gauge(_))).then_some(SeriesSnapshot {
        id,
        labels: total.labels,
        value: total.value,
    })
}

fn index_of(name: &str) -> Option<u16> {
    let index = CATALOGUE.iter().position(|definition| definition.name == name)?;
    u16::try_from(index).ok()
}
