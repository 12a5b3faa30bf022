//! Every model folder against its golden values (transformers, float32), at tp 1, 2 and 4.
//!
//! - [`goldens`]: prompt log-probabilities and greedy tokens
//! - [`invariance`]: chunked, batched and re-admitted sequences give the same bits
//! - [`broken`]: broken model folders give one clear error
//! - [`rig`]: ranks as threads, driven by step plans
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

mod broken;
mod goldens;
mod invariance;
mod rig;
