//! PURE: which front end has which slot, and which process and link are the slot's current ones.
//!
//! As with workers, a second process under the name of a linked one must wait, or the two would
//! displace each other forever. A name keeps its slot for as long as a front end that is gone is
//! expected back. Then its totals are closed and others get its slot: names may come and go, and
//! what is kept of them must not grow.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shared::ids::Incarnation;
use shared::protocol::FrontendId;

use crate::cluster::absence::EXPECTED_FOR;
use crate::cluster::actor::JoinRefusal;

/// Maximum number of front ends, linked or gone, that have a slot.
pub(super) const SLOTS_MAX: usize = 4096;

/// The table of slots; `L` is a link. See the module's documentation.
#[derive(Debug)]
pub(super) struct Slots<L> {
    by_node: BTreeMap<String, FrontendId>,
    slots: BTreeMap<FrontendId, Slot<L>>,
    /// Processes whose totals are closed, oldest first.
    closed: VecDeque<Incarnation>,
    /// Processes of earlier coordinators that have not joined this one, and since when they have
    /// been missed.
    unclaimed: BTreeMap<(FrontendId, Incarnation), Duration>,
}

#[derive(Debug)]
struct Slot<L> {
    /// The slot's last linked process.
    run: Option<Incarnation>,
    link: Option<L>,
    /// When the last link ended.
    free_since: Duration,
    /// Its process has said goodbye.
    leaving: bool,
}

/// How the current link of a front end ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absence {
    /// The process may be back.
    Lost,
    /// The process had said goodbye: its totals are to be closed.
    Over,
}

/// Permission for a front end to join.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AdmittedFrontend {
    /// Its slot.
    pub(super) frontend: FrontendId,
    /// The slot's previous process, if the slot was reassigned; it is not expected back.
    pub(super) freed: Option<Incarnation>,
}

/// What a joining front end replaces.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Replaced<L> {
    /// The previous process, if it was another one.
    pub(super) run: Option<Incarnation>,
    /// The previous link of the same process, if still open.
    pub(super) link: Option<L>,
}

impl<L> Default for Slots<L> {
    fn default() -> Self {
        Self {
            by_node: BTreeMap::new(),
            slots: BTreeMap::new(),
            closed: VecDeque::new(),
            unclaimed: BTreeMap::new(),
        }
    }
}

impl<L> Slots<L> {
    /// Linked front ends: name, slot, link.
    pub(super) fn linked(&self) -> impl Iterator<Item = (&str, FrontendId, &L)> {
        let link = |id: &FrontendId| self.slots.get(id).and_then(|slot| slot.link.as_ref());
        self.by_node.iter().filter_map(move |(node, id)| Some((node.as_str(), *id, link(id)?)))
    }

    /// Whether process `run` may join as `node`, and in which slot. `brought` is its slot at
    /// another coordinator.
    pub(super) fn admit(
        &mut self,
        now: Duration,
        node: &str,
        run: Incarnation,
        brought: Option<FrontendId>,
    ) -> Result<AdmittedFrontend, JoinRefusal> {
        if self.closed.contains(&run) {
            return Err(closed());
        }
        if let Some(frontend) = self.by_node.get(node).copied() {
            let slot = self.slots.get(&frontend);
            if slot.is_some_and(|slot| slot.link.is_some() && slot.run != Some(run)) {
                let reason = format!("another process is linked as front end {node}");
                return Err(JoinRefusal::NotYet(reason));
            }
            return Ok(AdmittedFrontend { frontend, freed: None });
        }
        let (frontend, freed) = if self.by_node.len() < SLOTS_MAX {
            (self.vacant(brought), None)
        } else {
            self.free(now)?
        };
        self.by_node.insert(node.to_owned(), frontend);
        let slot = Slot { run: None, link: None, free_since: now, leaving: false };
        self.slots.insert(frontend, slot);
        Ok(AdmittedFrontend { frontend, freed })
    }

    /// An admitted front end went away before it got its welcome: frees its slot if that was new.
    pub(super) fn not_joined(&mut self, node: &str) {
        let Some(id) = self.by_node.get(node).copied() else { return };
        if self.slots.get(&id).is_some_and(|slot| slot.run.is_none() && slot.link.is_none()) {
            self.by_node.remove(node);
            self.slots.remove(&id);
        }
    }

