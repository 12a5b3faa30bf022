//! A worker process: its life, and its end of the link, as in `worker::actor`.
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::membership::{Destination, Record, Role, View};
use shared::metrics::RankStats;
use shared::protocol::{
    ExitReason, FromWorker, Rejoin, StepTimings, ToWorker, Trouble, WorkerStats,
};

use crate::events::Event;
use crate::executor::{Command, Executor, Job};
use crate::network::{LinkId, Packet, Side};
use crate::scenario::{FORM_TIMEOUT, MS, S, Time};
use crate::world::World;

/// Same as in `worker::actor`.
const HANDSHAKE_DEADLINE: Time = 3 * S;
const REDIAL_MIN: Time = 50 * MS;
const REDIAL_MAX: Time = 2 * S;
const LEAVE_PATIENCE: Time = 2 * S;
/// Shorter than `worker::actor`'s, so that it may pass before or after the coordinator notices.
const RELEASE_PATIENCE: Time = 25 * S;
/// A hanging executor is noticed in a step, and then twice while it is formed.
const HANG_ENDS_WITHIN: Time = 70 * S + 2 * (FORM_TIMEOUT + 40 * S);

pub(crate) struct Process {
    pub(crate) incarnation: u64,
    pub(crate) alive: bool,
    pub(crate) frozen: bool,
    /// What happened while it was frozen.
    pub(crate) deferred: Vec<Event>,
    /// Its link, once it is welcomed.
    pub(crate) link: Option<LinkId>,
    dialling: Option<LinkId>,
    generation: u64,
    redial: Time,
    /// The coordinator dialled last.
    pub(crate) dialled: Option<Destination>,
    /// Whether it knows of no coordinator to dial.
    waits_for_leader: bool,
    /// Its slot at the current or last coordinator.
    pub(crate) worker: Option<WorkerId>,
    /// What it was told to remember, and when.
    trouble: (Trouble, Time),
    /// By slot, since each coordinator may give it another.
    stats: BTreeMap<WorkerId, Counted>,
    pub(crate) last_report: Option<Time>,
    pub(crate) executor: Executor,
    pub(crate) slowed: u64,
    pub(crate) stall: Time,
    pub(crate) fail_step: bool,
    /// Whether all of its steps hang.
    pub(crate) steps_hang: bool,
    pub(crate) diverge: bool,
    pub(crate) fail_form: Option<bool>,
    pub(crate) fail_adapter: bool,
    pub(crate) slow_fetch: Option<(Time, bool)>,
    /// Contents of the adapters that its host has fetched.
    pub(crate) fetched: BTreeSet<u64>,
    /// Set if its executor hangs, with whether its process notices.
    pub(crate) hung: Option<Hung>,
    /// When it is started again after it was told to end, if ever.
    pub(crate) back_after: Option<Time>,
}

impl Process {
    /// A slot without a process.
    pub(crate) fn absent() -> Self {
        Self {
            incarnation: 0,
            alive: false,
            frozen: false,
            deferred: Vec::new(),
            link: None,
            dialling: None,
            generation: 0,
            redial: REDIAL_MIN,
            dialled: None,
            waits_for_leader: false,
            worker: None,
            trouble: (Trouble::default(), 0),
            stats: BTreeMap::new(),
            last_report: None,
            executor: Executor::default(),
            slowed: 1,
            stall: 0,
            fail_step: false,
            steps_hang: false,
            diverge: false,
            fail_form: None,
            fail_adapter: false,
            slow_fetch: None,
            fetched: BTreeSet::new(),
            hung: None,
            back_after: None,
        }
    }

    /// Returns the epoch of the current step, and since when it has been running.
    pub(crate) fn step_under_way(&self) -> Option<(Epoch, Time)> {
        let executor = &self.executor;
        let (Some(Job::Compute(_)), Some((link, epoch))) = (&executor.job, executor.epoch) else {
            return None;
        };
        (link == executor.link).then_some((epoch, executor.began))
    }

    /// Does what `LinkOutbox::stats` does.
    pub(crate) fn stats(&mut self) -> &mut Counted {
        let worker = self.worker.unwrap_or_default();
        self.stats.entry(worker).or_insert_with(|| Counted {
            stats: RankStats::new(worker),
            steps: 0,
            formed: false,
        })
    }
}

/// An executor that hangs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hung {
    /// Whether the process ends when its executor does not leave an epoch.
    pub(crate) notices: bool,
    /// Whether it has since been told to form or to leave an epoch.
    pub(crate) asked: bool,
}

