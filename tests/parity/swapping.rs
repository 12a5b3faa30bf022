//! Sequences that were swapped to host memory and back, several times, get the same text as
//! recomputed and as undisturbed ones: the real scheduler with real engines, one step ahead, with
//! far fewer KV blocks than the load needs. Some sequences are guided: their masks follow their
//! plans.
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::task::{Context, Poll};
use std::time::Duration;

use coordinator::engine::{GenerateRequest, GuideEnd, Guided, TokenGuide};
use coordinator::scheduler::{
    Effect, Method, NgramConfig, Scheduler, SchedulerConfig, Speculation,
};
use kernels::collective::{Collective, local_group, single_rank};
use kernels::cpu::Precision;
use kernels::cuda::CudaOptions;
use kernels::{Backend, CpuBackend, ReferenceBackend};
use shared::ids::{Epoch, RequestId, StepId};
use shared::protocol::{
    EngineConfig, KvCacheDtype, SequenceOutput, StepMasks, StepPlan, ToWorker, TokenLogprobs,
    TokenMask,
};
use shared::sampling::SamplingParams;
use testkit::models::variant;
use worker::engine::Engine;
use worker::rank::StepSource;

use crate::masks;
use crate::rig::{engine_of, fake_cuda_with, with_draft};

const BLOCK_SIZE: u32 = 16;
const SEQS: u32 = 6;
const TOKENS: u32 = 48;
const MAX_LEN: u32 = 112;
const PATIENCE: Duration = Duration::from_secs(120);

/// Outputs, and how many tokens were drafted for each sequence that asked.
type Answer = Result<(Vec<SequenceOutput>, Vec<u32>), String>;

/// Tokens with their log-probabilities.
pub(crate) type Text = Vec<(u32, Option<TokenLogprobs>)>;

/// The result of a load: each choice's text, and statistics.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) choices: BTreeMap<(RequestId, u32), Text>,
    swapped: (u32, u32),
    preemptions: u32,
    recomputed: u32,
    /// Tokens of prompts that another sequence had computed.
    pub(crate) cached: u32,
    drafted: u32,
    accepted: u32,
    /// Numbers of steps that rank 0 began while the previous step ran: only decode; with chunks of
    /// prompts or admissions; with copies to or from host memory; and, of all these, those with
    /// masks.
    pub(crate) ahead: [u32; 4],
    /// Numbers of plans that keep a state: of decode alone, and of any kind with masks.
    pub(crate) keeps: (u32, u32),
}

/// A rank's messages: the next plan, which an engine may look at, and masks.
struct Plans {
    receiver: Receiver<ToWorker>,
    held: Option<StepPlan>,
    masks: Vec<StepMasks>,
}

impl Plans {
    /// Waits up to `within` for the next message; returns whether there was one.
    fn receive(&mut self, within: Duration) -> bool {
        match self.receiver.recv_timeout(within) {
            Ok(ToWorker::Step(plan)) => assert!(self.held.replace(plan).is_none(), "two ahead"),
            Ok(ToWorker::Masks(masks)) => self.masks.push(masks),
            _ => return false,
        }
        true
    }

    fn next(&mut self) -> Option<StepPlan> {
        while self.held.is_none() {
            if !self.receive(PATIENCE) {
                return None;
            }
        }
        self.held.take()
    }
}

impl StepSource for Plans {
    fn peek(&mut self) -> Option<&StepPlan> {
        // An emulated device computes while it is being waited for: the next plan should arrive
        // before.
        while self.held.is_none() && self.receive(Duration::from_millis(2)) {}
        self.held.as_ref()
    }

    fn masks(&mut self, step: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        loop {
            if let Some(at) = self.masks.iter().position(|masks| masks.step == step) {
                return Ok(self.masks.remove(at).masks);
            }
            if !self.receive(PATIENCE) {
                return Err(format!("no masks come for {step}"));
            }
        }
    }
}

/// A guide whose rule depends on all tokens.
#[derive(Debug)]
pub(crate) struct Rule {
    rule: u64,
    tokens: Vec<u32>,
    mask: TokenMask,
}

impl Rule {
    pub(crate) fn new(rule: u64) -> Self {
        Self { rule, tokens: Vec::new(), mask: masks::of(rule, &[]) }
    }
}

