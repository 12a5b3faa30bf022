//! PURE: identities: which slot a node name has, which process runs a slot has had, and which
//! connection is a worker's present one.
//!
//! A process that dials again supersedes its own old connection. Another process under the same
//! name must wait until the present one is gone: otherwise a process that was silent, was replaced
//! and is back, and its replacement, would displace each other forever.
//!
//! A name keeps its slot while there are enough. Then slots of nodes that are not expected back go
//! to others, and their totals are closed: names that were not given by an operator contain a
//! random part.
use std::collections::{BTreeMap, VecDeque};

use shared::ids::{Incarnation, WorkerId};

use super::slots;

/// Maximum number of nodes with a slot, as long as some of them are not expected back.
const SLOTS_MAX: usize = 4096;
/// Earlier process runs of a slot that may be back, since they were only silent for a while.
const EARLIER_MAX: usize = 3;
/// Process runs of a slot that are remembered as over.
const RETIRED_MAX: usize = 64;

/// Identifies a connection of a worker; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkNumber(u64);

/// All workers that ever joined.
#[derive(Debug, Default)]
pub struct Roster {
    slots: BTreeMap<String, WorkerId>,
    present: BTreeMap<WorkerId, (Incarnation, LinkNumber)>,
    known: BTreeMap<WorkerId, SlotRuns>,
    /// Slots of nodes that are not expected back, the first one given up first.
    idle: VecDeque<WorkerId>,
    /// Process runs whose totals were closed when their slots went to others, oldest first.
    closed: VecDeque<Incarnation>,
    /// Those not yet returned by [`Roster::take_freed`].
    freed: Vec<(WorkerId, Incarnation)>,
    links: u64,
}

/// Process runs of one slot.
#[derive(Debug)]
struct SlotRuns {
    last: Incarnation,
    /// Earlier ones that may be back, oldest first.
    earlier: VecDeque<Incarnation>,
    /// Those whose totals are closed, oldest first.
    retired: VecDeque<Incarnation>,
}

/// Answer to a process that wants to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may join, in this slot.
    Slot(WorkerId),
    /// Another process has its name at present.
    Taken,
    /// So many other processes have had its name since that its totals are closed: it must be
    /// restarted.
    Retired,
}

/// What it means that a worker joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinOutcome {
    /// Its connection.
    pub link: LinkNumber,
    /// Whether it is another process than the last one in its slot.
    pub restarted: bool,
    /// A process run that will not be back.
    pub retired: Option<Incarnation>,
}

impl Roster {
    /// Decides whether a node's process may join. It may have brought a slot from another
    /// coordinator.
    pub fn admit(
        &mut self,
        node: &str,
        incarnation: Incarnation,
        brought: Option<WorkerId>,
    ) -> Admission {
        let worker = match self.slots.get(node) {
            Some(worker) => *worker,
            None if self.closed.contains(&incarnation) => return Admission::Retired,
            None => {
                let freed = if self.slots.len() < SLOTS_MAX { None } else { self.free() };
                let worker = freed.unwrap_or_else(|| slots::vacant(self.slots.values(), brought));
                self.slots.insert(node.to_owned(), worker);
                worker
            }
        };
        if self.known.get(&worker).is_some_and(|runs| runs.retired.contains(&incarnation)) {
            return Admission::Retired;
        }
        match self.present.get(&worker) {
            Some((present, _)) if *present != incarnation => Admission::Taken,
            _ => Admission::Slot(worker),
        }
    }

