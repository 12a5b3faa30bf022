//! The coordinator's workers: which may join, what they report, and how they leave, as in
//! `cluster::actor::workers`.
use coordinator::cluster::Member;
use coordinator::cluster::roster::{Admission, JoinOutcome};
use shared::ids::{Incarnation, WorkerId};
use shared::metrics::Source;
use shared::metrics::labels::FencedReason;
use shared::protocol::{
    FromWorker, NodeResources, Rejoin, SequenceOutput, StepResult, WorkerStats,
};

use crate::coordinator::Connected;
use crate::network::{Link, LinkId, Packet, Side};
use crate::replicas::{ReplicaMail, RunningReplica};
use crate::scenario::Time;
use crate::world::World;

impl World {
    /// Handles a worker's hello: admits it, welcomes it, and lets it join.
    pub(crate) fn hello(&mut self, link: LinkId, rejoin: Rejoin) {
        let (slot, incarnation) = (self.links[link].slot, self.links[link].incarnation);
        let node = self.node_name(slot);
        let roster = &mut self.coordinator.roster;
        let admission = roster.admit(&node, Incarnation(incarnation), rejoin.slot);
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
            // As far as is known, another process has the name: this one may try again.
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
        let coordinator = &mut *self.coordinator;
        let JoinOutcome { link: number, restarted, retired } =
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
            self.coordinator.checks.retired.insert((worker, retired.0));
        }
        let is_on_gpu = self.scenario.gpus[self.scenario.nodes[slot]];
        let gpu = if is_on_gpu { format!("GPU-{node}") } else { String::new() };
        let member = Member {
            worker,
            incarnation: Incarnation(incarnation),
            node,
            host: format!("host-{}", self.scenario.hosts[slot]),
            collective_addr: ([127, 0, 0, 1], 9000 + slot as u16).into(),
            draining: false,
            offer: NodeResources::default(),
            gpu,
            build: "b".into(),
        };
        let mut effects = Vec::new();
        let now = self.time();
        let core = &mut self.coordinator.core;
        core.set_held_weights(worker, rejoin.shard);
        core.trouble_brought(now, &member, rejoin.trouble);
        self.coordinator.core.worker_joined(now, member, &mut effects);
        self.carry_out(effects);
    }

    /// Drains the node of a slot, as `ClusterActor` does.
    pub(crate) fn drain(&mut self, slot: usize, back_after: Option<Time>) {
        let node = self.node_name(slot);
        let found = self.coordinator.core.members().find(|it| it.node == node);
        let Some(worker) = found.map(|it| it.worker) else { return };
        let stays = |it: &&Member| !it.draining && it.worker != worker;
        let left = self.coordinator.core.members().filter(stays).count();
        let mut effects = Vec::new();
        let now = self.time();
        let done = self.coordinator.core.drain(now, &[worker], &mut effects);
        let least = *self.scenario.degrees.last().unwrap_or(&1) as usize;
        if done.is_ok() != (left >= least) {
            self.fail(format!("{node} is drained with {left} others there: {done:?}"));
        }
        self.carry_out(effects);
        if done.is_ok() {
            self.processes[slot].back_after = back_after;
            self.report.drained += 1;
            let told = self.coordinator.core.member(worker).map(|it| it.incarnation.0);
            told.into_iter().for_each(|run| self.drained(run));
        }
    }

    pub(crate) fn node_name(&self, slot: usize) -> String {
        format!("node-{}", self.scenario.nodes[slot])
    }

    /// Whether events of a link belong to a worker's current connection.
    fn is_current(&self, worker: WorkerId, link: LinkId) -> bool {
        let Some(connected) = self.coordinator.connected.get(&worker) else { return false };
        if self.switches.links_not_told_apart {
            return connected.incarnation == self.links[link].incarnation;
        }
        connected.link == link && self.coordinator.roster.is_present(worker, connected.number)
    }

    /// A worker has been silent for a while, or is heard again.
    pub(crate) fn worker_is_silent(&mut self, link: LinkId, silent: bool) {
        let Some(worker) = self.links[link].joined else { return };
        if self.is_current(worker, link) {
            self.say(|| format!("{worker} is {}", if silent { "silent" } else { "heard again" }));
            let dispatch = &mut self.coordinator.dispatch;
            if silent { dispatch.silent(worker) } else { dispatch.not_silent(worker) }
        }
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
        self.coordinator.dispatch.not_silent(worker);
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

    /// A link closes when nothing holds a handle to it.
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
            FromWorker::Step(result) => {
                core.executor_heard(now, worker);
                return self.step_done(worker, result);
            }
            FromWorker::Stats(stats) => {
                core.executor_heard(now, worker);
                return self.report(worker, stats);
            }
            FromWorker::Progress(progress) => core.load_progressed(now, worker, progress),
            FromWorker::GroupId(id) => core.group_id(now, worker, id, &mut effects),
            FromWorker::Formed(formed) => core.worker_formed(now, worker, formed, &mut effects),
            FromWorker::FormFailed(failure) => {
                core.form_failed(now, worker, &failure, &mut effects);
            }
            FromWorker::Started(started) => {
                core.worker_started(now, worker, started, &mut effects);
            }
            FromWorker::StepFailed(failed) => {
                core.executor_heard(now, worker);
                if let Some(replica) = self.coordinator.dispatch.replica_of(worker, None)
                    && !self.switches.step_failures_ignored
                {
                    let load = self.coordinator.dispatch.load(replica);
                    let last_step = load.and_then(|load| load.last_step());
                    let (epoch, why) = (failed.epoch, &failed.message);
                    let (core, in_vain) = (&mut self.coordinator.core, failed.waited_in_vain());
                    let to = &mut effects;
                    core.step_failed(now, worker, replica, epoch, last_step, in_vain, why, to);
                }
            }
            FromWorker::Adapter(done) => core.adapter_done(now, worker, done, &mut effects),
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
        let Some(replica) = self.coordinator.dispatch.replica_of(worker, None) else {
            return self.coordinator.hub.observer().record().fenced_frame(FencedReason::NoRank);
        };
        if self.switches.ranks_may_disagree {
            result.digest = 0;
        }
        if self.switches.drafts_are_cut {
            let of_the_same =
                |pair: &[SequenceOutput]| pair.len() == 2 && pair[0].seq == pair[1].seq;
            let last = result.outputs.windows(2).rposition(of_the_same);
            last.map(|at| result.outputs.remove(at + 1));
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

    /// Takes a report; occasionally it, or an older one, comes again later.
    fn report(&mut self, worker: WorkerId, mut stats: WorkerStats) {
        let Some(connected) = self.coordinator.connected.get(&worker) else { return };
        if stats.snapshot.is_empty() {
            return;
        }
        let incarnation = connected.incarnation;
        let checks = &mut self.coordinator.checks;
        if checks.retired.contains(&(worker, incarnation)) {
            // An earlier coordinator closed its totals.
            checks.refused += 1;
        } else {
            checks.delivered(worker, incarnation, stats.sequence);
        }
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
        if self.switches.workers_count_twice {
            incarnation.0 += self.coordinator.life as u64;
        }
        let now = self.time();
        let coordinator = &mut *self.coordinator;
        let hub = &coordinator.hub;
        let _ = hub.report(Source::Worker(worker), incarnation, &stats);
        hub.observer().record().worker_reported(worker, now);
        if let Some((worker, incarnation, echo)) = echo {
            let late = coordinator.checks.retired.contains(&(worker, incarnation));
            coordinator.checks.refused += u64::from(late);
            stats = echo;
            if self.switches.stale_reports_count {
                stats.sequence += 1_000_000;
            }
            let mut incarnation = Incarnation(incarnation);
            incarnation.0 += u64::from(late && self.switches.gone_process_counts_again);
            let _ = hub.report(Source::Worker(worker), incarnation, &stats);
        }
    }
}
