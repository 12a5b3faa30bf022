//! Operators' commands to coordinators, and what operators were promised: the next leader obeys the
//! last command that was reported as stored, or a later one.
use std::collections::BTreeMap;

use coordinator::cluster::Ticket;
use shared::membership::DesiredState;

use crate::adapters::AskedChange;
use crate::coordinator::Life;
use crate::model::{ADAPTERS, COMING};
use crate::scenario::{S, Time};
use crate::world::World;

/// Time after the last fault within which a command about an adapter has an outcome: each of those
/// before it may wait for a rank that says nothing.
const ANSWERED_WITHIN: Time = 300 * S;

/// A bound on replicas that a coordinator was given.
#[derive(Clone, Copy, Debug)]
struct ReplicaBound {
    life: Life,
    /// Number of commands until then.
    generation: u64,
    bound: Option<u32>,
    /// Whether that coordinator is the last one that led.
    led: bool,
}

/// What is served under a name, by which coordinator's word.
#[derive(Clone, Copy, Debug)]
struct ServedAs {
    life: Life,
    /// Number of commands until then.
    generation: u64,
    name: &'static str,
    contents: Option<u64>,
    /// Whether that coordinator is the last one that led.
    led: bool,
}

#[derive(Default)]
pub(crate) struct Operators {
    /// Commands about adapters whose outcome is awaited.
    pub(crate) asked: BTreeMap<Ticket, AskedChange>,
    tickets: u64,
    /// Adapters by name, where they are known to be stored and differ from the options.
    served: BTreeMap<&'static str, Option<u64>>,
    /// Changes since then, stored or not.
    changed: Vec<ServedAs>,
    /// The last bound that is known to be stored.
    promised: Option<u32>,
    /// Bounds given since then, stored or not.
    said: Vec<ReplicaBound>,
    /// Process runs that were told to leave: by which coordinator, and after how many commands.
    drained: BTreeMap<u64, (Life, u64)>,
    /// Those of them that stay away, whichever coordinator leads.
    pub(crate) gone: Vec<u64>,
}

impl Operators {
    pub(crate) fn new(bound: Option<u32>) -> Self {
        Self { promised: bound, ..Self::default() }
    }

    /// An operator waits for the outcome of a command.
    pub(crate) fn ask(&mut self, asked: AskedChange) -> Ticket {
        self.tickets += 1;
        self.asked.insert(Ticket(self.tickets), asked);
        Ticket(self.tickets)
    }

    /// It was carried out, as the command of this number.
    pub(crate) fn note_change(&mut self, asked: &AskedChange, generation: u64, led: bool) {
        let AskedChange { life, name, contents, .. } = *asked;
        self.changed.push(ServedAs { life, generation, name, contents, led });
    }
}

impl World {
    /// The acting coordinator is told how many replicas there should be.
    pub(crate) fn scale(&mut self, replicas: u32) {
        let (now, mut effects) = (self.time(), Vec::new());
        let core = &mut self.coordinator.core;
        core.scale(now, Some(replicas), &mut effects);
        let (bound, generation) = (core.max_replicas(), core.desired().generation);
        let life = self.coordinator.life;
        let led = self.etcd.led() == Some(self.seats[self.coordinator.seat].incarnation);
        self.say(|| format!("life {life} is told {bound:?}, its command {generation}"));
        self.operators.said.push(ReplicaBound { life, generation, bound, led });
        self.carry_out(effects);
    }

    /// The acting coordinator has told a process run to leave.
    pub(crate) fn drained(&mut self, incarnation: u64) {
        let said = (self.coordinator.life, self.coordinator.core.desired().generation);
        self.operators.drained.insert(incarnation, said);
    }

    /// The coordinator at `seat` reports to an operator that a command is stored.
    pub(crate) fn hear_stored(&mut self, seat: usize) {
        let Some(life) = self.seats[seat].life else { return };
        let run = self.seats[seat].incarnation;
        let Some(desired) = self.view(self.member_of(seat)).and_then(|it| it.desired.clone())
        else {
            return;
        };
        let stored = |by: Life, generation| by == life && desired.has(run, generation);
        let last = self.operators.said.iter().rposition(|it| stored(it.life, it.generation));
        if let Some(last) = last {
            let said = self.operators.said[last];
            if !said.led {
                self.fail(format!("life {life} stored {said:?} although another had led"));
            }
            self.operators.promised = said.bound;
            self.operators.said.drain(..=last);
        }
        let is_stored = |it: &ServedAs| stored(it.life, it.generation);
        let changed = self.operators.changed.extract_if(.., |it| is_stored(it));
        let changed: Vec<ServedAs> = changed.collect();
        for it in changed {
            if !it.led {
                self.fail(format!("life {life} stored {it:?} although another had led"));
            }
            self.operators.served.insert(it.name, it.contents);
        }
        let heard = |(_, said): &(&u64, &(Life, u64))| stored(said.0, said.1);
        let gone: Vec<u64> =
            self.operators.drained.iter().filter(heard).map(|(run, _)| *run).collect();
        self.operators.drained.retain(|run, _| !gone.contains(run));
        self.operators.gone.extend(gone);
    }

    /// The acting coordinator begins to lead and obeys these commands, which must be those
    /// promised.
    pub(crate) fn adopt_desired(&mut self, told: Option<DesiredState>) {
        if let Some(told) = told.filter(|_| !self.switches.commands_are_forgotten) {
            let who = self.member_of(self.coordinator.seat);
            self.coordinator.core.adopt_desired(told.clone());
            self.adapters_changed();
            self.desire(who, told);
        }
        let run = self.seats[self.coordinator.seat].incarnation;
        if self.etcd.leader().map(|(leader, _)| leader) != Some(run) {
            // It has been replaced meanwhile, and ends.
            return;
        }
        let bound = self.coordinator.core.max_replicas();
        let operators = &self.operators;
        let may_be = |it: &ReplicaBound| it.led && it.bound == bound;
        if bound != operators.promised && !operators.said.iter().any(may_be) {
            let (promised, said) = (operators.promised, operators.said.clone());
            return self.fail(format!(
                "the next leader goes by {bound:?}, stored was {promised:?}, said {said:?}"
            ));
        }
        self.operators.promised = bound;
        self.operators.said.clear();
        let options = (1..=u64::from(ADAPTERS)).map(Some).zip(["1", "2"]);
        for (contents, name) in options.chain(COMING.map(|name| (None, name))) {
            let operators = &self.operators;
            let promised = operators.served.get(name).copied().unwrap_or(contents);
            let served = self.served_as(name);
            let may_be = |it: &ServedAs| it.led && (it.name, it.contents) == (name, served);
            if served != promised && !operators.changed.iter().any(may_be) {
                return self.fail(format!(
                    "the next leader serves {served:?} as {name}, and stored was {promised:?}"
                ));
            }
            self.operators.served.insert(name, served);
        }
        self.operators.changed.clear();
    }

    /// A command about an adapter without an outcome for too long, if there is one.
    pub(crate) fn unanswered(&self) -> Option<String> {
        let asked = self.operators.asked.values();
        let since = |it: &&AskedChange| self.now > it.since.max(self.last_fault) + ANSWERED_WITHIN;
        asked.filter(since).map(|it| format!("{it:?} has no outcome")).next()
    }

    /// Returns a process that is linked although it was told to leave and that command was stored.
    pub(crate) fn undrained(&self) -> Option<u64> {
        let mut connected = self.coordinator.connected.values().map(|it| it.incarnation);
        connected.find(|run| self.operators.gone.contains(run))
    }
}
