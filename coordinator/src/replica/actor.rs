//! The actix shell of one replica: its mailbox, its timer, its ranks' links.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use actix::{
    Actor, ActorContext as _, AsyncContext as _, Context, Handler, Message, Recipient,
    WeakRecipient,
};
use shared::actor::peer::Encoded;
use shared::clock::Clock;
use shared::ids::{Epoch, ReplicaId, RequestId, WorkerId};
use shared::metrics::labels::FailoverReason;
use shared::protocol::{StepResult, ToWorker};

pub use super::core::ReplicaLoad;
use super::core::{Outbound, ReplicaCore, TICK};
use super::driver::{MovedRequest, ReplicaDriver};
use crate::cluster::migration::QueueShare;
use crate::engine::{EngineError, EventSender, GenerateRequest};
use crate::links::WorkerLink;
use crate::scheduler::EpochEnd;

/// Drives one replica. It ends with the coordinator or with [`Retire`].
#[derive(Debug)]
pub struct ReplicaActor {
    core: ReplicaCore,
    outbound: ReplicaLinks,
    clock: Arc<dyn Clock>,
    /// Whether a [`MaskReady`] is on its way.
    woken: Arc<AtomicBool>,
}

/// The ranks' links, and the cluster.
#[derive(Debug)]
struct ReplicaLinks {
    id: ReplicaId,
    ranks: Vec<(WorkerId, WorkerLink)>,
    /// Notified when the epoch must end.
    cluster: Recipient<EpochFailed>,
    /// Takes requests that this replica cannot continue.
    migrations: Recipient<MigrateRequests>,
    /// Notified of ranks that hold the others up.
    paces: Recipient<RankPace>,
}

impl ReplicaLinks {
    fn migrates(&self, requests: Vec<MovedRequest>, shared: bool) {
        self.migrations.do_send(MigrateRequests { from: self.id, requests, shared });
    }
}

impl Outbound for ReplicaLinks {
    /// Encodes the message once and sends the same bytes to every rank.
    fn send(&mut self, epoch: Epoch, message: &ToWorker) -> Result<(), String> {
        let encoded = Encoded::new(message).map_err(|error| error.to_string())?;
        self.ranks.iter().try_for_each(|(worker, link)| {
            link.tell_encoded(epoch, &encoded).map_err(|error| format!("{worker}: {error}"))
        })
    }

    fn end_epoch(
        &mut self,
        epoch: Epoch,
        cause: FailoverReason,
        reason: String,
        hung: Vec<WorkerId>,
    ) {
        self.cluster.do_send(EpochFailed { replica: self.id, epoch, cause, reason, hung });
    }

    fn report_pace(&mut self, epoch: Epoch, worker: WorkerId, slow: bool, times: f64) {
        self.paces.do_send(RankPace { replica: self.id, epoch, worker, slow, times });
    }
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

/// The replica's ranks are formed; answered with [`MigrateRequests`] that its KV cache has no room
/// for.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct EpochFormed {
    /// The epoch.
    pub epoch: Epoch,
    /// KV blocks on every rank.
    pub num_blocks: u32,
    /// Blocks in host memory, likewise.
    pub host_blocks: u32,
    /// Maximum number of tokens in one step.
    pub step_tokens: u32,
    /// Links to the ranks, in rank order.
    pub ranks: Vec<WorkerLink>,
    /// The ranks' workers.
    pub workers: Vec<WorkerId>,
}

/// The epoch is over.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct EpochEnded {
    /// The epoch.
    pub epoch: Epoch,
    /// Whether it was planned.
    pub end: EpochEnd,
}

/// Give up all requests if the replica cannot continue them now; answered with [`MigrateRequests`].
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct GiveUpRequests;

/// Give requests that have not run in this epoch to replicas with fewer; answered with
/// [`MigrateRequests`].
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct ShareQueue(pub QueueShare);

/// Forget the prefixes that the KV cache holds.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct ForgetPrefixes;

/// The replica is given up for good: like [`GiveUpRequests`], and the actor ends.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Retire;

/// Requests that a replica gave up, to be continued elsewhere; possibly none.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct MigrateRequests {
    /// The replica they come from.
    pub from: ReplicaId,
    /// The requests, oldest first.
    pub requests: Vec<MovedRequest>,
    /// Whether it could have kept them: they waited there, and may run sooner elsewhere.
    pub shared: bool,
}

/// Continue another replica's requests.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct AdoptRequests(pub Vec<MovedRequest>);

/// A rank finished a step.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct StepDone {
    /// The worker.
    pub worker: WorkerId,
    /// What it reports.
    pub result: StepResult,
}

/// Masks that steps wait for are ready.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
struct MaskReady;

/// Sends [`MaskReady`] unless one is on its way: the masks of a step may become ready together, and
/// each message makes the replica look at all of them. Does not keep the actor alive.
#[derive(Debug)]
struct MaskWaker {
    replica: WeakRecipient<MaskReady>,
    woken: Arc<AtomicBool>,
}

impl Wake for MaskWaker {
    fn wake(self: Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel)
            && let Some(replica) = self.replica.upgrade()
        {
            replica.do_send(MaskReady);
        }
    }
}

/// Fail all requests and accept no more.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct FailAll(pub EngineError);

/// Tells the cluster that an epoch must end.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct EpochFailed {
    /// The replica.
    pub replica: ReplicaId,
    /// The epoch.
    pub epoch: Epoch,
    /// Why, for metrics.
    pub cause: FailoverReason,
    /// Why, in words.
    pub reason: String,
    /// Ranks that have not finished a step that takes too long.
    pub hung: Vec<WorkerId>,
}

