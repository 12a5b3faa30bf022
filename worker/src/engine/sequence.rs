//! The state of one sequence on a rank.
use std::ops::Range;

use kernels::sampling::{SampleParams, SampleRow};
use shared::ids::StepId;
use shared::protocol::{EngineConfig, NewSequence, SequenceStep};
use shared::sampling::Pooling;

/// One sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Prompt and output, including tokens that this rank sampled.
    pub(super) tokens: Vec<u32>,
    pub(super) num_prompt: u32,
    /// Block table: ids in the cache.
    pub(super) blocks: Vec<u32>,
    /// Its blocks in host memory while it is swapped out; its block table is empty then.
    pub(super) host: Option<Vec<u32>>,
    /// Number of tokens whose K and V are in the cache. Unknown before the first step, which may
    /// begin after a prefix that another sequence has computed.
    pub(super) computed: Option<u32>,
    /// Its state of linear attention, if the model has that.
    pub(super) state: Option<u32>,
    /// The kept state to copy there before its first share.
    pub(super) begins_with: Option<u32>,
    /// The last step it was part of.
    pub(super) last_step: Option<StepId>,
    pub(super) params: SampleParams,
    /// Its adapter; 0 for none.
    pub(super) adapter: u32,
    /// Number of alternatives to report for each prompt token.
    pub(super) prompt_logprobs: Option<u32>,
    /// How its embedding is pooled, if an embedding is requested.
    pub(super) pooling: Option<Pooling>,
    /// The embedding so far: a vector or a sum of vectors.
    pub(super) pooled: Vec<f64>,
}

/// Same as [`Sequence::prompt_targets`], for a prompt of `num_prompt` tokens. The entry may come
/// from a plan that has not been checked.
pub(super) fn prompt_targets(entry: &SequenceStep, num_prompt: u32) -> Option<Range<u32>> {
    let first = entry.start.saturating_add(1);
    let end = first.saturating_add(entry.count).min(num_prompt);
    (first < end).then_some(first..end)
}

impl Sequence {
    /// Creates a sequence of which nothing is computed, with room for `tokens_max` tokens.
    pub(super) fn new(new: &NewSequence, tokens_max: usize) -> Self {
        let mut tokens = Vec::with_capacity(tokens_max.max(new.tokens.len()));
        tokens.extend_from_slice(&new.tokens);
        let sampling = &new.sampling;
        let params = SampleParams {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            seed: sampling.seed,
            choice: sampling.choice,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            repetition_penalty: sampling.repetition_penalty,
            logit_bias: sampling.logit_bias.clone(),
            suppress_until_min: sampling.suppress_until_min.clone(),
            min_tokens: sampling.min_tokens,
            logprobs: sampling.logprobs,
        };
        Self {
            tokens,
            num_prompt: new.num_prompt,
            blocks: Vec::new(),
            host: None,
            computed: None,
            state: None,
            begins_with: None,
            last_step: None,
            params,
            adapter: new.adapter,
            prompt_logprobs: sampling.prompt_logprobs,
            pooling: sampling.pooling,
            pooled: Vec::new(),
        }
    }

    /// Checks that an entry can be run on this state.
    pub(super) fn check(
        &self,
        entry: &SequenceStep,
        config: &EngineConfig,
        num_blocks: u32,
    ) -> Result<(), String> {
        if let Some(computed) = self.computed
            && entry.start != computed
        {
            let start = entry.start;
            return Err(format!(
                "is to be computed from {start}, but its cache ends at {computed}"
            ));
        }
        if self.state.is_some() && self.computed.is_none() {
            let start = entry.start;
            match self.begins_with {
                None if start > 0 => {
                    return Err(format!("is to be computed from {start}, where it has no state"));
                }
                Some(_) if start == 0 => {
                    return Err("is to be computed from 0, but begins with a state".to_owned());
                }
                _ => {}
            }
        }
        if self.state.is_some() && !entry.drafts.is_empty() {
            return Err("has drafts, which its state could not be without again".to_owned());
        }
        if self.host.is_some() {
            return Err("is to be computed, but is in host memory".to_owned());
        }
        let end = entry.start.checked_add(entry.count).filter(|_| entry.count > 0);
        let known = (self.tokens.len() + entry.drafts.len()) as u32;
        let Some(end) = end.filter(|end| *end <= known) else {
            return Err(format!("is to be computed beyond its {known} tokens"));
        };
        if entry.sample && (end != known || end > config.max_model_len) {
            return Err(format!("is to be sampled at {end}, but has {known} tokens"));
        }
        if self.pooling.is_some() && entry.sample {
            return Err("is to have an embedding, not a token".to_owned());
        }
        if self.computed.is_none()
            && entry.start > 0
            && self.pooling.is_some_and(Pooling::needs_all)
        {
            let start = entry.start;
            return Err(format!("needs all its tokens, but is to be computed from {start}"));
        }
        if let Some(block) = entry.new_blocks.iter().find(|block| block.0 >= num_blocks) {
            return Err(format!("is given {block} of {num_blocks}"));
        }
        let table = (self.blocks.len() + entry.new_blocks.len()) as u64;
        if table * u64::from(config.block_size) < u64::from(end) {
            return Err(format!("has {table} blocks, too few for {end} tokens"));
        }
        Ok(())
    }

