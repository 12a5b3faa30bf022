//! Words that must not be generated.
use serde::{Deserialize, Serialize};

/// Maximum number of [`BadWords::sequences`].
pub const SEQUENCES_MAX: usize = 512;
/// Maximum number of their tokens together: all are looked at for every token of a choice.
pub const TOKENS_MAX: usize = 4096;

/// Sequences of tokens that choices may not contain, as far as what else binds them lets other
/// tokens come: when all but the last token of one were generated, the last may not come next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadWords {
    /// At least one, each of at least one token.
    pub sequences: Vec<Vec<u32>>,
}

impl BadWords {
    /// Checks the bounds, and the tokens against a vocabulary of `vocab` tokens, of which some must
    /// remain.
    ///
    /// # Errors
    /// One sentence that continues after what it is about.
    pub fn check(&self, vocab: u32) -> Result<(), String> {
        let count = self.sequences.len();
        if !(1..=SEQUENCES_MAX).contains(&count) {
            return Err(format!(
                "have {count} sequences of tokens, there must be 1 to {SEQUENCES_MAX}"
            ));
        }
        if count >= vocab as usize {
            return Err(format!("may forbid all {vocab} tokens of the vocabulary"));
        }
        let tokens = self.tokens();
        if tokens > TOKENS_MAX {
            return Err(format!("have {tokens} tokens together, at most {TOKENS_MAX}"));
        }
        for sequence in &self.sequences {
            if sequence.is_empty() {
                return Err("have one without tokens".to_owned());
            }
            if let Some(token) = sequence.iter().find(|token| **token >= vocab) {
                return Err(format!(
                    "name token {token}, which is not below the vocabulary's {vocab}"
                ));
            }
        }
        Ok(())
    }

    /// Number of all their tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_few_and_of_the_vocabulary() {
        let words = |sequences: &[Vec<u32>]| BadWords { sequences: sequences.to_vec() };
        let right = words(&[vec![4], vec![0; TOKENS_MAX - 1]]);
        assert_eq!((right.check(5), right.tokens()), (Ok(()), TOKENS_MAX));
        assert_eq!(words(&vec![vec![4]; SEQUENCES_MAX]).check(1000), Ok(()));
        for (wrong, what) in [
            (words(&[]), "have 0 sequences"),
            (words(&vec![vec![4]; SEQUENCES_MAX + 1]), "have 513 sequences"),
            (words(&vec![vec![4]; 5]), "all 5 tokens"),
            (words(&[vec![4], vec![]]), "one without tokens"),
            (words(&[vec![4; TOKENS_MAX], vec![3]]), "have 4097 tokens together"),
            (words(&[vec![1], vec![1, 5]]), "token 5"),
        ] {
            let said = wrong.check(5 + 1000 * u32::from(wrong.sequences.len() > 5)).unwrap_err();
            assert!(said.contains(what), "{said}");
        }
    }
}
