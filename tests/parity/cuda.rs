//! The CUDA backend on the stand-in for NVIDIA's driver, with emulated kernels: all host code runs
//! as it would with a GPU, and the kernels' own sources compute. No GPU has run this.
//! The inputs of products are rounded to bf16, so log-probabilities are compared with a larger
//! tolerance than on CPUs, and greedy tokens only where the golden's choice was clear.
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::Duration;

use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use kernels::KernelError;
use kernels::backend::prelude::*;
use kernels::backend::{KvShape, KvStorage};
use kernels::collective::single_rank;
use kernels::cuda::bucket::decode_buckets;
use kernels::cuda::held::is_gpu_held;
use kernels::cuda::{CudaBackend, CudaOptions};
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KvCacheDtype, NewSequence, SequenceStep, StepPlan, TokenMask,
};
use worker::engine::Engine;
use worker::rank::{EmptyStepSource, StepSource};

use crate::checkpoint::Folder;
use crate::goldens::follow;
use crate::masks;
use crate::rig::{HANGING, On, Rig, engine_of, fake_cuda_backend, fake_cuda_with};

/// Largest error of a log-probability.
const TOLERANCE: f64 = 0.1;

pub(crate) fn check(on: On, model: &Path, degree: u32, prompts: usize, output: usize) {
    let mut rig = Rig::on(on, model, degree);
    let (mut worst, mut compared) = (0.0f64, 0);
    for golden in goldens(model).iter().take(prompts) {
        let at = format!("{} at tp {degree}", golden.name);
        let found = follow(&mut rig, golden, output, TOLERANCE, &at);
        worst = worst.max(found.worst);
        compared += found.compared as usize;
    }
    println!("{} tp {degree}: {compared} tokens, worst error {worst:.1e}", model.display());
    assert!(compared >= prompts * 4, "{compared} tokens compared");
}

macro_rules! variants {
    ($($test:ident: $folder:literal, $degree:literal;)*) => {
        $(#[test]
        fn $test() {
            check(On::FakeCuda, &variant($folder), $degree, 2, 12);
        })*
    };
}

variants! {
    llama_gqa: "llama-gqa", 1;
    llama_gqa_tp2: "llama-gqa", 2;
    llama_tied: "llama-tied", 1;
    llama3_rope: "llama3-rope", 1;
    llama_mha_bias: "llama-mha-bias", 1;
    qwen2: "qwen2", 1;
    qwen3: "qwen3", 1;
    mistral_swa: "mistral-swa", 1;
    phi3: "phi3", 1;
    phi4_mini_tp2: "phi4-mini", 2;
    qwen3_yarn: "qwen3-yarn", 1;
    smollm3: "smollm3", 1;
    granite_tp2: "granite", 2;
    seed_oss: "seed-oss", 1;
    mistral3_tp2: "mistral3", 2;
    glm4: "glm4", 1;
    exaone4_tp2: "exaone4", 2;
    olmo2_tp2: "olmo2", 2;
    cohere2_tp2: "cohere2", 2;
    starcoder2: "starcoder2", 1;
    nemotron: "nemotron", 1;
    ministral3_tp2: "ministral3", 2;
    granite_4_tp2: "granite-4", 2;
    granite_4_h_tp2: "granite-4-h", 2;
    granite_4_h_moe: "granite-4-h-moe", 1;
    gemma2_tp2: "gemma2", 2;
    gemma3: "gemma3", 1;
    gemma3_tp2: "gemma3", 2;
    mixtral: "mixtral", 1;
    mixtral_tp2: "mixtral", 2;
    qwen2_moe_tp2: "qwen2-moe", 2;
    glm4_moe: "glm4-moe", 1;
    deepseek_v2: "deepseek-v2", 1;
    deepseek_v3_tp2: "deepseek-v3", 2;
    glm4_moe_lite: "glm4-moe-lite", 1;
    hy_v3_tp2: "hy-v3", 2;
    minimax_m2_tp2: "minimax-m2", 2;
    qwen3_moe: "qwen3-moe", 1;
    qwen3_moe_stacked_tp2: "qwen3-moe-stacked", 2;
    qwen3_vl_moe: "qwen3-vl-moe", 1;
    qwen3_5: "qwen3_5", 1;
    qwen3_next_tp2: "qwen3-next", 2;
    gpt_oss: "gpt-oss", 1;
    gpt_oss_tp2: "gpt-oss", 2;
    gpt_oss_mxfp4: "gpt-oss-mxfp4", 1;
}

