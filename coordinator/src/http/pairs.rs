//! Pairs of texts, each a prompt of its own, for models that judge a query and a document together.
use std::borrow::Cow;

use super::conversation;
use super::error::ApiError;
use super::vectors::{Group, Input, check_length};
use crate::text::model::TextModel;
use crate::text::template::RenderError;

/// Tokenizes pairs of texts: keeps at most `keep` tokens of each pair if given, otherwise rejects
/// pairs of more than `max`, and more than `most` tokens of all pairs.
pub(super) struct Pairs<'a> {
    pub(super) model: &'a TextModel,
    pub(super) special: bool,
    pub(super) keep: Option<usize>,
    pub(super) max: u32,
    pub(super) most: usize,
    /// Most bytes of all pairs.
    pub(super) bytes: usize,
}

/// How many more tokens of a text than are kept of its pair are tokenized: a text that is cut may
/// end with other tokens than it would have there, and these have to be behind the pair's own cut.
const MARGIN: usize = 64;

impl Pairs<'_> {
    /// See [`Pairs`].
    pub(super) fn encode(&self, left: &Group, right: &Group) -> Result<Vec<Vec<u32>>, ApiError> {
        let (ones, others) = (self.shortened(left)?, self.shortened(right)?);
        // One side may be repeated in every pair, so that all together are much longer than the
        // request; and texts of many bytes may have few tokens.
        let total = |texts: &[Cow<'_, str>]| texts.iter().map(|text| text.len()).sum::<usize>();
        let times = others.len() / ones.len().max(1);
        let bytes = total(&ones).saturating_mul(times).saturating_add(total(&others));
        if bytes > self.bytes {
            let (field, most) = (left.field, self.bytes);
            let message = format!(
                "`{field}`, with each of `{}`, has {bytes} bytes in total, the limit is {most}",
                right.field
            );
            return Err(ApiError::field(field, message));
        }
        let mut pairs = Vec::with_capacity(right.inputs.len());
        let mut total = 0;
        for (index, other) in others.iter().enumerate() {
            let one = ones.get(index % ones.len().max(1)).map_or("", |one| &**one);
            let mut pair = self.model.encode_pair(one, other, self.special).map_err(|error| {
                let is_template = matches!(error, RenderError::Template(_));
                let field = if is_template { "model" } else { right.field };
                ApiError::field(field, error.to_string())
            })?;
            pair.truncate(self.keep.unwrap_or(usize::MAX));
            check_length(right.field, index, pair.len(), self.max)?;
            total += pair.len();
            if total > self.most {
                let (field, most) = (right.field, self.most);
                let message = format!(
                    "`{field}`, each with `{}`, has more than {most} tokens in total",
                    left.field
                );
                return Err(ApiError::field(field, message));
            }
            pairs.push(pair);
        }
        Ok(pairs)
    }

    /// How many tokens of each text of a group are needed, if not all.
    fn keeps(&self, group: &Group) -> Option<usize> {
        let whole = self.keep.map(|keep| keep.saturating_add(MARGIN));
        group.keep.into_iter().chain(whole).min()
    }

    /// The texts of a group, as much of each as the request wants to keep.
    fn shortened<'g>(&self, group: &'g Group) -> Result<Vec<Cow<'g, str>>, ApiError> {
        let name = group.field;
        let shorten = |input: &'g Input| match input {
            Input::Tokens(tokens) => Ok(self.model.decode(tokens).into()),
            Input::Text(text) => match self.keeps(group) {
                Some(keep) => {
                    let failed = |error| ApiError::field(name, error);
                    self.model.beginning(text, keep).map(Cow::Borrowed).map_err(failed)
                }
                None => {
                    conversation::check_fits(self.model, name, text, Some(self.max))?;
                    Ok(Cow::Borrowed(&**text))
                }
            },
        };
        group.inputs.iter().map(shorten).collect()
    }
}
