//! The compose file and the image, which no test can start: the host paths that they name exist,
//! and the program has the options that they give it.
use saphyr::{LoadableYamlNode as _, Yaml};

use crate::program;
use crate::tree;

const FOLDER: &str = "cluster-configs/docker";
const COMPOSE: &str = "cluster-configs/docker/compose.yml";
const IMAGE: &str = "cluster-configs/docker/Dockerfile";
/// The image that [`IMAGE`] makes; its entry point is the program.
const NAME: &str = "tutti";

/// What a key of a service holds, there or in what is merged into it.
fn value<'a, 'y>(service: &'a Yaml<'y>, key: &str) -> Option<&'a Yaml<'y>> {
    let merged = || service.as_mapping_get("<<")?.as_mapping_get(key);
    service.as_mapping_get(key).or_else(merged)
}

/// What is wrong with a compose file; `exists` answers for paths as seen from its folder.
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
        for other in strings("depends_on") {
            if !services.keys().any(|key| key.as_str() == Some(other)) {
                report(format!("depends on {other}, which is no service"));
            }
        }
        if let Some(build) = value(service, "build") {
            let text = |key: &str| build.as_mapping_get(key).and_then(Yaml::as_str);
            let (context, file) = (text("context").unwrap_or("."), text("dockerfile"));
            let file = format!("{context}/{}", file.unwrap_or("Dockerfile"));
            if !exists(&file) {
                report(format!("{file} does not exist"));
            }
        }
        if value(service, "image").and_then(Yaml::as_str) == Some(NAME) {
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

/// What is wrong with a Dockerfile whose context is the repository.
fn image_problems(text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    for line in text.lines() {
        if let Some(paths) = line.strip_prefix("COPY ") {
            let paths: Vec<&str> = paths.split_whitespace().collect();
            let (_, sources) = paths.split_last().unwrap();
            let from_stage = sources.first().is_some_and(|first| first.starts_with("--from="));
            for source in sources.iter().filter(|source| !from_stage && **source != ".") {
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
    crate::assert_kept(IMAGE, &image_problems(&text, tree::exists));
}

#[test]
fn the_compose_and_image_rules_can_fail() {
    let compose = |service: &str| {
        let text = format!("x: &x\n  image: tutti\nservices:\n  a:\n    {service}\n");
        compose_problems(&text, |path| ["./there", "./Dockerfile"].contains(&path)).len()
    };
    assert_eq!(compose("volumes: ['./there:/a:ro', 'named:/b']"), 0);
    assert_eq!(compose("volumes: ['./gone:/a']"), 1);
    assert_eq!(compose("depends_on: [a]"), 0);
    assert_eq!(compose("depends_on: [b]"), 1);
    assert_eq!(compose("build: {dockerfile: Dockerfile}"), 0);
    assert_eq!(compose("build: {context: ./gone}"), 1);
    assert_eq!(compose("command: up --wrokers 2\n    <<: *x"), 1);
    assert_eq!(compose("command: up --workers 2\n    <<: *x"), 0);
    assert_eq!(compose("image: tutti"), 1);
    assert_eq!(compose("image: other"), 0);

    let image = |text: &str| image_problems(text, |path| path == "there").len();
    assert_eq!(image("COPY there gone a/\nCOPY --from=b /gone /a"), 1);
    assert_eq!(image("CMD [\"up\", \"--wrokers\"]"), 1);
    assert_eq!(image("CMD [\"up\", \"--workers\", \"2\"]"), 0);
}