#[test]
fn demo_model() {
    check(On::FakeCuda, &demo(), 1, 1, 4);
}

pub(crate) const BLOCK_SIZE: u32 = 16;
pub(crate) const BLOCKS: u32 = 64;

fn engine(graphs: bool) -> Engine<CudaBackend> {
    engine_with(fake_cuda_backend(graphs, single_rank()))
}

pub(crate) fn engine_with(backend: CudaBackend) -> Engine<CudaBackend> {
    engine_on("llama-gqa", backend)
}

pub(crate) fn engine_on(model: &str, backend: CudaBackend) -> Engine<CudaBackend> {
    let sizes = EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: 256,
        max_num_seqs: 80,
        max_num_batched_tokens: 768,
        kv_cache_bytes: 1 << 30,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let mut engine = engine_of(&variant(model), 0, 1, backend, sizes).unwrap();
    engine.start(BLOCKS * 80, 0).unwrap();
    engine
}

/// With room for its largest steps, without which graphs are lost to the first one that needs more:
/// computing them takes an emulation longer than all else here.
fn with_room(mut engine: Engine<CudaBackend>) -> Engine<CudaBackend> {
    engine.profile().unwrap();
    engine.start(BLOCKS * 80, 0).unwrap();
    engine
}

/// A sequence of this test: its tokens, and where its next step begins.
struct Running {
    seq: SeqId,
    tokens: Vec<u32>,
    computed: u32,
    blocks: u32,
    sampling: SamplingParams,
}

impl Running {
    fn new(index: u32, sampling: SamplingParams) -> Self {
        let tokens = (0..1 + index % 19).map(|i| (index * 31 + i * 7) % 384).collect();
        Self { seq: SeqId(u64::from(index) + 1), tokens, computed: 0, blocks: 0, sampling }
    }
}

/// The next step of some sequences, up to their last tokens.
fn plan(number: &mut u64, running: &mut [&mut Running]) -> StepPlan {
    *number += 1;
    let mut plan = StepPlan { epoch: Epoch(1), step: StepId(*number), ..StepPlan::default() };
    for seq in running.iter_mut() {
        let len = seq.tokens.len() as u32;
        if seq.computed == 0 {
            plan.admitted.push(NewSequence {
                seq: seq.seq,
                tokens: seq.tokens.clone(),
                num_prompt: len,
                adapter: 0,
                sampling: seq.sampling.clone(),
            });
        }
        let mut new_blocks = Vec::new();
        while seq.blocks * BLOCK_SIZE < len {
            new_blocks.push(BlockId((seq.seq.0 as u32 - 1) * BLOCKS + seq.blocks));
            seq.blocks += 1;
        }
        let (start, count) = (seq.computed, len - seq.computed);
        plan.sequences.push(SequenceStep {
            seq: seq.seq,
            start,
            count,
            new_blocks,
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        });
        seq.computed = len;
    }
    plan
}

/// Runs one step of some sequences; appends all log-probabilities to `seen`.
fn step(
    engine: &mut Engine<CudaBackend>,
    number: &mut u64,
    running: &mut [&mut Running],
    seen: &mut Vec<(u64, u32, u32)>,
) {
    let plan = plan(number, running);
    let mut outputs = Vec::new();
    engine.step(&plan, &mut EmptyStepSource, &mut outputs).unwrap();
    for (seq, output) in running.iter_mut().zip(outputs) {
        assert!(output.seq == seq.seq && !output.corrupted);
        let token = output.token.unwrap();
        assert!(token < 384, "{token}");
        seq.tokens.push(token);
        let logprob = output.logprobs.map_or(0, |logprobs| logprobs.logprob.to_bits());
        seen.push((seq.seq.0, token, logprob));
    }
}

