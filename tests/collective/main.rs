//! Ranks exchanging data: threads, shared memory and TCP against a naive oracle, and every way in
//! which a group can end. (`tests/cluster` kills and freezes processes.)
//!
//! - [`operations`]: every operation compared with a naive oracle
//! - [`ends`]: all the ways in which a group can end
//! - [`devices`]: ranks that exchange data on GPUs (stand-ins)
//! - [`groups`]: groups of every kind, one thread per rank
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod devices;
mod ends;
mod groups;
mod operations;