    /// A worker has been admitted and welcomed. Its old connection, if any, is no longer its
    /// present one.
    pub fn joined(&mut self, worker: WorkerId, incarnation: Incarnation) -> JoinOutcome {
        self.links += 1;
        let link = LinkNumber(self.links);
        self.idle.retain(|idle| *idle != worker);
        self.present.insert(worker, (incarnation, link));
        let runs = self.known.entry(worker).or_insert_with(|| SlotRuns {
            last: incarnation,
            earlier: VecDeque::new(),
            retired: VecDeque::new(),
        });
        let restarted = runs.last != incarnation;
        let mut retired = None;
        if restarted {
            runs.earlier.retain(|earlier| *earlier != incarnation);
            runs.earlier.push_back(runs.last);
            runs.last = incarnation;
            if runs.earlier.len() > EARLIER_MAX {
                retired = runs.earlier.pop_front();
                runs.retired.extend(retired);
            }
            if runs.retired.len() > RETIRED_MAX {
                runs.retired.pop_front();
            }
        }
        JoinOutcome { link, restarted, retired }
    }

    /// A worker that was admitted did not join after all. A name that nobody ever joined under
    /// loses its slot: names cost nothing.
    pub fn not_joined(&mut self, node: &str, worker: WorkerId) {
        let is_its = self.slots.get(node) == Some(&worker);
        if is_its && !self.known.contains_key(&worker) && !self.present.contains_key(&worker) {
            self.slots.remove(node);
        }
    }

    /// Returns the slot of a node name, if it has one.
    #[must_use]
    pub fn slot_of(&self, node: &str) -> Option<WorkerId> {
        self.slots.get(node).copied()
    }

    /// Returns the node name of a slot.
    #[must_use]
    pub fn node_of(&self, worker: WorkerId) -> Option<&str> {
        self.slots.iter().find(|(_, slot)| **slot == worker).map(|(node, _)| node.as_str())
    }

    /// A worker's present connection has ended.
    pub fn left(&mut self, worker: WorkerId) {
        self.present.remove(&worker);
    }

    /// A worker that is gone is not expected back: its slot may go to another node.
    pub fn given_up(&mut self, worker: WorkerId) {
        if !self.present.contains_key(&worker) && !self.idle.contains(&worker) {
            self.idle.push_back(worker);
        }
    }

    /// Returns process runs whose slots went to other nodes, each once: their totals are to be
    /// closed.
    pub fn take_freed(&mut self) -> Vec<(WorkerId, Incarnation)> {
        std::mem::take(&mut self.freed)
    }

    /// Frees the slot of the node that was given up first.
    fn free(&mut self) -> Option<WorkerId> {
        let worker = self.idle.pop_front()?;
        self.slots.retain(|_, slot| *slot != worker);
        if let Some(runs) = self.known.remove(&worker) {
            let open = runs.earlier.into_iter().chain([runs.last]);
            let before = self.freed.len();
            self.freed.extend(open.map(|run| (worker, run)));
            let closed = self.freed[before..].iter().map(|(_, run)| *run);
            self.closed.extend(runs.retired.into_iter().chain(closed));
            let surplus = self.closed.len().saturating_sub(SLOTS_MAX);
            self.closed.drain(..surplus);
        }
        Some(worker)
    }

