//! Ranks exchanging data: threads, shared memory and TCP against a naive oracle, and every way a
//! group can end. (Killed and frozen processes are in `tests/cluster`.)
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod devices;
mod ends;
mod groups;
mod operations;
