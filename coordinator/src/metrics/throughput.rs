//! The deprecated gauges of average throughput, for queries that still use them; `rate()` of the
//! counters gives the same for any interval.
use std::time::Duration;

use shared::metrics::Merged;

use super::interval::Intervals;
use super::logger::StatLogger;
use super::observe::Observer;

/// Sets the gauges once per interval, even when nothing happens.
#[derive(Debug)]
pub struct ThroughputGauges {
    intervals: Intervals,
    observer: Observer,
}

impl ThroughputGauges {
    /// Makes a logger that sets the gauges of `observer`, which show 0 until the first interval is
    /// over.
    #[must_use]
    pub fn new(now: Duration, observer: Observer) -> Self {
        observer.record().throughput(0.0, 0.0);
        Self { intervals: Intervals::new(now), observer }
    }
}

impl StatLogger for ThroughputGauges {
    fn begin(&mut self, now: Duration, merged: &Merged) {
        self.intervals.begin(now, merged);
    }

    fn log(&mut self, now: Duration, merged: &Merged) {
        if let Some(interval) = self.intervals.next(now, merged) {
            let (prompt, generation) = (interval.prompt_throughput, interval.generation_throughput);
            self.observer.record().throughput(prompt, generation);
        }
    }
}
