//! A vocabulary as grammars see it: the bytes that each token adds to the text.
use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use tokenizers::Tokenizer;

use crate::text::dialect::Dialect;
use crate::text::model::TextModel;

/// The trie has room for tokens of fewer bytes; nobody misses longer ones.
const TOKEN_BYTES_MAX: usize = 1024;
/// And for so many bytes of all tokens, whatever they share.
const TRIE_BYTES_MAX: usize = 1 << 22;
/// No text has this byte: a token that begins with it is not matched as text.
const MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// The tokens' bytes, in the form that grammars are matched with.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    dialect: Dialect,
}

impl Vocabulary {
    /// That of a model.
    ///
    /// # Errors
    /// One sentence when the tokenizer's tokens do not say by themselves which text they stand for.
    pub(super) fn new(model: &TextModel) -> Result<Self, String> {
        let tokenizer = model.tokenizer.clone();
        let dialect = model.dialect.clone()?;
        let added = tokenizer.get_added_tokens_decoder();
        let word = |id: u32| -> Vec<u8> {
            let Some(piece) = tokenizer.id_to_token(id) else { return Vec::new() };
            // Neither is part of the text: the one is left out of it, the other ends it.
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

    /// Tokens whose first byte is not in the text when the output begins with them.
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

    /// To be shared.
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
        // Only tokens that stand for these very bytes: the tokenizer takes what is written like a
        // special token for one, and may normalize.
        let vocab = self.trie.vocab_size() as TokenId;
        let is_text = |tokens: &Vec<TokenId>| {
            let words = tokens.iter().filter(|token| **token < vocab);
            let words: Vec<&[u8]> = words.map(|token| self.trie.token(*token)).collect();
            words.len() == tokens.len() && words.concat() == text
        };
        encoded.filter(is_text).unwrap_or_else(|| self.trie.greedy_tokenize(text))
    }

    /// Where it is, text that a grammar leaves no choice of gets the tokens that the model knows
    /// it by. Tokenizers that put a space before every text have none for its middle.
    fn tokenize_is_canonical(&self) -> bool {
        self.dialect.byte_level
    }
}
