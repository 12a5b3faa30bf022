//! A draft model changes the number of steps that a text takes and nothing else: not a token, not a
//! bit of a log-probability, however good or bad its drafts are.
use std::path::Path;

use shared::protocol::Lora;
use shared::sampling::SamplingParams;
use testkit::adapters::AdapterSpec;
use testkit::models::{demo, goldens, variant};

use crate::adapters::Scratch;
use crate::drafts::{self, OUTPUT, requests, same};
use crate::rig::{On, Rig, Seq};

/// Maximum number of drafts requested.
const MOST: u32 = 5;

/// The prompts of a model, and their continuations without drafts.
struct Texts {
    prompts: Vec<Vec<u32>>,
    texts: Vec<Seq>,
}

impl Texts {
    fn of(on: On, model: &Path, degree: u32, lora: &Lora) -> Self {
        let mut rig = Rig::adapted(on, model, (degree, degree), lora);
        let prompts: Vec<Vec<u32>> = goldens(model).into_iter().map(|it| it.prompt_ids).collect();
        let texts = drafts::texts(&mut rig, on, &prompts, |at| adapter(at, lora));
        Self { prompts, texts }
    }

    /// Generates all texts in one batch with drafts, beside a prompt that is computed in parts;
    /// returns the number of steps.
    fn drafted(
        &self,
        rig: &mut Rig,
        lora: &Lora,
        asks: impl Fn(usize) -> u32,
        what: &str,
    ) -> usize {
        let long = self.prompts.iter().max_by_key(|prompt| prompt.len()).unwrap();
        let mut beside = rig.sequence(long, long.len(), SamplingParams::greedy());
        let mut batch: Vec<Seq> = Vec::new();
        for (at, (text, sampling)) in self.texts.iter().zip(requests()).enumerate() {
            let prompt = &text.tokens[..text.num_prompt];
            let mut seq = rig.sequence(prompt, text.num_prompt, sampling);
            seq.adapter = adapter(at, lora);
            batch.push(seq);
        }
        let mut steps = 0;
        while batch.iter().any(|seq| seq.output().len() < OUTPUT) {
            let mut going: Vec<&mut Seq> = Vec::new();
            for seq in &mut batch {
                let left = (OUTPUT - seq.output().len()) as u32;
                if left > 0 {
                    seq.asks = asks(seq.tokens.len()).min(left - 1);
                    going.push(seq);
                }
            }
            going.insert(steps % going.len(), &mut beside);
            rig.step(&mut going, if steps < 20 { 7 } else { u32::MAX });
            steps += 1;
        }
        for (at, (seq, text)) in batch.iter().zip(&self.texts).enumerate() {
            same(seq, text, &format!("request {at} {what}"));
        }
        let all: Vec<&Seq> = batch.iter().chain([&beside]).collect();
        rig.forget(&all);
        steps
    }
}

/// Every other request has an adapter, if there is one.
fn adapter(at: usize, lora: &Lora) -> u32 {
    if lora.adapters.is_empty() { 0 } else { at as u32 % 2 }
}

fn none() -> Lora {
    Lora::default()
}

/// The model's own drafts are all right where its sums are the same, which is on one rank.
#[test]
fn the_model_itself_is_right_and_its_text_takes_few_steps() {
    let models = ["qwen3", "llama-gqa", "gpt-oss", "gemma3"].map(variant);
    for model in models.into_iter().chain([demo()]) {
        for (on, degree) in [(On::Cpu, 1), (On::CpuBf16, 1), (On::CpuBf16, 2), (On::Reference, 1)] {
            let what = format!("of {} on {on:?} at tp {degree}", model.display());
            let texts = Texts::of(on, &model, degree, &none());
            let mut rig = Rig::drafting(on, &model, degree, &model, &none());
            let steps = texts.drafted(&mut rig, &none(), |_| MOST, &what);
            let (drafted, accepted) = rig.drafted;
            if degree == 1 {
                assert_eq!(drafted, accepted, "{what}");
            } else {
                assert!(accepted * 10 >= drafted * 8, "{accepted} of {drafted} {what}");
            }
            // Five at a time, and parts of prompts before them.
            assert!(drafted > 100 && steps < OUTPUT, "{steps} steps, {drafted} drafted {what}");
        }
    }
}

