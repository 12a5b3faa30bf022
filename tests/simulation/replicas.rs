//! The coordinator's replicas: their mailboxes, and what they want sent. Does what `replica::actor`
//! does around the real `Operation`.
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use coordinator::engine::{EventSender, GenerateRequest};
use coordinator::replica::operation::{Operation, Outside, ReplicaLoad};
use shared::ids::{Epoch, ReplicaId, RequestId, WorkerId};
use shared::protocol::{StepResult, ToWorker};

use crate::network::{LinkId, Packet, Side};
use crate::scenario::Time;
use crate::world::{Event, World};

/// A message to a replica.
pub(crate) enum ReplicaMail {
    Submit { index: usize, request: Box<GenerateRequest>, events: EventSender },
    Cancel(RequestId),
    Ready { epoch: Epoch, num_blocks: u32, ranks: Vec<(WorkerId, LinkId)> },
    Lost(Epoch),
    StepDone { worker: WorkerId, result: Box<StepResult> },
}

pub(crate) struct RunningReplica {
    pub(crate) operation: Operation,
    pub(crate) load: Arc<ReplicaLoad>,
    pub(crate) serving: Option<(Epoch, Vec<WorkerId>)>,
    /// The links that the replica's actor holds.
    pub(crate) links: Vec<(WorkerId, LinkId)>,
    pub(crate) mail: VecDeque<ReplicaMail>,
    pub(crate) mail_due: Time,
    /// Since when it has had no epoch.
    pub(crate) down_since: Option<Time>,
}

/// What a replica wants sent; sent when it has returned.
struct Outgoing<'a> {
    ranks: &'a [(WorkerId, LinkId, bool)],
    plans: Vec<(LinkId, Rc<ToWorker>)>,
    ends: Vec<(Epoch, String)>,
}

impl Outside for Outgoing<'_> {
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

    fn end_epoch(&mut self, epoch: Epoch, reason: String) {
        self.ends.push((epoch, reason));
    }
}
/// A message to the cluster.
pub(crate) struct EpochFailed {
    replica: ReplicaId,
    epoch: Epoch,
    reason: String,
}

impl World {
    /// Sends to a replica's mailbox, which it reads in order a little later.
    pub(crate) fn mail_replica(&mut self, id: ReplicaId, mail: ReplicaMail) {
        let after = self.now + self.random.skewed(1, 200);
        if let Some(running) = self.coordinator.replicas.get_mut(&id) {
            running.mail.push_back(mail);
            running.mail_due = after.max(running.mail_due + 1);
            let due = running.mail_due;
            self.schedule_at(due, Event::ReplicaMail(id));
        }
    }

    pub(crate) fn replica_mail(&mut self, id: ReplicaId) {
        let Some(running) = self.coordinator.replicas.get_mut(&id) else { return };
        let Some(mail) = running.mail.pop_front() else { return };
        let at = self.now;
        let mut submitted = None;
        match mail {
            ReplicaMail::Submit { index, request, events } => {
                submitted = Some(index);
                self.operate(id, |operation, now, out| {
                    operation.submit(now, *request, events, out)
                });
            }
            ReplicaMail::Cancel(request) => {
                self.operate(id, |operation, now, out| operation.cancel(now, request, out));
            }
            ReplicaMail::Ready { epoch, num_blocks, ranks } => {
                running.down_since = None;
                let old = std::mem::replace(&mut running.links, ranks.clone());
                let workers = ranks.iter().map(|(worker, _)| *worker).collect();
                self.operate(id, |operation, now, out| {
                    operation.ready(now, epoch, num_blocks, workers, out);
                });
                old.into_iter().for_each(|(_, link)| self.drop_handle(link));
            }
            ReplicaMail::Lost(epoch) => {
                if running.operation.lost(Duration::from_micros(at), epoch) {
                    running.down_since = Some(at);
                    let old = std::mem::take(&mut running.links);
                    old.into_iter().for_each(|(_, link)| self.drop_handle(link));
                }
            }
            ReplicaMail::StepDone { worker, result } => {
                self.operate(id, |operation, now, out| {
                    operation.step_done(now, worker, *result, out);
                });
            }
        }
        self.hear_clients(id, submitted);
    }

    /// Lets a replica act, then sends what it wants sent.
    fn operate(
        &mut self,
        id: ReplicaId,
        act: impl FnOnce(&mut Operation, Duration, &mut Outgoing<'_>),
    ) {
        let now = self.time();
        let Some(running) = self.coordinator.replicas.get_mut(&id) else { return };
        let ranks: Vec<(WorkerId, LinkId, bool)> = running
            .links
            .iter()
            .map(|(worker, link)| {
                (*worker, *link, self.links[*link].open[Side::Coordinator as usize])
            })
            .collect();
        let mut out = Outgoing { ranks: &ranks, plans: Vec::new(), ends: Vec::new() };
        act(&mut running.operation, now, &mut out);
        let Outgoing { plans, ends, .. } = out;
        for (link, plan) in plans {
            self.check_plan(id, &plan);
            self.send(link, Side::Worker, Packet::Down(plan));
        }
        for (epoch, reason) in ends {
            if reason.contains("took over") {
                self.check_timeout(&ranks, &reason);
            }
            self.coordinator.mail.push_back(EpochFailed { replica: id, epoch, reason });
            let after = self.now + self.random.skewed(1, 200);
            self.coordinator.mail_due = after.max(self.coordinator.mail_due + 1);
            let due = self.coordinator.mail_due;
            self.schedule_at(due, Event::ClusterMail);
        }
    }

    pub(crate) fn cluster_mail(&mut self) {
        let Some(EpochFailed { replica, epoch, reason }) = self.coordinator.mail.pop_front() else {
            return;
        };
        let mut effects = Vec::new();
        let now = self.time();
        self.coordinator.core.epoch_failed(now, replica, epoch, &reason, &mut effects);
        self.carry_out(effects);
    }

    /// Time passes for the cluster and its replicas.
    pub(crate) fn tick(&mut self) {
        let now = self.time();
        let mut effects = Vec::new();
        if !self.switches.no_cluster_tick {
            self.coordinator.core.tick(now, &mut effects);
        }
        self.carry_out(effects);
        let ids: Vec<ReplicaId> = self.coordinator.replicas.keys().copied().collect();
        for id in ids {
            if self.switches.no_canary && self.clients.hung().is_none() {
                continue;
            }
            self.operate(id, |operation, now, out| operation.tick(now, out));
            self.hear_clients(id, None);
        }
    }

    /// Now and then a result of an epoch that is over comes again, as it could if links did not
    /// keep order.
    pub(crate) fn deliver_late(
        &mut self,
        replica: ReplicaId,
        worker: WorkerId,
        result: &StepResult,
    ) {
        let late = &mut self.coordinator.late_results;
        if self.random.chance(20) {
            late.push((replica, worker, result.clone()));
        }
        let present = self.coordinator.replicas[&replica].operation.epoch();
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