/// Batches that grow, shrink and mix prefill with decode; greedy, random, and with edited logits.
fn run_batches(model: &str, graphs: bool, sizes: &[usize]) -> (Vec<(u64, u32, u32)>, usize) {
    run_batches_with(model, CudaOptions { graphs, ..CudaOptions::default() }, sizes)
}

fn run_batches_with(
    model: &str,
    options: CudaOptions,
    sizes: &[usize],
) -> (Vec<(u64, u32, u32)>, usize) {
    let mut engine = with_room(engine_on(model, fake_cuda_with(options, single_rank())));
    let sampling = |index: u32| SamplingParams {
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
        top_p: if index.is_multiple_of(3) { 0.8 } else { 1.0 },
        seed: u64::from(index),
        logprobs: Some(0),
        ..SamplingParams::greedy()
    };
    let mut all: Vec<Running> = (0..70).map(|i| Running::new(i, sampling(i))).collect();
    let (mut seen, mut number) = (Vec::new(), 0);
    for size in sizes {
        let mut batch: Vec<&mut Running> = all.iter_mut().take(*size).collect();
        step(&mut engine, &mut number, &mut batch, &mut seen);
    }
    let made = engine.backend().num_graphs();
    (seen, made)
}

#[test]
fn graphs_give_the_bits_of_single_calls() {
    let sizes =
        [1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 2, 2, 9, 9, 9, 9, 70, 70, 70, 70, 5, 5, 5].as_slice();
    let (eager, none) = run_batches("llama-gqa", false, sizes);
    let (graphs, made) = run_batches("llama-gqa", true, sizes);
    assert_eq!(none, 0);
    // Buckets 1, 4 (for 3 and 4), 12, 70.
    assert!(made >= 4, "{made} graphs");
    assert_eq!(eager.len(), graphs.len());
    for (i, (eager, graph)) in eager.iter().zip(&graphs).enumerate() {
        assert_eq!(eager, graph, "result {i}");
    }
}

/// An engine whose steps change their size takes the memory, and has the graphs, of one that was
/// loaded for such steps.
#[test]
fn steps_of_another_size_need_what_they_need_from_the_start() {
    let sizes = |tokens| EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: 64,
        max_num_seqs: 16,
        max_num_batched_tokens: tokens,
        kv_cache_bytes: 1 << 30,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let made = |tokens| {
        let backend = fake_cuda_backend(true, single_rank());
        engine_of(&variant("llama-gqa"), 0, 1, backend, sizes(tokens)).unwrap()
    };
    // Free memory after the largest steps, and the number of graphs.
    let measured = |engine: &mut Engine<CudaBackend>| {
        engine.profile().unwrap();
        engine.backend().settle().unwrap();
        let (free, _) = engine.backend().memory().unwrap();
        engine.start(BLOCKS, 0).unwrap();
        let rows = decode_buckets(engine.config().max_num_batched_tokens.min(16));
        engine.warm(&rows, Duration::from_secs(600)).unwrap();
        (free, engine.backend().num_graphs())
    };
    // One after the other: each has the GPU for itself.
    let few = measured(&mut made(4));
    let many = measured(&mut made(512));
    assert!(few.0 > many.0 && few.1 < many.1, "{few:?}, {many:?}");
    let mut engine = made(4);
    assert_eq!(measured(&mut engine), few);
    for (tokens, expected) in [(512, many), (4, few), (512, many)] {
        engine = engine.resized(sizes(tokens)).unwrap();
        assert_eq!(measured(&mut engine), expected, "steps of {tokens} tokens");
    }
}

