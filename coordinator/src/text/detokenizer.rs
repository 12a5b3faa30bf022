//! Incremental detokenization: tokens to text as they arrive.
//!
//! A token may end within a character; then nothing is emitted until the character is complete. The
//! emitted pieces together equal the decoding of all tokens at once. Each token costs the decoding
//! of the few tokens before it, never of the whole text.
//!
//! Text that continues other text starts with that text's last tokens as context: decoders drop the
//! leading space of the first token, which must be kept here.
use std::sync::Arc;

use tokenizers::Tokenizer;

/// Decodes one sequence's tokens into text.
#[derive(Clone, Debug)]
pub struct IncrementalDecoder {
    tokenizer: Arc<Tokenizer>,
    /// The last emitted tokens, from the start of a character, followed by those not emitted yet.
    window: Vec<u32>,
    /// How many tokens of the window have been emitted.
    emitted: usize,
    /// Special tokens become text.
    keep_special: bool,
}

/// A longer window is emitted as it is: no character takes so many tokens.
const WINDOW_MAX: usize = 64;
/// Number of preceding tokens used as context: more than a character takes, and more special tokens
/// than occur in a row.
const BEFORE_MAX: usize = 8;
/// Maximum bytes of a character in UTF-8.
const BYTES_MAX: usize = 4;

