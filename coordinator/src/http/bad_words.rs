//! vLLM's `bad_words`: words that must not be generated.
use std::sync::Arc;

use serde_json::Value;
use shared::protocol::BadWords;

use super::error::ApiError;
use super::fields::Fields;
use super::limits::Limits;
use super::params::Common;
use super::structured::{Asked, wrong};
use crate::text::model::TextModel;

/// The field.
pub const FIELD: &str = "bad_words";

/// A request's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words(Vec<String>);

impl Words {
    /// Reads the field; `None` without any words. `common` still has the request's constraint.
    ///
    /// # Errors
    /// 400, if it is no list of words, or if only end tokens might remain before they may come.
    pub fn read(
        fields: &Fields,
        limits: &Limits,
        common: &Common,
    ) -> Result<Option<Self>, ApiError> {
        let (words, bytes) = (limits.bad_words, limits.stop_bytes);
        let Some(value) = fields.get(FIELD) else { return Ok(None) };
        let fits = |word: &&str| (1..=bytes).contains(&word.len());
        let one = |word: &Value| word.as_str().filter(fits).map(str::to_owned);
        let list = value.as_array().filter(|list| list.len() <= words);
        let list: Option<Vec<String>> = list.and_then(|list| list.iter().map(one).collect());
        let list = list.ok_or_else(|| {
            let expected = format!("a list of at most {words} strings, each of 1 to {bytes} bytes");
            Fields::wrong(FIELD, value, &expected)
        })?;
        if list.is_empty() {
            return Ok(None);
        }
        let lists_tokens = common.asked.as_ref().is_some_and(Asked::lists_tokens);
        if lists_tokens && common.sampling.min_tokens > 0 {
            let message = "and `bad_words` cannot be combined with `allowed_token_ids`: only end \
                           tokens might remain";
            return Err(wrong("min_tokens", message));
        }
        Ok(Some(Self(list)))
    }

    /// Tokenizes them.
    ///
    /// # Errors
    /// 400, if one has no tokens, if they have too many, or may leave no token of the vocabulary.
    pub fn tokens(&self, text: &TextModel) -> Result<Arc<BadWords>, ApiError> {
        let mut sequences = Vec::new();
        for word in &self.0 {
            for tokens in forms(word, |form| text.encode(form, false))? {
                if tokens.is_empty() {
                    let message = format!("has a word without tokens, {word:?}");
                    return Err(wrong(FIELD, &message));
                }
                if !sequences.contains(&tokens) {
                    sequences.push(tokens);
                }
            }
        }
        let words = BadWords { sequences };
        words.check(text.vocab_size).map_err(|error| wrong(FIELD, &error))?;
        Ok(Arc::new(words))
    }
}

/// The tokens of a word at the beginning of a text and behind a space. The latter are left out
/// where they end with the former, which forbid them too.
fn forms(
    word: &str,
    encode: impl Fn(&str) -> Result<Vec<u32>, String>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let failed = |error: String| wrong(FIELD, &format!("cannot be tokenized: {error}"));
    let bare = word.trim_start();
    if bare.is_empty() {
        return Ok(vec![encode(word).map_err(failed)?]);
    }
    let first = encode(bare).map_err(failed)?;
    let spaced = encode(&format!(" {bare}")).map_err(failed)?;
    Ok(if spaced.ends_with(&first) { vec![first] } else { vec![first, spaced] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_forbidden_at_the_beginning_and_behind_a_space() {
        // With another token for " a" than for "a"; with one for all of " ab"; of single bytes.
        let merged = |text: &str| Ok(if text == " ab" { vec![9, 2] } else { vec![1, 2] });
        assert_eq!(forms("ab", merged).unwrap(), [vec![1, 2], vec![9, 2]]);
        assert_eq!(forms("  ab", merged).unwrap(), [vec![1, 2], vec![9, 2]]);
        let shorter = |text: &str| Ok(if text == " ab" { vec![9] } else { vec![1, 2] });
        assert_eq!(forms("ab", shorter).unwrap(), [vec![1, 2], vec![9]]);
        let bytes = |text: &str| Ok(text.bytes().map(u32::from).collect());
        assert_eq!(forms(" ab", bytes).unwrap(), [[97, 98]]);
        assert_eq!(forms("\n ", bytes).unwrap(), [[10, 32]]);
        assert!(forms("a", |_| Err("no".into())).is_err());
    }
}
