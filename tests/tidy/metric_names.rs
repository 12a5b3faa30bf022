//! Documents, dashboards and alerts name only series that the catalogue declares.
//!
//! A query for a series that nothing exports fails silently: its panel is empty, its alert never
//! fires.
use std::collections::BTreeSet;

use crate::tree::{self, File};

const CATALOGUE: &str = "shared/src/metrics/catalogue";
const PREFIX: &str = "tutti_";

/// Suffixes that the text exposition appends to the names of histograms only.
const SUFFIXES: [&str; 3] = ["_bucket", "_sum", "_count"];

/// Words of `text` with the prefix of our series, with their 1-based lines.
fn series_in(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words = line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
        for word in words.filter(|word| word.starts_with(PREFIX) && *word != PREFIX) {
            found.push((index + 1, word.to_owned()));
        }
    }
    found
}

/// Finds names in `files` that are not in `declared`. A name that ends with `_` stands for a family
/// (`tutti_request_*`) and needs one declared name with that prefix.
fn undeclared(files: &[File], declared: &BTreeSet<String>) -> Vec<String> {
    let mut findings = Vec::new();
    for file in files {
        for (line, name) in series_in(&file.text) {
            let known = if name.ends_with('_') {
                declared.iter().any(|declared| declared.starts_with(&name))
            } else {
                declared.contains(&name)
                    || SUFFIXES
                        .iter()
                        .filter_map(|suffix| name.strip_suffix(suffix))
                        .any(|base| declared.contains(base))
            };
            if !known {
                findings.push(format!("{}:{line}: {name} is not in the catalogue", file.path));
            }
        }
    }
    findings
}

/// Names that the catalogue's sources declare; `None` while there is no catalogue.
fn declared() -> Option<BTreeSet<String>> {
    let sources: Vec<File> =
        tree::rust_files().into_iter().filter(|file| file.in_module(CATALOGUE)).collect();
    if sources.is_empty() {
        return None;
    }
    let names = sources.iter().flat_map(|file| series_in(&file.text));
    Some(names.map(|(_, name)| name).collect())
}

#[test]
fn documents_and_dashboards_name_series_that_exist() {
    let declared = declared().expect("it exists");
    assert!(!declared.is_empty(), "no {PREFIX}* name in {CATALOGUE}");
    let files: Vec<File> = tree::files(&["md", "yml", "yaml", "json", "toml"])
        .into_iter()
        .filter(|file| {
            file.path == "README.md"
                || file.path.starts_with("docs/")
                || file.path.starts_with("cluster-configs/")
        })
        .collect();
    crate::assert_kept("series names", &undeclared(&files, &declared));
}

#[test]
fn the_series_rule_can_fail() {
    let declared: BTreeSet<String> =
        ["tutti_requests_total", "tutti_step_seconds"].map(str::to_owned).into();
    let rule = |text: &str| undeclared(&[File::sample("docs/x.md", text)], &declared).len();
    assert_eq!(rule("rate(tutti_reqests_total[5m])"), 1);
    assert_eq!(rule("`tutti_step_seconds_bucket` and `tutti_step_seconds_max`"), 1);
    assert_eq!(rule("`tutti_step_*`, `tutti_requests_total{replica=\"0\"}`, `tutti_*`"), 0);
    assert_eq!(rule("`tutti_gpu_*`"), 1);
    assert_eq!(rule("job:tutti_requests:rate5m is a recording rule"), 0);
}