/// Another model's drafts are mostly wrong, at any number and any time.
#[test]
fn whatever_another_model_drafts_the_text_is_the_same() {
    for (name, other) in [("qwen3", "llama-gqa"), ("mistral-swa", "qwen3-moe"), ("phi3", "gemma3")]
    {
        let (model, draft) = (variant(name), variant(other));
        for (on, degree) in [(On::Cpu, 1), (On::Cpu, 2), (On::CpuBf16, 2)] {
            let what = format!("of {name} by {other} on {on:?} at tp {degree}");
            let texts = Texts::of(on, &model, degree, &none());
            let mut rig = Rig::drafting(on, &model, degree, &draft, &none());
            texts.drafted(&mut rig, &none(), |len| len as u32 * 7 % 6, &what);
            let (drafted, accepted) = rig.drafted;
            assert!(drafted > 100 && accepted < drafted / 2, "{accepted} of {drafted} {what}");
        }
    }
}

/// Drafts only now and then: in between, the draft model falls behind and catches up.
#[test]
fn a_draft_model_catches_up_with_what_it_was_not_asked_about() {
    let model = variant("llama-gqa");
    let texts = Texts::of(On::Cpu, &model, 1, &none());
    let mut rig = Rig::drafting(On::Cpu, &model, 1, &model, &none());
    texts.drafted(&mut rig, &none(), |len| if len % 4 == 0 { 3 } else { 0 }, "now and then");
    let (drafted, accepted) = rig.drafted;
    assert!(drafted > 50 && drafted == accepted, "{accepted} of {drafted}");
}

#[test]
fn a_shorter_draft_model_drafts_up_to_its_last_position() {
    let model = variant("qwen3");
    let folder = tempfile::tempdir().unwrap();
    let draft = folder.path();
    for file in std::fs::read_dir(variant("llama-gqa")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), draft.join(file.file_name())).unwrap();
    }
    // 128 positions instead of 512.
    let config = std::fs::read_to_string(draft.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = 128.into();
    std::fs::write(draft.join("config.json"), config.to_string()).unwrap();
    let mut plain = Rig::new(&model, 1);
    let prompt: Vec<u32> = (0..110).map(|at| at * 31 % 384).collect();
    let mut text = plain.sequence(&prompt, 110, SamplingParams::greedy());
    plain.run(&mut text, 40, u32::MAX);
    let mut rig = Rig::drafting(On::Cpu, &model, 1, draft, &none());
    let mut seq = rig.sequence(&prompt, 110, SamplingParams::greedy());
    rig.run(&mut seq, 1, u32::MAX);
    let mut last = 0;
    while seq.output().len() < 40 {
        let (len, before) = (seq.tokens.len() as u32, rig.drafted.0);
        seq.asks = 4.min(39 - seq.output().len() as u32);
        let asked = seq.asks;
        rig.step(&mut [&mut seq], u32::MAX);
        let drafted = rig.drafted.0 - before;
        // It computes the last token's position, and one for each draft except the last.
        assert_eq!(drafted, asked.min(128u32.saturating_sub(len - 1)), "behind {len} tokens");
        last = last.max(if drafted > 0 { len } else { 0 });
    }
    assert!(last > 120, "{last}");
    assert_eq!(seq.output(), text.output());
}

#[test]
fn requests_with_adapters_and_masks_beside_are_drafted_for_by_the_model_alone() {
    let model = variant("llama-gqa");
    let scratch = Scratch::new(&model, &[AdapterSpec::whole(8, 31)]);
    let lora = scratch.lora();
    let texts = Texts::of(On::CpuBf16, &model, 1, lora);
    let mut rig = Rig::drafting(On::CpuBf16, &model, 1, &model, lora);
    texts.drafted(&mut rig, lora, |_| MOST, "with adapters");
    let (drafted, accepted) = rig.drafted;
    assert!(accepted > 100 && accepted < drafted, "{accepted} of {drafted}");
    let plain = Texts::of(On::CpuBf16, &model, 1, &none());
    // A masked sequence, which gets its mask while others draft.
    let Seq { tokens, num_prompt, .. } = &plain.texts[1];
    let prompt = &tokens[..*num_prompt];
    let mut alone = rig.sequence(prompt, prompt.len(), SamplingParams::greedy());
    alone.rule = Some(3);
    rig.run(&mut alone, 12, u32::MAX);
    let mut ruled = rig.sequence(prompt, prompt.len(), SamplingParams::greedy());
    ruled.rule = Some(3);
    let mut drafting = rig.sequence(prompt, prompt.len(), requests().swap_remove(1));
    while ruled.output().len() < 12 {
        drafting.asks = 3;
        rig.step(&mut [&mut ruled, &mut drafting], u32::MAX);
    }
    assert_eq!(ruled.output(), alone.output());
    let whole = plain.texts[1].output();
    assert!(drafting.output().len() > 20);
    let count = whole.len().min(drafting.output().len());
    assert_eq!(drafting.output()[..count], whole[..count]);
}

