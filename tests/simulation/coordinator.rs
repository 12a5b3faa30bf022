//! The coordinator: its real cores, and between them what `cluster::actor` and `replica::actor` do
//! with mailboxes and links.
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use coordinator::cluster::affinity::Affinity;
use coordinator::cluster::orphanage::{Home, Orphanage};
use coordinator::cluster::roster::{Admission, Joining, LinkNumber, Roster};
use coordinator::cluster::{
    Cluster, ClusterConfig, Effect, Member, PlacementRules, ReplicaPhase, ReplicaStatus,
};
use coordinator::engine::{EngineError, EngineEvent, GenerateRequest};
use coordinator::metrics::Hub;
use coordinator::metrics::observe::ReplicaConfig;
use coordinator::replica::driver::{ReplicaDriver, reject_reason};
use coordinator::replica::operation::{Operation, ReplicaLoad};
use coordinator::scheduler::Scheduler;
use shared::actor::liveness::LivenessConfig;
use shared::ids::{Epoch, Incarnation, ReplicaId, RequestId, WorkerId};
use shared::metrics::{Limits, Source};
use shared::protocol::{FromWorker, NodeResources, StepResult, ToWorker, WorkerStats};

use crate::network::{Link, LinkId, Packet, Side};
use crate::replicas::{ClusterMail, ReplicaMail, RunningReplica};
use crate::scenario::{S, Scenario, Time};
use crate::world::{Event, World};

#[derive(Clone, Copy, Debug)]
struct Connected {
    incarnation: u64,
    link: LinkId,
    number: LinkNumber,
}

pub(crate) struct Coordinator {
    pub(crate) core: Cluster,
    pub(crate) hub: Hub,
    roster: Roster,
    connected: BTreeMap<WorkerId, Connected>,
    pub(crate) replicas: BTreeMap<ReplicaId, RunningReplica>,
    /// Given up, and still with mail to read.
    pub(crate) retiring: BTreeMap<ReplicaId, RunningReplica>,
    pub(crate) orphanage: Orphanage,
    affinity: Affinity,
    pub(crate) mail: VecDeque<ClusterMail>,
    pub(crate) mail_due: Time,
    /// Results of epochs to come, or gone by then, to be delivered again.
    pub(crate) late_results: Vec<(ReplicaId, WorkerId, StepResult)>,
    /// Reports to be delivered again, or late.
    echoes: Vec<(WorkerId, u64, WorkerStats)>,
}

impl Coordinator {
    pub(crate) fn new(scenario: &Scenario, seed: u64) -> Self {
        let config = ClusterConfig {
            tensor_parallel: scenario.tensor_parallel,
            degrees: scenario.degrees.clone(),
            reshard_after: Duration::from_micros(scenario.reshard_after),
            max_replicas: scenario.max_replicas,
            model: "m".to_owned(),
            engine: scenario.engine.clone(),
            collective_timeout: Duration::from_micros(scenario.collective_timeout),
            worker_stats: true,
            collective_key: seed,
            placement: PlacementRules::default(),
            run: seed,
        };
        Self {
            core: Cluster::new(config),
            hub: Hub::new(Incarnation(1), Limits::default()),
            roster: Roster::default(),
            connected: BTreeMap::new(),
            replicas: BTreeMap::new(),
            retiring: BTreeMap::new(),
            orphanage: Orphanage::default(),
            affinity: Affinity::new(scenario.engine.max_num_seqs),
            mail: VecDeque::new(),
            mail_due: 0,
            late_results: Vec::new(),
            echoes: Vec::new(),
        }
    }

    pub(crate) fn num_connected(&self) -> usize {
        self.connected.len()
    }

    /// As `ClusterActor::route`.
    fn route(&mut self, request: &GenerateRequest) -> Option<ReplicaId> {
        let homes = self.replicas.iter().map(|(id, running)| Home {
            replica: *id,
            serving: running.serving.is_some(),
            load: running.load.in_flight.load(std::sync::atomic::Ordering::Relaxed),
        });
        self.affinity.route(&request.prompt, request.cache_salt, homes)
    }

    fn replica_of(&self, worker: WorkerId) -> Option<ReplicaId> {
        let holds = |running: &RunningReplica| {
            running.serving.as_ref().is_some_and(|(_, ranks)| ranks.contains(&worker))
        };
        self.replicas.iter().find(|(_, running)| holds(running)).map(|(id, _)| *id)
    }
}

