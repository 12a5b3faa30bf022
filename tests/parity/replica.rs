//! A replica in one process: one engine per thread, and the least scheduler that exercises it.
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use kernels::{Backend, Collective};
use shared::clock::SystemClock;
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{
    EngineConfig, NewSequence, SequenceOutput, SequenceStep, StepPlan, TokenLogprobs,
};
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::model::Model;

use crate::exchange;

/// Makes a rank's backend.
pub(crate) type Make<B> = fn(Box<dyn Collective>) -> B;

pub(crate) const NUM_BLOCKS: u32 = 1024;

/// Small blocks, so that every sequence has many.
pub(crate) fn engine_config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        max_model_len: 512,
        max_num_seqs: 32,
        max_num_batched_tokens: 256,
        kv_cache_bytes: 1 << 30,
    }
}

/// One completion wanted.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) max_tokens: usize,
}

impl Request {
    /// Greedy, with every log-probability that there is.
    pub(crate) fn greedy(prompt: &[u32], max_tokens: usize) -> Self {
        let sampling = SamplingParams {
            logprobs: Some(5),
            prompt_logprobs: Some(0),
            ..SamplingParams::greedy()
        };
        Self { prompt: prompt.to_vec(), sampling, max_tokens }
    }
}

/// What a request got.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Generated {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) prompt_logprobs: Vec<TokenLogprobs>,
}

/// How requests are run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// Most tokens of one sequence in one step.
    pub(crate) chunk: u32,
    /// Steps between one request's arrival and the next one's.
    pub(crate) arrival: u64,
    /// Every so many steps all sequences are preempted.
    pub(crate) preempt_every: Option<u64>,
}

impl Schedule {
    pub(crate) const WHOLE: Self = Self { chunk: u32::MAX, arrival: 0, preempt_every: None };
}

type Outcome = Result<Vec<SequenceOutput>, String>;

/// Engines of all ranks, started.
pub(crate) struct Replica {
    ranks: Vec<(Sender<Arc<StepPlan>>, Receiver<Outcome>)>,
    config: EngineConfig,
    step: u64,
    next_seq: u64,
    free_blocks: Vec<BlockId>,
}

#[derive(Debug)]
struct Live {
    seq: SeqId,
    tokens: Vec<u32>,
    computed: usize,
    blocks: Vec<BlockId>,
    admitted: bool,
    generated: Generated,
}

