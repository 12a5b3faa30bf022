//! The text side of a model folder: tokenizer, chat template, end tokens, sampling defaults, and
//! the sizes that bound a request.
//!
//! - `description`: what the folder says of its tokenizer, for clients
//! - `generation`: sampling defaults and end tokens
//! - `head`: whether the weights have an output head
//! - `pairs`: pairs of texts that are judged together
//! - `pooling`: how embeddings are pooled
//! - `surround`: special tokens around a text that `tokenizer.json` does not know of
//! - `templates`: where the chat templates are
mod description;
mod generation;
mod head;
mod pairs;
mod pooling;
mod surround;
mod templates;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};
use shared::model_config::{self, Classifier, ConfigOverrides};
use shared::sampling::Pooling;
use tokenizers::{PostProcessor as _, Tokenizer, TruncationDirection};

pub use self::generation::{GenerationSource, SamplingDefaults};
use self::templates::TemplateSources;
use super::bound;
use super::dialect::Dialect;
use super::reply::harmony;
use super::stream::{StopRules, TextStream};
use super::template::ChatTemplate;
use crate::guide::{GrammarCompiler, Guides};

/// Why a model folder cannot be served: one sentence naming the file and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", file.display())]
pub struct TextModelError {
    file: PathBuf,
    message: String,
}

impl TextModelError {
    fn new(file: &Path, message: impl std::fmt::Display) -> Self {
        Self { file: file.to_owned(), message: message.to_string() }
    }
}

/// What an operator chooses about a model's text side. Coordinator and front ends must be given the
/// same.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextOptions {
    /// What is laid over the model's `config.json`, also by its workers.
    pub config_overrides: ConfigOverrides,
    /// A chat template in place of the folder's own.
    pub chat_template: Option<PathBuf>,
    /// Variables of the chat template that requests do not set.
    pub variables: Map<String, Value>,
    /// Where sampling defaults come from.
    pub generation: GenerationSource,
    /// Sampling defaults that go before those.
    pub sampling: SamplingDefaults,
    /// Whether to keep a description of the tokenizer for clients. This may differ.
    pub describes_tokenizer: bool,
}

/// A model's text side.
#[derive(Debug)]
pub struct TextModel {
    /// The tokenizer, shared by all streams.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template; `None` when the model has none.
    pub template: Option<ChatTemplate>,
    /// Tokens that end a sequence.
    pub end_tokens: Vec<u32>,
    /// Further tokens that end harmony replies, whatever the folder says: after them the model
    /// would invent what others say.
    pub harmony_ends: Vec<u32>,
    /// Sampling defaults.
    pub defaults: SamplingDefaults,
    /// Size of the vocabulary, in tokens: the model computes that many logits.
    pub vocab_size: u32,
    /// The longest sequence that the model supports, in tokens.
    pub max_positions: u32,
    /// The default maximum sequence length: see [`model_config::Positions`].
    pub usual_positions: u32,
    /// The length of an embedding; 0 if the folder does not tell.
    pub hidden_size: u32,
    /// How it sorts texts into classes, if it does. It generates no text then.
    pub classifier: Option<Classifier>,
    /// Whether its weights lack an output head, as far as the files on this host tell: it makes
    /// embeddings and no text then.
    pub lacks_head: bool,
    /// Whether some layers have linear attention: see [`model_config::has_linear_attention`].
    pub has_linear_attention: bool,
    /// Which tokens of the tokenizer the model lacks, if any, in one sentence.
    pub lacks_tokens: Option<String>,
    /// Whether the operator chose the chat template.
    pub is_template_chosen: bool,
    /// How an embedding is pooled from the tokens' vectors, or why embeddings are not supported.
    pub pooling: Result<Pooling, String>,
    /// Hash of all files that the above was read from: equal on hosts that tokenize alike.
    pub fingerprint: u64,
    /// The description of the tokenizer, a JSON object, if that was asked for.
    pub tokenizer_info: Option<String>,
    /// Maximum bytes of text per token, if known.
    pub bytes_per_token: Option<usize>,
    /// How its tokens encode text, or why that is not known.
    pub dialect: Result<Dialect, String>,
    /// Special tokens by their text.
    special: HashMap<String, u32>,
    special_by_id: Arc<HashMap<u32, String>>,
    guides: OnceLock<Result<Guides, String>>,
    /// Compiles grammars for requests.
    pub grammars: GrammarCompiler,
}

impl TextModel {
    /// Reads a model folder.
    ///
    /// # Errors
    /// [`TextModelError`].
    pub fn load(folder: &Path) -> Result<Self, TextModelError> {
        Self::load_with(folder, &TextOptions::default())
    }

