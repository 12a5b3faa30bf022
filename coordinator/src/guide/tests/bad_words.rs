//! Words that must not come, alone and beside another guide.
use std::collections::BTreeSet;

use shared::protocol::BadWords;

use super::*;

const VOCAB: u32 = 5;

/// Allows what it is told to in each place, whatever came before.
#[derive(Clone, Debug)]
struct Told {
    masks: Vec<TokenMask>,
    at: usize,
    /// Whether it knows its mask only after being asked.
    is_asked: Option<bool>,
}

impl TokenGuide for Told {
    fn poll(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), GuideEnd>> {
        self.is_asked = self.is_asked.map(|_| true);
        Poll::Ready(Ok(()))
    }

    fn allowed(&self) -> Option<&TokenMask> {
        self.masks.get(self.at).filter(|_| self.is_asked != Some(false))
    }

    fn mask_bytes_max(&self) -> usize {
        self.masks.iter().map(TokenMask::weight).max().unwrap_or(0)
    }

    fn accept(&mut self, _: u32) -> Result<Guided, GuideEnd> {
        self.at += 1;
        self.is_asked = self.is_asked.map(|_| false);
        Ok(Guided::GoesOn)
    }
}

fn words(sequences: &[Vec<u32>]) -> Arc<BadWords> {
    let words = BadWords { sequences: sequences.to_vec() };
    words.check(u32::MAX).unwrap();
    Arc::new(words)
}

/// What may not come behind these tokens.
fn forbidden(words: &BadWords, said: &[u32]) -> BTreeSet<u32> {
    let ends = words.sequences.iter().map(|word| word.split_last().unwrap());
    ends.filter(|(_, before)| said.ends_with(before)).map(|(last, _)| *last).collect()
}

fn any_words(dice: &mut Dice) -> Arc<BadWords> {
    let mut word = || -> Vec<u32> {
        (0..1 + dice.below(3)).map(|_| dice.below(VOCAB as usize) as u32).collect()
    };
    let mut sequences = vec![word()];
    while sequences.len() < 4 && word()[0] > 0 {
        sequences.push(word());
    }
    words(&sequences)
}

#[test]
fn no_word_is_completed_unless_nothing_else_may_come() {
    let (mut completed, mut kept) = (0, 0);
    for seed in 0..3000 {
        let mut dice = Dice(seed);
        let words = any_words(&mut dice);
        let other = (dice.below(3) > 0).then(|| Told {
            masks: (0..12)
                .map(|_| {
                    let bits = 1 + dice.below(31) as u32;
                    let which =
                        |yes| (0..VOCAB).filter(|it| (bits >> it & 1 == 1) == yes).collect();
                    match dice.below(3) {
                        0 => TokenMask::Only(which(true)),
                        1 => TokenMask::Except(which(false)),
                        _ => TokenMask::Bits(vec![bits]),
                    }
                })
                .collect(),
            at: 0,
            is_asked: (dice.below(2) > 0).then_some(false),
        });
        let boxed = other.clone().map(|it| Box::new(it) as Box<dyn TokenGuide>);
        let mut guide = BadWordsGuide::new(words.clone(), VOCAB, boxed);
        let mut said = Vec::new();
        for at in 0..12 {
            let may = |token: &u32| other.as_ref().is_none_or(|it| it.masks[at].allows(*token));
            let asked: BTreeSet<u32> = (0..VOCAB).filter(may).collect();
            let bad = forbidden(&words, &said);
            let good: BTreeSet<u32> = asked.difference(&bad).copied().collect();
            let expected = if good.is_empty() { &asked } else { &good };
            let mask = wait(&mut guide).unwrap().clone();
            let got: BTreeSet<u32> = (0..VOCAB).filter(|it| mask.allows(*it)).collect();
            assert_eq!(got, *expected, "{seed}: {words:?} behind {said:?}: {mask:?}");
            assert_eq!(mask.check(VOCAB), Ok(()), "{seed}");
            assert!(mask.weight() <= guide.mask_bytes_max(), "{seed}");
            (completed, kept) =
                (completed + usize::from(good.is_empty()), kept + usize::from(good != asked));
            if let Some(wrong) = (0..VOCAB).find(|it| !expected.contains(it)) {
                assert!(guide.accept(wrong).is_err(), "{seed}");
            }
            let token = *expected.iter().nth(dice.below(expected.len())).unwrap();
            // As when it was taken by another process.
            let taken = if dice.below(3) > 0 { guide.accept(token) } else { guide.follow(token) };
            assert_eq!(taken, Ok(Guided::GoesOn));
            said.push(token);
        }
    }
    assert!(completed > 100 && kept > 5000, "{completed}, {kept}");
}

/// A model of what is said about masks that are not needed: whatever comes next.
#[test]
fn what_is_left_open_is_open_whatever_comes() {
    let mut open = 0;
    for seed in 0..500 {
        let mut dice = Dice(seed);
        let words = any_words(&mut dice);
        let mut guide = BadWordsGuide::new(words.clone(), VOCAB, None);
        let mut said: Vec<u32> = Vec::new();
        for _ in 0..4 {
            let mut seen = vec![said.clone()];
            let mut was_bound = false;
            for ahead in 0..4 {
                was_bound |= seen.iter().any(|said| !forbidden(&words, said).is_empty());
                assert_eq!(guide.leaves_open(ahead), !was_bound, "{words:?}, {said:?}, {ahead}");
                open += usize::from(!was_bound);
                let longer =
                    |said: &Vec<u32>| (0..VOCAB).map(|it| [&said[..], &[it]].concat()).collect();
                seen = seen.iter().flat_map(|said| -> Vec<Vec<u32>> { longer(said) }).collect();
            }
            let Some(token) = (0..VOCAB).find(|it| guide.allowed().unwrap().allows(*it)) else {
                break;
            };
            assert_eq!(guide.follow(token), Ok(Guided::GoesOn));
            said.push(token);
        }
        let other = Told { masks: vec![], at: 0, is_asked: None };
        let beside = BadWordsGuide::new(words, VOCAB, Some(Box::new(other)));
        assert!(!beside.leaves_open(0), "the other guide has masks of its own");
    }
    assert!(open > 300, "{open}");
}

#[test]
fn a_grammar_goes_on_within_it() {
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let made = guides.compile(&GuideSpec::Choice(vec!["yes".to_owned(), "no".to_owned()])).unwrap();
    let first = |word: &str| model.encode(word, false).unwrap();
    for (bad, expected) in [("yes", "no"), ("no", "yes")] {
        let words = words(&[first(bad)[..1].to_vec()]);
        let all =
            super::super::guides(2, Some(&made), None, Some((&words, model.vocab_size)), false);
        for mut guide in all.unwrap() {
            let ready = std::pin::pin!(std::future::poll_fn(|context| guide.poll(context)));
            let _ = ready.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
            let allowed = guide.allowed().unwrap();
            assert!(allowed.allows(first(expected)[0]) && !allowed.allows(first(bad)[0]), "{bad}");
        }
    }
}
