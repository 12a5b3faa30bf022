//! The coordinator's replicas: their mailboxes, and the messages that they send, as
//! `replica::actor` does around the real `ReplicaCore`.
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use coordinator::cluster::dispatch::{NotPlaced, ToReplica};
use coordinator::engine::EngineError;
use coordinator::replica::core::{Outbound, ReplicaCore};
use coordinator::replica::driver::MovedRequest;
use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::metrics::labels::FailoverReason;
use shared::protocol::{StepResult, ToWorker};

use crate::coordinator::Coordinator;
use crate::events::Event;
use crate::network::{LinkId, Packet, Side};
use crate::scenario::Time;
use crate::world::World;

/// How often queues are compared, as in `ClusterActor`.
pub(crate) const SHARE: Duration = Duration::from_millis(500);

/// A message to a replica.
pub(crate) enum ReplicaMail {
    Told(ToReplica),
    EpochFormed {
        epoch: Epoch,
        num_blocks: u32,
        host_blocks: u32,
        step_tokens: u32,
        ranks: Vec<(WorkerId, LinkId)>,
    },
    StepDone {
        worker: WorkerId,
        result: Box<StepResult>,
    },
}

pub(crate) struct RunningReplica {
    pub(crate) core: ReplicaCore,
    /// The links that the replica's actor holds.
    pub(crate) links: Vec<(WorkerId, LinkId)>,
    pub(crate) mail: VecDeque<ReplicaMail>,
    pub(crate) mail_due: Time,
    /// Since when it has had no epoch.
    pub(crate) down_since: Option<Time>,
}

/// What a replica sends, collected until it has returned.
struct Outgoing<'a> {
    ranks: &'a [(WorkerId, LinkId, bool)],
    plans: Vec<(LinkId, Rc<ToWorker>)>,
    ends: Vec<(Epoch, FailoverReason, String, Vec<WorkerId>)>,
    paces: Vec<(Epoch, WorkerId, bool)>,
}

impl Outbound for Outgoing<'_> {
    fn send(&mut self, _epoch: Epoch, plan: &ToWorker) -> Result<(), String> {
        let plan = Rc::new(plan.clone());
        for (worker, link, open) in self.ranks {
            if !open {
                return Err(format!("{worker}: the link is closed"));
            }
            self.plans.push((*link, plan.clone()));
        }
        Ok(())
    }

    fn end_epoch(
        &mut self,
        epoch: Epoch,
        cause: FailoverReason,
        reason: String,
        hung: Vec<WorkerId>,
    ) {
        self.ends.push((epoch, cause, reason, hung));
    }

    fn report_pace(&mut self, epoch: Epoch, worker: WorkerId, slow: bool, _times: f64) {
        self.paces.push((epoch, worker, slow));
    }
}

/// A message to the cluster.
pub(crate) enum ClusterMail {
    EpochFailed {
        replica: ReplicaId,
        epoch: Epoch,
        cause: FailoverReason,
        reason: String,
        hung: Vec<WorkerId>,
    },
    Pace {
        replica: ReplicaId,
        epoch: Epoch,
        worker: WorkerId,
        slow: bool,
    },
    MigrateRequests {
        from: ReplicaId,
        requests: Vec<MovedRequest>,
    },
}

impl Coordinator {
    /// Returns a replica, including one that is given up but still has mail to read.
    pub(crate) fn running(&mut self, id: ReplicaId) -> Option<&mut RunningReplica> {
        self.replicas.get_mut(&id).or_else(|| self.retiring.get_mut(&id))
    }
}

impl World {
    /// Puts a message into a replica's mailbox, which it reads in order a little later.
    pub(crate) fn mail_replica(&mut self, id: ReplicaId, mail: ReplicaMail) {
        let after = self.now + self.random.skewed(1, 200);
        let life = self.coordinator.life;
        if let Some(running) = self.coordinator.running(id) {
            running.mail.push_back(mail);
            running.mail_due = after.max(running.mail_due + 1);
            let due = running.mail_due;
            self.schedule_at(due, Event::ReplicaMail(life, id));
        }
    }

