//! Ranks on GPUs that exchange data with NCCL, all of them stand-ins: same bits as ranks that
//! exchange data through host memory, with graphs, and with one step begun ahead.
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use kernels::collective::{Collective, local_group};
use kernels::cuda::CudaBackend;
use kernels::cuda::bucket::decode_buckets;
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KvCacheDtype, NewSequence, SequenceStep, StepPlan, TokenMask,
};
use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};
use testkit::relay::SharedRelay;
use worker::engine::Engine;

use crate::cuda::{Script, check, plans_with, run_plans};
use crate::rig::{On, Rig, engine_of, fake_nccl_backend, fake_nccl_engine, join_nccl};

/// The sequences, one per kind of sampling: tokens, and the bits of all log-probabilities.
pub(crate) type Transcript = Vec<(Vec<u32>, Vec<u32>, Vec<(u32, u32)>)>;

pub(crate) fn transcript(on: On, model: &Path, degree: u32, steps: usize) -> Transcript {
    transcript_of(on, model, degree, steps, |_| None)
}

/// The same for sequences some of which have rules.
pub(crate) fn transcript_of(
    on: On,
    model: &Path,
    degree: u32,
    steps: usize,
    rule: impl Fn(usize) -> Option<u64>,
) -> Transcript {
    let mut rig = Rig::on(on, model, degree);
    let samplings = [
        SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() },
        SamplingParams { prompt_logprobs: Some(0), logprobs: Some(3), ..SamplingParams::greedy() },
        SamplingParams {
            temperature: 0.9,
            seed: 5,
            logprobs: Some(0),
            ..SamplingParams::default()
        },
        // For these, ranks only exchange the best of their own logits: a few for both, one for the
        // second alone.
        SamplingParams {
            temperature: 1.3,
            top_k: 40,
            top_p: 0.98,
            seed: 8,
            ..SamplingParams::default()
        },
        SamplingParams::greedy(),
        SamplingParams {
            temperature: 1.1,
            top_p: 0.9,
            repetition_penalty: 1.2,
            logit_bias: vec![(11, 2.0)],
            logprobs: Some(0),
            ..SamplingParams::default()
        },
    ];
    let prompts = goldens(model);
    let mut seqs: Vec<_> = samplings
        .iter()
        .zip(&prompts)
        .map(|(sampling, golden)| {
            rig.sequence(&golden.prompt_ids, golden.prompt_ids.len(), sampling.clone())
        })
        .collect();
    for (index, seq) in seqs.iter_mut().enumerate() {
        seq.rule = rule(index);
    }
    // Few rows per step: larger sums over more than two ranks have NCCL's order.
    while seqs.iter().any(|seq| seq.output().len() < 2) {
        rig.step(&mut seqs.iter_mut().collect::<Vec<_>>(), 6);
    }
    let mut sent = [0; 2];
    for step in 0..steps {
        // The simple sequences, whose steps are graphs.
        let some = match step {
            step if step.is_multiple_of(3) => 0..3,
            step if step % 3 == 1 => 3..5,
            _ => 4..5,
        };
        let mut batch: Vec<_> = seqs[some].iter_mut().collect();
        rig.step(&mut batch, u32::MAX);
        sent[usize::from(batch.len() == 1)] = rig.sent;
        if batch.len() == 2 && sent[1] > 0 && matches!(on, On::FakeNccl | On::FakePeers(_)) {
            // Apart from sums: 64 keys of 8 bytes for each row, and one for the greedy row alone.
            assert_eq!(sent[0] - 2 * 64 * 8, 2 * (sent[1] - 8), "step {step} of {degree} ranks");
        }
    }
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    seqs.iter()
        .map(|seq| {
            let prompt = seq.prompt_logprobs.iter().map(|(token, p)| (*token, p.to_bits()));
            (seq.output().to_vec(), bits(&seq.logprobs), prompt.collect())
        })
        .collect()
}

fn same_bits(model: &Path, degree: u32) {
    let devices = transcript(On::FakeNccl, model, degree, 14);
    let host = transcript(On::FakeCuda, model, degree, 14);
    assert_eq!(devices, host);
    assert!(host.iter().all(|(tokens, ..)| tokens.len() >= 2));
}

macro_rules! variants {
    ($($test:ident: $folder:literal, $degree:literal;)*) => {
        $(#[test]
        fn $test() {
            same_bits(&variant($folder), $degree);
        })*
    };
}

// What ranks exchange does not depend on what each computes by itself: positions, windows.
variants! {
    llama_gqa: "llama-gqa", 2;
    llama_gqa_tp4: "llama-gqa", 4;
    llama_gqa_sharded: "llama-gqa-sharded", 2;
    qwen2: "qwen2", 2;
    qwen3: "qwen3", 2;
    mixtral: "mixtral", 2;
}

