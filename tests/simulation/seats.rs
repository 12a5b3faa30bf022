//! Coordinator processes, like `tutti coordinator --etcd`: each stands by until it leads, then
//! serves until another leads, and is started again.
use std::collections::BTreeSet;

use shared::membership::{LEADER_LEASE_TTL, Record, Role};

use crate::coordinator::Life;
use crate::etcd::MemberId;
use crate::events::Event;
use crate::membership::micros;
use crate::scenario::{MS, S, Time};
use crate::world::World;

/// Same as in `coordinator::checkpoint`.
const LOAD_RETRY: Time = 500 * MS;
const LOAD_PATIENCE: Time = 5 * S;

/// A seat for a coordinator process.
#[derive(Debug, Default)]
pub(crate) struct Seat {
    pub(crate) alive: bool,
    pub(crate) incarnation: u64,
    /// Since when it has led without serving yet, because it loads what the last leader left.
    elected: Option<Time>,
    pub(crate) life: Option<Life>,
    /// Whether it is frozen; `deferred` holds what happened meanwhile.
    pub(crate) frozen: bool,
    pub(crate) deferred: Vec<Event>,
    thawed: Time,
    /// Until when it may be replaced because of a fault.
    troubled: Time,
}

impl World {
    pub(crate) fn member_of(&self, seat: usize) -> MemberId {
        self.processes.len() + seat
    }

    pub(crate) fn address(seat: usize) -> String {
        format!("seat-{seat}:8001")
    }

    /// Returns the coordinator that answers at an address.
    pub(crate) fn serves_at(&self, address: &str) -> Option<Life> {
        let seat = (0..self.seats.len()).find(|seat| Self::address(*seat) == address)?;
        self.seats[seat].life
    }

    /// Returns the leader according to etcd, or otherwise one that goes on serving.
    pub(crate) fn leading(&self) -> Option<Life> {
        let leader = self.etcd.leader().map(|(incarnation, _)| incarnation);
        let leads = |seat: &&Seat| seat.alive && Some(seat.incarnation) == leader;
        let known = self.seats.iter().find(leads).and_then(|seat| seat.life);
        known.or_else(|| self.seats.iter().find_map(|seat| seat.life))
    }

    pub(crate) fn leading_seat(&self) -> Option<usize> {
        let life = self.leading()?;
        self.seats.iter().position(|seat| seat.life == Some(life))
    }

    pub(crate) fn start_seat(&mut self, seat: usize) {
        if self.seats[seat].alive {
            return;
        }
        let incarnation = self.random.next();
        let troubled = self.seats[seat].troubled;
        self.seats[seat] = Seat { alive: true, incarnation, troubled, ..Seat::default() };
        let address = Self::address(seat);
        let record = Record {
            node: address.clone(),
            role: Role::Coordinator,
            incarnation,
            address,
            http: String::new(),
            pid: 1,
            version: String::new(),
            protocol: 0,
            model: None,
            serves: None,
        };
        self.join_etcd(self.member_of(seat), record);
    }

    /// The process is gone, and is started again after a while.
    pub(crate) fn seat_ends(&mut self, seat: usize, in_order: bool, back_after: Time) {
        if !std::mem::take(&mut self.seats[seat].alive) {
            return;
        }
        self.say(|| format!("seat {seat} ends"));
        let it = &mut self.seats[seat];
        (it.elected, it.frozen) = (None, false);
        let deferred = std::mem::take(&mut it.deferred);
        if let Some(life) = self.seats[seat].life.take() {
            self.end_life(life);
        }
        // Requests that waited for it go to another coordinator.
        deferred.into_iter().for_each(|event| self.schedule(1, event));
        self.leave_etcd(self.member_of(seat), in_order);
        self.schedule(back_after, Event::SeatStart { seat });
        self.faulty_until(self.now + back_after);
    }

    /// Until then, it may lose its lease because of a fault.
    pub(crate) fn trouble(&mut self, seat: usize, lasts: Time) {
        let until = self.now + lasts + 2 * micros(LEADER_LEASE_TTL);
        self.seats[seat].troubled = self.seats[seat].troubled.max(until);
    }

    /// The process is stopped for a while.
    pub(crate) fn freeze_seat(&mut self, seat: usize) -> bool {
        let it = &mut self.seats[seat];
        let freezes = it.alive && !it.frozen;
        it.frozen |= freezes;
        freezes
    }

    pub(crate) fn thaw(&mut self, seat: usize, incarnation: u64) {
        let it = &mut self.seats[seat];
        if !it.frozen || it.incarnation != incarnation {
            return;
        }
        (it.frozen, it.thawed) = (false, self.now);
        let mut at = self.now;
        for event in std::mem::take(&mut it.deferred) {
            at += self.random.range(1, 100);
            self.schedule_at(at, event);
        }
        (0..self.processes.len()).for_each(|slot| self.release_held(slot));
    }

    /// Whether the acting coordinator has had time to notice everything.
    pub(crate) fn is_awake(&self) -> bool {
        let seat = &self.seats[self.coordinator.seat];
        !seat.frozen && self.now > seat.thawed + 5 * S
    }

    /// The effects of faults since `since` may be noticed only now.
    pub(crate) fn trouble_again(&mut self, since: Time) {
        for seat in 0..self.seats.len() {
            if self.seats[seat].troubled >= since {
                self.trouble(seat, 0);
            }
        }
    }

    /// How a coordinator acts on its view, as in `election` and `other_leader`.
    pub(crate) fn seat_sees(&mut self, seat: usize) {
        let Some(view) = self.view(self.member_of(seat)) else { return };
        let it = &self.seats[seat];
        let superseded = view.other_than(it.incarnation).is_some();
        match (it.life, it.elected) {
            (None, None) if view.own().is_some() => {
                let incarnation = it.incarnation;
                self.seats[seat].elected = Some(self.now);
                self.schedule(1, Event::Load { seat, incarnation });
            }
            (Some(_), _) if superseded && !self.switches.superseded_goes_on => {
                self.say(|| format!("seat {seat} is superseded"));
                if self.now > self.seats[seat].troubled {
                    self.fail(format!("seat {seat} is replaced although nothing ailed it"));
                }
                self.report.superseded += 1;
                self.disturb_all(0);
                self.seat_ends(seat, true, S);
            }
            _ => {}
        }
    }

    /// A new leader loads what the last leader left, and begins to serve.
    pub(crate) fn load(&mut self, seat: usize, incarnation: u64) {
        let it = &self.seats[seat];
        let Some(elected) = it.elected.filter(|_| it.alive && it.incarnation == incarnation) else {
            return;
        };
        let who = self.member_of(seat);
        let reaches = self.reaches_etcd(who);
        if !reaches && self.now < elected + LOAD_PATIENCE {
            return self.schedule(LOAD_RETRY, Event::Load { seat, incarnation });
        }
        self.seats[seat].elected = None;
        let workers = self.view(who).into_iter().flat_map(|view| view.records.values());
        let workers = workers.filter(|record| record.role == Role::Worker);
        let workers: BTreeSet<String> = workers.map(|record| record.node.clone()).collect();
        let told = self.view(who).and_then(|view| view.desired.clone());
        let life = self.begin_life(seat, workers);
        self.adopt_desired(told);
        self.seats[seat].life = Some(life);
        self.disturb_all(0);
        if reaches {
            self.restore();
        }
        self.seat_sees(seat);
    }
}
