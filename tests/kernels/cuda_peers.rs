//! The exchange between GPUs (`all_reduce.cu`) under seeded schedules, also with parts of its
//! protocol removed: every such change must be detected.
//!
//! A failing seed is printed. To repeat it:
//! `TUTTI_PEER_SEED=17 cargo test -p computing --test kernels cuda_peers`. To run more seeds:
//! `TUTTI_PEER_SEEDS=100000 ..`.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::cuda_emulation::{SANITIZED, compile, folder, link, objects_named, program_named};
use crate::cuda_ptx;

/// The objects of all sources except the exchange itself.
fn others() -> Vec<PathBuf> {
    let units = [
        "emulate/block.cpp",
        "emulate/guarded.cpp",
        "emulate/ranks.cpp",
        "elementwise.cu",
        "rmsnorm.cu",
    ]
    .map(|name| folder().join(name));
    objects_named("cuda-ranks-objects", &units, SANITIZED)
}

/// The program of emulated ranks.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if cuda_ptx::program().is_some() {
            return cuda_ptx::built(
                "cuda-ranks-ptx",
                "emulate/ranks.cpp",
                &cuda_ptx::ptx().unwrap(),
            );
        }
        program_named("cuda-ranks", |program| {
            let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let exchange = [folder().join("all_reduce.cu")];
            let mut objects = compile(exchange.iter(), SANITIZED, scratch.path());
            objects.extend(others());
            link(&objects, SANITIZED, scratch.path(), program);
        })
    })
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn run(program: &Path, scenario: &str, (from, seeds): (u64, u64), threads: u32) -> Output {
    Command::new(program)
        .args([scenario, &from.to_string(), &seeds.to_string(), &threads.to_string()])
        .output()
        .unwrap()
}

/// Runs `seeds` seeds of a scenario, or those given in the environment.
fn holds(scenario: &str, seeds: u64, threads: u32) {
    // The protocol is the same in PTX: what remains to be seen is whether nvcc has kept it.
    let seeds = if cuda_ptx::program().is_some() { seeds.div_ceil(10) } else { seeds };
    let seeds = number("TUTTI_PEER_SEEDS").unwrap_or(seeds);
    let range = number("TUTTI_PEER_SEED").map_or((0, seeds), |seed| (seed, 1));
    let output = run(program(), scenario, range, threads);
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{threads} threads: {said}{complaint}");
}

#[test]
fn sums_of_all_ranks_are_right_under_any_schedule() {
    holds("whole", 600, 32);
    holds("whole", 60, 64);
}

#[test]
fn fused_sums_and_norms_are_those_of_the_kernels_apart() {
    holds("whole", 40, 512);
}

#[test]
fn ranks_end_when_the_host_aborts_them_at_any_point() {
    holds("abort", 800, 32);
    holds("abort", 30, 512);
}

#[test]
fn ranks_end_when_one_dies_or_freezes() {
    holds("die", 500, 32);
    holds("freeze", 500, 32);
    holds("freeze", 10, 512);
}

/// A part of the protocol to remove, and the scenario that must detect it.
struct Change {
    what: &'static str,
    scenario: &'static str,
    from: &'static str,
    to: &'static str,
}

