//! The licences and duplicate versions of our dependencies are those that `deny.toml` allows.
//!
//! `cargo deny` checks the same, and also advisories; this needs no extra tool and no network.
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use crate::tree;

/// Evaluates an SPDX expression: returns whether `allowed` licences alone satisfy it, and adds
/// those that it names to `used`. `/` is an old form of OR.
fn satisfied(expression: &str, allowed: &[String], used: &mut BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let result = any_of(&words, &mut at, allowed, used);
    result && at == words.len()
}

fn any_of(words: &[&str], at: &mut usize, allowed: &[String], used: &mut BTreeSet<String>) -> bool {
    let mut result = all_of(words, at, allowed, used);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        let right = all_of(words, at, allowed, used);
        result = result || right;
    }
    result
}

fn all_of(words: &[&str], at: &mut usize, allowed: &[String], used: &mut BTreeSet<String>) -> bool {
    let mut result = one(words, at, allowed, used);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        let right = one(words, at, allowed, used);
        result = result && right;
    }
    result
}

fn one(words: &[&str], at: &mut usize, allowed: &[String], used: &mut BTreeSet<String>) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let inner = any_of(words, at, allowed, used);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return inner && closed;
    }
    let mut licence = (*word).to_owned();
    if words.get(*at) == Some(&"WITH")
        && let Some(exception) = words.get(*at + 1)
    {
        *at += 2;
        licence = format!("{licence} WITH {exception}");
    }
    let known = allowed.contains(&licence);
    if known {
        used.insert(licence);
    }
    known
}

/// Finds packages whose licences are not allowed, and allowed licences that no package needs.
fn licence_findings(packages: &[(String, String)], allowed: &[String]) -> Vec<String> {
    let mut used = BTreeSet::new();
    let mut findings: Vec<String> = packages
        .iter()
        .filter(|(_, licence)| !satisfied(licence, allowed, &mut used))
        .map(|(name, licence)| format!("{name}: '{licence}' is not allowed by deny.toml"))
        .collect();
    for licence in allowed.iter().filter(|licence| !used.contains(*licence)) {
        findings.push(format!("deny.toml allows '{licence}', which no dependency names"));
    }
    findings
}

/// Finds packages with several versions of which more than one has no skip, and unused skips. A
/// skip is `name@version`.
fn duplicate_findings(versions: &[(String, String)], skips: &[String]) -> Vec<String> {
    let mut by_name: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, version) in versions {
        by_name.entry(name).or_default().insert(version);
    }
    let mut findings = Vec::new();
    let mut needed = BTreeSet::new();
    for (name, versions) in by_name.iter().filter(|(_, versions)| versions.len() > 1) {
        let mut open = Vec::new();
        for version in versions {
            let exact = format!("{name}@{version}");
            if skips.contains(&exact) {
                needed.insert(exact);
            } else {
                open.push(*version);
            }
        }
        if open.len() > 1 {
            findings.push(format!("{name} in versions {}: explain all but one", open.join(", ")));
        }
    }
    for skip in skips.iter().filter(|skip| !needed.contains(*skip)) {
        findings.push(format!("deny.toml skips {skip}, which is no duplicate"));
    }
    findings
}

fn strings(table: &toml::Table, path: [&str; 2]) -> Vec<toml::Value> {
    let list = table.get(path[0]).and_then(|section| section.get(path[1]));
    list.and_then(toml::Value::as_array).cloned().unwrap_or_default()
}

#[test]
fn dependencies_have_allowed_licences_and_explained_duplicates() {
    let deny: toml::Table = tree::read("deny.toml").unwrap().text.parse().unwrap();
    let allowed: Vec<String> = strings(&deny, ["licenses", "allow"])
        .iter()
        .map(|licence| licence.as_str().unwrap().to_owned())
        .collect();
    let skips: Vec<String> = strings(&deny, ["bans", "skip"])
        .iter()
        .map(|skip| {
            assert!(skip.get("reason").is_some(), "a skip without a reason: {skip}");
            skip.get("crate").and_then(toml::Value::as_str).unwrap().to_owned()
        })
        .collect();

    // The graph that cargo resolves for all targets in deny.toml.
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.args(["metadata", "--locked", "--format-version", "1"]);
    for target in strings(&deny, ["graph", "targets"]) {
        command.args(["--filter-platform", target.as_str().unwrap()]);
    }
    let output = command.current_dir(tree::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let resolved: BTreeSet<&str> = metadata["resolve"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["id"].as_str().unwrap())
        .collect();
    let foreign: Vec<&serde_json::Value> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|p| !p["source"].is_null() && resolved.contains(p["id"].as_str().unwrap()))
        .collect();
    assert!(foreign.len() > 100, "only {} dependencies: wrong graph", foreign.len());
    let text = |package: &serde_json::Value, key: &str| {
        package[key].as_str().unwrap_or("no licence").to_owned()
    };
    let licences: Vec<_> = foreign.iter().map(|p| (text(p, "name"), text(p, "license"))).collect();
    let versions: Vec<_> = foreign.iter().map(|p| (text(p, "name"), text(p, "version"))).collect();
    crate::assert_kept("licences", &licence_findings(&licences, &allowed));
    crate::assert_kept("duplicate versions", &duplicate_findings(&versions, &skips));
}

#[test]
fn the_licence_rule_can_fail() {
    let allowed = ["MIT", "Apache-2.0", "Unicode-3.0"].map(str::to_owned);
    let ok = |expression: &str| satisfied(expression, &allowed, &mut BTreeSet::new());
    assert!(ok("MIT OR GPL-3.0") && ok("(MIT OR Apache-2.0) AND Unicode-3.0") && ok("Zlib/MIT"));
    assert!(!ok("GPL-3.0") && !ok("(MIT OR Apache-2.0) AND BSD-3-Clause") && !ok(""));
    assert!(!ok("Apache-2.0 WITH LLVM-exception") && !ok("MIT MIT") && !ok("(MIT"));

    let package = |licence: &str| [("x".to_owned(), licence.to_owned())];
    assert_eq!(licence_findings(&package("MIT"), &allowed[..1]).len(), 0);
    assert_eq!(licence_findings(&package("GPL-3.0"), &allowed[..1]).len(), 2);
    assert_eq!(licence_findings(&package("MIT"), &allowed[..2]).len(), 1);
}

#[test]
fn the_duplicate_rule_can_fail() {
    let versions = [("a", "1.0.0"), ("a", "2.0.0"), ("b", "1.0.0")]
        .map(|(name, version)| (name.to_owned(), version.to_owned()));
    let rule = |skips: &[&str]| {
        duplicate_findings(&versions, &skips.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
            .len()
    };
    assert_eq!(rule(&[]), 1);
    assert_eq!(rule(&["a@1.0.0"]), 0);
    assert_eq!(rule(&["a@1.0.0", "b@1.0.0"]), 1);
}
