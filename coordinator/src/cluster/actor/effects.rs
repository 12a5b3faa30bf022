//! Carries out what the core wants done: messages to workers, the life of replicas, what the log
//! says of them.
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor as _, AsyncContext as _, Context};
use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::protocol::{EngineConfig, ToWorker};

use super::super::{Effect, Failing};
use super::ClusterActor;
use super::names::AffectedActors;
use crate::links::WorkerLink;
use crate::metrics::observe::ReplicaConfig;
use crate::replica::actor::{EpochFormed, ReplicaLoad};
use crate::scheduler::EpochEnd;
use shared::metrics::labels::FailoverReason;

impl ClusterActor {
    /// Carries out the core's effects, then publishes the view; without effects, the next tick
    /// publishes it.
    pub(super) fn carry_out(&mut self, ctx: &mut Context<Self>, effects: Vec<Effect>) {
        if effects.is_empty() {
            self.unpublished = true;
            return;
        }
        let affected = AffectedActors::of(&effects);
        for effect in effects {
            match effect {
                Effect::Send { worker, epoch, message } => self.send(worker, epoch, &message),
                Effect::ReplicaReady {
                    replica,
                    epoch,
                    ranks,
                    num_blocks,
                    host_blocks,
                    step_tokens,
                } => {
                    let sizes = (num_blocks, host_blocks, step_tokens);
                    self.replica_ready(ctx, replica, epoch, ranks, sizes);
                }
                Effect::ReplicaBroken { replica, epoch, end, reason } => {
                    if matches!(end, EpochEnd::Failed(_)) {
                        *self.broken.entry(replica).or_default() += 1;
                    }
                    if self.stopping || end == EpochEnd::Planned {
                        tracing::info!(%replica, %epoch, %reason, "the replica pauses");
                    } else {
                        tracing::warn!(%replica, %epoch, %reason, "the replica broke");
                    }
                    let mut messages = Vec::new();
                    self.dispatch.broke(replica, epoch, end, &mut messages);
                    self.tell_replicas(ctx, messages);
                }
                Effect::ReplicaRemoved { replica } => {
                    tracing::info!(%replica, "the replica is given up");
                    self.hub.observer().record().replica_removed(replica);
                    self.replica_died(replica);
                    self.broken.remove(&replica);
                    let mut messages = Vec::new();
                    self.dispatch.removed(replica, &mut messages);
                    self.tell_replicas(ctx, messages);
                }
                Effect::WorkerPace { worker, slow } => {
                    self.hub.observer().record().rank_slow(worker, slow);
                }
                Effect::AnswerTimedOut { worker, lasts } => {
                    let (node, seconds) = (self.node_of(worker), lasts.as_secs());
                    tracing::warn!(
                        worker = node,
                        slot = worker.0,
                        seconds,
                        "the worker did not answer while its replica was formed"
                    );
                }
                Effect::RankReplaced { worker, to, failing } => {
                    tracing::warn!(
                        worker = self.node_of(worker),
                        slot = worker.0,
                        to = self.node_of(to),
                        "{}: a spare takes the worker's rank",
                        complaint(failing)
                    );
                }
                Effect::FewerRanks { replica, workers, left, failing } => {
                    let without: Vec<&str> = workers.iter().map(|it| self.node_of(*it)).collect();
                    tracing::warn!(
                        %replica,
                        ranks = left,
                        ?without,
                        "{}: it goes on with fewer ranks; `tutti scale` tries all again at once",
                        complaint(failing)
                    );
                }
                Effect::Quarantined { worker, lasts } => {
                    let member = self.core.member(worker);
                    let node = member.map_or("", |member| member.node.as_str());
                    let device = member.map_or("", |member| member.device());
                    tracing::error!(
                        worker = node,
                        slot = worker.0,
                        device,
                        ?lasts,
                        "the device failed repeatedly: its worker gets no rank for a while; `tutti \
                         scale` tries it again at once"
                    );
                }
                Effect::Adapters => self.adapters_changed(),
                Effect::AdapterChanged { ticket, outcome } => self.adapter_changed(ticket, outcome),
                Effect::StoreDesired(desired) => {
                    if let Some(desires) = &self.desires {
                        desires.send_replace(Some(desired));
                    }
                }
                Effect::Unservable { replica, reason } => {
                    tracing::error!(
                        %replica, %reason,
                        "the replica cannot be formed; trying again when workers or replicas \
                         change, otherwise after a minute or more"
                    );
                }
            }
        }
        self.report_affected(&affected);
        self.publish();
    }

