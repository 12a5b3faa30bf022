//! The faults, and how they end.
use shared::membership::LEADER_LEASE_TTL;
use shared::membership::core::{DEADLINE, INCUMBENT_FIRST, MembershipCore};

use crate::events::{Event, Heal};
use crate::membership::micros;
use crate::network::Side;
use crate::scenario::{Fault, S, Time};
use crate::world::World;

/// A pending fault that found no opportunity is withdrawn after this time.
const OCCASION: Time = 5 * S;
/// Time within which the cluster finds ranks that are of no use to each other: a few formations
/// that wait for the others in vain, or steps that take too long.
const FOUND_WITHIN: Time = 300 * S;

impl World {
    pub(crate) fn fault(&mut self, index: usize) {
        let fault = self.scenario.faults[index].1.clone();
        self.say(|| format!("FAULT {fault:?}"));
        self.report.faults += 1;
        let leading = self.leading().filter(|life| self.coordinator.act(*life));
        match fault {
            Fault::CrashCoordinator { seat, back_after } => {
                let Some(seat) = seat.or_else(|| self.leading_seat()) else { return };
                self.report.replaced += u64::from(self.seats[seat].life.is_some());
                self.trouble(seat, 0);
                self.may_be_leaderless(back_after);
                self.disturb_all(0);
                self.seat_ends(seat, false, back_after);
            }
            Fault::StopCoordinator { seat, back_after } => {
                let Some(seat) = seat.or_else(|| self.leading_seat()) else { return };
                if self.seats[seat].frozen {
                    return;
                }
                let life = self.seats[seat].life;
                self.report.replaced += u64::from(life.is_some());
                self.trouble(seat, 0);
                self.may_be_leaderless(back_after);
                self.disturb_all(0);
                if life.is_some_and(|life| self.coordinator.act(life)) {
                    self.checkpoint();
                }
                self.seat_ends(seat, true, back_after);
            }
            Fault::FreezeCoordinator { seat, lasts } => {
                let Some(seat) = seat.or_else(|| self.leading_seat()) else { return };
                if self.freeze_seat(seat) {
                    self.trouble(seat, lasts);
                    self.may_be_leaderless(lasts);
                    self.disturb_all(lasts + S);
                    let incarnation = self.seats[seat].incarnation;
                    self.heal_after(lasts, Heal::Thaw { seat, incarnation });
                }
            }
            Fault::EtcdAway { lasts, counts, resets } => self.etcd_goes(lasts, counts, resets),
            Fault::CutEtcd { who, lasts } => {
                self.members[who].cut += 1;
                self.trouble_member(who, lasts);
                self.heal_after(lasts, Heal::JoinEtcd { who });
            }
            Fault::Revoke { who } => {
                self.trouble_member(who, 0);
                let lease = self.members[who].core.as_ref().and_then(MembershipCore::lease);
                if let Some(lease) = lease.filter(|_| self.etcd_away == 0) {
                    self.etcd.revoke(lease);
                    self.spread_news();
                }
            }
            Fault::FailKeep { who, gone } => {
                self.members[who].fails_keep = Some(gone);
                self.etcd_broken(who, "the connection is lost");
            }
            Fault::CancelWatch { who } => {
                self.etcd.cancel(who);
                self.spread_news();
            }
            Fault::LoseChange { who } => {
                self.members[who].loses_change = true;
                self.heal_after(OCCASION, Heal::ChangesArrive { who });
            }
            Fault::Compact => {
                let away = |who: usize| !self.reaches_etcd(who);
                let behind: Vec<usize> = (0..self.members.len()).filter(|it| away(*it)).collect();
                self.etcd.compact(|who| behind.contains(&who));
                self.spread_news();
            }
            Fault::Scale { .. } | Fault::Drain { .. } if leading.is_none() => {}
            // One that is frozen takes no commands.
            Fault::Drain { .. } if self.seats[self.coordinator.seat].frozen => {}
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
                for life in self.coordinator.lives() {
                    // Operators may still reach a former leader, with a different command.
                    let leads = Some(life) == leading;
                    let max = if leads { max } else { max.xor(Some(1)) };
                    self.schedule(1, Event::Scale(life, max.unwrap_or(0)));
                }
            }
            Fault::Drain { slot, back_after } => self.drain(slot, back_after),
            Fault::Twin { twin, lasts } => {
                self.start_process(twin);
                self.heal_after(lasts, Heal::Single { twin });
            }
            Fault::Hang { slot, notices } => self.hang(slot, notices),
            Fault::HangSteps { slot, lasts } => {
                let process = &mut self.processes[slot];
                process.steps_hang = true;
                let incarnation = process.incarnation;
                self.bad_ranks(lasts, Heal::StepsRun { slot, incarnation });
            }
            Fault::Apart { slots, lasts } => {
                self.apart.push(slots);
                self.bad_ranks(lasts, Heal::Together { slots });
            }
            Fault::LoadAdapter { .. } | Fault::UnloadAdapter { .. } if leading.is_none() => {}
            Fault::LoadAdapter { name, contents, replace } => {
                self.command_adapter(name, Some((contents, replace)));
            }
            Fault::UnloadAdapter { name } => self.command_adapter(name, None),
            Fault::FailAdapter { slot } => {
                self.processes[slot].fail_adapter = true;
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
            Fault::SlowFetch { slot, takes, speaks } => {
                self.processes[slot].slow_fetch = Some((takes, speaks));
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
            Fault::FailForm { slot, permanent } => {
                self.processes[slot].fail_form = Some(permanent);
                self.heal_after(OCCASION, Heal::NoOccasion { slot });
            }
        }
    }

    /// Ranks are of no use to each other, for a while or for ever: until that is over, or found,
    /// and until nobody waits any more for what will not come.
    fn bad_ranks(&mut self, lasts: Option<Time>, heal: Heal) {
        let lasts = match lasts {
            Some(lasts) => {
                self.heal_after(lasts, heal);
                let step = micros(self.scenario.limits.step_timeout);
                lasts + step + self.scenario.collective_timeout + 10 * S
            }
            None => FOUND_WITHIN,
        };
        self.disturb_all(lasts);
        self.faulty_until(self.now + lasts);
    }

    /// Something holds up the slot's steps for this long.
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

    /// Deadlines are counted from the end of the last fault.
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
            Heal::Thaw { seat, incarnation } => self.thaw(seat, incarnation),
            Heal::EtcdBack => {
                self.etcd_away -= 1;
                self.trouble_again(self.etcd_went);
                if !self.etcd_counts {
                    self.etcd.restarted(self.now);
                }
                self.etcd_is_back();
            }
            Heal::JoinEtcd { who } => {
                self.members[who].cut -= 1;
                self.etcd_is_back();
            }
            Heal::ChangesArrive { who } => self.members[who].loses_change = false,
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
                process.fail_adapter = false;
                process.slow_fetch = None;
            }
            Heal::StepsRun { slot, incarnation } => {
                let process = &mut self.processes[slot];
                process.steps_hang &= process.incarnation != incarnation;
            }
            Heal::Together { slots } => {
                let at = self.apart.iter().position(|it| *it == slots);
                at.map(|at| self.apart.remove(at));
            }
        }
    }

    /// etcd is out of reach for a while.
    fn etcd_goes(&mut self, lasts: Time, counts: bool, resets: bool) {
        if self.etcd_away > 0 {
            return;
        }
        self.report.outages += 1;
        self.etcd_away += 1;
        self.etcd_went = self.now;
        self.etcd_counts = counts;
        if resets {
            (0..self.members.len())
                .for_each(|who| self.etcd_broken(who, "the connection is reset"));
        }
        self.may_be_leaderless(lasts);
        self.heal_after(lasts, Heal::EtcdBack);
    }

    /// A member may lose its lease.
    fn trouble_member(&mut self, who: usize, lasts: Time) {
        if who >= self.processes.len() {
            self.trouble(who - self.processes.len(), lasts);
            self.may_be_leaderless(lasts);
        }
    }

    /// The leader may be gone, and another is found a while after this has lasted.
    pub(crate) fn may_be_leaderless(&mut self, lasts: Time) {
        let until = self.now + lasts + micros(LEADER_LEASE_TTL + INCUMBENT_FIRST + 2 * DEADLINE);
        self.leaderless = self.leaderless.max(until);
        self.faulty_until(self.now + lasts + micros(LEADER_LEASE_TTL));
    }

    /// Something holds up all slots' steps.
    pub(crate) fn disturb_all(&mut self, lasts: Time) {
        (0..self.processes.len()).for_each(|slot| self.disturb(slot, lasts));
    }
}