impl World {
    /// A worker's hello: admitted, welcomed, joined.
    pub(crate) fn hello(&mut self, link: LinkId) {
        let (slot, incarnation) = (self.links[link].slot, self.links[link].incarnation);
        let node = self.node_name(slot);
        let roster = &mut self.coordinator.roster;
        let admission = roster.admit(&node, Incarnation(incarnation), None);
        let mut admitted = match admission {
            Admission::Slot(worker) => Some(worker),
            Admission::Taken | Admission::Retired => None,
        };
        if admission == Admission::Taken && self.switches.newcomers_displace {
            let joined = |link: &Link| {
                (self.scenario.nodes[link.slot] == self.scenario.nodes[slot])
                    .then_some(link.joined)?
            };
            admitted = self.links.iter().find_map(joined);
        }
        let Some(worker) = admitted else {
            // Another process has the name, as far as is known: it may try again.
            if admission == Admission::Retired {
                self.send(link, Side::Worker, Packet::Refused);
            }
            return self.close(link, Side::Coordinator);
        };
        self.send(link, Side::Worker, Packet::Welcome(worker));
        self.watch(link, Side::Coordinator);
        self.links[link].joined = Some(worker);
        if let Some(old) = self.coordinator.connected.get(&worker).copied() {
            self.worker_gone(worker, old.link, "it joined again");
            self.close(old.link, Side::Coordinator);
        }
        let coordinator = &mut self.coordinator;
        let Joining { link: number, restarted, retired } =
            coordinator.roster.joined(worker, Incarnation(incarnation));
        coordinator.connected.insert(worker, Connected { incarnation, link, number });
        let mut recording = coordinator.hub.observer().record();
        recording.worker_up(worker, true);
        recording.worker_info(worker, &node, "0");
        if restarted {
            recording.worker_restarted(worker);
        }
        drop(recording);
        if let Some(retired) = retired {
            coordinator.hub.retire(Source::Worker(worker), retired);
            self.checks.retired.insert((worker, retired.0));
        }
        let member = Member {
            worker,
            incarnation: Incarnation(incarnation),
            node,
            host: format!("host-{}", self.scenario.hosts[slot]),
            collective_addr: ([127, 0, 0, 1], 9000 + slot as u16).into(),
            draining: false,
            offer: NodeResources::default(),
        };
        let mut effects = Vec::new();
        let now = self.time();
        self.coordinator.core.worker_joined(now, member, &mut effects);
        self.carry_out(effects);
    }

    /// As `ClusterActor` drains the node of a slot.
    pub(crate) fn drain(&mut self, slot: usize, back_after: Option<Time>) {
        let node = self.node_name(slot);
        let found = self.coordinator.core.members().find(|it| it.node == node);
        let Some(worker) = found.map(|it| it.worker) else { return };
        let stays = |it: &&Member| !it.draining && it.worker != worker;
        let left = self.coordinator.core.members().filter(stays).count();
        let mut effects = Vec::new();
        let now = self.time();
        let done = self.coordinator.core.drain(now, worker, &mut effects);
        let least = *self.scenario.degrees.last().unwrap_or(&1) as usize;
        if done.is_ok() != (left >= least) {
            self.fail(format!("{node} is drained with {left} others there: {done:?}"));
        }
        self.carry_out(effects);
        if done.is_ok() {
            self.processes[slot].back_after = back_after;
            self.report.drained += 1;
        }
    }

    fn node_name(&self, slot: usize) -> String {
        format!("node-{}", self.scenario.nodes[slot])
    }

    /// Whether events of a link are of a worker's present connection.
    fn is_current(&self, worker: WorkerId, link: LinkId) -> bool {
        let Some(connected) = self.coordinator.connected.get(&worker) else { return false };
        if self.switches.links_not_told_apart {
            return connected.incarnation == self.links[link].incarnation;
        }
        connected.link == link && self.coordinator.roster.is_present(worker, connected.number)
    }

    pub(crate) fn coordinator_link_closed(&mut self, link: LinkId) {
        if let Some(worker) = self.links[link].joined
            && self.is_current(worker, link)
        {
            let present = self.coordinator.connected[&worker].link;
            if self.links[present].open[Side::Coordinator as usize] {
                self.fail(format!("the end of an old link of {worker} ends its new one"));
            }
            self.worker_gone(worker, link, "the link ended");
        }
    }

