//! PURE: the scheduler of one replica. Continuous batching, chunked prefill under a token budget,
//! paged KV, preemption by swapping or recomputation, one step ahead of the workers.
//!
//! Events go in ([`Scheduler::submit`], [`Scheduler::plan`], [`Scheduler::apply`],
//! [`Scheduler::cancel`]); plans, masks and [`Effect`]s come out. Arrival and admission decide
//! every order, never hashing.
//!
//! - `queue order`: requests are admitted by priority (lower is earlier), then in order of arrival;
//!   where a step has no room for more masks, unguided requests pass guided ones, those that begin
//!   with a state that is kept in this step wait for the next and are passed (`states`), and beside
//!   a prompt longer than a step the shortest come first (`shorter`). When blocks run out, the
//!   least urgent sequence (of equal priority, the last admitted) is preempted and returns to the
//!   front of its priority, so the oldest of the most urgent always makes progress. Less urgent
//!   requests can starve: priorities are set on purpose. What was computed for a preempted sequence
//!   goes to host memory if that has room (`swap`); otherwise it is recomputed.
//! - `room to grow`: a sequence is admitted if those that run would still find the blocks that they
//!   may need until its prompt is computed. Who comes later is preempted first, so it would be the
//!   one to lose what was computed of it.
//! - `one step ahead`: a step is planned before the one in flight is answered. Its decode entries
//!   start at the position of a token that only the workers know yet. A sequence that is about to
//!   draft needs that token. While such sequences wait and are fewer than half of those that run,
//!   the others are planned ahead and the drafting ones are in every other step; otherwise no step
//!   is planned until their tokens are known.
//! - `mixed steps`: while sequences decode, prompts may be bounded to a part of each step, as the
//!   others wait for all of it.
//! - `masks`: guided sequences are planned ahead, too. The mask of the next token depends on the
//!   tokens before it, and follows the plan once they are known.
//! - `speculation`: a sequence that repeats itself drafts the tokens that may come next
//!   (`speculate`), or rank 0 drafts them with a draft model when the step begins, as many as the
//!   sequence's past drafts justify (`pace`). The step computes them all; its outputs count as far
//!   as the drafts were right, plus one more. Drafts use only what others leave of a step. Of a
//!   share with drafts, only the first token is taken for computed until the answer arrives.
//! - `freeing early`: a sequence that turns out to be finished while a later step with it is in
//!   flight gives its blocks back at once. Workers run plans in order, so the blocks' next owner
//!   writes them after the late step has; the late output is ignored.
//! - `acceptance`: an output counts only if epoch, step, admission and position match the plan. A
//!   token in flight of a sequence that is recomputed is ignored and sampled again, which gives the
//!   same token (law 7); that of a swapped sequence counts.
//!
//! Modules:
//! - `queue`, `order`: how much may wait, how requests come and leave; the order of sequences
//! - `admission`, `shorter`: who comes into a step; shorter prompts beside a long one
//! - `resume`: requests that continue from what another coordinator accepted
//! - `sequence`, `tokens`: state of sequences and requests; their tokens
//! - `epochs`, `moving`: epochs begin and end; requests move between replicas
//! - `blocks`, `states`: KV blocks and prefix caching; states of linear attention for it
//! - `plan`, `accept`: plans a step; accepts its answer
//! - `drafts`, `speculate`, `speculation`, `pace`: speculative decoding
//! - `masks`, `swap`, `weight`: structured output; swapping to host memory; bytes of plans and
//!   results
//! - `config`, `effect`: its bounds; what it decides
mod accept;
mod admission;
mod blocks;
mod config;
mod drafts;
mod effect;
mod epochs;
mod masks;
mod moving;
mod order;
mod pace;
mod plan;
mod queue;
mod resume;
mod sequence;
mod shorter;
mod speculate;
mod speculation;
mod states;
mod swap;
mod tokens;
mod weight;

pub use accept::{ApplyError, StopCallback, end_of};
pub use blocks::{BlockPool, CachedBlock, Prefix};
pub use config::{ConfigError, SchedulerConfig};
pub use effect::{Effect, RequestPlace, StepSummary};
pub use epochs::{EpochEnd, SUSPICION_MAX};
pub use moving::{HandedOver, RefusedRequest};
use plan::InFlight;
use queue::QueueLoad;
use sequence::{Request, Sequence};
use shared::ids::{Epoch, HostBlockId, RequestId, SeqId, StateId, StepId};
use shared::mix::IdMap;
use shared::protocol::Swap;
pub use speculate::{NgramConfig, NgramDrafter};
pub use speculation::{Method, Speculation};
pub use states::KeptStates;
use std::collections::VecDeque;
use std::task::Waker;
use swap::HostPool;

use crate::engine::FinishReason;

/// A mask that a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AwaitedMask {
    /// Request the mask belongs to.
    pub request: RequestId,
    /// Sequence of that request.
    pub seq: SeqId,
    /// Number of tokens before the masked one.
    pub position: u32,
}

