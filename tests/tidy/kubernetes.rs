//! Rules for the Kubernetes manifests, which no test can apply: the program has the options that
//! they pass, pods have enough time to terminate, selectors match their pods, and listed files
//! exist.
use saphyr::{LoadableYamlNode as _, Yaml};

use crate::program;
use crate::tree;

const FOLDER: &str = "cluster-configs/kubernetes";
const LIST: &str = "cluster-configs/kubernetes/kustomization.yaml";
/// Name of the image whose entry point is the program.
const NAME: &str = "tutti";
/// Environment variable with the host's name for metrics.
const HOST: &str = "TUTTI_HOST";
/// Seconds that a process needs beyond --drain-timeout, to hand over and say goodbye.
const BEYOND_DRAINING: i64 = 10;

/// The node below a path of keys.
fn at<'a, 'y>(node: &'a Yaml<'y>, path: &[&str]) -> Option<&'a Yaml<'y>> {
    path.iter().try_fold(node, |node, key| node.as_mapping_get(key))
}

/// The strings of a sequence.
fn strings<'a>(node: Option<&'a Yaml<'_>>) -> Vec<&'a str> {
    let items = node.and_then(Yaml::as_sequence).into_iter().flatten();
    items.filter_map(Yaml::as_str).collect()
}

/// Finds problems of one object.
fn object_problems(object: &Yaml<'_>) -> Vec<String> {
    let mut problems = Vec::new();
    for key in ["apiVersion", "kind"] {
        if at(object, &[key]).and_then(Yaml::as_str).is_none() {
            problems.push(format!("no {key}"));
        }
    }
    let Some(template) = at(object, &["spec", "template"]) else { return problems };
    let labels = at(template, &["metadata", "labels"]).and_then(Yaml::as_mapping);
    let wanted = at(object, &["spec", "selector", "matchLabels"]).and_then(Yaml::as_mapping);
    let found = |(key, value)| labels.is_some_and(|labels| labels.get(key) == Some(value));
    if !wanted.is_some_and(|wanted| !wanted.is_empty() && wanted.iter().all(found)) {
        problems.push("its selector does not select its own pods".to_owned());
    }
    let Some(pod) = at(template, &["spec"]) else { return problems };
    let containers = at(pod, &["containers"]).and_then(Yaml::as_sequence);
    for container in containers.into_iter().flatten() {
        if at(container, &["image"]).and_then(Yaml::as_str) != Some(NAME) {
            continue;
        }
        let args = strings(at(container, &["args"]));
        problems.extend(program::command_line_problems(&format!("tutti {}", args.join(" "))));
        let drain = args.iter().find_map(|arg| arg.strip_prefix("--drain-timeout="));
        let grace = at(pod, &["terminationGracePeriodSeconds"]).and_then(Yaml::as_integer);
        let needed = drain.map_or(0, |drain| drain.parse().unwrap_or(0)) + BEYOND_DRAINING;
        if grace.unwrap_or(30) < needed {
            problems.push(format!("terminationGracePeriodSeconds is below {needed}"));
        }
        let env = at(container, &["env"]).and_then(Yaml::as_sequence).into_iter().flatten();
        let hosts = env.filter(|it| at(it, &["name"]).and_then(Yaml::as_str) == Some(HOST));
        let mut paths = hosts.filter_map(|it| at(it, &["valueFrom", "fieldRef", "fieldPath"]));
        if paths.next().and_then(Yaml::as_str) != Some("spec.nodeName") {
            problems.push(format!("{HOST} is not the node's name"));
        }
        let security = |key: &str| at(container, &["securityContext", key]).and_then(Yaml::as_bool);
        if security("allowPrivilegeEscalation") != Some(false)
            || security("readOnlyRootFilesystem") != Some(true)
            || at(pod, &["securityContext", "runAsNonRoot"]).and_then(Yaml::as_bool) != Some(true)
        {
            problems.push("its container could change more than it has to".to_owned());
        }
        if at(container, &["resources", "requests"]).is_none() {
            problems.push("its container asks for no resources".to_owned());
        }
    }
    problems
}

/// Finds problems of all objects in one file.
fn file_problems(text: &str) -> Vec<String> {
    let documents = Yaml::load_from_str(text).unwrap();
    documents.iter().flat_map(object_problems).collect()
}