    pub(crate) fn replica_mail(&mut self, id: ReplicaId) {
        let life = self.coordinator.life;
        let Some(running) = self.coordinator.running(id) else { return };
        let Some(mail) = running.mail.pop_front() else { return };
        let at = self.now;
        let mut submitted = None;
        match mail {
            ReplicaMail::Told(ToReplica::Submit { request, events }) => {
                submitted = Some(request.id.0 as usize);
                self.operate(id, |core, now, out| core.submit(now, *request, events, out));
            }
            ReplicaMail::Told(ToReplica::Cancel(request)) => {
                self.operate(id, |core, now, out| core.cancel(now, request, out));
            }
            ReplicaMail::EpochFormed { epoch, num_blocks, host_blocks, step_tokens, ranks } => {
                running.down_since = None;
                self.clients.served(life, id);
                let Some(running) = self.coordinator.running(id) else { return };
                let old = std::mem::replace(&mut running.links, ranks.clone());
                let workers = ranks.iter().map(|(worker, _)| *worker).collect();
                let mut requests = Vec::new();
                self.operate(id, |core, now, out| {
                    core.limit_steps(step_tokens);
                    requests = core.epoch_formed(now, epoch, num_blocks, host_blocks, workers, out);
                });
                self.mail_cluster(ClusterMail::MigrateRequests { from: id, requests });
                old.into_iter().for_each(|(_, link)| self.drop_handle(link));
            }
            ReplicaMail::Told(ToReplica::EpochEnded { epoch, end }) => {
                if running.core.epoch_ended(Duration::from_micros(at), epoch, end) {
                    running.down_since = Some(at);
                    let old = std::mem::take(&mut running.links);
                    self.clients.interrupted(life, id, at);
                    old.into_iter().for_each(|(_, link)| self.drop_handle(link));
                }
                self.give_up(id);
            }
            ReplicaMail::Told(ToReplica::GiveUp) => self.give_up(id),
            ReplicaMail::Told(ToReplica::Share(queue_share)) => {
                let mut requests = Vec::new();
                self.operate(id, |core, now, out| requests = core.share(now, queue_share, out));
                self.report.shared += requests.len() as u64;
                self.mail_migrating(id, requests);
            }
            ReplicaMail::Told(ToReplica::Retire) => {
                if running.core.epoch().is_some() {
                    self.clients.interrupted(life, id, at);
                }
                running.core.retire(Duration::from_micros(at));
                let old = std::mem::take(&mut running.links);
                old.into_iter().for_each(|(_, link)| self.drop_handle(link));
                self.give_up(id);
                self.hear_clients(id, None);
                self.coordinator.retiring.remove(&id);
                return;
            }
            ReplicaMail::Told(ToReplica::Adopt { requests, .. }) => {
                self.operate(id, |core, now, out| core.adopt(now, requests, out));
            }
            ReplicaMail::StepDone { worker, result } => {
                self.note_done(worker, &result);
                self.operate(id, |core, now, out| {
                    core.step_done(now, worker, *result, out);
                });
            }
        }
        self.hear_clients(id, submitted);
    }

