//! The sampling parameters of one sequence, as they travel to the workers.
//!
//! They are validated where they enter (HTTP `Limits`); workers check again only what would make
//! them index out of bounds.
use serde::{Deserialize, Serialize};

/// How the next token of one sequence is chosen. Field names and meanings are vLLM's.
///
/// Randomness is counter-based (Philox4x32-10): the key is `seed`, the counter is the token's
/// position in the sequence's output, the draw and `choice`. So the same request gives the same
/// tokens alone, in a batch, after a preemption or on another replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Softmax temperature; 0 means greedy. In 0..=2.
    pub temperature: f32,
    /// Nucleus: the smallest set of tokens whose probability reaches this. In (0, 1]; 1 is off.
    pub top_p: f32,
    /// Only the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Drops tokens less likely than `min_p` times the most likely one. In [0, 1]; 0 is off.
    pub min_p: f32,
    /// Key of the random numbers; drawn at admission when the client names none.
    pub seed: u64,
    /// Which of the request's `n` choices this is; part of the counter.
    pub choice: u32,
    /// Subtracted once from the logits of tokens already generated. In -2..=2; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of tokens already generated. In -2..=2; 0 is off.
    pub frequency_penalty: f32,
    /// Divides positive (multiplies negative) logits of tokens in prompt or output. > 0; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these token ids before anything else. At most 1,024 entries.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that cannot be chosen before `min_tokens` tokens exist (end tokens).
    pub suppress_until_min: Vec<u32>,
    /// See `suppress_until_min`.
    pub min_tokens: u32,
    /// Report the chosen token's log-probability and those of this many most likely tokens.
    pub logprobs: Option<u32>,
    /// Report the same for every prompt token (OpenAI's `echo` with `logprobs`).
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
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
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Greedy decoding with every other control off.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}