impl IncrementalDecoder {
    /// A decoder without any tokens yet.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, window: Vec::new(), emitted: 0, keep_special: false }
    }

    /// Sets whether special tokens become text or are left out.
    #[must_use]
    pub fn keeping_special(self, keep_special: bool) -> Self {
        Self { keep_special, ..self }
    }

    /// Continues after `tokens`, which are not part of the text, except for a character that they
    /// leave unfinished.
    #[must_use]
    pub fn behind(self, tokens: &[u32]) -> Self {
        let start = tokens.len().saturating_sub(BEFORE_MAX);
        // Must not start within a character: a stray byte would invalidate all bytes after it.
        let is_whole = |start: &usize| {
            !self.decode(&tokens[*start..]).starts_with(char::REPLACEMENT_CHARACTER)
        };
        let earlier = start.saturating_sub(BYTES_MAX - 1)..=start;
        let window = tokens[earlier.rev().find(is_whole).unwrap_or(start)..].to_vec();
        let ends_whole =
            |end: &usize| !self.decode(&window[..*end]).ends_with(char::REPLACEMENT_CHARACTER);
        let ends = window.len().saturating_sub(BYTES_MAX - 1)..=window.len();
        let emitted = ends.rev().find(ends_whole).unwrap_or(window.len());
        Self { emitted, window, ..self }
    }

    /// Whether any text precedes the next token's.
    #[must_use]
    pub fn has_text_before(&self) -> bool {
        !self.decode(&self.window[..self.emitted]).is_empty()
    }

    /// Takes a token; appends to `text` what is now certain.
    pub fn push(&mut self, token: u32, text: &mut String) {
        self.window.push(token);
        self.advance(text, false);
    }

    /// Appends the rest; an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        self.advance(text, true);
    }

    /// Appends the rest as [`finish`](Self::finish) does, and forgets the context.
    pub fn interrupt(&mut self, text: &mut String) {
        self.finish(text);
        self.window.clear();
        self.emitted = 0;
    }

    fn advance(&mut self, text: &mut String, last: bool) {
        let before = self.decode(&self.window[..self.emitted]);
        let all = self.decode(&self.window);
        let unfinished = all.ends_with(char::REPLACEMENT_CHARACTER);
        if unfinished && !last && self.window.len() < WINDOW_MAX {
            return;
        }
        let new = all.strip_prefix(before.as_str()).or_else(|| {
            // The emitted tokens ended within a character, which is now complete.
            all.strip_prefix(before.trim_end_matches(char::REPLACEMENT_CHARACTER))
        });
        let had = text.len();
        match new {
            Some(new) => text.push_str(new),
            // Invalid bytes change the decoding of those before them, which are already emitted.
            None => text.push_str(&self.decode(&self.window[self.emitted..])),
        }
        // Tokens that decode to nothing, such as special ones, are no context: without the tokens
        // before them, the next one would be decoded as the beginning of the text.
        if text.len() == had && self.window.len() < WINDOW_MAX {
            return;
        }
        // The tokens just emitted are the context of the next: its decoding may depend on them.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::model::TextModel;
    use crate::text::samples::{sentencepiece_bpe, sentencepiece_that_keeps_spaces};

    fn behind(model: &TextModel, prompt: &[u32], tokens: &[u32]) -> String {
        let mut decoder = IncrementalDecoder::new(model.tokenizer.clone()).behind(prompt);
        let mut text = String::new();
        tokens.iter().for_each(|token| decoder.push(*token, &mut text));
        decoder.finish(&mut text);
        text
    }

    fn tokens(model: &TextModel, pieces: &[&str]) -> Vec<u32> {
        pieces.iter().map(|piece| model.tokenizer.token_to_id(piece).unwrap()).collect()
    }

    #[test]
    fn a_space_is_left_out_at_the_beginning_of_a_text_alone() {
        let model = sentencepiece_bpe();
        let of = |pieces: &[&str]| tokens(&model, pieces);
        let said = of(&["\u{2581}a", "b", "\u{2581}a"]);
        assert_eq!(behind(&model, &[], &said), "ab a");
        assert_eq!(behind(&model, &of(&["\u{2581}b"][..0]), &said), "ab a");
        assert_eq!(behind(&model, &of(&["\u{2581}a", "b"]), &said), " ab a");
        // Special tokens are no text, neither before it nor within it.
        assert_eq!(behind(&model, &of(&["<|tool|>"]), &said), "ab a");
        assert_eq!(behind(&model, &of(&["b", "<|tool|>"]), &said), " ab a");
        let special = of(&["b", "<|tool|>", "<|tool|>", "\u{2581}a"]);
        assert_eq!(behind(&model, &[], &special), "b a");
        assert_eq!(behind(&model, &of(&["a"]), &of(&["\u{2581}\u{2581}", "b"])), "  b");
        // No matter how much precedes.
        assert_eq!(behind(&model, &of(&["b"; 100]), &said), " ab a");
    }

    #[test]
    fn a_character_that_the_prompt_began_is_part_of_the_text() {
        for model in [sentencepiece_bpe(), sentencepiece_that_keeps_spaces()] {
            let of = |pieces: &[&str]| tokens(&model, pieces);
            let (begun, rest) = (of(&["a", "<0xE2>", "<0x82>"]), of(&["<0xAC>", "b"]));
            assert_eq!(behind(&model, &begun, &rest), "\u{20ac}b");
            // Complete characters before it belong to the prompt.
            let euro = ["<0xE2>", "<0x82>", "<0xAC>"];
            let two = of(&[&["a"][..], &euro, &euro[..2]].concat());
            assert_eq!(behind(&model, &two, &rest), "\u{20ac}b");
            // No matter how many.
            for count in 1..7 {
                let prompt = of(&[&["b"][..], &euro.repeat(count)].concat());
                let text = behind(&model, &prompt, &of(&[&euro[..], &["a"]].concat()));
                assert_eq!(text, "\u{20ac}a", "{count}");
            }
            assert_eq!(behind(&model, &rest, &begun[..1]), "a");
        }
    }

    /// A token that is text or none, or a character byte by byte.
    fn character() -> impl Strategy<Value = Vec<u32>> {
        let bytes = "\u{e4}\u{20ac}\u{1f600}".chars().map(|it| it.to_string().into_bytes());
        let bytes: Vec<Vec<u32>> =
            bytes.map(|it| it.into_iter().map(u32::from).collect()).collect();
        prop_oneof![3 => (256u32..277).prop_map(|token| vec![token]), 1 => prop::sample::select(bytes)]
    }

    proptest! {
        /// Prompt and text together equal the decoding of all tokens at once.
        #[test]
        fn the_text_goes_on_where_the_prompt_ends(
            prompt in prop::collection::vec(character(), 1..20),
            said in prop::collection::vec(character(), 0..20),
        ) {
            let (prompt, said) = (prompt.concat(), said.concat());
            for model in [sentencepiece_bpe(), sentencepiece_that_keeps_spaces()] {
                let before = model.decode(&prompt);
                prop_assume!(!before.is_empty());
                let all = model.decode(&[prompt.clone(), said.clone()].concat());
                prop_assert_eq!(before + &behind(&model, &prompt, &said), all);
            }
        }
    }
}
