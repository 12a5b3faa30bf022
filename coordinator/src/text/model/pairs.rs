//! Pairs of texts, as models take them that judge a query and a document together.
use serde_json::json;

use super::TextModel;
use crate::text::template::{Conversation, RenderError};

/// How often a text that is cut is only cut as far as its tokens say.
const PATIENCE: usize = 4;

impl TextModel {
    /// Tokenizes a pair of texts: with the template that the operator chose, in which they are
    /// what `query` and `document` say, or else joined as the model's configuration says. The
    /// folder's own template is not used: it is usually that of the chat model which the model was
    /// made from.
    ///
    /// # Errors
    /// The template's or the tokenizer's error, or a token that the model lacks.
    pub fn encode_pair(
        &self,
        query: &str,
        document: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, RenderError> {
        let failed = |error: String| RenderError::Conversation(error);
        if let Some(template) = self.template.as_ref().filter(|_| self.is_template_chosen) {
            let turn = |role: &str, text: &str| json!({"role": role, "content": text});
            let turns = vec![turn("query", query), turn("document", document)];
            let pair = Conversation { add_generation_prompt: false, ..Conversation::new(turns) };
            let text = template.render(&pair)?;
            return self.encode(&text, add_special_tokens).map_err(failed);
        }
        if self.classifier.as_ref().is_some_and(|classifier| !classifier.separates) {
            return self.encode(&[query, document].concat(), add_special_tokens).map_err(failed);
        }
        let encoding = self.tokenizer.encode_fast((query, document), add_special_tokens);
        let encoding = encoding.map_err(|error| failed(error.to_string()))?;
        self.of_model(encoding.get_ids().to_vec()).map_err(failed)
    }

    /// Returns the beginning of a text that has at most `max` tokens, as vLLM cuts it: no character
    /// is kept of which one token is too many, and what is left is tokenized again, because a part
    /// of a word may have other tokens, and more, than it has in the word.
    ///
    /// # Errors
    /// The tokenizer's error.
    pub fn beginning<'a>(&self, mut text: &'a str, max: usize) -> Result<&'a str, String> {
        let mut spare = 0;
        for round in 0usize.. {
            let Some(last) = max.checked_sub(spare + 1) else { break };
            let encoding = self.tokenizer.encode(text, false).map_err(|error| error.to_string())?;
            let offsets = encoding.get_offsets();
            if offsets.len() <= max {
                return Ok(text);
            }
            let (Some((_, end)), Some((next, _))) = (offsets.get(last), offsets.get(last + 1))
            else {
                break;
            };
            // Always shorter.
            let end = text.len().saturating_sub(1).min(*end).min(*next);
            text = &text[..text.floor_char_boundary(end)];
            // Usually enough at once. What never is enough loses ever more.
            if round >= PATIENCE {
                spare = spare * 2 + 1;
            }
        }
        Ok("")
    }
}