impl TokenGuide for Rule {
    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        Poll::Ready(Ok(()))
    }

    fn allowed(&self) -> Option<&TokenMask> {
        Some(&self.mask)
    }

    fn mask_bytes_max(&self) -> usize {
        100
    }

    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        if !self.mask.allows(token) {
            return Err(GuideEnd::Broke(format!("token {token} is not one of those allowed")));
        }
        self.tokens.push(token);
        self.mask = masks::of(self.rule, &self.tokens);
        Ok(Guided::GoesOn)
    }
}

/// Requests for answers of `answer` tokens and more.
fn load(answer: u32) -> Vec<GenerateRequest> {
    let sampled = SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        top_k: 40,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        repetition_penalty: 1.2,
        logprobs: Some(2),
        ..SamplingParams::greedy()
    };
    let greedy = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
    let request = |at: u32| {
        let params = if at.is_multiple_of(2) { &greedy } else { &sampled };
        let n = if at == 3 { 2 } else { 1 };
        let sampling = (0..n).map(|choice| SamplingParams {
            seed: u64::from(at),
            choice,
            prompt_logprobs: (at == 5).then_some(1),
            ..params.clone()
        });
        let rule = Rule::new(u64::from(at) + 7);
        // One with edited logits, and a greedy one.
        let guides = match at {
            1 | 2 => vec![Box::new(rule) as Box<dyn TokenGuide>],
            _ => Vec::new(),
        };
        let request = GenerateRequest::new(
            RequestId(at.into()), // Some share a prefix of one or two blocks.
            (0..18 + 7 * at).map(|i| (i * 5 + if i < 20 { 0 } else { at }) % 384).collect(),
            sampling.collect(),
            answer + at,
        );
        GenerateRequest { guides, ..request }
    };
    (0..7).map(request).collect()
}

fn serve<B: Backend>(
    mut engine: Engine<B>,
    receiver: Receiver<ToWorker>,
    results: &std::sync::mpsc::Sender<Answer>,
) -> [u32; 4] {
    let mut ahead = [0; 4];
    let mut plans = Plans { receiver, held: None, masks: Vec::new() };
    while let Some(plan) = plans.next() {
        let mut outputs = Vec::new();
        let before = engine.begun_ahead();
        let stepped = engine.step(&plan, &mut plans, &mut outputs);
        if let Some(begun) = plans.held.as_ref().filter(|_| engine.begun_ahead() > before) {
            let is_mixed = |plan: &StepPlan| plan.sequences.iter().any(|entry| entry.count > 1);
            let swaps = !begun.swap_out.is_empty() || !begun.swap_in.is_empty();
            let admits = is_mixed(begun) || !begun.admitted.is_empty();
            let kind = if swaps { 2 } else { usize::from(admits) };
            ahead[kind] += 1;
            ahead[3] += u32::from(begun.sequences.iter().any(|entry| entry.masked));
        }
        let drafted = engine.drafted().to_vec();
        let result = stepped.map(|_| (outputs, drafted)).map_err(|error| error.to_string());
        let failed = result.is_err();
        if engine.backend().rank() == 0 || failed {
            let _ = results.send(result);
        }
        if failed {
            break;
        }
    }
    ahead
}

/// Runs the load on `degree` ranks with the given numbers of blocks on the device and in host
/// memory.
fn run<B: Backend>(
    (degree, answer): (u32, u32),
    blocks: (u32, u32),
    options: (bool, Option<Speculation>),
    kv_cache_dtype: KvCacheDtype,
    make: impl Fn(Box<dyn Collective>) -> B + Copy + Send,
) -> Outcome {
    run_load(("llama-gqa", load(answer)), degree, blocks, options, kv_cache_dtype, make)
}

/// How a scheduler works.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scheduling {
    pub(crate) seqs: u32,
    pub(crate) max_len: u32,
    pub(crate) prefix_caching: bool,
    pub(crate) prefix_states: Option<u32>,
    pub(crate) speculation: Option<Speculation>,
}

impl From<(bool, Option<Speculation>)> for Scheduling {
    fn from((prefix_caching, speculation): (bool, Option<Speculation>)) -> Self {
        Self { seqs: SEQS, max_len: MAX_LEN, prefix_caching, prefix_states: None, speculation }
    }
}

