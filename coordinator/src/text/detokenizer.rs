//! Tokens to text as they come.
//!
//! A token may end within a character; then nothing is emitted until the character is whole. What
//! is emitted, piece by piece, is what decoding all tokens at once would give. Each token costs the
//! decoding of a few tokens before it, never of the whole text.
use std::sync::Arc;

use tokenizers::Tokenizer;

/// Turns one sequence's tokens into text.
#[derive(Clone, Debug)]
pub struct IncrementalDecoder {
    tokenizer: Arc<Tokenizer>,
    /// Tokens from the last whole character before `emitted` on.
    window: Vec<u32>,
    /// How many of them have been emitted.
    emitted: usize,
    /// Special tokens are text.
    keep_special: bool,
}

/// A window longer than this is emitted as it is: no character takes so many tokens.
const WINDOW_MAX: usize = 64;

impl IncrementalDecoder {
    /// A decoder that has seen nothing.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, window: Vec::new(), emitted: 0, keep_special: false }
    }

    /// Whether special tokens are text, or left out.
    #[must_use]
    pub fn keeping_special(self, keep_special: bool) -> Self {
        Self { keep_special, ..self }
    }

    /// Takes a token; appends the text that is certain now to `text`.
    pub fn push(&mut self, token: u32, text: &mut String) {
        self.window.push(token);
        self.advance(text, false);
    }

    /// Appends what is left, unfinished characters as U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        self.advance(text, true);
    }

    fn advance(&mut self, text: &mut String, last: bool) {
        let before = self.decode(&self.window[..self.emitted]);
        let all = self.decode(&self.window);
        let unfinished = all.ends_with(char::REPLACEMENT_CHARACTER);
        if unfinished && !last && self.window.len() < WINDOW_MAX {
            return;
        }
        match all.strip_prefix(before.as_str()) {
            Some(new) => text.push_str(new),
            // Bytes that are no character make others of those before them, which are text already.
            None => text.push_str(&self.decode(&self.window[self.emitted..])),
        }
        // The window goes on from the tokens just emitted: what follows may depend on them.
        self.window.drain(..self.emitted);
        self.emitted = self.window.len();
    }

    fn decode(&self, tokens: &[u32]) -> String {
        if tokens.is_empty() {
            return String::new();
        }
        self.tokenizer.decode(tokens, !self.keep_special).unwrap_or_default()
    }
}
