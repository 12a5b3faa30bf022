//! Measures structured output with a large vocabulary: preparing the vocabulary for grammars,
//! compiling a grammar, and computing the mask after each token.
//!
//! `cargo run --release -p coordinator --example guide_bench [TOKENS]`
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark's report, and its end")]
use std::collections::BTreeMap;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use coordinator::engine::{Guided, TokenGuide};
use coordinator::guide::{Guide, Guides};
use coordinator::text::model::TextModel;
use serde_json::{Value, json};
use shared::protocol::{GuideSpec, TokenMask, Whitespace};

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % n
    }
}

/// A byte-level vocabulary of random words, with the tokens that JSON needs.
fn vocabulary(size: usize) -> BTreeMap<String, usize> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let moved = (0..256u32).filter(|b| !printable(*b)).count() as u32;
    let bytes = (0..256).filter(|b| printable(*b)).chain(256..256 + moved);
    let mut words: Vec<String> = bytes.map(|c| char::from_u32(c).unwrap().to_string()).collect();
    let mut dice = Dice(3);
    let marks = [
        "{\"",
        "\":",
        "\",",
        "\"}",
        "},",
        "[]",
        ":\u{120}\"",
        ",\u{120}\"",
        "\u{10a}\u{120}\u{120}",
    ];
    words.extend(marks.map(str::to_owned));
    words.extend((10..1000).map(|number| number.to_string()));
    let letters: Vec<char> = ('a'..='z').chain("etaoinshr".repeat(3).chars()).collect();
    let mut known: std::collections::HashSet<String> = words.iter().cloned().collect();
    while words.len() < size {
        let length = 2 + dice.below(8);
        let mut word: String = (0..length).map(|_| letters[dice.below(letters.len())]).collect();
        match dice.below(10) {
            0..5 => word.insert(0, '\u{120}'),
            5 => word = word.to_uppercase(),
            6 => word.push(['.', ',', '"', ':', ')'][dice.below(5)]),
            _ => {}
        }
        if known.insert(word.clone()) {
            words.push(word);
        }
    }
    words.into_iter().enumerate().map(|(id, word)| (word, id)).collect()
}

fn model(size: usize) -> TextModel {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": size, "content": "<|end|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "vocab": vocabulary(size), "merges": []},
    });
    let config =
        json!({"vocab_size": size + 1, "max_position_embeddings": 4096, "eos_token_id": size});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    TextModel::load(folder.path()).unwrap()
}

fn schema(schema: &Value) -> GuideSpec {
    GuideSpec::Json { schema: schema.to_string(), whitespace: Whitespace::Usual }
}

/// Waits for the mask of the next token.
fn known(guide: &mut Guide) -> &TokenMask {
    let mut context = Context::from_waker(Waker::noop());
    while guide.poll(&mut context).is_pending() {
        std::thread::yield_now();
    }
    guide.allowed().unwrap()
}

/// Measures many sequences at once, from accepting a step's tokens until all masks are ready.
fn batch(name: &str, guides: &Guides, spec: &GuideSpec, size: usize) {
    let grammar = guides.compile(spec).unwrap();
    let mut sequences: Vec<Guide> = (0..32).map(|_| grammar.guide(false).unwrap()).collect();
    let (mut dice, mut times) = (Dice(5), Vec::new());
    for _ in 0..40 {
        let mut tokens = Vec::new();
        for guide in &mut sequences {
            let allowed: Vec<u32> =
                (0..size as u32).filter(|token| known(guide).allows(*token)).collect();
            tokens.push(allowed[dice.below(allowed.len())]);
        }
        let start = Instant::now();
        let went: Vec<_> =
            sequences.iter_mut().zip(tokens).map(|(it, token)| it.accept(token)).collect();
        let accepted = start.elapsed();
        sequences.iter_mut().zip(&went).for_each(|(guide, went)| {
            if *went == Ok(Guided::GoesOn) {
                known(guide);
            }
        });
        times.push((start.elapsed(), accepted));
        for (guide, went) in sequences.iter_mut().zip(went) {
            if went != Ok(Guided::GoesOn) {
                *guide = grammar.guide(false).unwrap();
            }
        }
    }
    times.sort_unstable();
    let (all, accepted) = times[times.len() / 2];
    println!("32 of {name}: {accepted:?} of the driving thread, {all:?} until all masks are there");
}

fn main() {
    let size = std::env::args().nth(1).and_then(|size| size.parse().ok()).unwrap_or(128_000);
    let model = model(size);
    let start = Instant::now();
    let guides = Guides::new(&model).unwrap();
    println!("{size} tokens: what grammars need of them takes {:?}", start.elapsed());
    let person = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "kind": {"enum": ["a", "b", "c"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "more": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    }, "required": ["name", "age", "kind", "tags"]});
    for (name, spec) in [
        ("a JSON object", schema(&json!({"type": "object"}))),
        ("a schema of five fields", schema(&person)),
        ("a regular expression", GuideSpec::Regex(r"(\w+ ){3,20}[a-z]{1,8}\.".to_owned())),
        (
            "a choice of 50",
            GuideSpec::Choice((0..50).map(|i| format!("answer number {i}")).collect()),
        ),
    ] {
        let start = Instant::now();
        let grammar = guides.compile(&spec).unwrap();
        let made = start.elapsed();
        let (mut first, mut times, mut bytes) = (Vec::new(), Vec::new(), 0);
        for seed in 0..20 {
            let mut dice = Dice(seed * 977);
            let mut guide = grammar.guide(false).unwrap();
            for at in 0..100 {
                bytes += known(&mut guide).weight();
                let allowed: Vec<u32> =
                    (0..size as u32).filter(|token| known(&mut guide).allows(*token)).collect();
                let Some(token) = allowed.get(dice.below(allowed.len().max(1))) else { break };
                let start = Instant::now();
                let went = guide.accept(*token);
                if went == Ok(Guided::GoesOn) {
                    known(&mut guide);
                }
                if at == 0 {
                    first.push(start.elapsed())
                } else {
                    times.push(start.elapsed())
                }
                if went != Ok(Guided::GoesOn) {
                    break;
                }
            }
        }
        times.sort_unstable();
        first.sort_unstable();
        let mean = times.iter().sum::<Duration>() / times.len().max(1) as u32;
        let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
        batch(name, &guides, &spec, size);
        println!(
            "{name}: made in {made:?}; first token {:?}; {} tokens: mean {mean:?}, median {:?}, p99 {:?}, \
             {} bytes each",
            first[first.len() / 2],
            times.len(),
            at(50),
            at(99),
            bytes / (times.len() + first.len()),
        );
    }
}
