//! PURE: the known state of the cluster. It takes lists and events in any order and any number of
//! times; the newest revision wins.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::serves::Difference;
use super::{DesiredState, Destination, PinnedRevision, Record, Serves};

/// The cluster as far as this process knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Records of all processes, by key.
    pub records: BTreeMap<String, Record>,
    /// The current leader.
    pub leader: Option<Leader>,
    /// The last leader, even if nobody leads now.
    pub last_leader: Option<LastLeader>,
    /// Operators' commands, as stored by the leaders.
    pub desired: Option<DesiredState>,
    /// Whether etcd answers.
    pub connected: bool,
    /// Whether this process leads, as far as it knows.
    pub leading: bool,
    /// Revision up to which this is known.
    pub revision: i64,
    /// When this was last confirmed, in seconds since 1970; 0 means never.
    pub confirmed: u64,
}

/// The coordinator that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its record.
    pub record: Record,
    /// Its epoch: the revision at which it began to lead, which grows from leader to leader.
    pub epoch: i64,
    /// The lease of its key; 0 where unknown.
    pub lease: i64,
}

/// The last leader. This key has no lease: each leader writes it together with the leader's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastLeader {
    /// Its record.
    #[serde(flatten)]
    pub record: Record,
    /// Whether it ended in order and will not lead again.
    #[serde(default)]
    pub ended: bool,
    /// Revision of the last write.
    #[serde(skip)]
    pub revision: i64,
}

/// One key as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key, without the cluster's prefix.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// Revision at which the key was created.
    pub created: i64,
    /// The lease that the key is bound to; 0: none.
    pub lease: i64,
}

/// Value of an [`Entry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A process's record of itself.
    Process(Record),
    /// The value of [`LAST_LEADER_KEY`].
    LastLeader(LastLeader),
    /// The value of [`DESIRED_KEY`].
    Desired(DesiredState),
}

impl Value {
    /// Decodes the value of a key as of `revision`; `None` if it is not ours.
    #[must_use]
    pub fn decode(key: &str, bytes: &[u8], revision: i64) -> Option<Self> {
        match key {
            LAST_LEADER_KEY => {
                let led: LastLeader = serde_json::from_slice(bytes).ok()?;
                Some(Self::LastLeader(LastLeader { revision, ..led }))
            }
            DESIRED_KEY => serde_json::from_slice(bytes).ok().map(Self::Desired),
            _ => serde_json::from_slice(bytes).ok().map(Self::Process),
        }
    }
}

/// Key of the leader, without the cluster's prefix.
pub const LEADER_KEY: &str = "leader";
/// Key of the last leader.
pub const LAST_LEADER_KEY: &str = "led";
/// Key of the operators' commands.
pub const DESIRED_KEY: &str = "desired";

impl View {
    /// Takes a complete list as of `revision`: a key that is not in it does not exist. A list older
    /// than the known state changes nothing.
    pub fn list(&mut self, revision: i64, entries: Vec<Entry>) {
        if revision < self.revision {
            return;
        }
        self.records.clear();
        (self.leader, self.last_leader, self.desired) = (None, None, None);
        for entry in entries {
            self.insert(entry);
        }
        self.revision = revision;
    }

    /// Takes a complete list that is newer than anything known, even if its `revision` is lower: an
    /// etcd restored to an older state counts revisions from there.
    pub fn list_anew(&mut self, revision: i64, entries: Vec<Entry>) {
        self.revision = revision;
        self.list(revision, entries);
    }

    /// Takes a write of a key at `revision`.
    pub fn put(&mut self, revision: i64, entry: Entry) {
        if revision > self.revision {
            self.insert(entry);
        }
    }

    /// Takes the deletion of a key at `revision`.
    pub fn delete(&mut self, revision: i64, key: &str) {
        if revision <= self.revision {
            return;
        }
        match key {
            LEADER_KEY => self.leader = None,
            LAST_LEADER_KEY => self.last_leader = None,
            DESIRED_KEY => self.desired = None,
            _ => drop(self.records.remove(key)),
        }
    }

    /// Records that all events up to `revision` were taken.
    pub fn reached(&mut self, revision: i64) {
        self.revision = self.revision.max(revision);
    }

    /// Returns the coordinator to dial; `None` while nobody leads.
    #[must_use]
    pub fn destination(&self) -> Option<Destination> {
        self.leader.as_ref().map(|leader| Destination {
            address: leader.record.address.clone(),
            incarnation: Some(leader.record.incarnation),
        })
    }

    /// Which state of a model the cluster serves, as long as any of its processes lives: whoever
    /// leads next serves the same, whatever has come to the model's branch since.
    #[must_use]
    pub fn pinned(&self) -> Option<&PinnedRevision> {
        let leader = self.leader.as_ref().map(|leader| &leader.record);
        let last = || {
            self.last_leader.as_ref().filter(|_| !self.records.is_empty()).map(|led| &led.record)
        };
        leader.or_else(last)?.model.as_deref()
    }

    /// Returns what a coordinator says that it would serve: as registered now, since its secrets
    /// may have changed since this `record` was written.
    #[must_use]
    pub fn serves<'a>(&'a self, record: &'a Record) -> Option<&'a Serves> {
        let is_its = |it: &&Record| it.role == record.role && it.incarnation == record.incarnation;
        self.records.values().find(is_its).unwrap_or(record).serves.as_deref()
    }

    /// Returns in what a coordinator differs from the one that leads; nothing while nobody leads,
    /// or if one of them does not say what it would serve.
    #[must_use]
    pub fn differences(&self, record: &Record) -> Vec<Difference> {
        let leader = self.leader.as_ref().and_then(|leader| self.serves(&leader.record));
        let both = self.serves(record).zip(leader);
        both.map(|(own, leader)| own.differences(leader)).unwrap_or_default()
    }

