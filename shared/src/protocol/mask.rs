//! Token masks: which tokens a sequence may sample in a step, sent after the step's plan, so that
//! workers need no grammars. A grammar allows a handful of tokens, all but a handful, or about half
//! of them, so there is a form for each; [`TokenMask::from_bits`] picks the smallest.
use serde::{Deserialize, Serialize};

/// Bits per word of [`TokenMask::Bits`].
const WORD: u32 = u32::BITS;

/// Which tokens may be sampled. Each form is complete: it covers the whole vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenMask {
    /// Only these tokens are allowed: ascending, each once.
    Only(Vec<u32>),
    /// All tokens of the vocabulary except these are allowed: ascending, each once.
    Except(Vec<u32>),
    /// A bitmap of `words(vocab)` words: bit `i % 32` of word `i / 32` is set if token `i` is
    /// allowed; bits beyond the vocabulary are 0. It travels as bytes: bit `i % 8` of byte `i / 8`.
    Bits(#[serde(with = "as_bytes")] Vec<u32>),
}

/// Number of words in the bitmap of a vocabulary of `vocab` tokens.
#[must_use]
pub const fn words(vocab: u32) -> usize {
    vocab.div_ceil(WORD) as usize
}

impl TokenMask {
    /// Builds the mask that allows the tokens whose bits are set in `bits` (as in
    /// [`TokenMask::Bits`]), in the form with the fewest bytes. Missing words allow nothing; bits
    /// beyond a vocabulary of `vocab` tokens are dropped.
    #[must_use]
    pub fn from_bits(vocab: u32, bits: &[u32]) -> Self {
        let word = |at: usize| bits.get(at).copied().unwrap_or(0) & valid(vocab, at);
        let rest = |at: usize| !word(at) & valid(vocab, at);
        // Find the smallest form without visiting each token.
        let (mut only, mut except, mut count) = (0, 0, 0);
        for at in 0..words(vocab) {
            let (yes, valid) = (word(at), valid(vocab, at));
            let (ones, first) = (yes.count_ones() as usize, at as u32 * WORD);
            count += ones;
            if first > ONE_BYTE_BELOW && valid == u32::MAX {
                only += ones * number(first);
                except += (WORD as usize - ones) * number(first);
            } else {
                only += weight_of_ids(first, yes);
                except += weight_of_ids(first, valid & !yes);
            }
        }
        let others = vocab as usize - count;
        (only, except) = (only + length(count), except + length(others));
        let dense = weight_of_words(words(vocab));
        if only <= except && only <= dense {
            Self::Only(list_of(vocab, count, word))
        } else if except <= dense {
            Self::Except(list_of(vocab, others, rest))
        } else {
            Self::Bits((0..words(vocab)).map(word).collect())
        }
    }

    /// Overwrites `bits` with the mask's bitmap (as in [`TokenMask::Bits`]) of `words(vocab)`
    /// words. Ignores ids beyond the vocabulary, which [`check`](Self::check) rejects.
    pub fn to_bits(&self, vocab: u32, bits: &mut Vec<u32>) {
        bits.clear();
        match self {
            Self::Only(tokens) => {
                bits.resize(words(vocab), 0);
                for &token in tokens.iter().filter(|token| **token < vocab) {
                    bits[(token / WORD) as usize] |= 1 << (token % WORD);
                }
            }
            Self::Except(tokens) => {
                bits.extend((0..words(vocab)).map(|at| valid(vocab, at)));
                for &token in tokens.iter().filter(|token| **token < vocab) {
                    bits[(token / WORD) as usize] &= !(1 << (token % WORD));
                }
            }
            Self::Bits(given) => {
                bits.extend_from_slice(&given[..given.len().min(words(vocab))]);
                bits.resize(words(vocab), 0);
                if let Some(last) = bits.last_mut() {
                    *last &= valid(vocab, words(vocab) - 1);
                }
            }
        }
    }

    /// Whether `token` is allowed. Binary search for lists.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        match self {
            Self::Only(tokens) => tokens.binary_search(&token).is_ok(),
            Self::Except(tokens) => tokens.binary_search(&token).is_err(),
            Self::Bits(bits) => {
                let word = bits.get((token / WORD) as usize).copied().unwrap_or(0);
                word >> (token % WORD) & 1 == 1
            }
        }
    }

    /// Checks that this is a mask over a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    ///
    /// One sentence if a list is not ascending or names a token beyond the vocabulary, if the
    /// number of words does not match the vocabulary or a bit beyond it is set, or if no token is
    /// allowed.
    pub fn check(&self, vocab: u32) -> Result<(), String> {
        match self {
            Self::Only(tokens) => {
                list("only", tokens, vocab)?;
                some(!tokens.is_empty())
            }
            Self::Except(tokens) => {
                list("except", tokens, vocab)?;
                some(tokens.len() < vocab as usize)
            }
            Self::Bits(bits) => {
                let (len, wanted) = (bits.len(), words(vocab));
                if len != wanted {
                    return Err(format!(
                        "a mask of {len} words of bits; a vocabulary of {vocab} tokens has {wanted}"
                    ));
                }
                if bits.last().is_some_and(|last| last & !valid(vocab, len - 1) != 0) {
                    return Err(format!(
                        "a mask allows tokens beyond the vocabulary of {vocab} tokens"
                    ));
                }
                some(bits.iter().any(|word| *word != 0))
            }
        }
    }

    /// Returns the mask's exact encoded size in bytes, for the bounds on messages.
    #[must_use]
    pub fn weight(&self) -> usize {
        1 + match self {
            Self::Only(tokens) | Self::Except(tokens) => {
                length(tokens.len()) + tokens.iter().copied().map(number).sum::<usize>()
            }
            Self::Bits(words) => weight_of_words(words.len()),
        }
    }

    /// Returns the maximum encoded size, in bytes, of a mask from [`from_bits`](Self::from_bits)
    /// over a vocabulary of `vocab` tokens.
    #[must_use]
    pub const fn weight_max(vocab: u32) -> usize {
        1 + weight_of_words(words(vocab))
    }
}

