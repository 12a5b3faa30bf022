//! The worker actor: one per process. Dials the coordinator for ever, shakes hands, hands what it
//! is told to the executor, and sends what the executor says.
//!
//! Its ends: asked to shut down by the coordinator, told to stop by the process ([`StopWorker`]),
//! or refused for a reason that trying again cannot change. At an end it sends the last lines of
//! its log and says goodbye. Losing the link is none: the epoch ends, the weights stay, and it
//! dials again.
//!
//! - `dialling`: how it finds its coordinator
//! - `uplink`: the way to the coordinator, as those who send know it
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor, ActorContext as _, AsyncContext as _, Context, Handler, Message};
use shared::actor::ActorRuntime;
use shared::actor::exchange::PeerId;
use shared::actor::link::join::{REDIAL_MIN, Unreached};
use shared::actor::link::{LinkEvent, LinkHandle};
use shared::actor::liveness::LivenessConfig;
use shared::clock::Clock;
use shared::ids::{Epoch, WorkerId};
use shared::log::{LogLimits, SharedLog};
use shared::membership::{CoordinatorAddress, Destination};
use shared::protocol::{FromWorker, Hello, Parting, ToWorker};
use shared::wire::auth::Secret;
use shared::wire::codec;
use shared::wire::frame::Frame;
use tokio::sync::oneshot;

pub use self::uplink::Uplink;
use crate::executor::{Executor, ExecutorCommand, ExecutorError};

mod dialling;
mod uplink;

/// New log lines go to the coordinator this often, a bounded number of them at a time.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// An executor that has not left an epoch for so long, and does not get on with what it is in,
/// never will: the process ends, so that another one takes its place. Longer than the largest
/// matrix takes to load from a slow disk, and than steps of large models on slow CPUs take, which
/// nothing breaks off.
const RELEASE_PATIENCE: Duration = Duration::from_secs(600);
/// Told to end, an executor that has not left its epoch for so long is taken for one that hangs.
const HANGS_AFTER: Duration = Duration::from_secs(10);
/// How long the last words may take to be delivered.
const GOODBYE_DEADLINE: Duration = Duration::from_millis(500);

/// Why a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It was asked to.
    Shutdown {
        /// Why.
        reason: String,
    },
    /// The coordinator will not have it.
    Refused {
        /// Why, in the coordinator's words.
        reason: String,
    },
    /// Its device computes no more.
    DeviceLost {
        /// Why, in one line.
        reason: String,
    },
    /// Its own thread of execution is gone.
    Failed {
        /// What happened.
        message: String,
    },
}

/// What the worker actor needs.
#[derive(Debug)]
pub struct WorkerConfig {
    /// Where the coordinator is.
    pub coordinator: CoordinatorAddress,
    /// Who this worker is; what it was before is filled in.
    pub hello: Hello,
    /// How the link is watched.
    pub liveness: LivenessConfig,
    /// The process's clock.
    pub clock: Arc<dyn Clock>,
    /// The cluster's secret.
    pub secret: Option<Secret>,
    /// The last lines of the process's log.
    pub log: SharedLog,
    /// The process's named actors.
    pub actors: ActorRuntime,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct WorkerActor {
    config: Arc<WorkerConfig>,
    executor: Executor,
    uplink: Uplink,
    link: Option<LinkHandle>,
    /// The link, as named actors know it.
    peer: Option<PeerId>,
    /// The coordinator dialled last.
    dialled: Option<Destination>,
    /// The slot at the last coordinator.
    slot: Option<WorkerId>,
    /// Counts links, so that events of an older one are told apart.
    generation: u64,
    redial: Duration,
    unreached: Unreached,
    /// Attempts to dial.
    dials: u64,
    /// Lines of the log up to here were sent over the present link.
    logged: u64,
    end: Option<oneshot::Sender<WorkerEnd>>,
    /// The goodbye is on its way; this is the end when it is delivered.
    ending: Option<WorkerEnd>,
}

impl WorkerActor {
    /// Makes the actor; `end` is told once when it is over.
    #[must_use]
    pub fn new(
        config: WorkerConfig,
        executor: Executor,
        uplink: Uplink,
        end: oneshot::Sender<WorkerEnd>,
    ) -> Self {
        Self {
            config: Arc::new(config),
            executor,
            uplink,
            link: None,
            peer: None,
            dialled: None,
            slot: None,
            generation: 0,
            redial: REDIAL_MIN,
            unreached: Unreached::default(),
            dials: 0,
            logged: 0,
            end: Some(end),
            ending: None,
        }
    }

