//! Scheduler, worker and clients, with named invariants checked after every event.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use coordinator::adapters::AdapterUse;
use coordinator::engine::{
    EngineError, FinishReason, GenerateRequest, Guided, Resumed, ResumedChoice, TokenGuide,
};
use coordinator::guide::ThinkingGuide;
use coordinator::scheduler::{
    Effect, EpochEnd, RequestPlace, Scheduler, SchedulerConfig, StepSummary,
};
use shared::ids::{Epoch, RequestId, SeqId, StepId};
use shared::protocol::{SequenceOutput, StepMasks, StepPlan, ThinkingBudget, ToWorker};
use shared::sampling::{Pooling, SamplingParams};

use crate::frames::travels;
use crate::guided::{Guidance, TestGuide, Woken, known};
use crate::worker::{FakeWorker, adapter_of, next_token};
use shared::metrics::labels::FailoverReason;

/// Limits of a small replica; tests change those that they are about.
pub(crate) fn sizes() -> SchedulerConfig {
    SchedulerConfig {
        block_size: 16,
        max_model_len: 1024,
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        max_mixed_prefill_tokens: None,
        max_queued_requests: 100,
        max_steps_in_flight: 2,
        prefix_caching: true,
        prefix_states: None,
        hidden_size: 2,
        vocab_size: u32::MAX,
        speculation: None,
    }
}

/// A request as seen by its client.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) n: u32,
    pub(crate) max_tokens: u32,
    pub(crate) open_ended: bool,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) min_tokens: u32,
    /// The token that completes a stop string.
    pub(crate) stop_token: Option<u32>,
    pub(crate) seed: u64,
    pub(crate) priority: i32,
    /// How many alternatives of each of the prompt's tokens it asks for.
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) pooling: Option<Pooling>,
    pub(crate) guide: Option<Guidance>,
    pub(crate) thinking: Option<ThinkingBudget>,
}

impl Default for ClientRequest {
    fn default() -> Self {
        Self {
            prompt: vec![1, 2, 3],
            n: 1,
            max_tokens: 5,
            open_ended: false,
            end_tokens: Vec::new(),
            min_tokens: 0,
            stop_token: None,
            seed: 1,
            priority: 0,
            prompt_logprobs: None,
            pooling: None,
            guide: None,
            thinking: None,
        }
    }
}

impl ClientRequest {
    /// `guide` for this choice.
    fn guide_of(&self, choice: u32) -> Option<Box<dyn TokenGuide>> {
        let mut client = self.clone();
        if let Some(guide) = &mut client.guide
            && guide.fails_in.is_some_and(|fails| fails != choice)
        {
            guide.fails_behind = None;
        }
        client.guide()
    }

    pub(crate) fn guide(&self) -> Option<Box<dyn TokenGuide>> {
        if let Some(budget) = &self.thinking {
            return Some(Box::new(ThinkingGuide::new(Arc::new(budget.clone()), None)));
        }
        self.guide.map(|guidance| Box::new(TestGuide::new(guidance)) as Box<dyn TokenGuide>)
    }
}

/// What a client got.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientResult {
    pub(crate) tokens: Vec<Vec<u32>>,
    pub(crate) reasons: Vec<Option<FinishReason>>,
    pub(crate) dropped: Option<Option<EngineError>>,
    pub(crate) prompt_logprobs: Option<usize>,
    pub(crate) embedded: bool,
}

impl ClientResult {
    fn has_begun(&self) -> bool {
        self.tokens.iter().any(|tokens| !tokens.is_empty())
            || self.reasons.iter().any(Option::is_some)
    }

    fn ended(&self) -> bool {
        self.dropped.is_some() || self.reasons.iter().all(Option::is_some)
    }
}

/// Scheduler, worker and clients together.
pub(crate) struct Rig {
    pub(crate) config: SchedulerConfig,
    pub(crate) scheduler: Scheduler,
    pub(crate) worker: Option<FakeWorker>,
    pub(crate) epoch: u64,
    /// Plans that the worker has received, oldest first, with the masks that have come for them.
    planned: VecDeque<(StepPlan, Option<StepMasks>)>,
    /// Its answers in transit: outputs, and how many tokens were drafted for each sequence that
    /// asked.
    in_flight: VecDeque<(StepId, Vec<SequenceOutput>, Vec<u32>)>,
    pub(crate) requests: BTreeMap<RequestId, (ClientRequest, ClientResult)>,
    stop_tokens: BTreeMap<SeqId, u32>,
    effects: Vec<Effect>,
    pub(crate) plan: StepPlan,
    next: u64,
    woken: Arc<Woken>,
    pub(crate) totals: StepSummary,
    pub(crate) preemptions: u32,
    /// How many of these went to host memory, and the blocks that went there and came back,
    /// according to effects.
    pub(crate) swaps: u32,
    pub(crate) moved: (u32, u32),
    /// Number of blocks in host memory that replicas have from now on.
    pub(crate) host_blocks: u32,
    /// Numbers of tokens drafted, and of those accepted.
    pub(crate) drafted: (u32, u32),
    /// Requests with an admitted sequence, according to effects.
    running: BTreeSet<RequestId>,
}

