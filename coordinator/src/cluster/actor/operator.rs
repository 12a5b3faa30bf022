//! Questions and commands of operators to the cluster actor.
use std::sync::atomic::Ordering;

use actix::{Handler, Message};
use shared::clock::since_1970;
use shared::ids::{ReplicaId, WorkerId};

use super::super::records::{ProcessExit, WhichProcess};
use super::super::status;
use super::ClusterActor;
use crate::replica::actor::ForgetPrefixes;

/// Asks for the state of the cluster; others add front ends and readiness.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "status::Status")]
pub struct GetStatus;

/// Bounds the number of replicas from now on; 0 removes the bound, absent restores the one the
/// coordinator was started with. Answers with the number of commands so far.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "u64")]
pub struct Scale(pub Option<u32>);

/// Drains nodes. Answers with the number of commands so far, or why it cannot: then all stay.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<u64, String>")]
pub struct Drain(pub Vec<String>);

/// Forgets the prefixes that all replicas' KV caches hold: requests that come from now on find
/// nothing of earlier ones.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct ResetPrefixCache;

impl Handler<ResetPrefixCache> for ClusterActor {
    type Result = ();

    fn handle(&mut self, _: ResetPrefixCache, _ctx: &mut Self::Context) {
        self.dispatch.forget_prefixes();
        for replica in self.replicas.values() {
            replica.do_send(ForgetPrefixes);
        }
    }
}

impl Handler<GetStatus> for ClusterActor {
    type Result = actix::MessageResult<GetStatus>;

    fn handle(&mut self, _: GetStatus, _ctx: &mut Self::Context) -> Self::Result {
        let now = self.clock.now();
        let replicas: Vec<_> = self.core.replicas().collect();
        let place = |worker: WorkerId| {
            replicas.iter().find_map(|replica| {
                let rank = replica.ranks.iter().position(|rank| *rank == Some(worker))?;
                Some((replica.id.0, rank as u32))
            })
        };
        let draining =
            |worker: WorkerId| self.core.member(worker).is_some_and(|member| member.draining);
        let nodes = self.connected.iter().map(|(worker, connected)| {
            let place = place(*worker);
            let state = match place {
                _ if draining(*worker) => "draining",
                None if self.core.is_aside(*worker) => "set aside",
                Some(_) => "alive",
                None if self.core.is_doubtful(*worker) => "doubtful",
                None => "spare",
            };
            status::Node {
                node: connected.node.clone(),
                role: "worker".to_owned(),
                slot: worker.0,
                pid: connected.pid,
                host: connected.host.clone(),
                state: state.to_owned(),
                replica: place.map(|(replica, _)| replica),
                rank: place.map(|(_, rank)| rank),
                offer: self.core.member(*worker).map(|member| member.offer.clone()),
            }
        });
        let load = |id: ReplicaId| {
            self.dispatch.load(id).map_or(0, |load| load.in_flight.load(Ordering::Relaxed))
        };
        actix::MessageResult(status::Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tensor_parallel: self.tensor_parallel,
            max_replicas: self.core.max_replicas(),
            commands: status::Commands {
                count: self.core.desired().generation,
                scaled: self.core.desired().replicas.is_some(),
                stored: None,
            },
            adapters: self.core.adapter_statuses(),
            adapter_places: Some(self.core.adapter_places()).filter(|places| *places > 0),
            nodes: nodes.collect(),
            replicas: replicas
                .iter()
                .map(|replica| status::Replica {
                    id: replica.id.0,
                    state: replica.phase.as_str().to_owned(),
                    epoch: replica.epoch.0,
                    ranks: replica.ranks.iter().map(|rank| rank.map(|rank| rank.0)).collect(),
                    requests: load(replica.id),
                    last_failure: replica.last_failure.clone(),
                    held_seconds: replica.held_until.map(|it| it.saturating_sub(now).as_secs()),
                })
                .collect(),
            actors: self.actor_statuses(),
            hosts: self.host_statuses(),
            dead: self.records.dead().collect(),
            ..status::Status::default()
        })
    }
}

/// A supervisor saw a worker process end.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct ProcessEnded(pub ProcessExit);

/// The last lines of a worker process's log.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Option<status::NodeLogs>")]
pub struct GetLogs {
    /// The node's name.
    pub node: String,
    /// The process asked about.
    pub process: WhichProcess,
    /// Maximum number of lines.
    pub lines: usize,
}

impl Handler<ProcessEnded> for ClusterActor {
    type Result = ();

    fn handle(&mut self, ProcessEnded(ended): ProcessEnded, _ctx: &mut Self::Context) {
        self.records.ended(ended, since_1970().as_secs());
    }
}

impl Handler<GetLogs> for ClusterActor {
    type Result = actix::MessageResult<GetLogs>;

    fn handle(&mut self, ask: GetLogs, _ctx: &mut Self::Context) -> Self::Result {
        actix::MessageResult(self.records.logs(&ask.node, ask.process, ask.lines))
    }
}

impl Handler<Scale> for ClusterActor {
    type Result = u64;

    fn handle(&mut self, Scale(replicas): Scale, ctx: &mut Self::Context) -> u64 {
        let mut effects = Vec::new();
        self.core.scale(self.clock.now(), replicas, &mut effects);
        self.carry_out(ctx, effects);
        self.report_actors();
        self.core.desired().generation
    }
}

impl Handler<Drain> for ClusterActor {
    type Result = Result<u64, String>;

    fn handle(&mut self, Drain(nodes): Drain, ctx: &mut Self::Context) -> Self::Result {
        let find = |node: &String| {
            let found = self.connected.iter().find(|(_, connected)| connected.node == *node);
            found.map(|(worker, _)| *worker).ok_or_else(|| format!("there is no worker `{node}`"))
        };
        let workers: Result<Vec<WorkerId>, String> = nodes.iter().map(find).collect();
        let workers = workers?;
        let mut effects = Vec::new();
        let result = self.core.drain(self.clock.now(), &workers, &mut effects);
        self.carry_out(ctx, effects);
        self.report_actors();
        // Before the answer: what its reader asks next may depend on who leaves.
        self.publish();
        result.map(|()| self.core.desired().generation)
    }
}
