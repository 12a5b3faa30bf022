//! A whole cluster in one thread and virtual time: the coordinator's real cores, simulated links,
//! workers and clients, and faults. Everything follows from a seed, so a failure can be replayed.
//!
//! - [`scenario`]: turns a seed into a cluster, its requests and its faults
//! - [`world`], [`events`]: the event queue; [`faults`]: what goes wrong
//! - [`network`]: links, latency, partitions, liveness
//! - [`process`], [`executor`], [`engine`], [`model`]: a worker, from its link to its cache
//! - [`adapters`]: adapters that come and go, at coordinators and workers
//! - [`seats`]: coordinator processes, one of which leads; [`etcd`], [`membership`]: how they and
//!   the workers find each other
//! - [`coordinator`], [`workers`], [`effects`], [`replicas`]: a coordinator that leads: the cores,
//!   and what the actors do between them
//! - [`clients`], [`tally`]: requests and what they were promised; [`operators`]: the same for
//!   commands
//! - [`checks`], [`idling`], [`pace`], [`convergence`]: what must hold at every moment, after the
//!   faults and at the end
//! - [`switches`]: guards that can be taken away, to show that the checks notice
//!
//! `TUTTI_SIM_SEED=7` replays one seed and prints what happens; `TUTTI_SIM_SEEDS=100000` runs more;
//! `TUTTI_SIM_GUARD=no_liveness` takes away this guard alone.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests panic and print"
)]

mod adapters;
mod checks;
mod clients;
mod convergence;
mod coordinator;
mod effects;
mod engine;
mod etcd;
mod events;
mod executor;
mod faults;
mod idling;
mod membership;
mod model;
mod network;
mod operators;
mod pace;
mod process;
mod random;
mod replicas;
mod scenario;
mod seats;
mod switches;
mod tally;
mod workers;
mod world;

use std::collections::VecDeque;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use ::coordinator::scheduler::SUSPICION_MAX;
use kernels::CollectiveError;
use shared::ids::{Epoch, StepId};
use shared::protocol::StepFailed;

use crate::events::Report;
use crate::scenario::{Fault, S, Scenario};
use crate::switches::Switches;
use crate::world::World;

/// Seeds of the usual test.
const SEEDS: u64 = 450;

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
    let reports = on_all_cores(from..from + seeds, |seed| run(seed, Switches::default(), false));
    for (seed, report) in (from..).zip(reports) {
        match report {
            Ok(report) => {
                all.events += report.events;
                all.faults += report.faults;
                all.forms += report.forms;
                all.finished += report.finished;
                all.replaced += report.replaced;
                all.lost += report.lost;
                all.superseded += report.superseded;
                all.outages += report.outages;
                all.unavailable += report.unavailable;
                all.quarantined += report.quarantined;
                all.moved += report.moved;
                all.shared += report.shared;
                all.resharded += report.resharded;
                all.poisoned += report.poisoned;
                all.drained += report.drained;
                all.cached += report.cached;
                all.drafted += report.drafted;
                all.accepted += report.accepted;
                all.disagreed += report.disagreed;
                all.relieved += report.relieved;
                all.overdue += report.overdue;
                all.silent += report.silent;
                all.hung += report.hung;
                all.adapters_changed += report.adapters_changed;
                all.adapters_refused += report.adapters_refused;
                all.preemptions += report.preemptions;
                all.swapped += report.swapped;
                all.filled += report.filled;
                all.masks_awaited += report.masks_awaited;
                all.fenced += report.fenced;
                all.lasted += report.lasted;
                all.converged_after = all.converged_after.max(report.converged_after);
                all.ended_after = all.ended_after.max(report.ended_after);
            }
            Err(why) => {
                println!("TUTTI_SIM_SEED={seed} cargo test -p computing --test simulation: {why}");
                failed.push(seed);
            }
        }
    }
    println!("{seeds} seeds: {all:?}");
    assert!(failed.is_empty(), "{} of {seeds} seeds failed: {failed:?}", failed.len());
}