/// Bits of word number `at` that stand for tokens of the vocabulary.
const fn valid(vocab: u32, at: usize) -> u32 {
    let rest = (vocab as usize).saturating_sub(at * WORD as usize);
    if rest >= WORD as usize { u32::MAX } else { (1 << rest) - 1 }
}

/// Lists the tokens of all set bits, ascending; `count` is their number.
fn list_of(vocab: u32, count: usize, word: impl Fn(usize) -> u32) -> Vec<u32> {
    let mut ids = Vec::with_capacity(count);
    for at in 0..words(vocab) {
        let mut bits = word(at);
        while bits != 0 {
            ids.push(at as u32 * WORD + bits.trailing_zeros());
            bits &= bits - 1;
        }
    }
    ids
}

/// Encoded bytes of the ids of a word's set bits; `first` is the id of its lowest bit.
const fn weight_of_ids(first: u32, word: u32) -> usize {
    let low = if first < ONE_BYTE_BELOW && ONE_BYTE_BELOW < first + WORD {
        word & ((1 << (ONE_BYTE_BELOW - first)) - 1)
    } else {
        0
    };
    // In all other words, every id takes the same number of bytes.
    let (low, high) = (low.count_ones() as usize, (word & !low).count_ones() as usize);
    low * number(first) + high * number(first + (WORD - 1))
}

/// Encoded bytes of a bitmap of so many words.
const fn weight_of_words(words: usize) -> usize {
    let bytes = words * size_of::<u32>();
    length(bytes) + bytes
}

/// Words as bytes, the lowest first, encoded in one piece: number by number, most would take a byte
/// more, and all of them much longer.
mod as_bytes {
    use serde::de::Error as _;
    use serde::{Deserializer, Serializer};

    use crate::wire::bytes;

