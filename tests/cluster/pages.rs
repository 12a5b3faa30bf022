//! `/metrics` of every role of a running cluster: what Prometheus's linter reports, and that no two
//! pages share a series once `instance` is removed.
use std::collections::BTreeSet;

use testkit::client::Client;
use testkit::local_cluster::LocalCluster;
use testkit::promtool::check_metrics;

use crate::etcd::{Meeting, PATIENCE, until};
use crate::scraping::curl;

const OPEN_METRICS: &str = "accept: application/openmetrics-text; version=1.0.0";

/// Violations of either text format in a page's families.
fn problems(page: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let (mut seen, mut family) = (BTreeSet::new(), String::new());
    for line in page.lines() {
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some("#"), Some(kind @ ("HELP" | "TYPE")), Some(name)) => {
                if !seen.insert(format!("{kind} {name}")) {
                    problems.push(format!("second {kind} line of {name}"));
                }
                name.clone_into(&mut family);
            }
            (Some("#"), ..) => {}
            _ => {
                // OpenMetrics names a counter's family without its `_total`.
                if !line.starts_with(&family) {
                    problems.push(format!("not among its family {family}: {line}"));
                }
                let series = line.split(" # ").next().unwrap_or(line);
                let series = series.rsplit_once(' ').map_or(series, |(series, _)| series);
                if !seen.insert(series.to_owned()) {
                    problems.push(format!("second sample of {series}"));
                }
            }
        }
    }
    problems
}

/// Names of a page's families that do not keep the scraped `instance`.
fn cluster_wide(page: &str) -> BTreeSet<String> {
    let names = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let own = |name: &str| name.starts_with("process_") || name.starts_with("tutti_membership_");
    names.filter(|name| !own(name)).map(str::to_owned).collect()
}

/// Returns the page after checking it in both formats.
fn checked(role: &str, of: &LocalCluster) -> String {
    let url = format!("{}/metrics", of.base());
    let page = curl(&[], &url).1;
    assert!(page.lines().count() > 4, "{role}: {page}");
    for text in [&page, &curl(&["-H", OPEN_METRICS], &url).1] {
        let problems = problems(text);
        assert!(problems.is_empty(), "{role}: {problems:#?}");
    }
    // The names of other servers follow those servers' rules.
    let ours = page.lines().filter(|line| !line.contains("vllm:") && !line.contains("aphrodite:"));
    if let Some(said) =
        check_metrics(&ours.map(|line| format!("{line}\n")).collect::<String>()).unwrap()
    {
        assert!(said.is_empty(), "{role}: {said}");
    }
    page
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_role_s_page_is_right_and_no_two_have_the_same_series() {
    let Some(meeting) = Meeting::new().await else { return };
    let _worker = meeting.worker(0);
    let mut leader = meeting.coordinator_of("1", &["--metrics-compat", "vllm,aphrodite"]).await;
    leader.wait_ready().await.unwrap();
    let standby = meeting.coordinator_of("1", &[]).await;
    let frontend = meeting.frontend().await;
    let stands_by = Client::new(standby.base()).unwrap();
    until("the standby sees etcd", async || {
        let scrape = stands_by.scrape().await.ok()?;
        scrape.has("tutti_membership_members", &[]).then_some(())
    })
    .await;
    // Includes series that only a leader with etcd has, and those of requests.
    let client = leader.client().unwrap();
    assert!(crate::etcd::serves(&client).await);
    let all = |s: &testkit::scrape::Scrape| {
        s.has("tutti_totals_checkpoint_timestamp_seconds", &[]) && s.has("tutti_frontend_up", &[])
    };
    assert!(all(&client.scrape_until(PATIENCE, all).await.unwrap()));

    let pages = [("leader", &leader), ("standby", &standby), ("front end", &frontend)];
    let pages = pages.map(|(role, of)| (role, checked(role, of)));
    for (at, (role, page)) in pages.iter().enumerate() {
        for (other, beside) in &pages[at + 1..] {
            let both: Vec<_> =
                cluster_wide(page).intersection(&cluster_wide(beside)).cloned().collect();
            assert!(both.is_empty(), "{role} and {other} both have {both:?}");
        }
    }
    // These checks can fail.
    let (_, page) = &pages[0];
    let twice = format!("{page}# HELP tutti_actors Again.\n# TYPE tutti_actors gauge\n");
    assert_eq!(problems(&twice).len(), 2);
    assert!(check_metrics(&twice).unwrap().is_none_or(|said| said.contains("HELP")));
}
