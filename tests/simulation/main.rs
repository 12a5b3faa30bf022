//! A whole cluster in one thread and virtual time: the coordinator's real cores, simulated links,
//! workers and clients, and faults. Everything follows from a seed, so a failure can be replayed.
//!
//! - [`scenario`]: what a seed stands for
//! - [`world`]: the event queue and the faults
//! - [`network`]: links, latency, partitions, liveness
//! - [`process`], [`engine`], [`model`]: a worker, its cache, its model
//! - [`coordinator`]: the cores, and what the actors do between them
//! - [`clients`]: requests and what they were promised
//! - [`checks`]: what must hold at every moment and at the end
//! - [`switches`]: guards that can be taken away, to show that this is noticed
//!
//! `TUTTI_SIM_SEED=7` replays one seed and says what happens; `TUTTI_SIM_SEEDS=100000` runs more.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests panic and print"
)]

mod checks;
mod clients;
mod coordinator;
mod engine;
mod model;
mod network;
mod process;
mod random;
mod scenario;
mod switches;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::switches::Switches;
use crate::world::{Report, World};

/// Runs of the usual test.
const SEEDS: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect(name))
}

fn run(seed: u64, switches: Switches, verbose: bool) -> Result<Report, String> {
    let run = || World::new(seed, switches, verbose).run();
    // The cores check themselves, too.
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err("a panic, see above".to_owned()))
}

#[test]
fn nothing_is_lost_repeated_or_hung_whatever_fails() {
    if let Some(seed) = number("TUTTI_SIM_SEED") {
        let report = run(seed, Switches::default(), true);
        println!("{report:#?}");
        assert!(report.is_ok(), "seed {seed}");
        return;
    }
    let seeds = number("TUTTI_SIM_SEEDS").unwrap_or(SEEDS);
    let from = number("TUTTI_SIM_FROM").unwrap_or(0);
    let mut failed = Vec::new();
    let mut all = Report::default();
    for seed in from..from + seeds {
        match run(seed, Switches::default(), false) {
            Ok(report) => {
                all.events += report.events;
                all.faults += report.faults;
                all.epochs += report.epochs;
                all.finished += report.finished;
                all.unavailable += report.unavailable;
                all.preemptions += report.preemptions;
                all.fenced += report.fenced;
                all.lasted += report.lasted;
                all.converged_after = all.converged_after.max(report.converged_after);
            }
            Err(why) => {
                println!("TUTTI_SIM_SEED={seed} cargo test -p tests --test simulation: {why}");
                failed.push(seed);
            }
        }
    }
    println!("{seeds} seeds: {all:?}");
    assert!(failed.is_empty(), "{} of {seeds} seeds failed: {failed:?}", failed.len());
}
