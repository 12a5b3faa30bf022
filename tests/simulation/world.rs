//! The event queue, virtual time, and all parts of the simulation.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use crate::checks::Checks;
use crate::clients::Clients;
use crate::coordinator::{Coordinators, Life};
use crate::etcd::{Etcd, MemberId};
use crate::events::{Event, Report};
use crate::executor::Meeting;
use crate::membership::Member;
use crate::network::{Link, LinkId, Packet, Path, Side};
use crate::operators::Operators;
use crate::process::Process;
use crate::random::{Random, mix};
use crate::scenario::{MS, S, Scenario, Time};
use crate::seats::Seat;
use crate::switches::Switches;

/// Time after the last fault within which the cluster serves with all its workers.
pub(crate) const CONVERGES_WITHIN: Time = 15 * S;
/// While there are requests, some progress happens at least this often.
const STANDS_STILL: Time = 30 * S;
/// Time after the last fault within which every request ends.
const ENDS_WITHIN: Time = 900 * S;
/// A run ends when all has been well for this long: two stats reports of every worker.
const STAYS_WELL: Time = 2500 * MS;
/// Interval between checks of all that must be noticed in time.
const SCRAPE: Time = 700 * MS;
/// Totals are checked at every so many of those, and at the end: what is wrong with them mostly
/// stays so, and to merge and compare them takes a good part of a run's time.
const TOTALS_EVERY: Time = 2;

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) switches: Switches,
    pub(crate) random: Random,
    pub(crate) now: Time,
    queue: BinaryHeap<Reverse<(Time, u64, Event)>>,
    order: u64,
    pub(crate) links: Vec<Link>,
    pub(crate) paths: Vec<Path>,
    pub(crate) processes: Vec<Process>,
    /// Ranks that wait for each other, by epoch and step; step 0 is connecting.
    pub(crate) meetings: BTreeMap<(u64, u64), Meeting>,
    /// Slots whose processes do not reach each other.
    pub(crate) apart: Vec<[usize; 2]>,
    /// Epochs whose TCP collective some rank has left.
    pub(crate) left: BTreeSet<u64>,
    pub(crate) coordinator: Coordinators,
    pub(crate) etcd: Etcd,
    /// Number of faults that keep all processes from etcd.
    pub(crate) etcd_away: u32,
    /// When it last became unreachable.
    pub(crate) etcd_went: Time,
    /// Whether leases end while it is unreachable.
    pub(crate) etcd_counts: bool,
    pub(crate) members: Vec<Member>,
    pub(crate) seats: Vec<Seat>,
    /// Until when there may be no coordinator that serves.
    pub(crate) leaderless: Time,
    pub(crate) seed: u64,
    pub(crate) clients: Clients,
    pub(crate) operators: Operators,
    pub(crate) checks: Checks,
    pub(crate) last_fault: Time,
    /// By slot: whether no process is started there any more.
    pub(crate) ended: Vec<bool>,
    /// By slot: until when something other than slowness may delay its steps.
    pub(crate) disturbed: Vec<Time>,
    pub(crate) next_token: u64,
    pub(crate) report: Report,
    well_since: Option<Time>,
    /// When any request last made progress, and the total progress then.
    got_on: (Time, u64),
    converged_since: Option<Time>,
    failure: Option<String>,
    verbose: bool,
}

impl World {
    pub(crate) fn new(seed: u64, switches: Switches, verbose: bool) -> Self {
        Self::of(Scenario::new(seed), seed, switches, verbose)
    }

