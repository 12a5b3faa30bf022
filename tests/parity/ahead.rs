//! Steps of any mix, begun while the previous step runs, on stand-ins for GPUs: prompts in chunks
//! beside decoding sequences, admissions, sequences that end late, are swapped, or come back under
//! their old ids, and sequences whose masks arrive while their step is computed. Every sequence
//! must get what it gets when steps run one after another.
use std::collections::BTreeMap;
use std::time::Duration;

use kernels::KernelError;
use kernels::collective::{Collective, local_group, single_rank};
use kernels::cuda::{CudaBackend, CudaOptions, GroupSetup};
use shared::ids::{BlockId, Epoch, HostBlockId, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KvCacheDtype, NewSequence, SequenceStep, StepPlan, Swap, SwapPair,
};
use shared::sampling::{Pooling, SamplingParams};
use testkit::models::variant;
use testkit::relay::SharedRelay;
use worker::engine::{Engine, EngineError};
use worker::rank::EmptyStepSource;

use crate::cuda::{Script, Waiting};
use crate::masks;
use crate::rig::{engine_of, fake_cuda_with, fake_nccl_backend, fake_nccl_options};

const BLOCK_SIZE: u32 = 16;
/// Blocks reserved for each sequence.
const BLOCKS: u32 = 8;
const SEQS: u32 = 10;

/// A sequence as the author of plans tracks it: computed tokens, its own blocks, and its place in
/// the cache.
#[derive(Debug, Default)]
struct Written {
    computed: u32,
    blocks: u32,
    moved: u32,
}

/// Writes plans like a coordinator that does not wait for tokens.
#[derive(Debug, Default)]
struct Author {
    written: BTreeMap<u64, Written>,
    /// Sequences whose tokens have masks.
    masked: Vec<u64>,
    script: Script,
}

fn prompt(seq: u64, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seq as u32 * 31 + i * 7) % 384).collect()
}

/// Greedy and random sequences, some with log-probabilities, some with edited logits: by fixed
/// parameters, or depending on all tokens so far.
fn sampling(seq: u64) -> SamplingParams {
    SamplingParams {
        repetition_penalty: if seq == 2 { 1.5 } else { 1.0 },
        presence_penalty: if seq == 4 { 2.0 } else { 0.0 },
        logit_bias: if seq == 5 { vec![(17, 3.0), (200, 3.0)] } else { Vec::new() },
        suppress_until_min: if seq == 3 { (0..192).collect() } else { Vec::new() },
        min_tokens: if seq == 3 { 4 } else { 0 },
        temperature: if seq.is_multiple_of(2) { 0.0 } else { 1.0 },
        top_p: if seq.is_multiple_of(3) { 0.9 } else { 1.0 },
        seed: seq + 9,
        logprobs: seq.is_multiple_of(3).then(|| seq as u32 - 3),
        ..SamplingParams::greedy()
    }
}

impl Author {
    fn new(masked: &[u64]) -> Self {
        Self { masked: masked.to_vec(), ..Self::default() }
    }

    /// Begins a plan.
    fn plan(&mut self) -> &mut Self {
        let step = StepId(self.script.plans.len() as u64 + 1);
        self.script.plans.push_back(StepPlan { epoch: Epoch(1), step, ..StepPlan::default() });
        self
    }

    fn last(&mut self) -> &mut StepPlan {
        self.script.plans.back_mut().unwrap()
    }

    fn admits(&mut self, seq: u64, len: u32) -> &mut Self {
        self.admits_with(seq, len, sampling(seq))
    }

    fn admits_with(&mut self, seq: u64, len: u32, sampling: SamplingParams) -> &mut Self {
        self.written.insert(seq, Written::default());
        let tokens = prompt(seq, len);
        let new = NewSequence { seq: SeqId(seq), tokens, num_prompt: len, adapter: 0, sampling };
        self.last().admitted.push(new);
        self
    }

    fn forgets(&mut self, seq: u64) -> &mut Self {
        self.written.remove(&seq);
        self.last().finished.push(SeqId(seq));
        self
    }

