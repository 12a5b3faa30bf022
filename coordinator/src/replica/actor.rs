//! The actix shell of one replica: its mailbox, its timer, its ranks' links.
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use actix::{Actor, ActorContext as _, AsyncContext as _, Context, Handler, Message, Recipient};
use shared::actor::remote::Encoded;
use shared::clock::Clock;
use shared::ids::{Epoch, ReplicaId, RequestId, StepId, WorkerId};
use shared::protocol::{StepPlan, StepResult, ToWorker};

use super::driver::{Moved, ReplicaDriver};
use crate::engine::{EngineError, EventSender, GenerateRequest};
use crate::links::WorkerLink;

/// How often waits and lost clients are looked at.
const TICK: Duration = Duration::from_millis(50);
/// An idle replica runs an empty step this often, so that readiness means something.
const CANARY_INTERVAL: Duration = Duration::from_secs(1);

/// What others may know of a replica without asking it.
#[derive(Debug, Default)]
pub struct ReplicaLoad {
    /// Requests accepted and not finished.
    pub in_flight: AtomicU32,
    /// When all ranks last finished a step, in milliseconds of the process's clock; 0 is never.
    pub last_step_ms: AtomicU64,
}

/// Drives one replica. Its end is the coordinator's.
#[derive(Debug)]
pub struct ReplicaActor {
    id: ReplicaId,
    driver: ReplicaDriver,
    clock: Arc<dyn Clock>,
    epoch: Option<Epoch>,
    ranks: Vec<Rank>,
    plan: StepPlan,
    load: Arc<ReplicaLoad>,
    /// Told when the epoch must end.
    cluster: Recipient<EpochFailed>,
    /// Takes requests that this replica cannot go on with.
    orphanage: Recipient<Orphans>,
    /// Steps that some ranks have finished and others not, oldest first.
    spread: VecDeque<Spread>,
    /// When a step was last sent in this epoch.
    last_step_sent: Option<Duration>,
}

/// One rank, as its replica sees it.
#[derive(Debug)]
struct Rank {
    worker: WorkerId,
    link: WorkerLink,
    /// The last step it finished.
    done: StepId,
}

/// How long the ranks computed in one step, as far as they have reported.
#[derive(Debug)]
struct Spread {
    step: StepId,
    reported: usize,
    fastest_us: u64,
    slowest_us: u64,
}

/// Run a request.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Submit {
    /// The request.
    pub request: Box<GenerateRequest>,
    /// Where its events go.
    pub events: EventSender,
}

/// Free what a request holds, if it is here.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Cancel(pub RequestId);

/// The replica's ranks are formed.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Ready {
    /// The epoch.
    pub epoch: Epoch,
    /// KV blocks on every rank.
    pub num_blocks: u32,
    /// Links to the ranks, in rank order.
    pub ranks: Vec<WorkerLink>,
    /// Who they are.
    pub workers: Vec<WorkerId>,
}

/// The epoch is over.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Lost {
    /// Which.
    pub epoch: Epoch,
}

/// Give up all requests if the replica cannot go on with them now; answered with [`Orphans`].
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct GiveUp;

/// The replica is given up for good: as [`GiveUp`], and the actor ends.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Retire;

/// Requests that a replica gave up, to be gone on with elsewhere; perhaps none.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Orphans {
    /// Whose they were.
    pub from: ReplicaId,
    /// The requests, oldest first.
    pub requests: Vec<Moved>,
}

/// Go on with another replica's requests.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Adopt(pub Vec<Moved>);

/// A rank finished a step.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct StepDone {
    /// Which worker.
    pub worker: WorkerId,
    /// What it reports.
    pub result: StepResult,
}

/// Fail everything and take nothing more.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct FailAll(pub EngineError);

/// Tells the cluster that an epoch must end.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct EpochFailed {
    /// Of which replica.
    pub replica: ReplicaId,
    /// Which epoch.
    pub epoch: Epoch,
    /// Why.
    pub reason: String,
}

impl ReplicaActor {
    /// A replica without ranks.
    #[must_use]
    pub fn new(
        id: ReplicaId,
        driver: ReplicaDriver,
        clock: Arc<dyn Clock>,
        load: Arc<ReplicaLoad>,
        cluster: Recipient<EpochFailed>,
        orphanage: Recipient<Orphans>,
    ) -> Self {
        Self {
            id,
            driver,
            clock,
            epoch: None,
            ranks: Vec::new(),
            spread: VecDeque::new(),
            plan: StepPlan::default(),
            load,
            cluster,
            orphanage,
            last_step_sent: None,
        }
    }