    pub(super) fn serialize<S: Serializer>(
        words: &[u32],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut all = Vec::with_capacity(size_of_val(words));
        words.iter().for_each(|word| all.extend_from_slice(&word.to_le_bytes()));
        bytes::serialize(&all, serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u32>, D::Error> {
        let all = bytes::deserialize(deserializer)?;
        let (words, rest) = all.as_chunks();
        if !rest.is_empty() {
            return Err(D::Error::custom("a mask's bits are no whole words"));
        }
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

/// Numbers below this take one byte (bincode's varint encoding).
const ONE_BYTE_BELOW: u32 = 251;

/// Encoded size of a number, in bytes.
const fn number(value: u32) -> usize {
    match value {
        0..ONE_BYTE_BELOW => 1,
        251..=0xffff => 3,
        _ => 5,
    }
}

/// Encoded size of a list's length, in bytes; no mask that fits a frame has 2^32 numbers.
const fn length(len: usize) -> usize {
    if len > u32::MAX as usize { 9 } else { number(len as u32) }
}

fn list(name: &str, tokens: &[u32], vocab: u32) -> Result<(), String> {
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0] >= pair[1]) {
        let (before, after) = (pair[0], pair[1]);
        return Err(format!(
            "a mask's list of tokens ({name}) is not ascending: {after} follows {before}"
        ));
    }
    match tokens.last() {
        Some(&last) if last >= vocab => Err(format!(
            "a mask's list of tokens ({name}) has token {last}; the vocabulary has {vocab}"
        )),
        _ => Ok(()),
    }
}

fn some(any: bool) -> Result<(), String> {
    if any { Ok(()) } else { Err("a mask allows no token at all".to_owned()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::codec;

    fn bits(vocab: u32, allowed: &[bool]) -> Vec<u32> {
        let mut bits = vec![0; words(vocab)];
        for (token, _) in allowed.iter().enumerate().filter(|(_, yes)| **yes) {
            bits[token / 32] |= 1 << (token % 32);
        }
        bits
    }

    #[test]
    fn the_form_with_the_fewest_bytes_is_taken() {
        assert_eq!(TokenMask::from_bits(40, &[1 << 7, 1]), TokenMask::Only(vec![7, 32]));
        let all_but = TokenMask::from_bits(40, &[!(1 << 7), u32::MAX]);
        assert_eq!(all_but, TokenMask::Except(vec![7]));
        assert_eq!(TokenMask::from_bits(64, &[0, 0]), TokenMask::Only(vec![]));
        assert_eq!(TokenMask::from_bits(64, &[u32::MAX; 2]), TokenMask::Except(vec![]));
        let half = vec![0x5555_5555; 100];
        assert_eq!(TokenMask::from_bits(3200, &half), TokenMask::Bits(half));
        // Missing words allow nothing, and surplus bits are dropped.
        assert_eq!(TokenMask::from_bits(70, &[2]), TokenMask::Only(vec![1]));
        assert_eq!(TokenMask::from_bits(3, &[0b1100, 9]), TokenMask::Only(vec![2]));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let wrong = |mask: TokenMask, vocab, what: &str| {
            let said = mask.check(vocab).unwrap_err();
            assert!(said.contains(what), "{said}");
        };
        wrong(TokenMask::Only(vec![]), 9, "no token at all");
        wrong(TokenMask::Only(vec![9]), 9, "has token 9; the vocabulary has 9");
        wrong(TokenMask::Only(vec![3, 3]), 9, "not ascending: 3 follows 3");
        wrong(TokenMask::Except(vec![4, 3]), 9, "not ascending: 3 follows 4");
        wrong(TokenMask::Except(vec![u32::MAX]), 9, "has token 4294967295");
        wrong(TokenMask::Except((0..9).collect()), 9, "no token at all");
        wrong(TokenMask::Bits(vec![1, 1]), 9, "2 words of bits");
        wrong(TokenMask::Bits(vec![]), 9, "0 words of bits");
        wrong(TokenMask::Bits(vec![0]), 9, "no token at all");
        wrong(TokenMask::Bits(vec![1 << 9]), 9, "beyond the vocabulary");
        for right in [
            TokenMask::Only(vec![0, 8]),
            TokenMask::Except(vec![]),
            TokenMask::Except(vec![8]),
            TokenMask::Bits(vec![1 << 8]),
        ] {
            assert_eq!(right.check(9), Ok(()));
        }
        assert_eq!(TokenMask::Bits(vec![0, 1 << 31]).check(64), Ok(()));
    }

    #[test]
    fn bits_travel_as_bytes() {
        let mask = TokenMask::Bits(vec![0x8000_0001, u32::MAX, 0]);
        let encoded = codec::encode(&mask).unwrap();
        // The form, the number of bytes, token 0 first.
        assert_eq!(encoded, [2, 12, 1, 0, 0, 0x80, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(codec::decode_message::<TokenMask>(&encoded), Ok(mask));
        let cut = codec::decode_message::<TokenMask>(&[2, 3, 1, 0, 0]);
        assert!(matches!(cut, Err(codec::CodecError::Decode(_))), "{cut:?}");
    }

    #[test]
    fn a_mask_that_is_not_checked_harms_nothing() {
        let mut bits = vec![9; 7];
        TokenMask::Only(vec![1, u32::MAX]).to_bits(33, &mut bits);
        assert_eq!(bits, [2, 0]);
        TokenMask::Except(vec![0, 33]).to_bits(33, &mut bits);
        assert_eq!(bits, [!1, 1]);
        TokenMask::Bits(vec![1; 9]).to_bits(33, &mut bits);
        assert_eq!(bits, [1, 1]);
        TokenMask::Bits(vec![7]).to_bits(33, &mut bits);
        assert_eq!(bits, [7, 0]);
        TokenMask::Bits(vec![7]).to_bits(0, &mut bits);
        assert!(bits.is_empty() && !TokenMask::Bits(vec![7]).allows(40));
    }

    proptest! {
        /// All three forms of one set agree, and the chosen one is no larger than the others, for
        /// densities from nothing to everything.
        #[test]
        fn forms_agree(vocab in 1u32..3000, per_mille in 0u32..=1000, seed in any::<u32>()) {
            let mut state = u64::from(seed) | 1 << 40;
            let allowed: Vec<bool> = (0..vocab).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 33) % 1000) < u64::from(per_mille)
            }).collect();
            let which = |yes: bool| -> Vec<u32> {
                (0..vocab).filter(|token| allowed[*token as usize] == yes).collect()
            };
            let words = bits(vocab, &allowed);
            let forms = [
                TokenMask::Only(which(true)),
                TokenMask::Except(which(false)),
                TokenMask::Bits(words.clone()),
            ];
            let best = TokenMask::from_bits(vocab, &words);
            prop_assert!(forms.contains(&best));
            prop_assert!(best.weight() <= TokenMask::weight_max(vocab));
            let mut out = Vec::new();
            for form in &forms {
                prop_assert!(best.weight() <= form.weight());
                prop_assert_eq!(form.weight(), codec::encode(form).unwrap().len());
                prop_assert_eq!(form.check(vocab).is_ok(), allowed.contains(&true));
                form.to_bits(vocab, &mut out);
                prop_assert_eq!(&out, &words);
                for (token, yes) in allowed.iter().enumerate() {
                    prop_assert_eq!(form.allows(token as u32), *yes);
                }
            }
        }
    }
}
