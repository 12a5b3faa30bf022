//! The matrix of a model that sorts texts into classes: it turns a text's vector into one number
//! for each class. It is small, so it stays in host memory, in f32, and rank 0 applies it.
use std::collections::HashMap;
use std::path::Path;

use kernels::weights::widen;
use serde::Deserialize;
use shared::model_config::ClassHeadSource;

use super::Source;
use crate::model::ModelError;

/// The matrix of classes.
#[derive(Debug)]
pub struct ClassHead {
    /// One row for each class, `[classes, width]`.
    rows: Vec<f32>,
    /// Added at the end, if the files have it.
    bias: Option<Vec<f32>>,
    /// Length of a text's vector.
    width: usize,
}

impl ClassHead {
    /// Reads the matrix, if the model has classes.
    ///
    /// # Errors
    /// [`ModelError`].
    pub(super) fn read(source: &Source<'_>) -> Result<Option<Self>, ModelError> {
        let Source { files, config, .. } = *source;
        let Some(classifier) = &config.classifier else { return Ok(None) };
        let (width, count) = (config.hidden_size, classifier.names.len());
        let head = match &classifier.head {
            ClassHeadSource::Own => {
                let rows = files.numbers("score.weight", &[count, width])?;
                let has_bias = files.has("score.bias");
                let bias = has_bias.then(|| files.numbers("score.bias", &[count])).transpose()?;
                Self { rows, bias, width }
            }
            ClassHeadSource::Tokens(tokens) => {
                let rows = tokens_rows(source, tokens)?;
                Self { rows: rows.concat(), bias: None, width }
            }
            ClassHeadSource::Contrast(tokens) => {
                let rows = tokens_rows(source, tokens)?;
                let difference = rows[1].iter().zip(&rows[0]).map(|(yes, no)| yes - no).collect();
                Self { rows: difference, bias: None, width }
            }
        };
        Ok(Some(head))
    }

    /// Size of the matrix, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        size_of_val(self.rows.as_slice()) as u64
    }

    /// Returns one number for each class. In double precision and always in the same order, so that
    /// the result depends on the vector alone.
    #[must_use]
    pub fn apply(&self, vector: &[f32]) -> Vec<f32> {
        let rows = self.rows.chunks_exact(self.width).enumerate();
        rows.map(|(class, row)| {
            let products = row.iter().zip(vector).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let bias = self.bias.as_ref().and_then(|bias| bias.get(class)).copied();
            (products.sum::<f64>() + f64::from(bias.unwrap_or(0.0))) as f32
        })
        .collect()
    }
}

/// The output head's rows for these tokens, so that a vector gives their logits.
fn tokens_rows(source: &Source<'_>, tokens: &[String]) -> Result<Vec<Vec<f32>>, ModelError> {
    let Source { files, config, .. } = *source;
    if let Some(cap) = config.logits_cap {
        let message = format!(
            "classifier_from_token is not supported with a cap of logits \
             (final_logit_softcapping is {cap})"
        );
        return Err(ModelError::file(&files.folder().join("config.json"), message));
    }
    let name = if config.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let head = files.tensor(name, &[config.vocab_size, config.hidden_size])?;
    let (ids, size) = (ids(files.folder(), tokens)?, config.hidden_size * head.dtype.bytes());
    let row = |(id, token): (usize, &String)| {
        let mut row = vec![0.0; config.hidden_size];
        let start = Some(id).filter(|id| *id < config.vocab_size).map(|id| id * size);
        let data = start.and_then(|start| head.data.get(start..start + size)).ok_or_else(|| {
            let message = format!(
                "token {token:?} of classifier_from_token is number {id}, not below vocab_size \
                 ({})",
                config.vocab_size
            );
            ModelError::file(&files.folder().join("config.json"), message)
        })?;
        widen(head.dtype, data, &mut row);
        row.iter_mut().for_each(|value| *value /= config.logits_scaling);
        Ok(row)
    };
    ids.into_iter().zip(tokens).map(row).collect()
}

/// The tokens' numbers, as the tokenizer's file has them.
fn ids(folder: &Path, tokens: &[String]) -> Result<Vec<usize>, ModelError> {
    #[derive(Deserialize)]
    struct Tokenizer {
        #[serde(default)]
        added_tokens: Vec<Added>,
        model: Model,
    }
    #[derive(Deserialize)]
    struct Added {
        id: usize,
        content: String,
    }
    #[derive(Deserialize)]
    struct Model {
        vocab: Vocabulary,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Vocabulary {
        Named(HashMap<String, usize>),
        Listed(Vec<(String, f64)>),
    }
    let file = folder.join("tokenizer.json");
    let failed = |message: String| ModelError::file(&file, message);
    let text = std::fs::read(&file).map_err(|error| {
        failed(format!("cannot be read, and classifier_from_token needs it: {error}"))
    })?;
    let tokenizer: Tokenizer = serde_json::from_slice(&text)
        .map_err(|error| failed(format!("not a tokenizer with a vocabulary: {error}")))?;
    let find = |token: &String| {
        let mut added = tokenizer.added_tokens.iter();
        let added = added.find(|it| it.content == *token).map(|it| it.id);
        added.or_else(|| match &tokenizer.model.vocab {
            Vocabulary::Named(named) => named.get(token).copied(),
            Vocabulary::Listed(list) => list.iter().position(|(text, _)| text == token),
        })
    };
    let find = |token: &String| {
        find(token).ok_or_else(|| {
            failed(format!("has no token {token:?}, which classifier_from_token names"))
        })
    };
    tokens.iter().map(find).collect()
}
