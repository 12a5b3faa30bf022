//! etcd: keys with revisions, leases, a history that can be compacted, and watches. It keeps its
//! promises here; [`crate::membership`] models the ways in which its messages get lost.
use std::collections::BTreeMap;

use shared::membership::core::{Event, EventKind, KeyOwner, WatchUpdate};
use shared::membership::view::{
    DESIRED_KEY, Entry, LAST_LEADER_KEY, LEADER_KEY, LastLeader, Value,
};
use shared::membership::{DesiredState, Record};

use crate::coordinator::Saved;
use crate::scenario::{S, Time};

/// Index of a process that uses etcd: workers by slot, then coordinators by seat.
pub(crate) type MemberId = usize;

/// A request that a process has sent and waits for.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Keep(i64),
    Grant(Time),
    List,
    Watch(i64),
    Get(String),
    /// Write a record, on condition of the key's last revision.
    Register {
        key: String,
        record: Record,
        seen: i64,
        lease: i64,
    },
    /// Write the leader's key, on condition that it does not exist and that nobody led meanwhile.
    Lead {
        record: Record,
        lease: i64,
        last_leader_revision: i64,
    },
    /// Write the leader's key again, on condition of its epoch.
    Hold {
        record: Record,
        lease: i64,
        epoch: i64,
    },
    /// Store operators' commands, on condition of the leader's epoch.
    Store {
        desired: DesiredState,
        epoch: i64,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// How much longer the lease lives; 0 if it has ended.
    Kept(Time),
    /// It is unknown whether the lease lives.
    NotKept,
    Granted(i64),
    List(i64, Vec<Entry>),
    Watching,
    KeyOwner(Option<KeyOwner>),
    Written(bool),
    /// There is no such lease.
    Refused,
}

/// What etcd sends unasked.
#[derive(Clone, Debug)]
pub(crate) enum EtcdNotice {
    Kept(Time),
    WatchUpdate(WatchUpdate),
}

/// Lease of keys that no lease ends.
const NO_LEASE: i64 = 0;

#[derive(Clone, Debug)]
struct Key {
    value: Value,
    created: i64,
    modified: i64,
    lease: i64,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    ttl: Time,
    ends: Time,
}

#[derive(Default)]
pub(crate) struct Etcd {
    revision: i64,
    /// History up to this revision is gone.
    compacted: i64,
    keys: BTreeMap<String, Key>,
    leases: BTreeMap<i64, Lease>,
    last_lease: i64,
    history: Vec<Event>,
    /// Watchers to be notified of changes.
    watches: BTreeMap<MemberId, ()>,
    /// Changes to be sent to watchers.
    pub(crate) news: Vec<(MemberId, WatchUpdate)>,
    /// Whether the condition on the leader's key is ignored.
    pub(crate) any_leads: bool,
    /// Whether the last leader is not recorded.
    pub(crate) no_led: bool,
    /// Whether the condition on storing commands is ignored.
    pub(crate) any_stores: bool,
    /// What the last leader left.
    pub(crate) ledger: Option<Saved>,
    last_led: Option<u64>,
}