    /// Has stats reported by a timer, until the link ends.
    fn report_every(&self, ctx: &mut Context<Self>, interval: Duration) {
        let generation = self.generation;
        let addr = ctx.address();
        actix::spawn(async move {
            let mut timer = tokio::time::interval(interval);
            while addr.send(ReportDue { generation }).await.unwrap_or(false) {
                timer.tick().await;
            }
        });
    }

    fn lost(&mut self, ctx: &mut Context<Self>, reason: &str) {
        self.generation += 1;
        self.link = None;
        self.leave_peer(reason);
        self.uplink.set(None);
        self.executor.abort_all();
        let pause = self.pause();
        self.dial(ctx, pause);
    }

    /// Sends what was logged since the last time. Rides on no step: a busy executor is not held up.
    fn send_log(&mut self) {
        if self.link.is_none() {
            return;
        }
        let (lines, next) = {
            let log = self.config.log.ring();
            (log.since(self.logged, LogLimits::SENT), log.next())
        };
        // A link that takes no message is over, and the next one begins with all of them.
        self.logged = next;
        if !lines.lines.is_empty() {
            self.uplink.tell(Epoch(0), &FromWorker::Logs(lines));
        }
    }

    /// Says why it ends, and ends when that is delivered or takes too long.
    fn leave(&mut self, ctx: &mut Context<Self>, end: WorkerEnd) {
        if self.ending.is_some() {
            return;
        }
        if self.link.is_none() {
            return self.finish(ctx, end);
        }
        let reason = match &end {
            WorkerEnd::Shutdown { reason } | WorkerEnd::Refused { reason } => reason.clone(),
            WorkerEnd::Failed { message } | WorkerEnd::DeviceLost { reason: message } => {
                message.clone()
            }
        };
        self.send_log();
        // The coordinator answers by closing the link.
        let parting = match end {
            WorkerEnd::Shutdown { .. } | WorkerEnd::Refused { .. } => Parting::OnPurpose,
            WorkerEnd::Failed { .. } => Parting::Failed,
            WorkerEnd::DeviceLost { .. } => Parting::DeviceLost,
        };
        self.uplink.tell(Epoch(0), &FromWorker::Goodbye { reason, parting });
        self.ending = Some(end);
        ctx.run_later(GOODBYE_DEADLINE, |actor, ctx| {
            if let Some(end) = actor.ending.take() {
                actor.finish(ctx, end);
            }
        });
    }

    /// Ends when the executor hangs in an epoch that is over.
    fn watch_executor(&mut self, ctx: &mut Context<Self>) {
        if self.executor.leaving_for().is_some_and(|lasts| lasts >= RELEASE_PATIENCE) {
            let seconds = RELEASE_PATIENCE.as_secs();
            let message = format!(
                "the executor has not left its epoch {seconds} s after it was told to, and makes \
                 no progress"
            );
            tracing::error!(message, "the worker cannot go on");
            self.leave(ctx, WorkerEnd::Failed { message });
        }
    }

    fn leave_peer(&mut self, reason: &str) {
        if let Some(peer) = self.peer.take() {
            self.config.actors.peer_lost(peer, reason);
        }
    }

    fn finish(&mut self, ctx: &mut Context<Self>, end: WorkerEnd) {
        self.leave_peer("the worker ends");
        if let Some(sender) = self.end.take() {
            let _ = sender.send(end);
        }
        ctx.stop();
    }

