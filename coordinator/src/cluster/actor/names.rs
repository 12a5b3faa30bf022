//! The cluster's own actors by name: `worker/NODE` and `replica/N`, in the states that operators
//! and watchers see.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use actix::{Handler, Message};
use shared::actor::runtime::ClassHost;
use shared::ids::{ReplicaId, WorkerId};
use shared::metrics::labels::ActorState;
use shared::protocol::actors::{ActorLife, ActorReport};

use super::super::{Effect, Member, ReplicaPhase, ReplicaStatus, status};
use super::ClusterActor;

/// How many times in a row a node's worker process is restarted when it ends; absent if no longer.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Supervised {
    /// The node's name.
    pub node: String,
    /// Maximum number of restarts in a row.
    pub max_restarts: Option<u32>,
}

impl Handler<Supervised> for ClusterActor {
    type Result = ();

    fn handle(&mut self, supervised: Supervised, _ctx: &mut Self::Context) {
        match supervised.max_restarts {
            Some(max) => drop(self.supervised.insert(supervised.node, max)),
            None => {
                self.supervised.remove(&supervised.node);
                if let Some(worker) = self.roster.slot_of(&supervised.node)
                    && !self.connected.contains_key(&worker)
                {
                    self.report_worker(
                        worker,
                        &supervised.node,
                        ActorLife::Dead,
                        Some("it is given up"),
                    );
                }
            }
        }
    }
}

/// Workers and replicas that effects concern.
#[derive(Debug, Default)]
pub(super) struct AffectedActors {
    workers: BTreeSet<WorkerId>,
    replicas: BTreeSet<ReplicaId>,
}

impl AffectedActors {
    pub(super) fn of(effects: &[Effect]) -> Self {
        let mut affected = Self::default();
        for effect in effects {
            match effect {
                Effect::Send { worker, .. }
                | Effect::WorkerPace { worker, .. }
                | Effect::AnswerTimedOut { worker, .. }
                | Effect::RankReplaced { worker, .. }
                | Effect::Quarantined { worker, .. } => drop(affected.workers.insert(*worker)),
                Effect::FewerRanks { replica, workers, .. } => {
                    affected.workers.extend(workers);
                    affected.replicas.insert(*replica);
                }
                Effect::ReplicaReady { replica, .. }
                | Effect::ReplicaBroken { replica, .. }
                | Effect::ReplicaRemoved { replica }
                | Effect::Unservable { replica, .. } => drop(affected.replicas.insert(*replica)),
                Effect::StoreDesired(_) | Effect::Adapters | Effect::AdapterChanged { .. } => {}
            }
        }
        affected
    }
}

impl ClusterActor {
    /// Reports all workers and replicas as they are now.
    pub(super) fn report_actors(&self) {
        self.core.members().for_each(|member| self.report_member(member));
        self.core.replicas().for_each(|replica| self.report_replica(&replica));
        self.count_actors();
    }

    /// Reports only those that effects concern, rather than a thousand others each time.
    pub(super) fn report_affected(&self, affected: &AffectedActors) {
        let AffectedActors { workers, replicas } = affected;
        let members = self.core.members().filter(|member| workers.contains(&member.worker));
        members.for_each(|member| self.report_member(member));
        for replica in self.core.replicas() {
            let mut ranks = replica.ranks.iter().flatten();
            if replicas.contains(&replica.id) || ranks.any(|rank| workers.contains(rank)) {
                self.report_replica(&replica);
            }
        }
        self.count_actors();
    }

    pub(super) fn report_member(&self, member: &Member) {
        // The created actors there move with it. Not those of a front end on the same node.
        if let Some(connected) = self.connected.get(&member.worker) {
            self.actors.drains(connected.peer, member.draining);
        }
        let life = if member.draining { ActorLife::Draining } else { ActorLife::Alive };
        let doubt = self.core.doubt(member.worker);
        self.report_worker(member.worker, &member.node, life, doubt.as_deref());
    }

    fn report_worker(&self, worker: WorkerId, node: &str, life: ActorLife, reason: Option<&str>) {
        let report = ActorReport {
            name: format!("worker/{node}"),
            kind: "worker".to_owned(),
            generation: u64::from(worker.0),
            life,
            restarts: self.restarts.get(&worker).copied().unwrap_or(0),
            max_restarts: self.supervised.get(node).copied(),
            reason: reason.map(str::to_owned),
        };
        self.send_report(node, report);
    }

    fn report_replica(&self, replica: &ReplicaStatus) {
        let failed = replica.last_failure.is_some();
        let life = match replica.phase {
            ReplicaPhase::Waiting if failed => ActorLife::Restarting,
            ReplicaPhase::Waiting => ActorLife::Pending,
            ReplicaPhase::Forming | ReplicaPhase::Starting => ActorLife::Starting,
            ReplicaPhase::Serving => ActorLife::Alive,
        };
        let reason = replica.last_failure.clone().filter(|_| life != ActorLife::Alive);
        self.send_report(
            "coordinator",
            replica_report(replica.id, life, self.broken(replica.id), reason),
        );
    }

