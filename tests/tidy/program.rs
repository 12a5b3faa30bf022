//! Runs the program `tutti` for rules that only it can check: whether options exist, and whether a
//! configuration file is valid.
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::tree;

/// The roles whose options the rules check.
const ROLES: [&str; 3] = ["up", "coordinator", "worker"];

/// The program, from `TUTTI_BIN` if set; otherwise it is built with the profile under test, which
/// takes no time when it is up to date.
fn binary() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("TUTTI_BIN") {
            return path.into();
        }
        // target/PROFILE/deps/tidy-HASH
        let this = std::env::current_exe().unwrap();
        let profile = this.parent().and_then(|deps| deps.parent()).unwrap();
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.args(["build", "--quiet", "--package", "coordinator", "--bin", "tutti"]);
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.current_dir(tree::root()).status().unwrap();
        assert!(status.success(), "the program does not build");
        profile.join("tutti")
    })
}

/// Runs the program at the repository root.
pub(crate) fn run(args: &[&str]) -> Output {
    Command::new(binary()).args(args).current_dir(tree::root()).output().unwrap()
}

/// The long options of subcommand `role`, or `None` if the program has no such subcommand.
pub(crate) fn options(role: &str) -> Option<Vec<String>> {
    let output = run(&[role, "--help"]);
    output.status.success().then(|| {
        let help = String::from_utf8_lossy(&output.stdout).into_owned();
        help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
            .filter(|word| word.starts_with("--") && word.len() > 2)
            .map(str::to_owned)
            .collect()
    })
}

/// Finds problems of a command line that begins with `tutti`, by the program's own help.
pub(crate) fn command_line_problems(line: &str) -> Vec<String> {
    let mut words = line.split_whitespace().skip(1);
    let Some(role) = words.next() else { return Vec::new() };
    if role.starts_with('-') {
        return Vec::new();
    }
    let Some(known) = options(role) else {
        return vec![format!("`tutti {role}`: no such subcommand")];
    };
    words
        .filter(|word| word.starts_with("--"))
        .map(|word| word.split('=').next().unwrap_or(word))
        .filter(|word| !known.iter().any(|option| option == word))
        .map(|word| format!("`tutti {role}` has no option {word}"))
        .collect()
}

#[test]
fn the_help_names_the_options_of_each_role() {
    for role in ROLES {
        let options = options(role).unwrap();
        assert!(options.iter().any(|option| option == "--config"), "{role}: {options:?}");
    }
}

#[test]
fn the_command_line_rule_can_fail() {
    assert!(command_line_problems("tutti up --workers 2 --config x.toml").is_empty());
    assert_eq!(command_line_problems("tutti up --wrokers=2").len(), 1);
    assert_eq!(command_line_problems("tutti fly").len(), 1);
}
