//! Rules that need only the files. Each rule for dashboards is also fed a violation.
use std::collections::BTreeSet;

use coordinator::metrics::FrontendStats;
use serde_json::{Value, json};
use shared::metrics::catalogue::HTTP_REQUESTS;
use shared::metrics::labels::{MODEL_NAME, REPLICA, ROUTE};
use shared::metrics::{Definition, Kind, Unit};

use crate::files::{self, Dashboard, Rule, list, text};
use crate::promql::{Selector, definition, selectors};

/// Grafana's grid.
const COLUMNS: i64 = 24;
const DATASOURCE: &str = "${datasource}";
/// Labels that scraping adds.
const SCRAPED: [&str; 2] = ["instance", "job"];
/// Words with which a help text says what is counted and what is not. Where it has them, the
/// description of a panel needs them, too, and has them nowhere else.
const SCOPES: [&str; 3] = ["Sequences", "however", "stop or length"];

/// Whether a series has this label when it has been scraped.
fn has_label(definition: &Definition, name: &str) -> bool {
    SCRAPED.contains(&name)
        || (name == MODEL_NAME && definition.model)
        || (name == "le" && !definition.buckets().is_empty())
        || definition.labels.iter().any(|label| label.name == name)
}

/// The labels that a query adds up by.
fn grouped_by(query: &str) -> impl Iterator<Item = &str> {
    let lists = query.split("by (").skip(1).filter_map(|rest| rest.split_once(')'));
    lists.flat_map(|(labels, _)| labels.split(", "))
}

/// Whether the results of a query have this label.
fn result_has(query: &str, label: &str) -> bool {
    if query.contains("by (") {
        return grouped_by(query).any(|by| by == label);
    }
    let is_added = ["sum(", "count(", "max(", "min(", "avg("].iter().any(|it| query.contains(it));
    let mut declared = selectors(query).into_iter().filter_map(|found| definition(found.name));
    !is_added && declared.any(|definition| has_label(definition, label))
}

/// Finds matchers that no series meets: of a label that it does not have, or of a value that is
/// not in the label's set.
fn matcher_problems(selector: &Selector<'_>, definition: &Definition) -> Vec<String> {
    let mut problems = Vec::new();
    for matcher in selector.matchers.split(", ").filter(|matcher| !matcher.is_empty()) {
        let (name, wanted) = matcher.split_once(['=', '!']).unwrap_or((matcher, ""));
        if !has_label(definition, name) {
            problems.push(format!("{} has no label {name}", selector.name));
        }
        let label = definition.labels.iter().find(|label| label.name == name);
        let Some(label) = label.filter(|label| !label.values.is_empty()) else { continue };
        let wanted = wanted.trim_start_matches(['=', '~']).trim_matches('"');
        for value in wanted.split('|').filter(|value| !label.allows(value)) {
            problems.push(format!("{}: {name} is never {value}", selector.name));
        }
    }
    problems
}

/// Finds problems in the form of a query, wherever it is used.
fn query_problems(query: &str, recorded: &BTreeSet<String>) -> Vec<String> {
    let mut problems = Vec::new();
    let found = selectors(query);
    if found.is_empty() {
        problems.push("selects no series".to_owned());
    }
    let declared: Vec<&Definition> =
        found.iter().filter_map(|selector| definition(selector.name)).collect();
    for label in grouped_by(query) {
        let is_known = declared.iter().any(|definition| has_label(definition, label));
        if !is_known && !SCRAPED.contains(&label) {
            problems.push(format!("adds up by {label}, which no series has"));
        }
    }
    for selector in &found {
        let Some(definition) = definition(selector.name) else {
            if selector.name != "up" && !recorded.contains(selector.name) {
                problems.push(format!("{} is not declared", selector.name));
            }
            continue;
        };
        problems.extend(matcher_problems(selector, definition));
        let grows = !matches!(definition.kind, Kind::Gauge(_));
        let rated = selector.before.ends_with("rate(") || selector.before.ends_with("increase(");
        if grows != rated {
            problems.push(format!("{}: rate() is for what grows, all of it", selector.name));
        }
        let is_histogram = matches!(definition.kind, Kind::Histogram(_));
        if is_histogram && selector.name == definition.name {
            problems.push(format!("{} is a histogram: it has no such series", selector.name));
        }
        let added = ["avg", "sum", "count"].iter().any(|operator| query.contains(operator));
        if definition.unit == Unit::Ratio && added {
            problems.push(format!("{}: ratios do not add, divide sums", selector.name));
        }
        if selector.name.ends_with("_bucket") && !query.contains("sum by (le") {
            problems.push("buckets are added by le".to_owned());
        }
    }
    if query.contains("histogram_quantile(") && !query.contains(", sum by (le") {
        problems.push("a quantile is over sum by (le".to_owned());
    }
    if found.iter().any(|selector| selector.name.ends_with("_sum")) && !is_average(query) {
        problems.push("an average is sum(rate(.._sum)) / sum(rate(.._count))".to_owned());
    }
    problems
}