    /// Creates a run of a scenario that the seed alone does not determine.
    pub(crate) fn of(scenario: Scenario, seed: u64, switches: Switches, verbose: bool) -> Self {
        let slots = scenario.hosts.len();
        let mut world = Self {
            switches,
            random: Random::new(mix(seed, 1)),
            now: 0,
            queue: BinaryHeap::new(),
            order: 0,
            links: Vec::new(),
            paths: vec![Path::default(); slots],
            processes: (0..slots).map(|_| Process::absent()).collect(),
            meetings: BTreeMap::new(),
            apart: Vec::new(),
            left: BTreeSet::new(),
            coordinator: Coordinators::default(),
            etcd: Etcd::default(),
            etcd_away: 0,
            etcd_went: 0,
            etcd_counts: true,
            members: (0..slots + scenario.seats).map(|_| Member::default()).collect(),
            seats: (0..scenario.seats).map(|_| Seat::default()).collect(),
            leaderless: 0,
            seed,
            clients: Clients::new(scenario.clients.clone()),
            operators: Operators::new(scenario.max_replicas),
            checks: Checks::default(),
            last_fault: 0,
            ended: vec![false; slots],
            disturbed: vec![0; slots],
            next_token: 1,
            report: Report::default(),
            well_since: None,
            got_on: (0, 0),
            converged_since: None,
            failure: None,
            verbose,
            scenario,
        };
        for slot in
            (0..slots).filter(|slot| world.scenario.starts[*slot] < Time::MAX).collect::<Vec<_>>()
        {
            world.schedule_at(world.scenario.starts[slot], Event::Start { slot });
            world.last_fault = world.last_fault.max(world.scenario.starts[slot]);
        }
        for index in 0..world.scenario.clients.len() {
            world.schedule_at(world.scenario.clients[index].at, Event::Submit(index));
        }
        for index in 0..world.scenario.faults.len() {
            world.schedule_at(world.scenario.faults[index].0, Event::Fault(index));
            world.last_fault = world.last_fault.max(world.scenario.faults[index].0);
        }
        world.etcd.any_leads = switches.leader_key_is_overwritten;
        world.etcd.no_led = switches.who_led_is_not_known;
        world.etcd.any_stores = switches.commands_stored_unfenced;
        for seat in 0..world.seats.len() {
            let at = world.random.range(0, 300 * MS);
            world.schedule_at(at, Event::SeatStart { seat });
        }
        world.may_be_leaderless(0);
        world.schedule_at(50 * MS, Event::Tick);
        world.schedule_at(SCRAPE, Event::Scrape);
        world
    }

    /// Runs until all is well after the last fault, or until something is wrong.
    pub(crate) fn run(mut self) -> Result<Report, String> {
        while self.failure.is_none() {
            let Some(Reverse((at, _, event))) = self.queue.pop() else {
                self.fail("nothing is left to happen".to_owned());
                break;
            };
            self.now = at;
            self.report.events += 1;
            self.trace(&[at, self.order]);
            if matches!(event, Event::Scrape) && self.scrape() {
                break;
            }
            self.happen(event);
        }
        self.report.lasted = self.now;
        match self.failure {
            Some(failure) => Err(format!("at {:.6} s: {failure}", self.now as f64 / S as f64)),
            None => Ok(self.report),
        }
    }

    pub(crate) fn time(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    pub(crate) fn schedule(&mut self, after: Time, event: Event) {
        self.schedule_at(self.now + after, event);
    }

    pub(crate) fn schedule_at(&mut self, at: Time, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((at.max(self.now), self.order, event)));
    }

    /// No coordinator takes a request. This may happen while a new leader is being found, but not
    /// for longer.
    fn refuse(&mut self, index: usize) {
        if self.now > self.leaderless {
            self.fail(format!("nobody serves, and req-{index} is refused"));
        }
        self.clients.refused(index);
    }

    /// Ends the run: an invariant does not hold.
    pub(crate) fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    pub(crate) fn trace(&mut self, of: &[u64]) {
        self.report.trace = of.iter().fold(self.report.trace, |hash, value| mix(hash, *value));
    }

    /// Prints what happens, when a single seed is replayed.
    pub(crate) fn say(&self, what: impl FnOnce() -> String) {
        if self.verbose {
            println!("{:10.6} {}", self.now as f64 / S as f64, what());
        }
    }

    pub(crate) fn note_packet(&mut self, link: LinkId, to: Side, packet: &Packet) {
        self.trace(&[link as u64, to as u64]);
        if !matches!(packet, Packet::Ping | Packet::Pong) {
            let slot = self.links[link].slot;
            self.say(|| {
                let mut text = format!("{packet:?}");
                text.truncate(160);
                format!("slot {slot} link {link} to {to:?}: {text}")
            });
        }
    }

