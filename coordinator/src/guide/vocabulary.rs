//! The vocabulary as grammars see it: the bytes that each token adds to the text.
use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use tokenizers::Tokenizer;

use crate::text::dialect::Dialect;
use crate::text::model::TextModel;

/// The trie only has room for tokens shorter than this; longer ones are not needed.
const TOKEN_BYTES_MAX: usize = 1024;
/// The trie's limit on the bytes of all tokens, before sharing prefixes.
const TRIE_BYTES_MAX: usize = 1 << 22;
/// A byte that occurs in no text: a token that begins with it never matches as text.
const MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// The bytes of all tokens, in llguidance's form.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    dialect: Dialect,
}

impl Vocabulary {
    /// The vocabulary of `model`.
    ///
    /// # Errors
    /// One sentence when the tokens alone do not determine the text that they stand for.
    pub(super) fn new(model: &TextModel) -> Result<Self, String> {
        let tokenizer = model.tokenizer.clone();
        let dialect = model.dialect.clone()?;
        let added = tokenizer.get_added_tokens_decoder();
        let word = |id: u32| -> Vec<u8> {
            let Some(piece) = tokenizer.id_to_token(id) else { return Vec::new() };
            // These are not text: special tokens are left out, end tokens end it.
            let special = added.get(&id).is_some_and(|token| token.special);
            let word = match special || model.end_tokens.contains(&id) {
                true => [&[MARKER], piece.as_bytes()].concat(),
                false => dialect.bytes(&piece),
            };
            if word.len() < TOKEN_BYTES_MAX { word } else { Vec::new() }
        };
        let words: Vec<Vec<u8>> = (0..model.vocab_size).map(word).collect();
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes >= TRIE_BYTES_MAX || model.vocab_size >= 1 << 24 {
            return Err(format!("the vocabulary is too large: {bytes} bytes of tokens"));
        }
        let first_end = model.end_tokens.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(model.vocab_size, first_end), &words);
        if model.end_tokens.len() > 1 {
            trie = trie.with_eos_tokens(&model.end_tokens);
        }
        Ok(Self { trie, tokenizer, dialect })
    }

    /// Tokens that lose their first byte, a space, when the output begins with them.
    pub(super) fn losing_their_space(&self) -> Vec<TokenId> {
        if !self.dialect.strips_space {
            return Vec::new();
        }
        let all = 0..self.trie.vocab_size() as TokenId;
        all.filter(|token| self.trie.token(*token).starts_with(b" ")).collect()
    }

    #[cfg(test)]
    pub(super) fn trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Wraps it for sharing.
    pub(super) fn into_env(self) -> TokEnv {
        Arc::new(self)
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        let encoded = std::str::from_utf8(text).ok().and_then(|text| {
            let encoding = self.tokenizer.encode_fast(text, false).ok()?;
            Some(encoding.get_ids().to_vec())
        });
        // Accepts only tokens that stand for exactly these bytes: the tokenizer turns text that
        // spells a special token into that token, and may normalize text.
        let vocab = self.trie.vocab_size() as TokenId;
        let is_text = |tokens: &Vec<TokenId>| {
            let words = tokens.iter().filter(|token| **token < vocab);
            let words: Vec<&[u8]> = words.map(|token| self.trie.token(*token)).collect();
            words.len() == tokens.len() && words.concat() == text
        };
        encoded.filter(is_text).unwrap_or_else(|| self.trie.greedy_tokenize(text))
    }

    /// If canonical, text that the grammar forces gets the tokens that the model is used to. A
    /// tokenizer that puts a space before every text has no canonical tokens for the middle of one.
    fn tokenize_is_canonical(&self) -> bool {
        self.dialect.byte_level
    }
}
