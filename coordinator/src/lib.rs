//! The coordinator: HTTP in, plans out, tokens back, one `/metrics`.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod engine;
pub mod metrics;
