//! PURE: a process's place in the cluster: what it asks of etcd and how it interprets the answers.
//!
//! A session consists of a lease, a list, and a watch from that list on. When any part of it fails,
//! the next one begins with a new list, under the old lease if that is still alive. In a session
//! the process registers under its lease and, if it campaigns, runs for leader. The owner does what
//! is due ([`MembershipCore::next_action`]) and reports the outcome. Any time that never goes back
//! will do.
use std::collections::VecDeque;
use std::time::Duration;

use super::view::{Entry, LastLeader, View};
use super::{DesiredState, FatalError, Record, Serves};
use crate::actor::pulse::GOES_ON_WITHIN;
use crate::clock::jittered;

/// Longest wait for an answer from etcd.
pub const DEADLINE: Duration = Duration::from_secs(3);
/// Shortest wait between two attempts to reach etcd.
pub const RETRY_MIN: Duration = Duration::from_millis(100);
/// Longest such wait.
pub const RETRY_MAX: Duration = Duration::from_secs(1);
/// A watch that was silent for this long, although asked for its progress, is restarted.
const WATCH_SILENCE: Duration = Duration::from_secs(30);
/// Longest interval between two lists of everything; the shortest is half of it.
const RELIST: Duration = Duration::from_secs(60);

/// When etcd is back and nobody leads, the last leader has this long to lead again before others
/// run: it still serves, and a change of leader would end its streams for nothing. A process that
/// has just started cannot know whether etcd was away, so it waits as well, unless the last leader
/// ended in order, had this process's name, or never existed.
pub const INCUMBENT_FIRST: Duration = Duration::from_secs(5);

/// Why a session cannot go on; the next one may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SessionBroken(pub String);

/// A state that a process should reach and has not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAction {
    /// Registered: report with [`MembershipCore::found`] who has its key.
    Register,
    /// Leader: write its record under [`LEADER_KEY`](super::view::LEADER_KEY) and, without the
    /// lease, under [`LAST_LEADER_KEY`](super::view::LAST_LEADER_KEY), if the first does not exist
    /// and the second is as [`MembershipCore::last_leader_revision`] says; then list.
    Lead,
    /// Leader for as long as its lease lives, where the leader's key is under an earlier lease that
    /// nobody keeps alive: write its record under [`LEADER_KEY`](super::view::LEADER_KEY) again, if
    /// it still leads in this epoch; then list.
    Hold(i64),
    /// Known to the next leader with the commands it was given: write [`MembershipCore::to_store`]
    /// under [`DESIRED_KEY`](super::view::DESIRED_KEY), if it still leads; then list.
    Store,
}

/// The present owner of a process's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOwner {
    /// Revision of the last write.
    pub revision: i64,
    /// Record of the process that wrote it, if it can be read.
    pub record: Option<Record>,
}

/// A message from a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchUpdate {
    /// The watch was cancelled, for this reason.
    pub cancelled: Option<String>,
    /// History up to this revision was compacted away; 0 if none was.
    pub compacted: i64,
    /// The events, in order.
    pub events: Vec<Event>,
}

impl WatchUpdate {
    /// Whether it is the watch's last message.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.cancelled.is_some() || self.compacted != 0
    }
}

/// One key's change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Revision of the change.
    pub revision: i64,
    /// What changed.
    pub kind: EventKind,
}

/// Kind of an [`Event`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// It was written.
    Put(Entry),
    /// The key, without the cluster's prefix, is gone.
    Delete(String),
    /// Something that is not ours.
    Other,
}

/// Times of a session.
#[derive(Debug)]
struct Session {
    /// When the keepalives that are not answered yet were sent.
    sent: VecDeque<Duration>,
    opened: Duration,
    /// When the watch last reported something.
    heard: Duration,
    spoke: Duration,
    listed: Duration,
}

/// The state of a process's membership; see the module's documentation.
#[derive(Debug)]
pub struct MembershipCore {
    record: Record,
    key: String,
    campaign: bool,
    lease_ttl: Duration,
    view: View,
    /// The lease, and the time until which it certainly lives, counted from the sending of the last
    /// answered keepalive.
    lease: Option<(i64, Duration)>,
    session: Option<Session>,
    /// Whether its key is written under the lease.
    registered: bool,
    /// Since when another process run has held its key.
    taken_since: Option<Duration>,
    /// Whether etcd was away, or a session ended, since this process began.
    missed: bool,
    /// Whether this process was the last leader.
    was_last_leader: bool,
    /// Whether this process has ever led.
    has_led: bool,
    /// What the last other leader that it saw said that it serves.
    led_by: Option<Serves>,
    /// Commands that it was given as the leader, to be stored for the next one.
    desired: Option<DesiredState>,
    /// Time before which it must not run for leader.
    run_after: Option<Duration>,
    /// When the main thread was first found silent for too long; `None` once it has beaten again.
    silent_since: Option<Duration>,
}

