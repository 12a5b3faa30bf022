//! The worker's engine against what transformers computed: every model folder, every degree.
//!
//! Map:
//! - `goldens`: prompt and greedy log-probabilities of every `golden.json`
//! - `invariance`: the same tokens chunked, batched, preempted
//! - `sharding`: a vocabulary that no degree divides, mixed types, numbers that are not finite
//! - `plans`: plans that do not fit are refused
//! - `broken_models`: damaged and unsupported model folders say what is wrong
//! - `checkpoint`: scratch copies of model folders, changed
//! - `replica`, `exchange`: ranks as threads, and the least scheduler
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

mod broken_models;
mod checkpoint;
mod exchange;
mod goldens;
mod invariance;
mod plans;
mod replica;
mod sharding;

use std::path::{Path, PathBuf};

/// A path in the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Every model folder in the repository.
fn model_folders() -> Vec<PathBuf> {
    let mut folders = vec![repository("models/demo")];
    for entry in std::fs::read_dir(repository("tests/models")).unwrap() {
        let path = entry.unwrap().path();
        if path.join("golden.json").is_file() {
            folders.push(path);
        }
    }
    folders.sort();
    assert!(folders.len() > 1, "no model folders in tests/models");
    folders
}
