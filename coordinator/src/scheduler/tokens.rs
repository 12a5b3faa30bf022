//! PURE: the accepted-token log of one sequence.
//!
//! The choices of a request share its prompt until their first tokens are accepted, so a queued
//! request takes the memory of one prompt, whatever `n` is.
use std::ops::Deref;
use std::sync::Arc;

/// The prompt, then the accepted tokens.
#[derive(Clone, Debug)]
pub(super) enum Tokens {
    /// The prompt alone, which may be shared.
    Prompt {
        prompt: Arc<[u32]>,
        /// Maximum number of tokens accepted after it.
        more: usize,
    },
    /// A log of its own.
    Own(Vec<u32>),
}

impl Tokens {
    /// Creates the log of a prompt that at most `more` tokens follow.
    pub(super) fn new(prompt: Arc<[u32]>, more: usize) -> Self {
        Self::Prompt { prompt, more }
    }

    /// Accepts a token.
    pub(super) fn push(&mut self, token: u32) {
        if let Self::Prompt { prompt, more } = self {
            let mut own = Vec::with_capacity(prompt.len() + *more);
            own.extend_from_slice(prompt);
            *self = Self::Own(own);
        }
        if let Self::Own(own) = self {
            own.push(token);
        }
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::Prompt { prompt, .. } => prompt,
            Self::Own(own) => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_share_the_prompt_until_they_differ() {
        let prompt: Arc<[u32]> = vec![1, 2, 3].into();
        let first = Tokens::new(prompt.clone(), 2);
        let mut second = first.clone();
        assert_eq!(Arc::strong_count(&prompt), 3);
        second.push(4);
        assert_eq!((&*first, &*second), (&[1, 2, 3][..], &[1, 2, 3, 4][..]));
        assert_eq!(Arc::strong_count(&prompt), 2);
        second.push(5);
        assert_eq!(&second[3..], [4, 5]);
    }
}
