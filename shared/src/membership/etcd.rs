//! The thread that speaks with etcd: registers this process under a lease, keeps the lease, watches
//! the cluster's keys, campaigns to lead.
//!
//! It is a thread of its own with a runtime of its own, so that no amount of other work delays a
//! keepalive; nor does an etcd that takes long to answer, since the lease is kept while its answers
//! are waited for. A session is a connection with its lease and its watch; when anything of it
//! fails, the next one begins with a new list, under the old lease if that still lives. It goes on
//! for ever: no failure of etcd ends the process. Only one thing does: another process under the
//! same name.
use std::time::{Duration, Instant};

use etcd_client::{
    Client, Compare, CompareOp, Error, EventType, GetOptions, GetResponse, KeyValue,
    LeaseKeepAliveResponse, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp,
    WatchOptions, WatchResponse, WatchStream,
};
use tokio::sync::{oneshot, watch};
use tokio::time::Interval;

use super::connect::{explained, is_full};
use super::keeper::{
    Broken, Change, DEADLINE, Due, Event, EventKind, Held, Keeper, RETRY_MAX, RETRY_MIN,
};
use super::view::{DESIRED_KEY, Entry, LEADER_KEY, LED_KEY, Led, Value};
use super::{Desired, EtcdOptions, FatalError, Record, View};
use crate::actor::link::join::Unreached;
use crate::clock::{jittered, since_1970};

/// A running membership. Dropping it without [`EtcdMembership::leave`] is like a crash: others
/// notice when the lease ends.
#[derive(Debug)]
pub struct EtcdMembership {
    view: watch::Receiver<View>,
    desires: Desires,
    leave: Option<oneshot::Sender<oneshot::Sender<()>>>,
    fatal: Option<oneshot::Receiver<FatalError>>,
}

/// Where a leader says what operators told it; the view shows when it is stored.
pub type Desires = watch::Sender<Option<Desired>>;

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
        let (desires, desired) = watch::channel(None);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("membership".into()).spawn(move || {
            let member = Member::new(options, record, campaign, publish, desired);
            runtime.block_on(member.run(left, die));
        })?;
        Ok(Self { view, desires, leave: Some(leave), fatal: Some(fatal) })
    }

    /// The cluster, as it changes.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Where to say what operators told this process, while it leads.
    #[must_use]
    pub fn desires(&self) -> Desires {
        self.desires.clone()
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
        Self::Broken(explained(&error))
    }
}

impl From<Broken> for Ended {
    fn from(Broken(reason): Broken) -> Self {
        Self::Broken(reason)
    }
}

/// What one session has open.
struct Session {
    client: Client,
    keeper: LeaseKeeper,
    kept: LeaseKeepAliveStream,
    watch: WatchStream,
    /// When the lease is kept.
    timer: Interval,
    /// Everything is to be listed, as soon as no other answer is waited for.
    lists: bool,
}

impl Session {
    fn client(&self) -> Client {
        self.client.clone()
    }
}

struct Member {
    options: EtcdOptions,
    keeper: Keeper,
    /// When the keeper's time begins.
    start: Instant,
    /// When etcd last confirmed the view, in seconds since 1970.
    confirmed: u64,
    publish: watch::Sender<View>,
    desired: watch::Receiver<Option<Desired>>,
}

