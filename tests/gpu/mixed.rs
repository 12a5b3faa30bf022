//! Decode steps of unequal sequences: a long one among short ones, a prompt in every step, one
//! whose sampling depends on all of its tokens. Measures the cost of each compared with a step of
//! equal sequences.
use std::time::Instant;

use shared::ids::{BlockId, SeqId};
use shared::protocol::{Drafts, NewSequence, SequenceStep, StepPlan};
use shared::sampling::SamplingParams;

use crate::Table;
use crate::driver::{Driver, Plans};
use crate::speed::{BLOCK_SIZE, Sizes};

/// Warm-up steps: the first one, one that is captured, one that is replayed.
const WARM: u32 = 3;

/// The short sequences of a case: their number, and the tokens of each.
fn short(sizes: &Sizes) -> (u32, u32) {
    (sizes.rows().saturating_sub(1).clamp(1, 64), sizes.context.min(200))
}

/// Blocks of a sequence with this many tokens before decode.
fn blocks_of(tokens: u32, sizes: &Sizes) -> u32 {
    (tokens + sizes.steps + 2).div_ceil(BLOCK_SIZE)
}

/// Blocks of all sequences, in the largest of these cases.
pub(crate) fn blocks(sizes: &Sizes) -> u32 {
    let (count, tokens) = short(sizes);
    count * blocks_of(tokens, sizes) + blocks_of(sizes.long.max(sizes.prompt), sizes)
}

/// The sequences with their positions, and the first free block.
struct Batch {
    rows: Vec<(SeqId, u32)>,
    next_block: u32,
}

impl Batch {
    fn new() -> Self {
        Self { rows: Vec::new(), next_block: 0 }
    }

    /// Admits a sequence of some tokens to `plan`, which computes the first `count` of them.
    fn admit(
        &mut self,
        driver: &mut Driver<'_>,
        plan: &mut StepPlan,
        (tokens, count): (u32, u32),
        (sampling, sizes): (SamplingParams, &Sizes),
    ) -> SeqId {
        let seq = driver.new_seq();
        let ids = (0..tokens).map(|at| (at * 7919 + plan.sequences.len() as u32) % driver.vocab);
        plan.admitted.push(NewSequence {
            seq,
            tokens: ids.collect(),
            num_prompt: tokens,
            adapter: 0,
            sampling,
        });
        let own = self.next_block..self.next_block + blocks_of(tokens, sizes);
        plan.sequences.push(entry(seq, 0, count, own.map(BlockId).collect(), count == tokens));
        seq
    }

    /// Computes the prompt of a sequence, as much per step as fits.
    fn prefill(
        &mut self,
        driver: &mut Driver<'_>,
        tokens: u32,
        sampling: SamplingParams,
        sizes: &Sizes,
    ) -> Result<(), String> {
        let mut plan = StepPlan::default();
        let mut done = tokens.min(sizes.prefill);
        let seq = self.admit(driver, &mut plan, (tokens, done), (sampling, sizes));
        driver.run(plan)?;
        while done < tokens {
            let count = (tokens - done).min(sizes.prefill);
            let last = done + count == tokens;
            let sequences = vec![entry(seq, done, count, Vec::new(), last)];
            driver.run(StepPlan { sequences, ..StepPlan::default() })?;
            done += count;
        }
        self.next_block += blocks_of(tokens, sizes);
        self.rows.push((seq, tokens));
        Ok(())
    }

    /// Plans the next token of all sequences.
    fn decode(&mut self, driver: &mut Driver<'_>) -> StepPlan {
        let seqs: Vec<SeqId> = self.rows.iter().map(|(seq, _)| *seq).collect();
        let mut plan = driver.decode_plan(&seqs, 0);
        for (entry, (_, at)) in plan.sequences.iter_mut().zip(&mut self.rows) {
            entry.start = *at;
            *at += 1;
        }
        plan
    }

    fn forget(self, driver: &mut Driver<'_>) -> Result<(), String> {
        driver.forget(self.rows.into_iter().map(|(seq, _)| seq).collect())
    }
}