/// No step is captured after the first request, whatever the number and the lengths of sequences.
#[test]
fn no_step_of_any_number_and_length_is_captured_after_the_start() {
    const LENGTHS: [u32; 8] = [1, 63, 64, 65, 200, 127, 30, 5];
    let run = |engine: &mut Engine<CudaBackend>| {
        let mut all: Vec<Running> = (0..)
            .zip(LENGTHS)
            .map(|(index, length)| {
                let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
                let tokens = (0..length).map(|at| (index * 31 + at * 7) % 384).collect();
                Running { tokens, ..Running::new(index, sampling) }
            })
            .collect();
        let (mut seen, mut number) = (Vec::new(), 0);
        for size in [8, 8, 1, 5, 3, 8, 2, 6, 8] {
            let mut batch: Vec<&mut Running> = all.iter_mut().take(size).collect();
            step(engine, &mut number, &mut batch, &mut seen);
        }
        seen
    };
    let buckets = decode_buckets(80);
    let mut warm = with_room(engine(true));
    assert_eq!(warm.warm(&buckets, Duration::ZERO).unwrap().kinds, 0);
    assert_eq!(warm.backend().num_graphs(), 0);
    let warmed = warm.warm(&buckets, Duration::from_secs(600)).unwrap();
    assert_eq!((warmed.kinds, warmed.of), (buckets.len(), buckets.len()));
    assert_eq!(warm.backend().num_graphs(), buckets.len());
    let seen = run(&mut warm);
    assert_eq!(warm.backend().num_graphs(), buckets.len());
    assert_eq!(seen, run(&mut engine(false)));
}

/// Sequences of several parts, where windows leave fewer parts, one, or all: full and sliding
/// layers each read their own list.
#[test]
fn long_sequences_are_split_by_each_layers_window() {
    let mixed = Folder::copy_of("qwen3");
    mixed.configure("sliding_window", 70.into());
    mixed.configure("use_sliding_window", true.into());
    mixed.configure("max_window_layers", 1.into());
    for (model, lengths) in [(variant("mistral-swa"), [130, 300]), (mixed.path().into(), [64, 290])]
    {
        let [expected, found] = [On::Cpu, On::FakeCuda].map(|on| {
            let mut rig = Rig::on(on, &model, 1);
            let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
            let mut seqs = lengths.map(|length| {
                let tokens: Vec<u32> = (0..length).map(|at| (at * at + 7 * at) % 384).collect();
                rig.sequence(&tokens, tokens.len(), sampling.clone())
            });
            for _ in 0..7 {
                rig.step(&mut seqs.each_mut(), u32::MAX);
            }
            seqs.map(|seq| (seq.output().to_vec(), seq.logprobs))
        });
        for ((tokens, logprobs), (others, found)) in expected.iter().zip(&found) {
            let alike = tokens.iter().zip(others).take_while(|(one, other)| one == other).count();
            assert!(alike >= 4, "{model:?}: {tokens:?}, {others:?}");
            for (one, other) in logprobs.iter().zip(found).take(alike) {
                let error = (f64::from(*one) - f64::from(*other)).abs();
                assert!(error < TOLERANCE, "{model:?}: {one}, {other}");
            }
        }
    }
}

/// Rows choose experts anew in every step, and a graph has more rows than are live.
#[test]
fn graphs_with_experts_give_the_bits_of_single_calls() {
    let sizes = [1, 1, 1, 3, 3, 3, 4, 2, 24, 24, 24, 5].as_slice();
    let (eager, _) = run_batches("mixtral", false, sizes);
    let (graphs, made) = run_batches("mixtral", true, sizes);
    assert!(made >= 3, "{made} graphs");
    assert_eq!(eager, graphs);
    // Also with several chunks of slots per graph, the last of which may have no live rows.
    let options = CudaOptions { expert_slots: 16, ..CudaOptions::default() };
    let (chunks, made) = run_batches_with("mixtral", options, sizes);
    assert!(made >= 3, "{made} graphs");
    assert_eq!(eager, chunks);
}

