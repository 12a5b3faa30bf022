//! PURE: the state of one sequence and of one request.
use std::sync::Arc;

use shared::ids::{BlockId, Epoch, RequestId, SeqId};
use shared::protocol::{Drafts, TokenLogprobs};
use shared::sampling::{Pooling, SamplingParams};

use super::blocks::Prefix;
use super::effect::RequestPlace;
use super::pace::DraftPace;
use super::queue::QueueLoad;
use super::speculate::NgramDrafter;
use super::states::OwnStates;
use super::swap::SwappedBlocks;
use super::tokens::Tokens;
use super::{AwaitedMask, SchedulerConfig};
use crate::engine::{GenerateRequest, TokenGuide, room_wanted};

/// The order of admitted sequences: priority, then admission.
pub(super) type Urgency = (i32, Option<u64>);

/// One choice of a request.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SeqId,
    pub(super) request: RequestId,
    /// Lower is earlier.
    pub(super) priority: i32,
    pub(super) sampling: SamplingParams,
    /// Accepted-token log: the prompt, then the accepted tokens.
    pub(super) tokens: Tokens,
    pub(super) num_prompt: u32,
    pub(super) max_tokens: u32,
    /// Output tokens that the present epoch's KV cache has room for, if the client set no bound.
    pub(super) room: u32,
    /// [`GenerateRequest::open_ended`](crate::engine::GenerateRequest::open_ended)
    pub(super) open_ended: bool,
    /// Constrains its tokens; has seen those accepted.
    pub(super) guide: Option<Box<dyn TokenGuide>>,
    /// Block table; covers at least `computed` tokens.
    pub(super) blocks: Vec<BlockId>,
    /// How many of its blocks were sent to the workers.
    pub(super) blocks_sent: u32,
    /// Whether the workers know it: it was in a plan since its admission.
    pub(super) known: bool,
    /// Set while its blocks are in host memory; `blocks` is empty then.
    pub(super) swapped: Option<SwappedBlocks>,
    /// How many of its blocks are full and offered to others, and the prefix of the next one.
    pub(super) kept: u32,
    pub(super) prefix: Prefix,
    /// What it has of kept states of linear attention.
    pub(super) states: OwnStates,
    /// Whether others may find its blocks: not those computed before all prompts were forgotten.
    pub(super) publishes: bool,
    /// Sequences with another salt share no blocks with it.
    pub(super) cache_salt: u64,
    /// The adapter it is computed with; 0 for none.
    pub(super) adapter: u32,
    /// Whether it was in a step that is answered or in flight, which then counted what the KV cache
    /// had of its prompt. What it finds when it comes back is not counted.
    pub(super) looked_up: bool,
    /// Prompt tokens found there then.
    pub(super) cached: u32,
    /// Tokens whose K and V are computed or planned, sent steps included.
    pub(super) computed: u32,
    /// Maximum that `computed` has reached, except by steps lost with their epoch: computing below
    /// it is recomputation.
    pub(super) computed_max: u32,
    /// Whether, since its last admission, a step was answered that computed further than any
    /// before: whatever it gets stuck at lies further on.
    pub(super) progressed: bool,
    /// Epochs in a row that ended while it was admitted without progress: it may be what ends them.
    pub(super) suspicion: u32,
    /// Tokens being sampled by steps in flight, after `tokens`.
    pub(super) pending: u32,
    /// Number of its admission, counted over the whole scheduler; set while admitted or swapped.
    /// Outputs of an older admission are ignored.
    pub(super) admission: Option<u64>,
    /// Prompt log-probabilities gathered so far; taken when complete.
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) prompt_logprobs_done: bool,
    /// Index of its n-grams; only while it is admitted, and only where drafts come from n-grams.
    pub(super) drafter: Option<Box<NgramDrafter>>,
    /// How many tokens a draft model drafts for it.
    pub(super) pace: DraftPace,
    /// Whether its next share is to have drafts, as decided before every plan.
    pub(super) wants_draft: bool,
    /// Drafts that the step in flight verifies; empty if there are none.
    pub(super) drafts: Drafts,
}

