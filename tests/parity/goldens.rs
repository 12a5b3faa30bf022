//! Prompt log-probabilities and greedy tokens of every golden prompt.
use std::path::Path;

use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::rig::{On, Rig};

/// How far a log-probability may be off.
const TOLERANCE: f64 = 1e-3;

fn check(model: &Path) {
    check_on(On::Cpu, model, &[1, 2, 4]);
    check_on(On::Reference, model, &[1, 2]);
}

fn check_on(backend: On, model: &Path, degrees: &[u32]) {
    let goldens = goldens(model);
    assert!(goldens.len() >= 6);
    for degree in degrees {
        let mut rig = Rig::on(backend, model, *degree);
        let (mut worst, mut compared) = (0.0f64, 0);
        for golden in &goldens {
            let at = format!("{} at tp {degree}", golden.name);
            let sampling = SamplingParams {
                logprobs: Some(0),
                prompt_logprobs: Some(0),
                ..SamplingParams::greedy()
            };
            let prompt = &golden.prompt_ids;
            let mut seq = rig.sequence(prompt, prompt.len(), sampling);
            rig.run(&mut seq, golden.greedy_ids.len(), u32::MAX);
            assert_eq!(seq.prompt_logprobs.len() + 1, prompt.len(), "{at}");
            for (i, (token, logprob)) in seq.prompt_logprobs.iter().enumerate() {
                assert_eq!(*token, prompt[i + 1], "{at}");
                let expected = golden.prompt_logprobs[i + 1].unwrap();
                let error = (f64::from(*logprob) - expected).abs();
                assert!(error < TOLERANCE, "{at}: prompt token {i}: {logprob} for {expected}");
                worst = worst.max(error);
            }
            for (i, expected) in golden.greedy_ids.iter().enumerate() {
                if seq.output()[i] != *expected {
                    let gap = golden.greedy_top1_top2_gap[i];
                    assert!(gap < TOLERANCE, "{at}: token {i} differs, with a gap of {gap}");
                    break;
                }
                let (logprob, expected) = (f64::from(seq.logprobs[i]), golden.greedy_logprobs[i]);
                let error = (logprob - expected).abs();
                assert!(error < TOLERANCE, "{at}: token {i}: {logprob} for {expected}");
                worst = worst.max(error);
                compared += 1;
            }
            rig.forget(&[&seq]);
        }
        println!(
            "{} on {backend:?} tp {degree}: {compared} tokens, worst error {worst:.1e}",
            model.display()
        );
        assert!(compared >= goldens.len() * 30, "{compared} tokens compared");
    }
}

#[test]
fn demo_model() {
    check(&demo());
}

macro_rules! variants {
    ($($test:ident: $folder:literal,)*) => {
        $(#[test]
        fn $test() {
            check(&variant($folder));
        })*
    };
}

variants! {
    llama_gqa: "llama-gqa",
    llama_gqa_sharded: "llama-gqa-sharded",
    llama_tied: "llama-tied",
    llama3_rope: "llama3-rope",
    llama_mha_bias: "llama-mha-bias",
    qwen2: "qwen2",
    qwen3: "qwen3",
    mistral_swa: "mistral-swa",
}