    fn worker_gone(&mut self, worker: WorkerId, link: LinkId, reason: &str) {
        if !self.is_current(worker, link) {
            return;
        }
        self.say(|| format!("{worker} is gone: {reason}"));
        self.coordinator.roster.left(worker);
        let Some(connected) = self.coordinator.connected.remove(&worker) else { return };
        let incarnation = Incarnation(connected.incarnation);
        self.coordinator.hub.lost(Source::Worker(worker), incarnation);
        self.coordinator.hub.observer().record().worker_up(worker, false);
        let mut effects = Vec::new();
        let now = self.time();
        self.coordinator.core.worker_left(now, worker, incarnation, reason, &mut effects);
        self.carry_out(effects);
        self.drop_handle(connected.link);
    }

    /// A link without any handle on it closes.
    pub(crate) fn drop_handle(&mut self, link: LinkId) {
        let coordinator = &self.coordinator;
        let connected = coordinator.connected.values().any(|it| it.link == link);
        let held = |running: &RunningReplica| running.links.iter().any(|(_, it)| *it == link);
        let mut replicas = coordinator.replicas.values().chain(coordinator.retiring.values());
        if !connected && !replicas.any(held) {
            self.close(link, Side::Coordinator);
        }
    }

    pub(crate) fn coordinator_takes(&mut self, link: LinkId, message: FromWorker) {
        let Some(worker) = self.links[link].joined else { return };
        if !self.is_current(worker, link) {
            return;
        }
        let now = self.time();
        let (mut effects, mut goodbye) = (Vec::new(), false);
        let core = &mut self.coordinator.core;
        match message {
            FromWorker::Step(result) => return self.step_done(worker, result),
            FromWorker::Stats(stats) => return self.report(worker, stats),
            FromWorker::Progress(progress) => core.load_progressed(worker, progress),
            FromWorker::GroupId(id) => core.group_id(worker, id, &mut effects),
            FromWorker::Formed(formed) => core.worker_formed(worker, formed, &mut effects),
            FromWorker::FormFailed(failure) => {
                core.form_failed(now, worker, &failure, &mut effects);
            }
            FromWorker::Started(started) => {
                core.worker_started(now, worker, started, &mut effects);
            }
            FromWorker::StepFailed(failed) => {
                if let Some(replica) = self.coordinator.replica_of(worker)
                    && !self.switches.step_failures_ignored
                {
                    let core = &mut self.coordinator.core;
                    core.epoch_failed(now, replica, failed.epoch, &failed.message, &mut effects);
                }
            }
            FromWorker::Logs(_) => return,
            FromWorker::Goodbye { reason, .. } => {
                core.worker_leaves(now, worker, &reason, &mut effects);
                goodbye = true;
            }
        }
        self.carry_out(effects);
        if goodbye {
            self.close(link, Side::Coordinator);
        }
    }

    fn step_done(&mut self, worker: WorkerId, mut result: StepResult) {
        self.report(worker, std::mem::take(&mut result.stats));
        let Some(replica) = self.coordinator.replica_of(worker) else {
            return self.coordinator.hub.observer().record().fenced_frames(1);
        };
        if self.switches.ranks_may_disagree {
            result.digest = 0;
        }
        self.deliver_late(replica, worker, &result);
        let again = self.switches.results_repeat.then(|| {
            let mut again = result.clone();
            again.step.0 += 1;
            Box::new(again)
        });
        let result = Box::new(result);
        self.mail_replica(replica, ReplicaMail::StepDone { worker, result });
        if let Some(result) = again {
            self.mail_replica(replica, ReplicaMail::StepDone { worker, result });
        }
    }

