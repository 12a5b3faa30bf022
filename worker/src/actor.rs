//! The worker actor, one per process. It dials the coordinator for ever, performs the handshake,
//! passes commands to the executor, and sends the executor's messages.
//!
//! It ends if the coordinator asks it to shut down, if the process tells it to stop
//! ([`StopWorker`]), or if it is refused for a reason that trying again cannot change: by a
//! coordinator that has proved itself, or by anybody before one has welcomed it. It lets the
//! process's named actors finish, sends the last lines of its log and says goodbye. Losing the link
//! does not end it: the epoch ends, the weights stay, and it dials again.
//!
//! - `dialling`: how it finds its coordinator
//! - `fetching`: how it gets the files of models of the hub, before it joins or becomes a rank
//! - `uplink`: the sending side of the link to the coordinator
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor, ActorContext as _, AsyncContext as _, Context, Handler, Message};
use shared::actor::ActorRuntime;
use shared::actor::exchange::PeerId;
use shared::actor::link::join::{REDIAL_MIN, Unreached};
use shared::actor::link::{LinkEvent, LinkHandle};
use shared::actor::liveness::LivenessConfig;
use shared::clock::Clock;
use shared::hub::Hub;
use shared::ids::{Epoch, WorkerId};
use shared::log::{LogLimits, SharedLog};
use shared::membership::{CoordinatorAddress, Destination};
use shared::protocol::{ExitReason, FromWorker, Hello, ToFetch, ToWorker, Trouble};
use shared::wire::codec;
use shared::wire::frame::Frame;
use shared::wire::keyring::Keyring;
use tokio::sync::oneshot;

use self::fetching::ModelFetch;
pub use self::uplink::Uplink;
use crate::executor::{Executor, ExecutorCommand, ExecutorError};

mod dialling;
mod fetching;
mod uplink;

/// Interval at which new log lines are sent to the coordinator, a bounded number at a time.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// An executor that has not left an epoch for this long, and makes no progress, never will: the
/// process ends, so that another one can take its place. Longer than loading the largest matrix
/// from a slow disk takes, which cannot be interrupted.
const RELEASE_PATIENCE: Duration = Duration::from_secs(600);
/// How long delivering the goodbye may take.
const GOODBYE_DEADLINE: Duration = Duration::from_millis(500);

/// Why a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It was asked to.
    Shutdown {
        /// Why.
        reason: String,
    },
    /// The coordinator refused it.
    Refused {
        /// Why, in the coordinator's words.
        reason: String,
    },
    /// Its device no longer works.
    DeviceLost {
        /// Why, in one line.
        reason: String,
    },
    /// Its executor ended, hangs, or accepts no more commands.
    Failed {
        /// What happened.
        message: String,
    },
}

/// Configuration of the worker actor.
#[derive(Debug)]
pub struct WorkerConfig {
    /// How to find the coordinator.
    pub coordinator: CoordinatorAddress,
    /// This worker's hello; the actor fills in `rejoin`.
    pub hello: Hello,
    /// Intervals of the link's failure detector.
    pub liveness: LivenessConfig,
    /// The process's clock.
    pub clock: Arc<dyn Clock>,
    /// The cluster's secrets, if it has any.
    pub secret: Option<Keyring>,
    /// The last lines of the process's log.
    pub log: SharedLog,
    /// The process's named actors.
    pub actors: ActorRuntime,
    /// Where models of the hub come from, or why there is none.
    pub hub: Result<Hub, String>,
    /// How long the process's named actors may take to finish what they have when it is to end.
    pub drain_timeout: Duration,
}

/// The worker actor; see the module's documentation.
#[derive(Debug)]
pub struct WorkerActor {
    config: Arc<WorkerConfig>,
    executor: Executor,
    uplink: Uplink,
    link: Option<LinkHandle>,
    /// The link's id in the actor runtime.
    peer: Option<PeerId>,
    /// The coordinator that was dialled last.
    dialled: Option<Destination>,
    /// The slot at the last coordinator.
    slot: Option<WorkerId>,
    /// What a coordinator has it remember, and since when.
    trouble: (Trouble, Duration),
    /// Number of the link, to recognise events of an older one.
    generation: u64,
    redial: Duration,
    unreached: Unreached,
    /// Number of attempts to dial.
    dials: u64,
    /// Number of the first log line not yet sent over the current link.
    logged: u64,
    end: Option<oneshot::Sender<WorkerEnd>>,
    /// Whether the process's named actors are finishing, before the goodbye.
    finishes: bool,
    /// Set while the goodbye is being delivered: how the worker will have ended.
    ending: Option<WorkerEnd>,
    /// What the last coordinator wanted it to fetch.
    to_fetch: Option<ToFetch>,
    /// The last fetching; called off, if it is under way, when this is dropped.
    fetching: Option<ModelFetch>,
}

