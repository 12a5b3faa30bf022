//! The same request gives the same tokens and the same bits, however it is run.
use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::rig::{On, Rig, Seq};

const ON_AND_DEGREES: [(On, u32); 6] = [
    (On::Cpu, 1),
    (On::Cpu, 2),
    (On::CpuBf16, 1),
    (On::CpuBf16, 2),
    (On::CpuInt8, 1),
    (On::CpuBf16Int8, 2),
];

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        top_k: 50,
        seed,
        presence_penalty: 0.3,
        repetition_penalty: 1.1,
        logprobs: Some(0),
        ..SamplingParams::default()
    }
}

fn greedy() -> SamplingParams {
    SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() }
}

fn same(a: &Seq, b: &Seq, what: &str) {
    assert_eq!(a.output(), b.output(), "{what}");
    let bits = |seq: &Seq| seq.logprobs.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b), "{what}: log-probabilities, bit by bit");
}

#[test]
fn chunked_prefill_gives_the_same_bits() {
    let models = [
        "mistral-swa",
        "gemma2",
        "gemma3",
        "smollm3",
        "granite",
        "qwen3",
        "qwen3-moe",
        "deepseek-v2",
        "llama-gptq",
        "qwen3-moe-w4a16",
        "gpt-oss",
        "gpt-oss-mxfp4",
    ];
    for model in std::iter::once(demo()).chain(models.map(variant)) {
        for (on, degree) in ON_AND_DEGREES {
            let mut rig = Rig::on(on, &model, degree);
            let golden = goldens(&model).into_iter().max_by_key(|g| g.prompt_ids.len()).unwrap();
            let prompt = &golden.prompt_ids;
            let mut whole = rig.sequence(prompt, prompt.len(), greedy());
            rig.run(&mut whole, 16, u32::MAX);
            for chunk in [1, 5, 16, 33] {
                let mut chunked = rig.sequence(prompt, prompt.len(), greedy());
                rig.run(&mut chunked, 16, chunk);
                same(&whole, &chunked, &format!("chunks of {chunk} on {on:?} at tp {degree}"));
                rig.forget(&[&chunked]);
            }
        }
    }
}

#[test]
fn a_request_in_a_batch_of_32_gets_the_same_bits_as_alone() {
    let prompts: Vec<Vec<u32>> = goldens(&demo()).into_iter().map(|g| g.prompt_ids).collect();
    for (on, degree) in ON_AND_DEGREES {
        let mut rig = Rig::on(on, &demo(), degree);
        let request = |i: usize| {
            let sampling = if i.is_multiple_of(2) { greedy() } else { sampled(i as u64) };
            (prompts[i % prompts.len()].clone(), sampling)
        };
        let mut alone = Vec::new();
        for i in 0..32 {
            let (prompt, sampling) = request(i);
            let mut seq = rig.sequence(&prompt, prompt.len(), sampling);
            rig.run(&mut seq, 12, u32::MAX);
            rig.forget(&[&seq]);
            alone.push(seq);
        }
        let mut batch: Vec<Seq> = (0..32)
            .map(|i| {
                let (prompt, sampling) = request(i);
                rig.sequence(&prompt, prompt.len(), sampling)
            })
            .collect();
        // Sequences join one by one, so that most steps mix prefill and decode.
        let mut running = 0;
        while batch.iter().any(|seq| seq.output().len() < 12) {
            running = (running + 3).min(batch.len());
            let mut step: Vec<&mut Seq> =
                batch[..running].iter_mut().filter(|seq| seq.output().len() < 12).collect();
            rig.step(&mut step, 24);
        }
        for (i, (alone, together)) in alone.iter().zip(&batch).enumerate() {
            same(alone, together, &format!("request {i} on {on:?} at tp {degree}"));
        }
    }
}

#[test]
fn a_sequence_admitted_again_with_its_accepted_tokens_goes_on_identically() {
    let prompt = goldens(&demo())[0].prompt_ids.clone();
    let cases = [greedy(), sampled(7), sampled(8)];
    for (on, sampling) in
        [On::Cpu, On::CpuBf16].into_iter().flat_map(|on| cases.clone().map(|it| (on, it)))
    {
        let mut rig = Rig::on(on, &demo(), 2);
        let mut whole = rig.sequence(&prompt, prompt.len(), sampling.clone());
        rig.run(&mut whole, 24, u32::MAX);
        for accepted in [1, 7, 23] {
            let tokens = &whole.tokens[..prompt.len() + accepted];
            let mut again = rig.sequence(tokens, prompt.len(), sampling.clone());
            rig.run(&mut again, 24, 10);
            assert_eq!(again.tokens, whole.tokens, "after {accepted} tokens on {on:?}");
            rig.forget(&[&again]);
        }
    }
}

#[test]
fn seeds_and_choices_differ() {
    let mut rig = Rig::new(&demo(), 1);
    let prompt = goldens(&demo())[0].prompt_ids.clone();
    let mut run = |seed, choice| {
        let sampling = SamplingParams { choice, ..sampled(seed) };
        let mut seq = rig.sequence(&prompt, prompt.len(), sampling);
        rig.run(&mut seq, 24, u32::MAX);
        rig.forget(&[&seq]);
        seq.output().to_vec()
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(2, 0));
    assert_ne!(run(1, 0), run(1, 1));
}

/// A replica that continues with fewer or more ranks gives the same bits: each rank computes the
/// sums of the ranks that it stands for.
#[test]
fn every_degree_gives_the_bits_of_the_wanted_one() {
    for model in [
        demo(),
        variant("qwen3"),
        variant("mistral-swa"),
        variant("gemma3"),
        variant("exaone4"),
        variant("olmo2"),
        variant("cohere2"),
        variant("starcoder2"),
        variant("qwen2-moe"),
        variant("qwen2"),
        variant("phi4-mini"),
        variant("smollm3"),
        variant("mixtral"),
        variant("qwen3-moe"),
        variant("minimax-m2"),
        variant("deepseek-v3"),
        variant("granite-4-h"),
        variant("granite-4-h-moe"),
        variant("qwen3-next"),
        variant("qwen3-fp8-blocks"),
        variant("qwen3-moe-fp8"),
        variant("llama-int8"),
        variant("llama-gptq"),
        variant("qwen2-gptq-order"),
        variant("qwen3-moe-w4a16"),
        variant("gpt-oss"),
        variant("gpt-oss-mxfp4"),
    ] {
        let golden = goldens(&model).into_iter().max_by_key(|g| g.prompt_ids.len()).unwrap();
        let prompt = &golden.prompt_ids;
        for (on, sampling) in
            [(On::Cpu, greedy()), (On::Cpu, sampled(3)), (On::CpuBf16, sampled(3))]
                .into_iter()
                .chain([(On::CpuInt8, greedy()), (On::CpuBf16Int8, sampled(3))])
        {
            let run = |degrees| {
                let mut rig = Rig::reducing(on, &model, degrees);
                let mut seq = rig.sequence(prompt, prompt.len(), sampling.clone());
                rig.run(&mut seq, 24, 33);
                seq
            };
            let whole = run((4, 4));
            for degree in [2, 1] {
                let what = format!("{} on {on:?}: {degree} ranks as 4", model.display());
                same(&run((degree, 4)), &whole, &what);
            }
            // By default, a degree computes its own sums: this test can fail. With rounded
            // activations, a small model may hide the difference.
            let own = run((1, 1));
            let bits = |seq: &Seq| seq.logprobs.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
            if matches!(on, On::Cpu) {
                assert_ne!(bits(&own), bits(&whole), "{}", model.display());
            }
        }
    }
}
