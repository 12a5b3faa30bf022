//! Drafted tokens change the number of steps and nothing else: not a token, not a bit of a
//! log-probability, whatever is drafted.
use std::path::Path;

use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::rig::{On, Rig, Seq};

pub(crate) const OUTPUT: usize = 32;

/// Requests with everything that depends on previous tokens: penalties, suppressed end tokens,
/// positions of random draws.
pub(crate) fn requests() -> Vec<SamplingParams> {
    let greedy = || SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    let sampled = |seed| SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        top_k: 50,
        seed,
        logprobs: Some(0),
        ..SamplingParams::default()
    };
    vec![
        greedy(),
        SamplingParams { logprobs: None, ..greedy() },
        SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.4, ..greedy() },
        SamplingParams { presence_penalty: 0.7, repetition_penalty: 1.1, ..sampled(3) },
        SamplingParams { min_tokens: 9, suppress_until_min: (0..200).collect(), ..sampled(4) },
        SamplingParams { logit_bias: vec![(5, 3.0), (7, -2.0)], min_p: 0.05, ..sampled(5) },
        sampled(6),
    ]
}

/// The drafts of a step: the next tokens of the true text, one of which may be wrong.
fn drafts(text: &Seq, known: usize, most: usize, vocab: u32) -> Vec<u32> {
    let mut drafts: Vec<u32> = text.tokens[known..].iter().copied().take(known % 6).collect();
    drafts.truncate(most);
    if let Some(wrong) = drafts.get_mut(known / 2 % 8) {
        *wrong = (*wrong + 1) % vocab;
    }
    drafts
}

/// The texts of all requests without drafts: each alone, or on emulated GPUs that do not mind the
/// batch all at once, which takes a fraction of the time.
pub(crate) fn texts(
    rig: &mut Rig,
    on: On,
    prompts: &[Vec<u32>],
    adapter: impl Fn(usize) -> u32,
) -> Vec<Seq> {
    let mut texts = Vec::new();
    for (at, sampling) in requests().into_iter().enumerate() {
        let prompt = &prompts[at % prompts.len()];
        let mut seq = rig.sequence(prompt, prompt.len(), sampling);
        seq.adapter = adapter(at);
        if !matches!(on, On::FakeInvariant) {
            rig.run(&mut seq, OUTPUT, u32::MAX);
            rig.forget(&[&seq]);
        }
        texts.push(seq);
    }
    if matches!(on, On::FakeInvariant) {
        rig.run_together(&mut texts, OUTPUT);
        rig.forget(&texts.iter().collect::<Vec<_>>());
    }
    texts
}

pub(crate) fn same(a: &Seq, b: &Seq, what: &str) {
    assert_eq!(a.output(), b.output(), "{what}");
    let bits = |seq: &Seq| seq.logprobs.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b), "{what}: log-probabilities, bit by bit");
}

/// Generates all texts in one batch with drafts, beside a prompt that is computed in chunks and
/// reports its log-probabilities. Returns the number of steps.
fn drafted(rig: &mut Rig, texts: &[Seq], prompts: &[Vec<u32>], vocab: u32, what: &str) -> usize {
    let long = prompts.iter().max_by_key(|prompt| prompt.len()).unwrap();
    let scored = SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::greedy() };
    let mut beside = rig.sequence(long, long.len(), scored.clone());
    let mut batch: Vec<Seq> = texts
        .iter()
        .zip(requests())
        .map(|(text, sampling)| {
            rig.sequence(&text.tokens[..text.num_prompt], text.num_prompt, sampling)
        })
        .collect();
    let mut steps = 0;
    while batch.iter().any(|seq| seq.output().len() < OUTPUT) {
        let mut going: Vec<&mut Seq> = Vec::new();
        for (seq, text) in batch.iter_mut().zip(texts) {
            let left = OUTPUT - seq.output().len();
            if left > 0 {
                seq.drafts = drafts(text, seq.tokens.len(), left - 1, vocab);
                going.push(seq);
            }
        }
        going.insert(steps % going.len(), &mut beside);
        rig.step(&mut going, 7);
        steps += 1;
    }
    for (at, (seq, text)) in batch.iter().zip(texts).enumerate() {
        same(seq, text, &format!("request {at} {what}"));
    }
    while beside.output().is_empty() {
        rig.step(&mut [&mut beside], u32::MAX);
    }
    let mut alone = rig.sequence(long, long.len(), scored);
    while alone.tokens.len() < beside.tokens.len() {
        rig.step(&mut [&mut alone], u32::MAX);
    }
    assert_eq!(alone.tokens, beside.tokens, "{what}");
    assert_eq!(alone.prompt_logprobs, beside.prompt_logprobs, "{what}");
    let all: Vec<&Seq> = batch.iter().chain([&alone, &beside]).collect();
    rig.forget(&all);
    steps
}