/// Whether a query is `sum..(rate(X_sum..)) / sum..(rate(X_count..))` of one histogram, with the
/// same labels and range.
fn is_average(query: &str) -> bool {
    let Some((above, below)) = query.split_once(" / ") else { return false };
    let name = selectors(above).first().map_or("", |selector| selector.name);
    let count = name.strip_suffix("_sum").map(|base| format!("{base}_count"));
    above.starts_with("sum")
        && above.contains("(rate(")
        && count.is_some_and(|count| above.replace(name, &count) == below)
}

/// Whether a selector uses exactly the dashboard variables whose labels its series have.
fn is_narrowed(selector: &Selector<'_>, definition: &Definition) -> bool {
    let has_replica = definition.labels.contains(&REPLICA);
    let narrowed = |by: &str| selector.matchers.split(", ").any(|matcher| matcher == by);
    // Each scraped cluster is a job.
    narrowed("job=~\"$job\"")
        && narrowed("model_name=~\"$model_name\"") == definition.model
        && narrowed("replica=~\"$replica\"") == has_replica
}

/// Grafana's name for this unit.
fn shown(unit: Unit) -> &'static str {
    match unit {
        Unit::Seconds => "s",
        Unit::Bytes => "bytes",
        Unit::Ratio => "percentunit",
        Unit::Celsius => "celsius",
        Unit::Watts => "watt",
        Unit::Info => "",
        Unit::Requests
        | Unit::Tokens
        | Unit::Blocks
        | Unit::Steps
        | Unit::Events
        | Unit::Items
        | Unit::Value => "short",
    }
}

/// The unit of a query's values, by Grafana's name.
fn unit_of(query: &str) -> Option<&'static str> {
    let selector = *selectors(query).first()?;
    let definition = definition(selector.name)?;
    if query.contains("histogram_quantile(") || is_average(query) {
        return Some(shown(definition.unit));
    }
    if query.contains(" / ") {
        return Some("percentunit");
    }
    if query.contains("count(") || query.contains("increase(") {
        return Some("short");
    }
    if matches!(definition.kind, Kind::Gauge(_)) {
        let per_second = selector.name.ends_with("_tokens_per_second");
        return Some(if per_second { "suffix: tok/s" } else { shown(definition.unit) });
    }
    Some(match definition.unit {
        Unit::Requests => "reqps",
        Unit::Tokens => "suffix: tok/s",
        Unit::Steps => "suffix: steps/s",
        // CPU seconds per second.
        Unit::Seconds => "suffix: cores",
        _ => "cps",
    })
}