impl WorkerActor {
    /// Creates the actor; `end` is told once, when it ends.
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
            trouble: (Trouble::default(), Duration::ZERO),
            generation: 0,
            redial: REDIAL_MIN,
            unreached: Unreached::default(),
            dials: 0,
            logged: 0,
            end: Some(end),
            finishes: false,
            ending: None,
            to_fetch: None,
            fetching: None,
        }
    }

    /// Has stats reported on a timer until the link ends.
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
        self.uplink.health().unlinked(reason.to_owned());
        self.executor.abort_all();
        let pause = self.pause();
        self.dial(ctx, pause);
    }

    /// Sends new log lines. Independent of steps, so a busy executor does not delay it.
    fn send_log(&mut self) {
        if self.link.is_none() {
            return;
        }
        let (lines, next) = {
            let log = self.config.log.ring();
            (log.since(self.logged, LogLimits::SENT), log.next())
        };
        // A link that accepts no message has ended, and the next one begins with all lines.
        self.logged = next;
        if !lines.lines.is_empty() {
            self.uplink.tell(Epoch(0), &FromWorker::Logs(lines));
        }
    }

    /// Ends: says goodbye, first letting the process's named actors finish if it is told to end.
    fn leave(&mut self, ctx: &mut Context<Self>, end: WorkerEnd) {
        self.uplink.health().ends();
        if !matches!(end, WorkerEnd::Shutdown { .. }) {
            return self.say_goodbye(ctx, end);
        }
        if std::mem::replace(&mut self.finishes, true) {
            return;
        }
        // The link stays: their replies go over it, and they may ask others.
        let (actors, patience) = (self.config.actors.clone(), self.config.drain_timeout);
        let addr = ctx.address();
        actix::spawn(async move {
            actors.finish(patience).await;
            addr.do_send(ActorsFinished(end));
        });
    }

    /// Says goodbye, and ends when that is delivered or takes too long.
    fn say_goodbye(&mut self, ctx: &mut Context<Self>, end: WorkerEnd) {
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
        let exit = match end {
            WorkerEnd::Shutdown { .. } | WorkerEnd::Refused { .. } => ExitReason::OnPurpose,
            WorkerEnd::Failed { .. } => ExitReason::Failed,
            WorkerEnd::DeviceLost { .. } => ExitReason::DeviceLost,
        };
        self.uplink.tell(Epoch(0), &FromWorker::Goodbye { reason, exit });
        self.ending = Some(end);
        ctx.run_later(GOODBYE_DEADLINE, |actor, ctx| {
            if let Some(end) = actor.ending.take() {
                actor.finish(ctx, end);
            }
        });
    }

    /// Ends the worker if the executor hangs in an epoch that has ended.
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
            ToWorker::Form(form) => {
                self.uplink.health().forms(form.epoch);
                self.executor.command(ExecutorCommand::Form(form))
            }
            ToWorker::Start(start) => self.executor.command(ExecutorCommand::Start(start)),
            ToWorker::Step(plan) => self.executor.command(ExecutorCommand::Step(plan)),
            ToWorker::Adapter(change) => self.executor.command(ExecutorCommand::Adapter(change)),
            ToWorker::Abort { epoch } => {
                self.uplink.health().aborted(epoch);
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
            ToWorker::Remember(trouble) => {
                self.trouble = (trouble, self.config.clock.now());
                Ok(())
            }
            ToWorker::Fetch(to_fetch) => {
                self.fetch_ahead(ctx, to_fetch);
                Ok(())
            }
            ToWorker::Shutdown { reason, again } => {
                // A worker that hangs has not done what it was told: it must be started again,
                // unless it is no longer wanted. Supervisors go by how it ends.
                return self.leave(
                    ctx,
                    match again {
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

/// Tells the worker to say goodbye and end, because the process stops.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct StopWorker {
    /// Why, for the coordinator's records.
    pub reason: String,
    /// Whether its device no longer works; otherwise someone wanted it to stop.
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

/// The process's named actors have finished, or took too long: the worker ends in this way.
#[derive(Message)]
#[rtype(result = "()")]
struct ActorsFinished(WorkerEnd);

impl Handler<ActorsFinished> for WorkerActor {
    type Result = ();

    fn handle(&mut self, ActorsFinished(end): ActorsFinished, ctx: &mut Self::Context) {
        self.say_goodbye(ctx, end);
    }
}

/// The executor's thread has ended.
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

/// A report is due; answers whether the link it was meant for is still the current one.
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
            // A full queue means a busy executor, whose stats are sent with its steps;
            // `ExecutorEnded` reports one that has ended.
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