    /// Reads a model folder with what its operator chooses.
    ///
    /// # Errors
    /// [`TextModelError`].
    pub fn load_with(folder: &Path, options: &TextOptions) -> Result<Self, TextModelError> {
        let chat_template = options.chat_template.as_deref();
        if !folder.is_dir() {
            return Err(TextModelError::new(folder, "there is no such model folder"));
        }
        let config_file = folder.join("config.json");
        let overrides = &options.config_overrides;
        let failed = |message| TextModelError::new(&config_file, overrides.explain(message));
        let config = overrides.lay_over(read_json(&config_file)?).map_err(failed)?;
        let classifier = model_config::classifier(&config).map_err(failed)?;
        let config = model_config::text_model(config).map_err(failed)?;
        let positions = model_config::positions(&config).map_err(failed)?;
        let size = |key: &str| {
            let value = config.get(key).and_then(Value::as_u64).filter(|n| *n > 0);
            let value = value.and_then(|n| u32::try_from(n).ok());
            value.ok_or_else(|| failed(format!("key {key} must be a positive integer")))
        };
        let vocab_size = size("vocab_size")?;
        let file = folder.join("tokenizer.json");
        if !file.is_file() {
            return Err(TextModelError::new(&file, "is missing"));
        }
        let bytes = std::fs::read(&file).map_err(|error| TextModelError::new(&file, error))?;
        let mut tokenizer =
            Tokenizer::from_bytes(&bytes).map_err(|error| TextModelError::new(&file, error))?;
        // Padding and truncation only matter in training.
        tokenizer.with_padding(None);
        let _ = tokenizer.with_truncation(None);
        let (defaults, mut end_ids) =
            generation::read(folder, &options.generation, &options.sampling)?;
        if end_ids.is_empty() {
            end_ids = generation::end_ids(&config);
        }
        // An additional end token: in many models it ends a turn, where the others end a document.
        let told_file = folder.join("tokenizer_config.json");
        let told = optional_json(&told_file)?;
        let around = surround::read(&tokenizer, &told);
        let around = around.map_err(|error| TextModelError::new(&told_file, error))?;
        if around.is_some() {
            tokenizer.with_post_processor(around);
        }
        let configured = told.get("chat_template");
        let sources = TemplateSources::find(folder, chat_template, configured, &told_file)?;
        let tokenizer_info = options.describes_tokenizer.then(|| {
            let source = sources.default.as_ref().map(|(_, source)| source.clone());
            description::of(&told, source)
        });
        let template = make_template(&told, sources)?;
        let told = told.get("eos_token").map(|it| it.get("content").unwrap_or(it));
        let told = told.and_then(Value::as_str).and_then(|text| tokenizer.token_to_id(text));
        let mut end_tokens: Vec<u32> = end_ids
            .into_iter()
            .filter_map(|id| u32::try_from(id).ok())
            .chain(told)
            .filter(|id| *id < vocab_size)
            .collect();
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let bytes_per_token = serde_json::from_slice(&bytes).ok();
        let bytes_per_token = bytes_per_token.as_ref().and_then(bound::bytes_per_token);
        let template = template.map(|template| template.with_variables(options.variables.clone()));
        if let Some(Err(error)) = template.as_ref().map(ChatTemplate::probe)
            && classifier.is_none()
        {
            // The template may be meant for other conversations than the simplest one.
            let folder = folder.display();
            tracing::warn!(%folder, %error, "a plain conversation has no prompt");
        }
        let is_made_of_tokens = |it: &Classifier| it.head != model_config::ClassHeadSource::Own;
        if chat_template.is_none() && classifier.as_ref().is_some_and(is_made_of_tokens) {
            let folder = folder.display();
            tracing::warn!(
                %folder,
                "classifier_from_token without --chat-template: what a token's logit says of two \
                 texts without the prompt that the model was trained with means little"
            );
        }
        let added = tokenizer.get_added_tokens_decoder().into_iter();
        let special = added.filter(|(_, token)| token.special);
        let special_by_id: HashMap<u32, String> =
            special.map(|(id, token)| (id, token.content)).collect();
        let special: HashMap<String, u32> =
            special_by_id.iter().map(|(id, text)| (text.clone(), *id)).collect();
        let harmony_ends = harmony::ENDS.iter().filter_map(|text| special.get(*text)).copied();
        let harmony_ends = harmony_ends.filter(|id| *id < vocab_size).collect();
        let dialect = Dialect::of(&tokenizer);
        let lacks_tokens = missing_tokens(&tokenizer, vocab_size);
        if let Some(lacks) = &lacks_tokens {
            tracing::warn!(folder = %folder.display(), "{lacks}");
        }
        let tokenizer = Arc::new(tokenizer);
        Ok(Self {
            tokenizer,
            template,
            end_tokens,
            harmony_ends,
            defaults,
            vocab_size,
            max_positions: positions.most,
            usual_positions: positions.usual,
            hidden_size: size("hidden_size").unwrap_or(0),
            pooling: match &classifier {
                Some(_) => Ok(Pooling::Last),
                None => pooling::read(folder)?,
            },
            lacks_head: classifier.is_none() && head::is_missing(folder, &config),
            classifier,
            has_linear_attention: model_config::has_linear_attention(&config),
            lacks_tokens,
            is_template_chosen: chat_template.is_some(),
            dialect,
            special,
            special_by_id: Arc::new(special_by_id),
            guides: OnceLock::new(),
            grammars: GrammarCompiler::default(),
            tokenizer_info,
            bytes_per_token,
            fingerprint: fingerprint(folder, options),
        })
    }

