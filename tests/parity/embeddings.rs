//! Embeddings compared with those of transformers: all ways of pooling, whole prompts and chunks,
//! alone and beside sequences that generate tokens.
use std::path::Path;

use shared::protocol::Quantization;
use shared::sampling::{Pooling, SamplingParams};
use testkit::models::{EmbeddingGolden, demo, embedding_goldens, variant};
use worker::model::config::ModelConfig;
use worker::model::draft::DraftFiles;

use crate::checkpoint::Folder;
use crate::rig::{On, Rig, Seq};

/// Largest deviation of the cosine of two vectors from 1, and of each element.
const FLOAT32: f64 = 1e-4;
/// The same where products, or the pooled activations, are in bf16.
const BFLOAT16: f64 = 2e-2;

const POOLINGS: [Pooling; 3] = [Pooling::Last, Pooling::First, Pooling::Mean];

fn wanted(golden: &EmbeddingGolden, pooling: Pooling) -> &[f64] {
    match pooling {
        Pooling::Last => &golden.last,
        Pooling::First => &golden.first,
        Pooling::Mean => &golden.mean,
    }
}

fn asking(rig: &mut Rig, golden: &EmbeddingGolden, pooling: Pooling) -> Seq {
    let sampling = SamplingParams { pooling: Some(pooling), ..SamplingParams::greedy() };
    rig.sequence(&golden.prompt_ids, golden.prompt_ids.len(), sampling)
}

fn check(seq: &Seq, golden: &EmbeddingGolden, pooling: Pooling, tolerance: f64, at: &str) {
    let expected = wanted(golden, pooling);
    assert_eq!(seq.embedding.len(), expected.len(), "{at}");
    let length = seq.embedding.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let mut cosine = 0.0;
    for (index, (value, expected)) in seq.embedding.iter().zip(expected).enumerate() {
        let value = f64::from(*value) / length;
        let error = (value - expected).abs();
        assert!(error < tolerance, "{at}, {pooling:?}: number {index}: {value} for {expected}");
        cosine += value * expected;
    }
    assert!(cosine > 1.0 - tolerance, "{at}, {pooling:?}: cosine {cosine}");
}

fn check_on(on: On, model: &Path, degrees: &[u32], tolerance: f64) {
    let goldens = embedding_goldens(model);
    assert!(goldens.iter().any(|golden| golden.prompt_ids.len() > 64));
    for degree in degrees {
        let mut rig = Rig::on(on, model, *degree);
        for chunk in [u32::MAX, 17] {
            for golden in &goldens {
                let at = format!("{} on {on:?}, tp {degree}, chunks of {chunk}", golden.name);
                let mut seqs = POOLINGS.map(|pooling| asking(&mut rig, golden, pooling));
                let longest = golden.prompt_ids.len() as u32;
                for _ in 0..longest.div_ceil(chunk) {
                    rig.step(&mut seqs.each_mut(), chunk);
                }
                for (seq, pooling) in seqs.iter().zip(POOLINGS) {
                    check(seq, golden, pooling, tolerance, &at);
                }
                rig.forget(&seqs.each_ref());
            }
        }
    }
}

#[test]
fn they_are_those_of_transformers() {
    for model in [demo(), variant("qwen3"), variant("llama-gqa")] {
        check_on(On::Cpu, &model, &[1, 2], FLOAT32);
        check_on(On::CpuBf16, &model, &[1], BFLOAT16);
    }
    check_on(On::Reference, &variant("qwen3"), &[1, 2], FLOAT32);
}