/// As [`run`], with a model and a load of one's own.
pub(crate) fn run_load<B: Backend>(
    (model, load): (&str, Vec<GenerateRequest>),
    degree: u32,
    (blocks, host): (u32, u32),
    scheduling: impl Into<Scheduling>,
    kv_cache_dtype: KvCacheDtype,
    make: impl Fn(Box<dyn Collective>) -> B + Copy + Send,
) -> Outcome {
    let Scheduling { seqs, max_len, prefix_caching, prefix_states, speculation } =
        scheduling.into();
    // If so, its steps are recorded.
    let is_cuda = make(single_rank()).queues_samples();
    let sizes = EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: max_len,
        max_num_seqs: seqs,
        max_num_batched_tokens: TOKENS,
        kv_cache_bytes: 1 << 30,
        swap_bytes: 0,
        kv_cache_dtype,
        prefix_states: prefix_states.unwrap_or(0),
    };
    let mut scheduler = Scheduler::new(SchedulerConfig {
        block_size: BLOCK_SIZE,
        max_model_len: max_len,
        max_num_seqs: seqs,
        max_num_batched_tokens: TOKENS,
        max_mixed_prefill_tokens: None,
        max_queued_requests: 100,
        max_steps_in_flight: 2,
        prefix_caching,
        prefix_states,
        hidden_size: 2,
        vocab_size: u32::MAX,
        speculation,
    })
    .unwrap();
    let (sender, results) = channel();
    std::thread::scope(|scope| {
        let (mut ranks, mut threads) = (Vec::new(), Vec::new());
        let group = local_group(degree as usize, PATIENCE).unwrap();
        for (rank, collective) in (0..degree).zip(group) {
            let (plans, receiver) = channel();
            ranks.push(plans);
            let (sender, sizes) = (sender.clone(), sizes.clone());
            threads.push(scope.spawn(move || {
                let model = variant(model);
                let engine = engine_of(&model, rank, degree, make(collective), sizes).unwrap();
                let drafts = speculation.is_some_and(|it| it.method == Method::DraftModel);
                // The same model: nearly all of its drafts are right.
                let draft = Some(model.as_path()).filter(|_| drafts && rank == 0);
                let own = || is_cuda.then(|| make(single_rank()));
                let mut engine = with_draft(engine, &model, draft, own);
                engine.start(blocks, host).unwrap();
                serve(engine, receiver, &sender)
            }));
        }
        let (mut effects, mut outcome) = (Vec::new(), Outcome::default());
        scheduler.replica_ready(Epoch(1), blocks, host, &mut effects);
        load.into_iter().for_each(|request| {
            scheduler.submit(request).unwrap();
        });
        let (mut plan, mut masks) = (StepPlan::default(), StepMasks::default());
        while scheduler.gauges().in_flight > 0 {
            while scheduler.masks(&mut masks, &mut effects) {
                let masks = ToWorker::Masks(masks.clone());
                ranks.iter().for_each(|rank| rank.send(masks.clone()).unwrap());
            }
            while scheduler.plan(&mut plan, &mut effects) {
                let count = |swaps: &[shared::protocol::Swap]| -> u32 {
                    swaps.iter().map(|swap| swap.blocks.len() as u32).sum()
                };
                if !plan.keep.is_empty() {
                    let decodes = plan.sequences.iter().all(|entry| entry.count == 1);
                    outcome.keeps.0 += u32::from(decodes);
                    let is_masked = plan.sequences.iter().any(|entry| entry.masked);
                    outcome.keeps.1 += u32::from(is_masked);
                }
                outcome.swapped.0 += count(&plan.swap_out);
                outcome.swapped.1 += count(&plan.swap_in);
                let plan = ToWorker::Step(plan.clone());
                ranks.iter().for_each(|rank| rank.send(plan.clone()).unwrap());
            }
            while scheduler.masks(&mut masks, &mut effects) {
                let masks = ToWorker::Masks(masks.clone());
                ranks.iter().for_each(|rank| rank.send(masks.clone()).unwrap());
            }
            let step = plan.step.0 + 1 - u64::from(scheduler.gauges().steps_in_flight);
            let (outputs, drafted) = results.recv_timeout(PATIENCE).unwrap().unwrap();
            let step = StepId(step);
            scheduler
                .apply(Epoch(1), step, outputs, &drafted, &mut |_, _| false, &mut effects)
                .unwrap();
            for effect in effects.drain(..) {
                match effect {
                    Effect::Token { request, choice, token, logprobs } => {
                        let choice = outcome.choices.entry((request, choice)).or_default();
                        choice.push((token, logprobs));
                    }
                    Effect::Preempted { .. } => outcome.preemptions += 1,
                    Effect::StepDone(step) => {
                        outcome.recomputed += step.recomputed;
                        outcome.cached += step.cached;
                    }
                    Effect::Drafted { tokens, accepted, .. } => {
                        outcome.drafted += tokens;
                        outcome.accepted += accepted;
                    }
                    Effect::Dropped { error, .. } => panic!("{error:?}"),
                    _ => {}
                }
            }
        }
        let gauges = scheduler.gauges();
        assert_eq!((gauges.blocks_used, gauges.host_used), (0, 0), "nothing is left behind");
        ranks.clear();
        outcome.ahead = threads.swap_remove(0).join().unwrap();
        outcome
    })
}

