//! The parameters and results of token sampling, as kernels see them.
use crate::error::KernelError;

/// Sampling parameters of one row. Meanings as in vLLM; see `shared::sampling` for the ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// Philox key.
    pub seed: u64,
    /// Third word of the Philox counter.
    pub choice: u32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens first; ids beyond the vocabulary are ignored.
    pub logit_bias: Vec<(u32, f32)>,
    /// Cannot be chosen while fewer than `min_tokens` output tokens exist.
    pub suppress_until_min: Vec<u32>,
    /// See `suppress_until_min`.
    pub min_tokens: u32,
    /// Log-probabilities wanted: of the chosen token and of this many most likely ones.
    pub logprobs: Option<u32>,
}

impl Default for SampleParams {
    /// The model's own distribution: temperature 1, nothing left out, nothing preferred.
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
    /// How.
    pub params: &'a SampleParams,
    /// The prompt's tokens (for the repetition penalty).
    pub prompt: &'a [u32],
    /// The tokens generated so far; its length is the first word of the Philox counter.
    pub output: &'a [u32],
    /// The tokens that may be chosen, all when absent: bit `i % 32` of word `i / 32` is set when
    /// token `i` may be, `vocab.div_ceil(32)` words. The logits of all others become -infinity
    /// before anything else happens to them; log-probabilities and ranks are those of the model's
    /// own distribution all the same.
    pub allowed: Option<&'a [u32]>,
}

impl SampleRow<'_> {
    /// Whether the row's mask, if it has one, says of every token of the vocabulary whether it may
    /// be chosen.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when words are missing.
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

/// What sampling one row gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    /// The token; on non-finite logits 0 with `corrupted` set.
    pub token: u32,
    /// Some logit was NaN or +infinity, or all were -infinity, or all that the mask leaves.
    pub corrupted: bool,
    /// Natural log-probability of `token` in the unmodified distribution (when asked for).
    pub logprob: f32,
    /// Rank of `token` in the unmodified distribution, 1-based (when asked for).
    pub rank: u32,
    /// The most likely tokens of the unmodified distribution, best first, ties by lower id.
    pub top: Vec<(u32, f32)>,
}