    /// Returns this process's leadership, if it leads.
    #[must_use]
    pub fn own(&self) -> Option<&Leader> {
        self.leader.as_ref().filter(|_| self.leading)
    }

    /// Returns another process run that leads or led last. If there is one, a process that led
    /// before it must stop, because the other one has stored totals and commands that this one does
    /// not know. That nobody leads, or that etcd cannot be reached, is no reason.
    #[must_use]
    pub fn other_than(&self, incarnation: u64) -> Option<Leader> {
        let other = |record: &Record| record.incarnation != incarnation;
        let leads = self.leader.as_ref().filter(|leader| other(&leader.record)).cloned();
        let led = self.last_leader.as_ref().filter(|led| other(&led.record));
        leads.or_else(|| {
            led.map(|it| Leader { record: it.record.clone(), epoch: it.revision, lease: 0 })
        })
    }

    fn insert(&mut self, entry: Entry) {
        match entry.value {
            Value::Process(record) if entry.key == LEADER_KEY => {
                let (epoch, lease) = (entry.created, entry.lease);
                self.leader = Some(Leader { record, epoch, lease });
            }
            Value::Process(record) => drop(self.records.insert(entry.key, record)),
            Value::LastLeader(led) => self.last_leader = Some(led),
            Value::Desired(desired) => self.desired = Some(desired),
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
            protocol: 0,
            model: None,
            serves: None,
        };
        Entry { key: key.to_owned(), value: Value::Process(record), created, lease: 7 }
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
        // Repeated events, and ones older than what is known.
        view.put(11, entry("a", 1, 3));
        view.delete(9, "b");
        view.list(10, vec![entry("a", 1, 3)]);
        assert_eq!(keys(&view), ["b", "c"]);
        // A list after events were lost.
        view.list(20, vec![entry("d", 2, 19)]);
        assert_eq!((keys(&view), view.revision), (vec!["d"], 20));
        // etcd was restored: its first list counts, and so do events after it.
        view.list_anew(5, vec![entry("e", 2, 4)]);
        view.put(6, entry("f", 2, 6));
        assert_eq!((keys(&view), view.revision), (vec!["e", "f"], 5));
    }

    #[test]
    fn several_events_of_one_revision_all_count() {
        let mut view = View::default();
        view.list(1, Vec::new());
        // When a lease ends, all its keys are deleted at one revision.
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

    fn led(incarnation: u64, revision: i64) -> Entry {
        let Value::Process(record) = entry("", incarnation, 0).value else { panic!("a process") };
        let bytes = serde_json::to_vec(&LastLeader { record, ended: false, revision: 0 }).unwrap();
        let value = Value::decode(LAST_LEADER_KEY, &bytes, revision).unwrap();
        Entry { key: LAST_LEADER_KEY.to_owned(), value, created: 1, lease: 0 }
    }

    #[test]
    fn one_that_led_is_other_than_who_led_last() {
        let mut view = View::default();
        view.list(5, vec![entry(LEADER_KEY, 7, 5), led(7, 5)]);
        assert_eq!(view.other_than(7), None);
        assert_eq!(view.other_than(8).map(|it| it.epoch), Some(5));
        // Its lease ended; another led, and is gone.
        view.delete(6, LEADER_KEY);
        view.reached(6);
        assert_eq!(view.other_than(7), None, "that nobody leads is no reason");
        view.put(7, led(8, 7));
        view.reached(7);
        assert_eq!(view.other_than(7).map(|it| (it.record.incarnation, it.epoch)), Some((8, 7)));
        assert!(view.records.is_empty());
    }

    #[test]
    fn a_model_s_state_is_the_cluster_s_while_anybody_of_it_lives() {
        let pinned =
            PinnedRevision { name: "o/m".into(), revision: "main".into(), commit: "c".into() };
        let serving = |mut entry: Entry| {
            match &mut entry.value {
                Value::Process(record) | Value::LastLeader(LastLeader { record, .. }) => {
                    record.model = Some(Box::new(pinned.clone()));
                }
                Value::Desired(_) => {}
            }
            entry
        };
        let mut view = View::default();
        view.list(5, vec![serving(entry(LEADER_KEY, 7, 5)), serving(led(7, 5))]);
        assert_eq!(view.pinned(), Some(&pinned));
        view.delete(6, LEADER_KEY);
        view.reached(6);
        assert_eq!(view.pinned(), None, "nobody is left");
        view.put(7, entry("workers/a", 1, 7));
        view.reached(7);
        assert_eq!(view.pinned(), Some(&pinned), "a worker has it");
        view.list(8, vec![entry(LEADER_KEY, 8, 8), serving(led(7, 5))]);
        assert_eq!(view.pinned(), None, "who leads serves a folder");
    }

    #[test]
    fn what_operators_want_is_known_until_it_is_deleted() {
        let desired =
            DesiredState { by: 1, generation: 2, replicas: Some(3), ..DesiredState::default() };
        let bytes = serde_json::to_vec(&desired).unwrap();
        let value = Value::decode(DESIRED_KEY, &bytes, 4).unwrap();
        let entry = Entry { key: DESIRED_KEY.to_owned(), value, created: 4, lease: 0 };
        let mut view = View::default();
        view.put(4, entry);
        view.reached(4);
        assert_eq!(view.desired, Some(desired));
        view.delete(5, DESIRED_KEY);
        assert_eq!(view.desired, None);
        assert_eq!(Value::decode(DESIRED_KEY, b"{", 5), None);
    }
}