    fn send(&self, worker: WorkerId, epoch: Epoch, message: &ToWorker) {
        if let Some(connected) = self.connected.get(&worker)
            && let Err(error) = connected.addr.tell(epoch, message)
        {
            tracing::warn!(worker = connected.node, slot = worker.0, %error, "message to the worker lost");
        }
    }

    fn replica_ready(
        &mut self,
        ctx: &mut Context<Self>,
        id: ReplicaId,
        epoch: Epoch,
        ranks: Vec<WorkerId>,
        (num_blocks, host_blocks, step_tokens): (u32, u32, u32),
    ) {
        let links: Vec<WorkerLink> = ranks
            .iter()
            .filter_map(|worker| self.connected.get(worker))
            .map(|connected| connected.addr.clone())
            .collect();
        if links.len() != ranks.len() {
            // A rank left just now; its end is on the way.
            return;
        }
        tracing::info!(
            replica = %id, %epoch, ranks = ranks.len(), kv_blocks = num_blocks, host_blocks,
            step_tokens, "serving"
        );
        let tokens = u64::from(num_blocks) * u64::from(self.engine.block_size);
        let max = self.engine.max_model_len;
        if tokens < u64::from(max) {
            tracing::warn!(
                replica = %id,
                "the KV cache holds {tokens} tokens, but --max-model-len is {max}: requests for \
                 more are refused, those without max_tokens end there; give more \
                 --kv-cache-memory, or set --max-model-len {tokens}"
            );
        }
        let tensor_parallel = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let engine = EngineConfig { max_num_batched_tokens: step_tokens, ..self.engine.clone() };
        let config = ReplicaConfig { engine, num_blocks, host_blocks, tensor_parallel };
        self.hub.observer().record().replica_ready(id, &config);
        self.start_replica(ctx, id);
        let Some(replica) = self.replicas.get(&id) else { return };
        replica.do_send(EpochFormed {
            epoch,
            num_blocks,
            host_blocks,
            step_tokens,
            ranks: links,
            workers: ranks.clone(),
        });
        let (room, mut messages) = (u32::try_from(tokens).unwrap_or(u32::MAX), Vec::new());
        self.dispatch.ready(id, epoch, ranks, room, &mut messages);
        self.tell_replicas(ctx, messages);
    }

    /// Starts a replica's actor, unless it is running.
    pub(super) fn start_replica(&mut self, ctx: &mut Context<Self>, id: ReplicaId) {
        if self.replicas.contains_key(&id) {
            return;
        }
        let load = Arc::new(ReplicaLoad::default());
        match (self.make_replica)(id, ctx.address(), load.clone()) {
            Ok(actor) => {
                self.replicas.insert(id, actor.start());
                self.dispatch.started(id, load);
                self.broken_config = None;
            }
            Err(error) => self.broken_config = Some(error.to_string()),
        }
    }

    /// Notices actors that panicked. Their requests are gone, and the clients see them end. Their
    /// ranks are formed again for a new actor.
    pub(super) fn detect_crashed_replicas(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let gone: Vec<ReplicaId> = self
            .replicas
            .iter()
            .filter(|(_, replica)| !replica.connected())
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            tracing::error!(replica = %id, "the replica's actor ended; restarting it");
            self.replicas.remove(&id);
            if let Some(epoch) = self.dispatch.crashed(id) {
                let cause = FailoverReason::ActorFailed;
                self.hub.observer().record().failover(id, cause);
                self.core.epoch_failed(now, id, epoch, cause, "its actor has ended", effects);
            }
        }
    }
}

/// What is wrong with a replica's groups, and where to look.
fn complaint(failing: Failing) -> &'static str {
    match failing {
        Failing::Formations => {
            "the replica's formations come to nothing (look whether its ranks reach each other)"
        }
        Failing::Steps => "the replica's steps hang again and again",
    }
}