    /// Sends the steps that can run now: up to two are in flight.
    fn drive(&mut self) {
        if self.epoch.is_some() {
            while self.driver.next_plan(self.clock.now(), &mut self.plan) {
                self.send_plan();
            }
        }
        let in_flight = u32::try_from(self.driver.num_requests()).unwrap_or(u32::MAX);
        self.load.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Encodes the plan once and sends the same bytes to every rank.
    fn send_plan(&mut self) {
        let Some(epoch) = self.epoch else { return };
        self.last_step_sent = Some(self.clock.now());
        let message = ToWorker::Step(std::mem::take(&mut self.plan));
        let sent = Encoded::new(&message).map_err(|error| error.to_string()).and_then(|encoded| {
            self.ranks.iter().try_for_each(|rank| {
                rank.link
                    .tell_encoded(epoch, &encoded)
                    .map_err(|error| format!("{}: {error}", rank.worker))
            })
        });
        // The plan's buffers are used again.
        if let ToWorker::Step(plan) = message {
            self.plan = plan;
        }
        if let Err(reason) = sent {
            self.end_epoch(format!("a step plan could not be sent: {reason}"));
        }
    }

    /// Notes a rank's own time for a step, without its waiting for others: the gap between the
    /// slowest and the fastest is what the others waited.
    fn note_spread(&mut self, result: &StepResult) {
        let own_us = result.timings.forward_us;
        let noted = self.spread.iter_mut().find(|spread| spread.step == result.step);
        if let Some(spread) = noted {
            spread.reported += 1;
            spread.fastest_us = spread.fastest_us.min(own_us);
            spread.slowest_us = spread.slowest_us.max(own_us);
        } else {
            let step = result.step;
            let first = Spread { step, reported: 1, fastest_us: own_us, slowest_us: own_us };
            self.spread.push_back(first);
        }
        while let Some(spread) =
            self.spread.pop_front_if(|spread| spread.reported == self.ranks.len())
        {
            let gap = Duration::from_micros(spread.slowest_us - spread.fastest_us);
            self.driver.straggler_gap(gap);
        }
    }

    /// Answers with all requests when no epoch is under way, with none otherwise.
    fn give_up(&mut self) {
        let requests = if self.epoch.is_none() { self.driver.hand_over() } else { Vec::new() };
        self.orphanage.do_send(Orphans { from: self.id, requests });
        self.drive();
    }

    fn end_epoch(&mut self, reason: String) {
        if let Some(epoch) = self.epoch {
            self.cluster.do_send(EpochFailed { replica: self.id, epoch, reason });
        }
    }

    fn tick(&mut self) {
        let now = self.clock.now();
        if let Some(waited) = self.driver.tick(now) {
            let slow: Vec<String> = self
                .ranks
                .iter()
                .filter(|rank| rank.done < self.driver.last_step())
                .map(|rank| rank.worker.to_string())
                .collect();
            let slow = slow.join(", ");
            self.end_epoch(format!("a step took over {} s on {slow}", waited.as_secs()));
        }
        let quiet =
            self.last_step_sent.is_none_or(|sent| now.saturating_sub(sent) >= CANARY_INTERVAL);
        if self.epoch.is_some() && quiet && self.driver.canary(now, &mut self.plan) {
            self.send_plan();
        }
        self.drive();
    }
}

impl Actor for ReplicaActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(4096);
        ctx.run_interval(TICK, |actor, _| actor.tick());
    }
}

impl Handler<Submit> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, Submit { request, events }: Submit, _ctx: &mut Self::Context) {
        self.driver.submit(*request, events);
        self.drive();
    }
}

impl Handler<Cancel> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, Cancel(id): Cancel, _ctx: &mut Self::Context) {
        self.driver.cancel(self.clock.now(), id);
        self.drive();
    }
}

impl Handler<Ready> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, ready: Ready, _ctx: &mut Self::Context) {
        let Ready { epoch, num_blocks, ranks, workers } = ready;
        self.epoch = Some(epoch);
        self.ranks = ranks
            .into_iter()
            .zip(workers)
            .map(|(link, worker)| Rank { worker, link, done: StepId(0) })
            .collect();
        self.driver.ready(self.clock.now(), epoch, num_blocks);
        // The first canary goes out at once: readiness waits for it.
        self.last_step_sent = None;
        self.spread.clear();
        self.drive();
        self.tick();
    }
}

impl Handler<Lost> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, lost: Lost, _ctx: &mut Self::Context) {
        if self.epoch == Some(lost.epoch) {
            self.epoch = None;
            self.ranks.clear();
            self.spread.clear();
            self.driver.lost(self.clock.now());
        }
        self.give_up();
    }
}

impl Handler<GiveUp> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, _: GiveUp, _ctx: &mut Self::Context) {
        self.give_up();
    }
}

impl Handler<Retire> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, _: Retire, ctx: &mut Self::Context) {
        self.epoch = None;
        self.driver.lost(self.clock.now());
        self.give_up();
        ctx.stop();
    }
}

impl Handler<Adopt> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, Adopt(requests): Adopt, _ctx: &mut Self::Context) {
        self.driver.adopt(requests);
        self.drive();
    }
}

impl Handler<StepDone> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, StepDone { worker, result }: StepDone, _ctx: &mut Self::Context) {
        if self.epoch != Some(result.epoch) {
            return self.driver.apply(self.clock.now(), result);
        }
        let Some(index) = self.ranks.iter().position(|rank| rank.worker == worker) else { return };
        self.ranks[index].done = self.ranks[index].done.max(result.step);
        if self.ranks.len() > 1 {
            self.note_spread(&result);
        }
        if self.ranks.iter().all(|rank| rank.done >= result.step) {
            let now_ms = u64::try_from(self.clock.now().as_millis()).unwrap_or(u64::MAX);
            self.load.last_step_ms.store(now_ms.max(1), Ordering::Relaxed);
        }
        if index == 0 {
            self.driver.apply(self.clock.now(), result);
            self.drive();
        }
    }
}

impl Handler<FailAll> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, FailAll(error): FailAll, _ctx: &mut Self::Context) {
        self.driver.fail_all(self.clock.now(), &error);
    }
}
