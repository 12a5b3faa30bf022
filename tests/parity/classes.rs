//! Models that sort texts into classes, compared with transformers: whole prompts and chunks, with
//! a matrix of their own and with rows of the output head.
use std::path::Path;

use kernels::collective::single_rank;
use serde_json::{Value, json};
use shared::sampling::{Pooling, SamplingParams};
use testkit::models::{ClassGolden, class_goldens, variant};

use crate::checkpoint::{Folder, Tensor};
use crate::rig::{On, Rig, Seq, engine};

/// Largest deviation of a number; they are between -5 and 5.
const FLOAT32: f64 = 1e-4;
/// The same where products, or the vectors, are in bf16.
const BFLOAT16: f64 = 0.1;

fn asking(rig: &mut Rig, prompt: &[u32]) -> Seq {
    let sampling = SamplingParams { pooling: Some(Pooling::Last), ..SamplingParams::greedy() };
    rig.sequence(prompt, prompt.len(), sampling)
}

fn check_on(on: On, model: &Path, goldens: &[ClassGolden], degrees: &[u32], tolerance: f64) {
    for degree in degrees {
        let mut rig = Rig::on(on, model, *degree);
        for golden in goldens {
            let mut seq = asking(&mut rig, &golden.prompt_ids);
            for _ in 0..golden.prompt_ids.len().div_ceil(40) {
                rig.step(&mut [&mut seq], 40);
            }
            assert_eq!(seq.embedding.len(), golden.numbers.len());
            for (number, expected) in seq.embedding.iter().zip(&golden.numbers) {
                let error = (f64::from(*number) - expected).abs();
                assert!(error < tolerance, "{on:?}, tp {degree}: {number} for {expected}");
            }
            rig.forget(&[&seq]);
        }
    }
}

#[test]
fn they_are_those_of_transformers() {
    for name in ["llama-classes", "qwen3-reranker"] {
        let (model, goldens) = (variant(name), class_goldens(&variant(name)).prompts);
        assert!(goldens[0].prompt_ids.len() > 64, "one is computed in several steps");
        check_on(On::Cpu, &model, &goldens, &[1, 2], FLOAT32);
        check_on(On::CpuBf16, &model, &goldens, &[1], BFLOAT16);
    }
    let model = variant("llama-classes");
    let goldens = class_goldens(&model).prompts;
    // The shortest ones: these backends are slow.
    let short = &goldens[goldens.len() - 2..];
    check_on(On::Reference, &model, short, &[2], FLOAT32);
    check_on(On::FakeCuda, &model, &short[1..], &[2], BFLOAT16);
    // Only the layers are quantised: there is no output head that could be.
    check_on(On::CpuInt8, &model, &goldens, &[1], 0.5);
}

/// A copy of a generating model that says yes or no with its output head.
fn asked_for_tokens(name: &str, tokens: &[String], how: &[(&str, Value)]) -> Folder {
    let folder = Folder::copy_of(name);
    folder.configure("classifier_from_token", json!(tokens));
    how.iter().for_each(|(key, value)| folder.configure(key, value.clone()));
    folder
}

#[test]
fn rows_of_the_output_head_stand_for_classes() {
    // One has an output head of its own; the other one's is its embedding.
    for name in ["llama-gqa", "qwen3"] {
        let goldens = class_goldens(&variant(name));
        let original = [("is_original_qwen3_reranker", json!(true))];
        let folder = asked_for_tokens(name, &goldens.tokens, &original);
        check_on(On::Cpu, folder.path(), &goldens.prompts, &[1, 2], FLOAT32);
        // As two classes, whose difference it is.
        let both = [("method", json!("no_post_processing"))];
        let folder = asked_for_tokens(name, &goldens.tokens, &both);
        let mut rig = Rig::on(On::Cpu, folder.path(), 2);
        let golden = &goldens.prompts[1];
        let mut seq = asking(&mut rig, &golden.prompt_ids);
        rig.step(&mut [&mut seq], u32::MAX);
        let [no, yes] = seq.embedding[..] else { panic!("{:?}", seq.embedding) };
        assert!((f64::from(yes - no) - golden.numbers[0]).abs() < FLOAT32, "{no} {yes}");
    }
}

