//! Files and sizes that the model folders of the repository do not have: a vocabulary that no
//! degree divides, weights of several types, numbers that are not finite.
use kernels::ReferenceBackend;
use serde_json::json;

use crate::checkpoint::{Folder, Tensor};
use crate::exchange;
use crate::replica::{Generated, Replica, Request, Schedule, engine_config, start_engine};

/// The folder's answer to prompts that name its first and last tokens.
fn answers(folder: &Folder, vocab: u32, tp: u32) -> Vec<Generated> {
    let prompts = [vec![0, vocab - 1, vocab / 2, vocab / 3], vec![vocab - 1; 7], vec![vocab / 2]];
    let requests = prompts.map(|prompt| Request::greedy(&prompt, 12));
    Replica::start(folder.path(), tp, ReferenceBackend::new).run(&requests, Schedule::WHOLE)
}

fn assert_close(found: &[Generated], wanted: &[Generated]) {
    let scores = |generated: &Generated| -> Vec<f32> {
        let all = generated.prompt_logprobs.iter().chain(&generated.logprobs);
        all.flat_map(|scored| scored.top.iter().map(|top| top.1).chain([scored.logprob])).collect()
    };
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.tokens, wanted.tokens);
        let (found, wanted) = (scores(found), scores(wanted));
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(&wanted) {
            assert!((found - wanted).abs() < 1e-4, "{found}, not {wanted}");
        }
    }
}

/// 381 leaves the last of four ranks short, 5 leaves it with padding alone.
#[test]
fn a_vocabulary_that_does_not_divide_is_padded() {
    for vocab in [381, 5] {
        let folder = Folder::copy_of("llama-gqa");
        folder.configure("vocab_size", json!(vocab));
        // Its end tokens may be beyond the vocabulary now.
        folder.damage("generation_config.json", |bytes| *bytes = b"{}".to_vec());
        folder.edit(|tensors| {
            for tensor in tensors.iter_mut().filter(|tensor| tensor.shape[0] == 384) {
                tensor.cut_rows(vocab);
            }
        });
        let whole = answers(&folder, vocab as u32, 1);
        let tops = whole[0].logprobs.iter().flat_map(|scored| &scored.top);
        assert!(tops.clone().count() > 0 && tops.clone().all(|top| (top.0 as usize) < vocab));
        for tp in [2, 4] {
            assert_close(&answers(&folder, vocab as u32, tp), &whole);
        }
    }
}

#[test]
fn element_types_mix_within_a_matrix() {
    let folder = Folder::copy_of("llama-gqa");
    let narrow = answers(&folder, 384, 2);
    folder.edit(|tensors| tensors.iter_mut().step_by(2).for_each(Tensor::widen));
    assert_eq!(answers(&folder, 384, 2), narrow);
}

#[test]
fn tensors_that_the_model_does_not_use_are_no_error() {
    let folder = Folder::copy_of("llama-tied");
    let before = answers(&folder, 384, 1);
    folder.edit(|tensors| {
        let mut unused = tensors[0].clone();
        unused.name = "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned();
        tensors.push(unused);
        let mut head = tensors[0].clone();
        head.name = "lm_head.weight".to_owned();
        head.data.fill(0);
        tensors.push(head);
    });
    assert_eq!(answers(&folder, 384, 1), before, "tied embeddings win over a stored lm_head");
}

#[test]
fn logits_that_are_not_finite_are_reported_and_the_engine_goes_on() {
    use shared::ids::{BlockId, SeqId, StepId};
    use shared::protocol::{NewSequence, SequenceStep, StepPlan};

    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| {
        let norm = tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap();
        norm.data[..2].copy_from_slice(&[0xc0, 0x7f]); // NaN
    });
    let collective = Box::new(exchange::group(1).remove(0));
    let backend = ReferenceBackend::new(collective);
    let mut engine = start_engine(folder.path(), backend, engine_config());
    let request = Request::greedy(&[1, 2, 3], 2);
    let run = |start, count| SequenceStep {
        seq: SeqId(1),
        start,
        count,
        new_blocks: if start == 0 { vec![BlockId(0)] } else { Vec::new() },
        sample: true,
    };
    let mut outputs = Vec::new();
    let admitted = vec![NewSequence {
        seq: SeqId(1),
        tokens: request.prompt,
        num_prompt: 3,
        sampling: request.sampling,
    }];
    let first =
        StepPlan { step: StepId(1), admitted, sequences: vec![run(0, 3)], ..StepPlan::default() };
    engine.step(&first, &mut outputs).unwrap();
    assert!(outputs[0].corrupted);
    // The next plan was already under way when the coordinator learns of it.
    let next = StepPlan { step: StepId(2), sequences: vec![run(3, 1)], ..StepPlan::default() };
    engine.step(&next, &mut outputs).unwrap();
    assert!(outputs[0].corrupted);
}