#[test]
fn manifests_start_the_program_with_options_that_it_has() {
    let files: Vec<String> =
        tree::entries(FOLDER).iter().map(|name| format!("{FOLDER}/{name}")).collect();
    assert!(files.len() > 5, "{files:?}");
    let mut findings = Vec::new();
    for path in files {
        let text = tree::read(&path).unwrap().text;
        findings.extend(file_problems(&text).iter().map(|problem| format!("{path}: {problem}")));
    }
    crate::assert_kept("Kubernetes manifests", &findings);
}

#[test]
fn what_is_listed_is_there_and_what_is_there_is_listed() {
    let text = tree::read(LIST).unwrap().text;
    let documents = Yaml::load_from_str(&text).unwrap();
    let listed = strings(at(&documents[0], &["resources"]));
    assert!(!listed.is_empty());
    let mut findings = Vec::new();
    for name in &listed {
        if !tree::exists(&format!("{FOLDER}/{name}")) {
            findings.push(format!("{LIST}: {name} does not exist"));
        }
    }
    for name in tree::entries(FOLDER) {
        // Commented-out entries, which are optional, count too.
        if !text.contains(&format!("- {name}")) && !LIST.ends_with(&name) {
            findings.push(format!("{LIST}: {name} is not listed"));
        }
    }
    crate::assert_kept("the list of manifests", &findings);
}

/// The image's tag in the list.
fn tag(text: &str) -> Option<String> {
    let documents = Yaml::load_from_str(text).ok()?;
    let images = at(documents.first()?, &["images"]).and_then(Yaml::as_sequence)?;
    let ours = images.iter().find(|it| at(it, &["name"]).and_then(Yaml::as_str) == Some(NAME))?;
    at(ours, &["newTag"]).and_then(Yaml::as_str).map(str::to_owned)
}

#[test]
fn the_image_is_of_this_version() {
    let text = tree::read(LIST).unwrap().text;
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(tag(&text).as_deref(), Some(version), "{LIST}: newTag");
    let pushed = format!("-t REGISTRY/tutti:{version} ");
    for path in [LIST, "docs/operations.md"] {
        assert!(tree::read(path).unwrap().text.contains(&pushed), "{path}: no `{pushed}`");
    }
    assert_eq!(tag("images: [{name: tutti, newTag: latest}]").as_deref(), Some("latest"));
    assert_eq!(tag("images: [{name: other, newTag: latest}]"), None);
}

#[test]
fn the_kubernetes_rules_can_fail() {
    let on = |args: &str, grace: u32, label: &str, root: bool, path: &str| {
        let text = format!(
            "apiVersion: apps/v1\nkind: Deployment\nspec:\n  selector: {{matchLabels: {{a: b}}}}\n  \
             template:\n    metadata: {{labels: {{a: {label}, c: d}}}}\n    spec:\n      \
             terminationGracePeriodSeconds: {grace}\n      securityContext: {{runAsNonRoot: true}}\n      \
             containers:\n        - image: tutti\n          args: [{args}]\n          \
             env: [{{name: {HOST}, valueFrom: {{fieldRef: {{fieldPath: {path}}}}}}}]\n          \
             resources: {{requests: {{cpu: 1}}}}\n          securityContext: \
             {{allowPrivilegeEscalation: {root}, readOnlyRootFilesystem: true}}\n"
        );
        file_problems(&text).len()
    };
    let pod = |args: &str, grace, label: &str, root| on(args, grace, label, root, "spec.nodeName");
    assert_eq!(on("up", 30, "b", false, "metadata.name"), 1);
    assert_eq!(pod("up, --workers=2", 30, "b", false), 0);
    assert_eq!(pod("up, --wrokers=2", 30, "b", false), 1);
    assert_eq!(pod("up, --drain-timeout=30", 30, "b", false), 1);
    assert_eq!(pod("up, --drain-timeout=30", 45, "b", false), 0);
    assert_eq!(pod("up", 30, "x", false), 1);
    assert_eq!(pod("up", 30, "b", true), 1);
    assert_eq!(file_problems("a: b"), ["no apiVersion", "no kind"]);
}
