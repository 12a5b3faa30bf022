//! `promtool`, Prometheus's own checker: the configurations are valid, and every alert can fire.
//!
//! It comes with the Prometheus server; without it, these tests pass on a developer's machine and
//! fail in continuous integration.
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use testkit::tools;

use crate::files;

/// An alert, and series: their first values and growth per minute, for half an hour, perhaps after
/// others.
type Case = (&'static str, &'static [(&'static str, &'static str)]);

/// The series of HTTP requests with this method, route and status.
macro_rules! answered {
    ($method:literal, $route:literal, $status:literal) => {
        concat!(
            "tutti_http_requests_total{method=\"",
            $method,
            "\", route=\"",
            $route,
            "\", status=\"",
            $status,
            "\"}"
        )
    };
}

/// For each alert, series that make it fire. One that fires for several reasons is there for each.
const FIRING: &[Case] = &[
    // Coordinators of another cluster do not count.
    (
        "TuttiCoordinatorDown",
        &[
            ("up{job=\"tutti-a\", instance=\"a\"}", "1+0"),
            ("up{job=\"tutti-b\", instance=\"b\"}", "0+0"),
        ],
    ),
    // Its targets vanish, as those of pods do.
    (
        "TuttiCoordinatorDown",
        &[
            ("up{job=\"tutti-a\", instance=\"a\"}", "1+0"),
            ("up{job=\"tutti-b\", instance=\"b\"}", "1+0x9 _"),
        ],
    ),
    (
        "TuttiCoordinatorRedundancyLost",
        &[
            ("up{job=\"tutti\", instance=\"a\"}", "0+0"),
            ("up{job=\"tutti\", instance=\"b\"}", "1+0"),
        ],
    ),
    // One that had a single coordinator all along does not count.
    (
        "TuttiNoStandby",
        &[
            (
                "tutti_membership_members{job=\"tutti-a\", role=\"coordinator\", instance=\"a\"}",
                "2+0x19 1+0",
            ),
            (
                "tutti_membership_members{job=\"tutti-b\", role=\"coordinator\", instance=\"b\"}",
                "1+0",
            ),
        ],
    ),
    (
        "TuttiNoReplicaUp",
        &[
            ("tutti_requests_in_flight{job=\"tutti\"}", "0+0"),
            ("tutti_replica_up{job=\"tutti\", replica=\"0\"}", "0+0"),
        ],
    ),
    (
        "TuttiReplicasMissing",
        &[("tutti_replica_up{replica=\"0\"}", "1+0"), ("tutti_replicas_wanted", "2+0")],
    ),
    ("TuttiWorkerDown", &[("tutti_worker_up{worker=\"0\"}", "0+0")]),
    // Of a cluster without etcd: the long interval of another one is nothing to it.
    (
        "TuttiWorkerReportStale",
        &[
            ("tutti_worker_up{job=\"tutti-a\", worker=\"0\"}", "1+0"),
            ("tutti_worker_last_report_timestamp_seconds{job=\"tutti-a\", worker=\"0\"}", "60+0"),
            ("tutti_worker_up{job=\"tutti-b\", worker=\"0\"}", "1+0"),
            ("tutti_worker_last_report_timestamp_seconds{job=\"tutti-b\", worker=\"0\"}", "60+0"),
            ("tutti_totals_checkpoint_interval_seconds{job=\"tutti-b\"}", "3600+0"),
        ],
    ),
    // Longer than pages of every five minutes explain; the other worker does report.
    (
        "TuttiWorkerReportStale",
        &[
            ("tutti_worker_up{worker=\"0\"}", "1+0"),
            ("tutti_worker_up{worker=\"1\"}", "1+0"),
            ("tutti_worker_last_report_timestamp_seconds{worker=\"0\"}", "60+0"),
            ("tutti_worker_last_report_timestamp_seconds{worker=\"1\"}", EVERY_FIVE_MINUTES),
            ("tutti_totals_checkpoint_interval_seconds", "300+0"),
        ],
    ),
    ("TuttiFrontendDown", &[("tutti_frontend_up{frontend=\"1\"}", "0+0")]),
    (
        "TuttiFailoversRepeated",
        &[("tutti_failovers_total{reason=\"rank_lost\",replica=\"0\"}", "0+1")],
    ),
    ("TuttiWorkerRestartsRepeated", &[("tutti_worker_restarts_total{worker=\"0\"}", "0+1")]),
    ("TuttiSlowRank", &[("tutti_slow_ranks{worker=\"0\"}", "1+0")]),
    ("TuttiDeviceSetAside", &[("tutti_devices_set_aside{worker=\"0\"}", "1+0")]),
    ("TuttiRanksDisagree", &[("tutti_rank_disagreements_total{replica=\"0\"}", "0+1")]),
    ("TuttiReportsRefused", &[("tutti_reports_refused_total{reason=\"malformed\"}", "0+1")]),
    (
        "TuttiAuthenticationRefused",
        &[("tutti_handshakes_refused_total{reason=\"authentication\"}", "0+1")],
    ),
    ("TuttiNobodyLeads", &[("tutti_membership_leading{instance=\"a\"}", "0+0")]),
    ("TuttiMembershipUnconfirmed", &[("tutti_membership_connected{instance=\"a\"}", "0+0")]),
    (
        "TuttiTotalsNotWritten",
        &[
            ("tutti_totals_checkpoint_timestamp_seconds", "60+0"),
            ("tutti_totals_checkpoint_interval_seconds", "300+0"),
        ],
    ),
    ("TuttiQueueBuildingUp", &[("tutti_requests_waiting{reason=\"capacity\"}", "0+2")]),
    (
        "TuttiKvCacheNearlyFull",
        &[
            ("tutti_kv_cache_used_blocks{replica=\"0\"}", "99+0"),
            ("tutti_kv_cache_blocks{replica=\"0\"}", "100+0"),
        ],
    ),
    (
        "TuttiPreemptionsRepeated",
        &[
            ("tutti_preemptions_total{replica=\"0\"}", "0+9"),
            ("tutti_request_success_total{finished_reason=\"stop\"}", "0+1"),
        ],
    ),
    (
        "TuttiTimeToFirstTokenHigh",
        &[
            ("tutti_time_to_first_token_seconds_bucket{le=\"10.0\"}", "0+0"),
            ("tutti_time_to_first_token_seconds_bucket{le=\"20.0\"}", "0+9"),
            ("tutti_time_to_first_token_seconds_bucket{le=\"+Inf\"}", "0+9"),
        ],
    ),
    (
        "TuttiRequestErrors",
        &[
            ("tutti_request_success_total{finished_reason=\"error\"}", "0+1"),
            ("tutti_request_success_total{finished_reason=\"stop\"}", "0+9"),
        ],
    ),
    (
        "TuttiRequestsAbandoned",
        &[
            ("tutti_request_success_total{finished_reason=\"abort\"}", "0+1"),
            ("tutti_request_success_total{finished_reason=\"stop\"}", "0+3"),
        ],
    ),
    ("TuttiRequestsTurnedAway", &[("tutti_requests_rejected_total{reason=\"queue_full\"}", "0+1")]),
    ("TuttiStreamsCutOff", &[("tutti_requests_expired_total{reason=\"no_coordinator\"}", "0+1")]),
    (
        "TuttiHttpServerErrors",
        &[
            (answered!("POST", "/v1/completions", "500"), "0+1"),
            (answered!("POST", "/v1/completions", "200"), "0+9"),
        ],
    ),
    // That the models are listed again and again makes the errors no fewer.
    (
        "TuttiHttpServerErrors",
        &[
            (answered!("POST", "/rerank", "500"), "0+1"),
            (answered!("POST", "/rerank", "200"), "0+9"),
            (answered!("GET", "/v1/models", "200"), "0+900"),
        ],
    ),
    ("TuttiGpuTooHot", &[("tutti_gpu_temperature_celsius{gpu=\"0\", host=\"a\"}", "90+0")]),
    (
        "TuttiHostMemoryNearlyFull",
        &[
            ("tutti_host_memory_used_bytes{host=\"a\"}", "99+0"),
            ("tutti_host_memory_bytes{host=\"a\"}", "100+0"),
        ],
    ),
    (
        "TuttiContainerMemoryNearlyFull",
        &[
            ("tutti_process_memory_limit_used_bytes{process=\"worker-0\"}", "95+0"),
            ("tutti_process_memory_limit_bytes{process=\"worker-0\"}", "100+0"),
        ],
    ),
];

