//! Ranks exchanging data: threads, shared memory and TCP against a naive oracle, and every way a
//! group can end. (Killed and frozen processes are in `tests/cluster`.)
//!
//! - [`operations`]: every operation compared with a naive oracle
//! - [`ends`]: all the ways in which a group can end
//! - [`devices`]: ranks that exchange data on (stand-ins for) GPUs
//! - [`groups`]: groups of every kind, one thread per rank
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod devices;
mod ends;
mod groups;
mod operations;
