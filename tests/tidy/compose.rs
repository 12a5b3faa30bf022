//! Rules for the compose file and the image, which no test can start: their host paths exist, the
//! image contains everything that its build reads, and the program has the options that they pass.
use saphyr::{LoadableYamlNode as _, Yaml};

use crate::program;
use crate::tree;

const FOLDER: &str = "cluster-configs/docker";
const COMPOSE: &str = "cluster-configs/docker/compose.yml";
const IMAGE: &str = "cluster-configs/docker/Dockerfile";
/// Name of the image built from [`IMAGE`]; its entry point is the program.
const NAME: &str = "tutti";

/// The value of a service's key, its own or a merged one.
fn value<'a, 'y>(service: &'a Yaml<'y>, key: &str) -> Option<&'a Yaml<'y>> {
    let merged = || service.as_mapping_get("<<")?.as_mapping_get(key);
    service.as_mapping_get(key).or_else(merged)
}

/// Finds problems of a compose file; `exists` takes paths relative to its folder.
fn compose_problems(text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let documents = Yaml::load_from_str(text).unwrap();
    let services = documents[0].as_mapping_get("services").and_then(Yaml::as_mapping);
    let Some(services) = services else { return vec!["no services".to_owned()] };
    let mut problems = Vec::new();
    for (name, service) in services {
        let name = name.as_str().unwrap();
        let mut report = |problem: String| problems.push(format!("{name}: {problem}"));
        let strings = |key: &str| -> Vec<&str> {
            let list = value(service, key).and_then(Yaml::as_sequence);
            list.map(|list| list.iter().filter_map(Yaml::as_str).collect()).unwrap_or_default()
        };
        for volume in strings("volumes") {
            let source = volume.split(':').next().unwrap();
            // Any other is a named volume.
            if source.starts_with(['.', '/']) && !exists(source) {
                report(format!("{source} does not exist"));
            }
        }
        let waits = value(service, "depends_on").and_then(Yaml::as_mapping);
        for (other, wait) in waits.into_iter().flatten() {
            let other = other.as_str().unwrap();
            let found = services.iter().find(|(key, _)| key.as_str() == Some(other));
            let Some((_, found)) = found else {
                report(format!("depends on {other}, which is no service"));
                continue;
            };
            let healthy =
                wait.as_mapping_get("condition").and_then(Yaml::as_str) == Some("service_healthy");
            if healthy && value(found, "healthcheck").is_none() {
                report(format!("waits for {other} to be healthy, which nobody checks"));
            }
        }
        for other in strings("depends_on") {
            report(format!("depends on {other} without saying what it waits for"));
        }
        if let Some(build) = value(service, "build") {
            let text = |key: &str| build.as_mapping_get(key).and_then(Yaml::as_str);
            let (context, file) = (text("context").unwrap_or("."), text("dockerfile"));
            let file = format!("{context}/{}", file.unwrap_or("Dockerfile"));
            if !exists(&file) {
                report(format!("{file} does not exist"));
            }
        }
        let runs_other = value(service, "entrypoint").is_some();
        if value(service, "image").and_then(Yaml::as_str) == Some(NAME) && !runs_other {
            match value(service, "command").and_then(Yaml::as_str) {
                Some(command) => program::command_line_problems(&format!("tutti {command}"))
                    .into_iter()
                    .for_each(&mut report),
                None => report("runs the image without a command in one line".to_owned()),
            }
        }
    }
    problems
}

/// Entries of the repository's root that `cargo build` reads, including its configuration.
fn needed_by_the_build() -> Vec<String> {
    let manifest: toml::Table = tree::read("Cargo.toml").unwrap().text.parse().unwrap();
    let members = manifest["workspace"]["members"].as_array().unwrap().iter();
    let mut needed = vec!["Cargo.toml".to_owned(), "Cargo.lock".to_owned()];
    let folders = members.map(|member| member.as_str().unwrap().split('/').next().unwrap());
    needed.extend(folders.map(str::to_owned));
    let optional = [".cargo", "rust-toolchain", "rust-toolchain.toml"].map(str::to_owned);
    needed.extend(optional.into_iter().filter(|path| tree::exists(path)));
    needed
}

