//! The expected totals, as counted from the clients' side.
use std::collections::BTreeMap;

use shared::metrics::labels::{FinishedReason, RejectReason};

/// The expected totals.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) rejected: BTreeMap<RejectReason, u64>,
    pub(crate) ended: BTreeMap<FinishedReason, u64>,
    /// Prompt tokens of all choices, for requests that finished and for the others.
    pub(crate) prompts_of_finished: u64,
    pub(crate) prompts_of_others: u64,
}

impl Tally {
    /// Adds another tally.
    pub(crate) fn add(&mut self, other: &Self) {
        self.accepted += other.accepted;
        for (reason, count) in &other.rejected {
            *self.rejected.entry(*reason).or_default() += count;
        }
        for (reason, count) in &other.ended {
            *self.ended.entry(*reason).or_default() += count;
        }
        self.prompts_of_finished += other.prompts_of_finished;
        self.prompts_of_others += other.prompts_of_others;
    }
}
