//! The connections between processes and etcd, which can be cut: what `shared::membership::etcd`
//! does around the real core, and how each process acts on its view.
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shared::membership::core::{
    DEADLINE, INCUMBENT_FIRST, MembershipCore, NextAction, RETRY_MAX, RETRY_MIN, WatchUpdate,
};
use shared::membership::{DesiredState, LEADER_LEASE_TTL, LEASE_TTL, Record, Role, View};

use crate::etcd::{Answer, EtcdNotice, MemberId, Request};
use crate::events::Event;
use crate::scenario::{MS, S, Time};
use crate::world::World;

/// A process lists everything again within this time, and then knows what its watch has lost.
const RELISTED: Time = 66 * S;

pub(crate) fn micros(duration: Duration) -> Time {
    duration.as_micros() as Time
}

/// Something to handle once no answer is being waited for.
#[derive(Debug)]
enum Todo {
    Tick,
    EtcdNotice(EtcdNotice),
}

/// A process's membership thread, and its connection.
#[derive(Default)]
pub(crate) struct Member {
    pub(crate) core: Option<MembershipCore>,
    /// Number of the current connection.
    pub(crate) session: u64,
    serving: bool,
    /// The pending request, and its number.
    asked: u64,
    request: Option<Request>,
    /// When it was sent.
    sent: Time,
    answer: Option<Answer>,
    /// Messages in transit from etcd.
    stream: VecDeque<EtcdNotice>,
    last_arrival: Time,
    held: u32,
    todo: VecDeque<Todo>,
    wait: Duration,
    began: Time,
    /// Number of faults that keep it from etcd.
    pub(crate) cut: u32,
    /// Whether the next change is lost in transit.
    pub(crate) loses_change: bool,
    /// Whether the next request to keep its lease fails; true if etcd says that there is no such
    /// lease.
    pub(crate) fails_keep: Option<bool>,
}

impl World {
    /// A process becomes a member.
    pub(crate) fn join_etcd(&mut self, who: MemberId, record: Record) {
        let campaign = record.role == Role::Coordinator;
        let ttl = if campaign { LEADER_LEASE_TTL } else { LEASE_TTL };
        self.drop_session(who);
        let member = &mut self.members[who];
        member.core = Some(MembershipCore::new(record, campaign, ttl));
        member.wait = RETRY_MIN;
        let session = member.session;
        self.schedule(1, Event::EtcdOpen { who, session });
    }

    /// The process is gone. Its lease stays, unless the process left in order.
    pub(crate) fn leave_etcd(&mut self, who: MemberId, in_order: bool) {
        self.drop_session(who);
        let core = self.members[who].core.take();
        if let Some(core) = core.as_ref().filter(|_| in_order)
            && core.view().own().is_some()
            && self.reaches_etcd(who)
        {
            self.etcd.led_ends(core.record().incarnation);
        }
        if let Some(lease) = core.and_then(|core| core.lease()).filter(|_| in_order)
            && self.reaches_etcd(who)
        {
            self.etcd.revoke(lease);
            self.spread_news();
        }
    }

    fn drop_session(&mut self, who: MemberId) {
        let member = &mut self.members[who];
        member.session += 1;
        member.serving = false;
        member.request = None;
        member.answer = None;
        member.stream.clear();
        member.held = 0;
        member.todo.clear();
        self.etcd.unwatch(who);
    }

    pub(crate) fn reaches_etcd(&self, who: MemberId) -> bool {
        self.etcd_away == 0 && self.members[who].cut == 0
    }

    pub(crate) fn view(&self, who: MemberId) -> Option<&View> {
        self.members[who].core.as_ref().map(MembershipCore::view)
    }

    /// Does what `Member::open` does.
    pub(crate) fn etcd_open(&mut self, who: MemberId) {
        self.members[who].began = self.now;
        let Some(core) = &self.members[who].core else { return };
        match core.lease() {
            Some(lease) => self.ask(who, Request::Keep(lease)),
            None => self.grant(who),
        }
    }

