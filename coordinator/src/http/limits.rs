//! Every bound of a request.
use shared::protocol::bad_words::SEQUENCES_MAX;

use super::error::ApiError;
use super::options::{ApiOptions, MAX_LOGPROBS};

/// Every bound of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Nesting depth of its JSON.
    pub json_depth: usize,
    /// Number of values in the request's JSON: each takes about 72 bytes when parsed.
    pub json_values: usize,
    /// Prompts of one completions request.
    pub prompts: usize,
    /// Inputs of one embeddings request; texts on each side of a rerank or score request.
    pub inputs: usize,
    /// Numbers of the vectors that a request keeps: one for each input of an embeddings request,
    /// and for each text on the left side of a rerank or score request.
    pub embedding_numbers: usize,
    /// Choices of one request, over all its prompts: each may have a whole sequence's tokens.
    pub choices: usize,
    /// Messages of one conversation, and documents with it.
    pub messages: usize,
    /// Tools offered to the model.
    pub tools: usize,
    /// Bytes of a request's id.
    pub request_id_bytes: usize,
    /// Choices of one prompt.
    pub n: u32,
    /// Stop strings.
    pub stops: usize,
    /// Bytes of one stop string.
    pub stop_bytes: usize,
    /// Stop token ids.
    pub stop_token_ids: usize,
    /// Words of `bad_words`.
    pub bad_words: usize,
    /// Entries of `logit_bias`.
    pub logit_bias: usize,
    /// Alternatives reported by completions.
    pub logprobs: u32,
    /// Alternatives reported by chat.
    pub top_logprobs: u32,
    /// Bytes of `user`.
    pub user_bytes: usize,
    /// Tokens of prompt and output.
    pub max_model_len: u32,
    /// Prompt tokens, over all choices.
    pub prompt_tokens: usize,
    /// Bytes of echoed prompts, over all choices.
    pub echoed_bytes: usize,
    /// Log-probabilities of prompts, echoed or not, alternatives included, over all choices.
    pub prompt_alternatives: usize,
    /// Log-probabilities of outputs that are kept until an answer is complete, alternatives
    /// included, over all choices.
    pub output_alternatives: usize,
    /// Whether requests may have a priority other than 0.
    pub priorities: bool,
    /// Whether replies are in harmony format: its marks end them, too.
    pub harmony: bool,
    /// Whether streams report usage although their requests do not ask for it.
    pub reports_usage: bool,
    /// Whether log-probabilities tell tokens by their ids, unless a request says otherwise.
    pub tokens_by_id: bool,
}

/// Most bytes that the messages of a conversation may make of its body, each of its length:
/// templates may copy all earlier text with each message.
const COPIED_MAX: u64 = 16 << 30;

/// Ranges of fields, the same for every model.
pub mod ranges {
    /// `temperature`. OpenAI's goes to 2, vLLM's has no bound, and interfaces offer more than 2.
    pub const TEMPERATURE: (f64, f64) = (0.0, 100.0);
    /// `top_p`, which is above the first.
    pub const TOP_P: (f64, f64) = (0.0, 1.0);
    /// `min_p`.
    pub const MIN_P: (f64, f64) = (0.0, 1.0);
    /// `presence_penalty` and `frequency_penalty`.
    pub const PENALTY: (f64, f64) = (-2.0, 2.0);
    /// `repetition_penalty`.
    pub const REPETITION_PENALTY: (f64, f64) = (0.01, 100.0);
    /// Values of `logit_bias`.
    pub const LOGIT_BIAS: (f64, f64) = (-100.0, 100.0);
    /// `top_k`.
    pub const TOP_K: (i64, i64) = (-1, i32::MAX as i64);
}

/// Bytes of `model`.
pub const MODEL_BYTES: usize = 4096;
/// Bytes of `guided_whitespace_pattern`.
pub const PATTERN_BYTES: usize = 4096;
/// Bytes of `cache_salt`.
pub const SALT_BYTES: usize = 256;
/// Bytes of `reasoning_effort`.
pub const EFFORT_BYTES: usize = 64;

/// Bodies of this size are accepted whatever the model: many prompts of a short model, or a
/// conversation whose messages contain much that the template leaves out. All bodies together have
/// another bound, see [`super::room`].
const BODY_BYTES_MIN: usize = 16 << 20;
/// A conversation may have as many messages as the model's length has tokens, since each takes some
/// of them, but at least and at most so many. The first leaves the length of a short model to tell
/// what is too long; with the second, templates that look at each message stay within their steps.
const MESSAGES: (usize, usize) = (1024, 16 << 10);
/// A token id takes 8 bytes with its comma; a token's text, escaped (`\u0000`), usually less than
/// 16.
const BODY_BYTES_PER_TOKEN: usize = 16;

impl Limits {
    /// Applies the operator's options.
    #[must_use]
    pub fn chosen(self, options: &ApiOptions) -> Self {
        let body_bytes = options.max_body_bytes.and_then(|bytes| usize::try_from(bytes).ok());
        Self {
            body_bytes: body_bytes.unwrap_or(self.body_bytes),
            logprobs: options.max_logprobs,
            top_logprobs: options.max_logprobs,
            reports_usage: options.reports_usage,
            tokens_by_id: options.tokens_by_id,
            ..self
        }
    }

    /// Sets whether requests may have a priority other than 0.
    #[must_use]
    pub fn with_priorities(self, priorities: bool) -> Self {
        Self { priorities, ..self }
    }

