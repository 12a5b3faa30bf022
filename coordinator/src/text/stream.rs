//! One choice's text as its tokens arrive: detokenized, checked for stop strings, ended.
//!
//! The engine runs the same code to find the token that completes a stop string, so that both sides
//! agree on the sequence's last token.
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use tokenizers::Tokenizer;

use super::detokenizer::IncrementalDecoder;
use super::reply::harmony::FENCE;
use super::stop::StopMatcher;
use crate::engine::StopCheck;

/// The rules by which text or tokens end a sequence.
#[derive(Clone, Debug, Default)]
pub struct StopRules {
    /// Stop strings.
    pub stops: Vec<String>,
    /// Tokens that end the sequence; not part of its text, unless they are in `shown`.
    pub end_tokens: Vec<u32>,
    /// End tokens that are part of the text.
    pub shown: Vec<u32>,
    /// Minimum number of tokens before anything ends the sequence.
    pub min_tokens: u32,
    /// Include the stop string in the text, but not what its last token has after it.
    pub include_stop: bool,
    /// Special tokens that do not end the sequence are part of its text.
    pub keep_special: bool,
    /// The text of those special tokens by id: in the output, each is put between two [`FENCE`]
    /// characters. `None` for no fences.
    pub fenced: Option<Arc<HashMap<u32, String>>>,
}

/// One choice's text as it grows.
#[derive(Clone)]
pub struct TextStream {
    decoder: IncrementalDecoder,
    matcher: StopMatcher,
    rules: Arc<StopRules>,
    num_tokens: u32,
    piece: String,
    stopped: bool,
}

impl fmt::Debug for TextStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextStream")
            .field("num_tokens", &self.num_tokens)
            .field("stopped", &self.stopped)
            .finish_non_exhaustive()
    }
}

impl TextStream {
    /// A choice without tokens yet.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, rules: Arc<StopRules>) -> Self {
        Self {
            decoder: IncrementalDecoder::new(tokenizer).keeping_special(rules.keep_special),
            matcher: StopMatcher::new(rules.stops.clone()).including(rules.include_stop),
            rules,
            num_tokens: 0,
            piece: String::new(),
            stopped: false,
        }
    }

    /// Continues after the tokens of `prompt`, whose text is not part of this one.
    #[must_use]
    pub fn behind(self, prompt: &[u32]) -> Self {
        Self { decoder: self.decoder.behind(prompt), ..self }
    }

    /// Whether any text precedes the next token's.
    #[must_use]
    pub fn has_text_before(&self) -> bool {
        self.decoder.has_text_before()
    }

    /// The stop string that ended the text, if one did.
    #[must_use]
    pub fn stop_string(&self) -> Option<&str> {
        self.matcher.found()
    }

    /// Takes a token; appends the text that is now certain. Returns true when the token completes a
    /// stop string.
    pub fn push_token(&mut self, token: u32, text: &mut String) -> bool {
        self.num_tokens += 1;
        let may_stop = self.num_tokens >= self.rules.min_tokens;
        let ends = may_stop && self.rules.end_tokens.contains(&token);
        if self.stopped || (ends && !self.rules.shown.contains(&token)) {
            return false;
        }
        self.piece.clear();
        let mark = self.rules.fenced.as_ref().and_then(|fenced| fenced.get(&token));
        match mark {
            Some(_) => self.decoder.interrupt(&mut self.piece),
            None => self.decoder.push(token, &mut self.piece),
        }
        // A fence character in ordinary text would be taken for a mark, or would hide one.
        if self.rules.fenced.is_some() {
            clean(&mut self.piece);
        }
        if let Some(mark) = mark {
            self.piece.push(FENCE);
            self.piece.push_str(mark);
            self.piece.push(FENCE);
        }
        // The token ends the sequence before a stop string within its text could.
        self.stopped = self.matcher.push(&self.piece, may_stop && !ends, text);
        self.stopped
    }

    /// Appends what was held back; call it when the choice is finished.
    pub fn finish(&mut self, text: &mut String) {
        if self.stopped {
            return;
        }
        self.piece.clear();
        self.decoder.finish(&mut self.piece);
        if self.rules.fenced.is_some() {
            clean(&mut self.piece);
        }
        // The rest is plain text: it could complete a stop string only with complete characters,
        // which would have been emitted before.
        let _ = self.matcher.push(&self.piece, false, text);
        self.matcher.finish(text);
    }
}

/// Replaces fence characters, which ordinary text has no use for.
fn clean(text: &mut String) {
    if text.contains(FENCE) {
        *text = text.replace(FENCE, "\u{fffd}");
    }
}

impl StopCheck for TextStream {
    fn push(&mut self, token: u32) -> bool {
        let mut text = String::new();
        self.push_token(token, &mut text)
    }
}