/// Finds problems of a Dockerfile whose context is the repository, and whose build reads `needed`.
fn image_problems(text: &str, needed: &[String], exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    let mut copied = Vec::new();
    for line in text.lines() {
        if let Some(paths) = line.strip_prefix("COPY ") {
            let paths: Vec<&str> = paths.split_whitespace().collect();
            let (_, sources) = paths.split_last().unwrap();
            let from_stage = sources.first().is_some_and(|first| first.starts_with("--from="));
            for source in sources.iter().filter(|source| !from_stage && **source != ".") {
                copied.push(*source);
                if !exists(source) {
                    problems.push(format!("COPY {source}: does not exist"));
                }
            }
        }
        if let Some(words) = line.strip_prefix("CMD ") {
            let words: Vec<String> = serde_json::from_str(words).unwrap();
            let command = format!("tutti {}", words.join(" "));
            problems.extend(program::command_line_problems(&command));
        }
    }
    let missing = needed.iter().filter(|path| !copied.contains(&path.as_str()));
    problems.extend(missing.map(|path| format!("the build reads {path}, which is not copied")));
    problems
}

#[test]
fn the_compose_file_names_what_there_is() {
    let text = tree::read(COMPOSE).unwrap().text;
    let exists = |path: &str| tree::exists(&format!("{FOLDER}/{path}"));
    crate::assert_kept(COMPOSE, &compose_problems(&text, exists));
}

#[test]
fn the_image_is_made_of_what_there_is() {
    let text = tree::read(IMAGE).unwrap().text;
    crate::assert_kept(IMAGE, &image_problems(&text, &needed_by_the_build(), tree::exists));
}

#[test]
fn the_compose_and_image_rules_can_fail() {
    let compose = |service: &str| {
        let text = format!("x: &x\n  image: tutti\nservices:\n  a:\n    {service}\n");
        compose_problems(&text, |path| ["./there", "./Dockerfile"].contains(&path)).len()
    };
    assert_eq!(compose("volumes: ['./there:/a:ro', 'named:/b']"), 0);
    assert_eq!(compose("volumes: ['./gone:/a']"), 1);
    assert_eq!(compose("depends_on: {a: {condition: service_started}}"), 0);
    assert_eq!(compose("depends_on: {b: {condition: service_started}}"), 1);
    assert_eq!(compose("depends_on: {a: {condition: service_healthy}}"), 1);
    assert_eq!(compose("depends_on: {a: {condition: service_healthy}}\n    healthcheck: {}"), 0);
    assert_eq!(compose("depends_on: [a]"), 1);
    assert_eq!(compose("build: {dockerfile: Dockerfile}"), 0);
    assert_eq!(compose("build: {context: ./gone}"), 1);
    assert_eq!(compose("command: up --wrokers 2\n    <<: *x"), 1);
    assert_eq!(compose("command: up --workers 2\n    <<: *x"), 0);
    assert_eq!(compose("image: tutti"), 1);
    assert_eq!(compose("image: tutti\n    entrypoint: [bash]"), 0);
    assert_eq!(compose("image: other"), 0);

    let image = |text: &str| image_problems(text, &[], |path| path == "there").len();
    assert_eq!(image("COPY there gone a/\nCOPY --from=b /gone /a"), 1);
    assert_eq!(image("CMD [\"up\", \"--wrokers\"]"), 1);
    assert_eq!(image("CMD [\"up\", \"--workers\", \"2\"]"), 0);
    let needed = ["there".to_owned(), "also".to_owned()];
    assert_eq!(image_problems("COPY there a/", &needed, |_| true).len(), 1);
    assert_eq!(image_problems("COPY there also a/", &needed, |_| true).len(), 0);
    assert!(needed_by_the_build().contains(&"coordinator".to_owned()));
}