impl Rig {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let woken = Arc::<Woken>::default();
        let mut scheduler = Scheduler::new(config).unwrap();
        scheduler.wake_with(woken.clone().into());
        Self {
            config,
            scheduler,
            woken,
            worker: None,
            epoch: 0,
            planned: VecDeque::new(),
            in_flight: VecDeque::new(),
            requests: BTreeMap::new(),
            stop_tokens: BTreeMap::new(),
            effects: Vec::new(),
            plan: StepPlan::default(),
            next: 1,
            totals: StepSummary::default(),
            preemptions: 0,
            swaps: 0,
            moved: (0, 0),
            host_blocks: 0,
            drafted: (0, 0),
            running: BTreeSet::new(),
        }
    }

    pub(crate) fn ready(&mut self, num_blocks: u32) {
        self.epoch += 1;
        self.planned.clear();
        self.in_flight.clear();
        self.worker = Some(FakeWorker::new(self.config, num_blocks, self.host_blocks));
        let (epoch, host_blocks) = (Epoch(self.epoch), self.host_blocks);
        let outgrown =
            self.scheduler.replica_ready(epoch, num_blocks, host_blocks, &mut self.effects);
        // The previous epoch, if it still existed, has ended.
        self.running.clear();
        // There is no other replica: what has outgrown this one ends here.
        for handed in outgrown.into_iter().rev() {
            for (there, here) in self.scheduler.adopt(handed).expect("no bound was set") {
                if let Some(token) = self.stop_tokens.remove(&there) {
                    self.stop_tokens.insert(here, token);
                }
            }
        }
        self.scheduler.end_outgrown(&mut self.effects);
        self.settle();
    }

    pub(crate) fn lost(&mut self) {
        self.ended(EpochEnd::Failed(FailoverReason::StepOverdue));
    }

    pub(crate) fn ended(&mut self, end: EpochEnd) {
        self.worker = None;
        self.planned.clear();
        self.in_flight.clear();
        self.scheduler.replica_lost(end, &mut self.effects);
        self.running.clear();
        assert_eq!(self.scheduler.gauges().running, 0);
        self.settle();
    }

    /// The replica breaks. Another one, which has served other requests before, continues its
    /// requests.
    pub(crate) fn move_on(&mut self) {
        self.lost();
        let other = Scheduler::new(self.config).unwrap();
        self.hand_over_to(other);
    }

    /// The replica breaks. Another one, which serves with `num_blocks` blocks, continues.
    pub(crate) fn move_on_to(&mut self, num_blocks: u32) {
        self.lost();
        let mut other = Scheduler::new(self.config).unwrap();
        self.epoch += 1;
        other.replica_ready(Epoch(self.epoch), num_blocks, 0, &mut self.effects);
        self.worker = Some(FakeWorker::new(self.config, num_blocks, 0));
        self.hand_over_to(other);
    }

    fn hand_over_to(&mut self, mut other: Scheduler) {
        other.wake_with(self.woken.clone().into());
        // It numbers sequences in its own way.
        let used = GenerateRequest::new(
            RequestId(u64::MAX),
            vec![1],
            vec![SamplingParams::greedy(); 5],
            1,
        );
        other.submit(used).unwrap();
        other.cancel(RequestId(u64::MAX), &mut Vec::new());
        let handed = self.scheduler.hand_over();
        assert_eq!(self.scheduler.gauges(), Default::default(), "nothing is left behind");
        let mut stop_tokens = BTreeMap::new();
        for handed in handed.into_iter().rev() {
            let names = other.adopt(handed).expect("the same sizes");
            for (there, here) in names {
                stop_tokens.extend(self.stop_tokens.get(&there).map(|token| (here, *token)));
            }
        }
        other.end_outgrown(&mut self.effects);
        self.stop_tokens = stop_tokens;
        self.scheduler = other;
        self.settle();
    }

    /// The coordinator dies. Another one, which has no replica yet, is asked to continue from what
    /// clients have received.
    pub(crate) fn lead_anew(&mut self) {
        self.worker = None;
        self.planned.clear();
        self.in_flight.clear();
        self.running.clear();
        self.stop_tokens.clear();
        self.scheduler = Scheduler::new(self.config).unwrap();
        self.scheduler.wake_with(self.woken.clone().into());
        for (id, (client, got)) in &mut self.requests {
            if got.ended() {
                continue;
            }
            let request = resumed(asked(*id, client), got);
            match self.scheduler.submit(request) {
                Ok(seqs) => {
                    let stops = seqs.iter().filter_map(|seq| Some((*seq, client.stop_token?)));
                    self.stop_tokens.extend(stops);
                    let ends = seqs.into_iter().map(|seq| (seq, None));
                    self.scheduler.end_resumed(*id, ends, &mut self.effects);
                }
                Err(error) => {
                    let full = matches!(error, EngineError::QueueFull { .. });
                    assert!(full && !got.has_begun(), "{id}: {error}");
                    got.dropped = Some(Some(error));
                }
            }
        }
        self.settle();
    }

    pub(crate) fn submit(&mut self, client: ClientRequest) -> Result<RequestId, EngineError> {
        let id = RequestId(self.next);
        self.next += 1;
        let request = asked(id, &client);
        let before = self.scheduler.gauges();
        let seqs = self.scheduler.submit(request).inspect_err(|_| {
            assert_eq!(self.scheduler.gauges(), before, "a refused request changes nothing");
        })?;
        if let Some(token) = client.stop_token {
            self.stop_tokens.extend(seqs.iter().map(|seq| (*seq, token)));
        }
        let n = client.n as usize;
        let got = ClientResult {
            tokens: vec![Vec::new(); n],
            reasons: vec![None; n],
            ..ClientResult::default()
        };
        self.requests.insert(id, (client, got));
        self.settle();
        Ok(id)
    }

    pub(crate) fn cancel(&mut self, id: RequestId) {
        self.scheduler.cancel(id, &mut self.effects);
        self.send_masks();
        self.settle();
    }

    /// Plans one step and lets the worker run it; the answer waits for delivery.
    pub(crate) fn plan(&mut self) -> bool {
        let mut plan = std::mem::take(&mut self.plan);
        let planned = self.scheduler.plan(&mut plan, &mut self.effects);
        self.plan = plan;
        if planned {
            self.send_plan();
        }
        self.send_masks();
        self.settle();
        planned
    }

    /// Sends the masks that are known, as the shell does after every event.
    pub(crate) fn send_masks(&mut self) {
        let mut masks = StepMasks::default();
        while self.scheduler.masks(&mut masks, &mut self.effects) {
            assert_eq!(masks.epoch, Epoch(self.epoch));
            travels(ToWorker::Masks(masks.clone()));
            let held = self.planned.iter_mut().find(|(plan, _)| plan.step == masks.step);
            let (plan, given) = held.expect("masks are for a step in flight");
            let masked = plan.sequences.iter().filter(|entry| entry.masked).count();
            assert_eq!(masks.masks.len(), masked, "one for each masked entry");
            assert!(given.replace(masks.clone()).is_none(), "masks come once");
        }
        self.run_plans();
    }

    /// Whether the worker waits for masks.
    pub(crate) fn awaits_masks(&self) -> bool {
        !self.planned.is_empty()
    }

    pub(crate) fn canary(&mut self) {
        if self.scheduler.canary(&mut self.plan) {
            self.send_plan();
            self.run_plans();
        }
        self.settle();
    }

    fn send_plan(&mut self) {
        assert_eq!(self.plan.epoch, Epoch(self.epoch));
        travels(ToWorker::Step(self.plan.clone()));
        self.planned.push_back((self.plan.clone(), None));
    }

    /// Lets the worker run the plans for which it has everything.
    fn run_plans(&mut self) {
        let has_all = |(plan, masks): &mut (StepPlan, Option<StepMasks>)| {
            masks.is_some() || !plan.sequences.iter().any(|entry| entry.masked)
        };
        while let Some((plan, masks)) = self.planned.pop_front_if(has_all) {
            let worker = self.worker.as_mut().expect("plans are made while a replica is ready");
            let outputs = worker.run(&plan, &masks.unwrap_or_default().masks);
            self.in_flight.push_back((plan.step, outputs, worker.drafted.clone()));
        }
    }

    /// Lets the worker answer a step before its masks come, right after the previous step: each
    /// sequence gets this token.
    pub(crate) fn rush(&mut self, tokens: &[u32]) {
        let (before, outputs, drafted) = self.in_flight.pop_front().unwrap();
        let epoch = Epoch(self.epoch);
        let effects = &mut self.effects;
        self.scheduler.apply(epoch, before, outputs, &drafted, &mut |_, _| false, effects).unwrap();
        let (plan, _) = self.planned.pop_front().unwrap();
        let outputs = plan.sequences.iter().zip(tokens).map(|(entry, token)| SequenceOutput {
            seq: entry.seq,
            position: entry.start + entry.count,
            token: Some(*token),
            logprobs: None,
            prompt_logprobs: Vec::new(),
            prompt_start: 0,
            corrupted: false,
            embedding: Vec::new(),
        });
        self.in_flight.push_back((plan.step, outputs.collect(), Vec::new()));
        assert!(self.deliver());
    }

    /// Whether a guide has woken the scheduler's shell since the last call.
    pub(crate) fn was_woken(&self) -> bool {
        self.woken.take()
    }

    /// Changes the oldest answer in transit.
    pub(crate) fn tamper(&mut self, change: impl FnOnce(&mut Vec<SequenceOutput>)) {
        change(&mut self.in_flight.front_mut().unwrap().1);
    }

    /// Delivers the oldest answer in transit.
    pub(crate) fn deliver(&mut self) -> bool {
        let Some((step, outputs, drafted)) = self.in_flight.pop_front() else { return false };
        let stops = &self.stop_tokens;
        let mut stopped = |seq: SeqId, token: u32| stops.get(&seq) == Some(&token);
        let epoch = Epoch(self.epoch);
        let effects = &mut self.effects;
        self.scheduler.apply(epoch, step, outputs, &drafted, &mut stopped, effects).unwrap();
        self.send_masks();
        self.settle();
        true
    }

    /// Handles all effects and checks the invariants.
    fn settle(&mut self) {
        for effect in std::mem::take(&mut self.effects) {
            self.take(effect);
        }
        self.gauges_consistent();
    }

    fn take(&mut self, effect: Effect) {
        match effect {
            Effect::Token { request, choice, token, .. } => {
                let (client, got) = self.requests.get_mut(&request).unwrap();
                let choice = choice as usize;
                assert!(!got.ended() && got.reasons[choice].is_none(), "no_token_after_finish");
                got.tokens[choice].push(token);
                let sampling = SamplingParams {
                    choice: choice as u32,
                    seed: client.seed,
                    ..SamplingParams::greedy()
                };
                let mut tokens = client.prompt.clone();
                let mut guide = client.guide_of(choice as u32);
                for (position, token) in got.tokens[choice].iter().enumerate() {
                    let allowed = guide.as_mut().map(|guide| known(guide.as_mut()).clone());
                    let expected = next_token(&sampling, &tokens, allowed.as_ref());
                    let _ = guide.as_mut().map(|guide| guide.accept(*token));
                    assert_eq!(*token, expected, "tokens_match_oracle: {request} at {position}");
                    tokens.push(*token);
                }
            }
            Effect::Finished { request, choice, reason, last, .. } => {
                let (client, got) = self.requests.get_mut(&request).unwrap();
                let tokens = &got.tokens[choice as usize];
                let guide = client.guide_of(choice);
                let room = self.scheduler.gauges().blocks_total * self.config.block_size;
                let sizes = (self.config.max_model_len, room);
                finish_reason_is_right(client, guide, tokens, reason, sizes);
                assert_eq!(got.embedded, client.pooling.is_some(), "{request}");
                assert!(got.reasons[choice as usize].replace(reason).is_none());
                assert_eq!(last, got.ended());
                if last {
                    self.running.remove(&request);
                }
            }
            Effect::Dropped { request, error, .. } => {
                let got = &mut self.requests.get_mut(&request).unwrap().1;
                assert!(!got.ended(), "a request ends once");
                got.dropped = Some(error);
                self.running.remove(&request);
            }
            Effect::PromptLogprobs { request, logprobs } => {
                let (client, got) = self.requests.get_mut(&request).unwrap();
                assert!(got.prompt_logprobs.is_none() && got.tokens[0].is_empty());
                let tokens: Vec<u32> = logprobs.iter().map(|entry| entry.token).collect();
                assert_eq!(tokens, client.prompt[1..], "prompt_logprobs_complete");
                got.prompt_logprobs = Some(tokens.len());
            }
            Effect::Embedding { request, embedding } => {
                let (client, got) = self.requests.get_mut(&request).unwrap();
                assert!(client.pooling.is_some() && !std::mem::replace(&mut got.embedded, true));
                assert_eq!(embedding, super::worker::embedding(&client.prompt), "{request}");
            }
            Effect::Preempted { request, place, swapped, tokens } => {
                self.preemptions += 1;
                self.swaps += u32::from(swapped.is_some());
                self.moved.0 += swapped.unwrap_or(0);
                assert!(swapped.is_none_or(|blocks| blocks > 0 && tokens == 0));
                let own = self.priority(request);
                let most = self.running.iter().map(|request| self.priority(*request)).max();
                assert!(most <= Some(own), "the_least_urgent_is_preempted: {request}");
                if place != RequestPlace::Running {
                    self.running.remove(&request);
                }
            }
            Effect::SwappedIn { blocks, .. } => self.moved.1 += blocks,
            Effect::Rests { request, place } => {
                assert!(place != RequestPlace::Running && !self.requests[&request].1.ended());
                self.running.remove(&request);
            }
            Effect::Drafted { request, tokens, accepted, emitted } => {
                assert!(!self.requests[&request].1.ended(), "drafts_before_the_end");
                assert!(accepted <= tokens && tokens > 0 && accepted <= emitted);
                assert!(emitted <= accepted + 1, "one more than accepted at most");
                self.drafted.0 += tokens;
                self.drafted.1 += accepted;
            }
            Effect::StepDone(step) => {
                self.totals.prompt += step.prompt;
                self.totals.looked_up += step.looked_up;
                self.totals.found += step.found;
                self.totals.generated += step.generated;
                self.totals.recomputed += step.recomputed;
                self.totals.wasted += step.wasted;
            }
            Effect::FirstScheduled { request } | Effect::Resumed { request } => {
                let own = self.priority(request);
                let overtaken = self.requests.iter().find(|(id, (client, got))| {
                    client.priority < own && !got.ended() && !self.running.contains(id)
                });
                assert!(overtaken.is_none(), "nobody_is_overtaken: {request}, {overtaken:?}");
                self.running.insert(request);
            }
        }
    }

    fn priority(&self, request: RequestId) -> i32 {
        self.requests[&request].0.priority
    }

    fn gauges_consistent(&self) {
        let gauges = self.scheduler.gauges();
        let unfinished = self.requests.values().filter(|(_, got)| !got.ended()).count() as u32;
        assert_eq!(gauges.in_flight, unfinished, "gauges_consistent");
        assert_eq!(gauges.running + gauges.waiting + gauges.swapped, gauges.in_flight);
        assert_eq!(gauges.running as usize, self.running.len(), "effects tell who runs");
        assert!(gauges.host_used <= gauges.host_total, "blocks_conserved");
        assert!(gauges.swapped <= gauges.host_used, "who is swapped has blocks there");
        assert!(gauges.blocks_used <= gauges.blocks_total, "blocks_conserved");
        assert!(gauges.steps_in_flight <= self.config.max_steps_in_flight + 1);
        if gauges.running == 0 {
            assert_eq!(gauges.blocks_used, 0, "blocks_conserved: nobody runs");
        }
    }

    /// Runs to the end, with late answers, lost ranks and moves to other replicas, each of which
    /// has `num_blocks` blocks; `before` runs before each step.
    pub(crate) fn disturbed(&mut self, num_blocks: u32, mut before: impl FnMut(&mut Self)) {
        for at in 0..400 {
            before(self);
            let (planned, delivered) = (self.plan(), at % 3 != 2 && self.deliver());
            if at % 41 == 40 {
                self.lost();
                self.ready(num_blocks);
            }
            if at % 67 == 66 {
                self.move_on();
                self.ready(num_blocks);
            }
            if !planned && !delivered && self.scheduler.gauges().in_flight == 0 {
                break;
            }
        }
        self.drain();
    }

    /// Runs until nothing is left to do; everything must finish within a bound on steps.
    pub(crate) fn drain(&mut self) {
        for _ in 0..20_000 {
            let planned = self.plan();
            if !planned && !self.deliver() && !self.woken.take() {
                self.everything_ended();
                return;
            }
        }
        panic!("no_starvation: not finished: {:?}", self.scheduler.gauges());
    }

    fn everything_ended(&self) {
        let gauges = self.scheduler.gauges();
        assert_eq!((gauges.in_flight, gauges.blocks_used), (0, 0), "everything_freed_at_end");
        assert_eq!((gauges.swapped, gauges.host_used), (0, 0), "everything_freed_at_end");
        let generated: usize =
            self.requests.values().flat_map(|(_, got)| &got.tokens).map(Vec::len).sum();
        assert_eq!(self.totals.generated as usize, generated, "every token is in one step");
    }
}