/// The divisor of logits is merged into the last norm's weight, from which embeddings are read.
#[test]
fn they_do_not_depend_on_what_logits_are_divided_by() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(variant("granite").join("config.json")).unwrap();
    std::fs::copy(
        variant("granite").join("model.safetensors"),
        folder.path().join("model.safetensors"),
    )
    .unwrap();
    let prompt: Vec<u32> = (40..60).collect();
    let [one, twice] = ["1.3", "2.6"].map(|scaling| {
        let text = text.replace("scaling\": 1.3", &format!("scaling\": {scaling}"));
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        let mut rig = Rig::new(folder.path(), 1);
        let sampling = SamplingParams { pooling: Some(Pooling::Mean), ..SamplingParams::greedy() };
        let mut seq = rig.sequence(&prompt, prompt.len(), sampling);
        rig.step(&mut [&mut seq], u32::MAX);
        seq.embedding.clone()
    });
    assert!(one.iter().any(|value| *value != 0.0));
    assert_eq!(one, twice);
}

#[test]
fn they_are_on_emulated_gpus() {
    check_on(On::FakeCuda, &variant("qwen3"), &[1, 2], BFLOAT16);
}

#[test]
fn they_share_steps_with_sequences_that_get_tokens() {
    let model = demo();
    let goldens = embedding_goldens(&model);
    let mut rig = Rig::new(&model, 2);
    let prompt = &goldens[1].prompt_ids;
    let mut alone = rig.sequence(prompt, prompt.len(), SamplingParams::greedy());
    rig.run(&mut alone, 8, u32::MAX);
    rig.forget(&[&alone]);
    let mut writes = rig.sequence(prompt, prompt.len(), SamplingParams::greedy());
    rig.run(&mut writes, 2, u32::MAX);
    let mut seqs = POOLINGS.map(|pooling| asking(&mut rig, &goldens[0], pooling));
    let steps = (goldens[0].prompt_ids.len() as u32).div_ceil(17);
    for _ in 0..steps {
        let [last, first, mean] = seqs.each_mut();
        // Outputs are in the plan's order.
        rig.step(&mut [last, &mut writes, first, mean], 17);
    }
    while writes.output().len() < 8 {
        rig.step(&mut [&mut writes], 17);
    }
    assert_eq!(writes.output()[..8], alone.output()[..8]);
    for (seq, pooling) in seqs.iter().zip(POOLINGS) {
        check(seq, &goldens[0], pooling, FLOAT32, "beside one that writes");
    }
}

/// The same weights as Qwen3-Embedding 8B has them: without names of a whole model, and without an
/// output head, though it would not be the embedding.
fn headless() -> Folder {
    let folder = Folder::copy_of("qwen3");
    folder.save_base_model();
    folder.configure("tie_word_embeddings", false.into());
    folder
}

#[test]
fn they_need_no_output_head() {
    let folder = headless();
    check_on(On::Cpu, folder.path(), &[1, 2], FLOAT32);
    check_on(On::CpuInt8, folder.path(), &[1], BFLOAT16);
    worker::check::model(folder.path(), 2, Quantization::Int8).unwrap();
    let model = ModelConfig::load(folder.path()).unwrap();
    let error = DraftFiles::open(folder.path(), &model).unwrap_err().to_string();
    assert!(error.contains("no output head (lm_head.weight)"), "{error}");
    // Nothing else may be missing, nor the head of what has the names of a whole model.
    for (lacks, says) in
        [("norm.weight", "model.norm.weight"), ("layers.1.mlp.up_proj.weight", "up_proj")]
    {
        let folder = headless();
        folder.edit(|tensors| tensors.retain(|tensor| tensor.name != lacks));
        let error = worker::check::model(folder.path(), 1, Quantization::None).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    let whole = Folder::copy_of("qwen3");
    whole.configure("tie_word_embeddings", false.into());
    let error = worker::check::model(whole.path(), 1, Quantization::None).unwrap_err();
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
}

/// A front end that has not seen the weights may ask for it.
#[test]
#[should_panic(expected = "!output.corrupted")]
fn what_is_generated_without_an_output_head_is_no_text() {
    let folder = headless();
    let mut rig = Rig::new(folder.path(), 1);
    let mut seq = rig.sequence(&[40, 41, 42], 3, SamplingParams::greedy());
    rig.step(&mut [&mut seq], u32::MAX);
}
