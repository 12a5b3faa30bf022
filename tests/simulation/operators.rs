//! Operators' commands to coordinators, and what operators were promised: the next leader obeys the
//! last command that was reported as stored, or a later one.
use std::collections::BTreeMap;

use shared::membership::DesiredState;

use crate::coordinator::Life;
use crate::world::World;

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

#[derive(Default)]
pub(crate) struct Operators {
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
    }

    /// Returns a process that is linked although it was told to leave and that command was stored.
    pub(crate) fn undrained(&self) -> Option<u64> {
        let mut connected = self.coordinator.connected.values().map(|it| it.incarnation);
        connected.find(|run| self.operators.gone.contains(run))
    }
}