    /// The compiler of grammars over this vocabulary; the first call takes a moment.
    ///
    /// # Errors
    /// One sentence when the tokenizer does not support grammars.
    pub fn guides(&self) -> Result<&Guides, String> {
        self.guides.get_or_init(|| Guides::new(self)).as_ref().map_err(String::clone)
    }

    /// Like [`guides`](Self::guides), if already created.
    pub(crate) fn loaded_guides(&self) -> Option<&Guides> {
        self.guides.get()?.as_ref().ok()
    }

    /// Number of numbers that the model makes of a text that it continues with no token: those of
    /// its embedding, 0 if unknown, or one for each class.
    #[must_use]
    pub fn numbers(&self) -> u32 {
        match &self.classifier {
            Some(classifier) => u32::try_from(classifier.names.len()).unwrap_or(u32::MAX),
            None => self.hidden_size,
        }
    }

    /// The special token with this text.
    #[must_use]
    pub fn special_token(&self, text: &str) -> Option<u32> {
        self.special.get(text).copied()
    }

    /// The token of the model's vocabulary with this text, special or not: the marks around
    /// reasoning often are tokens that tokenizers do not call special.
    #[must_use]
    pub fn token_with(&self, text: &str) -> Option<u32> {
        self.tokenizer.token_to_id(text).filter(|token| *token < self.vocab_size)
    }

    /// All special tokens by their ids.
    #[must_use]
    pub fn special_tokens(&self) -> &Arc<HashMap<u32, String>> {
        &self.special_by_id
    }

    /// Tokenizes text.
    ///
    /// # Errors
    /// The tokenizer's error, or a token that the model lacks.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(|error| error.to_string())?;
        self.of_model(encoding.get_ids().to_vec())
    }

    /// Checks that the model has these tokens of a text: a tokenizer may have more.
    fn of_model(&self, tokens: Vec<u32>) -> Result<Vec<u32>, String> {
        let vocab = self.vocab_size;
        let Some(token) = tokens.iter().find(|token| **token >= vocab) else { return Ok(tokens) };
        let text = self.tokenizer.id_to_token(*token).unwrap_or_default();
        Err(format!(
            "the text has token {token} ({text:?}), which the model lacks: its vocabulary has \
             {vocab} tokens"
        ))
    }

    /// Which of these options cannot be used with the model, if one cannot, and why, in one
    /// sentence.
    #[must_use]
    pub fn cannot(&self, swaps: bool, drafts: bool) -> Option<String> {
        let asked = [
            (swaps, "--swap-space", "a sequence that leaves the KV cache is computed again"),
            (drafts, "--speculative-config", "drafts cannot be taken back"),
        ];
        let (_, option, why) =
            asked.iter().find(|(asked, ..)| *asked && self.has_linear_attention)?;
        Some(format!(
            "{option}: not supported for a model with linear attention, which keeps a state of \
             each sequence: {why}"
        ))
    }

    /// Number of special tokens that are put around a text.
    #[must_use]
    pub fn num_special(&self) -> usize {
        self.tokenizer.get_post_processor().map_or(0, |post| post.added_tokens(false))
    }

    /// Tokenizes text and keeps at most `max` tokens: the first ones, with the special tokens
    /// around them.
    ///
    /// # Errors
    /// The tokenizer's error, or a token that the model lacks.
    pub fn encode_beginning(
        &self,
        text: &str,
        add_special_tokens: bool,
        max: usize,
    ) -> Result<Vec<u32>, String> {
        let tokenizer = &self.tokenizer;
        let failed = |error: tokenizers::Error| error.to_string();
        let mut encoding = tokenizer.encode_fast(text, false).map_err(failed)?;
        let special = if add_special_tokens { self.num_special() } else { 0 };
        encoding.truncate(max.saturating_sub(special), 0, TruncationDirection::Right);
        let encoding = tokenizer.post_process(encoding, None, add_special_tokens);
        let mut tokens = encoding.map_err(failed)?.get_ids().to_vec();
        tokens.truncate(max);
        self.of_model(tokens)
    }

    /// A choice's text, which continues that of `prompt`, if given.
    #[must_use]
    pub fn stream(&self, rules: Arc<StopRules>, prompt: Option<&Vec<u32>>) -> TextStream {
        let stream = TextStream::new(self.tokenizer.clone(), rules);
        match prompt {
            Some(prompt) => stream.behind(prompt),
            None => stream,
        }
    }

    /// Decodes tokens, leaving out special ones.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens, true).unwrap_or_default()
    }

    /// The bytes of one token.
    #[must_use]
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        let Some(piece) = self.tokenizer.id_to_token(token) else { return Vec::new() };
        match &self.dialect {
            Ok(dialect) => dialect.bytes(&piece),
            Err(_) => piece.replace('\u{2581}', " ").into_bytes(),
        }
    }
}

