//! Every file in `cluster-configs` is well formed, and the program accepts those that it can check.
use saphyr::LoadableYamlNode as _;

use crate::program;
use crate::tree::{self, File};

const FOLDER: &str = "cluster-configs";

/// Files whose format this rule knows.
fn config_files() -> Vec<File> {
    tree::all_paths()
        .into_iter()
        .filter(|path| path.starts_with(&format!("{FOLDER}/")))
        .map(|path| tree::read(&path).unwrap_or_else(|| panic!("{path} is not readable UTF-8")))
        .collect()
}

/// Returns a syntax error of a file, if any.
fn malformed(file: &File) -> Option<String> {
    let problem = match file.extension() {
        "toml" => file.text.parse::<toml::Table>().err().map(|error| error.to_string()),
        "json" => serde_json::from_str::<serde_json::Value>(&file.text)
            .err()
            .map(|error| error.to_string()),
        "yml" | "yaml" => match saphyr::Yaml::load_from_str(&file.text) {
            Ok(documents) if documents.is_empty() => Some("no YAML document".to_owned()),
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        },
        "service" | "target" => malformed_unit(&file.text),
        "md" => None,
        _ if file.path.ends_with("Dockerfile") || file.path.ends_with(".env") => None,
        other => Some(format!("no rule checks '.{other}' files: add one to tests/tidy/configs.rs")),
    };
    problem.map(|problem| format!("{}: {problem}", file.path))
}

/// Returns a syntax error of a systemd unit, if any.
fn malformed_unit(text: &str) -> Option<String> {
    let mut in_section = false;
    let mut continued = false;
    for (index, line) in text.lines().enumerate() {
        let content = line.trim();
        let problem = if continued || content.is_empty() || content.starts_with(['#', ';']) {
            None
        } else if content.starts_with('[') {
            in_section = content.ends_with(']');
            (!in_section).then_some("a section header ends with ]")
        } else if !in_section {
            Some("an assignment before the first section")
        } else {
            (!content.contains('=')).then_some("neither a section nor KEY=VALUE")
        };
        if let Some(problem) = problem {
            return Some(format!("line {}: {problem}", index + 1));
        }
        continued = content.ends_with('\\');
    }
    (!in_section).then(|| "no section".to_owned())
}

/// The command lines of `tutti` in a systemd unit, without the program's folder.
fn unit_commands(text: &str) -> Vec<String> {
    text.replace("\\\n", " ")
        .lines()
        .filter_map(|line| line.trim().strip_prefix("ExecStart="))
        .filter_map(|command| {
            let (program, rest) = command.split_once(' ')?;
            program.ends_with("/tutti").then(|| format!("tutti {rest}"))
        })
        .collect()
}

#[test]
fn configuration_files_are_well_formed() {
    let files = config_files();
    assert!(!files.is_empty(), "no file in {FOLDER}");
    let findings: Vec<String> = files.iter().filter_map(malformed).collect();
    crate::assert_kept("configuration files", &findings);
}

#[test]
fn the_program_accepts_every_configuration_file() {
    let mut findings = Vec::new();
    for file in config_files().iter().filter(|file| file.extension() == "toml") {
        let output = program::run(&["check-config", &file.path]);
        if !output.status.success() {
            findings.push(String::from_utf8_lossy(&output.stderr).into_owned());
        }
    }
    crate::assert_kept("tutti check-config", &findings);
}

#[test]
fn units_start_the_program_with_options_that_it_has() {
    let mut findings = Vec::new();
    for file in config_files().iter().filter(|file| file.extension() == "service") {
        let commands = unit_commands(&file.text);
        if commands.is_empty() {
            findings.push(format!("{}: starts no tutti", file.path));
        }
        for problem in commands.iter().flat_map(|line| program::command_line_problems(line)) {
            findings.push(format!("{}: {problem}", file.path));
        }
    }
    crate::assert_kept("systemd units", &findings);
}

/// Every role beats to systemd, which must be told to listen.
#[test]
fn units_are_watched() {
    let files = config_files();
    let units = files.iter().filter(|file| file.extension() == "service");
    let unwatched =
        units.filter(|file| !file.text.lines().any(|it| it.starts_with("WatchdogSec=")));
    let findings: Vec<String> = unwatched.map(|file| file.path.clone()).collect();
    crate::assert_kept("units without WatchdogSec", &findings);
}

#[test]
fn the_configuration_rules_can_fail() {
    let bad = |path: &str, text: &str| malformed(&File::sample(path, text)).is_some();
    assert!(bad("x.toml", "a = ") && !bad("x.toml", "a = 1"));
    assert!(bad("x.json", "{\"a\": 1,}") && !bad("x.json", "{\"a\": 1}"));
    assert!(bad("x.yml", "a: [1\nb: 2") && !bad("x.yml", "a: 1\n---\nb: [2]"));
    assert!(bad("x.yml", "a: 1\n\tb: 2") && bad("x.yml", ""));
    assert!(bad("x.service", "A=b") && bad("x.service", "[Unit\nA=b"));
    assert!(bad("x.service", "[Unit]\nnonsense") && !bad("x.service", "[Unit]\nA=b \\\n  c"));
    assert!(bad("x.conf", "anything"));

    let unit = "[Service]\nExecStart=/usr/bin/tutti worker \\\n  --node a\nExecStart=/bin/true x";
    let words: Vec<String> = unit_commands(unit)[0].split_whitespace().map(str::to_owned).collect();
    assert_eq!(words, ["tutti", "worker", "--node", "a"]);
    assert_eq!(unit_commands(unit).len(), 1);

    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(file.path(), "wrokers = 2").unwrap();
    let output = program::run(&["check-config", file.path().to_str().unwrap()]);
    assert!(!output.status.success(), "the program accepts an unknown key");
}