    fn grant(&mut self, who: MemberId) {
        let ttl = if self.is_coordinator(who) { LEADER_LEASE_TTL } else { LEASE_TTL };
        self.ask(who, Request::Grant(micros(ttl)));
    }

    fn ask(&mut self, who: MemberId, request: Request) {
        let latency = self.random.range(100, 3 * MS);
        let member = &mut self.members[who];
        member.asked += 1;
        member.request = Some(request);
        member.sent = self.now;
        let (session, number) = (member.session, member.asked);
        self.schedule(latency, Event::EtcdAsked { who, session, number });
        self.schedule(micros(DEADLINE), Event::EtcdDeadline { who, session, number });
    }

    /// A request arrives.
    pub(crate) fn etcd_asked(&mut self, who: MemberId, number: u64) {
        if self.members[who].asked != number || !self.reaches_etcd(who) {
            return;
        }
        let Some(request) = self.members[who].request.clone() else { return };
        let fails = match request {
            Request::Keep(_) => self.members[who].fails_keep.take(),
            _ => None,
        };
        let answer = match fails {
            Some(gone) if gone => Answer::Kept(0),
            Some(_) => Answer::NotKept,
            None => self.etcd.serve(who, self.now, request),
        };
        self.members[who].answer = Some(answer);
        let (latency, session) = (self.random.range(100, 3 * MS), self.members[who].session);
        self.schedule(latency, Event::EtcdAnswered { who, session, number });
        self.spread_news();
    }

    /// Sends changes to their watchers.
    pub(crate) fn spread_news(&mut self) {
        for (who, change) in std::mem::take(&mut self.etcd.news) {
            if !change.events.is_empty() && std::mem::take(&mut self.members[who].loses_change) {
                // Until it lists everything again.
                self.faulty_until(self.now + RELISTED);
                continue;
            }
            self.etcd_says(who, EtcdNotice::WatchUpdate(change));
        }
    }

    fn etcd_says(&mut self, who: MemberId, said: EtcdNotice) {
        let latency = self.random.range(100, 3 * MS);
        let member = &mut self.members[who];
        let at = (self.now + latency).max(member.last_arrival + 1);
        member.last_arrival = at;
        member.stream.push_back(said);
        let session = member.session;
        self.schedule_at(at, Event::EtcdSaid { who, session });
    }

    pub(crate) fn etcd_said(&mut self, who: MemberId) {
        if !self.reaches_etcd(who) {
            self.members[who].held += 1;
            return;
        }
        if let Some(said) = self.members[who].stream.pop_front() {
            self.members[who].todo.push_back(Todo::EtcdNotice(said));
            self.serve_member(who);
        }
    }

    /// Messages that were held up between etcd and processes continue.
    pub(crate) fn etcd_is_back(&mut self) {
        for who in 0..self.members.len() {
            if self.reaches_etcd(who) {
                let session = self.members[who].session;
                for _ in 0..std::mem::take(&mut self.members[who].held) {
                    self.schedule(10 * MS, Event::EtcdSaid { who, session });
                }
            }
        }
    }

    pub(crate) fn etcd_deadline(&mut self, who: MemberId, number: u64) {
        if self.members[who].request.is_some() && self.members[who].asked == number {
            self.etcd_broken(who, "etcd does not answer");
        }
    }

    /// The session is over; the next one begins after a while.
    pub(crate) fn etcd_broken(&mut self, who: MemberId, reason: &str) {
        self.say(|| format!("member {who}: {reason}"));
        self.drop_session(who);
        let now = self.now;
        let member = &mut self.members[who];
        let Some(core) = &mut member.core else { return };
        core.closed();
        if now - member.began > micros(RETRY_MAX) {
            member.wait = RETRY_MIN;
        }
        let (after, session) = (micros(member.wait), member.session);
        member.wait = (member.wait * 2).min(RETRY_MAX);
        self.schedule(after, Event::EtcdOpen { who, session });
    }

