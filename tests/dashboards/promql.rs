//! Parses as much of a query's text as the checks need: which series it selects, and Grafana's
//! variables.
use shared::metrics::Definition;
use shared::metrics::catalogue::CATALOGUE;

/// Suffixes of a histogram's series.
const PARTS: [&str; 3] = ["_bucket", "_sum", "_count"];

/// Values that Grafana substitutes for its variables, longest name first.
const VARIABLES: [(&str, &str); 6] = [
    ("$__rate_interval", "30s"),
    ("$__interval", "5s"),
    ("$__range", "5m"),
    ("$model_name", ".*"),
    ("$replica", ".*"),
    ("$job", ".*"),
];

/// One selector of series in a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Selector<'q> {
    /// Text of the query before the selector.
    pub(crate) before: &'q str,
    pub(crate) name: &'q str,
    /// Text between the braces.
    pub(crate) matchers: &'q str,
}

/// The series that a query selects: ours, those recorded from ours, and `up`.
pub(crate) fn selectors(query: &str) -> Vec<Selector<'_>> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let (mut at, mut depth, mut quoted) = (0, 0_u32, false);
    while let Some(c) = query[at..].chars().next() {
        match c {
            '"' => quoted = !quoted,
            '{' if !quoted => depth += 1,
            '}' if !quoted => depth -= 1,
            _ => {}
        }
        if quoted || depth > 0 || !is_word(c) {
            at += c.len_utf8();
            continue;
        }
        let rest = &query[at..];
        let (name, after) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
        if name.starts_with("tutti_") || name.contains(":tutti_") || name == "up" {
            let braces = after.strip_prefix('{').and_then(|inner| inner.split_once('}'));
            let matchers = braces.map_or("", |(matchers, _)| matchers);
            found.push(Selector { before: &query[..at], name, matchers });
        }
        at += name.len();
    }
    found
}

/// The declaration of a series, or of the histogram that it is part of.
pub(crate) fn definition(name: &str) -> Option<&'static Definition> {
    let find = |name: &str| CATALOGUE.iter().find(|definition| definition.name == name);
    find(name).or_else(|| {
        let base = PARTS.iter().find_map(|part| name.strip_suffix(part))?;
        find(base).filter(|definition| !definition.buckets().is_empty())
    })
}

/// A query as Grafana sends it with All selected for every variable.
pub(crate) fn substitute(query: &str) -> String {
    let mut sent = query.to_owned();
    for (variable, value) in VARIABLES {
        sent = sent.replace(variable, value);
    }
    assert!(!sent.contains('$'), "unknown variable in {query}");
    sent
}

/// The series and the label of `label_values(SERIES, LABEL)`.
pub(crate) fn label_values(query: &str) -> Option<(&str, &str)> {
    let (series, label) =
        query.strip_prefix("label_values(")?.strip_suffix(')')?.rsplit_once(", ")?;
    Some((series, label))
}

#[test]
fn series_are_found_outside_braces_and_strings() {
    let query = "sum by (le) (rate(tutti_a_bucket{x=\"tutti_b\", y=~\"}\"}[5m])) / job:tutti_c:sum";
    let found = selectors(query);
    let names: Vec<&str> = found.iter().map(|selector| selector.name).collect();
    assert_eq!(names, ["tutti_a_bucket", "job:tutti_c:sum"]);
    assert!(found[0].before.ends_with("rate(") && found[0].matchers.starts_with("x=\"tutti_b\""));
    assert_eq!(selectors("up{job=\"tutti\"} == 0")[0].matchers, "job=\"tutti\"");
}

#[test]
fn parts_belong_to_histograms_alone() {
    assert!(definition("tutti_iteration_tokens_sum").is_some());
    assert!(definition("tutti_fenced_frames_total").is_some());
    assert!(definition("tutti_worker_up_count").is_none() && definition("tutti_no").is_none());
}

#[test]
fn variables_are_replaced() {
    let query = "rate(a{m=~\"$model_name\"}[$__rate_interval]) + b[$__range]";
    assert_eq!(substitute(query), "rate(a{m=~\".*\"}[30s]) + b[5m]");
    assert_eq!(label_values("label_values(a{b=\"c\"}, d)"), Some(("a{b=\"c\"}", "d")));
}
