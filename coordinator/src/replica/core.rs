//! PURE: one replica in operation: drives its scheduler, tracks which rank has finished what,
//! checks for life, ends epochs that hang. Plans and ends of epochs go out through [`Outbound`];
//! the shell is [`super::actor`].
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use shared::ids::{Epoch, RequestId, StepId, WorkerId};
use shared::metrics::labels::{FailoverReason, FencedReason};
use shared::protocol::{StepMasks, StepPlan, StepResult, ToWorker};

use super::agreement::{Agreement, FinishedStep, RankReport};
use super::deadlines::OverdueStep;
use super::driver::{MovedRequest, ReplicaDriver};
use super::stragglers::{PaceChange, Stragglers};
use crate::cluster::migration::QueueShare;
use crate::engine::{EngineError, EventSender, GenerateRequest};
use crate::scheduler::EpochEnd;

/// Interval at which the shell calls [`ReplicaCore::tick`], which checks waits and lost clients.
pub const TICK: Duration = Duration::from_millis(50);
/// An idle replica runs an empty step this often, so that readiness means something.
const CANARY_INTERVAL: Duration = Duration::from_secs(1);

/// What others can read of a replica without asking it.
#[derive(Debug, Default)]
pub struct ReplicaLoad {
    /// Requests accepted and not finished.
    pub in_flight: AtomicU32,
    /// Those of them that have not been in a step of this epoch.
    pub shareable: AtomicU32,
    /// Those of them that a step of this epoch has left waiting.
    pub queued: AtomicU32,
    /// Their sequences that have not ended.
    pub sequences: AtomicU32,
    /// Number of blocks of its KV cache that a request that comes may have.
    pub free_blocks: AtomicU32,
    /// How many requests have reached it so far, from wherever; wraps around.
    pub taken: AtomicU32,
    /// When all ranks last finished a step of this epoch, in milliseconds of the process's clock; 0
    /// means never.
    pub last_step_ms: AtomicU64,
    /// Until when the oldest step in flight may take, likewise; 0 while there is none.
    pub steps_until_ms: AtomicU64,
    /// Whether one of its ranks is silent.
    pub doubtful: AtomicBool,
}

/// A replica is ready if all its ranks finished a step, real or canary, this recently.
const FRESH: Duration = Duration::from_secs(5);

impl ReplicaLoad {
    /// When all ranks last finished a step of this epoch.
    #[must_use]
    pub fn last_step(&self) -> Option<Duration> {
        let last = self.last_step_ms.load(Ordering::Relaxed);
        (last > 0).then(|| Duration::from_millis(last))
    }

    /// Whether all ranks finished a step recently, or have finished one and the next is within its
    /// time limit (prompts take long on slow processors) while no rank is silent.
    #[must_use]
    pub fn is_ready(&self, now: Duration) -> bool {
        let at = |ms: &AtomicU64| Duration::from_millis(ms.load(Ordering::Relaxed));
        let last = at(&self.last_step_ms);
        let steps = now < at(&self.steps_until_ms) && !self.doubtful.load(Ordering::Relaxed);
        !last.is_zero() && (steps || now.saturating_sub(last) <= FRESH)
    }
}