    /// Returns the slot whose process must run for an event to happen.
    fn runs_on(&self, event: Event) -> Option<usize> {
        match event {
            Event::Dial { slot, .. }
            | Event::HandshakeDeadline { slot, .. }
            | Event::Executed { slot, .. }
            | Event::Broken { slot, .. }
            | Event::Deadline { slot, .. }
            | Event::Reader { slot, .. }
            | Event::LeaveDeadline { slot, .. }
            | Event::ReportDue { slot, .. } => Some(slot),
            Event::EtcdOpen { who, .. }
            | Event::EtcdAnswered { who, .. }
            | Event::EtcdDeadline { who, .. }
            | Event::EtcdSaid { who, .. }
            | Event::EtcdTick { who, .. } => (who < self.processes.len()).then_some(who),
            Event::Poll { link, side: Side::Worker }
            | Event::Closed { link, side: Side::Worker } => {
                let link = &self.links[link];
                let same = self.processes[link.slot].incarnation == link.incarnation;
                same.then_some(link.slot)
            }
            _ => None,
        }
    }

    /// Returns the process whose connection to etcd an event belongs to.
    fn session_of(event: Event) -> Option<(MemberId, u64)> {
        match event {
            Event::EtcdOpen { who, session }
            | Event::EtcdAsked { who, session, .. }
            | Event::EtcdAnswered { who, session, .. }
            | Event::EtcdDeadline { who, session, .. }
            | Event::EtcdSaid { who, session }
            | Event::EtcdTick { who, session }
            | Event::EtcdKept { who, session, .. } => Some((who, session)),
            _ => None,
        }
    }

    /// Returns the coordinator process that must run for an event to happen.
    fn seat_of(&self, event: Event) -> Option<usize> {
        let coordinator = match event {
            Event::EtcdOpen { who, .. }
            | Event::EtcdAnswered { who, .. }
            | Event::EtcdDeadline { who, .. }
            | Event::EtcdSaid { who, .. }
            | Event::EtcdTick { who, .. } => return who.checked_sub(self.processes.len()),
            Event::Load { seat, .. } => return Some(seat),
            // Frames wait by themselves.
            Event::Arrive { .. } => return None,
            Event::Submit(_) => self.leading(),
            Event::Leave(index) => self.clients.life_of(index),
            _ => self.life_of(event),
        };
        self.seats.iter().position(|seat| coordinator.is_some() && seat.life == coordinator)
    }

    /// Returns the coordinator at which an event happens.
    fn life_of(&self, event: Event) -> Option<Life> {
        match event {
            Event::ReplicaMail(life, _)
            | Event::ClusterMail(life)
            | Event::Checkpoint(life)
            | Event::Scale(life, _) => Some(life),
            Event::Arrive { link, to: side }
            | Event::Poll { link, side }
            | Event::Closed { link, side } => {
                (side == Side::Coordinator).then_some(self.links[link].life)
            }
            _ => None,
        }
    }

