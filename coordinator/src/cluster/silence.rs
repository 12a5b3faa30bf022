//! PURE: which ranks were told to form or to start and have not answered, and for how long nothing
//! was heard from them.
//!
//! A hanging executor says nothing while its process and link live. Its silence is counted across
//! formations: its peers give up waiting earlier, and would be formed with it again without end.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shared::ids::WorkerId;

/// Unanswered formations since it last served after which a worker is let go.
const STRIKES_MAX: u32 = 2;

/// How long a rank may be silent that had not finished a step that took too long: what hung then
/// may hang still. Longer than those wait who are well and connect with one that is not.
const HUNG_PATIENCE: Duration = Duration::from_secs(45);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Silence {
    owed: BTreeMap<WorkerId, Owed>,
    /// Nothing was heard of them since a step of theirs took too long.
    hung: BTreeSet<WorkerId>,
    strikes: BTreeMap<WorkerId, u32>,
}

/// An answer that a worker owes.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    /// How long it was waited for in earlier formations.
    before: Duration,
    /// Since when it has been waited for in the present one.
    since: Option<Duration>,
}

impl Silence {
    /// Records that a worker owes an answer, perhaps in addition to an earlier one.
    pub(super) fn told(&mut self, now: Duration, worker: WorkerId) {
        self.owed.entry(worker).or_default().since.get_or_insert(now);
    }

    /// Stops the clock: its formation is over, so nobody waits for its answer.
    pub(super) fn pause(&mut self, now: Duration, worker: WorkerId) {
        if let Some(owed) = self.owed.get_mut(&worker)
            && let Some(since) = owed.since.take()
        {
            owed.before += now.saturating_sub(since);
        }
    }

    /// A step took too long that it had not finished.
    pub(super) fn hangs(&mut self, worker: WorkerId) {
        self.hung.insert(worker);
    }

    /// How long it may be silent, of which others may be for `patience`.
    pub(super) fn patience(&self, worker: WorkerId, patience: Duration) -> Duration {
        if self.hung.contains(&worker) { patience.min(HUNG_PATIENCE) } else { patience }
    }

    /// It is at work but still owes its answer.
    pub(super) fn heard(&mut self, now: Duration, worker: WorkerId) {
        self.hung.remove(&worker);
        if let Some(owed) = self.owed.get_mut(&worker) {
            *owed = Owed { before: Duration::ZERO, since: owed.since.map(|_| now) };
        }
    }

    /// It has answered.
    pub(super) fn answered(&mut self, worker: WorkerId) {
        self.hung.remove(&worker);
        self.owed.remove(&worker);
    }

    /// It is a rank of a serving replica: the past is forgotten.
    pub(super) fn serves(&mut self, worker: WorkerId) {
        self.left(worker);
    }

    /// Its process is gone.
    pub(super) fn left(&mut self, worker: WorkerId) {
        self.owed.remove(&worker);
        self.hung.remove(&worker);
        self.strikes.remove(&worker);
    }

    /// Returns when a worker that is waited for will have been silent for `patience`.
    pub(super) fn ends(&self, worker: WorkerId, patience: Duration) -> Option<Duration> {
        let patience = self.patience(worker, patience);
        let Owed { before, since } = *self.owed.get(&worker)?;
        Some(since?.saturating_add(patience.saturating_sub(before)))
    }

    /// Like [`Silence::ends`], for all workers.
    pub(super) fn all_ends(&self, patience: Duration) -> impl Iterator<Item = Duration> + '_ {
        self.owed.keys().filter_map(move |worker| self.ends(*worker, patience))
    }

    /// Stops waiting for it. Returns whether that happened once too often.
    pub(super) fn strike(&mut self, worker: WorkerId) -> bool {
        self.owed.remove(&worker);
        let strikes = self.strikes.entry(worker).or_default();
        *strikes += 1;
        *strikes >= STRIKES_MAX
    }

    /// Whether it was waited for in formations that are over, and was not heard of since.
    pub(super) fn is_owed(&self, worker: WorkerId) -> bool {
        self.owed.get(&worker).is_some_and(|owed| !owed.before.is_zero())
    }

    /// Whether it failed to answer and has not served since.
    pub(super) fn struck(&self, worker: WorkerId) -> bool {
        self.strikes.contains_key(&worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_whose_step_hung_is_waited_for_less_long_until_it_is_heard() {
        let (secs, worker) = (Duration::from_secs, WorkerId(3));
        let mut silence = Silence::default();
        silence.hangs(worker);
        silence.told(secs(10), worker);
        assert_eq!(silence.ends(worker, secs(300)), Some(secs(55)));
        assert_eq!(silence.ends(worker, secs(20)), Some(secs(30)), "no longer than others");
        silence.strike(worker);
        silence.told(secs(60), worker);
        assert_eq!(silence.ends(worker, secs(300)), Some(secs(105)), "it hangs still");
        silence.heard(secs(70), worker);
        assert_eq!(silence.ends(worker, secs(300)), Some(secs(370)));
    }

    #[test]
    fn silence_counts_while_an_answer_is_waited_for_until_something_is_heard() {
        let (secs, worker) = (Duration::from_secs, WorkerId(3));
        let mut silence = Silence::default();
        silence.heard(secs(1), worker);
        assert_eq!(silence.ends(worker, secs(10)), None, "it owes nothing");
        silence.told(secs(2), worker);
        silence.told(secs(3), worker);
        assert_eq!(silence.ends(worker, secs(10)), Some(secs(12)));
        silence.pause(secs(6), worker);
        assert_eq!(silence.ends(worker, secs(10)), None, "nobody waits for it");
        silence.told(secs(100), worker);
        assert_eq!(silence.all_ends(secs(10)).collect::<Vec<_>>(), [secs(106)]);
        silence.heard(secs(101), worker);
        assert_eq!(silence.ends(worker, secs(10)), Some(secs(111)));
        silence.answered(worker);
        assert_eq!(silence.ends(worker, secs(10)), None);
        assert!(!silence.strike(worker) && silence.struck(worker));
        assert!(silence.strike(worker), "again");
        silence.serves(worker);
        assert!(!silence.struck(worker));
    }
}