const DRAFTS: Speculation = Speculation {
    num_speculative_tokens: 3,
    method: Method::Ngram(NgramConfig { prompt_lookup_max: 3, prompt_lookup_min: 1 }),
    disable_by_batch_size: None,
};

const BY_MODEL: Speculation = Speculation { method: Method::DraftModel, ..DRAFTS };

/// The shortest answer: long enough for sequences to outgrow the block that each keeps.
const ANSWER: u32 = 44;

/// One more than the number of blocks that the longest sequence needs.
const FEW: u32 = MAX_LEN / BLOCK_SIZE + 1;

/// Blocks in host memory, and whether prefixes are cached, where a model drafts.
const HOSTS: [(u32, bool); 4] = [(100, true), (100, false), (3, true), (0, true)];

/// Checks that all runs agree.
fn all_alike<B: Backend>(
    size: (u32, u32),
    kv: KvCacheDtype,
    make: impl Fn(Box<dyn Collective>) -> B + Copy + Send,
) {
    let undisturbed = run(size, (100, 0), (true, None), kv, make);
    assert_eq!((undisturbed.preemptions, undisturbed.recomputed), (0, 0));
    assert_eq!(undisturbed.choices.len(), 8);
    let again = run(size, (FEW, 0), (true, None), kv, make);
    assert!(again.recomputed > 0 && again.swapped == (0, 0));
    assert_eq!(again.choices, undisturbed.choices, "computed again");
    let swapped = run(size, (FEW, 100), (true, None), kv, make);
    let (out, back) = swapped.swapped;
    assert!(back > 0 && back < out, "{back} of {out} blocks came back, the cache had the others");
    assert_eq!(swapped.recomputed, 0);
    assert_eq!(swapped.choices, undisturbed.choices, "swapped");
    let whole = run(size, (FEW, 100), (false, None), kv, make);
    let (out, back) = whole.swapped;
    assert!(out == back && back > 10, "{back} of {out} blocks came back");
    assert_eq!(whole.choices, undisturbed.choices, "swapped as a whole");
    let drafting = run(size, (FEW, 100), (false, Some(DRAFTS)), kv, make);
    assert!(drafting.drafted > 0 && drafting.swapped.1 > 0, "{drafting:?}");
    assert_eq!(drafting.choices, undisturbed.choices, "swapped with drafts");
    for (host, prefix_caching) in HOSTS {
        let modelled = run(size, (FEW, host), (prefix_caching, Some(BY_MODEL)), kv, make);
        let (drafted, accepted) = (modelled.drafted, modelled.accepted);
        assert!(drafted > 30 && accepted * 5 >= drafted * 4, "{accepted} of {drafted}");
        assert!(modelled.preemptions > 0);
        assert_eq!(modelled.choices, undisturbed.choices, "drafted by a model, {host} swapped");
    }
    // Host memory for one or two sequences: the others are recomputed.
    let mixed = run(size, (FEW, 3), (false, None), kv, make);
    assert!(mixed.recomputed > 0 && mixed.swapped.1 > 0, "{:?}", mixed.swapped);
    assert_eq!(mixed.choices, undisturbed.choices, "some swapped, some computed again");
}

