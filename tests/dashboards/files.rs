//! Reads dashboards and rules from `cluster-configs`.
use std::path::{Path, PathBuf};

use saphyr::{LoadableYamlNode as _, Yaml};
use serde_json::Value;
use testkit::models::repository;

/// One dashboard.
#[derive(Clone, Debug)]
pub(crate) struct Dashboard {
    /// The file's name without `.json`.
    pub(crate) name: String,
    pub(crate) json: Value,
}

/// One query of a panel.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    /// Dashboard, panel and query letter, for messages.
    pub(crate) place: String,
    pub(crate) expr: String,
}

impl Dashboard {
    pub(crate) fn panels(&self) -> &[Value] {
        list(&self.json["panels"])
    }

    /// Every target of every panel.
    pub(crate) fn queries(&self) -> Vec<Query> {
        let mut queries = Vec::new();
        for panel in self.panels() {
            for target in list(&panel["targets"]) {
                let (title, reference) = (text(&panel["title"]), text(&target["refId"]));
                queries.push(Query {
                    place: format!("{}: {title}: {reference}", self.name),
                    expr: text(&target["expr"]).to_owned(),
                });
            }
        }
        queries
    }

    /// Every variable that queries Prometheus, with its `label_values(SERIES, LABEL)`.
    pub(crate) fn variables(&self) -> Vec<Query> {
        list(&self.json["templating"]["list"])
            .iter()
            .filter(|variable| variable["type"] == "query")
            .map(|variable| Query {
                place: format!("{}: ${}", self.name, text(&variable["name"])),
                expr: text(&variable["query"]["query"]).to_owned(),
            })
            .collect()
    }
}

/// One recording rule or alert.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) group: String,
    /// Recorded series, or name of the alert.
    pub(crate) name: String,
    pub(crate) is_alert: bool,
    pub(crate) expr: String,
    pub(crate) severity: String,
    pub(crate) summary: String,
    pub(crate) description: String,
}

/// The items of an array; empty for anything else.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A string; empty for anything else.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn configs() -> PathBuf {
    repository().join("cluster-configs")
}

/// The files of a folder with this extension, sorted.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no .{extension} in {}", folder.display());
    paths
}

/// Every dashboard.
pub(crate) fn dashboards() -> Vec<Dashboard> {
    files(&configs().join("grafana/dashboards"), "json")
        .into_iter()
        .map(|path| Dashboard {
            name: path.file_stem().unwrap().to_str().unwrap().to_owned(),
            json: serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap(),
        })
        .collect()
}

/// The files that Prometheus loads rules from.
pub(crate) fn rule_files() -> Vec<PathBuf> {
    files(&configs().join("prometheus/rules"), "yml")
}

/// The configurations of a Prometheus server.
pub(crate) fn prometheus_configs() -> Vec<PathBuf> {
    ["prometheus", "docker"].map(|folder| configs().join(folder).join("prometheus.yml")).to_vec()
}

/// The autoscaler's queries, which scale workers.
pub(crate) fn scaling() -> Vec<Query> {
    let name = "kubernetes/autoscaling.yaml";
    let yaml = std::fs::read_to_string(configs().join(name)).unwrap();
    let objects = Yaml::load_from_str(&yaml).unwrap();
    let triggers = objects.iter().filter_map(|object| object.as_mapping_get("spec"));
    let triggers = triggers.flat_map(|spec| items(spec, "triggers"));
    let queries = triggers.filter_map(|trigger| trigger.as_mapping_get("metadata"));
    queries.map(|it| Query { place: name.to_owned(), expr: string(it, "query") }).collect()
}

/// Every rule.
pub(crate) fn rules() -> Vec<Rule> {
    rule_files().iter().flat_map(|path| rules_in(&std::fs::read_to_string(path).unwrap())).collect()
}

/// The items of the sequence below `key`; empty if there is none.
fn items<'a, 'y>(node: &'a Yaml<'y>, key: &str) -> impl Iterator<Item = &'a Yaml<'y>> {
    node.as_mapping_get(key).and_then(Yaml::as_sequence).into_iter().flatten()
}

/// The string below `key`; empty if there is none.
fn string(node: &Yaml<'_>, key: &str) -> String {
    node.as_mapping_get(key).and_then(Yaml::as_str).unwrap_or_default().to_owned()
}

/// The rules of one file.
pub(crate) fn rules_in(yaml: &str) -> Vec<Rule> {
    let documents = Yaml::load_from_str(yaml).unwrap();
    let mut rules = Vec::new();
    for group in items(&documents[0], "groups") {
        for rule in items(group, "rules") {
            let below = |outer: &str, key: &str| {
                rule.as_mapping_get(outer).map(|node| string(node, key)).unwrap_or_default()
            };
            let alert = string(rule, "alert");
            rules.push(Rule {
                group: string(group, "name"),
                is_alert: !alert.is_empty(),
                name: if alert.is_empty() { string(rule, "record") } else { alert },
                expr: string(rule, "expr"),
                severity: below("labels", "severity"),
                summary: below("annotations", "summary"),
                description: below("annotations", "description"),
            });
        }
    }
    rules
}