    /// Computes `count` tokens, and samples one more if `sample`.
    fn runs(&mut self, seq: u64, count: u32, sample: bool) -> &mut Self {
        let own = self.written.get_mut(&seq).unwrap();
        let start = own.computed;
        own.computed += count;
        let mut new_blocks = Vec::new();
        while own.blocks * BLOCK_SIZE < own.computed {
            new_blocks.push(BlockId(seq as u32 * BLOCKS + (own.blocks + own.moved) % BLOCKS));
            own.blocks += 1;
        }
        let masked = sample && self.masked.contains(&seq);
        if masked {
            let step = self.last().step;
            let masks = self.script.masks.entry(step).or_default();
            masks.push(Some(masks::of(seq, &[start])));
        }
        self.last().sequences.push(SequenceStep {
            seq: SeqId(seq),
            start,
            count,
            new_blocks,
            sample,
            masked,
            drafts: Drafts::none(),
        });
        self
    }

    fn decodes(&mut self, seqs: &[u64]) -> &mut Self {
        seqs.iter().for_each(|seq| {
            self.runs(*seq, 1, true);
        });
        self
    }

    fn pairs(&self, seq: u64) -> Swap {
        let own = &self.written[&seq];
        let blocks = (0..own.blocks).map(|at| SwapPair {
            device: BlockId(seq as u32 * BLOCKS + (at + own.moved) % BLOCKS),
            host: HostBlockId(seq as u32 * BLOCKS + at),
        });
        Swap { seq: SeqId(seq), blocks: blocks.collect() }
    }

    fn leaves(&mut self, seq: u64) -> &mut Self {
        let swap = self.pairs(seq);
        self.last().swap_out.push(swap);
        self
    }

    /// Swaps a sequence in, to different blocks.
    fn comes_back(&mut self, seq: u64) -> &mut Self {
        self.written.get_mut(&seq).unwrap().moved += 3;
        let swap = self.pairs(seq);
        self.last().swap_in.push(swap);
        self.written.get_mut(&seq).unwrap().blocks = 0;
        self.runs(seq, 1, true)
    }
}

/// Steps of every kind, with the numbers of those that can be begun while the previous step runs.
fn mixed(masked: &[u64]) -> (Script, Vec<u64>) {
    let mut author = Author::new(masked);
    author.plan().admits(1, 5).admits(2, 20).runs(1, 5, true).runs(2, 20, true);
    // A prompt in three chunks; another one, whole, beside it.
    author.plan().decodes(&[1, 2]).admits(3, 40).runs(3, 16, false);
    author.plan().decodes(&[2, 1]).runs(3, 16, false).admits(4, 7).runs(4, 7, true);
    author.plan().decodes(&[1, 2, 4]).runs(3, 8, true);
    author.plan().decodes(&[1, 2, 3, 4]);
    author.plan().decodes(&[1, 2, 3, 4]);
    // The token of 1 in flight is its last, which is found out late; 2 has no share.
    author.plan().forgets(1).decodes(&[4, 3]);
    // Nothing is sampled.
    author.plan().admits(5, 30).runs(5, 10, false);
    author.plan().decodes(&[2, 3, 4]).runs(5, 20, true);
    // 4 is swapped out with its token in flight, and comes back to other blocks.
    author.plan().leaves(4).decodes(&[2, 3, 5]);
    author.plan().decodes(&[5, 2, 3]).admits(6, 33).runs(6, 33, true);
    author.plan().comes_back(4).decodes(&[2, 3, 5, 6]);
    // One is swapped out and another in, in the same step.
    author.plan().leaves(6).decodes(&[2, 3, 4, 5]);
    author.plan().leaves(5).comes_back(6).decodes(&[2, 3, 4]);
    author.plan().comes_back(5).decodes(&[6, 4, 2, 3]);
    // Preempted with its token in flight, and admitted again a step later.
    author.plan().forgets(3).decodes(&[2, 4, 5, 6]);
    author.plan().admits(3, 48).decodes(&[2, 4, 5, 6]).runs(3, 30, false);
    author.plan().decodes(&[2, 4, 5, 6]).runs(3, 18, true);
    let begun = (2..=author.script.plans.len() as u64).collect();
    (author.script, begun)
}

