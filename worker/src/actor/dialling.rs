//! How the worker actor finds its coordinator: it dials for ever, and follows the current leader.
use std::time::Duration;

use actix::{AsyncContext as _, Context, Handler, Message};
use shared::actor::link::join::{JoinError, REDIAL_MAX, REDIAL_MIN, join};
use shared::actor::link::{Connection, LinkEvent};
use shared::actor::peer::PeerAddr;
use shared::clock::jittered;
use shared::membership::Destination;
use shared::protocol::{Rejoin, Welcome};
use shared::wire::frame::FrameKind;

use super::{FromLink, WorkerActor, WorkerEnd};

/// A model folder with a longer path is not reported to a new coordinator.
const SHARD_MODEL_MAX: usize = 1792;

#[derive(Message)]
#[rtype(result = "()")]
struct DialOutcome {
    to: Destination,
    outcome: Result<(Connection, Welcome), JoinError>,
}

/// Another coordinator leads now.
#[derive(Message)]
#[rtype(result = "()")]
struct LeaderChanged(Destination);

impl WorkerActor {
    /// Dials the coordinator after a while, or at once if it was not the one dialled last.
    pub(super) fn dial(&self, ctx: &mut Context<Self>, after: Duration) {
        let config = self.config.clone();
        let mut hello = config.hello.clone();
        // It must fit into a hello.
        let shard = self.uplink.held().filter(|shard| shard.model.len() <= SHARD_MODEL_MAX);
        let (trouble, since) = self.trouble;
        let trouble = trouble.after(config.clock.now().saturating_sub(since));
        hello.rejoin = Rejoin { slot: self.slot, shard, trouble };
        hello.fetched = self.fetched();
        let (mut address, last) = (config.coordinator.clone(), self.dialled.clone());
        let addr = ctx.address();
        actix::spawn(async move {
            let to = tokio::select! {
                // If nobody leads, the last leader may still be there.
                () = tokio::time::sleep(after) => address.current().or_else(|| last.clone()),
                other = address.other(last.as_ref()) => Some(other),
            };
            let to = match to {
                Some(to) => to,
                None => address.other(None).await,
            };
            let outcome = tokio::select! {
                outcome = join(&to.address, config.secret.as_ref(), FrameKind::Hello, &hello) => outcome,
                _ = address.other(Some(&to)) => {
                    Err(JoinError::Retry("another coordinator leads".to_owned()))
                }
            };
            addr.do_send(DialOutcome { to, outcome });
        });
    }

    /// Tells the actor whenever another coordinator leads.
    pub(super) fn follow(&self, ctx: &mut Context<Self>) {
        let mut address = self.config.coordinator.clone();
        let addr = ctx.address();
        actix::spawn(async move {
            let mut known = None;
            loop {
                let now = address.other(known.as_ref()).await;
                if addr.send(LeaderChanged(now.clone())).await.is_err() {
                    return;
                }
                known = Some(now);
            }
        });
    }

    /// Returns the wait before the next dial; jittered, since others have lost their link, too.
    pub(super) fn pause(&mut self) -> Duration {
        self.dials += 1;
        jittered(self.redial, self.config.hello.incarnation.0, self.dials)
    }

    /// Starts the link to a coordinator that accepted this worker.
    fn joined(&mut self, ctx: &mut Context<Self>, connection: Connection, welcome: &Welcome) {
        let (node, slot) = (self.config.hello.node.as_str(), welcome.worker.0);
        tracing::info!(worker = node, slot, coordinator = %connection.peer(), "joined");
        self.redial = REDIAL_MIN;
        self.unreached.reached();
        self.generation += 1;
        self.uplink.joined(welcome.worker);
        self.slot = Some(welcome.worker);
        let measures = welcome.stats_interval_ms > 0;
        self.uplink.set_measures(measures);
        if measures {
            let interval = Duration::from_millis(welcome.stats_interval_ms.max(100));
            self.report_every(ctx, interval);
        }
        let number = self.executor.new_link();
        self.uplink.health().linked(number);
        self.logged = 0;
        let (addr, generation) = (ctx.address(), self.generation);
        let actors = self.config.actors.clone();
        let (liveness, clock) = (self.config.liveness, self.config.clock.clone());
        let link = connection.start_with(liveness, clock, |link| {
            let peer = actors.peer_up("the coordinator", link.clone());
            self.peer = Some(peer);
            move |event| match event {
                // Handled at once, so that messages between actors take no room from steps.
                LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                    actors.frame(peer, &frame.body)
                }
                event @ LinkEvent::Closed { .. } => {
                    addr.do_send(FromLink { generation, event });
                    true
                }
                event => addr.try_send(FromLink { generation, event }).is_ok(),
            }
        });
        self.uplink.set(Some((number, PeerAddr::new(link.clone()))));
        self.link = Some(link);
        // Log lines from before the link are available to the coordinator at once.
        self.send_log();
    }
}

impl Handler<DialOutcome> for WorkerActor {
    type Result = ();

    fn handle(&mut self, DialOutcome { to, outcome }: DialOutcome, ctx: &mut Self::Context) {
        let coordinator = to.address.clone();
        let superseded = self.config.coordinator.current().is_some_and(|now| now != to);
        if self.dialled.replace(to.clone()) != Some(to) {
            // A coordinator that has just begun to lead may not listen yet, but will in a moment.
            self.redial = REDIAL_MIN;
        }
        match outcome {
            Ok(_) if superseded => self.dial(ctx, Duration::ZERO),
            Ok((connection, welcome)) => self.joined(ctx, connection, &welcome),
            Err(JoinError::Unproven(reason)) if self.slot.is_none() => {
                self.finish(ctx, WorkerEnd::Refused { reason });
            }
            // One that has been welcomed belongs here, whoever answers now.
            Err(JoinError::Retry(reason) | JoinError::Unproven(reason)) => {
                let why = format!("it dials the one at {coordinator}: {reason}");
                self.uplink.health().unlinked(why);
                match self.unreached.failed(self.config.clock.now()) {
                    Some(seconds) => {
                        tracing::warn!(coordinator, %reason, seconds, "cannot join yet; dialling until it answers");
                    }
                    None => tracing::debug!(%reason, "cannot join yet"),
                }
                self.redial = (self.redial * 2).min(REDIAL_MAX);
                let pause = self.pause();
                self.dial(ctx, pause);
            }
            Err(JoinError::Fetch(to_fetch)) => {
                self.uplink.health().unlinked("it downloads the model first".to_owned());
                self.fetch(ctx, to_fetch);
            }
            Err(JoinError::Refused(reason)) => {
                self.finish(ctx, WorkerEnd::Refused { reason });
            }
        }
    }
}

impl Handler<LeaderChanged> for WorkerActor {
    type Result = ();

    fn handle(&mut self, LeaderChanged(now): LeaderChanged, ctx: &mut Self::Context) {
        if self.dialled.as_ref() == Some(&now) {
            return;
        }
        // Without a link, the dialling in progress follows the leader anyway.
        if let Some(link) = self.link.take() {
            tracing::info!(coordinator = now.address, "another coordinator leads; joining it");
            link.close();
            self.redial = REDIAL_MIN;
            self.lost(ctx, "another coordinator leads");
        }
    }
}