    fn broken(&self, replica: ReplicaId) -> u32 {
        self.broken.get(&replica).copied().unwrap_or(0)
    }

    fn send_report(&self, node: &str, report: ActorReport) {
        let name = report.name.clone();
        if let Err(error) = self.actors.report(node, report) {
            tracing::debug!(%error, name, "not among the actors");
        }
    }

    /// A worker's link ended.
    pub(super) fn worker_died(&self, worker: WorkerId, node: &str, drained: bool, reason: &str) {
        let back = !drained && self.supervised.contains_key(node) && !self.stopping;
        let life = if back { ActorLife::Restarting } else { ActorLife::Dead };
        self.report_worker(worker, node, life, Some(reason));
        if drained {
            self.actors.forget(&format!("worker/{node}"));
        }
    }

    /// A worker that stayed away is not expected back.
    pub(super) fn worker_given_up(&self, worker: WorkerId) {
        if let Some(node) = self.roster.node_of(worker) {
            self.report_worker(worker, node, ActorLife::Dead, Some("it stayed away"));
            self.actors.forget(&format!("worker/{node}"));
        }
    }

    /// A replica is given up for good.
    pub(super) fn replica_died(&self, id: ReplicaId) {
        let reason = Some("it is not wanted any more".to_owned());
        self.send_report(
            "coordinator",
            replica_report(id, ActorLife::Dead, self.broken(id), reason),
        );
        self.actors.forget(&format!("replica/{}", id.0));
    }

    /// Counts the cluster's actors by state, for `/metrics`.
    fn count_actors(&self) {
        let lives = self.actors.lives();
        let wanted = self.core.max_replicas().map(|most| most as usize);
        let wanted = wanted.unwrap_or_else(|| self.core.replicas().count());
        let mut recording = self.hub.observer().record();
        recording.replicas_wanted(wanted);
        for (life, count) in lives {
            let state = match life {
                ActorLife::Pending => ActorState::Pending,
                ActorLife::Starting => ActorState::Starting,
                ActorLife::Alive => ActorState::Alive,
                ActorLife::Draining => ActorState::Draining,
                ActorLife::Restarting => ActorState::Restarting,
                ActorLife::Dead => ActorState::Dead,
            };
            recording.actors(state, count);
        }
    }

    /// Returns the processes that host classes, for operators.
    pub(super) fn host_statuses(&self) -> Vec<status::ActorHost> {
        let with = |host: ClassHost| status::ActorHost {
            node: host.node,
            classes: host.classes,
            actors: u32::try_from(host.actors).unwrap_or(u32::MAX),
            used: host.used,
            free: host.free,
            draining: host.draining,
        };
        self.actors.class_hosts().into_iter().map(with).collect()
    }

    /// Returns all actors, for operators.
    pub(super) fn actor_statuses(&self) -> Vec<status::Actor> {
        let created = self.actors.created().into_iter();
        let mut created: BTreeMap<String, String> =
            created.map(|actor| (actor.name, actor.needs)).collect();
        let replicas: Vec<ReplicaStatus> = self.core.replicas().collect();
        let load = |id: ReplicaId| {
            self.dispatch.load(id).map(|load| load.in_flight.load(Ordering::Relaxed))
        };
        let mut with = |known: shared::actor::registry::Known| {
            let report = known.report;
            let replica = match report.kind.as_str() {
                "replica" => replicas.iter().find(|r| report.name == format!("replica/{}", r.id.0)),
                "worker" => replicas.iter().find(|replica| {
                    let worker = self.roster.slot_of(&known.node);
                    worker.is_some() && replica.ranks.contains(&worker)
                }),
                _ => None,
            };
            status::Actor {
                needs: created.remove(&report.name),
                name: report.name,
                kind: report.kind,
                node: known.node,
                state: report.life.as_str().to_owned(),
                epoch: replica.map(|replica| replica.epoch.0),
                load: replica.and_then(|replica| load(replica.id)),
                restarts: known.restarts,
                max_restarts: report.max_restarts,
                reason: report.reason,
            }
        };
        self.actors.list().into_iter().map(&mut with).collect()
    }
}

fn replica_report(
    id: ReplicaId,
    life: ActorLife,
    restarts: u32,
    reason: Option<String>,
) -> ActorReport {
    ActorReport {
        name: format!("replica/{}", id.0),
        kind: "replica".to_owned(),
        generation: u64::from(id.0),
        life,
        restarts,
        max_restarts: None,
        reason,
    }
}
