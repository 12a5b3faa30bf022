//! Models by their names on Hugging Face's hub, against a stand-in for it; the oracle is the hub's
//! own Python package.
//!
//! - `cache`: what is downloaded, how it goes on after faults, and what is refused
//! - `python`: what this project and the hub's package make of each other's caches
//! - `serving`: real processes that serve a model by its name
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]
mod cache;
mod python;
mod serving;
