//! The thread that speaks with etcd: registers this process under a lease, keeps the lease, watches
//! the cluster's keys, campaigns to lead.
//!
//! It is a thread of its own with a runtime of its own, so that no amount of other work delays a
//! keepalive. A session is a connection with its lease and its watch; when anything of it fails, the
//! next one begins with a new list, under the old lease if that still lives. It goes on for ever: no
//! failure of etcd ends the process. Only one thing does: another process under the same name.
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use etcd_client::{
    Client, Compare, CompareOp, Error, EventType, GetOptions, KeyValue, LeaseKeepAliveStream,
    LeaseKeeper, PutOptions, Txn, TxnOp, WatchOptions, WatchResponse, WatchStream,
};
use tokio::sync::{oneshot, watch};

use super::view::{Entry, LEADER_KEY};
use super::{EtcdOptions, Record, View};

/// Longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Waits between two attempts to reach etcd.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// A watch that has not said anything for so long, asked for its progress, is begun anew.
const WATCH_SILENCE: Duration = Duration::from_secs(30);
/// Everything is listed again this often, whatever the watch says.
const RELIST: Duration = Duration::from_secs(60);

/// When etcd is back and nobody leads, whoever led before has so long to lead again before others
/// run: it still serves, and a change would end its streams for nothing.
const INCUMBENT_FIRST: Duration = Duration::from_secs(5);

/// Membership cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FatalError {
    /// Two processes have one name.
    #[error("another process is registered as `{key}` and alive: names must be unique")]
    NameTaken {
        /// The key both want.
        key: String,
    },
    /// Nobody keeps the lease any more.
    #[error("the membership thread has ended")]
    Ended,
}

/// A running membership. Dropping it without [`EtcdMembership::leave`] is like a crash: others
/// notice when the lease ends.
#[derive(Debug)]
pub struct EtcdMembership {
    view: watch::Receiver<View>,
    leave: Option<oneshot::Sender<oneshot::Sender<()>>>,
    fatal: Option<oneshot::Receiver<FatalError>>,
}

impl EtcdMembership {
    /// Registers `record`, and campaigns to lead if asked to. Returns at once; whether etcd answers
    /// is in the view.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start(options: EtcdOptions, record: Record, campaign: bool) -> std::io::Result<Self> {
        let (publish, view) = watch::channel(View::default());
        let (leave, left) = oneshot::channel();
        let (die, fatal) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("membership".into()).spawn(move || {
            let keeper = Keeper::new(options, record, campaign, publish);
            runtime.block_on(keeper.run(left, die));
        })?;
        Ok(Self { view, leave: Some(leave), fatal: Some(fatal) })
    }

    /// The cluster, as it changes.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Resolves when membership cannot go on.
    pub async fn failed(&mut self) -> FatalError {
        match &mut self.fatal {
            Some(fatal) => fatal.await.unwrap_or(FatalError::Ended),
            None => std::future::pending().await,
        }
    }

    /// Takes this process's keys away, so that others need not wait for the lease to end.
    pub async fn leave(mut self) {
        let (done, gone) = oneshot::channel();
        if let Some(leave) = self.leave.take()
            && leave.send(done).is_ok()
        {
            let _ = tokio::time::timeout(DEADLINE, gone).await;
        }
    }
}

