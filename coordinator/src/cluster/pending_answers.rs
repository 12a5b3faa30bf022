//! PURE: which ranks were told to form or to start and have not answered, and for how long nothing
//! was heard from them.
//!
//! A hanging executor says nothing while its process and link live. Its silence is counted across
//! formations: its peers give up waiting earlier, and would be formed with it again without end.
use std::collections::BTreeMap;
use std::time::Duration;

use shared::ids::WorkerId;

/// Unanswered formations since it last served after which a worker is let go.
const STRIKES_MAX: u32 = 2;

/// How long a rank on a GPU may be silent that had not finished a step that took too long: what
/// hung then may hang still. Longer than a GPU needs to drain its queue, and than most need that
/// find out by themselves, which tells a failed device from a failed process.
const GPU_PATIENCE: Duration = Duration::from_secs(45);
/// The same on a CPU, at least. That looks between two layers whether its epoch is over, and says
/// so at once.
const CPU_PATIENCE: Duration = Duration::from_secs(5);
/// A layer takes at most such a part of a step that takes as long as steps may: models with fewer
/// layers are small. With sliding windows a layer without one can take twice as much, which costs a
/// rank that is given up although it is well a reload.
const LAYERS_MIN: u32 = 12;

/// How long a rank may be silent that had not finished a step that took too long. Who gives steps
/// longer says that processors are slow.
pub(super) fn hung_patience(is_on_gpu: bool, step_timeout: Duration) -> Duration {
    match is_on_gpu {
        true => GPU_PATIENCE,
        false => (step_timeout / LAYERS_MIN).clamp(CPU_PATIENCE, GPU_PATIENCE),
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct PendingAnswers {
    pending: BTreeMap<WorkerId, PendingAnswer>,
    /// Nothing was heard of them since a step of theirs took too long, and how long that may last.
    hung: BTreeMap<WorkerId, Duration>,
    strikes: BTreeMap<WorkerId, u32>,
}

/// An answer that a worker owes.
#[derive(Clone, Copy, Debug, Default)]
struct PendingAnswer {
    /// How long it was waited for in earlier formations.
    before: Duration,
    /// Since when it has been waited for in the present one.
    since: Option<Duration>,
}

impl PendingAnswers {
    /// Records that a worker owes an answer, perhaps in addition to an earlier one.
    pub(super) fn expect(&mut self, now: Duration, worker: WorkerId) {
        self.pending.entry(worker).or_default().since.get_or_insert(now);
    }

    /// Stops the clock: its formation is over, so nobody waits for its answer.
    pub(super) fn pause(&mut self, now: Duration, worker: WorkerId) {
        if let Some(pending) = self.pending.get_mut(&worker)
            && let Some(since) = pending.since.take()
        {
            pending.before += now.saturating_sub(since);
        }
    }

    /// A step took too long that it had not finished; from now on it may be silent for `patience`.
    pub(super) fn mark_hung(&mut self, worker: WorkerId, patience: Duration) {
        self.hung.insert(worker, patience);
    }

    /// How long it may be silent, of which others may be for `patience`.
    pub(super) fn patience(&self, worker: WorkerId, patience: Duration) -> Duration {
        self.hung.get(&worker).map_or(patience, |own| patience.min(*own))
    }

    /// Nobody could be heard for so long up to now, because this process stood still.
    pub(super) fn stood_still(&mut self, now: Duration, lasted: Duration) {
        for since in self.pending.values_mut().filter_map(|it| it.since.as_mut()) {
            *since = since.saturating_add(lasted).min(now);
        }
    }

    /// It is at work but still owes its answer.
    pub(super) fn heard(&mut self, now: Duration, worker: WorkerId) {
        self.hung.remove(&worker);
        if let Some(pending) = self.pending.get_mut(&worker) {
            *pending = PendingAnswer { before: Duration::ZERO, since: pending.since.map(|_| now) };
        }
    }

    /// It has answered.
    pub(super) fn answered(&mut self, worker: WorkerId) {
        self.hung.remove(&worker);
        self.pending.remove(&worker);
    }

    /// It is a rank of a serving replica: the past is forgotten.
    pub(super) fn serves(&mut self, worker: WorkerId) {
        self.left(worker);
    }

    /// Its process is gone.
    pub(super) fn left(&mut self, worker: WorkerId) {
        self.pending.remove(&worker);
        self.hung.remove(&worker);
        self.strikes.remove(&worker);
    }

    /// Returns when a worker that is waited for will have been silent for `patience`.
    pub(super) fn deadline(&self, worker: WorkerId, patience: Duration) -> Option<Duration> {
        let patience = self.patience(worker, patience);
        let PendingAnswer { before, since } = *self.pending.get(&worker)?;
        Some(since?.saturating_add(patience.saturating_sub(before)))
    }

    /// Like [`PendingAnswers::deadline`], for all workers.
    pub(super) fn deadlines(&self, patience: Duration) -> impl Iterator<Item = Duration> + '_ {
        self.pending.keys().filter_map(move |worker| self.deadline(*worker, patience))
    }

    /// Whether a step of it took too long, and nothing was heard since.
    pub(super) fn is_hung(&self, worker: WorkerId) -> bool {
        self.hung.contains_key(&worker)
    }

    /// Stops waiting for it. Returns whether that happened once too often.
    pub(super) fn strike(&mut self, worker: WorkerId) -> bool {
        self.pending.remove(&worker);
        let strikes = self.strikes.entry(worker).or_default();
        *strikes += 1;
        *strikes >= STRIKES_MAX
    }

    /// Whether it was waited for in formations that are over, and was not heard of since.
    pub(super) fn is_unanswered(&self, worker: WorkerId) -> bool {
        self.pending.get(&worker).is_some_and(|pending| !pending.before.is_zero())
    }

    /// Whether it failed to answer and has not served since.
    pub(super) fn has_strikes(&self, worker: WorkerId) -> bool {
        self.strikes.contains_key(&worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn a_rank_whose_step_hung_is_waited_for_less_long_until_it_is_heard() {
        let worker = WorkerId(3);
        let mut pending_answers = PendingAnswers::default();
        pending_answers.mark_hung(worker, secs(45));
        pending_answers.expect(secs(10), worker);
        assert_eq!(pending_answers.deadline(worker, secs(300)), Some(secs(55)));
        assert_eq!(
            pending_answers.deadline(worker, secs(20)),
            Some(secs(30)),
            "no longer than others"
        );
        pending_answers.strike(worker);
        assert!(pending_answers.is_hung(worker), "it hangs still");
        pending_answers.expect(secs(60), worker);
        assert_eq!(pending_answers.deadline(worker, secs(300)), Some(secs(105)));
        pending_answers.heard(secs(70), worker);
        assert!(!pending_answers.is_hung(worker));
        assert_eq!(pending_answers.deadline(worker, secs(300)), Some(secs(370)));
    }

    #[test]
    fn a_cpu_is_waited_for_as_long_as_its_largest_layer_may_take() {
        let (cpu, gpu) = (|timeout| hung_patience(false, timeout), hung_patience(true, secs(2)));
        assert_eq!([2, 60, 240, 3600].map(|it| cpu(secs(it)).as_secs()), [5, 5, 20, 45]);
        assert_eq!((gpu, cpu(Duration::MAX)), (secs(45), secs(45)));
    }

    #[test]
    fn silence_that_nobody_could_hear_does_not_count() {
        let mut pending_answers = PendingAnswers::default();
        let [waits, does_not] = [3, 4].map(WorkerId);
        pending_answers.expect(secs(1), waits);
        pending_answers.expect(secs(1), does_not);
        pending_answers.pause(secs(2), does_not);
        pending_answers.stood_still(secs(21), secs(19));
        assert_eq!(pending_answers.deadline(waits, secs(5)), Some(secs(25)));
        pending_answers.expect(secs(21), does_not);
        assert_eq!(pending_answers.deadline(does_not, secs(5)), Some(secs(25)), "1 s before");
        pending_answers.stood_still(secs(30), secs(60));
        assert_eq!(pending_answers.deadline(waits, secs(5)), Some(secs(35)), "from now on");
    }

    #[test]
    fn silence_counts_while_an_answer_is_waited_for_until_something_is_heard() {
        let worker = WorkerId(3);
        let mut pending_answers = PendingAnswers::default();
        pending_answers.heard(secs(1), worker);
        assert_eq!(pending_answers.deadline(worker, secs(10)), None, "it owes nothing");
        pending_answers.expect(secs(2), worker);
        pending_answers.expect(secs(3), worker);
        assert_eq!(pending_answers.deadline(worker, secs(10)), Some(secs(12)));
        pending_answers.pause(secs(6), worker);
        assert_eq!(pending_answers.deadline(worker, secs(10)), None, "nobody waits for it");
        pending_answers.expect(secs(100), worker);
        assert_eq!(pending_answers.deadlines(secs(10)).collect::<Vec<_>>(), [secs(106)]);
        pending_answers.heard(secs(101), worker);
        assert_eq!(pending_answers.deadline(worker, secs(10)), Some(secs(111)));
        pending_answers.answered(worker);
        assert_eq!(pending_answers.deadline(worker, secs(10)), None);
        assert!(!pending_answers.strike(worker) && pending_answers.has_strikes(worker));
        assert!(pending_answers.strike(worker), "again");
        pending_answers.serves(worker);
        assert!(!pending_answers.has_strikes(worker));
    }
}