    /// Returns the default bounds for sequences of `max_model_len` tokens.
    #[must_use]
    pub fn new(max_model_len: u32) -> Self {
        Self {
            body_bytes: BODY_BYTES_MIN.max(max_model_len as usize * BODY_BYTES_PER_TOKEN),
            // Schemas of tools nest deeper than anything else.
            json_depth: 64,
            // Token ids, and as many other values.
            json_values: (16 * max_model_len as usize).max(2 << 20),
            prompts: 512,
            // OpenAI's.
            inputs: 2048,
            // 2,048 vectors of 4,096: 32 MiB while computed, 100 MB as JSON numbers.
            embedding_numbers: 8 << 20,
            choices: 512,
            messages: (max_model_len as usize).clamp(MESSAGES.0, MESSAGES.1),
            // Agents bring those of many servers; what they take of a template is their text.
            tools: 1024,
            // OpenMetrics allows an exemplar 128 characters, including its label's name.
            request_id_bytes: 100,
            n: 128,
            // Roleplay in groups sends the names of all who speak.
            stops: 64,
            stop_bytes: 256,
            stop_token_ids: 64,
            // Each has two forms.
            bad_words: SEQUENCES_MAX / 2,
            logit_bias: 1024,
            logprobs: MAX_LOGPROBS,
            top_logprobs: MAX_LOGPROBS,
            user_bytes: 4096,
            priorities: false,
            harmony: false,
            reports_usage: false,
            tokens_by_id: false,
            max_model_len,
            prompt_tokens: (8 * max_model_len as usize).max(1 << 20),
            echoed_bytes: 64 << 20,
            prompt_alternatives: 1 << 20,
            // A long output, or several, with all the alternatives that OpenAI's API has.
            output_alternatives: 4 << 20,
        }
    }

    /// Most tokens of an output: its prompt has one at least.
    #[must_use]
    pub fn max_output(&self) -> u32 {
        self.max_model_len.saturating_sub(1)
    }

    /// Tokens reserved for the output when a prompt is truncated to fit and the request does not
    /// say how many it wants.
    #[must_use]
    pub fn reserved_output(&self) -> u32 {
        (self.max_model_len / 4).clamp(1, 1024)
    }

    /// Checks the number of a conversation's messages, which came in this field of a body of so
    /// many bytes. Too many are too long a conversation: the client is to make it shorter.
    ///
    /// # Errors
    /// 400 naming the field, with the code of a prompt that does not fit.
    pub fn check_messages(&self, field: &str, count: usize, bytes: usize) -> Result<(), ApiError> {
        let fit = usize::try_from(COPIED_MAX / (bytes as u64).max(1)).unwrap_or(usize::MAX);
        let max = self.messages.min(fit);
        if count <= max {
            return Ok(());
        }
        let message = format!(
            "`{field}` has {count} messages, the limit is {max} for {bytes} bytes. Please reduce \
             your prompt."
        );
        Err(ApiError::context_length(field, message))
    }

    /// Checks the size of a request's prompts, which is copied for every choice: `tokens` counts
    /// them over all choices.
    ///
    /// # Errors
    /// Names `n`.
    pub fn check_prompts(&self, tokens: usize) -> Result<(), ApiError> {
        if tokens <= self.prompt_tokens {
            return Ok(());
        }
        let max = self.prompt_tokens;
        let message = format!(
            "`n`: the prompts of all choices have {tokens} tokens in total, the limit is {max}"
        );
        Err(ApiError::field("n", message))
    }

    /// Checks the number of log-probabilities that are kept of a request's prompts, of `tokens`
    /// tokens with so many alternatives each, if this field asks for them.
    ///
    /// # Errors
    /// Names the field.
    pub fn check_alternatives(
        &self,
        field: &str,
        tokens: usize,
        alternatives: Option<u32>,
    ) -> Result<(), ApiError> {
        let kept = (tokens, alternatives, self.prompt_alternatives);
        bounded(kept, |entries, max| {
            let message = format!(
                "`{field}`: the prompts have {entries} log-probabilities over all choices, the \
                 limit is {max}"
            );
            ApiError::field(field, message)
        })
    }

    /// Checks the number of log-probabilities that an answer keeps of its output, of at most
    /// `tokens` tokens over all choices with so many alternatives each, if this field asks for
    /// them.
    ///
    /// # Errors
    /// Names the field.
    pub fn check_output_alternatives(
        &self,
        field: &str,
        tokens: usize,
        alternatives: Option<u32>,
    ) -> Result<(), ApiError> {
        let kept = (tokens, alternatives, self.output_alternatives);
        bounded(kept, |entries, max| {
            let message = format!(
                "`{field}`: the output may have {entries} log-probabilities over all choices, the \
                 limit is {max}; ask for fewer tokens with `max_tokens`"
            );
            ApiError::field(field, message)
        })
    }
}

/// Checks how many log-probabilities are kept: of so many tokens, with so many alternatives each if
/// they are asked for, up to a limit.
fn bounded(
    (tokens, alternatives, max): (usize, Option<u32>, usize),
    refusal: impl FnOnce(usize, usize) -> ApiError,
) -> Result<(), ApiError> {
    let entries = alternatives.map_or(0, |each| tokens.saturating_mul(each as usize + 1));
    if entries <= max { Ok(()) } else { Err(refusal(entries, max)) }
}
