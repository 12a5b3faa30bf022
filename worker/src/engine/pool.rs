//! Embeddings: the last norm's vectors for a prompt's tokens, pooled into one vector while the
//! prompt's chunks are computed. Every rank has these vectors in full; rank 0 reports. A model that
//! sorts texts into classes reports a number for each class instead of the vector.
use std::ops::Range;

use kernels::Backend;
use shared::protocol::{SequenceOutput, SequenceStep, StepPlan};
use shared::sampling::Pooling;

use super::sequence::Sequence;
use super::{Engine, EngineError};

/// Rows that a sequence's embedding needs, among its rows of the step, which begin at `first`.
fn wanted(pooling: Pooling, seq: &Sequence, entry: &SequenceStep, first: usize) -> Range<usize> {
    let end = first + entry.count as usize;
    let is_last = (entry.start + entry.count) as usize == seq.tokens.len();
    match pooling {
        Pooling::Mean => first..end,
        Pooling::First if entry.start == 0 => first..first + 1,
        Pooling::Last if is_last => end - 1..end,
        Pooling::First | Pooling::Last => first..first,
    }
}

impl<B: Backend> Engine<B> {
    /// Adds the step's rows to the embeddings of its sequences, and reports those that are
    /// complete; returns whether any is.
    pub(super) fn pool(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<bool, EngineError> {
        let Self { backend, decoder, sequences, step, .. } = self;
        let (before, width) = (outputs.len(), decoder.config().hidden_size);
        if backend.rank() != 0 {
            return Ok(false);
        }
        // Read all rows at once, to wait for a device only once.
        let (mut pooled, mut all) = (Vec::new(), Vec::new());
        for (entry, first) in plan.sequences.iter().zip(&step.entry_rows) {
            // A sequence that gets a token has no embedding.
            if entry.sample {
                continue;
            }
            let Some(seq) = sequences.get(&entry.seq) else { continue };
            let Some(pooling) = seq.pooling else { continue };
            let rows = wanted(pooling, seq, entry, *first as usize);
            pooled.push((entry, pooling, rows.len()));
            all.extend(Some(rows).filter(|rows| !rows.is_empty()));
        }
        if !all.is_empty() {
            decoder.read_hidden(backend, &all, &mut step.hidden)?;
        }
        let mut hidden = step.hidden.as_slice();
        for (entry, pooling, rows) in pooled {
            let Some(seq) = sequences.get_mut(&entry.seq) else { continue };
            let (own, others) = hidden.split_at((rows * width).min(hidden.len()));
            hidden = others;
            if rows > 0 {
                add(&mut seq.pooled, own, width);
            }
            let end = entry.start + entry.count;
            if end as usize != seq.tokens.len() {
                continue;
            }
            let count = if pooling == Pooling::Mean { f64::from(end) } else { 1.0 };
            let embedding: Vec<f32> =
                seq.pooled.drain(..).map(|sum| (sum / count) as f32).collect();
            let embedding = match decoder.class_head() {
                Some(head) => head.apply(&embedding),
                None => embedding,
            };
            outputs.push(SequenceOutput {
                seq: entry.seq,
                position: end,
                token: None,
                logprobs: None,
                prompt_logprobs: Vec::new(),
                prompt_start: 0,
                corrupted: embedding.iter().any(|value| !value.is_finite()),
                embedding,
            });
        }
        Ok(outputs.len() > before)
    }
}

/// Adds rows of this width to a sum. In double precision, so that the sum of a long prompt does not
/// depend on how it was cut into chunks.
fn add(sum: &mut Vec<f64>, rows: &[f32], width: usize) {
    sum.resize(width, 0.0);
    for row in rows.chunks_exact(width) {
        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
    }
}
