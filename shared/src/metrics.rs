//! Cluster-wide metrics: what is measured, how a process counts, how reports are merged.
//!
//! Map:
//! - [`catalogue`]: every series, declared once; the only place that names series
//! - [`definition`]: what a declaration consists of
//! - [`labels`]: label names and the closed sets of their values
//! - [`local`]: cells of one process or thread, addressed by handles
//! - [`rank`]: the series of one rank of a replica, as a worker's executor records them
//! - [`snapshot`]: running totals; [`report`]: their encoding for other processes
//! - [`application`]: metrics of programs that embed the runtime
//! - [`compat`]: the metric names of other servers, computed from the same totals
//! - [`merger`]: merges the reports of all sources; [`merged`]: the result, for readers
//!
//! Everything here is pure: no clock, no thread, no socket. The text format, the log line and the
//! HTTP route belong to the coordinator.
//!
//! The algebra: a source reports running totals stamped (source, incarnation, sequence). Within an
//! incarnation the highest sequence wins; incarnations and sources add up. So repeated, reordered
//! and lost reports do no harm, and a total never falls.
pub mod application;
pub mod catalogue;
pub mod compat;
pub mod definition;
pub mod labels;
pub mod local;
pub mod merged;
pub mod merger;
pub mod rank;
pub mod report;
pub mod snapshot;

pub use definition::{
    CounterId, Definition, GaugeId, GaugeMerge, HistogramId, Kind, Owner, SeriesId, Unit,
};
pub use local::{Counter, Exemplar, Exemplars, Gauge, Histogram, LocalStats, SharedStats};
pub use merged::Merged;
pub use merger::{Limits, Merger, ReportOutcome, ReportRefused, Source};
pub use rank::RankStats;
pub use report::{
    MAX_SNAPSHOT_BYTES, SnapshotError, decode_snapshot, encode_report, encode_snapshot,
};
pub use snapshot::{HistogramTotals, LabelValues, PartialSnapshot, SeriesSnapshot, Value};