    /// Returns the slot that a front end brings from another coordinator if it is free, otherwise
    /// the first free one. Slot 0 is the coordinator's own.
    fn vacant(&self, brought: Option<FrontendId>) -> FrontendId {
        let most = SLOTS_MAX as u32;
        let brought = brought.map(|id| id.0).filter(|slot| (1..=most).contains(slot));
        let mut slots = brought.into_iter().chain(1..=most);
        FrontendId(slots.find(|slot| !self.slots.contains_key(&FrontendId(*slot))).unwrap_or(most))
    }

    /// Frees the slot of the front end that has been gone longest and is no longer expected back.
    fn free(&mut self, now: Duration) -> Result<(FrontendId, Option<Incarnation>), JoinRefusal> {
        let gone = |(id, slot): (&FrontendId, &Slot<L>)| {
            let long = now.saturating_sub(slot.free_since) >= EXPECTED_FOR;
            (slot.link.is_none() && long).then_some((slot.free_since, *id))
        };
        let Some((_, id)) = self.slots.iter().filter_map(gone).min() else {
            return Err(JoinRefusal::NotYet(format!(
                "{SLOTS_MAX} front ends are linked or were within the last {} minutes, which is \
                 the maximum",
                EXPECTED_FOR.as_secs() / 60
            )));
        };
        Ok((id, self.vacate(id)))
    }

    /// Takes a slot from its name; returns its process, whose totals are to be closed.
    fn vacate(&mut self, id: FrontendId) -> Option<Incarnation> {
        self.by_node.retain(|_, slot| *slot != id);
        let run = self.slots.remove(&id).and_then(|slot| slot.run);
        self.close(run);
        run
    }

    fn close(&mut self, run: Option<Incarnation>) {
        self.closed.extend(run);
        if self.closed.len() > SLOTS_MAX {
            self.closed.pop_front();
        }
    }

    /// Frees the slots of front ends that are not expected back; returns the processes whose totals
    /// are to be closed. `lost` are all processes with open totals and no link.
    pub(super) fn give_up(
        &mut self,
        now: Duration,
        lost: &[(FrontendId, Incarnation)],
    ) -> Vec<(FrontendId, Incarnation)> {
        let long = |since: Duration| now.saturating_sub(since) >= EXPECTED_FOR;
        let gone = self.slots.iter().filter(|(_, it)| it.link.is_none() && long(it.free_since));
        let gone: Vec<FrontendId> = gone.map(|(id, _)| *id).collect();
        let mut over: Vec<(FrontendId, Incarnation)> =
            gone.into_iter().filter_map(|id| Some((id, self.vacate(id)?))).collect();
        // Whoever has joined here has a slot, and perhaps totals under another one.
        let joined: BTreeSet<Incarnation> = self.slots.values().filter_map(|it| it.run).collect();
        let unclaimed = lost.iter().filter(|(_, run)| !joined.contains(run));
        let since = |key| (key, self.unclaimed.get(&key).copied().unwrap_or(now));
        self.unclaimed = unclaimed.copied().map(since).collect();
        let late: Vec<_> = self.unclaimed.extract_if(.., |_, since| long(*since)).collect();
        for (key, _) in late {
            self.close(Some(key.1));
            over.push(key);
        }
        over
    }

    /// A front end has got its welcome; `link` becomes its current link.
    ///
    /// # Errors
    /// Returns `link` when another process has the slot by now, or the process's totals are closed.
    pub(super) fn joined(
        &mut self,
        node: &str,
        id: FrontendId,
        run: Incarnation,
        link: L,
    ) -> Result<Replaced<L>, L> {
        let is_its = self.by_node.get(node) == Some(&id) && !self.closed.contains(&run);
        let Some(slot) = self.slots.get_mut(&id).filter(|_| is_its) else { return Err(link) };
        let is_same = slot.run == Some(run);
        if slot.link.is_some() && !is_same {
            return Err(link);
        }
        slot.leaving = false;
        let old = slot.link.replace(link);
        let run = slot.run.replace(run).filter(|_| !is_same);
        Ok(Replaced { run, link: old })
    }

