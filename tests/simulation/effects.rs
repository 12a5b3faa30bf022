//! Carries out what the cluster's core wants done, and what its dispatch tells the replicas, as
//! `cluster::actor` does.
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use coordinator::cluster::Effect;
use coordinator::cluster::dispatch::{Messages, ToReplica};
use coordinator::engine::{EngineError, EngineEvent};
use coordinator::metrics::observe::ReplicaConfig;
use coordinator::replica::core::{ReplicaCore, ReplicaLoad};
use coordinator::replica::driver::ReplicaDriver;
use coordinator::scheduler::Scheduler;
use shared::ids::{Epoch, ReplicaId, RequestId, WorkerId};
use shared::protocol::{EngineConfig, ToWorker};

use crate::events::Event;
use crate::network::{LinkId, Packet, Side};
use crate::replicas::{ReplicaMail, RunningReplica};
use crate::world::World;

impl World {
    pub(crate) fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { worker, message, .. } => {
                    if let ToWorker::Form(form) = &message {
                        self.report.forms += 1;
                        let fewer = form.world_size < self.scenario.tensor_parallel;
                        self.report.resharded += u64::from(fewer);
                    }
                    if let Some(connected) = self.coordinator.connected.get(&worker) {
                        let link = connected.link;
                        self.send(link, Side::Worker, Packet::Down(Rc::new(message)));
                    }
                }
                Effect::ReplicaReady {
                    replica,
                    epoch,
                    ranks,
                    num_blocks,
                    host_blocks,
                    step_tokens,
                } => {
                    let sizes = (num_blocks, host_blocks, step_tokens);
                    self.replica_ready(replica, epoch, ranks, sizes);
                }
                Effect::AnswerTimedOut { worker, .. } => {
                    self.say(|| format!("{worker} has not answered when it was formed"));
                    self.report.silent += 1;
                }
                Effect::RankReplaced { worker, to, .. } => {
                    self.say(|| format!("{worker} gives way to {to}"));
                }
                Effect::FewerRanks { replica, left, .. } => {
                    self.say(|| format!("{replica} goes on with {left} ranks"));
                }
                // No device fails in the simulation.
                Effect::Quarantined { .. } => {}
                Effect::WorkerPace { worker, slow } => {
                    self.coordinator.hub.observer().record().rank_slow(worker, slow);
                }
                Effect::ReplicaBroken { replica, epoch, end, reason } => {
                    self.report.relieved += u64::from(reason.contains("is slow"));
                    self.say(|| format!("{replica} broke, {epoch}: {reason}"));
                    let mut messages = Vec::new();
                    self.coordinator.dispatch.broke(replica, epoch, end, &mut messages);
                    if !self.switches.lost_is_not_told {
                        self.tell_replicas(messages);
                    }
                }
                Effect::ReplicaRemoved { replica } => {
                    self.say(|| format!("{replica} is given up"));
                    self.coordinator.hub.observer().record().replica_removed(replica);
                    let mut messages = Vec::new();
                    self.coordinator.dispatch.removed(replica, &mut messages);
                    self.tell_replicas(messages);
                }
                Effect::StoreDesired(desired) => {
                    let who = self.member_of(self.coordinator.seat);
                    self.desire(who, desired);
                }
                Effect::Adapters => self.adapters_changed(),
                Effect::AdapterChanged { ticket, outcome } => {
                    self.adapter_changed(ticket, &outcome);
                }
                Effect::Unservable { replica, reason } => {
                    self.say(|| format!("{replica} cannot be formed: {reason}"));
                }
            }
        }
    }

    fn replica_ready(
        &mut self,
        id: ReplicaId,
        epoch: Epoch,
        workers: Vec<WorkerId>,
        (num_blocks, host_blocks, step_tokens): (u32, u32, u32),
    ) {
        let ranks: Vec<(WorkerId, LinkId)> = workers
            .iter()
            .filter_map(|worker| Some((*worker, self.coordinator.connected.get(worker)?.link)))
            .collect();
        if ranks.len() != workers.len() {
            return;
        }
        self.say(|| format!("{id} serves in {epoch}"));
        self.coordinator.checks.serves(epoch, self.now);
        let config = ReplicaConfig {
            engine: EngineConfig {
                max_num_batched_tokens: step_tokens,
                ..self.scenario.engine.clone()
            },
            num_blocks,
            host_blocks,
            tensor_parallel: workers.len() as u32,
        };
        self.coordinator.hub.observer().record().replica_ready(id, &config);
        self.start_replica(id);
        let formed =
            ReplicaMail::EpochFormed { epoch, num_blocks, host_blocks, step_tokens, ranks };
        self.mail_replica(id, formed);
        let (room, mut messages) = (num_blocks * self.scenario.engine.block_size, Vec::new());
        self.coordinator.dispatch.ready(id, epoch, workers, room, &mut messages);
        self.tell_replicas(messages);
    }

    /// Does what `ClusterActor::start_replica` does.
    pub(crate) fn start_replica(&mut self, id: ReplicaId) {
        let (now, due) = (self.time(), self.now);
        let coordinator = &mut *self.coordinator;
        if !coordinator.replicas.contains_key(&id) {
            let mut limits = self.scenario.limits;
            if self.switches.no_step_timeout {
                limits.step_timeout = Duration::MAX;
            }
            if self.switches.deadlines_are_not_learned {
                limits.step_floor = Duration::MAX;
            }
            let observer = coordinator.hub.observer().clone();
            let Ok(scheduler) = Scheduler::new(self.scenario.scheduler) else {
                return self.fail("the scheduler refuses its configuration".to_owned());
            };
            let driver = ReplicaDriver::new(now, id, scheduler, observer, limits);
            let load = Arc::new(ReplicaLoad::default());
            coordinator.dispatch.started(id, load.clone());
            let running = RunningReplica {
                core: ReplicaCore::new(driver, load),
                links: Vec::new(),
                mail: VecDeque::new(),
                mail_due: due,
                down_since: Some(due),
            };
            coordinator.replicas.insert(id, running);
        }
    }

    /// Delivers messages to replicas, as `ClusterActor::tell_replicas` does.
    pub(crate) fn tell_replicas(&mut self, messages: Messages) {
        for (id, message) in messages {
            match &message {
                ToReplica::Submit { request, .. } => {
                    let running = self.coordinator.replicas.get(&id);
                    let down_since = running.and_then(|it| it.down_since);
                    self.clients.routed(request.id.0 as usize, id, down_since);
                }
                ToReplica::Adopt { from, requests } => {
                    let indices = requests.iter().map(|request| request.id().0 as usize);
                    let (life, indices) = (self.coordinator.life, indices.collect());
                    self.clients.moved(life, *from, id, indices);
                    self.report.moved += requests.len() as u64 * u64::from(*from != id);
                    self.start_replica(id);
                }
                ToReplica::Retire => {
                    let coordinator = &mut *self.coordinator;
                    let running = coordinator.replicas.remove(&id);
                    coordinator.retiring.extend(running.map(|running| (id, running)));
                }
                _ => {}
            }
            self.mail_replica(id, ReplicaMail::Told(message));
        }
    }

    /// A request arrives from the front end.
    pub(crate) fn submit(&mut self, index: usize) {
        let Some(adapter) = self.adapter_for(index) else {
            return self.clients.refused(index);
        };
        let (request, events) = self.clients.open(index, self.coordinator.life, self.now, adapter);
        if let Some((after, _)) = self.scenario.clients[index].leaves {
            self.schedule(after, Event::Leave(index));
        }
        let mut messages = Vec::new();
        let dispatch = &mut self.coordinator.dispatch;
        if let Err(events) = dispatch.submit(Box::new(request), events, &mut messages) {
            let error = EngineError::Unavailable { message: "nothing serves".to_owned() };
            self.coordinator.hub.observer().refused(&events, &error);
            let _ = events.send(EngineEvent::Failed(error));
            drop(events);
            return self.hear_refused(index);
        }
        self.tell_replicas(messages);
    }

    pub(crate) fn cancel(&mut self, id: RequestId) {
        let mut messages = Vec::new();
        if self.switches.cancelled_is_forgotten {
            let replicas = self.coordinator.replicas.keys();
            messages.extend(replicas.map(|replica| (*replica, ToReplica::Cancel(id))));
        } else {
            self.coordinator.dispatch.cancel(id, &mut messages);
        }
        self.tell_replicas(messages);
    }
}