/// What a process counted under one slot.
pub(crate) struct Counted {
    stats: RankStats,
    /// Steps recorded in `stats`.
    steps: u64,
    formed: bool,
}

impl Counted {
    pub(crate) fn formed(&mut self, replica: ReplicaId, rank: u32) {
        self.stats.formed(replica, rank, 1, Duration::ZERO);
        self.formed = true;
    }

    /// A step that began under another slot does not count for any rank yet.
    pub(crate) fn step(&mut self, timings: &StepTimings) {
        self.stats.step(timings);
        self.steps += u64::from(self.formed);
    }
}

impl World {
    pub(crate) fn start_process(&mut self, slot: usize) {
        if self.processes[slot].alive || self.ended[slot] {
            return;
        }
        let incarnation = self.random.next();
        let old = &mut self.processes[slot];
        let fetched = std::mem::take(&mut old.fetched);
        let (slowed, stall) = (old.slowed, old.stall);
        let (fail_adapter, slow_fetch) = (old.fail_adapter, old.slow_fetch);
        let (fail_step, fail_form, diverge) = (old.fail_step, old.fail_form, old.diverge);
        self.processes[slot] = Process {
            incarnation,
            alive: true,
            slowed,
            stall,
            fail_step,
            diverge,
            fail_form,
            fail_adapter,
            slow_fetch,
            fetched,
            ..Process::absent()
        };
        self.say(|| format!("slot {slot} starts"));
        let record = Record {
            node: self.node_name(slot),
            role: Role::Worker,
            incarnation,
            address: String::new(),
            http: String::new(),
            pid: 1,
            version: String::new(),
            protocol: 0,
            model: None,
            serves: None,
        };
        self.join_etcd(slot, record);
        self.schedule(0, Event::Dial { slot, incarnation, generation: 0 });
    }

    /// The process is told to end: it says goodbye, and ends when it is released or after a while.
    pub(crate) fn leave_cluster(&mut self, slot: usize, back_after: Option<Time>) {
        let process = &mut self.processes[slot];
        if !process.alive || process.frozen {
            return;
        }
        process.back_after = back_after;
        let incarnation = process.incarnation;
        self.disturb(slot, LEAVE_PATIENCE);
        if self.processes[slot].link.is_some() {
            self.tell_now(
                slot,
                FromWorker::Goodbye { reason: "it leaves".to_owned(), exit: ExitReason::OnPurpose },
            );
            self.schedule(LEAVE_PATIENCE, Event::LeaveDeadline { slot, incarnation });
            self.faulty_until(self.now + LEAVE_PATIENCE);
        } else {
            self.shut_down(slot);
        }
    }

    /// The executor does nothing any more. Its supervisor, if told, restarts the process.
    pub(crate) fn hang(&mut self, slot: usize, notices: bool) {
        let process = &mut self.processes[slot];
        if process.alive && process.hung.is_none() {
            process.hung = Some(Hung { notices, asked: false });
            process.back_after.get_or_insert(S);
            self.disturb(slot, HANG_ENDS_WITHIN);
            self.faulty_until(self.now + HANG_ENDS_WITHIN);
        }
    }

    /// A hanging executor gets a command: from now on the hang must be noticed.
    pub(crate) fn hung_is_asked(&mut self, slot: usize, leaves: bool) {
        let process = &mut self.processes[slot];
        let incarnation = process.incarnation;
        let Some(hung) = &mut process.hung else { return };
        let first = !std::mem::replace(&mut hung.asked, true);
        let ends = leaves && std::mem::take(&mut hung.notices);
        if first {
            self.disturb(slot, HANG_ENDS_WITHIN);
            self.faulty_until(self.now + HANG_ENDS_WITHIN);
        }
        if ends && !self.switches.hung_ranks_are_waited_for {
            self.schedule(RELEASE_PATIENCE, Event::LeaveDeadline { slot, incarnation });
        }
    }

    pub(crate) fn leave_deadline(&mut self, slot: usize, incarnation: u64) {
        if self.processes[slot].alive && self.processes[slot].incarnation == incarnation {
            self.shut_down(slot);
        }
    }

    /// The process is told to end.
    fn shut_down(&mut self, slot: usize) {
        let back_after = self.processes[slot].back_after;
        self.leave_etcd(slot, true);
        self.kill(slot);
        self.disturb(slot, 0);
        self.faulty_until(self.now);
        if let Some(after) = back_after {
            self.start_again(slot, after);
        }
    }

