//! Pure cores stay pure: events and time in, effects out. They own no socket, clock, thread, file,
//! actor or runtime, so that the simulator runs the same code as production.
use crate::rust_code::{crate_mentions, imports, line_of, split, word_offsets};
use crate::tree::{self, File};

/// How the first line of a file begins that says of itself that it is pure.
const SAYS_SO: &str = "//! PURE";

/// Modules that are pure with all their files, whatever these say.
const PURE: [&str; 21] = [
    "coordinator/src/frontend/open_request",
    "coordinator/src/frontend/held",
    "coordinator/src/frontend/requests",
    "coordinator/src/frontends/resume",
    "coordinator/src/scheduler",
    "coordinator/src/cluster",
    "coordinator/src/replica/completions",
    "coordinator/src/replica/deadlines",
    "coordinator/src/replica/core",
    "coordinator/src/traces/otlp",
    "coordinator/src/traces/record",
    "coordinator/src/traces/retry",
    "coordinator/src/traces/sampler",
    "coordinator/src/traces/settings",
    "coordinator/src/traces/span",
    "shared/src/actor/placement",
    "shared/src/hub/checksum",
    "shared/src/hub/files",
    "shared/src/hub/name",
    "shared/src/wire/frame",
    "shared/src/metrics",
];

/// Impure shells among the modules of the core that they drive.
const SHELLS: [&str; 1] = ["coordinator/src/cluster/actor"];

const CRATES: [&str; 7] =
    ["tokio", "actix", "actix_rt", "actix_web", "futures_util", "reqwest", "rand"];

const STANDARD: [&str; 6] = [
    "std::net",
    "std::fs",
    "std::thread",
    "std::process",
    "std::time::Instant",
    "std::time::SystemTime",
];

/// Finds pure sources that access the outside world.
fn pure_modules(sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in sources {
        let says_so = file.text.starts_with(SAYS_SO);
        let pure = says_so || PURE.iter().any(|module| file.in_module(module));
        let is_shell = !says_so && SHELLS.iter().any(|module| file.in_module(module));
        if !pure || is_shell {
            continue;
        }
        let code = split(&file.text).code;
        let mut report = |line: usize, what: &str| {
            findings.push(format!("{}:{line}: a pure module must not name {what}", file.path));
        };
        for name in CRATES {
            for line in crate_mentions(&code, name) {
                report(line, name);
            }
        }
        let (paths, rest) = imports(&code);
        for (line, path) in paths {
            let banned = STANDARD.iter().find(|name| {
                path.strip_prefix(**name).is_some_and(|r| r.is_empty() || r.starts_with("::"))
            });
            if let Some(name) = banned {
                report(line, name);
            }
        }
        for name in STANDARD {
            for at in word_offsets(&rest, name) {
                report(line_of(&rest, at), name);
            }
        }
        // `use std::time;` then `time::Instant::now()`.
        for clock in ["Instant", "SystemTime"] {
            for at in word_offsets(&rest, clock) {
                if rest[at..].starts_with(&format!("{clock}::now")) {
                    report(line_of(&rest, at), clock);
                }
            }
        }
    }
    findings
}

#[test]
fn pure_modules_know_no_runtime_and_no_clock() {
    let sources = tree::rust_files();
    assert!(
        sources.iter().any(|file| PURE.iter().any(|module| file.in_module(module))),
        "no pure module found: this rule lost its subject"
    );
    assert!(
        sources.iter().filter(|file| file.text.starts_with(SAYS_SO)).count() > 100,
        "files no longer say that they are pure in the way that this rule looks for"
    );
    crate::assert_kept("pure modules", &pure_modules(&sources));
}

#[test]
fn the_purity_rule_can_fail() {
    let rule = |path, text| pure_modules(&[File::sample(path, text)]).len();
    let core = "coordinator/src/scheduler/queue.rs";
    assert_eq!(rule(core, "use tokio::sync::mpsc;"), 1);
    assert_eq!(rule(core, "use std::{collections::VecDeque, time::{Duration, Instant}};"), 1);
    assert_eq!(rule(core, "fn f() { let now = std::time::Instant::now(); }"), 2);
    assert_eq!(rule(core, "use std::time;\nfn f() { time::Instant::now(); }"), 1);
    assert_eq!(rule("shared/src/metrics.rs", "use std::net::SocketAddr;"), 1);
    assert_eq!(rule("coordinator/src/cluster/actor.rs", "use actix::Actor;"), 0);
    assert_eq!(rule("shared/src/wire/codec.rs", "use std::io::Read;"), 0);
    let other = "coordinator/src/guide/cache.rs";
    assert_eq!(rule(other, "//! PURE: bounds.\nuse tokio::sync::mpsc;"), 1);
    assert_eq!(rule(other, "//! Not so.\nuse tokio::sync::mpsc;"), 0);
    assert_eq!(rule(core, "//! No tokio here.\nuse std::time::Duration;"), 0);
}
