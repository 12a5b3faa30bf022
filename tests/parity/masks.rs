//! Token masks through plan, engine and sampler: tokens obey their masks on every device and
//! degree, alone and in a batch, and equal what a sampler without masks chooses.
use kernels::collective::single_rank;
use shared::ids::{BlockId, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KvCacheDtype, NewSequence, SequenceStep, StepPlan, TokenMask,
};
use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::nccl::transcript_of;
use crate::rig::{Given, On, Rig, Seq, engine_of, fake_cuda_backend};

/// The vocabulary of the models here.
const VOCAB: u32 = 384;

fn mix(state: u64, word: u64) -> u64 {
    let state = (state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (state ^ (state >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// The tokens that a rule allows after `tokens`; like a grammar's, they depend on all of these. One
/// token, a few, half, or all but a few.
pub(crate) fn of(rule: u64, tokens: &[u32]) -> TokenMask {
    let state = tokens.iter().fold(rule, |state, token| mix(state, u64::from(*token)));
    let mut bits = [0u32; VOCAB.div_ceil(32) as usize];
    for token in 0..VOCAB {
        let draw = mix(state, u64::from(token)) >> 40;
        let allowed = match state >> 32 & 3 {
            0 => false,
            1 => draw.is_multiple_of(30),
            2 => draw.is_multiple_of(2),
            _ => !draw.is_multiple_of(30),
        };
        bits[token as usize / 32] |= u32::from(allowed) << (token % 32);
    }
    let always = (state >> 8) as u32 % VOCAB;
    bits[always as usize / 32] |= 1 << (always % 32);
    TokenMask::from_bits(VOCAB, &bits)
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.1,
        top_p: if seed.is_multiple_of(2) { 0.95 } else { 1.0 },
        seed,
        repetition_penalty: if seed.is_multiple_of(3) { 1.2 } else { 1.0 },
        ..SamplingParams::default()
    }
}

fn sampling(index: usize) -> SamplingParams {
    let logprobs = [None, Some(0), Some(2)][index % 3];
    let sampling = match index % 4 {
        0 | 1 => SamplingParams::greedy(),
        _ => sampled(index as u64),
    };
    SamplingParams { logprobs, ..sampling }
}

/// The rule of a sequence; two of three sequences have one.
fn rule(index: usize) -> Option<u64> {
    (!index.is_multiple_of(3)).then_some(index as u64)
}

fn same(a: &Seq, b: &Seq, what: &str) {
    assert_eq!(a.output(), b.output(), "{what}");
    let bits = |seq: &Seq| seq.logprobs.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b), "{what}: log-probabilities, bit by bit");
}

/// Gives the tokens that a rule excludes an overwhelming negative bias, so a different part of the
/// samplers must choose the same tokens.
fn check_against_biases(on: On, degree: u32, tokens: usize) {
    let model = variant("llama-gqa");
    let mut rig = Rig::on(on, &model, degree);
    let mut free = 0;
    for (index, golden) in goldens(&model).iter().take(2).enumerate() {
        for params in [sampling(0), sampling(1), sampling(2), sampling(3), sampling(6)] {
            let mut known = golden.prompt_ids.clone();
            let num_prompt = known.len();
            for _ in 0..tokens {
                let mut masked = rig.sequence(&known, num_prompt, params.clone());
                masked.rule = Some(index as u64);
                rig.step(&mut [&mut masked], u32::MAX);
                let mask = of(index as u64, &known);
                let others = (0..VOCAB).filter(|token| !mask.allows(*token));
                let biased = SamplingParams {
                    logit_bias: others.map(|token| (token, -1e30)).collect(),
                    ..params.clone()
                };
                let mut biased = rig.sequence(&known, num_prompt, biased);
                rig.step(&mut [&mut biased], u32::MAX);
                same(&masked, &biased, &format!("{params:?} on {on:?} at tp {degree}"));
                let mut plain = rig.sequence(&known, num_prompt, params.clone());
                rig.step(&mut [&mut plain], u32::MAX);
                free += usize::from(plain.tokens != masked.tokens);
                known.push(masked.tokens[known.len()]);
                rig.forget(&[&masked, &biased, &plain]);
            }
        }
    }
    assert!(free * 5 > tokens * 10, "masks changed {free} tokens of {}", tokens * 10);
}

#[test]
fn tokens_are_those_of_biases_that_say_the_same() {
    check_against_biases(On::Reference, 1, 6);
    check_against_biases(On::Cpu, 1, 20);
    check_against_biases(On::CpuBf16, 2, 10);
    check_against_biases(On::Cpu, 4, 10);
}

#[test]
fn tokens_on_gpus_are_those_of_biases_that_say_the_same() {
    check_against_biases(On::FakeCuda, 1, 2);
    check_against_biases(On::FakePeers(1 << 20), 2, 2);
}

/// The memory for the largest number of masks is allocated before the first step: reallocating what
/// graphs refer to would cost this rank, and no other, its graphs.
#[test]
fn masks_of_all_sequences_cost_no_graphs() {
    const SEQS: u32 = 64;
    let sizes = EngineConfig {
        block_size: 16,
        max_model_len: 16,
        max_num_seqs: SEQS,
        max_num_batched_tokens: SEQS,
        kv_cache_bytes: 1 << 20,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let backend = fake_cuda_backend(true, single_rank());
    let mut engine = engine_of(&demo(), 0, 1, backend, sizes).unwrap();
    engine.profile().unwrap();
    engine.start(SEQS, 0).unwrap();
    let run = |seq: u32, start, masked| SequenceStep {
        seq: SeqId(u64::from(seq)),
        start,
        count: 1,
        new_blocks: if start == 0 { vec![BlockId(seq)] } else { Vec::new() },
        sample: true,
        masked,
        drafts: Drafts::none(),
    };
    let sampling = SamplingParams::greedy();
    let new = |seq| NewSequence {
        seq: SeqId(seq),
        tokens: vec![7],
        num_prompt: 1,
        adapter: 0,
        sampling: sampling.clone(),
    };
    let half = Some(TokenMask::Bits(vec![0x5555_5555; 2048 / 32]));
    for step in 0..4u32 {
        let (admitted, sequences) = match step {
            0..3 => ((0..1 - u64::from(step.min(1))).map(new).collect(), vec![run(0, step, false)]),
            _ => {
                let others = (1..SEQS).map(|seq| run(seq, 0, true));
                ((1..u64::from(SEQS)).map(new).collect(), others.collect())
            }
        };
        let step = StepId(u64::from(step) + 1);
        let plan = StepPlan { step, admitted, sequences, ..StepPlan::default() };
        let masked = plan.sequences.iter().filter(|entry| entry.masked);
        let mut given = Given(masked.map(|_| half.clone()).collect());
        let mut outputs = Vec::new();
        engine.step(&plan, &mut given, &mut outputs).unwrap();
        let masked = outputs.iter().filter(|output| output.seq != SeqId(0));
        assert!(masked.filter_map(|output| output.token).all(|token| token.is_multiple_of(2)));
    }
    assert_eq!(engine.backend().num_graphs(), 1);
}

/// Runs every sequence alone, then all together, joining one by one.
fn check_alone_and_together(on: On, degree: u32, count: usize, output: usize) {
    let model = variant("llama-gqa");
    let prompts: Vec<Vec<u32>> = goldens(&model).into_iter().map(|g| g.prompt_ids).collect();
    let mut rig = Rig::on(on, &model, degree);
    let new = |rig: &mut Rig, index: usize| {
        let prompt = &prompts[index % prompts.len()];
        let mut seq = rig.sequence(prompt, prompt.len(), sampling(index));
        seq.rule = rule(index);
        seq
    };
    let mut alone = Vec::new();
    for index in 0..count {
        let mut seq = new(&mut rig, index);
        rig.run(&mut seq, output, u32::MAX);
        rig.forget(&[&seq]);
        alone.push(seq);
    }
    let mut batch: Vec<Seq> = (0..count).map(|index| new(&mut rig, index)).collect();
    let mut running = 0;
    while batch.iter().any(|seq| seq.output().len() < output) {
        running = (running + 3).min(count);
        let mut step: Vec<&mut Seq> =
            batch[..running].iter_mut().filter(|seq| seq.output().len() < output).collect();
        rig.step(&mut step, 24);
    }
    for (index, (alone, together)) in alone.iter().zip(&batch).enumerate() {
        same(alone, together, &format!("request {index} on {on:?} at tp {degree}"));
    }
}

#[test]
fn a_masked_request_in_a_batch_gets_the_same_tokens_as_alone() {
    for (on, degree) in [(On::Cpu, 1), (On::Cpu, 2), (On::CpuBf16, 2)] {
        check_alone_and_together(on, degree, 20, 12);
    }
}

/// As after a preemption, or on another replica.
#[test]
fn a_masked_sequence_admitted_again_goes_on_identically() {
    let model = variant("qwen3");
    let prompt = goldens(&model)[0].prompt_ids.clone();
    let mut rig = Rig::on(On::Cpu, &model, 2);
    for index in 0..4 {
        let mut whole = rig.sequence(&prompt, prompt.len(), sampling(index));
        whole.rule = Some(9);
        rig.run(&mut whole, 16, u32::MAX);
        for accepted in [1, 7, 15] {
            let tokens = &whole.tokens[..prompt.len() + accepted];
            let mut again = rig.sequence(tokens, prompt.len(), sampling(index));
            again.rule = Some(9);
            rig.run(&mut again, 16, 10);
            assert_eq!(again.tokens, whole.tokens, "{index} after {accepted} tokens");
            rig.forget(&[&again]);
        }
        rig.forget(&[&whole]);
    }
}

/// In greedy steps, each rank on a GPU sees only its own part of the vocabulary, in graphs and
/// outside of them; in other steps, all of it. If ranks exchange data through host memory, rank 0
/// always sees all of it.
#[test]
fn ranks_on_gpus_find_what_one_that_sees_all_logits_finds() {
    // The fourth and fifth are the greedy ones without log-probabilities.
    let rule = |index: usize| [Some(1), None, Some(2), Some(3), None, Some(5)][index];
    let model = variant("llama-gqa");
    for (degree, devices) in
        [(2, &[On::FakePeers(1 << 20), On::FakeNccl][..]), (4, &[On::FakePeers(1024)])]
    {
        let host = transcript_of(On::FakeCuda, &model, degree, 12, rule);
        let plain = transcript_of(On::FakeCuda, &model, degree, 12, |_| None);
        assert_ne!(host[3].0, plain[3].0, "masks change what is found");
        assert_eq!(host[4], plain[4], "but not beside them");
        for &on in devices {
            let found = transcript_of(on, &model, degree, 12, rule);
            assert_eq!(found, host, "{on:?} at tp {degree}");
        }
    }
}