/// Steps that need the host, or the previous token, each among others that do not.
fn hindered(masked: &[u64]) -> (Script, Vec<u64>) {
    let mut author = Author::new(masked);
    author.plan().admits(1, 5).runs(1, 5, true);
    // Log-probabilities of a prompt's chunks. The last position's are another prompt's, or none.
    let scored = SamplingParams { prompt_logprobs: Some(1), ..sampling(2) };
    author.plan().decodes(&[1]).admits_with(2, 20, scored).runs(2, 10, false);
    author.plan().decodes(&[1]).runs(2, 10, true);
    author.plan().decodes(&[1, 2]);
    author.plan().decodes(&[1, 2]);
    // An embedding.
    let pooled = SamplingParams { pooling: Some(Pooling::Mean), ..SamplingParams::greedy() };
    author.plan().decodes(&[1, 2]).admits_with(3, 9, pooled).runs(3, 9, false);
    author.plan().forgets(3).decodes(&[1, 2]);
    author.plan().decodes(&[1, 2]);
    // Drafts.
    author.plan().runs(1, 3, true).decodes(&[2]);
    author.last().sequences[0].drafts = vec![383, 1].into();
    author.written.get_mut(&1).unwrap().computed -= 2;
    author.plan().decodes(&[2]);
    author.plan().decodes(&[2]);
    // Its id is given to another sequence while its token is in flight.
    author.plan().forgets(2).admits(2, 6).runs(2, 6, true);
    author.plan().decodes(&[2]);
    // An empty step.
    author.plan();
    author.plan().decodes(&[2]);
    author.plan().decodes(&[2]).admits(4, 3).runs(4, 3, true);
    (author.script, vec![5, 8, 11, 13, 16])
}

fn started(backend: CudaBackend, rank: u32, degree: u32) -> Engine<CudaBackend> {
    let sizes = EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: BLOCKS * BLOCK_SIZE,
        max_num_seqs: SEQS,
        max_num_batched_tokens: 64,
        kv_cache_bytes: 1 << 30,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let mut engine = engine_of(&variant("llama-gqa"), rank, degree, backend, sizes).unwrap();
    if degree > 1 {
        engine.backend().set_alone(true);
        engine.profile().unwrap();
        engine.backend().set_alone(false);
    }
    engine.start(SEQS * BLOCKS, SEQS * BLOCKS).unwrap();
    engine
}

fn engine(graphs: bool) -> Engine<CudaBackend> {
    let options = CudaOptions { graphs, ..CudaOptions::default() };
    started(fake_cuda_with(options, single_rank()), 0, 1)
}

/// All outputs of a sequence at one position: the token, and the bits of numbers.
type Said = (u64, u32, Option<u32>, Vec<u32>);

/// Runs the plans; returns the outputs, and the steps begun while the previous one ran.
fn run(engine: &mut Engine<CudaBackend>, script: &Script, ahead: bool) -> (Vec<Said>, Vec<u64>) {
    let (mut said, mut begun) = (Vec::new(), Vec::new());
    let mut source = Waiting::new(script, !ahead);
    while let Some(plan) = source.plans.pop_front() {
        let (mut outputs, before) = (Vec::new(), engine.begun_ahead());
        engine.step(&plan, &mut source, &mut outputs).unwrap();
        if engine.begun_ahead() > before {
            begun.push(source.plans.front().unwrap().step.0);
        }
        for output in outputs {
            let scores = output.logprobs.iter().chain(&output.prompt_logprobs);
            let bits = scores.flat_map(|it| [it.token, it.logprob.to_bits()]);
            let embedding = output.embedding.iter().map(|value| value.to_bits());
            let bits = bits.chain(embedding).collect();
            assert!(!output.corrupted);
            said.push((output.seq.0, output.position, output.token, bits));
        }
    }
    (said, begun)
}

