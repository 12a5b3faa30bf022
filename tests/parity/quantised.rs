//! Weights quantised to int8 at load time: every backend gets the same weights, and the results
//! stay close to float32.
use std::path::Path;

use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::rig::{On, Rig, Seq};

/// Largest deviation of the fast backend in f32 precision from the oracle with the same weights.
const TOLERANCE: f32 = 1e-3;

/// Deviation of log-probabilities from those of transformers in float32.
#[derive(Debug, Default)]
pub(crate) struct Drift {
    pub(crate) worst: f64,
    total: f64,
    count: u32,
    /// Sums over all prompt tokens: the basis of perplexity.
    log_likelihood: [f64; 2],
    pub(crate) prompts: usize,
    /// Number of prompts with different greedy tokens.
    pub(crate) differ: usize,
}

impl Drift {
    fn add(&mut self, got: f32, want: f64) {
        let error = (f64::from(got) - want).abs();
        self.worst = self.worst.max(error);
        self.total += error;
        self.count += 1;
    }

    pub(crate) fn mean(&self) -> f64 {
        self.total / f64::from(self.count)
    }

    pub(crate) fn perplexities(&self) -> [f64; 2] {
        self.log_likelihood.map(|sum| (-sum / f64::from(self.count)).exp())
    }
}

/// All golden prompts, followed by their greedy tokens.
pub(crate) fn answers(on: On, model: &Path, degree: u32) -> Vec<Seq> {
    some_answers(on, model, degree, usize::MAX, usize::MAX)
}

/// The first `prompts` prompts, with `output` tokens each.
pub(crate) fn some_answers(
    on: On,
    model: &Path,
    degree: u32,
    prompts: usize,
    output: usize,
) -> Vec<Seq> {
    let mut rig = Rig::on(on, model, degree);
    let sampling =
        SamplingParams { logprobs: Some(0), prompt_logprobs: Some(0), ..SamplingParams::greedy() };
    goldens(model)
        .iter()
        .take(prompts)
        .map(|golden| {
            let prompt = &golden.prompt_ids;
            let mut seq = rig.sequence(prompt, prompt.len(), sampling.clone());
            rig.run(&mut seq, output.min(golden.greedy_ids.len()), u32::MAX);
            rig.forget(&[&seq]);
            seq
        })
        .collect()
}

/// Computed from the prompts' tokens, which do not depend on the backend.
pub(crate) fn drift(model: &Path, answers: &[Seq]) -> Drift {
    let mut drift = Drift::default();
    for (golden, seq) in goldens(model).iter().zip(answers) {
        for (i, (_, got)) in seq.prompt_logprobs.iter().enumerate() {
            let want = golden.prompt_logprobs[i + 1].unwrap();
            drift.add(*got, want);
            drift.log_likelihood[0] += want;
            drift.log_likelihood[1] += f64::from(*got);
        }
        drift.prompts += 1;
        drift.differ += usize::from(seq.output() != golden.greedy_ids);
    }
    drift
}

pub(crate) fn close(a: &[Seq], b: &[Seq], tolerance: f32, what: &str) {
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.prompt_logprobs.len(), b.prompt_logprobs.len());
        let pairs = a.prompt_logprobs.iter().zip(&b.prompt_logprobs);
        for ((token, x), (other, y)) in pairs {
            assert_eq!(token, other);
            assert!((x - y).abs() < tolerance, "{what}: {x} and {y}");
        }
    }
}

/// Mean error for models with random weights: small models with large logits, where rounding
/// matters.
const RANDOM: f64 = 0.1;

fn check(model: &Path, most: f64) {
    let oracle = answers(On::ReferenceInt8, model, 1);
    for degree in [1, 2] {
        let what = format!("{} at tp {degree}", model.display());
        close(&answers(On::CpuInt8, model, degree), &oracle, TOLERANCE, &what);
    }
    let two = answers(On::ReferenceInt8, model, 2);
    close(&two, &oracle, TOLERANCE, "the oracle of 2 ranks");
    for on in [On::ReferenceInt8, On::CpuBf16, On::CpuBf16Int8] {
        let drift = drift(model, &answers(on, model, 1));
        let [before, after] = drift.perplexities();
        println!(
            "{} on {on:?}: worst {:.1e}, mean {:.1e}, perplexity {before:.4} to {after:.4}; greedy \
             tokens differ for {} of {} prompts",
            model.display(),
            drift.worst,
            drift.mean(),
            drift.differ,
            drift.prompts
        );
        assert!(drift.mean() < most, "mean error {}", drift.mean());
        // Quantisation took place: in float32 the error would be a hundred times smaller.
        assert!(matches!(on, On::CpuBf16) || drift.mean() > 1e-4, "mean error {}", drift.mean());
    }
}

