//! The pages of a leader whose totals outlive it: [`Published`] with the hub and a clock around it.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shared::clock::{Clock, SystemClock};
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{Exemplars, Merged};

use super::published::Published;
use crate::metrics::Hub;

/// What a page shows of one moment.
#[derive(Debug)]
pub struct Moment {
    /// The cluster's totals and gauges.
    pub merged: Merged,
    /// Requests behind latencies.
    pub exemplars: Exemplars,
}

impl Moment {
    fn with_gauges_of(&self, present: &Self) -> Self {
        let merged = self.merged.with_gauges_of(&present.merged);
        Self { merged, exemplars: self.exemplars.clone() }
    }
}

/// Which moment pages show. Shared by the thread that writes checkpoints and whoever is scraped.
///
/// Its lock is held while the hub is asked, so that no page can be newer than the checkpoint that
/// it comes before.
#[derive(Debug)]
pub struct Publication {
    hub: Arc<Hub>,
    clock: SystemClock,
    published: Mutex<Published<Moment>>,
}

impl Publication {
    /// Pages of `hub`; of the present once nothing was acknowledged for `patience`. Another may
    /// lead when this process has stood still for longer than `stall`.
    #[must_use]
    pub fn new(hub: Arc<Hub>, patience: Duration, stall: Duration) -> Self {
        let clock = SystemClock::start();
        let published = Mutex::new(Published::new(patience, stall, clock.now()));
        Self { hub, clock, published }
    }

    /// This process does not stand still.
    pub fn beat(&self) {
        drop(self.published());
    }

    /// What a page shows now; `None` until it is known what the last leader left, and whether
    /// another leads. Totals that began at zero here and grew by all of that later would look like
    /// so much work at once.
    #[must_use]
    pub fn shown(&self) -> Option<Arc<Moment>> {
        let published = self.published();
        let shown = || published.shown(self.clock.now());
        published.has_totals().then(|| shown().unwrap_or_else(|| Arc::new(self.hub.moment())))
    }

    /// The last leader's totals have been restored, or there are none: pages begin.
    pub fn restored(&self) {
        let mut published = self.published();
        published.acknowledged(self.clock.now(), Arc::new(self.hub.moment()));
    }

    /// A checkpoint of now, which is about to be written. `None` where it would say nothing of note
    /// after `written`, which is in etcd: pages go on with its totals, and with the gauges of now.
    #[must_use]
    pub fn writing(&self, written: Option<&Checkpoint>) -> Option<Checkpoint> {
        let mut published = self.published();
        let (moment, checkpoint) = self.hub.moment_and_checkpoint();
        let now = self.clock.now();
        let is_old = written.is_some_and(|written| !checkpoint.has_news_since(written));
        if is_old && published.renewed(now, |shown| shown.with_gauges_of(&moment)) {
            return None;
        }
        published.writing(now, Arc::new(moment));
        Some(checkpoint)
    }

    /// Whether it is in etcd.
    pub fn written(&self, acknowledged: bool) {
        self.published().written(acknowledged);
    }

    /// etcd answers, but does not take what this process has: another may lead.
    pub fn kept(&self) {
        self.published().kept(self.clock.now());
    }

    fn published(&self) -> MutexGuard<'_, Published<Moment>> {
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        published.beat(self.clock.now());
        published
    }
}