    pub(crate) fn etcd_tick(&mut self, who: MemberId, session: u64) {
        let ttl = if self.is_coordinator(who) { LEADER_LEASE_TTL } else { LEASE_TTL };
        self.members[who].todo.push_back(Todo::Tick);
        self.schedule(micros(ttl / 3), Event::EtcdTick { who, session });
        self.serve_member(who);
    }

    fn is_coordinator(&self, who: MemberId) -> bool {
        who >= self.processes.len()
    }

    /// A keepalive arrives, and a request for the watch's progress.
    pub(crate) fn etcd_kept(&mut self, who: MemberId, lease: i64) {
        if !self.reaches_etcd(who) {
            return;
        }
        let ttl = self.etcd.keep(lease, self.now);
        self.etcd_says(who, EtcdNotice::Kept(ttl));
        if self.etcd.watches(who) {
            self.etcd_says(who, EtcdNotice::WatchUpdate(WatchUpdate::default()));
        }
    }

    /// Does what `Member::serve` does: one thing at a time.
    fn serve_member(&mut self, who: MemberId) {
        while self.members[who].serving && self.members[who].request.is_none() {
            let Some(todo) = self.members[who].todo.pop_front() else { return };
            let (now, switches) = (self.time(), self.switches);
            let Some(core) = &mut self.members[who].core else { return };
            let (mut keeps, mut lists) = (None, false);
            let outcome = match todo {
                Todo::Tick => core.tick(now).map(|due| {
                    keeps = core.lease();
                    lists = due && !switches.never_lists_again;
                }),
                Todo::EtcdNotice(EtcdNotice::Kept(ttl)) => {
                    core.kept(now, Duration::from_micros(ttl))
                }
                Todo::EtcdNotice(EtcdNotice::WatchUpdate(change)) => {
                    if switches.compaction_is_ignored && change.is_last() {
                        continue;
                    }
                    core.changed(now, change)
                }
            };
            let session = self.members[who].session;
            self.view_changed(who);
            if self.members[who].session != session {
                return;
            }
            if let Err(broken) = outcome {
                return self.etcd_broken(who, &broken.to_string());
            }
            if let Some(lease) = keeps {
                let latency = self.random.range(100, 3 * MS);
                self.schedule(latency, Event::EtcdKept { who, session, lease });
            }
            if lists {
                self.ask(who, Request::List);
            } else {
                self.take_place(who);
            }
        }
    }

    /// Handles an answer, as the rest of `Member` does.
    pub(crate) fn etcd_answered(&mut self, who: MemberId, number: u64) {
        let now = self.time();
        let member = &mut self.members[who];
        if member.asked != number || member.request.is_none() || !self.reaches_etcd(who) {
            return;
        }
        let member = &mut self.members[who];
        let (Some(request), Some(answer)) = (member.request.take(), member.answer.take()) else {
            return;
        };
        let (sent, session, serving) =
            (Duration::from_micros(member.sent), member.session, member.serving);
        let Some(core) = &mut member.core else { return };
        match (request, answer) {
            (Request::Keep(_), Answer::NotKept) if !self.switches.leases_are_given_up => {
                return self.etcd_broken(who, "the lease could not be kept");
            }
            (Request::Keep(_), Answer::Kept(0) | Answer::NotKept) => {
                core.lease_over();
                return self.grant(who);
            }
            (Request::Keep(lease), _) | (Request::Grant(_), Answer::Granted(lease)) => {
                core.leased(sent, lease);
                return self.ask(who, Request::List);
            }
            (Request::List, Answer::List(revision, entries)) if !serving => {
                core.opened(now, revision, entries);
                self.view_changed(who);
                if self.members[who].session == session {
                    self.ask(who, Request::Watch(revision + 1));
                }
                return;
            }
            (Request::Watch(_), _) => {
                member.serving = true;
                return self.etcd_tick(who, session);
            }
            (Request::List, Answer::List(revision, entries)) => {
                core.listed(now, revision, entries);
                self.view_changed(who);
                if self.members[who].session != session {
                    return;
                }
                self.take_place(who);
            }
            (Request::Get(key), Answer::KeyOwner(held)) => {
                match (core.found(now, held), core.lease()) {
                    (Ok(Some(seen)), Some(lease)) => {
                        let record = core.record().clone();
                        return self.ask(who, Request::Register { key, record, seen, lease });
                    }
                    (Ok(_), _) => {}
                    (Err(error), _) => {
                        self.say(|| format!("member {who}: {error}"));
                        return self.membership_failed(who);
                    }
                }
            }
            (Request::Register { .. }, Answer::Written(true)) => {
                core.registered();
                return self.ask(who, Request::List);
            }
            (
                Request::Lead { .. } | Request::Hold { .. } | Request::Store { .. },
                Answer::Written(_),
            ) => {
                return self.ask(who, Request::List);
            }
            (_, Answer::Refused) => return self.etcd_broken(who, "no such lease"),
            _ => {}
        }
        self.serve_member(who);
    }