/// Checks that every expected token occurs once, in the order of plans, and is allowed by its mask.
fn complete(script: &Script, said: &[Said]) {
    let plans = &script.plans;
    let shares = plans.iter().flat_map(|plan| &plan.sequences);
    let due = shares.filter(|entry| entry.sample && entry.drafts.is_empty());
    let due: Vec<_> = due.map(|entry| (entry.seq.0, entry.start + entry.count)).collect();
    let drafting: Vec<_> = plans.iter().flat_map(|plan| &plan.sequences).collect();
    let is_drafted = |seq: u64, position: u32| {
        drafting.iter().any(|entry| {
            let range = entry.start + 1..=entry.start + entry.count;
            !entry.drafts.is_empty() && entry.seq.0 == seq && range.contains(&position)
        })
    };
    let tokens = said.iter().filter(|said| said.2.is_some() && !is_drafted(said.0, said.1));
    let tokens: Vec<_> = tokens.map(|(seq, position, ..)| (*seq, *position)).collect();
    assert_eq!(tokens, due);
    for plan in plans {
        let mut masks = script.masks.get(&plan.step).into_iter().flatten();
        for entry in plan.sequences.iter().filter(|entry| entry.masked) {
            let mask = masks.next().unwrap().as_ref().unwrap();
            // An id may be reused.
            let own = |said: &&Said| (said.0, said.1) == (entry.seq.0, entry.start + entry.count);
            let mut tokens = said.iter().filter(own).filter_map(|said| said.2);
            assert!(tokens.any(|token| mask.allows(token)), "{} of {}", entry.seq, plan.step);
        }
    }
}

#[test]
fn steps_of_any_mix_are_begun_behind_each_other_and_give_the_same_tokens() {
    for (graphs, masked) in [
        (true, &[][..]),
        (false, &[]),
        (true, &[3]),
        (true, &[2, 5]),
        (false, &[2, 5]),
        (true, &[1, 2, 3, 4, 5, 6]),
    ] {
        let (plans, expected) = mixed(masked);
        let (known, begun) = run(&mut engine(graphs), &plans, true);
        assert_eq!(begun, expected, "graphs: {graphs}, masked: {masked:?}");
        let (one_by_one, none) = run(&mut engine(graphs), &plans, false);
        assert!(none.is_empty());
        complete(&plans, &one_by_one);
        assert_eq!(known, one_by_one, "graphs: {graphs}, masked: {masked:?}");
        let tokens: std::collections::HashSet<_> = known.iter().map(|said| said.2).collect();
        assert!(tokens.len() > 8, "{tokens:?}");
    }
}

#[test]
fn steps_that_need_their_host_or_the_token_before_wait() {
    for masked in [&[][..], &[2], &[4]] {
        let (plans, expected) = hindered(masked);
        let (known, begun) = run(&mut engine(true), &plans, true);
        assert_eq!(begun, expected, "{masked:?}");
        let (one_by_one, _) = run(&mut engine(true), &plans, false);
        complete(&plans, &one_by_one);
        assert_eq!(known, one_by_one, "{masked:?}");
        assert!(known.iter().any(|said| said.2.is_none() && said.3.len() > 20), "an embedding");
    }
}

/// An epoch ends with a step of any kind begun; nothing of it carries over to the next epoch.
#[test]
fn an_epoch_may_end_with_any_step_begun() {
    let (plans, _) = mixed(&[2, 5]);
    let mut engine = engine(true);
    let (expected, _) = run(&mut engine, &plans, false);
    // Behind them prompts begin, go on and end, and sequences end, leave and come back.
    for ended in [1, 2, 3, 6, 9, 10, 11, 13, 15, 17] {
        engine.start(SEQS * BLOCKS, SEQS * BLOCKS).unwrap();
        let mut source = Waiting::new(&plans, false);
        let before = engine.begun_ahead();
        for _ in 0..ended {
            let plan = source.plans.pop_front().unwrap();
            engine.step(&plan, &mut source, &mut Vec::new()).unwrap();
        }
        assert_eq!(engine.begun_ahead() - before, ended as u64, "begun behind step {ended}");
        engine.release();
    }
    engine.start(SEQS * BLOCKS, SEQS * BLOCKS).unwrap();
    let (again, _) = run(&mut engine, &plans, true);
    assert_eq!(again, expected);
}

/// A plan that does not fit is an error of the step during which it was looked at.
#[test]
fn a_plan_that_does_not_fit_ends_the_epoch_also_ahead() {
    let (plans, _) = mixed(&[2]);
    let mut engine = engine(true);
    let mut source = Waiting::new(&plans, false);
    source.plans[1].sequences[2].new_blocks = vec![BlockId(SEQS * BLOCKS)];
    let first = source.plans.pop_front().unwrap();
    let error = engine.step(&first, &mut source, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("step 2: seq-3 is given block-80 of 80"), "{error}");
    engine.start(SEQS * BLOCKS, SEQS * BLOCKS).unwrap();
    let (again, _) = run(&mut engine, &plans, true);
    assert_eq!(again, run(&mut self::engine(true), &plans, false).0);
}