/// Finds problems of one panel.
fn panel_problems(panel: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    if text(&panel["title"]).is_empty() {
        problems.push("no title".to_owned());
    }
    if panel["type"] == "row" {
        return problems;
    }
    let description = text(&panel["description"]);
    if description.is_empty() {
        problems.push("no description".to_owned());
    }
    let targets = list(&panel["targets"]);
    let found: Vec<Selector<'_>> =
        targets.iter().flat_map(|target| selectors(text(&target["expr"]))).collect();
    for scope in SCOPES {
        let says = |of: &Definition| of.help.contains(scope);
        let is_said = found.iter().any(|selector| definition(selector.name).is_some_and(says));
        if is_said != description.contains(scope) {
            problems.push(format!("only its series or only its description says '{scope}'"));
        }
    }
    if targets.is_empty() {
        problems.push("no query".to_owned());
    }
    for holder in targets.iter().chain([panel]) {
        if holder["datasource"]["uid"] != DATASOURCE {
            problems.push("the data source is not the variable".to_owned());
        }
    }
    let references: BTreeSet<&str> = targets.iter().map(|target| text(&target["refId"])).collect();
    if references.len() != targets.len() {
        problems.push("two queries have one refId".to_owned());
    }
    for target in targets {
        let query = text(&target["expr"]);
        let legend = text(&target["legendFormat"]);
        if legend.is_empty() {
            problems.push("no legend".to_owned());
        }
        for label in legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next()) {
            if !result_has(query, label) {
                problems.push(format!("the legend names {label}, which the result does not have"));
            }
        }
        // Dashboards must work without the recording rules.
        problems.extend(query_problems(query, &BTreeSet::new()));
        for selector in selectors(query) {
            if definition(selector.name).is_some_and(|found| !is_narrowed(&selector, found)) {
                problems.push(format!("{}: wrong variables in its braces", selector.name));
            }
        }
        let unit = text(&panel["fieldConfig"]["defaults"]["unit"]);
        if panel["type"] == "heatmap" {
            let axis = text(&panel["options"]["yAxis"]["unit"]);
            let name = selectors(query).first().map_or("", |selector| selector.name);
            if definition(name).is_none_or(|found| shown(found.unit) != axis) {
                problems.push(format!("the axis is in '{axis}'"));
            }
            if target["format"] != "heatmap" || panel["options"]["calculate"] != false {
                problems.push("the buckets are Prometheus's own".to_owned());
            }
        } else if unit_of(query) != Some(unit) {
            problems.push(format!("shows '{unit}', is {:?}", unit_of(query)));
        }
    }
    problems
}

/// A panel's left, top, right and bottom.
fn area(panel: &Value) -> [i64; 4] {
    let side = |name: &str| panel["gridPos"][name].as_i64().unwrap_or(-1);
    let (x, y) = (side("x"), side("y"));
    [x, y, x + side("w"), y + side("h")]
}

/// Finds problems of a dashboard.
fn dashboard_problems(dashboard: &Dashboard) -> Vec<String> {
    let mut problems = Vec::new();
    let panels = dashboard.panels();
    if panels.is_empty() {
        problems.push("no panel".to_owned());
    }
    let mut ids = BTreeSet::new();
    let mut titles = BTreeSet::new();
    for (index, panel) in panels.iter().enumerate() {
        let title = text(&panel["title"]);
        let mut report = |problem: &str| problems.push(format!("{title}: {problem}"));
        if !ids.insert(panel["id"].as_i64()) {
            report("its id is another's, too");
        }
        if !titles.insert(title) {
            report("its title is another's, too");
        }
        let [left, top, right, bottom] = area(panel);
        if left < 0 || top < 0 || right > COLUMNS || left >= right || top >= bottom {
            report("is not on the grid");
        }
        for other in &panels[..index] {
            let [l, t, r, b] = area(other);
            if left < r && l < right && top < b && t < bottom {
                report(&format!("lies over {}", other["title"]));
            }
        }
        panel_problems(panel).iter().for_each(|problem| report(problem));
    }
    let variables = list(&dashboard.json["templating"]["list"]);
    for name in ["datasource", "job", "model_name", "replica"] {
        let Some(variable) = variables.iter().find(|variable| variable["name"] == name) else {
            problems.push(format!("no variable {name}"));
            continue;
        };
        let all = variable["includeAll"] == true
            && variable["multi"] == true
            && variable["allValue"] == ".*";
        if name != "datasource" && !all {
            problems.push(format!("the variable {name} cannot be All"));
        }
    }
    for problem in &mut problems {
        *problem = format!("{}: {problem}", dashboard.name);
    }
    problems
}