#[test]
fn demo_model() {
    check(&demo(), 0.03);
}

#[test]
fn tied_and_untied_heads() {
    check(&variant("llama-tied"), RANDOM);
    check(&variant("llama-gqa"), RANDOM);
}

#[test]
fn biases_and_head_norms() {
    check(&variant("qwen2"), RANDOM);
    check(&variant("qwen3"), RANDOM);
}

#[test]
fn projections_that_are_one_tensor_and_heads_that_are_partly_rotated() {
    check(&variant("phi4-mini"), RANDOM);
}

#[test]
fn norms_of_what_is_added() {
    check(&variant("gemma3"), RANDOM);
}

/// FP8 and 4-bit weights are quantised again; int8 weights are used as they are.
#[test]
fn checkpoints_that_are_quantised() {
    check(&variant("qwen2-fp8"), RANDOM);
    check(&variant("qwen3-fp8-blocks"), RANDOM);
    check(&variant("qwen3-moe-fp8"), RANDOM);
    check(&variant("llama-int8"), RANDOM);
    check(&variant("qwen3-awq"), RANDOM);
}

/// On GPUs, groups of at least 32 stay in 4 bits, except for experts, and so does FP8, in experts
/// too; everything else is bf16.
#[test]
fn compact_weights_on_gpus_are_the_same() {
    for (model, degree) in [
        ("llama-gptq", 1),
        ("llama-gptq", 2),
        ("llama-w4a16", 2),
        ("qwen3-awq", 2),
        ("qwen2-gptq-order", 2),
        ("qwen3-moe-w4a16", 1),
        ("gpt-oss-mxfp4", 2),
        ("qwen2-fp8", 2),
        ("qwen3-moe-fp8", 2),
    ] {
        let oracle = some_answers(On::Reference, &variant(model), 1, 3, 4);
        let emulated = some_answers(On::FakeCuda, &variant(model), degree, 3, 4);
        close(&emulated, &oracle, 0.1, model);
    }
}

/// On GPUs, the inputs of products are rounded to bf16.
#[test]
fn kernels_for_gpus_make_the_same() {
    for (model, degree) in [
        ("llama-tied", 1),
        ("qwen2", 2),
        ("gemma3", 2),
        ("mixtral", 1),
        ("qwen3-moe", 2),
        ("llama-int8", 1),
        ("qwen3-fp8-blocks", 2),
        ("deepseek-v2", 2),
        ("gpt-oss", 1),
    ] {
        let oracle = some_answers(On::ReferenceInt8, &variant(model), 1, 3, 4);
        let emulated = some_answers(On::FakeCudaInt8, &variant(model), degree, 3, 4);
        close(&emulated, &oracle, 0.1, model);
    }
}

/// Long enough for cuBLASLt, which takes weights in bf16.
#[test]
fn long_prompts_on_gpus_make_the_same() {
    let prompt: Vec<u32> = (0..300).map(|i| (i * i * 7 + i * 31 + 3) % 384).collect();
    for (model, ons) in [
        ("qwen2", [On::ReferenceInt8, On::FakeCudaInt8]),
        ("llama-gptq", [On::Reference, On::FakeCuda]),
        ("llama-gptq", [On::Reference, On::FakeInvariant]),
        ("qwen2-fp8", [On::Reference, On::FakeCuda]),
    ] {
        let [a, b] = ons.map(|on| {
            let mut rig = Rig::on(on, &variant(model), 1);
            let sampling = SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::greedy() };
            let mut seq = rig.sequence(&prompt, prompt.len(), sampling);
            rig.run(&mut seq, 1, u32::MAX);
            seq
        });
        close(&[a], &[b], 0.2, model);
    }
}

#[test]
fn experts() {
    check(&variant("mixtral"), RANDOM);
    check(&variant("qwen3-moe"), RANDOM);
    check(&variant("qwen3-moe-stacked"), RANDOM);
    check(&variant("deepseek-v3"), RANDOM);
    check(&variant("gpt-oss"), RANDOM);
    check(&variant("gpt-oss-mxfp4"), RANDOM);
}
