//! Log-probabilities in OpenAI's two formats.
use serde_json::{Map, Value, json};
use shared::protocol::TokenLogprobs;

use crate::text::model::TextModel;

/// JSON has no infinity: impossible tokens get vLLM's stand-in.
const IMPOSSIBLE: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

fn text_of(model: &TextModel, token: u32) -> String {
    String::from_utf8_lossy(&model.token_bytes(token)).into_owned()
}

/// The format of completions, gathered token by token.
#[derive(Clone, Debug, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
    /// Number of characters of text so far.
    offset: usize,
    /// Whether special tokens are part of the text.
    keep_special: bool,
}

impl CompletionLogprobs {
    /// Starts with nothing gathered; `keep_special` tells whether special tokens are part of the
    /// text.
    #[must_use]
    pub fn new(keep_special: bool) -> Self {
        Self { keep_special, ..Self::default() }
    }

    /// Takes what was gathered; what follows continues after it.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let rest = Self { offset: self.offset, ..Self::new(self.keep_special) };
        std::mem::replace(self, rest)
    }

    /// Adds a prompt's first token, which has no log-probability.
    pub fn push_first(&mut self, model: &TextModel, token: u32) {
        self.push_text(model, token, text_of(model, token));
        self.token_logprobs.push(Value::Null);
        self.top_logprobs.push(Value::Null);
    }

    /// Adds a token.
    pub fn push(&mut self, model: &TextModel, token: &TokenLogprobs) {
        let text = text_of(model, token.token);
        let mut top = Map::new();
        for (id, logprob) in &token.top {
            // The best come first; tokens with the same text cannot be distinguished here.
            top.entry(text_of(model, *id)).or_insert_with(|| json!(finite(*logprob)));
        }
        // The chosen token is always among the alternatives.
        top.entry(text.clone()).or_insert_with(|| json!(finite(token.logprob)));
        self.push_text(model, token.token, text);
        self.token_logprobs.push(json!(finite(token.logprob)));
        self.top_logprobs.push(Value::Object(top));
    }

    fn push_text(&mut self, model: &TextModel, token: u32, text: String) {
        self.text_offset.push(self.offset);
        let is_text = self.keep_special || model.special_token(&text) != Some(token);
        // A character that several tokens share begins with the first of them.
        let begins = |byte: &&u8| **byte & 0xc0 != 0x80;
        let bytes = if is_text { model.token_bytes(token) } else { Vec::new() };
        self.offset += bytes.iter().filter(begins).count();
        self.tokens.push(text);
    }

    /// Continues after so many characters: a prompt's text is not always that of its tokens
    /// together.
    pub fn go_on_behind(&mut self, characters: usize) {
        self.offset = characters;
    }

    /// Returns the JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "tokens": self.tokens, "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs, "text_offset": self.text_offset,
        })
    }
}

/// Returns one token in the format of chat.
#[must_use]
pub fn chat_logprob(model: &TextModel, token: &TokenLogprobs) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = model.token_bytes(id);
        json!({
            "token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes,
        })
    };
    let mut chosen = entry(token.token, token.logprob);
    chosen["top_logprobs"] = token.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::samples::sentencepiece_bpe;

    #[test]
    fn of_alternatives_that_read_the_same_the_best_is_told() {
        let model = sentencepiece_bpe();
        let id = |piece: &str| model.tokenizer.token_to_id(piece).unwrap();
        let (first, second, third) = (id("<0xE2>"), id("<0x82>"), id("a"));
        let top = vec![(first, -0.5), (third, -1.0), (second, -2.0)];
        let token = TokenLogprobs { token: second, logprob: -2.0, rank: 3, top };
        let mut gathered = CompletionLogprobs::default();
        gathered.push(&model, &token);
        let expected = json!({"\u{fffd}": -0.5, "a": -1.0});
        assert_eq!(gathered.json()["top_logprobs"], json!([expected]));
        // Chat distinguishes them by their bytes.
        let told = chat_logprob(&model, &token);
        assert_eq!(
            (&told["bytes"], &told["top_logprobs"][0]["bytes"]),
            (&json!([0x82]), &json!([0xe2]))
        );
    }
}
