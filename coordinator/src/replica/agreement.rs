//! PURE: compares what the ranks of one epoch report on the same step. They compute it together, so
//! they must report the same tokens; how long each took by itself shows which one holds the others
//! up.
use std::collections::VecDeque;

use shared::ids::StepId;

/// One rank's report on one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankReport {
    /// Digest of the step's tokens, as the rank has them.
    pub digest: u32,
    /// How long it computed, without waiting for others, in microseconds.
    pub own_us: u64,
}

/// Steps that some ranks have finished and others have not.
#[derive(Debug, Default)]
pub struct Agreement {
    ranks: usize,
    open: VecDeque<Step>,
    /// Buffers of finished steps, for reuse.
    unused: Vec<Vec<Option<RankReport>>>,
    /// The last finished step; a field so that its memory is reused.
    finished: FinishedStep,
}

/// A step and each rank's report on it.
#[derive(Debug)]
struct Step {
    step: StepId,
    reports: Vec<Option<RankReport>>,
}

/// A step that all ranks have finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FinishedStep {
    /// The step.
    pub step: StepId,
    /// The ranks in the minority; of two equal halves, the one without rank 0.
    pub minority: Vec<usize>,
    /// Time that each rank computed by itself, in microseconds.
    pub own_us: Vec<u64>,
}

impl Agreement {
    /// Begins another epoch, with so many ranks.
    pub fn begin(&mut self, ranks: usize) {
        self.ranks = ranks;
        self.unused.clear();
        self.open.clear();
    }

    /// A rank has finished a step. A second report is ignored. The caller ensures that the step was
    /// sent and is the rank's next: nothing else bounds the number of open steps.
    pub fn report(&mut self, rank: usize, step: StepId, report: RankReport) {
        let known = self.open.iter().position(|it| it.step == step);
        let index = known.unwrap_or_else(|| {
            let mut reports = self.unused.pop().unwrap_or_default();
            reports.clear();
            reports.resize(self.ranks, None);
            self.open.push_back(Step { step, reports });
            self.open.len() - 1
        });
        if let Some(place) = self.open.get_mut(index).and_then(|it| it.reports.get_mut(rank)) {
            place.get_or_insert(report);
        }
    }

    /// Returns the oldest open step, once all ranks have finished it.
    pub fn take_finished(&mut self) -> Option<&FinishedStep> {
        let whole = |step: &mut Step| step.reports.iter().all(Option::is_some);
        let Step { step, reports } = self.open.pop_front_if(whole)?;
        let said = || reports.iter().flatten().map(|report| report.digest);
        self.finished.step = step;
        // Nothing is allocated for ranks that agree.
        self.finished.minority = minority(said);
        self.finished.own_us.clear();
        self.finished.own_us.extend(reports.iter().flatten().map(|report| report.own_us));
        self.unused.push(reports);
        Some(&self.finished)
    }
}

fn minority<I: Iterator<Item = u32>>(said: impl Fn() -> I) -> Vec<usize> {
    let votes = |digest: u32| said().filter(|it| *it == digest).count();
    // The first with the most votes: in a tie, rank 0's.
    let most = said().fold(None, |best: Option<(usize, u32)>, digest| match best {
        Some((count, _)) if votes(digest) <= count => best,
        _ => Some((votes(digest), digest)),
    });
    let right = most.map(|(_, digest)| digest);
    said().enumerate().filter(|(_, it)| Some(*it) != right).map(|(rank, _)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(digests: &[u32]) -> Vec<usize> {
        let mut agreement = Agreement::default();
        agreement.begin(digests.len());
        // In reverse order; the next step may be under way.
        for (rank, digest) in digests.iter().enumerate().rev() {
            assert_eq!(agreement.take_finished(), None);
            agreement.report(rank, StepId(7), RankReport { digest: *digest, own_us: rank as u64 });
            agreement.report(rank, StepId(7), RankReport { digest: 99, own_us: 99 });
            if rank > 0 {
                agreement.report(rank, StepId(8), RankReport { digest: 1, own_us: 1 });
            }
        }
        let finished = agreement.take_finished().cloned().unwrap();
        assert_eq!(finished.step, StepId(7));
        assert!(finished.own_us.iter().copied().eq(0..digests.len() as u64));
        assert_eq!(agreement.take_finished(), None, "rank 0 has not finished the next one");
        finished.minority
    }

    #[test]
    fn who_says_something_else_is_named() {
        assert!(finished(&[5, 5]).is_empty());
        assert_eq!(finished(&[5, 6]), [1], "of two, rank 0 is believed");
        assert_eq!(finished(&[5, 6, 5, 5]), [1]);
        assert_eq!(finished(&[6, 5, 5, 5]), [0], "most are believed");
        assert_eq!(finished(&[5, 6, 6, 5]), [1, 2]);
        assert_eq!(finished(&[4, 5, 6, 7]), [1, 2, 3]);
    }

    #[test]
    fn ranks_of_another_epoch_are_forgotten() {
        let mut agreement = Agreement::default();
        agreement.begin(2);
        agreement.report(0, StepId(1), RankReport { digest: 1, own_us: 0 });
        agreement.begin(3);
        agreement.report(5, StepId(1), RankReport { digest: 1, own_us: 0 });
        for rank in 0..3 {
            agreement.report(rank, StepId(1), RankReport { digest: 2, own_us: 0 });
        }
        let finished = agreement.take_finished().unwrap();
        assert!(finished.minority.is_empty() && finished.own_us.len() == 3);
    }
}