impl Member {
    fn new(
        options: EtcdOptions,
        record: Record,
        campaign: bool,
        publish: watch::Sender<View>,
        desired: watch::Receiver<Option<Desired>>,
    ) -> Self {
        let keeper = Keeper::new(record, campaign, options.lease_ttl);
        Self { options, keeper, start: Instant::now(), confirmed: 0, publish, desired }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    async fn run(
        mut self,
        mut left: oneshot::Receiver<oneshot::Sender<()>>,
        die: oneshot::Sender<FatalError>,
    ) {
        let mut wait = RETRY_MIN;
        let (seed, mut attempt) = (self.keeper.record().incarnation, 0);
        let (mut said, mut unreached) = (false, Unreached::default());
        // One that is full answers questions and refuses what follows: said once, too.
        let mut full = false;
        loop {
            let began = Instant::now();
            let ended = match self.open().await {
                Ok(mut session) => {
                    // One that was full is not taken for mended before it has kept a session.
                    if !full {
                        tracing::info!(cluster = self.options.cluster, "etcd answers");
                        said = false;
                    }
                    self.serve(&mut session, &mut left).await
                }
                Err(ended) => ended,
            };
            self.keeper.closed();
            self.publish();
            if began.elapsed() > RETRY_MAX {
                // It answered for a while: this is another outage.
                (wait, full, said) = (RETRY_MIN, false, false);
            }
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
                Ended::Broken(reason) if is_full(&reason) => {
                    if !std::mem::replace(&mut full, true) {
                        tracing::error!(%reason, "nobody can join or take over; going on without etcd");
                    }
                    said = true;
                }
                Ended::Broken(reason) => {
                    if !std::mem::replace(&mut said, true) {
                        unreached.reached();
                    }
                    let etcd = self.options.endpoints.join(",");
                    match (unreached.failed(self.now()), self.confirmed) {
                        // Nothing is known of the cluster yet.
                        (Some(seconds), 0) => {
                            tracing::warn!(etcd, %reason, seconds, "etcd does not answer; waiting until it does");
                        }
                        (Some(seconds), _) => {
                            tracing::warn!(etcd, %reason, seconds, "etcd does not answer; going on without it");
                        }
                        (None, _) => tracing::debug!(%reason, "etcd does not answer"),
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(jittered(wait, seed, attempt)) => {}
                done = &mut left => {
                    if let Ok(done) = done {
                        let _ = done.send(());
                    }
                    return;
                }
            }
            wait = (wait * 2).min(RETRY_MAX);
            attempt += 1;
        }
    }

    fn prefix(&self) -> String {
        format!("/{}/", self.options.cluster)
    }

    fn publish(&self) {
        self.publish.send_replace(View { confirmed: self.confirmed, ..self.keeper.view().clone() });
    }

    /// etcd has just said that this is how things are.
    fn confirm(&mut self) {
        self.confirmed = since_1970().as_secs();
        self.publish();
    }

    /// Connects, gets a lease, lists, watches.
    async fn open(&mut self) -> Result<Session, Ended> {
        let mut client = self.options.connect(DEADLINE).await?;
        let (keeper, kept) = self.keep_lease(&mut client).await?;
        let (revision, entries) = self.get_all(&mut client).await?;
        self.keeper.opened(self.now(), revision, entries);
        self.confirm();
        let watch = WatchOptions::new()
            .with_prefix()
            .with_start_revision(revision + 1)
            .with_progress_notify();
        // The timeout of the connection is for answers, not for streams.
        let watch = client.watch(self.prefix(), Some(watch)).await?;
        let timer = tokio::time::interval(self.options.lease_ttl / 3);
        Ok(Session { client, keeper, kept, watch, timer, lists: false })
    }

    /// The old lease if it still lives, else a new one.
    async fn keep_lease(
        &mut self,
        client: &mut Client,
    ) -> Result<(LeaseKeeper, LeaseKeepAliveStream), Ended> {
        if let Some(id) = self.keeper.lease() {
            let sent = self.now();
            match client.lease_keep_alive(id).await {
                Ok(kept) => {
                    self.keeper.leased(sent, id);
                    return Ok(kept);
                }
                Err(error) if is_gone(&error) => self.keeper.lease_over(),
                // It may well live: the next session asks again.
                Err(error) => return Err(error.into()),
            }
        }
        let sent = self.now();
        let ttl = self.options.lease_ttl.as_secs().max(2) as i64;
        let granted = client.lease_grant(ttl, None).await?;
        self.keeper.leased(sent, granted.id());
        Ok(client.lease_keep_alive(granted.id()).await?)
    }

    /// Writes this process's key, if nobody else has it.
    async fn register(&mut self, session: &mut Session) -> Result<(), Ended> {
        let Some(lease) = self.keeper.lease() else { return Ok(()) };
        let key = self.key(self.keeper.key());
        let (mut client, wanted) = (session.client(), key.clone());
        let got = self.during(session, async move { client.get(wanted, None).await }).await?;
        let held = got.kvs().first();
        let held = held.map(|kv| Held { revision: kv.mod_revision(), record: decode(kv) });
        let Some(seen) = self.keeper.found(self.now(), held).map_err(Ended::Fatal)? else {
            return Ok(());
        };
        let value = json(self.keeper.record())?;
        let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, seen);
        let put = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(key.as_str(), value, Some(put));
        let register = Txn::new().when([unchanged]).and_then([put]);
        let mut client = session.client();
        let written = self.during(session, async move { client.txn(register).await }).await?;
        if written.succeeded() {
            self.keeper.registered();
            tracing::info!(key = self.keeper.key(), "registered with etcd");
            self.list(session).await?;
        }
        Ok(())
    }

    /// Gets everything; also returns as of which revision.
    async fn get_all(&self, client: &mut Client) -> Result<(i64, Vec<Entry>), Ended> {
        let listed = client.get(self.prefix(), Some(GetOptions::new().with_prefix())).await?;
        Ok(self.entries(&listed))
    }

    fn entries(&self, listed: &GetResponse) -> (i64, Vec<Entry>) {
        let revision = listed.header().map_or(0, |header| header.revision());
        (revision, listed.kvs().iter().filter_map(|kv| self.entry(kv)).collect())
    }

    /// Lists everything again.
    async fn list(&mut self, session: &mut Session) -> Result<(), Ended> {
        session.lists = false;
        let (mut client, prefix) = (session.client(), self.prefix());
        let options = Some(GetOptions::new().with_prefix());
        let listed = self.during(session, async move { client.get(prefix, options).await }).await?;
        let (revision, entries) = self.entries(&listed);
        self.keeper.listed(self.now(), revision, entries);
        self.confirm();
        Ok(())
    }

    fn entry(&self, kv: &KeyValue) -> Option<Entry> {
        let key = std::str::from_utf8(kv.key()).ok()?.strip_prefix(&self.prefix())?.to_owned();
        let value = Value::decode(&key, kv.value(), kv.mod_revision())?;
        Some(Entry { key, value, created: kv.create_revision(), lease: kv.lease() })
    }

    async fn serve(
        &mut self,
        session: &mut Session,
        left: &mut oneshot::Receiver<oneshot::Sender<()>>,
    ) -> Ended {
        loop {
            let outcome = tokio::select! {
                _ = session.timer.tick() => self.tick(session).await,
                kept = session.kept.message() => self.kept(kept),
                change = session.watch.message() => match change {
                    Ok(Some(change)) => self.change(&change),
                    Ok(None) => Err(Ended::Broken("etcd ended the watch".to_owned())),
                    Err(error) => Err(error.into()),
                },
                desired = told(&mut self.desired) => {
                    self.keeper.desire(desired);
                    Ok(())
                }
                done = &mut *left => {
                    let Ok(done) = done else { return Ended::Dropped };
                    // What is gone already is as good.
                    let _ = tokio::time::timeout(DEADLINE, self.hand_over(session)).await;
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

    /// Waits for an answer of etcd's, and keeps the lease meanwhile: several that take long, one
    /// behind the other, may take longer than it lasts.
    async fn during<T>(
        &mut self,
        session: &mut Session,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Ended> {
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answer = &mut answer => return Ok(answer?),
                _ = session.timer.tick() => self.tick(session).await?,
                kept = session.kept.message() => self.kept(kept)?,
            }
        }
    }

    /// etcd has answered a keepalive.
    fn kept(&mut self, kept: Result<Option<LeaseKeepAliveResponse>, Error>) -> Result<(), Ended> {
        let Some(kept) = kept? else {
            return Err(Ended::Broken("etcd ended the keepalive stream".to_owned()));
        };
        let ttl = Duration::from_secs(u64::try_from(kept.ttl()).unwrap_or(0));
        self.keeper.kept(self.now(), ttl)?;
        self.confirm();
        Ok(())
    }

    /// Registers, and runs for leader, where that is due.
    async fn take_place(&mut self, session: &mut Session) -> Result<(), Ended> {
        if session.lists {
            self.list(session).await?;
        }
        if self.keeper.due(self.now()) == Some(Due::Register) {
            self.register(session).await?;
        }
        if self.keeper.due(self.now()) == Some(Due::Lead) {
            self.run_for_leader(session).await?;
        }
        if let Some(Due::Hold(epoch)) = self.keeper.due(self.now()) {
            self.hold(session, epoch).await?;
        }
        if self.keeper.due(self.now()) == Some(Due::Store) {
            self.store(session).await?;
        }
        Ok(())
    }

    async fn tick(&mut self, session: &mut Session) -> Result<(), Ended> {
        session.lists |= self.keeper.tick(self.now())?;
        session.keeper.keep_alive().await?;
        session.watch.request_progress().await?;
        Ok(())
    }

    fn change(&mut self, response: &WatchResponse) -> Result<(), Ended> {
        let cancelled = response.canceled().then(|| response.cancel_reason().to_owned());
        let events = response.events().iter().filter_map(|event| {
            let kv = event.kv()?;
            let kind = match event.event_type() {
                EventType::Put => self.entry(kv).map(EventKind::Put),
                EventType::Delete => {
                    let key = std::str::from_utf8(kv.key()).ok();
                    let key = key.and_then(|key| key.strip_prefix(&self.prefix()));
                    key.map(|key| EventKind::Delete(key.to_owned()))
                }
            };
            Some(Event { revision: kv.mod_revision(), kind: kind.unwrap_or(EventKind::Other) })
        });
        let events = events.collect();
        let change = Change { cancelled, compacted: response.compact_revision(), events };
        let is_last = change.is_last();
        let changed = self.keeper.changed(self.now(), change);
        if !is_last {
            // Also by what shows that this process is not registered any more.
            self.confirm();
        }
        Ok(changed?)
    }

    /// Takes the leader's key if nobody has it, and nobody had it whom this process has missed.
    async fn run_for_leader(&mut self, session: &mut Session) -> Result<(), Ended> {
        let Some(lease) = self.keeper.lease() else { return Ok(()) };
        let (key, led) = (self.key(LEADER_KEY), self.key(LED_KEY));
        let vacant = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
        let missed_nobody =
            Compare::mod_revision(led.as_str(), CompareOp::Equal, self.keeper.led_at());
        let value = json(self.keeper.record())?;
        let lead = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)));
        let led = TxnOp::put(led, self.led(false)?, None);
        let run = Txn::new().when([vacant, missed_nobody]).and_then([lead, led]);
        let mut client = session.client();
        self.during(session, async move { client.txn(run).await }).await?;
        // Whoever it is now: the list says so at once, the watch would a little later.
        self.list(session).await
    }

    /// Puts the lead under the present lease, if this process still leads as it did from `epoch`
    /// on.
    async fn hold(&mut self, session: &mut Session, epoch: i64) -> Result<(), Ended> {
        let Some(lease) = self.keeper.lease() else { return Ok(()) };
        let put = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(self.key(LEADER_KEY), json(self.keeper.record())?, Some(put));
        let hold = Txn::new().when([self.leads(epoch)]).and_then([put]);
        let mut client = session.client();
        self.during(session, async move { client.txn(hold).await }).await?;
        self.list(session).await
    }

    /// Leaves what operators said to the next leader, if this process still leads.
    async fn store(&mut self, session: &mut Session) -> Result<(), Ended> {
        let Some((epoch, desired)) = self.keeper.to_store() else { return Ok(()) };
        let put = TxnOp::put(self.key(DESIRED_KEY), json(desired)?, None);
        let store = Txn::new().when([self.leads(epoch)]).and_then([put]);
        let mut client = session.client();
        self.during(session, async move { client.txn(store).await }).await?;
        // Stored, or written by nobody as another leads: the list says which.
        self.list(session).await
    }

    /// Gives up the lease, and all keys with it. Who leads says before that it will not come back,
    /// so that nobody waits for it.
    async fn hand_over(&mut self, session: &mut Session) -> Result<(), Ended> {
        if let Some(epoch) = self.keeper.view().own().map(|leader| leader.epoch) {
            let put = TxnOp::put(self.key(LED_KEY), self.led(true)?, None);
            session.client.txn(Txn::new().when([self.leads(epoch)]).and_then([put])).await?;
        }
        if let Some(lease) = self.keeper.lease() {
            session.client.lease_revoke(lease).await?;
        }
        Ok(())
    }

    fn key(&self, rest: &str) -> String {
        format!("{}{rest}", self.prefix())
    }

    /// The condition that this process still leads as it did from `epoch` on.
    fn leads(&self, epoch: i64) -> Compare {
        Compare::create_revision(self.key(LEADER_KEY), CompareOp::Equal, epoch)
    }

    fn led(&self, ended: bool) -> Result<Vec<u8>, Ended> {
        json(&Led { record: self.keeper.record().clone(), ended, revision: 0 })
    }
}

/// Whether etcd knows the lease of a keepalive no more; any other failure says nothing about it.
fn is_gone(error: &Error) -> bool {
    match error {
        // The client's own word for an answer of no time to live, and its only one with these
        // words.
        Error::LeaseKeepAliveError(why) => why == "lease not found",
        Error::GRpcStatus(status) => status.message().contains("requested lease not found"),
        _ => false,
    }
}

/// The next that operators said.
async fn told(desired: &mut watch::Receiver<Option<Desired>>) -> Desired {
    loop {
        if desired.changed().await.is_err() {
            // Nobody can say anything any more.
            std::future::pending::<()>().await;
        }
        if let Some(desired) = desired.borrow_and_update().clone() {
            return desired;
        }
    }
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, Ended> {
    serde_json::to_vec(value).map_err(|error| Ended::Broken(error.to_string()))
}

fn decode(kv: &KeyValue) -> Option<Record> {
    serde_json::from_slice(kv.value()).ok()
}