    /// Positions of the prompt tokens that this share's logits predict, if any: the logits at
    /// position p predict the token at p + 1, which must be in the prompt.
    pub(super) fn prompt_targets(&self, entry: &SequenceStep) -> Option<Range<u32>> {
        prompt_targets(entry, self.num_prompt)
    }

    /// Slot in the cache for the K and V of a position that its blocks cover.
    pub(super) fn slot(&self, position: u32, block_size: u32) -> u32 {
        self.blocks[(position / block_size) as usize] * block_size + position % block_size
    }

    /// Inputs for sampling the token after its first `known` ones; `allowed` is the mask.
    pub(super) fn sample_row<'a>(
        &'a self,
        known: usize,
        allowed: Option<&'a [u32]>,
    ) -> SampleRow<'a> {
        let (prompt, output) = self.tokens[..known].split_at(self.num_prompt as usize);
        SampleRow { params: &self.params, prompt, output, allowed }
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::{BlockId, SeqId};
    use shared::protocol::{Drafts, KvCacheDtype};
    use shared::sampling::SamplingParams;

    use super::*;

    #[test]
    fn a_sequence_with_a_state_begins_where_that_is_and_has_no_drafts() {
        let new = NewSequence {
            seq: SeqId(1),
            tokens: vec![7; 40],
            num_prompt: 40,
            adapter: 0,
            sampling: SamplingParams::greedy(),
        };
        let config = EngineConfig {
            block_size: 16,
            max_model_len: 64,
            max_num_seqs: 2,
            max_num_batched_tokens: 64,
            kv_cache_bytes: 0,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        };
        let entry = |start: u32, drafts: Vec<u32>| SequenceStep {
            seq: SeqId(1),
            start,
            count: 40 - start + drafts.len() as u32,
            new_blocks: (0..3).map(BlockId).collect(),
            sample: true,
            masked: false,
            drafts: drafts.into(),
        };
        let check = |(state, begins_with), start, drafts| {
            let seq = Sequence { state, begins_with, ..Sequence::new(&new, 64) };
            seq.check(&entry(start, drafts), &config, 4)
        };
        let (plain, stateful, begun) = ((None, None), (Some(0), None), (Some(0), Some(2)));
        assert_eq!(check(stateful, 0, vec![]), Ok(()));
        assert_eq!(check(plain, 16, vec![]), Ok(()));
        assert_eq!(check(begun, 16, vec![]), Ok(()));
        let error = check(stateful, 16, vec![]).unwrap_err();
        assert!(error.contains("from 16, where it has no state"), "{error}");
        let error = check(begun, 0, vec![]).unwrap_err();
        assert!(error.contains("from 0, but begins with a state"), "{error}");
        let error = check(stateful, 0, vec![1]).unwrap_err();
        assert!(error.contains("has drafts"), "{error}");
    }

    #[test]
    fn a_part_tells_about_the_prompts_tokens_behind_its_own() {
        let targets = |start, count, num_prompt| {
            let (seq, drafts) = (SeqId(1), Drafts::none());
            let (sample, masked, new_blocks) = (false, false, Vec::new());
            let entry = SequenceStep { seq, start, count, new_blocks, sample, masked, drafts };
            prompt_targets(&entry, num_prompt)
        };
        assert_eq!(targets(0, 3, 10), Some(1..4));
        assert_eq!(targets(8, 2, 10), Some(9..10), "the last tells about the output");
        assert_eq!(targets(9, 1, 10), None);
        // A plan that is looked at ahead may contain anything.
        assert_eq!(targets(3, u32::MAX, 10), Some(4..10));
        assert_eq!(targets(u32::MAX, u32::MAX, 10), None);
        assert_eq!(targets(u32::MAX, 1, u32::MAX), None);
    }
}
