//! A step's results: tokens with their log-probabilities, and log-probabilities of prompts.
use kernels::Backend;
use kernels::sampling::Sampled;
use shared::ids::SeqId;
use shared::mix::IdMap;
use shared::protocol::{SequenceOutput, SequenceStep, StepPlan, TokenLogprobs};

use super::layout::StepBuffers;
use super::sequence::Sequence;
use super::{Engine, EngineError};
use crate::model::decoder::Decoder;

impl Sequence {
    /// Whether this share must report log-probabilities of prompt tokens.
    pub(super) fn reports_prompt(&self, entry: &SequenceStep) -> bool {
        self.prompt_logprobs.is_some() && self.prompt_targets(entry).is_some()
    }
}

impl<B: Backend> Engine<B> {
    /// Same as [`Sequence::reports_prompt`], for the entry's sequence.
    pub(super) fn reports_prompt(&self, entry: &SequenceStep) -> bool {
        self.sequences.get(&entry.seq).is_some_and(|seq| seq.reports_prompt(entry))
    }
}

/// Reports log-probabilities of prompt tokens for the sequences that ask for them.
pub(super) fn prompt_logprobs<B: Backend>(
    backend: &mut B,
    decoder: &mut Decoder<B>,
    sequences: &IdMap<SeqId, Sequence>,
    step: &mut StepBuffers,
    plan: &StepPlan,
    rows_max: u32,
    outputs: &mut Vec<SequenceOutput>,
) -> Result<(), EngineError> {
    let vocab = decoder.config().vocab_size;
    for (index, entry) in plan.sequences.iter().enumerate() {
        let Some(seq) = sequences.get(&entry.seq) else { continue };
        let Some(top_n) = seq.prompt_logprobs else { continue };
        let Some(targets) = seq.prompt_targets(entry) else { continue };
        let last = targets.end - 1;
        let mut report = Vec::with_capacity((last - entry.start) as usize);
        let mut corrupted = false;
        let row_start = step.entry_rows[index];
        let mut from = entry.start;
        while from < last {
            let to = last.min(from + rows_max);
            step.targets.clear();
            step.targets.extend_from_slice(&seq.tokens[from as usize + 1..to as usize + 1]);
            let rows = &mut step.prompt_rows;
            rows.clear();
            rows.extend((from..to).map(|position| row_start + position - entry.start));
            let logits = decoder.logits(backend, rows)?;
            if backend.rank() == 0 {
                let sampled = &mut step.sampled;
                backend.logprobs(logits, vocab, 0, &step.targets, top_n, sampled)?;
                corrupted |= sampled.iter().any(|scored| scored.corrupted);
                report.extend(sampled.drain(..).map(token_logprobs));
            }
            from = to;
        }
        if backend.rank() == 0 {
            outputs.push(SequenceOutput {
                seq: entry.seq,
                position: entry.start + entry.count,
                token: None,
                logprobs: None,
                prompt_logprobs: report,
                prompt_start: entry.start + 1,
                corrupted,
                embedding: Vec::new(),
            });
        }
    }
    Ok(())
}

/// Makes the output for a sampled token at `position` of its sequence.
pub(super) fn sampled_output(
    seq: SeqId,
    position: u32,
    sampled: Sampled,
    wants_logprobs: bool,
) -> SequenceOutput {
    SequenceOutput {
        seq,
        position,
        token: Some(sampled.token),
        corrupted: sampled.corrupted,
        logprobs: wants_logprobs.then(|| token_logprobs(sampled)),
        prompt_logprobs: Vec::new(),
        prompt_start: 0,
        embedding: Vec::new(),
    }
}

/// Adds a sampled token to its sequence's output, which the prompt log-probabilities began.
pub(super) fn merge_output(outputs: &mut Vec<SequenceOutput>, own: SequenceOutput) {
    let Some(begun) = outputs.iter_mut().find(|output| output.seq == own.seq) else {
        return outputs.push(own);
    };
    begun.token = own.token;
    begun.logprobs = own.logprobs;
    begun.corrupted |= own.corrupted;
}

fn token_logprobs(sampled: Sampled) -> TokenLogprobs {
    TokenLogprobs {
        token: sampled.token,
        logprob: sampled.logprob,
        rank: sampled.rank,
        top: sampled.top,
    }
}
