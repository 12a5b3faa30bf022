//! Guides over real vocabularies, followed at random and checked by independent oracles.
//!
//! - `forms`: each kind of specification; `schemas`: JSON schemas that combine others; `numbers`:
//!   numbers at the edges of what grammars hold
//! - `tokenizers`: tokens of different tokenizers
//! - `thinking`: bounds on reasoning; `bad_words`: words that must not come
//! - `tags`: parts with a form within text that has none
//! - `hostile`: specifications that would cost too much
//! - `replies`: tool calls, markers and reasoning around the text; `harmony`: the same in that
//!   format
use std::path::Path;
use std::task::Poll;

use regex::Regex;
use serde_json::{Value, json};
use shared::protocol::{TokenMask, Whitespace};

use super::*;
use crate::engine::{GuideEnd, Guided, TokenGuide};
use crate::text::samples::{folder, numbered, sentencepiece_bpe, sentencepiece_that_keeps_spaces};

mod bad_words;
mod forms;
mod harmony;
mod hostile;
mod numbers;
mod replies;
mod schemas;
mod tags;
mod thinking;
mod tokenizers;

fn model(folder: &str) -> TextModel {
    TextModel::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder)).unwrap()
}

fn json_spec(schema: &Value) -> GuideSpec {
    GuideSpec::Json { schema: schema.to_string(), whitespace: Whitespace::Usual }
}

/// Waits for the mask of the next tokens.
fn wait(guide: &mut impl TokenGuide) -> Result<&TokenMask, GuideEnd> {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match guide.poll(&mut context) {
            Poll::Ready(Ok(())) => return Ok(guide.allowed().unwrap()),
            Poll::Ready(Err(error)) => return Err(error),
            // Parks forever if nobody wakes the thread.
            Poll::Pending => std::thread::park(),
        }
    }
}

fn known(guide: &mut Guide) -> &TokenMask {
    wait(guide).unwrap()
}

/// Random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % n
    }
}

/// Takes allowed tokens at random until the text is complete. Returns the text; `None` if it is not
/// complete after `most` tokens.
fn follow(model: &TextModel, grammar: &Arc<Grammar>, seed: u64, most: usize) -> Option<String> {
    follow_behind("", model, grammar, seed, most)
}

/// Like [`follow`], for a text that begins with `said`.
fn follow_behind(
    said: &str,
    model: &TextModel,
    grammar: &Arc<Grammar>,
    seed: u64,
    most: usize,
) -> Option<String> {
    tokens_behind(said, model, grammar, seed, most).map(|tokens| model.decode(&tokens))
}

/// Like [`follow_behind`], but returns the tokens.
fn tokens_behind(
    said: &str,
    model: &TextModel,
    grammar: &Arc<Grammar>,
    seed: u64,
    most: usize,
) -> Option<Vec<u32>> {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut guide = grammar.guide(false).unwrap();
    let mut tokens = model.encode(said, false).unwrap();
    for token in &tokens {
        known(&mut guide);
        assert_eq!(guide.accept(*token), Ok(Guided::GoesOn), "{said:?}");
    }
    while tokens.len() < most {
        let mask = known(&mut guide);
        let allowed: Vec<u32> = (0..model.vocab_size).filter(|token| mask.allows(*token)).collect();
        let token = allowed[dice.below(allowed.len())];
        if model.end_tokens.contains(&token) {
            return Some(tokens);
        }
        tokens.push(token);
        if guide.accept(token).unwrap() == Guided::IsOver {
            return Some(tokens);
        }
    }
    None
}

fn texts(model: &TextModel, spec: &GuideSpec, most: usize) -> Vec<String> {
    let grammar = Guides::new(model).unwrap().compile(spec).unwrap();
    (0..40).filter_map(|seed| follow(model, &grammar, seed, most)).collect()
}
