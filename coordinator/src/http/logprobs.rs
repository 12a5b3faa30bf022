//! Log-probabilities in OpenAI's two shapes.
use serde_json::{Map, Value, json};
use shared::protocol::TokenLogprobs;

use crate::text::model::TextModel;

/// JSON has no infinity: what is impossible gets vLLM's stand-in.
const IMPOSSIBLE: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

fn text_of(model: &TextModel, token: u32) -> String {
    String::from_utf8_lossy(&model.token_bytes(token)).into_owned()
}

/// The shape of completions, gathered token by token.
#[derive(Clone, Debug, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
    offset: usize,
}

impl CompletionLogprobs {
    /// Starts behind `offset` characters of text.
    #[must_use]
    pub fn new(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    /// Adds a prompt's first token, which has no log-probability.
    pub fn push_first(&mut self, model: &TextModel, token: u32) {
        self.push_text(text_of(model, token));
        self.token_logprobs.push(Value::Null);
        self.top_logprobs.push(Value::Null);
    }

    /// Adds a token.
    pub fn push(&mut self, model: &TextModel, token: &TokenLogprobs) {
        let text = text_of(model, token.token);
        let mut top = Map::new();
        for (id, logprob) in &token.top {
            // The best come first, and tokens of the same text are told apart by nothing.
            top.entry(text_of(model, *id)).or_insert_with(|| json!(finite(*logprob)));
        }
        // The chosen token is always among the alternatives.
        top.entry(text.clone()).or_insert_with(|| json!(finite(token.logprob)));
        self.push_text(text);
        self.token_logprobs.push(json!(finite(token.logprob)));
        self.top_logprobs.push(Value::Object(top));
    }

    fn push_text(&mut self, text: String) {
        self.text_offset.push(self.offset);
        self.offset += text.chars().count();
        self.tokens.push(text);
    }

    /// Goes on behind so many characters: the text of a prompt is not always its tokens' together.
    pub fn go_on_behind(&mut self, characters: usize) {
        self.offset = characters;
    }

    /// Characters of text so far, for what follows.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "tokens": self.tokens, "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs, "text_offset": self.text_offset,
        })
    }
}

/// One token in the shape of chat.
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