/// What `work` makes of each item, in the items' order.
fn on_all_cores<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let items = Mutex::new(items.into_iter().enumerate().collect::<VecDeque<_>>());
    let next = || items.lock().unwrap().pop_front();
    let one_core =
        || std::iter::from_fn(next).map(|(at, item)| (at, work(item))).collect::<Vec<_>>();
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let cores: Vec<_> = (0..cores).map(|_| scope.spawn(one_core)).collect();
        cores.into_iter().flat_map(|core| core.join().unwrap()).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Seeds tried per guard: the absence of some guards shows only in rare situations.
const GUARD_SEEDS: u64 = 4000;

/// A guard's name, the seed to try first, and what takes the guard away. The seed is one that once
/// showed its absence; it only saves the search for another.
type Mutation = (&'static str, u64, fn(&mut Switches));

const MUTATIONS: [Mutation; 62] = [
    ("ignores_abort", 0, |it| it.ignores_abort = true),
    ("keeps_epoch_without_link", 15, |it| it.keeps_epoch_without_link = true),
    ("keeps_cache", 0, |it| it.keeps_cache = true),
    ("runs_any_epoch", 6, |it| it.runs_any_epoch = true),
    ("reports_pile_up", 69, |it| it.reports_pile_up = true),
    ("connecting_is_not_freed", 0, |it| it.connecting_is_not_freed = true),
    ("no_liveness", 2, |it| it.no_liveness = true),
    ("reorder_frames", 0, |it| it.reorder_frames = true),
    ("lose_frames", 0, |it| it.lose_frames = true),
    ("old_epochs_pass", 6, |it| it.old_epochs_pass = true),
    ("results_repeat", 0, |it| it.results_repeat = true),
    ("reports_add_up", 0, |it| it.reports_add_up = true),
    ("stale_reports_count", 0, |it| it.stale_reports_count = true),
    ("lost_is_not_told", 1, |it| it.lost_is_not_told = true),
    ("cancelled_is_forgotten", 56, |it| it.cancelled_is_forgotten = true),
    ("step_failures_ignored", 17, |it| it.step_failures_ignored = true),
    ("no_step_timeout", 22, |it| it.no_step_timeout = true),
    ("deadlines_are_not_learned", 46, |it| it.deadlines_are_not_learned = true),
    ("hung_ranks_are_waited_for", 8, |it| it.hung_ranks_are_waited_for = true),
    ("no_cluster_tick", 7, |it| it.no_cluster_tick = true),
    ("leaving_unnoticed", 0, |it| it.leaving_unnoticed = true),
    ("old_commands_run", 153, |it| it.old_commands_run = true),
    ("ranks_may_disagree", 32, |it| it.ranks_may_disagree = true),
    ("slow_ranks_stay", 48, |it| it.slow_ranks_stay = true),
    ("queues_are_not_shared", 6, |it| it.queues_are_not_shared = true),
    ("newcomers_displace", 75, |it| it.newcomers_displace = true),
    ("links_not_told_apart", 4, |it| it.links_not_told_apart = true),
    ("token_lost", 0, |it| it.token_lost = true),
    ("token_repeated", 0, |it| it.token_repeated = true),
    ("gone_process_counts_again", 2685, |it| it.gone_process_counts_again = true),
    ("adapters_are_mixed_up", 0, |it| it.adapters_are_mixed_up = true),
    ("masks_are_ignored", 0, |it| it.masks_are_ignored = true),
    ("masks_are_for_anybody", 18, |it| it.masks_are_for_anybody = true),
    ("masks_are_kept_back", 1, |it| it.masks_are_kept_back = true),
    ("drafts_are_believed", 3, |it| it.drafts_are_believed = true),
    ("rejected_drafts_stay", 9, |it| it.rejected_drafts_stay = true),
    ("drafts_are_cut", 3, |it| it.drafts_are_cut = true),
    ("drafts_are_not_told", 9, |it| it.drafts_are_not_told = true),
    ("drafted_is_not_told", 3, |it| it.drafted_is_not_told = true),
    ("no_canary", 0, |it| it.no_canary = true),
    ("old_words_pass", 510, |it| it.old_words_pass = true),
    ("collectives_share_names", 31, |it| it.collectives_share_names = true),
    ("totals_are_forgotten", 4, |it| it.totals_are_forgotten = true),
    ("workers_count_twice", 8, |it| it.workers_count_twice = true),
    ("superseded_goes_on", 58, |it| it.superseded_goes_on = true),
    ("leader_is_not_followed", 3, |it| it.leader_is_not_followed = true),
    ("compaction_is_ignored", 256, |it| it.compaction_is_ignored = true),
    ("never_lists_again", 24, |it| it.never_lists_again = true),
    ("anybody_runs", 24, |it| it.anybody_runs = true),
    ("saves_unfenced", 405, |it| it.saves_unfenced = true),
    ("leader_key_is_overwritten", 8, |it| it.leader_key_is_overwritten = true),
    ("who_led_is_not_known", 689, |it| it.who_led_is_not_known = true),
    ("swap_in_is_skipped", 5, |it| it.swap_in_is_skipped = true),
    ("swap_out_comes_late", 5, |it| it.swap_out_comes_late = true),
    ("swap_pairs_are_mixed_up", 5, |it| it.swap_pairs_are_mixed_up = true),
    ("states_are_kept_early", 13, |it| it.states_are_kept_early = true),
    ("commands_are_forgotten", 12, |it| it.commands_are_forgotten = true),
    ("commands_stored_unfenced", 388, |it| it.commands_stored_unfenced = true),
    ("leases_are_given_up", 1793, |it| it.leases_are_given_up = true),
    ("leads_by_an_old_lease", 1793, |it| it.leads_by_an_old_lease = true),
    ("adapters_are_dropped_in_use", 9, |it| it.adapters_are_dropped_in_use = true),
    ("listed_adapters_are_skipped", 17, |it| it.listed_adapters_are_skipped = true),
];

#[test]
fn every_guard_that_is_taken_away_is_missed() {
    let only = std::env::var("TUTTI_SIM_GUARD").ok();
    let chosen =
        MUTATIONS.iter().filter(|(name, ..)| only.as_ref().is_none_or(|only| only == name));
    let found = on_all_cores(chosen, |(name, first, take_away)| {
        let mut switches = Switches::default();
        take_away(&mut switches);
        let mut seeds = (*first..GUARD_SEEDS).chain(0..*first);
        (*name, seeds.find_map(|seed| Some((seed, run(seed, switches, false).err()?))))
    });
    let mut unnoticed = Vec::new();
    for (name, red) in found {
        match red {
            Some((seed, why)) => {
                println!("{name}: seed {seed}: {}", why.chars().take(160).collect::<String>());
            }
            None => unnoticed.push(name),
        }
    }
    assert!(unnoticed.is_empty(), "no seed of {GUARD_SEEDS} notices: {unnoticed:?}");
}

/// A leader freezes. The next one leads, leaves totals and crashes. When its lease has ended, the
/// first one continues, knowing nothing of this.
#[test]
fn one_that_missed_another_leader_does_not_write_over_its_totals() {
    let story = |seed: u64, switches: Switches| {
        let mut scenario = Scenario::new(seed);
        (scenario.seats, scenario.checkpoint) = (2, S);
        let (seat, back_after) = (None, 30 * S);
        scenario.faults = vec![
            (6 * S, Fault::FreezeCoordinator { seat, lasts: 19 * S }),
            (17 * S, Fault::CrashCoordinator { seat, back_after }),
        ];
        let world = World::of(scenario, seed, switches, false);
        world.run()
    };
    let blind = Switches { who_led_is_not_known: true, ..Switches::default() };
    let mut missed = 0;
    for seed in 0..20 {
        let report = story(seed, Switches::default());
        assert!(report.as_ref().is_ok_and(|it| it.superseded == 1), "seed {seed}: {report:?}");
        let fell = |why: &String| why.contains("the totals that are left to the next leader");
        missed += u32::from(story(seed, blind).err().as_ref().is_some_and(fell));
    }
    assert!(missed > 0, "that it writes over them is not noticed");
}

/// Scenarios of one replica with the given number of spares, in which a single fault happens.
fn stories(
    spares: usize,
    fault: impl Fn(&Scenario, u64) -> Fault,
) -> impl Iterator<Item = (u64, Scenario)> {
    let one_replica = move |(_, scenario): &(u64, Scenario)| {
        let ranks = scenario.tensor_parallel as usize;
        ranks > 1 && scenario.hosts.len() == ranks + spares && scenario.max_replicas.is_none()
    };
    let plain = |seed| (seed, Scenario::new(seed).without_faults());
    (0..).map(plain).filter(one_replica).map(move |(seed, mut scenario)| {
        let fault = fault(&scenario, seed);
        scenario.limits.step_timeout = std::time::Duration::from_secs(5);
        scenario.seats = 1;
        scenario.faults = vec![(4 * S, fault)];
        (seed, scenario)
    })
}

#[test]
fn ranks_that_waited_for_each_other_in_vain_say_so() {
    let waited = std::time::Duration::from_secs(30);
    let says = |error: CollectiveError| {
        let message = error.to_string();
        StepFailed { epoch: Epoch(1), step: StepId(1), message }.waited_in_vain()
    };
    assert!(says(CollectiveError::TimedOut { op: "all_reduce", waited, rank: 1 }));
    assert!(says(CollectiveError::Stalled { algorithm: "NCCL", waited }));
    assert!(!says(CollectiveError::Aborted));
    assert!(!says(CollectiveError::LinkLost { rank: 1, message: "reset".to_owned() }));
}

#[test]
fn a_rank_whose_every_step_hangs_makes_room_for_a_spare() {
    let any_slot = |scenario: &Scenario, seed: u64| Fault::HangSteps {
        slot: seed as usize % scenario.hosts.len(),
        lasts: None,
    };
    let found = |(seed, scenario): &(u64, Scenario), switches| {
        let report = World::of(scenario.clone(), *seed, switches, false).run();
        // So often a request may be to blame, which its client sends twice; then one after the
        // other gives way.
        let most = u64::from(2 * SUSPICION_MAX + 1 + scenario.tensor_parallel);
        match report {
            Ok(report) if report.hung > most => Err(format!("{} steps hung", report.hung)),
            Ok(_) => Ok(()),
            Err(why) => Err(why),
        }
    };
    let stories: Vec<(u64, Scenario)> = stories(1, any_slot).take(12).collect();
    for story in &stories {
        assert_eq!(found(story, Switches::default()), Ok(()), "seed {}", story.0);
    }
    let blind = Switches { hung_steps_are_failures: true, ..Switches::default() };
    assert!(
        stories.iter().any(|story| found(story, blind).is_err()),
        "that it stays is not noticed"
    );
}

#[test]
fn ranks_that_do_not_reach_each_other_go_on_with_fewer() {
    let two = |scenario: &Scenario, seed: u64| {
        let ranks = scenario.hosts.len();
        let first = seed as usize % ranks;
        Fault::Apart { slots: [first, (first + 1) % ranks], lasts: None }
    };
    let may_be_fewer = |(_, scenario): &(u64, Scenario)| scenario.degrees.len() > 1;
    let stories: Vec<(u64, Scenario)> = stories(0, two).filter(may_be_fewer).take(8).collect();
    let run = |(seed, scenario): &(u64, Scenario), switches| {
        World::of(scenario.clone(), *seed, switches, false).run()
    };
    for story in &stories {
        let report = run(story, Switches::default());
        assert!(report.as_ref().is_ok_and(|it| it.resharded > 0), "seed {}: {report:?}", story.0);
    }
    let blind = Switches { degrees_are_fixed: true, ..Switches::default() };
    let missed = stories.iter().any(|story| run(story, blind).is_err());
    assert!(missed, "that they wait for each other for ever is not noticed");
}

#[test]
fn a_seed_replays_exactly() {
    for seed in 0..20 {
        let (first, again) =
            (run(seed, Switches::default(), false), run(seed, Switches::default(), false));
        assert_eq!(first, again, "seed {seed}");
        assert_ne!(first, run(seed + 1, Switches::default(), false));
    }
}
