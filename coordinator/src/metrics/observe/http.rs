//! HTTP requests. The route is the pattern from our own route table, never the requested path, so
//! that a client cannot make series.
use std::time::Duration;

use shared::metrics::catalogue;
use shared::metrics::labels::{LabelValue, Method};

use super::{Cells, Recording};

impl Recording<'_> {
    /// An HTTP request came in. Answer with [`Recording::http_finished`], however it ends.
    pub fn http_started(&mut self) {
        let Cells { stats, fixed, .. } = &mut *self.cells;
        fixed.http_in_flight.up(stats);
    }

    /// The last byte of an answer was handed over, or the client left.
    pub fn http_finished(
        &mut self,
        route: &'static str,
        method: Method,
        status: u16,
        duration: Duration,
    ) {
        let Cells { stats, fixed, http_requests, http_durations, .. } = &mut *self.cells;
        fixed.http_in_flight.down(stats);
        let requests = *http_requests.entry((route, method, status)).or_insert_with(|| {
            let status = status.to_string();
            stats.counter(catalogue::HTTP_REQUESTS, [method.as_str(), route, &status])
        });
        let durations = *http_durations.entry((route, method)).or_insert_with(|| {
            stats.histogram(catalogue::HTTP_REQUEST_DURATION, [method.as_str(), route])
        });
        stats.add(requests, 1);
        stats.observe_duration(durations, duration);
    }
}
