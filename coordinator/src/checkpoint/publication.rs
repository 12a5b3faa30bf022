//! The pages of a leader whose totals outlive it: [`Published`] with the hub and a clock.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shared::clock::{Clock, SystemClock, since_1970};
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{Exemplars, Merged};

use super::published::Published;
use crate::metrics::Hub;

/// What a page shows, taken at one moment.
#[derive(Debug)]
pub struct PageSnapshot {
    /// The cluster's totals and gauges.
    pub merged: Merged,
    /// Exemplars: requests behind latencies.
    pub exemplars: Exemplars,
}

impl PageSnapshot {
    fn with_gauges_of(&self, present: &Self) -> Self {
        let merged = self.merged.with_gauges_of(&present.merged);
        Self { merged, exemplars: self.exemplars.clone() }
    }
}

/// The moment that pages show. Shared by the thread that writes checkpoints and by scrapes.
///
/// Its lock is held while the hub is read, so that no page is newer than the checkpoint written
/// after it.
#[derive(Debug)]
pub struct Publication {
    hub: Arc<Hub>,
    clock: SystemClock,
    published: Mutex<Published<PageSnapshot>>,
}

impl Publication {
    /// Pages of `hub`; of the present once nothing was acknowledged for `patience`. Another may
    /// lead when this process has stood still for longer than `stall`.
    #[must_use]
    pub fn new(hub: Arc<Hub>, patience: Duration, stall: Duration) -> Self {
        let clock = SystemClock::start();
        let published = Mutex::new(Published::new(patience, stall, clock.now(), since_1970()));
        Self { hub, clock, published }
    }

    /// This process does not stand still.
    pub fn record_progress(&self) {
        drop(self.published());
    }

    /// What a page shows now; `None` until it is known what the last leader left, and whether
    /// another leads. Totals that began at zero here and grew by all of that later would look like
    /// so much work at once.
    #[must_use]
    pub fn shown(&self) -> Option<Arc<PageSnapshot>> {
        let published = self.published();
        let shown = || published.shown(self.clock.now());
        published
            .has_totals()
            .then(|| shown().unwrap_or_else(|| Arc::new(self.hub.page_snapshot())))
    }

    /// The last leader's totals have been restored, or there are none: pages start.
    pub fn restored(&self) {
        let mut published = self.published();
        published.acknowledged(self.clock.now(), Arc::new(self.hub.page_snapshot()));
    }

    /// Returns a checkpoint of now, which the caller is about to write. `None` if it would add
    /// nothing of note to `written`, which is in etcd: pages keep its totals, with the present
    /// gauges.
    #[must_use]
    pub fn writing(&self, written: Option<&Checkpoint>) -> Option<Checkpoint> {
        let mut published = self.published();
        let (snapshot, checkpoint) = self.hub.snapshot_and_checkpoint();
        let now = self.clock.now();
        let is_old = written.is_some_and(|written| !checkpoint.has_news_since(written));
        if is_old && published.renewed(now, |shown| shown.with_gauges_of(&snapshot)) {
            return None;
        }
        published.writing(now, Arc::new(snapshot));
        Some(checkpoint)
    }

    /// Reports whether the checkpoint being written was acknowledged.
    pub fn written(&self, acknowledged: bool) {
        self.published().written(acknowledged);
    }

    /// etcd answers but does not accept what this process has: another may lead.
    pub fn keep_page(&self) {
        self.published().keep_page(self.clock.now());
    }

    fn published(&self) -> MutexGuard<'_, Published<PageSnapshot>> {
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        published.record_progress(self.clock.now(), since_1970());
        published
    }
}