    fn happen(&mut self, event: Event) {
        if let Some(slot) = self.runs_on(event)
            && self.processes[slot].frozen
        {
            self.processes[slot].deferred.push(event);
            return;
        }
        if let Some(seat) = self.seat_of(event)
            && self.seats[seat].frozen
        {
            self.seats[seat].deferred.push(event);
            return;
        }
        let session = Self::session_of(event);
        if session.is_some_and(|(who, session)| self.members[who].session != session) {
            return;
        }
        if let Some(life) = self.life_of(event)
            && !self.coordinator.act(life)
        {
            return;
        }
        match event {
            Event::Arrive { link, to } => self.arrive(link, to),
            Event::Poll { link, side } => self.poll(link, side),
            Event::Closed { link, side: Side::Worker } => self.worker_link_closed(link),
            Event::Closed { link, side: Side::Coordinator } => self.coordinator_link_closed(link),
            Event::Tick => {
                if self.etcd_away == 0 || self.etcd_counts {
                    self.etcd.expire(self.now);
                    self.spread_news();
                }
                for life in self.coordinator.lives() {
                    self.coordinator.act(life);
                    if !self.seats[self.coordinator.seat].frozen {
                        self.tick();
                    }
                }
                self.schedule(50 * MS, Event::Tick);
            }
            Event::ReplicaMail(_, replica) => self.replica_mail(replica),
            Event::ClusterMail(_) => self.cluster_mail(),
            Event::Checkpoint(_) => self.checkpoint(),
            Event::Scale(_, replicas) => self.scale(replicas),
            Event::SeatStart { seat } => self.start_seat(seat),
            Event::Load { seat, incarnation } => self.load(seat, incarnation),
            Event::EtcdOpen { who, .. } => self.etcd_open(who),
            Event::EtcdAsked { who, number, .. } => self.etcd_asked(who, number),
            Event::EtcdAnswered { who, number, .. } => self.etcd_answered(who, number),
            Event::EtcdDeadline { who, number, .. } => self.etcd_deadline(who, number),
            Event::EtcdSaid { who, .. } => self.etcd_said(who),
            Event::EtcdTick { who, session } => self.etcd_tick(who, session),
            Event::EtcdKept { who, lease, .. } => self.etcd_kept(who, lease),
            Event::Start { slot } => self.start_process(slot),
            Event::Dial { slot, incarnation, generation } => {
                self.dial(slot, incarnation, generation);
            }
            Event::HandshakeDeadline { slot, link } => self.handshake_deadline(slot, link),
            Event::Executed { slot, token } => self.executed(slot, token),
            Event::Broken { slot, token } => self.broken(slot, token),
            Event::Deadline { slot, token } => self.broken(slot, token),
            Event::Reader { slot, token } => self.reads(slot, token),
            Event::ReportDue { slot, incarnation, generation } => {
                self.report_due(slot, incarnation, generation);
            }
            Event::LeaveDeadline { slot, incarnation } => self.leave_deadline(slot, incarnation),
            Event::Submit(index) => match self.leading() {
                Some(life) if self.coordinator.act(life) => self.submit(index),
                _ => self.refuse(index),
            },
            Event::Leave(index) => self.leave(index),
            Event::Fault(index) => self.fault(index),
            Event::Heal(heal) => self.heal(heal),
            Event::Scrape => self.schedule(SCRAPE, Event::Scrape),
        }
    }

    /// Checks the cluster. Returns whether the run is over.
    fn scrape(&mut self) -> bool {
        for life in self.coordinator.lives() {
            self.coordinator.act(life);
            if (self.now / SCRAPE).is_multiple_of(TOTALS_EVERY) {
                self.check_totals();
            }
            self.check_bounds();
        }
        self.check_followed();
        let leads = self.leading().is_some_and(|life| self.coordinator.act(life));
        if leads && self.waits_for_a_change() {
            // A replica that failed for good is tried again when its wait is over, and not before.
            self.last_fault = self.last_fault.max(self.now);
            self.check_holds();
        }
        let since_fault = self.now.saturating_sub(self.last_fault);
        let converged = match self.leading() {
            Some(life) if self.coordinator.act(life) => {
                self.converged().and_then(|()| self.members_agree())
            }
            _ => Err("nobody leads".to_owned()),
        };
        if self.now > self.last_fault {
            if let Err(why) = &converged
                && since_fault >= CONVERGES_WITHIN
            {
                self.fail(format!(
                    "not converged {} s after the last fault: {why}",
                    since_fault / S
                ));
            }
            let so_far = self.clients.progress();
            if so_far != self.got_on.1 || self.now < self.last_fault + STANDS_STILL {
                self.got_on = (self.now, so_far);
            }
            if (since_fault >= ENDS_WITHIN || self.now >= self.got_on.0 + STANDS_STILL)
                && let Some(hung) = self.clients.hung()
            {
                self.fail(format!(
                    "{hung} has not ended {} s after the last fault",
                    since_fault / S
                ));
            }
        }
        if let Some(why) = self.unanswered() {
            self.fail(why);
        }
        let settled =
            converged.is_ok() && self.clients.hung().is_none() && self.operators.asked.is_empty();
        if !settled || self.now <= self.last_fault {
            self.well_since = None;
        } else if self.well_since.is_none() {
            self.well_since = Some(self.now);
            self.report.ended_after = since_fault;
        }
        if converged.is_err() || self.now <= self.last_fault {
            self.converged_since = None;
        } else if self.converged_since.is_none() {
            self.converged_since = Some(self.now);
            self.report.converged_after = since_fault;
        }
        if self.well_since.is_some_and(|since| self.now - since >= STAYS_WELL) {
            self.check_totals();
            self.check_end();
            return true;
        }
        false
    }
}
