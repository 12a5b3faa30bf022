//! Gauges that count things that come and go.
use shared::metrics::{Gauge, LocalStats};

/// A gauge that counts things that come and go.
#[derive(Clone, Copy, Debug)]
pub(super) struct UpDownGauge {
    gauge: Gauge,
    count: u64,
    /// Whether the series also exists at 0. That of a replica that does not serve vanishes with its
    /// last request.
    shows_zero: bool,
}

impl UpDownGauge {
    pub(super) fn new(gauge: Gauge) -> Self {
        Self { gauge, count: 0, shows_zero: false }
    }

    /// A level whose series always exists.
    pub(super) fn permanent(stats: &mut LocalStats, gauge: Gauge) -> Self {
        let mut level = Self::new(gauge);
        level.show_zero(stats, true);
        level
    }

    pub(super) fn show_zero(&mut self, stats: &mut LocalStats, shows_zero: bool) {
        self.shows_zero = shows_zero;
        self.publish(stats);
    }

    /// Whether it counts anything.
    pub(super) fn is_used(&self) -> bool {
        self.count > 0
    }

    pub(super) fn up(&mut self, stats: &mut LocalStats) {
        self.count += 1;
        self.publish(stats);
    }

    pub(super) fn down(&mut self, stats: &mut LocalStats) {
        self.count = self.count.saturating_sub(1);
        self.publish(stats);
    }

    /// Forgets the series.
    pub(super) fn remove(self, stats: &mut LocalStats) {
        stats.remove(self.gauge);
    }

    fn publish(&self, stats: &mut LocalStats) {
        if self.count > 0 || self.shows_zero {
            stats.set(self.gauge, self.count as f64);
        } else {
            stats.clear(self.gauge);
        }
    }
}