    /// Lets a replica act, then sends what it wants sent.
    fn operate(
        &mut self,
        id: ReplicaId,
        act: impl FnOnce(&mut ReplicaCore, Duration, &mut Outgoing<'_>),
    ) {
        let now = self.time();
        let Some(running) = self.coordinator.running(id) else { return };
        let ranks: Vec<(WorkerId, LinkId)> = running.links.clone();
        let ranks: Vec<(WorkerId, LinkId, bool)> = ranks
            .into_iter()
            .map(|(worker, link)| (worker, link, self.links[link].open[Side::Coordinator as usize]))
            .collect();
        let Some(running) = self.coordinator.running(id) else { return };
        let (plans, ends, paces) = (Vec::new(), Vec::new(), Vec::new());
        let mut out = Outgoing { ranks: &ranks, plans, ends, paces };
        act(&mut running.core, now, &mut out);
        let Outgoing { plans, ends, paces, .. } = out;
        for (link, plan) in plans {
            if self.switches.masks_are_kept_back
                && matches!(&*plan, ToWorker::Masks(masks) if masks.masks.contains(&None))
            {
                continue;
            }
            self.check_plan(id, &plan);
            self.note_admitted(id, &plan);
            self.note_sent(id, &plan);
            self.send(link, Side::Worker, Packet::Down(plan));
        }
        for (epoch, cause, reason, hung) in ends {
            if cause == FailoverReason::StepOverdue {
                self.check_overdue(id, &ranks, &reason);
            }
            self.report.disagreed += u64::from(cause == FailoverReason::RanksDisagree);
            self.mail_cluster(ClusterMail::EpochFailed { replica: id, epoch, cause, reason, hung });
        }
        for (epoch, worker, slow) in paces {
            if !self.switches.slow_ranks_stay {
                self.mail_cluster(ClusterMail::Pace { replica: id, epoch, worker, slow });
            }
        }
    }

    /// A replica answers with the requests that it cannot continue.
    fn give_up(&mut self, id: ReplicaId) {
        let mut requests = Vec::new();
        self.operate(id, |core, now, out| requests = core.give_up(now, out));
        self.mail_migrating(id, requests);
    }

    fn mail_migrating(&mut self, id: ReplicaId, requests: Vec<MovedRequest>) {
        // Some clients cancel at the moment when no replica has their request.
        let ids = requests.iter().map(|request| request.id().0 as usize);
        let cancels = ids.filter(|index| self.clients.would_cancel(*index)).collect::<Vec<_>>();
        self.mail_cluster(ClusterMail::MigrateRequests { from: id, requests });
        for index in cancels {
            if self.random.chance(10) {
                self.leave(index);
            }
        }
    }

    fn mail_cluster(&mut self, mail: ClusterMail) {
        let life = self.coordinator.life;
        self.coordinator.mail.push_back(mail);
        let after = self.now + self.random.skewed(1, 200);
        self.coordinator.mail_due = after.max(self.coordinator.mail_due + 1);
        let due = self.coordinator.mail_due;
        self.schedule_at(due, Event::ClusterMail(life));
    }

    pub(crate) fn cluster_mail(&mut self) {
        let Some(mail) = self.coordinator.mail.pop_front() else { return };
        match mail {
            ClusterMail::EpochFailed { replica, epoch, cause, reason, hung } => {
                self.report.hung += u64::from(!hung.is_empty());
                let mut effects = Vec::new();
                let now = self.time();
                if !self.switches.hung_steps_are_failures {
                    self.coordinator.core.ranks_hang(now, replica, epoch, &hung);
                }
                self.coordinator.core.epoch_failed(
                    now,
                    replica,
                    epoch,
                    cause,
                    &reason,
                    &mut effects,
                );
                self.carry_out(effects);
            }
            ClusterMail::Pace { replica, epoch, worker, slow } => {
                let mut effects = Vec::new();
                let now = self.time();
                self.check_pace(worker, slow);
                let core = &mut self.coordinator.core;
                core.rank_pace(now, replica, epoch, worker, slow, &mut effects);
                self.carry_out(effects);
            }
            ClusterMail::MigrateRequests { from, requests } => self.place_requests(from, requests),
        }
    }

    fn place_requests(&mut self, from: ReplicaId, requests: Vec<MovedRequest>) {
        let (coordinator, mut messages) = (&mut *self.coordinator, Vec::new());
        let known = coordinator.core.replicas().map(|replica| replica.id);
        let NotPlaced { cancelled, unplaced, outgrown } =
            coordinator.dispatch.place(from, requests, known, &mut messages);
        for request in cancelled {
            request.end(coordinator.hub.observer(), None);
        }
        for request in unplaced {
            let error = EngineError::Unavailable { message: "nothing serves".to_owned() };
            request.end(coordinator.hub.observer(), Some(error));
        }
        for (request, _) in outgrown {
            let error = EngineError::Unavailable { message: "no room".to_owned() };
            request.end(coordinator.hub.observer(), Some(error));
        }
        self.tell_replicas(messages);
        self.hear_clients(from, None);
    }

    fn share_queues(&mut self) {
        let mut messages = Vec::new();
        self.coordinator.dispatch.share_queues(&mut messages);
        self.tell_replicas(messages);
    }

    /// Time passes for the cluster and its replicas.
    pub(crate) fn tick(&mut self) {
        let now = self.time();
        let mut effects = Vec::new();
        if !self.switches.no_cluster_tick {
            self.coordinator.core.tick(now, &mut effects);
        }
        self.carry_out(effects);
        self.free_adapters();
        if now >= self.coordinator.shares_at {
            self.coordinator.shares_at = now + SHARE;
            if !self.switches.queues_are_not_shared {
                self.share_queues();
            }
        }
        let ids: Vec<ReplicaId> = self.coordinator.replicas.keys().copied().collect();
        for id in ids {
            if self.switches.no_canary && self.clients.hung().is_none() {
                continue;
            }
            self.operate(id, |core, now, out| core.tick(now, out));
            self.hear_clients(id, None);
        }
    }

    /// Occasionally a result of a past epoch comes again, as it might if links did not keep order.
    pub(crate) fn deliver_late(
        &mut self,
        replica: ReplicaId,
        worker: WorkerId,
        result: &StepResult,
    ) {
        let coordinator = &mut *self.coordinator;
        let late = &mut coordinator.late_results;
        if self.random.chance(20) {
            late.push((replica, worker, result.clone()));
        }
        let present = coordinator.replicas[&replica].core.epoch();
        let is_old = |it: &(ReplicaId, WorkerId, StepResult)| {
            it.0 == replica && Some(it.2.epoch) < present && it.2.step == result.step
        };
        if let Some(index) = late.iter().position(is_old) {
            let (replica, worker, mut result) = late.swap_remove(index);
            if self.switches.old_epochs_pass {
                result.epoch = present.unwrap_or_default();
            }
            let result = Box::new(result);
            self.mail_replica(replica, ReplicaMail::StepDone { worker, result });
        }
    }
}
