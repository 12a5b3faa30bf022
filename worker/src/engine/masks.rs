//! Masks of the step's rows: which tokens each row may sample. They come after their plan, while
//! the step is computed, as lists or bits, whichever is smaller; kernels read bits.
use std::time::{Duration, Instant};

use kernels::Backend;
use kernels::sampling::SampleRow;
use shared::protocol::{SequenceStep, StepPlan, TokenMask};

use super::{Engine, EngineError, recycle};
use crate::rank::StepSource;

/// Bitmaps of the sampled rows, kept for their allocations.
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
    /// Lays out `masks`, which belong to the masked ones among the sampled entries, in order.
    fn lay_out<'a>(
        &mut self,
        entries: impl ExactSizeIterator<Item = &'a SequenceStep> + Clone,
        masks: &[Option<TokenMask>],
        vocab: u32,
    ) -> Result<(), String> {
        let (count, masked) = (masks.len(), entries.clone().filter(|entry| entry.masked).count());
        if count != masked {
            return Err(format!("{count} masks came for {masked} masked sequences"));
        }
        if self.rows.len() < entries.len() {
            self.rows.resize_with(entries.len(), Row::default);
        }
        let mut masks = masks.iter();
        for (row, entry) in self.rows.iter_mut().zip(entries) {
            let mask = if entry.masked { masks.next().and_then(Option::as_ref) } else { None };
            row.is_masked = mask.is_some();
            if let Some(mask) = mask {
                mask.check(vocab).map_err(|message| format!("{}: {message}", entry.seq))?;
                mask.to_bits(vocab, &mut row.bits);
            }
        }
        Ok(())
    }

    /// Returns the mask of sampled row `index`, as of the last layout.
    fn of(&self, index: usize) -> Option<&[u32]> {
        self.rows.get(index).filter(|row| row.is_masked).map(|row| row.bits.as_slice())
    }
}

/// Whether some of the step's rows have masks.
pub(super) fn are_in(plan: &StepPlan) -> bool {
    plan.sequences.iter().any(|entry| entry.masked)
}

/// Checks that an entry with a mask is sampled.
pub(super) fn check(entry: &SequenceStep) -> Result<(), String> {
    if entry.masked && !entry.sample {
        return Err("is masked, but is not to be sampled".to_owned());
    }
    Ok(())
}

impl<B: Backend> Engine<B> {
    /// Whether this rank samples, and so needs masks.
    pub(super) fn samples(&self) -> bool {
        self.backend.rank() == 0 || self.backend.samples_everywhere()
    }

    /// Waits for the masks of the step whose forward pass was launched last, then samples it or
    /// queues the sampling; returns how long waiting and sampling took.
    pub(super) fn sample_masked(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        queue: bool,
    ) -> Result<(Duration, Duration), EngineError> {
        let fault = |message: String| EngineError::Plan { step: plan.step.0, message };
        let began = Instant::now();
        let given = source.masks(plan.step).map_err(fault)?;
        let waited = began.elapsed();
        let began = Instant::now();
        let Self { backend, decoder, sequences, step, masks, .. } = self;
        let vocab = decoder.config().vocab_size;
        let entries = step.sample_entries.iter().map(|index| &plan.sequences[*index]);
        masks.lay_out(entries.clone(), &given, vocab as u32).map_err(fault)?;
        let mut rows: Vec<SampleRow<'_>> = std::mem::take(&mut step.sampling);
        for (row, entry) in entries.enumerate() {
            if let Some(seq) = sequences.get(&entry.seq) {
                rows.push(seq.sample_row(step.known(row), masks.of(row)));
            }
        }
        let logits = decoder.last_logits();
        if queue {
            backend.queue_sample(logits, vocab, &rows)?;
        } else {
            backend.sample(logits, vocab, 0, &rows, &mut step.sampled)?;
        }
        backend.end_step()?;
        decoder.copy_states(backend, &step.keep)?;
        step.sampling = recycle(rows);
        Ok((waited, if queue { Duration::ZERO } else { began.elapsed() }))
    }
}
