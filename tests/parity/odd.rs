//! Model folders unlike those of the repository: a vocabulary that no degree divides, weights of
//! several types, unused tensors, values that are not finite.
use std::path::Path;

use kernels::ReferenceBackend;
use kernels::collective::single_rank;
use serde_json::json;
use shared::ids::{BlockId, SeqId, StepId};
use shared::protocol::{Drafts, EngineConfig, KvCacheDtype, NewSequence, SequenceStep, StepPlan};
use shared::sampling::SamplingParams;
use worker::rank::EmptyStepSource;

use crate::checkpoint::{Folder, Tensor};
use crate::rig::{On, Rig, Seq, engine_of};

fn params() -> SamplingParams {
    SamplingParams { logprobs: Some(5), prompt_logprobs: Some(0), ..SamplingParams::greedy() }
}

/// The model's answers to prompts with its first and last tokens.
fn answers(on: On, folder: &Path, vocab: u32, degree: u32) -> Vec<Seq> {
    let prompts = [vec![0, vocab - 1, vocab / 2, vocab / 3], vec![vocab - 1; 7], vec![vocab / 2]];
    let mut rig = Rig::on(on, folder, degree);
    prompts
        .iter()
        .map(|prompt| {
            let mut seq = rig.sequence(prompt, prompt.len(), params());
            rig.run(&mut seq, 12, u32::MAX);
            rig.forget(&[&seq]);
            seq
        })
        .collect()
}

fn assert_close(found: &[Seq], wanted: &[Seq], what: &str) {
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.tokens, wanted.tokens, "{what}");
        let scores = |seq: &Seq| -> Vec<f32> {
            seq.prompt_logprobs.iter().map(|scored| scored.1).chain(seq.logprobs.clone()).collect()
        };
        let (found, wanted) = (scores(found), scores(wanted));
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(&wanted) {
            assert!((found - wanted).abs() < 1e-3, "{what}: {found}, not {wanted}");
        }
    }
}

/// 381 leaves the last of four ranks with fewer tokens, 5 leaves it with padding only.
#[test]
fn a_vocabulary_that_does_not_divide_is_padded() {
    for vocab in [381, 5] {
        let folder = Folder::copy_of("llama-gqa");
        folder.configure("vocab_size", json!(vocab));
        folder.edit(|tensors| {
            for tensor in tensors.iter_mut().filter(|tensor| tensor.shape[0] == 384) {
                tensor.cut_rows(vocab);
            }
        });
        let vocab = vocab as u32;
        let whole = answers(On::Reference, folder.path(), vocab, 1);
        assert!(whole.iter().all(|seq| seq.tokens.iter().all(|token| *token < vocab)));
        for (on, degree) in [(On::Reference, 2), (On::Reference, 4), (On::Cpu, 1), (On::Cpu, 4)] {
            let what = format!("{on:?}, vocabulary of {vocab}, tp {degree}");
            assert_close(&answers(on, folder.path(), vocab, degree), &whole, &what);
        }
    }
}

#[test]
fn element_types_mix_within_a_matrix() {
    let narrow = Folder::copy_of("llama-gqa");
    let mixed = Folder::copy_of("llama-gqa");
    mixed.edit(|tensors| tensors.iter_mut().step_by(2).for_each(Tensor::widen));
    for on in [On::Reference, On::Cpu] {
        let (mixed, narrow) = (mixed.path(), narrow.path());
        let what = format!("{on:?}");
        assert_close(&answers(on, mixed, 384, 2), &answers(on, narrow, 384, 2), &what);
    }
}

#[test]
fn tensors_that_the_model_does_not_use_are_no_error() {
    let folder = Folder::copy_of("llama-tied");
    let before = answers(On::Reference, folder.path(), 384, 1);
    folder.edit(|tensors| {
        let mut unused = tensors[0].clone();
        unused.name = "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned();
        let mut head = tensors[0].clone();
        head.name = "lm_head.weight".to_owned();
        head.data.fill(0);
        tensors.extend([unused, head]);
    });
    let after = answers(On::Reference, folder.path(), 384, 1);
    assert_close(&after, &before, "tied embeddings win over a stored lm_head");
}

#[test]
fn logits_that_are_not_finite_are_reported_and_the_engine_goes_on() {
    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| {
        let norm = tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap();
        norm.data[..2].copy_from_slice(&[0xc0, 0x7f]); // NaN
    });
    let sizes = EngineConfig {
        block_size: 4,
        max_model_len: 16,
        max_num_seqs: 2,
        max_num_batched_tokens: 16,
        kv_cache_bytes: 1 << 20,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let backend = ReferenceBackend::new(single_rank());
    let mut engine = engine_of(folder.path(), 0, 1, backend, sizes).unwrap();
    engine.start(4, 0).unwrap();
    let run = |start: u32, count, sample| SequenceStep {
        seq: SeqId(1),
        start,
        count,
        new_blocks: if start == 0 { vec![BlockId(0)] } else { Vec::new() },
        sample,
        masked: false,
        drafts: Drafts::none(),
    };
    let admitted = vec![NewSequence {
        seq: SeqId(1),
        tokens: vec![1, 2, 3],
        num_prompt: 3,
        adapter: 0,
        sampling: params(),
    }];
    let steps = [
        // A prefill chunk that only scores its prompt, the chunk that samples, and the step that
        // was already in flight when the coordinator learned of it.
        StepPlan {
            step: StepId(1),
            admitted,
            sequences: vec![run(0, 2, false)],
            ..StepPlan::default()
        },
        StepPlan { step: StepId(2), sequences: vec![run(2, 1, true)], ..StepPlan::default() },
        StepPlan { step: StepId(3), sequences: vec![run(3, 1, true)], ..StepPlan::default() },
    ];
    for plan in steps {
        let mut outputs = Vec::new();
        engine.step(&plan, &mut EmptyStepSource, &mut outputs).unwrap();
        assert_eq!(outputs.len(), 1);
        assert!(outputs[0].corrupted, "{:?}", outputs[0]);
    }
}