impl Etcd {
    pub(crate) fn serve(&mut self, who: MemberId, now: Time, request: Request) -> Answer {
        match request {
            Request::Keep(lease) => Answer::Kept(self.keep(lease, now)),
            Request::Grant(ttl) => {
                self.last_lease += 1;
                self.leases.insert(self.last_lease, Lease { ttl, ends: now + ttl });
                Answer::Granted(self.last_lease)
            }
            Request::List => Answer::List(self.revision, self.entries()),
            Request::Watch(from) => {
                self.watch(who, from);
                Answer::Watching
            }
            Request::Get(key) => Answer::KeyOwner(
                self.keys
                    .get(&key)
                    .map(|key| KeyOwner { revision: key.modified, record: key.process().cloned() }),
            ),
            Request::Register { lease, .. }
            | Request::Lead { lease, .. }
            | Request::Hold { lease, .. }
                if !self.leases.contains_key(&lease) =>
            {
                Answer::Refused
            }
            Request::Register { key, record, seen, lease } => {
                let unchanged = self.keys.get(&key).map_or(0, |key| key.modified) == seen;
                if unchanged {
                    self.put(&[(&key, Value::Process(record), lease)]);
                }
                Answer::Written(unchanged)
            }
            Request::Lead { record, lease, last_leader_revision } => {
                let modified = self.keys.get(LAST_LEADER_KEY).map_or(0, |key| key.modified);
                let missed_nobody = modified == last_leader_revision;
                let vacant = self.any_leads || !self.keys.contains_key(LEADER_KEY);
                if self.any_leads {
                    self.keys.remove(LEADER_KEY);
                }
                let leads = vacant && missed_nobody;
                if leads {
                    let led = LastLeader { record: record.clone(), ended: false, revision: 0 };
                    let leader = (LEADER_KEY, Value::Process(record.clone()), lease);
                    let both = [leader, (LAST_LEADER_KEY, Value::LastLeader(led), NO_LEASE)];
                    self.put(if self.no_led { &both[..1] } else { &both });
                    self.last_led = Some(record.incarnation);
                }
                Answer::Written(leads)
            }
            Request::Hold { record, lease, epoch } => {
                let leads = self.leads_since(epoch);
                if leads {
                    self.put(&[(LEADER_KEY, Value::Process(record), lease)]);
                }
                Answer::Written(leads)
            }
            Request::Store { desired, epoch } => {
                let leads = self.any_stores || self.leads_since(epoch);
                if leads {
                    self.put(&[(DESIRED_KEY, Value::Desired(desired), NO_LEASE)]);
                }
                Answer::Written(leads)
            }
        }
    }

    /// Renews a lease and returns how long it lives; 0 if it does not exist.
    pub(crate) fn keep(&mut self, lease: i64, now: Time) -> Time {
        let Some(lease) = self.leases.get_mut(&lease) else { return 0 };
        lease.ends = now + lease.ttl;
        lease.ttl
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |(key, of): (&String, &Key)| Entry {
            key: key.clone(),
            value: of.value(),
            created: of.created,
            lease: of.lease,
        };
        self.keys.iter().map(entry).collect()
    }

    fn watch(&mut self, who: MemberId, from: i64) {
        if from <= self.compacted {
            let change = WatchUpdate { compacted: self.compacted, ..self.cancelled("compacted") };
            return self.news.push((who, change));
        }
        self.watches.insert(who, ());
        let events = self.history.iter().filter(|event| event.revision >= from).cloned();
        let events: Vec<Event> = events.collect();
        if !events.is_empty() {
            self.news.push((who, WatchUpdate { events, ..WatchUpdate::default() }));
        }
    }

    fn cancelled(&self, why: &str) -> WatchUpdate {
        WatchUpdate { cancelled: Some(why.to_owned()), ..WatchUpdate::default() }
    }

    pub(crate) fn watches(&self, who: MemberId) -> bool {
        self.watches.contains_key(&who)
    }

    pub(crate) fn unwatch(&mut self, who: MemberId) {
        self.watches.remove(&who);
    }

    /// Forgets the history. Watches that are behind it end.
    pub(crate) fn compact(&mut self, behind: impl Fn(MemberId) -> bool) {
        self.compacted = self.revision;
        self.history.clear();
        let ended: Vec<MemberId> =
            self.watches.keys().copied().filter(|who| behind(*who)).collect();
        for who in ended {
            self.watches.remove(&who);
            let change = WatchUpdate { compacted: self.compacted, ..self.cancelled("compacted") };
            self.news.push((who, change));
        }
    }

    /// Ends a watch.
    pub(crate) fn cancel(&mut self, who: MemberId) {
        if self.watches.remove(&who).is_some() {
            let change = self.cancelled("etcd changes its leader");
            self.news.push((who, change));
        }
    }