    /// Whether `link` is a worker's present connection.
    #[must_use]
    pub fn is_present(&self, worker: WorkerId, link: LinkNumber) -> bool {
        self.present.get(&worker).is_some_and(|(_, present)| *present == link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(admission: Admission) -> WorkerId {
        match admission {
            Admission::Slot(worker) => worker,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_process_takes_its_own_place_again_and_no_other_one_s() {
        let mut roster = Roster::default();
        let worker = slot(roster.admit("a", Incarnation(1), None));
        let first = roster.joined(worker, Incarnation(1));
        assert_eq!(roster.admit("a", Incarnation(2), None), Admission::Taken);
        assert_eq!(roster.admit("b", Incarnation(2), None), Admission::Slot(WorkerId(1)));
        assert_eq!(roster.admit("a", Incarnation(1), None), Admission::Slot(worker));
        let again = roster.joined(worker, Incarnation(1));
        assert!(!again.restarted && again.retired.is_none());
        assert!(!roster.is_present(worker, first.link) && roster.is_present(worker, again.link));
        roster.left(worker);
        assert!(!roster.is_present(worker, again.link));
        assert_eq!(roster.admit("a", Incarnation(2), None), Admission::Slot(worker));
    }

    #[test]
    fn a_name_under_which_nobody_joins_has_no_slot() {
        let mut roster = Roster::default();
        let gone = slot(roster.admit("gone", Incarnation(1), None));
        roster.not_joined("gone", gone);
        assert_eq!(roster.slot_of("gone"), None);
        // Neither another node's slot, nor that of a node that has joined, before or now.
        let worker = slot(roster.admit("a", Incarnation(2), None));
        roster.joined(worker, Incarnation(2));
        roster.not_joined("a", worker);
        roster.not_joined("gone", worker);
        assert_eq!(roster.slot_of("a"), Some(worker));
        roster.left(worker);
        roster.not_joined("a", worker);
        assert_eq!(roster.slot_of("a"), Some(worker));
    }

    #[test]
    fn a_node_keeps_the_slot_it_had_elsewhere_where_nobody_has_it() {
        let mut roster = Roster::default();
        let mut bringing = |node, brought: Option<u32>| {
            slot(roster.admit(node, Incarnation(1), brought.map(WorkerId))).0
        };
        assert_eq!(bringing("b", Some(1)), 1);
        assert_eq!(bringing("c", Some(1)), 0);
        assert_eq!(bringing("d", None), 2);
        assert_eq!(bringing("b", Some(9)), 1);
    }

    #[test]
    fn names_that_never_return_give_their_slots_to_others() {
        let mut roster = Roster::default();
        for node in 0..SLOTS_MAX as u32 {
            let run = Incarnation(100 + u64::from(node));
            let worker = slot(roster.admit(&format!("pod-{node}"), run, None));
            assert_eq!(worker, WorkerId(node));
            roster.joined(worker, run);
        }
        let new = |roster: &mut Roster, node: &str, run| {
            slot(roster.admit(node, Incarnation(run), None)).0
        };
        // All of them are linked, so there may be more slots.
        assert_eq!(new(&mut roster, "x", 1), 4096);
        for worker in [7, 5, 9].map(WorkerId) {
            roster.left(worker);
            roster.given_up(worker);
            roster.given_up(worker);
        }
        // One is back after all, in its own slot.
        let back = slot(roster.admit("pod-5", Incarnation(1105), None));
        assert!(back == WorkerId(5) && roster.joined(back, Incarnation(1105)).restarted);
        assert_eq!(new(&mut roster, "y", 2), 7);
        assert_eq!(roster.take_freed(), [(WorkerId(7), Incarnation(107))]);
        assert!(!roster.joined(WorkerId(7), Incarnation(2)).restarted, "it is new there");
        assert_eq!((roster.slot_of("pod-7"), roster.node_of(WorkerId(7))), (None, Some("y")));
        // The slot has another process by now: the old one's totals would count twice.
        assert_eq!(roster.admit("pod-7", Incarnation(107), None), Admission::Retired);
        assert_eq!(new(&mut roster, "pod-7", 3), 9);
        assert_eq!(roster.take_freed(), [(WorkerId(9), Incarnation(109))]);
        assert_eq!(new(&mut roster, "z", 4), 4097, "nobody else is given up");
    }

    #[test]
    fn a_run_may_be_back_until_its_totals_are_closed() {
        let mut roster = Roster::default();
        let worker = slot(roster.admit("a", Incarnation(1), None));
        let mut joined = |incarnation| {
            let joining = roster.joined(worker, Incarnation(incarnation));
            roster.left(worker);
            (joining.restarted, joining.retired.map(|it| it.0))
        };
        assert_eq!(joined(1), (false, None));
        assert_eq!(joined(2), (true, None));
        assert_eq!(joined(1), (true, None), "it was only silent");
        assert_eq!(joined(3), (true, None));
        assert_eq!(joined(4), (true, None));
        assert_eq!(joined(5), (true, Some(2)));
        assert_eq!(roster.admit("a", Incarnation(2), None), Admission::Retired);
        assert_eq!(roster.admit("a", Incarnation(1), None), Admission::Slot(worker));
    }
}
