//! Runs an engine's steps as a coordinator would request them.
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use kernels::cuda::CudaBackend;
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{Drafts, NewSequence, SequenceOutput, SequenceStep, StepPlan, TokenMask};
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::rank::{EmptyStepSource, StepSource};

use crate::speed::Sizes;

/// A queue of plans.
pub(crate) struct Plans(pub(crate) VecDeque<StepPlan>);

impl StepSource for Plans {
    fn peek(&mut self) -> Option<&StepPlan> {
        self.0.front()
    }

    fn masks(&mut self, _: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        Err("nothing is masked here".to_owned())
    }
}

/// Checks that a step's tokens were chosen from numbers, not from NaN.
fn sound(outputs: &[SequenceOutput]) -> Result<(), String> {
    match outputs.iter().find(|output| output.corrupted) {
        None => Ok(()),
        Some(SequenceOutput { seq, position, .. }) => {
            Err(format!("logits of sequence {} at {position} are not finite", seq.0))
        }
    }
}

/// Runs steps of one engine.
pub(crate) struct Driver<'a> {
    pub(crate) engine: &'a mut Engine<CudaBackend>,
    pub(crate) vocab: u32,
    step: u64,
    next_seq: u64,
}

impl<'a> Driver<'a> {
    pub(crate) fn new(engine: &'a mut Engine<CudaBackend>, vocab: u32) -> Self {
        Self { engine, vocab, step: 0, next_seq: 1 }
    }
}

impl Driver<'_> {
    pub(crate) fn new_seq(&mut self) -> SeqId {
        self.next_seq += 1;
        SeqId(self.next_seq - 1)
    }

    pub(crate) fn run(&mut self, mut plan: StepPlan) -> Result<(), String> {
        self.step += 1;
        plan.epoch = Epoch(1);
        plan.step = StepId(self.step);
        let mut outputs = Vec::new();
        self.engine
            .step(&plan, &mut EmptyStepSource, &mut outputs)
            .map_err(|error| error.to_string())?;
        sound(&outputs)
    }

    /// Computes the prompts of `batch` sequences of some blocks each, in steps as large as allowed.
    pub(crate) fn prefill(
        &mut self,
        batch: u32,
        (tokens, blocks): (u32, u32),
        together: u32,
        sampling: &SamplingParams,
    ) -> Result<Vec<SeqId>, String> {
        let first = self.next_seq;
        self.next_seq += u64::from(batch);
        let seqs: Vec<SeqId> = (first..self.next_seq).map(SeqId).collect();
        let mut slot = 0;
        for group in seqs.chunks(together.max(1) as usize) {
            let mut plan = StepPlan::default();
            for seq in group {
                let ids = (0..tokens).map(|i| (i * 7919 + slot * 31) % self.vocab).collect();
                plan.admitted.push(NewSequence {
                    seq: *seq,
                    tokens: ids,
                    num_prompt: tokens,
                    adapter: 0,
                    sampling: sampling.clone(),
                });
                let own = slot * blocks..(slot + 1) * blocks;
                plan.sequences.push(SequenceStep {
                    seq: *seq,
                    start: 0,
                    count: tokens,
                    new_blocks: own.map(BlockId).collect(),
                    sample: true,
                    masked: false,
                    drafts: Drafts::none(),
                });
                slot += 1;
            }
            self.run(plan)?;
        }
        Ok(seqs)
    }

    /// Decode steps whose plans are all known, as if a coordinator always had the next one ready.
    pub(crate) fn decode(&mut self, seqs: &[SeqId], positions: Range<u32>) -> Result<(), String> {
        let plans = Plans(positions.map(|at| self.decode_plan(seqs, at)).collect());
        self.run_all(plans)
    }

    /// Runs all steps of `plans`, which have their numbers.
    pub(crate) fn run_all(&mut self, plans: Plans) -> Result<(), String> {
        self.run_each(plans, |_| ())
    }

    /// Same; `seen` gets each step's output.
    pub(crate) fn run_each(
        &mut self,
        mut plans: Plans,
        mut seen: impl FnMut(&[SequenceOutput]),
    ) -> Result<(), String> {
        let mut outputs = Vec::new();
        while let Some(plan) = plans.0.pop_front() {
            outputs.clear();
            self.engine.step(&plan, &mut plans, &mut outputs).map_err(|error| error.to_string())?;
            sound(&outputs)?;
            seen(&outputs);
        }
        Ok(())
    }

    /// Returns the seconds of a decode step of `batch` sequences.
    pub(crate) fn step_seconds(
        &mut self,
        batch: u32,
        sizes: &Sizes,
        together: u32,
        sampling: &SamplingParams,
    ) -> Result<f64, String> {
        let blocks = (sizes.context, sizes.decoded());
        let seqs = self.prefill(batch, blocks, together, sampling)?;
        // A warm-up step, a captured one, and one replay.
        let (first, warm) = (sizes.context, sizes.context + 3);
        self.decode(&seqs, first..warm)?;
        let began = Instant::now();
        self.decode(&seqs, warm..first + sizes.steps)?;
        let step = began.elapsed().as_secs_f64() / f64::from(sizes.steps - 3);
        self.forget(seqs)?;
        Ok(step)
    }

    /// Runs steps of one sequence with arbitrary drafts, to measure their cost however many drafts
    /// are accepted. Returns the sequence's position afterwards, and the number of steps.
    pub(crate) fn verify(
        &mut self,
        seq: SeqId,
        drafts: u32,
        positions: Range<u32>,
    ) -> Result<(u32, u32), String> {
        let (mut at, mut steps) = (positions.start, 0);
        while at + drafts < positions.end {
            let mut plan = self.decode_plan(&[seq], at);
            for entry in &mut plan.sequences {
                entry.count += drafts;
                let tokens = (at..at + drafts).map(|token| token * 7919 % self.vocab);
                entry.drafts = tokens.collect::<Vec<u32>>().into();
            }
            let mut outputs = Vec::new();
            self.engine
                .step(&plan, &mut EmptyStepSource, &mut outputs)
                .map_err(|error| error.to_string())?;
            if outputs.is_empty() {
                return Err("a step with drafts yields no token".to_owned());
            }
            sound(&outputs)?;
            at += u32::try_from(outputs.len()).unwrap_or(u32::MAX);
            steps += 1;
        }
        Ok((at, steps))
    }

    pub(crate) fn decode_plan(&mut self, seqs: &[SeqId], at: u32) -> StepPlan {
        let entry = |seq: &SeqId| SequenceStep {
            seq: *seq,
            start: at,
            count: 1,
            new_blocks: Vec::new(),
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        };
        self.step += 1;
        StepPlan {
            epoch: Epoch(1),
            step: StepId(self.step),
            sequences: seqs.iter().map(entry).collect(),
            ..StepPlan::default()
        }
    }

    pub(crate) fn forget(&mut self, seqs: Vec<SeqId>) -> Result<(), String> {
        self.run(StepPlan { finished: seqs, ..StepPlan::default() })
    }
}
