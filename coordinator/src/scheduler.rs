//! PURE: the scheduler of one replica. Continuous batching, chunked prefill under a token budget,
//! paged KV, preemption by swapping or recomputation, one step ahead of the workers.
//!
//! Events and the time go in ([`Scheduler::submit`], [`Scheduler::plan`], [`Scheduler::apply`],
//! [`Scheduler::cancel`]); plans, masks and [`Effect`]s come out. The order of everything is
//! decided by arrival and admission, never by hashing.
//!
//! - `queue order`: requests are admitted by priority (lower is earlier), and in order of arrival
//!   among equals; where a step has no room for more masks, those that are not guided pass those
//!   that are. Out of blocks, the least urgent sequence, of equals the one admitted last, is
//!   preempted and returns to the front of its equals, so the oldest of the most urgent always
//!   makes progress. Who is less urgent may wait for ever: priorities are given on purpose. What
//!   was computed of it goes to host memory where that has room (`swap`), else it is computed
//!   again.
//! - `one step ahead`: a step is planned before the one in flight is answered. Its decode entries
//!   begin at the position of a token that only the workers know yet. A sequence that is about to
//!   draft needs that token. While such ones wait for theirs and are fewer than half of those that
//!   run, the others are planned ahead and those are in every other step; else no step is planned
//!   before their tokens are there.
//! - `masks`: guided sequences are planned ahead, too. The mask of what they may get depends on
//!   that token, and follows its plan when it is known.
//! - `speculation`: a sequence that repeats what it has before drafts the tokens that may come next
//!   (`speculate`), or rank 0 drafts them by a model of its own when the step begins, as many as
//!   the sequence's drafts are worth (`pace`); the step computes them all: its own tokens count as
//!   far as they are those drafted, and one more. Drafts take what nobody else wants of a step; of
//!   what a step drafts only its first token is taken for computed until the answer is there.
//! - `freeing early`: a sequence that turns out to be finished while a later step with it is in
//!   flight gives its blocks back at once. Workers run plans in order, so whoever gets the blocks
//!   writes them after the late step has; the late output is ignored.
//! - `acceptance`: an output counts only if epoch, step, admission and position match what was
//!   planned. A token in flight of a sequence that is computed again is ignored and sampled again,
//!   which gives the same token (law 7); that of a swapped one counts.
//!
//! Modules:
//! - `queue`, `order`: how much may wait, and how requests leave; who is before whom
//! - `resume`: requests that go on from what another coordinator accepted of them
//! - `sequence`, `tokens`: sequences and requests, their tokens
//! - `epochs`, `moving`: the replica's ranks come and go; requests go to another replica and come
//! - `blocks`: KV blocks, and which of them are found again
//! - `plan`, `accept`: a step planned; its answer accepted
//! - `drafts`, `speculate`, `speculation`, `pace`: speculative decoding
//! - `masks`, `swap`, `weight`: structured output; host memory; what a plan weighs
//! - `config`, `effect`: its bounds; what it decides
mod accept;
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
mod speculate;
mod speculation;
mod swap;
mod tokens;
mod weight;

pub use accept::{ApplyError, Stopped, end_of};
pub use blocks::{BlockPool, Found, Prefix};
pub use config::{ConfigError, SchedulerConfig};
pub use effect::{Effect, Place, StepSummary};
pub use epochs::{EpochEnd, SUSPICION_MAX};
pub use moving::{HandedOver, Refused};
use plan::InFlight;
use queue::Load;
use sequence::{Request, Sequence};
use shared::ids::{Epoch, HostBlockId, RequestId, SeqId, StepId};
use shared::mix::IdMap;
use shared::protocol::Swap;
pub use speculate::{Drafter, Lookup};
pub use speculation::{Method, Speculation};
use std::collections::VecDeque;
use std::task::Waker;
use swap::HostPool;

use crate::engine::FinishReason;

/// A mask that a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AwaitedMask {
    /// Whose.
    pub request: RequestId,
    /// Of which sequence of it.
    pub seq: SeqId,
    /// Behind how many tokens.
    pub position: u32,
}

/// A sequence that waits for blocks.
#[derive(Clone, Copy, Debug)]
struct Waits {
    seq: SeqId,
    /// Its tokens.
    length: u32,
    /// How many free blocks it needs.
    blocks: u64,
    /// [`BlockPool::gains`] when that was counted.
    gains: u64,
}

