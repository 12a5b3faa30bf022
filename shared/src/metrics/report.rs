//! The encoding of snapshots sent between processes, perhaps of different versions.
//!
//! Series are identified by the names of their families, as in checkpoints, each with a hash of
//! what decides whether totals may be added up. Series that the reader's catalogue lacks or
//! declares differently are left out and named; this affects no other series. Every report carries
//! the names of its families, so that a lost report does not affect others.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::application::{Family, Metrics};
use super::catalogue::{CATALOGUE, FORMS, OBSERVATIONS_REFUSED};
use super::definition::SeriesId;
use super::labels::{LabelValue as _, ObservationRefusal};
use super::local::LocalStats;
use super::snapshot::{LabelValues, PartialSnapshot, SeriesSnapshot, Value};
use crate::wire::codec::{self, CodecError};

/// Maximum size of an encoded snapshot, in bytes.
pub const MAX_SNAPSHOT_BYTES: usize = 256 * 1024;

/// Why a snapshot could not be encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// It is too large.
    #[error("a snapshot of {bytes} bytes exceeds the limit of {MAX_SNAPSHOT_BYTES} bytes")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// A series is of a family that the snapshot does not name.
    #[error("a series is of family {family}, the snapshot names {families}")]
    NoFamily {
        /// Index of the family.
        family: u16,
        /// Number of families in the snapshot.
        families: usize,
    },
    /// The bytes do not hold a snapshot.
    #[error("not a snapshot: {0}")]
    Codec(#[from] CodecError),
}

/// The encoded form, as written.
#[derive(Serialize)]
struct Written<'a> {
    /// Names and form hashes of the families.
    families: Vec<(&'static str, u64)>,
    /// Indices into `families`, labels and values.
    series: Vec<(u16, &'a LabelValues, &'a Value)>,
    application: &'a [Family],
}

/// The encoded form, as read.
#[derive(Deserialize)]
struct Read {
    families: Vec<(String, u64)>,
    series: Vec<(u16, LabelValues, Value)>,
    application: Vec<Family>,
}