#[test]
fn on_the_cpu_by_one_rank_and_by_two() {
    for (degree, kv) in [(1, KvCacheDtype::Auto), (2, KvCacheDtype::Fp8)] {
        let make = |collective| CpuBackend::new(2, Precision::Float32, collective).unwrap();
        all_alike((degree, ANSWER), kv, make);
    }
}

#[test]
fn on_the_reference() {
    all_alike((1, ANSWER), KvCacheDtype::Auto, ReferenceBackend::new);
}

/// With graphs and steps begun ahead; each row's bits are those that it has alone. What differs
/// only in the scheduler's plans is left to the other devices: this one is slow.
#[test]
fn on_an_emulated_gpu_by_one_rank_and_by_two() {
    let options = CudaOptions { graphs: true, batch_invariant: true, ..CudaOptions::default() };
    let on = |degree, blocks, speculation| {
        let make = |collective| fake_cuda_with(options.clone(), collective);
        run((degree, ANSWER), blocks, (false, speculation), KvCacheDtype::Auto, make)
    };
    let undisturbed = on(1, (100, 0), None);
    let (swapped, drafting) = (on(1, (FEW, 100), None), on(1, (FEW, 100), Some(BY_MODEL)));
    assert!(swapped.ahead.iter().all(|steps| *steps > 0), "{:?} are begun ahead", swapped.ahead);
    assert!(drafting.accepted > 0 && drafting.swapped.1 > 0, "{drafting:?}");
    assert_eq!(drafting.choices, undisturbed.choices);
    let two = (on(2, (100, 0), None), on(2, (FEW, 100), None));
    for (undisturbed, swapped) in [(&undisturbed, &swapped), (&two.0, &two.1)] {
        assert!(undisturbed.preemptions == 0 && swapped.swapped.1 > 10);
        assert_eq!(swapped.choices, undisturbed.choices);
    }
}

/// Latents of prompts that another sequence has computed, drafts among latents, and both with
/// sequences that move to host memory and back.
#[test]
fn latents_that_others_computed_and_drafts_among_them() {
    for (degree, kv) in [(1, KvCacheDtype::Auto), (2, KvCacheDtype::Fp8)] {
        let run = |blocks, options| {
            let make = |collective| CpuBackend::new(1, Precision::Bfloat16, collective).unwrap();
            run_load(("deepseek-v2", load(ANSWER)), degree, blocks, options, kv, make)
        };
        let alone = run((100, 0), (false, None));
        assert_eq!((alone.cached, alone.drafted, alone.choices.len()), (0, 0, 8));
        let cached = run((100, 0), (true, None));
        assert!(cached.cached >= 16 * 4, "{} tokens", cached.cached);
        assert_eq!(cached.choices, alone.choices, "computed by others");
        let both = run((FEW, 100), (true, Some(DRAFTS)));
        assert!(both.cached > 0 && both.accepted > 0 && both.swapped.1 > 0, "{both:?}");
        assert_eq!(both.choices, alone.choices, "with drafts, and swapped");
    }
}

/// Two short requests, of which one has to wait for the other.
fn waits_on_an_emulated_gpu(model: &str, kv_cache_dtype: KvCacheDtype) {
    let options = || CudaOptions { graphs: true, batch_invariant: true, ..CudaOptions::default() };
    let run = |blocks| {
        let load = load(ANSWER).into_iter().filter(|request| matches!(request.id.0, 4 | 6));
        let load = load.map(|request| GenerateRequest { max_tokens: 12, ..request }).collect();
        let make = |collective| fake_cuda_with(options(), collective);
        run_load((model, load), 1, blocks, (false, None), kv_cache_dtype, make)
    };
    let (undisturbed, swapped) = (run((100, 0)), run((FEW, 100)));
    assert_eq!((undisturbed.preemptions, undisturbed.choices.len()), (0, 2));
    assert!(swapped.swapped.1 > 2 && swapped.recomputed == 0, "{:?}", swapped.swapped);
    assert_eq!(swapped.choices, undisturbed.choices);
}

/// Blocks of FP8 have half the bytes.
#[test]
fn in_fp8_on_an_emulated_gpu() {
    waits_on_an_emulated_gpu("llama-gqa", KvCacheDtype::Fp8);
}

/// Blocks of latents have no V.
#[test]
fn latents_on_an_emulated_gpu() {
    waits_on_an_emulated_gpu("deepseek-v2", KvCacheDtype::Auto);
}
