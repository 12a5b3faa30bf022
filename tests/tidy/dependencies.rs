//! The direction of dependencies between the crates, and the modules that may use certain crates.
use std::collections::BTreeSet;

use crate::rust_code::{crate_mentions, imports, line_of, split, word_offsets};
use crate::tree::{self, File};

const CRATES: [&str; 5] = ["coordinator", "worker", "shared", "kernels", "tests"];

/// Workspace crates that each crate may depend on. `tests` may depend on all.
const MAY_DEPEND: [(&str, &[&str]); 4] = [
    ("shared", &[]),
    ("kernels", &[]),
    ("worker", &["shared", "kernels"]),
    ("coordinator", &["shared", "worker", "kernels"]),
];

/// The modules of `coordinator` that wire the roles together; the others are its library.
const WIRING: [&str; 2] = ["coordinator/src/main", "coordinator/src/cli"];

/// Workspace crates in any dependency table of a manifest, target-specific ones too.
fn manifest_dependencies(manifest: &toml::Table) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (key, value) in manifest {
        let Some(table) = value.as_table() else { continue };
        if key.ends_with("dependencies") {
            for (name, details) in table {
                let package = details.get("package").and_then(toml::Value::as_str);
                names.insert(package.unwrap_or(name).to_owned());
            }
        } else if key == "target" {
            for target in table.values().filter_map(toml::Value::as_table) {
                names.extend(manifest_dependencies(target));
            }
        }
    }
    names
}

/// Finds manifests that name one of our crates although they may not depend on it.
fn manifest_direction(manifests: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in manifests {
        let Some((owner, _)) = file.path.split_once('/') else { continue };
        let Some((_, allowed)) = MAY_DEPEND.iter().find(|(name, _)| *name == owner) else {
            continue;
        };
        let manifest: toml::Table = match file.text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                findings.push(format!("{}: {error}", file.path));
                continue;
            }
        };
        for name in manifest_dependencies(&manifest) {
            if CRATES.contains(&name.as_str()) && !allowed.contains(&name.as_str()) {
                findings.push(format!("{}: {owner} must not depend on {name}", file.path));
            }
        }
    }
    findings
}

/// Finds sources that name one of our crates although they may not depend on it.
fn source_direction(sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in sources {
        let Some((owner, _)) = file.path.split_once('/') else { continue };
        let Some((_, in_manifest)) = MAY_DEPEND.iter().find(|(name, _)| *name == owner) else {
            continue;
        };
        let code = split(&file.text).code;
        for name in CRATES.into_iter().filter(|name| *name != owner) {
            let wiring = WIRING.iter().any(|module| file.in_module(module));
            let library_of_coordinator = owner == "coordinator" && !wiring;
            let allowed =
                in_manifest.contains(&name) && (name == "shared" || !library_of_coordinator);
            if !allowed {
                for line in crate_mentions(&code, name) {
                    findings.push(format!("{}:{line}: must not name {name}", file.path));
                }
            }
        }
    }
    findings
}

/// Finds sources and manifests that name bincode outside the one module that hides it.
fn bincode_is_hidden(files: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for file in files {
        if file.in_module("shared/src/wire") {
            continue;
        }
        if file.extension() == "rs" {
            for line in crate_mentions(&split(&file.text).code, "bincode") {
                findings.push(format!("{}:{line}: only shared/src/wire names bincode", file.path));
            }
        } else if !["Cargo.toml", "shared/Cargo.toml"].contains(&file.path.as_str()) {
            let manifest: toml::Table = file.text.parse().unwrap_or_default();
            if manifest_dependencies(&manifest).contains("bincode") {
                findings.push(format!("{}: only shared depends on bincode", file.path));
            }
        }
    }
    findings
}

/// Dependencies that are needed although no source of their crate names them.
const NOT_NAMED: [(&str, &str); 2] = [
    // Its library is called testkit.
    ("tests", "tests"),
    // Fetched so that .cargo/protoc finds it.
    ("shared", "protoc-bin-vendored"),
];

/// Finds dependencies that no source of their crate names.
fn unused_dependencies(manifests: &[File], sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    for manifest in manifests {
        let Some((owner, _)) = manifest.path.split_once('/') else { continue };
        let folder = format!("{owner}/");
        let of_owner = sources.iter().filter(|file| file.path.starts_with(&folder));
        let code: Vec<String> = of_owner.map(|file| split(&file.text).code).collect();
        let table: toml::Table = manifest.text.parse().unwrap_or_default();
        for name in dependency_keys(&table) {
            let in_code = name.replace('-', "_");
            let known = NOT_NAMED.contains(&(owner, name.as_str()));
            if !known && code.iter().all(|code| crate_mentions(code, &in_code).is_empty()) {
                findings.push(format!("{}: no source names {name}", manifest.path));
            }
        }
    }
    findings
}

/// The names of a manifest's dependencies in its sources.
fn dependency_keys(manifest: &toml::Table) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (key, table) in manifest.iter().filter_map(|(key, it)| Some((key, it.as_table()?))) {
        if key.ends_with("dependencies") {
            names.extend(table.keys().cloned());
        } else if key == "target" {
            let targets = table.values().filter_map(toml::Value::as_table);
            names.extend(targets.flat_map(dependency_keys));
        }
    }
    names
}

/// Modules below the seam between the HTTP frontend and the engine.
const BELOW_THE_SEAM: [&str; 3] = ["crate::cluster", "crate::replica", "crate::scheduler"];