/// Why a session ended.
enum Ended {
    /// Try again.
    Broken(String),
    /// Told to leave, by somebody who waits for it.
    Left(oneshot::Sender<()>),
    /// Nobody is interested any more.
    Dropped,
    /// Do not try again.
    Fatal(FatalError),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// What one session has open.
struct Session {
    client: Client,
    keeper: LeaseKeeper,
    kept: LeaseKeepAliveStream,
    watch: WatchStream,
    /// When keepalives without an answer yet were sent.
    sent: std::collections::VecDeque<Instant>,
    opened: Instant,
    heard: Instant,
    listed: Instant,
}

struct Keeper {
    options: EtcdOptions,
    record: Record,
    key: String,
    campaign: bool,
    view: View,
    publish: watch::Sender<View>,
    /// The lease, and until when it lives for certain: from when its last answered keepalive was
    /// sent.
    lease: Option<(i64, Instant)>,
    /// Its key is written under the lease.
    registered: bool,
    /// Since when another process run has had its key.
    taken_since: Option<Instant>,
    /// This process was the last that led.
    led_last: bool,
    /// Not to run for leader before.
    run_after: Option<Instant>,
}

impl Keeper {
    fn new(
        options: EtcdOptions,
        record: Record,
        campaign: bool,
        publish: watch::Sender<View>,
    ) -> Self {
        let role = format!("{:?}s", record.role).to_lowercase();
        let key = format!("{role}/{}", record.node);
        let view = View::default();
        Self {
            options,
            record,
            key,
            campaign,
            view,
            publish,
            lease: None,
            registered: false,
            taken_since: None,
            led_last: false,
            run_after: None,
        }
    }

