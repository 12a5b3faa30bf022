//! `--batch-invariant`: on a GPU (emulated here), a request's bits depend neither on the rest of
//! the batch nor on how the request got there.
use kernels::collective::single_rank;
use kernels::cuda::{CudaBackend, CudaOptions};
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{Drafts, NewSequence, SequenceStep, StepPlan};
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::rank::EmptyStepSource;

use crate::cuda::{BLOCK_SIZE, BLOCKS, engine_on};
use crate::rig::fake_cuda_with;

const PROMPT: u32 = 100;
const OUTPUT: usize = 4;

/// A running request, with `chunk` tokens per step.
struct Request {
    seq: SeqId,
    tokens: Vec<u32>,
    computed: u32,
    blocks: u32,
    chunk: u32,
    /// The bits of every sampled token's log-probability.
    logprobs: Vec<u32>,
}

impl Request {
    fn new(index: u32, tokens: Vec<u32>, chunk: u32) -> Self {
        let seq = SeqId(u64::from(index) + 1);
        Self { seq, tokens, computed: 0, blocks: 0, chunk, logprobs: Vec::new() }
    }

    fn prompt(index: u32, len: u32) -> Vec<u32> {
        (0..len).map(|i| (index * 31 + i * i * 7 + 3) % 384).collect()
    }

    /// Adds its next tokens to a plan.
    fn plan(&mut self, plan: &mut StepPlan) {
        let len = self.tokens.len() as u32;
        if self.computed == 0 {
            plan.admitted.push(NewSequence {
                seq: self.seq,
                tokens: self.tokens.clone(),
                num_prompt: PROMPT.min(len),
                adapter: 0,
                sampling: SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() },
            });
        }
        let (start, count) = (self.computed, (len - self.computed).min(self.chunk));
        let mut new_blocks = Vec::new();
        while self.blocks * BLOCK_SIZE < start + count {
            new_blocks.push(BlockId((self.seq.0 as u32 - 1) * BLOCKS + self.blocks));
            self.blocks += 1;
        }
        self.computed += count;
        let sample = self.computed == len;
        plan.sequences.push(SequenceStep {
            seq: self.seq,
            start,
            count,
            new_blocks,
            sample,
            masked: false,
            drafts: Drafts::none(),
        });
    }
}

/// Runs steps of all requests until the first one has `tokens` tokens.
fn run(engine: &mut Engine<CudaBackend>, requests: &mut [Request], tokens: usize) {
    for step in 1.. {
        if requests[0].tokens.len() >= tokens {
            return;
        }
        let mut plan = StepPlan { epoch: Epoch(1), step: StepId(step), ..StepPlan::default() };
        for request in requests.iter_mut() {
            request.plan(&mut plan);
        }
        let mut outputs = Vec::new();
        engine.step(&plan, &mut EmptyStepSource, &mut outputs).unwrap();
        for output in outputs {
            let request = requests.iter_mut().find(|it| it.seq == output.seq).unwrap();
            request.tokens.push(output.token.unwrap());
            request.logprobs.push(output.logprobs.unwrap().logprob.to_bits());
        }
    }
}

/// The tokens and log-probabilities of one request: alone; with its prompt in chunks; among many
/// others; and re-admitted in chunks after half of its tokens.
fn in_four_ways(model: &str, batch_invariant: bool, others: u32) -> [(Vec<u32>, Vec<u32>); 4] {
    let run = |mut requests: Vec<Request>| {
        let options = CudaOptions { batch_invariant, ..CudaOptions::default() };
        let mut engine = engine_on(model, fake_cuda_with(options, single_rank()));
        run(&mut engine, &mut requests, PROMPT as usize + OUTPUT);
        let first = requests.swap_remove(0);
        let told = OUTPUT - OUTPUT / 2;
        let of = |all: &[u32]| all[all.len() - told..].to_vec();
        ((of(&first.tokens), of(&first.logprobs)), first.tokens)
    };
    let prompt = Request::prompt(0, PROMPT);
    let request = |chunk| Request::new(0, prompt.clone(), chunk);
    let (alone, tokens) = run(vec![request(u32::MAX)]);
    let (chunked, _) = run(vec![request(33)]);
    let others = (1..=others).map(|i| Request::new(i, Request::prompt(i, 1 + i % 7), u32::MAX));
    let (among, _) = run([request(u32::MAX)].into_iter().chain(others).collect());
    let accepted = tokens[..PROMPT as usize + OUTPUT / 2].to_vec();
    let (again, _) = run(vec![Request::new(0, accepted, 40)]);
    [alone, chunked, among, again]
}

#[test]
fn a_request_gets_the_same_bits_however_it_is_run() {
    // With experts, tiles contain different slots, and different numbers of slots.
    for (model, others) in [("llama-gqa", 66), ("qwen3-moe", 40), ("gpt-oss", 20)] {
        let ways = in_four_ways(model, true, others);
        for (way, result) in ["in pieces", "among others", "again"].iter().zip(&ways[1..]) {
            assert_eq!(result, &ways[0], "{model}: {way}");
        }
    }
    // Without the option the same comparison fails.
    let ways = in_four_ways("llama-gqa", false, 66);
    assert!(ways[1..].iter().any(|way| way != &ways[0]), "nothing differs without it either");
}