/// Finds sources of the HTTP frontend that reach below the seam: a frontend in its own process has
/// nothing there. The admin API, which only the coordinator has, may.
fn seam_is_kept(sources: &[File]) -> Vec<String> {
    let mut findings = Vec::new();
    let of_http = |file: &&File| {
        file.in_module("coordinator/src/http") && !file.in_module("coordinator/src/http/admin")
    };
    for file in sources.iter().filter(of_http) {
        let (paths, rest) = imports(&split(&file.text).code);
        for module in BELOW_THE_SEAM {
            let within = |path: &str| {
                path.strip_prefix(module).is_some_and(|it| it.is_empty() || it.starts_with("::"))
            };
            let imported = paths.iter().filter(|(_, path)| within(path)).map(|(line, _)| *line);
            let named = word_offsets(&rest, module).into_iter().map(|at| line_of(&rest, at));
            findings.extend(imported.chain(named).map(|line| {
                format!("{}:{line}: the front end knows {module} by crate::engine alone", file.path)
            }));
        }
    }
    findings
}

/// Of [`CRATES`], and of the tests that compute. Nothing can depend on those: they have no library.
fn manifests() -> Vec<File> {
    let folders = CRATES.iter().chain(&["tests/computing"]);
    folders.map(|name| tree::read(&format!("{name}/Cargo.toml")).unwrap()).collect()
}

#[test]
fn crates_depend_in_one_direction() {
    crate::assert_kept("manifest direction", &manifest_direction(&manifests()));
    crate::assert_kept("source direction", &source_direction(&tree::rust_files()));
}

#[test]
fn the_http_front_end_reaches_no_deeper_than_the_engine_seam() {
    crate::assert_kept("the engine seam", &seam_is_kept(&tree::rust_files()));
    let rule = |path, text| seam_is_kept(&[File::sample(path, text)]).len();
    let http = "coordinator/src/http/chat.rs";
    assert_eq!(rule(http, "use crate::{engine::EngineError, replica::driver::MovedRequest};"), 1);
    assert_eq!(rule(http, "fn f() { crate::scheduler::mix(0, &[]); }"), 1);
    assert_eq!(rule(http, "use crate::engine::EngineError; // not crate::cluster"), 0);
    assert_eq!(rule("coordinator/src/http/admin.rs", "use crate::cluster::status::Node;"), 0);
    assert_eq!(rule("coordinator/src/engine.rs", "use crate::scheduler::mix;"), 0);
}

#[test]
fn only_the_wire_module_names_bincode() {
    let mut files = tree::rust_files();
    files.extend(manifests());
    crate::assert_kept("bincode is hidden", &bincode_is_hidden(&files));
}

#[test]
fn every_dependency_is_used() {
    let (manifests, sources) = (manifests(), tree::rust_files());
    crate::assert_kept("dependencies", &unused_dependencies(&manifests, &sources));

    let manifest = |text| [File::sample("kernels/Cargo.toml", text)];
    let rule = |text, path, source| {
        unused_dependencies(&manifest(text), &[File::sample(path, source)]).len()
    };
    let named = "[dev-dependencies]\na-b.workspace = true";
    assert_eq!(rule(named, "kernels/src/x.rs", "use a_b::c;"), 0);
    assert_eq!(rule(named, "kernels/src/x.rs", "fn f() { a_b::c() }"), 0);
    assert_eq!(rule(named, "kernels/src/x.rs", "// a_b::c"), 1);
    assert_eq!(rule(named, "worker/src/x.rs", "use a_b::c;"), 1);
    let target = "[target.'cfg(unix)'.dependencies]\na-b = \"1\"";
    assert_eq!(rule(target, "kernels/src/x.rs", "fn f() {}"), 1);
}

#[test]
fn the_direction_rules_can_fail() {
    let manifest = |path, text| manifest_direction(&[File::sample(path, text)]).len();
    assert_eq!(manifest("kernels/Cargo.toml", "[dependencies]\nshared.workspace = true"), 1);
    assert_eq!(
        manifest("shared/Cargo.toml", "[target.'cfg(unix)'.dependencies]\nworker = \"1\""),
        1
    );
    assert_eq!(manifest("worker/Cargo.toml", "[dev-dependencies]\nx = { package = \"tests\" }"), 1);
    assert_eq!(manifest("worker/Cargo.toml", "[dependencies]\nshared.workspace = true"), 0);

    let source = |path, text| source_direction(&[File::sample(path, text)]).len();
    assert_eq!(source("coordinator/src/http.rs", "use worker::Options;"), 1);
    assert_eq!(source("coordinator/src/http.rs", "fn f() { kernels::add() }"), 1);
    assert_eq!(source("coordinator/src/cli/up.rs", "use worker::Options;"), 0);
    assert_eq!(source("shared/src/ids.rs", "use kernels::Backend;"), 1);
    assert_eq!(source("worker/src/lib.rs", "// use coordinator::x\nuse coordinator::x;"), 1);
    assert_eq!(source("kernels/src/cpu.rs", "/// See `shared::ids`.\nfn f() {}"), 0);
}

#[test]
fn the_bincode_rule_can_fail() {
    let rule = |path, text| bincode_is_hidden(&[File::sample(path, text)]).len();
    assert_eq!(rule("shared/src/protocol.rs", "#[derive(bincode::Encode)] struct A;"), 1);
    assert_eq!(rule("worker/Cargo.toml", "[dependencies]\nbincode.workspace = true"), 1);
    assert_eq!(rule("shared/src/wire/codec.rs", "use bincode::config;"), 0);
}