impl MembershipCore {
    /// A process that etcd does not know yet; it runs for leader if `campaign` is set.
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
            was_last_leader: false,
            has_led: false,
            led_by: None,
            desired: None,
            run_after: None,
            silent_since: None,
        }
    }

    /// Returns the process's record.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the process's key, without the cluster's prefix.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the process's view of the cluster.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Returns the process's lease, as far as it knows.
    #[must_use]
    pub fn lease(&self) -> Option<i64> {
        self.lease.map(|(id, _)| id)
    }

    /// Records that etcd granted this lease, or still has it, when asked at `sent`.
    pub fn leased(&mut self, sent: Duration, lease: i64) {
        self.lease = Some((lease, sent + self.lease_ttl));
    }

    /// Records that the lease no longer exists because etcd says so. An etcd that could not be
    /// asked is no reason to give it up, since the lead goes with the lease.
    pub fn lease_over(&mut self) {
        self.lease = None;
    }

    /// Looks at the thread whose work this process is registered for: whether it has been silent
    /// for longer than the lease lives. Then the lease is not kept, nor another one taken: while it
    /// lives, nobody else can lead. Whether it [is stuck](Self::is_stuck), a later look shows.
    pub fn looks_silent(&mut self, now: Duration, silence: Option<Duration>) -> bool {
        let is_silent = silence.is_some_and(|silence| silence > self.lease_ttl);
        self.silent_since = is_silent.then(|| self.silent_since.unwrap_or(now));
        is_silent
    }

    /// Whether that thread is stuck, as far as the last look showed: it had its time to go on and
    /// has not. One look proves nothing, since the whole process may have stood still, and its
    /// threads go on in any order. Nor do several in a row, since the ticks of a standstill are
    /// made up for at once.
    #[must_use]
    pub fn is_stuck(&self, now: Duration) -> bool {
        self.silent_since.is_some_and(|since| now.saturating_sub(since) >= GOES_ON_WITHIN)
    }

    /// Begins a session with this list, which is watched from the next revision on.
    pub fn opened(&mut self, now: Duration, revision: i64, entries: Vec<Entry>) {
        self.registered = false;
        // No lease ended while etcd was away: its own previous run may hold the key.
        self.taken_since = None;
        let sent = VecDeque::new();
        self.session = Some(Session { sent, opened: now, heard: now, spoke: now, listed: now });
        self.view.list_anew(revision, entries);
        self.confirmed();
        if !self.was_last_leader && (self.missed || self.view.last_leader.is_some()) {
            self.run_after = Some(now + INCUMBENT_FIRST);
        }
    }

    /// Records that the session ended or could not be opened.
    pub fn closed(&mut self) {
        self.missed = true;
        self.session = None;
        self.view.connected = false;
    }

    /// Handles a tick: a keepalive is sent now, and the watch is asked for its progress. Returns
    /// whether to list everything, too.
    ///
    /// # Errors
    /// When etcd has not answered for too long.
    pub fn tick(&mut self, now: Duration) -> Result<bool, SessionBroken> {
        let Some(session) = &mut self.session else {
            return Err(SessionBroken("no session".to_owned()));
        };
        let young = now < session.opened + self.lease_ttl;
        if self.lease.is_none_or(|(_, until)| until <= now && !young) {
            // No keepalive has been answered for the whole lifetime of the lease.
            return Err(SessionBroken("no keepalive was answered in time".to_owned()));
        }
        session.sent.push_back(now);
        if now.saturating_sub(session.heard) > WATCH_SILENCE {
            return Err(SessionBroken("the watch is silent".to_owned()));
        }
        // Each process at a time of its own: all of them restart at once when etcd was away.
        let spread = jittered(RELIST / 2, self.record.incarnation, session.listed.as_secs());
        Ok(now.saturating_sub(session.listed) > RELIST - spread)
    }

    /// Handles the answer to a keepalive: the lease lives for `ttl`, or has ended.
    ///
    /// # Errors
    /// When the lease has ended.
    pub fn kept(&mut self, now: Duration, ttl: Duration) -> Result<(), SessionBroken> {
        self.record_life(now);
        if ttl.is_zero() {
            self.lease = None;
            return Err(SessionBroken("the lease has ended".to_owned()));
        }
        let sent = self.session.as_mut().and_then(|session| session.sent.pop_front());
        if let Some((_, until)) = &mut self.lease {
            *until = sent.unwrap_or(now) + ttl;
        }
        self.confirmed();
        Ok(())
    }

    /// Handles a list.
    pub fn listed(&mut self, now: Duration, revision: i64, entries: Vec<Entry>) {
        if let Some(session) = &mut self.session {
            session.listed = now;
        }
        self.view.list(revision, entries);
        self.confirmed();
    }

    /// Handles a message from the watch.
    ///
    /// # Errors
    /// When the watch is over, or the process's own key is gone because someone revoked the lease.
    pub fn changed(&mut self, now: Duration, change: WatchUpdate) -> Result<(), SessionBroken> {
        self.record_life(now);
        if let Some(session) = &mut self.session {
            session.heard = now;
        }
        if change.is_last() {
            // The next session's list will show what was missed.
            let reason = change.cancelled.unwrap_or_default();
            return Err(SessionBroken(format!("the watch was cancelled: {reason}")));
        }
        // Not the response's own revision: the answer to a new watch or to a progress request may
        // name a revision whose events are still in transit.
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
            return Err(SessionBroken("this process is not registered any more".to_owned()));
        }
        Ok(())
    }

    /// Returns what the process should do next, if anything.
    #[must_use]
    pub fn next_action(&self, now: Duration) -> Option<NextAction> {
        if !self.registered {
            return Some(NextAction::Register);
        }
        let first = self.run_after.is_none_or(|at| at <= now) || self.has_no_incumbent();
        let may_run = first && !self.is_replaced() && !self.is_stranger();
        if self.campaign && self.view.leader.is_none() && may_run {
            return Some(NextAction::Lead);
        }
        if let Some(leader) = self.view.own()
            && self.lease().is_some_and(|lease| lease != leader.lease)
        {
            return Some(NextAction::Hold(leader.epoch));
        }
        self.to_store().map(|_| NextAction::Store)
    }

    /// What this process says that it would serve has changed: its record is written again.
    pub fn serves(&mut self, serves: Serves) {
        self.record.serves = Some(Box::new(serves));
        self.registered = false;
    }

    /// Whether it shares no secret with the last leader that it saw. Workers and front ends would
    /// end if it led, so it leaves them to other coordinators, and to the old leader if that is
    /// back. An operator who wants it to lead starts it again.
    fn is_stranger(&self) -> bool {
        let both = self.record.serves.as_deref().zip(self.led_by.as_ref());
        both.is_some_and(|(own, leader)| !own.shares_secret(leader))
    }

    /// Records a command from operators to this process as the leader; it is to outlive it.
    pub fn desire(&mut self, desired: DesiredState) {
        self.desired = Some(DesiredState { by: self.record.incarnation, ..desired });
    }

    /// Returns the commands that are not stored yet, and the epoch in which they may be.
    #[must_use]
    pub fn to_store(&self) -> Option<(i64, &DesiredState)> {
        let epoch = self.view.own()?.epoch;
        let desired = self.desired.as_ref().filter(|it| self.view.desired.as_ref() != Some(it))?;
        Some((epoch, desired))
    }

    /// Returns the revision of the last leader's key, as far as this process knows; 0 if it does
    /// not exist. A process that takes the lead on this condition has missed no other leader.
    #[must_use]
    pub fn last_leader_revision(&self) -> i64 {
        self.view.last_leader.as_ref().map_or(0, |led| led.revision)
    }

    /// Whether another process has led after this one, which must then end rather than lead again.
    fn is_replaced(&self) -> bool {
        self.has_led && self.view.other_than(self.record.incarnation).is_some()
    }

    /// Whether the last leader has ended, so that nobody serves who might lead again.
    fn has_no_incumbent(&self) -> bool {
        let gone = |led: &LastLeader| led.ended || led.record.node == self.record.node;
        self.view.last_leader.as_ref().is_some_and(gone)
    }

    /// Handles the present owner of the process's key. Another process run is waited for: most
    /// likely it is this program's last run, whose lease has not ended yet. Returns the revision of
    /// the key (0: none) on condition of which to write it now.
    ///
    /// # Errors
    /// When another process has held it for longer than a lease lives.
    pub fn found(
        &mut self,
        now: Duration,
        owner: Option<KeyOwner>,
    ) -> Result<Option<i64>, FatalError> {
        let Some(owner) = owner else {
            self.taken_since = None;
            return Ok(Some(0));
        };
        if owner.record.is_none_or(|record| !self.is_mine(&record)) {
            let since = *self.taken_since.get_or_insert(now);
            if now.saturating_sub(since) > self.lease_ttl * 2 + DEADLINE {
                return Err(FatalError::NameTaken { key: self.key.clone() });
            }
            return Ok(None);
        }
        self.taken_since = None;
        Ok(Some(owner.revision))
    }

    /// Records that the process's key was written under its lease.
    pub fn registered(&mut self) {
        self.registered = true;
    }

    /// Records a sign of life from etcd. If it was silent for so long that leases may have expired
    /// for that reason alone, it counts as having been away, although the session has survived.
    fn record_life(&mut self, now: Duration) {
        let Some(session) = &mut self.session else { return };
        let silent = now.saturating_sub(std::mem::replace(&mut session.spoke, now));
        if silent > self.lease_ttl / 2 && !self.was_last_leader {
            self.run_after = Some(now + INCUMBENT_FIRST);
        }
    }

    fn is_mine(&self, record: &Record) -> bool {
        record.incarnation == self.record.incarnation
    }

    /// Updates the view after etcd has confirmed it.
    fn confirmed(&mut self) {
        self.view.connected = true;
        self.view.leading =
            self.view.leader.as_ref().is_some_and(|leader| self.is_mine(&leader.record));
        if self.view.leader.is_some() {
            self.was_last_leader = self.view.leading;
        }
        self.has_led |= self.view.leading;
        if let Some(leader) = self.view.leader.as_ref().filter(|_| !self.view.leading) {
            self.led_by = self.view.serves(&leader.record).cloned();
        }
    }
}

#[cfg(test)]
mod tests;