/// One replica's scheduler.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    blocks: BlockPool,
    epoch: Option<Epoch>,
    last_step: StepId,
    /// Slots of sequences; `None` is free.
    sequences: Vec<Option<Sequence>>,
    free_slots: Vec<usize>,
    requests: IdMap<RequestId, Request>,
    /// Slots waiting for admission: by priority, of equals the oldest request first.
    waiting: VecDeque<usize>,
    /// Slots admitted: by priority, of equals in order of admission.
    running: Vec<usize>,
    in_flight: VecDeque<InFlight>,
    /// What the KV cache has of a sequence that is about to be admitted: kept for its memory.
    found: Vec<Found>,
    /// What was last found to wait for blocks.
    waits_for: Option<Waits>,
    /// Answered steps' lists, used again.
    spare: Vec<InFlight>,
    /// Sequences the workers shall forget with the next plan.
    forget: Vec<SeqId>,
    host: HostPool,
    /// Sequences that go to host memory with the next plan.
    outgoing: Vec<Swap>,
    /// Host blocks that are free once this plan is sent.
    left: Vec<HostBlockId>,
    next_seq: u64,
    next_admission: u64,
    num_running_requests: u32,
    num_swapped_requests: u32,
    /// What requests that have not run take of the queue: it is bounded by that.
    queued: Load,
    /// Masks that the last look at them did not find, though all tokens before are known.
    masks_awaited: Vec<AwaitedMask>,
    /// Wakes the shell when a guide that was waited for is ready.
    waker: Waker,
}

/// The state that gauges show. `running + waiting + swapped = in_flight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Requests with at least one sequence admitted.
    pub running: u32,
    /// Requests without, of which a sequence is in host memory.
    pub swapped: u32,
    /// All others.
    pub waiting: u32,
    /// Requests accepted and not ended.
    pub in_flight: u32,
    /// KV blocks in use.
    pub blocks_used: u32,
    /// KV blocks there are.
    pub blocks_total: u32,
    /// Blocks of host memory in use.
    pub host_used: u32,
    /// Blocks of host memory there are.
    pub host_total: u32,
    /// Steps sent and not answered.
    pub steps_in_flight: u32,
}

impl Scheduler {
    /// A scheduler whose replica is not there yet.
    ///
    /// # Errors
    /// When the bounds are in conflict.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            blocks: BlockPool::default(),
            epoch: None,
            last_step: StepId(0),
            sequences: Vec::new(),
            free_slots: Vec::new(),
            requests: IdMap::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            in_flight: VecDeque::new(),
            found: Vec::new(),
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
            queued: Load::default(),
            masks_awaited: Vec::new(),
            waker: Waker::noop().clone(),
        })
    }

    /// Guides that are asked and do not know yet wake this: masks may be there then.
    pub fn wake_with(&mut self, waker: Waker) {
        self.waker = waker;
    }

    /// The present state.
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

    /// Masks that are being computed, as of the last [`Scheduler::masks`]: a step waits for them.
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
        let place = |scheduler: &Self, request| {
            scheduler.requests.get(&request).map_or(Place::Waiting, Request::place)
        };
        let Some(request) = self.sequences[slot].as_ref().map(|seq| seq.request) else { return };
        let before = place(self, request);
        let Some(seq) = self.remove(slot) else { return };
        let now = place(self, request);
        let Some(owner) = self.requests.get_mut(&request) else { return };
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
    }

    /// Tokens that the whole KV cache has room for.
    fn room(&self) -> u32 {
        self.blocks.total().saturating_mul(self.config.block_size)
    }

    fn blocks_needed(&self, tokens: u32) -> u32 {
        self.config.blocks_for(tokens.min(self.config.max_model_len))
    }
}

/// Lets others find the blocks of a sequence that are planned whole and whose tokens are known.
fn keep_full(blocks: &mut BlockPool, seq: &mut Sequence, config: &SchedulerConfig) {
    if !config.prefix_caching {
        return;
    }
    let known = seq.computed.min(seq.tokens.len() as u32);
    // Of one that is swapped nothing is there.
    while (seq.kept + 1) * config.block_size <= known && (seq.kept as usize) < seq.blocks.len() {
        let start = (seq.kept * config.block_size) as usize;
        let tokens = &seq.tokens[start..start + config.block_size as usize];
        seq.prefix = blocks.keep(seq.blocks[seq.kept as usize], seq.prefix, tokens);
        seq.kept += 1;
    }
}
