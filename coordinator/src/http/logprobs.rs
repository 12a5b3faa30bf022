//! Log-probabilities in OpenAI's two formats. They are kept as numbers, and become JSON when they
//! are written: an answer may have twenty alternatives for each of its tokens, and JSON values of
//! them would take many times as much memory, for as long as it grows.
use std::sync::Arc;

use serde::ser::{SerializeMap as _, SerializeSeq as _};
use serde::{Serialize, Serializer};
use shared::protocol::TokenLogprobs;

use crate::text::model::TextModel;

/// JSON has no infinity: impossible tokens get vLLM's stand-in.
const IMPOSSIBLE: f32 = -9999.0;

pub(super) fn finite(logprob: f32) -> f64 {
    f64::from(if logprob.is_finite() { logprob } else { IMPOSSIBLE })
}

pub(super) fn text_of(model: &TextModel, token: u32) -> String {
    String::from_utf8_lossy(&model.token_bytes(token)).into_owned()
}

/// How tokens are told.
#[derive(Clone, Debug)]
pub struct TokenNames {
    model: Arc<TextModel>,
    by_id: bool,
}

impl TokenNames {
    /// By their text, or by their ids, as in vLLM: text does not always tell tokens apart.
    #[must_use]
    pub fn new(model: Arc<TextModel>, by_id: bool) -> Self {
        Self { model, by_id }
    }

    fn of(&self, token: u32) -> String {
        if self.by_id { format!("token_id:{token}") } else { text_of(&self.model, token) }
    }
}

/// The format of completions, gathered token by token.
#[derive(Clone, Debug)]
pub struct CompletionLogprobs {
    names: TokenNames,
    tokens: Vec<Gathered>,
    /// Number of characters of text so far.
    offset: usize,
    /// Whether special tokens are part of the text.
    keep_special: bool,
}

/// A token and the number of characters before it.
#[derive(Clone, Debug)]
struct Gathered {
    token: u32,
    offset: usize,
    /// None for a prompt's first token.
    logprobs: Option<TokenLogprobs>,
}

impl CompletionLogprobs {
    /// Starts with nothing gathered; `keep_special` tells whether special tokens are part of the
    /// text.
    #[must_use]
    pub fn new(names: TokenNames, keep_special: bool) -> Self {
        Self { names, tokens: Vec::new(), offset: 0, keep_special }
    }

    /// Takes what was gathered; what follows continues after it.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let rest = Self { offset: self.offset, ..Self::new(self.names.clone(), self.keep_special) };
        std::mem::replace(self, rest)
    }

    /// Adds a prompt's first token, which has no log-probability. `echoed` is the prompt's text,
    /// without a special token that the tokenizer put before it.
    pub fn push_first(&mut self, token: u32, echoed: &str) {
        self.gather(token, None);
        let special = self.names.model.special_tokens().get(&token);
        if special.is_some_and(|special| !echoed.starts_with(special.as_str())) {
            self.offset = 0;
        }
    }

    /// Adds a token.
    pub fn push(&mut self, token: TokenLogprobs) {
        self.gather(token.token, Some(token));
    }

    fn gather(&mut self, token: u32, logprobs: Option<TokenLogprobs>) {
        let model = &self.names.model;
        self.tokens.push(Gathered { token, offset: self.offset, logprobs });
        // A character that several tokens share begins with the first of them.
        let begins = |byte: &&u8| **byte & 0xc0 != 0x80;
        self.offset += match model.special_tokens().get(&token) {
            Some(_) if !self.keep_special => 0,
            Some(special) => special.chars().count(),
            None => model.token_bytes(token).iter().filter(begins).count(),
        };
    }

    /// Continues after so many characters: a prompt's text is not always that of its tokens
    /// together.
    pub fn go_on_behind(&mut self, characters: usize) {
        self.offset = characters;
    }
}

impl Serialize for CompletionLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (names, tokens) = (&self.names, &self.tokens);
        let mut map = serializer.serialize_map(Some(4))?;
        let text = |it: &Gathered| names.of(it.token);
        map.serialize_entry("tokens", &Listed(tokens, text))?;
        let logprob = |it: &Gathered| it.logprobs.as_ref().map(|it| finite(it.logprob));
        map.serialize_entry("token_logprobs", &Listed(tokens, logprob))?;
        let top = |it: &Gathered| Some(Alternatives(names, it.logprobs.clone()?));
        map.serialize_entry("top_logprobs", &Listed(tokens, top))?;
        map.serialize_entry("text_offset", &Listed(tokens, |it: &Gathered| it.offset))?;
        map.end()
    }
}

/// A list of what is made of each token.
struct Listed<'a, F>(&'a [Gathered], F);

impl<T: Serialize, F: Fn(&Gathered) -> T> Serialize for Listed<'_, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        self.0.iter().try_for_each(|token| list.serialize_element(&(self.1)(token)))?;
        list.end()
    }
}

/// The alternatives to a token by their names, and the token itself, which is always among them.
/// The best come first; tokens with the same text cannot be distinguished here by it.
struct Alternatives<'a>(&'a TokenNames, TokenLogprobs);

impl Serialize for Alternatives<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(names, token) = self;
        let mut told: Vec<String> = Vec::with_capacity(token.top.len() + 1);
        let mut map = serializer.serialize_map(None)?;
        for (id, logprob) in token.top.iter().chain(&[(token.token, token.logprob)]) {
            let name = names.of(*id);
            if !told.contains(&name) {
                map.serialize_entry(&name, &finite(*logprob))?;
                told.push(name);
            }
        }
        map.end()
    }
}