impl Sequence {
    /// Creates a choice of a request that has not run here; `accepted` are its tokens from another
    /// coordinator.
    pub(super) fn new(
        id: SeqId,
        request: &GenerateRequest,
        mut sampling: SamplingParams,
        (prompt, accepted): (Arc<[u32]>, Vec<u32>),
        guide: Option<Box<dyn TokenGuide>>,
    ) -> Self {
        let wants_prompt = sampling.prompt_logprobs.is_some() && sampling.choice == 0;
        if !wants_prompt {
            sampling.prompt_logprobs = None;
        }
        let num_prompt = prompt.len() as u32;
        let mut tokens = Tokens::new(prompt, request.max_tokens as usize);
        accepted.iter().for_each(|token| tokens.push(*token));
        // All but the last was computed once, so computing it again is recomputation.
        let computed_max = if accepted.is_empty() { 0 } else { tokens.len() as u32 - 1 };
        Self {
            id,
            request: request.id,
            priority: request.priority,
            sampling,
            tokens,
            num_prompt,
            max_tokens: request.max_tokens,
            room: u32::MAX,
            open_ended: request.open_ended,
            guide,
            blocks: Vec::new(),
            blocks_sent: 0,
            known: false,
            swapped: None,
            kept: 0,
            prefix: Prefix::Start { salt: request.cache_salt, adapter: request.adapter.number() },
            states: OwnStates::default(),
            publishes: true,
            cache_salt: request.cache_salt,
            adapter: request.adapter.number(),
            looked_up: false,
            cached: 0,
            computed: 0,
            computed_max,
            progressed: false,
            suspicion: 0,
            pending: 0,
            admission: None,
            prompt_logprobs: Vec::new(),
            prompt_logprobs_done: !wants_prompt,
            drafter: None,
            pace: DraftPace::default(),
            wants_draft: false,
            drafts: Drafts::none(),
        }
    }

    /// Identifies the mask of its next token.
    pub(super) fn awaited_mask(&self) -> AwaitedMask {
        let position = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        AwaitedMask { request: self.request, seq: self.id, position }
    }

    /// Tokens that a KV cache must have room for; just one more if the sequence is open-ended.
    pub(super) fn tokens_needed(&self) -> u32 {
        let all = self.num_prompt.saturating_add(self.max_tokens);
        let accepted = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        if self.open_ended { all.min(accepted.saturating_add(1)) } else { all }
    }

    /// Tokens that a KV cache should have room for, see [`room_wanted`].
    pub(super) fn tokens_wanted(&self) -> u32 {
        let all = self.num_prompt.saturating_add(self.max_tokens);
        let accepted = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        if self.open_ended { room_wanted(accepted, all) } else { all }
    }

    /// Bounds the output by a cache of `tokens` tokens, if the client set no bound, until another
    /// cache is there: the next one may be larger. A sequence without room for one more token is
    /// left alone.
    pub(super) fn fit(&mut self, tokens: u32) {
        let fits = self.open_ended && self.tokens_needed() <= tokens;
        self.room = if fits { tokens.saturating_sub(self.num_prompt) } else { u32::MAX };
    }

    /// Maximum number of output tokens in the present epoch.
    pub(super) fn output_max(&self) -> u32 {
        self.max_tokens.min(self.room)
    }

    /// Whether the client set no `max_tokens` and the sequence can no longer grow in a cache of
    /// `tokens` tokens.
    pub(super) fn has_outgrown(&self, tokens: u32) -> bool {
        self.open_ended && self.num_output() > 0 && self.tokens_needed() > tokens
    }

    /// Its place in the order of admitted sequences.
    pub(super) fn urgency(&self) -> Urgency {
        (self.priority, self.admission)
    }

    /// Length once every step in flight is answered.
    pub(super) fn len_ahead(&self) -> u32 {
        self.tokens.len() as u32 + self.pending
    }

    /// Maximum length in the present epoch.
    fn len_max(&self, max_model_len: u32) -> u32 {
        self.num_prompt.saturating_add(self.output_max()).min(max_model_len)
    }

