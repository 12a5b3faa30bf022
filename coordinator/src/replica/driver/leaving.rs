//! Requests that nobody waits for, and requests that hold up everybody.
use std::time::Duration;

use shared::ids::RequestId;
use shared::metrics::labels::ExpiryReason;
use shared::mix::IdSet;

use super::ReplicaDriver;
use crate::engine::EngineError;
use crate::scheduler::AwaitedMask;

/// A mask that takes longer than this is given up. Meanwhile other ranks wait for the one that
/// samples; this is shorter than their exchange may take.
const MASK_PATIENCE: Duration = Duration::from_secs(10);
/// Time between two looks counts as at most this much: no masks are computed while this process is
/// stopped.
const LOOK_MAX: Duration = Duration::from_secs(1);
/// Interval at which the clients of all requests are looked at, and up to how many requests that is
/// done at every tick. Of more, those that wait are looked at less often than those that run.
const GONE_INTERVAL: Duration = Duration::from_millis(500);
const LOOKED_AT_MAX: usize = 1024;
/// Approximate number of choices of abandoned requests dropped at a time.
const CHOICES_DROPPED: u32 = 4096;

impl ReplicaDriver {
    /// Finds requests whose clients are gone, or have long stopped reading.
    pub(super) fn find_gone(&mut self, now: Duration) {
        let Self { live, scheduler, gone, looked_for_gone, .. } = self;
        let all =
            live.len() <= LOOKED_AT_MAX || now.saturating_sub(*looked_for_gone) >= GONE_INTERVAL;
        if all {
            *looked_for_gone = now;
            gone.extend(live.iter_mut().filter_map(|(id, live)| live.is_gone(now).then_some(*id)));
            return;
        }
        for id in scheduler.running_requests() {
            if live.get_mut(&id).is_some_and(|live| live.is_gone(now)) {
                gone.push(id);
            }
        }
    }

    /// Notes that a request waits for its first step, if it does.
    pub(super) fn note_wait(&mut self, unscheduled_since: Option<Duration>) {
        if let (Some(since), Some(max)) = (unscheduled_since, self.limits.max_queue_wait) {
            self.overdue_from = self.overdue_from.min(since.saturating_add(max));
        }
    }

    /// Ends requests whose masks are overdue: a whole step waits for them, and must not take longer
    /// than steps may.
    pub(super) fn drop_late_masks(&mut self, now: Duration) {
        let passed = now.saturating_sub(std::mem::replace(&mut self.looked_for_masks, now));
        let passed = passed.min(LOOK_MAX);
        let awaited = self.scheduler.masks_awaited();
        if awaited.is_empty() && self.masks_late.is_empty() {
            return;
        }
        // Hundreds of sequences may wait for masks.
        let present: IdSet<AwaitedMask> = awaited.iter().copied().collect();
        self.masks_late.retain(|mask, _| present.contains(mask));
        for mask in awaited {
            let waited = self.masks_late.entry(*mask);
            waited.and_modify(|waited| *waited += passed).or_default();
        }
        let patience = MASK_PATIENCE.min(self.limits.step_timeout / 2);
        let found = self.masks_late.iter().filter(|(_, waited)| **waited >= patience);
        let mut ids: Vec<RequestId> = found.map(|(mask, _)| mask.request).collect();
        ids.sort_unstable();
        ids.dedup();
        if !ids.is_empty() {
            let seconds = patience.as_secs_f64();
            let message = format!("the tokens allowed next were not known within {seconds} s");
            tracing::warn!(replica = %self.id, requests = ids.len(), message);
            self.masks_late.retain(|mask, _| !ids.contains(&mask.request));
            // It may be known in time on a retry.
            let retry_after_s = ids.first().map_or(1, |id| self.retry_after_s(now, *id));
            self.fail(now, ids, &EngineError::Overloaded { message, retry_after_s });
        }
    }

    /// Ends requests that have waited too long for their first step: their clients are better off
    /// with another server, and may have left already.
    pub(super) fn drop_overdue(&mut self, now: Duration) {
        let Some(max) = self.limits.max_queue_wait.filter(|_| now >= self.overdue_from) else {
            return;
        };
        let mut ids: Vec<RequestId> = Vec::new();
        self.overdue_from = Duration::MAX;
        for (id, live) in &self.live {
            let Some(since) = live.unscheduled_since else { continue };
            match since.saturating_add(max) {
                until if now >= until => ids.push(*id),
                until => self.overdue_from = self.overdue_from.min(until),
            }
        }
        if ids.is_empty() {
            return;
        }
        ids.sort_unstable();
        tracing::debug!(replica = %self.id, requests = ids.len(), "waited too long");
        self.observer.record().expired(ExpiryReason::QueueWait, ids.len() as u64);
        let message = format!("the request has waited for over {} s", max.as_secs_f64());
        // Each is told its own time to retry.
        let overloaded = |id| {
            let (message, retry_after_s) = (message.clone(), self.retry_after_s(now, id));
            (id, EngineError::Overloaded { message, retry_after_s })
        };
        let ends: Vec<(RequestId, EngineError)> = ids.into_iter().map(overloaded).collect();
        self.scheduler.fail_each(ends, &mut self.effects);
        self.deliver(now);
    }

    /// Cancels requests whose clients are gone, up to a bound so that others are not delayed; the
    /// rest follows at the next tick.
    pub(super) fn drop_gone(&mut self, now: Duration) {
        if self.gone.is_empty() {
            return;
        }
        self.gone.sort_unstable();
        self.gone.dedup();
        let mut choices = 0;
        let mut is_one = |id: &RequestId| {
            let before = choices;
            choices += self.live.get(id).map_or(0, |live| live.summary.n);
            before < CHOICES_DROPPED
        };
        let rest = self.gone.iter().position(|id| !is_one(id)).unwrap_or(self.gone.len());
        let rest = self.gone.split_off(rest);
        let ids = std::mem::replace(&mut self.gone, rest);
        self.scheduler.cancel_all(ids, &mut self.effects);
        self.deliver(now);
    }
}