    fn take(&mut self, ctx: &mut Context<Self>, frame: &Frame) {
        let message = match codec::decode_message::<ToWorker>(&frame.body) {
            Ok(message) => message,
            Err(error) => {
                tracing::error!(%error, "the coordinator sent a message that cannot be read");
                if let Some(link) = &self.link {
                    link.close();
                }
                return;
            }
        };
        let queued = match message {
            ToWorker::Form(form) => self.executor.command(ExecutorCommand::Form(form)),
            ToWorker::Start(start) => self.executor.command(ExecutorCommand::Start(start)),
            ToWorker::Step(plan) => self.executor.command(ExecutorCommand::Step(plan)),
            ToWorker::Abort { epoch } => {
                self.executor.abort(epoch);
                Ok(())
            }
            ToWorker::GroupId(id) => {
                self.executor.tell_group_id(id);
                Ok(())
            }
            ToWorker::Masks(masks) => {
                self.executor.tell_masks(masks);
                Ok(())
            }
            ToWorker::Shutdown { reason, again } => {
                // One that hangs has not done what it was told: it is to be started again, unless
                // it is not wanted any more.
                let hangs = self.executor.leaving_for().is_some_and(|it| it >= HANGS_AFTER);
                return self.leave(
                    ctx,
                    match hangs && again {
                        true => WorkerEnd::Failed { message: reason },
                        false => WorkerEnd::Shutdown { reason },
                    },
                );
            }
        };
        if let Err(error) = queued {
            tracing::error!(%error, "the worker cannot go on");
            self.leave(ctx, WorkerEnd::Failed { message: error.to_string() });
        }
    }
}

impl Actor for WorkerActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(1024);
        ctx.run_interval(LOG_INTERVAL, |actor, ctx| {
            actor.send_log();
            actor.watch_executor(ctx);
        });
        if let Some(ended) = self.executor.ended() {
            let addr = ctx.address();
            actix::spawn(async move {
                let _ = ended.await;
                addr.do_send(ExecutorEnded);
            });
        }
        self.follow(ctx);
        self.dial(ctx, Duration::ZERO);
    }
}

/// The process is told to stop: the worker says goodbye and ends.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct StopWorker {
    /// Why, for the coordinator's records.
    pub reason: String,
    /// Its device computes no more; otherwise somebody wanted it to stop.
    pub device_lost: bool,
}

impl Handler<StopWorker> for WorkerActor {
    type Result = ();

    fn handle(&mut self, stop: StopWorker, ctx: &mut Self::Context) {
        let StopWorker { reason, device_lost } = stop;
        let end = match device_lost {
            true => WorkerEnd::DeviceLost { reason },
            false => WorkerEnd::Shutdown { reason },
        };
        self.leave(ctx, end);
    }
}

/// The executor's thread is gone.
#[derive(Message)]
#[rtype(result = "()")]
struct ExecutorEnded;

impl Handler<ExecutorEnded> for WorkerActor {
    type Result = ();

    fn handle(&mut self, _: ExecutorEnded, ctx: &mut Self::Context) {
        let message = ExecutorError::Ended.to_string();
        tracing::error!(message, "the worker cannot go on");
        self.leave(ctx, WorkerEnd::Failed { message });
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct FromLink {
    generation: u64,
    event: LinkEvent,
}

/// Time for a report; answers whether the link it was meant for still lives.
#[derive(Message)]
#[rtype(result = "bool")]
struct ReportDue {
    generation: u64,
}

impl Handler<ReportDue> for WorkerActor {
    type Result = bool;

    fn handle(&mut self, due: ReportDue, _ctx: &mut Self::Context) -> bool {
        let current = due.generation == self.generation;
        if current {
            // A full queue means a busy executor, whose stats ride on its steps; of one that has
            // ended `ExecutorEnded` tells.
            let _ = self.executor.report();
        }
        current
    }
}

impl Handler<FromLink> for WorkerActor {
    type Result = ();

    fn handle(&mut self, message: FromLink, ctx: &mut Self::Context) {
        if message.generation != self.generation {
            return;
        }
        match message.event {
            LinkEvent::Frame(frame) => self.take(ctx, &frame),
            LinkEvent::Suspect => tracing::warn!("the coordinator is silent"),
            LinkEvent::Alive => tracing::info!("the coordinator answers again"),
            LinkEvent::Closed { .. } if self.ending.is_some() => {
                self.link = None;
                if let Some(end) = self.ending.take() {
                    self.finish(ctx, end);
                }
            }
            LinkEvent::Closed { reason } => {
                tracing::warn!(%reason, "the link to the coordinator ended; dialling again");
                self.lost(ctx, &reason.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests;
