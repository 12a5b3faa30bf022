//! Cluster-wide metrics: their declarations, the merge of reports, and scrapes.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's helpers may fail it where they stand"
)]
mod application;
mod application_bounds;
mod baselines;
mod catalogue;
mod checkpoint;
mod docs;
mod exposition;
mod host;
mod identities;
mod logging;
mod merge_laws;
mod observing;
mod refusals;
mod rig;
mod scrape;