#[test]
fn a_sequence_gets_the_same_bits_alone_and_among_others() {
    let sampling = |_| SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
    let run = |others: u32| {
        let mut engine = engine(true);
        let mut all: Vec<Running> =
            (0..=others).map(|i| Running::new(i + 5, sampling(i))).collect();
        let mut number = 0;
        let mut seen = Vec::new();
        for _ in 0..6 {
            let mut batch: Vec<&mut Running> = all.iter_mut().collect();
            step(&mut engine, &mut number, &mut batch, &mut seen);
        }
        seen.retain(|(seq, ..)| *seq == 6);
        seen
    };
    assert_eq!(run(0), run(13));
}

#[test]
fn edited_logits_and_lists_of_likely_tokens_come_back_right() {
    let mut engine = engine(true);
    let edited = SamplingParams {
        logit_bias: vec![(7, 100.0)],
        frequency_penalty: 0.5,
        repetition_penalty: 1.2,
        logprobs: Some(3),
        ..SamplingParams::greedy()
    };
    let plain = SamplingParams { logprobs: Some(5), ..SamplingParams::greedy() };
    let mut all = [Running::new(3, edited), Running::new(4, plain)];
    let mut number = 0;
    for _ in 0..3 {
        let mut batch: Vec<&mut Running> = all.iter_mut().collect();
        step(&mut engine, &mut number, &mut batch, &mut Vec::new());
    }
    // The bias outweighs the penalties.
    assert_eq!(all[0].tokens[all[0].tokens.len() - 3..], [7, 7, 7]);
}

/// Plans, and the masks of their masked entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    pub(crate) plans: VecDeque<StepPlan>,
    pub(crate) masks: BTreeMap<StepId, Vec<Option<TokenMask>>>,
}

/// A source that has the whole script from the start, or never has the next plan in time.
pub(crate) struct Waiting {
    pub(crate) plans: VecDeque<StepPlan>,
    masks: BTreeMap<StepId, Vec<Option<TokenMask>>>,
    is_hidden: bool,
}

impl Waiting {
    pub(crate) fn new(script: &Script, is_hidden: bool) -> Self {
        let Script { plans, masks } = script.clone();
        Self { plans, masks, is_hidden }
    }
}

impl StepSource for Waiting {
    fn peek(&mut self) -> Option<&StepPlan> {
        self.plans.front().filter(|_| !self.is_hidden)
    }

    fn masks(&mut self, step: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        // If a step was begun ahead, its plan has already been taken: the previous step was
        // reported.
        assert!(self.plans.front().is_none_or(|next| next.step > step), "{step}");
        self.masks.remove(&step).ok_or_else(|| format!("{step} has no masks, or had them"))
    }
}

/// Steps of six sequences, two of which leave, in changing order: their prompts, then decode.
pub(crate) fn plans() -> Script {
    plans_with(&[])
}

/// The same, but with masks on the tokens of some sequences after their prompts.
pub(crate) fn plans_with(masked: &[usize]) -> Script {
    let sampling = |index: u32| SamplingParams {
        temperature: if index.is_multiple_of(2) { 0.0 } else { 1.0 },
        seed: u64::from(index) + 9,
        logprobs: index.is_multiple_of(3).then_some(0),
        ..SamplingParams::greedy()
    };
    let mut all: Vec<Running> = (0..6).map(|i| Running::new(i + 2, sampling(i))).collect();
    let mut number = 0;
    let mut batch: Vec<&mut Running> = all.iter_mut().collect();
    let mut script =
        Script { plans: VecDeque::from([plan(&mut number, &mut batch)]), ..Script::default() };
    for i in 0..12u32 {
        number += 1;
        let mut plan = StepPlan { epoch: Epoch(1), step: StepId(number), ..StepPlan::default() };
        let mut order: Vec<usize> = match i {
            0..4 => (0..6).collect(),
            4..8 => vec![5, 0, 3, 2],
            _ => vec![2, 3],
        };
        if i == 4 {
            plan.finished = vec![all[1].seq, all[4].seq];
        }
        if i == 9 {
            // An empty step: nothing can be begun after or before it.
            order.clear();
        }
        for index in order {
            let is_masked = masked.contains(&index);
            if is_masked {
                let masks = script.masks.entry(plan.step).or_default();
                // Occasionally a masked sequence whose mask no longer matters.
                let ends = i == 3 && masks.is_empty();
                masks.push((!ends).then(|| masks::of(index as u64, &[i])));
            }
            let seq = &mut all[index];
            let start = seq.computed;
            let mut new_blocks = Vec::new();
            while seq.blocks * BLOCK_SIZE < start + 1 {
                new_blocks.push(BlockId((seq.seq.0 as u32 - 1) * BLOCKS + seq.blocks));
                seq.blocks += 1;
            }
            seq.computed += 1;
            plan.sequences.push(SequenceStep {
                seq: seq.seq,
                start,
                count: 1,
                new_blocks,
                sample: true,
                masked: is_masked,
                drafts: Drafts::none(),
            });
        }
        script.plans.push_back(plan);
    }
    script
}

