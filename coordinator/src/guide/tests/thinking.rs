//! Bounds on reasoning, alone and beside a grammar.
use shared::protocol::ThinkingBudget;

use super::*;
use crate::text::reply::ThinkMarks;
use crate::text::reply::grammar;

/// Opens and ends reasoning.
const MARKS: [u32; 2] = [3, 4];

fn budget(tokens: u32, is_open: bool) -> Arc<ThinkingBudget> {
    let [open, close] = MARKS;
    Arc::new(ThinkingBudget { tokens, open: Some(open), closes: vec![close], is_open })
}

fn only(token: u32) -> TokenMask {
    TokenMask::Only(vec![token])
}

/// A model of what is said about masks that are not needed: whatever comes next.
#[test]
fn what_is_left_open_is_open_whatever_comes() {
    let [open, close] = MARKS;
    for tokens in 0..4 {
        for (is_open, first) in [
            (false, &[][..]),
            (false, &[open]),
            (false, &[open, 9]),
            (false, &[open, close]),
            (false, &[9, open, open, 9]),
            (false, &[9, 9, 9]),
            (false, &[9, 9, 9, 9]),
            (true, &[]),
            (true, &[open]),
            (true, &[9, open]),
            (true, &[close]),
        ] {
            let made = || ThinkingGuide::new(budget(tokens, is_open), None);
            let mut guide = made();
            if first.iter().any(|token| guide.accept(*token).is_err()) {
                continue;
            }
            let mut was_bound = false;
            for ahead in 0..6 {
                // Whatever is allowed may come, the marks among it.
                let mut seen = vec![Vec::new()];
                for _ in 0..ahead {
                    seen = seen
                        .iter()
                        .flat_map(|before: &Vec<u32>| {
                            [open, close, 9].map(|token| [&before[..], &[token]].concat())
                        })
                        .collect();
                }
                let is_bound = seen.iter().any(|then| {
                    let mut guide = made();
                    let all = first.iter().chain(then);
                    let taken = all.map(|token| guide.accept(*token)).all(|it| it.is_ok());
                    taken && guide.allowed() == Some(&only(close))
                });
                let is_open = guide.leaves_open(ahead);
                was_bound |= is_bound;
                // It is so for less as well, and no mask is made where none can be needed.
                assert_eq!(is_open, !was_bound, "{tokens}, {first:?}, {ahead} ahead");
            }
        }
    }
}

#[test]
fn the_marks_themselves_are_not_counted() {
    let [open, close] = MARKS;
    for (is_open, first) in [
        (true, &[][..]),
        // A model may open what its prompt has opened; that is told once.
        (true, &[open]),
        (false, &[open]),
        (false, &[9, 9, 9, open]),
    ] {
        let mut guide = ThinkingGuide::new(budget(2, is_open), None);
        for token in first.iter().chain([9, open].iter()) {
            assert_ne!(guide.allowed(), Some(&only(close)), "{first:?}");
            assert_eq!(guide.accept(*token), Ok(Guided::GoesOn));
        }
        assert_eq!(guide.allowed(), Some(&only(close)), "{first:?}");
        assert_eq!(guide.accept(close), Ok(Guided::GoesOn));
        assert!(guide.leaves_open(100), "{first:?}");
    }
    // A mark within an answer is part of it.
    let mut guide = ThinkingGuide::new(budget(0, false), None);
    assert!([9, 9, 9, 9, open].iter().all(|token| guide.accept(*token).is_ok()));
    assert!(guide.leaves_open(100) && guide.allowed().unwrap().allows(9));
}

#[test]
fn a_grammar_is_followed_before_and_behind_the_end_of_reasoning() {
    let model = model("models/demo");
    let [_, close] = MARKS;
    let special = |text: &str| (text == "</think>").then_some(close);
    let rules = grammar::choice("answer", &["yes".to_owned()]);
    let text = grammar::reasoned("answer", &rules, ThinkMarks::THINK, true, &special);
    let guides = Guides::new(&model).unwrap();
    let made = guides.compile(&GuideSpec::Made(text)).unwrap();
    let mut guide = ThinkingGuide::new(budget(3, true), Some(made.guide(false).unwrap()));
    assert!(!guide.leaves_open(0), "the grammar has masks of its own");
    let said = model.encode("Well, it may be so", false).unwrap();
    for token in &said[..3] {
        assert!(wait(&mut guide).unwrap().allows(close));
        assert_eq!(guide.accept(*token), Ok(Guided::GoesOn));
    }
    assert_eq!(wait(&mut guide), Ok(&only(close)));
    assert!(guide.accept(said[3]).is_err(), "nothing else may come");
    // The same with tokens that are replayed.
    let mut guide = ThinkingGuide::new(budget(3, true), Some(made.guide(false).unwrap()));
    assert!(said[..3].iter().all(|token| guide.follow(*token) == Ok(Guided::GoesOn)));
    assert_eq!(wait(&mut guide), Ok(&only(close)));
    assert_eq!(guide.accept(close), Ok(Guided::GoesOn));
    assert!(!wait(&mut guide).unwrap().allows(close), "the answer is next");
    assert_eq!(guide.accept(model.encode("yes", false).unwrap()[0]), Ok(Guided::GoesOn));
}

/// A client's grammar may want more text first.
#[test]
fn the_end_comes_as_soon_as_a_grammar_lets_it_come() {
    let model = model("models/demo");
    let [_, close] = MARKS;
    let text = format!("start: /[a-z]{{5}}/ <[{close}]> \"yes\"\n");
    let made = Guides::new(&model).unwrap().compile(&GuideSpec::Made(text)).unwrap();
    let mut guide = ThinkingGuide::new(budget(1, true), Some(made.guide(false).unwrap()));
    for letter in ["a", "b", "c", "d", "e"] {
        assert!(!wait(&mut guide).unwrap().allows(close));
        let token = model.encode(letter, false).unwrap()[0];
        assert_eq!(guide.accept(token), Ok(Guided::GoesOn));
    }
    assert_eq!(wait(&mut guide), Ok(&only(close)));
}