/// One token in the format of chat.
#[derive(Clone, Debug)]
pub struct ChatLogprob {
    names: TokenNames,
    token: TokenLogprobs,
}

impl ChatLogprob {
    /// The token's, if they were requested.
    #[must_use]
    pub fn of(names: &TokenNames, token: Option<&TokenLogprobs>) -> Option<Self> {
        token.map(|token| Self { names: names.clone(), token: token.clone() })
    }
}

impl Serialize for ChatLogprob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { names, token } = self;
        let entry = |id: u32, logprob: f32, top_logprobs: Option<Vec<Entry>>| {
            let bytes = names.model.token_bytes(id);
            let token = names.of(id);
            Entry { token, logprob: finite(logprob), bytes, top_logprobs }
        };
        let top = token.top.iter().map(|(id, logprob)| entry(*id, *logprob, None)).collect();
        entry(token.token, token.logprob, Some(top)).serialize(serializer)
    }
}

/// A token, or an alternative to one.
#[derive(Serialize)]
struct Entry {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry>>,
}

/// The tokens of a choice, in the format of chat.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChatLogprobs<'a> {
    content: &'a [ChatLogprob],
    /// Always null.
    refusal: (),
}

impl<'a> ChatLogprobs<'a> {
    /// Of these tokens.
    #[must_use]
    pub fn of(content: &'a [ChatLogprob]) -> Self {
        Self { content, refusal: () }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{json, to_string, to_value};

    use super::*;
    use crate::text::samples::sentencepiece_bpe;

    #[test]
    fn of_alternatives_that_read_the_same_the_best_is_told() {
        let model = Arc::new(sentencepiece_bpe());
        let id = |piece: &str| model.tokenizer.token_to_id(piece).unwrap();
        let (first, second, third) = (id("<0xE2>"), id("<0x82>"), id("a"));
        let top = vec![(first, -0.5), (third, -1.0), (second, -2.0)];
        let token = TokenLogprobs { token: second, logprob: -2.0, rank: 3, top };
        let names = TokenNames::new(model, false);
        let mut gathered = CompletionLogprobs::new(names.clone(), false);
        gathered.push(token.clone());
        let expected = json!({"\u{fffd}": -0.5, "a": -1.0});
        assert_eq!(to_value(&gathered).unwrap()["top_logprobs"], json!([expected]));
        // Chat distinguishes them by their bytes.
        let told = to_value(ChatLogprob::of(&names, Some(&token))).unwrap();
        assert_eq!(
            (&told["bytes"], &told["top_logprobs"][0]["bytes"]),
            (&json!([0x82]), &json!([0xe2]))
        );
        // Ids distinguish them everywhere, and their bytes stay what they are.
        let names = TokenNames { by_id: true, ..names };
        let mut gathered = CompletionLogprobs::new(names.clone(), false);
        gathered.push(token.clone());
        let name = |id: u32| format!("token_id:{id}");
        let expected = json!({(name(first)): -0.5, (name(third)): -1.0, (name(second)): -2.0});
        let told = to_value(&gathered).unwrap();
        assert_eq!(
            (&told["tokens"], &told["top_logprobs"]),
            (&json!([name(second)]), &json!([expected]))
        );
        let told = to_value(ChatLogprob::of(&names, Some(&token))).unwrap();
        assert_eq!((&told["token"], &told["bytes"]), (&json!(name(second)), &json!([0x82])));
        assert_eq!(told["top_logprobs"][0]["token"], name(first));
    }

    #[test]
    fn both_formats_are_openais() {
        let model = Arc::new(sentencepiece_bpe());
        let id = |piece: &str| model.tokenizer.token_to_id(piece).unwrap();
        let (a, b) = (id("a"), id("b"));
        // As of a token that another one keeps from being chosen at all.
        let top = vec![(b, -0.1), (a, f32::NEG_INFINITY)];
        let token = TokenLogprobs { token: b, logprob: -0.1, rank: 1, top };
        let names = TokenNames::new(model, false);
        let mut gathered = CompletionLogprobs::new(names.clone(), false);
        gathered.push_first(a, "a");
        gathered.push(token.clone());
        let logprob = f64::from(-0.1f32);
        let written = to_string(&gathered).unwrap();
        let expected = format!(
            r#"{{"tokens":["a","b"],"token_logprobs":[null,{logprob}],"top_logprobs":[null,{{"b":{logprob},"a":-9999.0}}],"text_offset":[0,1]}}"#
        );
        assert_eq!(written, expected);
        // What a stream has not told yet goes on behind what it has.
        let told = gathered.take();
        gathered.push(token.clone());
        assert_eq!(to_string(&told).unwrap(), expected);
        assert_eq!(to_value(&gathered).unwrap()["text_offset"], json!([2]));
        let one = ChatLogprob::of(&names, Some(&token)).unwrap();
        let entry = |text: &str, byte: u8, logprob: &str| {
            format!(r#""token":"{text}","logprob":{logprob},"bytes":[{byte}]"#)
        };
        let (b, a) = (entry("b", b'b', &logprob.to_string()), entry("a", b'a', "-9999.0"));
        assert_eq!(
            to_string(&ChatLogprobs::of(&[one])).unwrap(),
            format!(r#"{{"content":[{{{b},"top_logprobs":[{{{b}}},{{{a}}}]}}],"refusal":null}}"#)
        );
        assert!(ChatLogprob::of(&names, None).is_none());
    }
}