/// Finds problems of a rule.
fn rule_problems(rule: &Rule, recorded: &BTreeSet<String>) -> Vec<String> {
    let mut problems = query_problems(&rule.expr, recorded);
    // A server that scrapes several clusters has one job for each.
    let ups = selectors(&rule.expr).into_iter().filter(|selector| selector.name == "up");
    if ups.into_iter().any(|selector| selector.matchers != "job=~\"tutti.*\"") {
        problems.push("up is of all jobs whose names begin with tutti".to_owned());
    }
    let mut added = rule.expr.split("by (").skip(1);
    if added.any(|rest| !rest.split(')').next().unwrap_or("").contains("job")) {
        problems.push("what is added up is of one job".to_owned());
    }
    if rule.is_alert {
        if !["critical", "warning"].contains(&rule.severity.as_str()) {
            problems.push(format!("severity '{}'", rule.severity));
        }
        if rule.summary.is_empty() || rule.description.is_empty() {
            problems.push("no summary or no description".to_owned());
        }
    } else {
        // level:metric:operation, where the level consists of the remaining labels.
        let labels = rule.expr.split_once("by (").and_then(|(_, rest)| rest.split_once(')'));
        let level: Vec<&str> = labels
            .map_or("", |(labels, _)| labels)
            .split(", ")
            .filter(|label| *label != "le")
            .collect();
        let parts: Vec<&str> = rule.name.split(':').collect();
        if parts.len() != 3 || parts[0] != level.join("_") || !parts[1].starts_with("tutti_") {
            problems.push("its name is not level:metric:operation".to_owned());
        }
    }
    problems.iter().map(|problem| format!("{}: {problem}", rule.name)).collect()
}

fn recorded() -> BTreeSet<String> {
    files::rules().into_iter().filter(|rule| !rule.is_alert).map(|rule| rule.name).collect()
}

#[test]
fn dashboards_are_well_made() {
    let dashboards = files::dashboards();
    let names: Vec<&str> = dashboards.iter().map(|dashboard| dashboard.name.as_str()).collect();
    assert_eq!(names, ["cluster", "overview", "realtime"]);
    let problems: Vec<String> = dashboards.iter().flat_map(dashboard_problems).collect();
    crate::assert_none("dashboards", &problems);
}

#[test]
fn rules_are_well_made() {
    let recorded = recorded();
    assert!(!recorded.is_empty());
    let rules = files::rules();
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names.len(), rules.len(), "every rule has its own name");
    let problems: Vec<String> =
        rules.iter().flat_map(|rule| rule_problems(rule, &recorded)).collect();
    crate::assert_none("rules", &problems);
}

/// The gauge of the last log interval is of computed tokens, and so is what stands beside it.
#[test]
fn prompt_throughput_leaves_out_what_a_cache_had() {
    let gauge = "tutti_prompt_throughput_tokens_per_second";
    let mut panels = 0;
    for dashboard in files::dashboards() {
        for panel in dashboard.panels() {
            let queries = list(&panel["targets"]).iter().map(|target| text(&target["expr"]));
            let found: Vec<Selector<'_>> = queries.flat_map(selectors).collect();
            if found.iter().all(|selector| selector.name != gauge) {
                continue;
            }
            panels += 1;
            for selector in found.iter().filter(|selector| selector.name != gauge) {
                assert_eq!(selector.name, "tutti_prompt_tokens_by_source_total");
                assert!(selector.matchers.contains("source=\"local_compute\""), "{selector:?}");
            }
        }
    }
    assert_eq!(panels, 1);
}

/// The alert about the server's errors is of the requests that reach the engine: those whose series
/// a front end has from the start.
#[test]
fn server_errors_are_those_of_the_engines_routes() {
    let series = HTTP_REQUESTS.series();
    let place = series.definition().labels.iter().position(|label| *label == ROUTE).unwrap();
    let (_, snapshot) = FrontendStats::new().report();
    let counted = snapshot.series.iter().filter(|counted| counted.id == series.index());
    let routes: BTreeSet<&str> = counted.map(|counted| counted.labels[place].as_str()).collect();
    assert!(routes.len() > 1);
    let rules = files::rules();
    let alert = rules.iter().find(|rule| rule.name == "TuttiHttpServerErrors").unwrap();
    let found = selectors(&alert.expr);
    assert_eq!(found.len(), 2, "errors of all");
    for selector in found {
        let matchers: Vec<&str> = selector.matchers.split(", ").collect();
        assert!(matchers.contains(&"method=\"POST\""), "{selector:?}");
        let named = matchers.iter().find_map(|it| it.strip_prefix("route=~\"")?.strip_suffix('"'));
        assert_eq!(named.unwrap().split('|').collect::<BTreeSet<_>>(), routes);
    }
}