const CHANGES: &[Change] = &[
    Change {
        what: "flags are raised before what they stand for is there",
        scenario: "whole",
        from: "store_release(flag_of(lane, peer, lane.rank), lane.round);",
        to: "*flag_of(lane, peer, lane.rank) = lane.round;",
    },
    Change {
        what: "threads do not meet before the flags",
        scenario: "whole",
        from: "    __syncthreads();\n    const uint32_t peer = threadIdx.x;",
        to: "    const uint32_t peer = threadIdx.x;",
    },
    Change {
        what: "flags are looked at without order",
        scenario: "whole",
        from: "load_acquire(flag) >=",
        to: "*flag >=",
    },
    Change {
        what: "nobody waits",
        scenario: "whole",
        from: "there = wait_for(lane, peer);",
        to: "there = true;",
    },
    Change {
        what: "only the threads that looked wait",
        scenario: "whole",
        from: "const bool all = all_of_block(there);",
        to: "const bool all = there;",
    },
    Change {
        what: "slots have one half",
        scenario: "whole",
        from: "lane.round % 2",
        to: "lane.round * 0",
    },
    Change { what: "any flag will do", scenario: "whole", from: ">= lane.round)", to: "!= 0)" },
    Change {
        what: "a flag that is ahead will not",
        scenario: "whole",
        from: ">= lane.round)",
        to: "== lane.round)",
    },
    Change {
        what: "the time of an exchange ends before it does",
        scenario: "whole",
        from: "    const bool all = all_of_block(there);\n    if (keeps_time()) {\n        \
               *lane.addresses->spent = lane.addresses->clock + nanoseconds();\n    }\n    return \
               all;",
        to: "    if (keeps_time()) {\n        *lane.addresses->spent = lane.addresses->clock + \
             nanoseconds();\n    }\n    return all_of_block(there);",
    },
    Change {
        what: "the time of earlier exchanges is forgotten",
        scenario: "whole",
        from: "lane->addresses->clock = load_word(lane->spent) - now;",
        to: "lane->addresses->clock = 0 - now;",
    },
    Change {
        what: "launches begin where the last one began",
        scenario: "whole",
        from: "*lane.addresses->rounds = lane.round - 1;",
        to: "*lane.addresses->rounds = 0;",
    },
    Change {
        what: "blocks count together",
        scenario: "whole",
        from: "(half * lane.addresses->blocks + blockIdx.x)",
        to: "(half * lane.addresses->blocks)",
    },
    Change {
        what: "sums are made in another order",
        scenario: "whole",
        from: "for (uint32_t apart = 1; apart < RANKS; apart *= 2) {\n#pragma unroll\n        for \
               (uint32_t rank = 0; rank < RANKS; rank += 2 * apart)",
        to: "for (uint32_t apart = RANKS / 2; apart > 0; apart /= 2) {\n        for (uint32_t rank = \
             0; rank < apart; rank++)",
    },
    Change {
        what: "nobody hears the host",
        scenario: "abort",
        from: "if (load_word(reinterpret_cast<const uint32_t*>(peers->abort)) != 0)",
        to: "if (false)",
    },
    Change {
        what: "waiting has no end",
        scenario: "die",
        from: "began > peers->spin_ns",
        to: "began == peers->spin_ns + 1",
    },
    Change {
        what: "later launches are not told",
        scenario: "freeze",
        from: "    store_word(reinterpret_cast<uint32_t*>(peers->failed), 1);\n",
        to: "",
    },
    Change {
        what: "later launches do not listen",
        scenario: "die",
        from: "return all_of_block(failed == 0);",
        to: "return all_of_block(failed < 2);",
    },
    Change {
        what: "the host is not told",
        scenario: "die",
        from: "store_word(reinterpret_cast<uint32_t*>(peers->outcome), outcome);",
        to: "(void)outcome;",
    },
    Change {
        what: "a kernel does not wait for those before it",
        scenario: "whole",
        from: "    const uint64_t piece = share(count, 4, lane.slot);\n    \
               wait_for_predecessors();\n    release_early(lane);\n    const float4 ahead = \
               load_first(data, piece, count);\n",
        to: "    const uint64_t piece = share(count, 4, lane.slot);\n    \
             release_early(lane);\n    const float4 ahead = load_first(data, piece, count);\n",
    },
    Change {
        what: "the next kernel takes the room that other ranks need",
        scenario: "whole",
        from: "if (!lane.shares_gpu) {",
        to: "if (lane.shares_gpu || true) {",
    },
    Change {
        what: "the next kernel is kept waiting",
        scenario: "whole",
        from: "if (!lane.shares_gpu) {",
        to: "if (lane.shares_gpu && false) {",
    },
    Change {
        what: "a piece is sent as it was ahead, whichever it is",
        scenario: "whole",
        from: "        bool is_ahead = first == blockIdx.x * piece;\n        for",
        to: "        bool is_ahead = true;\n        for",
    },
];

#[test]
fn every_part_of_the_protocol_that_is_taken_away_is_missed() {
    let source = std::fs::read_to_string(folder().join("all_reduce.cu")).unwrap();
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let others = others();
    // Each is compiled once and mostly runs until its first seed that fails.
    let flags = [SANITIZED, &["-O0"]].concat();
    let built = |name: &str, source: &str| {
        let place = scratch.path().join(name);
        std::fs::create_dir(&place).unwrap();
        let changed = place.join("changed.cu");
        std::fs::write(&changed, source).unwrap();
        let mut objects = others.clone();
        objects.extend(compile([&changed].into_iter(), &flags, &place));
        let program = place.join("ranks");
        link(&objects, SANITIZED, &place, &program);
        program
    };
    // What is not changed holds when it is compiled so.
    let whole = built("whole", &source);
    for scenario in BTreeSet::from_iter(CHANGES.iter().map(|change| change.scenario)) {
        let output = run(&whole, scenario, (0, 50), 32);
        assert!(output.status.success(), "{scenario}: {output:?}");
    }
    for (index, change) in CHANGES.iter().enumerate() {
        assert_eq!(source.matches(change.from).count(), 1, "{}: {}", change.what, change.from);
        let program = built(&index.to_string(), &source.replace(change.from, change.to));
        let output = run(&program, change.scenario, (0, 1000), 32);
        let said =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        let said = said.concat();
        assert!(!output.status.success(), "{}: nothing is noticed: {said}", change.what);
        assert!(said.contains("seed"), "{}: it fails otherwise: {said}", change.what);
    }
}
