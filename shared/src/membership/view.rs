//! PURE: what is known of the cluster. Lists and events go in, in any order and any number of
//! times; what is newer by its revision wins.
use std::collections::BTreeMap;

use super::{Destination, Record};

/// The cluster, as far as this process knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Everybody, by key.
    pub records: BTreeMap<String, Record>,
    /// Who leads.
    pub leader: Option<Leader>,
    /// etcd answers.
    pub connected: bool,
    /// This process leads, as far as it knows.
    pub leading: bool,
    /// Up to which revision this is known.
    pub revision: i64,
    /// When this was last confirmed, in seconds since 1970; 0 is never.
    pub confirmed: u64,
}

/// A coordinator that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Who.
    pub record: Record,
    /// Grows from leader to leader: the revision at which it began to lead.
    pub epoch: i64,
}

/// One key as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Without the cluster's prefix.
    pub key: String,
    /// What a process wrote.
    pub record: Record,
    /// When the key came to be.
    pub created: i64,
}

/// The leader's key, without the cluster's prefix.
pub const LEADER_KEY: &str = "leader";

impl View {
    /// A whole list, as of `revision`: what is not in it is not there. An older list than what is
    /// known changes nothing.
    pub fn list(&mut self, revision: i64, entries: Vec<Entry>) {
        if revision < self.revision {
            return;
        }
        self.records.clear();
        self.leader = None;
        for entry in entries {
            self.insert(entry);
        }
        self.revision = revision;
    }

    /// A whole list, as of `revision`, that is newer than anything known: of an etcd that was put
    /// back to an older state, whose revisions begin again, too.
    pub fn list_anew(&mut self, revision: i64, entries: Vec<Entry>) {
        self.revision = revision;
        self.list(revision, entries);
    }

    /// A key was written at `revision`.
    pub fn put(&mut self, revision: i64, entry: Entry) {
        if revision > self.revision {
            self.insert(entry);
        }
    }

    /// A key is gone since `revision`.
    pub fn delete(&mut self, revision: i64, key: &str) {
        if revision <= self.revision {
            return;
        }
        if key == LEADER_KEY {
            self.leader = None;
        } else {
            self.records.remove(key);
        }
    }

    /// All events up to `revision` were taken.
    pub fn reached(&mut self, revision: i64) {
        self.revision = self.revision.max(revision);
    }

    /// Which coordinator to dial; `None` while nobody leads.
    #[must_use]
    pub fn destination(&self) -> Option<Destination> {
        self.leader.as_ref().map(|leader| Destination {
            address: leader.record.address.clone(),
            incarnation: Some(leader.record.incarnation),
        })
    }

    /// This process's leadership, if it leads.
    #[must_use]
    pub fn own(&self) -> Option<&Leader> {
        self.leader.as_ref().filter(|_| self.leading)
    }

    /// The leader, if it is another process run than this one: then this one has to stop. That
    /// nobody leads, or that etcd cannot be asked, is no reason.
    #[must_use]
    pub fn other_than(&self, incarnation: u64) -> Option<&Leader> {
        self.leader.as_ref().filter(|leader| leader.record.incarnation != incarnation)
    }

    fn insert(&mut self, entry: Entry) {
        if entry.key == LEADER_KEY {
            self.leader = Some(Leader { record: entry.record, epoch: entry.created });
        } else {
            self.records.insert(entry.key, entry.record);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::Role;

    fn entry(key: &str, incarnation: u64, created: i64) -> Entry {
        let record = Record {
            node: key.to_owned(),
            role: Role::Worker,
            incarnation,
            address: String::new(),
            http: String::new(),
            pid: 1,
            version: String::new(),
        };
        Entry { key: key.to_owned(), record, created }
    }

    fn keys(view: &View) -> Vec<&str> {
        view.records.keys().map(String::as_str).collect()
    }

    #[test]
    fn lists_and_events_in_any_order_give_the_newest() {
        let mut view = View::default();
        view.list(10, vec![entry("a", 1, 3), entry("b", 1, 4)]);
        view.put(11, entry("c", 1, 11));
        view.delete(12, "a");
        view.reached(12);
        // Again, and older than what is known.
        view.put(11, entry("a", 1, 3));
        view.delete(9, "b");
        view.list(10, vec![entry("a", 1, 3)]);
        assert_eq!(keys(&view), ["b", "c"]);
        // A list after events were lost.
        view.list(20, vec![entry("d", 2, 19)]);
        assert_eq!((keys(&view), view.revision), (vec!["d"], 20));
        // etcd was put back: its first list counts, and what happens from there.
        view.list_anew(5, vec![entry("e", 2, 4)]);
        view.put(6, entry("f", 2, 6));
        assert_eq!((keys(&view), view.revision), (vec!["e", "f"], 5));
    }

    #[test]
    fn several_events_of_one_revision_all_count() {
        let mut view = View::default();
        view.list(1, Vec::new());
        // A lease's end deletes all its keys at one revision.
        view.put(2, entry("a", 1, 2));
        view.put(2, entry("b", 1, 2));
        view.reached(2);
        assert_eq!(keys(&view), ["a", "b"]);
    }

    #[test]
    fn the_leader_is_known_by_its_own_key_and_epoch() {
        let mut view = View::default();
        view.list(5, vec![entry(LEADER_KEY, 7, 4)]);
        assert_eq!(view.leader.as_ref().map(|l| (l.record.incarnation, l.epoch)), Some((7, 4)));
        assert!(view.records.is_empty());
        view.delete(6, LEADER_KEY);
        view.put(7, entry(LEADER_KEY, 8, 7));
        view.reached(7);
        assert_eq!(view.leader.as_ref().map(|l| (l.record.incarnation, l.epoch)), Some((8, 7)));
    }
}