impl Replica {
    /// Loads the model on `tp` ranks.
    pub(crate) fn start<B: Backend + 'static>(dir: &Path, tp: u32, make: Make<B>) -> Self {
        let config = engine_config();
        let ranks = exchange::group(tp)
            .into_iter()
            .map(|collective| {
                let (plans, plan_receiver) = channel::<Arc<StepPlan>>();
                let (result_sender, results) = channel();
                let (dir, config) = (dir.to_owned(), config.clone());
                thread::spawn(move || {
                    let mut engine = start_engine(&dir, make(Box::new(collective)), config);
                    let mut outputs = Vec::new();
                    for plan in plan_receiver {
                        let result = engine.step(&plan, &mut outputs);
                        let result = result.map_err(|error| error.to_string());
                        if result_sender.send(result.map(|_| outputs.clone())).is_err() {
                            return;
                        }
                    }
                });
                (plans, results)
            })
            .collect();
        // Not in order, so that no test passes because tables are contiguous.
        let (odd, even): (Vec<_>, Vec<_>) =
            (0..NUM_BLOCKS).map(BlockId).partition(|b| b.0 % 2 == 1);
        let free_blocks = even.into_iter().chain(odd.into_iter().rev()).collect();
        Self { ranks, config, step: 0, next_seq: 0, free_blocks }
    }

    /// Runs one plan on all ranks and returns rank 0's outputs.
    pub(crate) fn step(&mut self, plan: StepPlan) -> Vec<SequenceOutput> {
        let plan = Arc::new(plan);
        for (plans, _) in &self.ranks {
            plans.send(Arc::clone(&plan)).unwrap();
        }
        let mut all: Vec<_> =
            self.ranks.iter().map(|(_, results)| results.recv().unwrap().unwrap()).collect();
        assert!(all[1..].iter().all(Vec::is_empty), "only rank 0 has outputs");
        all.swap_remove(0)
    }

    /// Runs all requests to their end.
    pub(crate) fn run(&mut self, requests: &[Request], schedule: Schedule) -> Vec<Generated> {
        let mut live: Vec<Live> = requests
            .iter()
            .map(|request| {
                self.next_seq += 1;
                Live {
                    seq: SeqId(self.next_seq),
                    tokens: request.prompt.clone(),
                    computed: 0,
                    blocks: Vec::new(),
                    admitted: false,
                    generated: Generated::default(),
                }
            })
            .collect();
        let is_done =
            |live: &Live, request: &Request| live.generated.tokens.len() >= request.max_tokens;
        let first_step = self.step;
        let mut finished = Vec::new();
        loop {
            self.step += 1;
            let since = self.step - first_step;
            if schedule.preempt_every.is_some_and(|every| since.is_multiple_of(every)) {
                for live in live.iter_mut().filter(|live| live.admitted) {
                    finished.push(live.seq);
                    self.free_blocks.append(&mut live.blocks);
                    (live.admitted, live.computed) = (false, 0);
                }
            }
            let mut plan = StepPlan {
                epoch: Epoch(1),
                step: StepId(self.step),
                finished: std::mem::take(&mut finished),
                ..StepPlan::default()
            };
            let mut budget = self.config.max_num_batched_tokens as usize;
            for (i, (live, request)) in live.iter_mut().zip(requests).enumerate() {
                let arrived = since > i as u64 * schedule.arrival;
                let fits = plan.sequences.len() < self.config.max_num_seqs as usize && budget > 0;
                if is_done(live, request) || !arrived || !fits {
                    continue;
                }
                if !live.admitted {
                    live.admitted = true;
                    plan.admitted.push(NewSequence {
                        seq: live.seq,
                        tokens: live.tokens.clone(),
                        num_prompt: request.prompt.len() as u32,
                        sampling: request.sampling.clone(),
                    });
                }
                plan.sequences.push(self.advance(live, schedule.chunk as usize, &mut budget));
            }
            if plan.sequences.is_empty() && live.iter().zip(requests).all(|(l, r)| is_done(l, r)) {
                self.step(plan);
                return live.into_iter().map(|live| live.generated).collect();
            }
            for output in self.step(plan) {
                let i = live.iter().position(|live| live.seq == output.seq).unwrap();
                live[i].take(output);
                if is_done(&live[i], &requests[i]) {
                    finished.push(live[i].seq);
                    live[i].admitted = false;
                    self.free_blocks.append(&mut live[i].blocks);
                }
            }
        }
    }

    /// The sequence's share of the next step.
    fn advance(&mut self, live: &mut Live, chunk: usize, budget: &mut usize) -> SequenceStep {
        let start = live.computed;
        let count = (live.tokens.len() - start).min(chunk).min(*budget);
        *budget -= count;
        live.computed += count;
        let wanted = live.computed.div_ceil(self.config.block_size as usize);
        let held = live.blocks.len();
        while live.blocks.len() < wanted {
            live.blocks.push(self.free_blocks.pop().unwrap());
        }
        SequenceStep {
            seq: live.seq,
            start: start as u32,
            count: count as u32,
            new_blocks: live.blocks[held..].to_vec(),
            sample: live.computed == live.tokens.len(),
        }
    }
}

impl Live {
    fn take(&mut self, output: SequenceOutput) {
        assert!(!output.corrupted);
        assert_eq!(output.position as usize, self.computed);
        // After a preemption the prompt is scored again; the scores must not change.
        let known = output.prompt_start as usize - 1;
        for (i, scored) in output.prompt_logprobs.into_iter().enumerate() {
            match self.generated.prompt_logprobs.get(known + i) {
                Some(before) => assert_eq!(*before, scored),
                None => {
                    assert_eq!(known + i, self.generated.prompt_logprobs.len());
                    self.generated.prompt_logprobs.push(scored);
                }
            }
        }
        if let Some(token) = output.token {
            self.tokens.push(token);
            self.generated.tokens.push(token);
        }
        self.generated.logprobs.extend(output.logprobs);
    }
}

/// An engine that has loaded its shard and allocated its cache.
pub(crate) fn start_engine<B: Backend>(
    dir: &Path,
    mut backend: B,
    config: EngineConfig,
) -> Engine<B> {
    let model = Model::load(&mut backend, dir, &mut |_, _| {}).unwrap();
    let clock = Arc::new(SystemClock::start());
    let mut engine = Engine::new(backend, model, config, clock).unwrap();
    engine.start(NUM_BLOCKS).unwrap();
    engine
}
