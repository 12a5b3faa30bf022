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
//! - `queue`, `sequence`, `tokens`: requests that wait, sequences, their tokens
//! - `resume`: requests that go on from what another coordinator accepted of them
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
mod masks;
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
pub(crate) use blocks::mix;
pub use blocks::{BlockPool, Found, Prefix};
pub use config::{ConfigError, SchedulerConfig};
pub use effect::{Effect, Place, StepSummary};
use pace::Pace;
use plan::InFlight;
use queue::Load;
pub use sequence::HandedOver;
use sequence::{Request, Sequence, Urgency};
use shared::ids::{Epoch, HostBlockId, RequestId, SeqId, StepId};
use shared::protocol::{Drafts, Swap};
pub use speculate::{Drafter, Lookup};
pub use speculation::{Method, Speculation};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use swap::HostPool;
use tokens::Tokens;

use crate::engine::{EngineError, FinishReason, GenerateRequest};

/// A request is given up when so many epochs in a row ended before a step with it was answered; all
/// but the first of them it had for itself.
pub const SUSPICION_MAX: u32 = 3;

/// A request that does not fit where it was to go on, and why.
pub type Refused = Box<(HandedOver, EngineError)>;

/// Why an epoch is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochEnd {
    /// Something broke, maybe because of what was computed.
    Failed,
    /// The cluster wanted it so: a drain, another degree, fewer replicas.
    Planned,
}

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
    requests: HashMap<RequestId, Request>,
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
            requests: HashMap::new(),
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

    /// The ranks are formed with `num_blocks` empty blocks, `host_blocks` in host memory, and know
    /// no sequence. Open-ended requests that have outgrown the new cache, where that is smaller,
    /// end. Returns those that it could never hold: another replica may have room.
    pub fn replica_ready(
        &mut self,
        epoch: Epoch,
        num_blocks: u32,
        host_blocks: u32,
        effects: &mut Vec<Effect>,
    ) -> Vec<HandedOver> {
        if self.epoch.is_some() {
            self.replica_lost(EpochEnd::Planned, effects);
        }
        self.epoch = Some(epoch);
        self.last_step = StepId(0);
        self.blocks = BlockPool::new(num_blocks, self.config.block_size);
        self.waits_for = None;
        self.host = HostPool::new(host_blocks);
        let room = self.room();
        for slot in &self.waiting {
            if let Some(sequence) = &mut self.sequences[*slot] {
                sequence.fit(room);
            }
        }
        self.end_outgrown(effects);
        let too_large: HashSet<RequestId> = self
            .waiting
            .iter()
            .filter_map(|slot| self.sequences[*slot].as_ref())
            .filter(|seq| self.blocks_needed(seq.tokens_needed()) > num_blocks)
            .map(|seq| seq.request)
            .collect();
        if too_large.is_empty() { Vec::new() } else { self.hand_over_those(&too_large) }
    }

    /// The epoch is over. What was accepted stays; all sequences wait again, oldest first. A
    /// request that was there alone, without progress, when [`SUSPICION_MAX`] epochs in a row ended
    /// is what ends them: it fails, so that the others can go on.
    pub fn replica_lost(&mut self, end: EpochEnd, effects: &mut Vec<Effect>) {
        self.epoch = None;
        // What the steps in flight computed is counted by nobody: computing it again is no
        // recomputation. Newest first, back to what was before the oldest.
        while let Some(step) = self.in_flight.pop_back() {
            for entry in step.entries.iter().rev() {
                if let Some(seq) = &mut self.sequences[entry.slot]
                    && seq.id == entry.seq
                {
                    seq.computed_max = entry.computed_max;
                    seq.looked_up &= !entry.looks_up;
                }
            }
            self.spare.push(step);
        }
        let mut guilty: Vec<(RequestId, u32)> = Vec::new();
        while let Some(slot) = self.running.last().copied() {
            if end == EpochEnd::Failed
                && let Some(seq) = &mut self.sequences[slot]
            {
                seq.suspicion += u32::from(!seq.progressed);
                if seq.suspicion >= SUSPICION_MAX {
                    guilty.push((seq.request, seq.suspicion));
                }
            }
            self.unadmit(slot);
        }
        self.lose_swapped();
        for (request, epochs) in guilty {
            self.end_request(request, Some(EngineError::Quarantined { epochs }), effects);
        }
        // Workers that come back know nothing, and bring a cache of their own.
        self.forget.clear();
        self.masks_awaited.clear();
        self.blocks = BlockPool::default();
    }

    /// Gives up all requests, oldest first, for another replica to go on with. Only between two
    /// epochs, when nothing of them is anywhere else.
    pub fn hand_over(&mut self) -> Vec<HandedOver> {
        if self.epoch.is_some() {
            return Vec::new();
        }
        let sequences = self.sequences.iter().flatten();
        let all = sequences.map(|sequence| sequence.request).collect();
        self.hand_over_those(&all)
    }

    /// Gives up to `most` of the requests that have not run yet, for a replica with fewer to go on
    /// with, whose KV cache has room for `room` tokens: evenly chosen along the queue, so that
    /// those that stay and those that go are both served in the order in which they came.
    pub fn share(&mut self, most: u32, room: u32) -> Vec<HandedOver> {
        let has_run = |id: RequestId| self.requests.get(&id).is_none_or(|owner| owner.scheduled);
        let mut fresh: Vec<RequestId> = Vec::new();
        for slot in &self.waiting {
            let Some(sequence) = &self.sequences[*slot] else { continue };
            let id = sequence.request;
            let fits = sequence.tokens_needed() <= room;
            if fits && fresh.last() != Some(&id) && !has_run(id) {
                fresh.push(id);
            }
        }
        let (all, most) = (fresh.len(), (most as usize).min(fresh.len()));
        let goes = (0..most).map(|i| fresh[(i * all) / most]).collect();
        let mut handed = self.hand_over_those(&goes);
        handed.iter_mut().for_each(|request| request.shared = true);
        handed
    }

    /// Of what waits.
    fn hand_over_those(&mut self, requests: &HashSet<RequestId>) -> Vec<HandedOver> {
        let mut handed: Vec<HandedOver> = Vec::new();
        // Where each request is among them: looking for it there takes minutes for a long queue.
        let mut places: HashMap<RequestId, usize> = HashMap::new();
        let leaves = |slot: &usize| {
            self.sequences[*slot].as_ref().is_none_or(|it| requests.contains(&it.request))
        };
        let (leaving, staying): (VecDeque<usize>, _) =
            self.waiting.iter().copied().partition(leaves);
        self.waiting = staying;
        for slot in leaving {
            let Some(sequence) = self.sequences[slot].take() else { continue };
            self.free_slots.push(slot);
            let id = sequence.request;
            match places.get(&id).and_then(|place| handed.get_mut(*place)) {
                Some(held) => held.sequences.push(sequence),
                None => {
                    let Some(owner) = self.forget_request(id) else { continue };
                    places.insert(id, handed.len());
                    let sequences = vec![sequence];
                    handed.push(HandedOver { id, owner, sequences, shared: false });
                }
            }
        }
        handed
    }

    /// Ends what was to end where its KV cache does, and is longer than the one it came to.
    pub fn end_outgrown(&mut self, effects: &mut Vec<Effect>) {
        if self.epoch.is_none() {
            return;
        }
        let room = self.room();
        let outgrown = |slot: &usize| {
            self.sequences[*slot].as_ref().is_some_and(|sequence| sequence.has_outgrown(room))
        };
        let slots: Vec<usize> = self.waiting.iter().copied().filter(outgrown).collect();
        for slot in slots {
            self.finish(slot, FinishReason::Length, effects);
        }
    }

    /// Goes on with another replica's requests, before all equals that wait here: they are older.
    /// Those that were shared queue behind, as new ones do: others may wait here for longer.
    /// Returns which of their sequences is which here. [`Scheduler::end_outgrown`] is to follow.
    ///
    /// # Errors
    /// The request, when it does not fit here.
    pub fn adopt(&mut self, handed: HandedOver) -> Result<Vec<(SeqId, SeqId)>, Refused> {
        let room = self.room();
        let goes_on = handed.sequences.iter().filter(|sequence| !sequence.has_outgrown(room));
        let needed = goes_on.map(Sequence::tokens_needed).max().unwrap_or(0);
        let needed = self.blocks_needed(needed);
        if self.epoch.is_some() && needed > self.blocks.total() {
            let available = self.blocks.total();
            return Err(Box::new((handed, EngineError::TooLarge { needed, available })));
        }
        let HandedOver { id, mut owner, mut sequences, shared } = handed;
        if self.epoch.is_some() {
            sequences.iter_mut().for_each(|sequence| sequence.fit(room));
        }
        owner.live.clear();
        let mut names = Vec::with_capacity(sequences.len());
        // What is put in front is put there last to first.
        if !shared {
            sequences.reverse();
        }
        for mut sequence in sequences {
            let here = SeqId(self.next_seq);
            self.next_seq += 1;
            names.push((sequence.id, here));
            sequence.id = here;
            let slot = self.store(sequence);
            if shared {
                self.wait_last(slot);
            } else {
                self.wait_first(slot);
            }
            owner.live.push(slot);
        }
        self.own(id, owner);
        Ok(names)
    }

    /// Takes a request. Returns its sequences, one per choice. [`Scheduler::end_resumed`] is to
    /// follow for one that is resumed.
    ///
    /// # Errors
    /// [`EngineError::QueueFull`], [`EngineError::TooLarge`], [`EngineError::Unavailable`] where a
    /// request of the same number runs; nothing has changed then.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<Vec<SeqId>, EngineError> {
        if self.requests.contains_key(&request.id) {
            let message = format!("request number {} runs already", request.id.0);
            return Err(EngineError::Unavailable { message });
        }
        let queued = Load::of(request.prompt.len(), request.sampling.len());
        let goes_on = request.resumed.is_some();
        if !goes_on {
            self.queued.check(queued, self.config.max_queued_requests)?;
        }
        let num_prompt = request.prompt.len() as u32;
        // An open-ended one that has outgrown the cache ends by it.
        let needed = match request.open_ended {
            true => num_prompt + request.max_tokens.min(1),
            false => request.tokens_needed(),
        };
        let needed = self.blocks_needed(needed);
        let available = match self.epoch {
            Some(_) => self.blocks.total(),
            None => self.config.blocks_for(self.config.max_model_len),
        };
        let too_long = num_prompt + request.max_tokens.min(1) > self.config.max_model_len;
        if too_long || needed > available {
            return Err(EngineError::TooLarge { needed, available });
        }
        let prompt: Arc<[u32]> = request.prompt.into();
        let mut guides = request.guides.into_iter();
        let mut accepted = request.resumed.into_iter().flat_map(|resumed| resumed.choices);
        let mut live = Vec::with_capacity(request.sampling.len());
        let mut ids = Vec::with_capacity(request.sampling.len());
        for mut sampling in request.sampling {
            let wants_prompt = sampling.prompt_logprobs.is_some() && sampling.choice == 0;
            if !wants_prompt {
                sampling.prompt_logprobs = None;
            }
            let id = SeqId(self.next_seq);
            self.next_seq += 1;
            let mut tokens = Tokens::new(prompt.clone(), request.max_tokens as usize);
            let before = accepted.next().unwrap_or_default().tokens;
            before.iter().for_each(|token| tokens.push(*token));
            // What it had, but for its last token, was computed once: that is recomputation.
            let computed_max = if before.is_empty() { 0 } else { tokens.len() as u32 - 1 };
            let mut sequence = Sequence {
                id,
                request: request.id,
                priority: request.priority,
                sampling,
                tokens,
                num_prompt,
                max_tokens: request.max_tokens,
                open_ended: request.open_ended,
                guide: guides.next(),
                blocks: Vec::new(),
                told: 0,
                known: false,
                swapped: None,
                kept: 0,
                prefix: Prefix::Start { salt: request.cache_salt, adapter: request.adapter },
                cache_salt: request.cache_salt,
                adapter: request.adapter,
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
                pace: Pace::default(),
                wants_draft: false,
                drafts: Drafts::none(),
            };
            if self.epoch.is_some() {
                sequence.fit(self.room());
            }
            let slot = self.store(sequence);
            if goes_on {
                self.wait_resumed(slot);
            } else {
                self.wait_last(slot);
            }
            live.push(slot);
            ids.push(id);
        }
        let (end_tokens, scheduled) = (request.end_tokens, goes_on);
        let owner = Request { live, end_tokens, admitted: 0, swapped: 0, scheduled, queued };
        self.own(request.id, owner);
        Ok(ids)
    }

    /// Ends a request whose client is gone. Unknown requests are ignored.
    pub fn cancel(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        self.end_request(request, None, effects);
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

    /// Takes a sequence, which may be gone, off the list.
    fn no_longer_running(&mut self, slot: usize, urgency: Urgency) {
        let before = |running: &usize| {
            let other = self.sequences[*running].as_ref().map(Sequence::urgency);
            *running != slot && other < Some(urgency)
        };
        let at = self.running.partition_point(before);
        if self.running.get(at) == Some(&slot) {
            self.running.remove(at);
        }
    }

    /// Puts an admitted sequence on the list.
    fn run(&mut self, slot: usize) {
        let urgency = |slot: &usize| self.sequences[*slot].as_ref().map(Sequence::urgency);
        let own = urgency(&slot);
        let at = self.running.partition_point(|running| urgency(running) <= own);
        self.running.insert(at, slot);
    }

    /// Queues a sequence behind its equals.
    fn wait_last(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let at = self.waiting.partition_point(|waiting| self.priority(*waiting) <= priority);
        self.waiting.insert(at, slot);
    }

    /// Queues a sequence before its equals.
    fn wait_first(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let at = self.waiting.partition_point(|waiting| self.priority(*waiting) < priority);
        self.waiting.insert(at, slot);
    }

    fn priority(&self, slot: usize) -> i32 {
        self.sequences[slot].as_ref().map_or(0, |seq| seq.priority)
    }

    /// Sends an admitted sequence back into the queue, before its equals.
    fn unadmit(&mut self, slot: usize) {
        if let Some(seq) = &self.sequences[slot] {
            self.no_longer_running(slot, seq.urgency());
        }
        let Some(seq) = &mut self.sequences[slot] else { return };
        let request = seq.request;
        self.blocks.give_back(&mut seq.blocks);
        if seq.known {
            self.forget.push(seq.id);
        }
        seq.reset();
        self.wait_first(slot);
        self.count(request, |owner| owner.admitted -= 1);
    }

    /// Changes how many of a request's sequences are where, and keeps count of where requests are.
    fn count(&mut self, request: RequestId, change: impl FnOnce(&mut Request)) {
        let Some(owner) = self.requests.get_mut(&request) else { return };
        let before = owner.place();
        change(owner);
        let now = owner.place();
        for (place, count) in [
            (Place::Running, &mut self.num_running_requests),
            (Place::Swapped, &mut self.num_swapped_requests),
        ] {
            *count = *count + u32::from(now == place) - u32::from(before == place);
        }
    }

    /// Tells that a request runs, once the first of its sequences is admitted.
    fn resumed(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        if let Some(owner) = self.requests.get_mut(&request)
            && owner.admitted == 1
        {
            if std::mem::replace(&mut owner.scheduled, true) {
                effects.push(Effect::Resumed { request });
            } else {
                self.queued.subtract(owner.queued);
                effects.push(Effect::FirstScheduled { request });
            }
        }
    }

    fn store(&mut self, sequence: Sequence) -> usize {
        match self.free_slots.pop() {
            Some(slot) => {
                self.sequences[slot] = Some(sequence);
                slot
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() - 1
            }
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