    /// The process is gone, with all it held.
    pub(crate) fn kill(&mut self, slot: usize) {
        if !self.processes[slot].alive {
            return;
        }
        self.leave_collective(slot);
        self.leave_etcd(slot, false);
        let process = &mut self.processes[slot];
        process.alive = false;
        process.frozen = false;
        process.deferred.clear();
        process.executor = Executor::default();
        process.hung = None;
        process.steps_hang = false;
        let links = [process.link.take(), process.dialling.take()];
        for link in links.into_iter().flatten() {
            self.close(link, Side::Worker);
        }
        self.release_held(slot);
    }

    pub(crate) fn unfreeze(&mut self, slot: usize, incarnation: u64) {
        let process = &mut self.processes[slot];
        if process.incarnation != incarnation || !process.frozen {
            return;
        }
        process.frozen = false;
        let mut at = self.now;
        for event in std::mem::take(&mut self.processes[slot].deferred) {
            at += self.random.range(1, 10 * MS);
            self.schedule_at(at, event);
        }
        self.release_held(slot);
    }

    pub(crate) fn dial(&mut self, slot: usize, incarnation: u64, generation: u64) {
        let process = &self.processes[slot];
        let current = process.incarnation == incarnation && process.generation == generation;
        if !process.alive || !current || process.link.is_some() || process.dialling.is_some() {
            return;
        }
        let known = self.view(slot).and_then(View::destination);
        // If no coordinator leads, the last leader may still be there.
        let Some(to) = known.or_else(|| self.processes[slot].dialled.clone()) else {
            self.processes[slot].waits_for_leader = true;
            return;
        };
        let life = self.serves_at(&to.address);
        let process = &mut self.processes[slot];
        if process.dialled.replace(to.clone()) != Some(to) {
            process.redial = REDIAL_MIN;
        }
        let Some(life) = life else {
            // Nothing listens there, or a standby hangs up.
            process.redial = (process.redial * 2).min(REDIAL_MAX);
            let after = process.redial;
            return self.schedule(after, Event::Dial { slot, incarnation, generation });
        };
        let link = self.new_link(slot, incarnation, life);
        // During a partition, a connection is established only once both directions work.
        self.links[link].established = self.paths[slot].blocked == [0, 0];
        self.processes[slot].dialling = Some(link);
        let process = &self.processes[slot];
        let shard = process.executor.held();
        let (trouble, since) = process.trouble;
        let trouble = trouble.after(Duration::from_micros(self.now - since));
        let rejoin = Rejoin { slot: process.worker, shard, trouble };
        self.send(link, Side::Coordinator, Packet::Hello(rejoin));
        self.schedule(HANDSHAKE_DEADLINE, Event::HandshakeDeadline { slot, link });
    }

    pub(crate) fn handshake_deadline(&mut self, slot: usize, link: LinkId) {
        if self.processes[slot].dialling == Some(link) {
            self.close(link, Side::Worker);
        }
    }

    pub(crate) fn welcomed(&mut self, link: LinkId, worker: WorkerId) {
        let slot = self.links[link].slot;
        if self.processes[slot].dialling != Some(link) {
            return;
        }
        let process = &mut self.processes[slot];
        process.dialling = None;
        process.link = Some(link);
        process.redial = REDIAL_MIN;
        process.generation += 1;
        process.worker = Some(worker);
        // As in `Executor::new_link`.
        process.executor.link += 1;
        if self.switches.old_commands_run {
            process.executor.aborted = (process.executor.link, Epoch(0));
        }
        let (incarnation, generation) = (process.incarnation, process.generation);
        self.schedule(0, Event::ReportDue { slot, incarnation, generation });
        self.watch(link, Side::Worker);
    }

    /// The process ends, and its supervisor starts it again.
    pub(crate) fn refused(&mut self, link: LinkId) {
        let slot = self.links[link].slot;
        if self.processes[slot].dialling == Some(link) {
            self.kill(slot);
            self.start_again(slot, S);
        }
    }

    pub(crate) fn worker_link_closed(&mut self, link: LinkId) {
        let (slot, incarnation) = (self.links[link].slot, self.links[link].incarnation);
        let process = &mut self.processes[slot];
        if !process.alive || process.incarnation != incarnation {
            return;
        }
        if process.dialling == Some(link) {
            process.dialling = None;
            process.redial = (process.redial * 2).min(REDIAL_MAX);
        } else if process.link == Some(link) {
            process.link = None;
            process.generation += 1;
            if !self.switches.keeps_epoch_without_link {
                self.abort(slot, Epoch(u64::MAX));
            }
        } else {
            return;
        }
        let process = &self.processes[slot];
        let (generation, after) = (process.generation, process.redial);
        self.schedule(after, Event::Dial { slot, incarnation, generation });
    }

