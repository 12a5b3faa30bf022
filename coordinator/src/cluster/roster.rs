//! PURE: who is who: node names to slots, process runs to slots, and which connection is a worker's
//! present one.
//!
//! A process that dials again supersedes its own old connection. Another process under the same
//! name has to wait until the present one is gone: where a process that was not heard of has been
//! replaced and is back, the two would otherwise displace each other for ever.
use std::collections::{BTreeMap, VecDeque};

use shared::ids::{Incarnation, WorkerId};

use super::slots;

/// Earlier process runs of a slot that may be back: processes that were not heard of for a while.
const EARLIER_MAX: usize = 3;
/// Process runs of a slot that are known to be over.
const RETIRED_MAX: usize = 64;

/// Tells connections of one worker apart; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkNumber(u64);

/// Everyone who ever joined.
#[derive(Debug, Default)]
pub struct Roster {
    slots: BTreeMap<String, WorkerId>,
    present: BTreeMap<WorkerId, (Incarnation, LinkNumber)>,
    known: BTreeMap<WorkerId, Runs>,
    links: u64,
}

/// Process runs of one slot.
#[derive(Debug)]
struct Runs {
    last: Incarnation,
    /// Those before it that may be back, oldest first.
    earlier: VecDeque<Incarnation>,
    /// Those whose totals are closed, oldest first.
    retired: VecDeque<Incarnation>,
}

/// The answer to a process that wants to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may, in this slot.
    Slot(WorkerId),
    /// Another process has its name at present.
    Taken,
    /// So many others have had its name since that its totals are closed: it has to be started
    /// again.
    Retired,
}

/// What a worker's joining means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joining {
    /// Its connection.
    pub link: LinkNumber,
    /// It is another process than the last in its slot.
    pub restarted: bool,
    /// A process run that will not be back.
    pub retired: Option<Incarnation>,
}

impl Roster {
    /// Whether a node's process may join. It may have brought a slot from another coordinator.
    pub fn admit(
        &mut self,
        node: &str,
        incarnation: Incarnation,
        brought: Option<WorkerId>,
    ) -> Admission {
        let worker = match self.slots.get(node) {
            Some(worker) => *worker,
            None => {
                let worker = slots::vacant(self.slots.values(), brought);
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

    /// A worker has been admitted and welcomed. Its old connection, if there was one, is not its
    /// present one any more.
    pub fn joined(&mut self, worker: WorkerId, incarnation: Incarnation) -> Joining {
        self.links += 1;
        let link = LinkNumber(self.links);
        self.present.insert(worker, (incarnation, link));
        let runs = self.known.entry(worker).or_insert_with(|| Runs {
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
        Joining { link, restarted, retired }
    }

    /// A worker's present connection has ended.
    pub fn left(&mut self, worker: WorkerId) {
        self.present.remove(&worker);
    }

    /// Whether `link` is a worker's present connection.
    #[must_use]
    pub fn is_present(&self, worker: WorkerId, link: LinkNumber) -> bool {
        self.present.get(&worker).is_some_and(|(_, present)| *present == link)
    }

    /// Workers that ever joined.
    #[must_use]
    pub fn num_known(&self) -> usize {
        self.known.len()
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