/// Encodes a snapshot for [`crate::protocol::WorkerStats::snapshot`].
///
/// # Errors
/// Returns [`SnapshotError::TooLarge`] above [`MAX_SNAPSHOT_BYTES`].
pub fn encode_snapshot(snapshot: &PartialSnapshot) -> Result<Vec<u8>, SnapshotError> {
    let mut families: Vec<(&'static str, u64)> = Vec::new();
    let mut last = None;
    let mut series = Vec::with_capacity(snapshot.series.len());
    for SeriesSnapshot { id, labels, value } in &snapshot.series {
        let Some(name) = SeriesId::from_index(*id).map(|id| id.definition().name) else { continue };
        if last != Some(id) {
            families.push((name, FORMS[usize::from(*id)]));
            last = Some(id);
        }
        // Fits, since there are no more families than catalogue positions, which are of this type.
        series.push((families.len().saturating_sub(1) as u16, labels, value));
    }
    let application = &snapshot.application;
    let bytes = codec::encode(&Written { families, series, application })?;
    if bytes.len() > MAX_SNAPSHOT_BYTES {
        return Err(SnapshotError::TooLarge { bytes: bytes.len() });
    }
    Ok(bytes)
}

/// Encodes a process's report: what it counts itself, and the application's metrics. If these make
/// it too large, it is made without them, so that everything else arrives, and counts that.
///
/// # Errors
/// Returns [`SnapshotError::TooLarge`] if it is too large without them, too.
pub fn encode_report(
    mut snapshot: PartialSnapshot,
    application: &Metrics,
) -> Result<Vec<u8>, SnapshotError> {
    let left_out = application.left_out();
    if left_out > 0 {
        snapshot.add(reports_without(left_out));
    }
    snapshot.application = application.snapshot();
    match encode_snapshot(&snapshot) {
        Err(error @ SnapshotError::TooLarge { .. }) if !snapshot.application.is_empty() => {
            application.leave_out(&error.to_string());
            snapshot.application.clear();
            snapshot.add(reports_without(1));
            encode_snapshot(&snapshot)
        }
        encoded => encoded,
    }
}

/// Counts so many reports that were made without the application's metrics.
fn reports_without(count: u64) -> PartialSnapshot {
    let mut stats = LocalStats::uncounted();
    let counter = stats.counter(OBSERVATIONS_REFUSED, [ObservationRefusal::TooLarge.as_str()]);
    stats.add(counter, count);
    stats.snapshot()
}

/// Decodes a snapshot as far as our catalogue has its series. [`super::Merger::apply`] checks its
/// contents.
///
/// # Errors
/// Returns [`SnapshotError::TooLarge`] above [`MAX_SNAPSHOT_BYTES`], [`SnapshotError::NoFamily`],
/// and [`SnapshotError::Codec`] for bytes that are not exactly one snapshot.
pub fn decode_snapshot(bytes: &[u8]) -> Result<PartialSnapshot, SnapshotError> {
    if bytes.len() > MAX_SNAPSHOT_BYTES {
        return Err(SnapshotError::TooLarge { bytes: bytes.len() });
    }
    // Decoded values are larger than encoded ones, so the decoder's own bound is wider.
    let Read { families, series, application } =
        codec::decode::<Read, { 16 * MAX_SNAPSHOT_BYTES }>(bytes)?;
    let ids: Vec<Option<SeriesId>> = families.iter().map(known).collect();
    let mut snapshot = PartialSnapshot { application, ..PartialSnapshot::default() };
    let mut unknown = BTreeSet::new();
    for (family, labels, value) in series {
        let no_family = SnapshotError::NoFamily { family, families: families.len() };
        let id = *ids.get(usize::from(family)).ok_or(no_family)?;
        match id.filter(|id| has_values(*id, &labels)) {
            Some(id) => snapshot.series.push(SeriesSnapshot { id: id.index(), labels, value }),
            None => drop(unknown.insert(family)),
        }
    }
    // Another catalogue has them in another order.
    if !ids.iter().flatten().is_sorted() {
        snapshot.series.sort_by(|a, b| (a.id, &a.labels).cmp(&(b.id, &b.labels)));
    }
    let name = |family: u16| families.get(usize::from(family)).map(|(name, _)| name.clone());
    snapshot.unknown = unknown.into_iter().filter_map(name).collect();
    Ok(snapshot)
}

/// Returns the series of a family, if our catalogue declares it the same way.
fn known((name, form): &(String, u64)) -> Option<SeriesId> {
    static PLACES: LazyLock<BTreeMap<&str, u16>> =
        LazyLock::new(|| (0..).zip(CATALOGUE).map(|(at, it)| (it.name, at)).collect());
    let place = *PLACES.get(name.as_str())?;
    (FORMS.get(usize::from(place)) == Some(form)).then(|| SeriesId::from_index(place))?
}

/// Whether our catalogue has these values of labels with a closed set of values.
fn has_values(id: SeriesId, labels: &[String]) -> bool {
    let mut declared = id.definition().labels.iter().zip(labels);
    declared.all(|(label, value)| label.values.is_empty() || label.values.contains(&value.as_str()))
}

#[cfg(test)]
mod tests {
    use super::super::catalogue::{ENGINE_STEPS, REQUEST_SUCCESS, REQUESTS_RUNNING};
    use super::super::local::LocalStats;
    use super::*;

    fn form(id: SeriesId) -> (String, u64) {
        (id.definition().name.to_owned(), FORMS[usize::from(id.index())])
    }

    fn labels(values: &[&str]) -> LabelValues {
        values.iter().map(|value| (*value).to_owned()).collect()
    }

    #[test]
    fn the_same_program_reads_what_it_wrote() {
        let mut stats = LocalStats::new();
        for replica in ["1", "0"] {
            let steps = stats.counter(ENGINE_STEPS, [replica]);
            stats.add(steps, 7);
            let running = stats.gauge(REQUESTS_RUNNING, [replica]);
            stats.set(running, 2.0);
        }
        let snapshot = stats.snapshot();
        let read = decode_snapshot(&encode_snapshot(&snapshot).unwrap()).unwrap();
        assert_eq!(read, snapshot);
        assert!(read.unknown.is_empty());
    }

    /// A program whose catalogue has another order, other series, and one of ours changed.
    #[test]
    fn another_program_s_series_are_found_by_their_names() {
        let (steps, running) = (ENGINE_STEPS.series(), REQUESTS_RUNNING.series());
        assert!(running < steps);
        let changed = (REQUEST_SUCCESS.series().definition().name.to_owned(), 7);
        let families =
            vec![("tutti_of_tomorrow_total".to_owned(), 5), form(steps), changed, form(running)];
        let series = vec![
            (0u16, labels(&["x"]), Value::Counter(1)),
            (1, labels(&["0"]), Value::Counter(2)),
            (1, labels(&["1"]), Value::Counter(3)),
            (2, labels(&["stop"]), Value::Counter(4)),
            (3, labels(&["0"]), Value::Gauge(5.0)),
        ];
        let bytes = codec::encode(&(families, series, Vec::<Family>::new())).unwrap();
        let read = decode_snapshot(&bytes).unwrap();
        assert_eq!(read.unknown, ["tutti_of_tomorrow_total", "tutti_request_success_total"]);
        let found: Vec<_> =
            read.series.iter().map(|it| (it.id, it.labels.concat(), it.value.clone())).collect();
        let expected = [
            (running.index(), "0".to_owned(), Value::Gauge(5.0)),
            (steps.index(), "0".to_owned(), Value::Counter(2)),
            (steps.index(), "1".to_owned(), Value::Counter(3)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_value_of_tomorrow_is_left_out_alone() {
        let success = REQUEST_SUCCESS.series();
        let series = vec![
            (0u16, labels(&["exploded"]), Value::Counter(1)),
            (0, labels(&["stop"]), Value::Counter(2)),
        ];
        let bytes = codec::encode(&(vec![form(success)], series, Vec::<Family>::new())).unwrap();
        let read = decode_snapshot(&bytes).unwrap();
        assert_eq!(read.unknown, ["tutti_request_success_total"]);
        assert_eq!((read.series.len(), &read.series[0].value), (1, &Value::Counter(2)));
    }

    #[test]
    fn a_series_of_no_family_is_refused() {
        let series = vec![(3u16, labels(&[]), Value::Counter(1))];
        let none = Vec::<(String, u64)>::new();
        let bytes = codec::encode(&(none, series, Vec::<Family>::new())).unwrap();
        let error = decode_snapshot(&bytes).unwrap_err();
        assert_eq!(error, SnapshotError::NoFamily { family: 3, families: 0 });
    }

    #[test]
    fn trailing_and_oversized_bytes_are_refused() {
        let mut bytes = encode_snapshot(&PartialSnapshot::default()).unwrap();
        assert_eq!(decode_snapshot(&bytes).unwrap(), PartialSnapshot::default());
        bytes.push(0);
        assert!(matches!(
            decode_snapshot(&bytes),
            Err(SnapshotError::Codec(CodecError::Trailing { extra: 1 }))
        ));
        assert!(matches!(
            decode_snapshot(&vec![0; MAX_SNAPSHOT_BYTES + 1]),
            Err(SnapshotError::TooLarge { .. })
        ));
    }

    #[test]
    fn a_claimed_length_beyond_the_bytes_allocates_nothing() {
        // No families, then a series count of u64::MAX.
        let mut bytes = codec::encode(&0u64).unwrap();
        bytes.extend(codec::encode(&u64::MAX).unwrap());
        assert!(decode_snapshot(&bytes).is_err());
    }
}
