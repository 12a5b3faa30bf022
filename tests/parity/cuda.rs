//! The CUDA backend over the stand-in for NVIDIA's driver, its kernels emulated: all of the host's
//! side runs as it would on a GPU, and the kernels' own sources compute. No GPU has checked it.
//!
//! Products' inputs are rounded to bf16, so log-probabilities are compared more loosely than on
//! CPUs, and greedy tokens where the golden's own choice was clear.
use std::path::Path;

use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::rig::{On, Rig};

/// How far a log-probability may be off.
const TOLERANCE: f64 = 0.1;

fn check(model: &Path, degree: u32, prompts: usize, output: usize) {
    let mut rig = Rig::on(On::FakeCuda, model, degree);
    let (mut worst, mut compared) = (0.0f64, 0);
    for golden in goldens(model).iter().take(prompts) {
        let at = format!("{} at tp {degree}", golden.name);
        let sampling = SamplingParams {
            logprobs: Some(0),
            prompt_logprobs: Some(0),
            ..SamplingParams::greedy()
        };
        let prompt = &golden.prompt_ids;
        let mut seq = rig.sequence(prompt, prompt.len(), sampling);
        rig.run(&mut seq, output.min(golden.greedy_ids.len()), u32::MAX);
        assert_eq!(seq.prompt_logprobs.len() + 1, prompt.len(), "{at}");
        for (i, (token, logprob)) in seq.prompt_logprobs.iter().enumerate() {
            assert_eq!(*token, prompt[i + 1], "{at}");
            let expected = golden.prompt_logprobs[i + 1].unwrap();
            let error = (f64::from(*logprob) - expected).abs();
            assert!(error < TOLERANCE, "{at}: prompt token {i}: {logprob} for {expected}");
            worst = worst.max(error);
        }
        for (i, token) in seq.output().iter().enumerate() {
            if *token != golden.greedy_ids[i] {
                let gap = golden.greedy_top1_top2_gap[i];
                assert!(gap < TOLERANCE, "{at}: token {i} differs, with a gap of {gap}");
                break;
            }
            let expected = golden.greedy_logprobs[i];
            let error = (f64::from(seq.logprobs[i]) - expected).abs();
            assert!(error < TOLERANCE, "{at}: token {i}: {} for {expected}", seq.logprobs[i]);
            worst = worst.max(error);
            compared += 1;
        }
        rig.forget(&[&seq]);
    }
    println!("{} tp {degree}: {compared} tokens, worst error {worst:.1e}", model.display());
    assert!(compared >= prompts * 4, "{compared} tokens compared");
}

macro_rules! variants {
    ($($test:ident: $folder:literal, $degree:literal;)*) => {
        $(#[test]
        fn $test() {
            check(&variant($folder), $degree, 2, 12);
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
}

#[test]
fn demo_model() {
    check(&demo(), 1, 1, 4);
}
