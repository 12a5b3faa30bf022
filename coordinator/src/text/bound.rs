//! The maximum bytes of text that one token can stand for, so that a text too long for the model is
//! rejected before it is tokenized.
//!
//! Only tokenizers that drop no bytes have such a bound: byte-level BPE, and BPE with byte
//! fallback, if their normalizer and pre-tokenizer drop nothing. Others have none.
use std::collections::HashSet;

use serde_json::Value;

/// How much Unicode composition may shorten text at most (UAX #15, maximum expansion of NFD).
const NFC_FACTOR: usize = 3;

/// Returns the maximum bytes per token, from a `tokenizer.json`; `None` if it is not known.
#[must_use]
pub fn bytes_per_token(tokenizer: &Value) -> Option<usize> {
    let model = tokenizer.get("model")?;
    if model.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "BPE") {
        return None;
    }
    let vocabulary = model.get("vocab")?.as_object()?;
    let byte_level = keeps_all(tokenizer.get("pre_tokenizer").unwrap_or(&Value::Null))?;
    let longest = if byte_level {
        // With a token for each of the 256 byte characters, nothing is dropped.
        let single: HashSet<char> = vocabulary
            .keys()
            .filter_map(|token| {
                let mut chars = token.chars();
                chars.next().filter(|_| chars.next().is_none())
            })
            .filter(|c| super::dialect::byte_of(*c).is_some())
            .collect();
        if single.len() < 256 {
            return None;
        }
        vocabulary.keys().map(|token| token.chars().count()).max()?
    } else {
        let fallback = model.get("byte_fallback") == Some(&Value::Bool(true));
        if !fallback || (0..=255).any(|byte| !vocabulary.contains_key(&format!("<0x{byte:02X}>"))) {
            return None;
        }
        vocabulary.keys().map(String::len).max()?
    };
    let mut most = longest;
    for token in tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        // Such a token absorbs any amount of adjacent white space.
        if ["lstrip", "rstrip"].iter().any(|side| token.get(side) == Some(&Value::Bool(true))) {
            return None;
        }
        most = most.max(token.get("content")?.as_str()?.len());
    }
    Some(most * shortening(tokenizer.get("normalizer").unwrap_or(&Value::Null))?)
}

/// The factor by which a normalizer may shorten text, if bounded.
fn shortening(normalizer: &Value) -> Option<usize> {
    if normalizer.is_null() {
        return Some(1);
    }
    match normalizer.get("type")?.as_str()? {
        "NFC" => Some(NFC_FACTOR),
        "Prepend" => Some(1),
        "Replace" => {
            let from = normalizer.get("pattern")?.get("String")?.as_str()?;
            let to = normalizer.get("content")?.as_str()?;
            (to.len() >= from.len()).then_some(1)
        }
        "Sequence" => {
            let list = normalizer.get("normalizers")?.as_array()?;
            list.iter().map(shortening).product()
        }
        _ => None,
    }
}

/// For a pre-tokenizer that drops no text: whether it is byte-level. `None` for one that may drop
/// text.
fn keeps_all(pre_tokenizer: &Value) -> Option<bool> {
    if pre_tokenizer.is_null() {
        return Some(false);
    }
    match pre_tokenizer.get("type")?.as_str()? {
        "ByteLevel" => Some(true),
        "Metaspace" | "Digits" => Some(false),
        "Split" | "Punctuation" => {
            let behavior = pre_tokenizer.get("behavior").and_then(Value::as_str);
            (behavior? != "Removed").then_some(false)
        }
        "Sequence" => {
            let list = pre_tokenizer.get("pretokenizers")?.as_array()?;
            list.iter().map(keeps_all).try_fold(false, |any, one| Some(any | one?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn byte_level(pre_tokenizer: &Value, normalizer: &Value, added: &Value) -> Option<usize> {
        let bytes = (0..=0x143u32).filter_map(char::from_u32);
        let bytes = bytes.filter(|c| crate::text::dialect::byte_of(*c).is_some());
        let mut vocab: serde_json::Map<String, Value> =
            bytes.map(|c| (c.to_string(), json!(0))).collect();
        assert_eq!(vocab.len(), 256);
        vocab.insert("\u{120}hello".to_owned(), json!(1));
        bytes_per_token(&json!({"model": {"type": "BPE", "vocab": vocab},
            "pre_tokenizer": pre_tokenizer, "normalizer": normalizer, "added_tokens": added}))
    }

    #[test]
    fn a_bound_is_told_only_where_no_byte_is_left_out() {
        let level = json!({"type": "ByteLevel"});
        let split = |behavior: &str| {
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "behavior": behavior}, {"type": "ByteLevel"}]})
        };
        let none = Value::Null;
        assert_eq!(byte_level(&level, &none, &none), Some(6));
        assert_eq!(byte_level(&split("Isolated"), &json!({"type": "NFC"}), &none), Some(18));
        assert_eq!(byte_level(&level, &none, &json!([{"content": "<|begin|>"}])), Some(9));
        let drops = [
            byte_level(&split("Removed"), &none, &none),
            byte_level(&level, &json!({"type": "StripAccents"}), &none),
            byte_level(&level, &none, &json!([{"content": "a", "rstrip": true}])),
            byte_level(&json!({"type": "WhitespaceSplit"}), &none, &none),
            bytes_per_token(&json!({"model": {"type": "WordPiece", "vocab": {"a": 0}}})),
            bytes_per_token(&json!({"model": {"type": "BPE", "vocab": {"a": 0}},
                "pre_tokenizer": {"type": "ByteLevel"}})),
            bytes_per_token(
                &json!({"model": {"type": "BPE", "vocab": {"a": 0}, "byte_fallback": true}}),
            ),
        ];
        assert_eq!(drops, [None; 7]);
    }

    #[test]
    fn byte_fallback_counts_the_bytes_of_the_longest_piece() {
        let bytes = (0..=255).map(|byte| (format!("<0x{byte:02X}>"), json!(0)));
        let mut vocab: serde_json::Map<String, Value> = bytes.collect();
        vocab.insert("\u{2581}longest".to_owned(), json!(1));
        let normalizer = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]});
        let tokenizer = json!({"model": {"type": "BPE", "vocab": vocab, "byte_fallback": true},
            "normalizer": normalizer});
        assert_eq!(bytes_per_token(&tokenizer), Some(10));
    }
}
