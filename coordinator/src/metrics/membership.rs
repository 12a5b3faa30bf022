//! Series about the membership, of a process that has one.
use prometheus::proto::MetricFamily;
use shared::membership::{Role, View};
use shared::metrics::catalogue::{
    MEMBERSHIP_CONFIRMED, MEMBERSHIP_CONNECTED, MEMBERSHIP_LEADING, MEMBERSHIP_MEMBERS,
};
use shared::metrics::labels::{LabelValue as _, MemberRole};
use shared::metrics::{LocalStats, Merged, SharedStats};
use tokio::sync::watch;

use super::exposition::{Format, Page, PageOptions};

/// Records `view`.
pub fn record(stats: &mut LocalStats, view: &View) {
    let flag = |set: bool| if set { 1.0 } else { 0.0 };
    let connected = stats.gauge(MEMBERSHIP_CONNECTED, []);
    stats.set(connected, flag(view.connected));
    let leading = stats.gauge(MEMBERSHIP_LEADING, []);
    stats.set(leading, flag(view.leading));
    if view.confirmed == 0 {
        return;
    }
    let confirmed = stats.gauge(MEMBERSHIP_CONFIRMED, []);
    stats.set(confirmed, view.confirmed as f64);
    for role in MemberRole::ALL {
        let is = |of: Role| match of {
            Role::Coordinator => *role == MemberRole::Coordinator,
            Role::Frontend => *role == MemberRole::Frontend,
            Role::Worker => *role == MemberRole::Worker,
        };
        let count = view.records.values().filter(|record| is(record.role)).count();
        let members = stats.gauge(MEMBERSHIP_MEMBERS, [role.as_str()]);
        stats.set(members, count as f64);
    }
}

/// Records the view whenever it changes.
pub async fn observe(stats: SharedStats, mut view: watch::Receiver<View>) {
    loop {
        let now = view.borrow_and_update().clone();
        stats.with(|stats| record(stats, &now));
        if view.changed().await.is_err() {
            return;
        }
    }
}

/// Renders the page of a coordinator that does not lead: its membership, and its process's own
/// series. Totals are on the leader's page; here they would begin at zero.
#[must_use]
pub fn page(view: &View, gathered: &[MetricFamily], format: Format) -> String {
    let mut stats = LocalStats::uncounted();
    record(&mut stats, view);
    let own = Merged::of(&stats.snapshot());
    let page = Page { merged: &Merged::default(), own: &own, exemplars: &Vec::new(), gathered };
    let mut text = String::new();
    page.render(format, &PageOptions::default(), &mut text);
    text
}