/// A sequence that waits for blocks.
#[derive(Clone, Copy, Debug)]
struct BlockWait {
    seq: SeqId,
    /// Number of its tokens.
    length: u32,
    /// Free blocks it needs.
    blocks: u64,
    /// Tokens it has to compute: the more they are, the more blocks running sequences keep.
    uncomputed: u32,
    /// [`BlockPool::gains`] when these two were computed.
    gains: u64,
    /// [`KeptStates::gains`] then, if one more state might have saved blocks: any number of them.
    states: Option<u64>,
}

/// One replica's scheduler.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    /// Maximum number of tokens in a step of the present epoch, at most `config`'s.
    step_tokens: u32,
    /// Maximum number of prompt tokens in one of its steps while a sequence decodes.
    mixed_prefill_tokens: u32,
    blocks: BlockPool,
    states: KeptStates,
    /// The most KV blocks that an epoch had.
    blocks_most: u32,
    epoch: Option<Epoch>,
    last_step: StepId,
    /// Slots of sequences; `None` is free.
    sequences: Vec<Option<Sequence>>,
    free_slots: Vec<usize>,
    requests: IdMap<RequestId, Request>,
    /// Slots waiting for admission, by priority, then by age of the request.
    waiting: VecDeque<usize>,
    /// Admitted slots, by priority, then by admission.
    running: Vec<usize>,
    in_flight: VecDeque<InFlight>,
    /// Cached blocks of the sequence about to be admitted; a field so that its memory is reused.
    found: Vec<CachedBlock>,
    /// The state behind these, the number of blocks that were found whatever states are kept, and
    /// of those that the next step finds a state behind.
    found_state: Option<StateId>,
    found_blocks: u32,
    found_soon: u32,
    /// Prompts for which a longer one leaves some of the step; a field for the same reason.
    shorter: Vec<shorter::Prompt>,
    /// The sequence last found to be short of blocks.
    waits_for: Option<BlockWait>,
    /// Answered steps, kept so that their lists are reused.
    spare: Vec<InFlight>,
    /// Sequences that the next plan tells the workers to forget.
    forget: Vec<SeqId>,
    host: HostPool,
    /// Sequences that the next plan copies to host memory.
    outgoing: Vec<Swap>,
    /// Host blocks that become free once this plan is sent.
    left: Vec<HostBlockId>,
    next_seq: u64,
    next_admission: u64,
    num_running_requests: u32,
    num_swapped_requests: u32,
    /// Requests that have been in a step of the present epoch.
    num_run_here: u32,
    /// Queue capacity taken by requests that have not run; this is what bounds the queue.
    queued: QueueLoad,
    /// Masks that the last [`Scheduler::masks`] found pending although all tokens before are known.
    masks_awaited: Vec<AwaitedMask>,
    /// Wakes the shell when a guide that was waited for is ready.
    waker: Waker,
}

/// State shown by the gauges. `running + waiting + swapped = in_flight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Requests with at least one sequence admitted.
    pub running: u32,
    /// Requests with no sequence admitted and at least one in host memory.
    pub swapped: u32,
    /// All other requests.
    pub waiting: u32,
    /// Requests accepted and not ended.
    pub in_flight: u32,
    /// KV blocks in use.
    pub blocks_used: u32,
    /// KV blocks in total.
    pub blocks_total: u32,
    /// Blocks of host memory in use.
    pub host_used: u32,
    /// Blocks of host memory in total.
    pub host_total: u32,
    /// Steps sent and not answered.
    pub steps_in_flight: u32,
}

