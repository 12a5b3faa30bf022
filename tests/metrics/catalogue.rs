//! Rules that every declaration keeps.
use std::collections::BTreeSet;

use shared::metrics::catalogue::{CATALOGUE, KV_CACHE_USAGE};
use shared::metrics::{Definition, GaugeMerge, Kind, Owner, Unit};

fn each(check: impl Fn(&Definition) -> bool, rule: &str) {
    let broken: Vec<_> = CATALOGUE.iter().filter(|d| !check(d)).map(|d| d.name).collect();
    assert!(broken.is_empty(), "{rule}: {broken:?}");
}

#[test]
fn names_are_unique_prefixed_and_plain() {
    let names: BTreeSet<_> = CATALOGUE.iter().map(|d| d.name).collect();
    assert_eq!(names.len(), CATALOGUE.len());
    each(|d| d.name.starts_with("tutti_"), "prefix");
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    each(|d| d.name.chars().all(plain), "lower case, digits, underscores");
}

#[test]
fn no_series_name_is_what_a_histogram_expands_to() {
    let expanded: BTreeSet<_> = CATALOGUE
        .iter()
        .filter(|d| matches!(d.kind, Kind::Histogram(_)))
        .flat_map(|d| ["_bucket", "_sum", "_count"].map(|suffix| format!("{}{suffix}", d.name)))
        .collect();
    each(|d| !expanded.contains(d.name), "clash");
    each(|d| !["_bucket", "_sum", "_count"].iter().any(|s| d.name.ends_with(s)), "suffix");
}

#[test]
fn suffixes_tell_kind_and_unit() {
    each(|d| d.name.ends_with("_total") == (d.kind == Kind::Counter), "_total means counter");
    let unit_in_name = |d: &Definition| match d.unit {
        Unit::Seconds => d.name.trim_end_matches("_total").ends_with("_seconds"),
        Unit::Bytes => d.name.trim_end_matches("_total").ends_with("_bytes"),
        Unit::Ratio => d.name.ends_with("_ratio"),
        Unit::Info => d.name.ends_with("_info"),
        Unit::Celsius => d.name.ends_with("_celsius"),
        Unit::Watts => d.name.ends_with("_watts"),
        Unit::Tokens => d.name.contains("tokens"),
        Unit::Requests => d.name.contains("request"),
        Unit::Blocks => d.name.trim_end_matches("_total").ends_with("_blocks"),
        Unit::Steps => d.name.ends_with("_steps_total"),
        Unit::Events | Unit::Items | Unit::Value => true,
    };
    each(unit_in_name, "the unit is in the name");
    let foreign =
        ["ms", "us", "s", "ns", "percent", "perc", "minutes", "kb", "mb", "gauge", "histogram"];
    let plain = |d: &Definition| d.name.split('_').all(|word| !foreign.contains(&word));
    each(plain, "base units only, no kind in the name");
}

#[test]
fn help_is_one_sentence_or_more() {
    each(|d| d.help.len() > 10 && d.help.ends_with('.'), "help");
    each(|d| !d.help.contains(['\n', '|']), "help fits a table row");
}

#[test]
fn labels_are_sorted_unique_and_not_reserved() {
    each(|d| d.labels.windows(2).all(|pair| pair[0].name < pair[1].name), "sorted");
    let reserved = ["job", "instance", "le", "quantile", "pid", "request"];
    each(|d| d.labels.iter().all(|label| !reserved.contains(&label.name)), "reserved");
    each(
        |d| d.labels.iter().all(|label| label.values.iter().all(|value| label.allows(value))),
        "declared values are legal",
    );
}

#[test]
fn buckets_increase_and_reach_both_ends() {
    for definition in CATALOGUE {
        let Kind::Histogram(bounds) = definition.kind else { continue };
        let name = definition.name;
        assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{name} increases");
        assert!(bounds.iter().all(|bound| bound.is_finite() && *bound > 0.0), "{name} finite");
        assert!((5..=30).contains(&bounds.len()), "{name}: {} buckets", bounds.len());
        if definition.unit == Unit::Seconds {
            assert!(bounds[0] <= 0.001, "{name} is fine at the low end");
            assert!(bounds[bounds.len() - 1] >= 10.0, "{name} reaches the high end");
        }
    }
}

#[test]
fn buckets_known_from_other_servers_are_a_subset_of_ours() {
    let seeds: [(&str, &[f64]); 4] = [
        (
            "tutti_time_to_first_token_seconds",
            &[
                0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0,
            ],
        ),
        (
            "tutti_inter_token_latency_seconds",
            &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
        ),
        (
            "tutti_e2e_request_latency_seconds",
            &[1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0],
        ),
        ("tutti_request_params_n", &[1.0, 2.0, 5.0, 10.0, 20.0]),
    ];
    for (name, seed) in seeds {
        let ours = CATALOGUE.iter().find(|d| d.name == name).unwrap().buckets();
        assert!(seed.iter().all(|bound| ours.contains(bound)), "{name}");
    }
}

#[test]
fn what_ranks_measure_is_labelled_by_rank() {
    let has = |d: &Definition, name| d.labels.iter().any(|label| label.name == name);
    each(
        |d| d.owner != Owner::EveryRank || (has(d, "rank") && has(d, "worker")),
        "a rank's series names rank and worker",
    );
    each(|d| !has(d, "rank") || d.owner == Owner::EveryRank, "only ranks label by rank");
}

#[test]
fn a_ratio_is_built_from_gauges_with_its_own_labels() {
    let mut ratios = 0;
    for definition in CATALOGUE {
        let Kind::Gauge(GaugeMerge::Ratio { numerator, denominator }) = definition.kind else {
            // All processes of one host report the same about the host.
            let one_host = definition.kind == Kind::Gauge(GaugeMerge::Max)
                && definition.labels.iter().any(|label| label.name == "host");
            assert!(
                definition.unit != Unit::Ratio || one_host,
                "{} would be added up",
                definition.name
            );
            continue;
        };
        ratios += 1;
        for part in [numerator, denominator].map(|id| id.definition()) {
            let adds = matches!(part.kind, Kind::Gauge(GaugeMerge::Sum) | Kind::Counter);
            assert!(adds, "{}", part.name);
            assert_eq!(part.labels, definition.labels, "{}", part.name);
        }
    }
    assert!(ratios > 0);
    assert_eq!(KV_CACHE_USAGE.series().definition().name, "tutti_kv_cache_usage_ratio");
}
