//! PURE: whether totals differ from earlier ones in a way that matters.
//!
//! Even an idle cluster counts: processor time, load balancers' probes, and scrapes. These alone
//! are no reason to write a checkpoint every few seconds.
use super::{Checkpoint, LiveTotals, Total, index_of, without_gauges};
use crate::metrics::catalogue::{
    HTTP_REQUEST_DURATION, HTTP_REQUESTS, PROCESS_CPU, SCRAPE_DURATION,
};
use crate::metrics::definition::{Owner, SeriesId};
use crate::metrics::labels::ROUTE;

/// Routes that load balancers, routers, supervisors and scrapers request all the time.
const PROBES: [&str; 7] = ["/live", "/load", "/ready", "/health", "/ping", "/version", "/metrics"];

impl Checkpoint {
    /// Whether anything has changed since `before` other than what changes in an idle cluster.
    #[must_use]
    pub fn has_news_since(&self, before: &Self) -> bool {
        self.gone != before.gone
            || !same(&self.retired, &before.retired)
            || !without_gauges(&self.applications).eq(without_gauges(&before.applications))
            || self.live.len() != before.live.len()
            || self.live.iter().zip(&before.live).any(|(now, then)| !now.is_as(then))
    }
}

impl LiveTotals {
    fn is_as(&self, then: &Self) -> bool {
        (self.source, self.incarnation) == (then.source, then.incarnation)
            && same(&self.series, &then.series)
            && without_gauges(&self.application).eq(without_gauges(&then.application))
    }
}

fn same(now: &[Total], then: &[Total]) -> bool {
    now.iter().filter(|it| !it.is_routine()).eq(then.iter().filter(|it| !it.is_routine()))
}

impl Total {
    /// Whether it grows while the cluster is idle.
    fn is_routine(&self) -> bool {
        let Some(id) = index_of(&self.name).and_then(SeriesId::from_index) else { return false };
        let definition = id.definition();
        if [HTTP_REQUESTS.series(), HTTP_REQUEST_DURATION.series()].contains(&id) {
            let at = definition.labels.iter().position(|label| label.name == ROUTE.name);
            let route = at.and_then(|at| self.labels.get(at));
            return route.is_some_and(|route| PROBES.contains(&route.as_str()));
        }
        let counted = [PROCESS_CPU.series(), SCRAPE_DURATION.series()];
        // Ranks count steps; tokens and failures are the coordinator's.
        counted.contains(&id) || definition.owner == Owner::EveryRank
    }
}