    /// The process says goodbye over the slot's current link, if `is_it` is that one.
    pub(super) fn leaves(&mut self, id: FrontendId, is_it: impl FnOnce(&L) -> bool) {
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.leaving |= slot.link.as_ref().is_some_and(is_it);
        }
    }

    /// A link has ended. Returns what that means if it was the slot's current one, as `is_it`
    /// tells.
    pub(super) fn left(
        &mut self,
        now: Duration,
        id: FrontendId,
        is_it: impl FnOnce(&L) -> bool,
    ) -> Option<Absence> {
        let slot = self.slots.get_mut(&id)?;
        if !slot.link.as_ref().is_some_and(is_it) {
            return None;
        }
        (slot.link, slot.free_since) = (None, now);
        if !slot.leaving {
            return Some(Absence::Lost);
        }
        let run = slot.run.take();
        self.close(run);
        Some(Absence::Over)
    }
}

/// The refusal of a process whose totals are closed: they would be counted again.
pub(super) fn closed() -> JoinRefusal {
    let reason = "it was away for so long that its totals are closed: start it again";
    JoinRefusal::Never(reason.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Incarnation = Incarnation(1);
    const B: Incarnation = Incarnation(2);

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn slot(admitted: Result<AdmittedFrontend, JoinRefusal>) -> u32 {
        let AdmittedFrontend { frontend, freed } = admitted.unwrap();
        assert_eq!(freed, None);
        frontend.0
    }

    #[test]
    fn one_that_was_not_told_has_no_slot() {
        let mut slots = Slots::<u32>::default();
        let first = slots.admit(secs(0), "a", A, None).unwrap().frontend;
        slots.not_joined("a");
        slots.not_joined("nobody");
        assert_eq!(slots.admit(secs(0), "b", B, None).unwrap().frontend, first);
        assert!(slots.joined("b", first, B, 1).is_ok());
        slots.not_joined("b");
        assert_eq!(slots.linked().count(), 1, "it is linked");
    }

    #[test]
    fn another_process_waits_until_the_present_one_is_gone() {
        let mut slots = Slots::<u32>::default();
        assert_eq!(slot(slots.admit(secs(0), "a", A, None)), 1);
        let nobody = Replaced { run: None, link: None };
        assert_eq!(slots.joined("a", FrontendId(1), A, 7), Ok(nobody));
        let waits = slots.admit(secs(1), "a", B, None).unwrap_err();
        assert!(matches!(waits, JoinRefusal::NotYet(why) if why.contains("linked as front end a")));
        // The process's own next link replaces the old one, which ends later.
        assert_eq!(slot(slots.admit(secs(1), "a", A, None)), 1);
        let own = Replaced { run: None, link: Some(7) };
        assert_eq!(slots.joined("a", FrontendId(1), A, 8), Ok(own));
        assert_eq!(slots.left(secs(2), FrontendId(1), |link| *link == 7), None);
        assert!(slots.admit(secs(2), "a", B, None).is_err(), "it is linked still");
        let left = slots.left(secs(3), FrontendId(1), |link| *link == 8);
        assert_eq!(left, Some(Absence::Lost));
        // Two processes are admitted at the same time; only one of them joins.
        let both = [A, B].map(|run| slot(slots.admit(secs(3), "a", run, None)));
        assert_eq!(both, [1, 1]);
        let other = Replaced { run: Some(A), link: None };
        assert_eq!(slots.joined("a", FrontendId(1), B, 9), Ok(other));
        assert_eq!(slots.joined("a", FrontendId(1), A, 10), Err(10));
        assert_eq!(slots.linked().collect::<Vec<_>>(), [("a", FrontendId(1), &9)]);
    }

    #[test]
    fn a_slot_is_brought_where_nobody_has_it() {
        let mut slots = Slots::<u32>::default();
        let brings = |it| Some(FrontendId(it));
        assert_eq!(slot(slots.admit(secs(0), "a", A, brings(5))), 5);
        assert_eq!(slot(slots.admit(secs(0), "b", A, brings(5))), 1);
        assert_eq!(slot(slots.admit(secs(0), "c", A, brings(0))), 2);
        assert_eq!(slot(slots.admit(secs(0), "d", A, brings(u32::MAX))), 3);
        assert_eq!(slot(slots.admit(secs(9), "a", B, brings(7))), 5, "its name's");
    }

    #[test]
    fn names_that_never_return_give_their_slots_to_others() {
        let mut slots = Slots::<u32>::default();
        for i in 0..SLOTS_MAX as u32 {
            let (node, run) = (format!("pod-{i}"), Incarnation(100 + u64::from(i)));
            let now = secs(u64::from(i.min(2)));
            let id = FrontendId(slot(slots.admit(now, &node, run, None)));
            slots.joined(&node, id, run, i).unwrap();
            if i < 2 {
                assert_eq!(slots.left(now, id, |link| *link == i), Some(Absence::Lost));
            }
        }
        let late = secs(0) + EXPECTED_FOR;
        let full = slots.admit(late - secs(1), "new", A, None).unwrap_err();
        assert!(matches!(full, JoinRefusal::NotYet(why) if why.contains("4096 front ends")));
        let freed = AdmittedFrontend { frontend: FrontendId(1), freed: Some(Incarnation(100)) };
        assert_eq!(slots.admit(late, "new", A, None), Ok(freed));
        assert!(slots.admit(late, "newer", B, None).is_err(), "the next one is expected still");
        // Its slot belongs to another process by now, or to none: its totals would be counted
        // twice.
        let back = slots.admit(late + secs(9), "pod-0", Incarnation(100), None).unwrap_err();
        assert!(matches!(back, JoinRefusal::Never(why) if why.contains("start it again")));
        let freed = AdmittedFrontend { frontend: FrontendId(2), freed: Some(Incarnation(101)) };
        assert_eq!(slots.admit(late + secs(9), "pod-0", B, None), Ok(freed));
    }

    /// Restarts under one name keep the slot; a name that is not used again gives it back.
    #[test]
    fn slots_are_kept_for_as_long_as_their_front_ends_are_expected_back() {
        let mut slots = Slots::<u32>::default();
        let join = |slots: &mut Slots<u32>, now, node, run| {
            let id = slots.admit(now, node, run, None).unwrap().frontend;
            slots.joined(node, id, run, id.0).unwrap();
            id
        };
        let leave = |slots: &mut Slots<u32>, now, id: FrontendId, goodbye: bool| {
            if goodbye {
                slots.leaves(id, |link| *link == id.0);
            }
            slots.left(now, id, |link| *link == id.0).unwrap()
        };
        let first = join(&mut slots, secs(0), "a", A);
        assert_eq!(leave(&mut slots, secs(1), first, true), Absence::Over);
        assert!(slots.admit(secs(2), "a", A, None).is_err(), "it said that it would not come back");
        assert_eq!(join(&mut slots, secs(9), "a", B), first);
        let second = join(&mut slots, secs(9), "b", Incarnation(3));
        for (id, goodbye) in [(first, false), (second, true)] {
            leave(&mut slots, secs(10), id, goodbye);
        }
        let late = secs(10) + EXPECTED_FOR;
        assert_eq!(slots.give_up(late - secs(1), &[(first, B)]), []);
        assert_eq!(slots.give_up(late, &[(first, B)]), [(first, B)], "the other one is closed");
        assert!(slots.admit(late, "a", B, None).is_err());
        assert_eq!(join(&mut slots, late, "c", Incarnation(4)), first);
    }

    #[test]
    fn those_of_earlier_coordinators_are_given_up_unless_they_join() {
        let mut slots = Slots::<u32>::default();
        let lost = [(FrontendId(1), A), (FrontendId(5), B)];
        assert_eq!(slots.give_up(secs(7), &lost), []);
        // One joins under another slot: its totals under the old one stay open.
        let id = slots.admit(secs(8), "b", B, Some(FrontendId(6))).unwrap().frontend;
        slots.joined("b", id, B, 6).unwrap();
        let late = secs(7) + EXPECTED_FOR;
        assert_eq!(slots.give_up(late - secs(1), &lost), []);
        assert_eq!(slots.give_up(late, &lost), [lost[0]]);
        assert_eq!(slots.give_up(late, &lost[1..]), [], "once");
        assert!(slots.admit(late, "a", A, None).is_err());
        assert_eq!(slots.joined("b", id, A, 7), Err(7), "not even if it was admitted before");
    }
}