/// The request with which a client that has received this asks to continue.
fn resumed(mut request: GenerateRequest, got: &ClientResult) -> GenerateRequest {
    if got.prompt_logprobs.is_some() {
        request.sampling.iter_mut().for_each(|sampling| sampling.prompt_logprobs = None);
    }
    if !got.has_begun() {
        return request;
    }
    let is_over = |choice: u32| got.reasons[choice as usize].is_some();
    let mut resumed = Resumed::default();
    let guides = std::mem::take(&mut request.guides).into_iter().map(Some);
    let guides = guides.chain(std::iter::repeat_with(|| None));
    for (sampling, guide) in std::mem::take(&mut request.sampling).into_iter().zip(guides) {
        let tokens = got.tokens[sampling.choice as usize].clone();
        if is_over(sampling.choice) {
            resumed.over.push((sampling.choice, tokens.len() as u32));
            continue;
        }
        request.guides.extend(guide.map(|mut guide| {
            for token in &tokens {
                known(guide.as_mut());
                assert_eq!(guide.accept(*token), Ok(Guided::GoesOn));
            }
            guide
        }));
        resumed.choices.push(ResumedChoice { tokens, end: None });
        request.sampling.push(sampling);
    }
    GenerateRequest { resumed: Some(Box::new(resumed)), ..request }
}