fn entry(
    seq: SeqId,
    start: u32,
    count: u32,
    new_blocks: Vec<BlockId>,
    sample: bool,
) -> SequenceStep {
    SequenceStep { seq, start, count, new_blocks, sample, masked: false, drafts: Drafts::none() }
}

/// Returns the seconds per step; `run` runs a number of steps.
fn timed(sizes: &Sizes, mut run: impl FnMut(u32) -> Result<(), String>) -> Result<f64, String> {
    run(WARM)?;
    let began = Instant::now();
    run(sizes.steps - WARM)?;
    Ok(began.elapsed().as_secs_f64() / f64::from(sizes.steps - WARM))
}

/// Runs decode steps with all plans known in advance.
fn decode(driver: &mut Driver<'_>, batch: &mut Batch, steps: u32) -> Result<(), String> {
    let plans = (0..steps).map(|_| batch.decode(driver)).collect();
    driver.run_all(Plans(plans))
}

/// Measures the cases one by one, so that a failure affects no other.
pub(crate) fn cases(name: &str, driver: &mut Driver<'_>, sizes: &Sizes, table: &mut Table) {
    let (count, tokens) = short(sizes);
    let text = |step: f64| format!("step {:.3} ms", step * 1e3);
    for long in [None, Some(sizes.long)] {
        let and = long.map_or(String::new(), |long| format!(", one of {long} besides"));
        let step = unlike(driver, long, sizes);
        table.add(format!("{name} decode, {count} of {tokens} tokens{and}"), step.map(text));
    }
    let step = penalised(driver, sizes);
    table.add(format!("{name} decode, one of {count} with a repetition penalty"), step.map(text));
    let step = with_prompts(driver, sizes);
    let what = format!("{name} decode, {count} with a prompt of {} in each step", sizes.prompt);
    table.add(what, step.map(text));
}

/// Short sequences with one long one among them.
fn unlike(driver: &mut Driver<'_>, long: Option<u32>, sizes: &Sizes) -> Result<f64, String> {
    let (count, tokens) = short(sizes);
    let mut batch = Batch::new();
    for tokens in std::iter::repeat_n(tokens, count as usize).chain(long) {
        batch.prefill(driver, tokens, SamplingParams::greedy(), sizes)?;
    }
    let step = timed(sizes, |steps| decode(driver, &mut batch, steps))?;
    batch.forget(driver)?;
    Ok(step)
}

/// Short sequences, one of which has sampling that depends on all of its tokens.
fn penalised(driver: &mut Driver<'_>, sizes: &Sizes) -> Result<f64, String> {
    let (count, tokens) = short(sizes);
    let mut batch = Batch::new();
    for index in 0..count {
        let repetition_penalty = if index == 0 { 1.1 } else { 1.0 };
        let sampling = SamplingParams { repetition_penalty, ..SamplingParams::greedy() };
        batch.prefill(driver, tokens, sampling, sizes)?;
    }
    let step = timed(sizes, |steps| decode(driver, &mut batch, steps))?;
    batch.forget(driver)?;
    Ok(step)
}

/// Short sequences with a prompt in every step.
fn with_prompts(driver: &mut Driver<'_>, sizes: &Sizes) -> Result<f64, String> {
    let (count, tokens) = short(sizes);
    let greedy = SamplingParams::greedy;
    let mut batch = Batch::new();
    for _ in 0..count {
        batch.prefill(driver, tokens, greedy(), sizes)?;
    }
    let mut last = None;
    let step = timed(sizes, |steps| {
        for _ in 0..steps {
            let mut plan = batch.decode(driver);
            plan.finished.extend(last.take());
            let prompt = (sizes.prompt, sizes.prompt);
            last = Some(batch.admit(driver, &mut plan, prompt, (greedy(), sizes)));
            driver.run(plan)?;
        }
        Ok(())
    })?;
    driver.forget(last.into_iter().collect())?;
    batch.forget(driver)?;
    Ok(step)
}
