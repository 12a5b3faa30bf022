//! What goes wrong, and how it ends.
use crate::network::Side;
use crate::scenario::{Fault, S, Time};
use crate::world::{Event, Heal, World};

/// A pending fault that found no occasion is taken back after this.
const OCCASION: Time = 5 * S;

impl World {
    pub(crate) fn fault(&mut self, index: usize) {
        let fault = self.scenario.faults[index].1.clone();
        self.say(|| format!("FAULT {fault:?}"));
        self.report.faults += 1;
        if let Some(life) = self.leader {
            self.coordinator.act(life);
        }
        match fault {
            Fault::Replace { after } => self.replace(after),
            Fault::Scale { .. } | Fault::Drain { .. } if self.leader.is_none() => {}
            Fault::Leave { slot, back_after } => self.leave_cluster(slot, back_after),
            Fault::Crash { slot, back_after } => {
                self.kill(slot);
                self.disturb(slot, 0);
                if let Some(after) = back_after {
                    self.start_again(slot, after);
                }
            }
            Fault::Freeze { slot, lasts } => {
                let process = &mut self.processes[slot];
                if process.alive && !process.frozen {
                    process.frozen = true;
                    let incarnation = process.incarnation;
                    self.disturb(slot, lasts);
                    self.heal_after(lasts, Heal::Unfreeze { slot, incarnation });
                }
            }
            Fault::Cut { slot } => {
                if let Some(link) = self.processes[slot].link {
                    self.close(link, Side::Worker);
                    self.close(link, Side::Coordinator);
                }
            }
            Fault::Partition { slot, up, down, lasts } => {
                self.paths[slot].blocked[Side::Coordinator as usize] += u32::from(up);
                self.paths[slot].blocked[Side::Worker as usize] += u32::from(down);
                self.disturb(slot, lasts + S);
                self.heal_after(lasts, Heal::Unblock { slot, up, down });
            }
            Fault::Delay { slot, extra, lasts } => {
                self.paths[slot].extra += extra;
                self.disturb(slot, lasts + 10 * extra);
                self.heal_after(lasts, Heal::Faster { slot, extra });
            }
            Fault::Slow { slot, factor, lasts } => {
                self.processes[slot].slowed *= factor;
                self.checks.slowed(slot, self.now, lasts);
                self.heal_after(lasts, Heal::Quicker { slot, factor });
            }
            Fault::Stall { slot, takes } => {
                self.processes[slot].stall = takes;
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
            Fault::FailStep { slot } => {
                self.processes[slot].fail_step = true;
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
            Fault::Diverge { slot } => {
                self.processes[slot].diverge = true;
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
            Fault::Scale { max } => {
                let mut effects = Vec::new();
                let now = self.time();
                self.coordinator.core.set_max_replicas(now, max, &mut effects);
                self.carry_out(effects);
            }
            Fault::Drain { slot, back_after } => self.drain(slot, back_after),
            Fault::Twin { twin, lasts } => {
                self.start_process(twin);
                self.heal_after(lasts, Heal::Single { twin });
            }
            Fault::FailForm { slot, permanent } => {
                self.processes[slot].fail_form = Some(permanent);
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
        }
    }

    /// Something holds up the slot's steps for so long.
    pub(crate) fn disturb(&mut self, slot: usize, lasts: Time) {
        self.disturbed[slot] = self.disturbed[slot].max(self.now + lasts);
    }

    pub(crate) fn start_again(&mut self, slot: usize, after: Time) {
        self.schedule(after, Event::Start { slot });
        self.faulty_until(self.now + after);
    }

    fn heal_after(&mut self, after: Time, heal: Heal) {
        self.schedule(after, Event::Heal(heal));
        self.faulty_until(self.now + after);
    }

    /// Bounds of time are counted from the last fault's end.
    pub(crate) fn faulty_until(&mut self, at: Time) {
        self.last_fault = self.last_fault.max(at);
    }

    pub(crate) fn heal(&mut self, heal: Heal) {
        self.say(|| format!("HEAL {heal:?}"));
        match heal {
            Heal::Unfreeze { slot, incarnation } => self.unfreeze(slot, incarnation),
            Heal::Unblock { slot, up, down } => {
                self.paths[slot].blocked[Side::Coordinator as usize] -= u32::from(up);
                self.paths[slot].blocked[Side::Worker as usize] -= u32::from(down);
                self.release_held(slot);
            }
            Heal::Faster { slot, extra } => self.paths[slot].extra -= extra,
            Heal::Single { twin } => {
                self.kill(twin);
                self.ended[twin] = true;
            }
            Heal::Quicker { slot, factor } => self.processes[slot].slowed /= factor,
            Heal::NoOccasion { slot } => {
                let process = &mut self.processes[slot];
                process.stall = 0;
                process.fail_step = false;
                process.diverge = false;
                process.fail_form = None;
            }
        }
    }

    /// The coordinator is killed; another takes over after a while.
    fn replace(&mut self, after: Time) {
        let Some(life) = self.leader.take() else { return };
        self.report.replaced += 1;
        self.end_life(life);
        (0..self.processes.len()).for_each(|slot| self.disturb(slot, after));
        self.schedule(after, Event::Lead);
        self.faulty_until(self.now + after);
    }

    /// Somebody takes over.
    pub(crate) fn lead(&mut self) {
        let alive = |slot: &usize| self.processes[*slot].alive;
        let workers = (0..self.processes.len()).filter(alive).map(|slot| self.node_name(slot));
        let workers = workers.collect();
        self.leader = Some(self.begin_life(workers));
    }
}
