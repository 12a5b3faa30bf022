//! One choice's text as its tokens arrive: detokenized, checked for stop strings, ended.
//!
//! The engine runs the same code to find the token that completes a stop string, so that both sides
//! agree on the sequence's last token.
use std::collections::{HashMap, VecDeque};
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
    /// characters, which stop strings do not see. `None` for no fences.
    pub fenced: Option<Arc<HashMap<u32, String>>>,
}

/// One choice's text as it grows.
#[derive(Clone)]
pub struct TextStream {
    decoder: IncrementalDecoder,
    matcher: StopMatcher,
    rules: Arc<StopRules>,
    num_tokens: u32,
    /// Whether a stop string may end the text where its last token is.
    may_stop: bool,
    piece: String,
    /// Bytes of the text that were searched, and of those that left the matcher.
    searched: usize,
    released: usize,
    /// Fences of text that is held back: where they are in it, and whether a mark follows. They are
    /// no part of what is searched, so that a stop string may cross them.
    fences: VecDeque<(usize, bool)>,
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
            may_stop: false,
            piece: String::new(),
            searched: 0,
            released: 0,
            fences: VecDeque::new(),
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
        // The token ends the sequence before a stop string within its text could.
        self.may_stop = may_stop && !ends;
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
            let at = self.searched + self.piece.len();
            self.fences.extend([(at, true), (at + mark.len(), false)]);
            self.piece.push_str(mark);
        }
        self.search(text);
        self.stopped
    }

    /// Searches the piece; appends what is certain.
    fn search(&mut self, text: &mut String) {
        let from = text.len();
        self.stopped = self.matcher.push(&self.piece, self.may_stop, text);
        self.searched += self.piece.len();
        self.fence(text, from);
    }

    /// Puts fences into the text behind `from`, which has just left the matcher.
    fn fence(&mut self, text: &mut String, from: usize) {
        let before = self.released;
        self.released += text.len() - from;
        let mut inserted = 0;
        // Before a mark none is certain until the mark's own text is.
        while let Some((at, opens)) = self.fences.front().copied()
            && if opens { at < self.released } else { at <= self.released }
        {
            text.insert(from + (at - before) + inserted, FENCE);
            inserted += FENCE.len_utf8();
            self.fences.pop_front();
        }
    }

    /// Appends what was held back; call it when the choice is finished. It may have a stop string:
    /// see [`TextStream::stop_string`].
    pub fn finish(&mut self, text: &mut String) {
        if self.stopped {
            return;
        }
        self.piece.clear();
        self.decoder.finish(&mut self.piece);
        if self.rules.fenced.is_some() {
            clean(&mut self.piece);
        }
        // The last token may have completed one and begun another character, without whose end its
        // text was not certain.
        self.search(text);
        if !self.stopped {
            let from = text.len();
            self.matcher.finish(text);
            self.fence(text, from);
        }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_stop_string_is_found_where_its_last_token_begins_another_character() {
        // Of bytes; the last token has the first one of a euro sign.
        let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
                "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "byte_fallback": false, "vocab": {"a": 0, "b\u{e2}": 1}, "merges": []}});
        let tokenizer = Arc::new(Tokenizer::from_bytes(tokenizer.to_string()).unwrap());
        for (min_tokens, include_stop, expected) in
            [(0, false, "a"), (0, true, "aab"), (4, false, "aab\u{fffd}")]
        {
            let stops = vec!["ab".to_owned()];
            let rules = StopRules { stops, min_tokens, include_stop, ..StopRules::default() };
            let mut stream = TextStream::new(tokenizer.clone(), Arc::new(rules));
            let mut text = String::new();
            for token in [0, 0, 1] {
                assert!(!stream.push_token(token, &mut text), "it is not certain yet");
            }
            stream.finish(&mut text);
            let is_found = stream.stop_string().is_some();
            assert_eq!((text.as_str(), is_found), (expected, min_tokens == 0));
        }
    }

    /// Stop strings are found as where there are no fences, and the text is the same but for them.
    #[test]
    fn a_stop_string_may_cross_fences() {
        let vocab = json!({"a": 0, "b": 1, "c": 2});
        let mark = json!([{"id": 3, "content": "<m>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}]);
        let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null,
            "added_tokens": mark, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
                "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "byte_fallback": false, "vocab": vocab, "merges": []}});
        let tokenizer = Arc::new(Tokenizer::from_bytes(tokenizer.to_string()).unwrap());
        let fences = Arc::new(HashMap::from([(3, "<m>".to_owned())]));
        for (stop, including, expected) in [
            ("<m>b", false, "a|<m>|"),
            ("<m>b", true, "a|<m>||<m>|b"),
            ("a<m><m>", false, ""),
            ("><m>bc", false, "a|<m"),
            ("c", false, "a|<m>||<m>|b"),
            ("x", false, "a|<m>||<m>|bc"),
            ("cx", false, "a|<m>||<m>|bc"),
        ] {
            let rules = |fenced| {
                let (stops, keep_special) = (vec![stop.to_owned()], true);
                let include_stop = including;
                StopRules { stops, keep_special, include_stop, fenced, ..StopRules::default() }
            };
            let read = |rules| {
                let mut stream = TextStream::new(tokenizer.clone(), Arc::new(rules));
                let mut text = String::new();
                let tokens = [0, 3, 3, 1, 2];
                let end = tokens.iter().position(|token| stream.push_token(*token, &mut text));
                stream.finish(&mut text);
                (end, text)
            };
            let (plain, fenced) = (read(rules(None)), read(rules(Some(fences.clone()))));
            assert_eq!(fenced.0, plain.0, "{stop}");
            assert_eq!(fenced.1.replace(FENCE, "|"), expected, "{stop}");
            assert_eq!(fenced.1.replace(FENCE, ""), plain.1, "{stop}");
        }
    }
}