    /// Takes a report; now and then it comes again later, or an older one does.
    fn report(&mut self, worker: WorkerId, mut stats: WorkerStats) {
        let Some(connected) = self.coordinator.connected.get(&worker) else { return };
        if stats.snapshot.is_empty() {
            return;
        }
        let incarnation = connected.incarnation;
        self.checks.delivered(worker, incarnation, stats.sequence);
        let echoes = &mut self.coordinator.echoes;
        if self.random.chance(10) {
            echoes.push((worker, incarnation, stats.clone()));
        }
        let echo = (!echoes.is_empty() && self.random.chance(10)).then(|| {
            let index = self.random.range(0, echoes.len() as u64 - 1) as usize;
            echoes.swap_remove(index)
        });
        let mut incarnation = Incarnation(incarnation);
        if self.switches.reports_add_up {
            incarnation.0 ^= stats.sequence;
        }
        let hub = &self.coordinator.hub;
        let _ = hub.report(Source::Worker(worker), incarnation, &stats);
        hub.observer().record().worker_reported(worker, self.time());
        if let Some((worker, incarnation, echo)) = echo {
            let late = self.checks.retired.contains(&(worker, incarnation));
            self.checks.refused += u64::from(late);
            stats = echo;
            if self.switches.stale_reports_count {
                stats.sequence += 1_000_000;
            }
            let mut incarnation = Incarnation(incarnation);
            incarnation.0 += u64::from(late && self.switches.gone_process_counts_again);
            let _ = hub.report(Source::Worker(worker), incarnation, &stats);
        }
    }

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
                Effect::ReplicaReady { replica, epoch, ranks, num_blocks } => {
                    self.replica_ready(replica, epoch, ranks, num_blocks);
                }
                Effect::Pace { worker, slow } => {
                    self.coordinator.hub.observer().record().rank_slow(worker, slow);
                }
                Effect::ReplicaBroken { replica, epoch, end, reason } => {
                    self.report.relieved += u64::from(reason.contains("is slow"));
                    self.say(|| format!("{replica} broke, {epoch}: {reason}"));
                    if let Some(running) = self.coordinator.replicas.get_mut(&replica) {
                        running.serving = None;
                        self.coordinator.affinity.forget(replica);
                        running.load.last_step_ms.store(0, std::sync::atomic::Ordering::Relaxed);
                        if !self.switches.lost_is_not_told {
                            self.mail_replica(replica, ReplicaMail::Lost(epoch, end));
                            self.coordinator.orphanage.expect();
                        }
                    }
                }
                Effect::ReplicaRemoved { replica } => {
                    self.say(|| format!("{replica} is given up"));
                    self.coordinator.hub.observer().record().replica_removed(replica);
                    if let Some(running) = self.coordinator.replicas.remove(&replica) {
                        self.coordinator.retiring.insert(replica, running);
                        self.mail_replica(replica, ReplicaMail::Retire);
                        self.coordinator.orphanage.expect();
                    }
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
        num_blocks: u32,
    ) {
        let ranks: Vec<(WorkerId, LinkId)> = workers
            .iter()
            .filter_map(|worker| Some((*worker, self.coordinator.connected.get(worker)?.link)))
            .collect();
        if ranks.len() != workers.len() {
            return;
        }
        self.say(|| format!("{id} serves in {epoch}"));
        self.checks.serves(epoch, self.now);
        let config = ReplicaConfig {
            engine: self.scenario.engine.clone(),
            num_blocks,
            tensor_parallel: workers.len() as u32,
        };
        self.coordinator.hub.observer().record().replica_ready(id, &config);
        self.start_replica(id);
        self.mail_replica(id, ReplicaMail::Ready { epoch, num_blocks, ranks });
        if let Some(running) = self.coordinator.replicas.get_mut(&id) {
            running.serving = Some((epoch, workers));
        }
        let waits = |(_, running): &(&ReplicaId, &RunningReplica)| running.serving.is_none();
        let waiting = self.coordinator.replicas.iter().filter(waits).map(|(id, _)| *id);
        for id in waiting.collect::<Vec<_>>() {
            self.mail_replica(id, ReplicaMail::GiveUp);
            self.coordinator.orphanage.expect();
        }
    }

    /// As `ClusterActor::start_replica`.
    pub(crate) fn start_replica(&mut self, id: ReplicaId) {
        let (now, due) = (self.time(), self.now);
        let coordinator = &mut self.coordinator;
        if !coordinator.replicas.contains_key(&id) {
            let mut limits = self.scenario.limits;
            if self.switches.no_step_timeout {
                limits.step_timeout = Duration::MAX;
            }
            let observer = coordinator.hub.observer().clone();
            let Ok(scheduler) = Scheduler::new(self.scenario.scheduler) else {
                return self.fail("the scheduler refuses its configuration".to_owned());
            };
            let driver = ReplicaDriver::new(now, id, scheduler, observer, limits);
            let load = Arc::new(ReplicaLoad::default());
            let running = RunningReplica {
                operation: Operation::new(driver, load.clone()),
                load,
                serving: None,
                links: Vec::new(),
                mail: VecDeque::new(),
                mail_due: due,
                down_since: Some(due),
            };
            coordinator.replicas.insert(id, running);
        }
    }

