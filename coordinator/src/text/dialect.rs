//! How a tokenizer encodes text in its tokens: which bytes each of them stands for.
use serde_json::Value;
use tokenizers::Tokenizer;

/// How a tokenizer encodes text in its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// Each byte is one printable character (byte-level BPE); otherwise tokens are text with U+2581
    /// for spaces (sentencepiece).
    pub(crate) byte_level: bool,
    /// Tokens such as `<0xE9>` stand for a byte (byte fallback).
    byte_fallback: bool,
    /// The decoder drops a leading space of the output.
    pub(crate) strips_space: bool,
}

impl Dialect {
    /// The dialect of `tokenizer`.
    ///
    /// # Errors
    /// One sentence when the tokens alone do not determine the text that they stand for.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, String> {
        let decoder = serde_json::to_value(tokenizer.get_decoder());
        Self::of_decoder(&decoder.map_err(|error| format!("the tokenizer's decoder: {error}"))?)
    }

    fn of_decoder(decoder: &Value) -> Result<Self, String> {
        let mut dialect = Self { byte_level: false, byte_fallback: false, strips_space: false };
        let mut has_spaces = false;
        let parts = match decoder.get("decoders").and_then(Value::as_array) {
            Some(parts) => parts.as_slice(),
            None => std::slice::from_ref(decoder),
        };
        for part in parts {
            let text = |key: &str| part.get(key).and_then(Value::as_str);
            let number = |key: &str| part.get(key).and_then(Value::as_u64).unwrap_or(0);
            match text("type") {
                Some("ByteLevel") => dialect.byte_level = true,
                Some("ByteFallback") => dialect.byte_fallback = true,
                Some("Fuse") => {}
                Some("Replace")
                    if part.pointer("/pattern/String") == Some(&Value::from("\u{2581}"))
                        && text("content") == Some(" ") =>
                {
                    has_spaces = true;
                }
                Some("Metaspace") if text("replacement") == Some("\u{2581}") => {
                    has_spaces = true;
                    dialect.strips_space |= text("prepend_scheme") != Some("never");
                }
                Some("Strip") if text("content") == Some(" ") && number("stop") == 0 => {
                    dialect.strips_space |= number("start") > 0;
                }
                kind => {
                    let kind = kind.unwrap_or("none");
                    return Err(format!(
                        "structured output needs a tokenizer whose tokens are text by themselves; \
                         with this model's decoder ({kind}) they are not"
                    ));
                }
            }
        }
        if dialect.byte_level == has_spaces {
            return Err("the tokenizer's decoder is of an unknown kind".to_owned());
        }
        Ok(dialect)
    }

    /// The bytes of a text token.
    #[must_use]
    pub fn bytes(self, piece: &str) -> Vec<u8> {
        if self.byte_level {
            let bytes: Option<Vec<u8>> = piece.chars().map(byte_of).collect();
            return bytes.unwrap_or_else(|| piece.as_bytes().to_vec());
        }
        let hex = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        let byte = hex.filter(|hex| self.byte_fallback && hex.len() == 2);
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => vec![byte],
            None => piece.replace('\u{2581}', " ").into_bytes(),
        }
    }
}

/// The byte that byte-level BPE writes as `c`: printable Latin-1 stands for itself, the other 68
/// bytes are shifted to U+0100 and up.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(c);
    if code < 256 {
        return printable(code).then_some(code as u8);
    }
    (0..=255u32).filter(|b| !printable(*b)).nth(code.checked_sub(256)? as usize).map(|b| b as u8)
}

#[cfg(test)]
mod tests {
    use crate::text::samples::{sentencepiece_bpe, sentencepiece_that_keeps_spaces};

    #[test]
    fn a_token_that_is_a_byte_stands_for_it() {
        for model in [sentencepiece_bpe(), sentencepiece_that_keeps_spaces()] {
            let bytes =
                |piece: &str| model.token_bytes(model.tokenizer.token_to_id(piece).unwrap());
            assert_eq!(bytes("<0xE2>"), [0xe2]);
            assert_eq!(bytes("<0x0A>"), b"\n");
            assert_eq!(bytes("<0xZZ>"), b"<0xZZ>");
            assert_eq!(bytes("\u{2581}a"), b" a");
        }
    }
}