/// A dashboard of two sound panels.
fn sample() -> Value {
    let panel = |id: i64, title: &str, unit: &str, expr: &str| {
        json!({
            "id": id, "title": title, "description": "d", "type": "timeseries",
            "datasource": {"uid": DATASOURCE}, "gridPos": {"x": 12 * (id - 1), "y": 0, "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit}},
            "targets": [{"refId": "A", "expr": expr, "legendFormat": "x",
                         "datasource": {"uid": DATASOURCE}}],
        })
    };
    let average = "sum(rate(tutti_rank_step_seconds_sum{job=~\"$job\", model_name=~\"$model_name\", \
                   replica=~\"$replica\"}[1m])) / sum(rate(tutti_rank_step_seconds_count{job=~\"$job\", \
                   model_name=~\"$model_name\", replica=~\"$replica\"}[1m]))";
    let heat = "sum by (le) (increase(tutti_time_to_first_token_seconds_bucket\
                {job=~\"$job\", model_name=~\"$model_name\"}[1m]))";
    let mut heat = panel(2, "heat", "", heat);
    heat["type"] = json!("heatmap");
    heat["options"] = json!({"calculate": false, "yAxis": {"unit": "s"}});
    heat["targets"][0]["format"] = json!("heatmap");
    let all = json!({"includeAll": true, "multi": true, "allValue": ".*"});
    let mut variables = [json!({"name": "datasource"}), all.clone(), all.clone(), all];
    variables[1]["name"] = json!("job");
    variables[2]["name"] = json!("model_name");
    variables[3]["name"] = json!("replica");
    json!({"panels": [panel(1, "average", "s", average), heat], "templating": {"list": variables}})
}

#[test]
fn the_dashboard_rules_can_fail() {
    let problems = |json: Value| dashboard_problems(&Dashboard { name: "x".to_owned(), json });
    assert_eq!(problems(sample()), Vec::<String>::new());
    let spoil = |pointer: &str, value: Value| {
        let mut json = sample();
        *json.pointer_mut(pointer).unwrap() = value;
        assert!(!problems(json).is_empty(), "{pointer}");
    };
    spoil("/panels", json!([]));
    spoil("/panels/0/id", json!(2));
    spoil("/panels/0/title", json!("heat"));
    spoil("/panels/0/title", json!(""));
    spoil("/panels/0/description", json!(""));
    spoil("/panels/0/description", json!("of requests that ended by stop or length"));
    spoil("/panels/0/gridPos/w", json!(13));
    spoil("/panels/1/gridPos/w", json!(13));
    spoil("/panels/0/datasource/uid", json!("abc"));
    spoil("/panels/0/targets/0/datasource/uid", json!("abc"));
    spoil("/panels/0/targets/0/legendFormat", json!(""));
    spoil("/panels/0/targets/0/legendFormat", json!("replica {{replica}}"));
    spoil("/panels/1/targets/0/legendFormat", json!("{{reason}}"));
    spoil("/panels/0/fieldConfig/defaults/unit", json!("ms"));
    spoil("/panels/1/options/yAxis/unit", json!("short"));
    spoil("/panels/1/options/calculate", json!(true));
    spoil("/panels/1/targets/0/format", json!("time_series"));
    spoil("/templating/list/1/allValue", json!(""));
    spoil("/templating/list/2/name", json!("engine"));
    let spoil_query = |from: &str, to: &str| {
        let json = sample().to_string();
        assert!(json.contains(from), "{from}");
        let json = serde_json::from_str(&json.replacen(from, to, 1)).unwrap();
        assert!(!problems(json).is_empty(), "{from} -> {to}");
    };
    spoil_query(", replica=~\\\"$replica\\\"", "");
    spoil_query("model_name=~\\\"$model_name\\\", ", "");
    spoil_query("bucket{", "bucket{replica=~\\\"$replica\\\", ");
    spoil_query("bucket{job=~\\\"$job\\\", ", "bucket{");
    spoil_query("[1m])) / ", "[5m])) / ");
}

#[test]
fn the_query_rules_can_fail() {
    let recorded = BTreeSet::from(["job:tutti_x:sum".to_owned()]);
    let sound = |query: &str| query_problems(query, &recorded).is_empty();
    for query in [
        "job:tutti_x:sum > 3",
        "up == 0",
        "tutti_gpu_utilization_ratio",
        "sum by (replica) (rate(tutti_iteration_tokens_sum[1m])) / sum by (replica) (rate(tutti_iteration_tokens_count[1m]))",
        "histogram_quantile(0.9, sum by (le, job) (rate(tutti_iteration_tokens_bucket[1m])))",
        "sum(tutti_kv_cache_used_blocks) / sum(tutti_kv_cache_blocks)",
        "sum by (job, model_name) (rate(tutti_failovers_total{reason=~\"rank_lost|rank_silent\"}[1m]))",
        "tutti_replica_up{job=~\"$job\", replica!=\"0\"}",
    ] {
        assert!(sound(query), "{query}: {:?}", query_problems(query, &recorded));
    }
    for query in [
        "1 + 1",
        "job:tutti_y:sum > 3",
        "tutti_engine_step_total",
        "tutti_engine_steps_total",
        "rate(tutti_requests_running[1m])",
        "rate(tutti_iteration_tokens[1m])",
        "sum by (worker) (rate(tutti_failovers_total[1m]))",
        "sum by (model_name) (tutti_worker_up)",
        "rate(tutti_failovers_total{reason=~\"rank_lost|rank_gone\"}[1m])",
        "rate(tutti_failovers_total{cause!=\"rank_lost\"}[1m])",
        "avg(tutti_kv_cache_usage_ratio)",
        "sum(tutti_kv_cache_usage_ratio)",
        "sum(rate(tutti_iteration_tokens_bucket[1m]))",
        "histogram_quantile(0.9, rate(tutti_iteration_tokens_bucket[1m]))",
        "sum(rate(tutti_iteration_tokens_sum[1m]))",
        "rate(tutti_iteration_tokens_sum[1m]) / rate(tutti_iteration_tokens_count[1m])",
        "sum by (replica) (rate(tutti_iteration_tokens_sum[1m])) / sum(rate(tutti_iteration_tokens_count[1m]))",
        "sum(rate(tutti_rank_step_seconds_sum[1m])) / sum(rate(tutti_rank_idle_seconds_count[1m]))",
    ] {
        assert!(!sound(query), "{query}");
    }
}

#[test]
fn the_rule_rules_can_fail() {
    let problems = |yaml: &str| {
        let yaml = format!("groups: [{{name: g, rules: [{yaml}]}}]");
        let rules = files::rules_in(&yaml);
        assert_eq!(rules.len(), 1, "{yaml}");
        rule_problems(&rules[0], &BTreeSet::new()).len()
    };
    let expr = "expr: 'sum by (job) (rate(tutti_engine_steps_total[5m]))'";
    assert_eq!(problems(&format!("{{record: 'job:tutti_engine_steps:rate5m', {expr}}}")), 0);
    assert_eq!(problems(&format!("{{record: 'replica:tutti_engine_steps:rate5m', {expr}}}")), 1);
    assert_eq!(problems(&format!("{{record: 'tutti_engine_steps', {expr}}}")), 1);
    let told = "annotations: {summary: a, description: b}";
    assert_eq!(
        problems(&format!("{{alert: A, {expr}, labels: {{severity: warning}}, {told}}}")),
        0
    );
    assert_eq!(problems(&format!("{{alert: A, {expr}, labels: {{severity: loud}}, {told}}}")), 1);
    assert_eq!(problems(&format!("{{alert: A, {expr}, labels: {{severity: warning}}}}")), 1);
    for (expr, count) in [
        ("up{job=~\"tutti.*\"} == 0", 0),
        ("up{job=\"tutti\"} == 0", 1),
        ("sum by (replica) (tutti_replica_up) == 0", 1),
    ] {
        let alert = format!("{{alert: A, expr: '{expr}', labels: {{severity: warning}}, {told}}}");
        assert_eq!(problems(&alert), count, "{expr}");
    }
}