    async fn run(
        mut self,
        mut left: oneshot::Receiver<oneshot::Sender<()>>,
        die: oneshot::Sender<FatalError>,
    ) {
        let mut wait = RETRY_MIN;
        let (mut said, mut reached) = (false, false);
        loop {
            let began = Instant::now();
            let ended = match self.open().await {
                Ok(mut session) => {
                    tracing::info!(cluster = self.options.cluster, "etcd answers");
                    if reached && !self.led_last {
                        self.run_after = Some(Instant::now() + INCUMBENT_FIRST);
                    }
                    (said, reached) = (false, true);
                    self.serve(&mut session, &mut left).await
                }
                Err(ended) => ended,
            };
            self.view.connected = false;
            self.publish();
            match ended {
                Ended::Left(done) => {
                    let _ = done.send(());
                    return;
                }
                Ended::Dropped => return,
                Ended::Fatal(error) => {
                    let _ = die.send(error);
                    return;
                }
                Ended::Broken(reason) if !said => {
                    tracing::warn!(%reason, "etcd does not answer; going on without it");
                    said = true;
                }
                Ended::Broken(reason) => tracing::debug!(%reason, "etcd does not answer"),
            }
            if began.elapsed() > RETRY_MAX {
                wait = RETRY_MIN;
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                done = &mut left => {
                    if let Ok(done) = done {
                        let _ = done.send(());
                    }
                    return;
                }
            }
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    fn prefix(&self) -> String {
        format!("/{}/", self.options.cluster)
    }

    fn publish(&self) {
        self.publish.send_replace(self.view.clone());
    }

    /// Connects, gets a lease, lists, watches.
    async fn open(&mut self) -> Result<Session, Ended> {
        let mut client = self.options.connect(DEADLINE).await?;
        let (keeper, kept) = self.keep_lease(&mut client).await?;
        self.registered = false;
        // While etcd was away no lease ended: what has the key may be this one's own last run.
        self.taken_since = None;
        let (revision, entries) = self.get_all(&mut client).await?;
        self.view.list_anew(revision, entries);
        self.confirmed();
        let watch = WatchOptions::new()
            .with_prefix()
            .with_start_revision(revision + 1)
            .with_progress_notify();
        // The timeout of the connection is for answers, not for streams.
        let watch = client.watch(self.prefix(), Some(watch)).await?;
        let now = Instant::now();
        let sent = std::collections::VecDeque::new();
        Ok(Session { client, keeper, kept, watch, sent, opened: now, heard: now, listed: now })
    }

    /// The old lease if it still lives, else a new one.
    async fn keep_lease(
        &mut self,
        client: &mut Client,
    ) -> Result<(LeaseKeeper, LeaseKeepAliveStream), Ended> {
        let ttl = self.options.lease_ttl;
        if let Some((id, _)) = self.lease {
            let sent = Instant::now();
            if let Ok(kept) = client.lease_keep_alive(id).await {
                self.lease = Some((id, sent + ttl));
                return Ok(kept);
            }
            self.lease = None;
        }
        let sent = Instant::now();
        let granted = client.lease_grant(ttl.as_secs().max(2) as i64, None).await?;
        self.lease = Some((granted.id(), sent + ttl));
        Ok(client.lease_keep_alive(granted.id()).await?)
    }

    /// Writes this process's key, if nobody else has it. A key of another process run under the
    /// same name is waited for: it is most likely this program's last run, whose lease has not
    /// ended yet.
    async fn register(&mut self, session: &mut Session) -> Result<(), Ended> {
        let Some((lease, _)) = self.lease else { return Ok(()) };
        let key = format!("{}{}", self.prefix(), self.key);
        let got = session.client.get(key.as_str(), None).await?;
        let held = got.kvs().first();
        if held.is_some_and(|held| decode(held).is_none_or(|record| !self.is_mine(&record))) {
            let since = *self.taken_since.get_or_insert_with(Instant::now);
            if since.elapsed() > self.options.lease_ttl * 2 + DEADLINE {
                return Err(Ended::Fatal(FatalError::NameTaken { key: self.key.clone() }));
            }
            return Ok(());
        }
        self.taken_since = None;
        let value =
            serde_json::to_vec(&self.record).map_err(|error| Ended::Broken(error.to_string()))?;
        let seen = held.map_or(0, KeyValue::mod_revision);
        let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, seen);
        let put = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(key.as_str(), value, Some(put));
        let written = session.client.txn(Txn::new().when([unchanged]).and_then([put])).await?;
        if written.succeeded() {
            self.registered = true;
            tracing::info!(key = self.key, "registered with etcd");
            self.list(&mut session.client).await?;
        }
        Ok(())
    }

    fn is_mine(&self, record: &Record) -> bool {
        record.incarnation == self.record.incarnation
    }

    /// Gets everything; also returns as of which revision.
    async fn get_all(&self, client: &mut Client) -> Result<(i64, Vec<Entry>), Ended> {
        let listed = client.get(self.prefix(), Some(GetOptions::new().with_prefix())).await?;
        let revision = listed.header().map_or(0, |header| header.revision());
        Ok((revision, listed.kvs().iter().filter_map(|kv| self.entry(kv)).collect()))
    }

    /// Lists everything again.
    async fn list(&mut self, client: &mut Client) -> Result<(), Ended> {
        let (revision, entries) = self.get_all(client).await?;
        self.view.list(revision, entries);
        self.confirmed();
        Ok(())
    }

    /// etcd has just said that this is how things are.
    fn confirmed(&mut self) {
        self.view.connected = true;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.view.confirmed = now.as_secs();
        self.view.leading =
            self.view.leader.as_ref().is_some_and(|leader| self.is_mine(&leader.record));
        if self.view.leader.is_some() {
            self.led_last = self.view.leading;
        }
        self.publish();
    }

    fn entry(&self, kv: &KeyValue) -> Option<Entry> {
        let key = std::str::from_utf8(kv.key()).ok()?.strip_prefix(&self.prefix())?.to_owned();
        Some(Entry { key, record: decode(kv)?, created: kv.create_revision() })
    }

    async fn serve(
        &mut self,
        session: &mut Session,
        left: &mut oneshot::Receiver<oneshot::Sender<()>>,
    ) -> Ended {
        let mut timer = tokio::time::interval(self.options.lease_ttl / 3);
        loop {
            let outcome = tokio::select! {
                _ = timer.tick() => self.tick(session).await,
                kept = session.kept.message() => match kept {
                    Ok(Some(kept)) if kept.ttl() > 0 => {
                        let sent = session.sent.pop_front().unwrap_or_else(Instant::now);
                        if let Some((_, until)) = &mut self.lease {
                            *until = sent + Duration::from_secs(kept.ttl().unsigned_abs());
                        }
                        self.confirmed();
                        Ok(())
                    }
                    Ok(Some(_)) => {
                        self.lease = None;
                        Err(Ended::Broken("the lease has ended".to_owned()))
                    }
                    Ok(None) => Err(Ended::Broken("etcd ended the keepalive stream".to_owned())),
                    Err(error) => Err(error.into()),
                },
                change = session.watch.message() => match change {
                    Ok(Some(change)) => {
                        session.heard = Instant::now();
                        self.change(&change)
                    }
                    Ok(None) => Err(Ended::Broken("etcd ended the watch".to_owned())),
                    Err(error) => Err(error.into()),
                },
                done = &mut *left => {
                    let Ok(done) = done else { return Ended::Dropped };
                    if let Some((lease, _)) = self.lease.take() {
                        // One that is gone already is as good.
                        let _ = tokio::time::timeout(DEADLINE, session.client.lease_revoke(lease)).await;
                    }
                    return Ended::Left(done);
                }
            };
            if let Err(ended) = outcome {
                return ended;
            }
            if let Err(ended) = self.take_place(session).await {
                return ended;
            }
        }
    }

    /// Registers, and runs for leader, where that is due.
    async fn take_place(&mut self, session: &mut Session) -> Result<(), Ended> {
        if !self.registered {
            self.register(session).await?;
        }
        let may_run = self.run_after.is_none_or(|at| at <= Instant::now());
        if self.campaign && self.registered && self.view.leader.is_none() && may_run {
            self.run_for_leader(session).await?;
        }
        Ok(())
    }

    async fn tick(&mut self, session: &mut Session) -> Result<(), Ended> {
        let now = Instant::now();
        let young = now < session.opened + self.options.lease_ttl;
        if self.lease.is_none_or(|(_, until)| until <= now && !young) {
            // Nothing has answered for a whole life of the lease.
            return Err(Ended::Broken("no keepalive was answered in time".to_owned()));
        }
        session.sent.push_back(now);
        session.keeper.keep_alive().await?;
        if session.heard.elapsed() > WATCH_SILENCE {
            return Err(Ended::Broken("the watch is silent".to_owned()));
        }
        session.watch.request_progress().await?;
        if session.listed.elapsed() > RELIST {
            self.list(&mut session.client).await?;
            session.listed = Instant::now();
        }
        Ok(())
    }

    fn change(&mut self, change: &WatchResponse) -> Result<(), Ended> {
        if change.canceled() || change.compact_revision() != 0 {
            // What was missed is found by the next session's list.
            return Err(Ended::Broken(format!(
                "the watch was cancelled: {}",
                change.cancel_reason()
            )));
        }
        for event in change.events() {
            let Some(kv) = event.kv() else { continue };
            match event.event_type() {
                EventType::Put => {
                    if let Some(entry) = self.entry(kv) {
                        self.view.put(kv.mod_revision(), entry);
                    }
                }
                EventType::Delete => {
                    let key = std::str::from_utf8(kv.key()).ok();
                    if let Some(key) = key.and_then(|key| key.strip_prefix(&self.prefix())) {
                        self.view.delete(kv.mod_revision(), key);
                    }
                }
            }
        }
        // Not the header's revision: the answer to a new watch, or to a progress request, may name
        // one whose events are still on their way.
        let newest = change.events().iter().filter_map(|event| event.kv());
        if let Some(revision) = newest.map(KeyValue::mod_revision).max() {
            self.view.reached(revision);
        }
        self.confirmed();
        let present = self.view.records.get(&self.key).is_some_and(|record| self.is_mine(record));
        if self.registered && !present {
            // Its own key is gone: someone took the lease away.
            self.lease = None;
            return Err(Ended::Broken("this process is not registered any more".to_owned()));
        }
        Ok(())
    }

    /// Takes the leader's key if nobody has it.
    async fn run_for_leader(&mut self, session: &mut Session) -> Result<(), Ended> {
        let Some((lease, _)) = self.lease else { return Ok(()) };
        let key = format!("{}{LEADER_KEY}", self.prefix());
        let value =
            serde_json::to_vec(&self.record).map_err(|error| Ended::Broken(error.to_string()))?;
        let vacant = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
        let put = TxnOp::put(key.as_str(), value, Some(PutOptions::new().with_lease(lease)));
        session.client.txn(Txn::new().when([vacant]).and_then([put])).await?;
        // Whoever it is now: the list says so at once, the watch would a little later.
        self.list(&mut session.client).await
    }
}

fn decode(kv: &KeyValue) -> Option<Record> {
    serde_json::from_slice(kv.value()).ok()
}