/// Tells the cluster that a rank computes much slower than the others of its replica, or keeps pace
/// again.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RankPace {
    /// The replica.
    pub replica: ReplicaId,
    /// The epoch.
    pub epoch: Epoch,
    /// The rank's worker.
    pub worker: WorkerId,
    /// Whether it is slow.
    pub slow: bool,
    /// How many times as long as the others it computes.
    pub times: f64,
}

impl ReplicaActor {
    /// Makes a replica without ranks.
    #[must_use]
    pub fn new(
        id: ReplicaId,
        driver: ReplicaDriver,
        clock: Arc<dyn Clock>,
        load: Arc<ReplicaLoad>,
        cluster: Recipient<EpochFailed>,
        migrations: Recipient<MigrateRequests>,
        paces: Recipient<RankPace>,
    ) -> Self {
        let outbound = ReplicaLinks { id, ranks: Vec::new(), cluster, migrations, paces };
        let core = ReplicaCore::new(driver, load);
        Self { core, outbound, clock, woken: Arc::default() }
    }

    /// Answers with all requests if no epoch is under way, otherwise with none.
    fn give_up(&mut self) {
        let requests = self.core.give_up(self.clock.now(), &mut self.outbound);
        self.outbound.migrates(requests, false);
    }
}

impl Actor for ReplicaActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(4096);
        let replica = ctx.address().downgrade().recipient();
        self.core.wake_with(Arc::new(MaskWaker { replica, woken: self.woken.clone() }).into());
        ctx.run_interval(TICK, |actor, _| {
            actor.core.tick(actor.clock.now(), &mut actor.outbound);
        });
    }
}

impl Handler<Submit> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, Submit { request, events }: Submit, _ctx: &mut Self::Context) {
        self.core.submit(self.clock.now(), *request, events, &mut self.outbound);
    }
}

impl Handler<Cancel> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, Cancel(id): Cancel, _ctx: &mut Self::Context) {
        self.core.cancel(self.clock.now(), id, &mut self.outbound);
    }
}

impl Handler<EpochFormed> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, ready: EpochFormed, _ctx: &mut Self::Context) {
        let EpochFormed { epoch, num_blocks, host_blocks, step_tokens, ranks, workers } = ready;
        self.core.limit_steps(step_tokens);
        self.outbound.ranks = workers.iter().copied().zip(ranks).collect();
        let now = self.clock.now();
        let outbound = &mut self.outbound;
        let requests =
            self.core.epoch_formed(now, epoch, num_blocks, host_blocks, workers, outbound);
        self.outbound.migrates(requests, false);
    }
}

impl Handler<EpochEnded> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, lost: EpochEnded, _ctx: &mut Self::Context) {
        if self.core.epoch_ended(self.clock.now(), lost.epoch, lost.end) {
            self.outbound.ranks.clear();
        }
        self.give_up();
    }
}

impl Handler<GiveUpRequests> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, _: GiveUpRequests, _ctx: &mut Self::Context) {
        self.give_up();
    }
}

impl Handler<ShareQueue> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, ShareQueue(queue_share): ShareQueue, _ctx: &mut Self::Context) {
        let requests = self.core.share(self.clock.now(), queue_share, &mut self.outbound);
        self.outbound.migrates(requests, true);
    }
}

impl Handler<ForgetPrefixes> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, _: ForgetPrefixes, _ctx: &mut Self::Context) {
        self.core.forget_prefixes();
    }
}

impl Handler<Retire> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, _: Retire, ctx: &mut Self::Context) {
        self.core.retire(self.clock.now());
        self.outbound.ranks.clear();
        self.give_up();
        ctx.stop();
    }
}

impl Handler<AdoptRequests> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, AdoptRequests(requests): AdoptRequests, _ctx: &mut Self::Context) {
        self.core.adopt(self.clock.now(), requests, &mut self.outbound);
    }
}

impl Handler<StepDone> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, StepDone { worker, result }: StepDone, _ctx: &mut Self::Context) {
        self.core.step_done(self.clock.now(), worker, result, &mut self.outbound);
    }
}

impl Handler<MaskReady> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, _: MaskReady, _ctx: &mut Self::Context) {
        // Before the masks are looked at: what becomes ready from here on wakes again.
        self.woken.swap(false, Ordering::AcqRel);
        self.core.mask_ready(self.clock.now(), &mut self.outbound);
    }
}

impl Handler<FailAll> for ReplicaActor {
    type Result = ();

    fn handle(&mut self, FailAll(error): FailAll, _ctx: &mut Self::Context) {
        self.core.fail_all(self.clock.now(), &error);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Counts [`MaskReady`].
    #[derive(Default)]
    struct Woken {
        times: u32,
    }

    #[derive(Message)]
    #[rtype(result = "u32")]
    struct Times;

    impl Actor for Woken {
        type Context = Context<Self>;
    }

    impl Handler<MaskReady> for Woken {
        type Result = ();

        fn handle(&mut self, _: MaskReady, _ctx: &mut Self::Context) {
            self.times += 1;
        }
    }

    impl Handler<Times> for Woken {
        type Result = u32;

        fn handle(&mut self, _: Times, _ctx: &mut Self::Context) -> u32 {
            self.times
        }
    }

    #[actix::test]
    async fn masks_that_become_ready_together_wake_once() {
        let (actor, woken) = (Woken::default().start(), Arc::new(AtomicBool::default()));
        let replica = actor.downgrade().recipient();
        let waker = Waker::from(Arc::new(MaskWaker { replica, woken: woken.clone() }));
        for _ in 0..5 {
            waker.wake_by_ref();
        }
        assert_eq!(actor.send(Times).await.unwrap(), 1);
        woken.swap(false, Ordering::AcqRel);
        waker.wake_by_ref();
        assert_eq!(actor.send(Times).await.unwrap(), 2, "the replica has looked since");
    }
}
