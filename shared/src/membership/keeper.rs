//! PURE: a process's place in the cluster: what it asks of etcd and what it makes of the answers.
//!
//! A session is a lease, a list and a watch from that list on. When anything of it fails, the next
//! one begins with a new list, under the old lease if that still lives. In a session the process
//! registers under its lease, and runs for leader if it is to. Its owner does what is due
//! ([`Keeper::due`]) and says what came of it; time is any that never goes back.
use std::collections::VecDeque;
use std::time::Duration;

use super::view::{Entry, Led, View};
use super::{Desired, FatalError, Record};
use crate::clock::jittered;

/// Longest wait for an answer of etcd.
pub const DEADLINE: Duration = Duration::from_secs(3);
/// Waits between two attempts to reach etcd.
pub const RETRY_MIN: Duration = Duration::from_millis(100);
/// Longest such wait.
pub const RETRY_MAX: Duration = Duration::from_secs(1);
/// A watch that has not said anything for so long, asked for its progress, is begun anew.
const WATCH_SILENCE: Duration = Duration::from_secs(30);
/// Everything is listed again this often, whatever the watch says.
const RELIST: Duration = Duration::from_secs(60);

/// When etcd is back and nobody leads, whoever led before has so long to lead again before others
/// run: it still serves, and a change would end its streams for nothing. One that is started cannot
/// know whether etcd was away, so it waits likewise: but for a leader that has ended in order, or
/// had its own name, for nobody.
pub const INCUMBENT_FIRST: Duration = Duration::from_secs(5);

/// A session cannot go on; the next one may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// What a process wants to be, and is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Registered: say with [`Keeper::found`] what has its key.
    Register,
    /// Leader: its record under [`LEADER_KEY`](super::view::LEADER_KEY) and, without the lease,
    /// under [`LED_KEY`](super::view::LED_KEY), if the first is not there and the second as
    /// [`Keeper::led_at`] says; then a list.
    Lead,
    /// Sure that its lead lasts as long as its lease, where the leader's key is under an earlier
    /// one that nobody keeps: its record under [`LEADER_KEY`](super::view::LEADER_KEY) again, if it
    /// still leads by this epoch; then a list.
    Hold(i64),
    /// Sure that the next leader knows what this one was told: [`Keeper::to_store`] under
    /// [`DESIRED_KEY`](super::view::DESIRED_KEY), if it still leads; then a list.
    Store,
}

/// What has a process's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// When it was written last.
    pub revision: i64,
    /// By whom, if that can be read.
    pub record: Option<Record>,
}

/// What a watch says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// It is the last word, and why.
    pub cancelled: Option<String>,
    /// The history up to here is not there any more; 0 if it is.
    pub compacted: i64,
    /// What happened, in its order.
    pub events: Vec<Event>,
}

impl Change {
    /// Whether nothing comes after it.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.cancelled.is_some() || self.compacted != 0
    }
}

/// One key's change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When.
    pub revision: i64,
    /// To what.
    pub kind: EventKind,
}

/// See [`Event`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// It was written.
    Put(Entry),
    /// The key, without the cluster's prefix, is gone.
    Delete(String),
    /// Something that is not for us.
    Other,
}

/// Moments of a session.
#[derive(Debug)]
struct Session {
    /// When keepalives without an answer yet were sent.
    sent: VecDeque<Duration>,
    opened: Duration,
    /// When the watch said something last, and when etcd did at all.
    heard: Duration,
    spoke: Duration,
    listed: Duration,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Keeper {
    record: Record,
    key: String,
    campaign: bool,
    lease_ttl: Duration,
    view: View,
    /// The lease, and until when it lives for certain: from when its last answered keepalive was
    /// sent.
    lease: Option<(i64, Duration)>,
    session: Option<Session>,
    /// Its key is written under the lease.
    registered: bool,
    /// Since when another process run has had its key.
    taken_since: Option<Duration>,
    /// etcd was away, or the session with it ended, since this process began.
    missed: bool,
    /// This process was the last that led.
    led_last: bool,
    /// It has led at some time.
    has_led: bool,
    /// What it was told as the leader, to be kept for the next one.
    desired: Option<Desired>,
    /// Not to run for leader before.
    run_after: Option<Duration>,
}

impl Keeper {
    /// A process that etcd knows nothing of; it runs for leader if it is to `campaign`.
    #[must_use]
    pub fn new(record: Record, campaign: bool, lease_ttl: Duration) -> Self {
        let role = format!("{:?}s", record.role).to_lowercase();
        let key = format!("{role}/{}", record.node);
        Self {
            record,
            key,
            campaign,
            lease_ttl,
            view: View::default(),
            lease: None,
            session: None,
            registered: false,
            taken_since: None,
            missed: false,
            led_last: false,
            has_led: false,
            desired: None,
            run_after: None,
        }
    }

