//! Log-probabilities of a prompt in vLLM's format: an entry for each token, with the token and its
//! alternatives by their ids.
use std::sync::Arc;

use serde::ser::{SerializeMap as _, SerializeSeq as _};
use serde::{Serialize, Serializer};
use shared::protocol::TokenLogprobs;

use super::logprobs::{finite, text_of};
use crate::text::model::TextModel;

/// A prompt's log-probabilities. Like those of answers, they are kept as numbers.
#[derive(Clone, Debug)]
pub struct PromptLogprobs {
    model: Arc<TextModel>,
    alternatives: usize,
    /// Of all tokens but the first.
    tokens: Vec<TokenLogprobs>,
}

impl PromptLogprobs {
    /// Starts with none; at most so many alternatives to each token are told.
    #[must_use]
    pub fn new(model: Arc<TextModel>, alternatives: u32) -> Self {
        Self { model, alternatives: alternatives as usize, tokens: Vec::new() }
    }

    /// Adds the next tokens, which may have more alternatives.
    pub fn extend(&mut self, tokens: Vec<TokenLogprobs>) {
        let most = self.alternatives;
        self.tokens.extend(tokens.into_iter().map(|mut token| {
            token.top.truncate(most);
            token
        }));
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.tokens.len() + 1))?;
        // Nothing comes before the first token.
        list.serialize_element(&None::<()>)?;
        self.tokens.iter().try_for_each(|it| list.serialize_element(&Entry(&self.model, it)))?;
        list.end()
    }
}

/// A token, then its alternatives, the best first.
struct Entry<'a>(&'a TextModel, &'a TokenLogprobs);

/// What is told of each.
#[derive(Serialize)]
struct Told {
    logprob: f64,
    rank: u32,
    decoded_token: String,
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(model, token) = self;
        let told = |id: u32, logprob: f32, rank: u32| Told {
            logprob: finite(logprob),
            rank,
            decoded_token: text_of(model, id),
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(&token.token, &told(token.token, token.logprob, token.rank))?;
        // They are in the order of their ranks, and so is the token if it is among them.
        for (rank, (id, logprob)) in (1..).zip(&token.top) {
            if *id != token.token {
                map.serialize_entry(id, &told(*id, *logprob, rank))?;
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::to_string;

    use super::*;
    use crate::text::samples::sentencepiece_bpe;

    #[test]
    fn the_token_comes_first_and_each_has_its_rank() {
        let model = Arc::new(sentencepiece_bpe());
        let id = |piece: &str| model.tokenizer.token_to_id(piece).unwrap();
        let (a, b, byte) = (id("a"), id("b"), id("<0xE2>"));
        let mut all = PromptLogprobs::new(model.clone(), 2);
        assert_eq!(to_string(&all).unwrap(), "[null]", "a prompt of one token");
        // More alternatives than asked for, as for the log-probabilities of an echo beside it.
        let top = vec![(b, -0.5), (a, -1.5), (byte, f32::NEG_INFINITY)];
        all.extend(vec![TokenLogprobs { token: a, logprob: -1.5, rank: 2, top: top.clone() }]);
        let last = TokenLogprobs { token: byte, logprob: f32::NEG_INFINITY, rank: 7, top };
        all.extend(vec![last]);
        let entry = |id: u32, logprob: &str, rank: u32, text: &str| {
            format!(r#""{id}":{{"logprob":{logprob},"rank":{rank},"decoded_token":"{text}"}}"#)
        };
        let (best, second) = (entry(b, "-0.5", 1, "b"), entry(a, "-1.5", 2, "a"));
        let far = entry(byte, "-9999.0", 7, "\u{fffd}");
        let expected = format!("[null,{{{second},{best}}},{{{far},{best},{second}}}]");
        assert_eq!(to_string(&all).unwrap(), expected);
    }
}