impl Scheduler {
    /// Creates a scheduler whose replica is not ready yet.
    ///
    /// # Errors
    /// If the bounds conflict.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            step_tokens: config.max_num_batched_tokens,
            mixed_prefill_tokens: config.max_mixed_prefill_tokens.unwrap_or(u32::MAX),
            config,
            blocks: BlockPool::default(),
            states: KeptStates::default(),
            blocks_most: 0,
            epoch: None,
            last_step: StepId(0),
            sequences: Vec::new(),
            free_slots: Vec::new(),
            requests: IdMap::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            in_flight: VecDeque::new(),
            found: Vec::new(),
            found_state: None,
            found_blocks: 0,
            found_soon: 0,
            shorter: Vec::new(),
            waits_for: None,
            spare: Vec::new(),
            forget: Vec::new(),
            host: HostPool::default(),
            outgoing: Vec::new(),
            left: Vec::new(),
            next_seq: 1,
            next_admission: 1,
            num_running_requests: 0,
            num_swapped_requests: 0,
            num_run_here: 0,
            queued: QueueLoad::default(),
            masks_awaited: Vec::new(),
            waker: Waker::noop().clone(),
        })
    }

    /// Sets the waker that pending guides wake when their masks may be ready.
    pub fn wake_with(&mut self, waker: Waker) {
        self.waker = waker;
    }

    /// Forgets what KV blocks hold: no later sequence finds anything that was computed before. The
    /// sequences that run or are in host memory keep their blocks; others find none of them, nor of
    /// those that follow, unless they are computed again.
    pub fn forget_prefixes(&mut self) {
        self.blocks.forget_all();
        self.states.forget_all();
        for seq in self.sequences.iter_mut().flatten() {
            if seq.admission.is_some() {
                seq.publishes = false;
                states::stop(&mut self.states, seq);
            }
        }
    }

    /// Bounds the tokens of each step from now on, within the bounds that it was made with: that
    /// depends on the devices of the replica's ranks. Those that need a lower bound compute a
    /// prompt hardly faster in larger chunks; unless another share was configured, prompts then get
    /// at most a quarter of a step in which sequences decode, so that these wait less between
    /// tokens.
    pub fn limit_steps(&mut self, tokens: u32) {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = self.config;
        self.step_tokens = tokens.max(max_num_seqs).min(max_num_batched_tokens);
        let is_lower = self.step_tokens < max_num_batched_tokens;
        let usual = if is_lower { (self.step_tokens / 4).max(1) } else { u32::MAX };
        self.mixed_prefill_tokens = self.config.max_mixed_prefill_tokens.unwrap_or(usual);
    }

    /// Returns the present state.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let in_flight = self.requests.len() as u32;
        Gauges {
            running: self.num_running_requests,
            swapped: self.num_swapped_requests,
            waiting: in_flight
                .saturating_sub(self.num_running_requests + self.num_swapped_requests),
            in_flight,
            blocks_used: self.blocks.num_used(),
            blocks_total: self.blocks.total(),
            host_used: self.host.num_used(),
            host_total: self.host.total(),
            steps_in_flight: self.in_flight.len() as u32,
        }
    }

    /// Number of requests that could go to another replica, see [`Scheduler::share`].
    #[must_use]
    pub fn num_shareable(&self) -> u32 {
        (self.requests.len() as u32).saturating_sub(self.num_run_here)
    }

    /// Number of sequences that have not ended.
    #[must_use]
    pub fn num_sequences(&self) -> u32 {
        (self.sequences.len() - self.free_slots.len()) as u32
    }

    /// The requests of the admitted sequences, once for each.
    pub fn running_requests(&self) -> impl Iterator<Item = RequestId> {
        self.running().map(|seq| seq.request)
    }

    /// Masks still being computed as of the last [`Scheduler::masks`]; a step waits for them.
    #[must_use]
    pub fn masks_awaited(&self) -> &[AwaitedMask] {
        &self.masks_awaited
    }

    /// Whether sequences draft tokens, and how.
    #[must_use]
    pub fn speculation(&self) -> Option<&Speculation> {
        self.config.speculation.as_ref()
    }

    /// The last step planned in this epoch.
    #[must_use]
    pub fn last_step(&self) -> StepId {
        self.last_step
    }

    fn finish(&mut self, slot: usize, reason: FinishReason, effects: &mut Vec<Effect>) {
        if self.finish_queued(slot, reason, effects) {
            self.waiting.retain(|waiting| *waiting != slot);
        }
    }

    /// Like [`Scheduler::finish`], but leaves the sequence's place in the queue: whether it has
    /// one. Call [`Scheduler::close_gaps`] once after several.
    fn finish_queued(
        &mut self,
        slot: usize,
        reason: FinishReason,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let place = |scheduler: &Self, request| {
            scheduler.requests.get(&request).map_or(RequestPlace::Waiting, Request::place)
        };
        let request = self.sequences[slot].as_ref().map(|seq| seq.request);
        let Some(request) = request else { return false };
        let before = place(self, request);
        let Some((seq, waits)) = self.detach(slot) else { return false };
        let now = place(self, request);
        let Some(owner) = self.requests.get_mut(&request) else { return waits };
        owner.live.retain(|live| *live != slot);
        let last = owner.live.is_empty();
        if last {
            self.forget_request(request);
        }
        let (choice, cached) = (seq.sampling.choice, seq.cached);
        effects.push(Effect::Finished { request, seq: seq.id, choice, reason, cached, last });
        if !last && now != before {
            effects.push(Effect::Rests { request, place: now });
        }
        waits
    }

    /// Number of tokens that the whole KV cache has room for.
    fn room(&self) -> u32 {
        self.blocks.total().saturating_mul(self.config.block_size)
    }

    fn blocks_needed(&self, tokens: u32) -> u32 {
        self.config.blocks_for(tokens.min(self.config.max_model_len))
    }
}

/// Makes a sequence's full blocks findable by others, as far as their tokens are known.
fn keep_full(
    (blocks, states): (&mut BlockPool, &mut KeptStates),
    seq: &mut Sequence,
    config: &SchedulerConfig,
) {
    if !config.prefix_caching || !seq.publishes {
        return;
    }
    let known = seq.computed.min(seq.tokens.len() as u32);
    // A swapped sequence has no blocks.
    while (seq.kept + 1) * config.block_size <= known && (seq.kept as usize) < seq.blocks.len() {
        let start = (seq.kept * config.block_size) as usize;
        let tokens = &seq.tokens[start..start + config.block_size as usize];
        seq.prefix = blocks.keep(seq.blocks[seq.kept as usize], seq.prefix, tokens);
        seq.kept += 1;
        states::name_kept(states, seq, config);
    }
}
