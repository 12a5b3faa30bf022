//! The parameters and results of token sampling, as kernels see them.
use crate::error::KernelError;

/// Sampling parameters of one row, with vLLM's meanings; see `shared::sampling` for the ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleParams {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Threshold of nucleus sampling; 1 is off.
    pub top_p: f32,
    /// Number of most likely tokens to keep; 0 is off.
    pub top_k: u32,
    /// Fraction of the largest probability below which tokens are dropped; 0 is off.
    pub min_p: f32,
    /// The Philox key.
    pub seed: u64,
    /// Index among the request's choices: the third word of the Philox counter.
    pub choice: u32,
    /// Subtracted once from logits of generated tokens; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from logits of generated tokens; 0 is off.
    pub frequency_penalty: f32,
    /// Divides positive (multiplies negative) logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens first; ids beyond the vocabulary are ignored.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that cannot be chosen until `min_tokens` output tokens exist.
    pub suppress_until_min: Vec<u32>,
    /// Minimum number of output tokens; see `suppress_until_min`.
    pub min_tokens: u32,
    /// Number of most likely tokens to report log-probabilities for, besides the chosen one.
    pub logprobs: Option<u32>,
}

impl Default for SampleParams {
    /// The model's own distribution: temperature 1, everything else off.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            suppress_until_min: Vec::new(),
            min_tokens: 0,
            logprobs: None,
        }
    }
}

/// One row to sample.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// Its sampling parameters.
    pub params: &'a SampleParams,
    /// The prompt's tokens (for the repetition penalty).
    pub prompt: &'a [u32],
    /// The tokens generated so far; its length is the first word of the Philox counter.
    pub output: &'a [u32],
    /// The token mask, `vocab.div_ceil(32)` words; `None` allows all tokens. Bit `i % 32` of word
    /// `i / 32` is set if token `i` may be chosen. The logits of all other tokens become -infinity
    /// before anything else; log-probabilities and ranks are still those of the model's own
    /// distribution.
    pub allowed: Option<&'a [u32]>,
}

impl SampleRow<'_> {
    /// Checks that the row's mask, if any, covers the whole vocabulary.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if words are missing.
    pub fn check_mask(&self, vocab: usize) -> Result<(), KernelError> {
        let wanted = vocab.div_ceil(32);
        match self.allowed {
            Some(mask) if mask.len() < wanted => Err(KernelError::Shape {
                op: "sample",
                message: format!("a mask of {} words, {vocab} tokens have {wanted}", mask.len()),
            }),
            _ => Ok(()),
        }
    }
}

/// The result of sampling one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    /// The token; 0 if `corrupted`.
    pub token: u32,
    /// Some logit was NaN or +infinity, or all logits (or all that the mask leaves) were -infinity.
    pub corrupted: bool,
    /// Natural log-probability of `token` in the unmodified distribution (if requested).
    pub logprob: f32,
    /// Rank of `token` in the unmodified distribution, from 1 (if requested).
    pub rank: u32,
    /// The most likely tokens of the unmodified distribution, best first, ties by lower id.
    pub top: Vec<(u32, f32)>,
}
