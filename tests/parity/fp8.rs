//! K and V in FP8: every backend stores the same values, and results stay close to those without.
use std::path::Path;

use serde_json::json;
use shared::sampling::SamplingParams;
use testkit::models::{demo, goldens, variant};

use crate::checkpoint::Folder;
use crate::quantised::{Drift, answers, close, drift, some_answers};
use crate::rig::{On, Rig, Seq};

/// Largest deviation of the fast backend in f32 precision from the oracle with the same storage. An
/// element halfway between two values may become one on the one and the other on the other, which
/// is a sixteenth of it.
const TOLERANCE: f32 = 0.1;

/// How many of the sequences have the same tokens.
fn alike(a: &[Seq], b: &[Seq]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a.tokens == b.tokens).count()
}

fn mean_difference(a: &[Seq], b: &[Seq]) -> f64 {
    let pairs: Vec<f64> = a
        .iter()
        .zip(b)
        .flat_map(|(a, b)| a.prompt_logprobs.iter().zip(&b.prompt_logprobs))
        .map(|((_, x), (_, y))| f64::from((x - y).abs()))
        .collect();
    pairs.iter().sum::<f64>() / pairs.len() as f64
}

fn report(model: &Path, on: On, drift: &Drift) {
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
}

fn check(model: &Path, most: f64) {
    let oracle = answers(On::ReferenceFp8, model, 1);
    for degree in [1, 2] {
        let what = format!("{} at tp {degree}", model.display());
        let found = answers(On::CpuFp8, model, degree);
        close(&found, &oracle, TOLERANCE, &what);
        let (mean, same) = (mean_difference(&found, &oracle), alike(&found, &oracle));
        println!("{what}: mean difference {mean:.1e}, {same} of {} texts", oracle.len());
        assert!(mean < 3e-3, "{what}: mean difference {mean}");
        assert!(same + 2 >= oracle.len(), "{what}: {same} of {} texts", oracle.len());
    }
    let [oracle, plain, fast] = [On::ReferenceFp8, On::CpuBf16, On::CpuBf16Fp8].map(|on| {
        let drift = drift(model, &answers(on, model, 1));
        report(model, on, &drift);
        assert!(drift.mean() < most, "mean error {}", drift.mean());
        drift.mean()
    });
    // K and V are rounded: in float32 the error would be a hundred times smaller.
    assert!(oracle > 1e-4, "mean error {oracle}");
    // What bf16 rounds is finer.
    assert!(fast > 2.0 * plain, "mean error {fast}, without FP8 {plain}");
}

#[test]
fn demo_model() {
    check(&demo(), 0.1);
}

/// Small models with random weights and large logits, where rounding matters; one has windows.
#[test]
fn random_models() {
    check(&variant("llama-gqa"), 0.15);
    check(&variant("gemma3"), 0.15);
    // K is normalised over all heads before it is rounded.
    check(&variant("olmo2"), 0.15);
    check(&variant("deepseek-v3"), 0.15);
}

fn bits(seq: &Seq) -> Vec<u32> {
    seq.logprobs.iter().map(|x| x.to_bits()).collect()
}

/// In chunks, in a batch, admitted again with its accepted tokens, on fewer ranks: what a sequence
/// reads of the cache is the same.
#[test]
fn the_same_request_gives_the_same_bits() {
    let sampling = || SamplingParams {
        temperature: 0.9,
        seed: 5,
        logprobs: Some(0),
        ..SamplingParams::default()
    };
    for (model, on) in [("llama-gqa", On::CpuFp8), ("gemma3", On::CpuBf16Fp8)] {
        let model = variant(model);
        let golden = goldens(&model).into_iter().max_by_key(|it| it.prompt_ids.len()).unwrap();
        let prompt = &golden.prompt_ids;
        let mut rig = Rig::on(on, &model, 2);
        let mut whole = rig.sequence(prompt, prompt.len(), sampling());
        rig.run(&mut whole, 16, u32::MAX);
        let mut chunked = rig.sequence(prompt, prompt.len(), sampling());
        let mut other = rig.sequence(&prompt[..5], 5, sampling());
        while chunked.output().len() < 16 {
            rig.step(&mut [&mut other, &mut chunked], 7);
        }
        assert_eq!((chunked.output(), bits(&chunked)), (whole.output(), bits(&whole)), "{on:?}");
        let accepted = &whole.tokens[..prompt.len() + 9];
        let mut again = rig.sequence(accepted, prompt.len(), sampling());
        rig.run(&mut again, 16, u32::MAX);
        assert_eq!(again.output(), whole.output(), "{on:?}: admitted again");
        let mut fewer = Rig::reducing(on, &model, (1, 2));
        let mut alone = fewer.sequence(prompt, prompt.len(), sampling());
        fewer.run(&mut alone, 16, u32::MAX);
        assert_eq!((alone.output(), bits(&alone)), (whole.output(), bits(&whole)), "{on:?}: tp 1");
    }
}

/// The repository's models have small heads; these have 64 elements, for which there are kernels.
#[test]
fn kernels_for_gpus_make_the_same() {
    let wide = Folder::copy_of("llama-gqa");
    wide.configure("head_dim", json!(64));
    wide.edit(|tensors| {
        for tensor in tensors.iter_mut().filter(|it| it.name.contains("self_attn")) {
            let axis = usize::from(tensor.name.contains("o_proj"));
            tensor.shape[axis] *= 4;
            tensor.data = tensor.data.repeat(4);
        }
    });
    let folders = ["gemma3", "olmo2", "deepseek-v2"].map(variant);
    let others = folders.iter().map(|folder| (folder.as_path(), 2));
    for (model, degree) in [(wide.path(), 1), (wide.path(), 2)].into_iter().chain(others) {
        let oracle = some_answers(On::ReferenceFp8, model, 1, 3, 4);
        let emulated = some_answers(On::FakeCudaFp8, model, degree, 3, 4);
        close(&emulated, &oracle, 0.3, &model.display().to_string());
        let mean = mean_difference(&emulated, &oracle);
        assert!(mean < 0.05, "{}: mean difference {mean}", model.display());
    }
}
