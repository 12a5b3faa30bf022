//! The sampling parameters of one sequence, as sent to the workers.
//!
//! They are validated where requests enter (HTTP `Limits`); workers check again only what they
//! could not compute with.
use serde::{Deserialize, Serialize};

/// Maximum number of alternatives whose log-probabilities are reported.
pub const LOGPROBS_MAX: u32 = 128;
/// Maximum number of entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Maximum number of tokens that may end a sequence, hence of entries of `suppress_until_min`.
pub const SUPPRESSED_MAX: usize = 256;

/// How the next token of one sequence is chosen. Field names and meanings are vLLM's.
///
/// Randomness is counter-based (Philox4x32-10): the key is `seed`; the counter holds the token's
/// position in the output, the draw and `choice`. So the same request gives the same tokens alone,
/// in a batch, after a preemption or on another replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Softmax temperature; 0 means greedy. In 0..=2.
    pub temperature: f32,
    /// Nucleus sampling: keep the smallest set of tokens whose probability reaches this. In (0, 1];
    /// 1 is off.
    pub top_p: f32,
    /// Keep only the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Drop tokens less likely than `min_p` times the most likely one. In [0, 1]; 0 is off.
    pub min_p: f32,
    /// Key of the random numbers; drawn at admission if the client gives none.
    pub seed: u64,
    /// Index among the request's `n` choices; part of the counter.
    pub choice: u32,
    /// Subtracted once from the logits of tokens already generated. In -2..=2; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of tokens already generated. In -2..=2; 0 is off.
    pub frequency_penalty: f32,
    /// Divides positive (multiplies negative) logits of tokens in prompt or output. > 0; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these token ids before anything else. At most 1,024 entries.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens (end tokens) that cannot be chosen until `min_tokens` tokens are generated.
    pub suppress_until_min: Vec<u32>,
    /// Minimum number of output tokens; see `suppress_until_min`.
    pub min_tokens: u32,
    /// Report the log-probabilities of the chosen token and of this many most likely tokens.
    pub logprobs: Option<u32>,
    /// Report the same for every prompt token (`prompt_logprobs`; OpenAI's `echo` with `logprobs`).
    pub prompt_logprobs: Option<u32>,
    /// Report an embedding of the prompt, pooled this way; for sequences that generate no token.
    pub pooling: Option<Pooling>,
}

/// How the final norm's output vectors for a prompt's tokens are pooled into one embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pooling {
    /// The vector of the last token.
    Last,
    /// The vector of the first token.
    First,
    /// The mean over all tokens.
    Mean,
}

impl Pooling {
    /// Whether pooling needs the vectors of all tokens, which rules out cached prefixes.
    #[must_use]
    pub fn needs_all(self) -> bool {
        self != Self::Last
    }
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
            pooling: None,
        }
    }
}

impl SamplingParams {
    /// Greedy decoding with every other control off.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks that a rank can compute with these parameters and a vocabulary of `vocab` tokens. The
    /// limits for clients are narrower and are checked where requests enter.
    ///
    /// # Errors
    /// One sentence naming the field, its value and the bound.
    pub fn check(&self, vocab: u32) -> Result<(), String> {
        let floats = [
            ("temperature", self.temperature, self.temperature >= 0.0),
            ("top_p", self.top_p, self.top_p > 0.0),
            ("min_p", self.min_p, self.min_p >= 0.0),
            ("presence_penalty", self.presence_penalty, true),
            ("frequency_penalty", self.frequency_penalty, true),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0),
        ];
        if let Some((name, value, _)) =
            floats.into_iter().find(|(_, value, fits)| !value.is_finite() || !fits)
        {
            return Err(format!("{name} is {value}, which is not a usable value"));
        }
        let logprobs = [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)];
        if let Some((name, value)) = logprobs.into_iter().find(|it| it.1 > Some(LOGPROBS_MAX)) {
            let value = value.unwrap_or_default();
            return Err(format!("{name} is {value}, at most {LOGPROBS_MAX} are reported"));
        }
        let lists = [
            ("logit_bias", self.logit_bias.len(), LOGIT_BIAS_MAX),
            ("suppress_until_min", self.suppress_until_min.len(), SUPPRESSED_MAX),
        ];
        if let Some((name, len, max)) = lists.into_iter().find(|(_, len, max)| len > max) {
            return Err(format!("{name} has {len} entries, at most {max} are allowed"));
        }
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            return Err(format!("the bias of token {token} is {bias}, which is not a number"));
        }
        let biased = self.logit_bias.iter().map(|(token, _)| *token);
        let mut tokens = biased.chain(self.suppress_until_min.iter().copied());
        match tokens.find(|token| *token >= vocab) {
            Some(token) => Err(format!("token {token} is not below the vocabulary's {vocab}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_rank_can_compute_with_is_named() {
        let fits = SamplingParams {
            logit_bias: vec![(9, -100.0); LOGIT_BIAS_MAX],
            suppress_until_min: vec![9; SUPPRESSED_MAX],
            logprobs: Some(LOGPROBS_MAX),
            prompt_logprobs: Some(0),
            ..SamplingParams::default()
        };
        assert_eq!(fits.check(10), Ok(()));
        let wrong = |named: &str, change: fn(&mut SamplingParams)| {
            let mut params = fits.clone();
            change(&mut params);
            let error = params.check(10).unwrap_err();
            assert!(error.contains(named), "{error} without {named}");
        };
        wrong("temperature is NaN", |it| it.temperature = f32::NAN);
        wrong("temperature is -1", |it| it.temperature = -1.0);
        wrong("top_p is 0", |it| it.top_p = 0.0);
        wrong("min_p is inf", |it| it.min_p = f32::INFINITY);
        wrong("presence_penalty is -inf", |it| it.presence_penalty = f32::NEG_INFINITY);
        wrong("frequency_penalty is NaN", |it| it.frequency_penalty = f32::NAN);
        wrong("repetition_penalty is 0", |it| it.repetition_penalty = 0.0);
        wrong("logprobs is 129, at most 128", |it| it.logprobs = Some(129));
        wrong("prompt_logprobs is 129", |it| it.prompt_logprobs = Some(129));
        wrong("logit_bias has 1025", |it| it.logit_bias.push((1, 0.0)));
        wrong("suppress_until_min has 257", |it| it.suppress_until_min.push(1));
        wrong("bias of token 9 is NaN", |it| it.logit_bias[0].1 = f32::NAN);
        wrong("token 10 is not below", |it| it.logit_bias[7].0 = 10);
        wrong("token 11 is not below", |it| it.suppress_until_min[7] = 11);
    }
}