/// The chat template of a folder whose `tokenizer_config.json` has `config`, null if there is none.
fn make_template(
    config: &Value,
    sources: TemplateSources,
) -> Result<Option<ChatTemplate>, TextModelError> {
    let token = |key: &str| match config.get(key) {
        Some(Value::String(token)) => token.clone(),
        Some(Value::Object(token)) => {
            token.get("content").and_then(Value::as_str).unwrap_or_default().to_owned()
        }
        _ => String::new(),
    };
    let template = sources.default.map(|(file, source)| {
        let named = |message| TextModelError::new(&file, message);
        let template = ChatTemplate::new(&source, token("bos_token"), token("eos_token"));
        let template = template.map_err(named)?;
        match &sources.tool_use {
            Some((file, source)) => {
                template.with_tool_use(source).map_err(|message| TextModelError::new(file, message))
            }
            None => Ok(template),
        }
    });
    template.transpose()
}

/// Tells which tokens of a tokenizer are beyond the model's vocabulary. Added tokens sometimes are,
/// where the model was not made larger with its tokenizer.
fn missing_tokens(tokenizer: &Tokenizer, vocab_size: u32) -> Option<String> {
    let all = tokenizer.get_vocab(true);
    let missing = all.iter().filter(|(_, id)| **id >= vocab_size);
    let count = missing.clone().count();
    let (text, id) = missing.min_by_key(|(_, id)| **id)?;
    Some(format!(
        "the tokenizer has {count} tokens that the model lacks, from {id} ({text:?}) on, since its \
         vocab_size is {vocab_size}: requests with them are refused"
    ))
}

/// FNV-1a hash over the names and contents of the files that concern text, and of what the operator
/// chooses beside them.
fn fingerprint(folder: &Path, options: &TextOptions) -> u64 {
    let files = [
        "config.json",
        generation::FILE,
        "tokenizer.json",
        "tokenizer_config.json",
        templates::FILES[0],
        templates::FILES[1],
        "chat_template.json",
        pooling::FILES[0],
        pooling::FILES[1],
    ];
    // An unreadable file counts as empty: whoever needs it has already reported the error.
    let content = |file: &Path| std::fs::read(file).unwrap_or_default();
    let mut parts: Vec<(&str, Vec<u8>)> =
        files.into_iter().map(|name| (name, content(&folder.join(name)))).collect();
    parts.extend(options.chat_template.as_deref().map(|file| ("chat-template", content(file))));
    if !options.variables.is_empty() {
        parts.push(("variables", serde_json::to_vec(&options.variables).unwrap_or_default()));
    }
    match &options.generation {
        GenerationSource::Model => {}
        GenerationSource::None => parts.push(("generation", Vec::new())),
        other @ GenerationSource::Other(_) => {
            parts.extend(other.file().map(|file| ("generation", content(&file))));
        }
    }
    if options.sampling != SamplingDefaults::default() {
        parts.push(("sampling", format!("{:?}", options.sampling).into_bytes()));
    }
    if !options.config_overrides.is_empty() {
        parts.push(("hf-overrides", options.config_overrides.canonical()));
    }
    let mut state = 0xcbf2_9ce4_8422_2325u64;
    for (name, content) in parts {
        let length = (content.len() as u64).to_le_bytes();
        for byte in name.as_bytes().iter().chain(&length).chain(&content) {
            state = (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    state
}

fn read_json(file: &Path) -> Result<Value, TextModelError> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| TextModelError::new(file, format!("cannot be read: {error}")))?;
    model_config::parse(&text)
        .map_err(|error| TextModelError::new(file, format!("not JSON: {error}")))
}

fn optional_json(file: &Path) -> Result<Value, TextModelError> {
    if file.is_file() { read_json(file) } else { Ok(Value::Null) }
}

#[cfg(test)]
mod tests;
