//! Cluster-wide metrics: what is measured, how a process counts, how reports become one total.
//!
//! Map:
//! - [`catalogue`]: every series, declared once; the only place that names one
//! - [`definition`]: what a declaration consists of
//! - [`labels`]: label names and the closed sets of their values
//! - [`local`]: plain cells of one process or thread, addressed by handles
//! - [`rank`]: the series of one rank of a replica, as a worker's executor records them
//! - [`snapshot`]: running totals; [`report`]: how they travel
//! - [`application`]: what users of the runtime count
//! - [`compat`]: the names that other servers publish, from the same totals
//! - [`merger`]: reports of all sources to one total; [`merged`]: that total, to be read
//!
//! Everything here is pure: no clock, no thread, no socket. The text format, the log line and the
//! HTTP route belong to the coordinator.
//!
//! The algebra: a source reports running totals stamped (source, incarnation, sequence). Within an
//! incarnation the highest sequence wins; incarnations and sources add. So repeated, reordered and
//! lost reports do no harm, and a total never falls.
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
pub use merger::{Applied, Limits, Merger, Refused, Source};
pub use rank::RankStats;
pub use report::{MAX_SNAPSHOT_BYTES, SnapshotError, decode_snapshot, encode_snapshot};
pub use snapshot::{HistogramTotals, LabelValues, PartialSnapshot, SeriesSnapshot, Value};