/// When a page of every five minutes says that a worker reported.
const EVERY_FIVE_MINUTES: &str = "0+0x4 300+0x4 600+0x4 900+0x4 1200+0x4 1500+0";

/// Series with which an alert must not fire at any time of the half hour.
const QUIET: &[Case] = &[
    // Each page tells of the moment when it was written.
    (
        "TuttiWorkerReportStale",
        &[
            ("tutti_worker_up{worker=\"0\"}", "1+0"),
            ("tutti_worker_last_report_timestamp_seconds{worker=\"0\"}", EVERY_FIVE_MINUTES),
            ("tutti_totals_checkpoint_interval_seconds", "300+0"),
        ],
    ),
    // A full queue, and what is not for the engine.
    (
        "TuttiHttpServerErrors",
        &[
            (answered!("POST", "/v1/messages", "529"), "0+9"),
            (answered!("POST", "/v1/messages", "200"), "0+1"),
            (answered!("GET", "/ready", "503"), "0+9"),
        ],
    ),
];

/// Runs `promtool`: whether it found no error, and its output. `None` if it is not installed.
fn promtool(arguments: &[&str], file: &Path) -> Option<(bool, String)> {
    let Some(program) = tools::find("promtool") else {
        assert!(std::env::var_os("CI").is_none(), "promtool is needed in CI");
        crate::notice("promtool is not here: nothing was asked of it (tests/run gets it)");
        return None;
    };
    let output = Command::new(program).args(arguments).arg(file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    Some((output.status.success(), said))
}

/// A file for `promtool test rules` that expects each case's alert to be firing `times` times after
/// half an hour; for `None`, not to have fired until then.
fn unit_tests(cases: &[Case], times: Option<u32>) -> String {
    let quoted = |text: &str| serde_json::to_string(text).unwrap();
    let rules: Vec<String> =
        files::rule_files().iter().map(|path| quoted(path.to_str().unwrap())).collect();
    let mut yaml = format!("rule_files: [{}]\ntests:\n", rules.join(", "));
    for (alert, series) in cases {
        yaml.push_str("- interval: 1m\n  input_series:\n");
        for (series, values) in *series {
            let (series, values) = (quoted(series), quoted(&format!("{values}x30")));
            writeln!(yaml, "  - {{series: {series}, values: {values}}}").unwrap();
        }
        let fires = format!("ALERTS{{alertname=\"{alert}\", alertstate=\"firing\"}}");
        let (expr, expected) = match times {
            Some(times) => {
                (format!("count({fires})"), format!("{{labels: '{{}}', value: {times}}}"))
            }
            None => (format!("count(count_over_time({fires}[31m]))"), String::new()),
        };
        let expr = quoted(&expr);
        writeln!(yaml, "  promql_expr_test:\n  - expr: {expr}\n    eval_time: 30m").unwrap();
        writeln!(yaml, "    exp_samples: [{expected}]").unwrap();
    }
    yaml
}

#[test]
fn the_configurations_are_right() {
    for path in files::prometheus_configs() {
        let Some((content, said)) = promtool(&["check", "config"], &path) else { return };
        assert!(content && said.contains("2 rule files found"), "{}: {said}", path.display());
    }
}

#[test]
fn every_alert_can_fire() {
    let alerts: Vec<String> =
        files::rules().into_iter().filter(|rule| rule.is_alert).map(|rule| rule.name).collect();
    let mut listed: Vec<&str> = FIRING.iter().map(|(alert, _)| *alert).collect();
    listed.dedup();
    assert_eq!(listed, alerts, "the table has each alert, in the order of the file");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("firing.yml");
    std::fs::write(&file, unit_tests(FIRING, Some(1))).unwrap();
    let Some((content, said)) = promtool(&["test", "rules"], &file) else { return };
    assert!(content, "{said}");
    // A wrong expectation is detected for every alert.
    std::fs::write(&file, unit_tests(FIRING, Some(2))).unwrap();
    let (content, said) = promtool(&["test", "rules"], &file).unwrap();
    assert!(!content, "{said}");
    for alert in &alerts {
        assert!(said.contains(alert.as_str()), "{alert}: {said}");
    }
}

#[test]
fn alerts_stay_quiet_where_nothing_is_wrong() {
    let rules = files::rules();
    for (alert, _) in QUIET {
        assert!(rules.iter().any(|rule| rule.name == *alert), "{alert} is no alert");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("quiet.yml");
    std::fs::write(&file, unit_tests(QUIET, None)).unwrap();
    let Some((content, said)) = promtool(&["test", "rules"], &file) else { return };
    assert!(content, "{said}");
    // An alert that does fire is noticed.
    std::fs::write(&file, unit_tests(FIRING, None)).unwrap();
    let (content, said) = promtool(&["test", "rules"], &file).unwrap();
    assert!(!content, "{said}");
    for (alert, _) in FIRING {
        assert!(said.contains(*alert), "{alert}: {said}");
    }
}