/// By definition, the draft model's drafts are its own continuation of the text so far, computed
/// from scratch; those that the text continues with count. What was drafted and rejected, or not
/// asked for, must be forgotten: otherwise its drafts would differ.
#[test]
fn drafts_are_what_the_draft_model_says_of_the_text_so_far() {
    let model = variant("llama-gqa");
    let scratch = Scratch::new(&model, &[AdapterSpec::whole(8, 31)]);
    let lora = scratch.lora();
    let (mut accepted, mut rejected) = (0, 0);
    for (at, sampling) in requests().into_iter().enumerate() {
        let golden = &goldens(&model)[at % 3];
        let prompt = &golden.prompt_ids;
        // With its adapter, parts of the text differ from the draft model's.
        let mut plain = Rig::adapted(On::Cpu, &model, (1, 1), lora);
        let mut text = plain.sequence(prompt, prompt.len(), sampling.clone());
        text.adapter = 1;
        plain.run(&mut text, OUTPUT, u32::MAX);
        let mut rig = Rig::drafting(On::Cpu, &model, 1, &model, lora);
        let mut seq = rig.sequence(prompt, prompt.len(), sampling.clone());
        seq.adapter = 1;
        rig.run(&mut seq, 1, u32::MAX);
        while seq.output().len() < OUTPUT {
            let len = seq.tokens.len();
            let asks = [4, 3, 0, 5, 0, 0, 2][len % 7].min((OUTPUT - seq.output().len()) as u32 - 1);
            let mut anew = plain.sequence(&seq.tokens, prompt.len(), sampling.clone());
            plain.run(&mut anew, seq.output().len() + asks as usize, u32::MAX);
            let drafts = &anew.tokens[len..];
            let right = drafts.iter().zip(&text.tokens[len..]).take_while(|(a, b)| a == b).count();
            plain.forget(&[&anew, &text]);
            let before = rig.drafted;
            seq.asks = asks;
            rig.step(&mut [&mut seq], u32::MAX);
            let own = (rig.drafted.0 - before.0, rig.drafted.1 - before.1);
            assert_eq!(own, (asks, right as u32), "request {at} behind {len} tokens");
            (accepted, rejected) = (accepted + own.1, rejected + own.0 - own.1);
        }
        same(&seq, &text, &format!("request {at}"));
    }
    assert!(accepted > 20 && rejected > 100, "{accepted} accepted, {rejected} rejected");
}

/// With emulated CUDA kernels, whose decode steps run as graphs: the draft model has its own
/// backend on the same GPU, with its own graphs.
#[test]
fn on_gpus_that_do_not_mind_the_batch() {
    for (model, draft, degree) in [("mistral-swa", "llama-gqa", 1), ("qwen3", "qwen3", 2)] {
        let (model, draft) = (variant(model), variant(draft));
        let texts = Texts::of(On::FakeInvariant, &model, degree, &none());
        let mut rig = Rig::drafting(On::FakeInvariant, &model, degree, &draft, &none());
        let what = format!("of {} by {}", model.display(), draft.display());
        texts.drafted(&mut rig, &none(), |_| MOST, &what);
        let (drafted, accepted) = rig.drafted;
        assert!(drafted > 100, "{drafted} {what}");
        if model == draft {
            assert!(accepted * 10 >= drafted * 8, "{accepted} of {drafted} {what}");
        }
    }
}

/// Ranks that exchange data on their GPUs, with a stand-in for NCCL: drafts go through their hosts.
#[test]
fn on_gpus_that_exchange_data_among_themselves() {
    let model = variant("llama-gqa");
    let mut rig = Rig::drafting(On::FakeNccl, &model, 2, &model, &none());
    let golden = goldens(&model).into_iter().max_by_key(|it| it.prompt_ids.len()).unwrap();
    let prompt = &golden.prompt_ids;
    let mut seq = rig.sequence(prompt, prompt.len(), SamplingParams::greedy());
    let mut steps = 0;
    while seq.output().len() < OUTPUT {
        seq.asks = MOST.min((OUTPUT - seq.output().len()) as u32 - 1);
        rig.step(&mut [&mut seq], u32::MAX);
        steps += 1;
    }
    let (drafted, accepted) = rig.drafted;
    assert!(accepted * 10 >= drafted * 7 && steps < OUTPUT / 2, "{accepted} of {drafted}, {steps}");
    let alike = seq.output().iter().zip(&golden.greedy_ids).take_while(|(a, b)| a == b).count();
    let gap = golden.greedy_top1_top2_gap.get(alike);
    assert!(alike == OUTPUT || gap.is_none_or(|gap| *gap < 1e-2), "{alike} tokens");
}
