//! PURE: a guide that keeps words from being generated, as far as another guide of the same
//! sequence lets other tokens come.
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use shared::protocol::{BadWords, TokenMask};

use super::grammar::not_allowed;
use crate::engine::{GuideEnd, Guided, TokenGuide};

/// Bytes of a token in a mask, and of how many there are, at most.
const TOKEN_BYTES: usize = 5;

/// Forbids the last token of each word whose other tokens were just generated. Where the other
/// guide allows nothing else, its tokens may come nevertheless.
#[derive(Debug)]
pub struct BadWordsGuide {
    words: Arc<BadWords>,
    vocab: u32,
    inner: Option<Box<dyn TokenGuide>>,
    /// The last tokens, as many as the longest word has before its last one.
    last: VecDeque<u32>,
    last_max: usize,
    /// The tokens that complete a word here: ascending, each once.
    forbidden: Vec<u32>,
    mask: Mask,
    /// The mask of both guides, if that is [`Mask::Both`].
    both: TokenMask,
}

/// Which mask holds here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mask {
    /// The other guide's is not known.
    Unknown,
    /// The other guide's: nothing that it allows is forbidden, or everything.
    Inner,
    Both,
}

impl BadWordsGuide {
    /// A guide before its first token. `words` have passed [`BadWords::check`] for a vocabulary of
    /// `vocab` tokens.
    #[must_use]
    pub fn new(words: Arc<BadWords>, vocab: u32, inner: Option<Box<dyn TokenGuide>>) -> Self {
        let longest = words.sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut guide = Self {
            words,
            vocab,
            inner,
            last: VecDeque::new(),
            last_max: longest.saturating_sub(1),
            forbidden: Vec::new(),
            mask: Mask::Unknown,
            both: TokenMask::Except(Vec::new()),
        };
        guide.forbid();
        guide
    }

    fn take(&mut self, token: u32) {
        self.last.push_back(token);
        if self.last.len() > self.last_max {
            self.last.pop_front();
        }
    }

    /// Whether the last tokens are the first `count` of a word.
    fn ends_with(&self, word: &[u32], count: usize) -> bool {
        let Some(from) = self.last.len().checked_sub(count) else { return false };
        self.last.range(from..).eq(&word[..count])
    }

    /// Finds what is forbidden here, and the mask if the other guide's is known.
    fn forbid(&mut self) {
        let mut forbidden = std::mem::take(&mut self.forbidden);
        forbidden.clear();
        for word in &self.words.sequences {
            if let Some((last, before)) = word.split_last()
                && self.ends_with(word, before.len())
            {
                forbidden.push(*last);
            }
        }
        forbidden.sort_unstable();
        forbidden.dedup();
        self.forbidden = forbidden;
        self.mask = Mask::Unknown;
        self.combine();
    }

    fn combine(&mut self) {
        if self.mask != Mask::Unknown {
            return;
        }
        let inner = match &self.inner {
            Some(inner) => inner.allowed(),
            None => Some(&TokenMask::Except(Vec::new())),
        };
        let Some(inner) = inner else { return };
        self.mask = match without(inner, &self.forbidden, self.vocab, &mut self.both) {
            true => Mask::Both,
            // Without another guide there is no other mask.
            false if self.inner.is_none() => {
                self.both.clone_from(inner);
                Mask::Both
            }
            false => Mask::Inner,
        };
    }
}

/// Makes the mask of what `mask` allows besides `forbidden`; false if that is the same, or nothing.
/// Copies nothing then, and otherwise into memory that `into` has already.
fn without(mask: &TokenMask, forbidden: &[u32], vocab: u32, into: &mut TokenMask) -> bool {
    if !forbidden.iter().any(|token| mask.allows(*token)) {
        return false;
    }
    let (TokenMask::Only(mut numbers)
    | TokenMask::Except(mut numbers)
    | TokenMask::Bits(mut numbers)) = std::mem::replace(into, TokenMask::Only(Vec::new()));
    numbers.clear();
    let is_some;
    match mask {
        TokenMask::Only(tokens) => {
            let others = tokens.iter().filter(|token| forbidden.binary_search(token).is_err());
            numbers.extend(others);
            is_some = !numbers.is_empty();
            *into = TokenMask::Only(numbers);
        }
        TokenMask::Except(tokens) => {
            numbers.extend(tokens);
            numbers.extend(forbidden.iter().filter(|token| mask.allows(**token)));
            numbers.sort_unstable();
            is_some = numbers.len() < vocab as usize;
            *into = TokenMask::Except(numbers);
        }
        TokenMask::Bits(bits) => {
            numbers.extend(bits);
            for token in forbidden {
                if let Some(word) = numbers.get_mut((token / u32::BITS) as usize) {
                    *word &= !(1 << (token % u32::BITS));
                }
            }
            is_some = numbers.iter().any(|word| *word != 0);
            *into = TokenMask::Bits(numbers);
        }
    }
    is_some
}

impl TokenGuide for BadWordsGuide {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        if let Some(inner) = &mut self.inner {
            ready!(inner.poll(context))?;
        }
        self.combine();
        Poll::Ready(Ok(()))
    }

    fn allowed(&self) -> Option<&TokenMask> {
        match self.mask {
            Mask::Unknown => None,
            Mask::Inner => self.inner.as_ref()?.allowed(),
            Mask::Both => Some(&self.both),
        }
    }

    fn leaves_open(&self, ahead: u32) -> bool {
        // Of the next tokens nothing is known, so a word may be complete but for its last token
        // when those before them begin it.
        let may_come = |word: &Vec<u32>| {
            let before = word.len().saturating_sub(1);
            let ahead = usize::try_from(ahead).unwrap_or(usize::MAX).min(before);
            (0..=ahead).any(|next| self.ends_with(word, before - next))
        };
        let inner = self.inner.as_ref().is_none_or(|inner| inner.leaves_open(ahead));
        inner && !self.words.sequences.iter().any(may_come)
    }

    fn mask_bytes_max(&self) -> usize {
        let inner = self.inner.as_ref().map_or(0, |inner| inner.mask_bytes_max());
        inner + TOKEN_BYTES * (self.words.sequences.len() + 2)
    }

    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        if !self.allowed().is_some_and(|allowed| allowed.allows(token)) {
            return Err(not_allowed(token));
        }
        self.take(token);
        let guided = self.inner.as_mut().map_or(Ok(Guided::GoesOn), |inner| inner.accept(token));
        self.forbid();
        guided
    }

    fn follow(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        self.take(token);
        let guided = self.inner.as_mut().map_or(Ok(Guided::GoesOn), |inner| inner.follow(token));
        self.forbid();
        guided
    }
}