    fn membership_failed(&mut self, who: MemberId) {
        if self.is_coordinator(who) {
            let seat = who - self.processes.len();
            return self.seat_ends(seat, false, S);
        }
        self.kill(who);
        self.disturb(who, 0);
        self.start_again(who, S);
    }

    fn view_changed(&mut self, who: MemberId) {
        if self.is_coordinator(who) {
            let seat = who - self.processes.len();
            self.hear_stored(seat);
            self.seat_sees(seat);
        } else {
            self.follow(who);
        }
    }

    /// Whether all processes know of each other.
    pub(crate) fn members_agree(&self) -> Result<(), String> {
        let there =
            self.members.iter().enumerate().filter_map(|(who, it)| Some((who, it.core.as_ref()?)));
        let expected: BTreeMap<String, u64> = there
            .clone()
            .map(|(_, core)| (core.key().to_owned(), core.record().incarnation))
            .collect();
        let registered = self.etcd.registered();
        if registered != expected {
            return Err(format!("registered are {registered:?}, not {expected:?}"));
        }
        let leader = self.etcd.leader();
        for (who, core) in there {
            let view = core.view();
            let seen = view.leader.as_ref().map(|it| (it.record.incarnation, it.epoch));
            let known = view.records.iter().map(|(key, record)| (key.clone(), record.incarnation));
            if !view.connected || seen != leader || known.collect::<BTreeMap<_, _>>() != expected {
                return Err(format!("member {who} knows {view:?}, not {leader:?}, {expected:?}"));
            }
        }
        Ok(())
    }

    /// An operator has given a leader a command.
    pub(crate) fn desire(&mut self, who: MemberId, desired: DesiredState) {
        let Some(core) = &mut self.members[who].core else { return };
        core.desire(desired);
        if self.members[who].serving && self.members[who].request.is_none() {
            self.take_place(who);
        }
    }

    /// Does what `Member::take_place` does.
    fn take_place(&mut self, who: MemberId) {
        let ahead = if self.switches.anybody_runs { INCUMBENT_FIRST } else { Duration::ZERO };
        let now = self.time() + ahead;
        let Some(core) = &self.members[who].core else { return };
        match (core.next_action(now), core.lease()) {
            (Some(NextAction::Register), Some(_)) => {
                let key = core.key().to_owned();
                self.ask(who, Request::Get(key));
            }
            (Some(NextAction::Lead), Some(lease)) => {
                let (record, last_leader_revision) =
                    (core.record().clone(), core.last_leader_revision());
                self.ask(who, Request::Lead { record, lease, last_leader_revision });
            }
            // A key under a lease that was given up ends with that lease.
            (Some(NextAction::Hold(_)), _)
                if self.switches.leads_by_an_old_lease || self.switches.leases_are_given_up => {}
            (Some(NextAction::Hold(epoch)), Some(lease)) => {
                let record = core.record().clone();
                self.ask(who, Request::Hold { record, lease, epoch });
            }
            (Some(NextAction::Store), _) => {
                let Some((epoch, desired)) = core.to_store() else { return };
                let desired = desired.clone();
                self.ask(who, Request::Store { desired, epoch });
            }
            _ => {}
        }
    }
}