    /// Leaves a coordinator when another leads, as `WorkerActor` does.
    pub(crate) fn follow(&mut self, slot: usize) {
        let Some(now) = self.view(slot).and_then(View::destination) else { return };
        let process = &mut self.processes[slot];
        let waits = std::mem::take(&mut process.waits_for_leader);
        let stays = self.switches.leader_is_not_followed && !waits;
        if !process.alive || process.dialled.as_ref() == Some(&now) || stays {
            return;
        }
        process.generation += 1;
        let (incarnation, generation) = (process.incarnation, process.generation);
        let (link, dialling) = (process.link.take(), process.dialling.take());
        if link.is_some() {
            process.redial = REDIAL_MIN;
        }
        if let Some(link) = link.or(dialling) {
            self.close(link, Side::Worker);
        }
        if link.is_some() && !self.switches.keeps_epoch_without_link {
            self.abort(slot, Epoch(u64::MAX));
        }
        self.schedule(0, Event::Dial { slot, incarnation, generation });
    }

    pub(crate) fn report_due(&mut self, slot: usize, incarnation: u64, generation: u64) {
        let process = &self.processes[slot];
        let current = process.incarnation == incarnation && process.generation == generation;
        if process.alive && current && process.link.is_some() {
            let waits = process.executor.queue.iter().any(|it| matches!(it, (_, Command::Report)));
            if !waits || self.switches.reports_pile_up {
                let _ = self.command(slot, Command::Report);
            }
            self.schedule(S, Event::ReportDue { slot, incarnation, generation });
        }
    }

    pub(crate) fn worker_takes(&mut self, link: LinkId, message: &Rc<ToWorker>) {
        let slot = self.links[link].slot;
        if self.processes[slot].link != Some(link) {
            return;
        }
        let queued = match &**message {
            ToWorker::Form(form) => self.command(slot, Command::Form(form.clone())),
            ToWorker::Start(start) => self.command(slot, Command::Start(*start)),
            ToWorker::Step(_) => self.command(slot, Command::Step(message.clone())),
            ToWorker::Abort { epoch } => {
                if !self.switches.ignores_abort {
                    self.abort(slot, *epoch);
                }
                true
            }
            ToWorker::Masks(masks) => {
                self.tell_masks(slot, masks);
                true
            }
            // Its ranks have no GPUs, and its spares fetch when they become ranks.
            ToWorker::GroupId(_) | ToWorker::Fetch(_) => true,
            ToWorker::Adapter(command) => self.command(slot, Command::Adapter(command.clone())),
            ToWorker::Remember(trouble) => {
                self.processes[slot].trouble = (*trouble, self.now);
                true
            }
            ToWorker::Shutdown { again, .. } => {
                if *again {
                    // Its supervisor goes by how it ends.
                    self.processes[slot].back_after.get_or_insert(S);
                }
                self.shut_down(slot);
                true
            }
        };
        if !queued {
            self.fail(format!("slot {slot} ends: its executor has too many commands waiting"));
        }
    }

    pub(crate) fn stats(&mut self, slot: usize) -> WorkerStats {
        let process = &mut self.processes[slot];
        process.last_report = Some(self.now);
        let counted = process.stats();
        let (stats, steps) = (counted.stats.report().unwrap_or_default(), counted.steps);
        let worker = process.worker.unwrap_or_default();
        let key = (worker, process.incarnation, stats.sequence);
        self.checks.reported.insert(key, steps);
        stats
    }

    /// Sends a message about the current command to the coordinator. Like `Uplink::tell_over`, only
    /// to the coordinator that the command came from, and not at all without a link.
    pub(crate) fn tell(&mut self, slot: usize, message: FromWorker) {
        let process = &self.processes[slot];
        let passes = process.executor.entered == process.executor.link;
        if passes || self.switches.old_words_pass {
            self.tell_now(slot, message);
        }
    }

    /// Sends a message about the process itself.
    fn tell_now(&mut self, slot: usize, message: FromWorker) {
        if let Some(link) = self.processes[slot].link {
            self.send(link, Side::Coordinator, Packet::Up(Box::new(message)));
        }
    }
}