/// Runs the script, with the next plan known or not; returns every token with its log-probability's
/// bits.
pub(crate) fn run_plans(
    engine: &mut Engine<CudaBackend>,
    script: &Script,
    ahead: bool,
) -> Vec<(u64, u32, u32)> {
    let mut seen = Vec::new();
    let mut source = Waiting::new(script, !ahead);
    while let Some(plan) = source.plans.pop_front() {
        let mut outputs = Vec::new();
        engine.step(&plan, &mut source, &mut outputs).unwrap();
        if outputs.is_empty() {
            // Another rank reports it.
            continue;
        }
        assert_eq!(outputs.len(), plan.sequences.len());
        for (output, entry) in outputs.iter().zip(&plan.sequences) {
            let position = entry.start + entry.count;
            assert_eq!((output.seq, output.position), (entry.seq, position));
            let logprob = output.logprobs.as_ref().map_or(0, |all| all.logprob.to_bits());
            seen.push((output.seq.0, output.token.unwrap(), logprob));
        }
    }
    seen
}

/// Masked sequences among others: results do not depend on what is begun ahead, and masked
/// sequences are in every step.
#[test]
fn masked_steps_are_begun_ahead_and_give_the_same_tokens() {
    let unmasked = run_plans(&mut engine(true), &plans(), true);
    for masked in [&[2usize][..], &[0, 3], &[0, 1, 2, 3, 4, 5]] {
        let script = plans_with(masked);
        let allowed: Vec<_> = script
            .plans
            .iter()
            .flat_map(|plan| {
                let mut masks = script.masks.get(&plan.step).into_iter().flatten();
                let next = move |entry: &SequenceStep| match entry.masked {
                    true => masks.next().unwrap().clone(),
                    false => None,
                };
                plan.sequences.iter().map(next).collect::<Vec<_>>()
            })
            .collect();
        let mut engine = engine(true);
        let known = run_plans(&mut engine, &script, true);
        assert_eq!(engine.begun_ahead(), 10, "{masked:?}");
        let mut engine = self::engine(false);
        assert_eq!(known, run_plans(&mut engine, &script, false), "{masked:?}");
        assert_eq!(engine.begun_ahead(), 0);
        assert_eq!(known.len(), allowed.len());
        for ((_, token, _), mask) in known.iter().zip(&allowed) {
            assert!(mask.as_ref().is_none_or(|mask| mask.allows(*token)));
        }
        assert_ne!(known, unmasked, "masks matter");
    }
}

#[test]
fn steps_begun_ahead_give_the_same_tokens() {
    let mut engine = engine(true);
    let known = run_plans(&mut engine, &plans(), true);
    // All decode steps except the first after an empty step: 0 to 8, and 11.
    assert_eq!(engine.begun_ahead(), 10);
    let mut engine = self::engine(true);
    assert_eq!(known, run_plans(&mut engine, &plans(), false));
    assert_eq!(engine.begun_ahead(), 0);
    let tokens: std::collections::HashSet<u32> = known.iter().map(|(_, token, _)| *token).collect();
    assert!(tokens.len() > 8, "{tokens:?}");
}

/// A computation that has not finished may never finish.
#[test]
fn a_gpu_alone_is_not_waited_for_longer_than_it_may_take() {
    hang(&mut on_gpu(HANGING[0], Duration::ZERO));
}