fn check(model: &Path, on: On, degree: u32) {
    let prompts: Vec<Vec<u32>> = goldens(model).into_iter().map(|it| it.prompt_ids).collect();
    let vocab = worker::model::config::ModelConfig::load(model).unwrap().vocab_size as u32;
    let mut rig = Rig::on(on, model, degree);
    let texts = texts(&mut rig, on, &prompts, |_| 0);
    let what = format!("of {} on {on:?} at tp {degree}", model.display());
    let steps = drafted(&mut rig, &texts, &prompts, vocab, &what);
    // Without drafts, each token takes a step, and prompts take some more.
    assert!(steps < OUTPUT, "{steps} steps {what}");
}

#[test]
fn drafts_change_not_a_bit() {
    let models = ["mistral-swa", "qwen3", "qwen3-moe", "llama-gqa", "deepseek-v2"].map(variant);
    for model in models.into_iter().chain([demo()]) {
        for (on, degree) in
            [(On::Cpu, 1), (On::Cpu, 2), (On::CpuBf16, 1), (On::CpuBf16, 2), (On::Reference, 1)]
        {
            check(&model, on, degree);
        }
    }
}

/// On emulated CUDA kernels, whose decode steps run as graphs from the third of a kind on.
#[test]
fn drafts_change_not_a_bit_on_gpus_that_do_not_mind_the_batch() {
    for (model, degree) in [("llama-gqa", 1), ("mistral-swa", 2)] {
        check(&variant(model), On::FakeInvariant, degree);
    }
}

/// Without batch invariance, kernels depend on the number of rows: the log-probability of the true
/// next token is then the same with and without drafts only up to rounding.
#[test]
fn drafts_change_next_to_nothing_on_other_gpus() {
    for (on, degree) in [(On::FakeCuda, 1), (On::FakeNccl, 2)] {
        let model = variant("llama-gqa");
        let mut rig = Rig::on(on, &model, degree);
        let golden = goldens(&model).into_iter().max_by_key(|it| it.prompt_ids.len()).unwrap();
        let prompt = &golden.prompt_ids;
        let greedy = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
        let mut text = rig.sequence(prompt, prompt.len(), greedy.clone());
        rig.run(&mut text, OUTPUT, u32::MAX);
        let mut drafted = rig.sequence(prompt, prompt.len(), greedy);
        let mut steps = 0;
        while drafted.output().len() < OUTPUT {
            let left = OUTPUT - drafted.output().len();
            drafted.drafts = drafts(&text, drafted.tokens.len(), left - 1, 384);
            rig.step(&mut [&mut drafted], u32::MAX);
            steps += 1;
        }
        assert!(steps < OUTPUT * 2 / 3, "{steps} steps");
        let pairs = text.output().iter().zip(drafted.output());
        let alike = pairs.take_while(|(one, other)| one == other).count();
        let gap = golden.greedy_top1_top2_gap.get(alike);
        assert!(alike == OUTPUT || gap.is_none_or(|gap| *gap < 1e-2), "{alike} tokens on {on:?}");
        assert!(alike > 6, "{alike} tokens on {on:?}");
        for at in 0..alike {
            let (one, other) = (text.logprobs[at], drafted.logprobs[at]);
            assert!((one - other).abs() < 1e-2, "token {at} on {on:?}: {one}, {other}");
        }
    }
}