/// A client's request, before any token is accepted.
fn asked(id: RequestId, client: &ClientRequest) -> GenerateRequest {
    let sampling = |choice| SamplingParams {
        choice,
        seed: client.seed,
        min_tokens: client.min_tokens,
        prompt_logprobs: client.prompt_logprobs,
        pooling: client.pooling,
        ..SamplingParams::greedy()
    };
    GenerateRequest {
        guides: (0..client.n).filter_map(|choice| client.guide_of(choice)).collect(),
        open_ended: client.open_ended,
        priority: client.priority,
        adapter: AdapterUse::numbered(adapter_of(client.seed)),
        end_tokens: client.end_tokens.clone(),
        ..GenerateRequest::new(
            id,
            client.prompt.clone(),
            (0..client.n).map(sampling).collect(),
            client.max_tokens,
        )
    }
}

fn finish_reason_is_right(
    client: &ClientRequest,
    guide: Option<Box<dyn TokenGuide>>,
    tokens: &[u32],
    reason: FinishReason,
    (max_model_len, cache): (u32, u32),
) {
    let ends = |at: usize| {
        let may = at + 1 >= client.min_tokens as usize;
        may && (client.end_tokens.contains(&tokens[at]) || client.stop_token == Some(tokens[at]))
    };
    let early = (0..tokens.len().saturating_sub(1)).find(|at| ends(*at));
    assert_eq!(early, None, "it should have ended at {early:?} of {tokens:?}");
    if client.pooling.is_some() {
        assert_eq!((reason, tokens), (FinishReason::Complete, &[][..]));
        return;
    }
    match reason {
        FinishReason::EndToken(token) => {
            assert!(client.end_tokens.contains(&token) && tokens.last() == Some(&token));
        }
        FinishReason::StopString => assert_eq!(tokens.last().copied(), client.stop_token),
        FinishReason::Length => {
            let room = max_model_len - client.prompt.len() as u32;
            let most = client.max_tokens.min(room);
            // The cache may have room for fewer: the one that it is in, not one before.
            let is_full = (client.prompt.len() + tokens.len()) as u32 >= cache;
            let by_cache = client.open_ended && !tokens.is_empty() && is_full;
            assert!(tokens.len() as u32 == most || by_cache, "{} of {most}", tokens.len());
            assert!(tokens.len() as u32 <= most);
        }
        FinishReason::Complete => {
            let mut guide = guide.expect("a guide was asked for");
            let over = tokens.iter().position(|it| {
                known(guide.as_mut());
                guide.accept(*it) == Ok(Guided::IsOver)
            });
            assert_eq!(over, Some(tokens.len() - 1));
        }
    }
}