/// One rank learns of the next step earlier than the other, or neither does in time.
#[test]
fn ranks_begin_mixed_steps_alike_whenever_they_learn_of_them() {
    let one = [true, false];
    let other = [false, true];
    ranks_begin_alike(&[2, 5], &[[true, true], one]);
    ranks_begin_alike(&[], &[one]);
    ranks_begin_alike(&[1, 2, 3, 4, 5, 6], &[other]);
}

fn ranks_begin_alike(masked: &[u64], who_knows: &[[bool; 2]]) {
    let (plans, expected) = mixed(masked);
    let plans = &plans;
    let run_both = |ahead: [bool; 2]| {
        let group = local_group(2, Duration::from_secs(60)).unwrap();
        let relay = SharedRelay::default();
        let one = |rank: u32, collective: Box<dyn Collective>, relay: SharedRelay| {
            let mut engine = started(fake_nccl_backend(rank, collective, relay), rank, 2);
            let (said, begun) = run(&mut engine, plans, ahead[rank as usize]);
            (said, begun, engine.digest())
        };
        let one = &one;
        let results: Vec<_> = std::thread::scope(|scope| {
            let ranks = (0u32..).zip(group);
            let threads: Vec<_> = ranks
                .map(|(rank, collective)| {
                    let relay = relay.clone();
                    scope.spawn(move || one(rank, collective, relay))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for ((_, begun, _), ahead) in results.iter().zip(ahead) {
            assert_eq!(*begun, if ahead { expected.clone() } else { Vec::new() });
        }
        assert_eq!(results[0].2, results[1].2, "ranks have other tokens");
        assert!(results[1].0.is_empty(), "only rank 0 tells tokens");
        results[0].0.clone()
    };
    let known = run_both([false, false]);
    complete(plans, &known);
    for &ahead in who_knows {
        assert_eq!(run_both(ahead), known, "{ahead:?}, masked: {masked:?}");
    }
}

/// The other rank does not join the step that this one has begun: aborting the epoch frees this
/// rank, and its device works in the next epoch.
#[test]
fn a_mixed_step_that_waits_for_another_rank_is_aborted() {
    const COME: usize = 3;
    let (plans, _) = mixed(&[]);
    let plans = &plans;
    let group = local_group(2, Duration::from_secs(60)).unwrap();
    let relay = SharedRelay::default();
    let joined = |rank: u32, collective: Box<dyn Collective>, mut relay: SharedRelay| {
        let mut handles = Vec::new();
        let mut backend = CudaBackend::new(fake_nccl_options(rank), collective).unwrap();
        let setup = GroupSetup {
            timeout: Duration::from_secs(60),
            is_given_up: &|| false,
            relay: &mut relay,
            on_abort_handle: &mut |handle| handles.push(handle),
        };
        assert_eq!(backend.join(setup).unwrap().algorithm, "nccl");
        (started(backend, rank, 2), handles)
    };
    std::thread::scope(|scope| {
        let mut ranks = group.into_iter();
        let (here, there) = (ranks.next().unwrap(), ranks.next().unwrap());
        let other = relay.clone();
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        let leaver = scope.spawn(move || {
            let (mut engine, _) = joined(1, there, other);
            for plan in plans.plans.iter().take(COME) {
                engine.step(plan, &mut EmptyStepSource, &mut Vec::new()).unwrap();
            }
            let _ = is_over.recv();
        });
        let (mut engine, handles) = joined(0, here, relay);
        let mut source = Waiting::new(plans, false);
        for _ in 0..COME {
            let plan = source.plans.pop_front().unwrap();
            engine.step(&plan, &mut source, &mut Vec::new()).unwrap();
        }
        assert_eq!(engine.begun_ahead(), COME as u64);
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            handles.iter().for_each(|handle| handle.abort());
        });
        // The step is begun; no other rank joins it.
        let plan = source.plans.pop_front().unwrap();
        let error = engine.step(&plan, &mut source, &mut Vec::new()).unwrap_err();
        let is_aborted = matches!(&error, EngineError::Kernel(KernelError::Collective(_)));
        assert!(is_aborted, "{error}");
        engine.backend().set_collective(single_rank()).unwrap();
        engine.release();
        drop(over);
        leaver.join().unwrap();
    });
}
