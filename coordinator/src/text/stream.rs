//! One choice's text as its tokens come: decoded, checked for stop strings, ended.
//!
//! The engine runs the same code to know at which token a stop string is complete, so both sides
//! agree on the sequence's last token.
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use tokenizers::Tokenizer;

use super::detokenizer::IncrementalDecoder;
use super::reply::harmony::FENCE;
use super::stop::StopMatcher;
use crate::engine::StopCheck;

/// When a sequence ends for reasons that text or token tell.
#[derive(Clone, Debug, Default)]
pub struct StopRules {
    /// Stop strings.
    pub stops: Vec<String>,
    /// Tokens that end the sequence and are not part of its text, unless they are among `shown`.
    pub end_tokens: Vec<u32>,
    /// End tokens that are part of the text.
    pub shown: Vec<u32>,
    /// Nothing ends the sequence before it has so many tokens.
    pub min_tokens: u32,
    /// The stop string is part of the text, though not what its last token has behind it.
    pub include_stop: bool,
    /// Special tokens that do not end the sequence are part of its text.
    pub keep_special: bool,
    /// Those, by their ids: each stands between two of [`FENCE`] in the text. None otherwise.
    pub fenced: Option<Arc<HashMap<u32, String>>>,
}

/// One choice's text.
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
    /// A choice without tokens.
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

    /// Goes on behind these tokens, those of a prompt: what it says is no text of its own.
    #[must_use]
    pub fn behind(self, prompt: &[u32]) -> Self {
        Self { decoder: self.decoder.behind(prompt), ..self }
    }

    /// Whether text comes before what is next.
    #[must_use]
    pub fn has_text_before(&self) -> bool {
        self.decoder.has_text_before()
    }

    /// Tokens taken.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// The stop string that ended the text, if one did.
    #[must_use]
    pub fn stop_string(&self) -> Option<&str> {
        self.matcher.found()
    }

    /// Takes a token; appends the text that is certain now. Returns true when the token completes a
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
        // Text that has the fence itself would be taken for a mark, or would hide one.
        if self.rules.fenced.is_some() {
            clean(&mut self.piece);
        }
        if let Some(mark) = mark {
            self.piece.push(FENCE);
            self.piece.push_str(mark);
            self.piece.push(FENCE);
        }
        // The token ends the sequence before a stop string within it does.
        self.stopped = self.matcher.push(&self.piece, may_stop && !ends, text);
        self.stopped
    }

    /// Appends what was held back, once the choice is finished.
    pub fn finish(&mut self, text: &mut String) {
        if self.stopped {
            return;
        }
        self.piece.clear();
        self.decoder.finish(&mut self.piece);
        if self.rules.fenced.is_some() {
            clean(&mut self.piece);
        }
        // What was held back may complete a stop string only together with whole characters, which
        // would have been seen: the rest is text.
        let _ = self.matcher.push(&self.piece, false, text);
        self.matcher.finish(text);
    }
}

/// Without fences, which stand for characters that nobody should have used.
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
