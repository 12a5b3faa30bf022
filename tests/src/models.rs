//! The locations of the model folders, and their golden values.
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}

/// The shipped demo model.
#[must_use]
pub fn demo() -> PathBuf {
    repository().join("models/demo")
}

/// The model with random weights of one architecture.
#[must_use]
pub fn variant(name: &str) -> PathBuf {
    repository().join("tests/models").join(name)
}

/// Reference values of one prompt, computed by transformers in float32.
#[derive(Clone, Debug, Deserialize)]
pub struct Golden {
    /// Unique within the file.
    pub name: String,
    /// The prompt, if it is plain text.
    #[serde(default)]
    pub text: Option<String>,
    /// The prompt, if it is a chat.
    #[serde(default)]
    pub messages: Option<serde_json::Value>,
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// Log-probability of each prompt token; `None` for the first.
    pub prompt_logprobs: Vec<Option<f64>>,
    /// 32 greedy tokens; end tokens do not stop generation.
    pub greedy_ids: Vec<u32>,
    /// Their log-probabilities.
    pub greedy_logprobs: Vec<f64>,
    /// Their text, including special tokens.
    pub greedy_text: String,
    /// Index of the first end token among them.
    pub greedy_stop_index: Option<usize>,
    /// For each of them, the gap between the log-probabilities of the best two tokens.
    pub greedy_top1_top2_gap: Vec<f64>,
}

/// Reads a model folder's golden values.
///
/// # Panics
/// If the file is missing or malformed: the repository is broken then.
#[must_use]
pub fn goldens(model: &Path) -> Vec<Golden> {
    goldens_in(model, "golden.json")
}

/// Reads golden values of a model folder from `file`.
///
/// # Panics
/// If the file is missing or malformed: the repository is broken then.
#[must_use]
#[expect(clippy::expect_used, reason = "a broken repository must fail the test that needs it")]
pub fn goldens_in(model: &Path, file: &str) -> Vec<Golden> {
    #[derive(Deserialize)]
    struct File {
        prompts: Vec<Golden>,
    }
    let text = std::fs::read_to_string(model.join(file)).expect("golden values");
    serde_json::from_str::<File>(&text).expect("golden values have the known fields").prompts
}

/// Reference embeddings of one prompt, normalised to length 1, computed by transformers in float32.
#[derive(Clone, Debug, Deserialize)]
pub struct EmbeddingGolden {
    /// The prompt's name in `golden.json`.
    pub name: String,
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// Embedding of the last token.
    pub last: Vec<f64>,
    /// Embedding of the first token.
    pub first: Vec<f64>,
    /// Mean over all tokens.
    pub mean: Vec<f64>,
}

/// Reads a model folder's reference embeddings.
///
/// # Panics
/// If the file is missing or malformed: the repository is broken then.
#[must_use]
#[expect(clippy::expect_used, reason = "a broken repository must fail the test that needs it")]
pub fn embedding_goldens(model: &Path) -> Vec<EmbeddingGolden> {
    #[derive(Deserialize)]
    struct File {
        prompts: Vec<EmbeddingGolden>,
    }
    let text = std::fs::read_to_string(model.join("embeddings.json")).expect("embeddings.json");
    serde_json::from_str::<File>(&text).expect("embeddings.json has the known fields").prompts
}

/// What transformers makes of one prompt in float32, before any activation.
#[derive(Clone, Debug, Deserialize)]
pub struct ClassGolden {
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// A number for each class.
    pub numbers: Vec<f64>,
}

/// A pair of texts, in each form in which a model may get it.
#[derive(Clone, Debug, Deserialize)]
pub struct PairGolden {
    /// The first text.
    pub query: String,
    /// The second text.
    pub document: String,
    /// Its tokens.
    pub ids: PairForms<Vec<u32>>,
    /// The number of the model's only class.
    pub numbers: PairForms<f64>,
}

/// Something for each form of a pair.
#[derive(Clone, Debug, Deserialize)]
pub struct PairForms<T> {
    /// As the tokenizer joins the texts.
    pub joined: T,
    /// The second text behind the first.
    pub following: T,
    /// Rendered with `score.jinja`.
    pub templated: T,
}

/// Reference values of a model that sorts texts into classes.
#[derive(Clone, Debug, Deserialize)]
pub struct ClassGoldens {
    /// Of a generating model: the tokens whose logits are compared, `no` and `yes`.
    #[serde(default)]
    pub tokens: Vec<String>,
    /// Prompts, the longest first.
    pub prompts: Vec<ClassGolden>,
    /// Pairs of texts, of a model with one class.
    pub pairs: Vec<PairGolden>,
}

/// Reads the reference values in a model folder's `classes.json`.
///
/// # Panics
/// If the file is missing or malformed: the repository is broken then.
#[must_use]
#[expect(clippy::expect_used, reason = "a broken repository must fail the test that needs it")]
pub fn class_goldens(model: &Path) -> ClassGoldens {
    let text = std::fs::read_to_string(model.join("classes.json")).expect("classes.json");
    serde_json::from_str(&text).expect("classes.json has the known fields")
}
