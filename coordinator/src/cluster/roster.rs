//! PURE: who is who: node names to slots, process runs to slots, and which connection is a worker's
//! present one.
//!
//! A process that dials again supersedes its own old connection. Another process under the same
//! name has to wait until the present one is gone: where a process that was not heard of has been
//! replaced and is back, the two would otherwise displace each other for ever.
use std::collections::BTreeMap;

use shared::ids::{Incarnation, WorkerId};

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
#[derive(Clone, Copy, Debug)]
struct Runs {
    last: Incarnation,
    /// The one before it. It may be back: a process that was not heard of for a while.
    before: Option<Incarnation>,
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
    /// The slot for a node's process, or `None` while another process has it.
    pub fn admit(&mut self, node: &str, incarnation: Incarnation) -> Option<WorkerId> {
        let next = WorkerId(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
        let worker = *self.slots.entry(node.to_owned()).or_insert(next);
        let present = self.present.get(&worker);
        present.is_none_or(|(present, _)| *present == incarnation).then_some(worker)
    }

    /// A worker has been admitted and welcomed. Its old connection, if there was one, is not its
    /// present one any more.
    pub fn joined(&mut self, worker: WorkerId, incarnation: Incarnation) -> Joining {
        self.links += 1;
        let link = LinkNumber(self.links);
        self.present.insert(worker, (incarnation, link));
        let runs = self.known.entry(worker).or_insert(Runs { last: incarnation, before: None });
        let restarted = runs.last != incarnation;
        let mut retired = None;
        if restarted {
            retired = runs.before.replace(runs.last).filter(|before| *before != incarnation);
            runs.last = incarnation;
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

    #[test]
    fn a_process_takes_its_own_place_again_and_no_other_one_s() {
        let mut roster = Roster::default();
        let worker = roster.admit("a", Incarnation(1)).unwrap();
        let first = roster.joined(worker, Incarnation(1));
        assert_eq!(roster.admit("a", Incarnation(2)), None);
        assert_eq!(roster.admit("b", Incarnation(2)), Some(WorkerId(1)));
        assert_eq!(roster.admit("a", Incarnation(1)), Some(worker));
        let again = roster.joined(worker, Incarnation(1));
        assert!(!again.restarted && again.retired.is_none());
        assert!(!roster.is_present(worker, first.link) && roster.is_present(worker, again.link));
        roster.left(worker);
        assert!(!roster.is_present(worker, again.link));
        assert_eq!(roster.admit("a", Incarnation(2)), Some(worker));
    }

    #[test]
    fn the_run_before_the_last_is_over_when_a_third_joins() {
        let mut roster = Roster::default();
        let worker = roster.admit("a", Incarnation(1)).unwrap();
        let mut joined = |incarnation| {
            let joining = roster.joined(worker, Incarnation(incarnation));
            (joining.restarted, joining.retired.map(|it| it.0))
        };
        assert_eq!(joined(1), (false, None));
        assert_eq!(joined(2), (true, None));
        assert_eq!(joined(1), (true, None), "it was only silent");
        assert_eq!(joined(3), (true, Some(2)));
        assert_eq!(joined(4), (true, Some(1)));
    }
}