/// Where logits are divided, tokens have the numbers of their logits; a matrix of the files is
/// multiplied with the vector as it is.
#[test]
fn scaled_logits_and_biases_count() {
    let golden = std::fs::read(variant("granite").join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let golden = &golden["prompts"][1];
    let prompt: Vec<u32> = serde_json::from_value(golden["prompt_ids"].clone()).unwrap();
    let best = golden["first_step_top5"].as_array().unwrap();
    let numbers = |folder: &Folder| {
        let mut rig = Rig::on(On::Cpu, folder.path(), 2);
        let mut seq = asking(&mut rig, &prompt);
        rig.step(&mut [&mut seq], u32::MAX);
        seq.embedding.iter().map(|number| f64::from(*number)).collect::<Vec<_>>()
    };
    let close = |found: f64, expected: f64| {
        assert!((found - expected).abs() < FLOAT32, "{found} for {expected}");
    };
    let names: Vec<String> =
        best.iter().map(|token| token["token"].as_str().unwrap().to_owned()).collect();
    let how = [("method", json!("no_post_processing"))];
    let logits = numbers(&asked_for_tokens("granite", &names, &how));
    assert_eq!(logits.len(), 5);
    for (logit, token) in logits.iter().zip(best) {
        let below = |token: &Value| token["logprob"].as_f64().unwrap();
        close(logit - logits[0], below(token) - below(&best[0]));
    }
    let folder = Folder::copy_of("granite");
    let scaling = 1.3;
    folder.configure("architectures", json!(["GraniteForSequenceClassification"]));
    folder.configure("num_labels", json!(5));
    let bias = [0.5f32, -1.25, 2.0, 0.0, 8.0];
    folder.edit(|tensors| {
        let mut score = tensors.iter().find(|it| it.name == "lm_head.weight").unwrap().clone();
        let size = score.data.len() / score.shape[0];
        let ids = best.iter().map(|token| token["id"].as_u64().unwrap() as usize);
        score.data = ids.flat_map(|id| score.data[id * size..][..size].to_vec()).collect();
        (score.name, score.shape[0]) = ("score.weight".to_owned(), 5);
        let data = bias.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (name, dtype) = ("score.bias".to_owned(), "F32".to_owned());
        tensors.extend([score, Tensor { name, dtype, shape: vec![5], data }]);
    });
    for ((number, logit), bias) in numbers(&folder).into_iter().zip(logits).zip(bias) {
        close(number, logit * scaling + f64::from(bias));
    }
}

/// In chunks, in a batch, beside sequences that get tokens, on fewer ranks.
#[test]
fn the_same_text_gives_the_same_bits() {
    let model = variant("llama-classes");
    let goldens = class_goldens(&model).prompts;
    let bits = |seq: &Seq| seq.embedding.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let prompt = &goldens[0].prompt_ids;
    let mut rig = Rig::on(On::CpuBf16, &model, 2);
    let mut alone = asking(&mut rig, prompt);
    rig.step(&mut [&mut alone], u32::MAX);
    assert_eq!(alone.embedding.len(), 3);
    let mut others: Vec<Seq> =
        goldens[1..].iter().map(|golden| asking(&mut rig, &golden.prompt_ids)).collect();
    let mut among = asking(&mut rig, prompt);
    while among.embedding.is_empty() {
        let all = others.iter_mut().chain([&mut among]);
        let mut batch: Vec<&mut Seq> = all.filter(|seq| seq.embedding.is_empty()).collect();
        rig.step(&mut batch, 13);
    }
    assert_eq!(bits(&among), bits(&alone));
    let mut fewer = Rig::reducing(On::CpuBf16, &model, (1, 2));
    let mut seq = asking(&mut fewer, prompt);
    while seq.embedding.is_empty() {
        fewer.step(&mut [&mut seq], 31);
    }
    assert_eq!(bits(&seq), bits(&alone));
}

#[test]
fn what_is_missing_or_of_another_size_is_named() {
    let refused = |folder: &Folder| {
        engine(folder.path(), 0, 1, single_rank()).map(drop).unwrap_err().to_string()
    };
    let folder = Folder::copy_of("llama-classes");
    folder.configure("id2label", json!({"0": "good", "1": "bad"}));
    let error = refused(&folder);
    assert!(error.contains("score.weight") && error.contains("[2, 64]"), "{error}");
    folder.edit(|tensors| tensors.retain(|tensor| !tensor.name.starts_with("score")));
    let error = refused(&folder);
    assert!(error.contains("score.weight"), "{error}");
    let original = [("is_original_qwen3_reranker", json!(true))];
    let tokens = |no: &str, yes: &str| {
        asked_for_tokens("qwen3", &[no.to_owned(), yes.to_owned()], &original)
    };
    let error = refused(&tokens("o", "no such token"));
    assert!(error.contains("tokenizer.json: has no token \"no such token\""), "{error}");
    let folder = tokens("o", "e");
    std::fs::remove_file(folder.file("tokenizer.json")).unwrap();
    let error = refused(&folder);
    assert!(error.contains("tokenizer.json: cannot be read"), "{error}");
    let folder = Folder::copy_of("llama-classes");
    folder.configure("architectures", json!(["BertForSequenceClassification"]));
    let error = refused(&folder);
    assert!(error.contains("architecture BertForSequenceClassification is not"), "{error}");
}