    /// Maximum length once it has been in so many more steps as one that decodes; with its next
    /// token, in any case. One that drafts may gain all of its drafts in each.
    pub(super) fn len_after(&self, steps: u32, config: &SchedulerConfig) -> u32 {
        let drafts = config.speculation.filter(|_| self.wants_draft || !self.drafts.is_empty());
        let each = 1 + drafts.map_or(0, |drafts| drafts.num_speculative_tokens);
        let more = steps.saturating_mul(each).max(1);
        self.len_ahead().saturating_add(more).min(self.len_max(config.max_model_len))
    }

    /// Whether it may begin with what the KV cache has of its tokens: log-probabilities of its
    /// prompt, and an embedding pooled over more than one token, need all of it to be computed.
    pub(super) fn may_be_cached(&self) -> bool {
        let needs_all = self.sampling.pooling.is_some_and(Pooling::needs_all);
        self.prompt_logprobs_done && !needs_all
    }

    /// Accepted output tokens.
    pub(super) fn num_output(&self) -> u32 {
        self.tokens.len() as u32 - self.num_prompt
    }

    /// Number of tokens that could be computed next; 0 if it will have all its tokens once the
    /// steps in flight are answered.
    pub(super) fn num_wanted(&self, max_model_len: u32) -> u32 {
        let output_ahead = self.len_ahead() - self.num_prompt;
        let complete = output_ahead >= self.output_max() || self.len_ahead() >= max_model_len;
        if complete && (self.max_tokens > 0 || self.computed >= self.num_prompt) {
            return 0;
        }
        self.len_ahead() - self.computed
    }

    /// Whether its next share depends on a token in flight: it is about to draft, or its drafts are
    /// being verified, so that its length is unknown.
    pub(super) fn waits_for_token(&self, max_model_len: u32) -> bool {
        let depends = self.wants_draft || !self.drafts.is_empty();
        depends && self.pending > 0 && self.num_wanted(max_model_len) > 0
    }

    /// Whether computing up to `end` yields a token.
    pub(super) fn samples_at(&self, end: u32) -> bool {
        end == self.len_ahead() && self.max_tokens > 0
    }

    /// Whether computing up to `end` completes an embedding.
    pub(super) fn embeds_at(&self, end: u32) -> bool {
        self.sampling.pooling.is_some() && end as usize == self.tokens.len()
    }

    /// How many of its next `count` tokens yield log-probabilities of its prompt: each those of the
    /// token after it, so the prompt's last one yields none.
    pub(super) fn num_scored(&self, count: u32) -> u32 {
        if self.prompt_logprobs_done {
            return 0;
        }
        self.num_prompt.saturating_sub(self.computed.saturating_add(1)).min(count)
    }

    /// Resets what the workers and others know of its block table, which is empty.
    pub(super) fn forget_blocks(&mut self) {
        self.blocks_sent = 0;
        self.kept = 0;
        self.prefix = Prefix::Start { salt: self.cache_salt, adapter: self.adapter };
    }

    /// Forgets everything but the log: it waits again.
    pub(super) fn reset(&mut self) {
        self.forget_blocks();
        self.states = OwnStates::default();
        self.publishes = true;
        self.known = false;
        self.swapped = None;
        self.computed = 0;
        self.pending = 0;
        self.admission = None;
        self.drafter = None;
        self.wants_draft = false;
        self.drafts = Drafts::none();
        if !self.prompt_logprobs_done {
            self.prompt_logprobs.clear();
        }
    }
}

/// One client request.
#[derive(Debug)]
pub(super) struct Request {
    /// Slots of its unfinished sequences.
    pub(super) live: Vec<usize>,
    pub(super) end_tokens: Vec<u32>,
    /// Sequences admitted now.
    pub(super) admitted: u32,
    /// Sequences in host memory now.
    pub(super) swapped: u32,
    /// It has been in a step.
    pub(super) scheduled: bool,
    /// The last epoch in which it was in a step here: while that lasts, the KV cache may hold
    /// something of it.
    pub(super) ran_in: Option<Epoch>,
    /// Queue capacity it took before it ran.
    pub(super) queued: QueueLoad,
}

impl Request {
    /// Where it is: in the batch if any of its sequences is, otherwise in host memory if any is.
    pub(super) fn place(&self) -> RequestPlace {
        match (self.admitted, self.swapped) {
            (0, 0) => RequestPlace::Waiting,
            (0, _) => RequestPlace::Swapped,
            _ => RequestPlace::Running,
        }
    }
}