/// A time as others read it: 0 is reserved for none.
fn in_ms(at: Duration) -> u64 {
    u64::try_from(at.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Where a replica's messages go.
pub trait Outbound {
    /// Sends one plan, or one step's masks, to every rank of the epoch.
    ///
    /// # Errors
    /// Why some rank does not get it, in one sentence.
    fn send(&mut self, epoch: Epoch, message: &ToWorker) -> Result<(), String>;
    /// The epoch must end. `hung` ranks have not finished a step that takes too long, if that is
    /// why.
    fn end_epoch(
        &mut self,
        epoch: Epoch,
        cause: FailoverReason,
        reason: String,
        hung: Vec<WorkerId>,
    );
    /// Tells that a rank has computed `times` as long as the others for a while, which is slow, or
    /// that it keeps pace.
    fn report_pace(&mut self, epoch: Epoch, worker: WorkerId, slow: bool, times: f64);
}

/// One replica in operation.
#[derive(Debug)]
pub struct ReplicaCore {
    driver: ReplicaDriver,
    epoch: Option<Epoch>,
    ranks: Vec<Rank>,
    plan: StepPlan,
    masks: StepMasks,
    load: Arc<ReplicaLoad>,
    /// What the ranks report on the same steps.
    agreement: Agreement,
    /// They said different things, or what none can say, or nothing for too long: nothing more of
    /// this epoch counts.
    over: bool,
    /// Rank 0's results not yet accepted, oldest first.
    held: VecDeque<StepResult>,
    stragglers: Stragglers,
    /// Steps that compute nothing and that not all ranks have finished, oldest first; none where
    /// there is one rank alone.
    empty_steps: VecDeque<StepId>,
    /// When a step was last sent in this epoch.
    last_step_sent: Option<Duration>,
}

/// One rank, as its replica sees it.
#[derive(Debug)]
struct Rank {
    worker: WorkerId,
    /// The last step it finished.
    done: StepId,
}

impl ReplicaCore {
    /// Makes a replica without ranks.
    #[must_use]
    pub fn new(driver: ReplicaDriver, load: Arc<ReplicaLoad>) -> Self {
        Self {
            driver,
            epoch: None,
            ranks: Vec::new(),
            agreement: Agreement::default(),
            over: false,
            held: VecDeque::new(),
            stragglers: Stragglers::default(),
            empty_steps: VecDeque::new(),
            plan: StepPlan::default(),
            masks: StepMasks::default(),
            load,
            last_step_sent: None,
        }
    }

    /// The epoch under way.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Sets the waker upon which the shell must call [`ReplicaCore::mask_ready`].
    pub fn wake_with(&mut self, waker: Waker) {
        self.driver.wake_with(waker);
    }

    /// Forgets the prefixes that its KV cache holds.
    pub fn forget_prefixes(&mut self) {
        self.driver.forget_prefixes();
    }

    /// What steps have waited for may be ready.
    pub fn mask_ready(&mut self, now: Duration, outbound: &mut impl Outbound) {
        self.drive(now, outbound);
    }

    /// Takes a request.
    pub fn submit(
        &mut self,
        now: Duration,
        request: GenerateRequest,
        events: EventSender,
        outbound: &mut impl Outbound,
    ) {
        self.driver.submit(now, request, events);
        self.drive(now, outbound);
        self.load.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// Frees what a request holds, if it is here.
    pub fn cancel(&mut self, now: Duration, id: RequestId, outbound: &mut impl Outbound) {
        self.driver.cancel(now, id);
        self.drive(now, outbound);
    }

    /// The replica's ranks are formed: `workers`, in rank order. Returns requests that they can
    /// never hold, for other replicas.
    #[allow(clippy::too_many_arguments, reason = "what a replica has, and its outside")]
    pub fn epoch_formed(
        &mut self,
        now: Duration,
        epoch: Epoch,
        num_blocks: u32,
        host_blocks: u32,
        workers: Vec<WorkerId>,
        outbound: &mut impl Outbound,
    ) -> Vec<MovedRequest> {
        self.epoch = Some(epoch);
        self.ranks = workers.into_iter().map(|worker| Rank { worker, done: StepId(0) }).collect();
        self.driver.set_ranks(u32::try_from(self.ranks.len()).unwrap_or(u32::MAX));
        let too_large = self.driver.ready(now, epoch, num_blocks, host_blocks);
        // The first canary goes out at once: readiness waits for it.
        self.last_step_sent = None;
        self.load.last_step_ms.store(0, Ordering::Relaxed);
        self.agreement.begin(self.ranks.len());
        self.stragglers.begin(self.ranks.len());
        self.over = false;
        self.held.clear();
        self.empty_steps.clear();
        self.drive(now, outbound);
        self.tick(now, outbound);
        too_large
    }

    /// Bounds the tokens of each step of the next epoch; call it before
    /// [`ReplicaCore::epoch_formed`].
    pub fn limit_steps(&mut self, tokens: u32) {
        self.driver.limit_steps(tokens);
    }

    /// An epoch is over. Returns whether it was this replica's present one.
    pub fn epoch_ended(&mut self, now: Duration, epoch: Epoch, end: EpochEnd) -> bool {
        if self.epoch != Some(epoch) {
            return false;
        }
        self.epoch = None;
        self.ranks.clear();
        self.held.clear();
        self.driver.lost(now, end);
        self.load.steps_until_ms.store(0, Ordering::Relaxed);
        true
    }

    /// The epoch is over, and none will follow.
    pub fn retire(&mut self, now: Duration) {
        if let Some(epoch) = self.epoch {
            self.epoch_ended(now, epoch, EpochEnd::Planned);
        }
        self.driver.removed();
    }

    /// Gives up all requests if no epoch is under way, otherwise none.
    pub fn give_up(&mut self, now: Duration, outbound: &mut impl Outbound) -> Vec<MovedRequest> {
        let requests = if self.epoch.is_none() { self.driver.hand_over() } else { Vec::new() };
        self.drive(now, outbound);
        requests
    }

    /// Gives up requests that have not run in this epoch, for a replica with fewer to continue.
    pub fn share(
        &mut self,
        now: Duration,
        queue_share: QueueShare,
        outbound: &mut impl Outbound,
    ) -> Vec<MovedRequest> {
        let requests = self.driver.share(queue_share);
        self.drive(now, outbound);
        requests
    }

    /// Continues another replica's requests, before its own waiting ones unless they were shared.
    pub fn adopt(
        &mut self,
        now: Duration,
        requests: Vec<MovedRequest>,
        outbound: &mut impl Outbound,
    ) {
        let number = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        self.driver.adopt(now, requests);
        self.drive(now, outbound);
        self.load.taken.fetch_add(number, Ordering::Relaxed);
    }

    /// A rank finished a step.
    pub fn step_done(
        &mut self,
        now: Duration,
        worker: WorkerId,
        result: StepResult,
        outbound: &mut impl Outbound,
    ) {
        if self.epoch != Some(result.epoch) {
            return self.driver.apply(now, result);
        }
        let Some(index) = self.ranks.iter().position(|rank| rank.worker == worker) else {
            return self.driver.fenced(FencedReason::NoRank);
        };
        let done = self.ranks[index].done;
        if self.over {
            return self.driver.fenced(FencedReason::StaleEpoch);
        }
        if result.step <= done {
            // Each rank finishes a step once.
            return self.driver.fenced(FencedReason::Repeated);
        }
        if result.step > self.driver.last_step() || result.step.0 - done.0 > 1 {
            self.over = true;
            let reason = format!("{worker} answered {} after {done}", result.step);
            return self.end_epoch(FailoverReason::WrongStep, reason, outbound);
        }
        self.ranks[index].done = result.step;
        if self.ranks.len() > 1 {
            self.note(now, index, &result, outbound);
        }
        if self.ranks.iter().all(|rank| rank.done >= result.step) {
            self.load.last_step_ms.store(in_ms(now), Ordering::Relaxed);
        }
        if index == 0 {
            self.held.push_back(result);
        }
        self.apply_agreed(now, outbound);
    }

    /// Fails everything.
    pub fn fail_all(&mut self, now: Duration, error: &EngineError) {
        self.driver.fail_all(now, error);
    }

    /// Time passes.
    pub fn tick(&mut self, now: Duration, outbound: &mut impl Outbound) {
        let heard = !self.load.doubtful.load(Ordering::Relaxed);
        if let Some(OverdueStep { waited, usual }) = self.driver.tick(now, heard)
            && !self.over
        {
            self.over = true;
            let step = self.driver.oldest_step();
            let slow = self.ranks.iter().filter(|rank| rank.done < step).map(|rank| rank.worker);
            let slow: Vec<WorkerId> = slow.collect();
            let names: Vec<String> = slow.iter().map(ToString::to_string).collect();
            let names = names.join(", ");
            let mut reason = format!("a step took over {} s on {names}", waited.as_secs());
            if let Some(usual) = usual {
                let usual = usual.as_secs_f64();
                reason.push_str(&format!("; such steps take {usual:.3} s at most"));
            }
            self.driver.step_overdue();
            if let Some(epoch) = self.epoch {
                outbound.end_epoch(epoch, FailoverReason::StepOverdue, reason, slow);
            }
        }
        // A step under way is a sign of life itself; anything sent after it would only queue up.
        let quiet = !self.driver.is_stepping()
            && self.last_step_sent.is_none_or(|sent| now.saturating_sub(sent) >= CANARY_INTERVAL);
        if self.epoch.is_some() && quiet && self.driver.canary(now, &mut self.plan) {
            self.send_plan(now, outbound);
        }
        self.drive(now, outbound);
    }

    /// Sends masks that are known, since ranks wait for them, and the steps that can run now: up to
    /// two are in flight.
    fn drive(&mut self, now: Duration, outbound: &mut impl Outbound) {
        self.send_masks(now, outbound);
        let mut is_planned = false;
        while self.epoch.is_some() && self.driver.next_plan(now, &mut self.plan) {
            self.send_plan(now, outbound);
            is_planned = true;
        }
        // Masks of what was just planned, and of what preemption changed.
        self.send_masks(now, outbound);
        let in_flight = u32::try_from(self.driver.num_requests()).unwrap_or(u32::MAX);
        self.load.in_flight.store(in_flight, Ordering::Relaxed);
        let shareable = self.driver.num_shareable();
        self.load.shareable.store(shareable, Ordering::Relaxed);
        // What has come since the last step may be in the next one.
        let left = if is_planned { u32::MAX } else { self.load.queued.load(Ordering::Relaxed) };
        self.load.queued.store(shareable.min(left), Ordering::Relaxed);
        self.load.free_blocks.store(self.driver.num_free_blocks(), Ordering::Relaxed);
        self.load.sequences.store(self.driver.num_sequences(), Ordering::Relaxed);
        let until = self.driver.steps_until().map_or(0, in_ms);
        self.load.steps_until_ms.store(until, Ordering::Relaxed);
    }

    fn send_plan(&mut self, now: Duration, outbound: &mut impl Outbound) {
        let Some(epoch) = self.epoch else { return };
        self.last_step_sent = Some(now);
        if self.plan.sequences.is_empty() && self.ranks.len() > 1 {
            self.empty_steps.push_back(self.plan.step);
        }
        let message = ToWorker::Step(std::mem::take(&mut self.plan));
        let sent = outbound.send(epoch, &message);
        // Reuses the plan's buffers.
        if let ToWorker::Step(plan) = message {
            self.plan = plan;
        }
        if let Err(reason) = sent {
            let reason = format!("a step plan could not be sent: {reason}");
            self.end_epoch(FailoverReason::RankLost, reason, outbound);
        }
    }

    fn send_masks(&mut self, now: Duration, outbound: &mut impl Outbound) {
        while let Some(epoch) = self.epoch
            && self.driver.next_masks(now, &mut self.masks)
        {
            let message = ToWorker::Masks(std::mem::take(&mut self.masks));
            let sent = outbound.send(epoch, &message);
            // Reuses the list.
            if let ToWorker::Masks(masks) = message {
                self.masks = masks;
            }
            if let Err(reason) = sent {
                let reason = format!("a step's masks could not be sent: {reason}");
                self.end_epoch(FailoverReason::RankLost, reason, outbound);
            }
        }
    }

    /// Notes a rank's report on a step, and checks the steps that all ranks have finished.
    fn note(
        &mut self,
        now: Duration,
        rank: usize,
        result: &StepResult,
        outbound: &mut impl Outbound,
    ) {
        let report = RankReport { digest: result.digest, own_us: result.timings.forward_us };
        self.agreement.report(rank, result.step, report);
        while let Some(FinishedStep { step, minority, own_us }) = self.agreement.take_finished() {
            let slowest = own_us.iter().max().copied().unwrap_or_default();
            let fastest = own_us.iter().min().copied().unwrap_or_default();
            // A step that computes nothing tells nothing of steps that do, and is counted nowhere.
            // It is judged nevertheless: a window of such steps ends without a verdict.
            if self.empty_steps.pop_front_if(|empty| *empty == *step).is_none() {
                self.driver.straggler_gap(Duration::from_micros(slowest - fastest));
            }
            for PaceChange { rank, slow, times } in self.stragglers.step(now, own_us) {
                if let (Some(epoch), Some(rank)) = (self.epoch, self.ranks.get(rank)) {
                    outbound.report_pace(epoch, rank.worker, slow, times);
                }
            }
            if !minority.is_empty() && !self.over {
                self.over = true;
                self.driver.ranks_disagreed();
                let workers = minority.iter().filter_map(|rank| self.ranks.get(*rank));
                let workers: Vec<String> = workers.map(|it| it.worker.to_string()).collect();
                let workers = workers.join(", ");
                if let Some(epoch) = self.epoch {
                    let reason = format!("ranks disagree on {step}: {workers}");
                    let cause = FailoverReason::RanksDisagree;
                    outbound.end_epoch(epoch, cause, reason, Vec::new());
                }
            }
        }
    }

    /// Accepts rank 0's results as far as all ranks have finished the steps before: a step depends
    /// on the tokens that every rank has of the one before.
    fn apply_agreed(&mut self, now: Duration, outbound: &mut impl Outbound) {
        let mut applied = false;
        while !self.over
            && let Some(result) = self.held.pop_front_if(|result| {
                self.ranks.iter().all(|rank| rank.done.0 + 1 >= result.step.0)
            })
        {
            self.driver.apply(now, result);
            applied = true;
        }
        if applied {
            self.drive(now, outbound);
        }
    }

    fn end_epoch(&self, cause: FailoverReason, reason: String, outbound: &mut impl Outbound) {
        if let Some(epoch) = self.epoch {
            outbound.end_epoch(epoch, cause, reason, Vec::new());
        }
    }
}
