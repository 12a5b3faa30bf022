//! Masks of the step's rows: which tokens each may get. They come as lists or bits, whichever takes
//! fewer bytes, and kernels read bits.
use kernels::Backend;
use shared::protocol::{SequenceStep, StepPlan};

use super::{Engine, EngineError};
use crate::rank::StepSource;

/// Bits of each sampled row, kept for their memory.
#[derive(Debug, Default)]
pub(super) struct Masks {
    rows: Vec<Row>,
}

#[derive(Debug, Default)]
struct Row {
    is_masked: bool,
    bits: Vec<u32>,
}

impl Masks {
    /// Lays out the masks of the sampled `entries`, which have been checked, in their order.
    pub(super) fn lay_out<'a>(
        &mut self,
        entries: impl ExactSizeIterator<Item = &'a SequenceStep>,
        vocab: u32,
    ) {
        if self.rows.len() < entries.len() {
            self.rows.resize_with(entries.len(), Row::default);
        }
        for (row, entry) in self.rows.iter_mut().zip(entries) {
            row.is_masked = entry.allowed.is_some();
            if let Some(mask) = &entry.allowed {
                mask.to_bits(vocab, &mut row.bits);
            }
        }
    }

    /// The mask of sampled row `index`, as of the last layout.
    pub(super) fn of(&self, index: usize) -> Option<&[u32]> {
        self.rows.get(index).filter(|row| row.is_masked).map(|row| row.bits.as_slice())
    }
}

/// Checks an entry's mask, if it has one.
pub(super) fn check(entry: &SequenceStep, vocab: u32) -> Result<(), String> {
    let Some(mask) = &entry.allowed else { return Ok(()) };
    if !entry.sample {
        return Err("has a mask, but is not to be sampled".to_owned());
    }
    mask.check(vocab)
}

impl<B: Backend> Engine<B> {
    /// Refuses a next plan with a mask for a sequence whose token of this step nobody has been told
    /// yet: what it allows was computed without knowing what it follows. Only rank 0 can tell: once
    /// it has reported, the next plan may reach other ranks before they are done with this one.
    pub(super) fn check_next(
        &self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
    ) -> Result<(), EngineError> {
        if self.backend.rank() != 0 {
            return Ok(());
        }
        let Some(next) = source.peek() else { return Ok(()) };
        let mut masked = next.sequences.iter().filter(|entry| entry.allowed.is_some());
        let presumes = |entry: &&SequenceStep| {
            plan.sequences.iter().any(|other| other.sample && other.seq == entry.seq)
        };
        match masked.find(presumes) {
            Some(entry) => Err(EngineError::Plan {
                step: next.step.0,
                message: format!(
                    "{} has a mask, but its token of step {} is not known yet",
                    entry.seq, plan.step.0
                ),
            }),
            None => Ok(()),
        }
    }
}