#[test]
fn goldens_hold() {
    check(On::FakeNccl, &variant("llama-gqa"), 2, 2, 12);
    check(On::FakeNccl, &variant("qwen3"), 2, 1, 12);
}

#[test]
fn the_demo_model_at_two_ranks() {
    check(On::FakeNccl, &demo(), 2, 1, 4);
}

/// The tokens of two ranks; `ahead` says which of them looks for the next step.
fn run_ranks(plans: &Script, ahead: [bool; 2]) -> Vec<(u64, u32, u32)> {
    let group = local_group(2, Duration::from_secs(30)).unwrap();
    let relay = SharedRelay::default();
    let is_masked = !plans.masks.is_empty();
    let run = |rank: u32, collective, relay| {
        let model = variant("llama-gqa");
        let mut engine = fake_nccl_engine(&model, (rank, 2), collective, relay);
        let seen = run_plans(&mut engine, plans, ahead[rank as usize]);
        assert_eq!(engine.begun_ahead() > 0, ahead[rank as usize]);
        // With masks, a late step allocates for the first exchange of best logits.
        let graphs = if is_masked { 0 } else { 2 };
        assert!(engine.backend().num_graphs() >= graphs, "{}", engine.backend().num_graphs());
        (seen, engine.digest())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0u32..)
            .zip(group)
            .map(|(rank, collective)| {
                let relay = relay.clone();
                scope.spawn(move || run(rank, collective, relay))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(results[0].1, results[1].1, "ranks have other tokens");
    assert!(results[1].0.is_empty(), "only rank 0 tells tokens");
    results[0].0.clone()
}

/// One rank learns of the next step earlier than another, or neither does in time.
#[test]
fn steps_begun_ahead_give_the_same_tokens_on_every_rank() {
    for masked in [&[][..], &[0, 3], &[0, 1, 2, 3, 4, 5]] {
        let plans = plans_with(masked);
        let known = run_ranks(&plans, [false, false]);
        assert!(known.len() > 40);
        for ahead in [[true, true], [true, false], [false, true]] {
            assert_eq!(run_ranks(&plans, ahead), known, "{ahead:?}, masked {masked:?}");
        }
    }
}

/// Greedy steps of these sequences: a prompt at the first occurrence, later a token. Every third
/// sequence asks for its prompt's log-probabilities, and every fifth has masks.
fn greedy(batches: &[&[u64]]) -> Script {
    const PROMPT: [u32; 5] = [1, 5, 9, 33, 7];
    let mut computed = HashMap::new();
    let mut script = Script::default();
    for (number, batch) in (1..).zip(batches) {
        let mut plan = StepPlan { epoch: Epoch(1), step: StepId(number), ..StepPlan::default() };
        for &seq in *batch {
            let start: u32 = computed.get(&seq).copied().unwrap_or(0);
            let count = if start == 0 { PROMPT.len() as u32 } else { 1 };
            let mut new_blocks = Vec::new();
            if start == 0 {
                let prompt_logprobs = seq.is_multiple_of(3).then_some(0);
                plan.admitted.push(NewSequence {
                    seq: SeqId(seq),
                    tokens: PROMPT.to_vec(),
                    num_prompt: count,
                    adapter: 0,
                    sampling: SamplingParams { prompt_logprobs, ..SamplingParams::greedy() },
                });
                new_blocks.push(BlockId(seq as u32 * 2));
            }
            if (start..start + count).contains(&16) {
                new_blocks.push(BlockId(seq as u32 * 2 + 1));
            }
            computed.insert(seq, start + count);
            let masked = seq.is_multiple_of(5);
            if masked {
                let masks = script.masks.entry(plan.step).or_default();
                masks.push(Some(TokenMask::Except(vec![0, start + 1])));
            }
            let seq = SeqId(seq);
            plan.sequences.push(SequenceStep {
                seq,
                start,
                count,
                new_blocks,
                sample: true,
                masked,
                drafts: Drafts::none(),
            });
        }
        script.plans.push_back(plan);
    }
    script
}

/// An engine as in a worker: the largest steps have run once.
fn profiled(rank: u32, collective: Box<dyn Collective>, relay: SharedRelay) -> Engine<CudaBackend> {
    let sizes = EngineConfig {
        block_size: 16,
        max_model_len: 64,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        kv_cache_bytes: 1 << 20,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let backend = fake_nccl_backend(rank, collective, relay);
    let mut engine = engine_of(&variant("llama-gqa"), rank, 2, backend, sizes).unwrap();
    engine.backend().set_alone(true);
    engine.profile().unwrap();
    engine.backend().set_alone(false);
    engine
}

/// Ranks capture steps of every size before the first request, as long as rank 0 has time for it;
/// with less time, or none, tokens are the same.
#[test]
fn ranks_capture_steps_of_every_size_before_the_first_request() {
    let batches: [&[u64]; 9] = [
        &[1, 2, 4],
        &[1, 2, 4],
        &[1],
        &[4],
        &[1, 2, 4, 7, 8],
        &[1, 2, 4, 7, 8],
        &[7],
        &[2, 8],
        &[1],
    ];
    for plans in [greedy(&batches), plans_with(&[])] {
        let ends = [60, 0].map(|seconds| {
            let group = local_group(2, Duration::from_secs(60)).unwrap();
            let relay = SharedRelay::default();
            let run = |rank: u32, collective, relay| {
                let mut engine = profiled(rank, collective, relay);
                engine.start(512, 0).unwrap();
                let own = if rank == 0 { seconds } else { 60 - seconds };
                let warmed = engine.warm(&decode_buckets(8), Duration::from_secs(own)).unwrap();
                // Greedy steps and those with top-k, for which ranks look at parts of the logits,
                // and others.
                let kinds = if seconds > 0 { 3 * 4 } else { 0 };
                assert_eq!((warmed.kinds, warmed.of), (kinds, 3 * 4));
                assert_eq!(engine.backend().num_graphs(), kinds);
                let seen = run_plans(&mut engine, &plans, false);
                if seconds > 0 {
                    assert_eq!(engine.backend().num_graphs(), kinds);
                }
                (seen, engine.digest())
            };
            let run = &run;
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..)
                    .zip(group)
                    .map(|(rank, collective)| {
                        let relay = relay.clone();
                        scope.spawn(move || run(rank, collective, relay))
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            })
        });
        assert_eq!(ends[0], ends[1]);
        assert!(!ends[0][0].0.is_empty() && ends[0][0].1 == ends[0][1].1);
    }
}

/// In the second epoch, one rank is a new process: it must call, record and replay the same steps
/// as the other one, which has already seen larger steps. Otherwise NCCL's ranks would wait for
/// each other.
#[test]
fn a_replaced_rank_records_the_steps_that_the_other_records() {
    const LARGE: &[u64] = &[1, 2, 3, 4, 5, 6];
    const MOST: &[u64] = &[1, 2, 4, 5, 6, 7, 8];
    let first = [LARGE, LARGE, LARGE, &[1], &[1], &[1], &[1, 2], &[1, 2], &[1, 2]];
    let second: [&[u64]; 18] = [
        &[1],
        &[1],
        &[1],
        &[1],
        &[1, 2, 4],
        &[1, 2, 4],
        &[1],
        &[1, 2, 4],
        &[1, 2, 3, 4],
        &[1, 2, 4],
        &[1],
        MOST,
        MOST,
        &[1],
        MOST,
        MOST,
        &[1, 2, 4],
        &[1, 2],
    ];
    let mut epochs = [(); 2].map(|()| {
        let group = local_group(2, Duration::from_secs(60)).unwrap();
        (group.into_iter(), SharedRelay::default())
    });
    let mut next = |epoch: usize| (epochs[epoch].0.next().unwrap(), epochs[epoch].1.clone());
    let ranks = [[next(0), next(1)], [next(0), next(1)]];
    let run = |rank: u32, [one, two]: [(Box<dyn Collective>, SharedRelay); 2]| {
        let mut engine = profiled(rank, one.0, one.1);
        engine.start(64, 0).unwrap();
        run_plans(&mut engine, &greedy(&first), false);
        if rank == 0 {
            engine.release();
            engine.backend().set_collective(two.0).unwrap();
            join_nccl(engine.backend(), two.1);
        } else {
            drop(engine);
            engine = profiled(rank, two.0, two.1);
        }
        engine.start(64, 0).unwrap();
        let seen = run_plans(&mut engine, &greedy(&second), false);
        assert!(engine.backend().num_graphs() >= 3, "{}", engine.backend().num_graphs());
        (seen.len(), engine.digest())
    };
    let run = &run;
    let ends = std::thread::scope(|scope| {
        let start = |(rank, epochs)| scope.spawn(move || run(rank, epochs));
        let threads: Vec<_> = (0..).zip(ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(ends[0].1, ends[1].1);
    assert_eq!(ends[0].0, second.iter().map(|batch| batch.len()).sum::<usize>());
}