    /// What the process says of itself.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Its key, without the cluster's prefix.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What it knows of the cluster.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Its lease, as far as it knows.
    #[must_use]
    pub fn lease(&self) -> Option<i64> {
        self.lease.map(|(id, _)| id)
    }

    /// etcd granted this lease, or keeps it; it was asked at `sent`.
    pub fn leased(&mut self, sent: Duration, lease: i64) {
        self.lease = Some((lease, sent + self.lease_ttl));
    }

    /// The lease is not there any more: etcd says so. An etcd that could not be asked is no reason,
    /// for with the lease goes the lead.
    pub fn lease_over(&mut self) {
        self.lease = None;
    }

    /// A session begins with this list; it is watched from the next revision on.
    pub fn opened(&mut self, now: Duration, revision: i64, entries: Vec<Entry>) {
        self.registered = false;
        // While etcd was away no lease ended: what has the key may be this one's own last run.
        self.taken_since = None;
        let sent = VecDeque::new();
        self.session = Some(Session { sent, opened: now, heard: now, spoke: now, listed: now });
        self.view.list_anew(revision, entries);
        self.confirmed();
        if !self.led_last && (self.missed || self.view.led.is_some()) {
            self.run_after = Some(now + INCUMBENT_FIRST);
        }
    }

    /// The session is over, or did not come about.
    pub fn closed(&mut self) {
        self.missed = true;
        self.session = None;
        self.view.connected = false;
    }

    /// Time for a keepalive, which is sent now, and to ask the watch for its progress. Returns
    /// whether to list everything, too.
    ///
    /// # Errors
    /// When etcd has not answered for too long.
    pub fn tick(&mut self, now: Duration) -> Result<bool, Broken> {
        let Some(session) = &mut self.session else { return Err(Broken("no session".to_owned())) };
        let young = now < session.opened + self.lease_ttl;
        if self.lease.is_none_or(|(_, until)| until <= now && !young) {
            // Nothing has answered for a whole life of the lease.
            return Err(Broken("no keepalive was answered in time".to_owned()));
        }
        session.sent.push_back(now);
        if now.saturating_sub(session.heard) > WATCH_SILENCE {
            return Err(Broken("the watch is silent".to_owned()));
        }
        // Each at a time of its own: all begin anew at once when etcd was away.
        let spread = jittered(RELIST / 2, self.record.incarnation, session.listed.as_secs());
        Ok(now.saturating_sub(session.listed) > RELIST - spread)
    }

    /// A keepalive was answered: the lease lives for so long, or not at all.
    ///
    /// # Errors
    /// When it does not.
    pub fn kept(&mut self, now: Duration, ttl: Duration) -> Result<(), Broken> {
        self.hears(now);
        if ttl.is_zero() {
            self.lease = None;
            return Err(Broken("the lease has ended".to_owned()));
        }
        let sent = self.session.as_mut().and_then(|session| session.sent.pop_front());
        if let Some((_, until)) = &mut self.lease {
            *until = sent.unwrap_or(now) + ttl;
        }
        self.confirmed();
        Ok(())
    }

    /// A list came.
    pub fn listed(&mut self, now: Duration, revision: i64, entries: Vec<Entry>) {
        if let Some(session) = &mut self.session {
            session.listed = now;
        }
        self.view.list(revision, entries);
        self.confirmed();
    }

    /// The watch said something.
    ///
    /// # Errors
    /// When it is over, or the process's own key is gone: someone took the lease away.
    pub fn changed(&mut self, now: Duration, change: Change) -> Result<(), Broken> {
        self.hears(now);
        if let Some(session) = &mut self.session {
            session.heard = now;
        }
        if change.is_last() {
            // What was missed is found by the next session's list.
            let reason = change.cancelled.unwrap_or_default();
            return Err(Broken(format!("the watch was cancelled: {reason}")));
        }
        // Not the answer's own revision: that to a new watch, or to a progress request, may name
        // one whose events are still on their way.
        let newest = change.events.iter().map(|event| event.revision).max();
        for event in change.events {
            match event.kind {
                EventKind::Put(entry) => self.view.put(event.revision, entry),
                EventKind::Delete(key) => self.view.delete(event.revision, &key),
                EventKind::Other => {}
            }
        }
        if let Some(revision) = newest {
            self.view.reached(revision);
        }
        self.confirmed();
        let present = self.view.records.get(&self.key).is_some_and(|record| self.is_mine(record));
        if self.registered && !present {
            self.lease = None;
            return Err(Broken("this process is not registered any more".to_owned()));
        }
        Ok(())
    }