    /// A request comes in from the front end, as `ClusterActor::submit`.
    pub(crate) fn submit(&mut self, index: usize) {
        let (request, events) = self.clients.open(index, self.now);
        if let Some((after, _)) = self.scenario.clients[index].leaves {
            self.schedule(after, Event::Leave(index));
        }
        let Some(replica) = self.coordinator.route(&request) else {
            let error = EngineError::Unavailable { message: "nothing serves".to_owned() };
            self.coordinator.hub.observer().record().rejected(reject_reason(&error));
            let _ = events.send(EngineEvent::Failed(error));
            drop(events);
            return self.hear_refused(index);
        };
        let down_since = self.coordinator.replicas.get(&replica).and_then(|it| it.down_since);
        self.clients.routed(index, replica, down_since);
        let request = Box::new(request);
        self.mail_replica(replica, ReplicaMail::Submit { index, request, events });
    }

    pub(crate) fn cancel(&mut self, id: RequestId) {
        if !self.switches.cancelled_is_forgotten {
            self.coordinator.orphanage.cancelled(id);
        }
        let replicas: Vec<ReplicaId> = self.coordinator.replicas.keys().copied().collect();
        for replica in replicas {
            self.mail_replica(replica, ReplicaMail::Cancel(id));
        }
    }

    /// Slots of members, and the epoch in which each is a rank of a replica that serves.
    pub(crate) fn places(&self) -> Vec<(usize, Option<Epoch>)> {
        let epoch_of = |worker: WorkerId| {
            let serves = |it: &ReplicaStatus| it.phase == ReplicaPhase::Serving;
            let holds = |it: &ReplicaStatus| it.ranks.contains(&Some(worker));
            self.coordinator.core.replicas().find(|it| serves(it) && holds(it)).map(|it| it.epoch)
        };
        let connected = self.coordinator.connected.iter();
        connected.map(|(worker, it)| (self.links[it.link].slot, epoch_of(*worker))).collect()
    }

    /// The slot of a connected worker.
    pub(crate) fn slot_of(&self, worker: WorkerId) -> Option<usize> {
        self.coordinator.connected.get(&worker).map(|it| self.links[it.link].slot)
    }

    /// A connection whose other end has been silent for too long, if there is one.
    pub(crate) fn unnoticed_silence(&self) -> Option<WorkerId> {
        let silent = |(_, it): &(&WorkerId, &Connected)| {
            self.now
                > self.links[it.link].heard
                    + LivenessConfig::default().dead_after.as_micros() as Time
                    + S / 5
        };
        self.coordinator.connected.iter().find(silent).map(|(worker, _)| *worker)
    }

    /// Whether all that are there serve, as far as they can, and all workers are linked.
    pub(crate) fn converged(&self) -> Result<(), String> {
        let alive = self.processes.iter().filter(|process| process.alive).count();
        let connected = self.coordinator.num_connected();
        let core = &self.coordinator.core;
        let all = || core.replicas().collect::<Vec<_>>();
        if connected != alive {
            return Err(format!("{connected} of {alive} workers are connected: {:?}", all()));
        }
        let degrees: Vec<usize> = self.scenario.degrees.iter().map(|it| *it as usize).collect();
        let (largest, least) = (degrees[0], degrees[degrees.len() - 1]);
        let present = |replica: &ReplicaStatus| replica.ranks.iter().flatten().count();
        let free = alive - core.replicas().map(|replica| present(&replica)).sum::<usize>();
        let max = core.max_replicas().map_or(usize::MAX, |max| max as usize);
        let there = core.replicas().count();
        let waiting: usize = core
            .replicas()
            .filter(|it| it.phase != ReplicaPhase::Serving)
            .map(|it| present(&it))
            .sum();
        if there > max {
            return Err(format!("{there} replicas, not {max}: {:?}", all()));
        }
        if there < max && free >= if there == 0 { least } else { largest } {
            return Err(format!("{free} workers are spare: {:?}", all()));
        }
        for replica in core.replicas() {
            let degree = replica.ranks.len();
            if replica.phase != ReplicaPhase::Serving {
                if waiting + free >= least {
                    return Err(format!("{} could serve: {:?}", replica.id, all()));
                }
                continue;
            }
            if degrees.iter().any(|it| *it > degree && *it <= degree + free) {
                return Err(format!("{} could have more ranks: {:?}", replica.id, all()));
            }
            let running = self.coordinator.replicas.get(&replica.id);
            if running.and_then(|running| running.operation.epoch()) != Some(replica.epoch) {
                return Err(format!("{} is not told of {}", replica.id, replica.epoch));
            }
        }
        Ok(())
    }
}
