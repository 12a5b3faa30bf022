//! The features of the crates that the program uses: tests build it together with themselves, and
//! what they enable of a crate, the program has as well. Users build it alone. So everything that
//! its sources can name must be there without the tests.
use std::collections::BTreeMap;
use std::process::Command;

use crate::rust_code::{split, word_offsets};
use crate::tree::{self, File};

/// The crates of the program.
const PROGRAM: [&str; 4] = ["coordinator", "worker", "shared", "kernels"];

/// What tests may enable of a crate although the program does not: its feature, and the names that
/// are there with it alone, which no source of the program may have.
const OF_TESTS: [(&str, &str, &[&str]); 2] = [
    ("getrandom", "sys_rng", &["SysRng", "rand_core"]),
    ("tokio", "rt-multi-thread", &["multi_thread", "new_multi_thread", "block_in_place"]),
];

/// The features of the crates that each crate of the program names in its manifest, in the output
/// of `cargo tree --prefix depth --format '|{p}|{f}'`, by the names of both.
fn direct(tree: &str) -> BTreeMap<(&'static str, &str), Vec<&str>> {
    let mut features = BTreeMap::new();
    // The path from the root to the present line.
    let mut path: Vec<&str> = Vec::new();
    for line in tree.lines() {
        let mut parts = line.split('|');
        let (Some(depth), Some(package)) = (parts.next(), parts.next()) else { continue };
        let Ok(depth) = depth.parse() else { continue };
        path.truncate(depth);
        let name = package.split(' ').next().unwrap_or_default();
        let of = path.last().and_then(|owner| PROGRAM.into_iter().find(|it| it == owner));
        if let Some(owner) = of {
            let listed = parts.next().unwrap_or_default().trim_end_matches("(*)").trim();
            features.insert((owner, name), listed.split(',').filter(|it| !it.is_empty()).collect());
        }
        path.push(name);
    }
    features
}

/// Finds features that only tests enable.
fn features_of_tests(alone: &str, with_tests: &str) -> Vec<String> {
    let (alone, with_tests) = (direct(alone), direct(with_tests));
    let mut findings = Vec::new();
    for ((owner, name), features) in &alone {
        let Some(more) = with_tests.get(&(*owner, *name)) else {
            findings.push(format!("{owner}: {name} is missing in the workspace"));
            continue;
        };
        let allowed = |feature: &str| OF_TESTS.iter().any(|it| (it.0, it.1) == (*name, feature));
        let more = more.iter().filter(|it| !features.contains(it) && !allowed(it));
        findings.extend(more.map(|feature| {
            format!("{owner}: only tests enable {feature:?} of {name}; the program may lack it")
        }));
    }
    findings
}

/// Finds sources of the program that name what only those features bring.
fn names_of_tests(sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    let is_program = |file: &&File| PROGRAM.iter().any(|it| file.in_module(&format!("{it}/src")));
    for file in sources.iter().filter(is_program) {
        let code = split(&file.text).code;
        for (name, feature, names) in OF_TESTS {
            let found = names.iter().filter(|it| !word_offsets(&code, it).is_empty());
            findings.extend(found.map(|found| {
                format!("{}: {found} needs {feature:?} of {name}, which only tests have", file.path)
            }));
        }
    }
    findings
}

fn cargo_tree(of: &[&str]) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["tree", "--locked", "--offline", "--prefix", "depth", "--format", "|{p}|{f}"]);
    let output = cargo.args(of).current_dir(tree::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_program_needs_no_feature_that_only_tests_enable() {
    let alone = cargo_tree(&["--package", "coordinator", "--edges", "normal"]);
    let with_tests = cargo_tree(&["--workspace", "--edges", "normal,build,dev"]);
    let crates = direct(&alone);
    for owner in PROGRAM {
        assert!(crates.keys().any(|(it, _)| *it == owner), "{owner} has no dependencies");
    }
    crate::assert_kept("features", &features_of_tests(&alone, &with_tests));
    crate::assert_kept("names of features", &names_of_tests(&tree::rust_files()));
}

#[test]
fn the_rules_on_features_can_fail() {
    let tree = |features: &str| {
        format!(
            "0|coordinator v0.1.0 (/x)|\n1|tokio v1|{features}\n2|mio v1|net\n1|shared v0.1.0 (/x)|\n2|half v2|std (*)\n"
        )
    };
    let alone = tree("net");
    assert_eq!(direct(&alone).len(), 3);
    assert_eq!(direct(&alone)[&("shared", "half")], ["std"]);
    assert!(features_of_tests(&alone, &alone).is_empty());
    assert!(features_of_tests(&alone, &tree("net,rt-multi-thread")).is_empty());
    assert_eq!(features_of_tests(&alone, &tree("fs,net")).len(), 1);
    assert_eq!(features_of_tests(&alone, "0|coordinator v0.1.0 (/x)|\n").len(), 3);

    let named = |path: &str, text: &str| names_of_tests(&[File::sample(path, text)]).len();
    assert_eq!(named("worker/src/a.rs", "fn f() { tokio::task::block_in_place(g) }"), 1);
    assert_eq!(named("worker/src/a.rs", "// block_in_place\nfn f() {}"), 0);
    assert_eq!(named("tests/src/a.rs", "fn f() { tokio::task::block_in_place(g) }"), 0);
}
