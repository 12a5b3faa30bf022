//! What a worker remembers of one sequence between steps.
use kernels::sampling::{SampleParams, SampleRow};
use shared::ids::StepId;
use shared::protocol::{NewSequence, SequenceStep};
use shared::sampling::SamplingParams;

use crate::kv_cache::BlockTable;

/// One admitted sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Prompt and output, this worker's own samples included.
    pub(super) tokens: Vec<u32>,
    num_prompt: usize,
    params: SampleParams,
    /// Most likely tokens wanted per prompt token.
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) table: BlockTable,
    /// Tokens in the KV cache; `None` before the first step, which may begin behind a prefix that
    /// other sequences have put there.
    cached: Option<u32>,
    /// The last step it ran in.
    last_step: Option<StepId>,
}

impl Sequence {
    /// Checks a sequence's own fields.
    pub(super) fn admit(
        new: &NewSequence,
        vocab_size: usize,
        max_model_len: u32,
    ) -> Result<Self, String> {
        let len = new.tokens.len();
        if len == 0 || len > max_model_len as usize {
            return Err(format!("has {len} tokens, it must have 1..={max_model_len}"));
        }
        if new.num_prompt == 0 || new.num_prompt as usize > len {
            return Err(format!("num_prompt is {}, it must be in 1..={len}", new.num_prompt));
        }
        if let Some(token) = new.tokens.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(format!("has token {token}, tokens are in 0..{vocab_size}"));
        }
        Ok(Self {
            tokens: new.tokens.clone(),
            num_prompt: new.num_prompt as usize,
            params: sample_params(&new.sampling),
            prompt_logprobs: new.sampling.prompt_logprobs,
            table: BlockTable::default(),
            cached: None,
            last_step: None,
        })
    }

    /// Marks that the sequence runs in `step`; false when it already does.
    pub(super) fn enter(&mut self, step: StepId) -> bool {
        self.last_step.replace(step) != Some(step)
    }

    /// Checks what is to be computed, and counts it as cached.
    pub(super) fn advance(
        &mut self,
        run: &SequenceStep,
        block_size: u32,
        max_model_len: u32,
    ) -> Result<(), String> {
        let SequenceStep { start, count, .. } = *run;
        if count == 0 {
            return Err("count is 0, it must be at least 1".to_owned());
        }
        let end = u64::from(start) + u64::from(count);
        let len = self.tokens.len() as u64;
        if end > len {
            return Err(format!("tokens {start}..{end} are to be computed, it has {len}"));
        }
        if end > u64::from(max_model_len) {
            return Err(format!(
                "token {} is to be computed, max_model_len is {max_model_len}",
                end - 1
            ));
        }
        if run.sample && end != len {
            return Err(format!("a token is to be sampled after {end} tokens, it has {len}"));
        }
        if let Some(cached) = self.cached
            && start > cached
        {
            return Err(format!("start is {start}, only {cached} tokens are in the KV cache"));
        }
        let capacity = self.table.capacity(block_size);
        if end > capacity {
            return Err(format!("{end} tokens do not fit in its blocks, which hold {capacity}"));
        }
        self.cached = Some(end as u32);
        Ok(())
    }

    /// The tokens that are predicted by rows `start..start + count` and are part of the prompt.
    pub(super) fn prompt_targets(&self, run: &SequenceStep) -> &[u32] {
        if self.prompt_logprobs.is_none() {
            return &[];
        }
        let start = run.start as usize + 1;
        let end = (start + run.count as usize).min(self.num_prompt);
        self.tokens.get(start..end).unwrap_or_default()
    }

    /// How its next token is sampled.
    pub(super) fn sample_row(&self) -> SampleRow<'_> {
        let (prompt, output) = self.tokens.split_at(self.num_prompt);
        SampleRow { params: &self.params, prompt, output }
    }

    /// Whether log-probabilities of sampled tokens are wanted.
    pub(super) fn wants_logprobs(&self) -> bool {
        self.params.logprobs.is_some()
    }
}

fn sample_params(params: &SamplingParams) -> SampleParams {
    SampleParams {
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        seed: params.seed,
        choice: params.choice,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: params.repetition_penalty,
        logit_bias: params.logit_bias.clone(),
        suppress_until_min: params.suppress_until_min.clone(),
        min_tokens: params.min_tokens,
        logprobs: params.logprobs,
    }
}