/// The driver frees nothing before all that the GPU computes is done, whoever asked for it.
#[test]
fn a_gpu_that_hangs_is_asked_for_nothing_by_others_that_use_it() {
    let [mut backend, mut draft] =
        [Duration::ZERO, Duration::from_secs(60)].map(|patience| on_gpu(HANGING[1], patience));
    let [before, after] =
        [draft.new_buffer(1, 8), draft.new_buffer(1, 8)].map(|buffer| buffer.unwrap());
    let free = |backend: &CudaBackend| backend.memory().unwrap().0;
    let used = free(&draft);
    drop(before);
    assert!(free(&draft) > used, "memory is freed");
    let used = free(&draft);
    hang(&mut backend);
    let left = free(&draft);
    assert!(left <= used, "{left} {used}");
    drop(after);
    drop(backend);
    assert_eq!(free(&draft), left, "nothing is freed any more");
    drop(draft);
    // A new one takes some more, but far less than both had.
    assert!(free(&on_gpu(HANGING[1], Duration::ZERO)) <= left, "not even with the last");
    assert!(is_gpu_held());
}

fn on_gpu(ordinal: u32, patience: Duration) -> CudaBackend {
    fake_cuda_with(CudaOptions { ordinal, patience, ..CudaOptions::default() }, single_rank())
}

/// Reads a buffer from a GPU that may take no time at all.
fn hang(backend: &mut CudaBackend) {
    let mut buffer = backend.new_buffer(1, 8).unwrap();
    buffer.set_rows(1).unwrap();
    let error = backend.read_buffer(&buffer).unwrap_err();
    assert!(matches!(&error, KernelError::Device(why) if why.contains("hangs")), "{error}");
}

/// NVIDIA does not document that freeing host memory waits for the GPU, and the stand-in does not.
#[test]
fn copies_of_blocks_end_before_their_host_memory_is_freed() {
    let mut backend = fake_cuda_backend(true, single_rank());
    let shape = KvShape {
        num_layers: 2,
        num_kv_heads: 2,
        head_dim: 16,
        latent: None,
        block_size: 16,
        num_blocks: 4,
        storage: KvStorage::AsTaken,
    };
    let mut cache = backend.new_kv_cache(shape).unwrap();
    for out in [true, false] {
        let mut host = backend.new_host_kv(shape).unwrap();
        let pairs = [(0, 1), (2, 3)];
        if out {
            backend.swap_out(&cache, &mut host, &pairs).unwrap();
        } else {
            backend.swap_in(&mut cache, &mut host, &pairs).unwrap();
        }
        drop(host);
        backend.settle().unwrap();
    }
}

/// Numbers exact in bf16, whose rows are padded there.
#[test]
fn rows_of_buffers_are_read_together() {
    let mut backend = fake_cuda_backend(true, single_rank());
    let (rows, width) = (7, 13);
    let values: Vec<f32> = (0..rows * width).map(|i| (i as f32 - 40.0) * 0.5).collect();
    for is_input in [false, true] {
        let mut buffer = match is_input {
            false => backend.new_buffer(rows, width).unwrap(),
            true => backend.new_input_buffer(rows, width).unwrap(),
        };
        backend.write_buffer(&mut buffer, &values).unwrap();
        let mut found = vec![7.0];
        for ranges in [&[5..7, 0..1, 3..3, 2..4][..], &[], std::slice::from_ref(&(0..7))] {
            backend.read_rows(&buffer, ranges, &mut found).unwrap();
            let rows = ranges.iter().flat_map(|rows| &values[rows.start * width..rows.end * width]);
            assert!(found.iter().eq(rows), "{ranges:?}, input: {is_input}");
        }
        assert_eq!(backend.read_buffer(&buffer).unwrap(), values);
        let error = backend.read_rows(&buffer, &[0..1, 6..8], &mut found).unwrap_err().to_string();
        assert!(error.contains("6..8") && error.contains("7 are in use"), "{error}");
    }
}