    /// What the process wants to be and can become now.
    #[must_use]
    pub fn due(&self, now: Duration) -> Option<Due> {
        if !self.registered {
            return Some(Due::Register);
        }
        let first = self.run_after.is_none_or(|at| at <= now) || self.nobody_goes_on();
        let may_run = first && !self.is_replaced();
        if self.campaign && self.view.leader.is_none() && may_run {
            return Some(Due::Lead);
        }
        if let Some(leader) = self.view.own()
            && self.lease().is_some_and(|lease| lease != leader.lease)
        {
            return Some(Due::Hold(leader.epoch));
        }
        self.to_store().map(|_| Due::Store)
    }

    /// What operators told this process, which leads, is to outlive it.
    pub fn desire(&mut self, desired: Desired) {
        self.desired = Some(Desired { by: self.record.incarnation, ..desired });
    }

    /// What is not stored yet, and under which epoch it may be.
    #[must_use]
    pub fn to_store(&self) -> Option<(i64, &Desired)> {
        let epoch = self.view.own()?.epoch;
        let desired = self.desired.as_ref().filter(|it| self.view.desired.as_ref() != Some(it))?;
        Some((epoch, desired))
    }

    /// The revision of the key of who led last, as far as this process knows; 0: there is none.
    /// Whoever takes the lead on this condition has missed nobody who led.
    #[must_use]
    pub fn led_at(&self) -> i64 {
        self.view.led.as_ref().map_or(0, |led| led.revision)
    }

    /// Somebody has led after this process did: it has to end, not to lead again.
    fn is_replaced(&self) -> bool {
        self.has_led && self.view.other_than(self.record.incarnation).is_some()
    }

    /// Whoever led last has ended: nobody serves who might lead again.
    fn nobody_goes_on(&self) -> bool {
        let gone = |led: &Led| led.ended || led.record.node == self.record.node;
        self.view.led.as_ref().is_some_and(gone)
    }

    /// This has the process's key. A process run other than this one is waited for: it is most
    /// likely this program's last run, whose lease has not ended yet. Returns on condition of which
    /// revision of the key (0: none) to write it now.
    ///
    /// # Errors
    /// When another process has it for longer than a lease lives.
    pub fn found(&mut self, now: Duration, held: Option<Held>) -> Result<Option<i64>, FatalError> {
        let Some(held) = held else {
            self.taken_since = None;
            return Ok(Some(0));
        };
        if held.record.is_none_or(|record| !self.is_mine(&record)) {
            let since = *self.taken_since.get_or_insert(now);
            if now.saturating_sub(since) > self.lease_ttl * 2 + DEADLINE {
                return Err(FatalError::NameTaken { key: self.key.clone() });
            }
            return Ok(None);
        }
        self.taken_since = None;
        Ok(Some(held.revision))
    }

    /// The process's key was written under its lease.
    pub fn registered(&mut self) {
        self.registered = true;
    }

    /// etcd says something. If it was silent for so long that leases may have ended by that alone,
    /// it was away, though the session has outlived it.
    fn hears(&mut self, now: Duration) {
        let Some(session) = &mut self.session else { return };
        let silent = now.saturating_sub(std::mem::replace(&mut session.spoke, now));
        if silent > self.lease_ttl / 2 && !self.led_last {
            self.run_after = Some(now + INCUMBENT_FIRST);
        }
    }

    fn is_mine(&self, record: &Record) -> bool {
        record.incarnation == self.record.incarnation
    }

    /// etcd has just said that this is how things are.
    fn confirmed(&mut self) {
        self.view.connected = true;
        self.view.leading =
            self.view.leader.as_ref().is_some_and(|leader| self.is_mine(&leader.record));
        if self.view.leader.is_some() {
            self.led_last = self.view.leading;
        }
        self.has_led |= self.view.leading;
    }
}

#[cfg(test)]
mod tests;