    /// Writes keys, all at one revision.
    fn put(&mut self, all: &[(&str, Value, i64)]) {
        self.revision += 1;
        let modified = self.revision;
        let mut events = Vec::new();
        for (key, value, lease) in all {
            let created = self.keys.get(*key).map_or(modified, |held| held.created);
            let held = Key { value: value.clone(), created, modified, lease: *lease };
            let (name, value) = ((*key).to_owned(), held.value());
            let kind = EventKind::Put(Entry { key: name, value, created, lease: *lease });
            self.keys.insert((*key).to_owned(), held);
            events.push(Event { revision: modified, kind });
        }
        self.tell(events);
    }

    fn tell(&mut self, events: Vec<Event>) {
        self.history.extend(events.iter().cloned());
        let change = WatchUpdate { events, ..WatchUpdate::default() };
        self.news.extend(self.watches.keys().map(|who| (*who, change.clone())));
    }

    /// A lease ends, with all its keys.
    pub(crate) fn revoke(&mut self, lease: i64) {
        if self.leases.remove(&lease).is_none() {
            return;
        }
        let gone = self.keys.iter().filter(|(_, key)| key.lease == lease);
        let gone: Vec<String> = gone.map(|(key, _)| key.clone()).collect();
        if gone.is_empty() {
            return;
        }
        self.revision += 1;
        let delete = |key: String| {
            self.keys.remove(&key);
            Event { revision: self.revision, kind: EventKind::Delete(key) }
        };
        let events = gone.into_iter().map(delete).collect();
        self.tell(events);
    }

    /// Ends leases that were not renewed.
    pub(crate) fn expire(&mut self, now: Time) {
        let over = self.leases.iter().filter(|(_, lease)| lease.ends <= now);
        for lease in over.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.revoke(lease);
        }
    }

    /// It was stopped: leases now live for a whole term again.
    pub(crate) fn restarted(&mut self, now: Time) {
        for lease in self.leases.values_mut() {
            lease.ends = now + lease.ttl + S / 10;
        }
    }

    /// The leader: its process run, and the revision since which it leads.
    pub(crate) fn leader(&self) -> Option<(u64, i64)> {
        let key = self.keys.get(LEADER_KEY)?;
        Some((key.process()?.incarnation, key.created))
    }

    /// The process run that led last, whether that is recorded or not.
    pub(crate) fn led(&self) -> Option<u64> {
        self.last_led
    }

    fn leads_since(&self, epoch: i64) -> bool {
        self.leader().is_some_and(|(_, since)| since == epoch)
    }

    /// The leader says that it is ending.
    pub(crate) fn led_ends(&mut self, incarnation: u64) {
        let Some(key) = self.keys.get(LEADER_KEY) else { return };
        let Some(record) = key.process().filter(|it| it.incarnation == incarnation) else { return };
        let led = LastLeader { record: record.clone(), ended: true, revision: 0 };
        if self.no_led {
            return;
        }
        self.put(&[(LAST_LEADER_KEY, Value::LastLeader(led), NO_LEASE)]);
    }

    /// Returns the records of all processes except the leader's, with their process runs.
    pub(crate) fn registered(&self) -> BTreeMap<String, u64> {
        let keys = self.keys.iter().filter(|(key, _)| *key != LEADER_KEY);
        keys.filter_map(|(key, of)| Some((key.clone(), of.process()?.incarnation))).collect()
    }

    /// Stores the totals, as the leader since `epoch`. If that leader no longer leads and the
    /// condition is ignored, stores only the bytes. Returns what was stored before, if it is
    /// replaced.
    pub(crate) fn save(&mut self, epoch: i64, saved: Saved, fenced: bool) -> Option<Saved> {
        if self.leads_since(epoch) {
            return self.ledger.replace(saved);
        }
        if let Some(ledger) = self.ledger.as_mut().filter(|_| !fenced) {
            ledger.bytes = saved.bytes;
        }
        None
    }
}

impl Key {
    fn process(&self) -> Option<&Record> {
        match &self.value {
            Value::Process(record) => Some(record),
            Value::LastLeader(_) | Value::Desired(_) => None,
        }
    }

    /// The value as a process reads it.
    fn value(&self) -> Value {
        match &self.value {
            Value::LastLeader(led) => {
                Value::LastLeader(LastLeader { revision: self.modified, ..led.clone() })
            }
            value => value.clone(),
        }
    }
}
