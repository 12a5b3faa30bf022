//! Pairs of texts, as models take them that judge a query and a document together.
use serde_json::json;

use super::TextModel;
use crate::text::template::{Conversation, RenderError};

impl TextModel {
    /// Tokenizes a pair of texts: with the template that the operator chose, in which they are
    /// what `query` and `document` say, or else joined as the model's configuration says. The
    /// folder's own template is not used: it is usually that of the chat model which the model was
    /// made from.
    ///
    /// # Errors
    /// The template's or the tokenizer's error.
    pub fn encode_pair(
        &self,
        query: &str,
        document: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, RenderError> {
        let failed = |error: String| RenderError::Template(error);
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
        Ok(encoding.map_err(|error| failed(error.to_string()))?.get_ids().to_vec())
    }

    /// Returns the part of a text that its first `max` tokens stand for.
    ///
    /// # Errors
    /// The tokenizer's error.
    pub fn beginning<'a>(&self, text: &'a str, max: usize) -> Result<&'a str, String> {
        let encoding = self.tokenizer.encode(text, false).map_err(|error| error.to_string())?;
        let Some((_, end)) = encoding.get_offsets().get(..max).and_then(<[_]>::last) else {
            // It has no more than that.
            return Ok(if max == 0 { "" } else { text });
        };
        // A character may be several tokens.
        Ok(&text[..text.ceil_char_boundary(*end)])
    }
}
